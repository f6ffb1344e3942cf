"""The strategy under its short name, for LightningCLI.

A command line gives settings to a class, but not to a name of the Trainer's registry. So this class has that name:
LightningCLI finds imported classes by their own names, without the modules.
"""

from __future__ import annotations

from lightning_deepcompile.trainer.strategy import DeepCompileStrategy


class deepcompile(DeepCompileStrategy):
    """`DeepCompileStrategy`, by the name that the Trainer knows."""
