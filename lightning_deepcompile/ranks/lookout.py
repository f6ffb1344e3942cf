"""A thread that calls a method of an object every few seconds, for as long as the object lives."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch.distributed as dist


class Lookout:
    """Calls a method of an object every few seconds, from a thread.

    Args:
        act: The bound method; its object is held weakly, and the thread ends with it. It also ends when the store that
            the method uses has ended.
        seconds: Between two calls.
        name: The thread's.

    Attributes:
        thread: The thread.
    """

    def __init__(self, act: Callable[[], None], seconds: float, name: str) -> None:
        stop = threading.Event()
        self.thread = threading.Thread(
            target=_run, args=(weakref.WeakMethod(act), seconds, stop), daemon=True, name=f"deepcompile {name}"
        )
        self.thread.start()
        # Also at the interpreter's end: a thread that returns from the store then would abort the process.
        self._finalizer = weakref.finalize(self, _end, stop, self.thread, seconds)

    def end(self) -> None:
        """Ends the thread."""
        self._finalizer()


def _run(method: weakref.WeakMethod[Callable[[], None]], seconds: float, stop: threading.Event) -> None:
    while not stop.wait(seconds):
        act = method()
        if act is None:
            return
        try:
            act()
        except (RuntimeError, dist.DistError):  # the store has ended
            return
        del act


def _end(stop: threading.Event, thread: threading.Thread, seconds: float) -> None:
    stop.set()
    if thread is not threading.current_thread():  # which may hold the last reference to the object
        thread.join(seconds)
