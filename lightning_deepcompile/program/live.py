"""How much memory a program's values take between its regions, from their metadata alone."""

from __future__ import annotations

from torch import fx

from lightning_deepcompile.program.copies import strip_copies
from lightning_deepcompile.program.graph import args_of, is_element, nbytes
from lightning_deepcompile.program.instructions import REDUCTIONS, instructions_of
from lightning_deepcompile.program.program import Program

__all__ = ["live_bytes"]


def live_bytes(program: Program) -> dict[str, tuple[int, int, int]]:
    """Estimates what values take before, during and after every region; gathered parameters and shards do not count.

    What a region allocates and frees by itself is not seen, so the peak is a lower bound.

    Args:
        program: A scheduled program.

    Returns:
        Bytes before, at the peak and after, by region name, as if no saved tensor left the device, and every gradient
        were reduced as soon as it is there.
    """
    program = program.copy()
    strip_copies(program.gm.graph)
    nodes = [node for node in program.gm.graph.nodes if _counts(node)]
    position = {node: index for index, node in enumerate(program.gm.graph.nodes)}
    reductions = {node for node, traits in instructions_of(program.gm.graph) if traits.op in REDUCTIONS}
    last_use = {
        node: max(map(position.__getitem__, node.users.keys() - reductions), default=position[node]) for node in nodes
    }
    result = {}
    for call in program.regions():
        here = position[call]
        made = [element for element in call.users if element in last_use]
        earlier = [node for node in nodes if position[node] < here]
        before = sum(nbytes(node) for node in earlier if last_use[node] >= here)
        after = sum(nbytes(node) for node in earlier if last_use[node] > here) + sum(nbytes(node) for node in made)
        result[str(call.target)] = (before, before + sum(nbytes(node) for node in made), after)
    return result


def _counts(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return bool(node.users)  # shards have none: gathers name them by number
    return is_element(node) and args_of(node)[0].op == "call_module"
