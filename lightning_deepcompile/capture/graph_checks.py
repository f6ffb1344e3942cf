"""Refuses graphs that would be wrong on shards while they are compiled: their code runs uncompiled, or fails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from lightning_deepcompile import compat
from lightning_deepcompile.capture.dynamo_graph import (
    VIEWS,
    calls_gather,
    checkpoint_body,
    checkpoint_operands,
    gathered_id,
    name_of,
)
from lightning_deepcompile.sharding.errors import UnsupportedStepError

# Methods that end in an underscore but write to no memory.
_HARMLESS = frozenset({"requires_grad_", "and_", "or_"})


class UncompilableError(RuntimeError):
    """A function uses its parameters in a way that a graph cannot handle, and the uncompiled path can."""


def check_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], names: Mapping[int, str], replicated: Sequence[nn.Parameter] = ()
) -> None:
    """Raises for a graph that writes to a gathered parameter, or that treats a parameter as more than a tensor.

    Raises:
        UncompilableError: Names the parameter and the line, or the call, for which the function must run as it is.
        UnsupportedStepError: For a parameter that would not be trained.
    """
    for value in example_inputs:
        stray = isinstance(value, nn.Parameter) and not isinstance(value, DTensor | compat.FakeTensor)
        if stray and value.requires_grad and not any(value is known for known in replicated):
            raise UnsupportedStepError(
                f"The step reads a parameter of shape {tuple(value.shape)} that no module of the LightningModule "
                "holds, or held before it was sharded: it would not be trained. Read it through the module that owns "
                "it (`self.layer.weight`) rather than through another reference, and register what is to be trained."
            )
    if any(isinstance(value, DTensor) for value in example_inputs):
        raise UncompilableError(
            "it handles parameters themselves, not attributes of modules (`parameters()`, `named_parameters()`, "
            "`state_dict()`)"
        )
    _check_writes(gm, {}, names)


def check_losses_are_apart(gm: fx.GraphModule) -> None:
    """Raises for a graph that a second backward pass may go through, which would be a separate graph in eager code.

    For example the discriminator's loss and the fake images of a GAN: their backward is one compiled function, which
    the first pass frees, and whose parameters an optimizer's step changes.

    Args:
        gm: Dynamo's graph, of a step with several backward passes.

    Raises:
        UncompilableError: If it returns a loss (one number with a gradient) and something else with a gradient.
    """
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    values = [node.meta.get("example_value") for node in output.all_input_nodes]
    differentiable = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    if len(differentiable) > 1 and any(value.numel() == 1 for value in differentiable):
        shapes = ", ".join(str(tuple(value.shape)) for value in differentiable if value.numel() != 1) or "another loss"
        raise UncompilableError(
            f"it computes a loss and other tensors with gradients ({shapes}) before a backward pass, and each backward "
            "pass needs a graph of its own (`detach` what is not differentiated later, or compute it then)"
        )


_MIXED = (
    "A step computes with shards and whole tensors together. It has taken them off the parameters before the step "
    "began, or calls a copy (`copy.deepcopy`) that was made of a sharded module, which has shards only: copy modules "
    "in `setup` or before, or inside of `trainer.strategy.full_parameters()`."
)
_TWICE = (
    "A compiled function is differentiated twice (`create_graph=True`), for which PyTorch compiles no graph. Its code "
    "does not say so by that name: put `@torch.compiler.disable` on the step, or on the part that is differentiated."
)
_EXPLANATIONS = {"mixed torch.Tensor and DTensor": _MIXED, "does not currently support double backward": _TWICE}


def unsupported_step_error(error: BaseException) -> UnsupportedStepError | None:
    """Returns the error to raise for one of PyTorch's that does not say what to do; None if it is not known."""
    known = _EXPLANATIONS.items() if isinstance(error, RuntimeError) else ()
    return next((UnsupportedStepError(text) for part, text in known if part in str(error)), None)


def _check_writes(gm: fx.GraphModule, inherited: Mapping[fx.Node, str], names: Mapping[int, str]) -> None:
    # The nodes that are (views of) gathered parameters. `inherited`: such placeholders of a checkpointed graph.
    gathered: dict[fx.Node, str] = dict(inherited)
    for node in gm.graph.nodes:
        if compat.is_checkpoint(node):
            inner = {i: gathered[o] for i, o in checkpoint_operands(gm, node) if o in gathered}
            _check_writes(checkpoint_body(gm, node), inner, names)
        elif calls_gather(node):
            gathered[node] = names[cast(int, gathered_id(node))]
        elif node.op in ("call_function", "call_method"):
            for written in _written(node):
                if written in gathered:
                    raise UncompilableError(_write_message(gathered[written], node))
            source = next(iter(node.all_input_nodes), None)
            if source in gathered and name_of(node) in VIEWS | {"data", "getattr"}:
                gathered[node] = gathered[source]


def _written(node: fx.Node) -> Iterable[fx.Node]:
    """The arguments that `node` may write to."""
    if "out" in node.kwargs:
        yield from _nodes(node.kwargs["out"])
    name = name_of(node) or getattr(node.target, "__name__", "")
    max_norm = node.args[3] if len(node.args) > 3 else node.kwargs.get("max_norm")
    if name == "embedding" and max_norm is not None:
        yield from _nodes(node.args[1] if len(node.args) > 1 else node.kwargs["weight"])
    in_place = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    augmented = node.op == "call_function" and name.startswith("i") and name[1:] in _AUGMENTED
    if (in_place or augmented or name == "setitem") and node.args:
        yield from _nodes(node.args[0])


_AUGMENTED = frozenset("add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split())


def _nodes(value: Any) -> list[fx.Node]:
    if isinstance(value, tuple | list):
        return [node for item in value for node in _nodes(item)]
    return [value] if isinstance(value, fx.Node) else []


def _write_message(parameter: str, node: fx.Node) -> str:
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    where = " ".join(line.strip() for line in lines[-2:]) or node.format_node()
    return f"it writes to the parameter {parameter!r} ({where})"
