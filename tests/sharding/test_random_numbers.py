"""Random numbers for sharded tensors are those of one process, and optimizers draw others for each rank's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from multiprocess import devices, run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lightning_deepcompile import CompileConfig, DeepCompileStrategy

ROWS, COLUMNS = 7, 3  # three ranks have 3, 3 and 1 rows
VALUES = torch.linspace(0, 1, ROWS * COLUMNS).view(ROWS, COLUMNS)

DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "initialized": lambda t: nn.init.kaiming_uniform_(t),
    "truncated": lambda t: nn.init.trunc_normal_(t),
    "data": lambda t: t.data.normal_(),
    "by a generator": lambda t: t.uniform_(generator=torch.Generator(t.device).manual_seed(5)),
    "rows": lambda t: t[2:6].exponential_(),
    "noise": lambda t: t.add_(torch.randn_like(t), alpha=0.1),
    "doubles": lambda t: t.add_(torch.rand_like(t, dtype=torch.float64)),
    "by its values": lambda t: t.copy_(torch.bernoulli(t)),
    "dropped": lambda t: t.copy_(F.dropout(t, 0.5)),
    "of another shape": lambda t: t.copy_(torch.multinomial(t, COLUMNS).to(t.dtype)),
}


class Noisy(torch.optim.Optimizer):
    """Adds noise to parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=group["lr"])
        return loss


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(COLUMNS, ROWS)
        self.found: dict[tuple[str, str], Tensor] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Noisy(self.parameters())

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for what, tensor in (("weight", self.net.weight), ("gradient", self.net.weight.grad)):
            for name, draw in DRAWS.items():
                tensor.copy_(VALUES)
                torch.manual_seed(1)
                draw(tensor)
                self.found[what, name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
                self.found[what, f"{name}, and what follows"] = torch.rand((), device=self.device)
        self.net.weight.zero_()

    def on_train_end(self) -> None:
        weight = self.net.weight.detach()
        self.found["weight", "stepped"] = weight.full_tensor() if isinstance(weight, DTensor) else weight
        self.found["weight", "stepped, and what follows"] = torch.rand((), device=self.device)


def found(world_size: int, accelerator: str) -> dict[tuple[str, str], Tensor]:
    torch.manual_seed(0)
    module = Net()
    trainer = pl.Trainer(
        strategy=DeepCompileStrategy(compile=CompileConfig(region_backend="eager")) if world_size > 1 else "auto",
        accelerator=accelerator,
        **devices(world_size),
        max_steps=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.randn(2, COLUMNS, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2))
    return {key: value.cpu() for key, value in module.found.items()}


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_ranks_draw_as_one_process_and_optimizers_draw_for_each_rank(accelerator: str) -> None:
    (expected,), on_ranks = run_ranks(found, 1, 1, accelerator), run_ranks(found, 3, 3, accelerator)
    for ours in on_ranks:
        assert ours.keys() == expected.keys()
        for key, value in expected.items():
            if "stepped" not in key[1]:
                assert torch.equal(ours[key], value), f"{key}: {ours[key]} instead of {value}"
        noise = ours["weight", "stepped"]
        assert len(noise.unique()) == ROWS * COLUMNS and 0.02 < float(noise.std()) < 0.3
        after = "weight", "stepped, and what follows"
        assert ours[after] == on_ranks[0][after], "ranks go on with different random numbers"
