"""The private parts of Dynamo that trace one call without running it, and that build a trace's guards anew.

As in `compat`, each has a test that fails when PyTorch moves what it uses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import pickle
import random
import sys
import types
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, fx
from torch._guards import CompileContext, Guard, GuardsSet, TracingContext, compile_context, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = [
    "FrameState",
    "TracedFrame",
    "UntraceableError",
    "apart",
    "attribute_found",
    "build_guards",
    "compiling",
    "dynamo_settings",
    "fake_mode",
    "fake_value",
    "global_modes",
    "installed_globals",
    "trace_frame",
]


P = ParamSpec("P")
T = TypeVar("T")


class UntraceableError(RuntimeError):
    """A call is not one graph, or has something that could not be brought into another process."""


@dataclasses.dataclass
class FrameState:
    """What guards are built from, besides the objects that they look at; can be pickled.

    Args:
        guards: The guards, without anything of the process that made them.
        parts: Further fields of Dynamo's state of guards, by name.
        modules: Global variables that the trace added to the step's module, each an imported module.
        builtins: The name under which it added Python's builtins.
        graph: The name under which the compiled graph is called.
        names: Those of the added variables that Dynamo may come to use for something else in another process, and
            what they are called in this one.
    """

    guards: list[Guard]
    parts: dict[str, Any]
    modules: dict[str, str]
    builtins: str | None
    graph: str
    names: dict[str, str]

    def dump(self) -> bytes:
        """Writes this down; see `load`.

        Raises:
            UntraceableError: If a guard holds what cannot be pickled.
        """
        names, buffer = self.names, io.BytesIO()

        class Pickler(pickle.Pickler):
            def persistent_id(self, value: Any) -> str | None:
                return value if type(value) is str and value in names else None

        try:
            Pickler(buffer).dump(self)
        except Exception as error:  # whatever objects do that were not made for it
            raise UntraceableError(f"a guard cannot be written down ({type(error).__name__}: {error})") from error
        return buffer.getvalue()

    @classmethod
    def load(cls, data: bytes) -> FrameState:
        """What `dump` wrote, with new names in place of `names`.

        Raises:
            UntraceableError: If guards still use an old one.
        """
        fresh: dict[str, str] = {}

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, name: str) -> str:
                return fresh.setdefault(name, f"{name}_{uuid.uuid4().hex}")

        state: FrameState = Unpickler(io.BytesIO(data)).load()
        state.names = fresh
        for guard in state.guards:
            if any(old in guard.name.replace(new, "") for old, new in fresh.items()):
                raise UntraceableError(f"the guard on {guard.name!r} has names of its own")
        return state

    def as_traced(self, text: str) -> str:
        """`text` with the names that there were when the step was traced."""
        for old, new in self.names.items():
            text = text.replace(new, old)
        return text

    def renamed(self, code: types.CodeType) -> types.CodeType:
        """Stored bytecode with this process's names."""
        return code.replace(co_names=tuple(self.names.get(name, name) for name in code.co_names))


@dataclasses.dataclass
class TracedFrame:
    """One traced call.

    Args:
        graph: Its graph.
        inputs: The graph's fake inputs.
        code: Bytecode that calls the graph in the place of the function's own.
        traced: Code of all functions that were traced through.
        state: Of the guards.
        context: The tracing context in which the graph must be compiled.
    """

    graph: fx.GraphModule
    inputs: Sequence[Any]
    code: types.CodeType
    traced: list[types.CodeType]
    state: FrameState
    context: TracingContext


_PARTS = (
    "guard_on_key_order",
    "input_source_to_sizes_strides",
    "dual_level",
    "functorch_layers",
    "current_device",
    "global_state_guard",
)


def dynamo_settings() -> str:
    """Dynamo's settings, in words that are the same in every process that has the same ones."""

    def plain(value: Any) -> str:
        if isinstance(value, set | frozenset):
            return f"{sorted(map(plain, value))}"
        if isinstance(value, tuple | list):
            return f"{list(map(plain, value))}"
        return repr(value) if value is None or type(value) in (bool, int, float, str) else type(value).__name__

    settings = torch._dynamo.config.get_config_copy()
    return ", ".join(f"{name}={plain(value)}" for name, value in sorted(settings.items()))


