"""Inductor: its passes over whole graphs, and regions compiled apart from the compilation under way.

Seen to work with torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing

from lightning_deepcompile.compat.aot import BoxedCallable, current_fake_mode

_log = logging.getLogger(__name__)

__all__ = [
    "EXACT_STRIDES",
    "compile_region",
    "import_inductor",
    "inference_joint_passes",
    "prepare_cpp_compiler",
    "rounds_casts",
    "start_compile_workers",
]

EXACT_STRIDES = "eager_input_vals"
"""Key of a node's ``meta``: the arguments as traced, of an operator that needs their strides (FP8 products, custom
operators). Inductor chooses the strides of such arguments as it likes where the key is missing."""


def inference_joint_passes(gm: fx.GraphModule) -> None:
    """Runs Inductor's joint-graph passes on an unpartitioned graph; without them random operators do not lower."""
    from torch._inductor.compile_fx import _recursive_joint_graph_passes

    _recursive_joint_graph_passes(gm)


def compile_region(
    gm: fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool, is_inference: bool, rounds: bool = False
) -> BoxedCallable:
    """Compiles one region with Inductor, apart from the compilation that is in progress.

    The tracing context must be a fresh one: AOTAutograd's own names the outer backward graph's donated inputs by index,
    and Inductor would overwrite the region's inputs at the same indices: silently wrong gradients.

    Args:
        gm: The region; its output node carries ``user_visible_output_idxs``.
        inputs: Fake inputs.
        is_backward: Whether it belongs to a backward graph.
        is_inference: Whether no gradients will be needed.
        rounds: Whether casts to a narrower dtype round, as without a compiler, where fused code reads the result; see
            `rounds_casts`.

    Raises:
        RuntimeError: If Inductor would compute another number than the region says.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    if _rounds_minima() and (found := _minimum_on_cpu(gm)):
        raise RuntimeError(
            f"PyTorch {torch.__version__} computes `{found}` in integers on CPUs (a minimum or maximum of numbers that "
            "change from step to step). Use PyTorch 2.13, or make the number a tensor."
        )

    from torch._inductor import config

    settings: dict[str, bool] = {}
    if any(map(_is_symbolic, inputs)) and hasattr(config.triton, "mix_order_reduction"):
        # It pays from certain numbers of rows on, three of them, and Inductor would guard on each. The norms' gradients
        # read their inputs once more instead.
        settings["triton.mix_order_reduction"] = False
    if rounds:
        settings["emulate_precision_casts"] = True
        for node in gm.graph.nodes:
            if node.op == "call_function" and any(map(_is_narrow, (node, *node.all_input_nodes))):
                node.meta["low_precision_pointwise_barrier"] = True  # as tracing under that setting leaves it
    with tracing(TracingContext(current_fake_mode())), config.patch(settings):
        return compile_fx_inner(gm, inputs, is_backward=is_backward, is_inference=is_inference, static_input_idxs=())


def _is_symbolic(value: Any) -> bool:
    sizes = value.shape if isinstance(value, Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _is_narrow(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def rounds_casts(inputs: Sequence[Any]) -> bool:
    """Returns whether a region with these inputs can be compiled with `rounds`: C++ of PyTorch before 2.13 cannot."""
    on_cpu = any(isinstance(value, Tensor) and value.device.type == "cpu" for value in inputs)
    return not on_cpu or torch.__version__ >= "2.13"


@functools.cache
def _rounds_minima() -> bool:
    """Returns whether Inductor's C++ casts the arguments of a minimum to integers, as in torch 2.11: 0.7 becomes 0."""
    from torch.utils._sympy.functions import Min
    from torch.utils._sympy.printers import CppPrinter

    return "int64_t>(0.5" in CppPrinter().doprint(Min(sympy.Float(0.5), sympy.Symbol("x", real=True)))


def _minimum_on_cpu(gm: fx.GraphModule) -> str:
    """Finds a minimum or maximum among the non-integer numbers of a graph for CPUs; "" if there is none."""
    from torch.utils._sympy.functions import Max, Min

    values = [node.meta.get("val") for node in gm.graph.nodes]
    if not any(isinstance(value, Tensor) and value.device.type == "cpu" for value in values):
        return ""
    numbers = [value.node.expr for value in values if isinstance(value, torch.SymFloat)]
    return next((str(number) for number in numbers if number.has(Min, Max)), "")


def start_compile_workers() -> None:
    """Starts the processes in which Inductor compiles GPU kernels, or wakes them; returns at once.

    They take seconds to start, and until then kernels are compiled one after another in this process.
    ``torch.compile(backend="inductor")`` does this by itself; callers that compile a part of a graph with Inductor must
    do it. Without Triton there are none.
    """
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()


def import_inductor() -> None:
    """Imports Inductor's compiler, which takes seconds, before the first region needs it."""
    from torch._inductor import compile_fx  # noqa: F401


@functools.cache
def prepare_cpp_compiler() -> threading.Thread:
    """Starts a thread in which Inductor gets ready to compile C++ for this processor; returns at once.

    It finds the vector instructions that work, and precompiles the header of all kernels. g++ takes 14 s for both, and
    the first kernel waits for them. They stay on disk. Where this fails, the first kernel fails too, and says why.
    """
    # What the thread would import otherwise: modules of a cycle that two threads import may be seen unfinished.
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch.utils import _filelock  # noqa: F401

    def prepare() -> None:
        try:
            CppPythonBindingsCodeCache.load_pybinding_async([], "")  # the code itself is compiled when it is called
        except Exception:
            _log.debug("Inductor's C++ header was not precompiled: the first kernel will.", exc_info=True)

    thread = threading.Thread(target=prepare, name="deepcompile-cpp", daemon=True)
    thread.start()
    return thread
