from __future__ import annotations

import contextlib
import io
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
from gpt import GPT
from lightning.pytorch import seed_everything
from multiprocess import run_ranks
from test_handover import trainer_of
from text_data import StdlibText, Windows, read_bytes, source_files, split_files


def test_the_text_is_large_and_its_split_is_by_file() -> None:
    files = source_files()
    train, validation = split_files(files)
    assert files == sorted(files)
    assert not set(train) & set(validation)
    assert sorted(train + validation) == files
    assert not any("test" in path.parts for path in files)
    assert len(read_bytes(train)) > 2_000_000
    assert len(read_bytes(validation)) > 50_000
    assert split_files(files, seed=1)[1] != validation


def test_windows_are_the_same_for_every_process() -> None:
    text = torch.arange(1000, dtype=torch.int64)
    crops, again = Windows.random_crops(text, 100, seed=3), Windows.random_crops(text, 100, seed=3)
    assert len(crops) == 10
    assert all(torch.equal(a, b) and len(a) == 100 for a, b in zip(crops, again, strict=True))
    assert not torch.equal(crops.starts, Windows.random_crops(text, 100, seed=4).starts)
    fixed = Windows.in_order(text, 100, limit=3)
    assert [int(window[0]) for window in fixed] == [0, 300, 600]
    with pytest.raises(ValueError, match="length=1001"):
        Windows.in_order(text, 1001)


def test_batches_have_one_shape() -> None:
    data = StdlibText(length=33, batch_size=7, validation_windows=20)
    data.setup("fit")
    assert {batch.shape for batch in data.val_dataloader()} == {(7, 33)}
    batch = next(iter(data.train_dataloader()))
    assert batch.shape == (7, 33) and batch.dtype == torch.int64 and 0 <= batch.min() and batch.max() < 256


@pytest.mark.parametrize("tied", [False, True])
def test_gpt_starts_near_eight_bits_and_learns(tied: bool) -> None:
    seed_everything(1, verbose=False)
    model = GPT(layers=2, width=64, heads=2, tied=tied, warmup=2)
    data = StdlibText(length=65, batch_size=8, validation_windows=16)
    data.setup("fit")
    with torch.no_grad():
        bits = float(model.loss(next(iter(data.val_dataloader())))) / math.log(2)
    assert bits == pytest.approx(8.0, abs=0.3)
    trainer = trainer_of("auto", max_steps=20)
    trainer.fit(model, data)
    assert float(trainer.callback_metrics["train_bits_per_byte"]) < 7.0


def test_gpt_refuses_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="width=30"):
        GPT(width=30, heads=4)


def test_llama_sizes() -> None:
    pytest.importorskip("transformers")
    from train_llama import SIZES, Llama, Throughput, Tokens, llama_config

    layers = {"tiny": 4, "1b": 16, "8b": 32, "13b": 40, "70b": 80}
    assert {size: llama_config(size).num_hidden_layers for size in SIZES} == layers
    model = Llama(size="tiny")
    model.configure_model()
    data = Tokens(source="synthetic", length=32, batch_size=2, vocabulary=SIZES["tiny"]["vocab_size"])
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    with torch.no_grad():
        loss = model.model(input_ids=batch, labels=batch).loss
    assert float(loss) == pytest.approx(math.log(256), abs=0.3)
    assert Throughput().every == 10


def test_a_pass_of_ones_own_changes_the_programs() -> None:
    import custom_pass

    trainer = custom_pass.main(devices=1, region_backend="eager")
    printed = trainer.strategy.programs()["frame0.forward"].splitlines()
    assert "early_ends" in printed[0]
    first, second = (line.split()[:2] for line in printed[1:3])
    assert first[0] == second[0] == "gather"
    assert "net.tokens" in first[1] and "net.head" in second[1]


def _run(script: str, options: tuple[str, ...]) -> str:
    printed = io.StringIO()
    sys.argv = [script, *options]
    with contextlib.redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def printed_by(script: str, *options: str) -> str:
    """Runs an example on two ranks, as torchrun would start them; returns what the first one prints."""
    printed: str = run_ranks(_run, 2, f"examples/{script}", options, timeout=280)[0]
    return printed


