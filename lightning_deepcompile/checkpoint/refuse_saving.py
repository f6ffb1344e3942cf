"""Refuses a sharded model's own ``save_pretrained``, which would find no whole tensor to write."""

from __future__ import annotations

import types
from typing import Any, cast

from torch import nn
from torch.distributed.tensor import DTensor


def can_save_pretrained(module: nn.Module) -> bool:
    """Returns whether a module's class has a method ``save_pretrained``, as models of Transformers and of PEFT have."""
    return callable(getattr(type(module), "save_pretrained", None))


def refuse_saving(root: nn.Module) -> None:
    """Shadows every model's ``save_pretrained`` by a function that raises as long as the model is sharded.

    It is an attribute of the object: classes do not change, and copies and pickled forms of the model work.
    """
    for module in root.modules():
        if module is not root and can_save_pretrained(module):
            module.__dict__["save_pretrained"] = types.MethodType(save_pretrained, module)


def save_pretrained(self: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """Raises if the model is sharded, else calls its own ``save_pretrained``; pickled methods are found by this name.

    Raises:
        RuntimeError: If the parameters are sharded, and no state dict of whole tensors is given.
    """
    own = cast(Any, type(self)).save_pretrained
    if kwargs.get("state_dict") is None and any(isinstance(p, DTensor) for p in self.parameters()):
        raise RuntimeError(
            f"`save_pretrained({str(save_directory)!r})` was called on a sharded {type(self).__name__}: "
            "each process has only its rows of every parameter. Call "
            f"`trainer.strategy.save_pretrained({str(save_directory)!r})` on all processes instead: it gathers and "
            "writes one tensor after another."
        )
    return own(self, save_directory, *args, **kwargs)
