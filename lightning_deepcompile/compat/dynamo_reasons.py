"""Dynamo's reasons for a graph: why it ends where it does, and why its function was compiled again.

Seen to work with torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import fx
from torch._dynamo.utils import get_metrics_context

__all__ = ["GraphReasons", "reasons_of"]


class GraphReasons(NamedTuple):
    """The reasons for a graph.

    Args:
        place: The line of the user's code at which the graph ends: ``file:line in function: code``.
        broken: Why it ends there, if the function goes on behind it; else empty.
        recompiled: Why graphs of the same function that were compiled before do not do; else empty.
    """

    place: str
    broken: str
    recompiled: str


def reasons_of(gm: fx.GraphModule) -> GraphReasons:
    """Returns the reasons for a graph; call it in the backend that Dynamo hands the graph to."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    frame = reason.user_stack[-1] if reason is not None and reason.user_stack else None
    place = "" if frame is None else f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    broken = ""
    if reason is not None and reason.graph_break:
        lines = [line.strip() for line in reason.reason.splitlines() if line.strip()]
        wanted = [line for line in lines if line.startswith(("Explanation:", "Hint:"))]
        broken = ". ".join(line.rstrip(".") for line in [*lines[:1], *wanted]) + "."
    again = get_metrics_context()._metrics.get("recompile_reason")
    return GraphReasons(place, broken, again or "")
