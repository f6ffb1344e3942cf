"""Prints this package's messages: through the user's own handlers, or on the screen if there are none.

PyTorch imports this package long before users configure logging. So each message looks for other handlers when it is
printed, and messages always propagate to the root logger.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal

from tqdm import tqdm

from lightning_deepcompile.options import did_you_mean

LogLevel = Literal["debug", "info", "warning", "error"]

VARIABLE = "DEEPCOMPILE_LOG"
"""The environment variable that says how much is told; it goes before the setting."""

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_logger = logging.getLogger("lightning_deepcompile")


class _Screen(logging.Handler):
    """Prints to standard error, where no other handler sees the message.

    Attributes:
        chosen: The level that this package has set; another one is the user's own, and stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self.chosen = logging.NOTSET
        self.setFormatter(logging.Formatter("deepcompile %(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a message."""
        if logging.getLogger().handlers or any(other is not self for other in _logger.handlers):
            return
        try:
            # As `print`, but a progress bar that is on the screen moves one line down.
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


def show_messages(level: LogLevel | None = None) -> None:
    """Shows messages from now on; further calls only change the level.

    Args:
        level: Least level of messages; the environment variable ``DEEPCOMPILE_LOG`` overrides it. None: the level that
            the user has set for the logger ``lightning_deepcompile``, or ``"info"``.

    Raises:
        ValueError: If the variable names no level.
    """
    named = os.environ.get(VARIABLE, "").strip().lower() or level
    if named is not None and named not in _LEVELS:
        raise ValueError(f"{VARIABLE}={os.environ[VARIABLE]!r}: use one of {[*_LEVELS]}.{did_you_mean(named, _LEVELS)}")
    screen = _screen()
    if screen is None:
        screen = _Screen()
        _logger.addHandler(screen)
    if named is not None or _logger.level in (logging.NOTSET, screen.chosen):
        screen.chosen = _LEVELS[named or "info"]
        _logger.setLevel(screen.chosen)


def quieten(rank: int) -> None:
    """Shows only warnings on all ranks but the first: they would all say the same. A level that the user has set stays.

    Args:
        rank: This process's, among all.
    """
    screen = _screen()
    if rank != 0 and screen is not None and _logger.level == screen.chosen:
        screen.chosen = max(screen.chosen, logging.WARNING)
        _logger.setLevel(screen.chosen)


def _screen() -> _Screen | None:
    return next((handler for handler in _logger.handlers if isinstance(handler, _Screen)), None)
