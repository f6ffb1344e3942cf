"""Finetunes a pretrained Hugging Face model on a few facts; nothing is downloaded.

    python examples/finetune_hf.py              # two processes on CPU, or every GPU that is there
    python examples/finetune_hf.py --lora       # trains and saves adapters alone
    python examples/finetune_hf.py --model DIR  # a model and a tokenizer of yours, saved by `save_pretrained`

Without --model a small Llama and a tokenizer are made first, and stand for pretrained ones. Ends with exit status 1 if
a training of full length, without --lora, does not learn most of the facts.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer

from lightning_deepcompile import DeepCompileStrategy

STEPS = 150
GOAL = 0.8
END = "<end>"
CAPITALS = {
    "Austria": "Vienna", "Chile": "Santiago", "Cuba": "Havana", "Denmark": "Copenhagen", "Egypt": "Cairo",
    "Finland": "Helsinki", "France": "Paris", "Ghana": "Accra", "Greece": "Athens", "Iraq": "Baghdad",
    "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi", "Norway": "Oslo", "Peru": "Lima", "Spain": "Madrid",
}  # fmt: skip
QUESTION = "What is the capital of {country}? It is"
SENTENCES = [QUESTION + " {capital}.", "{capital} is the capital of {country}."]


def make_pretrained(folder: Path) -> None:
    """Saves a small Llama without training and a tokenizer of bytes and frequent pairs: the shape of real ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bytes_ = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=[END], initial_alphabet=bytes_, show_progress=False)
    tokenizer.train_from_iterator(documents(1000, seed=1), trainer)
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


def documents(count: int, seed: int) -> list[str]:
    """Sentences about the facts, in random order."""
    chosen = random.Random(seed)
    facts = list(CAPITALS.items())
    every = ((chosen.choice(SENTENCES), *chosen.choice(facts)) for _ in range(count))
    return [sentence.format(country=country, capital=capital) for sentence, country, capital in every]


class Packed(LightningDataModule):
    """Documents one after another, cut into windows of one length: no padding, and one shape to compile for.

    Args:
        model: Folder of the model and its tokenizer.
        make: Whether both are made first.
        length: Tokens in a window.
        batch_size: Windows in a batch, per process.
    """

    def __init__(self, model: Path, make: bool = False, length: int = 64, batch_size: int = 8) -> None:
        super().__init__()
        self.model, self.make, self.length, self.batch_size = model, make, length, batch_size

    def prepare_data(self) -> None:
        """Runs on one process of a node, before the others go on."""
        if self.make:
            make_pretrained(self.model)

    def setup(self, stage: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        self.train, self.validation = self._pack(documents(6000, seed=2)), self._pack(documents(300, seed=3))

    def _pack(self, texts: list[str]) -> Tensor:
        encoded = self.tokenizer([text + END for text in texts], add_special_tokens=False)["input_ids"]
        tokens = torch.tensor([token for tokens in encoded for token in tokens])
        return tokens[: len(tokens) // self.length * self.length].view(-1, self.length)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.validation, self.batch_size, drop_last=True)


class Finetuning(LightningModule):
    """Learns to predict the next token; validation asks questions, too.

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

    def loss(self, batch: Tensor) -> Tensor:
        return self.model(input_ids=batch, labels=batch, use_cache=False).loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """Asks all questions at once, with whole parameters: gathered once, not for every token."""
        with self.trainer.strategy.full_parameters(writeback=False):
            found = answers(self.model, self.trainer.datamodule.tokenizer, self.device)
        right = sum(capital in answer for capital, answer in zip(CAPITALS.values(), found, strict=True))
        self.log("right", right / len(CAPITALS), rank_zero_only=False, sync_dist=True)
        if self.trainer.is_global_zero:
            loss = float(self.trainer.callback_metrics["val_loss"])
            example = f"{QUESTION.format(country='Peru')}{found[list(CAPITALS).index('Peru')]}"
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
    questions = [QUESTION.format(country=country) for country in CAPITALS]
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
    args = parser.parse_args()

    gpu = args.accelerator in ("gpu", "cuda") or (args.accelerator == "auto" and torch.cuda.is_available())
    work = Path(tempfile.gettempdir()) / "lightning_deepcompile_finetune_hf"  # the same for all processes
    model, out = args.model or work / "pretrained", args.out or work / "finetuned"
    seed_everything(1, verbose=False)
    data = Packed(model, make=args.model is None)
    trainer = Trainer(
        strategy=DeepCompileStrategy(),
        accelerator="gpu" if gpu else args.accelerator.replace("auto", "cpu"),
        devices=args.devices or (torch.cuda.device_count() if gpu else 2),
        precision="bf16-mixed" if gpu else "32-true",
        max_steps=args.steps,
        val_check_interval=max(args.steps // 4, min(args.steps, 20)),
        check_val_every_n_epoch=None,  # count steps, not those of an epoch
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Finetuning(model, lora=args.lora), data)
    trainer.strategy.save_pretrained(out)

    right = float(trainer.callback_metrics["right"])
    if trainer.is_global_zero:
        data.tokenizer.save_pretrained(out)
        print(f"saved to {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
        if not args.lora:
            loaded = AutoModelForCausalLM.from_pretrained(out).eval()
            print(f"loaded again, it says: {answers(loaded, data.tokenizer, torch.device('cpu'))[:4]}")
    if args.steps >= STEPS and args.model is None and not args.lora and right < GOAL:
        sys.exit(f"{right:.0%} of the facts were learnt; {args.steps} steps should teach {GOAL:.0%}.")


if __name__ == "__main__":
    main()
