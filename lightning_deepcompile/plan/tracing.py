"""How a step is traced, as far as planning decides it: no pass changes it, only tracing the step once more does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["Chunkable", "Tracing"]

Chunkable = Literal["losses", "mlps"]
"""What may be computed in pieces of tokens: losses over many classes, and feed-forward layers."""


@dataclass(frozen=True)
class Tracing:
    """How a training step is traced.

    Args:
        uncheckpointed: How many of the last blocks that the model checkpoints are not computed again in backward.
        sparing: Whether little is saved for backward: what is cheap to compute is computed again.
        chunked_losses: Whether losses over many classes are computed in pieces, where the settings leave that to
            planning.
        chunked_mlps: Whether feed-forward layers are, likewise.
    """

    uncheckpointed: int = 0
    sparing: bool = False
    chunked_losses: bool = False
    chunked_mlps: bool = False

    def chunks(self, what: Chunkable) -> bool:
        """Whether `what` is computed in pieces, where the settings leave that to planning."""
        return self.chunked_losses if what == "losses" else self.chunked_mlps

    def chunking(self, what: Chunkable) -> Tracing:
        """The same, with `what` in pieces."""
        return replace(self, chunked_losses=True) if what == "losses" else replace(self, chunked_mlps=True)
