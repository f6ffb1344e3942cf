"""The choices of planning that change how a step is traced: no pass can make them, only retracing the step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Chunkable = Literal["losses", "mlps"]
"""Losses over many classes, and feed-forward layers: both may be computed in chunks of tokens."""


@dataclass(frozen=True)
class Tracing:
    """The choices that change how a training step is traced.

    Args:
        uncheckpointed: How many of the last blocks that the model checkpoints are not computed again in backward.
        sparing: Whether little is saved for backward: what is cheap to compute is computed again.
        chunked_losses: In how many chunks of tokens losses are computed; 0: unchunked.
        chunked_mlps: In how many feed-forward layers are.
    """

    uncheckpointed: int = 0
    sparing: bool = False
    chunked_losses: int = 0
    chunked_mlps: int = 0

    def chunks(self, what: Chunkable) -> int:
        """Returns in how many chunks `what` is computed; 0: unchunked."""
        return self.chunked_losses if what == "losses" else self.chunked_mlps

    def chunking(self, what: Chunkable, chunks: int) -> Tracing:
        """Returns the same with `what` in so many chunks."""
        return replace(self, chunked_losses=chunks) if what == "losses" else replace(self, chunked_mlps=chunks)
