"""Pretrained folders are read into shards and written from them, and are what Transformers itself reads and writes."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import VOCAB, Base, Record, assert_close, assert_same_training, full, train
from init_memory import Peak, Tiny, peak_of_init
from multiprocess import run_ranks
from torch import Tensor, nn

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.sharding.adapters import materialize_adapters

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

MIB = 2**20
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 36, "num_hidden_layers": 1,
         "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    # Its folders hold experts one by one, the model all of a layer in one tensor: three are uneven for two ranks.
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=3)),
}


def make_folder(name: str, folder: Path) -> Path:
    torch.manual_seed(1)
    model = MODELS[name]()
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(folder / name, max_shard_size="5KB")
    assert len(list((folder / name).glob("model-*.safetensors"))) > 2
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pretrained")
    for name in MODELS:
        make_folder(name, made)
    return made


class Pretrained(Base):
    """A model of a folder: without memory and read into shards, or as Transformers loads it."""

    def __init__(self, folder: Path, adapted: bool = False) -> None:
        super().__init__()
        self.folder, self.adapted = folder, adapted

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        strategy = self.trainer.strategy
        if isinstance(strategy, DeepCompileStrategy):
            config = transformers.AutoConfig.from_pretrained(self.folder)
            with self.trainer.init_module(empty_init=True):
                self.net = transformers.AutoModelForCausalLM.from_config(config)
            strategy.load_pretrained(self.net, self.folder)
            assert all(p.is_meta for p in self.net.parameters())
        else:
            self.net = transformers.AutoModelForCausalLM.from_pretrained(self.folder)
        self.net.train()
        if self.adapted:
            self.net = adapt(self.net)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.net(input_ids=tokens).logits


def adapt(model: nn.Module, **options: Any) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM",
                             modules_to_save=["norm"], **options)  # fmt: skip
    return peft.get_peft_model(model, config)


def strategy_of(**options: Any) -> DeepCompileStrategy:
    return DeepCompileStrategy(compile=CompileConfig(region_backend="eager"), **options)


def _train(
    name: str,
    folder: Path,
    strategy: Any,
    world: int,
    inspect: Any = None,
    callbacks: Any = (),
    steps: int = 3,
    **options: Any,
) -> Record:
    rank = int(os.environ["RANK"]) if world > 1 else 0
    adapted = name == "lora"
    model = Pretrained(folder / ("llama" if adapted else name), adapted)
    return train(
        lambda: model, strategy, world_size=world, rank=rank, steps=steps, inspect=inspect, data_world=2,
        callbacks=[*callbacks], **options,
    )  # fmt: skip


def _save_in_all_ways(trainer: pl.Trainer, to: Path) -> dict[str, Any]:
    """Saves to `to`, over an older model and beside a file of the user; returns what the model's own way says."""
    strategy, net = trainer.strategy, trainer.lightning_module.net
    said: dict[str, Any] = {"params": {name: full(parameter) for name, parameter in net.named_parameters()}}
    with pytest.raises(RuntimeError) as refused:
        net.save_pretrained(to / "refused")
    said["model"] = str(refused.value)
    said["generated"] = generate(net, trainer.global_rank, synced_gpus=True)
    strategy.save_pretrained(to / "saved", max_shard_size="5KB")
    strategy.save_pretrained(to / "half", dtype=torch.bfloat16)
    with pytest.raises(NotADirectoryError, match="is a file"):
        strategy.save_pretrained(to / "half" / "config.json")
    with strategy.full_parameters():
        if trainer.is_global_zero:
            net.save_pretrained(to / "own", max_shard_size="5KB")
    strategy.load_pretrained(net, to / "half")  # into shards
    said["loaded"] = {name: full(parameter) for name, parameter in net.named_parameters()}
    assert type(pickle.loads(pickle.dumps(net))) is type(net)
    return said


def generate(model: Any, rank: int, **options: Any) -> Tensor:
    """A continuation: of another length, and of a prompt of another length, on every rank."""
    prompt = torch.arange(3, 6 + rank)[None]
    model.eval()
    return model.generate(prompt, min_new_tokens=2 + 2 * rank, max_new_tokens=2 + 2 * rank, do_sample=False, **options)


