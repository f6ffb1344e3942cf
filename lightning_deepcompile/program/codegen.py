"""Turns a program into one straight Python function: the schedule gives the order, the graph the values that are read.

FX's own code would call ``region(a, b, c)``: the caller's frame then keeps every argument alive while the region runs.
Here regions take their inputs as one list, and every name is deleted before the call that uses it last, so that a
region can free an activation as soon as it has read it.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import fx

from lightning_deepcompile.program.graph import (
    args_of,
    attribute,
    gathers_of,
    is_element,
    is_gather,
    is_read_between,
    is_reduce,
    only_maker,
    output_node,
)
from lightning_deepcompile.program.program import LOCAL_ID, Program, RegionModule
from lightning_deepcompile.program.schedule import COPIES, REDUCTIONS, Instruction

__all__ = ["Guard", "Marks", "generate"]

Guard = Callable[[str, str, RegionModule], Callable[[list[Any]], Sequence[Any]]]
"""What a program calls for a region, by the names of both: the region's own function, or one around it."""


class Marks(Protocol):
    """The object that a profiled program calls while it runs."""

    def begin(self) -> None:
        """Call when the program starts."""

    def mark(self) -> None:
        """Call when the next instruction was issued."""

    def drain(self) -> None:
        """Call when a reduction was launched; the compute stream must wait for it."""


def generate(
    program: Program, marks: Marks | None = None, guard: Guard | None = None
) -> tuple[Callable[[list[Any]], Sequence[Any]], str]:
    """Compiles `program` to a function.

    Args:
        program: The program.
        marks: Called at the start and behind every instruction; None for code that does nothing but its work.
        guard: Returns the function that is called for a region; None for the region itself.

    Returns:
        The function, which takes all placeholders as one list and empties it, and its readable source.
    """
    return _Writer(program, marks, guard).write()


class _Name(str):
    """The name of a value among arguments."""


@dataclass
class _Line:
    """A call in the function.

    Args:
        call: The call; of a region, the callee.
        reads: Names of the values that it reads.
        makes: Names of the elements that it returns, "" where nothing can read one; or of the one value.
        unpacks: Whether it returns a tuple.
        inputs: Of a region, the list that it is called with.
        acts: Whether it is written even if nothing reads its result.
        behind: Lines that follow it.
    """

    call: str
    reads: dict[str, None]
    makes: Sequence[str] = ()
    unpacks: bool = False
    inputs: str | None = None
    acts: bool = True
    behind: list[str] = field(default_factory=list)


