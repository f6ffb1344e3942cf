"""Transformers: maps the tensors of a pretrained folder to those of a model; imported by itself.

Folders keep the names and shapes that a model had when it was published; Transformers renames, merges and splits them.
`plan_reading` and `plan_saving` find out how, without reading a value: conversions run on tensors without memory first.

Seen to work with transformers 5.23.0.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

__all__ = [
    "MergedTensors",
    "PreTrainedModel",
    "ReadingPlan",
    "SavingGroup",
    "has_adapters",
    "never_saved",
    "plan_reading",
    "plan_saving",
    "tied_away",
]

# Buffers that old folders contain, and that models compute now.
_COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
_NUMBERED = re.compile(r"^.*?\.\d+\.")


@dataclass(eq=False)
class MergedTensors:
    """Tensors of a folder that are converted to one or several tensors of a model.

    Args:
        model: The model.
        name: The first of the model's names.
        converter: Transformers' own.
        parts: Pattern and name of each tensor in the folder, in its order.

    Attributes:
        shapes: Of the model's tensors, by name.
        by_rows: Whether the n-th tensor of each pattern becomes the n-th row: a rank then needs to read its rows only.
    """

    model: PreTrainedModel
    name: str
    converter: Any
    parts: list[tuple[str, str]]
    shapes: dict[str, tuple[int, ...]] = field(init=False)
    by_rows: bool = field(init=False)

    def learn(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Finds out which tensors of the model result from tensors with these `shapes`.

        Raises:
            ValueError: If they do not fit together; names them.
        """
        keys = [key for _, key in self.parts]
        try:
            made = self.convert({key: torch.empty(shapes[key], device="meta") for key in keys})
        except Exception as error:  # whatever an operation finds wrong
            raise ValueError(
                f"{len(keys)} tensors of the folder, {keys[0]!r} to {keys[-1]!r}, should become {self.name!r}, "
                f"and do not fit together: {error}"
            ) from error
        self.shapes = {name: tuple(tensor.shape) for name, tensor in made.items()}
        first, *others = self.converter.operations
        stacked = isinstance(first, MergeModulelist) and first.dim == 0
        self.by_rows = stacked and all(isinstance(other, Concatenate) and other.dim > 0 for other in others)

    def keys(self, low: int = 0, high: int | None = None) -> list[str]:
        """The folder's names of the tensors in rows `low` to `high`; of all tensors where `by_rows` is false."""
        patterns: dict[str, list[str]] = {}
        for pattern, key in self.parts:
            patterns.setdefault(pattern, []).append(key)
        return [key for of_pattern in patterns.values() for key in of_pattern[low:high]]

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the model's tensors that result from `tensors`, by the model's names.

        Args:
            tensors: By the folder's names: those of `keys`.
        """
        converter = copy.deepcopy(self.converter)
        for pattern, key in self.parts:
            if key in tensors:
                converter.add_tensor(self.name, key, pattern, tensors[key])
        return _single(converter.convert(self.name, model=self.model, config=self.model.config))


@dataclass(frozen=True)
class ReadingPlan:
    """The tensors of a folder that a model needs, and how they are named.

    Args:
        renamed: The model's name to the folder's, of tensors that are the same.
        merged: Of tensors that are not.
        unexpected: The folder's names of what the model has no place for.
        may_lack: Whether a folder may lack the tensor of a name.
    """

    renamed: dict[str, str]
    merged: list[MergedTensors]
    unexpected: list[str]
    may_lack: Callable[[str], bool]


def plan_reading(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> ReadingPlan:
    """Finds the model's name for every tensor of a folder.

    Args:
        model: Of its own class, not of a subclass that sharding makes.
        shapes: Shapes of the folder's tensors, by name.

    Raises:
        ValueError: For tensors that should be merged and do not fit together.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    expected = model.state_dict(keep_vars=True)
    renamed: dict[str, str] = {}
    merged: dict[str, MergedTensors] = {}
    unexpected = []
    for key in sorted(shapes, key=dot_natural_key):
        prefix = model.base_model_prefix
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:  # saved by the names that it has now
            name, pattern = rename_source_key(key, [], [], prefix, expected)
        if name not in expected:
            unexpected.append(key)
        elif pattern is None:
            renamed[name] = key
        else:
            if name not in merged:
                merged[name] = MergedTensors(model, name, copy.deepcopy(of_pattern[pattern]), [])
            merged[name].parts.append((pattern, key))
    for tensors in merged.values():
        tensors.learn(shapes)
    known = {*(model._keys_to_ignore_on_load_unexpected or ())}
    buffers = [name for name, _ in model.named_buffers()]
    known |= {computed for computed in _COMPUTED if any(_matches([computed], name) for name in buffers)}
    unexpected = [key for key in unexpected if not _matches(known, key)]
    lacking = tuple(model._keys_to_ignore_on_load_missing or ())
    return ReadingPlan(renamed, list(merged.values()), unexpected, lambda name: _matches(lacking, name))