def global_modes() -> list[str]:
    """What is switched on in this thread that no stored guard can compare: names, to be told."""
    found = []
    if torch._C._len_torch_function_stack():
        found.append("a torch function mode")
    if torch._C._len_torch_dispatch_stack():
        found.append("a dispatch mode")
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        found.append("hooks for saved tensors")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        found.append("a function transform")
    hooks = vars(torch.nn.modules.module)
    if any(hooks[name] for name in hooks if name.startswith("_global_") and name.endswith("_hooks")):
        found.append("a hook of all modules")  # Dynamo does what hooks say, without a guard on there being any
    return found


def apart(work: Callable[P, T]) -> Callable[P, T]:
    """Makes `work`, which traces or compiles, leave random numbers, gradient modes and the like as they are.

    Args:
        work: Is called as Dynamo calls its own tracing: under inference mode, outside of it.
    """
    from torch._dynamo.convert_frame import preserve_global_state
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        numbers = random.getstate()
        try:
            with get_metrics_context(), dynamo_timed("lightning_deepcompile"):
                return preserve_global_state(work)(*args, **kwargs)
        finally:
            random.setstate(numbers)

    return run


@contextlib.contextmanager
def compiling(context: TracingContext | None = None) -> Iterator[None]:
    """Inside, which must be inside of `apart`, guards may be built, and graphs compiled.

    Args:
        context: The tracing context of a graph.
    """
    from torch._dynamo.convert_frame import get_compile_id

    with (
        compile_context(CompileContext(get_compile_id({}))),
        tracing(context) if context is not None else contextlib.nullcontext(),
    ):
        yield


