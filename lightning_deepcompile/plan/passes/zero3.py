"""ZeRO-3: every parameter is sharded except while a region uses it, every gradient is reduced as soon as it exists."""

from __future__ import annotations

import operator
from dataclasses import replace

from torch import fx

from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.program.graph import args_of, is_gather, is_reduce, output_node
from lightning_deepcompile.program.instructions import TABLE, Traits, traits_of
from lightning_deepcompile.program.program import Program

__all__ = ["zero3"]


def zero3(program: Program, settings: PlanSettings) -> Program:
    """Replaces functional gathers and reductions by scheduled groups, one per region.

    Looks for: ``dc.gather`` feeding a region; ``dc.reduce`` of a region's output that is a graph output.

    Changes: before each region ``prefetch_params_fused`` (launch as one group) and ``wait_allgather_fused``, after it
    ``release_params_fused`` and ``reduce_grads_fused``; reduced gradients leave the graph as None, as the runtime
    accumulates them: each micro-batch's or, with ``reduce="boundary"``, their sum. A backward program ends with
    ``end_backward``. A parameter that the next region reads again is not released in between. With ``keep_last_block``
    the forward program's last group stays for the backward program, which releases at once what it does not read.

    Promises: same values; at most the parameters of one region gathered at a time (of two with ``keep_last_block``).

    Args:
        program: Program in functional form.
        settings: What the user chose.

    Returns:
        The scheduled program; its ``kept`` names what a forward program leaves gathered.
    """
    result = program.copy()
    graph = result.gm.graph
    regions = result.regions()
    needs = [[n for n in dict.fromkeys(region.all_input_nodes) if is_gather(n)] for region in regions]
    ids: list[list[int]] = [[args_of(n)[1] for n in gathers] for gathers in needs]
    last_group = max((k for k, group in enumerate(ids) if group), default=-1)
    keep = set(ids[last_group]) if program.kind == "forward" and settings.keep_last_block and last_group >= 0 else set()
    unread = sorted(set(program.kept).difference(*ids))
    if unread and regions:
        # Parameters of one group share their memory: a bias that backward does not read would hold its whole block.
        with graph.inserting_before(regions[0]):
            TABLE["release"].write(graph, program.graph_id, ids=unread)
    held: set[int] = set()
    for k, region in enumerate(regions):
        fresh = [n for n in needs[k] if n.args[1] not in held]
        with graph.inserting_before(region):
            if fresh:
                group = [n.args[1] for n in fresh]
                dtypes = [n.args[3] for n in fresh]
                TABLE["gather"].write(graph, program.graph_id, shards=[], ids=group, dtypes=dtypes)
            if needs[k]:
                wait = TABLE["wait"].write(graph, program.graph_id, ids=ids[k])
                for position, gather in enumerate(needs[k]):
                    parameter = graph.call_function(operator.getitem, (wait, position))
                    parameter.meta["val"] = gather.meta["val"]
                    region.replace_input_with(gather, parameter)
        following = set(ids[k + 1]) if k + 1 < len(ids) else set()
        held = {i for i in ids[k] if i in following}
        kept_here = keep if k == last_group else set()
        released = [i for i in ids[k] if i not in held and i not in kept_here]
        point = region.next
        while point.op == "call_function" and point.target is operator.getitem and point.args[0] is region:
            point = point.next
        with graph.inserting_before(point):
            if released:
                TABLE["release"].write(graph, program.graph_id, ids=released)
            # A gradient that does not depend on the loss's is computed, and saved, by the forward graph: there the
            # functional reduction stays, and its result reaches `.grad` through autograd.
            if program.kind == "backward":
                traits = TABLE["reduce_at_boundary" if settings.reduce == "boundary" else "reduce"]
                _reduce_gradients(graph, region, program.graph_id, traits)
    if program.kind == "backward":
        with graph.inserting_before(output_node(graph)):
            TABLE["end"].write(graph, program.graph_id)
    graph.eliminate_dead_code(is_impure_node=_is_impure)
    for gather in [n for n in graph.nodes if is_gather(n) and not n.users]:
        graph.erase_node(gather)
    kept = tuple(sorted(keep)) if program.kind == "forward" else program.kept
    return replace(result, kept=kept).finish("zero3")


def _reduce_gradients(graph: fx.Graph, region: fx.Node, graph_id: int, traits: Traits) -> None:
    """One group for all gradients that `region` produces and that only leave the graph."""
    reductions = []
    for element in region.users:
        for user in element.users:
            if is_reduce(user) and all(u.op == "output" for u in user.users):
                reductions.append(user)
    if not reductions:
        return
    reductions.sort(key=lambda n: args_of(n)[1])
    grads, ids = [n.args[0] for n in reductions], [n.args[1] for n in reductions]
    traits.write(graph, graph_id, tensors=grads, ids=ids)
    for node in reductions:
        node.replace_all_uses_with(None)  # type: ignore[arg-type] # an output may be None
        graph.erase_node(node)


def _is_impure(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or traits_of(node) is not None
