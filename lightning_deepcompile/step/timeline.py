"""What happens in a step, and when: the one place where the order of everybody's work is written down.

``begin`` → the forward pass → ``backward`` → the backward pass → ``backward_done``, or ``abort`` →
``before_optimizer`` → the optimizer → ``stepped`` → ``optimizer_left`` → ``end``. Under manual optimization backward
passes and optimizers' steps lie inside of the forward pass, and ``end`` does not come. Evaluation knows ``begin``
alone.
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
from lightning_deepcompile.ranks.meetings import Meetings, RanksPartedError, Where
from lightning_deepcompile.ranks.order import Agreement
from lightning_deepcompile.sharding.gradients import GradientSession
from lightning_deepcompile.sharding.uncompiled import Uncompiled
from lightning_deepcompile.step.evaluation import Evaluation
from lightning_deepcompile.step.prefetch import StepPrefetch
from lightning_deepcompile.tuning.tuner import Tuner

__all__ = ["Timeline"]

TRAINING = "training_step"


@dataclass(eq=False, repr=False)
class Timeline:
    """Tells those who take part in a step of its events, in the order that its methods are written in.

    Args:
        runtime: ``_C.Runtime`` that executes the programs.
        meetings: Asks the other ranks' hosts, once a training step, where they are, whether parameters were written to
            between steps, and whether a rank was told to stop.
        evaluation: Lets ranks evaluate different numbers of batches.
        order: Compares the ranks' order of collectives.
        tuner: Measures steps and swaps their programs.
        residency: Keeps optimizer states in host memory; None if none leaves.
        leaving: Decides which activations leave, where no plan does.
        prefetch: Follows writes to parameters, and launches the first gathers of the next step.
        capture: Has the programs.
        uncompiled: Has the parameters that uncompiled code reads.
        gradients: Has the gradients.

    Attributes:
        told_to_stop: Whether this rank was told to stop training.
        communicated: What the runtime has counted during the last training step whose backward pass is done.
        uncompiled_share: The share of its time that the host spent outside of programs.
    """

    runtime: Any
    meetings: Meetings
    evaluation: Evaluation
    order: Agreement
    tuner: Tuner
    residency: Residency | None
    leaving: ActivationOffload
    prefetch: StepPrefetch
    capture: Capture
    uncompiled: Uncompiled
    gradients: GradientSession
    communicated: dict[str, int] = field(default_factory=dict)
    uncompiled_share: float = 0.0
    told_to_stop: bool = False
    _answers: Asked | None = None  # of the last training step
    _stops: bool = False
    _stale_gradients: bool = False
    _began: tuple[float, float] = (0.0, 0.0)  # the last forward pass: when, and what programs had taken by then

    def begin(self, name: str, sizes: Hashable = ()) -> bool:
        """Before the forward pass of the step `name`.

        Args:
            name: The step's name.
            sizes: Those of the tensors in its batch.

        Returns:
            Whether what was compiled of the training step is to be compiled anew.
        """
        if name == TRAINING and self.order.compares_end:  # else one of the questions below says where ranks are
            self.meet(Where.TRAINING)
        if self.evaluation.behind is None:
            self.order.begin(name)  # first: what follows communicates, and is compared as part of this step
        anew = False
        if name == TRAINING:
            launched = {"early_gathers": self.prefetch.early, "head_start": self.prefetch.in_optimizer}
            anew = self.tuner.begin_micro_batch(launched)  # before all that depends on the programs, which it may swap
            if (replays := self.capture.replays) is not None:
                replays.begin_step(self.tuner.settled)  # before the hosts are asked
            if self.residency is not None:  # before gathers, which take the memory that states leave
                self.residency.begin_step(self.capture.waits_for_states)
            self.prefetch.begin_training_step(self._ask(self._is_new(name, sizes)))  # drops what is out of date
            self.capture.begin_step()  # after `prefetch`, which asks what the last step began with
        elif self.evaluation.behind is None:  # else nothing is gathered ahead
            self.prefetch.begin(name)
            met = self.meetings.meet(Where.EVALUATION, self._is_new(name, sizes))
            self.order.compare_all(lambda: bool(met()[0]))
        self.uncompiled.clear()  # parameters may have changed between steps, and nobody says so
        self.gradients.follow_requires_grad()  # before guards of the compiled step look at it
        self._began = time.perf_counter(), self.capture.program_seconds
        return anew

    def _is_new(self, name: str, sizes: Hashable) -> bool:
        """Returns whether this rank may run what it has not run in such a step: of other sizes, or by a newer graph."""
        return self.order.is_new((name, sizes, self.capture.captured))

    def _ask(self, new: bool) -> bool:
        """Asks the other hosts; returns whether the training step that begins may use what is gathered.

        Args:
            new: Whether this rank may run what it has not run since programs were swapped.
        """
        self.stops()  # keeps the answer of the step before
        may_stay = self.prefetch.may_stay(isolated=self.tuner.isolates)
        replays = self.capture.replays
        failures = 0 if replays is None else replays.failures
        *_, taken = self.runtime.memory.windows()
        answers = self.meetings.meet(
            Where.TRAINING,
            may_stay and self.prefetch.written(),
            self.told_to_stop,
            replays is not None and not replays.ready,
            failures,
            -failures,
            taken,
            -taken,
            new,
        )
        self._answers = answers
        self.order.compare_all(lambda: bool(answers()[-1]))  # a compiler may make another graph of it
        if replays is not None:
            replays.agree(lambda: not answers()[2])
        # A rank that gathered again alone would wait for the others: it may be the only one that has what was written.
        return may_stay and not answers()[0]

    def stops(self) -> bool:
        """Whether a rank had been told to stop when the last training step began; the same on all ranks."""
        answers, self._answers = self._answers, None
        if answers is not None:
            _, told_to_stop, _, most, least, *taken, _ = answers()
            self._stops |= bool(told_to_stop)
            if sum(taken) != 0:
                raise RuntimeError(
                    "Ranks have gathered parameters to different places of their symmetric memory, so the last step "
                    "read wrong ones. Train with CompileConfig(symmetric_memory=False), from the last checkpoint, and "
                    "report this."
                )
            if self.capture.replays is not None:
                self.capture.replays.failed_on_ranks(-least, most)
        return self._stops

    def backward(self) -> None:
        """Before a backward pass.

        Raises:
            RanksPartedError: If another rank is not in a training step.
        """
        self.order.passed()  # first: ranks that wait elsewhere learn that this one went on
        if self._answers is not None:
            self._answers()  # which are there by now
        self.tuner.begin_backward(self.gradients.update)
        if self.residency is not None:
            self.runtime.states.release()  # what the forward pass did not wait for
        self.gradients.begin_now()

    def backward_done(self) -> None:
        """After a backward pass: every ``.grad`` is set."""
        self.order.end_backward()  # before `gradients`: other ranks may have some that this one takes part in
        self.gradients.finish()
        self.uncompiled.clear()  # after `gradients`, which reduce what uncompiled code has left
        seconds = time.perf_counter() - self._began[0]
        self.uncompiled_share = 1 - (self.capture.program_seconds - self._began[1]) / seconds
        self.prefetch.after_backward(last=self.gradients.update)
        counts, before = self.runtime.stats(), self.prefetch.before
        self.communicated = {key: value - before.get(key, 0) for key, value in counts.items()}

    def hooks_called(self) -> None:
        """A backward pass has called hooks of parameters, which may have written to them."""
        self.uncompiled.clear()
        self.prefetch.rewritten()

    def before_optimizer(self, *, follows: bool) -> None:
        """Before an optimizer steps.

        Args:
            follows: Whether `end` comes right behind it: then gathers for the next step may be launched inside.
        """
        self.order.passed()
        self.prefetch.follows = follows

    def written(self) -> None:
        """An optimizer has written to parameters, and gradients are still needed: what is gathered is out of date."""
        self.uncompiled.clear()
        self.prefetch.rewritten()

    def stepped(self) -> None:
        """An optimizer has stepped, or parameters were written to: what is gathered of them is out of date."""
        self.uncompiled.clear()
        self.prefetch.stepped()
        self._stale_gradients = self.leaving.has_states = True
        self.tuner.end_step()  # last: what it times includes the work of the others

    def optimizer_stepped(self) -> None:
        """An optimizer has stepped: as `stepped`, and all ranks must do so as often."""
        self.meetings.steps += 1
        self.stepped()

    def optimizer_called(self) -> None:
        """A method of an optimizer's class that is no step may have written to parameters; gradients are as before."""
        self.meetings.steps += 1  # what is gathered goes where it was called: all ranks must
        self.written()

    def optimizer_left(self) -> None:
        """After the call that has stepped an optimizer, also where it failed."""
        self.prefetch.follows = False

    def end(self) -> None:
        """The optimizer's step is over and the next training step uses its parameters: they may be gathered."""
        if self.residency is not None and not self.capture.waits_for_states:
            self.runtime.states.release()  # first: what is gathered now shall not wait for what leaves the device
        self.prefetch.launch()

    def abort(self) -> None:
        """A backward pass has failed."""
        self.gradients.abandon()

    def meet(self, where: Where) -> None:
        """Waits for all ranks to come to a place outside of steps.

        Args:
            where: The place.

        Raises:
            RanksPartedError: If another rank is elsewhere.
        """
        self.meetings.meet(where)()

    def why_alone(self) -> str:
        """Why communication failed, as far as this rank has been told where others are; "" if it does not know."""
        if self._answers is not None and self._answers.is_there():
            try:
                self._answers()
            except RanksPartedError as error:
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
        """After a training: gives back what is only needed while steps run."""
        if self.residency is not None:
            self.residency.retire()
        if self.capture.replays is not None:
            self.capture.replays.forget()
        self.evaluation.forget()
        self.order.rest()  # ends its thread, also where communication has ended
        self.meetings.watch.rest()
        self._answers, self._stops, self.told_to_stop = None, False, False

    def release_memory(self) -> None:
        """As `rest`, while communication has not ended: memory, too."""
        self.gradients.forget_held_back()
        self.uncompiled.clear()
        self.prefetch.forget()
        self.runtime.memory.free_unused()