@pytest.mark.slow
def test_demo_trains_two_processes() -> None:
    printed = printed_by("demo_gpt.py", "--steps=4", "--layers=1", "--accelerator=cpu")
    assert "step    4  bits per byte: train" in printed
    assert "regions compiled/total" in printed


@pytest.mark.slow
@pytest.mark.extensive
@pytest.mark.parametrize("config", ["train_llama", "train_llama_70b"])
def test_llama_trains_two_processes(config: str) -> None:
    pytest.importorskip("jsonargparse")
    pytest.importorskip("transformers")
    trainer = {"accelerator": "cpu", "devices": 2, "max_steps": 2, "limit_val_batches": 0, "callbacks.every": 1}
    options = [f"--trainer.{name}={value}" for name, value in trainer.items()]
    options += ["--model.size=tiny", "--data.length=32"]
    printed = printed_by("train_llama.py", "fit", f"--config=examples/{config}.yaml", *options)
    assert "tokens/s" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), *(pytest.param(option, marks=pytest.mark.extensive) for option in (("--lora",), ("--mode=all",)))]
)
def test_a_pretrained_model_is_finetuned_by_two_processes(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    lora = "--lora" in options
    if lora:
        pytest.importorskip("peft")
    out, model = tmp_path / "out", tmp_path / "model"
    import finetune_hf

    config = finetune_hf.LlamaConfig
    monkeypatch.setattr(finetune_hf, "LlamaConfig", lambda **sizes: config(**sizes | {"num_hidden_layers": 1}))
    finetune_hf.make_pretrained(model)
    command = ["--accelerator=cpu", "--devices=2", "--steps=4", f"--model={model}", f"--out={out}", *options]
    printed = printed_by("finetune_hf.py", *command)
    assert "of 16 right" in printed and (out / "tokenizer.json").exists()
    assert (out / ("adapter_model.safetensors" if lora else "model.safetensors")).exists()
    assert ("loaded again, it says" in printed) == (not lora)
    table = printed[printed.index("batches     tokens/s") :].splitlines()
    modes = list(finetune_hf.MODES) if "--mode=all" in options else ["packed"]
    assert [line.split()[0] for line in table[1 : len(modes) + 1]] == modes


def test_questions_are_batched_in_three_ways(tmp_path: Path) -> None:
    """The same tokens are learnt, and packed ones as if each question were alone."""
    pytest.importorskip("transformers")
    import finetune_hf

    finetune_hf.make_pretrained(tmp_path)
    model = finetune_hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    learnt, sizes = {}, {}
    for mode in finetune_hf.MODES:
        data = finetune_hf.Instructions(tmp_path, mode)
        data.setup("fit")
        batches = list(data.val_dataloader())
        sizes[mode] = {batch["input_ids"].shape[1] for batch in batches}
        learnt[mode] = [batch["labels"][batch["labels"] >= 0] for batch in batches]
        if mode == "packed":
            row = {key: value[:1] for key, value in batches[0].items()}
            starts = [*(row["position_ids"][0] == 0).nonzero().flatten().tolist(), data.length]
            with torch.no_grad():
                logits = model(**row, use_cache=False).logits[0]
                for start, end in zip(starts, starts[1:], strict=False):
                    alone = model(input_ids=row["input_ids"][:, start:end]).logits[0]
                    torch.testing.assert_close(logits[start:end], alone, rtol=1e-4, atol=1e-5)
    assert torch.equal(torch.cat(learnt["padded"]), torch.cat(learnt["bucketed"]))
    packed, padded = torch.cat(learnt["packed"]), torch.cat(learnt["padded"])
    both = min(len(packed), len(padded))
    assert both > 1000 and torch.equal(packed[:both], padded[:both]), "in the same order; `drop_last` may drop more"
    assert sizes["packed"] == {128} and sizes["bucketed"] <= {32, 64} and len(sizes["padded"]) > 1


def test_the_large_models_differ_in_size_alone() -> None:
    yaml = pytest.importorskip("yaml")
    large, larger = (yaml.safe_load(Path(f"examples/train_llama_{size}.yaml").read_text()) for size in ("13b", "70b"))
    assert large["model"].pop("size") == "13b" and larger["model"].pop("size") == "70b"
    assert large == larger
