"""States of optimizers on GPUs, and in the memory of their host: what users read and write is of the whole tensor."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from cases import assert_close
from multiprocess import GPU_RANKS, run_ranks
from test_ways import IN_HOST_MEMORY, STATES, resets

from lightning_deepcompile import CompileConfig, DeepCompileStrategy

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


def _on_gpus() -> dict[str, Any]:
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    found = {}
    for offload, names in (("none", list(STATES)), ("all", IN_HOST_MEMORY)):
        for name in names:
            strategy = DeepCompileStrategy(compile=CompileConfig(region_backend="eager", offload=offload))
            found[name, offload] = resets(*STATES[name], strategy, world, rank, world, accelerator="gpu")
    return found


def test_states_on_gpus_are_those_of_one_process() -> None:
    alone = {name: resets(*STATES[name], "auto", 1, 0, GPU_RANKS) for name in STATES}
    for result in run_ranks(_on_gpus, GPU_RANKS, timeout=300):
        for (name, offload), (losses, seen, shown, params) in result.items():
            expected = alone[name]
            assert shown, (name, offload)
            for ours, theirs in ((losses, expected[0]), (seen, expected[1])):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            for parameter, value in expected[3].items():
                assert_close(params[parameter], value, f"{name} {offload} {parameter}")
