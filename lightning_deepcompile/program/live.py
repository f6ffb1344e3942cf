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
from lightning_deepcompile.program.sizes import Sizes

__all__ = ["live_bytes", "traffic"]


def traffic(program: Program, sizes: Sizes) -> dict[str, int]:
    """Returns the bytes of values that each region reads and makes, without parameters, by region name.

    Args:
        program: The program.
        sizes: Values of its symbolic sizes.
    """
    found = {}
    for call in program.gm.graph.nodes:
        if call.op == "call_module":
            read = [node for node in call.all_input_nodes if not is_gather(node)]
            found[str(call.target)] = sum(nbytes(node, sizes) for node in (*read, *call.users))
    return found


def live_bytes(
    program: Program, *, inside: bool = False, sizes: Sizes | None = None
) -> dict[str, tuple[int, int, int]]:
    """Estimates the bytes of values before, during and after every region, without gathered parameters and shards.

    Args:
        program: The program; its schedule does not matter.
        inside: Whether the peak includes what a region is predicted to allocate and free by itself; else it is a lower
            bound.
        sizes: Values of symbolic sizes; None: they count with their hints.

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
    result, bytes_of = {}, {node: nbytes(node, sizes) for node in last_use}
    for call, here in position.items():
        if call.op != "call_module":
            continue
        made = [element for element in call.users if element in last_use]
        earlier = [node for node in last_use if position[node] < here]
        own = sum(bytes_of[node] for node in made)
        before = sum(bytes_of[node] for node in earlier if last_use[node] >= here)
        after = sum(bytes_of[node] for node in earlier if last_use[node] > here) + own
        if inside:
            own = max(own, program.region(str(call.target)).info.memory.peak.at(sizes))
        result[str(call.target)] = (before, before + own, after)
    return result


def _is_replaced(program: Program, node: fx.Node) -> bool:
    """Returns whether schedules replace `node` by instructions of their own."""
    if is_gather(node):
        return not is_read_between(node)
    return is_reduce(node) and only_maker(node, program.kind) is not None
