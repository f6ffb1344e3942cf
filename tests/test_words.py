"""Docstrings begin with a verb or with the noun that they are about."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REFUSED = frozenset(
    "What Whether That Those How Which Who Where When Why If As So Nothing It They Around Inside For From".split()
)


@pytest.mark.parametrize("folder", ["lightning_deepcompile", "tests", "examples"])
def test_docstrings_begin_with_a_verb_or_with_their_noun(folder: str) -> None:
    refused = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            first = re.match(r"\w+", ast.get_docstring(node) or "")
            if first is not None and first.group() in REFUSED:
                refused.append(f"{file.relative_to(ROOT)}:{node.body[0].lineno}: {first.group()}")
    assert refused == []
