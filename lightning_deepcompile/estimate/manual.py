"""Stands for what a step calls that steps its optimizers itself: nothing of it runs in an estimate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer


class _Stepped:
    """Stands for an optimizer, or for its scheduler, of which all that is asked for but steps are the optimizer's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["optimizer"], name)

    @torch.compiler.disable
    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Calls the closure, if that is what is passed."""
        return closure() if callable(closure) else None

    @torch.compiler.disable
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing."""

    @contextlib.contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Returns a context that does nothing."""
        yield


def replace_manual_calls(module: pl.LightningModule, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
    """Replaces the methods of a module that need a running Trainer.

    Args:
        module: With manual optimization.
        optimizers: Returns what it configures.
    """
    made: list[_Stepped] = []

    def stepped(*args: Any, **kwargs: Any) -> Any:
        if not made:
            made.extend(map(_Stepped, optimizers()))
        return made[0] if len(made) == 1 else made

    def nothing(*args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    calls = dict.fromkeys(("manual_backward", "clip_gradients", "toggle_optimizer", "untoggle_optimizer"), nothing)
    vars(module).update(calls, optimizers=stepped, lr_schedulers=stepped)
