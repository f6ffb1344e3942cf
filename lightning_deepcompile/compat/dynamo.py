"""Dynamo: selects the frames that it compiles, and reads its messages and graphs.

Seen to work with torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, fx
from torch._dynamo.utils import get_metrics_context

__all__ = [
    "ENTER_AUTOCAST",
    "EXIT_AUTOCAST",
    "LOG_USE",
    "SET_GRADIENTS",
    "GraphReasons",
    "INNER_CALL",
    "called_by",
    "compile_failures",
    "describe_error",
    "held_weakly",
    "is_checkpoint",
    "is_exporting",
    "mark_dynamic",
    "never_code",
    "never_frames",
    "reasons_of",
    "root_cause",
    "step_settings",
    "unguarded",
    "with_own_code",
    "without_dynamo",
]

P = ParamSpec("P")
R = TypeVar("R")

INNER_CALL = "_compiled_call_impl"
"""A module's attribute: what a call of the module runs if it is not None, and what Dynamo does not look at."""


_DEFAULT_LIMIT, _LIMIT = 8, 16
"""Compilations of one function, before it is given up: PyTorch's default, and what replaces it, as a step meets batches
of several sizes, micro-batches and evaluation."""


def step_settings(*, falls_back: bool, follows: bool) -> contextlib.AbstractContextManager[None]:
    """Dynamo's settings around a compiled step; to be made once, and entered for every step.

    Integers on modules (``self.global_step``) become inputs instead of guards. A function that cannot be compiled, or
    that was compiled too often, runs as it is: see `compile_failures`. Backward graphs are compiled with their forward
    graphs, so that a failure comes before anything has run. Messages that loggers emit once (Transformers'
    ``warning_once``) do not break graphs: they are dropped.

    Making one costs time, and memory that PyTorch 2.13 never frees.

    A function may be compiled 16 times, or as often as ``torch._dynamo.config.recompile_limit`` says if it was changed.

    Args:
        falls_back: Whether functions that cannot be compiled run as they are; else that is an error.
        follows: Whether attributes of a module are written to whenever one of its parameters is frozen, or trained
            again. PyTorch 2.11 would not notice otherwise, and looks at every tensor in every step where it must not
            rely on it.
    """
    limit = torch._dynamo.config.recompile_limit
    return torch._dynamo.config.patch(
        recompile_limit=_LIMIT if limit == _DEFAULT_LIMIT else limit,
        allow_unspec_int_on_nn_module=True,
        skip_tensor_guards_with_matching_dict_tags=follows,
        suppress_errors=falls_back,
        fail_on_recompile_limit_hit=not falls_back,
        ignore_logging_functions=_Ignored(torch._dynamo.config.ignore_logging_functions),
    )


class _Ignored(list[Callable[..., Any]]):
    """The functions that Dynamo ignores: the user's, and cached functions that log once (``..._once``).

    Not a set: PyTorch 2.11 writes its settings as JSON, and fails at sets of functions.
    """

    def __contains__(self, function: object) -> bool:
        said_once = hasattr(function, "cache_info") and getattr(function, "__name__", "").endswith("_once")
        return said_once or super().__contains__(function)


_CONVERTED_NOT = re.compile(r"WON'T CONVERT (?P<name>\S+) (?P<file>.*) line (?P<line>\d+)")


_HIT_LIMIT = re.compile(
    r"hit config\.\w+ \((?P<limit>\d+)\)\s+function: '(?P<name>[^']*)' \((?P<place>.*)\)\s+last reason: (?P<reason>.*)"
)


def unguarded(codes: frozenset[types.CodeType]) -> Callable[[Sequence[Any]], list[bool]]:
    """Returns a ``guard_filter_fn`` for ``torch.compile(options=...)``: drops guards on functions that never change.

    Args:
        codes: Of the functions. What their closures hold is not guarded either.
    """

    def keep(guards: Sequence[Any]) -> list[bool]:
        # With a filter Dynamo builds guards twice, and asserts that both find the same objects. Those that a property
        # makes on each read are others, and the first ones are still alive.
        for guard in guards:
            guard.orig_guard.obj_weakref = None
        found = {g.name for g in guards if isinstance(g.value, types.FunctionType) and g.value.__code__ in codes}
        return [_function_of(g.name) not in found for g in guards]

    return keep


