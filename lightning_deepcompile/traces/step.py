"""A step whose first graph comes from an earlier run, if nothing that it depends on has changed.

The trace is run as Dynamo would run it: guards before every call, bytecode around the graph. Guards are not loaded but
built on the objects of this process, so that they also hold later; what they then accept is compared with what the
trace was made from. Code that Dynamo does not guard (methods of classes, above all) is compared by its bytecode, and
whatever cannot be compared is a reason to trace anew.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import marshal
import re
import sys
import sysconfig
import time
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._guards import TracingContext

from lightning_deepcompile import compat, compat_frames
from lightning_deepcompile.compat_frames import FrameState, TracedFrame, UntraceableError
from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.traces.fingerprint import Fingerprints, UnknownError
from lightning_deepcompile.traces.records import (
    GraphRecord,
    Memory,
    read_graph,
    read_inputs,
    record_graph,
    record_inputs,
)
from lightning_deepcompile.traces.store import TraceFile, environment

__all__ = ["StoredStep", "compile_step"]

_log = logging.getLogger(__name__)

# Dynamo's guards, by what must be compared besides what they check by themselves when they are built anew.
_BY_VALUE = {
    "BOOL_MATCH",
    "BUILTIN_MATCH",
    "CLASS_MATCH",
    "CLOSURE_MATCH",
    "CONSTANT_MATCH",
    "CONSTANT_SUBCLASS_MATCH",
    "EQUALS_MATCH",
    "FUNCTION_MATCH",
    "ID_MATCH",
    "MODULE_MATCH",
    "NONE_MATCH",
    "TENSOR_MATCH",
}
_BY_TYPE = {
    "DICT_CONTAINS",
    "DICT_NOT_CONTAINS",
    "DUPLICATE_INPUT",
    "NOT_NONE_MATCH",
    "NOT_PRESENT_IN_GENERIC_DICT",
    "SET_CONTAINS",
    "SET_NOT_CONTAINS",
    "TYPE_MATCH",
}
_BY_LENGTH = {"DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK", "SEQUENCE_LENGTH"}
_EMPTY = {"EMPTY_NN_MODULE_HOOKS_DICT"}  # Dynamo does not look at these by default
# Of the whole process: compared by the stored state of guards itself, or by `compat_frames.global_modes`.
_GLOBAL = {
    "AUTOGRAD_SAVED_TENSORS_HOOKS",
    "DEFAULT_DEVICE",
    "DETERMINISTIC_ALGORITHMS",
    "DUAL_LEVEL",
    "FUNCTORCH_STACK_MATCH",
    "GLOBAL_STATE",
    "GRAD_MODE",
    "SHAPE_ENV",
    "TORCH_FUNCTION_STATE",
}


@dataclass(frozen=True)
class _Trace:
    """A trace as it is stored.

    Args:
        graph: The graph.
        inputs: Where its inputs are.
        code: Bytecode that calls it.
        state: A `FrameState`.
        seen: What the guards looked at, each in words.
        modules: The modules whose code was traced, by name, and what they define.
        surroundings: What else it depends on (`environment`).
    """

    graph: GraphRecord
    inputs: list[Memory]
    code: bytes
    state: bytes
    seen: list[str]
    modules: dict[str, str]
    surroundings: dict[str, str]


@dataclass(frozen=True)
class _Refusal:
    """Why a step is left to Dynamo, until the user's code (`_own_code`) changes."""

    reason: str
    of: str


def compile_step(
    method: Callable[..., Any], backend: Callable[..., Any], config: CompileConfig, device: torch.device
) -> Callable[..., Any]:
    """Compiles a method as ``torch.compile`` does; it may begin with a trace of an earlier run.

    Args:
        method: The method; its compilations are its own (`compat.with_own_code`).
        backend: Compiles graphs.
        config: Says where traces are kept.
        device: Where the step runs.
    """
    step = compat.with_own_code(method)
    if config.traces is None or not isinstance(getattr(step, "__func__", step), types.FunctionType):
        return torch.compile(step, backend=backend)
    return StoredStep(step, backend, config.traces, device)


