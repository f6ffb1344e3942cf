"""Every private part of PyTorch that this package leans on, in one place, with what differs from 2.11 to 2.15.

Each function has a test that fails when PyTorch moves what it uses.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.fx._lazy_graph_module import _LazyGraphModule

__all__ = [
    "INNER_CALL",
    "BoxedCallable",
    "alias",
    "below_autograd",
    "all_gather_into",
    "all_to_all_into",
    "capture",
    "capture_apart",
    "compile_failures",
    "compile_region",
    "current_fake_mode",
    "fake_tensor",
    "graph_module",
    "held_weakly",
    "hooks_saved_tensors",
    "in_function_transform",
    "inference_joint_passes",
    "is_checkpoint",
    "is_tracing",
    "keeping_graphs",
    "mark_effectful",
    "never_a_frame",
    "never_code",
    "never_frames",
    "outside_transforms",
    "partition",
    "plain_functions",
    "process_group",
    "real_tensors",
    "reduce_scatter_mean_into",
    "root_cause",
    "start_compile_workers",
    "step_settings",
    "storage_of",
    "storage_uses",
    "store",
    "with_local",
    "with_own_code",
]

T = TypeVar("T")

INNER_CALL = "_compiled_call_impl"
"""A module's attribute: what a call of the module runs if it is not None, and what Dynamo does not look at."""

BoxedCallable = Callable[[list[Any]], Sequence[Any]]
"""A compiled function that takes its arguments as one list and empties it, so that they can be freed while it runs."""


