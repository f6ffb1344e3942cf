"""A table of devices and their rates, for predictions of steps that have not run.

Rates are what programs of this package reach, not what data sheets say. Of an H100 they follow from whole training
steps of a Llama-3-8B's shape (docs/memory.md); other devices have the same parts of their data sheets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_deepcompile.plan.costs import Link

_PRODUCTS, _ATTENTION, _MEMORY = 0.68, 0.5, 0.85
"""Parts of the data sheet's rates that matrix products, attention and memory reach."""

_LAUNCH = 5e-6
"""Seconds between the kernels of a region."""


@dataclass(frozen=True)
class Kernel:
    """Work of one kernel.

    Args:
        moved: Bytes read and written.
        operations: Floating-point operations of a product or of attention.
        dtype: Of the operands, as PyTorch prints it without ``torch.``.
        attends: Whether it is attention.
    """

    moved: int
    operations: int = 0
    dtype: str = ""
    attends: bool = False


@dataclass(frozen=True)
class Device:
    """A device and its links.

    Args:
        name: As users call it.
        type: ``"cuda"`` or ``"cpu"``.
        memory: Bytes that its driver reports.
        operations: Floating-point operations a second of matrix products, by dtype; of other dtypes the least of these.
        bandwidth: Bytes a second of its memory.
        link: Between ranks of a node.
        host: Between the device and host memory, each way.
        node_bandwidth: Bytes a second that leave a node of eight.
    """

    name: str
    type: str
    memory: int
    operations: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float = 1e11
    link: Link = Link(3e-5, 1e10)
    host: Link = Link(2e-5, 4e10)
    node_bandwidth: float = 4e11

    def seconds(self, kernel: Kernel) -> float:
        """Returns how long a kernel takes."""
        moving = kernel.moved / (_MEMORY * self.bandwidth)
        if not kernel.operations:
            return _LAUNCH + moving
        rate = self.operations.get(kernel.dtype, min(self.operations.values()))
        return _LAUNCH + max(moving, kernel.operations / (rate * (_ATTENTION if kernel.attends else _PRODUCTS)))

    def moving_seconds(self, size: int) -> float:
        """Returns how long kernels take that do nothing but read and write `size` bytes."""
        return size / (_MEMORY * self.bandwidth)


def _gpu(name: str, gib: float, tera: float, bandwidth: float, link: float, host: float) -> Device:
    """A GPU of which 16-bit products reach `tera` 10^12 operations a second; rates of links are in 10^9 bytes."""
    rates = {"bfloat16": tera, "float16": tera, "float8_e4m3fn": 2 * tera, "float32": tera / 2, "float64": tera / 15}
    rates = {dtype: rate * 1e12 for dtype, rate in rates.items()}
    return Device(
        name, "cuda", int(gib * 2**30), rates, bandwidth * 1e9, Link(3e-5, link * 1e9), Link(2e-5, host * 1e9)
    )


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu("A100", 79.3, 312, 2039, 230, 22),
        _gpu("H100", 79.2, 989, 3350, 350, 40),
        _gpu("H200", 139.8, 989, 4800, 350, 40),
        _gpu("B200", 178.4, 2250, 8000, 700, 45),
        Device("cpu", "cpu", 2**40, {"float32": 1e11}),
    )
}
"""By name."""


def device_named(name: str) -> Device:
    """Returns a device of the table.

    Args:
        name: In any case.

    Raises:
        ValueError: If there is none of that name.
    """
    found = next((device for key, device in DEVICES.items() if key.lower() == name.lower()), None)
    if found is None:
        raise ValueError(f"device {name!r} is not in the table: use one of {', '.join(DEVICES)}.")
    return found
