"""Prints a program so that a person sees what is gathered, computed, released and reduced, in order."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from lightning_deepcompile.program.copies import OFFLOAD, RELOAD, WAIT_COPIES, copied_numbers
from lightning_deepcompile.program.graph import args_of, nbytes
from lightning_deepcompile.program.program import Program

__all__ = ["format_bytes", "format_program"]

_LABELS = {
    "dc.prefetch_params_fused.default": "gather",
    "dc.wait_allgather_fused.default": "wait",
    "dc.release_params_fused.default": "release",
    "dc.release_params_at_boundary.default": "release at boundary",
    "dc.reduce_grads_fused.default": "reduce",
}
_STATE_COPIES = {"dc.reload_states.default": "reload", "dc.wait_states.default": "wait"}
_COPIES = {OFFLOAD: "offload", RELOAD: "reload", WAIT_COPIES: "wait copy"}


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
    for node in program.gm.graph.nodes:
        line = _line(program, node, shapes)
        if line:
            lines.append("  " + line)
    return "\n".join(lines)


def _line(program: Program, node: fx.Node, shapes: dict[str, str]) -> str:
    if node.op == "call_module":
        info = program.region(node).info
        blocks = ", ".join(info.blocks) or "no parameters"
        parts = [f"{part} {program.params[i].name}" for part, i in info.lookups if part.startswith("look")]
        return f"compute  {node.target} = {shapes[info.key]} ({'; '.join([blocks, f'{info.nodes} ops', *parts])})"
    if node.op != "call_function" or node.target is operator.getitem:
        return ""
    target = str(node.target)
    if target in _LABELS:
        ids = args_of(node)[1 if target.startswith(("dc.wait", "dc.release")) else 2]
        late = " at boundary" if target.startswith("dc.reduce") and node.args[0] == program.boundary_id else ""
        return f"{_LABELS[target] + late:8} {_describe(program, ids)}"
    if target in _COPIES:
        size = format_bytes(sum(nbytes(source) for source in args_of(node)[1]))
        numbers = ", ".join(map(str, copied_numbers(node)))
        return f"{_COPIES[target]:8} saved {numbers} ({size})"
    if target in _STATE_COPIES:
        chunks, sizes = args_of(node)[1:3]
        return f"{_STATE_COPIES[target]:8} optimizer states {', '.join(map(str, chunks))} ({format_bytes(sum(sizes))})"
    if target == "dc.end_backward.default":
        return "end of backward"
    if target.startswith("dc."):
        name = target.removeprefix("dc.").removesuffix(".default")
        return f"{name:8} {_describe(program, [args_of(node)[1]])}"
    return ""


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
