"""Turns a module's parameters into shards, in place, and registers them with the runtime."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_deepcompile import compat
from lightning_deepcompile.program.program import LOCAL_ID
from lightning_deepcompile.ranks.ranks import Ranks
from lightning_deepcompile.sharding.access import StepState, install_access
from lightning_deepcompile.sharding.adapters import materialize_adapters
from lightning_deepcompile.sharding.derived import DerivedShards
from lightning_deepcompile.sharding.layout import FlatLayout, ParamSpec, ShardLayout, assign_blocks, lay_out_flat
from lightning_deepcompile.sharding.materialize import Materializer
from lightning_deepcompile.sharding.parameter import GradBuffer, Owner, ShardedParameter, distribute_rows
from lightning_deepcompile.sharding.parameter_class import HOOKS
from lightning_deepcompile.sharding.wire_dtypes import WireDtypes

ReadRows = Callable[[int, int], Tensor]
"""Reads the rows of a parameter, from the first number to before the second, onto the CPU; no communication."""


@dataclass(eq=False, repr=False)
class ShardedModel:
    """A sharded module: its parameters by id, the replicated rest, and the state that its accessors share.

    Attributes:
        derived: The values that programs gather in place of parameters.
    """

    parameters: list[ShardedParameter]
    replicated: list[nn.Parameter]
    flat_layouts: list[FlatLayout]
    grad_buffers: list[GradBuffer]
    state: StepState
    ranks: Ranks
    runtime: InitVar[Any]
    derived: DerivedShards = field(init=False)
    by_id: dict[int, ShardedParameter] = field(init=False)
    by_name: dict[str, ShardedParameter] = field(init=False)
    by_parameter: dict[Tensor, ShardedParameter] = field(init=False)
    _storages: list[torch.UntypedStorage] = field(init=False)

    def __post_init__(self, runtime: Any) -> None:
        self._storages = [parameter.dtensor.untyped_storage() for parameter in self.parameters]
        self.by_id = {parameter.ds_id: parameter for parameter in self.parameters}
        self.by_name = {parameter.name: parameter for parameter in self.parameters}
        self.by_parameter = {parameter.dtensor: parameter for parameter in self.parameters}
        self.derived = DerivedShards(self.by_id, runtime, self.ranks.shards)

    @property
    def names(self) -> dict[int, str]:
        """Names by local ids, which are the same on all ranks."""
        return {parameter.ds_id & LOCAL_ID: parameter.name for parameter in self.parameters}

    def holds(self, module: nn.Module) -> bool:
        """Returns whether these, in their own memory, are still all the parameters of `module`.

        Args:
            module: The module that was sharded; a user may have moved or replaced some of it since.
        """
        known = {*self.by_parameter, *self.replicated}
        return set(module.parameters()) == known and all(p.in_place for p in self.parameters)

    def check_installed(self) -> None:
        """Checks before a step that modules still hold the shards that steps read.

        Raises:
            RuntimeError: If not: PyTorch gives a DTensor other storage when its ``.data`` is assigned, and leaves its
                values as they are.
        """
        with compat.reading_attributes():
            present = [parameter.dtensor.untyped_storage() for parameter in self.parameters]
        for parameter, own, storage in zip(self.parameters, self._storages, present, strict=True):
            for owner in parameter.owners:
                if owner.module._parameters.get(owner.name) is not parameter.dtensor:
                    raise RuntimeError(
                        f"The parameter {owner.fqn!r} was replaced by another tensor since the module was sharded: "
                        "steps do not see it. Replace parameters before `trainer.fit`, in `setup` or in "
                        "`configure_model`; change their values in place, by `parameter.data.copy_(...)`."
                    )
            if storage is not own:
                raise RuntimeError(
                    f"`parameter.data = ...` was assigned to {parameter.name!r}, or the module was moved. Parameters "
                    "are sharded, and steps would read the old values. Change them in place, by "
                    "`parameter.data.copy_(...)` (or `mul_`, `lerp_`, `clamp_`)."
                )

    @contextlib.contextmanager
    def whole(self, module: nn.Module, *, writeback: bool) -> Iterator[None]:
        """Returns a context in which `module` and its children hold whole, plain parameters; all ranks must enter it.

        Args:
            module: The sharded module, or one of its children.
            writeback: Keep what was written to them, each rank's own rows; otherwise it is dropped.
        """
        wanted = {p for m in module.modules() for p in m._parameters.values() if p is not None}
        chosen = [p for p in self.parameters if p.dtensor in wanted]
        wholes = {
            p: nn.Parameter(compat.full_tensor(cast(DTensor, p.dtensor.detach())), p.dtensor.requires_grad)
            for p in chosen
        }
        for parameter, whole in wholes.items():
            parameter.install(whole)
        try:
            with self.state.holding_whole():
                yield
        finally:
            for parameter, whole in wholes.items():
                if whole.shape != parameter.dtensor.shape:
                    continue  # resized by its ``.data``: it stays in the modules, and is sharded again
                for owner in parameter.owners:
                    if owner.module._parameters.get(owner.name) is whole:  # else it was replaced
                        owner.module._parameters[owner.name] = parameter.dtensor
                if writeback:
                    with torch.no_grad():
                        parameter.local.copy_(parameter.rows(whole))

    @property
    def shard_bytes(self) -> int:
        """Bytes of parameter shards that this rank holds, padding included."""
        return sum(flat.nbytes for flat in self.flat_layouts)

    @property
    def gradient_dtypes(self) -> set[tuple[torch.dtype, torch.dtype]]:
        """Dtypes of unsharded gradients, each with that of the shards to which they are added."""
        return {(p.info.dtype, p.local.dtype) for p in self.parameters if p.dtensor.requires_grad}

    @property
    def device_bytes(self) -> int:
        """Bytes of these shards that are on the device, and of what is derived of them."""
        on_device = [flat for flat in self.flat_layouts if self.by_name[flat.shards[0].spec.name].host is None]
        return sum(flat.nbytes for flat in on_device) + self.derived.nbytes

    @property
    def hosted_bytes(self) -> dict[str, int]:
        """Bytes of each shard that is in host memory, by its parameter's number within the model as text."""
        hosted = [p for p in self.parameters if p.host is not None]
        return {str(p.ds_id & LOCAL_ID): p.layout.shard_numel * p.local.dtype.itemsize for p in hosted}


