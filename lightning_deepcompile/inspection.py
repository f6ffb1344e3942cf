"""What users look at, of a strategy whose model is sharded: whole parameters, programs, plans and their counters."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor, nn

from lightning_deepcompile.engine import Engine
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.report import Round
from lightning_deepcompile.summary import Summary

__all__ = ["Inspection"]


class Inspection:
    """Base of strategies with an `engine`."""

    engine: Engine

    @contextmanager
    def full_parameters(
        self, module: nn.Module | None = None, *, writeback: bool = True
    ) -> Generator[None, None, None]:
        """Inside, the parameters are whole, plain tensors (as under FSDP's ``summon_full_params``).

        All ranks must enter and leave together. Calling a module needs no such context: it gathers for itself.

        Args:
            module: Whose parameters; by default the whole model's, which must then fit into memory.
            writeback: Keep what was written to them, each rank's own rows; else it is dropped.
        """
        with self.engine.full_parameters(module, writeback=writeback):
            yield

    def grad_norm(self, module: nn.Module | None = None) -> Tensor:
        """The 2-norm of gradients over all ranks, to be logged, say, in ``on_before_optimizer_step``; a collective.

        Args:
            module: Whose parameters' gradients; by default the whole model's.

        Returns:
            A 0-dim tensor, equal on all ranks; the host does not wait for it.
        """
        return self.engine.clipping.total_norm((module or self.engine.module).parameters())

    def summary(self) -> Summary:
        """Counters of what was compiled and what a step communicates; print it for a table."""
        return self.engine.summary()

    def report(self) -> list[Round]:
        """What each round of profiling and planning changed, predicted and then measured."""
        return self.engine.report()

    def profile(self) -> Profile | None:
        """What the last round planned with; its `to_json` is for ``python -m lightning_deepcompile simulate``."""
        return self.engine.tuner.profile

    def programs(self) -> dict[str, str]:
        """The current programs, printed, by name."""
        return self.engine.programs()
