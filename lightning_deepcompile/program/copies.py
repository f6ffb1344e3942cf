"""Copies of saved tensors to host memory and back, as instructions in a program's graph.

A forward program hands on the host tensor in place of the value; its backward program reads what was copied back in
place of its placeholder. Nothing else knows of it: AOTAutograd saves whatever the forward program returns.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from lightning_deepcompile import compat
from lightning_deepcompile.program.graph import args_of, output_node

__all__ = ["OFFLOAD", "RELOAD", "WAIT_COPIES", "CopyWriter", "copied_numbers", "strip_copies"]

OFFLOAD = "dc.offload_tensors_fused.default"
RELOAD = "dc.reload_tensors_fused.default"
WAIT_COPIES = "dc.wait_copies_fused.default"


def copied_numbers(node: fx.Node) -> tuple[int, ...]:
    """The numbers of the saved tensors that an instruction of this module concerns."""
    return tuple(_original(source).meta["saved"] for source in args_of(node)[1])


def _original(node: fx.Node) -> fx.Node:
    return node if "saved" in node.meta else args_of(args_of(node)[0])[1][args_of(node)[1]]


def strip_copies(graph: fx.Graph) -> None:
    """Takes all copies out of `graph`: every saved tensor stays on the device."""
    copies = [node for node in graph.nodes if str(node.target) in (OFFLOAD, RELOAD, WAIT_COPIES)]
    for node in copies:
        if str(node.target) == WAIT_COPIES:
            graph.erase_node(node)
    for node in copies:
        if str(node.target) == WAIT_COPIES:
            continue
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

    def offload(self, numbers: Sequence[int]) -> None:
        """Starts copying values of a forward program to the host, where the graph is being written."""
        call = torch.ops.dc.offload_tensors_fused.default
        output = output_node(self.graph)
        for number, host in zip(numbers, self._call(call, [self._values[n] for n in numbers]), strict=True):
            self._hosts[number] = host
            output.replace_input_with(self._values[number], host)

    def reload(self, numbers: Sequence[int]) -> None:
        """Starts copying what a forward program left on the host; regions of the backward program read the copies."""
        call = torch.ops.dc.reload_tensors_fused.default
        hosts = [self._values[n] for n in numbers]
        readers = [[user for user in host.users if user.op == "call_module"] for host in hosts]
        for host, copy, users in zip(hosts, self._call(call, hosts), readers, strict=True):
            for user in users:
                user.replace_input_with(host, copy)

    def wait(self, numbers: Sequence[int]) -> None:
        """Makes compute wait for the last copies of these tensors."""
        hosts = [self._hosts[n] for n in numbers]
        self.graph.call_function(torch.ops.dc.wait_copies_fused.default, (self.graph_id, hosts))

    def _call(self, target: compat.OpOverload, sources: list[fx.Node]) -> list[fx.Node]:
        call = self.graph.call_function(target, (self.graph_id, sources))
        elements = []
        for position, source in enumerate(sources):
            element = self.graph.call_function(operator.getitem, (call, position))
            element.meta["val"] = source.meta.get("val")
            elements.append(element)
        return elements
