"""The package is rooms on top of each other: a module imports what lies in its own room or below, and in no circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "lightning_deepcompile"
# From the bottom to the top. Files at the package's root are rooms of their own.
ORDER = (
    ["compat", "registry", "command_line", "installation"],
    ["runtime", "ranks", "options", "_autoload", "user_code"],
    ["program", "console"],
    ["plan", "summary"],
    ["profile", "config", "report", "sharding"],
    ["capture", "offload"],
    ["tuning", "step"],
    ["engine", "estimate"],
    ["checkpoint"],
    ["trainer"],
    ["__main__"],
    ["__init__"],
)
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
# nn.Module's own dictionaries, which pickles and state dicts rely on, and what Python's standard library hides.
ALLOWED = {"_parameters", "_buffers", "_modules", "_apply", "_metadata", "_reconstructor", "_getframe", "_init_weights"}
ALLOWED |= {"_current_frames"}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts)


def imports_of(file: Path) -> Iterator[str]:
    """Modules of the package that `file` imports, those for type checkers included.

    The package itself gives public names, which it looks up when they are used.
    """
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
            inner = node.module.split(".")[1:]
            for alias in node.names:
                for parts in ([*inner, alias.name], [*inner, alias.name, "__init__"], inner, [*inner, "__init__"]):
                    if parts not in ([], ["__init__"]) and (PACKAGE.joinpath(*parts[:-1]) / f"{parts[-1]}.py").exists():
                        yield ".".join(parts)
                        break


def room_of(module: str) -> str:
    return module.split(".")[0]


@pytest.mark.parametrize("file", files(), ids=name_of)
def test_rooms_lie_on_top_of_each_other(file: Path) -> None:
    mine = room_of(name_of(file))
    above = {other for other in imports_of(file) if room_of(other) != mine and LEVEL[room_of(other)] >= LEVEL[mine]}
    assert not above


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {name_of(file): set(imports_of(file)) for file in files()}
    while leaves := [module for module, others in graph.items() if not others & graph.keys()]:
        for module in leaves:
            del graph[module]
    assert not graph, "these import each other"


def test_the_root_is_small_and_rooms_say_what_they_are() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 12
    for room in {file.parent for file in files()} - {PACKAGE}:
        assert ast.get_docstring(ast.parse((room / "__init__.py").read_text())), room


@pytest.mark.parametrize("file", [file for file in files() if "compat" not in name_of(file)], ids=name_of)
def test_private_parts_of_others_are_named_in_compat_alone(file: Path) -> None:
    tree = ast.parse(file.read_text())
    mine = {
        node.attr for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    }  # fmt: skip
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "lightning"):
            for part in [*node.module.split("."), *(alias.name for alias in node.names)]:
                assert not part.startswith("_"), f"line {node.lineno}: {node.module}"
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            known = mine | defined | ALLOWED
            assert node.attr in known or node.attr.startswith("_dc_"), f"line {node.lineno}: {ast.unparse(node)}"
