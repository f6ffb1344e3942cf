"""Optimizer states: this rank's rows of every parameter's state, as DTensors or whole, and loading them.

Optimizers show states of a parameter's shape as DTensors. A state of another shape (a step counter) belongs to the
whole parameter. If one rank steps on a parameter, only that rank has its states, unsharded.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_deepcompile import compat
from lightning_deepcompile.checkpoint.module_state import gather, plain_name
from lightning_deepcompile.offload.states import StateOffload
from lightning_deepcompile.ranks.exchange import alike, exchange
from lightning_deepcompile.sharding.composite import Form, copied, is_composite, parts_of, unpacked
from lightning_deepcompile.sharding.parameter import ShardedParameter
from lightning_deepcompile.sharding.shards import ShardedModel
from lightning_deepcompile.step.counters import counters
from lightning_deepcompile.step.state_sizes import convert_states

_log = logging.getLogger(__name__)

OwnerOf = Callable[[Tensor], int | None]
"""Returns the shard rank that has all states of a parameter; None: each rank has those of its rows."""

_SMALL = 1024  # elements; ranks exchange smaller states with the table


@dataclass(frozen=True)
class _Rows:
    """Entry of the table that ranks exchange: a state with this rank's rows of its parameter."""

    dtype: torch.dtype


@dataclass(frozen=True)
class _OnOwner:
    """Entry of the table: a state that only one rank has.

    Args:
        owner: Its shard rank.
        form: The state's.
        mine: The state itself, on its owner.
    """

    owner: int
    form: Form
    mine: Tensor | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the part that ranks exchange."""
        return self.__dict__ | {"mine": None}


def full_optimizer_state(
    optimizer: Optimizer, module: nn.Module, model: ShardedModel, owner_of: OwnerOf, *, keep: bool
) -> dict[str, Any]:
    """Returns the optimizer's state dict with whole tensors on the CPU, as plain PyTorch would write it; a collective.

    Args:
        optimizer: Holds the module's parameters; its state tensors are this rank's rows.
        module: The sharded module.
        model: How it is sharded.
        owner_of: Returns the rank that alone has a parameter's states.
        keep: Whether this rank, the first, keeps the tensors.

    Returns:
        The state dict, empty where `keep` is false.
    """
    states, groups = _distributed_states(optimizer, module, model, owner_of)
    full: dict[int, dict[str, Any]] = {}
    for index, entries in states.items():
        values = {}
        for key, value in entries.items():
            if isinstance(value, DTensor):
                value = gather(value, keep=keep)
            elif isinstance(value, _OnOwner):
                value = _fetch(value, model, keep=keep)
            values[key] = value
        if keep:
            full[index] = values
    return {"state": full, "param_groups": groups} if keep else {}


def sharded_optimizer_state(
    optimizer: Optimizer, module: nn.Module, model: ShardedModel, owner_of: OwnerOf
) -> dict[str, Any]:
    """Returns the optimizer's state dict, keyed by parameter names, with DTensors; a collective.

    States that only one rank has are in that rank's dict alone; the rest is the same on all ranks.
    """
    names = [name for name, _ in _parameters_of(optimizer, module, model)]
    states, groups = _distributed_states(optimizer, module, model, owner_of)
    here = {
        index: {
            key: value.mine if isinstance(value, _OnOwner) else value
            for key, value in entries.items()
            if not isinstance(value, _OnOwner) or value.mine is not None
        }
        for index, entries in states.items()
    }
    return {
        "state": {names[index]: entries for index, entries in here.items()},
        "param_groups": [{**group, "params": [names[index] for index in group["params"]]} for group in groups],
    }


def load_optimizer_state(
    optimizer: Optimizer,
    state: Mapping[str, Any],
    module: nn.Module,
    model: ShardedModel,
    owner_of: OwnerOf,
    offload: StateOffload | None = None,
) -> None:
    """Loads an optimizer state dict; each rank takes its rows, and all states of the parameters that it owns.

    Args:
        optimizer: The optimizer.
        state: A plain state dict, or one keyed by names, with whole tensors or DTensors; see `whole_for_owners`.
        module: The sharded module.
        model: How it is sharded.
        owner_of: Returns the rank that alone has a parameter's states.
        offload: Holds states in host memory; they go there without passing through the device.

    Raises:
        ValueError: If the parameter groups differ; names what does.
    """
    parameters = _parameters_of(optimizer, module, model)
    groups = _matching_groups(optimizer, state["param_groups"], [name for name, _ in parameters])
    saved = list(chain.from_iterable(group["params"] for group in groups))
    held = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    counting = counters(
        (parameter.layout.spec.shape, state["state"][key])
        for (_, parameter), key in zip(parameters, saved, strict=True)
        if parameter is not None and key in state["state"]
    )
    local: dict[int, dict[str, Any]] = {}
    waiting: dict[tuple[int, str], Tensor] = {}
    for index, key in enumerate(saved):
        owner = owner_of(held[index])
        if key in state["state"] and owner in (None, model.ranks.shard_rank):
            _, parameter = parameters[index]
            local[index] = {}
            for name, value in state["state"][key].items():
                if name in counting:
                    rows = compat.full_tensor(value) if isinstance(value, DTensor) else value
                else:
                    rows = _rows(value, parameter if owner is None else None)
                if offload is not None and offload.takes(held[index], rows := unpacked(rows)):
                    # The optimizer decides on the dtype, from a tensor without memory.
                    waiting[index, name], rows = rows, rows.new_empty(0)
                elif isinstance(rows, Tensor):
                    rows = copied(rows, rows.device)  # the optimizer's states must not depend on a memory-mapped file
                local[index][name] = rows
    numbers = iter(range(len(parameters)))
    groups = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]
    optimizer.load_state_dict({"state": local, "param_groups": groups})
    whole = {
        held[index]: parameter.layout.spec.shape
        for index, (_, parameter) in enumerate(parameters)
        if parameter is not None and (owner_of(held[index]) is not None or model.ranks.shards == 1)
    }
    if (count := convert_states(optimizer, whole)) > 0:
        _log.info("%d states of %s were quantised anew, or unpacked.", count, type(optimizer).__name__)
    if offload is not None:
        offload.forget()
    for (index, name), rows in waiting.items():
        assert offload is not None
        parameter = held[index]
        entries = optimizer.state[parameter]
        entries[name] = offload.load(parameter, name, entries[name].dtype, rows)


def whole_for_owners(
    optimizer: Optimizer, state: Mapping[str, Any], module: nn.Module, model: ShardedModel, owner_of: OwnerOf
) -> dict[str, Any]:
    """Returns `state` with DTensors of owned parameters gathered on their owners; a collective if there are any.

    Args:
        optimizer: The optimizer that is going to load it.
        state: A state dict keyed by names; others are returned as they are.
        module: The sharded module.
        model: How it is sharded.
        owner_of: Returns the rank that alone has a parameter's states.
    """
    held = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    owners = {
        plain_name(name): owner_of(parameter)
        for parameter, (name, _) in zip(held, _parameters_of(optimizer, module, model), strict=True)
    }
    states = dict(state["state"])
    for key, entries in states.items():
        owner = owners.get(plain_name(key)) if isinstance(key, str) else None
        if owner is not None:
            keep = owner == model.ranks.shard_rank
            states[key] = {k: gather(v, keep=keep) if isinstance(v, DTensor) else v for k, v in entries.items()}
    return {**state, "state": states}


def _parameters_of(
    optimizer: Optimizer, module: nn.Module, model: ShardedModel
) -> list[tuple[str, ShardedParameter | None]]:
    """Name and sharded parameter (None: replicated) of each of the optimizer's parameters, in its order."""
    replicated = {parameter: name for name, parameter in module.named_parameters()}
    found: list[tuple[str, ShardedParameter | None]] = []
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        sharded = model.by_parameter.get(parameter)
        found.append((sharded.name if sharded is not None else replicated[parameter], sharded))
    return found


