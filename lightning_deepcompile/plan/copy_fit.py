"""Places the copies of saved tensors so that they are hidden and memory stays within a limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_deepcompile.plan.copy_placement import CopyPlacement, Key
from lightning_deepcompile.plan.costs import Profile
from lightning_deepcompile.plan.simulate import memory_bytes
from lightning_deepcompile.program.schedule import Schedule


@dataclass
class _Program:
    """One program of a micro-batch.

    Args:
        placement: Its body, and the tensors that may be copied.
        memory: Bytes at every place of the body if nothing is offloaded.
        clock: The time at which compute, if it never waits, gets to every place.
        partner: Index of the frame's other program.
    """

    placement: CopyPlacement
    memory: list[int]
    clock: list[float]
    partner: int | None = None

    @property
    def forward(self) -> bool:
        return self.placement.schedule.kind == "forward"


class CopyFit:
    """Places copies in the programs of a micro-batch.

    Memory is simulated once, without copies, and the bytes of offloaded tensors are subtracted: nothing else depends on
    them.

    Args:
        schedules: Without copies.
        profile: Used to simulate.
        limit: Bytes that may be allocated.
    """

    def __init__(self, schedules: Sequence[Schedule], profile: Profile, limit: int) -> None:
        self.limit = limit
        self._profile = profile
        self._programs = [
            _Program(CopyPlacement.of(schedule), row, profile.clock(schedule))
            for schedule, row in zip(schedules, memory_bytes(schedules, profile), strict=True)
        ]
        for program in self._programs:
            frame, kind = program.placement.schedule.frame, "backward" if program.forward else "forward"
            others = (k for k, s in enumerate(schedules) if (s.frame, s.kind) == (frame, kind))
            program.partner = next(others, None)

    def peak(self, chosen: Iterable[Key]) -> int:
        """Returns the peak bytes if `chosen` are offloaded: within the limit, or as small as possible."""
        return self._placed(chosen, 1.0)[1]

    def place(self, chosen: Iterable[Key], margin: float) -> list[Schedule]:
        """Returns the schedules with copies of `chosen`.

        Args:
            chosen: The tensors to offload.
            margin: The time that copies get, as a multiple of the expected one, where memory allows.
        """
        turns, _ = self._placed(chosen, margin)
        return [program.placement.at(turn) for program, turn in zip(self._programs, turns, strict=True)]

    def _placed(self, chosen: Iterable[Key], margin: float) -> tuple[list[dict[int, int]], int]:
        keys = list(chosen)
        turns: list[dict[int, int]] = []
        peak = 0
        for index, program in enumerate(self._programs):
            frame = program.placement.schedule.frame
            mine = [n for f, n in keys if f == frame] if program.partner is not None else []
            turn = self._hidden(program, mine, margin)
            elsewhere = self._away_throughout(index, keys)
            peak = max(peak, self._fit(program, turn, elsewhere))
            turns.append(turn)
        return turns, peak

    def _away_throughout(self, index: int, keys: Sequence[Key]) -> int:
        """Bytes of tensors of other frames that are offloaded while a program runs between their two programs."""
        total = 0
        for k, program in enumerate(self._programs):
            if program.forward and program.partner is not None and k < index < program.partner:
                saved, frame = program.placement.saved, program.placement.schedule.frame
                total += sum(saved[n].size for f, n in keys if f == frame)
        return total

    def _hidden(self, program: _Program, numbers: Sequence[int], margin: float) -> dict[int, int]:
        """Returns the places that hide the copies, if each takes `margin` times as long as the profile says."""
        placement, clock = program.placement, program.clock
        turns: dict[int, int] = {}
        order = sorted(numbers, key=lambda n: (placement.first(n), n))
        if program.forward:
            done, place = 0.0, 0
            for number in order:
                seconds = self._profile.copy_out.copy_seconds(placement.saved[number].size)
                done = max(done, clock[placement.first(number) + 1]) + margin * seconds
                while place < len(placement.body) and clock[place] < done:
                    place += 1
                turns[number] = max(place, placement.free(number))
        else:
            deadline, place = float("inf"), len(placement.body)
            for number in reversed(order):
                first = placement.first(number)
                seconds = self._profile.copy_in.copy_seconds(placement.saved[number].size)
                deadline = min(deadline, clock[first]) - margin * seconds
                place = min(place, first)
                while place > 0 and clock[place] > deadline:
                    place -= 1
                turns[number] = place
        return turns

    def _fit(self, program: _Program, turns: dict[int, int], elsewhere: int) -> int:
        """Moves turns to where memory is needed; returns the peak.

        Forward waits for copies earlier, beginning with the tensors that were made first; backward starts copies later,
        beginning with the tensors that are needed last.
        """
        placement = program.placement
        size = {n: placement.saved[n].size for n in turns}
        by_age = sorted(turns, key=lambda n: (placement.first(n), n))
        peak = 0
        for place, memory in enumerate(program.memory):
            if program.forward:
                away = sum(size[n] for n in by_age if turns[n] <= place)
                movable = [n for n in by_age if turns[n] > place >= placement.free(n)]
            else:
                away = sum(size[n] for n in by_age if turns[n] > place)
                movable = [n for n in reversed(by_age) if turns[n] <= place < placement.first(n)]
            over = memory - elsewhere - away - self.limit
            for number in movable:
                if over <= 0:
                    break
                turns[number] = place if program.forward else place + 1
                over -= size[number]
            peak = max(peak, over + self.limit)
        return peak
