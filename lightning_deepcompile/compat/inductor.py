"""Inductor: its passes over whole graphs, and regions compiled apart from the compilation under way.

Seen to work with torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._guards import TracingContext, tracing

from lightning_deepcompile.compat.aot import BoxedCallable, current_fake_mode

__all__ = ["compile_region", "inference_joint_passes", "start_compile_workers"]


def inference_joint_passes(gm: fx.GraphModule) -> None:
    """Inductor's joint-graph passes for a graph that is not partitioned; without them random operators do not lower."""
    from torch._inductor.compile_fx import _recursive_joint_graph_passes

    _recursive_joint_graph_passes(gm)


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
