"""Which NUMA node a GPU is connected to: pinned memory should lie there, as copies from other nodes are slower."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["NumaNode", "node_of_device", "node_of_pci", "pci_address"]


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node.

    Args:
        number: Its number.
        cpus: Its processors.
    """

    number: int
    cpus: tuple[int, ...]


def node_of_device(device: torch.device, root: Path = Path("/")) -> NumaNode | None:
    """The node that `device` is connected to; None on CPUs, and where the platform does not say.

    Args:
        device: The device.
        root: Where ``sys`` is.
    """
    if device.type != "cuda":
        return None
    return node_of_pci(pci_address(torch.cuda.get_device_properties(device)), root)


def pci_address(properties: Any) -> str:
    """The address of a device on the PCI bus, as sysfs writes it; "" if PyTorch does not know it.

    Args:
        properties: What ``torch.cuda.get_device_properties`` returns.
    """
    numbers: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return "" if None in numbers else "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def node_of_pci(address: str, root: Path = Path("/")) -> NumaNode | None:
    """The node that a device on the PCI bus is connected to; None if the platform does not say.

    Args:
        address: Such as ``"0000:1b:00.0"``.
        root: Where ``sys`` is.
    """
    try:
        number = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text()) if address else -1
        if number < 0:  # machines with one node, and many virtual ones
            return None
        cpus = (root / f"sys/devices/system/node/node{number}/cpulist").read_text()
        return NumaNode(number, tuple(_numbers(cpus)))
    except (OSError, ValueError):
        return None


def _numbers(text: str) -> list[int]:
    """The numbers of a list like ``"0-3,8"``."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.extend(range(int(first), int(last or first) + 1))
    return found
