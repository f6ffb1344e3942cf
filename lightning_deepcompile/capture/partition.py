"""Cuts the joint graph so that no gathered parameter is saved for backward, nor anything that is overwritten by then.

A gather is not on the partitioner's list of cheap operators: by default it saves every full parameter as an activation.
Tagging only the gather is not enough: the partitioner then saves a value computed from it that is as large, such as the
cast under autocast, the transpose, or the concatenation of several weights.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from lightning_deepcompile import compat
from lightning_deepcompile.program.graph import args_of, is_gather, is_random, is_reduce, output_node

# One constant for all: the partitioner turns a tag into "must save" where two adjacent nodes carry rising numbers.
_GRAPH_ID = 100_000

_COPY = torch.ops.aten.clone.default

# A product of parameters (a low-rank update) is worth saving: the cost to compute it is not known here.
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "convolution"})


def tag_gathers(gm: fx.GraphModule) -> None:
    """Marks every gather, and every value computed from parameters alone, for recomputation in backward."""
    for node in _of_parameters_alone(gm.graph):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = _GRAPH_ID


def protect_written_inputs(gm: fx.GraphModule) -> None:
    """Makes backward see buffers as they were before the step wrote to them.

    The write comes last in the forward graph. Still, the partitioner may save the buffer itself, which by then holds
    the new value, and recompute from it what forward had computed from the old one: wrong gradients.
    """
    copies = [n for n in gm.graph.nodes if n.target is torch.ops.aten.copy_.default and n.args[0].op == "placeholder"]
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for written in dict.fromkeys(node.args[0] for node in copies):
        readers = [user for user in written.users if user not in copies and user.op != "output"]
        if readers:
            with gm.graph.inserting_after(placeholders[-1]):
                before = gm.graph.call_function(_COPY, (written,))
            before.meta.update(val=torch.empty_like(written.meta["val"]), recompute=CheckpointPolicy.MUST_SAVE)
            for reader in readers:
                reader.replace_input_with(written, before)


def count_saved_parameters(forward: fx.GraphModule, num_outputs: int) -> int:
    """Counts gathered parameters, and values computed from them alone, among the tensors saved for backward.

    Args:
        forward: The partitioned forward graph.
        num_outputs: How many of its outputs are not saved tensors.
    """
    derived = _of_parameters_alone(forward.graph)
    return sum(node in derived for node in args_of(output_node(forward.graph))[0][num_outputs:])


def separate_outputs(gm: fx.GraphModule, num_outputs: int) -> None:
    """Makes every output a separate tensor.

    Inductor's passes drop copies: of a loss and its detached copy only one tensor is left, which requires no gradient,
    as the copy does not.

    Args:
        gm: A forward graph after all passes.
        num_outputs: How many of its outputs are not saved tensors.
    """
    output = output_node(gm.graph)
    (before,) = args_of(output)
    values = list(before)
    seen: set[fx.Node] = set()
    for index, value in enumerate(values[:num_outputs]):
        if value in seen:
            with gm.graph.inserting_before(output):
                values[index] = gm.graph.call_function(_COPY, (value,))
            values[index].meta.update(val=value.meta["val"].clone())
        elif isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor):
            seen.add(value)
    output.args = (type(before)(values),)


def _of_parameters_alone(graph: fx.Graph) -> set[fx.Node]:
    """The gathers, and nodes that read only them and constants. Products and random operators end a chain."""
    derived: set[fx.Node] = set()
    constants: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            constants.add(node)
        elif is_gather(node):
            derived.add(node)
        elif node.op == "call_function" and not is_reduce(node) and not _must_run_once(node):
            sources = set(node.all_input_nodes)
            if sources <= constants:
                constants.add(node)
            elif all(source in derived or source in constants for source in sources):
                derived.add(node)
    return derived


def _must_run_once(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, compat.OpOverload):
        return target is not operator.getitem
    name = compat.schema_of(target).name.partition("::")[2]
    return name in _PRODUCTS or torch.Tag.nondeterministic_seeded in target.tags or compat.schema_of(target).is_mutable


def partition(
    gm: fx.GraphModule, joint_inputs: Sequence[Any], *, checkpointed: bool = True, sparing: bool = False, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partitions the joint graph for AOTAutograd.

    Args:
        gm: The joint graph.
        joint_inputs: Its inputs.
        checkpointed: Whether backward recomputes what the model runs under activation checkpointing.
        sparing: Whether to save little, and recompute all that is cheap.
        **kwargs: As for `compat.partition`.

    Returns:
        Forward and backward graph.
    """
    hide_from_passes(gm)
    prepare = _prepare if checkpointed else _prepare_uncheckpointed
    parts = compat.partition(gm, joint_inputs, prepare, sparing=sparing, **kwargs)
    # PyTorch's backward graph would write its code at every change, and once more when AOTAutograd copies it.
    forward, backward = (compat.graph_module(part, part.graph) for part in parts)
    for part in (forward, backward):
        _show_randomness(part)
    separate_outputs(forward, kwargs["num_fwd_outputs"])
    return forward, backward


