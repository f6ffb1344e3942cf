"""Lightning's loop over batches, in which hosts run ahead of their devices, and ranks stop together.

Before every batch Lightning broadcasts whether rank 0 was told to stop (SIGTERM) and reads the answer through the
device:
so the host waits for the work of the device, and then the device for the host, which has yet to reach the next batch's
first kernel. A rank that is told also broadcasts that from within its signal handler, and stops by itself after its
batch: ranks that are told a moment later, in the next batch, wait for it in vain.

Here the handler only records the signal. When a training step begins, hosts ask each other (`Timeline`), and all stop
before the next batch, or none. They meet once more when they leave the epoch: otherwise a rank with fewer batches would
leave the others waiting in their next step.
"""

from __future__ import annotations

import copyreg
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_deepcompile.compat.lightning import DataFetcher, SignalConnector, TrainingEpochLoop, signal_connector
from lightning_deepcompile.ranks.meetings import Where


class _SignalConnector(SignalConnector):
    """Records a SIGTERM, and passes it on to processes that this one has started."""

    received_sigterm: bool

    def _sigterm_notifier_fn(self, signum: Any, frame: Any) -> None:
        launcher = self.trainer.strategy.launcher
        if launcher is not None and not self.received_sigterm:
            launcher.kill(signum)
        self.received_sigterm = True


class _BatchLoop(TrainingEpochLoop):
    """Stops before a batch if any rank was told to before the last batch's step; leaves the epoch with all ranks."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles are of Lightning's own loop, as it was before there were ranks to ask.
        return copyreg._reconstructor, (TrainingEpochLoop, object, None), vars(self)  # type: ignore[attr-defined]

    def run(self, data_fetcher: DataFetcher) -> None:
        """Runs the batches of an epoch.

        Raises:
            RanksDivergedError: If another rank is in a batch when this one has no more.
        """
        super().run(data_fetcher)
        strategy: Any = self.trainer.strategy
        strategy.engine.timeline.meetings.batches = self.batch_progress.current.ready
        strategy.engine.timeline.meet(Where.LEFT)

    def on_advance_end(self, data_fetcher: DataFetcher) -> None:
        """Ends the batch; a rank that was told to stop does so before a later batch, together with all ranks."""
        try:
            super().on_advance_end(data_fetcher)
        except SIGTERMException:
            if not self.trainer.training:  # a validation that was left half-way
                raise

    def _broadcast_sigterm_tensor(self) -> None:
        strategy: Any = self.trainer.strategy
        if strategy.engine.timeline.stops():
            raise SIGTERMException


def let_host_run_ahead(trainer: pl.Trainer, ranks: int) -> None:
    """Gives one trainer's loop and signals the classes above; Lightning's own classes do not change.

    Args:
        trainer: Before it trains, and listens to signals. A loop of another class than Lightning's is left alone.
        ranks: The number of ranks that train together.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    if type(loop) not in (TrainingEpochLoop, _BatchLoop) or ranks == 1:
        return
    loop.__class__ = _BatchLoop
    if hasattr(loop, "_broadcast_sigterm_tensor"):  # versions of Lightning that do not ask need nothing
        signal_connector(trainer).__class__ = _SignalConnector