class StoredStep:
    """Calls a step, of which one trace may be kept in a file; to be called in the place of ``torch.compile(step)``.

    Args:
        step: A method or function with code of its own (`compat.with_own_code`).
        backend: Compiles graphs.
        folder: Where the file is, or will be.
        device: Where the step runs.
    """

    def __init__(
        self, step: Callable[..., Any], backend: Callable[..., Any], folder: str, device: torch.device
    ) -> None:
        self._step, self._backend, self._folder, self._device = step, backend, folder, device
        self._compiled: Callable[..., Any] = torch.compile(step, backend=backend)
        self._function: types.FunctionType = getattr(step, "__func__", step)
        self._self = (step.__self__,) if isinstance(step, types.MethodType) else ()
        self._signature = inspect.signature(self._function, follow_wrapped=False)
        self._prepared = False
        self._fits: Callable[[dict[str, Any]], bool] | None = None
        self._run: Callable[..., Any] = self._compiled
        self._kept: Fingerprints | None = None  # guards compare addresses, which nothing else may take over

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step."""
        if not self._prepared:
            self._prepared = True
            compat_frames.apart(self._prepare)(args, kwargs)
        if self._fits is not None and self._fits(self._variables(args, kwargs)):
            return self._run(*self._self, *args, **kwargs)
        return self._compiled(*args, **kwargs)  # not from the trace on: as if this were the step's first call

    def _variables(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind(*self._self, *args, **kwargs)
        bound.apply_defaults()
        names, cells = self._function.__code__.co_freevars, self._function.__closure__ or ()
        return {**bound.arguments, **{name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}}

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = self._step.__name__
        rank, world_size = dist.get_rank(), dist.get_world_size()
        file, surroundings = (
            TraceFile(self._folder, name, rank, world_size),
            environment(self._device, rank, world_size),
        )
        path = str(file.path)
        try:
            stored = file.read()
            if isinstance(stored, _Refusal) and stored.of == _own_code():
                _log.info("`%s` is traced anew: %s.", name, stored.reason)
                return
            if isinstance(stored, _Trace):
                _check_surroundings(stored.surroundings, surroundings)
                start = time.perf_counter()
                self._load(stored, args, kwargs)
                _log.info("The trace of `%s` was read from %r (%.1f s).", name, path, time.perf_counter() - start)
                return
        except UntraceableError as error:
            _log.info("`%s` is traced anew, not read from %r: %s.", name, path, error)
        own = _own_code()  # tracing may import more
        try:
            self._trace(file, surroundings, args, kwargs)
        except UntraceableError as error:
            _log.info("No trace of `%s` is kept: %s.", name, error)
            file.write(_Refusal(str(error), own))

    def _load(self, stored: _Trace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fingerprints = Fingerprints()
        for name, known in stored.modules.items():
            module = sys.modules.get(name)
            if module is None or fingerprints.module(module) != known:
                raise UntraceableError(f"the code of {name} has changed")
        state = FrameState.load(stored.state)
        with compat_frames.installed_globals(state, self._function.__globals__):
            with compat_frames.compiling():
                fits, seen = self._guards(state, fingerprints, args, kwargs)
            if seen != stored.seen:
                raise UntraceableError(_difference(stored.seen, seen))
            mode = compat_frames.fake_mode()
            inputs = read_inputs(stored.graph, stored.inputs, mode)
            graph = read_graph(stored.graph, mode, inputs)
            compiled = self._compile(graph, inputs, TracingContext(mode))
        self._install(state, state.renamed(marshal.loads(stored.code)), compiled, fits)
        self._kept = fingerprints

    def _trace(
        self, file: TraceFile, surroundings: dict[str, str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        frame = compat_frames.trace_frame(self._step, args, kwargs)
        fingerprints = Fingerprints()
        modules = _modules_of([self._function.__code__, *frame.traced])
        defined = {name: fingerprints.module(module) for name, module in modules.items()}
        with compat_frames.compiling():
            fits, seen = self._guards(frame.state, fingerprints, args, kwargs)
        self._check_covered(frame, fingerprints)
        graph = record_graph(frame.graph)  # before it is compiled, which may change it
        inputs, code, state = record_inputs(graph, frame.inputs), _dump(frame.code), frame.state.dump()
        compiled = self._compile(frame.graph, frame.inputs, frame.context)
        file.write(_Trace(graph, inputs, code, state, seen, defined, surroundings))
        self._install(frame.state, frame.code, compiled, fits)
        self._kept = fingerprints

    def _compile(self, graph: fx.GraphModule, inputs: Sequence[Any], context: TracingContext) -> Callable[..., Any]:
        with compat_frames.compiling(context):
            compiled = self._backend(graph, inputs)
        if context.guards_context.aotautograd_guards:
            raise UntraceableError("what it returns or changes overlaps with its inputs")
        return compiled

    def _install(
        self, state: FrameState, code: types.CodeType, graph: Callable[..., Any], fits: Callable[..., bool]
    ) -> None:
        function = self._function
        function.__globals__[state.graph] = torch.compiler.disable(graph)
        run = types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
        run.__defaults__, run.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        self._run, self._fits = run, fits

    def _guards(
        self, state: FrameState, fingerprints: Fingerprints, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[[dict[str, Any]], bool], list[str]]:
        if modes := compat_frames.global_modes():
            raise UntraceableError(f"{modes[0]} is in use")
        seen: list[str] = []
        fits = compat_frames.build_guards(
            self._function.__code__,
            state,
            self._function.__globals__,
            self._variables(args, kwargs),
            lambda entries: seen.extend(_describe(entry, fingerprints) for entry in entries),
        )
        return fits, sorted(map(state.as_traced, seen))

    def _check_covered(self, frame: TracedFrame, fingerprints: Fingerprints) -> None:
        """Raises if code was traced that nothing would compare."""
        for code in frame.traced:
            if code not in fingerprints.codes:
                raise UntraceableError(f"nothing tells whether {code.co_qualname} ({code.co_filename}) changes")


def _dump(code: types.CodeType) -> bytes:
    try:
        return marshal.dumps(code)
    except ValueError as error:
        raise UntraceableError("its bytecode holds an object") from error


def _describe(entry: Any, fingerprints: Fingerprints) -> str:
    """What a guard looks at, in words that mean the same in another process."""
    kind, value = entry.guard_type, entry.value
    words: Sequence[Any] = ()
    if kind in _GLOBAL:
        return kind
    if kind == "HASATTR":
        return f"{kind} {entry.name} {compat_frames.attribute_found(entry)}"
    if not entry.has_value:
        raise UnknownError(f"a guard {kind} on {entry.name!r} looks at nothing")
    if kind in _BY_VALUE:
        words = [fingerprints.value(value)]
    elif kind in _BY_LENGTH:
        words = [len(value), *(fingerprints.value(key) for key in value)] if hasattr(value, "keys") else [len(value)]
    elif kind in _EMPTY:
        if value:
            raise UnknownError(f"hooks in {entry.name}")
    elif kind not in _BY_TYPE:
        raise UnknownError(f"a guard of the kind {kind}")
    return f"{kind} {entry.name} {fingerprints.kind(type(value))} {' '.join(map(str, words))}"


def _modules_of(codes: Iterable[types.CodeType]) -> dict[str, types.ModuleType]:
    """The modules whose files hold `codes`, by the names under which they are imported."""
    files = {code.co_filename for code in codes}
    frozen = {match[1] for file in files if (match := re.fullmatch(r"<frozen (.*)>", file))}
    found = {}
    for name, module in list(sys.modules.items()):
        if name in frozen or getattr(module, "__file__", None) in files:
            found[name] = module
    return found


def _own_code() -> str:
    """What modules that are not installed define: the user's."""
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    fingerprints, words = Fingerprints(), []
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and not file.startswith(installed):
            words.append(f"{name} {fingerprints.module(module)}")
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def _check_surroundings(before: dict[str, str], now: dict[str, str]) -> None:
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise UntraceableError(f"the {name} has changed")


def _difference(before: Sequence[str], now: Sequence[str]) -> str:
    gone = sorted(set(before) - set(now)) or sorted(set(now) - set(before))
    return f"something has changed: {gone[0][:300]}" if gone else "something has changed"
