"""The compiled runtime as Python sees it: loading the extension, and what the tracer must know of its operators."""

from lightning_deepcompile.runtime import dc
from lightning_deepcompile.runtime.extension import ExtensionNotBuiltError, load_extension

__all__ = ["ExtensionNotBuiltError", "dc", "load_extension"]
