"""Ranks of a communicator may meet at several of them, as thousands should."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from multiprocess import RankError, join, run_ranks
from test_symmetric_gpu import _Side

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(200)]


def _gathers(ranks_per_id: str) -> list[float]:
    device = join("cuda")
    os.environ["TORCH_NCCL_RANKS_PER_ROOT"] = ranks_per_id  # PyTorch's own group is there: of 0 it dies
    shard = torch.full((3, 5), float(dist.get_rank()), device=device)
    side = _Side([shard], [(6, 5)])
    (whole,) = side.gather([0])
    rows: list[float] = whole[:, 0].tolist()
    side.release([0])
    side.runtime.close()
    return rows


@pytest.mark.parametrize("ranks_per_id", ["1", "2"])
def test_every_rank_may_be_a_root(ranks_per_id: str) -> None:
    assert run_ranks(_gathers, 2, ranks_per_id, timeout=90) == [[0.0] * 3 + [1.0] * 3] * 2


def test_a_number_of_ranks_that_is_none_is_refused() -> None:
    with pytest.raises(RankError, match="TORCH_NCCL_RANKS_PER_ROOT=0 is no number of ranks"):
        run_ranks(_gathers, 2, "0", timeout=90)
