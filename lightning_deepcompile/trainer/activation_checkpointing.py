"""Activation checkpointing by policy: selected modules keep only their inputs and run again in the backward pass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

from torch import nn
from torch.utils.checkpoint import checkpoint

_OURS = "_dc_checkpointed_forward"

CheckpointingPolicy = set[type[nn.Module]] | Callable[..., bool]


def checkpoint_activations(module: nn.Module, policy: CheckpointingPolicy) -> int:
    """Makes modules run under ``torch.utils.checkpoint``, in place; names in state dicts do not change.

    Args:
        module: The model.
        policy: Classes of the modules to checkpoint; or a function of a module, or one as FSDP takes (such as
            ``ModuleWrapPolicy``), that tells whether to.

    Returns:
        The number of modules that were chosen.

    Raises:
        ValueError: If the policy chooses none, or one inside another.
    """
    chosen = {child: path for path, child in module.named_modules() if child is not module and _chooses(policy, child)}
    if not chosen:
        names = ", ".join(sorted({type(child).__name__ for child in module.modules()})[:8])
        raise ValueError(
            f"`activation_checkpointing_policy={policy!r}` chooses no module of {type(module).__name__}. Name the "
            f"classes of its layers; among its modules are {names}."
        )
    for child, path in chosen.items():
        inner = next((p for m, p in chosen.items() if m is not child and p.startswith(f"{path}.")), None)
        if inner is not None:
            raise ValueError(
                f"`activation_checkpointing_policy` chooses {path!r} and {inner!r} inside of it: the inner one would "
                "run three times. Choose one of the two classes."
            )
        child.forward = child.__dict__[_OURS] = functools.partial(checkpoint, child.forward, use_reentrant=False)
    return len(chosen)


def keep_activations(module: nn.Module) -> None:
    """Undoes `checkpoint_activations` on `module`, in place."""
    for child in module.modules():
        ours = child.__dict__.pop(_OURS, None)
        if child.__dict__.get("forward") is ours and ours is not None:
            del child.forward
            if child.forward != ours.args[0]:  # the user had set it
                child.forward = ours.args[0]


def _chooses(policy: CheckpointingPolicy, module: nn.Module) -> bool:
    if not callable(policy):
        return isinstance(module, tuple(policy))
    if "recurse" in inspect.signature(policy).parameters:
        return policy(module=module, recurse=False, nonwrapped_numel=0)
    return policy(module)
