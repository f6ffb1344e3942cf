"""The program: compiled regions and the values between them, and the schedule in which they and communication run."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_deepcompile.program.instructions import AT_BOUNDARY
from lightning_deepcompile.program.region_memory import RegionMemory
from lightning_deepcompile.program.saved import Saved
from lightning_deepcompile.program.schedule import ProgramKind, Schedule
from lightning_deepcompile.program.sizes import Noted, Sizes, read_sizes, tensor_bytes
from lightning_deepcompile.program.values import Name, Value, names_in
from lightning_deepcompile.ranks.order import EXCHANGES

DERIVE = "derive"
"""In a program's collectives: the exchange of maxima from which values are derived, if parameters have changed."""

LOCAL_ID = 0xFFFFFFFF
"""The part of an id that is the same on all ranks: the rest is the runtime's number."""


@dataclass(frozen=True)
class ParamInfo:
    """The properties of a parameter that passes use.

    Args:
        ds_id: Runtime id.
        name: Fully qualified name.
        block: Block it communicates with.
        gathered_bytes: Bytes of the gathered parameter in its compute dtype, padding included.
        dtype: Compute dtype, which is the dtype on the wire.
    """

    ds_id: int
    name: str
    block: str
    gathered_bytes: int
    dtype: torch.dtype


@dataclass(frozen=True)
class DerivedValue:
    """A value that is computed of one parameter whenever that has changed.

    Args:
        number: Its number within the model, where parameters have numbers, too; the same on all ranks.
        source: Runtime id of the parameter.
        shape: Its shape; if it is gathered, the parameter's rows come first.
        dtype: Its dtype.
        is_gathered: Whether a rank has rows of it; otherwise all ranks have the same.
    """

    number: int
    source: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_gathered: bool

    @property
    def id(self) -> int:
        """Its runtime id."""
        return self.source & ~LOCAL_ID | self.number


@dataclass(frozen=True, eq=False)
class DerivedBlock:
    """The derived values of one block of parameters, and the functions that compute them; see `derive`.

    Args:
        block: The block.
        sources: Runtime ids of its parameters.
        values: The values.
        maxima: Number of the maxima that ranks exchange.
        masked: Places of the parameters whose padding must not count as rows.
        compare: Takes shards, and which of their rows are no padding; returns maxima over this rank's rows.
        compute: Takes shards, maxima over the rows of all ranks, and the tensors that it writes the values to.
    """

    block: str
    sources: tuple[int, ...]
    values: tuple[DerivedValue, ...]
    maxima: int
    masked: tuple[int, ...]
    compare: Callable[[list[Any]], Sequence[Any]] | None
    compute: Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class RegionInfo:
    """The properties of a region, apart from its code.

    Args:
        key: Content key; equal regions share it.
        blocks: Blocks that it works for.
        nodes: Number of operators before compilation.
        repeatable: Whether it may be called again with the same inputs; see `is_repeatable`.
        lookups: Its exchanges with other ranks: for each look-up in a table, its part in it and the table's id.
        memory: The predicted memory of the values that it makes.
        statistics: The number of operators that share statistics of the batch with other ranks.
        operations: Floating-point operations of a run; see `count_flops`.
    """

    key: str
    blocks: tuple[str, ...]
    nodes: int
    repeatable: bool = False
    lookups: tuple[tuple[str, int], ...] = ()
    memory: RegionMemory = RegionMemory()
    statistics: int = 0
    operations: int = 0


