"""The compiled runtime's Python side: loads the extension, and registers what the tracer needs of its operators."""

from lightning_deepcompile.runtime import dc
from lightning_deepcompile.runtime.extension import ExtensionNotBuiltError, load_extension

__all__ = ["ExtensionNotBuiltError", "dc", "load_extension"]
