"""Settings of Sphinx: ``make docs`` builds these pages. The version and the address are pyproject.toml's."""

import tomllib
from pathlib import Path

_PROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]

project = "lightning_deepcompile"
author = _PROJECT["authors"][0]["name"]
copyright = author
release = version = _PROJECT["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
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
