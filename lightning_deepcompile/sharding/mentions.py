"""Finds the names that a step's code mentions, from its bytecode, to decide before it runs what must not be compiled.

Some code would mean something else when compiled, and nothing would tell: a gradient that is differentiated, modules
called with other tensors in place of their parameters, a ``deque`` of bounded length. Its names reveal it.
"""

from __future__ import annotations

import dis
import inspect
import os
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL")
_READERS = ("item", "tolist", "cpu", "numpy", "float", "int", "bool")
"""What reads numbers from a tensor, for which Dynamo ends a graph."""

_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")  # packages may be within
_LIBRARIES = frozenset({"torch", "lightning", "pytorch_lightning", "torchmetrics", "lightning_deepcompile"})


@dataclass
class Mentions:
    """The names mentioned by some functions and those that they call.

    Attributes:
        names: Global names, attributes and methods.
        keywords: Names of keyword arguments in calls.
        used: Attributes that are read for anything but a call of their ``append``.
        appended: Attributes of which ``append`` is called.
        transforms: Whether functions of ``torch.func`` are among them.
        gradients: Functions that read or set an attribute ``grad``.
        broken_texts: Functions with an f-string that reads a tensor behind a part that is formatted already.
    """

    names: set[str] = field(default_factory=set)
    keywords: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    appended: set[str] = field(default_factory=set)
    transforms: bool = False
    gradients: set[types.CodeType] = field(default_factory=set)
    broken_texts: set[types.CodeType] = field(default_factory=set)

    @property
    def only_appended(self) -> set[str]:
        """Attributes that are appended to and not used otherwise."""
        return self.appended - self.used


def mentions_of(module: nn.Module, step: Callable[..., Any]) -> Mentions:
    """Finds the names in `step`, a method of `module`, and in all code of the module, its children and its helpers."""
    methods: dict[str, list[types.FunctionType]] = {}
    kinds = {kind for child in module.modules() for kind in type(child).__mro__ if issubclass(kind, nn.Module)}
    users = (kind for kind in kinds if _is_own(kind.__module__))
    for kind in sorted(users, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}"):
        for name, value in vars(kind).items():
            if (function := _function(value)) is not None:
                methods.setdefault(name, []).append(function)
    return mentions([step, *methods.get("forward", [])], methods)


def mentions(
    functions: Iterable[Callable[..., Any]], methods: dict[str, list[types.FunctionType]] | None = None
) -> Mentions:
    """Finds the names that `functions` mention, including users' functions that they name.

    Args:
        functions: The first functions to read.
        methods: Methods by name: a mentioned method counts as called.
    """
    found, seen = Mentions(), set()
    pending = [function for one in functions if (function := _function(one)) is not None]
    while pending:
        function = pending.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        for code in _codes(function.__code__):
            _read(code, found)
            if _has_to_do_with_gradients(code):
                found.gradients.add(function.__code__)
            if _breaks_a_text(code):
                found.broken_texts.add(code)
            for called in _called(function, code, methods or {}):
                if _is_of_python(called):
                    continue
                if _is_own(called.__module__):
                    pending.append(called)
                else:
                    found.transforms |= called.__module__.startswith("torch._functorch")
    return found


def _called(
    function: types.FunctionType, code: types.CodeType, methods: dict[str, list[types.FunctionType]]
) -> Iterator[types.FunctionType]:
    closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    scope = {**function.__globals__, **{name: cell.cell_contents for name, cell in closure if _is_full(cell)}}
    for name in (*code.co_names, *code.co_freevars):
        yield from methods.get(name, ())
        value = scope.get(name)
        candidates = [value]
        if inspect.ismodule(value) and _is_own(value.__name__):
            candidates += [vars(value).get(other) for other in code.co_names]
        for candidate in candidates:
            found = _function(candidate)
            if found is not None and found.__module__ is not None:
                yield found


def _read(code: types.CodeType, found: Mentions) -> None:
    found.names.update(code.co_names)
    for constant in code.co_consts:  # the names of a call's keyword arguments are one constant
        if isinstance(constant, tuple) and constant and all(isinstance(item, str) for item in constant):
            found.keywords.update(constant)
    attribute = None
    for instruction in dis.get_instructions(code):
        name = instruction.argval if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") else None
        if name == "vmap" or (attribute == "func" and name is not None and hasattr(torch.func, name)):
            found.transforms = True
        if attribute is not None:
            (found.appended if name == "append" else found.used).add(attribute)
        if instruction.opname in ("STORE_ATTR", "DELETE_ATTR"):
            found.used.add(instruction.argval)
        attribute = name


def _has_to_do_with_gradients(code: types.CodeType) -> bool:
    before = None
    for instruction in dis.get_instructions(code):
        name = instruction.argval if instruction.opname.endswith(("_ATTR", "_METHOD", "_GLOBAL")) else None
        if name == "grad" and not instruction.opname.endswith("_GLOBAL") and before not in ("autograd", "func"):
            return True
        before = name
    return False


def _breaks_a_text(code: types.CodeType) -> bool:
    formatted = False
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("FORMAT_"):
            formatted = True
        elif instruction.opname == "BUILD_STRING":
            formatted = False
        elif formatted and instruction.opname in _LOADS and instruction.argval in _READERS:
            return True
    return False


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _function(value: Any) -> types.FunctionType | None:
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)
    while hasattr(value, "__wrapped__"):
        value = getattr(value.__wrapped__, "__func__", value.__wrapped__)
    return value if isinstance(value, types.FunctionType) else None


def _is_own(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] not in _LIBRARIES


def _is_of_python(function: types.FunctionType) -> bool:
    """Returns whether the standard library has this function: a step's tensors do not depend on its code."""
    file = function.__code__.co_filename
    return file.startswith((_PYTHON, "<frozen ")) and "-packages" not in file


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a function that is being defined
        return False
    return True
