"""Real text that every machine has: the Python standard library's own source files, with bytes as tokens."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def source_files() -> list[Path]:
    """Lists the standard library's Python files in a stable order, without its tests and what pip installed."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(p for p in root.rglob("*.py") if _SKIPPED.isdisjoint(p.relative_to(root).parts[:-1]))


def split_files(files: Iterable[Path], validation: float = 0.05, seed: int = 0) -> tuple[list[Path], list[Path]]:
    """Splits whole files, so that no validation window was ever seen in training.

    Args:
        files: What to split.
        validation: The share of files that is held out (at least one file).
        seed: Which files are held out.

    Returns:
        Training files and validation files.
    """
    shuffled = list(files)
    random.Random(seed).shuffle(shuffled)
    held_out = max(1, round(len(shuffled) * validation))
    return shuffled[held_out:], shuffled[:held_out]


def read_bytes(files: Iterable[Path]) -> Tensor:
    """Reads files into one uint8 tensor, one after another."""
    return torch.from_numpy(np.frombuffer(b"".join(p.read_bytes() for p in files), dtype=np.uint8).copy())


class Windows(Dataset[Tensor]):
    """Windows of `length` tokens that start at the given offsets of a text.

    The offsets are fixed when the dataset is made, so that any sampler (Lightning's DistributedSampler too) may hand
    out the indices and every rank agrees on what an index means.

    Args:
        text: One-dimensional uint8 tensor.
        starts: Offset of each window.
        length: Tokens in a window.
    """

    def __init__(self, text: Tensor, starts: Tensor, length: int) -> None:
        self.text, self.starts, self.length = text, starts, length

    @classmethod
    def random_crops(cls, text: Tensor, length: int, seed: int = 0) -> Windows:
        """Returns as many windows as cover the text once, at offsets drawn from `seed`."""
        cls._check(text, length)
        generator = torch.Generator().manual_seed(seed)
        return cls(text, torch.randint(len(text) - length + 1, (len(text) // length,), generator=generator), length)

    @classmethod
    def in_order(cls, text: Tensor, length: int, limit: int | None = None) -> Windows:
        """Neighbouring windows that do not overlap; `limit` of them, spread over the whole text."""
        cls._check(text, length)
        count = len(text) // length
        chosen = torch.arange(count) if limit is None or limit >= count else torch.arange(limit) * count // limit
        return cls(text, chosen * length, length)

    @staticmethod
    def _check(text: Tensor, length: int) -> None:
        if not 0 < length <= len(text):
            raise ValueError(f"length={length}: a window needs between 1 and {len(text)} tokens, the size of the text.")

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = int(self.starts[index])
        return self.text[start : start + self.length].long()


class StdlibText(LightningDataModule):
    """Batches of bytes of the standard library: random crops to train on, fixed windows to validate on.

    Args:
        length: Tokens in a window.
        batch_size: Windows in a batch, per process.
        validation_windows: How many windows validation reads.
        seed: Chooses the validation files and the crops.
    """

    def __init__(self, length: int = 129, batch_size: int = 16, validation_windows: int = 256, seed: int = 0) -> None:
        super().__init__()
        self.length, self.batch_size = length, batch_size
        self.validation_windows, self.seed = validation_windows, seed
        self.train: Windows | None = None
        self.validation: Windows | None = None

    def setup(self, stage: str) -> None:
        """Reads the files, once."""
        if self.train is None:
            train, validation = (read_bytes(files) for files in split_files(source_files(), seed=self.seed))
            self.train = Windows.random_crops(train, self.length, self.seed)
            self.validation = Windows.in_order(validation, self.length, self.validation_windows)

    # Full batches only: a last, smaller one would be a new shape to compile for.
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.validation, self.batch_size, drop_last=True)
