"""Makes optimizers hold the module's parameters, and step on this rank's plain shards of them.

To users an optimizer looks as usual: its groups hold the tensors that ``module.parameters()`` gives, so that toggling,
freezing, adding groups and reading ``.grad`` work. While it computes, each is replaced by the plain tensor of the same
memory: elementwise arithmetic needs no more, and DTensor's dispatch would cost milliseconds of host time a step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from lightning_deepcompile import compat
from lightning_deepcompile.offload.chunks import Parts
from lightning_deepcompile.offload.states import StateOffload
from lightning_deepcompile.ranks.random_numbers import own_random_numbers
from lightning_deepcompile.sharding.checks import check_no_hooks
from lightning_deepcompile.sharding.composite import parts_of
from lightning_deepcompile.sharding.gradients import GradientSession
from lightning_deepcompile.sharding.parameter import ShardedParameter
from lightning_deepcompile.sharding.shards import ShardedModel
from lightning_deepcompile.sharding.successors import Successors
from lightning_deepcompile.step.counters import counters
from lightning_deepcompile.step.direct import DirectStep
from lightning_deepcompile.step.dtensor_steps import replicated
from lightning_deepcompile.step.owner_step import OwnerStep
from lightning_deepcompile.step.shown_states import ShownStates
from lightning_deepcompile.step.ways import OptimizerWays, Way


def take_over(optimizer: Optimizer, model: ShardedModel, successors: Successors) -> list[Tensor]:
    """Makes an optimizer that was built before the module was sharded hold the parameters that replaced its own.

    Args:
        optimizer: Its groups and its state are changed in place.
        model: The sharded model.
        successors: The new parameters.

    Returns:
        Parameters that have states; `share_states` divides these.
    """
    taken = []
    for group in optimizer.param_groups:
        for place, old in enumerate(group["params"]):
            new = successors.of(old)
            if new is None:
                continue
            group["params"][place] = new
            if old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)
                taken.append(new)
    return taken


def share_states(
    optimizer: Optimizer,
    model: ShardedModel,
    parameters: Iterable[Tensor],
    owner_of: Callable[[Tensor], int | None] | None,
) -> None:
    """Keeps this rank's part of states that every rank has: rows of states of a parameter's shape, or all on its owner.

    Args:
        optimizer: Its state is changed in place.
        model: The sharded model.
        parameters: Those whose states are divided.
        owner_of: Returns the shard rank that steps on a parameter; None, also as a whole: all ranks do, on shards.
    """
    parameters = list(parameters)
    sharded_ones = [(model.by_parameter[p], optimizer.state[p]) for p in parameters if p in model.by_parameter]
    counting = counters((sharded.layout.spec.shape, entries) for sharded, entries in sharded_ones)
    for new in parameters:
        owner, sharded = None if owner_of is None else owner_of(new), model.by_parameter.get(new)
        if owner is not None and owner != model.ranks.shard_rank:
            del optimizer.state[new]
        elif owner is None and sharded is not None:
            entries = optimizer.state[new]
            optimizer.state[new] = {
                key: value if key in counting else _rows(value, sharded) for key, value in entries.items()
            }
        elif sharded is not None:
            entries, device = optimizer.state[new], sharded.local.device
            shape = sharded.layout.spec.shape
            optimizer.state[new] = {
                key: value.to(device, copy=True) if isinstance(value, Tensor) and value.shape == shape else value
                for key, value in entries.items()
            }


def _rows(value: Any, parameter: ShardedParameter) -> Any:
    if not isinstance(value, Tensor) or value.shape != parameter.layout.spec.shape:
        return value
    return parameter.rows(value).to(parameter.local.device, copy=True)


def check_optimizer(optimizer: Optimizer, model: ShardedModel) -> None:
    """Raises for optimizers that cannot step on shards.

    Args:
        optimizer: Holds the module's (sharded) parameters.
        model: How they are sharded.

    Raises:
        ValueError: For LBFGS, for parameters that are not the module's, and for those with hooks.
    """
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            f"{type(optimizer).__name__} keeps its directions as flat vectors over all parameters, which no rank has. "
            "Use an optimizer with a state for each parameter (SGD, AdamW, Muon, ...)."
        )
    known = {*model.by_parameter, *model.replicated}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in known:
                raise ValueError(
                    f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that is not the "
                    "module's. Build optimizers in `configure_optimizers` from `self.parameters()`."
                )
            check_no_hooks(parameter, model.by_parameter[parameter].name if parameter in model.by_parameter else "")


def state_bytes(optimizer: Optimizer, device: torch.device) -> int:
    """Bytes of an optimizer's states on `device`, of this rank."""
    return sum(part.nbytes for part in _parts_of_states(optimizer) if part.device == device)


