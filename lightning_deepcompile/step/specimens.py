"""Copies of an optimizer that step on small tensors while they are watched."""

from __future__ import annotations

import copy
import inspect
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_deepcompile import compat

_LEAST_RATE = 0.05  # schedulers begin with 0, which reveals nothing about a class


class CannotCopy(Exception):
    """An optimizer cannot be copied."""


class Communicates(Exception):
    """An optimizer's step communicates by itself."""


@dataclass(eq=False)
class Specimen:
    """A small tensor that stands for a parameter.

    Args:
        parameter: The parameter, as the optimizer holds it.
        group: Index of the parameter's group.
        shape: Of the small tensor.
        number: Of the specimen.
    """

    parameter: Tensor
    group: int
    shape: tuple[int, ...]
    number: int


@dataclass
class OperationRecord:
    """A record of the operations of steps.

    Attributes:
        operations: Names of the operations, in order.
        draws: Numbers of elements that random operations drew.
    """

    operations: list[str] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)


class _Operations(compat.TorchDispatchMode):
    """Records operations, refuses communication, and replaces random numbers by constants: runs are to be compared."""

    def __init__(self, watch: OperationRecord) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise Communicates(str(func))
        self._watch.operations.append(str(func))
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(result, Tensor):
            self._watch.draws.append(result.numel())
            _make_constant(result, func, args)
        return result