@dataclass(frozen=True)
class SavingGroup:
    """Tensors of a model that are written together.

    Args:
        model: The model; None if one tensor is written as it is, under another name at most.
        names: The model's names.
        tensors: What is written, by the folder's names; without memory.
    """

    model: PreTrainedModel | None
    names: tuple[str, ...]
    tensors: dict[str, Tensor]

    def convert(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors to write for the group.

        Args:
            whole: With their values, by the model's names.
        """
        if self.model is None:
            return dict(zip(self.tensors, whole.values(), strict=True))
        return dict(revert_weight_conversion(self.model, whole))


def plan_saving(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> list[SavingGroup]:
    """Splits a model into groups, as small as possible, that can be saved one after another.

    Args:
        model: Of its own class, not of a subclass that sharding makes.
        tensors: The model's tensors, without memory: each an object of its own.
    """
    saved = dict(revert_weight_conversion(model, dict(tensors)))
    name_of = {id(tensor): name for name, tensor in tensors.items()}
    passed = {name_of[id(tensor)]: key for key, tensor in saved.items() if id(tensor) in name_of}
    groups = [SavingGroup(None, (name,), {key: saved[key]}) for name, key in passed.items()]
    left = [name for name in tensors if name not in passed]
    made = {key: tensor for key, tensor in saved.items() if id(tensor) not in name_of}
    # Most conversions make several tensors of one. If a conversion does not, try a layer, and then the whole model.
    for split in (lambda name: name, _layer_of):
        found = list(_split(model, tensors, left, split))
        if _same({key: tensor for group in found for key, tensor in group.tensors.items()}, made):
            groups += found
            break
    else:
        groups.append(SavingGroup(model, tuple(left), made))
    order = {key: index for index, key in enumerate(saved)}
    return sorted(groups, key=lambda group: min(order[key] for key in group.tensors))


def never_saved(model: PreTrainedModel) -> frozenset[str]:
    """Names of tensors that the model's class leaves out of folders."""
    return frozenset(model._keys_to_ignore_on_save or ())


def tied_away(model: PreTrainedModel) -> frozenset[str]:
    """Names that a folder lacks because the model ties them to others."""
    return frozenset(model.all_tied_weights_keys)


def has_adapters(model: nn.Module) -> bool:
    """Returns whether adapters were added to a model by its own ``add_adapter``."""
    return isinstance(model, PreTrainedModel) and model._hf_peft_config_loaded


def _split(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], names: list[str], key: Callable[[str], str]
) -> Iterator[SavingGroup]:
    together: dict[str, list[str]] = {}
    for name in names:
        together.setdefault(key(name), []).append(name)
    for members in together.values():
        try:
            made = dict(revert_weight_conversion(model, {name: tensors[name] for name in members}))
        except (ValueError, KeyError, RuntimeError):  # a tensor is missing that goes with these
            made = {}
        yield SavingGroup(model, tuple(members), made)


def _same(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return {k: v.shape for k, v in some.items()} == {k: v.shape for k, v in others.items()}


def _layer_of(name: str) -> str:
    found = _NUMBERED.match(name)
    return found.group() if found else ""


def _single(made: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
