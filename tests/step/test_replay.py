"""Recording and replaying of programs, on CPUs: a replay runs the program again and writes to the same memory.

What the device does is `test_cuda_graphs_gpu.py`'s.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import CASES, Record, Tokens, gpt, train
from multiprocess import run_ranks
from test_cuda_graphs_gpu import Bucketed, Dropped, Fused, TwoPasses, equal_after_fifty_steps, fifty_steps
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_deepcompile.step.clipping import Clipping
from lightning_deepcompile.step.direct import DirectStep

MODELS = {**CASES, "gpt_tied": gpt(tied=True, layers=1), "dropped": Dropped, "fused": Fused, "two_passes": TwoPasses}


class Replay(pl.Callback):
    """Lets an engine replay its programs though its device has no graphs."""

    fails = False

    def __init__(self) -> None:
        self.replayed: Counter[str] = Counter()
        self.recorded = 0

    def install(self, engine: Any) -> None:
        from lightning_deepcompile.program import replay

        callback = self

        class OnCpu(replay.Replays):
            def record(self, run: Any, inputs: list[Any]) -> tuple[Any, Any, list[Any]]:
                self._graphs.prepare()
                self._graphs.fork()
                try:
                    if callback.fails:  # what was recorded until then has reached no device
                        raise RuntimeError("not while capturing")
                    outputs = list(run(list(inputs)))
                except BaseException:
                    self._graphs.cancel()
                    raise
                recording = self._graphs.join()
                self.recorded += 1
                callback.recorded += 1
                return SimpleNamespace(run=run, inputs=inputs, outputs=outputs, ran=True), recording, outputs

            def launch(self, graph: Any, name: str) -> None:
                known = graph.graph
                if not known.ran:  # else its recording was its first run
                    for old, new in zip(known.outputs, known.run(list(known.inputs)), strict=True):
                        if isinstance(old, Tensor) and old is not new:
                            old.copy_(new)
                known.ran = False
                self._graphs.replayed(graph.recording, name)
                self.replayed.add(name)
                callback.replayed[name] += 1

            def record_alone(self, run: Any) -> Any:
                if callback.fails:
                    raise RuntimeError("not while capturing")
                result, ran = run(), [True]

                def replay() -> None:
                    if not ran:
                        new = run()
                        if isinstance(result, Tensor):
                            result.copy_(new)
                    ran.clear()

                return SimpleNamespace(replay=replay), result

            def launch_alone(self, graph: Any, name: str) -> None:
                super().launch_alone(graph, name)
                callback.replayed[name] += 1

        replays = OnCpu(engine.runtime, torch.device("cpu"), True)
        engine.capture.replays = engine.capture.entry.replays = replays
        engine.clipping = Clipping(engine.model, engine.device, replays)
        for optimizer, shards in engine._local_shards.items():
            shards._direct = DirectStep.of(optimizer, engine.model, replays)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.strategy.engine.capture.replays is None:
            self.install(trainer.strategy.engine)


def _run(name: str, replays: bool, world: int, **options: Any) -> tuple[Record, Any]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    config = CompileConfig(region_backend="eager", schedule=None)
    callbacks = options.pop("callbacks", [])
    callback = next((c for c in callbacks if isinstance(c, Replay)), Replay())
    record = train(
        MODELS[name],
        DeepCompileStrategy(compile=config),
        world_size=world,
        rank=int(os.environ["RANK"]),
        callbacks=list(dict.fromkeys([callback, *callbacks])) if replays else callbacks,
        inspect=lambda trainer: trainer.strategy.engine.capture.replays,
        **{"steps": 7, **options},
    )
    record.extra = record.extra and (dict(callback.replayed), record.extra.reasons)
    return record, None


def _both(name: str, world: int, options: dict[str, Any]) -> list[Record]:
    return [_run(name, replays, world, **options)[0] for replays in (False, True)]


class _Fails(Replay):
    """Recording fails as it does where a kernel cannot be part of a graph."""

    fails = True


def _plain_replayed_and_failing(name: str, world: int, options: dict[str, Any]) -> list[Record]:
    failing = [_run(name, True, world, callbacks=[_Fails()], **options)[0]] if name == "gpt_tied" else []
    return [*_both(name, world, options), *failing]


@pytest.mark.parametrize(
    ("name", "world", "options", "replays"),
    [
        (
            "dropped",
            2,
            {"accumulate": 3, "gradient_clip_val": 0.5},
            {"frame0.forward": 18, "frame0.backward": 18, "clipping.norm": 4, "clipping.scale": 1, "SGD.step": 4},
        ),
        ("gpt_tied", 1, {}, {"frame0.forward": 4, "frame0.backward": 4, "SGD.step": 2}),
        pytest.param("frozen", 1, {}, {"frame0.forward": 4, "frame0.backward": 4}, marks=pytest.mark.extensive),
        ("graph_break", 1, {}, {f"frame{i}.{kind}": 4 for i in range(1, 4) for kind in ("forward", "backward")}),
    ],
)  # fmt: skip
def test_replays(name: str, world: int, options: dict[str, Any], replays: dict[str, int]) -> None:
    for plain, replayed, *failing in run_ranks(_plain_replayed_and_failing, world, name, world, options):
        for one in failing:  # it runs as before
            _check(plain, one)
            assert one.extra == ({}, {"frame0.forward": "RuntimeError: not while capturing"})
        _check(plain, replayed)
        ran, reasons = replayed.extra
        assert reasons == {} and ran.keys() <= replays.keys(), ran
        for name, count in replays.items():
            # A host's allocator gives a gradient another address now and then, and what reads it starts to wait again.
            assert ran[name] == count if name.startswith("frame") else ran.get(name, 0) <= count, ran


def _check(plain: Record, replayed: Record) -> None:
    assert replayed.losses == plain.losses
    for left, right in zip(plain.grads, replayed.grads, strict=True):
        assert all((left[name] is None) == (right[name] is None) for name in left)
        assert all(torch.equal(grad, right[name]) for name, grad in left.items() if grad is not None)
    for left, right in ((plain.params, replayed.params), (plain.buffers, replayed.buffers)):
        assert all(torch.equal(value, right[name]) for name, value in left.items())


def test_what_a_backward_pass_may_still_read_is_not_overwritten() -> None:
    for plain, replayed in run_ranks(_both, 1, "two_passes", 1, {}):
        _check(plain, replayed)
        ran, reasons = replayed.extra
        assert reasons == {}
        forward = sum(count for name, count in ran.items() if name.endswith("forward"))
        assert 0 < forward < 2 * 7  # the second of two passes runs


class _Retains(Dropped):
    """A loss is differentiated again when the same program has run with another batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        kept = self._loss(batch)
        self.manual_backward(kept, retain_graph=True)
        loss = self._loss(batch.flip(0))
        self.manual_backward(loss)
        self.manual_backward(kept)
        self.optimizers().step()
        self.optimizers().zero_grad()
        return {"loss": loss.detach()}

    def _loss(self, batch: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        loss = F.cross_entropy(self.logits(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        torch._dynamo.graph_break()
        return loss


def _retain() -> list[Record]:
    MODELS["retains"] = _Retains
    return [_run("retains", replays, 1)[0] for replays in (False, True)]


def test_a_graph_that_is_retained_is_not_overwritten() -> None:
    ((plain, replayed),) = run_ranks(_retain, 1)
    _check(plain, replayed)
    ran, reasons = replayed.extra
    assert reasons == {} and 0 < sum(ran[name] for name in ran if name.endswith("forward")) <= 7, ran


class _Interferes(pl.Callback):
    """Changes, between two steps, what an optimizer's step reads from the host."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        (optimizer,) = trainer.optimizers
        if batch_idx == 11:
            optimizer.param_groups[0]["lr"] *= 0.5
        elif batch_idx == 18:
            module.layers[1].weight.requires_grad_(False)
        elif batch_idx == 25:
            state = optimizer.state_dict()["state"]
            optimizer.load_state_dict(
                {**optimizer.state_dict(), "state": {k: {n: v.clone() for n, v in e.items()} for k, e in state.items()}}
            )
        elif batch_idx == 38:
            for entries in optimizer.state.values():
                entries["exp_avg"] = entries["exp_avg"] * 0.5


def _interfered() -> list[Record]:
    options = {"steps": 56, "callbacks": [_Interferes()], "gradient_clip_val": 0.5}
    return [_run("fused", replays, 1, **{**options})[0] for replays in (False, True)]


def test_an_optimizer_step_that_reads_something_else_is_not_replayed() -> None:
    for plain, replayed in run_ranks(_interfered, 1):
        _check(plain, replayed)
        ran, reasons = replayed.extra
        assert reasons == {} and 0 < ran["AdamW.step"] < 56 - 3 * 4, ran


class _Annealed(Fused):
    """Another learning rate in every step."""

    kind: type[torch.optim.Optimizer] = torch.optim.AdamW

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(super().configure_optimizers().param_groups, lr=1e-2, fused=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class _ByItself(torch.optim.AdamW):
    """A subclass steps by itself."""


class _Itself(_Annealed):
    kind = _ByItself


def _annealing(world: int, accumulate: int) -> list[Record]:
    MODELS.update(annealed=_Annealed, itself=_Itself)
    options = {"steps": 60 // accumulate, "gradient_clip_val": 0.5, "accumulate": accumulate}
    return [
        _run(name, replays, world, callbacks=[_Interferes()], **options)[0]
        for name, replays in (("itself", False), ("annealed", False), ("annealed", True))
    ]


@pytest.mark.parametrize(("world", "accumulate"), [pytest.param(1, 1, marks=pytest.mark.extensive), (2, 3)])
def test_clipping_is_replayed_where_the_learning_rate_always_changes(world: int, accumulate: int) -> None:
    for itself, plain, replayed in run_ranks(_annealing, world, world, accumulate):
        _check(itself, plain)
        _check(itself, replayed)
        ran, reasons = replayed.extra
        names = {"clipping"} if world == 1 else {"clipping.norm", "clipping.scale"}
        assert {name for name in ran if not name.startswith("frame")} == names and reasons == {}
        assert all(ran[name] for name in names), ran


class _Own(torch.optim.SGD):
    """Looks at its parameters before it calls its closure, and steps with other rates every time."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 if any(p.numel() for p in group["params"]) else 0.0
        return super().step(closure)


class _Custom(Dropped):
    def configure_optimizers(self) -> Any:
        return _Own(self.parameters(), lr=0.0)


def _of_the_user() -> list[Record]:
    MODELS["custom"] = _Custom
    return [_run("custom", replays, 1, steps=12)[0] for replays in (False, True)]


def test_an_optimizer_of_the_user_steps_as_it_is() -> None:
    ((plain, replayed),) = run_ranks(_of_the_user, 1)
    _check(plain, replayed)
    ran, reasons = replayed.extra
    assert set(ran) == {"frame0.forward", "frame0.backward"} and reasons == {}


def _counts_on_host() -> list[Record]:
    return [_run("gpt_tied", replays, 1, optimizer="adamw")[0] for replays in (False, True)]


def test_an_optimizer_that_counts_on_the_host_runs() -> None:
    ((plain, replayed),) = run_ranks(_counts_on_host, 1)
    _check(plain, replayed)
    ran, reasons = replayed.extra
    assert set(ran) == {"frame0.forward", "frame0.backward"} and "fused=True" in reasons["AdamW.step"]


class _Shorter(Dropped):
    """Another shape now and then, a step whose loss is dropped, and one whose backward pass fails."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        tokens = batch[:, : (8 if batch_idx in (5, 9, 10) else 13)]
        logits = self.logits(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss)
        return None if batch_idx == 7 else loss


class _ManyBuckets(Bucketed):
    lengths = tuple(range(13, 2, -1))


def _in_buckets(name: str, world: int, steps: int) -> tuple[list[Record], int]:
    MODELS.update(bucketed=Bucketed, many_buckets=_ManyBuckets)
    replay = Replay()
    return [_run(name, on, world, steps=steps, callbacks=[replay] * on)[0] for on in (False, True)], replay.recorded


# The first run, and two of each length, or of all but eight, are no replays. On a host, recordings may end when memory
# that they read lies elsewhere: `test_cuda_graphs_gpu.py` has what devices do.
@pytest.mark.parametrize(
    ("name", "steps", "most"),
    [pytest.param("bucketed", 21, 21 - 7, marks=pytest.mark.extensive), ("many_buckets", 44, 8 * 2)],
)
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.extensive)])
def test_more_lengths_than_graphs_end_no_graph(name: str, steps: int, most: int, world: int) -> None:
    for (plain, replayed), recorded in run_ranks(_in_buckets, world, name, world, steps):
        _check(plain, replayed)
        ran, reasons = replayed.extra
        assert reasons == {} and recorded <= 2 * 8, "recordings of forward and backward programs"
        assert 0 < sum(count for name, count in ran.items() if name.endswith("forward")) <= most, ran


class _Losses(pl.Callback):
    def __init__(self, losses: list[float]) -> None:
        self._losses = losses

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self._losses.append(float(outputs["loss"]) if outputs else 0.0)


def _lives() -> list[list[float]]:
    from lightning_deepcompile import CompileConfig, DeepCompileStrategy

    results = []
    for replays in (False, True):
        torch.manual_seed(3)
        losses: list[float] = []

        module = _Shorter()
        callback = Replay()
        for fit in range(2):  # the second goes on with what the first one compiled
            trainer = pl.Trainer(
                strategy=DeepCompileStrategy(compile=CompileConfig(region_backend="eager", schedule=None)),
                callbacks=[_Losses(losses), *[callback] * replays],
                accelerator="cpu", devices=1, max_epochs=1, logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(module, DataLoader(Tokens(30, 2, 0, 1), batch_size=2))
            if replays:
                replayed = trainer.strategy.engine.capture.replays
                assert sum(callback.replayed.values()) > 20 * (fit + 1) and replayed.reasons == {}, callback.replayed
                assert replayed.recorded == 0  # they went with the fit
        losses += [float(p.full_tensor().sum()) for p in module.parameters()]
        results.append(losses)
    return results


def test_other_shapes_lost_steps_and_a_second_fit() -> None:
    ((plain, replayed),) = run_ranks(_lives, 1)
    assert replayed == plain


def _fifty(folder: str) -> list[Any]:
    replay = Replay()
    both = [fifty_steps(folder, replays, "cpu", [replay] * replays) for replays in (False, True)]
    assert replay.replayed["frame0.forward"] == replay.replayed["frame0.backward"] == 2 * (25 - 3), replay.replayed
    return both


def test_fifty_steps_saved_and_resumed(tmp_path: Path) -> None:
    for plain, replayed in run_ranks(_fifty, 1, str(tmp_path)):
        equal_after_fifty_steps(plain, replayed)


class _HoldsGradients(pl.Callback):
    """Keeps every step's gradient of one parameter, as it was handed out."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        self.kept.append(module.head.weight.grad)


def _held() -> tuple[list[Record], list[Tensor]]:
    kept = _HoldsGradients()
    plain = _run("dropped", False, 1)[0]
    replayed = _run("dropped", True, 1, callbacks=[kept])[0]
    return [plain, replayed], [grad.full_tensor() for grad in kept.kept]


def test_gradients_that_are_kept_stay_as_they_are() -> None:
    (((plain, replayed), kept),) = run_ranks(_held, 1)
    _check(plain, replayed)
    for step, grad in enumerate(kept):
        assert torch.equal(grad, plain.grads[step]["head.weight"]), step


class _FailsOnOne(Replay):
    """One rank cannot record, or finds that it does not pay; the other can, and does."""

    def __init__(self, records: bool) -> None:
        super().__init__()
        self._mine = os.environ["RANK"] == "1"
        self.fails = self._mine and not records

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        if batch_idx == 7 and self._mine and not self.fails:
            trainer.strategy.engine.capture.replays.give_up()


def _failing_on_one() -> list[Record]:
    plain = _run("dropped", False, 2, steps=12)[0]
    return [plain, *(_run("dropped", True, 2, callbacks=[_FailsOnOne(b)], steps=12)[0] for b in (False, True))]


def test_ranks_stay_together_where_one_has_no_graphs() -> None:
    first, second = run_ranks(_failing_on_one, 2)
    for plain, *replayed in (first, second):
        for one in replayed:
            _check(plain, one)
    (ran, _), (other, _) = first[1].extra, second[1].extra
    assert ran["frame0.forward"] == 2 and other == {}, (ran, other)  # until all ranks know
    (ran, _), (other, _) = first[2].extra, second[2].extra  # a rank gives up in step 8
    assert ran["frame0.forward"] == other["frame0.forward"] == 5, (ran, other)


def _steps(trial: Any, seconds: list[float], idle: bool, now: float = 0.0) -> float:
    for duration in seconds:
        now += duration
        trial.begin_step(idle, now)
    return now


@pytest.mark.parametrize(("after", "kept"), [(0.010, True), (0.0199, False)])
def test_graphs_stay_where_they_are_faster(after: float, kept: bool) -> None:
    from lightning_deepcompile.program.replay_trial import Trial

    trial = Trial()
    now = _steps(trial, [0.02] * 20, idle=True)
    assert not trial.host_is_late  # too few steps
    now = _steps(trial, [0.02] * 20, True, now)
    assert trial.host_is_late
    trial.start()
    now = _steps(trial, [0.5, 0.3, *[after] * 45, 9.0], True, now)  # two record, and once a checkpoint is written
    assert trial.outcome and trial.failed is not kept
    assert ("kept: 10.0 ms a step (20.0 ms before)" in trial.outcome) is kept


def test_graphs_are_not_tried_where_the_device_is_late() -> None:
    from lightning_deepcompile.program.replay_trial import Trial

    trial = Trial()
    now = _steps(trial, [0.02] * 30, idle=True)
    _steps(trial, [0.02] * 6, False, now)
    assert not trial.host_is_late


def test_a_host_is_late_although_gradients_are_reduced_when_the_next_step_begins() -> None:
    """At stages 1 and 2 the device waits for the host within the step, and not at its end."""
    from lightning_deepcompile.program.replay_trial import Trial

    for late in (True, False):
        trial = Trial()
        for step in range(30):
            trial.begin_step(False, 0.02 * step)
            trial.begin_backward(False)
            trial.begin_backward(late)
        assert trial.host_is_late is late


def test_settings_that_exclude_graphs_are_named() -> None:
    from lightning_deepcompile import CompileConfig

    with pytest.raises(ValueError, match=r"cuda_graphs=True, offload=\['parameters'\]"):
        CompileConfig(cuda_graphs=True, offload=["parameters"])
    assert CompileConfig(cuda_graphs="auto", symmetric_memory="64MiB").replays is False
    assert CompileConfig(cuda_graphs="auto").replays == "auto" and CompileConfig(cuda_graphs=True).replays is True
