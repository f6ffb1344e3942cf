"""Teaches a Hugging Face model to answer, and prints tokens a second of padded, bucketed, and packed batches.

    python examples/finetune_hf.py              # two processes on CPU, or every GPU that is there
    python examples/finetune_hf.py --mode all   # padded, then bucketed, then packed batches, and a table of all three
    python examples/finetune_hf.py --lora       # trains and saves adapters alone
    python examples/finetune_hf.py --model DIR  # a model and a tokenizer of yours, saved by `save_pretrained`

Nothing is downloaded: without --model a small Llama and a tokenizer are made first, and stand for pretrained ones. Ends
with exit status 1 if a training of full length, without --lora, does not learn most of the facts.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer

from lightning_deepcompile import DeepCompileStrategy

STEPS = 60
GOAL = 0.8
END = "<end>"
CAPITALS = {
    "Austria": "Vienna", "Chile": "Santiago", "Cuba": "Havana", "Denmark": "Copenhagen", "Egypt": "Cairo",
    "Finland": "Helsinki", "France": "Paris", "Ghana": "Accra", "Greece": "Athens", "Iraq": "Baghdad",
    "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi", "Norway": "Oslo", "Peru": "Lima", "Spain": "Madrid",
}  # fmt: skip
QUESTION, QUESTIONS = "What is the capital of {}?", "What are the capitals of {}?"
MODES = ("padded", "bucketed", "packed")
Batch = dict[str, Tensor]


def make_pretrained(folder: Path) -> None:
    """Saves a small Llama without training and a tokenizer of bytes and frequent pairs: the shape of real ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bytes_ = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=[END], initial_alphabet=bytes_, show_progress=False)
    tokenizer.train_from_iterator((question + answer for question, answer in instructions(1000, seed=1)), trainer)
    fast = FastTokenizer(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,  # as fits the small width
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="200KB")


def instructions(count: int, seed: int) -> list[tuple[str, str]]:
    """Questions about one to eight of the facts, with their answers."""
    chosen, made = random.Random(seed), []
    for _ in range(count):
        facts = chosen.sample(list(CAPITALS.items()), chosen.choice([1, 1, 1, 2, 4, 8]))
        countries, capitals = (", ".join(part) for part in zip(*facts, strict=True))
        made.append(((QUESTION if len(facts) == 1 else QUESTIONS).format(countries), f" {capitals}.{END}"))
    return made


