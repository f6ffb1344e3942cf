"""Lightning's loops of evaluation, in which a rank without batches takes part in the others' gathers."""

from __future__ import annotations

import copyreg
from typing import Any

import lightning.pytorch as pl

from lightning_deepcompile.compat.lightning import EvaluationLoop, PredictionLoop


class _Uneven:
    """Base of the loops; before Lightning's own class in the order of bases."""

    trainer: Any
    skip: bool
    batch_progress: Any

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles are of Lightning's own loop, as it was before there were ranks to ask.
        return copyreg._reconstructor, (type(self).__mro__[2], object, None), vars(self)  # type: ignore[attr-defined]

    def run(self) -> Any:
        """Runs the batches of this rank, and takes part in those of others."""
        results = super().run()  # type: ignore[misc]
        if self.skip:  # then it did nothing else
            self._evaluation.end()
        return results

    def on_run_end(self) -> Any:
        """Ends the evaluation when all ranks have come to its end."""
        self._evaluation.end()
        return super().on_run_end()  # type: ignore[misc]

    @property
    def _evaluation(self) -> Any:
        return self.trainer.strategy.engine.timeline.evaluation

    def _begin_batch(self, dataloader_idx: int, dataloader_iter: Any) -> None:
        # The loader of a step is not known before the step reads from it.
        loader = dataloader_idx if dataloader_iter is None else 0
        self._evaluation.begin_batch(loader, self.batch_progress.current.ready + 1)


class _EvaluationLoop(_Uneven, EvaluationLoop):
    """The loop of validation and tests."""

    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        self._begin_batch(dataloader_idx, dataloader_iter)
        super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)

    def _store_dataloader_outputs(self) -> None:
        self._evaluation.end_loader()
        super()._store_dataloader_outputs()


class _PredictionLoop(_Uneven, PredictionLoop):
    """The loop of predictions."""

    def _predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        self._begin_batch(dataloader_idx, dataloader_iter)
        super()._predict_step(batch, batch_idx, dataloader_idx, dataloader_iter)


def let_ranks_evaluate_unevenly(trainer: pl.Trainer, ranks: int) -> None:
    """Gives one trainer's loops the classes above; Lightning's own classes do not change.

    Args:
        trainer: Before it runs. Loops of other classes than Lightning's are left alone.
        ranks: The number of ranks that evaluate together.
    """
    if ranks == 1:
        return
    kinds = {EvaluationLoop: _EvaluationLoop, PredictionLoop: _PredictionLoop}
    fitting = trainer.fit_loop.epoch_loop.val_loop
    for loop in (fitting, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        if type(loop) in kinds:
            loop.__class__ = kinds[type(loop)]