class _Addresses(TorchFunctionMode):
    """Refuses to return addresses of tensors without memory: a kernel would read there."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "data_ptr" and args and args[0].is_meta:
            raise RuntimeError("reads the address of a tensor without memory")
        return func(*args, **(kwargs or {}))


def _make_constant(drawn: Tensor, func: Any, args: tuple[Any, ...]) -> None:
    if drawn.is_meta or drawn.numel() == 0:
        return
    name = func.name()
    if "randperm" in name:
        drawn.copy_(torch.arange(drawn.numel(), device=drawn.device))
    elif drawn.is_floating_point() and "bernoulli" not in name:
        drawn.fill_(0.5)
    elif "randint" in name:
        limits = [arg for arg in args if isinstance(arg, int)]
        drawn.fill_(sum(limits[:2]) // 2)
    else:
        drawn.fill_(1)


@contextmanager
def watched(device: torch.device, watch: OperationRecord | None) -> Iterator[None]:
    """Records operations inside, uncompiled; the process's later random numbers do not change.

    Args:
        device: Where tensors are.
        watch: The record. None: tensors are DTensors, whose operations communicate.

    Raises:
        RuntimeError: If random numbers were drawn outside of PyTorch.
    """
    before = random.getstate()
    cuda = [device.index] if device.type == "cuda" and device.index is not None else []
    with torch.random.fork_rng(cuda), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        if watch is None:
            yield
        else:
            with _Addresses(), _Operations(watch):
                yield
    if random.getstate() != before:
        random.setstate(before)
        raise RuntimeError("it draws random numbers outside of PyTorch")


class Copy:
    """A copy of an optimizer, with its hyperparameters, that holds small tensors.

    Args:
        optimizer: The original, which does not change.
        tensors: The tensors of the copy's groups in place of parameters; other parameters are dropped.
        keep_states: Keep states that the original has, of the small tensors' shapes.

    Raises:
        CannotCopy: If it cannot be copied; says why.
    """

    def __init__(self, optimizer: Optimizer, tensors: Mapping[Tensor, Tensor], *, keep_states: bool = False) -> None:
        self.tensors = dict(tensors)
        memo: dict[int, Any] = {}
        for group in optimizer.param_groups:
            for value in group.values():
                if isinstance(value, compat.FakeTensor):  # a rate that was made without values: any will do
                    memo[id(value)] = torch.ones(value.shape, dtype=value.dtype)
            for parameter in group["params"]:
                memo[id(parameter)] = self.tensors.get(parameter)
                if memo[id(parameter)] is None:  # deepcopy would take None for an object that it does not know
                    memo[id(parameter)] = torch.ones(
                        (1,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device
                    )
        try:
            self.optimizer = _copied(optimizer, self.tensors, memo, keep_states)
        except Exception as error:
            raise CannotCopy(named(error)) from error
        if callable(train := getattr(self.optimizer, "train", None)):
            train()  # averaging classes step only in this mode
        parameters = inspect.signature(type(optimizer).step).parameters
        self._takes_closure = "closure" in parameters
        self.closure_calls = 0

    def step(self, set_gradients: Callable[[], None], loss: Tensor) -> None:
        """Steps once.

        Args:
            set_gradients: Sets the gradients of the tensors, by the values that they have.
            loss: What a closure returns.
        """
        calls = 0

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            with torch.no_grad():
                set_gradients()
            return loss.clone()

        step: Callable[..., Any] = type(self.optimizer).step
        step = getattr(step, "__wrapped__", step)  # without hooks
        if self._takes_closure:
            step(self.optimizer, closure=closure)
        else:
            closure()
            calls = 0
            step(self.optimizer)
        self.closure_calls = max(self.closure_calls, calls)

    def counters(self) -> dict[str, float]:
        """Returns all numbers that the copy keeps, by their places."""
        return {path: float(value) for path, _, _, value in self._numbers()}

    def advance(self, steps: Mapping[str, float]) -> None:
        """Adds to numbers that the copy keeps.

        Args:
            steps: How much, by place.
        """
        for path, container, key, value in self._numbers():
            if path in steps:
                if isinstance(value, Tensor):
                    value.add_(steps[path] if value.is_floating_point() else int(steps[path]))
                else:
                    container[key] = type(value)(value + steps[path])

    def integers(self) -> set[int]:
        """Returns whole numbers among the settings of the copy."""
        found = {value for _, _, _, value in self._numbers() if type(value) is int}
        return found | {int(v) for _, _, _, v in self._numbers() if type(v) is float and v.is_integer()}

    def _numbers(self) -> list[tuple[str, Any, Any, Any]]:
        found: list[tuple[str, Any, Any, Any]] = []
        skipped = {id(tensor) for tensor in self.tensors.values()}
        _collect(self.optimizer, "", found, skipped, set())
        return found


def _copied(optimizer: Optimizer, tensors: Mapping[Tensor, Tensor], memo: dict[int, Any], keep: bool) -> Optimizer:
    known = memo.get(id(optimizer))
    if known is not None:
        return known  # type: ignore[no-any-return]
    kind = type(optimizer)
    new = kind.__new__(kind)
    memo[id(optimizer)] = new
    # Groups and states by hand: there may be gigabytes of states. Wrappers share groups with the optimizer that they
    # wrap.
    for group in optimizer.param_groups:
        if id(group) in memo:
            continue
        settings = {key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"}
        if "lr" in settings:
            settings["lr"] = _rate(settings["lr"])
        memo[id(group)] = {**settings, "params": [tensors[p] for p in group["params"] if p in tensors]}
    if id(optimizer.param_groups) not in memo:
        memo[id(optimizer.param_groups)] = [memo[id(group)] for group in optimizer.param_groups]
    if id(optimizer.state) not in memo:
        state: defaultdict[Any, Any] = defaultdict(dict)
        for parameter, entries in optimizer.state.items() if keep else ():
            if isinstance(parameter, Tensor) and parameter in tensors:
                state[tensors[parameter]] = {k: _small(v, parameter, tensors[parameter]) for k, v in entries.items()}
            elif not isinstance(parameter, Tensor):
                state[parameter] = copy.deepcopy(entries, memo)
        memo[id(optimizer.state)] = state
    own = vars(optimizer)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if name in own:
            memo[id(own[name])] = OrderedDict()  # users' hooks are meant for real steps
    for value in own.values():
        inner = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else (value,)
        for one in inner:
            if isinstance(one, Optimizer):
                _copied(one, tensors, memo, keep)
            elif isinstance(one, nn.Module):
                raise TypeError(f"it keeps a module ({type(one).__name__})")
    for name, value in own.items():
        if name != "step":  # schedulers put a function of the original there
            vars(new)[name] = copy.deepcopy(value, memo)
    return new


def _rate(rate: Any) -> Any:
    if isinstance(rate, Tensor):
        return rate.clamp(min=_LEAST_RATE)
    return max(rate, _LEAST_RATE) if isinstance(rate, float | int) else rate


def _small(value: Any, parameter: Tensor, small: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    local = value.to_local() if isinstance(value, DTensor) else value
    if value.dim() == 0:
        return local.detach().clone()
    of_parameter = value.shape[1:] == parameter.shape[1:] and value.dim() == parameter.dim()
    if not of_parameter:
        return local.detach().clone()
    first = local.reshape(-1)[:1].tolist()
    return torch.full_like(small, first[0] if first else 0, dtype=value.dtype, requires_grad=False)


def _collect(value: Any, path: str, found: list[Any], skipped: set[int], seen: set[int], depth: int = 0) -> None:
    if depth > 6 or id(value) in skipped or id(value) in seen:
        return
    entries: Any = ()
    if isinstance(value, Optimizer):
        entries = [(vars(value), name, one) for name, one in vars(value).items()]
    elif isinstance(value, dict):
        entries = [(value, key, one) for key, one in value.items()]
    elif isinstance(value, list):
        entries = [(value, key, one) for key, one in enumerate(value)]
    if entries:
        seen.add(id(value))
    for number, (container, key, one) in enumerate(entries):
        name = f"{path}/{key if isinstance(key, str | int) else number}"
        if isinstance(one, bool):
            continue
        if isinstance(one, int | float):
            found.append((name, container, key, one))
        elif isinstance(one, Tensor):
            if type(one) is Tensor and one.numel() == 1 and not one.is_meta and id(one) not in skipped:
                found.append((name, container, key, one))
        else:
            _collect(one, name, found, skipped, seen, depth + 1)


def named(error: Exception) -> str:
    """Returns an error in one line; if it has no text, that of its cause."""
    told: BaseException = error
    while not str(told).strip() and (before := told.__cause__ or told.__context__) is not None:
        told = before
    return f"{type(told).__name__}: {(str(told).strip().splitlines() or [''])[0]}"
