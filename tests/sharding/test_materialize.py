"""Models built on the meta device get the values that they would have without; what nothing initialises is named."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import Mlp, Tokens, full
from init_memory import Peak, Tiny, peak_of_init
from multiprocess import GPU_RANKS, run_ranks
from test_handover import trainer_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.sharding.materialize import Materializer, has_meta_tensors


class Block(nn.Module):
    """Parameters of its own, which it initialises itself, and children."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                        num_attention_heads=2, num_key_value_heads=1))  # fmt: skip


@pytest.mark.parametrize("build", [Stack, llama])
def test_every_tensor_gets_its_initial_distribution(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    expected = build()
    with torch.device("meta"):
        model = build()
    torch.manual_seed(0)
    materializer = Materializer(model, torch.device("cpu"))
    materializer.materialize(model.modules())
    assert not any(has_meta_tensors(m) for m in model.modules())
    for (name, ours), theirs in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        if name == "head.weight":
            continue  # tied again when sharded
        assert ours.shape == theirs.shape and ours.isfinite().all()
        spread = float(theirs.float().std()) if theirs.numel() > 1 else 0.0
        assert float(ours.float().std() if ours.numel() > 1 else 0.0) == pytest.approx(spread, rel=0.6), name
    for (name, ours), theirs in zip(model.named_buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


def test_a_module_without_initialisation_is_named() -> None:
    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Forgetful())
    with pytest.raises(ValueError, match=r"nothing initialises '?1.weight'? of Forgetful.*reset_parameters"):
        Materializer(model, torch.device("cpu")).materialize(model.modules())


class Deferred(Mlp):
    """Built in `configure_model`, without memory if the Trainer says so."""

    def __init__(self, empty: bool) -> None:
        pl.LightningModule.__init__(self)
        self.empty = empty

    def configure_model(self) -> None:
        if hasattr(self, "head"):
            return
        torch.manual_seed(3)
        with self.trainer.init_module(empty_init=self.empty):
            self.embed = nn.Embedding(61, 13)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(13, 17), nn.Tanh(), nn.Linear(17, 13)) for _ in range(3)
            )
            self.head = nn.Linear(13, 61)
            self.head.weight = self.embed.weight
        torch.manual_seed(3)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def _deferred(empty: bool) -> tuple[dict[str, Tensor], int]:
    module = Deferred(empty)
    trainer = trainer_of(DeepCompileStrategy(compile=CompileConfig(region_backend="eager")))
    initial: dict[str, Any] = {}

    class Look(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            initial.update({name: full(p) for name, p in module.named_parameters()})

    trainer.callbacks.append(Look())
    trainer.fit(module, DataLoader(Tokens(3, 4, int(os.environ["RANK"]), 2), batch_size=2))
    assert module.head.weight is module.embed.weight
    moved = sum(not torch.equal(initial[name], full(p)) for name, p in module.named_parameters())
    return initial, moved


def test_deferred_models_train() -> None:
    (eager, _), _ = run_ranks(_deferred, 2, False)
    ranks = run_ranks(_deferred, 2, True)
    for initial, moved in ranks:
        assert moved == len(initial)
        for name, value in initial.items():
            assert torch.equal(value, ranks[0][0][name])
            assert value.abs().max() == pytest.approx(float(eager[name].abs().max()), rel=0.5), name


MIB = 2**20


class Heavy(Tiny):
    """Layers of 36 MiB, each of which glibc takes from the system and gives back at once."""

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            with self.trainer.init_module(empty_init=True):
                self.layers = nn.ModuleList(nn.Linear(3072, 3072, bias=False) for _ in range(10))


def _peak() -> Peak:
    return peak_of_init(Heavy(), lambda: DeepCompileStrategy(compile=CompileConfig(region_backend="eager")), "cpu")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
def test_no_rank_holds_more_than_its_shard_and_a_layer() -> None:
    for peak in run_ranks(_peak, 2):
        assert peak.shard == 10 * 18 * MIB
        assert peak.shard <= peak.host <= 1.3 * peak.shard + 36 * MIB, f"{peak.host / MIB:.0f} MiB"


def _peak_8b() -> Peak:
    from train_llama import Llama

    return peak_of_init(Llama("8b", deferred_init=True), DeepCompileStrategy, "gpu")


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_an_8b_model_is_initialised_in_the_memory_of_its_shard() -> None:
    """Its 32 layers take 0.8 GiB each, its embedding and its head 2 GiB, in fp32."""
    largest = 128_256 * 4096 * 4
    for peak in run_ranks(_peak_8b, GPU_RANKS, timeout=200):
        assert peak.shard == pytest.approx(8.03e9 * 4 / GPU_RANKS, rel=0.01)
        limit = 1.3 * peak.shard + largest
        assert peak.shard <= peak.device <= limit, f"{peak.device / MIB:.0f} MiB of the device"
        assert peak.host <= limit, f"{peak.host / MIB:.0f} MiB of host memory"
