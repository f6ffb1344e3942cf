"""Keeps one optimizer's states in host memory, and steps it chunk by chunk while they are copied in and out.

Between steps ``optimizer.state`` holds the host tensors, so that state dicts see them; where ranks share parameters, as
DTensors of the same memory. A step runs the class's own `step` on copies of the groups that hold one chunk's
parameters, and lets the call that the user made do the last chunk: hooks, counters of schedulers and return values are
those of one step.

Shards that live in host memory themselves come and go with the states of their parameters.

Programs may fetch the first chunks while backward still runs: a step finds them on the device, or on their way.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_deepcompile import compat
from lightning_deepcompile.offload.chunks import Chunk, GroupChanges, make_chunks
from lightning_deepcompile.offload.leaving_states import StateSizes, can_leave
from lightning_deepcompile.offload.temporaries import Temporaries
from lightning_deepcompile.plan.state_copies import LEAST_SLOTS, round_slots
from lightning_deepcompile.sharding.sharded_tensor import ShardedTensor

_ALIGNMENT = 512


class StateOffload:
    """Keeps states of one optimizer in host memory.

    Args:
        optimizer: While it steps it holds this rank's plain shards.
        runtime: ``_C.Runtime`` that copies.
        sizes: What its states take.
        temporaries: What its steps take besides, for each of its groups.
        chunk_bytes: Most bytes of states that step together.
        before_step: Called before each step; may set `leaving`.
        local_of: This rank's shard of a parameter that the optimizer holds between steps.
        host_of: The host memory in which a shard lives, as a CPU tensor; None for those on the device.

    Attributes:
        sizes, temporaries: As above.
        divided: Whether parameters whose states stay on the device step chunk by chunk, too, as all of them together
            take too much memory besides.
        leaving: Whether the states of a shard leave after a step.
        alone: Whether no other optimizer has states in host memory: then programs may fetch the first chunks.
        slots: Buffers of a chunk's size that states may take on the device: some for what programs fetch, the others go
            round, and at least three do.
        optional: Whether states may stay on the device for want of host memory while they are loaded.
        moved: Bytes that the last step copied to and from the device.
    """

    needs_closure = True  # else an optimizer would look at its groups before they are a chunk's

    def __init__(
        self,
        optimizer: Optimizer,
        runtime: Any,
        sizes: StateSizes,
        temporaries: Sequence[Temporaries],
        chunk_bytes: int,
        before_step: Callable[[], None],
        local_of: Callable[[Tensor], Tensor],
        host_of: Callable[[Tensor], Tensor | None] = lambda local: None,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._runtime = runtime
        self.sizes, self.temporaries = sizes, temporaries
        self._chunk_bytes = chunk_bytes
        self._before_step = before_step
        self._local_of = local_of
        self._host_of = host_of
        self.leaving: Callable[[Tensor], bool] = lambda local: False
        self.alone = self.divided = False
        self.slots = LEAST_SLOTS
        self.optional = False
        self.moved = 0
        self._host_buffers: dict[Tensor, dict[str, Tensor]] = {}  # by shard and name
        self._chunks: list[Chunk] = []  # of the step under way
        self._expected: list[list[Tensor]] = []  # host buffers of the chunks that programs may fetch
        self._slots_of: list[list[int]] = []  # out of which they left
        self._versions: list[list[int]] = []  # of what they hold
        self._early: dict[Tensor, tuple[int, Tensor]] = {}  # by host buffer: slot, and tensor on the device
        self._current = 0
        self._shards_moved = False
        self._changes: GroupChanges | None = None
        # Copies to the host may still run when a step has returned.
        optimizer.register_state_dict_pre_hook(lambda _: runtime.states.synchronize())

    @property
    def stepping(self) -> bool:
        """True during a step: calls of `step` are then parts of it."""
        return self._changes is not None

    @property
    def host_bytes(self) -> int:
        """Bytes of states in host memory."""
        return sum(buffer.nbytes for entries in self._host_buffers.values() for buffer in entries.values())

    def holds(self, local: Tensor) -> bool:
        """Returns whether a shard's states are in host memory."""
        return bool(self._host_buffers.get(local))

    # A step -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, *args: Any, **kwargs: Any) -> None:
        """Steps all chunks but the last, and leaves the optimizer with the last one's parameters.

        Args:
            *args: Arguments of the optimizer's `step`, without a closure.
            **kwargs: Its keyword arguments.
        """
        self._before_step()
        optimizer = self._held()
        self.moved = 0
        self._forget_replaced()
        offloaded = any(self._is_offloaded(p) for group in optimizer.param_groups for p in group["params"])
        if not offloaded and not self.divided:
            return
        self._chunks = make_chunks(
            optimizer.param_groups, self._is_offloaded, self._size_of, self._chunk_bytes, self._temporary_bytes
        )
        self._current = 0
        self._changes = GroupChanges(optimizer)
        fetched = self._runtime.states.take() if self.alone else []
        self._early = {
            buffer: (-1 - k, tensor)
            for k, tensors in enumerate(fetched)
            for buffer, version, tensor in zip(self._expected[k], self._versions[k], tensors, strict=True)
            if compat.version_of(buffer) == version  # else somebody has written to it since
        }
        self._place_chunks(round_slots(self.slots, len(fetched)))
        sizes = [self._fetched_bytes(chunk) for chunk in self._chunks]
        self._runtime.states.begin(max((size for size in sizes if size <= self._chunk_bytes), default=0))
        self._fetch(0)
        with compat.unhooked_step(optimizer) as step:
            for _ in self._chunks[1:]:
                self._enter()
                step(optimizer, *args, **kwargs)
                self._leave()
        self._enter()

    @torch.no_grad()
    def finish(self) -> None:
        """Ends a step whose last chunk has been stepped."""
        if self._changes is None:
            return
        self._leave()
        self._changes.apply()
        chunks = [chunk for chunk in self._chunks if chunk.offloaded]
        self.restore()
        self._expect([(self._buffers_of(chunk), sorted(chunk.slots)) for chunk in chunks])

    def restore(self) -> None:
        """Restores the optimizer's own groups; after an error, states that came to the device stay there."""
        if self._changes is None:
            return
        for chunk in self._chunks:
            for (p, _, _), mapped in zip(chunk.shards, chunk.mapped, strict=False):
                mapped.copy_(p.detach())
                p.data = mapped
        if self._shards_moved:
            self._shards_moved = False
            self._runtime.states.settle()  # whoever reads parameters from now on finds what was stepped
        self._held().param_groups = self._changes.groups
        self._changes = None
        self._chunks = []
        self._early = {}

    def _expect(self, left: list[tuple[list[Tensor], list[int]]]) -> None:
        """Tells the runtime the next step's first chunks and the slots they left, so that programs can fetch them."""
        left = [(buffers, slots) for buffers, slots in left if buffers] if self.alone else []
        chunks, slots_of = [buffers for buffers, _ in left], [slots for _, slots in left]
        self._versions = [[compat.version_of(buffer) for buffer in buffers] for buffers in chunks]
        known = [buffer for buffers in self._expected for buffer in buffers]
        new = [buffer for buffers in chunks for buffer in buffers]
        same = [len(c) for c in chunks] == [len(c) for c in self._expected] and all(map(operator.is_, known, new))
        if not same or slots_of != self._slots_of:
            self._expected, self._slots_of = chunks, slots_of
            self._runtime.states.expect(chunks, slots_of)

    def _forget_replaced(self) -> None:
        """Forgets host buffers that the optimizer no longer holds, as after its states were cleared."""
        state = self._held().state
        replaced = False
        for p, buffers in list(self._host_buffers.items()):
            entries = state.get(p, {})
            held = {name: buffer for name, buffer in buffers.items() if entries.get(name) is buffer}
            if len(held) < len(buffers):
                for name in buffers.keys() - held.keys():
                    value = entries.get(name)
                    if isinstance(value, Tensor) and value.shape == p.shape and value.device != p.device:
                        # Somebody computed it of what was there.
                        held[name] = entries[name] = self._copied(value, value.dtype)
                self._host_buffers[p] = held
                replaced = True
        if replaced:
            self._expect([])  # it holds them, too, and their memory is for the states that this step makes

    def _copied(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        buffer: Tensor = self._runtime.states.host_buffer(torch.empty(value.shape, dtype=dtype, device="meta"))
        buffer.copy_(value)
        return buffer

    def _buffers_of(self, chunk: Chunk) -> list[Tensor]:
        return [buffer for params in chunk.params for p in params for buffer in self._host_buffers.get(p, {}).values()]

    def _place_chunks(self, slots: int) -> None:
        """Assigns a slot, in turn, to each chunk that has to be fetched or whose states are new."""
        turn = 0
        for chunk in self._chunks:
            buffers = self._buffers_of(chunk)
            if chunk.offloaded and (not buffers or any(buffer not in self._early for buffer in buffers)):
                chunk.slot = turn % slots
                turn += 1

    def _is_offloaded(self, local: Tensor) -> bool:
        if self._host_buffers.get(local) or self._shard_buffer(local) is not None:
            return True
        # Without a gradient an optimizer makes no state; one that is still on the device leaves.
        return self.leaving(local) and (local.grad is not None or bool(self._held().state.get(local)))

    def _shard_buffer(self, local: Tensor) -> Tensor | None:
        """The host memory from which a shard is fetched to be stepped; None if it is on the device or not stepped."""
        buffer = self._host_of(local)
        return buffer if buffer is not None and buffer.numel() > 0 and local.grad is not None else None

    def _size_of(self, group: int, local: Tensor) -> int:
        buffers = self._host_buffers.get(local)
        states = _buffer_bytes(buffers.values()) if buffers else self.sizes.of(group, local.dtype, local.numel())
        return states + self._shard_bytes(local)

    def _temporary_bytes(self, group: int, local: Tensor) -> int:
        known = self.divided and group < len(self.temporaries)
        return self.temporaries[group].of([local.numel()]) if known else 0

    def _shard_bytes(self, local: Tensor) -> int:
        buffer = self._shard_buffer(local)
        return 0 if buffer is None else _buffer_bytes([buffer])

    def _fetched_bytes(self, chunk: Chunk) -> int:
        buffers = [buffer for buffer in self._buffers_of(chunk) if buffer not in self._early]
        return _buffer_bytes(buffers) + sum(self._shard_bytes(p) for params in chunk.params for p in params)

    def _fetch(self, index: int) -> None:
        chunk = self._chunks[index]
        wanted = [
            (p, name, buffer)
            for params in chunk.params
            for p in params
            for name, buffer in self._host_buffers.get(p, {}).items()
        ]
        parameters = [p for params in chunk.params for p in params] if chunk.offloaded else []
        shards = [(p, buffer) for p in parameters if (buffer := self._shard_buffer(p)) is not None]
        chunk.arrived = [(*entry, self._early[entry[2]][1]) for entry in wanted if entry[2] in self._early]
        wanted = [entry for entry in wanted if entry[2] not in self._early]
        buffers = [*(buffer for _, _, buffer in wanted), *(buffer for _, buffer in shards)]
        tensors = iter(() if chunk.slot is None else self._runtime.states.fetch(chunk.slot, buffers))
        chunk.slots = {self._early[buffer][0] for *_, buffer, _ in chunk.arrived}
        if chunk.slot is not None:
            chunk.slots.add(chunk.slot)
        self.moved += sum(buffer.nbytes for buffer in (*buffers, *(buffer for _, _, buffer, _ in chunk.arrived)))
        chunk.arrived += [(*entry, next(tensors)) for entry in wanted]
        chunk.shards = [(*entry, next(tensors)) for entry in shards]

    def _enter(self) -> None:
        index, optimizer = self._current, self._held()
        assert self._changes is not None
        if index + 1 < len(self._chunks):
            self._fetch(index + 1)
        chunk = self._chunks[index]
        for slot in chunk.slots:
            self._runtime.states.wait(slot)
        for p, name, _, tensor in chunk.arrived:
            optimizer.state[p][name] = tensor
        for p, _, tensor in chunk.shards:
            chunk.mapped.append(p.detach())
            p.data = tensor
        self._shards_moved |= bool(chunk.shards)
        optimizer.param_groups = chunk.narrow(self._changes.groups)

    def _leave(self) -> None:
        index, optimizer = self._current, self._held()
        assert self._changes is not None
        chunk = self._chunks[index]
        self._changes.add(chunk, optimizer.param_groups, type(optimizer).__name__)
        known = {(p, name): (buffer, tensor) for p, name, buffer, tensor in chunk.arrived}
        fetched_to = {tensor.untyped_storage().data_ptr() for *_, tensor in chunk.arrived}
        leaving: list[tuple[Tensor, Tensor, Tensor | None]] = []  # what, where to, and where it came from
        for p in (p for params in chunk.params for p in params if chunk.offloaded):
            entries = optimizer.state[p] if p in optimizer.state else {}
            kept: dict[str, Tensor] = {}
            for name, value in entries.items():
                buffer, fetched = known.get((p, name), (None, None))
                if value is not fetched and type(value) is Tensor and value.untyped_storage().data_ptr() in fetched_to:
                    entries[name] = value = value.clone()  # a new view of a slot, which goes to the next chunk
                if value is not fetched and not can_leave(value, p):
                    continue
                if not self.leaving(p):
                    # It has come back to stay.
                    entries[name] = fetched.clone() if fetched is not None and value is fetched else value
                    continue
                source = buffer if value is fetched else None
                if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                    buffer = self._runtime.states.host_buffer(value)
                entries[name] = kept[name] = buffer
                leaving.append((value, buffer, source))
            if kept:
                self._host_buffers[p] = kept
            else:
                self._host_buffers.pop(p, None)
        for (p, buffer, _), mapped in zip(chunk.shards, chunk.mapped, strict=True):
            leaving.append((p.detach(), buffer, None))
            p.data = mapped
        chunk.arrived, chunk.shards, chunk.mapped = [], [], []
        for slot in sorted(chunk.slots):
            mine = [(v, h) for v, h, source in leaving if self._slot_of(source, chunk) == slot]
            self._runtime.states.stow(slot, [value for value, _ in mine], [buffer for _, buffer in mine])
        self.moved += sum(buffer.nbytes for _, buffer, _ in leaving)
        self._current += 1

    def _slot_of(self, source: Tensor | None, chunk: Chunk) -> int | None:
        """The slot of a chunk's tensor that was fetched from the host buffer `source`; None if it was not fetched."""
        if source in self._early:
            return self._early[source][0]
        return min(chunk.slots, default=None) if chunk.slot is None else chunk.slot

    # Outside of steps -------------------------------------------------------------------------------------------------

    def takes(self, parameter: Tensor, value: Any) -> bool:
        """Returns whether a state that is about to be loaded is to wait in host memory.

        Args:
            parameter: As the optimizer holds it between steps.
            value: This rank's part of the state.
        """
        local = self._local_of(parameter)
        return (
            isinstance(value, Tensor)
            and value.dim() > 0
            and value.numel() > 0
            and value.numel() == local.numel()
            and self.leaving(local)
        )

    def load(self, parameter: Tensor, name: str, dtype: torch.dtype, value: Tensor) -> Tensor:
        """Puts a loaded state into host memory.

        Args:
            parameter: As the optimizer holds it between steps.
            name: Of the state.
            dtype: In which the optimizer keeps it.
            value: This rank's part of it.

        Returns:
            What the optimizer is to hold.
        """
        local = self._local_of(parameter)
        try:
            buffer = self._copied(value, dtype)
        except torch.OutOfMemoryError:
            if not self.optional:
                raise
            return value.to(local.device, dtype, copy=True)
        self._host_buffers.setdefault(local, {})[name] = buffer
        return buffer

    @torch.no_grad()
    def depart(self) -> None:
        """Moves states that are to be offloaded to host memory now, rather than after the next step."""
        for parameter, entries in self._held().state.items():
            local = self._local_of(parameter)
            if self.holds(local) or not self.leaving(local):
                continue
            for name, value in entries.items():
                rows = compat.local_of(value) if isinstance(value, DTensor) else value
                if can_leave(rows, local):
                    entries[name] = _as_shown(value, self.load(parameter, name, rows.dtype, rows), self.synchronize)

    def synchronize(self) -> None:
        """Waits until all states that are being offloaded are in host memory."""
        self._runtime.states.synchronize()

    def forget(self) -> None:
        """Frees the host buffers; call when the optimizer's state was replaced."""
        self._host_buffers.clear()
        self._expect([])
        self._runtime.states.synchronize()

    def retire(self) -> None:
        """Moves states from pinned to ordinary host memory, for an optimizer that will not step soon."""
        optimizer = self._optimizer()
        buffers, self._host_buffers = self._host_buffers, {}
        self._expect([])
        if optimizer is None or not buffers:
            return
        self._runtime.states.synchronize()
        for parameter, entries in optimizer.state.items():
            for name, buffer in buffers.pop(self._local_of(parameter), {}).items():
                value = entries.get(name)
                if (compat.local_of(value) if isinstance(value, DTensor) else value) is buffer:
                    entries[name] = _as_shown(value, buffer.clone())

    def _held(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None  # it is stepping
        return optimizer


def _as_shown(value: Any, rows: Tensor, before_use: Callable[[], None] | None = None) -> Tensor:
    """Returns `rows` as users see them if `value` is a DTensor."""
    return ShardedTensor.of(compat.with_local(value, rows), before_use) if isinstance(value, DTensor) else rows


def _buffer_bytes(buffers: Iterable[Tensor]) -> int:
    """Bytes of a runtime buffer that holds `buffers`."""
    return sum(-(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT for buffer in buffers)
