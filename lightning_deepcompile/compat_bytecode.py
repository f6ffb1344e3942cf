"""The private parts of Dynamo that rewrite bytecode.

As in `compat`, each has a test that fails when PyTorch moves what it uses.
"""

from __future__ import annotations

import dis
import types
from typing import Any

from torch._dynamo import bytecode_transformation as bytecode

from lightning_deepcompile.compat import with_code

__all__ = ["spelled_out"]

_CONVERSIONS = ("", "!s", "!r", "!a")
_WITH_SPEC = 4


def spelled_out(function: types.FunctionType) -> types.FunctionType:
    """The function, or if it may need that, a copy whose f-strings are calls of ``str.format``, part by part.

    Dynamo loses that a number which varies is formatted already where a later part breaks the graph
    (``f"{batch_idx}: {loss.item():.3f}"``: the text is put together of an integer), and cannot put off formatting one
    as `.2f` says. It does both right for ``str.format``.

    Args:
        function: Any function written in Python.
    """
    if not _may_fail(function.__code__):
        return function
    code = bytecode.transform_code_object(function.__code__, _spell_out)[0]
    return with_code(function, code)


def _template(opname: str, arg: int | None) -> str | None:
    """What formats as an instruction does; None for those that format nothing."""
    if opname == "FORMAT_VALUE":  # until Python 3.12
        arg = arg or 0
        return f"{{{_CONVERSIONS[arg & 3]}{':{}' if arg & _WITH_SPEC else ''}}}"
    return {"FORMAT_SIMPLE": "{}", "FORMAT_WITH_SPEC": "{:{}}"}.get(opname)


def _may_fail(code: types.CodeType) -> bool:
    started = False
    for instruction in dis.get_instructions(code):
        template = _template(instruction.opname, instruction.arg)
        if template is not None:
            started = True
            if ":" in template:
                return True
        elif instruction.opname == "BUILD_STRING":
            started = False
        elif started and instruction.opname.startswith("CALL"):
            return True
    return False


def _spell_out(instructions: list[bytecode.Instruction], options: dict[str, Any]) -> None:
    written: list[bytecode.Instruction] = []
    for instruction in instructions:
        template = _template(instruction.opname, instruction.arg)
        if template is None:
            written.append(instruction)
            continue
        operands = 2 if ":" in template else 1
        call = [
            bytecode.create_instruction("LOAD_CONST", argval=template),
            bytecode.create_instruction("LOAD_ATTR", argval="format"),
            *bytecode.create_rot_n(operands + 1),
            *bytecode.create_call_function(operands, True),
        ]
        written += bytecode.overwrite_instruction(instruction, call)
    instructions[:] = written
