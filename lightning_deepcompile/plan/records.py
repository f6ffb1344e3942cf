"""Reads dataclasses from JSON: fields must have the types of their annotations; an error names the field."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import json
import reprlib
import types
import typing
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

T = TypeVar("T")

_WORDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false", types.NoneType: "null"}


class RecordError(ValueError):
    """A text that is no JSON, or a field that is missing, unknown or of another type."""


def parse(text: str) -> Any:
    """Parses JSON.

    Raises:
        RecordError: If the text is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"no JSON ({error})") from error


_FIELDS = {"a plan": {"setting", "programs"}, "a profile": {"schedules", "regions", "step_seconds"}}
"""Fields that tell the kinds of file from each other, in all of their versions."""


def kind_of(data: object) -> str:
    """``"a plan"``, ``"a profile"``, or "" for anything else.

    Args:
        data: What `parse` returned.
    """
    names = data.keys() if isinstance(data, dict) else set()
    return next((kind for kind, fields in _FIELDS.items() if fields <= names), "")


def read_record(hint: type[T], data: object, where: str) -> T:
    """Reads a dataclass, or a mapping of them, from parsed JSON.

    Args:
        hint: The annotation: a dataclass whose fields are plain values, dataclasses, tuples and mappings of these.
        data: What `json` returned.
        where: Names it in messages.

    Raises:
        RecordError: Names the field, the value seen, and what may be there.
    """
    return typing.cast(T, _read(hint, data, where))


def _read(hint: Any, data: object, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _read_dataclass(hint, data, where)
    if origin in (Union, types.UnionType):
        return _read_one_of(arguments, data, where)
    if origin is Literal:
        if any(data == choice and type(data) is type(choice) for choice in arguments):
            return data
        raise _wrong(where, data, f"one of {', '.join(map(repr, arguments))}")
    if origin is tuple:
        if not isinstance(data, list):
            raise _wrong(where, data, "a list")
        return tuple(_read(arguments[0], one, f"{where}[{position}]") for position, one in enumerate(data))
    if origin in (dict, collections.abc.Mapping):
        return {name: _read(arguments[1], one, f"{where}.{name}") for name, one in _mapping(data, where).items()}
    if type(data) is hint or (hint is float and type(data) is int):
        return data
    raise _wrong(where, data, _WORDS[hint])


def _read_one_of(alternatives: tuple[Any, ...], data: object, where: str) -> Any:
    for one in alternatives:
        try:
            return _read(one, data, where)
        except RecordError as error:
            wrong = error
            if isinstance(data, dict | list) and one is not types.NoneType:
                raise  # it says what is wrong inside
    if set(alternatives) <= _WORDS.keys():
        raise _wrong(where, data, " or ".join(_WORDS[one] for one in alternatives))
    raise wrong


def _read_dataclass(cls: Any, data: object, where: str) -> Any:
    values, hints = _mapping(data, where), _hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if unknown := values.keys() - fields.keys():
        raise RecordError(f"{where} has no field {min(unknown)!r}")
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise RecordError(f"{where}.{name} is missing")
    return cls(**{name: _read(hints[name], value, f"{where}.{name}") for name, value in values.items()})


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _mapping(data: object, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _wrong(where, data, "a mapping")
    return data


def _wrong(where: str, data: object, expected: str) -> RecordError:
    return RecordError(f"{where} is {reprlib.repr(data)}; expected {expected}")
