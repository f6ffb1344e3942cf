"""Steps that would train silently wrong on shards are refused while they are compiled, with the place named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
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

__all__ = ["UnsupportedStepError", "check_graph", "explain"]

# Methods that end in an underscore, and write to no memory.
_HARMLESS = frozenset({"requires_grad_", "and_", "or_"})


class UnsupportedStepError(RuntimeError):
    """A step does with its parameters what cannot be done with shards."""


def check_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    names: Mapping[int, str],
    replicated: Sequence[nn.Parameter] = (),
) -> None:
    """Raises for a graph that writes to a gathered parameter, or reads a parameter without gathering it.

    Args:
        gm: Dynamo's graph.
        example_inputs: Its inputs.
        names: Parameter names by id.
        replicated: Parameters that are not sharded.

    Raises:
        UnsupportedStepError: Names the parameter and the line.
    """
    for value in example_inputs:
        stray = isinstance(value, nn.Parameter) and not isinstance(value, DTensor | FakeTensor)
        if stray and value.requires_grad and not any(value is known for known in replicated):
            raise UnsupportedStepError(
                f"The step reads a parameter of shape {tuple(value.shape)} that no module of the LightningModule "
                "holds, or held before it was sharded: it would not be trained. Read it through the module that owns "
                "it (`self.layer.weight`) rather than through another reference, and register what is to be trained."
            )
    if any(isinstance(value, DTensor) for value in example_inputs):
        raise UnsupportedStepError(_UNGATHERED)
    _check_writes(gm, {}, names)


_UNGATHERED = (
    "The step reads parameters through `parameters()`, `named_parameters()`, `state_dict()` or `_parameters`. Under "
    "DeepCompileStrategy that gives this rank's shards; only an attribute of the module that owns it "
    "(`self.layer.weight`) gives the whole parameter, with its gradient. Read it that way, use the optimizer's "
    "`weight_decay` for a penalty on all weights and `self.clip_gradients` to clip, or move the code to a hook "
    "outside of the step, such as `on_train_batch_end` (for an average of weights, say, or for "
    "`target.load_state_dict(net.state_dict())`), where it can work on the shards. Or it calls a copy "
    "(`copy.deepcopy`) that was made of a sharded module, which has shards only: copy modules in `setup` or before, "
    "or inside of `trainer.strategy.full_parameters()`."
)
_TWICE = (
    "The step differentiates a gradient (`torch.autograd.grad(..., create_graph=True)`), for which PyTorch compiles no "
    "graph. Compute the inner gradient by a function: `torch.func.grad`, `torch.func.jacrev` or `torch.func.vjp` of "
    "the module's call, inside of the step."
)
_EXPLANATIONS = {
    "mixed torch.Tensor and DTensor": _UNGATHERED,
    "does not currently support double backward": _TWICE,
}


def explain(error: BaseException) -> UnsupportedStepError | None:
    """What to raise for an error of PyTorch's that does not say what to do; None if nothing is known of it."""
    known = _EXPLANATIONS.items() if isinstance(error, RuntimeError) else ()
    return next((UnsupportedStepError(text) for part, text in known if part in str(error)), None)


def _check_writes(gm: fx.GraphModule, inherited: Mapping[fx.Node, str], names: Mapping[int, str]) -> None:
    # Which nodes are (views of) gathered parameters. `inherited`: placeholders of a checkpointed graph that are.
    gathered: dict[fx.Node, str] = dict(inherited)
    for node in gm.graph.nodes:
        if compat.is_checkpoint(node):
            inner = {i: gathered[o] for i, o in checkpoint_operands(gm, node) if o in gathered}
            _check_writes(checkpoint_body(gm, node), inner, names)
        elif calls_gather(node):
            gathered[node] = names[gathered_id(node)]
        elif node.op in ("call_function", "call_method"):
            for written in _written(node):
                if written in gathered:
                    raise UnsupportedStepError(_write_message(gathered[written], node))
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
    where = "\n".join(lines[-2:]) if lines else f"  {node.format_node()}"
    return (
        f"The step writes to the parameter {parameter!r} in place:\n{where}\nInside a step that is a gathered copy, "
        "and what is written to it would be lost. Move the change to a hook outside of the step, such as "
        "`on_train_batch_end`, where the parameter is this rank's shard and element-wise changes work."
    )
