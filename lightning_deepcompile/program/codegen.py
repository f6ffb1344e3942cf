"""Turns a program into one straight Python function.

FX's own code would call ``region(a, b, c)``: the caller's frame then keeps every argument alive while the region runs.
Here regions take their inputs as one list, and every name is dropped before the call that uses it last, so that a
region can free an activation as soon as it has read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import fx

from lightning_deepcompile.program.graph import args_of, attribute, is_element
from lightning_deepcompile.program.instructions import REDUCTIONS, traits_of
from lightning_deepcompile.program.program import Program, RegionModule

__all__ = ["Divider", "Guard", "Marks", "generate"]

Guard = Callable[[str, str, RegionModule], Callable[[list[Any]], Sequence[Any]]]
"""What a program calls for a region, by the names of both: the region's own function, or one around it."""


class Marks(Protocol):
    """What a profiled program calls while it runs."""

    def begin(self) -> None:
        """The program starts."""

    def mark(self) -> None:
        """The next instruction was issued."""

    def drain(self) -> None:
        """A reduction was launched; the compute stream shall wait for it."""


class Divider(Protocol):
    """What is told where a program computes."""

    def divide(self) -> None:
        """A region is called next."""

    def end(self) -> None:
        """The program is over."""


def generate(
    program: Program, marks: Marks | None = None, guard: Guard | None = None, divider: Divider | None = None
) -> tuple[Callable[[list[Any]], Sequence[Any]], str]:
    """Compiles `program` to a function.

    Args:
        program: The program.
        marks: Called at the start and behind every instruction; None for code that does nothing but its work.
        guard: Gives what is called for a region; None for the region itself.
        divider: Told of every region, but not of the end; None: nobody is.

    Returns:
        The function, which takes all placeholders as one list and empties it, and its source for people to read.
    """
    return _Writer(program, marks, guard, divider).write()


class _Writer:
    def __init__(self, program: Program, marks: Marks | None, guard: Guard | None, divider: Divider | None) -> None:
        self._program = program
        self._marks, self._guard = marks, guard
        self._divide = None if divider is None else divider.divide
        self._globals: dict[str, Any] = {}
        self._lines: list[str] = []
        self._last_use: dict[fx.Node, fx.Node] = {}
        # Taken: a program's values carry whatever names AOTAutograd gave them.
        self._names = {node.name for node in program.gm.graph.nodes}
        self._run, self._args, self._inputs, self._unread = map(self._fresh, ("run", "args", "inputs", "_"))
        for node in program.gm.graph.nodes:
            for source in node.all_input_nodes:
                self._last_use[source] = node

    def write(self) -> tuple[Callable[[list[Any]], Sequence[Any]], str]:
        nodes = list(self._program.gm.graph.nodes)
        placeholders = [n for n in nodes if n.op == "placeholder"]
        if placeholders:
            self._lines.append(f"({', '.join(n.name for n in placeholders)},) = {self._args}")
        self._lines.append(f"{self._args}.clear()")
        unused = [n.name for n in placeholders if not n.users]
        if unused:
            self._lines.append(f"del {', '.join(unused)}")
        if self._marks is not None:
            self._lines.append(f"{self._bind('begin', self._marks.begin)}()")
        for node in nodes:
            if node.op == "output":
                self._lines.append(f"return {self._text(node.args[0])}")
            elif node.op == "call_module":
                self._region(node)
            elif node.op == "get_attr":
                value = attribute(self._program.gm, node)
                self._lines.append(f"{node.name} = {self._bind(node.name + '_', value)}")
            elif node.op == "call_function":
                if not self._is_element(node):
                    self._call(node)
            elif node.op != "placeholder":
                raise ValueError(f"{self._program.name}: a program has no {node.op} nodes, but {node.name} is one.")
            if self._marks is not None and (traits := traits_of(node)) is not None:
                if traits.op in REDUCTIONS:
                    self._lines.append(f"{self._bind('drain', self._marks.drain)}()")
                self._lines.append(f"{self._bind('mark', self._marks.mark)}()")
        source = f"def {self._run}({self._args}):\n" + "\n".join(f"    {line}" for line in self._lines) + "\n"
        exec(compile(source, f"<{self._program.name}>", "exec"), self._globals)
        return self._globals[self._run], source

    def _region(self, node: fx.Node) -> None:
        name, region = str(node.target), self._program.region(node)
        call = self._bind(name, region.run if self._guard is None else self._guard(self._program.name, name, region))
        if self._divide is not None:
            self._lines.append(f"{self._bind('divide', self._divide)}()")
        self._lines.append(f"{self._inputs} = [{', '.join(self._text(a) for a in node.args)}]")
        self._drop(node)
        self._assign(node, f"{call}({self._inputs})")

    def _call(self, node: fx.Node) -> None:
        name = str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
        function = self._bind(name, node.target)
        arguments = [self._text(a) for a in node.args] + [f"{k}={self._text(v)}" for k, v in node.kwargs.items()]
        self._assign(node, f"{function}({', '.join(arguments)})")
        self._drop(node)

    def _assign(self, node: fx.Node, expression: str) -> None:
        """Unpacks tuples by position; elements that nobody reads are not named and die at once."""
        elements = [user for user in node.users if self._is_element(user)]
        if elements and len(elements) == len(node.users):
            width = len(node.meta["val"]) if node.op == "call_module" else len(args_of(node)[1])
            names = [self._unread] * width
            for element in elements:
                names[args_of(element)[1]] = element.name
            self._lines.append(f"({', '.join(names)},) = {expression}")
            dead = [e.name for e in elements if not e.users] + [self._unread] * (self._unread in names)
            if dead:
                self._lines.append(f"del {', '.join(dead)}")
        elif node.users:
            self._lines.append(f"{node.name} = {expression}")
        else:
            self._lines.append(expression)

    def _drop(self, node: fx.Node) -> None:
        dead = [s.name for s in dict.fromkeys(node.all_input_nodes) if self._last_use[s] is node]
        if dead:
            self._lines.append(f"del {', '.join(dead)}")

    @staticmethod
    def _is_element(node: fx.Node) -> bool:
        return is_element(node) and isinstance(args_of(node)[1], int) and traits_of(args_of(node)[0]) is not None

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, list | tuple):
            inner = ", ".join(self._text(v) for v in value)
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

    def _fresh(self, name: str) -> str:
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name