def _distributed_states(
    optimizer: Optimizer, module: nn.Module, model: ShardedModel, owner_of: OwnerOf
) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
    """Returns states by parameter number, with equal structure on all ranks: rows as DTensors, the rest as on rank 0.

    Args:
        optimizer: The optimizer.
        module: The sharded module.
        model: How it is sharded.
        owner_of: Returns the rank that alone has a parameter's states.

    Returns:
        The states, and the parameter groups.

    Raises:
        RuntimeError: For a state that is neither of the parameter's shape nor equal on all ranks.
    """
    parameters = _parameters_of(optimizer, module, model)
    held = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    packed = optimizer.state_dict()
    plain = {index: dict(entries) for index, entries in packed["state"].items()}
    sharded = ((parameters[index][1], entries) for index, entries in plain.items())
    counting = counters((one.local.shape, entries) for one, entries in sharded if one is not None)
    table: dict[tuple[int, str], Any] = {}
    for index, entries in plain.items():
        parameter, owner = parameters[index][1], owner_of(held[index])
        if owner is not None:
            if owner == model.ranks.shard_rank:
                table |= {(index, key): _on_owner(value, owner) for key, value in entries.items()}
            continue
        for key, value in entries.items():
            if isinstance(value, DTensor):
                of_parameter = parameter is not None and value.shape == parameter.dtensor.shape
                # Others belong to groups that step on DTensors, on all ranks alike.
                value = parameter.rows(value) if of_parameter and parameter else compat.full_tensor(value)
                entries[key] = value
            if is_composite(value):
                if parameter is not None and model.ranks.shards == 1:
                    table[index, key] = _on_owner(value, 0)
                    continue
                # Ranks' rows cannot be joined without their values: blocks of quantisation follow ranks there.
                value = entries[key] = unpacked(value)
            of_parameter = isinstance(value, Tensor) and parameter is not None and value.shape == parameter.local.shape
            if of_parameter and key not in counting:
                table[index, key] = _Rows(value.dtype)
            else:
                table[index, key] = value.detach().cpu() if isinstance(value, Tensor) else value
    # A rank may lack a state: an optimizer skips parameters without gradients. The gathers must not depend on it.
    told = [(key, _told(value)) for key, value in sorted(table.items())]
    tables = [table] if alike(repr(told)) else exchange(table)
    states: dict[int, dict[str, Any]] = {}
    for index, key in dict.fromkeys(chain.from_iterable(tables)):
        name, parameter = parameters[index]
        found = [ranks[index, key] for ranks in tables if (index, key) in ranks]
        # A rank without rows tells counters of one element from rows.
        found = [one for one in found if isinstance(one, Tensor) and one.shape == (1,)] or found
        value = found[0]
        if isinstance(value, _OnOwner):
            states.setdefault(index, {})[key] = table.get((index, key), value)
            continue
        if any(_differs(value, other) for other in found[1:]):
            raise RuntimeError(
                f"The state {key!r} of {name!r} in {type(optimizer).__name__} has not the shape of the parameter's "
                "shard, and differs between ranks: it cannot be saved. Use an element-wise optimizer."
            )
        if isinstance(value, _Rows):
            assert parameter is not None
            local = plain.get(index, {}).get(key)
            value = _distributed(parameter, local, value.dtype)
        states.setdefault(index, {})[key] = value
    groups = [
        {key: compat.full_tensor(value) if isinstance(value, DTensor) else value for key, value in group.items()}
        for group in packed["param_groups"]
    ]
    return dict(sorted(states.items())), groups


