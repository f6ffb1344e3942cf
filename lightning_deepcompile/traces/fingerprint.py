"""What functions, classes and values are, in words that mean the same in another process.

Dynamo's guards compare much by address, and do not look at all at what hardly changes within a process: the methods of
classes, hooks, the standard library. Between two processes any of that may have changed.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_deepcompile.capture.dynamo_graph import CONSTANTS
from lightning_deepcompile.compat_frames import UntraceableError

__all__ = ["Fingerprints", "UnknownError"]

_PLAIN = (*CONSTANTS, bytes, range, slice)
_BUILTIN = (
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_VARIES = {
    "__dict__",
    "__weakref__",
    "__doc__",
    "__annotations__",
    "__abstractmethods__",
    "_abc_impl",
    "__module__",
    "__firstlineno__",  # since Python 3.13; a comment above moves it, and lines of functions do not count either
}
_BY_ADDRESS = re.compile(r".*_\d+_c\d+")
_CODE = "co_code", "co_names", "co_varnames", "co_cellvars", "co_freevars", "co_flags", "co_exceptiontable"


class UnknownError(UntraceableError):
    """Something has no fingerprint, so that nobody can tell whether it changed."""


class Fingerprints:
    """Makes fingerprints; looks at everything once, as it is then.

    Attributes:
        codes: All code that fingerprints cover.
    """

    def __init__(self) -> None:
        self.codes: set[types.CodeType] = set()
        self._made: dict[Any, str] = {}  # of functions, code and classes

    def value(self, value: Any) -> str:
        """Of a value that a trace depends on.

        Args:
            value: A constant, a container of constants, a module, class, function or operator, or a tensor, of which
                all is told but its content.

        Raises:
            UnknownError: For anything else.
        """
        if isinstance(value, enum.Enum):
            return f"{_name(type(value))}.{value.name}"
        if type(value) in _PLAIN:
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, tuple | list | set | frozenset | torch.Size):
            items = [self.value(item) for item in value]
            return f"{_name(type(value))}({', '.join(sorted(items) if isinstance(value, set | frozenset) else items)})"
        if isinstance(value, dict | types.MappingProxyType):
            items = [f"{self.value(key)}: {self.value(item)}" for key, item in value.items()]
            return f"{_name(type(value))}({', '.join(items)})"
        if isinstance(value, Tensor):
            return _tensor(value)
        if (known := self._definition(value)) is not None:
            return known
        raise UnknownError(f"a value of type {_name(type(value))}")

    def kind(self, kind: type) -> str:
        """Of a class: what it and its bases define in Python."""
        return " < ".join(self._class(one) for one in kind.__mro__)

    def module(self, module: types.ModuleType) -> str:
        """Of a module: the functions and classes that its names stand for."""
        words = []
        for name, value in list(vars(module).items()):
            if name.startswith("__") or _BY_ADDRESS.fullmatch(name):
                continue  # tracing adds such
            if isinstance(value, type) and value.__module__ != module.__name__:
                words.append(f"{name} {_name(value)}")
            elif (known := self._definition(value)) is not None:
                words.append(f"{name} {known}")
        return f"{module.__name__} {_digest(sorted(words))}"

    def _definition(self, value: Any) -> str | None:
        """Of what source code defines; None for other values."""
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return f"method {_name(type(value.__self__))} {self._loosely(value.__func__)}"
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, type):
            return self.kind(value)
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__} {sys.modules.get(value.__name__) is value}"
        if isinstance(value, _BUILTIN):
            owner = getattr(value, "__self__", None)
            owner = owner if isinstance(owner, type | types.ModuleType) else type(owner)
            return f"builtin {getattr(value, '__module__', None)} {value.__qualname__} {owner.__name__}"
        if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._ops.HigherOrderOperator):
            return f"operator {value}"
        if isinstance(value, staticmethod | classmethod):
            return f"{type(value).__name__} {self._loosely(value.__func__)}"
        if isinstance(value, property):
            return f"property {[self._loosely(one) for one in (value.fget, value.fset, value.fdel)]}"
        if isinstance(value, functools.cached_property):
            return f"cached {self._loosely(value.func)}"
        if isinstance(wrapped := inspect.getattr_static(value, "__wrapped__", None), types.FunctionType):
            return f"{_name(type(value))} {self._function(wrapped)}"
        return None

    def _loosely(self, value: Any) -> str:
        """Of a default, a closure's or a class's variable, which guards compare where a trace read it."""
        if type(value) in _PLAIN:
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, type):
            return _name(value)
        return self._definition(value) or _name(type(value))

    def _function(self, function: types.FunctionType) -> str:
        if function not in self._made:
            self._made[function] = f"function {function.__module__}.{function.__qualname__}"  # it may refer to itself
            defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            cells = [self._cell(cell) for cell in function.__closure__ or ()]
            wrapped = [self._loosely(value) for name, value in vars(function).items() if name == "__wrapped__"]
            words = [self._code(function.__code__), *map(self._loosely, defaults), *cells, *wrapped]
            self._made[function] = f"function {function.__module__}.{function.__qualname__} {_digest(words)}"
        return self._made[function]

    def _cell(self, cell: types.CellType) -> str:
        try:
            return self._loosely(cell.cell_contents)
        except ValueError:
            return "empty"

    def _code(self, code: types.CodeType) -> str:
        if code not in self._made:
            self.codes.add(code)
            constants = [self._constant(value) for value in code.co_consts]
            words = [repr(getattr(code, name)) for name in _CODE]
            self._made[code] = f"code {code.co_qualname} {_digest([code.co_filename, *words, *constants])}"
        return self._made[code]

    def _constant(self, value: Any) -> str:
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, frozenset):
            return f"set {sorted(map(repr, value))}"
        return f"{type(value).__name__} {value!r}"

    def _class(self, kind: type) -> str:
        if kind not in self._made:
            self._made[kind] = _name(kind)
            words = [f"{name} {self._loosely(value)}" for name, value in vars(kind).items() if name not in _VARIES]
            self._made[kind] = f"{_name(kind)} {_digest(sorted(words))}"
        return self._made[kind]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _digest(words: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(words).encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _tensor(tensor: Tensor) -> str:
    if type(tensor) not in (Tensor, nn.Parameter):
        raise UnknownError(f"a tensor of type {_name(type(tensor))}")
    words: Sequence[Any] = (
        _name(type(tensor)),
        tensor.dtype,
        tensor.device,
        tensor.layout,
        tensor.requires_grad,
        tensor.is_leaf,
        tuple(tensor.shape),
        tensor.stride() if tensor.layout is torch.strided else (),
        tensor.is_inference(),
        torch._C._dispatch_keys(tensor).raw_repr(),
        # Whether sizes vary; the other one is a mark that tracing leaves behind.
        sorted(n for n in vars(tensor) if n.startswith("_dynamo") and n != "_dynamo_static_input_type"),
    )
    return f"tensor {words}"
