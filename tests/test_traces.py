"""A step's trace that an earlier run kept: used where nothing changed, and nowhere else."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import lightning.pytorch as pl
import pytest
import torch
from multiprocess import GPUS, run_ranks
from torch import Tensor, nn

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.traces import store
from lightning_deepcompile.traces.fingerprint import Fingerprints
from lightning_deepcompile.traces.store import TraceFile


class Net(cases.Base):
    """What a trace depends on: code, attributes, hooks, a value of a class, one of a module, dropout."""

    scale = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(cases.VOCAB, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.25)) for _ in range(3))
        self.head = nn.Linear(8, cases.VOCAB)
        self.weights = {"residual": 1.0}

    def logits(self, tokens: Tensor, gain: float = 1.0) -> Tensor:
        x = self.embed(tokens) * self.scale * FACTOR * gain * float(os.environ.get("TEST_GAIN", "1"))
        for layer in self.layers:
            x = self.weights["residual"] * x + layer(x)
        return self.head(x)


FACTOR = 2.0


class Viewed(Net):
    """Batches are parts of larger tensors."""

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return torch.cat([batch, batch])[1 : 1 + len(batch)]


CASES = cases.CASES | {"viewed": Viewed}


def method(net: Net) -> None:
    nn.Tanh.forward = lambda self, x: x.sin()  # type: ignore[method-assign]


def own_method(net: Net) -> None:
    net.layers[1][1].forward = torch.cos


def function(net: Net) -> None:
    nn.functional.dropout = lambda x, p, training, inplace: x * p  # type: ignore[assignment]


def default(net: Net) -> None:
    Net.logits.__defaults__ = (3.0,)


def class_value(net: Net) -> None:
    Net.scale = 0.25


def global_value(net: Net) -> None:
    globals()["FACTOR"] = 3.0


def attribute(net: Net) -> None:
    net.layers[2][2].p = 0.5


def entry(net: Net) -> None:
    net.weights["residual"] = 0.5


def layer(net: Net) -> None:
    net.layers[0][1] = nn.Sigmoid()


def hook(net: Net) -> None:
    net.layers[0].register_forward_hook(lambda module, inputs, output: output * 2)


def global_hook(net: Net) -> None:
    nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: 2 * output if type(module) is nn.Tanh else None
    )


def environment(net: Net) -> None:
    os.environ["TEST_GAIN"] = "2"


def evaluation(net: Net) -> None:
    net.layers[0].eval()


def frozen(net: Net) -> None:
    net.head.weight.requires_grad_(False)


CHANGES: dict[str, Callable[[Net], None]] = {
    change.__name__: change
    for change in (
        method,
        own_method,
        function,
        default,
        class_value,
        global_value,
        attribute,
        entry,
        layer,
        hook,
        global_hook,
        environment,
        evaluation,
        frozen,
    )
}


@dataclass
class Run:
    """What one rank's training did: results, programs, Dynamo's graphs, and what was logged."""

    losses: list[float]
    params: dict[str, Tensor]
    programs: dict[str, str]
    graphs: int
    log: str


class Changed(pl.Callback):
    def __init__(self, change: str | None) -> None:
        self.change = change

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self.change in CHANGES and batch_idx == 0:
            CHANGES[self.change](module)
        if self.change == "later" and batch_idx == 1:
            entry(module)


def _train(folder: str | None, case: str | None, change: str | None, options: dict[str, Any]) -> Run:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_deepcompile.traces")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    config = CompileConfig(region_backend="eager", traces=folder, schedule=None)
    record = cases.train(
        Net if case is None else CASES[case],
        DeepCompileStrategy(compile=config),
        world_size=int(os.environ["WORLD_SIZE"]),
        rank=int(os.environ["RANK"]),
        callbacks=[Changed(change)],
        inspect=lambda trainer: trainer.strategy.engine.programs(),
        **{"steps": 3, **options},
    )
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    params = {name: value.cpu() for name, value in record.params.items()}
    return Run(record.losses, params, record.extra, graphs, "\n".join(messages))


def train(
    folder: Path | None,
    *,
    case: str | None = None,
    change: str | None = None,
    world_size: int = 1,
    fresh: bool = False,
    **options: Any,
) -> list[Run]:
    """Trains on `world_size` ranks; returns what each did."""
    text = None if folder is None else str(folder)
    return run_ranks(_train, world_size, text, case, change, options, fresh=fresh)


def assert_same(actual: Run, expected: Run) -> None:
    assert actual.losses == expected.losses
    assert actual.programs == expected.programs
    assert actual.params.keys() == expected.params.keys()
    for name, value in expected.params.items():
        assert torch.equal(actual.params[name], value), name


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the trace of `Net` on one rank."""
    folder = tmp_path_factory.mktemp("traces")
    (run,) = train(folder)
    assert run.graphs == 1 and run.log == ""
    return folder