def _distributed(parameter: ShardedParameter, local: Tensor | None, dtype: torch.dtype) -> DTensor:
    """Returns a DTensor of this rank's rows (None: zeros) without moving them: states in host memory stay there."""
    if local is None:
        return parameter.distribute(torch.zeros_like(parameter.local, dtype=dtype))
    if local.device == parameter.local.device:
        return parameter.distribute(local.detach())
    return compat.with_local(parameter.distribute(torch.empty_like(local, device="meta")), local.detach())


def _on_owner(value: Any, owner: int) -> Any:
    """Returns a state in the form that its owner sends to the other ranks."""
    if not isinstance(value, Tensor):
        return value
    if not is_composite(value) and value.numel() <= _SMALL:
        return value.detach().cpu()
    return _OnOwner(owner, Form.of(value), value)


def _fetch(state: _OnOwner, model: ShardedModel, *, keep: bool) -> Tensor | None:
    """Returns a state that only one rank has, on the CPU of the first; a collective of those that share parameters."""
    ranks, mine = model.ranks, state.mine
    if state.owner == 0:  # the first rank's own
        return copied(mine, "cpu") if keep and mine is not None else None
    device = model.parameters[0].local.device
    own = iter([] if mine is None else parts_of(mine))
    parts: list[Tensor] = []
    for form in state.form.parts():
        if mine is None:
            sent = torch.empty(form.shape, dtype=form.dtype, device=device)
        else:
            sent = next(own).detach().to(device).contiguous()
        if sent.numel():  # as bytes: collectives do not support every dtype
            dist.broadcast(sent.view(-1).view(torch.uint8), group=ranks.shard_group, group_src=state.owner)
        if keep:
            parts.append(sent.to("cpu", copy=True))
    return state.form.build(iter(parts)) if keep else None


