"""The order of a step: the one place where the order of everybody's work is written down.

``begin`` → the forward pass → ``backward`` → the backward pass → ``backward_done``, or ``abort`` →
``before_optimizer`` → the optimizer → ``stepped``. Under manual optimization backward passes and optimizers' steps lie
inside of the forward pass. Evaluation only calls ``begin``.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.offload.activations import ActivationOffload
from lightning_deepcompile.offload.residency import Residency
from lightning_deepcompile.ranks.exchange import Asked
from lightning_deepcompile.ranks.host_report import HostReport, HostReports
from lightning_deepcompile.ranks.meetings import Meetings, RanksDivergedError, Where
from lightning_deepcompile.ranks.order import Agreement
from lightning_deepcompile.sharding.gradients import GradientSession
from lightning_deepcompile.sharding.uncompiled import Uncompiled
from lightning_deepcompile.step.batch_sizes import LargestBatch, elements_of
from lightning_deepcompile.step.evaluation import Evaluation
from lightning_deepcompile.step.freshness import Freshness
from lightning_deepcompile.step.step_times import StepTimes
from lightning_deepcompile.tuning.tuner import Tuner

TRAINING = "training_step"


@dataclass(eq=False, repr=False)
class Timeline:
    """Passes the events of a step to its participants, in the order in which its methods are written.

    Args:
        runtime: ``_C.Runtime`` that executes the programs.
        meetings: Asks the other ranks' hosts, once a training step, where they are, whether parameters were written to
            between steps, and whether a rank was told to stop, or was short of memory.
        evaluation: Supports evaluation of different numbers of batches.
        order: Compares the ranks' order of collectives.
        tuner: Measures steps and swaps their programs.
        residency: Keeps optimizer states in host memory; None if none is offloaded.
        leaving: Decides which activations are offloaded without a plan.
        freshness: Tracks writes to parameters, and drops gathered copies that are out of date.
        capture: Has the programs.
        uncompiled: Has the parameters that uncompiled code reads.
        gradients: Has the gradients.

    Attributes:
        told_to_stop: Whether this rank was told to stop training.
        communicated: The runtime's counters of the micro-batches of the last optimizer step.
        uncompiled_share: The share of its time that the host spent outside of programs.
    """

    runtime: Any
    meetings: Meetings
    evaluation: Evaluation
    order: Agreement
    tuner: Tuner
    residency: Residency | None
    leaving: ActivationOffload
    freshness: Freshness
    capture: Capture
    uncompiled: Uncompiled
    gradients: GradientSession
    communicated: dict[str, int] = field(default_factory=dict)
    uncompiled_share: float = 0.0
    told_to_stop: bool = False
    times: StepTimes = field(default_factory=StepTimes)
    _before: dict[str, int] = field(default_factory=dict)  # the runtime's counters before the micro-batch under way
    _counted: dict[str, int] = field(default_factory=dict)  # in micro-batches before the last one
    _answers: Asked[HostReports] | None = None  # of the last training step
    _stops: bool = False
    _stale_gradients: bool = False
    _largest: LargestBatch = field(init=False)
    _began: tuple[float, float] = (0.0, 0.0)  # the last forward pass: its start, and the programs' time before it

    def __post_init__(self) -> None:
        self._largest = LargestBatch(self.tuner.largest)

    def begin(self, name: str, sizes: Hashable = ()) -> bool:
        """Call before the forward pass of the step `name`.

        Args:
            name: The step's name.
            sizes: Those of the tensors in its batch.

        Returns:
            Whether the training step is to be compiled again.
        """
        if name == TRAINING:
            self.times.begin(self.capture.frames.captured)
        else:
            self.times.interrupt()
        if name == TRAINING and self.order.compares_end:  # else one of the questions below exchanges the place
            self.meet(Where.TRAINING)
        if self.evaluation.behind is None:
            self.order.begin(name)  # first: the rest communicates, and is compared as part of this step
        anew = False
        if name == TRAINING:
            self.stops()  # keeps the answers of the step before
            anew = self.tuner.begin_micro_batch()  # before all that depends on the programs, which it may swap
            if (replays := self.capture.replays) is not None:
                replays.begin_step(self.tuner.settled)  # before the hosts are asked
            if self.residency is not None:  # before gathers, which use the memory that states leave
                self.residency.begin_step(self.capture.entry.waits_for_states)
            new = self._is_new(name, sizes)
            larger = new and self._largest.grows(sizes)
            self.tuner.largest = self._largest.most
            self.freshness.begin(name, self._ask(new, larger, sizes))
            self._before = self.runtime.stats()
            self.capture.entry.begin_step()
        elif self.evaluation.behind is None:  # else nothing is gathered ahead
            if self.residency is not None:
                self.runtime.states.release()  # first: gathers use the memory that states leave
            self.freshness.begin(name)
            met = self.meetings.meet(Where.EVALUATION, HostReport(new=self._is_new(name, sizes)))
            self.order.compare_all(lambda: met().most.new)
        self.uncompiled.clear()  # parameters may have changed between steps, which nothing reports
        self.gradients.follow_requires_grad()  # before guards of the compiled step read it
        self._began = time.perf_counter(), self.capture.frames.seconds
        return anew

    def _is_new(self, name: str, sizes: Hashable) -> bool:
        """Returns whether this rank may run what it has not run in such a step: of other sizes, or by a newer graph."""
        return self.order.is_new((name, sizes, self.capture.frames.captured))

    def _ask(self, new: bool, larger: bool, sizes: Hashable) -> bool:
        """Asks the other hosts; returns whether the training step that begins may use gathered parameters.

        Args:
            new: Whether this rank may run what it has not run since programs were swapped.
            larger: Whether its batch is larger than all before.
            sizes: Those of its batch.
        """
        if self.tuner.isolates:
            self.freshness.doubt()
        may_stay = self.freshness.may_stay(TRAINING)
        replays = self.capture.replays
        *_, windows = self.runtime.memory.windows()
        report = HostReport(
            written=may_stay and self.freshness.written(),
            told_to_stop=self.told_to_stop,
            cannot_record=replays is not None and not replays.ready,
            failed_recordings=0 if replays is None else replays.failures,
            windows=windows,
            short=self.tuner.short,
            new=new,
            larger=larger,
        )
        answers = self.meetings.meet(Where.TRAINING, report)
        self._answers = answers
        self.order.compare_all(lambda: answers().most.new)  # a compiler may make another graph for them
        self.tuner.begin_batch(larger, lambda: answers().most.larger, lambda: elements_of(sizes))
        if replays is not None:
            replays.agree(lambda: not answers().most.cannot_record)
        # A rank that gathered again alone would wait for the others: it may be the only one where parameters were
        # written to.
        return may_stay and not answers().most.written

    def stops(self) -> bool:
        """Returns whether a rank had been told to stop when the last training step began; the same on all ranks."""
        answers, self._answers = self._answers, None
        if answers is not None:
            most, least = answers()
            self._stops |= most.told_to_stop
            self.tuner.hear(short=most.short)
            if most.windows != least.windows:
                raise RuntimeError(
                    "Ranks have gathered parameters to different places of their symmetric memory, so the last step "
                    "read wrong ones. Train with CompileConfig(symmetric_memory=False), from the last checkpoint, and "
                    "report this."
                )
            if self.capture.replays is not None:
                self.capture.replays.failed_on_ranks(least.failed_recordings, most.failed_recordings)
        return self._stops

    def backward(self) -> None:
        """Call before a backward pass.

        Raises:
            RanksDivergedError: If another rank is not in a training step.
        """
        self.order.passed()  # first: ranks that wait elsewhere learn that this one went on
        if self._answers is not None:
            self._answers()  # the answers are there by now
        self.tuner.begin_backward(self.gradients.update)
        if self.residency is not None:
            self.runtime.states.release()  # states that the forward pass did not wait for
        self.gradients.begin_now()

    def backward_done(self) -> None:
        """Call after a backward pass: every ``.grad`` is set."""
        self.order.end_backward()  # before `gradients`: this one may take part in others' reductions
        self.gradients.finish()
        self.tuner.end_backward()
        self.uncompiled.clear()  # after `gradients`, which reduce those of uncompiled code
        seconds = time.perf_counter() - self._began[0]
        self.uncompiled_share = 1 - (self.capture.frames.seconds - self._began[1]) / seconds
        self.freshness.after_backward(last=self.gradients.update)
        counts, before, so_far = self.runtime.stats(), self._before, self._counted
        self._counted = {key: so_far.get(key, 0) + value - before.get(key, 0) for key, value in counts.items()}
        if self.gradients.update:
            self.communicated, self._counted = self._counted, {}

    def before_optimizer(self) -> None:
        """Call before an optimizer steps."""
        self.order.passed()

    def written(self) -> None:
        """Call when hooks of parameters, or an optimizer whose gradients stay, may have written to parameters."""
        self.uncompiled.clear()
        self.freshness.forget()

    def stepped(self) -> None:
        """Call when an optimizer has stepped, or parameters were written to: gathered copies are out of date."""
        self.uncompiled.clear()
        self.freshness.forget()
        self._stale_gradients = self.leaving.has_states = True
        self.times.stepped()
        self.tuner.end_step()  # last: its time includes the others' work

    def optimizer_stepped(self) -> None:
        """Call when an optimizer has stepped, like `stepped`; all ranks must do so equally often."""
        self.meetings.steps += 1
        self.stepped()

    def optimizer_called(self) -> None:
        """Call when another method of an optimizer's class may have written to parameters, but not to gradients."""
        self.meetings.steps += 1  # gathered copies were dropped: all ranks must call it
        self.written()

    def abort(self) -> None:
        """Call when a backward pass has failed."""
        self._counted = {}
        self.gradients.abandon()

    def meet(self, where: Where) -> None:
        """Waits for all ranks to come to a place outside of steps.

        Raises:
            RanksDivergedError: If another rank is elsewhere.
        """
        self.meetings.meet(where)()

    def why_alone(self) -> str:
        """Explains why communication failed, if this rank has been told where others are; "" if it does not know."""
        if self._answers is not None and self._answers.is_there():
            try:
                self._answers()
            except RanksDivergedError as error:
                return str(error)
            except RuntimeError:  # which is what failed
                pass
        return ""

    def drop_stale_gradients(self) -> None:
        """Frees gradients that an optimizer step has consumed, before a forward pass needs the memory."""
        if self._stale_gradients:
            self.gradients.drop()
            self._stale_gradients = False

    def rest(self) -> None:
        """Call after a training: releases resources that only steps need."""
        if self.residency is not None:
            self.residency.retire()
        if self.capture.replays is not None:
            self.capture.replays.forget()
        self.evaluation.forget()
        self.order.rest()  # ends its thread, also if communication has ended
        self.meetings.watch.rest()
        self._answers, self._stops, self.told_to_stop = None, False, False

    def release_memory(self) -> None:
        """Releases memory, too, after a training; call before communication ends. See `rest`."""
        self.gradients.forget_held_back()
        self.uncompiled.clear()
        self.freshness.forget()
        self.runtime.memory.free_unused()