@dataclass(frozen=True, eq=False)
class CompiledRegion:
    """A region of a program.

    Args:
        run: The compiled function, taking its inputs as one list that it empties.
        info: Its properties.
        inputs: The values that it reads.
        outputs: The values that it returns.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    info: RegionInfo
    inputs: tuple[Name, ...] = ()
    outputs: tuple[Name, ...] = ()


@dataclass(frozen=True)
class Program:
    """The values that a captured graph computes, and their schedule. Passes change the schedule alone.

    Args:
        graph_id: Runtime id of the graph.
        params: Parameters by id, those of the whole model.
        schedule: The instructions, in order.
        values: The values by name. No pass changes them.
        regions: The regions by name, in order.
        inputs: The values that its caller hands over.
        results: What it returns, in which a `Name` stands for a value.
        history: Passes applied so far.
        members: Numbers of the graph's parameters, those of its forward and its backward program.
        derived: The values that it reads in place of parameters.
    """

    graph_id: int
    params: dict[int, ParamInfo]
    schedule: Schedule
    values: Mapping[str, Value]
    regions: Mapping[str, CompiledRegion]
    inputs: tuple[Name, ...]
    results: Sequence[Any]
    history: tuple[str, ...] = ()
    members: tuple[int, ...] = ()
    derived: tuple[DerivedBlock, ...] = ()

    @property
    def name(self) -> str:
        """The frame and kind, for people."""
        return self.schedule.name

    @property
    def kind(self) -> ProgramKind:
        """The program's kind: forward (a backward follows), backward, or inference, which needs no gradients."""
        return self.schedule.kind

    @property
    def kept(self) -> tuple[int, ...]:
        """The parameters in `Schedule.kept`."""
        return self.schedule.kept

    @property
    def boundary_id(self) -> int:
        """Runtime id of the graph for gradients that are added up whole and reduced at the boundary.

        The time of reduction is a property of a graph in the runtime. So a backward program is two graphs there, and
        each of its reductions names one of them.
        """
        return self.graph_id | AT_BOUNDARY

    @functools.cached_property
    def signature(self) -> str:
        """The program's communication as lines of text, the same on all ranks; empty if there is none.

        It does not contain the program's name: if ranks meet other shapes at a time, their programs are numbered
        differently.
        """
        sequence = collective_sequence(self)
        if all(kind == "end of backward" for kind, _ in sequence):
            return ""
        return "\n".join([f"{self.kind} program", *(f"{kind} {ids}" for kind, ids in sequence)]) if sequence else ""

    def ids(self, numbers: Sequence[int]) -> list[int]:
        """Runtime ids of parameters, by their numbers within the model."""
        return [self.graph_id & ~LOCAL_ID | number for number in numbers]

    def infos(self, numbers: Sequence[int]) -> list[ParamInfo]:
        """The properties of parameters, by their numbers within the model."""
        return [self.params[ds_id] for ds_id in self.ids(numbers)]

    @property
    def operations(self) -> int:
        """Floating-point operations of a run; see `count_flops`."""
        return sum(region.info.operations for region in self.regions.values())

    def sizes(self, noted: Noted) -> Sizes:
        """The values that symbolic sizes had in a run with these inputs."""
        return read_sizes((self.values[name].meta for name in self.inputs), noted)

    def saved(self, sizes: Sizes | None = None) -> tuple[Saved, ...]:
        """Returns the saved tensors that may be offloaded, by number.

        Args:
            sizes: Values of symbolic sizes; None: they count with their hints.
        """
        uses: dict[str, list[str]] = {name: [] for name, value in self.values.items() if value.saved is not None}
        for region, code in self.regions.items():
            for name in uses.keys() & {*code.inputs, *code.outputs}:
                uses[name].append(region)
        found = []
        for name, regions in uses.items():
            value = self.values[name]
            assert value.saved is not None
            found.append(Saved(value.saved, tensor_bytes(value.meta, sizes), regions[0], regions[-1]))
        return tuple(sorted(found, key=lambda saved: saved.number))

    def readers(self) -> dict[str, list[int]]:
        """Returns the places where each value is read, those where the runtime takes a parameter or gradient left out.

        A place is twice the position of a region among the regions; one less is before the region, one more behind.
        """
        found: defaultdict[str, list[int]] = defaultdict(list)
        computed: set[str] = set()

        def read(names: Iterable[str], place: int, before: int) -> None:
            for name in names:
                found[name].append(place)
                value = self.values[name]
                if value.function is not None and not value.communicated and name not in computed:
                    computed.add(name)
                    read(value.reads, before, before)

        results = (name for i in self.schedule.groups("reduce_now") if not i.made for name in i.values)
        reduced = {self.values[name].args[0] for name in results}  # other arguments are sizes
        place = 0
        for region in self.regions.values():
            read(region.inputs, place, place - 1)
            read(reduced.intersection(region.outputs), place + 1, place + 1)
            place += 2
        read(names_in(self.results), place, place - 1)
        return found

    def with_kept(self, kept: Sequence[int]) -> Program:
        """Returns the program for the case that forward leaves parameters of these numbers gathered."""
        return replace(self, schedule=replace(self.schedule, kept=tuple(kept)))


def collective_sequence(program: Program) -> list[tuple[str, tuple[int, ...]]]:
    """The collectives that a program issues, in order, with parameters' numbers in the model: equal on all ranks.

    A gather of gathered parameters sends nothing, so the sequence includes which parameters stay gathered, and until
    when. With it a rank can take part in the program's collectives without the program.
    """
    sequence: list[tuple[str, tuple[int, ...]]] = []
    if program.derived:
        sequence.append((DERIVE, tuple(value.number for block in program.derived for value in block.values)))
    if program.kept:
        sequence.append(("keep", tuple(sorted(program.kept))))
    for instruction in program.schedule.instructions:
        if instruction.op == "compute":
            info = program.regions[instruction.region].info
            sequence += [(f"{EXCHANGES}{part}", (ds_id & LOCAL_ID,)) for part, ds_id in info.lookups]
            sequence += [(f"{EXCHANGES}statistics", ())] * info.statistics
        elif instruction.op == "end":
            sequence.append((instruction.traits.collective, program.members))
        elif collective := instruction.traits.collective:
            sequence.append((collective, instruction.ids))
    return sequence