def trace_frame(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedFrame:
    """Traces a call without running it; nothing that it would do is done. Must be called inside of `apart`.

    Args:
        step: A method or function.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Raises:
        UntraceableError: If the call is not one graph, or raises, or depends on what cannot be written down.
    """
    from torch._dynamo.convert_frame import fullgraph_capture
    from torch._dynamo.exc import TorchDynamoException

    function = getattr(step, "__func__", step)
    before = set(function.__globals__)
    try:
        captured = fullgraph_capture(step, args, kwargs)
    except TorchDynamoException as error:
        raise UntraceableError(str(error).partition("\n")[0]) from error
    output, backend = captured.graph_capture_output, captured.backend_input
    if backend is None:
        raise UntraceableError("it computes nothing")
    graph = output.output_graph
    if graph.aotautograd_guards or graph.torch_function_mode_stack:
        raise UntraceableError("modes or guards of another kind are in use")
    if output.bytecode.co_freevars != function.__code__.co_freevars:
        raise UntraceableError("its closure changed")
    builtins = graph.name_of_builtins_dict_key_in_fglobals
    modules = dict(output.import_sources)
    for name in set(function.__globals__) - before - {backend.backend_id, builtins}:
        value = function.__globals__[name]
        if not inspect.ismodule(value) or sys.modules.get(value.__name__) is not value:
            raise UntraceableError(f"it refers to an object by its address ({name})")
        modules[name] = value.__name__
    names = {name: name for name in {*modules, builtins} - {*output.import_sources, None}}
    parts = {name: getattr(graph, name) for name in _PARTS}
    guards = [_detached(guard) for guard in graph.guards]
    state = FrameState(guards, parts, modules, builtins, backend.backend_id, names)
    context = TracingContext(backend.fake_mode)
    context.tensor_to_context = backend.tensor_to_context
    return TracedFrame(
        backend.graph_module, backend.example_inputs, output.bytecode, output.traced_code, state, context
    )


def _detached(guard: Guard) -> Guard:
    """`guard` without references to this process's objects: what it compares is looked up when it is built."""
    create = guard.create_fn
    if isinstance(create, functools.partial) and "value" in create.keywords:
        others = {name: value for name, value in create.keywords.items() if name != "value"}
        create = functools.partial(create.func, *create.args, **others)
    return dataclasses.replace(
        guard,
        create_fn=create,
        stack=None,
        user_stack=None,
        guard_types=None,
        code_list=None,
        obj_weakref=None,
        guarded_class_weakref=None,
    )


@contextlib.contextmanager
def installed_globals(state: FrameState, scope: dict[str, Any]) -> Iterator[None]:
    """Makes the global variables that a trace's bytecode and guards use, as tracing does; an error takes them back.

    Args:
        state: Of the trace.
        scope: The global variables of the step's function.

    Raises:
        UntraceableError: If one is there already and is something else.
    """
    from torch._dynamo.output_graph import get_builtins_dict

    values: dict[str, Any] = {name: importlib.import_module(module) for name, module in state.modules.items()}
    if state.builtins is not None:
        values[state.builtins] = get_builtins_dict(scope)
    if taken := [name for name, value in values.items() if scope.get(name, value) is not value]:
        raise UntraceableError(f"the global variable {taken[0]} is something else")
    new = {name: value for name, value in values.items() if name not in scope}
    scope.update(new)
    try:
        yield
    except BaseException:
        for name in new:
            del scope[name]
        raise


def build_guards(
    code: types.CodeType,
    state: FrameState,
    scope: dict[str, Any],
    variables: dict[str, Any],
    see: Callable[[Sequence[Any]], None],
) -> Callable[[dict[str, Any]], bool]:
    """Builds the guards on this process's objects, as Dynamo does behind a trace.

    Args:
        code: The step's code.
        state: Of the trace.
        scope: Global variables of the step's function.
        variables: The local variables of a call.
        see: Is shown all guards with what they look at (``GuardFilterEntry``): built anew, they accept whatever is
            there now, so that it must be compared with what was there when the step was traced.

    Returns:
        Whether a call with some local variables is one that the trace is for.

    Raises:
        UntraceableError: If the guards do not fit `variables`.
    """
    from torch._dynamo.guards import CheckFunctionManager
    from torch._dynamo.output_graph import OutputGraphCommon, OutputGraphGuardsState
    from torch.utils._ordered_set import OrderedSet

    def keep(entries: Sequence[Any]) -> Sequence[bool]:
        see(entries)
        return [True] * len(entries)

    output = OutputGraphCommon(
        OutputGraphGuardsState(
            local_scope=variables,
            global_scope=scope,
            torch_function_mode_stack=[],
            _guards=GuardsSet(
                OrderedSet(dataclasses.replace(guard) for guard in state.guards)
            ),  # building writes to them
            _aotautograd_guards=[],
            name_of_builtins_dict_key_in_fglobals=state.builtins,
            **state.parts,
        )
    )
    try:
        manager = CheckFunctionManager(code, output, guard_filter_fn=keep, runtime_global_scope=scope).guard_manager
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UntraceableError(f"its guards do not fit ({type(error).__name__}: {error})") from error
    return manager.check


def attribute_found(entry: Any) -> str:
    """What a guard HASATTR looked for, and whether it found it.

    Args:
        entry: The guard (``GuardFilterEntry``). With torch 2.11 it is one on the attribute, later on its owner.
    """
    name = getattr(entry.orig_guard.create_fn, "keywords", {}).get("attr")
    return str(entry.has_value) if name is None else f"{name} {hasattr(entry.value, name)}"


def fake_mode() -> FakeTensorMode:
    """A fake mode like the one that Dynamo traces with."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def fake_value(
    mode: FakeTensorMode, meta: Tensor, device: torch.device, requires_grad: bool, is_parameter: bool
) -> Tensor:
    """A fake tensor like `meta`, which is on device "meta"; no fake mode may be on.

    Args:
        mode: Its fake mode.
        meta: Gives sizes, strides and dtype.
        device: Where it pretends to be.
        requires_grad: Whether it needs gradients.
        is_parameter: Whether it stands for an ``nn.Parameter``.
    """
    fake = FakeTensor(mode, meta, device).requires_grad_(requires_grad)
    if is_parameter:
        fake._is_param = True
    return fake
