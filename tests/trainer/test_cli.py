"""LightningCLI as users run it: the YAML files of `examples/cli`, made small by a file of the user's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreters import declare_entry_points, run_python

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
model: {layers: 3, width: 32, heads: 2}
data: {length: 17, batch_size: 2}
"""
EAGER = "--trainer.strategy.compile.region_backend=eager"


def run_cli(folder: Path, *arguments: str) -> str:
    """Runs ``main.py fit`` in this checkout."""
    metadata = folder / "metadata"
    if not metadata.exists():
        metadata.mkdir()
        declare_entry_points(metadata)
    return run_python(str(CLI / "main.py"), "fit", *arguments, paths=(metadata,))


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

    run_cli(tmp_path, *pretrain, "--trainer.max_steps=2")
    assert read(last)["global_step"] == 2
    printed = run_cli(tmp_path, *pretrain, f"--config={CLI}/resume.yaml", "--trainer.max_steps=4")
    assert f"Restored all states from the checkpoint at {last}" in printed
    pretrained = read(last)
    # The steps that AdamW has counted tell a resumed training from one that began anew.
    assert pretrained["global_step"] == 4 and pretrained["optimizer_states"][0]["state"][0]["step"] == 4

    finetune = [f"--config={CLI}/finetune.yaml", f"--config={small}", EAGER, f"--model.pretrained={last}"]
    finetune += [f"--trainer.default_root_dir={tmp_path / 'finetune'}", "--trainer.limit_train_batches=2"]
    run_cli(tmp_path, *finetune)
    before = pretrained["state_dict"]
    for epoch in (0, 1):
        after = read(tmp_path / "finetune" / "checkpoints" / f"epoch={epoch}.ckpt")["state_dict"]
        assert after.keys() == before.keys()
        for name, value in after.items():
            frozen = epoch == 0 and name.startswith(("tokens.", "blocks.0.", "blocks.1."))
            assert torch.equal(value, before[name]) == frozen, f"{name} after epoch {epoch}"


@pytest.mark.slow
def test_the_configuration_and_the_help_are_whole(tmp_path: Path) -> None:
    import yaml

    mine = ["--trainer.strategy.stage=2", "--trainer.strategy.device_mesh=auto"]
    printed = run_cli(tmp_path, f"--config={CLI}/pretrain.yaml", *mine, "--print_config")
    config = yaml.safe_load(printed)["trainer"]
    assert config["default_root_dir"] == "runs/pretrain"
    assert config["strategy"]["class_path"] == "lightning_deepcompile.DeepCompileStrategy"
    settings = config["strategy"]["init_args"]
    assert settings["stage"] == 2 and settings["timeout"] == "0:30:00" and settings["state_dict_type"] == "full"
    assert settings["device_mesh"] == "auto"
    assert settings["compile"]["prefetch_blocks"] == 2 and settings["compile"]["region_backend"] == "inductor"

    printed = run_cli(tmp_path, "--trainer.strategy.help=lightning_deepcompile.DeepCompileStrategy")
    shown = " ".join(printed.partition("Help for --trainer.strategy.help=")[2].split())
    assert "Trains an unmodified LightningModule" in shown
    value = r"(?:[A-Z_]+|{\S+})"  # stands behind each name of an option, since Python 3.13 behind the last one
    for name in settings:  # every setting, with what its docstring says
        entry = re.search(rf"--trainer\.strategy\.{name}(?:(?: {value})?, --\S+)? {value} (.*?) \(type:", shown)
        assert entry is not None and "--trainer" not in entry[1], f"`{name}` is not explained"
