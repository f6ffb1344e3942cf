"""Reads the compiled step for users: counters, programs, plans, and files that show them."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

from lightning_deepcompile.engine.engine import Engine
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.report import Round
from lightning_deepcompile.report.page import write_page
from lightning_deepcompile.report.trace import write_trace
from lightning_deepcompile.summary import Summary
from lightning_deepcompile.trainer.processes import ProcessStrategy


class InspectedStrategy(ProcessStrategy):
    """Base of strategies with an engine, whose state it reads."""

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """The engine behind the strategy."""

    def summary(self) -> Summary:
        """Counters of what was compiled and what a step communicates; print it for a table."""
        return self.engine.summary()

    def print_summary(self) -> None:
        """Prints `summary` as a table, on rank 0 alone; call it on any rank."""
        if self.is_global_zero:
            print(self.summary())

    def report(self) -> list[Round]:
        """The rounds of profiling and planning: their changes, with predictions and measurements."""
        return self.engine.report()

    def profile(self) -> Profile | None:
        """The profile of the last round; its `to_json` is for ``python -m lightning_deepcompile simulate``."""
        return self.engine.profile()

    def save_report(self, path: str | Path) -> Path | None:
        """Writes a report of compilation, measurement and planning as one page for a browser, which needs no network.

        Call it on any rank, at any time after the first step; rank 0 writes. Before a step was measured, the page says
        so, and shows what is known.

        Args:
            path: The file, such as ``"report.html"``.

        Returns:
            The file; None on other ranks. Without Plotly (``pip install 'lightning-deepcompile[report]'``) it has its
            tables and no charts.
        """
        return write_page(self.engine.record(), path) if self.is_global_zero else None

    def save_trace(self, path: str | Path) -> Path | None:
        """Writes the predicted step as a file for https://ui.perfetto.dev or Chrome's ``about:tracing``.

        Args:
            path: The file, such as ``"trace.json"``.

        Returns:
            The file; None on other ranks than 0.

        Raises:
            ValueError: If no step was measured.
        """
        return write_trace(self.engine.record(), path) if self.is_global_zero else None

    def programs(self) -> dict[str, str]:
        """The current programs, printed, by name."""
        return self.engine.programs()
