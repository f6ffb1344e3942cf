"""Statements of README and docs about the repository hold: links, messages, settings."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
import tomllib
from typing import Any

import pytest
from pages import ROOT

from lightning_deepcompile import CompileConfig

README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]


def test_readme_is_short_and_right_on_pypi() -> None:
    assert len(README.splitlines()) <= 150
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links and all(link.startswith("https://") for link in links), "PyPI shows no relative links"
    raw = REPOSITORY.replace("github.com", "raw.githubusercontent.com") + "/main/"
    ours = [*links, *PROJECT["urls"].values()]
    ours += re.findall(r"\]\((https://github\.com[^)]+)\)", (ROOT / "docs/index.md").read_text())
    paths = [link.removeprefix(raw).removeprefix(f"{REPOSITORY}/blob/main/") for link in ours if "github" in link]
    missing = [path for path in paths if not path.startswith(REPOSITORY) and not (ROOT / path).is_file()]
    assert len(paths) > 5 and not missing


def _conf() -> Any:
    spec = importlib.util.spec_from_file_location("conf", ROOT / "docs/conf.py")
    assert spec is not None and spec.loader is not None
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    return conf


def test_the_landing_page_lists_every_page_and_shows_no_directive() -> None:
    text = (ROOT / "docs/index.md").read_text()
    assert "{toctree}" not in text and len(re.findall("^## ", text, re.M)) == 5
    listed = re.findall(r"^[\w/]+$", _conf().sidebar(text), re.M)
    pages = [path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").glob("**/*.md")]
    assert sorted([*listed, "index"]) == sorted(pages)


def test_the_page_of_settings_has_a_paragraph_for_each() -> None:
    sections = _conf().settings("lightning_deepcompile.CompileConfig").split("### ")[1:]
    assert [section.partition("`\n")[0].strip("`") for section in sections] == [
        field.name for field in dataclasses.fields(CompileConfig)
    ]
    for section in sections:
        _, facts, text = section.strip().split("\n\n")
        assert facts.startswith("Type: `") and " Default: `" in facts and len(text) > 40, section


def _texts(node: ast.AST) -> str:
    """The constant parts of a string, with `...` for what is put into it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "..." for v in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@pytest.mark.parametrize("page", ["docs/troubleshooting.md", "docs/install.md"])
def test_messages_that_are_explained_exist(page: str) -> None:
    sources = [
        *ROOT.glob("lightning_deepcompile/**/*.py"),
        ROOT / "lightning_deepcompile_autoload.py",
        ROOT / "setup.py",
    ]
    texts = [_texts(node) for source in sources for node in ast.walk(ast.parse(source.read_text()))]
    tables = re.findall(r"^\| message \|.*\n\| ---.*\n((?:\|.*\n)+)", (ROOT / page).read_text(), re.M)
    messages = [row.split("|")[1].strip() for table in tables for row in table.splitlines()]
    quoted = [message.strip("`") for message in messages if message.startswith("`") and not message.startswith("`LDC_")]
    ours = [message for message in quoted if "g++" not in message and "command-line" not in message]
    assert len(ours) >= 2
    for message in ours:
        parts = [part.strip() for part in message.split("...") if part.strip()]
        assert any(all(part in text for part in parts) for text in texts), f"no code says {message!r}"