def collect_parameters(module: nn.Module) -> dict[nn.Parameter, list[Owner]]:
    """Finds all parameters and all places where they are registered, in registration order."""
    found: dict[nn.Parameter, list[Owner]] = {}
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append(Owner(path, owner, name))
    return found


def is_sharded(parameter: Tensor) -> bool:
    """Returns whether a parameter is sharded when it is trained: 0-dim or empty ones have no rows."""
    return parameter.dim() > 0 and parameter.numel() > 0


def _in_script(owners: Sequence[Owner]) -> bool:
    """Returns whether TorchScript's C++ code reads a parameter, bypassing Python attributes."""
    return any(isinstance(owner.module, torch.jit.ScriptModule) for owner in owners)


@dataclass(frozen=True)
class Layout:
    """The future places of all parameters of a module.

    Args:
        owners: Of each parameter that is sharded, by its name.
        replicated: Owners of the others: without rows to distribute (0-dim or empty), or read by TorchScript.
        specs: Of each parameter that is sharded.
        flat_layouts: Their places.
    """

    owners: dict[str, tuple[Owner, ...]]
    replicated: list[Owner]
    specs: list[ParamSpec]
    flat_layouts: list[FlatLayout]


def lay_out(module: nn.Module, shards: int, dtypes: WireDtypes) -> Layout:
    """Plans the sharding of a module; keeps no reference to a parameter.

    Args:
        module: The module, before it is sharded.
        shards: Ranks that share its parameters.
        dtypes: The dtypes in which these travel.
    """
    found = collect_parameters(module)
    sharded = {owners[0].fqn: (p, owners) for p, owners in found.items() if is_sharded(p) and not _in_script(owners)}
    replicated = [owners[0] for owners in found.values() if owners[0].fqn not in sharded]
    blocks = assign_blocks(module, list(sharded))
    specs = [
        ParamSpec(
            name,
            tuple(parameter.shape),
            parameter.dtype,
            parameter.requires_grad,
            blocks[name],
            dtypes.gathered(parameter.dtype, (owner.module for owner in owners)),
        )
        for name, (parameter, owners) in sharded.items()
    ]
    owners_of = {name: tuple(owners) for name, (_, owners) in sharded.items()}
    return Layout(owners_of, replicated, specs, lay_out_flat(specs, shards))


