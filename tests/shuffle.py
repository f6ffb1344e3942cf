"""Other valid schedules."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.copy_placement import CopyPlacement
from lightning_deepcompile.plan.known_passes import DEFAULT_PASSES
from lightning_deepcompile.plan.passes.fuse import reduction_pairs
from lightning_deepcompile.plan.passes.keep_whole import keep_until_boundary
from lightning_deepcompile.plan.passes.unshard import keep_gathered, unshard_candidates
from lightning_deepcompile.plan.placement import Placement
from lightning_deepcompile.plan.reductions import merge_reductions
from lightning_deepcompile.plan.step_pass import step_pass
from lightning_deepcompile.program.schedule import STATE_COPIES, Instruction, Schedule

__all__ = ["KEEPING", "Clear", "Meddle", "Shuffle", "TravelStates", "merge_some"]


@step_pass("keep_last", needs=["gathers"], initial=True)
def _keep_last(schedules: list[Schedule], context: PlanContext) -> list[Schedule]:
    return [s.keep(s.groups()[-1].ids) if s.kind == "forward" and s.groups() else s for s in schedules]


KEEPING = (*DEFAULT_PASSES, _keep_last)
"""Passes at compile time with which a forward program leaves its last group gathered, read by backward or not."""


def merge_some(schedule: Schedule, choose: Callable[[], bool]) -> Schedule:
    """Merges neighbouring groups of reductions where `choose` says so."""
    for number in reversed(range(len(reduction_pairs(schedule)))):
        if choose():
            schedule = merge_reductions(schedule, *reduction_pairs(schedule)[number])
    return schedule


class Shuffle(pl.Callback):
    """Another valid schedule for every step, the same on both ranks.

    Launches and copies go anywhere, any blocks are kept, any neighbouring reductions merge.
    """

    def __init__(self) -> None:
        self.random = random.Random(5)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.swap(trainer.strategy.engine.capture)

    def swap(self, capture: Capture) -> list[Schedule]:
        capture.scheduling.replan()
        step = [e.program.schedule for e in capture.frames.executables]
        for pair, group in unshard_candidates(step):
            choice = self.random.random()
            if choice < 0.3:
                step = keep_gathered(step, *pair, group.ids)
            elif choice < 0.6:
                step = keep_until_boundary(step, *pair, group)
        placements = [Placement.of(s) for s in step]
        step = [p.at(sorted(self.random.randint(0, g.need) for g in p.groups)) for p in placements]
        step = [merge_some(s, lambda: self.random.random() < 0.5) for s in self.copy(step)]
        capture.scheduling.replan(plan=step)
        swapped = [e.program.schedule for e in capture.frames.executables]
        assert [s.instructions for s in swapped] == [s.instructions for s in step]
        return swapped

    def copy(self, step: list[Schedule]) -> list[Schedule]:
        placements = [CopyPlacement.of(s) for s in step]
        read = {(p.schedule.frame, n) for p in placements if p.schedule.kind == "backward" for n in p.saved}
        away = {key for key in sorted(read) if self.random.random() < 0.5}
        return [
            p.at({n: self.random.randint(0, len(p.body)) for n in p.saved if (p.schedule.frame, n) in away})
            for p in placements
        ]


class TravelStates(pl.Callback):
    """Lets programs copy optimizer states: other chunks at other places in every step, the same on all ranks.

    Attributes:
        chunks: Chunks that programs fetched, by step.
    """

    def __init__(self, seed: int = 5) -> None:
        self.random = random.Random(seed)
        self.chunks: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        engine = trainer.strategy.engine
        if batch_idx == 0 or batch_idx % trainer.accumulate_grad_batches or engine.residency is None:
            return
        memory = engine.residency.memory()
        sizes = memory.chunks(memory.away)
        assert len(sizes) > 1, "too few chunks for a test"
        engine.residency.set_slots(self.random.randint(1, len(sizes) + 2))
        step = [e.program.schedule for e in engine.capture.frames.executables]
        self.chunks.append(self.random.choice([0, 1, 2, len(sizes) - 1, len(sizes), len(sizes) + 3]))
        fetched = list(range(self.chunks[-1]))
        left = self.random.sample(range(len(sizes)), self.random.randint(0, len(sizes)))
        travel = {"forward": ("wait_states", sorted(left)), "backward": ("reload_states", fetched)}
        plan = [self._with(s, *travel[s.kind]) if s.kind in travel else s for s in step]
        engine.capture.scheduling.replan(plan=plan)
        swapped = [e.program.schedule for e in engine.capture.frames.executables]
        # Of frames that were compiled again, those that are alike get one plan.
        assert len(plan) > 2 or [s.instructions for s in swapped] == [s.instructions for s in plan]

    def _with(self, schedule: Schedule, op: Any, chunks: list[int]) -> Schedule:
        instructions = [i for i in schedule.instructions if i.op not in STATE_COPIES]
        places = sorted(self.random.randint(0, len(instructions)) for _ in chunks)
        for chunk, place in reversed(list(zip(chunks, places, strict=True))):
            instructions.insert(place, Instruction(op, (chunk,), (1,)))
        return schedule.with_instructions(instructions)


class Meddle(TravelStates):
    """Changes a state on the host when programs have fetched it."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        for entries in optimizer.state.values():
            entries["exp_avg"].mul_(0.5)


class Clear(TravelStates):
    """Drops all states, as warm restarts do, of which programs are going to fetch some."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        if trainer.global_step % 2:  # what is made anew must be there in the next step
            trainer.optimizers[0].state.clear()
