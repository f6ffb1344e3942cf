"""Facts about a training for the head of its report: model, ranks, device, settings, versions."""

from __future__ import annotations

import math
import platform
import time
from collections import Counter
from dataclasses import fields

import torch
from torch import nn

from lightning_deepcompile import __version__
from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.plan.devices import DEVICES
from lightning_deepcompile.sharding.shards import ShardedModel


def facts_of(
    module: nn.Module, model: ShardedModel, config: CompileConfig, stage: int, device: torch.device
) -> dict[str, str]:
    """Returns the facts, each with its name.

    Args:
        module: The module that is trained.
        model: Its parameters.
        config: Settings; those that differ from the defaults are named.
        stage: ZeRO stage.
        device: Where this rank computes.
    """
    parameters = sum(math.prod(p.layout.spec.shape) for p in model.parameters)
    defaults, ranks = CompileConfig(), model.ranks
    values = {one.name: getattr(config, one.name) for one in fields(CompileConfig)}
    changed = [f"{name}={value!r}" for name, value in values.items() if value != getattr(defaults, name)]
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    count = str(ranks.shards) if ranks.replicas == 1 else f"{ranks.replicas} times {ranks.shards}"
    return {
        "model": f"{type(module).__name__}, {parameters:,} parameters, gathered in {', '.join(_dtypes(model))}",
        "ranks": f"{count}, each with one {named}",
        "settings": ", ".join([f"stage={stage}", *changed]),
        "versions": f"lightning_deepcompile {__version__}, PyTorch {torch.__version__}",
        "written": time.strftime("%Y-%m-%d %H:%M"),
    }


def peak_rate(model: ShardedModel, device: torch.device) -> float | None:
    """Returns the device's floating-point operations a second in the dtype that most parameters are gathered in.

    Returns:
        The rate of matrix products by the device's data sheet; None if the table of devices does not have it.
    """
    dtypes = _dtypes(model)
    if device.type != "cuda" or not dtypes:
        return None
    name = torch.cuda.get_device_name(device)
    return next((one.operations.get(dtypes[0]) for one in DEVICES.values() if one.name in name), None)


def _dtypes(model: ShardedModel) -> list[str]:
    """The dtypes that parameters are gathered in, the one of most elements first."""
    elements = Counter[str]()
    for parameter in model.parameters:
        elements[str(parameter.info.dtype).removeprefix("torch.")] += parameter.layout.shard_numel
    return [name for name, _ in elements.most_common()]