def _function_of(name: str) -> str:
    """The function that a guard is on: for something that a property's function holds, that function."""
    function, found, _ = name.partition(".fget.")
    return f"{function}.fget" if found else name


def is_exporting() -> bool:
    """Returns whether `torch.export` traces, in code that Dynamo traces, too.

    Dynamo of PyTorch 2.11 takes `torch.compiler.is_exporting` for true in every frame; the flag behind it is right.
    """
    return torch.compiler._is_exporting_flag


class _Failures(logging.Filter):
    """Intercepts Dynamo's log messages about functions that it leaves uncompiled."""

    def __init__(self, tell: Callable[[str, str, str | BaseException], None]) -> None:
        super().__init__()
        self._tell = tell

    def filter(self, record: logging.LogRecord) -> bool:
        if found := _CONVERTED_NOT.match(record.getMessage()):
            error = record.exc_info[1] if record.exc_info else None
            if record.levelno < logging.WARNING:
                return True  # a graph break where Dynamo cannot go on
            self._tell(found["name"], f"{found['file']}:{found['line']}", error or "Dynamo gave no reason")
            return False
        if found := _HIT_LIMIT.search(record.getMessage()):
            self._tell(found["name"], found["place"], f"compiled more than {found['limit']} times: {found['reason']}")
            return False
        return True


@contextlib.contextmanager
def compile_failures(tell: Callable[[str, str, str | BaseException], None]) -> Iterator[None]:
    """Reports functions that Dynamo leaves uncompiled in this context; Dynamo says so only in its log.

    Args:
        tell: Called with a function's name, ``file:line`` and the error, or the reason. What it raises ends the step.
    """
    log, failures = logging.getLogger("torch._dynamo.convert_frame"), _Failures(tell)
    log.addFilter(failures)
    try:
        yield
    finally:
        log.removeFilter(failures)


def root_cause(error: BaseException) -> BaseException:
    """The error that Dynamo wrapped in its own."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    return error


_MET_BY_TRACING = re.compile(r"with fake tensors: .*?: got (\w+)\(['\"](.+?)['\"]\)", re.DOTALL)
"""An operator's own error, in the text of the one that Dynamo raises instead."""


