"""Lightning's loop over batches, in which the host runs ahead of the device from one batch to the next.

Before every batch Lightning broadcasts whether rank 0 was told to stop (SIGTERM) and reads the answer. On the stream
that computes, this waits for all compute that is queued: the device is idle afterwards until the host has come to the
next batch's first kernel, some milliseconds for every micro-batch.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

__all__ = ["let_host_run_ahead"]


class _BatchLoop(_TrainingEpochLoop):
    """Asks on a stream of its own: the same broadcasts, which wait for the other ranks' hosts alone."""

    _stream: torch.cuda.Stream

    def _broadcast_sigterm_tensor(self) -> None:
        with torch.cuda.stream(self._stream):
            super()._broadcast_sigterm_tensor()


def let_host_run_ahead(trainer: pl.Trainer, device: torch.device) -> None:
    """Gives one trainer's loop the class above, on GPUs; Lightning's own classes stay as they are.

    Args:
        trainer: Before it trains. A loop of another class than Lightning's is left alone.
        device: Of this rank.
    """
    loop = trainer.fit_loop.epoch_loop
    # Versions of Lightning that do not ask need nothing.
    if device.type != "cuda" or type(loop) is not _TrainingEpochLoop or not hasattr(loop, "_broadcast_sigterm_tensor"):
        return
    loop.__class__ = _BatchLoop
    loop._stream = torch.cuda.Stream(device, priority=-1)  # it is one small kernel, for which hosts wait
