"""Steps on unsharded tensors, each on the one rank that owns it, by the optimizer's own class.

Before a step, parameters and gradients are collected on their owners; after it, rows of the parameters are sent back to
the shards. States stay on their owner, as tensors of the parameters' own shapes: no other rank has them.

A class that can be called on a part of its parameters at a time steps chunk by chunk: while it steps on one chunk, the
next is collected, and the one before is sent back.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_deepcompile import compat
from lightning_deepcompile.offload.chunks import Chunk, GroupChanges
from lightning_deepcompile.offload.leaving_states import probe_states
from lightning_deepcompile.program.program import LOCAL_ID
from lightning_deepcompile.ranks.exchange import AnyRank, exchange
from lightning_deepcompile.sharding.gradients import GradientSession
from lightning_deepcompile.sharding.parameter import ShardedParameter
from lightning_deepcompile.sharding.shards import ShardedModel
from lightning_deepcompile.step.owners import Candidate, assign_owners, chunks_of, cost_of
from lightning_deepcompile.step.row_exchange import Owned, RowExchange
from lightning_deepcompile.step.ways import OptimizerWays, Way

_AHEAD = 1
"""Chunks that are collected ahead of the one that is stepped on; each takes its tensors twice, while they are sent."""


class OwnerStep:
    """Divides the steps of one optimizer between owner ranks, and in chunks.

    Args:
        optimizer: Before its first step.
        model: The sharded model.
        gradients: Has their gradients.
        hosts: Process group of all the ranks' CPUs.
        ways: Decides which groups have owners; without one nothing is done.
        check: Raises unless all ranks pass the same text: what they are about to exchange.

    Attributes:
        sent: Bytes that this rank has sent to others.
    """

    needs_closure = False

    def __init__(
        self,
        optimizer: Optimizer,
        model: ShardedModel,
        gradients: GradientSession,
        hosts: dist.ProcessGroup,
        ways: OptimizerWays,
        check: Callable[[str], None],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._model, self._gradients, self._ways, self._check = model, gradients, ways, check
        self._hosts = hosts
        self._asks = AnyRank(hosts)  # whether a step failed, and whether it read tensors without gradients
        self._rows = RowExchange(model.ranks)
        self._owned: dict[Tensor, Owned] = {}
        self._loads = [0] * model.ranks.shards
        self._divides: bool | None = None  # None: not known yet
        self._skips = False  # tensors without gradients, as the class does
        self._stand_ins: dict[int, Tensor] = {}  # by group
        self._stand_in_states: dict[int, Any] = {}
        self._groups: list[dict[str, Any]] | None = None  # the optimizer's own, while it steps
        self._params: list[list[Tensor]] = []
        self._moved: list[tuple[Tensor, Tensor]] = []  # of states: the parameter and its stand-in
        self._changes: GroupChanges | None = None
        self._chunk = Chunk([], offloaded=False)
        self._last: list[Owned] = []
        self._gradless: list[tuple[Owned, int]] = []
        self._returning: deque[Callable[[], None]] = deque()
        self._agrees = False  # whether the other ranks wait to hear how the step went

    @property
    def stepping(self) -> bool:
        """Returns whether a step is under way, so that calls of `step` are parts of it."""
        return self._groups is not None

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent to others."""
        return self._rows.sent

    def owner_of(self, parameter: Tensor) -> int | None:
        """Returns the shard rank that owns a parameter of the optimizer; None if it steps another way."""
        self._assign()
        one = self._owned.get(parameter)
        return None if one is None else one.owner

    @torch.no_grad()
    def begin(self, *args: Any, **kwargs: Any) -> None:
        """Steps on all chunks but the last, and leaves the optimizer with the last one's tensors.

        Groups that step another way keep the optimizer's tensors, and step with the last chunk.

        Args:
            *args: Arguments of the optimizer's `step`, without a closure.
            **kwargs: Its keyword arguments.
        """
        optimizer = self._held()
        if Way.OWNERS not in self._ways.ways():
            return
        if self._divides is None:
            self._divides = not self._ways.together and _steps_in_parts(optimizer, self._model)
        owned = self._assign()
        gradients = {one: self._gradients.local_grad(p) for p, one in owned.items()}
        moving = [one for one in owned.values() if not self._skips or gradients[one] is not None]
        chunks = self._chunks(moving)
        self._check(_signature(type(optimizer).__name__, chunks, gradients))
        self._hold(optimizer, owned)
        collected: deque[Callable[[], None]] = deque()
        ahead = iter(chunks)
        self._agrees = True
        error: BaseException | None = None
        for index, chunk in enumerate(chunks):
            while len(collected) <= _AHEAD and (following := next(ahead, None)) is not None:
                collected.append(self._rows.collect(following, [gradients[one] for one in following]))
            collected.popleft()()
            gradless = [one for one in chunk if gradients[one] is None and one.owner == self._model.ranks.shard_rank]
            self._gradless += [(one, compat.version_of(one.whole)) for one in gradless]
            if index == len(chunks) - 1:
                break
            if error is None:
                try:
                    self._step(optimizer, chunk, args, kwargs)
                except BaseException as raised:
                    error = raised  # the other ranks exchange all chunks
            self._send_back(chunk)
        self._last = chunks[-1] if chunks else []
        if error is not None:
            self._agree(error)
            raise error
        self._narrow(optimizer, self._last, gradients, last=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Sends the rows of the last chunk's parameters back to the shards.

        Raises:
            RuntimeError: If the class has raised on another rank.
        """
        if self._groups is None:
            return
        optimizer = self._held()
        error: Exception | None = None
        try:
            if self._changes is not None:
                self._note_changes(optimizer)
                self._changes.apply()
        except RuntimeError as raised:
            error = raised
        self._agree(error)
        self._send_back(self._last)
        self._settle(0)
        self._share_replicated()
        self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the optimizer's own groups and states.

        If it is called in place of `finish`, the class has raised: the other ranks, which wait, then raise, too.
        """
        if self._groups is None:
            return
        optimizer, groups = self._held(), self._groups
        optimizer.param_groups = groups
        for group, params in zip(groups, self._params, strict=True):
            group["params"][:] = params
        state = optimizer.state
        for parameter, whole in self._moved:
            if whole in state:
                state[parameter] = state.pop(whole)
        for index, stand_in in self._stand_ins.items():
            if stand_in in state:
                self._stand_in_states[index] = state.pop(stand_in)
        self._groups = self._changes = None
        self._params, self._moved, self._gradless = [], [], []
        if self._agrees:
            self._agrees = False
            self._told(sys.exc_info()[1] or RuntimeError("it was left"))
        self._settle(0)
        for one in self._last:
            one.empty()
        self._last = []

    # What is stepped on -----------------------------------------------------------------------------------------------

    def _assign(self) -> dict[Tensor, Owned]:
        """Returns the parameters that have owners, in the optimizer's order; assigns those that have none yet."""
        optimizer = self._held()
        groups = self._groups if self._groups is not None else optimizer.param_groups
        params = self._params if self._groups is not None else [group["params"] for group in groups]
        by_parameter = self._model.by_parameter
        held = [
            parameter
            for way, each in zip(self._ways.ways(), params, strict=True)
            if way is Way.OWNERS
            for parameter in each
            if parameter in by_parameter  # all ranks have the others, and step on them themselves
        ]
        new = [parameter for parameter in held if parameter not in self._owned]
        if new:
            order: dict[Tensor, int] = {one.dtensor: index for index, one in enumerate(self._model.parameters)}
            new.sort(key=lambda parameter: order[parameter])
            candidates = [_candidate(by_parameter[parameter]) for parameter in new]
            owners = assign_owners(candidates, self._model.ranks.shards, self._loads)
            if self._ways.together:
                owners = [0] * len(candidates)
            for parameter, candidate, owner in zip(new, candidates, owners, strict=True):
                sharded = by_parameter[parameter]
                whole = sharded.local.detach().new_empty(0).requires_grad_(parameter.requires_grad)
                self._owned[parameter] = Owned(sharded, owner, whole)
                self._loads[owner] += cost_of(candidate.shape)
        return {parameter: self._owned[parameter] for parameter in held}

    def _chunks(self, moving: list[Owned]) -> list[list[Owned]]:
        if not moving or not self._divides:
            return [moving] if moving else []
        order = {one: index for index, one in enumerate(self._model.parameters)}
        moving = sorted(moving, key=lambda one: order[one.parameter])
        candidates = [_candidate(one.parameter) for one in moving]
        chunks = chunks_of(candidates, [one.owner for one in moving], self._model.ranks.shards)
        return [[moving[index] for index in chunk] for chunk in chunks]

    def _hold(self, optimizer: Optimizer, owned: Mapping[Tensor, Owned]) -> None:
        """Replaces the optimizer's groups and states."""
        self._groups = optimizer.param_groups
        self._params = [list(group["params"]) for group in self._groups]
        self._changes = GroupChanges(optimizer) if self._divides else None
        state, mine = optimizer.state, self._model.ranks.shard_rank
        for parameter, one in owned.items():
            one.whole.requires_grad_(parameter.requires_grad)
            if one.owner != mine:
                continue
            self._moved.append((parameter, one.whole))
            if parameter in state:
                state[one.whole] = state.pop(parameter)

    def _narrow(
        self, optimizer: Optimizer, chunk: list[Owned], gradients: Mapping[Owned, Tensor | None], *, last: bool
    ) -> None:
        """Makes the optimizer hold this rank's part of `chunk`; the last one also holds everything without an owner."""
        assert self._groups is not None
        mine, inside = self._model.ranks.shard_rank, set(chunk)
        ways, narrowed = self._ways.ways(), []
        for index, (group, params) in enumerate(zip(self._groups, self._params, strict=True)):
            held: list[Tensor] = []
            for parameter in params:
                one = self._owned.get(parameter) if ways[index] is Way.OWNERS else None
                if one is None:
                    held += [parameter] if last and self._steps_on_replicated else []
                elif one in inside and one.owner == mine:
                    held.append(one.whole)
            narrowed.append(held)
            if last and ways[index] is Way.OWNERS and self._owns_none(params):
                held += self._stand_in(optimizer, index, params, gradients)
            if self._changes is None:
                group["params"][:] = held
        if self._changes is not None:
            self._chunk = Chunk(narrowed, offloaded=False)
            optimizer.param_groups = self._chunk.narrow(self._groups)

    @property
    def _steps_on_replicated(self) -> bool:
        """Returns whether this rank steps on unsharded parameters: all ranks do, unless one steps on everything."""
        return not self._ways.together or self._model.ranks.shard_rank == 0

    def _share_replicated(self) -> None:
        """Sends parameters that are not sharded from the rank that steps on everything to the others."""
        if self._ways.together:
            replicated = [p for params in self._params for p in params if p not in self._model.by_parameter]
            for parameter in replicated:
                if parameter.numel():
                    dist.broadcast(parameter.detach(), group=self._model.ranks.shard_group, group_src=0)

    def _owns_none(self, params: list[Tensor]) -> bool:
        """Returns whether this rank steps on no tensor of a group, though it has some."""
        mine = self._model.ranks.shard_rank
        owned = [self._owned.get(parameter) for parameter in params if parameter in self._model.by_parameter]
        return bool(owned) and all(one is not None and one.owner != mine for one in owned)

    def _stand_in(
        self, optimizer: Optimizer, index: int, params: list[Tensor], gradients: Mapping[Owned, Tensor | None]
    ) -> list[Tensor]:
        """Returns a small tensor for a group of which this rank owns nothing.

        A class may keep counters in the group itself, which go on with it, and may fail on empty groups.
        """
        params = [parameter for parameter in params if parameter in self._owned]
        example = self._owned[params[0]].parameter
        if index not in self._stand_ins:
            sizes = [min(size, 2) for size in example.layout.spec.shape]
            self._stand_ins[index] = torch.ones(
                sizes, dtype=example.local.dtype, device=example.local.device, requires_grad=params[0].requires_grad
            )
        stand_in = self._stand_ins[index]
        stand_in.fill_(1)
        has_gradient = any(gradients[self._owned[parameter]] is not None for parameter in params)
        stand_in.grad = torch.full_like(stand_in, 1e-2) if has_gradient else None
        if index in self._stand_in_states:
            optimizer.state[stand_in] = self._stand_in_states.pop(index)
        return [stand_in]

    # A chunk ----------------------------------------------------------------------------------------------------------

    def _step(self, optimizer: Optimizer, chunk: list[Owned], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._narrow(optimizer, chunk, {}, last=False)
        if any(self._chunk.params):
            with compat.unhooked_step(optimizer) as step:
                step(optimizer, *args, **kwargs)
            self._note_changes(optimizer)

    def _note_changes(self, optimizer: Optimizer) -> None:
        assert self._changes is not None
        self._changes.add(self._chunk, optimizer.param_groups, type(optimizer).__name__)

    def _send_back(self, chunk: list[Owned]) -> None:
        if not chunk:
            return
        written = self._rows.send_back(chunk)

        def settle() -> None:
            written()
            for one in chunk:
                one.empty()

        self._returning.append(settle)
        self._settle(1)

    def _settle(self, left: int) -> None:
        while len(self._returning) > left:
            self._returning.popleft()()

    def _agree(self, error: BaseException | None) -> None:
        """Tells the other ranks whether the step succeeded; raises if it failed on one of them."""
        state = self._held().state
        touched = any(compat.version_of(one.whole) != seen or one.whole in state for one, seen in self._gradless)
        has_gradless = bool(self._gradless)
        self._agrees = False
        touches = self._told(error, touched, has_gradless)
        self._skips = self._skips or touches

    def _told(self, error: BaseException | None, touched: bool = False, gradless: bool = False) -> bool:
        """Returns whether tensors without gradients were passed to the class on some rank, and used on none."""
        failed, was_touched, were_gradless = self._asks.ask(error is not None, touched, gradless)()
        if not failed:
            return bool(were_gradless) and not was_touched
        told = exchange(None if error is None else f"{type(error).__name__}: {error}", self._hosts)
        if error is None:
            kind = type(self._held()).__name__
            rank, text = next((rank, text) for rank, text in enumerate(told) if text is not None)
            raise RuntimeError(f"{kind}.step failed on rank {rank}, which owns other tensors than this one: {text}")
        return False

    def _held(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None  # it is stepping
        return optimizer


def _candidate(parameter: ShardedParameter) -> Candidate:
    return Candidate(parameter.layout.spec.block, parameter.layout.spec.shape)


def _signature(kind: str, chunks: list[list[Owned]], gradients: Mapping[Owned, Tensor | None]) -> str:
    """Returns a text of what is exchanged, which `Agreement.check` compares."""
    lines = [f"a step of {kind}"]
    for chunk in chunks:
        for has_gradient, what in ((True, "collect"), (False, "collect without gradients")):
            ids = [one.parameter.ds_id & LOCAL_ID for one in chunk if (gradients[one] is not None) == has_gradient]
            lines += [f"{what} ({', '.join(map(str, ids))})"] if ids else []
    return "\n".join(lines)


def _steps_in_parts(optimizer: Optimizer, model: ShardedModel) -> bool:
    """Returns whether a step on a part of the parameters at a time is the same to the class."""
    device = next((parameter.local.device for parameter in model.parameters), torch.device("cpu"))
    try:
        probe_states(optimizer, device)
    except ValueError:
        return False
    return True