def test_the_next_run_begins_without_tracing(kept: Path) -> None:
    (run,) = train(kept, fresh=True)  # with hashes of its own
    assert run.graphs == 0
    assert "The trace of `training_step` was read" in run.log
    (plain,) = train(None)
    assert plain.graphs == 1
    assert_same(run, plain)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_traced_anew(kept: Path, change: str, tmp_path: Path) -> None:
    folder = shutil.copytree(kept, tmp_path / "traces")
    (run,) = train(folder, change=change)
    assert run.graphs >= 1
    assert "`training_step` is traced anew" in run.log
    (plain,) = train(None, change=change)
    assert_same(run, plain)
    (again,) = train(folder, change=change)
    assert again.graphs == (1 if "No trace of `training_step` is kept" in run.log else 0), again.log
    assert_same(again, plain)


SOURCE = """
class One:
    scale = 2
    def forward(self, x):
        self.seen = x
        return x * self.scale
"""


@pytest.mark.parametrize(
    ("change", "same"),
    [("# A comment." + SOURCE, True), (SOURCE.replace("2", "3"), False), (SOURCE + "    a = 1", False)],
)
def test_lines_and_comments_are_no_part_of_a_class(change: str, same: bool) -> None:
    def fingerprint(source: str) -> str:
        names: dict[str, Any] = {"__name__": "users"}
        exec(compile(source, "users.py", "exec"), names)
        return Fingerprints().kind(names["One"])

    assert (fingerprint("\n\n" + change) == fingerprint(SOURCE)) == same