def hide_from_passes(gm: fx.GraphModule) -> None:
    """Hides operators that Inductor's passes over whole graphs would handle wrongly, until `show_to_compiler`.

    The passes fail if rows are picked by a random permutation (``x[torch.randperm(n)]``), and drop copies of inputs, as
    if nobody could write to those before backward: a queue of keys is read, copied, by one graph, and written by the
    next.

    Args:
        gm: A joint or an inference graph.
    """
    for node in gm.graph.nodes:
        is_copy = node.target is _COPY and _viewed(node.args[0]).op == "placeholder"
        if is_copy or node.target is torch.ops.aten.randperm.default:
            node.target = _Hidden(node.target)
            if is_copy:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _viewed(node: fx.Node) -> fx.Node:
    """The node that `node` is a view of, through views of views; itself if it is none."""
    while isinstance(node.target, compat.OpOverload):
        returns = compat.schema_of(node.target).returns
        if compat.schema_of(node.target).is_mutable or not returns or returns[0].alias_info is None:
            break
        node = args_of(node)[0]
    return node


def show_to_compiler(gm: fx.GraphModule) -> None:
    """Undoes `hide_from_passes`."""
    for node in gm.graph.nodes:
        if type(node.target) is _Hidden:
            node.target = node.target.operator


def _prepare(gm: fx.GraphModule) -> None:
    show_to_compiler(gm)
    tag_gathers(gm)
    protect_written_inputs(gm)
    _hide_randomness(gm)


def _prepare_uncheckpointed(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        node.meta.pop("recompute", None)
        node.meta.pop("ac_graph_id", None)
    _prepare(gm)


class _Hidden:
    """Stands for an operator that a pass must not recognise."""

    def __init__(self, operator_: compat.OpOverload) -> None:
        self.operator, self.overloadpacket = operator_, operator_.overloadpacket  # the partitioner knows it by these
        self.__name__ = operator_.__name__
        self.__module__ = operator_.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.operator(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hidden:
        return self


class _Certain(_Hidden):
    """Stands for a random operator in calls that draw no random numbers."""


def _hide_randomness(gm: fx.GraphModule) -> None:
    """Hides attention without dropout, which is tagged as random all the same.

    Recomputed in backward (activation checkpointing), it would first save and restore the state of the random
    generator:
    host time, and a state for each layer, for nothing.
    """
    certain: dict[compat.OpOverload, _Certain] = {}
    for node in gm.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not is_random(node):
            node.target = certain.setdefault(node.target, _Certain(node.target))


def _show_randomness(gm: fx.GraphModule) -> None:
    hidden = [node for node in gm.graph.nodes if isinstance(node.target, _Certain)]
    for node in hidden:
        node.target = node.target.operator
    if hidden:
        gm.recompile()
