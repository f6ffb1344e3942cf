"""Keeps calls in a compiled step that run on the host out of its graphs.

A step with ``automatic_optimization = False`` calls the optimizer and the backward pass itself. Dynamo must not trace
them: they belong to the host. Each loss between them is still one graph, with its model, also in a closure that an
optimizer calls.

A metric that is called keeps its state in lists and attributes, which it removes and restores in every call: as part of
a graph some results are wrong (``MeanMetric()(loss)``), and each metric is compiled by itself many times.

``self.all_gather`` is PyTorch's differentiable one, which cannot be compiled: Dynamo would leave the step uncompiled.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from lightning_deepcompile import compat

_TOGGLES = ("toggle_optimizer", "untoggle_optimizer")
_METRIC_CALLS = ("forward", "update", "compute")
_CALLS = ("manual_backward", "optimizers", "lr_schedulers", "clip_gradients", *_TOGGLES)


class HostOptimizer(LightningOptimizer):
    """An optimizer as ``self.optimizers()`` returns it; Dynamo traces neither its step nor other methods of the class.

    It does trace a closure that a step is given. Methods of the class that are not PyTorch's, such as SAM's
    ``first_step``, see parameters in the same form as its step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        for name in _own_methods(type(optimizer)):
            vars(self)[name] = _untraced(functools.partial(self._call, name))

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        strategy: Any = self._strategy
        may_step = not strategy.lightning_module.automatic_optimization  # else `step` alone is one
        with strategy.engine.calling(self._optimizer, may_step=may_step):
            return getattr(self._optimizer, name)(*args, **kwargs)

    @torch.compiler.disable(recursive=False)
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Steps the optimizer; see `LightningOptimizer.step`."""
        with compat.without_dynamo() as traced:
            return super().step(traced(closure) if callable(closure) else closure, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the gradients, also those that accumulate whole until the last batch; see `Optimizer.zero_grad`."""
        self._optimizer.zero_grad(set_to_none)
        strategy: Any = self._strategy
        engine = strategy.engine
        if engine.gradients.holds_back:
            engine.gradients.forget(p for group in self._optimizer.param_groups for p in group["params"])


def _own_methods(kind: type[Optimizer]) -> list[str]:
    """Returns the names of public methods that PyTorch's base class of optimizers does not have."""
    bases = kind.__mro__[: kind.__mro__.index(Optimizer)]
    names = {name: None for base in bases for name, value in vars(base).items() if inspect.isfunction(value)}
    return [name for name in names if not name.startswith("_") and not hasattr(Optimizer, name)]


class HostCalls:
    """Keeps calls of optimizers and metrics, and of ``self.all_gather``, out of a LightningModule's graphs.

    One per module, as Dynamo guards on functions.

    Args:
        module: The LightningModule.
        after_toggle: Called when ``requires_grad`` of parameters may have changed.
    """

    def __init__(self, module: pl.LightningModule, after_toggle: Callable[[], None]) -> None:
        self._module = module
        self._calls = {name: _untraced(getattr(module, name)) for name in _CALLS}
        self._calls |= {name: _untraced(getattr(module, name), after_toggle) for name in _TOGGLES}
        self._steps: weakref.WeakKeyDictionary[Any, _StepOutside] = weakref.WeakKeyDictionary()
        # Under automatic optimization, too; of the modules inside.
        self._others: list[tuple[nn.Module, dict[str, Callable[..., Any]]]] = []
        for child in module.modules():
            if isinstance(child, Metric | MetricCollection):
                self._others.append((child, {name: _untraced(getattr(child, name)) for name in _METRIC_CALLS}))
            elif isinstance(child, pl.LightningModule):
                self._others.append((child, {"all_gather": _untraced(child.all_gather)}))

    @contextlib.contextmanager
    def outside_graphs(self, stepping: Iterable[Any]) -> Iterator[None]:
        """Keeps calls outside of graphs during a step; those of optimizers only under manual optimization.

        Args:
            stepping: The module's optimizers, as they are without Lightning's wrapper, and its schedulers.
        """
        manual = not self._module.automatic_optimization
        places = [(self._module, self._calls), *self._others] if manual else self._others
        before = [{name: vars(owner)[name] for name in calls if name in vars(owner)} for owner, calls in places]
        for owner, calls in places:
            vars(owner).update(calls)
        try:
            with contextlib.ExitStack() as steps:
                for one in stepping if manual else ():
                    if one not in self._steps:
                        self._steps[one] = _StepOutside()
                    steps.enter_context(self._steps[one].of(one))
                yield
        finally:
            for (owner, calls), own in zip(places, before, strict=True):
                for name in calls:
                    vars(owner).pop(name, None)
                vars(owner).update(own)


class _StepOutside:
    """Keeps calls of an object's `step` outside of graphs, but for the closure that it is given."""

    def __init__(self) -> None:
        self._replaced = replaced = list[Callable[..., Any]]()  # the object may not be held by what is kept for it

        @torch.compiler.disable(recursive=False)
        def step(*args: Any, **kwargs: Any) -> Any:
            with compat.without_dynamo() as traced:
                if args and callable(args[0]):
                    args = (traced(args[0]), *args[1:])
                elif callable(kwargs.get("closure")):
                    kwargs["closure"] = traced(kwargs["closure"])
                return replaced[-1](*args, **kwargs)

        self._step = compat.counted_step(step)

    @contextlib.contextmanager
    def of(self, stepping: Any) -> Iterator[None]:
        """Returns a context in which this is the step of `stepping`."""
        own = vars(stepping)
        before = own.get("step")  # schedulers put theirs on optimizers
        if before is self._step:  # a step within a step
            yield
            return
        self._replaced.append(stepping.step)
        own["step"] = self._step
        try:
            yield
        finally:
            self._replaced.pop()
            if before is None:
                own.pop("step", None)
            else:
                own["step"] = before


def _untraced(call: Callable[..., Any], then: Callable[[], None] | None = None) -> Callable[..., Any]:
    @torch.compiler.disable
    def run(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if then is not None:
            then()
        return result

    return run
