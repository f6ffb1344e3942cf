"""The blocks of code in README and docs run: Python on one CPU process for a few steps, settings in LightningCLI.

Commands of the shell are looked at: what they run must exist and know their options. Those of the package are run.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from pages import ROOT, blocks, commands, pages_with
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.__main__ import main
from lightning_deepcompile.plan.plan_file import Setting, write_plan

Trainer = L.Trainer


class Net(L.LightningModule):
    """The module that stands for the reader's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        for block in self.blocks:
            x = torch.relu(block(x))
        return nn.functional.mse_loss(x, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class SmallTrainer(Trainer):
    """The Trainer of a block: what is given is checked as ever, but it has one CPU process, and runs a few steps."""

    def __init__(self, *, devices: int = 1, num_nodes: int = 1, max_steps: int = 2, **arguments: Any) -> None:
        small = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        super().__init__(accelerator="cpu", devices=1, max_steps=max_steps, logger=False, **small, **arguments)
        if isinstance(self.strategy, DeepCompileStrategy):  # Inductor's C++ takes a minute, and is not the point
            self.strategy.compile = replace(self.strategy.compile, region_backend="eager")


def names_of_a_page(folder: Path) -> dict[str, Any]:
    """Names that code blocks may use: imports from earlier on the page, a module, and a Trainer for it."""
    data = DataLoader(TensorDataset(torch.randn(64, 8), torch.rand(64, 8)), batch_size=8)
    strategy = DeepCompileStrategy(compile=CompileConfig(memory_budget="1GiB"))  # with which one rank plans, too
    trainer = SmallTrainer(strategy=strategy, max_steps=6, default_root_dir=folder)
    names = {"L": L, "torch": torch, "Path": Path, "Net": Net, "net": Net(), "model": Net(), "data": data}
    return names | {"CompileConfig": CompileConfig, "DeepCompileStrategy": DeepCompileStrategy, "trainer": trainer}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names of pages that train nothing themselves: `trainer` has trained `net`."""
    names = names_of_a_page(tmp_path_factory.mktemp("trained"))
    trainer = names["trainer"]
    trainer.fit(names["net"], names["data"])
    assert trainer.strategy.profile() is not None and trainer.strategy.report()
    return names


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder that is the current one, and a Trainer that fits a test; blocks may set levels of logging."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(L, "Trainer", SmallTrainer)
    monkeypatch.setattr("lightning.pytorch.Trainer", SmallTrainer)
    log = logging.getLogger("lightning_deepcompile")
    level = log.level
    yield tmp_path
    log.setLevel(level)


def pretrained_llama(folder: Path) -> dict[str, Any]:
    """Writes a small model of Transformers to a folder; the names are batches for it."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, num_key_value_heads=2, use_cache=False, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokens = torch.randint(32, (16, 8))
    return {"data": DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=8)}


@pytest.mark.parametrize("page", pages_with("python"))
def test_python(page: str, trained: dict[str, Any], workplace: Path) -> None:
    document, examples = blocks(page, "python")
    assert examples, f"{page} has blocks of Python that are not seen: begin them with ```python at the line's start"
    trains = any("trainer.fit(" in example.parsed for example in examples)
    document.namespace.update(names_of_a_page(workplace) if trains else trained)
    if page == "docs/hugging_face.md":
        document.namespace.update(pretrained_llama(workplace / "llama"))
    for example in examples:
        example.evaluate()


@pytest.mark.parametrize("page", pages_with("yaml"))
def test_settings(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.chdir(tmp_path)
    _, examples = blocks(page, "yaml")
    for number, example in enumerate(examples):
        file = tmp_path / f"{number}.yaml"
        file.write_text(example.parsed)
        arguments = [f"--config={file}", "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
        cli = LightningCLI(BoringModel, run=False, args=arguments, save_config_callback=None)
        assert isinstance(cli.trainer.strategy, DeepCompileStrategy)


@pytest.mark.parametrize("page", [*pages_with("bash"), "examples/slurm/train.sbatch"])
def test_shell(
    page: str, trained: dict[str, Any], workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    profile = trained["trainer"].strategy.profile()
    (workplace / "profile.json").write_text(profile.to_json())
    plan = write_plan(profile.schedules, Setting(world_size=1, stage=3, device_type="cpu"))
    (workplace / "deepcompile_plan.json").write_text(plan)
    for name in ("before.html", "after.html"):
        trained["trainer"].strategy.save_report(workplace / name)
    scripts = [(ROOT / page).read_text()]
    if page.endswith(".md"):
        scripts = [example.parsed for example in blocks(page, "bash")[1]]
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        for words in commands(script):
            if words[:3] == ["python", "-m", "lightning_deepcompile"]:
                monkeypatch.setattr(sys, "argv", words[2:])
                try:
                    main()
                except SystemExit as end:
                    assert not end.code, f"{words}: {capsys.readouterr().err}"
                assert capsys.readouterr().out, words
            else:
                check_command(words)


def check_command(words: list[str]) -> None:
    """Raises unless a command is one that this repository knows, with options that it has."""
    match words:
        case ["srun" | "sbatch", *rest]:
            if rest[0].endswith(".sbatch"):
                assert (ROOT / rest[0]).is_file(), words
            else:
                check_command(rest)
        case ["python", "-m", module, *_]:
            assert find_spec(module), words
        case [assignment, *rest] if re.fullmatch(r"[A-Z_]+=.*", assignment):
            check_command(rest)
        case ["python", script, *options]:
            check_script(ROOT / script, options)
        case ["torchrun", *rest]:
            place = next(i for i, word in enumerate(rest) if word.endswith(".py"))
            check_script(ROOT / rest[place], rest[place + 1 :])
        case ["make", *rest]:
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert {word for word in rest if "=" not in word} <= {*targets}, words
        case ["pip", "install", *rest]:
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            extras = [extra for word in rest if word.endswith("]") for extra in word[:-1].partition("[")[2].split(",")]
            assert {*extras} <= {*known}, words
        case ["docker", "build", *rest]:
            declared = re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
            given = [rest[i + 1].partition("=")[0] for i, word in enumerate(rest) if word == "--build-arg"]
            assert {*given} <= {*declared}, words
        case ["docker", "run", *_] | ["export" | "set" | "ulimit" | "cd", *_]:
            pass
        case _:
            raise AssertionError(f"{words}: no test knows this command; teach `check_command` what to look at")


def check_script(script: Path, words: list[str]) -> None:
    """Raises unless a script exists, its files of settings do, and its sources mention every option that is given.

    A script without a folder is the reader's own: of its options only the Trainer's are known.
    """
    if script.parent != ROOT:
        assert script.is_file(), f"{script} does not exist"
    known = "".join(path.read_text() for path in script.parent.glob("*.py"))
    settings = {*CompileConfig.__dataclass_fields__, *signature(DeepCompileStrategy).parameters, "help"}
    for word, value in zip(words, [*words[1:], ""], strict=False):
        if not word.startswith("--"):
            continue
        section, _, rest = word.removeprefix("--").partition("=")[0].partition(".")
        if section == "config":
            assert (ROOT / value).is_file() or value in known, f"{script.name}: {value} does not exist"
        elif section == "trainer":
            name, _, setting = rest.partition(".")
            assert name in signature(Trainer).parameters, word
            inner = setting.rpartition(".")[2]
            assert not inner or inner in settings, word
        elif script.parent != ROOT:
            name = word if not rest else re.escape(rest)
            assert re.search(rf"\b{name}\b" if rest else re.escape(word), known), f"{script.name} has no {word}"
