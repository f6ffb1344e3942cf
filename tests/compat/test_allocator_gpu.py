"""The allocator's segments grow where its settings allow it; each case in a process of its own, as settings stay."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

_CODE = """
import torch
from lightning_deepcompile.compat import grow_segments

MiB = 1 << 20
grown = grow_segments()
value = torch.empty(64 * MiB, dtype=torch.uint8, device="cuda")
large = [one for one in torch.cuda.memory_snapshot() if one["total_size"] >= 64 * MiB]
print(grown, all(one["is_expandable"] for one in large), any(one["is_expandable"] for one in large))
"""


@pytest.mark.parametrize(
    ("chosen", "printed"),
    [
        ("", "True True True"),
        ("max_split_size_mb:200", "True True True"),
        ("expandable_segments:False", "False False False"),
        ("expandable_segments:True", "True True True"),
        ("backend:cudaMallocAsync", "False"),
    ],
)
def test_segments_grow_unless_the_environment_says_otherwise(chosen: str, printed: str) -> None:
    code = _CODE if "backend" not in chosen else "\n".join(_CODE.splitlines()[:6] + ["print(grown)"])
    environment = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment | {"PYTORCH_CUDA_ALLOC_CONF": chosen},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == printed
