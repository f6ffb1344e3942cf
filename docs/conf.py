"""Settings of Sphinx: ``make docs`` builds these pages. The version and the address are pyproject.toml's.

Pages read well in the repository, too, which shows directives of Sphinx as they are. So the sidebar is made of the
lists of `index.md`, and the page of settings of the docstring of their class.
"""

import dataclasses
import importlib.util
import inspect
import re
import tomllib
import types
import typing
from pathlib import Path
from typing import Any

_PROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]

project = "lightning_deepcompile"
author = _PROJECT["authors"][0]["name"]
copyright = author
release = version = _PROJECT["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
if importlib.util.find_spec("sphinx_copybutton") is not None:  # where there is no network, it may be missing
    extensions.append("sphinx_copybutton")
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_static_path, html_css_files = ["_static"], ["wrap.css"]
html_title = f"deepcompile {release}"  # the whole name does not fit the sidebar
html_theme_options = {
    "source_repository": _PROJECT["urls"]["Repository"],
    "source_branch": "main",
    "source_directory": "docs/",
}

# Docstrings put names in single backticks, as Markdown does.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def sidebar(text: str) -> str:
    """The hidden tables of contents that say what the lists of links of a page say: one for each heading."""
    tables = []
    for title, part in re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", text, re.M):
        if pages := re.findall(r"^- \[.+?\]\(([\w/]+)\.md\)", part, re.M):
            tables.append("\n".join(["```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```"]))
    return "\n\n".join(tables)


def settings(path: str) -> str:
    """A heading, which is an anchor, and a paragraph for each field of a dataclass, as its docstring has them.

    Args:
        path: Of the class, such as ``package.Class``.
    """
    module, _, name = path.rpartition(".")
    cls: Any = getattr(importlib.import_module(module), name)
    arguments = inspect.getdoc(cls).partition("\nArgs:\n")[2].partition("\n\n")[0]
    said = dict(re.findall(r"^    (\w+): ((?:.*\n?(?!    \w))*)", arguments, re.M))
    kinds = typing.get_type_hints(cls)
    sections = []
    for field in dataclasses.fields(cls):
        facts = f"Type: `{readable(kinds[field.name])}`. Default: `{field.default!r}`."
        text = " ".join(said[field.name].split())
        sections.append(f"### `{field.name}`\n\n{facts}\n\n{text}\n")
    return "\n".join(sections)


def readable(kind: Any) -> str:
    """A type as users write it: without names of this package and of modules."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " | ".join(map(readable, typing.get_args(kind)))
    text = "None" if kind is type(None) else kind.__name__ if isinstance(kind, type) else str(kind)
    return re.sub(r"\b(typing|pathlib|collections\.abc)\.", "", text)


def _show_plain_types(app: Any, documented: Any, bound: bool) -> None:
    """Shows the arguments of a checked class as its users write them, and not as LightningCLI reads them."""
    init = documented.__init__ if isinstance(documented, type) else documented
    if getattr(init, "is_checked", False) and "__signature__" in vars(init):
        del init.__signature__
        init.__wrapped__.__annotations__ = typing.get_type_hints(init.__wrapped__)


def _complete(app: Any, page: str, source: list[str]) -> None:
    if page == "index":
        source[0] += f"\n{sidebar(source[0])}\n"
    source[0] = re.sub(r"<!-- settings: (\S+) -->", lambda found: settings(found[1]), source[0])


def setup(app: Any) -> None:
    """Has Sphinx call `_complete` for each page that it reads."""
    app.connect("source-read", _complete)
    app.connect("autodoc-before-process-signature", _show_plain_types)