def describe_error(error: BaseException) -> str:
    """Returns the kind and the first line of an error, or of the operator's error that is only quoted in it."""
    if found := _MET_BY_TRACING.search(str(error)):
        return f"{found[1]}: {found[2]}"
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def with_own_code(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a copy of a method whose compilations are counted, and cached, apart from those of the original's code.

    Dynamo keeps what it compiled with the code object. Without this, every model of a class, and every training run in
    a process, would use up the recompile limit of the others, and slow their guards down.

    Args:
        method: A bound method, or a function, written in Python; anything else is returned as it is.
    """
    function = getattr(method, "__func__", method)
    if not isinstance(function, types.FunctionType):
        return method
    name, code = function.__name__, function.__code__.replace()
    copy = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    copy.__doc__, copy.__qualname__, copy.__module__ = function.__doc__, function.__qualname__, function.__module__
    return copy if method is function else types.MethodType(copy, cast(types.MethodType, method).__self__)


def held_weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls a bound method as long as somebody else keeps its object.

    Dynamo keeps every backend that it was ever given, and keeps a backend's result in the globals of the module whose
    code was compiled: with ours, whole models.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        if alive is None:
            raise RuntimeError("A compiled step runs, but its strategy is gone. Keep the Trainer as long as it does.")
        return alive(*args, **kwargs)

    return call


def never_frames(*packages: str) -> None:
    """Keeps Dynamo from compiling functions of packages by themselves; it still traces through them.

    PyTorch does so with its own ``Module.__call__``: behind a graph break, as in a step that calls its optimizer,
    Dynamo compiles every function that runs, one by one, and what modules share up to the recompile limit.

    Args:
        *packages: Their names. Modules of them that are imported later are not looked at.
    """
    for name, module in list(sys.modules.items()):
        if any(f"{name}.".startswith(f"{package}.") for package in packages):
            for code in _codes(vars(module).values(), name):
                never_code(code)


def _codes(values: Iterable[Any], module: str) -> Iterator[types.CodeType]:
    """Yields the code of a module's functions, of those in its classes and of functions inside of functions."""
    for value in values:
        if isinstance(value, type):
            if value.__module__ == module:
                yield from _codes(vars(value).values(), module)
        elif isinstance(value, property):
            yield from _codes((value.fget, value.fset, value.fdel), module)
        elif isinstance(value, functools.cached_property):
            yield from _codes((value.func,), module)
        elif isinstance(value, staticmethod | classmethod):
            yield from _codes((value.__func__,), module)
        elif isinstance(value, types.FunctionType | functools._lru_cache_wrapper):
            function = inspect.unwrap(value)
            if function.__module__ == module:
                yield from _codes((function.__code__,), module)
        elif isinstance(value, types.CodeType):
            yield value
            yield from _codes(value.co_consts, module)


def never_code(code: types.CodeType) -> None:
    """Keeps Dynamo from compiling functions with this code by themselves."""
    torch._dynamo.eval_frame.skip_code(code)


@contextlib.contextmanager
def without_dynamo() -> Iterator[Callable[[Callable[P, R]], Callable[P, R]]]:
    """Returns a context in which Dynamo compiles no function, as in a call of a function with `torch.compiler.disable`.

    It gives a function that returns a given one so that Dynamo compiles it again, if it did before the context.
    """
    before = torch._dynamo.eval_frame.set_eval_frame(None)

    def again(function: Callable[P, R]) -> Callable[P, R]:
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            within = torch._dynamo.eval_frame.set_eval_frame(before)
            try:
                return function(*args, **kwargs)
            finally:
                torch._dynamo.eval_frame.set_eval_frame(within)

        return function if before is None else run

    try:
        yield again
    finally:
        torch._dynamo.eval_frame.set_eval_frame(before)


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Makes a dimension symbolic in what Dynamo compiles next with `tensor`, unless the code needs it to be a number.

    What was compiled before, with a tensor without the mark, does not run with this one.
    """
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
SET_GRADIENTS = torch._C._set_grad_enabled
LOG_USE = torch._C._log_api_usage_once
"""Functions that graphs call for PyTorch's global state alone."""


def is_checkpoint(node: fx.Node) -> bool:
    """Returns whether `node` of a Dynamo graph is an activation checkpoint: ``(subgraph, *operands)``."""
    return node.op == "call_function" and node.target is torch.ops.higher_order.tag_activation_checkpoint


def called_by(node: fx.Node) -> Any:
    """Returns the function, or the name of the method, that `node` of a Dynamo graph calls; equal for equal calls.

    Dynamo wraps an autograd function that is allowed in graphs in a new function for each call.
    """
    target = node.target
    if getattr(target, "_origin", None) is torch._dynamo.variables.misc.produce_trampoline_autograd_apply:
        return inspect.getclosurevars(cast(types.FunctionType, target)).nonlocals["fn_cls"].apply
    return target


class GraphReasons(NamedTuple):
    """The reasons for a graph.

    Args:
        place: The line of the user's code at which the graph ends: ``file:line in function: code``.
        broken: Why it ends there, if the function goes on behind it; else empty.
        recompiled: Why graphs of the same function that were compiled before do not do; else empty.
    """

    place: str
    broken: str
    recompiled: str

    def broken_in(self, code: types.CodeType) -> bool:
        """Returns whether the graph ends in a function with this code, which goes on behind it."""
        lines = {line for *_, line in code.co_lines()}
        return self.broken != "" and any(self.place.startswith(f"{code.co_filename}:{line} ") for line in lines)


def reasons_of(gm: fx.GraphModule) -> GraphReasons:
    """Returns the reasons for a graph; call it in the backend that Dynamo hands the graph to."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    frame = reason.user_stack[-1] if reason is not None and reason.user_stack else None
    place = "" if frame is None else f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    broken = ""
    if reason is not None and reason.graph_break:
        lines = [line.strip() for line in reason.reason.splitlines() if line.strip()]
        wanted = [line for line in lines if line.startswith(("Explanation:", "Hint:"))]
        broken = ". ".join(line.rstrip(".") for line in [*lines[:1], *wanted]) + "."
    again = get_metrics_context()._metrics.get("recompile_reason")
    return GraphReasons(place, broken, again or "")
