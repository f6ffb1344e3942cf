"""FSDP's arguments: mapped, accepted with one warning, or refused with the way out."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from lightning_deepcompile import CompileConfig, DeepCompilePrecision, DeepCompileStrategy
from lightning_deepcompile.plan.offload import Offloading
from lightning_deepcompile.sharding.wire_dtypes import WireDtypes
from lightning_deepcompile.trainer.activation_checkpointing import checkpoint_activations


@pytest.mark.parametrize(
    ("arguments", "stage"),
    [
        ({}, 3),
        ({"stage": 1}, 1),
        ({"sharding_strategy": "FULL_SHARD"}, 3),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, 2),
        ({"sharding_strategy": "full_shard", "stage": 3}, 3),
        ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 4)}, 3),
        ({"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2}, 2),
    ],
)
def test_stages(arguments: dict[str, Any], stage: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DeepCompileStrategy(**arguments).stage == stage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": 0}, "stage=0"),
        ({"sharding_strategy": "SOME_SHARD"}, "'FULL_SHARD', 'SHARD_GRAD_OP'"),
        ({"sharding_strategy": "HYBRID_SHARD", "stage": 2}, "that strategy is stage 3"),
        ({"sharding_strategy": "FULL_SHARD", "stage": 2}, "that strategy is stage 3"),
        ({"state_dict_type": "half"}, "state_dict_type"),
    ],
)
def test_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeepCompileStrategy(**arguments)


@pytest.mark.parametrize(
    ("arguments", "offload"),
    [
        ({}, Offloading("auto", "auto", "auto")),
        ({"cpu_offload": True}, Offloading("auto", "auto", "auto")),
        ({"cpu_offload": CPUOffload(offload_params=True)}, Offloading("auto", "auto", "auto")),
        ({"cpu_offload": True, "compile": CompileConfig(offload=["states"])}, Offloading(states="all")),
        (
            {"compile": CompileConfig(offload=["activations", "parameters"])},
            Offloading(activations="all", parameters="all"),
        ),
        ({"compile": CompileConfig(offload="none")}, Offloading()),
    ],
)
def test_cpu_offload(arguments: dict[str, Any], offload: Offloading) -> None:
    assert DeepCompileStrategy(**arguments).compile.offloading == offload


def test_cpu_offload_where_nothing_may_be_offloaded() -> None:
    with pytest.raises(ValueError, match=r"cpu_offload=True, compile=CompileConfig\(offload='none'\)\): nothing may"):
        DeepCompileStrategy(cpu_offload=True, compile=CompileConfig(offload="none"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"offload": "some"}, "offload='some'"),
        ({"offload": ["state"]}, "offload=.'state'"),
        ({"host_memory_budget": "much"}, "host_memory_budget='much'"),
    ],
)
def test_offload_settings_that_cannot_be_meant(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompileConfig(**arguments)


def test_what_is_not_needed_is_named_in_one_warning() -> None:
    with pytest.warns(UserWarning) as caught:
        DeepCompileStrategy(
            auto_wrap_policy={nn.Linear},
            limit_all_gathers=True,
            ignored_modules=[nn.Linear(1, 1)],
            cpu_offload=CPUOffload(),
        )
    (warning,) = (str(w.message) for w in caught)
    assert all(name in warning for name in ("auto_wrap_policy", "limit_all_gathers", "ignored_modules"))
    assert "cpu_offload" not in warning and "device_id" not in warning


def test_every_argument_of_fsdp_is_known() -> None:
    """FSDPStrategy's own, and those that it hands on."""
    ours = set(inspect.signature(DeepCompileStrategy).parameters)
    for theirs in (FSDPStrategy, FullyShardedDataParallel):
        assert set(inspect.signature(theirs).parameters) - {"module", "kwargs"} <= ours


def test_a_precision_plugin_of_another_kind() -> None:
    class Own(Precision):
        precision = "own"

    for kind in (TypeError, ValueError):  # FSDP raises the one for plugins and the other for flags
        with pytest.raises(kind, match=r"plugin Own \(precision='own'\) is not supported"):
            DeepCompileStrategy(precision_plugin=Own())


def test_no_shard_says_what_it_becomes() -> None:
    with pytest.warns(UserWarning, match="runs as stage 1"):
        assert DeepCompileStrategy(sharding_strategy="NO_SHARD").stage == 1


def test_mixed_precision_sets_the_dtypes_of_the_wire() -> None:
    plugin = DeepCompileStrategy().precision_plugin
    assert plugin.dtypes == WireDtypes()
    plugin.mixed_precision = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    assert plugin.dtypes == WireDtypes(torch.bfloat16, torch.float32)
    module = nn.BatchNorm1d(2)
    plugin.convert_module(module)
    assert module.running_mean.dtype is torch.bfloat16 and module.weight.dtype is torch.float32


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("32-true", torch.float32), ("bf16-true", torch.bfloat16), ("16-mixed", torch.float16),
     ("bf16-mixed", torch.bfloat16)],
)  # fmt: skip
def test_utilisation_is_computed_for_the_dtype_of_the_arithmetic(precision: Any, dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _plugin_to_compute_dtype(DeepCompilePrecision(precision)) is dtype


def test_what_code_reads_from_an_fsdp_strategy() -> None:
    strategy = DeepCompileStrategy(activation_checkpointing=[nn.Linear])
    assert strategy.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert strategy.cpu_offload == CPUOffload() and strategy.mixed_precision is None
    assert strategy.mixed_precision_config.param_dtype is torch.float32
    assert strategy._checkpointing_policy == {nn.Linear}
    config = MixedPrecision(torch.bfloat16)
    strategy = DeepCompileStrategy(sharding_strategy="SHARD_GRAD_OP", cpu_offload=True, mixed_precision=config)
    assert strategy.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert strategy.cpu_offload == CPUOffload(offload_params=True) and strategy.mixed_precision_config is config
    assert DeepCompileStrategy(device_mesh=(2, 2)).sharding_strategy is ShardingStrategy.HYBRID_SHARD
    assert DeepCompileStrategy(cpu_offload=CPUOffload(True)).cpu_offload == CPUOffload(True)


def layers() -> nn.Module:
    return nn.Sequential(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Sequential(nn.Linear(2, 2))}), nn.ReLU())


@pytest.mark.parametrize(
    "policy", [{nn.Linear}, ModuleWrapPolicy({nn.Linear}), lambda module: isinstance(module, nn.Linear)]
)
def test_checkpointing_policies(policy: Any) -> None:
    module = layers()
    names = list(module.state_dict())
    assert checkpoint_activations(module, policy) == 2
    assert list(module.state_dict()) == names
    x = torch.ones(1, 2, requires_grad=True)
    layer = module[0]["a"]
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_checkpointing_policies_that_cannot_be_meant() -> None:
    with pytest.raises(ValueError, match="You cannot set both"):
        DeepCompileStrategy(activation_checkpointing=nn.Linear, activation_checkpointing_policy={nn.Linear})
    with pytest.raises(ValueError, match="chooses no module of Sequential"):
        checkpoint_activations(layers(), {nn.Conv2d})
    with pytest.raises(ValueError, match=r"'0.b' and '0.b.0' inside of it"):
        checkpoint_activations(layers(), {nn.Linear, nn.Sequential})
