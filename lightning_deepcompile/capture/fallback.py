"""Decides which functions of a step run uncompiled, and reports each once with the reason, or raises an error."""

from __future__ import annotations

import contextlib
import linecache
import logging
import re
import sys
import types
from collections.abc import Iterator
from types import FrameType
from typing import Literal

import torch

from lightning_deepcompile import compat
from lightning_deepcompile.capture.graph_checks import UncompilableError
from lightning_deepcompile.sharding.errors import UnsupportedStepError
from lightning_deepcompile.sharding.mentions import Mentions

_log = logging.getLogger("lightning_deepcompile")
_LIBRARIES = re.compile(r"[/\\](torch|lightning|pytorch_lightning|torchmetrics|lightning_deepcompile)[/\\]|^<")

# Functions that run as Python by design, and hooks of a profiler of which the user was warned.
_UNSPOKEN = re.compile(r"[/\\](lightning|pytorch_lightning|lightning_deepcompile)[/\\]")

_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.*)_at_\d+$")  # Dynamo's name of the code after a break
_BLOCK = re.compile(r"([ \t]*)(class|def|async def)\s+(\w+)")

_SKIPPED = "Dynamo left it out of its graphs (TORCH_LOGS=graph_breaks says why)"
BROKEN_TEXT = "an f-string reads a tensor behind a number (f'{i}: {loss.item()}'), of which Dynamo makes another text"
"""Why a function with such an f-string is not compiled: Dynamo forgets that the number is formatted already."""

READS_GRADIENTS = "it reads or sets `.grad`, which nothing has inside of a graph"
"""Why a function that does so is not compiled."""

_HINTS = {
    "compiled more than": "Keep what changes with every step out of it, or pass it as a tensor; or raise "
    "`torch._dynamo.config.recompile_limit` before training if there are that many shapes.",
    READS_GRADIENTS: "Read gradients in a hook such as `on_before_optimizer_step`.",
    BROKEN_TEXT: "Read the tensor in a line before the f-string.",
    "": "It is right and as fast as eager FSDP. CompileConfig(fallback='error') makes it an error.",
}

# Names of functions and arguments, and the reason why a compiled step cannot contain them.
_NAMES = {
    "functional_call": "it calls modules with other tensors in the place of their parameters (`functional_call`)",
    "swap_tensors": "it swaps tensors",
    "detect_anomaly": "it looks for anomalies in each operation's gradient (`detect_anomaly`)",
    "set_detect_anomaly": "it looks for anomalies in each operation's gradient (`set_detect_anomaly`)",
}
_KEYWORDS = {"create_graph": "it asks for a gradient that can be differentiated (`create_graph`)"}
_PARAMETERS = frozenset({"parameters", "named_parameters", "weight", "bias"})
_TWICE = frozenset({"hessian", "hvp", "vhp"})  # of torch.autograd.functional


def why_not(found: Mentions, bounded: set[str], step: types.CodeType | None) -> str | None:
    """Returns the reason why a whole step must run as Python; None if there is none.

    Args:
        found: The names that its code mentions.
        bounded: Attributes that are deques of bounded length: inside of graphs they would grow beyond it.
        step: Its own code, which may stay uncompiled while all that it calls is compiled.
    """
    for name, reason in _NAMES.items():
        if name in found.names:
            return reason
    for name, reason in _KEYWORDS.items():
        if name in found.keywords:
            return reason
    if {"autograd", "grad"} <= found.names and (taken := _PARAMETERS & found.names):
        return f"it takes gradients by parameters by itself (`torch.autograd.grad`, with `{min(taken)}`)"
    if "autograd" in found.names and (twice := _TWICE & found.names):
        return f"it differentiates twice (`torch.autograd.functional.{min(twice)}`)"
    if others := found.gradients - {step}:
        return f"`{min(code.co_name for code in others)}` reads or sets `.grad`, which nothing has inside of a graph"
    if names := bounded & (found.used | found.appended):
        return f"it uses {min(names)!r}, a deque of bounded length"
    return None


class Fallbacks:
    """Records which functions run uncompiled; one per engine.

    Args:
        mode: ``"warn"`` or ``"error"``, as `CompileConfig.fallback`.
        rank: This rank; the first one reports.

    Attributes:
        reasons: Each function, ``name (file:line)``, with the first line of the reason.
    """

    def __init__(self, mode: Literal["warn", "error"], rank: int) -> None:
        self._mode, self._rank = mode, rank
        self.reasons: dict[str, str] = {}
        self._places: set[str] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Returns a context for a compiled step."""
        with compat.compile_failures(self._failed):
            yield

    def add(self, name: str, place: str, reason: str) -> None:
        """Records a function that runs uncompiled.

        Args:
            name: Its name, without a class.
            place: Its place, ``file:line``.
            reason: The reason; the first line is kept.

        Raises:
            RuntimeError: If settings say so.
        """
        first = reason.strip().partition("\n")[0]
        if place in self._places:
            return
        if _UNSPOKEN.search(place):
            _log.debug("`%s` (%s) runs uncompiled: %s", name, place, first)
            return
        name = _with_class(name, place)
        hint = next(text for start, text in _HINTS.items() if first.startswith(start))
        if self._mode == "error":
            raise RuntimeError(
                f"`{name}` ({place}) cannot be compiled: {first}. CompileConfig(fallback='warn') runs it uncompiled."
            )
        self._places.add(place)
        self.reasons[f"{name} ({place})"] = first
        if self._rank == 0:
            _log.warning("`%s` (%s) runs uncompiled: %s. %s", name, place, first.rstrip("."), hint)

    def noticed(self) -> None:
        """Call where code that is not compiled reads a parameter: some function on the stack is left uncompiled."""
        if torch.is_anomaly_enabled():
            return  # then everything is, as the user asked
        frame: FrameType | None = sys._getframe(1)
        innermost: tuple[str, str] | None = None
        while frame is not None:
            code = frame.f_code
            if not _LIBRARIES.search(code.co_filename):
                place = f"{code.co_filename}:{code.co_firstlineno}"
                if place in self._places:
                    return
                innermost = innermost or (code.co_name, place)
            frame = frame.f_back
        if innermost is not None:
            self.add(*innermost, _SKIPPED)

    def _failed(self, name: str, place: str, error: str | BaseException) -> None:
        if isinstance(error, BaseException):
            error = compat.root_cause(error)
            if isinstance(error, UnsupportedStepError):
                raise error
            error = str(error) if isinstance(error, UncompilableError) else compat.describe_error(error)
        self.add(_RESUMED.sub(r"\1", name), place, error)


def _with_class(name: str, place: str) -> str:
    """``Class.name`` of a method that starts at `place`: Dynamo tells only the name, and many are called `forward`.

    By indentation: parsing a file in several places at once fails in some releases of Python 3.11.
    """
    file, _, line = place.rpartition(":")
    *before, first = linecache.getlines(file)[: int(line)] or [""]
    indented = len(first) - len(first.lstrip())
    for above in reversed(before):
        if (block := _BLOCK.match(above)) is not None and len(block[1]) < indented:
            return f"{block[3]}.{name}" if block[2] == "class" else name
    return name
