"""Annotations by which jsonargparse, and with it LightningCLI, reads the arguments of this package's classes.

For a nested setting (``--trainer.strategy.compile.plan=null``), jsonargparse writes None as the text ``'None'`` and
parses that. If an argument may be an object or a dict of its arguments, it accepts any keys of the dict, even
misspelt ones. The help shows an annotation as it is, with all that an ``Annotated`` adds.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable
from typing import Annotated, Any, Union, get_args, get_origin


class Null:
    """Stands for None in the annotations that jsonargparse sees, and reads the text ``'None'`` as None."""


def as_parsed(hint: Any, is_settings: Callable[[Any], bool]) -> Any:
    """Returns the annotation for jsonargparse.

    Args:
        hint: The annotation of an argument.
        is_settings: Whether an alternative is a class of settings, whose arguments jsonargparse reads one by one; then
            no dict of them is needed.
    """
    if get_origin(hint) is Annotated:
        return as_parsed(get_args(hint)[0], is_settings)
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    alternatives = [as_parsed(one, is_settings) for one in get_args(hint)]
    if any(is_settings(one) for one in alternatives):
        alternatives = [one for one in alternatives if get_origin(one) is not dict]
    if types.NoneType in alternatives:
        alternatives.insert(0, Null)  # before texts: the first that fits is taken
    return functools.reduce(operator.or_, alternatives)


def register_null() -> None:
    """Registers `Null` with jsonargparse, if that is installed."""
    try:
        from jsonargparse.typing import register_type
    except ImportError:
        return
    register_type(Null, serializer=_read, deserializer=_read, type_check=lambda value, _: value is None)


def _read(value: object) -> None:
    if value not in (None, "None"):
        raise ValueError("Expected null.")
