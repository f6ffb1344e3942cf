"""Checks the arguments of a class against its annotations, when an object of it is made.

An annotation gives types and choices; a `Rule` in an ``Annotated`` adds what a type does not express: ranges, units,
names. An error names the argument, the value seen and the allowed values.
"""

from __future__ import annotations

import collections.abc
import difflib
import functools
import inspect
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from lightning_deepcompile.command_line import as_parsed, register_null

T = TypeVar("T")

_COLLECTIONS = (list, tuple, set, frozenset)
_WORDS = {int: "an integer", float: "a number", str: "a text", list: "a list", tuple: "a tuple", dict: "a dict"}


class Rule:
    """A condition beyond a type; belongs into an ``Annotated``.

    Attributes:
        expected: In words; "": as the type says.
    """

    expected: str = ""

    def read(self, value: Any) -> Any:
        """Returns `value` in the form that is compared with the type."""
        return value

    def complaint(self, value: Any) -> str:
        """Describes the problem with `value`, which is of the type, and what to do; "" if there is none."""
        return ""


class AnyCase(Rule):
    """A choice that may also be written in lower case."""

    def read(self, value: Any) -> Any:
        """Returns a text in capitals."""
        return value.upper() if isinstance(value, str) else value


def checked(cls: type[T]) -> type[T]:
    """Decorates a class whose arguments are checked against the annotations of its ``__init__``.

    Args:
        cls: The class; what is made of it raises a ValueError for a value that may not be there, and a TypeError for an
            argument that there is not, with the name that was meant.
    """
    plain = cls.__init__
    signature = inspect.signature(plain)
    names = list(signature.parameters)[1:]
    hints = typing.get_type_hints(plain, include_extras=True)

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in names:
                meant = _inside(cls.__name__, name, kwargs[name], hints) or did_you_mean(name, names)
                raise TypeError(f"{cls.__name__} has no argument {name!r}.{meant} There are: {', '.join(names)}.")
        for name, value in signature.bind(self, *args, **kwargs).arguments.items():
            if name in names:
                _check(cls.__name__, name, value, hints.get(name, Any))
        plain(self, *args, **kwargs)

    # Read by tools that take arguments from files and command lines.
    own, *others = signature.parameters.values()
    shown = [p.replace(annotation=as_parsed(hints.get(p.name, Any), _is_checked)) for p in others]
    init.__signature__ = signature.replace(parameters=[own, *shown], return_annotation=None)  # type: ignore[attr-defined]
    init.is_checked = True  # type: ignore[attr-defined]
    register_null()
    cls.__init__ = init  # type: ignore[method-assign]
    return cls


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """`` Did you mean 'x'?`` with what `name` is most like; "" if it is like nothing that there is.

    Args:
        name: What was given.
        known: What may be given; a number that was given as a text is like the number.
    """
    choices = {str(one): one for one in known}
    close = difflib.get_close_matches(str(name), choices, n=1)
    return f" Did you mean {choices[close[0]]!r}?" if close else ""


def _inside(owner: str, name: str, value: Any, hints: Mapping[str, Any]) -> str:
    """Says where an argument belongs that is one of the settings which another argument of `owner` holds."""
    for argument, hint in hints.items():
        for one in _alternatives(hint):
            if _is_checked(one) and name in inspect.signature(one.__init__).parameters:
                return f" It belongs to {one.__name__}: {owner}({argument}={one.__name__}({name}={value!r}))."
    return ""


def _is_checked(cls: Any) -> bool:
    return getattr(getattr(cls, "__init__", None), "is_checked", False)


def _check(owner: str, name: str, value: Any, hint: Any) -> None:
    alternatives = _alternatives(hint)
    complaints = [_judge(one, value) for one in alternatives]
    if any(complaint == "" for complaint in complaints):
        return
    told = next((complaint for complaint in complaints if complaint is not None), None)
    if told is None:
        choices = [choice for one in alternatives for choice in _choices(one)]
        told = f"{'use' if all(map(_choices, alternatives)) else 'expected'} {_listed(alternatives)}."
        if isinstance(value, str):
            told += did_you_mean(value, choices)
    raise ValueError(f"{owner}({name}={value!r}): {told}")


def _judge(hint: Any, value: Any) -> str | None:
    """Judges `value` by `hint`: "" if it fits, a complaint if only its type does, None if not even that."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        rules = [rule for rule in arguments[1:] if isinstance(rule, Rule)]
        read = functools.reduce(lambda seen, rule: rule.read(seen), rules, value)
        judged = [_judge(one, read) for one in _alternatives(arguments[0])]
        if "" not in judged:
            return next((one for one in judged if one is not None), None)
        return next((text for rule in rules if (text := rule.complaint(read))), "")
    return "" if _is(origin, arguments, hint, value) else None


def _is(origin: Any, arguments: tuple[Any, ...], hint: Any, value: Any) -> bool:
    if hint is Any:
        return True
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin is type:
        return isinstance(value, type)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin in _COLLECTIONS:  # any of them: YAML has only lists
        inner = [one for argument in arguments for one in _alternatives(argument)]
        return isinstance(value, _COLLECTIONS) and all(any(_judge(one, v) == "" for one in inner) for v in value)
    if isinstance(origin, type):
        return isinstance(value, origin)
    if hint in (int, float):
        return isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values that `hint` lists."""
    if get_origin(hint) is Annotated:
        return tuple(choice for one in _alternatives(get_args(hint)[0]) for choice in _choices(one))
    if get_origin(hint) is Literal:
        return get_args(hint)
    return (None,) if hint is types.NoneType else ()


def _words(hint: Any) -> list[str]:
    if choices := _choices(hint):
        return [repr(choice) for choice in choices]
    if get_origin(hint) is Annotated:
        inner, *rules = get_args(hint)
        said = [rule.expected for rule in rules if isinstance(rule, Rule) and rule.expected]
        return said or [word for one in _alternatives(inner) for word in _words(one)]
    if hint is bool:
        return ["True", "False"]
    kind = get_origin(hint) or hint
    if kind is tuple and set(get_args(hint)) == {int} and len(get_args(hint)) == 2:
        return ["a tuple of two numbers"]
    if kind is collections.abc.Callable:
        return ["a function"]
    return [_WORDS.get(kind, f"a {getattr(kind, '__name__', kind)}")]


def _listed(alternatives: Iterable[Any]) -> str:
    words = list(dict.fromkeys(word for one in alternatives for word in _words(one)))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
