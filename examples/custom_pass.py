"""A pass of your own gathers embedding and head first: prints the program in which their gathers stand at the start.

Run it on two processes with `python examples/custom_pass.py`. In a config file, name the pass by its import path:
`passes: [zero3, prefetch, "custom_pass:early_ends"]`.
"""

from __future__ import annotations

import lightning as L
import torch
from gpt import GPT
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.plan.context import PlanContext
from lightning_deepcompile.plan.placement import Placement
from lightning_deepcompile.plan.step_pass import step_pass
from lightning_deepcompile.program.schedule import Schedule


@step_pass("early_ends", needs=["gathers"])
def early_ends(schedules: list[Schedule], context: PlanContext) -> list[Schedule]:
    """Launches the first and the last group of each program at once.

    A pass may look at `context.profile` if it names "profile" among its needs, and at `simulate(schedules, profile)`
    to see what its idea would cost. It decides from its arguments alone, so that every rank decides alike.
    """
    result = []
    for schedule in schedules:
        placement = Placement.of(schedule)
        positions = [group.position for group in placement.groups]
        if len(positions) > 1:
            order = [placement.groups[0], placement.groups[-1], *placement.groups[1:-1]]
            early = Placement(schedule, placement.body, tuple(order))
            schedule = early.at([0, 0, *positions[1:-1]])
        result.append(schedule)
    return result


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = GPT(layers=4, width=32, heads=2, vocabulary=64, tied=False)

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(devices: int = 2, steps: int = 4, region_backend: str = "inductor") -> L.Trainer:
    compile_config = CompileConfig(
        region_backend=region_backend, schedule=[{"step": 0, "passes": ["zero3", "prefetch", early_ends]}]
    )
    trainer = L.Trainer(
        strategy=DeepCompileStrategy(compile=compile_config),
        accelerator="auto" if torch.cuda.device_count() >= devices else "cpu",
        devices=devices,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    L.seed_everything(0)
    trainer.fit(Model(), DataLoader(torch.randint(0, 64, (4 * steps * devices, 17)), batch_size=4))
    if trainer.is_global_zero:
        print(trainer.strategy.programs()["frame0.forward"])
    return trainer


if __name__ == "__main__":
    main()