def shard_module(
    module: nn.Module,
    runtime: Any,
    ranks: Ranks,
    *,
    dtypes: WireDtypes,
    hosted: frozenset[int] = frozenset(),
    stored: Mapping[nn.Parameter, ReadRows] | None = None,
) -> ShardedModel:
    """Shards every parameter of `module` on dim 0, in place.

    All ranks get rank 0's values (as with DDP): ranks that were seeded differently would otherwise train a
    patchwork. One full parameter at a time is on the device, of a model on the meta device one block, which is
    initialised there. Parameters without rows to distribute (0-dim or empty) and those of TorchScript are replicated.

    Args:
        module: The model, on any device; its parameters may be DTensors of an earlier sharding.
        runtime: ``_C.Runtime`` of this rank.
        ranks: The data-parallel ranks.
        dtypes: The dtypes in which parameters, cast before the wire, and gradients travel.
        hosted: Indices of the flat buffers of `lay_out` that live in host memory; the same on all ranks.
        stored: Parameters on the meta device of which each rank reads its rows; the same on all ranks.

    Raises:
        ValueError: If a parameter of `stored` is not one of the module's.
    """
    stored = stored or {}
    copied = materialize_adapters(module, stored)
    device = torch.device("cpu")
    if ranks.mesh.device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    planned = lay_out(module, ranks.shards, dtypes)  # the module must hold the only references to whole parameters
    owners_of, specs, flats = planned.owners, planned.specs, planned.flat_layouts
    deferred = {
        name
        for name, (owner, *_) in owners_of.items()
        if cast(nn.Parameter, owner.module._parameters[owner.name]).is_meta
    }
    reads = {**stored, **copied}
    read = {
        name: reads[whole]
        for name, (owner, *_) in owners_of.items()
        if (whole := cast(nn.Parameter, owner.module._parameters[owner.name])) in reads
    }
    if len(read) < len(reads):
        raise ValueError(
            f"`load_pretrained` found values for {len(reads)} parameters, of which the module now has {len(read)}. "
            "Call it when the model is whole (after `resize_token_embeddings`, say), on a part of the LightningModule."
        )
    materializer = Materializer(module, device, given=set(reads))
    state = StepState()
    parameters: dict[str, ShardedParameter] = {}
    buffers: list[GradBuffer] = []
    next_id = runtime.serial << 32
    for index, flat in enumerate(flats):
        materializer.materialize(owners_of[spec.name][0].module for spec in specs if spec.block == flat.block)
        if index in hosted:
            values = runtime.memory.host_shard(flat.numel, flat.dtype).zero_()
        else:
            values = torch.zeros(flat.numel, dtype=flat.dtype, device=device)
        buffer = GradBuffer(torch.empty_like(values)) if flat.is_trained else None
        for layout in flat.shards:
            spec = layout.spec
            owners = owners_of[spec.name]
            in_place = spec.name in deferred  # else it is the user's memory
            parameter = _shard_parameter(
                owners, layout, values, ranks, next_id, in_place=in_place, read=read.get(spec.name)
            )
            parameter.host = runtime.memory.host_of(parameter.local.detach()) if index in hosted else None
            next_id += 1
            if buffer is not None:
                buffer.add(parameter)
            runtime.setup.register_param(
                parameter.ds_id,
                spec.name,
                list(spec.shape),
                parameter.leaf.detach(),
                parameter.grad_padded,
                dtypes.reduced(spec.dtype),
            )
            parameters[spec.name] = parameter
            parameter.install(parameter.dtensor)  # at once: this frees the whole one
        if buffer is not None:
            buffer.settle()
            buffers.append(buffer)
            # It exists to be registered; it uses memory only while it holds gradients.
            runtime.gradients.free([parameter.ds_id for parameter in buffer.parameters])
    materializer.materialize(module.modules())  # modules without sharded parameters
    _move_rest(module, ranks, device)
    _install(list(parameters.values()), state)
    replicated = [cast(nn.Parameter, owner.module._parameters[owner.name]) for owner in planned.replicated]
    return ShardedModel([parameters[spec.name] for spec in specs], replicated, flats, buffers, state, ranks, runtime)


