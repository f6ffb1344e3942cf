"""Tracks the peak of device memory, within an interval of a measurement, and since training began."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_deepcompile.compat import grow_segments
from lightning_deepcompile.profile.memory import memory_limit


class PeakMemory:
    """Reads the allocator's peak in intervals, and keeps the highest of them.

    PyTorch's allocator keeps one peak for all readers. A measurement must reset it, so
    ``torch.cuda.max_memory_allocated()`` covers only the time since the last measurement; this object covers all of it.

    Args:
        device: Where the memory is; on CPUs nothing counts it, and all figures are 0.

    Attributes:
        beside: Bytes that PyTorch's allocator does not know: windows that parameters are gathered to.
        largest: Bytes of the largest value of a step, as far as it is compiled.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0  # the highest peak of the intervals that have ended
        self.beside: Callable[[], int] = lambda: 0
        self.largest = 0

    def limit(self, budget: int | float | str | None) -> int:
        """Bytes that may be allocated, those `beside` included, and contiguous ones for the largest value.

        Args:
            budget: `CompileConfig.memory_budget`.
        """
        return memory_limit(self._device, budget, self.beside(), self.largest)

    @property
    def current(self) -> int:
        """Bytes allocated."""
        return torch.cuda.memory_allocated(self._device) + self.beside() if self._device.type == "cuda" else 0

    @property
    def latest(self) -> int:
        """The most bytes allocated since the last `restart`."""
        return torch.cuda.max_memory_allocated(self._device) + self.beside() if self._device.type == "cuda" else 0

    @property
    def highest(self) -> int:
        """The most bytes allocated since this object was made."""
        return max(self._before, self.latest)

    def avoid_pieces(self) -> None:
        """Keeps free memory from falling into pieces from now on; for steps that need nearly all of it.

        Of 137.7 GiB that an H200's allocator had taken, 17 GiB were in pieces when it found no 3.5 GiB.
        """
        if self._device.type == "cuda" and grow_segments():
            torch.cuda.empty_cache()  # free segments of fixed sizes go back to the device

    def restart(self) -> int:
        """Begins an interval; returns the most bytes that PyTorch's allocator had handed out before."""
        if self._device.type != "cuda":
            return 0
        self._before = self.highest
        most = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return most
