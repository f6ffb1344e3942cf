"""Arguments of Lightning's FSDPStrategy that mean something else here: mapped, or accepted with one warning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed.fsdp import ShardingStrategy

from lightning_deepcompile.compat.fsdp import HYBRID_SHARD_GRAD_OP
from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.options import AnyCase

ShardingStrategyName = Annotated[Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"], AnyCase()]

_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 1, "HYBRID_SHARD": 3, "_HYBRID_SHARD_ZERO2": 2}
_INSTEAD = {
    "auto_wrap_policy": "blocks are found in the model's lists of layers",
    "use_orig_params": "parameters keep their names and shapes",
    "backward_prefetch": "plans place gathers by what a step measured (CompileConfig.schedule)",
    "forward_prefetch": "plans place gathers by what a step measured (CompileConfig.schedule)",
    "limit_all_gathers": "plans place gathers by what a step measured (CompileConfig.schedule)",
    "sync_module_states": "all ranks always start with rank 0's values",
    "param_init_fn": "deferred parameters are initialised by their modules' `reset_parameters` or the model's own way",
    "ignored_modules": "the parameters of all modules are sharded, and trained with the mean gradient of all ranks",
    "ignored_states": "all parameters are sharded, and trained with the mean gradient of all ranks",
    "process_group": "all ranks share the parameters, or those that `device_mesh` says",
    "device_id": "the Trainer says which device is a rank's",
}


def stage_for(sharding_strategy: Any, stage: int | None) -> int:
    """Returns the ZeRO stage that an FSDP sharding strategy amounts to.

    Args:
        sharding_strategy: A name, or a member of ``torch.distributed.fsdp.ShardingStrategy``; None if not given.
        stage: The stage, if it was given.

    Raises:
        ValueError: Where the two contradict each other.
    """
    if sharding_strategy is None:
        return stage or 3
    name = _name(sharding_strategy)
    if stage is not None and stage != _STAGES[name]:
        raise ValueError(
            f"DeepCompileStrategy(stage={stage}, sharding_strategy={name!r}): that strategy is stage {_STAGES[name]}. "
            "Give one of the two."
        )
    if name == "NO_SHARD":
        rank_zero_warn(
            "DeepCompileStrategy(sharding_strategy='NO_SHARD') runs as stage 1: parameters and gradients are whole on "
            "every rank, optimizer states are sharded all the same."
        )
    return _STAGES[name]


def is_hybrid(sharding_strategy: Any) -> bool:
    """Returns whether an FSDP sharding strategy shards among some ranks, and replicates over the others."""
    return "HYBRID" in _name(sharding_strategy)


def sharding_strategy_of(stage: int, *, hybrid: bool) -> ShardingStrategy:
    """Returns FSDP's name for what is sharded, for code that asks a strategy for it.

    Args:
        stage: ZeRO stage.
        hybrid: Whether only some ranks share the parameters.
    """
    if hybrid and stage > 1:
        return ShardingStrategy.HYBRID_SHARD if stage == 3 else HYBRID_SHARD_GRAD_OP
    return {1: ShardingStrategy.NO_SHARD, 2: ShardingStrategy.SHARD_GRAD_OP, 3: ShardingStrategy.FULL_SHARD}[stage]


def checkpointing_policy(classes: Any, policy: Any) -> Any:
    """Returns the policy of activation checkpointing, from the argument of that name or FSDP's older one.

    Args:
        classes: The older one: a class of modules or a list of them; None if not given.
        policy: The policy; None if not given.

    Raises:
        ValueError: If both are given.
    """
    if classes is None:
        return policy
    if policy is not None:
        raise ValueError(
            "You cannot set both `activation_checkpointing` and `activation_checkpointing_policy`. Use the latter."
        )
    return set(classes) if isinstance(classes, list | tuple | set) else {classes}


def _name(sharding_strategy: Any) -> str:
    return str(getattr(sharding_strategy, "name", sharding_strategy)).upper()


def check_cpu_offload(config: CompileConfig, cpu_offload: Any) -> None:
    """Raises where FSDP's argument and the settings contradict each other; else it asks for what is the default.

    Args:
        config: The user's settings.
        cpu_offload: A bool, or ``torch.distributed.fsdp.CPUOffload``; None if not given.

    Raises:
        ValueError: If nothing may be offloaded.
    """
    if getattr(cpu_offload, "offload_params", cpu_offload) and not config.offloading.any:
        raise ValueError(
            f"DeepCompileStrategy(cpu_offload=True, compile=CompileConfig(offload={config.offload!r})): nothing may be "
            "offloaded. Leave one of them out: offload='auto', the default, offloads what does not fit."
        )


def warn_about_ignored(arguments: Mapping[str, Any]) -> None:
    """Warns, once for all, about arguments that change nothing here.

    Args:
        arguments: Values by name, those of other arguments, too; None means that the argument was not given.
    """
    given = [name for name in _INSTEAD if arguments.get(name) is not None]
    if given:
        reasons = "; ".join(f"`{name}`: {_INSTEAD[name]}" for name in given)
        rank_zero_warn(f"DeepCompileStrategy does not need these arguments of FSDP and ignores them. {reasons}.")
