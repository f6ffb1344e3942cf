"""Lists the kernels of a region, from its operators and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from lightning_deepcompile.plan.devices import Kernel
from lightning_deepcompile.program.extract import ExtractedRegion
from lightning_deepcompile.program.flops import flops_of
from lightning_deepcompile.program.graph import is_element, is_view, named_args, nbytes
from lightning_deepcompile.program.program import Program
from lightning_deepcompile.program.region_memory import values_in_memory
from lightning_deepcompile.program.schedule import ProgramKind

_OF_ATTENTION = frozenset(["is_causal", "custom_mask_type"])
"""Arguments that operators of attention have, and no others."""


class CountedRegion:
    """Stands where a compiled region would.

    Args:
        kernels: Its work.
    """

    def __init__(self, kernels: list[Kernel]) -> None:
        self.kernels = kernels

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Refuses to run."""
        raise RuntimeError("A region ran that was counted and not compiled. This is a bug: please report it.")


class CountedRegions:
    """Counts the work of regions in place of compiling them; takes the place of a `RegionCompiler`.

    Args:
        backend: As `CompileConfig.region_backend`.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.compiled = self.requested = 0
        self.seconds = 0.0
        self._known: dict[tuple[str, ProgramKind], CountedRegion] = {}

    def __call__(self, extracted: ExtractedRegion, kind: ProgramKind, *, rounds: bool = False) -> CountedRegion:
        """Returns the work of `extracted`, which is counted once for all regions of the same content."""
        self.requested += 1
        key = extracted.key, kind
        if key not in self._known:
            self.compiled += 1
            region = extracted.region
            kernels = list(_kernels(region.nodes, region.outputs, compiled=self.backend == "inductor"))
            self._known[key] = CountedRegion(kernels)
        return self._known[key]


def _kernels(nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], *, compiled: bool) -> Iterator[Kernel]:
    made = set(values_in_memory(nodes, outputs, compiled=compiled))
    own = set(nodes)

    def sources(node: fx.Node) -> dict[fx.Node, None]:
        """Returns what a kernel that writes `node` reads from memory, through views and fused operators."""
        found: dict[fx.Node, None] = {}
        waiting = list(node.all_input_nodes)
        while waiting:
            source = waiting.pop()
            if source not in own or source in made:
                found[source] = None
            else:
                waiting += source.all_input_nodes
        return found

    for node in nodes:
        if is_view(node) or is_element(node):
            continue
        operations = flops_of(node)
        results = [one for one in node.users if is_element(one) and one in own] or [node]
        if not operations and not any(one in made for one in results):
            continue  # computed with what reads it
        moved = sum(map(nbytes, sources(node))) + sum(map(nbytes, results))
        operand = next((one.meta["val"] for one in node.all_input_nodes if _is_tensor(one)), None)
        dtype = "" if operand is None else str(operand.dtype).removeprefix("torch.")
        arguments = named_args(node)
        if arguments.get("is_causal", False):
            operations //= 2  # the formula counts what is masked, too
        yield Kernel(moved, operations, dtype, attends=not _OF_ATTENTION.isdisjoint(arguments))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def seconds_of(program: Program, seconds: Callable[[Kernel], float]) -> dict[str, float]:
    """Returns the time of every region of a program whose regions were counted.

    Args:
        program: The program.
        seconds: Of one kernel.
    """
    found: dict[str, float] = {}
    for name, region in program.regions.items():
        assert isinstance(region.run, CountedRegion)
        found[name] = sum(map(seconds, region.run.kernels))
    return found
