"""Lightning's loop over batches, in which the host runs ahead of the device from one batch to the next.

Before every batch Lightning broadcasts whether rank 0 was told to stop (SIGTERM) and reads the answer, through the
device: then the host waits for what that has to do already, and the device for the host, which has yet to come to the
next batch's first kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_deepcompile.agreement import AnyRank

__all__ = ["let_host_run_ahead"]


class _BatchLoop(_TrainingEpochLoop):
    """Asks the other hosts, and reads the answer a batch later, when it has long been there."""

    _stops: AnyRank
    _answer: Callable[[], bool] | None

    def _broadcast_sigterm_tensor(self) -> None:
        # All ranks read the same answer before the same batch: none is left waiting for those that stop.
        answer, self._answer = self._answer, None
        if answer is not None and answer():
            raise SIGTERMException
        self._answer = self._stops.ask(self.trainer.received_sigterm)


def let_host_run_ahead(trainer: pl.Trainer, host_group: dist.ProcessGroup) -> None:
    """Gives one trainer's loop the class above; Lightning's own classes stay as they are.

    Args:
        trainer: Before it trains. A loop of another class than Lightning's is left alone.
        host_group: Of the ranks' CPUs.
    """
    loop = trainer.fit_loop.epoch_loop
    # Versions of Lightning that do not ask need nothing.
    if type(loop) not in (_TrainingEpochLoop, _BatchLoop) or not hasattr(loop, "_broadcast_sigterm_tensor"):
        return
    loop.__class__ = _BatchLoop
    loop._stops, loop._answer = AnyRank(host_group, "whether training is to stop"), None
