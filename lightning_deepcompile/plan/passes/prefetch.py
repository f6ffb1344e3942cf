"""Prefetching at a fixed distance: a block's parameters travel while the blocks before it compute."""

from __future__ import annotations

from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.program.instructions import TABLE, traits_of
from lightning_deepcompile.program.program import Program

__all__ = ["prefetch"]


def prefetch(program: Program, settings: PlanSettings) -> Program:
    """Moves every launch of a group ``settings.prefetch_blocks`` groups ahead of where it is needed.

    Looks for: ``prefetch_params_fused`` right before a region, as `zero3` leaves them.

    Changes: the launch of the k-th group moves before the region that uses group ``k - prefetch_blocks`` (behind that
    group's own launch), that of the first ones to the program's start. A launch never moves before an earlier release
    of one of its own parameters, which would turn the release into a use after free. Launches keep their order, so all
    ranks issue the same collectives.

    Promises: same values; at most ``prefetch_blocks`` more groups gathered at a time.

    Args:
        program: Program scheduled by `zero3`.
        settings: What the user chose.

    Returns:
        The program with earlier launches.
    """
    result = program.copy()
    position = {node: i for i, node in enumerate(result.gm.graph.nodes)}
    launches = [n for n in position if traits_of(n) is TABLE["gather"]]
    waits = [launch.next for launch in launches]
    releases = [n for n in position if traits_of(n) is TABLE["release"]]
    start = result.regions()[0] if launches else None
    earliest = 0
    for k, launch in enumerate(launches):
        assert start is not None
        own = set(launch.args[2])
        released = max(
            (position[r] for r in releases if position[r] < position[launch] and own & set(r.args[1])), default=-1
        )
        place = max(earliest, k - settings.prefetch_blocks)
        while place < k and position[waits[place]] < released:
            place += 1
        opens = k < settings.prefetch_blocks and place == 0 and position[start] < position[waits[0]] and released < 0
        (start if opens else waits[place]).prepend(launch)
        earliest = place
    return result.finish("prefetch")
