"""The plans of `compat.transformers` match what Transformers itself writes and reads: names, shapes and values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from lightning_deepcompile.compat.transformers import (  # noqa: E402
    MergedTensors,
    PreTrainedModel,
    ReadingPlan,
    SavingGroup,
    has_adapters,
    never_saved,
    plan_reading,
    plan_saving,
    tied_away,
)

TEXT = {"vocab_size": 31, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGE = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}


def build(model: str, config: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**options))


# With the most tensors that must be converted together.
MODELS = {
    "experts": (build("MixtralForCausalLM", "MixtralConfig", **TEXT, num_local_experts=3, num_key_value_heads=1), 1),
    "split": (build("Dinov2Model", "Dinov2Config", **IMAGE, use_swiglu_ffn=True), 4),
    "renamed": (build("ViTForImageClassification", "ViTConfig", **IMAGE, intermediate_size=12, num_labels=3), 1),
    "tied": (build("BertForMaskedLM", "BertConfig", **TEXT, max_position_embeddings=16), 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_planned_is_what_transformers_does(name: str, tmp_path: Path) -> None:
    make, most = MODELS[name]
    torch.manual_seed(0)
    model = make()
    model.save_pretrained(tmp_path)
    folder = safetensors.load_file(tmp_path / "model.safetensors")
    left_out = never_saved(model) | tied_away(model)
    state = {n: t for n, t in model.state_dict().items() if n not in left_out}

    groups = plan_saving(model, {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()})
    assert max(len(group.names) for group in groups) == most
    assert isinstance(model, PreTrainedModel) and all(isinstance(group, SavingGroup) for group in groups)
    assert sorted(name for group in groups for name in group.names) == sorted(state)
    written: dict[str, Tensor] = {}
    for group in groups:
        made = group.convert({name: state[name] for name in group.names})
        assert {n: t.shape for n, t in made.items()} == {n: t.shape for n, t in group.tensors.items()}
        written |= made
    assert written.keys() == folder.keys() and all(torch.equal(written[key], folder[key]) for key in folder)

    plan = plan_reading(model, {key: tuple(tensor.shape) for key, tensor in folder.items()})
    assert isinstance(plan, ReadingPlan) and all(isinstance(merged, MergedTensors) for merged in plan.merged)
    read = {name: folder[key] for name, key in plan.renamed.items()}
    for merged in plan.merged:
        made = merged.convert({key: folder[key] for key in merged.keys()})
        assert {name: tuple(tensor.shape) for name, tensor in made.items()} == merged.shapes
        read |= made
    assert not plan.unexpected and all(torch.equal(read[name], state[name]) for name in state)
    assert any(merged.by_rows for merged in plan.merged) == (name == "experts")


def test_older_names_of_a_base_model_are_found() -> None:
    """A folder of BERT without a head, with the names of its first publication and a buffer that is computed now."""
    base = build("BertModel", "BertConfig", **TEXT)()
    shapes = {name: tuple(tensor.shape) for name, tensor in base.state_dict().items()}
    old = {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): s
           for n, s in shapes.items()}  # fmt: skip
    assert old.keys() != shapes.keys()
    model = MODELS["tied"][0]()
    plan = plan_reading(model, old | {"embeddings.position_ids": (1, 16), "bert.decoder.weight": (3,)})
    known = model.state_dict()
    assert plan.unexpected == ["bert.decoder.weight", "pooler.dense.bias", "pooler.dense.weight"]
    assert set(plan.renamed) == {name for name in known if name.startswith("bert.")}
    assert plan.renamed["bert.embeddings.LayerNorm.weight"] == "embeddings.LayerNorm.gamma"
    assert not has_adapters(model)
