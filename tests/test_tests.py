"""Every test can fail: it asserts, or it calls or passes on a function that does, such as one that runs on ranks."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parent
FAILS = {"assert", "assert_close", "fail", "raises", "warns"}
"""Names by which a test fails."""


def names_in(function: ast.FunctionDef) -> set[str]:
    """The names that a function refers to; ``assert`` stands for a statement of that kind."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            names.add("assert")
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.arg):  # a fixture
            names.add(node.arg)
    return names


def functions() -> dict[Path, dict[str, set[str]]]:
    """The functions of each file of tests, methods among them, with the names that they refer to."""
    found: dict[Path, dict[str, set[str]]] = {}
    for file in sorted(TESTS.rglob("*.py")):
        own = found.setdefault(file, {})
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                own[node.name] = own.get(node.name, set()) | names_in(node)
    return found


def reaches_an_assertion(name: str, own: dict[str, set[str]], others: dict[str, set[str]]) -> bool:
    """Follows names through functions of the test's file, then through those of other files."""
    seen: set[str] = set()
    left = {name}
    while left:
        one = left.pop()
        seen.add(one)
        names = own[one] if one in own else others.get(one, set())
        if names & FAILS:
            return True
        left |= {other for other in names if other in own or other in others} - seen
    return False


def test_every_test_reaches_an_assertion() -> None:
    found = functions()
    helpers = [own for file, own in found.items() if not file.name.startswith("test_")]
    shared = {name: names for own in helpers for name, names in own.items()}
    tests = [(file, name) for file, own in found.items() for name in own if name.startswith("test_")]
    assert len(tests) > 500
    cannot_fail = [
        f"{file.relative_to(TESTS)}: {name}"
        for file, name in tests
        if name != "test_step" and not reaches_an_assertion(name, found[file], shared)  # of LightningModules
    ]
    assert not cannot_fail, "\n".join(cannot_fail)