def _move_rest(module: nn.Module, ranks: Ranks, device: torch.device) -> None:
    """Moves buffers and replicated parameters to `device` and gives them rank 0's values on all ranks."""
    seen: dict[Tensor, Tensor] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                if buffer not in seen:
                    seen[buffer] = _broadcast(buffer.to(device), ranks)
                owner._buffers[name] = seen[buffer]
        for parameter in owner._parameters.values():
            if parameter is not None and not isinstance(parameter, DTensor) and parameter not in seen:
                seen[parameter] = parameter
                parameter.data = _broadcast(parameter.data.to(device), ranks)


def _broadcast(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Broadcasts rank 0's values, into `tensor` itself if it is dense: collectives would write past an expanded one."""
    if tensor.numel() and ranks.world_size > 1:
        tensor = tensor.contiguous()
        dist.broadcast(tensor, src=dist.get_global_rank(ranks.group, 0), group=ranks.group)
    return tensor


@torch.no_grad()
def _shard_parameter(
    owners: tuple[Owner, ...],
    layout: ShardLayout,
    values: Tensor,
    ranks: Ranks,
    ds_id: int,
    *,
    in_place: bool,
    read: ReadRows | None,
) -> ShardedParameter:
    spec = layout.spec
    original = owners[0].module._parameters[owners[0].name]
    assert original is not None
    low, high = layout.rows_of(ranks.shard_rank)
    if read is not None:
        mine = read(low, high)
    elif isinstance(original, DTensor):  # of an earlier sharding: all ranks get the same
        mine = compat.full_tensor(cast(DTensor, original.detach().to(values.device)))[low:high]
    else:
        full = original.detach().to(values.device, copy=not in_place).contiguous()
        mine = _broadcast(full, ranks)[low:high]

    padded = values[layout.offset : layout.offset + layout.shard_numel].view(layout.shard_shape)
    rows = padded.narrow(0, 0, high - low)
    rows.copy_(mine)
    parameter = ShardedParameter(
        ds_id=ds_id,
        layout=layout,
        owners=owners,
        ranks=ranks,
        dtensor=nn.Parameter(distribute_rows(_alone(rows), spec.shape, ranks), requires_grad=spec.requires_grad),
        leaf=padded.detach().requires_grad_(spec.requires_grad),
        local=rows.detach().requires_grad_(spec.requires_grad),
        grad_offset=layout.offset,
    )
    parameter.dtensor.__dict__.update(original.__dict__)  # marks such as `no_weight_decay` that users hang on them
    # The same dictionary that the handles which remove hooks know.
    parameter.hooks = getattr(original, HOOKS, None) or compat.take_accumulation_hooks(original) or parameter.hooks
    return parameter


def _alone(rows: Tensor) -> Tensor:
    """The same memory as a storage of its own: PyTorch can neither save nor copy DTensors that begin inside of one."""
    if isinstance(rows, compat.FakeTensor):  # it has no memory
        return rows
    begin = rows.storage_offset() * rows.itemsize
    piece = rows.untyped_storage()[begin : begin + rows.nbytes]
    return torch.empty(0, dtype=rows.dtype, device=rows.device).set_(piece, 0, rows.shape, rows.stride())


def _install(parameters: list[ShardedParameter], state: StepState) -> None:
    entries: dict[nn.Module, dict[str, tuple[Tensor, int, tuple[int, ...], torch.dtype]]] = {}
    for parameter in parameters:
        for owner in parameter.owners:
            entry = (parameter.leaf, parameter.ds_id, parameter.layout.spec.shape, parameter.info.dtype)
            entries.setdefault(owner.module, {})[owner.name] = entry
    for module, names in entries.items():
        install_access(module, names, state)