class _Writer:
    """Collects all calls first: only then is it known where each value is read last, and which are never read."""

    def __init__(self, program: Program, marks: Marks | None, guard: Guard | None) -> None:
        self._program = program
        self._marks, self._guard = marks, guard
        self._globals: dict[str, Any] = {}
        self._lines: list[_Line] = []
        self._nodes = list(program.gm.graph.nodes)
        self._place = {node: place for place, node in enumerate(self._nodes)}
        self._passed = 0  # the number of nodes whose lines are written, or that need none
        self._values = {node: node.name for node in self._nodes if node.op == "placeholder"}
        self._parameters: dict[int, str] = {}  # the values that the last wait returned
        self._copies: dict[fx.Node, str] = {}  # of saved tensors
        self._calls = {str(node.target): node for node in self._nodes if node.op == "call_module"}
        self._saved = {node.meta["saved"]: node for node in self._nodes if "saved" in node.meta}
        # The nodes of instructions that do not name a region: their order is the same in any schedule.
        self._gathers: defaultdict[int, deque[fx.Node]] = defaultdict(deque)
        self._reductions: defaultdict[tuple[int, bool], deque[fx.Node]] = defaultdict(deque)
        for node in self._nodes:
            if is_gather(node) and is_read_between(node):
                self._gathers[args_of(node)[1] & LOCAL_ID].append(node)
            elif is_reduce(node):
                kept = only_maker(node, program.kind) is not None
                self._reductions[args_of(node)[1] & LOCAL_ID, kept].append(node)
        # Names in use: a program's values keep whatever names AOTAutograd gave them.
        self._names = {node.name for node in self._nodes}
        self._run, self._args, self._inputs, self._unread = map(self._fresh, ("run", "args", "inputs", "_"))

    def write(self) -> tuple[Callable[[list[Any]], Sequence[Any]], str]:
        placeholders = list(self._values.values())
        for instruction in self._program.schedule.instructions:
            self._instruction(instruction)
            if self._marks is not None:
                behind = self._lines[-1].behind
                if instruction.op in REDUCTIONS:
                    behind.append(f"{self._bind('drain', self._marks.drain)}()")
                behind.append(f"{self._bind('mark', self._marks.mark)}()")
        self._pass(len(self._nodes))
        reads: dict[str, None] = {}
        output = output_node(self._program.gm.graph)
        lines = [f"return {self._text(output.args[0], reads, copies=self._program.kind == 'forward')}"]
        later = set(reads)
        for line in reversed(self._lines):
            if line.acts or not later.isdisjoint(line.makes):
                lines += reversed(self._written(line, later))
                later.update(line.reads)
        head = [f"({', '.join(placeholders)},) = {self._args}"] if placeholders else []
        head.append(f"{self._args}.clear()")
        if unused := [name for name in placeholders if name not in later]:
            head.append(f"del {', '.join(unused)}")
        if self._marks is not None:
            head.append(f"{self._bind('begin', self._marks.begin)}()")
        body = "\n".join(f"    {line}" for line in [*head, *reversed(lines)])
        source = f"def {self._run}({self._args}):\n{body}\n"
        exec(compile(source, f"<{self._program.name}>", "exec"), self._globals)
        return self._globals[self._run], source

    def _instruction(self, instruction: Instruction) -> None:
        match instruction.op:
            case "compute":
                self._region(instruction.region)
            case "gather_now":
                numbers, region = instruction.ids, instruction.region
                gathers = gathers_of(self._calls[region]) if region else [self._gathers[i].popleft() for i in numbers]
                for node in gathers:
                    self._pass(self._place[node])
                    self._function(node)
            case "reduce_now":
                for i in instruction.ids:
                    node = self._reductions[i, bool(instruction.made)].popleft()
                    self._pass(self._place[node])
                    self._function(node)
            case _:
                self._operator(instruction)

    def _pass(self, place: int) -> None:
        """Writes the nodes up to the one at `place` that belong to no instruction: constants, arithmetic of sizes."""
        for node in self._nodes[self._passed : place]:
            if node.op == "get_attr":
                value = self._bind(node.name + "_", attribute(self._program.gm, node))
                self._lines.append(_Line(value, {}, [node.name], acts=False))
                self._values[node] = node.name
            elif node.op == "call_function":
                if not (node in self._values or is_gather(node) or is_reduce(node)):
                    self._function(node, acts=False)
            elif node.op not in ("placeholder", "call_module", "output"):
                raise ValueError(f"{self._program.name}: a program has no {node.op} nodes, but {node.name} is one.")
        self._passed = max(self._passed, place)

    def _region(self, name: str) -> None:
        node, region = self._calls[name], self._program.region(name)
        self._pass(self._place[node])
        call = self._bind(name, region.run if self._guard is None else self._guard(self._program.name, name, region))
        reads: dict[str, None] = {}
        inputs = ", ".join(self._text(a, reads, copies=self._program.kind != "forward") for a in node.args)
        elements = {args_of(reader)[1]: reader for reader in node.users if is_element(reader)}
        unpacks = len(elements) == len(node.users)
        made = [elements.get(k) for k in range(len(node.meta["val"]))] if unpacks else [node]
        self._values |= {value: value.name for value in made if value is not None}
        makes = ["" if value is None else value.name for value in made]
        self._lines.append(_Line(call, reads, makes, unpacks, inputs=f"[{inputs}]"))

    def _function(self, node: fx.Node, acts: bool = True) -> None:
        """Writes a node as a call of its function."""
        reads: dict[str, None] = {}
        arguments = [self._text(a, reads) for a in node.args]
        arguments += [f"{k}={self._text(v, reads)}" for k, v in node.kwargs.items()]
        name = str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
        call = f"{self._bind(name, node.target)}({', '.join(arguments)})"
        self._lines.append(_Line(call, reads, [node.name], acts=acts))
        self._values[node] = node.name

    def _operator(self, instruction: Instruction) -> None:
        """Writes an instruction that passes place."""
        program, traits, numbers = self._program, instruction.traits, instruction.ids
        given: dict[str, Sequence[Any]] = {"shards": (), "ids": numbers, "sizes": instruction.sizes}
        makes: list[str] = []
        if traits.effect[1] in ("parameters", "gradients"):
            given["ids"] = program.ids(numbers)
            given["dtypes"] = [info.dtype for info in program.infos(numbers)]
        if instruction.op in REDUCTIONS:
            gradients = [args_of(self._reductions[i, True].popleft())[0] for i in numbers]
            given["tensors"] = [_Name(self._values[node]) for node in gradients]
        elif instruction.op in COPIES:
            waits, saved = traits.effect[0] == "wait", [self._saved[i] for i in numbers]
            hosts = self._copies if waits and program.kind == "forward" else self._values
            given["tensors"] = [_Name(hosts[node]) for node in saved]
            if not waits:
                makes = [self._fresh(f"saved_{i}") for i in numbers]
                self._copies |= zip(saved, makes, strict=True)
        elif instruction.op == "wait":
            makes = [self._fresh(f"parameter_{i}") for i in numbers]
            self._parameters |= zip(numbers, makes, strict=True)
        reads: dict[str, None] = {}
        arguments = ", ".join(self._text(value, reads) for value in traits.values(program.graph_id, **given))
        call = f"{self._bind(traits.operator, traits.overload)}({arguments})"
        self._lines.append(_Line(call, reads, makes, unpacks=True))

    def _written(self, line: _Line, later: set[str]) -> list[str]:
        """The lines of a call; lines behind it read the names in `later`."""
        result = []
        dead = [name for name in line.reads if name not in later]
        dropped = [f"del {', '.join(dead)}"] if dead else []
        call = line.call
        if line.inputs is not None:
            result += [f"{self._inputs} = {line.inputs}", *dropped]
            call = f"{call}({self._inputs})"
        names = [name if name in later else self._unread for name in line.makes]
        if all(name == self._unread for name in names):
            result.append(call)
        elif line.unpacks:
            result.append(f"({', '.join(names)},) = {call}")
            result += [f"del {self._unread}"] * (self._unread in names)
        else:
            result.append(f"{names[0]} = {call}")
        return [*result, *([] if line.inputs is not None else dropped), *line.behind]

    def _text(self, value: Any, reads: dict[str, None], copies: bool = False) -> str:
        """Returns an argument's source text.

        Args:
            value: The argument.
            reads: The names that it mentions are added here.
            copies: Whether to read the copies of saved tensors, where there are any.
        """
        if isinstance(value, fx.Node):
            return self._text(self._name(value, copies), reads)
        if isinstance(value, _Name):
            reads[value] = None
            return value
        if isinstance(value, list | tuple):
            inner = ", ".join(self._text(v, reads, copies) for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if value else "()"
        if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        return self._bind(f"const_{len(self._globals)}", value)

    def _name(self, node: fx.Node, copies: bool) -> _Name | None:
        if copies and node in self._copies:
            return _Name(self._copies[node])
        if node not in self._values:
            if is_reduce(node):  # the runtime keeps it: nothing leaves the program
                return None
            if is_gather(node):
                return _Name(self._parameters[args_of(node)[1] & LOCAL_ID])
        return _Name(self._values[node])

    def _bind(self, name: str, value: Any) -> str:
        name = "".join(c if c.isalnum() else "_" for c in name)
        while name in self._names or (name in self._globals and self._globals[name] is not value):
            name += "_"
        self._globals[name] = value
        return name

    def _fresh(self, name: str) -> str:
        while name in self._names or name in self._globals:
            name += "_"
        self._names.add(name)
        return name
