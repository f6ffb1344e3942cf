"""Estimates the memory of a program's values between its regions, from their metadata alone."""

from __future__ import annotations

from lightning_deepcompile.program.program import Program
from lightning_deepcompile.program.sizes import Sizes, tensor_bytes


def traffic(program: Program, sizes: Sizes) -> dict[str, int]:
    """Returns the bytes of values that each region reads and makes, without parameters, by region name."""
    return {
        name: sum(
            tensor_bytes(program.values[value].meta, sizes)
            for value in (*region.inputs, *region.outputs)
            if not program.values[value].communicated
        )
        for name, region in program.regions.items()
    }


def live_bytes(
    program: Program, *, inside: bool = False, sizes: Sizes | None = None
) -> dict[str, tuple[int, int, int]]:
    """Estimates the bytes of values before, during and after every region, without gathered parameters and shards.

    Args:
        program: The program; its schedule does not matter.
        inside: Whether the peak includes what a region is predicted to allocate and free by itself; else it is a lower
            bound.
        sizes: Values of symbolic sizes; None: they count with their hints.

    Returns:
        Bytes before, at the peak and after, by region name, as if no saved tensor left the device, and every gradient
        were reduced as soon as it is there.
    """
    read = program.readers()
    shards = {value.args[0] for value in program.values.values() if value.communicated}
    inputs = [name for name in program.inputs if name in read and name not in shards]  # forward returns shards, too
    made = {name: -2 for name in inputs}
    made |= {name: 2 * place for place, region in enumerate(program.regions.values()) for name in region.outputs}
    last_use = {name: max(read.get(name, [place])) for name, place in made.items()}
    size_of = {name: tensor_bytes(program.values[name].meta, sizes) for name in made}
    result = {}
    for here, (name, region) in zip(range(0, 2 * len(program.regions), 2), program.regions.items(), strict=True):
        own = sum(size_of[output] for output in region.outputs)
        earlier = [value for value in made if made[value] < here]
        before = sum(size_of[value] for value in earlier if last_use[value] >= here)
        after = sum(size_of[value] for value in earlier if last_use[value] > here) + own
        if inside:
            own = max(own, region.info.memory.peak.at(sizes))
        result[name] = (before, before + own, after)
    return result