@pytest.mark.parametrize("options", [{"data_world": 2}, {"precision": "bf16-mixed"}, {"precision": "bf16-true"}])
def test_another_shape_or_precision_is_traced_anew(kept: Path, options: dict[str, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(kept, tmp_path / "traces")
    (run,), (again,), (plain,) = (train(place, **options) for place in (folder, folder, None))
    assert "`training_step` is traced anew" in run.log
    assert (run.graphs, again.graphs, plain.graphs) == (1, 0, 1)
    assert_same(run, plain)
    assert_same(again, plain)


def test_packages_count_and_what_setuptools_brings_along_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = store.environment(torch.device("cpu"), 0, 1)
    for folder, same in (("setuptools/_vendor", True), ("packages", False)):
        info = tmp_path / folder / "autocommand-2.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: autocommand\nVersion: 2.0\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
        assert (store.environment(torch.device("cpu"), 0, 1) == before) == same


def test_variables_that_processes_set_themselves_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = store.environment(torch.device("cpu"), 0, 1)
    for name in ("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "TRITON_CACHE_DIR", "PL_GLOBAL_SEED", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "140303")
    assert store.environment(torch.device("cpu"), 0, 1) == before
    monkeypatch.setenv("TEST_GAIN", "2")
    assert store.environment(torch.device("cpu"), 0, 1) != before


@pytest.mark.parametrize("case", ["mlp", "gpt", "llama", "llama_checkpointing", "normed", "viewed"])
def test_models(case: str, tmp_path: Path) -> None:
    (cold,) = train(tmp_path, case=case)
    (warm,) = train(tmp_path, case=case)
    (plain,) = train(None, case=case)
    assert "was read from" in warm.log, (cold.log, warm.log)
    assert warm.graphs == 0
    assert_same(cold, plain)
    assert_same(warm, plain)


def test_mixed_precision_and_accumulation(tmp_path: Path) -> None:
    options = {"accumulate": 2, "precision": "bf16-mixed"}
    (cold,), (warm,), (plain,) = (train(folder, **options) for folder in (tmp_path, tmp_path, None))
    assert (cold.graphs, warm.graphs) == (plain.graphs, 0)
    assert_same(cold, plain)
    assert_same(warm, plain)


@pytest.mark.gpu(1)
def test_on_gpus(tmp_path: Path) -> None:
    options = {"world_size": GPUS, "accelerator": "gpu", "precision": "bf16-mixed"}
    cold, warm, plain = (train(folder, **options) for folder in (tmp_path, tmp_path, None))
    for first, second, without in zip(cold, warm, plain, strict=True):
        assert "was read from" in second.log and second.graphs == 0, (first.log, second.log)
        assert_same(first, without)
        assert_same(second, without)


def test_a_step_in_pieces_is_left_to_dynamo(tmp_path: Path) -> None:
    (cold,), (warm,), (plain,) = (train(folder, case="graph_break") for folder in (tmp_path, tmp_path, None))
    assert "No trace of `training_step` is kept" in cold.log
    assert "`training_step` is traced anew" in warm.log and "kept" not in warm.log
    assert warm.graphs == plain.graphs
    assert_same(cold, plain)
    assert_same(warm, plain)


@pytest.mark.parametrize("damage", ["cut", "bit", "other", "pickle"])
def test_a_damaged_file_is_traced_anew(kept: Path, damage: str, tmp_path: Path) -> None:
    folder = shutil.copytree(kept, tmp_path / "traces")
    (file,) = folder.iterdir()
    data = bytearray(file.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "bit":
        data[-100] ^= 1
    elif damage == "other":
        data = bytearray(b"something else")
    if damage == "pickle":
        other = TraceFile(str(folder), "other", 0, 1)
        other.write({"a": 1})
        data = bytearray(other.path.read_bytes())
    file.write_bytes(data)
    (run,) = train(folder)
    assert run.graphs == 1
    (again,) = train(folder)
    assert again.graphs == 0
    assert_same(run, again)


def test_an_attribute_that_changes_later_is_noticed(kept: Path) -> None:
    """The guards of a trace that was read hold in every step, as Dynamo's do."""
    (run,), (plain,) = (train(folder, change="later") for folder in (kept, None))
    assert "was read from" in run.log
    assert run.graphs == plain.graphs - 1
    assert run.losses == plain.losses  # by another graph: Dynamo, which saw both values, makes the number an input


def test_other_numbers_of_ranks(kept: Path, tmp_path: Path) -> None:
    """Ranks have files of their own, and one alone may find its trace."""
    folder = shutil.copytree(kept, tmp_path / "traces")
    (file,) = folder.iterdir()
    runs = train(folder, world_size=2)
    assert [run.graphs for run in runs] == [1, 1]
    assert file.exists() and len(list(folder.iterdir())) == 3
    next(other for other in sorted(folder.iterdir()) if other != file).unlink()
    again, plain = train(folder, world_size=2), train(None, world_size=2)
    assert sorted(run.graphs for run in again) == [0, 1]
    for runs_of_rank in zip(runs, again, plain, strict=True):
        assert_same(runs_of_rank[0], runs_of_rank[2])
        assert_same(runs_of_rank[1], runs_of_rank[2])
