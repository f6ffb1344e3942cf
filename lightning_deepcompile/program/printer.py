"""Prints a program so that a person sees what is gathered, computed, released and reduced, in order."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from lightning_deepcompile.program.copies import copied_numbers
from lightning_deepcompile.program.graph import nbytes
from lightning_deepcompile.program.instructions import Traits, instructions_of
from lightning_deepcompile.program.program import Program

__all__ = ["format_bytes", "format_program"]


def format_program(program: Program) -> str:
    """Formats `program`, an instruction a line.

    Args:
        program: The program.

    Returns:
        Text like ``gather   model.layers.3 (9 params, 416.0 MiB bfloat16)``.
    """
    calls = program.regions()
    keys = [program.region(node).info.key for node in calls]
    shapes = {key: f"r{index}" for index, key in enumerate(dict.fromkeys(keys))}
    history = " -> ".join(program.history)
    lines = [f"{program.name} [{history}]: {len(calls)} regions, {len(shapes)} distinct"]
    for node, traits in instructions_of(program.gm.graph):
        lines.append(f"  {traits.label:8} {_rest(program, node, traits, shapes)}".rstrip())
    return "\n".join(lines)


def _rest(program: Program, node: fx.Node, traits: Traits, shapes: dict[str, str]) -> str:
    """What stands behind an instruction's label."""
    match traits.effect[1]:
        case "parameters" | "gradients":
            return _describe(program, traits.argument(node, "ids"))
        case "saved tensors":
            size = format_bytes(sum(nbytes(source) for source in traits.argument(node, "tensors")))
            return f"saved {', '.join(map(str, copied_numbers(node)))} ({size})"
        case "states":
            size = format_bytes(sum(traits.argument(node, "sizes")))
            return f"optimizer states {', '.join(map(str, traits.argument(node, 'ids')))} ({size})"
    if node.op != "call_module":
        return ""
    info = program.region(node).info
    blocks = ", ".join(info.blocks) or "no parameters"
    parts = [f"{part} {program.params[i].name}" for part, i in info.lookups if part.startswith("look")]
    return f"{node.target} = {shapes[info.key]} ({'; '.join([blocks, f'{info.nodes} ops', *parts])})"


def _describe(program: Program, ids: Iterable[int]) -> str:
    infos = [program.params[i] for i in ids]
    blocks = ", ".join(dict.fromkeys(info.block for info in infos))
    dtypes = ", ".join(dict.fromkeys(str(info.dtype).removeprefix("torch.") for info in infos))
    count = "1 param" if len(infos) == 1 else f"{len(infos)} params"
    return f"{blocks} ({count}, {format_bytes(sum(info.gathered_bytes for info in infos))} {dtypes})"


def format_bytes(count: int) -> str:
    """Bytes with a binary unit: ``416.0 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