def capture(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward: Callable[[fx.GraphModule, Sequence[Any]], BoxedCallable],
    backward: Callable[[fx.GraphModule, Sequence[Any]], BoxedCallable],
    inference: Callable[[fx.GraphModule, Sequence[Any]], BoxedCallable],
    partitioner: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    eager: bool = False,
) -> Callable[..., Any]:
    """Runs AOTAutograd on a Dynamo graph with our compilers for the partitioned graphs.

    Args:
        gm: Dynamo's graph.
        example_inputs: Its (fake) inputs.
        forward: Compiles the forward graph of a graph that needs gradients.
        backward: Compiles its backward graph; called when the first backward pass runs.
        inference: Compiles graphs that need no gradients.
        partitioner: Cuts the joint graph in two; takes the graph, its inputs and keywords.
        eager: Keep PyTorch's own random operators. Inductor's, which replace them otherwise, mean what they say only
            when Inductor compiles them: run eagerly they ignore their seed, so that a dropout mask that backward
            computes again would be another one. Nor are products padded, of which there may not be every view.

    Returns:
        The callable that replaces `gm`.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.utils import detect_fake_mode
    from torch._inductor import lowering  # noqa: F401 - decompositions of pooling look it up as an attribute
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    # Inductor's joint passes (dropout's random numbers) look the fake mode up here.
    with (
        V.set_fake_mode(detect_fake_mode(example_inputs)),
        inductor_config.patch(fallback_random=True, shape_padding=False) if eager else contextlib.nullcontext(),
        # A view of a loss's input and its detached twin, both read behind a graph break, are replayed from one another.
        # Backward graphs are compiled at once: where that fails, the function can still run uncompiled.
        functorch_config.patch(view_replay_for_aliased_outputs=False, force_non_lazy_backward_lowering=True),
    ):
        backend = aot_autograd(
            fw_compiler=forward,
            bw_compiler=backward,
            inference_compiler=inference,
            partition_fn=partitioner,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )
        return backend(gm, example_inputs)


def capture_apart(gm: fx.GraphModule, example_inputs: Sequence[Tensor], **compilers: Any) -> None:
    """As `capture`, for a part of a graph whose compilation is in progress, which learns nothing of it.

    Args:
        gm: The part, of Dynamo's kind.
        example_inputs: What it reads: fake tensors, of which some may require gradients.
        **compilers: As for `capture`.
    """
    with tracing(TracingContext(current_fake_mode())):
        leaves = [value.detach().requires_grad_(value.requires_grad) for value in example_inputs]
        capture(gm, leaves, **compilers)


def partition(
    gm: fx.GraphModule, joint_inputs: Sequence[Any], prepare: Callable[[fx.GraphModule], None], **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Inductor's joint-graph passes, then `prepare`, then the min-cut partitioner.

    Args:
        gm: The joint graph.
        joint_inputs: Its inputs.
        prepare: Marks nodes with what the partitioner must recompute or save. After the passes, which replace nodes.
        **kwargs: Passed on; new keywords have appeared with every PyTorch release.

    Returns:
        Forward and backward graph.
    """
    import torch._inductor.config as inductor_config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class PrepareAndCut(CustomPartitionerFn):
        def __call__(
            self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **inner: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            prepare(gm)
            return min_cut_rematerialization_partition(gm, joint_inputs, **inner)

        def uuid(self) -> None:
            return None  # part of cache keys, of which none is made here

    with inductor_config.patch(custom_partitioner_fn=PrepareAndCut()):
        return partition_fn(gm, joint_inputs, **kwargs)


def inference_joint_passes(gm: fx.GraphModule) -> None:
    """Inductor's joint-graph passes for a graph that is not partitioned; without them random operators do not lower."""
    from torch._inductor.compile_fx import _recursive_joint_graph_passes

    _recursive_joint_graph_passes(gm)


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph module whose Python code is written when it is run, or asked for it: most are neither."""
    return _LazyGraphModule(root, graph)


def current_fake_mode() -> FakeTensorMode:
    """The fake mode of the compilation in progress."""
    mode = TracingContext.get().fake_mode
    if mode is None:
        raise RuntimeError("No fake tensor mode is active: a graph was lowered outside of a compilation.")
    return mode


def is_tracing() -> bool:
    """Whether a function is being compiled, so that what runs is a compiler's code, and not the function's."""
    return TracingContext.try_get() is not None


def fake_tensor(tensor: Tensor, like: Tensor) -> Tensor:
    """A fake tensor with the sizes, strides and memory of `tensor`; no fake mode may be on.

    Far faster than the operators that would compute it.

    Args:
        tensor: On device "meta", or a fake tensor, which is returned as it is.
        like: A fake tensor: gives the fake mode and the device.
    """
    if isinstance(tensor, FakeTensor):
        return tensor
    if not isinstance(like, FakeTensor):
        raise TypeError(f"fake_tensor: expected a fake tensor to make one like, got {type(like).__name__}.")
    return FakeTensor(like.fake_mode, tensor, like.fake_device)


def real_tensors() -> contextlib.AbstractContextManager[None]:
    """Inside, operators compute with real tensors, also while a graph is being traced."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def with_own_code(method: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a method whose compilations are counted, and cached, apart from those of the original's code.

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
    return copy if method is function else types.MethodType(copy, method.__self__)


def held_weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a bound method as long as somebody else keeps its object.

    Dynamo keeps every backend that it was ever given, and keeps what one returned in the globals of the module whose
    code was compiled: with ours, whole models.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        if alive is None:
            raise RuntimeError("A compiled step runs, but its strategy is gone. Keep the Trainer as long as it does.")
        return alive(*args, **kwargs)

    return call


def never_a_frame(function: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo compiles what `function` calls, and traces through it, but never compiles `function` by itself.

    As it does with PyTorch's own ``Module.__call__``: behind a graph break, a function that all modules share would
    otherwise be compiled for each of them, which soon exceeds the recompile limit.
    """
    never_code(function.__code__)
    return function


def never_code(code: types.CodeType) -> None:
    """As `never_a_frame`, for all functions of that code; copies of the code have to be named by themselves."""
    torch._dynamo.eval_frame.skip_code(code)


def never_frames(kind: type[T]) -> type[T]:
    """Does so with all methods of a class.

    Under manual optimization, optimizers step within compiled code, behind a graph break: what accompanies their steps
    handles many tensors and computes nothing.
    """
    for value in vars(kind).values():
        if inspect.isfunction(value):
            never_a_frame(inspect.unwrap(value))
    return kind


def storage_uses(tensor: Tensor) -> int:
    """How many tensors share the memory of `tensor`, itself included; temporary Python objects count, too."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def with_local(tensor: DTensor, local: Tensor) -> DTensor:
    """A DTensor like `tensor` with another local tensor, which may be on another device than the mesh.

    ``DTensor.from_local`` would copy it to the mesh's device.
    """
    return DTensor(local, tensor._spec, requires_grad=False)


def store() -> dist.Store:
    """The key-value store that the ranks of the default process group met at."""
    return dist.distributed_c10d._get_default_store()


def all_gather_into(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Gathers `tensor` of every rank, one behind the other, into `output`; a collective of `group`.

    torch 2.13 has another name for ``all_gather_into_tensor``, and warns of that one.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, tensor, group=group)


def all_to_all_into(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Sends the n-th of `tensor`'s equal parts to rank n, whose part for this rank comes to the same place."""
    dist.all_to_all_single(output, tensor, group=group)


def reduce_scatter_mean_into(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """This rank's part of the mean of every rank's `tensor`; a collective of `group`. Gloo knows no means."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    mean = tensor.is_cuda
    scatter(output, tensor, op=dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM, group=group)
    if not mean:
        output.div_(group.size())


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of that name (``group.group_name``), as the tracer's graphs hold it."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


def is_checkpoint(node: fx.Node) -> bool:
    """Whether `node` of a Dynamo graph runs a subgraph under activation checkpointing: ``(subgraph, *operands)``."""
    return node.op == "call_function" and node.target is torch.ops.higher_order.tag_activation_checkpoint


def mark_effectful(operator: torch._ops.OpOverload) -> None:
    """Makes AOTAutograd and Inductor keep all calls of an operator, in their order. Its schema must alias nothing."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    _register_effectful_op(operator, _EffectType.ORDERED)


def compile_region(
    gm: fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool, is_inference: bool
) -> BoxedCallable:
    """Compiles one region with Inductor, apart from the compilation that is in progress.

    The tracing context must be a fresh one: AOTAutograd's own names the outer backward graph's donated inputs by index,
    and Inductor would overwrite the region's inputs at the same indices: silently wrong gradients.

    Args:
        gm: The region; its output node carries ``user_visible_output_idxs``.
        inputs: Fake inputs.
        is_backward: Whether it belongs to a backward graph.
        is_inference: Whether no gradients will be needed.

    Returns:
        The compiled region.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    with tracing(TracingContext(current_fake_mode())):
        return compile_fx_inner(gm, inputs, is_backward=is_backward, is_inference=is_inference, static_input_idxs=())


def start_compile_workers() -> None:
    """Starts the processes in which Inductor compiles GPU kernels, or wakes them; returns at once.

    They take seconds to come up, and until then kernels are compiled one after another in this process.
    ``torch.compile(backend="inductor")`` does this by itself; whoever calls Inductor for a part of a graph must do it.
    Without Triton there are none.
    """
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()


def step_settings(recompile_limit: int, *, falls_back: bool) -> contextlib.AbstractContextManager[None]:
    """Dynamo's settings around a compiled step; to be made once, and entered for every step.

    Integers on modules (``self.global_step``) become inputs instead of guards. A function that cannot be compiled, or
    that was compiled too often, runs as it is: see `compile_failures`. Backward graphs are compiled with their forward
    graphs, so that a failure comes before anything has run.

    Each one made costs time, and memory that PyTorch 2.13 never frees.

    Args:
        recompile_limit: Compilations of one function before it is given up.
        falls_back: Whether functions that cannot be compiled run as they are; else that is an error.
    """
    return torch._dynamo.config.patch(
        recompile_limit=recompile_limit,
        allow_unspec_int_on_nn_module=True,
        # Else a parameter that is frozen, or trained again, goes unnoticed (PyTorch 2.11, Python 3.12).
        skip_tensor_guards_with_matching_dict_tags=False,
        suppress_errors=falls_back,
        fail_on_recompile_limit_hit=not falls_back,
    )


class _Failures(logging.Filter):
    """Takes what Dynamo logs of functions that it leaves uncompiled."""

    def __init__(self, tell: Callable[[str, str, str | BaseException], None]) -> None:
        super().__init__()
        self._tell = tell

    def filter(self, record: logging.LogRecord) -> bool:
        if found := _CONVERTED_NOT.match(record.getMessage()):
            error = record.exc_info[1] if record.exc_info else None
            if record.levelno < logging.WARNING:
                return True  # a break of the graph where Dynamo cannot go on
            self._tell(found["name"], f"{found['file']}:{found['line']}", error or "Dynamo gave no reason")
            return False
        if found := _HIT_LIMIT.search(record.getMessage()):
            self._tell(found["name"], found["place"], f"compiled more than {found['limit']} times: {found['reason']}")
            return False
        return True


_CONVERTED_NOT = re.compile(r"WON'T CONVERT (?P<name>\S+) (?P<file>.*) line (?P<line>\d+)")
_HIT_LIMIT = re.compile(
    r"hit config\.\w+ \((?P<limit>\d+)\)\s+function: '(?P<name>[^']*)' \((?P<place>.*)\)\s+last reason: (?P<reason>.*)"
)


@contextlib.contextmanager
def compile_failures(tell: Callable[[str, str, str | BaseException], None]) -> Iterator[None]:
    """Around a compiled step: Dynamo says which functions it leaves as they are, and why, in its log alone.

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


def alias(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of its own: no view, with a count of writes of its own."""
    with torch.no_grad():
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor; None where it has none of its own, as inside of a function transform."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or type(tensor) not in (Tensor, nn.Parameter):
        return None
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


def hooks_saved_tensors() -> bool:
    """Whether hooks for saved tensors are on: of activation checkpointing, or a user's."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def keeping_graphs() -> contextlib.AbstractContextManager[Any]:
    """Around a backward pass with ``retain_graph=True``, which AOTAutograd refuses where it donates saved tensors.

    No region is told of donated buffers (`compile_region`).
    """
    import torch._functorch.config as functorch_config

    return functorch_config.patch(donated_buffer=False)


def in_function_transform() -> bool:
    """Whether the code runs inside of ``torch.func.grad``, ``vmap`` or the like."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Inside, tensors are not those of ``torch.func.grad``, ``vmap`` or the like, though their code runs."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack() if in_function_transform() else contextlib.nullcontext()


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Inside, operators run without autograd, and without the Python that derivatives of custom ones are written in.

    ``torch.no_grad()`` runs that nevertheless: some 70 us for each call.
    """
    return torch._C._AutoDispatchBelowAutograd()


def plain_functions() -> contextlib.AbstractContextManager[None]:
    """Inside, functions treat subclasses of tensors as if they had no ``__torch_function__``."""
    return torch._C.DisableTorchFunctionSubclass()
