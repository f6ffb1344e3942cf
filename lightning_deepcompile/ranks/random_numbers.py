"""Random numbers that differ between ranks: where each steps on rows of its own, equal ones would repeat themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def own_random_numbers(rank: int, device: torch.device) -> Iterator[None]:
    """Returns a context in which a rank draws numbers of its own; afterwards ranks that drew alike before do so again.

    Args:
        rank: Ranks with the same number draw alike.
        device: A GPU that draws, too; any other device stands for the CPU.
    """
    seed = int(torch.randint(2**62, (), device="cpu")) + rank
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
