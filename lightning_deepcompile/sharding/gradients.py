"""Sets ``.grad`` of the module's parameters to the runtime's reduced gradients.

Compiled backward programs hand full gradients to the runtime, which accumulates their mean in flat buffers; autograd
never sees them. Around each backward pass this session tells the runtime which parameters start a new accumulation
(``.grad`` is None, as after ``zero_grad``), and afterwards makes ``.grad`` a DTensor view of the buffers. Gradients
from other sources (autograd, for code that Dynamo did not compile; one that a user assigned) are merged in.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_deepcompile import compat
from lightning_deepcompile.sharding.access import renew_leaf
from lightning_deepcompile.sharding.errors import UnsupportedStepError
from lightning_deepcompile.sharding.parameter import GradBuffer, ShardedParameter
from lightning_deepcompile.sharding.sharded_tensor import ShardedTensor
from lightning_deepcompile.sharding.shards import ShardedModel

_Hooks = dict[int, Callable[[Tensor], None]]


class GradientSession:
    """Brackets backward passes; one per strategy.

    Args:
        runtime: ``_C.Runtime`` that accumulates the gradients.
        model: The sharded model.
        group: Process group over which replicated parameters' gradients are averaged.
        holds_back: Whether gradients may be reduced once for several passes.

    Attributes:
        update: Whether backward passes are the last ones before the optimizer steps. Otherwise gradients that are
            reduced once per optimizer step (stage 1) are held back, and ``.grad`` does not show them yet.
        around_hooks: A context for users' hooks, which see parameters as they are between steps.
        after_hooks: Called when hooks have run: they may have written to parameters.
    """

    def __init__(
        self, runtime: Any, model: ShardedModel, group: dist.ProcessGroup | None, *, holds_back: bool = False
    ) -> None:
        self._runtime = runtime
        self.holds_back = holds_back
        self._model = model
        self._group = group
        self._foreign: dict[ShardedParameter, Tensor] = {}
        self._stashed: dict[nn.Parameter, Tensor | None] = {}
        self._active = False
        self._discards = False  # drops gradients of the pass under way: other tensors' were asked for
        self._watched: set[ShardedParameter] = set()
        self._adopts = False  # at the end of the pass under way, which does not belong to a step
        self._replicated_hooks: dict[nn.Parameter, list[_Hooks]] = {}
        self.around_hooks: Callable[[], AbstractContextManager[None]] = nullcontext
        self.after_hooks: Callable[[], None] = _nothing
        self.update = True
        for parameter in self._trainable():
            self._watch(parameter)

    def begin(self) -> None:
        """Starts a backward pass, and asks autograd to call `finish` at its end. Does nothing if one has begun."""
        if self._active:
            return
        leaves = [parameter.leaf for parameter in self._trainable() if parameter.leaf.requires_grad]
        self._discards = bool(leaves) and not any(map(compat.is_accumulated, leaves))
        if self._discards:
            self._keep_apart()
        self.begin_now()
        # Queued with the engine rather than placed in "the last graph": with graph breaks, or a loss of several graphs,
        # no graph knows that it is the last.
        compat.after_backward(self.finish)

    def begin_now(self) -> None:
        """Starts a backward pass, for a caller that calls `finish` itself."""
        if self._active:
            return
        with compat.reading_attributes():
            reset = [p for p in self._trainable() if p.dtensor.grad is not p.grad_dtensor]
            foreign = [p for p in reset if p.dtensor.grad is not None]
        for parameter in foreign:
            self._set_aside(parameter)
        for parameter in self._trainable():
            if parameter.hooks and parameter.dtensor.grad is not None:
                self._set_aside(parameter)  # then the pass tells whether it computes a gradient of this one
                reset.append(parameter)
        self._protect_held(reset)
        for replicated in self._replicated():
            if (hooks := compat.take_accumulation_hooks(replicated)) is not None:
                self._replicated_hooks.setdefault(replicated, []).append(hooks)
        self._stashed = {p: p.grad for p in self._replicated()}
        for replicated in self._stashed:
            replicated.grad = None
        self._runtime.gradients.start_backward([p.ds_id for p in reset], self.update)
        self._active, self._adopts = True, False

    @torch.compiler.disable  # autograd calls it inside of a step: users' hooks, which it calls, are not compiled
    def finish(self) -> None:
        """Ends a backward pass: waits for the reductions (on the device, not the host) and sets every ``.grad``."""
        if not self._active:
            self.adopt()
            return
        self._active = False
        self._runtime.gradients.finish_backward()
        if self._discards:
            self._discards = False
            self._runtime.gradients.free([parameter.ds_id for parameter in self._trainable()])
        reduced = [self._model.by_id[ds_id] for ds_id in self._runtime.gradients.ids()]
        with compat.reading_attributes():
            for parameter in reduced:
                parameter.dtensor.grad = parameter.grad_dtensor
        self._return()
        averaged = self._average_replicated()
        self.adopt(reduced, averaged)

    def _keep_apart(self) -> None:
        """Keeps the present gradients out of a pass whose own are not wanted: programs reduce them all the same."""
        if self.holds_back:
            raise UnsupportedStepError(
                "torch.autograd.grad(...) is called for tensors other than parameters, through compiled code, where "
                "unsharded gradients are added up. Use CompileConfig(reduce='every')."
            )
        for parameter in self._trainable():
            if parameter.dtensor.grad is not None:
                self._set_aside(parameter)

    def abandon(self) -> None:
        """Drops a backward pass that raised, with the accumulated gradients, which are undefined."""
        if self._active:
            self._active = self._discards = False
            self._foreign, self._stashed = {}, {}
            self.drop()

    def adopt(self, reduced: Iterable[ShardedParameter] = (), averaged: Iterable[nn.Parameter] = ()) -> None:
        """Merges gradients that autograd left on the leaves (eager code inside the step) into ``.grad``; calls hooks.

        Args:
            reduced: Parameters whose gradients the ending pass has set.
            averaged: Those of them that are not sharded.
        """
        found = {p for p in reduced if p.hooks}
        for parameter in self._trainable():
            leaf = parameter.leaf
            if leaf.grad is not None:
                self._merge(parameter, leaf.grad.narrow(0, 0, parameter.local.shape[0]))
                leaf.grad = None
                if parameter.hooks:
                    found.add(parameter)
        calls: list[tuple[Tensor, _Hooks]] = [(p.dtensor, p.hooks) for p in self._trainable() if p in found]
        calls += [(p, hooks) for p in averaged for hooks in self._replicated_hooks.get(p, ())]
        if not calls:
            return
        with torch.no_grad(), self.around_hooks():
            for tensor, hooks in reversed(calls):  # about as a backward pass would
                for hook in list(hooks.values()):
                    hook(tensor)
        self.after_hooks()

    def _watch(self, parameter: ShardedParameter) -> None:
        """Makes gradients of passes outside of steps be adopted, too, such as of a module that a hook called."""
        if parameter in self._watched or not parameter.leaf.requires_grad:
            return
        self._watched.add(parameter)
        reference = weakref.ref(self)  # the garbage collector does not see autograd's hooks

        # Autograd calls it for every parameter in every pass: `torch.compiler.disable` around it would take longer.
        def adopt_later(_: Tensor) -> None:
            session = reference()
            if session is not None and not session._active and not session._adopts:
                session._queue_adoption()

        parameter.leaf.register_post_accumulate_grad_hook(adopt_later)

    @torch.compiler.disable
    def _queue_adoption(self) -> None:
        self._adopts = True
        compat.after_backward(self._adopt_late)

    @torch.compiler.disable
    def _adopt_late(self) -> None:
        self._adopts = False
        if not self._active:
            self.adopt()

    def drop(self) -> None:
        """Sets every gradient to None and returns the buffers' memory to the allocator."""
        self.forget([parameter.dtensor for parameter in self._trainable()])
        for replicated in self._replicated():
            replicated.grad = None

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Sets the gradients of some parameters to None, and drops those held back for them."""
        chosen = [self._model.by_parameter[p] for p in parameters if p in self._model.by_parameter]
        with compat.reading_attributes():
            for parameter in chosen:
                parameter.dtensor.grad = None
        self._protect_held(chosen)
        self._runtime.gradients.free([p.ds_id for p in chosen])
        if not self._active:  # else `finish` does
            self._return()

    def forget_held_back(self) -> None:
        """Drops gradients that were held back for a last micro-batch that does not come."""
        self.forget([parameter.dtensor for parameter in self._trainable() if parameter.dtensor.grad is None])

    def local_grad(self, parameter: Tensor) -> Tensor | None:
        """This rank's rows of the gradient, to be read or changed in place.

        Args:
            parameter: One of the module's parameters, sharded or replicated.
        """
        sharded = self._model.by_parameter.get(parameter)
        grad = parameter.grad
        if sharded is None or grad is None:
            return grad
        return sharded.grad_local if grad is sharded.grad_dtensor else sharded.rows(grad)

    def follow_requires_grad(self) -> None:
        """Copies the parameters' ``requires_grad``, which users may change, to the leaves that graphs read."""
        with compat.reading_attributes():
            changed = [p for p in self._model.parameters if p.dtensor.requires_grad != p.leaf.requires_grad]
        for parameter in changed:
            wanted = parameter.dtensor.requires_grad
            if wanted and parameter.grad_buffer is None:
                self._add_buffer(parameter)
            parameter.leaf.requires_grad_(wanted)
            parameter.local.requires_grad_(wanted)
            for owner in parameter.owners:
                renew_leaf(owner.module, owner.name)
            self._watch(parameter)

    def _add_buffer(self, parameter: ShardedParameter) -> None:
        buffer = GradBuffer(parameter.leaf.new_empty(parameter.layout.shard_numel))
        parameter.grad_offset = 0
        buffer.add(parameter)
        self._runtime.gradients.replace(parameter.ds_id, parameter.grad_padded)
        buffer.settle()
        self._model.grad_buffers.append(buffer)

    def _trainable(self) -> list[ShardedParameter]:
        return [parameter for buffer in self._model.grad_buffers for parameter in buffer.parameters]

    def _replicated(self) -> list[nn.Parameter]:
        return [p for p in self._model.replicated if p.requires_grad and p.numel()]

    def _set_aside(self, parameter: ShardedParameter) -> None:
        """Takes the present gradient out of the accumulation; `finish` adds it to that of the pass."""
        rows = self.local_grad(parameter.dtensor)
        assert rows is not None
        self._foreign[parameter] = rows.clone() if rows is parameter.grad_local else rows
        parameter.dtensor.grad = None

    def _return(self) -> None:
        foreign, self._foreign = self._foreign, {}
        for parameter, rows in foreign.items():
            self._merge(parameter, rows)

    def _merge(self, parameter: ShardedParameter, rows: Tensor) -> None:
        present = self.local_grad(parameter.dtensor)
        if present is None:
            rows = rows.to(parameter.local.dtype)
            parameter.dtensor.grad = ShardedTensor.of(compat.with_local(cast(DTensor, parameter.dtensor), rows))
        else:
            with torch.no_grad():
                present.add_(rows)

    def _average_replicated(self) -> list[nn.Parameter]:
        """Averages gradients of parameters that are not sharded; returns the parameters that got one in this pass."""
        # Every rank takes part for every parameter, used or not: if a rank's data skipped one, the others would hang.
        stashed, self._stashed = self._stashed, {}
        averaged: list[nn.Parameter] = []
        if not stashed:
            return averaged
        with torch.no_grad():
            flats = _flat_or_zeros(stashed)
            device = next(iter(flats.values())).device
            used = torch.tensor([float(p.grad is not None) for p in stashed], device=device)
            if self._model.ranks.world_size > 1:
                try:
                    for flat in flats.values():
                        dist.all_reduce(flat, group=self._group)
                    dist.all_reduce(used, group=self._group)
                except RuntimeError as error:
                    raise RuntimeError(
                        f"Averaging the gradients of {len(stashed)} parameters that are not sharded failed on rank "
                        f"{dist.get_rank(self._group)} of {dist.get_world_size(self._group)}: {error} If another rank "
                        "failed, look at its error first."
                    ) from error
            places = dict.fromkeys(flats, 0)
            for (p, before), users in zip(stashed.items(), used.tolist(), strict=True):
                dtype, size = _summed_in(p), p.numel()
                piece = flats[dtype][places[dtype] : places[dtype] + size] / self._model.ranks.world_size
                places[dtype] += size
                grad = piece.view_as(p).to(p.dtype) if users else None
                p.grad = before if grad is None else grad if before is None else before.add_(grad)
                if users:
                    averaged.append(p)
        return averaged

    def _protect_held(self, reset: list[ShardedParameter]) -> None:
        """Preserves gradients that someone still refers to: PyTorch users expect that after ``zero_grad``.

        Args:
            reset: Parameters whose gradients are about to be overwritten or freed; their ``.grad`` is None.
        """
        buffers = {parameter.grad_buffer: None for parameter in reset if parameter.grad_buffer is not None}
        with compat.reading_attributes():
            held = [buffer for buffer in buffers if buffer.is_held()]
        for buffer in held:
            for parameter in buffer.parameters:
                if parameter.dtensor.grad is not None:
                    self._set_aside(parameter)
            buffer.renew(self._runtime)


def _nothing() -> None:
    """Does nothing."""


def _summed_in(parameter: nn.Parameter) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _flat_or_zeros(parameters: Iterable[nn.Parameter]) -> dict[torch.dtype, Tensor]:
    """The parameters' gradients one after another, by the dtype in which they are summed."""
    pieces: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.new_zeros(parameter.numel()) if parameter.grad is None else parameter.grad.reshape(-1)
        dtype = _summed_in(parameter)
        pieces.setdefault(dtype, []).append(grad.to(dtype))
    return {dtype: torch.cat(grads) for dtype, grads in pieces.items()}