def bytes_of_states(optimizer: Optimizer) -> int:
    """Bytes of an optimizer's states, wherever they are, or would be."""
    return sum(part.nbytes for part in _parts_of_states(optimizer))


def _parts_of_states(optimizer: Optimizer) -> Iterator[Tensor]:
    for entries in optimizer.state.values():
        for value in entries.values():
            if isinstance(value, Tensor):
                yield from parts_of(value)


class LocalShards:
    """Makes an optimizer see this rank's plain shards, with their gradients, during its steps.

    Args:
        optimizer: Its groups and its state are changed in place for a step, and changed back.
        model: The sharded model.
        gradients: Has their gradients.
        ways: Decides which groups step on shards.
        after_step: Called after each step, however it was started.
        written: Called if a step has written to parameters before its end.
        around_closure: A context for a user's closure.
        parts: Divides the optimizer's steps, if they are divided.
        direct: Steps in place of the optimizer if it can; None: the optimizer steps.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: ShardedModel,
        gradients: GradientSession,
        ways: OptimizerWays,
        after_step: Callable[[], None],
        written: Callable[[], None],
        around_closure: Callable[[], AbstractContextManager[None]],
        parts: Parts | None = None,
        direct: DirectStep | None = None,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)  # whose hooks keep this object alive
        self._direct = direct
        self._model = model
        self._gradients = gradients
        self.ways = ways
        self._after_step, self._written, self._around_closure = after_step, written, around_closure
        self._parts = parts
        self._stepped = False  # with a closure: whether the step under way has called its closure
        self._inner = 0  # calls of ``super().step(closure)`` under way
        self._swapped: dict[Tensor, Tensor] = {}
        self._given: dict[Tensor, Tensor | None] = {}  # gradients, by the module's parameters
        self._own_numbers = contextlib.ExitStack()
        self._has_one_element = any(parameter.layout.spec.shape == (1,) for parameter in model.parameters)
        self._states = ShownStates(model.ranks, None if self.offload is None else self.offload.synchronize)
        self._dtensors: dict[Tensor, Tensor] = {}
        self._hooks = (
            optimizer.register_step_pre_hook(self._on_step),
            # Users' hooks must see their parameters.
            compat.run_first_after_step(optimizer, self._on_stepped),
        )

    @property
    def offload(self) -> StateOffload | None:
        """The object that steps the optimizer chunk by chunk, if its states may be offloaded."""
        return self._parts if isinstance(self._parts, StateOffload) else None

    @property
    def owner_step(self) -> OwnerStep | None:
        """The object that steps on unsharded tensors, if the optimizer's groups may have owners."""
        return self._parts if isinstance(self._parts, OwnerStep) else None

    def detach(self) -> None:
        """Stops changing the optimizer, which then holds the module's parameters."""
        if self._optimizer() is not None:
            self.restore()
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> None:
        """Makes the optimizer hold the shards of all its parameters, for work on gradients."""
        self._enter([Way.SHARDS] * len(self._held().param_groups), states=False)

    def __exit__(self, *exc_info: object) -> None:
        self.restore()

    def _enter(self, ways: Sequence[Way], *, states: bool = True) -> None:
        """Makes groups hold the tensors that they step on; those with owners keep the module's parameters.

        Args:
            ways: Of each group.
            states: Whether states are converted, too; those of owners are no rows, whatever their groups hold
                meanwhile.
        """
        self.restore()
        if Way.OWNERS in ways and self.owner_step is None:
            raise RuntimeError(
                f"A parameter group was added to {type(self._held()).__name__} that it steps on unsharded, while the "
                "states of its other groups are offloaded. Use CompileConfig(offload='none')."
            )
        for group, way in zip(self._held().param_groups, ways, strict=True):
            for parameter in group["params"]:
                sharded = self._model.by_parameter.get(parameter)
                if way is Way.DTENSORS:
                    self._swap(parameter, self._dtensor_of(parameter), self._dtensor_gradient(parameter))
                elif way is Way.SHARDS and sharded is not None:
                    self._swap(parameter, sharded.local, self._gradients.local_grad(parameter))
        self._exchange(self._swapped, states=states)
        state = self._held().state
        for parameter, replacement in self._swapped.items():
            if replacement in state:
                sharded = self._model.by_parameter.get(parameter)
                if isinstance(replacement, DTensor):
                    self._states.show_all(sharded, state[replacement])
                elif sharded is not None:
                    self._states.hide(sharded, state[replacement])
        ranks = self._model.ranks
        # On DTensors ranks step together, and must decide alike by the numbers that they draw.
        if states and ranks.shards > 1 and Way.DTENSORS not in ways and self.ways.draws:
            device = self._model.parameters[0].leaf.device
            self._own_numbers.enter_context(own_random_numbers(ranks.shard_rank, device))

    def _swap(self, parameter: Tensor, replacement: Tensor, gradient: Tensor | None) -> None:
        replacement.grad = gradient
        self._swapped[parameter] = replacement
        self._given[parameter] = gradient

    def _dtensor_of(self, parameter: Tensor) -> Tensor:
        """The DTensor, of the same memory, that a group holds in a parameter's place."""
        if parameter not in self._dtensors:
            own = parameter if isinstance(parameter, DTensor) else replicated(parameter, self._model.ranks)
            self._dtensors[parameter] = compat.AssignableDTensor.like(own)
        return self._dtensors[parameter]

    def _dtensor_gradient(self, parameter: Tensor) -> Tensor | None:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):  # of PyTorch's class, as the class was tested on, and compilers expect
            return compat.with_local(gradient, compat.local_of(gradient))
        return None if gradient is None else replicated(gradient, self._model.ranks)

    @contextlib.contextmanager
    def calling(self, after: Callable[[], None]) -> Iterator[None]:
        """Returns a context for a method of the optimizer's class other than `step`: it sees the tensors of `step`.

        Args:
            after: Called when the method has returned, unless `step` called it.
        """
        if self._swapped:  # called by `step`
            yield
            return
        self._enter(self.ways.ways())
        try:
            yield
        finally:
            self.restore()
        self._share_draws()
        after()

    def show_states(self) -> None:
        """Converts states that were loaded as this rank's rows to DTensors."""
        state = self._held().state
        self._learn_counters()
        for group, way in zip(self._held().param_groups, self.ways.ways(), strict=True):
            for parameter in group["params"] if way is not Way.OWNERS else ():
                sharded = self._model.by_parameter.get(parameter)
                if sharded is not None and parameter in state:
                    self._states.show(sharded, state[parameter])

    def restore(self) -> None:
        """Restores the parameters; does nothing if they are in place, so it also cleans up after an error."""
        self._own_numbers.close()
        if self._parts is not None:
            self._parts.restore()
        if self._direct is not None:
            self._direct.restore()
        if not self._swapped:
            return
        swapped, self._swapped = self._swapped, {}
        given, self._given = self._given, {}
        self._exchange({replacement: parameter for parameter, replacement in swapped.items()})
        state = self._held().state
        self._learn_counters()
        cleared: list[Tensor] = []
        for parameter, replacement in swapped.items():
            sharded = self._model.by_parameter.get(parameter)
            if sharded is not None:
                if replacement is sharded.local:
                    sharded.keep_in_place()
                if parameter in state:
                    self._states.show(sharded, state[parameter])
            elif parameter in state:
                self._states.hide_replicated(state[parameter])
            gradient, replacement.grad = replacement.grad, None
            if gradient is None and given[parameter] is not None:
                parameter.grad = None
                cleared.append(parameter)
            elif gradient is not None and gradient is not given[parameter]:
                parameter.grad = self._as_gradient(gradient, sharded)
        self._states.forget_hidden()
        if cleared:  # by the class
            self._gradients.forget(cleared)

    def _learn_counters(self) -> None:
        if self._has_one_element:
            sharded = ((self._model.by_parameter.get(p), entries) for p, entries in self._held().state.items())
            self._states.learn((parameter, entries) for parameter, entries in sharded if parameter is not None)

    def _as_gradient(self, gradient: Tensor, sharded: ShardedParameter | None) -> Tensor:
        if sharded is None:
            return compat.full_tensor(gradient) if isinstance(gradient, DTensor) else gradient
        return gradient if isinstance(gradient, DTensor) else sharded.distribute(gradient)

    def _on_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs["closure"] if "closure" in kwargs else args[1] if len(args) > 1 else None
        if self._is_part(closure):
            self._inner += 1
            return None
        self._inner = 0
        needs_closure = self._usable is not None or (self._parts is not None and self._parts.needs_closure)
        if closure is None and not needs_closure:
            self._enter(self.ways.ways())
            if self._parts is not None:
                self._parts.begin(*args[1:], **{key: value for key, value in kwargs.items() if key != "closure"})
            return None
        self._stepped = False
        # An optimizer calls its closure before it looks at its groups. So the closure makes it see shards, and, in
        # parts, steps all parts but the last: after the hooks that may follow this one.
        if "closure" in kwargs or len(args) < 2:
            rest = {key: value for key, value in kwargs.items() if key != "closure"}
            return args, {**rest, "closure": _Closure(self, closure, args[1:], rest)}
        return (args[0], _Closure(self, closure, (None, *args[2:]), kwargs), *args[2:]), kwargs

    def _run(self, closure: Callable[[], Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the user's closure, and makes the optimizer see shards."""
        if self.offload is not None and self._stepped:
            raise RuntimeError(
                f"{type(self._held()).__name__} evaluates its closure more than once in a step, so its states cannot "
                "be offloaded. Use CompileConfig(offload='none')."
            )
        # It runs the forward and the backward pass and users' hooks, which must see the parameters.
        self.restore()
        if self._stepped:
            self._written()  # an evaluation elsewhere, as SAM's
        result = None
        if closure is not None:
            with self._around_closure():
                result = closure()
        self._stepped = True
        direct = self._usable if not kwargs and all(a is None for a in args) else None
        if direct is not None and direct.begin():
            return result
        ways = self.ways.ways()
        if Way.DTENSORS in ways:
            result = self._mean(result)  # a class that looks at it shall see the same on all ranks
        self._enter(ways)
        if self._parts is not None:
            self._parts.begin(*args, **kwargs)
        return result

    @property
    def _usable(self) -> DirectStep | None:
        # A user's `torch.compile(optimizer.step)` must contain the class's step.
        return None if torch.compiler.is_compiling() else self._direct

    def _is_part(self, closure: Any) -> bool:
        """Returns whether a call of `step` comes from one that is under way, as in ``super().step(closure)``."""
        return isinstance(closure, _Closure) or (self._parts is not None and self._parts.stepping)

    def _on_stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inner:
            self._inner -= 1  # the code after ``super().step`` is part of the step, too
            return
        if self.offload is not None and not self._stepped:
            raise RuntimeError(
                f"{type(optimizer).__name__} does not call the closure that its `step` is given, so its states cannot "
                "be offloaded. Use CompileConfig(offload='none')."
            )
        if self._parts is not None:
            self._parts.finish()
        self.restore()
        self._share_draws()
        self._after_step()

    @torch.no_grad()
    def _share_draws(self) -> None:
        """Gives all ranks that have stepped on a tensor the first one's result, if steps draw random numbers."""
        if not self.ways.draws:
            return
        ranks = self._model.ranks
        for parameter in (parameter for group in self._held().param_groups for parameter in group["params"]):
            sharded = self._model.by_parameter.get(parameter)
            own, group = (parameter, ranks.group) if sharded is None else (sharded.local, ranks.replica_group)
            if group is not None and own.numel():
                first = own.detach().clone()  # shards may live in host memory
                dist.broadcast(first, group=group, group_src=0)
                own.copy_(first)

    def _mean(self, result: Any) -> Any:
        """Returns the mean of what the ranks' closures return, over those that return a number; anything else as is."""
        loss = result.detach().double() if isinstance(result, Tensor) and result.numel() == 1 else None
        device = self._model.parameters[0].leaf.device
        told = torch.zeros(2, dtype=torch.float64, device=device)  # on all ranks, whatever a closure returns
        if loss is not None:
            told[0], told[1] = loss.sum(), 1
        dist.all_reduce(told, group=self._model.ranks.group)
        return result if loss is None else (told[0] / told[1]).to(result.device, result.dtype).view(result.shape)

    def _held(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None  # it is stepping
        return optimizer

    def _exchange(self, replacements: dict[Tensor, Tensor], *, states: bool = True) -> None:
        optimizer = self._held()
        for group in optimizer.param_groups:
            group["params"][:] = [replacements.get(p, p) for p in group["params"]]
        state = optimizer.state
        for parameter, replacement in replacements.items() if states else ():
            if parameter in state:
                state[replacement] = state.pop(parameter)


class _Closure:
    """The closure that an optimizer calls before it looks at its groups."""

    def __init__(
        self, shards: LocalShards, closure: Callable[[], Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._shards, self._closure, self._args, self._kwargs = shards, closure, args, kwargs

    def __call__(self) -> Any:
        return self._shards._run(self._closure, self._args, self._kwargs)
