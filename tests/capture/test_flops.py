"""FLOPs are those that PyTorch counts of the model, whatever is compiled once, or computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.engine.engine import Engine

aten = torch.ops.aten
# PyTorch has formulas for the GPUs' kernels alone.
ON_CPU: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop.__wrapped__,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop.__wrapped__,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def training_step(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x.square().mean()


@pytest.mark.parametrize("again", [False, True])
def test_flops_are_the_models(mesh: DeviceMesh, again: bool, fresh_dynamo: None) -> None:
    x = torch.randn(2, 6, 8)
    with FlopCounterMode(display=False, custom_mapping=ON_CPU) as counter:
        Net(again=False).training_step(x).backward()
    engine = Engine(Net(again), mesh, CompileConfig(region_backend="eager", schedule=None))
    for steps in (1, 2):
        engine.backward(engine.run_step("training_step", x).backward)
        assert engine.capture.frames.flops_done == steps * counter.get_total_flops()
    engine.close()
