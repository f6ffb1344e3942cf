"""The host memory that this rank may use for offloading."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from lightning_deepcompile.plan.budget import parse_budget
from lightning_deepcompile.ranks.exchange import exchange

_DEFAULT = 0.8


def host_limit(budget: int | float | str | None, group: dist.ProcessGroup) -> int:
    """Bytes of host memory for each rank: the least of all nodes' budgets, shared by a node's ranks. A collective.

    Args:
        budget: `CompileConfig.host_memory_budget`, of a node.
        group: The ranks.
    """
    mine = socket.gethostname(), parse_host_budget(budget, available_host_memory())
    everybody = exchange(mine, group)
    hosts = [host for host, _ in everybody]
    return min(limit // hosts.count(host) for host, limit in everybody)


def parse_host_budget(value: int | float | str | None, total: int) -> int:
    """Bytes of `CompileConfig.host_memory_budget`, of which a fraction means `total`; see `parse_budget`."""
    return parse_budget(value, total, name="host_memory_budget", default=_DEFAULT)


def available_host_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that processes of this node can still take, within the limits of their control groups.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    limits = [*_of_machine(root), *_of_control_groups(root)]
    return max(min(limits, default=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")), 1)


def _of_machine(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _of_control_groups(root: Path) -> Iterator[int]:
    """Yields the bytes left by this process's control groups and their parents (versions 2 and 1)."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        mount = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        folder = mount / path.strip("/")
        while folder.is_relative_to(mount):  # inside a container the path may be the host's: then only the mount exists
            limit, used = (_read(folder / name).strip() for name in names)
            if limit.isdigit() and used.isdigit():
                yield int(limit) - int(used) + _reclaimable(folder)
            folder = folder.parent


def _reclaimable(folder: Path) -> int:
    """Bytes of the page cache that is not in use: the kernel reclaims it first."""
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # another version of control groups, or none
