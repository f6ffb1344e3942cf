"""Prints a program readably: gathers, compute, releases and reductions in order."""

from __future__ import annotations

from collections.abc import Container, Sequence

from lightning_deepcompile.program.program import DerivedBlock, ParamInfo, Program
from lightning_deepcompile.program.schedule import Instruction


def format_program(program: Program) -> str:
    """Formats `program`, an instruction a line.

    Returns:
        Text like ``gather   model.layers.3 (9 params, 416.0 MiB bfloat16)``.
    """
    keys = [region.info.key for region in program.regions.values()]
    shapes = {key: f"r{index}" for index, key in enumerate(dict.fromkeys(keys))}
    history = " -> ".join(program.history)
    lines = [f"{program.name} [{history}]: {len(keys)} regions, {len(shapes)} distinct"]
    for block in program.derived:
        lines.append(f"  {'derive':8} {_derived(program, block)}")
    for instruction in program.schedule.instructions:
        lines.append(f"  {instruction.traits.label:8} {_rest(program, instruction, shapes)}".rstrip())
    return "\n".join(lines)


def _rest(program: Program, instruction: Instruction, shapes: dict[str, str]) -> str:
    """The text behind an instruction's label."""
    numbers = ", ".join(map(str, instruction.ids))
    match instruction.traits.effect[1]:
        case "parameters" | "gradients":
            return _describe(program, instruction.ids)
        case "saved tensors":
            return f"saved {numbers} ({format_bytes(instruction.bytes)})"
        case "states":
            return f"optimizer states {numbers} ({format_bytes(instruction.bytes)})"
    if not instruction.region:
        return ""
    info = program.regions[instruction.region].info
    blocks = ", ".join(info.blocks) or "no parameters"
    parts = [f"{part} {program.params[i].name}" for part, i in info.lookups if part.startswith("look")]
    return f"{instruction.region} = {shapes[info.key]} ({'; '.join([blocks, f'{info.nodes} ops', *parts])})"


def _derived(program: Program, block: DerivedBlock) -> str:
    made = [program.params[value.id] for value in block.values if value.is_gathered]
    before = _sizes([program.params[ds_id] for ds_id in block.sources])
    exchanged = f", {format_count(block.maxima, 'maximum', 'maxima')} exchanged" if block.maxima else ""
    return f"{block.block} ({format_count(len(block.sources), 'param')}, {before} -> {_sizes(made)}{exchanged})"


def _describe(program: Program, numbers: Sequence[int]) -> str:
    infos = program.infos(numbers)
    blocks = ", ".join(dict.fromkeys(info.block for info in infos))
    return f"{blocks} ({format_count(len(infos), 'param')}, {_sizes(infos)})"


def _sizes(infos: Sequence[ParamInfo]) -> str:
    dtypes = ", ".join(dict.fromkeys(str(info.dtype).removeprefix("torch.") for info in infos))
    return f"{format_bytes(sum(info.gathered_bytes for info in infos))} {dtypes}".rstrip()


def format_bytes(count: int) -> str:
    """Bytes with a binary unit: ``416.0 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def exact_bytes(count: int) -> str:
    """Bytes as a number that can be copied, and with a unit: ``1096704 bytes (1.0 MiB)``."""
    return f"{count} bytes" if count < 1024 else f"{count} bytes ({format_bytes(count)})"


def format_count(number: int, one: str, many: str = "") -> str:
    """A number of things: ``1 group``, ``2 groups``.

    Args:
        number: How many.
        one: What they are, in the singular.
        many: In the plural, where that is not an "s" more.
    """
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def align(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """Returns rows of a table as lines with aligned columns.

    Args:
        rows: Of equally many cells.
        left: Columns that are set to the left; the others are numbers.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if k in left else cell.rjust(width) for k, (cell, width) in enumerate(cells)
        ).rstrip()
        for cells in (zip(row, widths, strict=True) for row in rows)
    ]
