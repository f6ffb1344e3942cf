"""Reads documentation for its tests: pages, the blocks of code in them, and the commands of shell blocks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"))
)


def blocks(page: str, language: str) -> tuple[Any, list[Any]]:
    """The blocks of a page in a language, in order; `<!-- skip: next "why" -->` before a block leaves it out.

    Args:
        page: Path in the repository.
        language: What stands behind the fence; Python's can be evaluated.

    Returns:
        Sybil's document, which holds the names that blocks share, and its examples. Without Sybil the test is skipped.
    """
    pytest.importorskip("sybil")
    from sybil.document import Document
    from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

    parser = PythonCodeBlockParser() if language == "python" else CodeBlockParser(language, lambda example: None)
    document = Document.parse(str(ROOT / page), parser, SkipParser())
    return document, list(document.examples())


def pages_with(language: str) -> list[str]:
    """The pages that have blocks in a language."""
    return [page for page in PAGES if f"```{language}\n" in (ROOT / page).read_text()]


def commands(script: str) -> Iterator[list[str]]:
    """The commands of a shell script that has one a line, as words; without comments."""
    for line in script.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words
