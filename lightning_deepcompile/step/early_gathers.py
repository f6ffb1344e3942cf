"""Launches the first gathers of a step when the optimizer has stepped, while the host is busy with the trainer.

Between two steps the trainer fetches a batch and calls hooks; then the step's guards are checked, and then no compute
can start before the first block has arrived. If it is launched early, it has arrived by then.

These gathers may even be launched while the optimizer steps, once it has stepped on their inputs
(`launch_in_optimizer`).

Early gathers are stale if somebody writes to the parameters before the step. Writes that PyTorch counts are noticed
(`Freshness`); others (``parameter.data``, ``torch._foreach`` functions on parameters) change a checksum of the shards.
Nothing is launched early before it is known that a model makes no such writes; if it makes one later, training stops.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.program.program import Gathers
from lightning_deepcompile.ranks.exchange import maxima
from lightning_deepcompile.sharding.layout import ChunkLayout

_log = logging.getLogger(__name__)


class EarlyGathers:
    """Launches the first gathers of a training step; one per engine.

    Args:
        capture: Its programs determine the gathers that a step begins with.
        group: Of the ranks' CPUs; they decide together whether it is safe.
        device: Where the shards are.

    Attributes:
        launched: Whether the first gathers of the last step were launched before it.
        in_optimizer: Whether they were launched while the optimizer stepped.
    """

    def __init__(self, capture: Capture, group: dist.ProcessGroup, device: torch.device) -> None:
        self._capture, self._group, self._device = capture, group, device
        self.launched = self.in_optimizer = False
        self._safe: bool | None = None  # None: not known yet
        self._groups: list[Gathers] = []  # launched last; another plan may begin a step with others
        self._chunks: list[ChunkLayout] = []  # the chunks that they gather from
        self._watched: list[Tensor] = []  # a shard of every block that they gather from
        self._sums: Tensor | None = None  # after the optimizer's step
        self._may_in_optimizer = False  # whether they may be launched within it: decided with `_safe`
        self._trial: Tensor | None = None  # before that decision, sums from within the optimizer's step
        self._written = torch.zeros((), dtype=torch.bool, device=device)  # since then
        self._seen = torch.zeros((), dtype=torch.bool, pin_memory=device.type == "cuda")  # its copy on the host
        self._copied: Any = None  # the event of that copy

    @property
    def useful(self) -> bool:
        """False once early gathers are known to be unsafe."""
        return self._safe is not False

    def chunks(self) -> list[ChunkLayout]:
        """The chunks of the parameters that are gathered, which share their memory; none if nothing is launched."""
        self._look()
        return self._chunks if self._safe is None or (self._safe and self._may_in_optimizer) else []

    @property
    def ids(self) -> list[int]:
        """Ids of the parameters that were gathered last."""
        return [i for _, ids, _ in self._groups for i in ids]

    def launch_in_optimizer(self) -> None:
        """Launches the gathers within the optimizer's step, once it has stepped on `chunks`; call on all ranks alike.

        Call it instead of `launch`. Neither the rest of the step nor later hooks may write to these parameters. Before
        that is known to hold, nothing is launched, and `launch` is to be called, too.
        """
        self.in_optimizer = self.launched = bool(self._safe and self._may_in_optimizer and self._groups)
        if self.in_optimizer:
            self._gather()
            self._sums = self._checksums()
        elif self._safe is None:
            self._trial = self._checksums() if self._groups else None

    def launch(self) -> None:
        """Launches the gathers after the optimizer's step; call on all ranks alike."""
        before, self.in_optimizer = self._groups, False
        self._look()
        self._sums = self._checksums() if self._groups else None
        if self._trial is not None:
            same = self._sums is not None and before == self._groups and torch.equal(self._trial, self._sums)
            self._may_in_optimizer, self._trial = same, None
        self.launched = bool(self._safe and self._groups)
        if self.launched:
            self._gather()

    def _look(self) -> None:
        # Left to the step: shards in host memory, whose checksum would cost as much as the copy to the device; and what
        # is derived of parameters, of all of them together, as checksums of all would cost as much as deriving.
        model = self._capture.model
        early = {ds_id for ds_id, parameter in model.by_id.items() if parameter.host is None}
        groups = [group for group in self._capture.entry.first_gathers() if early.issuperset(group[1])]
        if groups != self._groups:
            names = {model.by_id[i].name for _, ids, _ in groups for i in ids}
            self._groups = groups
            self._chunks = [c for c in model.chunks if any(shard.spec.name in names for shard in c.shards)]
            self._watched = [model.by_name[chunk.shards[0].spec.name].leaf for chunk in self._chunks]

    def _gather(self) -> None:
        for graph_id, ids, dtypes in self._groups:
            torch.ops.dc.prefetch_params_fused(graph_id, [], ids, dtypes)

    def check(self) -> None:
        """Checks for stale gathers; call before the next step, unless it gathers again anyway.

        Raises:
            RuntimeError: If parameters were written to since a `launch`. It does not wait for the device, and so
                comes a step or two late.
        """
        sums, self._sums = self._sums, None
        if sums is None:
            return
        changed = (self._checksums() != sums).any()
        if self._safe is None:
            written, may_not = maxima([float(changed), float(not self._may_in_optimizer)], self._group)
            self._safe, self._may_in_optimizer = not written, not may_not
            if not self._safe:
                _log.info("Parameters are written to between steps, so no parameter is gathered before a step begins.")
            return
        self._written.logical_or_(changed)
        if self._copied is None or self._copied.query():
            self._raise_if_seen()
            self._seen.copy_(self._written, non_blocking=True)
            if self._device.type == "cuda":
                self._copied = torch.cuda.Event()
                self._copied.record()

    def _raise_if_seen(self) -> None:
        if self._seen:
            raise RuntimeError(
                "Parameters were written to after the optimizer's step in a way that PyTorch does not count "
                "(`parameter.data`, or a `torch._foreach` function on parameters), for the first time since training "
                "began: a step has computed with old values. Write to the parameters themselves under "
                "`torch.no_grad()`."
            )

    @torch.no_grad()
    def _checksums(self) -> Tensor:
        """Returns a checksum for each watched block: of its shards' bytes, as integers, and of their addresses."""
        words = torch.empty(0, dtype=torch.int64, device=self._device)
        return torch.stack([_checksum(words.new_empty(0).set_(leaf.untyped_storage())) for leaf in self._watched])


def _checksum(words: Tensor) -> Tensor:
    """Returns a number that changes if words change, or their order.

    It combines sums of rows and of columns, each with a weight of its own: a plain sum would miss a permutation, and a
    weight for every word would take as much memory again.
    """
    columns = math.isqrt(max(words.numel(), 1))
    square = words[: words.numel() // columns * columns].view(-1, columns)
    rest = words[square.numel() :]
    return _weighed(square.sum(0)) + _weighed(square.sum(1)) + _weighed(rest)


def _weighed(sums: Tensor) -> Tensor:
    weights = torch.arange(sums.numel(), device=sums.device).mul_(_ODD).add_(1)
    return (sums * weights).sum()


_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""Multiples of it are spread over all bits."""
