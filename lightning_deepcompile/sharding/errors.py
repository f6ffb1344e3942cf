"""Errors of steps that shards cannot serve."""

__all__ = ["UnsupportedStepError", "hook_refused"]


class UnsupportedStepError(RuntimeError):
    """A step does with its parameters what cannot be done with shards."""


def hook_refused(name: str) -> ValueError:
    """The error for a hook on the gradient of the sharded parameter `name`."""
    return ValueError(
        f"The parameter {name!r} has a hook (`register_hook`), which would not run: gradients are reduced inside of "
        "compiled programs, and autograd sees none of a parameter. Use `register_post_accumulate_grad_hook`, which is "
        "called with the parameter when its reduced `.grad` is there, or change `parameter.grad` in "
        "`on_after_backward` or `on_before_optimizer_step`."
    )
