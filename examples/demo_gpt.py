"""Trains a byte-level GPT on several processes, and prints bits per byte, what was compiled, and what planning changed.

    python examples/demo_gpt.py                  # two processes on CPU, or every GPU that is there
    python examples/demo_gpt.py --strategy fsdp  # the same training with another strategy

The text is the Python standard library's sources. Ends with exit status 1 if a training of full length does not bring
validation below 3.5 bits per byte (it starts at 8).
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings

import torch
from gpt import GPT
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from text_data import StdlibText

# Lightning 2.6 with PyTorch from 2.12 on says this of its own code, on every rank.
warnings.filterwarnings("ignore", message=r".*LeafSpec.* is deprecated", category=FutureWarning)

STEPS = 200
GOAL = 3.5


class PrintProgress(Callback):
    """Prints a line per validation: bits per byte so far, and the time since training started."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.started = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.is_global_zero:
            bits = {name: trainer.callback_metrics.get(f"{name}_bits_per_byte") for name in ("train", "val")}
            shown = "  ".join(f"{name} {value:.3f}" for name, value in bits.items() if value is not None)
            elapsed = "" if trainer.sanity_checking else f"  ({time.perf_counter() - self.started:.0f} s)"
            print(f"step {trainer.global_step:4d}  bits per byte: {shown}{elapsed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="deepcompile", help="any strategy name of Lightning")
    parser.add_argument("--accelerator", default="auto", help="auto, cpu, gpu")
    parser.add_argument("--devices", type=int, help="number of processes; default: every GPU, or 2 on CPU")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps; {STEPS} are a full length")
    args = parser.parse_args()

    gpu = args.accelerator in ("gpu", "cuda") or (args.accelerator == "auto" and torch.cuda.is_available())
    seed_everything(1, verbose=False)
    trainer = Trainer(
        strategy=args.strategy,
        accelerator="gpu" if gpu else args.accelerator.replace("auto", "cpu"),
        devices=args.devices or (torch.cuda.device_count() if gpu else 2),
        precision="bf16-mixed" if gpu else "32-true",
        max_steps=args.steps,
        val_check_interval=min(40, args.steps),
        num_sanity_val_steps=-1,  # validate before the first step, to show where training starts
        callbacks=[PrintProgress()],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(GPT(layers=args.layers), StdlibText())

    if hasattr(trainer.strategy, "print_summary"):
        trainer.strategy.print_summary()
        if trainer.is_global_zero:
            print(*trainer.strategy.report(), sep="\n")
    bits = float(trainer.callback_metrics["val_bits_per_byte"])  # the mean over all ranks: they agree on the outcome
    if args.steps >= STEPS and not bits < GOAL:
        sys.exit(f"Validation ended at {bits:.2f} bits per byte; {args.steps} steps should bring it below {GOAL}.")


if __name__ == "__main__":
    main()
