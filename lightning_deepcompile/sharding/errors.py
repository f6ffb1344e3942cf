"""Errors of steps that shards cannot serve."""

__all__ = ["UnsupportedStepError"]


class UnsupportedStepError(RuntimeError):
    """A step does with its parameters what cannot be done with shards."""
