"""What PyTorch calls at the end of ``import torch``: an entry point of the group ``torch.backends``.

PyTorch does not go on where an entry point cannot be imported. An installation can outlive its package: a checkout that
was installed with ``pip install -e`` and moved, or a file of the user's that is named like the package and comes first.
So this module is one file that is copied beside the installed packages, also by ``pip install -e``, and needs nothing.
"""

from __future__ import annotations

import sys
import warnings

__all__ = ["install"]


def install() -> None:
    """Makes Lightning know ``strategy="deepcompile"``; warns, and never raises, where the package does not import."""
    try:
        from lightning_deepcompile._autoload import install as register
    except Exception as error:  # whatever code that is not ours raises: `import torch` must go on
        message = (
            f"lightning_deepcompile is installed but cannot be imported ({type(error).__name__}: {error}): "
            'Trainer(strategy="deepcompile") will not be known. Install it again, or `pip uninstall '
            "lightning-deepcompile`."
        )
        try:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        except Warning:  # the user asked for warnings to be errors
            print(message, file=sys.stderr)
    else:
        register()
