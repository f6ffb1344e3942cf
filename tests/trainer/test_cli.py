"""LightningCLI as users run it: the YAML files of `examples/cli`, made small by a file of the user's own."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import re
import runpy
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from multiprocess import run_ranks

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.console import show_messages

pytest.importorskip("jsonargparse")

CLI = Path("examples/cli")
SMALL = """
trainer:
  accelerator: cpu
  devices: 2
  num_sanity_val_steps: 0
  limit_val_batches: 1
  enable_progress_bar: false
  enable_model_summary: false
model: {layers: 2, width: 32, heads: 2}
data: {length: 17, batch_size: 2}
"""
EAGER = "--trainer.strategy.compile.region_backend=eager"


class Messages(logging.Handler):
    """Keeps the texts of log records."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def run_main(*arguments: str) -> None:
    """Runs ``main.py fit`` in this process."""
    sys.argv = [str(CLI / "main.py"), "fit", *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _pretrain_and_resume(last: Path, pretrain: list[str]) -> tuple[int, list[str]]:
    """Pretrains on a rank, as torchrun would start it, and resumes; returns the first steps, and what is logged."""
    run_main(*pretrain, "--trainer.max_steps=2")
    steps = read(last)["global_step"]
    messages = Messages()
    logging.getLogger("lightning.pytorch").addHandler(messages)
    run_main(*pretrain, f"--config={CLI}/resume.yaml", "--trainer.max_steps=4")
    return steps, messages.texts


def read(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_pretrain_resume_finetune(tmp_path: Path) -> None:
    small = tmp_path / "small.yaml"
    small.write_text(SMALL)
    pretrain = [f"--config={CLI}/pretrain.yaml", f"--config={small}", EAGER]
    pretrain += [f"--trainer.default_root_dir={tmp_path}", "--trainer.val_check_interval=2"]
    pretrain += ["--trainer.callbacks.every_n_train_steps=2"]
    last = tmp_path / "checkpoints" / "last.ckpt"

    (steps, logged), _ = run_ranks(_pretrain_and_resume, 2, last, pretrain)
    assert steps == 2 and f"Restored all states from the checkpoint at {last}" in logged
    pretrained = read(last)
    # The steps that AdamW has counted tell a resumed training from one that began anew.
    assert pretrained["global_step"] == 4 and pretrained["optimizer_states"][0]["state"][0]["step"] == 4

    finetune = [f"--config={CLI}/finetune.yaml", f"--config={small}", EAGER, f"--model.pretrained={last}"]
    finetune += [f"--trainer.default_root_dir={tmp_path / 'finetune'}", "--trainer.limit_train_batches=2"]
    run_ranks(run_main, 2, *finetune)
    before = pretrained["state_dict"]
    for epoch in (0, 1):
        after = read(tmp_path / "finetune" / "checkpoints" / f"epoch={epoch}.ckpt")["state_dict"]
        assert after.keys() == before.keys()
        for name, value in after.items():
            frozen = epoch == 0 and name.startswith(("tokens.", "blocks.0.", "blocks.1."))
            assert torch.equal(value, before[name]) == frozen, f"{name} after epoch {epoch}"


@pytest.mark.usefixtures("in_process")
def test_the_configuration_and_the_help_are_whole() -> None:
    import yaml

    mine = ["--trainer.strategy.stage=2", "--trainer.strategy.device_mesh=auto"]
    _, printed, _ = printed_by(f"--config={CLI}/pretrain.yaml", *mine, "--print_config", run=run_main)
    config = yaml.safe_load(printed)["trainer"]
    assert config["default_root_dir"] == "runs/pretrain"
    assert config["strategy"]["class_path"] == "lightning_deepcompile.DeepCompileStrategy"
    settings = config["strategy"]["init_args"]
    assert settings["stage"] == 2 and settings["timeout"] == "0:30:00" and settings["state_dict_type"] == "full"
    assert settings["device_mesh"] == "auto"
    assert settings["compile"]["memory_budget"] == "90%" and settings["compile"]["region_backend"] == "inductor"

    _, printed, _ = printed_by("--trainer.strategy.help=lightning_deepcompile.DeepCompileStrategy", run=run_main)
    shown = " ".join(printed.partition("Help for --trainer.strategy.help=")[2].split())
    assert "Trains an unmodified LightningModule" in shown
    assert_explained(shown, "--trainer.strategy", settings)


def assert_explained(shown: str, owner: str, names: Iterable[str]) -> None:
    """Each setting stands in the help with its paragraph, and with a type of plain Python."""
    value = r"(?:[A-Z_]+|{\S+})"  # stands behind each name of an option, since Python 3.13 behind the last one
    for name in names:
        option = rf"{re.escape(owner)}\.{name}"
        entry = re.search(rf"{option}(?:\+?(?: {value})?, --\S+)? {value} (.*?) \(type: (.*?), default:", shown)
        another = rf"{re.escape(owner)}\.\S+ {value} "
        assert entry is not None and not re.search(another, entry[1]), f"`{name}` is not explained"
        assert not re.search(r"Annotated| object at ", entry[2]), f"the type of `{name}` is shown as {entry[2]}"


STRATEGY = ("--trainer.accelerator=cpu", "--trainer.strategy=lightning_deepcompile.DeepCompileStrategy")


def strategy_of(*arguments: str) -> DeepCompileStrategy:
    from lightning.pytorch.cli import LightningCLI

    cli = LightningCLI(BoringModel, run=False, save_config_callback=None, seed_everything_default=False, args=arguments)
    assert isinstance(cli.trainer.strategy, DeepCompileStrategy)
    return cli.trainer.strategy


def printed_by(*arguments: str, run: Callable[..., Any] = strategy_of) -> tuple[int, str, str]:
    """Returns the result of a command line that only prints: exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
        run(*arguments)
    return int(left.value.code or 0), out.getvalue(), err.getvalue()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("page", ["lightning_cli", "command_line"])
def test_the_command_of_a_page_explains_the_settings_of_compile(page: str) -> None:
    (command,) = re.findall(r"^python .* fit (.*compile\.help)$", Path(f"docs/{page}.md").read_text(), re.M)
    importlib.import_module("lightning_deepcompile.trainer.short_names")  # as an installed package does
    code, shown, error = printed_by(*command.split())
    assert code == 0, error
    shown = " ".join(shown.split())
    assert_explained(shown, "--trainer.strategy.compile", [field.name for field in fields(CompileConfig)])


def values_of(name: str, hint: Any) -> Iterator[Any]:
    """Values of each alternative of a setting's type that the setting takes."""
    if typing.get_origin(hint) is typing.Literal:
        yield from typing.get_args(hint)
    elif typing.get_origin(hint) is list and hint not in PLAIN:
        yield [*values_of(name, *typing.get_args(hint))]
    elif hint in PLAIN:
        for value in PLAIN[hint]:
            with contextlib.suppress(ValueError):
                CompileConfig(**{name: value})
                yield value
    else:
        for one in typing.get_args(hint):
            yield from values_of(name, one)


PLAIN: dict[Any, tuple[Any, ...]] = {
    type(None): (None,),
    bool: (True, False),
    int: (2, 3 * 2**20),
    float: (0.5,),
    str: ("64MiB", "80%", "some/plan.json"),
    list[dict[str, Any]]: ([{"step": 0, "passes": ["zero3"]}], [{"step": 0, "passes": ["zero3", "prefetch"]}]),
}


def rounds() -> Iterator[dict[str, Any]]:
    """Settings of which each has each of its values in one of the rounds; those of a round fit together."""
    hints = typing.get_type_hints(CompileConfig)
    left = {field.name: [*values_of(field.name, hints[field.name])] for field in fields(CompileConfig)}
    assert all(left.values())
    while left:
        settings: dict[str, Any] = {}
        for name, values in left.items():
            with contextlib.suppress(ValueError):
                CompileConfig(**settings, **{name: values[0]})
                settings[name] = values.pop(0)
        assert settings, f"no setting of {left} takes its first value"
        left = {name: values for name, values in left.items() if values}
        yield settings


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("sys.argv", ["main.py"])
    yield
    show_messages()  # without the level that was asked for last


@pytest.mark.usefixtures("in_process")
@pytest.mark.timeout(600)  # jsonargparse parses some dozen command lines
def test_every_setting_survives_the_command_line_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    nulls = 0
    for settings in rounds():
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
        arguments = [f"--trainer.strategy.compile.{name}={text}" for name, text in texts.items()]
        wanted = CompileConfig(**settings)
        nulls += sum(value is None for value in settings.values())
        code, printed, error = printed_by(*STRATEGY, *arguments, "--print_config")
        assert code == 0, error
        file.write_text(printed)
        for read in (strategy_of(*STRATEGY, *arguments), strategy_of(f"--config={file}")):
            assert vars(read.compile) == vars(wanted)
    assert nulls >= 6  # memory_budget, host_memory_budget, plan, schedule, reduce and log_level
    assert strategy_of(*STRATEGY, "--trainer.strategy.stage=2", "--trainer.strategy.stage=null").stage == 3


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("compile.memory_budge=3", "Option 'memory_budge' is not accepted"),
        ("compile={offload: all, schedul: null}", "Option 'schedul' is not accepted"),
        ("compile.fallback=null", r'key "fallback":\s*Expected a typing.Literal'),
        ("stge=3", "Option 'stge' is not accepted"),
    ],
)
def test_a_setting_that_there_is_not_is_no_configuration(argument: str, named: str) -> None:
    code, printed, error = printed_by(
        *STRATEGY, "--trainer.strategy.compile.offload=all", f"--trainer.strategy.{argument}", "--print_config"
    )
    assert code == 2 and not printed and re.search(named, error), error
