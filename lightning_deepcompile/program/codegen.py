"""Turns a program into one straight Python function: the schedule gives the order, and names the values.

FX's own code would call ``region(a, b, c)``: the caller's frame then keeps every argument alive while the region runs.
Here regions take their inputs as one list, and every name is deleted before the call that uses it last, so that a
region can free an activation as soon as it has read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_deepcompile.program.program import CompiledRegion, Program
from lightning_deepcompile.program.schedule import REDUCTIONS, Instruction
from lightning_deepcompile.program.values import Name, names_in, parameter_name

Guard = Callable[[str, str, CompiledRegion], Callable[[list[Any]], Sequence[Any]]]
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


@dataclass
class _Line:
    """A call in the function.

    Args:
        call: The call; of a region, the callee.
        reads: Names of the values that it reads.
        makes: Names of the elements that it returns; or of the one value.
        unpacks: Whether it returns a tuple.
        inputs: Of a region, the list that it is called with.
        behind: Lines that follow it.
    """

    call: str
    reads: dict[str, None]
    makes: Sequence[str] = ()
    unpacks: bool = True
    inputs: str | None = None
    behind: list[str] = field(default_factory=list)


class _Writer:
    """Collects all calls first: only then is it known where each value is read last, and which are never read."""

    def __init__(self, program: Program, marks: Marks | None, guard: Guard | None) -> None:
        self._program = program
        self._marks, self._guard = marks, guard
        self._globals: dict[str, Any] = {}
        self._lines: list[_Line] = []
        self._made: set[str] = set(program.inputs)
        self._saved = {value.saved: Name(name) for name, value in program.values.items() if value.saved is not None}
        self._copies: dict[str, Name] = {}  # of saved tensors, by name
        self._kept: set[str] = set()  # reduced gradients that do not leave the runtime
        # Names in use: a program's values keep whatever names AOTAutograd gave them.
        self._names: set[str] = set(program.values)
        self._run, self._args, self._inputs, self._unread = map(self._fresh, ("run", "args", "inputs", "_"))

    def write(self) -> tuple[Callable[[list[Any]], Sequence[Any]], str]:
        program = self._program
        for instruction in program.schedule.instructions:
            self._instruction(instruction)
            if self._marks is not None:
                behind = self._lines[-1].behind
                if instruction.op in REDUCTIONS:
                    behind.append(f"{self._bind('drain', self._marks.drain)}()")
                behind.append(f"{self._bind('mark', self._marks.mark)}()")
        self._compute(names_in(program.results))
        reads: dict[str, None] = {}
        lines = [f"return {self._text(tuple(program.results), reads, copies=program.kind == 'forward')}"]
        later = set(reads)
        for line in reversed(self._lines):
            lines += reversed(self._written(line, later))
            later.difference_update(line.makes)
            later.update(line.reads)
        head = [f"({', '.join(program.inputs)},) = {self._args}"] if program.inputs else []
        head.append(f"{self._args}.clear()")
        if unused := [name for name in program.inputs if name not in later]:
            head.append(f"del {', '.join(unused)}")
        if self._marks is not None:
            head.append(f"{self._bind('begin', self._marks.begin)}()")
        body = "\n".join(f"    {line}" for line in [*head, *reversed(lines)])
        source = f"def {self._run}({self._args}):\n{body}\n"
        exec(compile(source, f"<{program.name}>", "exec"), self._globals)
        return self._globals[self._run], source

    def _instruction(self, instruction: Instruction) -> None:
        match instruction.traits.effect:
            case "compute", _:
                self._region(instruction.region)
            case "launch and wait", _:
                for name in instruction.values or map(parameter_name, instruction.ids):
                    self._function(name)
            case _:
                self._operator(instruction)

    def _compute(self, names: Iterable[str]) -> None:
        """Writes the calls between regions that make `names`, and what these read."""
        for name in names:
            value = self._program.values[name]
            if name not in self._made and value.function is not None and not value.communicated:
                self._function(name)

    def _function(self, name: str) -> None:
        """Writes the call of a value's function."""
        value = self._program.values[name]
        self._compute(value.reads)
        reads: dict[str, None] = {}
        arguments = [self._text(a, reads) for a in value.args]
        arguments += [f"{k}={self._text(v, reads)}" for k, v in value.kwargs.items()]
        target = str(getattr(value.function, "__name__", value.function)).removesuffix(".default")
        call = f"{self._bind(target, value.function)}({', '.join(arguments)})"
        self._add(_Line(call, reads, [name], unpacks=False))

    def _region(self, name: str) -> None:
        region = self._program.regions[name]
        self._compute(region.inputs)
        call = self._bind(name, region.run if self._guard is None else self._guard(self._program.name, name, region))
        reads: dict[str, None] = {}
        inputs = self._text(list(region.inputs), reads, copies=self._program.kind != "forward")
        self._add(_Line(call, reads, region.outputs, inputs=inputs))

    def _operator(self, instruction: Instruction) -> None:
        """Writes an instruction that passes place."""
        program, traits, numbers = self._program, instruction.traits, instruction.ids
        given: dict[str, Sequence[Any]] = {"shards": (), "ids": numbers, "sizes": instruction.sizes}
        makes: list[Name] = []
        match traits.effect:
            case verb, "parameters" | "gradients":
                given["ids"] = program.ids(numbers)
                given["dtypes"] = [info.dtype for info in program.infos(numbers)]
                given["tensors"] = [program.values[value].args[0] for value in instruction.values]
                makes = list(map(parameter_name, numbers)) if verb == "wait" else []
                self._kept.update(instruction.values)
            case verb, "saved tensors":
                given["tensors"] = saved = [self._saved[number] for number in numbers]
                if verb == "launch":
                    makes = [self._fresh(f"saved_{number}") for number in numbers]
                    self._copies |= zip(saved, makes, strict=True)
                elif program.kind == "forward":
                    given["tensors"] = [self._copies[name] for name in saved]
        reads: dict[str, None] = {}
        arguments = ", ".join(self._text(value, reads) for value in traits.values(program.graph_id, **given))
        self._add(_Line(f"{self._bind(traits.operator, traits.overload)}({arguments})", reads, makes))

    def _add(self, line: _Line) -> None:
        self._lines.append(line)
        self._made.update(line.makes)

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
        if isinstance(value, Name):
            if value in self._kept:
                return "None"
            name = self._copies.get(value, value) if copies else value
            reads[name] = None
            return name
        if isinstance(value, list | tuple):
            inner = ", ".join(self._text(v, reads, copies) for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if value else "()"
        if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        return self._bind(f"const_{len(self._globals)}", value)

    def _bind(self, name: str, value: Any) -> str:
        name = "".join(c if c.isalnum() else "_" for c in name)
        while name in self._names or (name in self._globals and self._globals[name] is not value):
            name += "_"
        self._globals[name] = value
        return name

    def _fresh(self, name: str) -> Name:
        while name in self._names or name in self._globals:
            name += "_"
        self._names.add(name)
        return Name(name)
