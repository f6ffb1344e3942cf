"""Reports where all ranks are when one has waited for the others for a while.

A rank that hangs in its loader, or in a hook, says nothing, and the others wait until the timeout of the process group.
So each rank has a thread that checks whether the rank makes progress. If it does not, the thread asks those of the
other ranks, over the rendezvous store, where their ranks are, and reports it.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import sysconfig
import threading
import time
from typing import Any

import torch.distributed as dist

from lightning_deepcompile.ranks.failures import is_of_library
from lightning_deepcompile.ranks.lookout import Lookout

_log = logging.getLogger(__name__)

_LOOK_SECONDS, _ANSWER_SECONDS = 1.0, 5.0
_SHOWN = 8
_NOT_THE_USERS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Watch:
    """Tracks where this rank is, and reports where all are if it stays there while others are elsewhere.

    Args:
        store: Key-value store shared by the ranks.
        rank: This rank.
        world_size: Number of ranks.
        prefix: Makes keys unique to one engine.

    Attributes:
        after: Seconds after which it is said; 0: never.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, prefix: str) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._prefix = f"{prefix}/watch"
        self.after = 30.0
        self._place = "", "", 0.0, 0  # what it is, as others read it, since when, and in which thread
        self._next, self._answered = 0.0, 0
        self._lookout: Lookout | None = None

    def come_to(self, place: str, advice: str = "") -> None:
        """Sets this rank's place.

        Args:
            place: The place, to follow "rank n". Ranks at one place are assumed to compute, or to wait for a device.
            advice: What to do if the others do not come there.
        """
        now = time.monotonic()
        self._place, self._next = (place, advice, now, threading.get_ident()), now + self.after
        if self._lookout is None and self._world_size > 1 and self.after:
            self._lookout = Lookout(self._look, _LOOK_SECONDS, "watch")

    def rest(self) -> None:
        """Ends the thread; call when there is nothing to wait for."""
        if self._lookout is not None:
            self._lookout.end()
            self._lookout = None

    def _look(self) -> None:
        self._answer()
        if time.monotonic() > self._next:
            self._next = time.monotonic() + self.after
            number = self._store.add(f"{self._prefix}/asked", 1)
            self._tell(number)

    def _answer(self) -> None:
        """Answers the questions of other ranks since the last time."""
        asked = self._store.add(f"{self._prefix}/asked", 0)
        if asked == self._answered:
            return
        place, advice, since, thread = self._place
        mine = json.dumps([place, advice, round(time.monotonic() - since), _line_of(thread)])
        for number in range(self._answered + 1, asked + 1):
            self._store.set(f"{self._prefix}/{number}/{self._rank}", mine)
        self._answered = asked
        self._next = max(self._next, time.monotonic() + 3 * self.after)  # another rank is about to report

    def _tell(self, number: int) -> None:
        known: dict[int, list[Any]] = {}
        begun, since = time.monotonic(), self._place[2]
        missing = list(range(self._world_size))
        while missing and time.monotonic() < begun + _ANSWER_SECONDS:
            self._answer()
            for rank in [r for r in missing if self._store.check([f"{self._prefix}/{number}/{r}"])]:
                known[rank] = json.loads(self._store.get(f"{self._prefix}/{number}/{rank}"))
                self._store.delete_key(f"{self._prefix}/{number}/{rank}")
                missing.remove(rank)
            time.sleep(_LOOK_SECONDS / 10)
        if self._place[2] != since:  # this rank has moved on meanwhile
            return
        self._next = time.monotonic() + self.after
        places = {place for place, *_ in known.values()}
        if len(places) == 1 and not missing:
            return
        self._next = math.inf  # reported once
        # One rank for each place, for as many as there is room.
        first = {place: rank for rank, (place, *_) in sorted(known.items(), reverse=True)}
        lines = []
        for rank in sorted(first.values())[:_SHOWN]:
            place, _, seconds, line = known[rank]
            lines.append(f"rank {rank} {place}{f', at {line}' if line else ''}, for {seconds} s")
        if missing:
            names = ", ".join(map(str, missing[:_SHOWN])) + (" and others" if len(missing) > _SHOWN else "")
            lines.append(f"rank{'s' if len(missing) > 1 else ''} {names} did not answer: ended, or busy without Python")
        advice = {advice for _, advice, *_ in known.values() if advice}
        _log.warning("Ranks wait for each other: %s. %s", "; ".join(lines), " ".join(sorted(advice)))


def _line_of(thread: int) -> str:
    """The innermost line of the user's code that a thread of this process is in; "" if there is none."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_of_library(file) and not file.startswith(_NOT_THE_USERS):
            return f"{file}:{frame.f_lineno} in `{frame.f_code.co_name}`"
        frame = frame.f_back
    return ""
