"""Lets a module outlive its Trainer: the next one uses its shards and compiled steps, or shards it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import lightning.pytorch as pl
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecision

from lightning_deepcompile.checkpoint.refuse_saving import refuse_saving
from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.engine.engine import Engine
from lightning_deepcompile.ranks.mesh import MeshArgument, make_mesh
from lightning_deepcompile.sharding.access import step_states
from lightning_deepcompile.sharding.checks import check_module
from lightning_deepcompile.sharding.shards import ReadRows
from lightning_deepcompile.sharding.wire_dtypes import WireDtypes
from lightning_deepcompile.trainer.activation_checkpointing import (
    CheckpointingPolicy,
    checkpoint_activations,
    keep_activations,
)
from lightning_deepcompile.trainer.auto_mesh import choose_mesh
from lightning_deepcompile.trainer.precision import DeepCompilePrecision
from lightning_deepcompile.user_code.appends import Appends
from lightning_deepcompile.user_code.host_calls import HostCalls
from lightning_deepcompile.user_code.log import DeferredLog


@dataclass(frozen=True)
class TrainerSetting:
    """All that determines how a module is sharded and compiled: a Trainer with the same setting reuses both.

    Args:
        stage: ZeRO stage.
        config: Settings of compiler and schedule, with all paths.
        precision: Lightning's name of it.
        mixed_precision: The strategy's argument.
        checkpointing_policy: The modules that keep only their inputs.
        device_mesh: The strategy's argument.
        hybrid: Whether parameters are sharded inside every node.
        device_type: ``"cpu"`` or ``"cuda"``.
        world_size: Number of ranks.
        per_node: Ranks of a node.
        syncs_layers: Whether the Trainer makes layers such as batch normalization use all ranks' batches.
        timeout: How long ranks wait for each other.
    """

    stage: int
    config: CompileConfig
    precision: str
    mixed_precision: MixedPrecision | None
    checkpointing_policy: CheckpointingPolicy | None
    device_mesh: MeshArgument | None
    hybrid: bool
    device_type: str
    world_size: int
    per_node: int
    syncs_layers: bool
    timeout: timedelta

    def mesh(self, module: nn.Module, dtypes: WireDtypes) -> DeviceMesh:
        """Returns the mesh to train on; a collective of all ranks.

        Args:
            module: The module to shard, by whose sizes ``"auto"`` decides.
            dtypes: The dtypes in which its parameters travel.
        """
        chosen, hybrid = self.device_mesh, self.hybrid
        if isinstance(chosen, str):
            hybrid = False
            chosen = choose_mesh(
                module,
                self.config,
                stage=self.stage,
                dtypes=dtypes,
                device_type=self.device_type,
                world_size=self.world_size,
                per_node=self.per_node,
            )
        return make_mesh(
            chosen, hybrid=hybrid, device_type=self.device_type, world_size=self.world_size, per_node=self.per_node
        )


@dataclass(eq=False)
class ShardedModule:
    """The objects that run a sharded module. The module keeps them, so it works when the Trainer is gone.

    Args:
        setting: The setting it was sharded by.
        engine: Its engine.
        log: Records what its steps log; compiled steps refer to it.
        host_calls: The calls of its steps outside of graphs; compiled steps refer to it.
        appends: Replaces lists that its steps append to; compiled steps refer to it.
    """

    setting: TrainerSetting
    engine: Engine
    log: DeferredLog
    host_calls: HostCalls
    appends: Appends

    @classmethod
    def of(cls, module: nn.Module) -> ShardedModule | None:
        """Returns the objects that run `module`; None if it is not sharded, or parts of it by different Trainers."""
        keepers = [state.keeper for state in step_states(module)]
        return keepers[0] if len(keepers) == 1 else None

    @classmethod
    def make(
        cls,
        module: pl.LightningModule,
        setting: TrainerSetting,
        plugin: DeepCompilePrecision,
        sync_layers: Callable[[Any], Any] | None,
        stored: Mapping[nn.Parameter, ReadRows] | None = None,
    ) -> ShardedModule:
        """Shards `module`, in place; a collective of all ranks.

        Parts that other Trainers have sharded are gathered parameter by parameter and sharded again. If that was all of
        a module, their engine ends; its shards take memory until nobody refers to it.

        Args:
            module: The user's.
            setting: The Trainer's setting.
            plugin: Converts it.
            sync_layers: Replaces layers by those that use all ranks' batches.
            stored: Parameters on the meta device of which each rank reads its rows.
        """
        previous = [state.keeper.engine for state in step_states(module) if state.keeper is not None]
        keep_activations(module)
        if sync_layers is not None:
            module = sync_layers(module)
        module = cast(pl.LightningModule, plugin.convert_module(module))
        if setting.checkpointing_policy is not None:
            checkpoint_activations(module, setting.checkpointing_policy)
        # Before the mesh is chosen: parameters that cannot be sharded may have no sizes.
        check_module(module, {p for e in previous for p in e.model.by_parameter}, world_size=setting.world_size)
        engine = Engine(
            module,
            setting.mesh(module, plugin.dtypes),
            setting.config,
            dtypes=plugin.dtypes,
            stage=setting.stage,
            timeout=setting.timeout,
            previous=previous,
            stored=stored,
        )
        refuse_saving(module)
        for other in previous:
            if other.module is module:
                other.close()
        log, host_calls = DeferredLog(module), HostCalls(module, after_toggle=engine.gradients.follow_requires_grad)
        made = engine.model.state.keeper = cls(setting, engine, log, host_calls, Appends(module))
        return made

    def serves(self, module: nn.Module, setting: TrainerSetting) -> bool:
        """Returns whether a Trainer with `setting` can use this object.

        Args:
            module: The one to run; since it was sharded, a user may have changed it.
            setting: The Trainer's.
        """
        engine = self.engine
        return setting == self.setting and engine.module is module and not engine.ended and engine.model.holds(module)
