"""Architectures of Transformers, built from small configurations, train under the strategy as they train alone."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import assert_close
from multiprocess import run_ranks
from packaging.version import Version
from test_handover import trainer_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_deepcompile import CompileConfig, DeepCompileStrategy

transformers = pytest.importorskip("transformers")

WORLD, ROWS, STEPS, VOCAB, LENGTH = 2, 2, 5, 67, 10
TEXT = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2}  # fmt: skip
CAUSAL = {**TEXT, "num_key_value_heads": 1, "max_position_embeddings": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
         "image_size": 8, "patch_size": 4, **NO_DROPOUT}  # fmt: skip

# Per model: class, configuration class, its arguments, and the kind of batch.
MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", CAUSAL, "causal"),
    "Mistral": ("MistralForCausalLM", "MistralConfig", CAUSAL, "causal"),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", CAUSAL, "causal"),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", {**CAUSAL, "head_dim": 8, "pad_token_id": 0}, "causal"),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**CAUSAL, "num_local_experts": 3}, "causal"),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 1, "n_head": 2,
              "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "causal"),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**TEXT, "max_position_embeddings": 32}, "causal"),
    "Falcon": ("FalconForCausalLM", "FalconConfig", {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1,
               "num_attention_heads": 2, "bos_token_id": 1, "eos_token_id": 2}, "causal"),
    "BERT": ("BertForMaskedLM", "BertConfig", {**TEXT, **NO_DROPOUT, "max_position_embeddings": 32}, "masked"),
    "RoBERTa": ("RobertaForSequenceClassification", "RobertaConfig", {**TEXT, **NO_DROPOUT,
                "max_position_embeddings": 32, "num_labels": 3, "classifier_dropout": 0.0}, "classes"),
    "T5": ("T5ForConditionalGeneration", "T5Config", {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 24,
           "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0}, "causal"),
    "BART": ("BartForConditionalGeneration", "BartConfig", {"vocab_size": VOCAB, "d_model": 16, "encoder_layers": 1,
             "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
             "decoder_ffn_dim": 24, "max_position_embeddings": 32, "dropout": 0.0}, "causal"),
    "ViT": ("ViTForImageClassification", "ViTConfig", {**IMAGE, "num_labels": 3}, "images"),
    "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {"vocab_size": VOCAB, "d_model": 16,
                "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
                "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_source_positions": 8, "max_target_positions": 32,
                "num_mel_bins": 6, "dropout": 0.0, "decoder_start_token_id": 1, "pad_token_id": 0}, "speech"),
    "Mamba": ("MambaForCausalLM", "MambaConfig", {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1,
              "state_size": 4}, "causal"),
}  # fmt: skip
SIMILAR = {"Llama", "Mistral", "Qwen2", "Gemma", "Mixtral", "GPT-NeoX", "Falcon", "RoBERTa", "T5", "BART", "ViT"}
"""To others, or trained by other tests."""


# Graphs that Dynamo makes of a step, where it is not one: a line logged once, a setting that the first step infers.
GRAPHS = {"GPT-2": 2, "RoBERTa": 2, "ViT": 2}
if torch.__version__ < "2.12":
    GRAPHS |= {"T5": 4, "Whisper": 5}
if Version(transformers.__version__) < Version("5.23"):
    # Layers dropped at random, also with a probability of 0, and an operator for experts that cannot be traced.
    GRAPHS |= {"BART": 16, "Whisper": 20, "Mixtral": 100}


class Batches(Dataset[dict[str, Tensor]]):
    """Random batches of a kind; a rank reads its rows of every global batch."""

    def __init__(self, kind: str, rank: int, world: int) -> None:
        generator = torch.Generator().manual_seed(11)
        tokens = torch.randint(3, VOCAB, (STEPS, ROWS * WORLD, LENGTH), generator=generator)
        pixels = torch.randn(STEPS, ROWS * WORLD, 3, 8, 8, generator=generator)
        sound = torch.randn(STEPS, ROWS * WORLD, 6, 16, generator=generator)
        classes = tokens[..., 0] % 3
        every = {
            "causal": {"input_ids": tokens, "labels": tokens},
            "masked": {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)},
            "classes": {"input_ids": tokens, "labels": classes},
            "images": {"pixel_values": pixels, "labels": classes},
            "speech": {"input_features": sound, "labels": tokens},
        }[kind]
        self.data = {key: value.chunk(world, dim=1)[rank].flatten(0, 1) for key, value in every.items()}

    def __len__(self) -> int:
        return len(self.data["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: value[index] for key, value in self.data.items()}


class Wrapped(pl.LightningModule):
    """Any of the models; plain Lightning."""

    def __init__(self, name: str) -> None:
        super().__init__()
        model, config, options, _ = MODELS[name]
        torch.manual_seed(2)
        self.model: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.losses.append(float(self.trainer.strategy.reduce(outputs["loss"].detach().clone())))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _train(name: str, strategy: Any, rank: int, world: int) -> tuple[list[float], pl.Trainer]:
    trainer = trainer_of(strategy)
    module = Wrapped(name)
    trainer.fit(module, DataLoader(Batches(MODELS[name][3], rank, world), batch_size=ROWS * WORLD // world))
    return module.losses, trainer


def _train_all(names: list[str]) -> dict[str, tuple[list[float], int] | str]:
    results: dict[str, tuple[list[float], int] | str] = {}
    for name in names:
        strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager"))
        try:
            losses, trainer = _train(name, strategy, int(os.environ["RANK"]), WORLD)
            results[name] = losses, trainer.strategy.summary().graphs
        except Exception:
            results[name] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def sharded() -> Callable[[], list[dict[str, tuple[list[float], int] | str]]]:
    chosen = [name for name in MODELS if "TEST_ALL" in os.environ or name not in SIMILAR]
    return run_ranks(_train_all, WORLD, chosen, timeout=500)


@pytest.mark.timeout(600)
@pytest.mark.xdist_group("hugging_face")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extensive] if name in SIMILAR else []) for name in MODELS]
)
def test_trains_as_alone(name: str, sharded: list[dict[str, tuple[list[float], int] | str]]) -> None:
    expected, _ = _train(name, "auto", 0, 1)
    for rank, results in enumerate(sharded):
        actual = results[name]
        assert not isinstance(actual, str), f"rank {rank}:\n{actual}"
        assert_close(torch.tensor(actual[0]), torch.tensor(expected), f"{name}, losses")
        assert actual[1] <= GRAPHS.get(name, 1), f"{name} was captured in {actual[1]} graphs"
