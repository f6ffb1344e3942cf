"""The strategy under its short name, for LightningCLI.

A command line gives settings to a class, and to a name of the Trainer's registry none. So this is a class of that name:
LightningCLI finds classes by their own names, without the modules, once they are imported.
"""

from __future__ import annotations

from lightning_deepcompile.trainer.strategy import DeepCompileStrategy

__all__ = ["deepcompile"]


class deepcompile(DeepCompileStrategy):
    """`DeepCompileStrategy`, by the name that the Trainer knows."""