def _told(value: Any) -> Any:
    """Returns a state, or a digest of a tensor: digests are equal if tensors are."""
    if not isinstance(value, Tensor):
        return value
    digest = hashlib.sha256()
    for part in parts_of(value):
        digest.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return Form.of(value), digest.hexdigest()


def _differs(value: Any, other: Any) -> bool:
    if isinstance(value, _Rows) or isinstance(other, _Rows):
        return value != other
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        # Counters of one element may differ where ranks skip different parameters.
        return value.shape != other.shape or (value.numel() > 1 and not torch.equal(value, other))
    return isinstance(value, Tensor) != isinstance(other, Tensor)


def _rows(value: Any, parameter: ShardedParameter | None) -> Any:
    """Returns this rank's part of a saved state."""
    if isinstance(value, Tensor) and parameter is not None and value.dim() and value.shape == parameter.dtensor.shape:
        # One that consists of others can be divided between its blocks alone, if at all.
        return value if parameter.ranks.shards == 1 else parameter.rows(unpacked(value))
    return value


def _matching_groups(optimizer: Optimizer, saved: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """Returns the saved groups with their parameters in the optimizer's order.

    Groups keyed by numbers are in that order already: the numbers are names, as other strategies count parameters that
    this optimizer does not have. Groups keyed by names need not be.
    """
    if len(saved) != len(optimizer.param_groups):
        raise ValueError(
            f"The checkpoint's {type(optimizer).__name__} has {len(saved)} parameter groups, yours "
            f"{len(optimizer.param_groups)}. Resume with the optimizer that the checkpoint was saved with."
        )
    groups, rest = [], iter(names)
    for number, (theirs, ours) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        mine = [next(rest) for _ in ours["params"]]
        params = theirs["params"]
        if params and isinstance(params[0], str):
            by_name = {plain_name(name): name for name in params}
            missing = [name for name in mine if plain_name(name) not in by_name]
            unexpected = sorted(by_name.keys() - {plain_name(name) for name in mine})
            if missing or unexpected:
                raise ValueError(
                    f"Parameter group {number} of {type(optimizer).__name__} differs from the checkpoint's. Missing "
                    f"there: {missing}; unexpected: {unexpected}. Resume with the parameter groups that the checkpoint "
                    "was saved with."
                )
            params = [by_name[plain_name(name)] for name in mine]
        elif len(params) != len(mine):
            raise ValueError(
                f"Parameter group {number} of the checkpoint's {type(optimizer).__name__} has {len(params)} "
                f"parameters, yours {len(mine)}. Resume with the optimizer that the checkpoint was saved with."
            )
        values = {name: _in_form_of(ours.get(name), value) for name, value in theirs.items()}
        groups.append({**values, "params": params})
    return groups


def _in_form_of(own: Any, saved: Any) -> Any:
    """Returns a saved hyperparameter as a tensor, or as a number, as the optimizer's own is."""
    if isinstance(own, Tensor) and type(saved) in (int, float):
        return torch.full_like(own, saved)
    if type(own) in (int, float) and isinstance(saved, Tensor) and saved.numel() == 1:
        return saved.item()
    return saved
