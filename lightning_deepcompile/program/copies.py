"""Copies of saved tensors to host memory and back, as instructions in a program's graph.

A forward program hands on the host tensor in place of the value; its backward program reads what was copied back in
place of its placeholder. Nothing else knows of it: AOTAutograd saves whatever the forward program returns.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from lightning_deepcompile.program.graph import args_of, output_node
from lightning_deepcompile.program.instructions import COPIES, Traits, instructions_of

__all__ = ["CopyWriter", "copied_numbers", "strip_copies"]


def copied_numbers(node: fx.Node) -> tuple[int, ...]:
    """The numbers of the saved tensors that an instruction of this module concerns."""
    return tuple(_original(source).meta["saved"] for source in args_of(node)[1])


def _original(node: fx.Node) -> fx.Node:
    return node if "saved" in node.meta else args_of(args_of(node)[0])[1][args_of(node)[1]]


def strip_copies(graph: fx.Graph) -> None:
    """Takes all copies out of `graph`: every saved tensor stays on the device."""
    copies = [node for node, traits in instructions_of(graph) if traits.op in COPIES]
    for node in reversed(copies):  # what waits for a copy comes behind it
        for element in list(node.users):
            element.replace_all_uses_with(args_of(node)[1][args_of(element)[1]])
            graph.erase_node(element)
        graph.erase_node(node)


@dataclass
class CopyWriter:
    """Writes copies into a program without any, in the order in which they run.

    Args:
        graph: The program's graph.
        graph_id: Runtime id of the graph.
    """

    graph: fx.Graph
    graph_id: int
    _values: dict[int, fx.Node] = field(init=False)
    _hosts: dict[int, fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        self._values = {node.meta["saved"]: node for node in self.graph.nodes if "saved" in node.meta}
        self._hosts = {number: node for number, node in self._values.items() if node.op == "placeholder"}

    def write(self, traits: Traits, numbers: Sequence[int]) -> None:
        """Writes one of the table's instructions on saved tensors, where the graph is being written.

        What starts a copy has those read the copy that come later: a forward program's output, or regions of a backward
        program. What waits is told of the host tensor of either.
        """
        waits = traits.effect[0] == "wait"
        sources = [(self._hosts if waits else self._values)[n] for n in numbers]
        call = traits.write(self.graph, self.graph_id, tensors=sources)
        if waits:
            return
        for position, (number, source) in enumerate(zip(numbers, sources, strict=True)):
            copy = self.graph.call_function(operator.getitem, (call, position))
            copy.meta["val"] = source.meta.get("val")
            if traits.in_forward:
                self._hosts[number] = copy
                readers = [output_node(self.graph)]
            else:
                readers = [user for user in source.users if user.op == "call_module"]
            for reader in readers:
                reader.replace_input_with(source, copy)