def _in_ranks(folder: Path, to: Path) -> dict[str, Record]:
    records = {}
    for name in MODELS:

        def inspect(trainer: pl.Trainer, name: str = name) -> Any:
            return _save_in_all_ways(trainer, to / name)

        steps = {} if name == "llama" else {"max_steps": 0}  # which compiles nothing
        records[name] = _train(name, folder, strategy_of(), 2, inspect, **steps)
    return records


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("saved")
    for name in MODELS:
        (to / name / "saved").mkdir(parents=True)
        (to / name / "saved" / "tokenizer.json").write_text("the user's")
        (to / name / "saved" / "model.safetensors").write_text("an older model")
    return to


@pytest.fixture(scope="module")
def trained(folder: Path, saved: Path) -> list[dict[str, Record]]:
    return run_ranks(_in_ranks, 2, folder, saved)


@pytest.mark.xdist_group("pretrained")
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_is_read_trained_and_saved(
    name: str, folder: Path, saved: Path, trained: list[dict[str, Record]]
) -> None:
    if name == "llama":
        expected = _train(name, folder, "auto", 1)
        for rank in trained:
            assert_same_training(rank[name], expected, params=True)
    else:
        for parameter, value in transformers.AutoModelForCausalLM.from_pretrained(folder / name).named_parameters():
            assert torch.equal(value, trained[1][name].extra["params"][parameter]), parameter

    made = saved / name / "saved"
    assert (made / "tokenizer.json").read_text() == "the user's"
    assert not (made / "model.safetensors").exists()
    index = json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
    assert {*index.values()} == {path.name for path in made.glob("*.safetensors")} and len({*index.values()}) > 2
    assert index.keys() == json.loads((folder / name / "model.safetensors.index.json").read_text())["weight_map"].keys()
    own = saved / name / "own"
    theirs = {key: tensor for file in own.glob("*.safetensors") for key, tensor in safetensors.load_file(file).items()}
    ours = {key: tensor for file in made.glob("*.safetensors") for key, tensor in safetensors.load_file(file).items()}
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert json.loads((made / "config.json").read_text()) == json.loads((own / "config.json").read_text())
    assert (made / "generation_config.json").read_text() == (own / "generation_config.json").read_text()

    loaded = transformers.AutoModelForCausalLM.from_pretrained(made)
    assert loaded.generation_config.max_new_tokens == 7
    for parameter, value in loaded.named_parameters():
        assert torch.equal(value, trained[0][name].extra["params"][parameter]), parameter
    for rank, records in enumerate(trained):
        assert torch.equal(records[name].extra["generated"], generate(loaded, rank))
    half = transformers.AutoModelForCausalLM.from_pretrained(saved / name / "half")
    assert half.dtype == torch.bfloat16 and half.config.dtype == torch.bfloat16
    for parameter, value in half.named_parameters():
        for rank in trained:
            assert torch.equal(value.float(), rank[name].extra["loaded"][parameter]), parameter

    said = trained[1][name].extra["model"]
    assert "was called on a sharded" in said and "trainer.strategy.save_pretrained" in said
    assert not list(saved.glob("*/refused")) and not list(saved.glob("*/.*"))


class Start(pl.Callback):
    """Notes down where a training starts, or lets one start there."""

    def __init__(self, values: dict[str, Tensor] | None = None) -> None:
        self.values = values

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.values is None:
            self.values = {name: full(p) for name, p in module.named_parameters()}
        else:
            module.load_state_dict(self.values, strict=False)


def _lora(folder: Path, to: Path) -> tuple[Record, dict[str, Tensor]]:
    def inspect(trainer: pl.Trainer) -> None:
        with pytest.raises(RuntimeError, match="sharded PeftModelForCausalLM"):
            trainer.lightning_module.net.save_pretrained(to / "refused")
        trainer.strategy.save_pretrained(to)

    start = Start()
    return _train("lora", folder, strategy_of(), 2, inspect, [start], steps=4), start.values


