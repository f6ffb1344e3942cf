"""Errors of steps that are not possible with shards."""

_MIXED = "mixed torch.Tensor and DTensor"  # PyTorch's words, in every release that we know


class UnsupportedStepError(RuntimeError):
    """A step uses its parameters in a way that is not possible with shards."""


def hook_refused(name: str) -> ValueError:
    """The error for a hook on the gradient of the sharded parameter `name`."""
    return ValueError(
        f"The parameter {name!r} has a hook (`register_hook`), which would not run: gradients are reduced inside of "
        "compiled programs, and autograd sees none of a parameter. Use `register_post_accumulate_grad_hook`, which is "
        "called with the parameter when its reduced `.grad` is there, or change `parameter.grad` in "
        "`on_after_backward` or `on_before_optimizer_step`."
    )


def explain_mixing(error: BaseException) -> None:
    """Adds advice to PyTorch's error of an operator that got both a shard and a plain tensor."""
    if _MIXED in str(error):
        error.add_note(
            "Parameters are sharded, since the first `fit` of the module, say. Compute with whole ones in `with "
            "trainer.strategy.full_parameters():` (in `setup` they may also be replaced there, by resized ones), or "
            "with `parameter.full_tensor()`; all ranks must call either."
        )
