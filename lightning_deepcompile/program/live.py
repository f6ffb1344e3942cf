"""Estimates the memory of a program's values between its regions, from their metadata alone."""

from __future__ import annotations

from torch import fx

from lightning_deepcompile.program.graph import (
    args_of,
    is_element,
    is_gather,
    is_read_between,
    is_reduce,
    nbytes,
    only_maker,
)
from lightning_deepcompile.program.program import Program

__all__ = ["live_bytes"]


def live_bytes(program: Program, *, inside: bool = False) -> dict[str, tuple[int, int, int]]:
    """Estimates the bytes of values before, during and after every region, without gathered parameters and shards.

    Args:
        program: The program; its schedule does not matter.
        inside: Whether the peak includes what a region is predicted to allocate and free by itself; else it is a lower
            bound.

    Returns:
        Bytes before, at the peak and after, by region name, as if no saved tensor left the device, and every gradient
        were reduced as soon as it is there.
    """
    position = {node: index for index, node in enumerate(program.gm.graph.nodes)}
    last_use = {}
    shards = {args_of(node)[0] for node in position if is_gather(node)}  # forward returns them to backward, too
    for node in position:
        if node in shards:
            continue
        readers = [reader for reader in node.users if not _is_replaced(program, reader)]
        if is_element(node) and args_of(node)[0].op == "call_module" or node.op == "placeholder" and readers:
            last_use[node] = max(map(position.__getitem__, readers), default=position[node])
    result = {}
    for call, here in position.items():
        if call.op != "call_module":
            continue
        made = [element for element in call.users if element in last_use]
        earlier = [node for node in last_use if position[node] < here]
        before = sum(nbytes(node) for node in earlier if last_use[node] >= here)
        after = sum(nbytes(node) for node in earlier if last_use[node] > here) + sum(nbytes(node) for node in made)
        own = sum(nbytes(node) for node in made)
        if inside:
            own = max(own, program.region(str(call.target)).info.memory.peak)
        result[str(call.target)] = (before, before + own, after)
    return result


def _is_replaced(program: Program, node: fx.Node) -> bool:
    """Returns whether schedules replace `node` by instructions of their own."""
    if is_gather(node):
        return not is_read_between(node)
    return is_reduce(node) and only_maker(node, program.kind) is not None
