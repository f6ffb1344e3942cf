"""Initialises PEFT adapters that were added to a model without memory: PEFT then leaves them without values.

The modules of an adapter do not know their initial values (an update of zero): the layer around them does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T")


@torch.no_grad()
def materialize_adapters(root: nn.Module, stored: Mapping[nn.Parameter, T]) -> dict[nn.Parameter, T]:
    """Gives adapters on the meta device memory, on the CPU, and initial values; they are small.

    Args:
        root: The model; only those of PEFT are changed.
        stored: Values attached to parameters of the model.

    Returns:
        Parameters that are PEFT's copies of some in `stored` (``modules_to_save``), and their attached values.

    Raises:
        ValueError: For adapters whose initial values follow from the model's, and those of other kinds than LoRA; says
            what to do.
    """
    copies: dict[nn.Parameter, T] = {}
    configs: dict[str, Any] = {}  # of the models around: a nested model has its own
    for path, module in root.named_modules():
        configs |= _configs_of(module)
        original, kept = getattr(module, "original_module", None), getattr(module, "modules_to_save", None)
        if isinstance(original, nn.Module) and isinstance(kept, nn.ModuleDict):
            own = dict(original.named_parameters())
            for copy in kept.values():
                copies |= {p: stored[own[name]] for name, p in copy.named_parameters() if own[name] in stored}
        elif hasattr(module, "adapter_layer_names"):
            for name in module.adapter_layer_names:
                _materialize(module, f"{path}.{name}", getattr(module, name, None), configs)
    return copies


def _configs_of(module: nn.Module) -> dict[str, Any]:
    found = vars(module).get("peft_config")
    return dict(found) if isinstance(found, dict) else {}


def _materialize(layer: Any, path: str, adapters: Any, configs: Mapping[str, Any]) -> None:
    if not isinstance(adapters, nn.ModuleDict | nn.ParameterDict):
        return
    of_adapter: Any = adapters
    for name, adapter in of_adapter.items():
        tensors = [adapter] if isinstance(adapter, nn.Parameter) else [*adapter.parameters()]
        if not any(tensor.is_meta for tensor in tensors):
            continue
        start = getattr(configs.get(name), "init_lora_weights", None)
        if not hasattr(layer, "reset_lora_parameters") or start not in (True, "gaussian") or _reads_model(layer, name):
            raise ValueError(
                f"The adapter {name!r} of {path!r} was added to a model without memory (`empty_init=True`), and its "
                "initial values may follow from the model's. Use LoRA with `init_lora_weights=True` or 'gaussian', and "
                "without DoRA; or build the model with memory."
            )
        if isinstance(adapter, nn.Parameter):
            of_adapter[name] = nn.Parameter(torch.empty_like(adapter, device="cpu"), adapter.requires_grad)
        else:
            adapter.to_empty(device=torch.device("cpu"))
        if not any(p.is_meta for n in layer.adapter_layer_names for p in _parameters_of(layer, n, name)):
            layer.reset_lora_parameters(name, start)


def _reads_model(layer: Any, adapter: str) -> bool:
    return adapter in getattr(layer, "lora_variant", {}) or adapter in getattr(layer, "lora_magnitude_vector", {})


def _parameters_of(layer: Any, name: str, adapter: str) -> list[nn.Parameter]:
    adapters = getattr(layer, name, None)
    if not isinstance(adapters, nn.ModuleDict | nn.ParameterDict) or adapter not in adapters:
        return []
    found = adapters[adapter]
    return [found] if isinstance(found, nn.Parameter) else [*found.parameters()]