class Instructions(LightningDataModule):
    """Questions and answers, of which the answers are learnt.

    Args:
        model: Folder of the model and its tokenizer.
        mode: How they are batched. ``"padded"``: rows are filled up to the longest one of the batch. ``"bucketed"``:
            to a multiple of 32 tokens, which makes few sizes. ``"packed"``: rows of one length hold as many as fit,
            and positions start anew with each, by which attention keeps them apart.
        make: Whether model and tokenizer are made first.
        rows: Questions in a batch, per process, if they are not packed.
        length: Tokens of a packed row, of which a batch has a quarter as many.
    """

    def __init__(
        self, model: Path, mode: str = "packed", make: bool = False, rows: int = 16, length: int = 128
    ) -> None:
        super().__init__()
        self.model, self.mode, self.make, self.rows, self.length = model, mode, make, rows, length

    def prepare_data(self) -> None:
        """Runs on one process of a node, before the others go on."""
        if self.make:
            make_pretrained(self.model)

    def setup(self, stage: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        self.train, self.validation = self._encode(instructions(8000, seed=2)), self._encode(instructions(300, seed=3))

    def _encode(self, pairs: list[tuple[str, str]]) -> list[Batch]:
        """Tokens with labels and positions; packed, several of them in a row."""
        encoded = []
        for question, answer in pairs:
            asked, answered = self.tokenizer([question, answer], add_special_tokens=False)["input_ids"]
            tokens, labels = torch.tensor(asked + answered), torch.tensor([-100] * len(asked) + answered)
            encoded.append({"input_ids": tokens, "labels": labels, "position_ids": torch.arange(len(tokens))})
        return encoded if self.mode != "packed" else list(self._pack(encoded))

    def _pack(self, encoded: list[Batch]) -> Iterator[Batch]:
        row: list[Batch] = []
        for one in encoded:
            if sum(len(other["labels"]) for other in [*row, one]) > self.length:
                yield self._row(row, self.length)
                row = []
            row.append(one)

    def _row(self, documents: list[Batch], length: int) -> Batch:
        """Documents one after another, and padding up to `length`."""
        gap = length - sum(len(one["labels"]) for one in documents)
        filling = {
            "input_ids": torch.full((gap,), self.tokenizer.pad_token_id),
            "labels": torch.full((gap,), -100),
            "position_ids": torch.arange(gap),
        }
        return {key: torch.cat([one[key] for one in [*documents, filling]]) for key in filling}

    def _batch(self, documents: list[Batch]) -> Batch:
        """Rows of one length. Padding lies behind what attends only to what is before it, so it needs no mask."""
        longest = max(len(one["labels"]) for one in documents)
        if self.mode == "bucketed":
            longest = -(-longest // 32) * 32
        rows = [self._row([one], longest) for one in documents]
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        if self.mode != "packed":
            del batch["position_ids"]
        return batch

    def _loader(self, data: list[Batch], shuffle: bool) -> DataLoader[Batch]:
        rows = self.rows // 4 if self.mode == "packed" else self.rows
        return DataLoader(data, rows, shuffle=shuffle, drop_last=True, collate_fn=self._batch)

    def train_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self.validation, shuffle=False)


class Throughput(Callback):
    """Tokens a second of all processes in the second half of training, when steps are compiled and planned."""

    def __init__(self) -> None:
        self.seconds = self.real = self.computed = 0.0

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Batch, batch_idx: int) -> None:
        self._began = self._now(module)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if trainer.global_step > trainer.max_steps // 2:
            self.seconds += self._now(module) - self._began
            self.computed += batch["input_ids"].numel()
            self.real += int((batch["input_ids"] != trainer.datamodule.tokenizer.pad_token_id).sum())

    def _now(self, module: LightningModule) -> float:
        if module.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        counts = torch.tensor([self.real, self.computed], dtype=torch.float64, device=module.device)
        self.real, self.computed = trainer.strategy.reduce(counts, reduce_op="sum").tolist()

    def row(self, mode: str, trainer: Trainer) -> str:
        """A row of the table."""
        summary = trainer.strategy.summary()
        padding = f"{1 - self.real / self.computed:.0%}"
        compiled = f"{summary.graphs} in {summary.compile_seconds:.1f} s"
        return f"{mode:<10}{self.real / self.seconds:>10.0f}{padding:>10}{compiled:>20}"