def test_adapters_train_as_alone_and_are_saved_alone(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    ranks = run_ranks(_lora, 2, folder, tmp_path / "adapters")
    start = ranks[0][1]
    trained = [name for name in start if "lora_" in name or "modules_to_save" in name]
    for name, value in start.items():
        assert bool(value.any()) != ("lora_B" in name), name
        if "modules_to_save" in name:
            assert torch.equal(value, start[name.replace("modules_to_save.default", "original_module")])
    expected = _train("lora", folder, "auto", 1, callbacks=[Start(start)], steps=4)
    for name, value in start.items():
        assert torch.equal(value, expected.params[name]) != (name in trained), name
    for record, _ in ranks:
        assert_same_training(record, expected, params=True)
    files = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= files and "model.safetensors" not in files
    kept = safetensors.load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert len(kept) == len(trained) and all("lora_" in name or name.endswith("norm.weight") for name in kept)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    for name, value in loaded.named_parameters():
        assert_close(value.detach(), expected.params[f"net.{name}"], name)


def test_adapters_that_begin_with_what_the_model_has_need_its_memory(folder: Path) -> None:
    pytest.importorskip("peft")
    with torch.device("meta"):
        model = MODELS["llama"]()
    with pytest.raises(ValueError, match=r"adapter 'default' of .*q_proj.lora_A.*without memory.*DoRA"):
        materialize_adapters(adapt(model, use_dora=True), {})


class Heavy(Tiny):
    """Layers of 36 MiB in a file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            with self.trainer.init_module(empty_init=True):
                self.layers = heavy_layers()
            self.trainer.strategy.load_pretrained(self.layers, self.folder)


def heavy_layers() -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(3072, 3072, bias=False) for _ in range(6))


def _peak(folder: Path) -> tuple[Peak, float]:
    module = Heavy(folder)
    peak = peak_of_init(module, strategy_of, "cpu")
    return peak, float(full(module.layers[5].weight).double().sum())


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
def test_no_rank_holds_more_than_its_shard(tmp_path: Path) -> None:
    layers = heavy_layers()
    expected = float(layers[5].weight.detach().double().sum())
    safetensors.save_file({n: t.detach() for n, t in layers.state_dict().items()}, tmp_path / "model.safetensors")
    del layers
    for peak, total in run_ranks(_peak, 2, tmp_path):
        assert peak.shard == 6 * 18 * MIB and total == pytest.approx(expected, rel=1e-9)
        assert peak.shard <= peak.host <= 1.15 * peak.shard, f"{peak.host / MIB:.0f} MiB"


class Plain(nn.Module):
    """A buffer, a scalar, tied weights, and a part that no file has."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.embed.weight
        self.head = nn.Linear(5, classes)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def plain_folder(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    torch.manual_seed(8)
    model = Plain()
    model.norm.running_mean += torch.arange(5)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    del state["tied.weight"]
    folder.mkdir(exist_ok=True)
    safetensors.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, state


class Module(pl.LightningModule):
    def __init__(self, folder: Path, classes: int, strict: bool) -> None:
        super().__init__()
        self.folder, self.classes, self.strict_reading = folder, classes, strict

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with self.trainer.init_module(empty_init=True):
                self.net = Plain(self.classes)
            self.trainer.strategy.load_pretrained(self.net, self.folder, strict=self.strict_reading)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("mean", self.net.norm(self.net.embed.weight).mean())


def _plain(folder: Path) -> dict[str, Tensor]:
    """A folder that lacks a tensor; the module's own names."""
    module = Module(folder, 3, strict=False)
    trainer = pl.Trainer(strategy=strategy_of(), accelerator="cpu", devices=2, logger=False, barebones=False,
                         enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)  # fmt: skip
    trainer.test(module, torch.utils.data.DataLoader(torch.zeros(4, 1)), verbose=False)
    with pytest.raises(ValueError, match=r"Module has no model of Transformers.*module=\.\.\."):
        trainer.strategy.save_pretrained(folder / "again")
    trainer.strategy.save_pretrained(folder / "again", module.net)
    return {name: full(tensor) for name, tensor in module.net.state_dict().items()}


def test_any_module_is_read_and_saved_with_buffers_and_ties(tmp_path: Path) -> None:
    folder, state = plain_folder(tmp_path / "plain")
    safetensors.save_file({n: t for n, t in state.items() if n != "head.bias"}, folder / "model.safetensors")
    for found in run_ranks(_plain, 2, folder):
        assert torch.equal(found["tied.weight"], state["embed.weight"])
        assert found["head.bias"].isfinite().all() and not torch.equal(found.pop("head.bias"), state["head.bias"])
        for name, value in state.items():
            assert name == "head.bias" or torch.equal(found[name], value), name
    written = safetensors.load_file(folder / "again" / "model.safetensors")
    assert {n: t.shape for n, t in written.items()} == {
        **{n: t.shape for n, t in state.items()}, "tied.weight": torch.Size([7, 5])
    }  # fmt: skip # nothing says that loading ties them
    assert torch.equal(written["norm.running_mean"], state["norm.running_mean"])
