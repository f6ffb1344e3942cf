"""AOTAutograd: captures and partitions graphs, and gives access to the fake tensors of its tracing.

Seen to work with torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = [
    "FakeTensor",
    "BoxedCallable",
    "capture",
    "capture_apart",
    "current_fake_mode",
    "fake_tensor",
    "is_tracing",
    "keeping_graphs",
    "hint_of",
    "mark_effectful",
    "partition",
    "real_tensors",
]

_BANS = ("ban_recompute_used_far_apart", "ban_recompute_long_fusible_chains", "ban_recompute_materialized_backward")
"""Of ``torch._functorch.config``: why the partitioner saves what it could compute again cheaply, as that is faster."""

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
        # Otherwise a view of a loss's input and its detached twin, if both are read behind a graph break, are replayed
        # from one another. Backward graphs are compiled at once: if that fails, the function can still run uncompiled.
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


def capture_apart(gm: fx.GraphModule, example_inputs: Sequence[Any], **compilers: Any) -> None:
    """Captures a part of a graph that is being compiled, without affecting that compilation; see `capture`.

    Args:
        gm: The part, of Dynamo's kind.
        example_inputs: What it reads: fake tensors, of which some may require gradients, and symbolic sizes.
        **compilers: As for `capture`.
    """
    with tracing(TracingContext(current_fake_mode())):
        leaves = [
            value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
            for value in example_inputs
        ]
        capture(gm, leaves, **compilers)


def partition(
    gm: fx.GraphModule,
    joint_inputs: Sequence[Any],
    prepare: Callable[[fx.GraphModule], None],
    *,
    sparing: bool = False,
    **kwargs: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Inductor's joint-graph passes, then `prepare`, then the min-cut partitioner.

    Args:
        gm: The joint graph.
        joint_inputs: Its inputs.
        prepare: Marks nodes with what the partitioner must recompute or save. After the passes, which replace nodes.
        sparing: Whether the partitioner saves as little as it can without computing products or sums again, as it does
            for a smaller ``activation_memory_budget``; else also what backward reads sooner than it is computed.
        **kwargs: Passed on; new keywords have appeared with every PyTorch release.

    Returns:
        Forward and backward graph.
    """
    import torch._functorch.config as functorch_config
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
            return None  # part of cache keys; no cache is used here

    bans = dict.fromkeys(_BANS, False) if sparing else {}
    with inductor_config.patch(custom_partitioner_fn=PrepareAndCut()), functorch_config.patch(bans):
        return partition_fn(gm, joint_inputs, **kwargs)


def keeping_graphs() -> contextlib.AbstractContextManager[Any]:
    """Returns a context for a backward pass with ``retain_graph=True``: saved tensors are not donated.

    AOTAutograd refuses such a pass if it donates them. No region is told of donated buffers (`compile_region`).
    """
    import torch._functorch.config as functorch_config

    return functorch_config.patch(donated_buffer=False)


def current_fake_mode() -> FakeTensorMode:
    """The fake mode of the compilation in progress."""
    mode = TracingContext.get().fake_mode
    if mode is None:
        raise RuntimeError("No fake tensor mode is active: a graph was lowered outside of a compilation.")
    return mode


def is_tracing() -> bool:
    """Returns whether a function is being compiled: then a compiler's code runs, not the function's."""
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


def hint_of(size: int | torch.SymInt) -> int | None:
    """Returns the number that a size had when it was traced; None if it depends on data."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else None


def real_tensors() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which operators compute with real tensors, even while a graph is being traced."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def mark_effectful(operator: torch._ops.OpOverload) -> None:
    """Makes AOTAutograd and Inductor keep all calls of an operator, in their order. Its schema must alias nothing."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    _register_effectful_op(operator, _EffectType.ORDERED)