class Finetuning(LightningModule):
    """Learns to predict the tokens of answers; validation asks questions, too.

    Args:
        model: Folder of the pretrained model.
        lora: Whether only low-rank adapters are trained.
        lr: Learning rate of AdamW.
    """

    def __init__(self, model: Path, lora: bool = False, lr: float = 4e-3) -> None:
        super().__init__()
        self.folder, self.lora, self.lr = model, lora, lr
        self.model: Any = None

    def configure_model(self) -> None:
        """Builds the model without memory: every process then reads its own rows of the files, and no more."""
        if self.model is not None:
            return
        config = AutoConfig.from_pretrained(self.folder)
        with self.trainer.init_module(empty_init=True):
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.trainer.strategy.load_pretrained(self.model, self.folder)
        if self.lora:
            self.model = add_adapters(self.model)

    def loss(self, batch: Batch) -> Tensor:
        return self.model(**batch, use_cache=False).loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """Asks all questions at once, with whole parameters: gathered once, not for every token."""
        with self.trainer.strategy.full_parameters(writeback=False):
            found = answers(self.model, self.trainer.datamodule.tokenizer, self.device)
        right = sum(capital in answer for capital, answer in zip(CAPITALS.values(), found, strict=True))
        self.log("right", right / len(CAPITALS), rank_zero_only=False, sync_dist=True)
        if self.trainer.is_global_zero:
            loss = float(self.trainer.callback_metrics["val_loss"])
            example = f"{QUESTION.format('Peru')}{found[list(CAPITALS).index('Peru')]}"
            print(f"step {self.trainer.global_step:4d}  loss {loss:.3f}  {right} of {len(CAPITALS)} right  {example!r}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def add_adapters(model: nn.Module) -> nn.Module:
    """LoRA on all linear layers of the model but its head."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"))


@torch.no_grad()
def answers(model: Any, tokenizer: Any, device: torch.device) -> list[str]:
    """Returns the model's answers to the question about each country."""
    questions = [QUESTION.format(country) for country in CAPITALS]
    asked = tokenizer(questions, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    training = model.training
    model.eval()
    made = model.generate(**asked.to(device), max_new_tokens=6, do_sample=False)
    model.train(training)
    return tokenizer.batch_decode(made[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a pretrained model and its tokenizer")
    parser.add_argument("--out", type=Path, help="where to save what was trained; default: a temporary folder")
    parser.add_argument("--lora", action="store_true", help="train low-rank adapters alone (needs peft)")
    parser.add_argument("--accelerator", default="auto", help="auto, cpu, gpu")
    parser.add_argument("--devices", type=int, help="number of processes; default: every GPU, or 2 on CPU")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps; {STEPS} are a full length")
    parser.add_argument("--mode", choices=[*MODES, "all"], default="packed", help="how questions are batched")
    parser.add_argument("--precision", default="bf16-mixed", help="as the Trainer takes it")
    args = parser.parse_args()

    table = [f"{'batches':<10}{'tokens/s':>10}{'padding':>10}{'graphs':>20}"]
    for mode in MODES if args.mode == "all" else [args.mode]:
        trainer, throughput = finetune(args, mode)
        table.append(throughput.row(mode, trainer))
    if trainer.is_global_zero:
        print("\n".join(table))
    right = float(trainer.callback_metrics["right"])
    if args.steps >= STEPS and args.model is None and not args.lora and right < GOAL:
        sys.exit(f"{right:.0%} of the facts were learnt; {args.steps} steps should teach {GOAL:.0%}.")


def finetune(args: argparse.Namespace, mode: str) -> tuple[Trainer, Throughput]:
    """Trains, saves, and loads again."""
    gpu = args.accelerator in ("gpu", "cuda") or (args.accelerator == "auto" and torch.cuda.is_available())
    work = Path(tempfile.gettempdir()) / "lightning_deepcompile_finetune_hf"  # the same for all processes
    model, out = args.model or work / "pretrained", args.out or work / "finetuned"
    seed_everything(1, verbose=False)
    data, throughput = Instructions(model, mode, make=args.model is None), Throughput()
    trainer = Trainer(
        strategy=DeepCompileStrategy(),
        accelerator="gpu" if gpu else args.accelerator.replace("auto", "cpu"),
        devices=args.devices or (torch.cuda.device_count() if gpu else 2),
        precision=args.precision,
        max_steps=args.steps,
        val_check_interval=max(args.steps // 4, min(args.steps, 20)),
        check_val_every_n_epoch=None,  # count steps, not those of an epoch
        callbacks=[throughput],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Finetuning(model, lora=args.lora), data)
    trainer.strategy.save_pretrained(out)
    if trainer.is_global_zero:
        data.tokenizer.save_pretrained(out)
        print(f"saved to {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
        if not args.lora:
            loaded = AutoModelForCausalLM.from_pretrained(out).eval()
            print(f"loaded again, it says: {answers(loaded, data.tokenizer, torch.device('cpu'))[:4]}")
    return trainer, throughput


if __name__ == "__main__":
    main()
