"""The reasons that Dynamo gives for its graphs: breaks and recompilations, with the lines of the user's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from lightning_deepcompile.compat import GraphReasons, reasons_of


def test_breaks_and_recompilations_are_told_with_their_lines() -> None:
    found: list[GraphReasons] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        found.append(reasons_of(gm))
        return gm.forward

    def function(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, dynamic=False)
    compiled(torch.ones(3))
    compiled(torch.ones(4))
    first, rest, *others = found
    assert first.place.startswith(f"{Path(__file__)}:") and "in function: torch._dynamo.graph_break()" in first.place
    assert first.broken.startswith("Call to `torch._dynamo.graph_break()`. Explanation: User-inserted graph break")
    assert not first.recompiled and not rest.broken
    assert [one.recompiled.partition("'x' ")[2] for one in others[:1]] == [
        "size mismatch at index 0. expected 3, actual 4"
    ]
