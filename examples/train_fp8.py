"""Trains a byte-level GPT whose linear layers compute in FP8 (torchao), sharded over the processes of this machine.

    pip install "lightning-deepcompile[ao]"
    python examples/train_fp8.py                      # every GPU, or two processes on CPU with emulated FP8
    python examples/train_fp8.py --recipe rowwise     # a scale for each row of a weight, in place of one for all of it
    python examples/train_fp8.py --recipe none        # the same training without FP8

Weights travel as FP8. `trainer.strategy.programs()` shows which: lines that begin with `derive`.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import torch
from gpt import GPT
from lightning.pytorch import Trainer, seed_everything
from text_data import StdlibText
from torch import nn

RECIPES = ("none", "tensorwise", "rowwise", "rowwise_with_gw_hp")


class Fp8GPT(GPT):
    """A GPT with FP8 layers in its blocks; embedding, norms and head stay as they are.

    Args:
        recipe: Name of torchao's recipe; "none" for no FP8.
        emulate: Compute with FP8 numbers in fp32, for devices without FP8.
        **settings: Of the GPT.
    """

    def __init__(self, recipe: str = "tensorwise", emulate: bool = False, **settings: int) -> None:
        super().__init__(**settings)
        self.recipe, self.emulate = recipe, emulate

    def configure_model(self) -> None:
        """Converts the layers; Lightning may call it more than once."""
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

        if self.recipe == "none" or any(isinstance(module, Float8Linear) for module in self.modules()):
            return
        config = replace(Float8LinearConfig.from_recipe_name(self.recipe), emulate=self.emulate)
        convert_to_float8_training(self.blocks, config=config, module_filter_fn=fits)


def fits(module: nn.Module, name: str) -> bool:
    """Returns whether FP8 products take a layer: both sizes must be multiples of 16."""
    return isinstance(module, nn.Linear) and module.in_features % 16 == module.out_features % 16 == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="deepcompile", help="any strategy name of Lightning")
    parser.add_argument("--recipe", choices=RECIPES, default="tensorwise")
    parser.add_argument("--devices", type=int, help="number of processes; default: every GPU, or 2 on CPU")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    seed_everything(1, verbose=False)
    trainer = Trainer(
        strategy=args.strategy,
        accelerator="gpu" if gpu else "cpu",
        devices=args.devices or (torch.cuda.device_count() if gpu else 2),
        precision="bf16-mixed" if gpu else "32-true",
        max_steps=args.steps,
        val_check_interval=args.steps,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    model = Fp8GPT(args.recipe, emulate=not gpu, layers=args.layers, width=args.width)
    trainer.fit(model, StdlibText(length=129, validation_windows=64))
    if trainer.is_global_zero:
        loss = float(trainer.callback_metrics["val_loss"])
        print(f"{args.recipe}: {loss / math.log(2):.3f} bits per byte after {args.steps} steps")
        if hasattr(trainer.strategy, "programs"):
            text = "\n".join(trainer.strategy.programs().values())
            print(*sorted({line for line in text.splitlines() if line.startswith("  derive")}), sep="\n")


if __name__ == "__main__":
    main()
