"""How a step is traced, as far as planning decides it: no pass changes it, only tracing the step once more does."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Tracing"]


@dataclass(frozen=True)
class Tracing:
    """How a training step is traced.

    Args:
        uncheckpointed: How many of the last blocks that the model checkpoints are not computed again in backward.
        sparing: Whether little is saved for backward: what is cheap to compute is computed again.
        chunked: Whether losses over many classes are computed in pieces, where the settings leave that to planning.
    """

    uncheckpointed: int = 0
    sparing: bool = False
    chunked: bool = False
