"""A pretrained folder that does not fit is refused before training, with what is wrong in it named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from test_pretrained import MODELS, Plain, make_folder, plain_folder  # noqa: E402

from lightning_deepcompile import DeepCompileStrategy  # noqa: E402
from lightning_deepcompile.checkpoint.load_pretrained import load_pretrained  # noqa: E402
from lightning_deepcompile.checkpoint.safetensors_folder import INDEX, SafetensorsFolder, publish  # noqa: E402
from lightning_deepcompile.checkpoint.save_pretrained import find_pretrained  # noqa: E402


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("whole")
    for name in MODELS:
        make_folder(name, made)
    return made


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name]()


def change(file: Path, do: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = safetensors.load_file(file)
    do(tensors)
    safetensors.save_file(tensors, file, metadata={"format": "pt"})


def file_of(folder: Path, key: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][key]


def drop_from_index(folder: Path, key: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][key]
    (folder / INDEX).write_text(json.dumps(index))


Q = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts.1.w1.weight"


def _lose_a_file(folder: Path) -> None:
    file_of(folder, Q).unlink()


def _truncate(folder: Path) -> None:
    file = file_of(folder, Q)
    os.truncate(file, file.stat().st_size - 10)


def _lose_a_tensor(folder: Path) -> None:
    change(file_of(folder, Q), lambda tensors: tensors.pop(Q))


def _leave_out_a_tensor(folder: Path) -> None:
    _lose_a_tensor(folder)
    drop_from_index(folder, Q)


def _misname_a_tensor(folder: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.query.weight"] = tensors.pop(Q)

    change(file_of(folder, Q), rename)
    drop_from_index(folder, Q)


def _reshape_a_tensor(folder: Path) -> None:
    change(file_of(folder, Q), lambda tensors: tensors.update({Q: torch.zeros(16, 8)}))


def _lose_an_expert(folder: Path) -> None:
    change(file_of(folder, EXPERT), lambda tensors: tensors.pop(EXPERT))
    drop_from_index(folder, EXPERT)


def _leave_the_folder(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][Q] = "../outside.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def _damage_the_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def _only_pickles(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").touch()


BROKEN = {
    "file": ("llama", _lose_a_file, FileNotFoundError, r"names files that are not beside it: 'model-0000\d-of-"),
    "cut": ("llama", _truncate, ValueError, r"model-0000\d-of-\d+.safetensors' cannot be read \(truncated\?\)"),
    "promised": ("llama", _lose_a_tensor, ValueError, f"promises tensors that its files lack: '{Q}'"),
    "missing": ("llama", _leave_out_a_tensor, ValueError, f"not fit the model: it lacks '{Q}'. With `strict=False`"),
    "misnamed": ("llama", _misname_a_tensor, ValueError, f"it lacks '{Q}'; the model has no place for '.*query"),
    "shape": ("llama", _reshape_a_tensor, ValueError, rf"'{Q}' has the shape \(16, 8\), .* needs \(16, 16\)"),
    "expert": ("mixtral", _lose_an_expert, ValueError, r"5 tensors .* 'model.layers.0.mlp.experts.gate_up_proj'"),
    "outside": ("llama", _leave_the_folder, FileNotFoundError, "not beside it: '../outside.safetensors'"),
    "index": ("llama", _damage_the_index, ValueError, "is not an index of safetensors files"),
    "pickles": ("llama", _only_pickles, FileNotFoundError, "It has 'config.json'.*'pytorch_model.bin'. Weights"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_with_a_folder_is_named(case: str, folders: Path, tmp_path: Path) -> None:
    name, damage, error, message = BROKEN[case]
    folder = tmp_path / name
    shutil.copytree(folders / name, folder)
    model = on_meta(name)
    load_pretrained(model, folder, None, strict=True)
    damage(folder)
    with pytest.raises(error, match=message):
        load_pretrained(model, folder, None, strict=True)


def test_a_name_of_a_hub_says_how_to_download(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="'some/model' is not a directory.*snapshot_download"):
        SafetensorsFolder("some/model")


def test_rows_are_read_by_themselves(folders: Path) -> None:
    """Also of experts, which the folder has one by one; and a model with memory gets all of its values."""
    for name in MODELS:
        model, whole = on_meta(name), MODELS[name]()
        assert not load_pretrained(whole, folders / name, None, strict=True)
        deferred = load_pretrained(model, folders / name, None, strict=True)
        values = dict(whole.named_parameters())
        assert len(deferred) == len(values)
        for parameter, value in model.named_parameters():
            rows = len(values[parameter])
            for low, high in ((0, rows), (1, rows - 1), (rows // 2, rows), (rows, rows)):
                assert torch.equal(deferred[value](low, high), values[parameter][low:high]), (parameter, low, high)
        torch.manual_seed(1)
        assert all(torch.equal(a, b) for a, b in zip(values.values(), MODELS[name]().parameters(), strict=True))


def test_shapes_are_wrong_whether_strict_or_not(tmp_path: Path) -> None:
    folder, _ = plain_folder(tmp_path)
    with pytest.raises(ValueError, match=r"'head.weight' has .* \(3, 5\).*needs \(4, 5\); 'head.bias'.*AutoConfig"):
        load_pretrained(Plain(4), folder, None, strict=False)
    model = Plain()
    del model.head
    with pytest.warns(UserWarning, match="the model has no place for 'head.bias', 'head.weight'"):
        load_pretrained(model, folder, None, strict=False)


def test_which_model_to_save_must_be_plain() -> None:
    several = nn.ModuleDict({"policy": MODELS["llama"](), "reference": MODELS["llama"]()})
    with pytest.raises(ValueError, match=r"several models with a `save_pretrained`: 'policy', 'reference'"):
        find_pretrained(several)
    del several["reference"]
    assert find_pretrained(several) is several["policy"]
    with pytest.raises(ValueError, match="no model of Transformers"):
        find_pretrained(nn.Sequential(nn.Linear(2, 2)))
    assert DeepCompileStrategy().__getstate__()["_stored"] == {}


def test_a_model_that_replaces_another_leaves_none_of_its_weights(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, names in (
        (old, ["model-00001-of-00002.safetensors", INDEX, "model.safetensors", "model.bin", "notes", "config.json"]),
        (new, ["model.safetensors", "config.json"]),
    ):  # fmt: skip
        folder.mkdir()
        for name in names:
            (folder / name).write_text(folder.name)
    publish(new, old)
    assert {path.name: path.read_text() for path in old.iterdir()} == {
        "model.safetensors": "new", "config.json": "new", "model.bin": "old", "notes": "old"
    }  # fmt: skip
    assert not new.exists()
