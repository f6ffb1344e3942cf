"""The Lightning strategy: maps Lightning's hooks to the engine, and does nothing more."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_deepcompile import compat
from lightning_deepcompile.checkpoint import Checkpoints, StateDictType, with_default
from lightning_deepcompile.compat.lightning import NoOptimizer, callbacks_of, optimizers_to_device, wrap_optimizer
from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.console import show_messages
from lightning_deepcompile.engine.engine import Engine
from lightning_deepcompile.estimate.estimate import MOST_RANKS, Request, StepEstimate, estimate_step, parse_memory
from lightning_deepcompile.options import checked
from lightning_deepcompile.plan.devices import device_named
from lightning_deepcompile.plan.known_passes import resolve_passes
from lightning_deepcompile.ranks.exchange import raise_together
from lightning_deepcompile.ranks.failures import Failures, shorten
from lightning_deepcompile.ranks.meetings import Where
from lightning_deepcompile.ranks.mesh import MeshArgument, check_mesh
from lightning_deepcompile.sharding.errors import explain_mixing
from lightning_deepcompile.sharding.shards import ReadRows
from lightning_deepcompile.trainer.activation_checkpointing import CheckpointingPolicy, checkpoint_activations
from lightning_deepcompile.trainer.averaging import distribute_states, is_averaged, shard_averages
from lightning_deepcompile.trainer.batch_loop import let_host_run_ahead
from lightning_deepcompile.trainer.checks import check_backward_inputs, check_trainer, may_drop_gradients
from lightning_deepcompile.trainer.evaluation_loops import let_ranks_evaluate_unevenly
from lightning_deepcompile.trainer.fsdp_arguments import (
    ShardingStrategyName,
    check_cpu_offload,
    checkpointing_policy,
    is_hybrid,
    sharding_strategy_of,
    stage_for,
    warn_about_ignored,
)
from lightning_deepcompile.trainer.inspected import InspectedStrategy
from lightning_deepcompile.trainer.precision import DeepCompilePrecision
from lightning_deepcompile.trainer.progress import CompileProgress
from lightning_deepcompile.trainer.reuse import ShardedModule, TrainerSetting
from lightning_deepcompile.user_code.host_calls import HostOptimizer


@checked
class DeepCompileStrategy(InspectedStrategy):
    """Trains an unmodified LightningModule with sharded parameters, gradients and optimizer states (ZeRO).

    The step is captured with ``torch.compile`` and run as a program in which every gather, release and reduction is an
    explicit instruction, executed by a C++ runtime. Use it like FSDP: ``Trainer(strategy="deepcompile", devices=8)``.

    Args:
        stage: What is sharded between uses (ZeRO). 3 (the default): parameters, gradients and optimizer states. 2:
            gradients and optimizer states; parameters are gathered once after each optimizer step and stay whole. 1: as
            2, and gradients of accumulated batches are added up whole and reduced once.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Set by the Trainer.
        precision_plugin: Set by the Trainer from ``precision=``; see `DeepCompilePrecision`.
        process_group_backend: Backend of torch.distributed; by default NCCL for GPUs and gloo for CPUs.
        timeout: How long a rank waits for the others.
        wait_report: The time of a wait after which one line reports every rank's place: its batch, or what else it
            does, and the line of the user's code. Zero: never.
        mixed_precision: Dtypes instead of those that follow from ``precision=``: ``param_dtype`` in which parameters
            are gathered and computed with, ``reduce_dtype`` of gradients on the wire, ``buffer_dtype`` of buffers.
        activation_checkpointing_policy: Classes of modules that keep only their inputs and run again in backward; or
            a function of a module that tells whether it does.
        activation_checkpointing: FSDP's older name for the same: a class or a list of classes.
        sharding_strategy: FSDP's name for the stage: ``"FULL_SHARD"`` is 3, ``"SHARD_GRAD_OP"`` is 2.
            ``"HYBRID_SHARD"`` is 3 with the parameters sharded inside every node, or as `device_mesh` says.
        device_mesh: For hybrid sharding: (number of replicas, ranks that share the parameters), or a DeviceMesh of
            these two dimensions. Ranks next to each other share; gradients are reduced among them, and then averaged
            over the replicas. ``"auto"``: the ranks of a node share; those of several nodes, or all, if one node's have
            no memory for that. It is decided by sizes before the model is sharded, on all ranks alike, and told in one
            line: shards of parameters and gradients, two optimizer states an element (Adam's, in fp32 at least, as the
            optimizer is not known yet), and what is gathered and reduced at a time must fit into three quarters of what
            ``CompileConfig(memory_budget=...)`` allows on the smallest device (CPU: of the available host memory, a
            rank's part). What may leave for host memory is counted, too. None: all ranks share, or those of a node
            under ``"HYBRID_SHARD"``.
        cpu_offload: Of FSDP; not needed, as what does not fit is offloaded by itself (``offload`` of `CompileConfig`).
        auto_wrap_policy: Of FSDP; ignored with a warning, as are the next ones.
        use_orig_params: Of FSDP; ignored.
        backward_prefetch: Of FSDP; ignored.
        forward_prefetch: Of FSDP; ignored.
        limit_all_gathers: Of FSDP; ignored.
        sync_module_states: Of FSDP; ignored.
        param_init_fn: Of FSDP; ignored.
        ignored_modules: Of FSDP; ignored.
        ignored_states: Of FSDP; ignored.
        process_group: Of FSDP; ignored.
        device_id: Of FSDP; ignored.
        state_dict_type: How checkpoints are saved. ``"full"``: one plain file, as of a single device. ``"sharded"``: a
            directory to which every rank writes its shards. Both are loaded, whatever is set here.
        save_distributed_checkpoint: ModelParallelStrategy's name for the same; True means ``"sharded"``.
        async_save: Whether sharded checkpoints are written by a thread while training goes on. A rank needs host memory
            for a copy of its shards.
        compile: Settings of the compiler and of the schedule: a `CompileConfig`, or a dict of its arguments. On the
            command line, ``--trainer.strategy.help=deepcompile --trainer.strategy.compile.help`` explains them.

    Raises:
        ValueError: For an argument of another type, a choice that there is not, arguments that contradict each other,
            and passes that do not exist or do not fit together.
        TypeError: For an argument that there is not; the message names the one that is most like it.
    """

    strategy_name = "deepcompile"
    _checkpoint_io: CheckpointIO | None

    def __init__(
        self,
        stage: Literal[1, 2, 3] | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        wait_report: timedelta = timedelta(seconds=30),
        mixed_precision: MixedPrecision | None = None,
        activation_checkpointing_policy: CheckpointingPolicy | None = None,
        activation_checkpointing: type[nn.Module] | list[type[nn.Module]] | None = None,
        sharding_strategy: ShardingStrategyName | ShardingStrategy | None = None,
        device_mesh: MeshArgument | None = None,
        cpu_offload: bool | CPUOffload | None = None,
        auto_wrap_policy: Any | None = None,
        use_orig_params: bool | None = None,
        backward_prefetch: Any | None = None,
        forward_prefetch: bool | None = None,
        limit_all_gathers: bool | None = None,
        sync_module_states: bool | None = None,
        param_init_fn: Any | None = None,
        ignored_modules: Any | None = None,
        ignored_states: Any | None = None,
        process_group: Any | None = None,
        device_id: Any | None = None,
        state_dict_type: StateDictType = "full",
        save_distributed_checkpoint: bool | None = None,
        async_save: bool = False,
        compile: CompileConfig | dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.stage = stage_for(sharding_strategy, stage)
        self._hybrid = is_hybrid(sharding_strategy)
        # With "auto", this is known when the model is sharded.
        hybrid = self._hybrid if isinstance(device_mesh, str) else self._hybrid or device_mesh is not None
        self.sharding_strategy = sharding_strategy_of(self.stage, hybrid=hybrid)
        check_mesh(device_mesh, hybrid=self._hybrid)
        self._device_mesh, self._wait_report = device_mesh, wait_report
        warn_about_ignored(locals())
        self.mixed_precision = mixed_precision
        self._checkpointing_policy = checkpointing_policy(activation_checkpointing, activation_checkpointing_policy)
        self.cpu_offload = CPUOffload(cpu_offload) if isinstance(cpu_offload, bool) else cpu_offload or CPUOffload()
        config = CompileConfig(**compile) if isinstance(compile, dict) else compile or CompileConfig()
        show_messages(config.log_level)
        check_cpu_offload(config, cpu_offload)
        self.compile = config
        for entry in self.compile.planned:
            resolve_passes(entry["passes"], profiled=entry["step"] > 0)  # before processes start and a model is built
        self._checkpoints = Checkpoints(self, state_dict_type, save_distributed_checkpoint, async_save)
        self._sharded: ShardedModule | None = None
        self._stored: dict[nn.Parameter, ReadRows] = {}
        self._progress = CompileProgress()
        self._failures: Failures | None = None

    # What Lightning sets and reads -----------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> DeepCompilePrecision:
        """The precision plugin."""
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, DeepCompilePrecision) else DeepCompilePrecision.convert(plugin)

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else DeepCompilePrecision.convert(plugin)

    @property
    def mixed_precision_config(self) -> MixedPrecision:
        """The dtypes of parameters, gradients and buffers in steps: `mixed_precision`, or those of the precision."""
        return self.mixed_precision or self.precision_plugin.mixed_precision_config

    @property
    def _lightning_module(self) -> pl.LightningModule | None:
        return self._module

    @_lightning_module.setter
    def _lightning_module(self, module: pl.LightningModule | None) -> None:
        # Lightning hands the module over, and then refuses compiled modules for strategies that it does not know.
        if getattr(module, "_compiler_ctx", None) is not None:
            rank_zero_warn(
                "The model was compiled with `torch.compile`. DeepCompileStrategy compiles the steps itself, with the "
                "distribution in the graph; your compilation is undone."
            )
            assert module is not None
            module = to_uncompiled(module)
        self._module = module

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers; `LightningModule.optimizers` gives their wrappers."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers
        self._lightning_optimizers = [wrap_optimizer(HostOptimizer, o, self) for o in optimizers]

    # Setting up -------------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Sets the device up and joins the process group; a rank that waits for others makes the compiler ready."""
        if self.compile.region_backend == "inductor":
            if self.root_device.type == "cpu" and self.local_rank == 0:
                compat.prepare_cpp_compiler()
            compat.import_inductor()
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """Shards the model (unless it is), compiles its steps lazily, and builds optimizers when fitting."""
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        check_trainer(trainer)
        self._progress = CompileProgress(trainer)
        # Inference tensors cannot enter a compiled graph that also serves training.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        let_ranks_evaluate_unevenly(trainer, self.world_size)
        self._failures = Failures.of_setup()
        self._shard(self.lightning_module)
        self.barrier("sharded")
        if trainer.state.fn == TrainerFn.FITTING:
            let_host_run_ahead(trainer, self.world_size)
            shard_averages(trainer, self.engine.model, self.root_device, self.engine.runtime.memory.host_shard)
            self.setup_optimizers(trainer)
        self.engine.timeline.meetings.watch.after = self._wait_report.total_seconds()
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            optimizers_to_device(self.optimizers, self.root_device)
        self._failures = self.engine.failures

    def _shard(self, module: pl.LightningModule) -> None:
        plugin = self.precision_plugin
        plugin.mixed_precision = self.mixed_precision
        setting = TrainerSetting(
            stage=self.stage,
            config=self.compile.in_folder(module.trainer.default_root_dir),
            precision=plugin.precision,
            mixed_precision=self.mixed_precision,
            checkpointing_policy=self._checkpointing_policy,
            device_mesh=self._device_mesh,
            hybrid=self._hybrid,
            device_type=self.root_device.type,
            world_size=self.world_size,
            per_node=self.num_processes,
            syncs_layers=self._layer_sync is not None,
            timeout=self._timeout,
        )
        sharded = ShardedModule.of(module) or self._sharded  # a module without parameters keeps nothing
        # If one rank cannot continue with it, none does: whether a user moved a module, say, is decided on every rank.
        if not self.reduce_boolean_decision(sharded is not None and sharded.serves(module, setting)):
            if self._sharded is not None and self._sharded.engine.module is not module:
                self._sharded.engine.close()
            sync_layers = None if self._layer_sync is None else self._layer_sync.apply
            sharded = ShardedModule.make(module, setting, plugin, sync_layers, self._stored)
            self._stored = {}  # closes the files
        assert sharded is not None
        for child in module.modules():
            if isinstance(child, Metric):
                child.to(self.root_device)
        plugin.attach(sharded.engine, self.root_device.type)
        if isinstance(self._device_mesh, str):
            hybrid = sharded.engine.model.ranks.replicas > 1
            self.sharding_strategy = sharding_strategy_of(self.stage, hybrid=hybrid)
        self._sharded, self.model = sharded, module

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Builds the optimizers and makes them step on this rank's shards."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if not isinstance(optimizer, NoOptimizer):  # Lightning's, where there is nothing to optimize
                self.engine.attach_optimizer(optimizer)
        assert self.lightning_module is not None
        manual = not self.lightning_module.automatic_optimization
        self.engine.capture.several_backward_passes = manual and len(self.optimizers) > 1

    def model_to_device(self) -> None:
        """Does nothing: sharding moves the model."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Returns a context in which new tensors have the parameters' dtype, on the default device (as a rule the CPU).

        Args:
            empty_init: Make them without memory (on the meta device); each rank then initialises one block at a time,
                by the modules' ``reset_parameters`` or the model's ``_init_weights``, and keeps its shard.
        """
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    @property
    def engine(self) -> Engine:
        """The engine behind the strategy.

        Raises:
            RuntimeError: Before setup.
        """
        if self._sharded is None:
            raise RuntimeError(
                "The strategy is not set up yet: it shards the model when `trainer.fit` (or another entry) runs."
            )
        return self._sharded.engine

    @property
    def engine_of_module(self) -> Engine | None:
        """The engine that the module runs with, also before `setup`; None if it is not sharded."""
        module, sharded = self.lightning_module, self._sharded
        if sharded is None or sharded.engine.module is not module:  # another Trainer may have replaced it
            sharded = None if module is None else ShardedModule.of(module)
        return None if sharded is None else sharded.engine

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickles and copies: its settings, as before `setup`."""
        fresh: dict[str, Any] = {
            "_sharded": None,
            "_stored": {},
            "_progress": CompileProgress(),
            "_failures": None,
            "_optimizers": [],
        }
        return super().__getstate__() | fresh

    # Running ----------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled training step."""
        if may_drop_gradients(self.lightning_module) and not self.engine.steps.mentions("training_step").gradients:
            self.engine.timeline.drop_stale_gradients()
        assert self.lightning_module is not None
        trainer, timeline = self.lightning_module.trainer, self.engine.timeline
        timeline.told_to_stop = trainer.received_sigterm
        timeline.meetings.batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return self._run("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled validation step."""
        return self._run("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled test step."""
        return self._run("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled predict step."""
        return self._run("predict_step", *args, **kwargs)

    def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        assert self._sharded is not None
        log, host_calls = self._sharded.log, self._sharded.host_calls
        appends = self._sharded.appends.deferred(self.engine.steps.mentions(name).only_appended)
        context = {
            "training_step": self.precision_plugin.train_step_context,
            "validation_step": self.precision_plugin.val_step_context,
            "test_step": self.precision_plugin.test_step_context,
            "predict_step": self.precision_plugin.predict_step_context,
        }[name]
        deferred = nullcontext() if name == "predict_step" else log.deferred()
        first, ends = not self.engine.steps.has_run(name), name != "training_step"
        shown = self._progress.shown(self.engine.capture, name, first=first, ends=ends)
        stepping = itertools.chain(self.optimizers, (config.scheduler for config in self.lr_scheduler_configs))
        with context(), deferred, host_calls.outside_graphs(stepping), appends, shown:
            return self.engine.run_step(name, *args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the backward pass; ``.grad`` holds reduced gradients when Lightning calls ``on_after_backward``."""
        module, plugin = self.lightning_module, self.precision_plugin
        assert module is not None
        check_backward_inputs(module, kwargs)
        keeping = compat.keeping_graphs() if kwargs.get("retain_graph") else nullcontext()
        self.pre_backward(closure_loss)
        loss = plugin.pre_backward(closure_loss, module)
        with self._progress.shown(self.engine.capture), keeping:
            self.engine.backward(lambda: plugin.backward(loss, module, optimizer, *args, **kwargs))
        loss = plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Returns a context for batches whose gradients only accumulate."""
        with self.engine.accumulating():
            yield

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Steps the optimizer, on this rank's shards."""
        assert self.lightning_module is not None
        with self.engine.stepping(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    # Ending -----------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Ends this rank's communication, and the ranks that it started, so that none waits for it."""
        super().on_exception(exception)
        self.take_over_started_processes()  # before other ranks learn of the error, and end
        if self._sharded is not None:
            self.engine.tuner.note_memory(exception)
            if self.engine.capture.replays is not None:
                self.engine.capture.replays.note_memory(exception)
        explain_mixing(exception)
        if self._failures is not None:
            why_alone = "" if self._sharded is None else self.engine.timeline.why_alone()
            self._failures.note_cause(exception, why_alone)
        if self._sharded is not None:
            self.engine.abort()
        self.end_started_processes()
        shorten(exception)

    def teardown(self) -> None:
        """Frees what only steps need; the model stays sharded on its device for the next entry point."""
        with self._outside_inference:  # which teardown leaves
            if self.cluster_environment is not None:
                self.cluster_environment.teardown()
            if self._sharded is not None:
                self.engine.release_memory()
            self.precision_plugin.teardown()
            if self.accelerator is not None:
                self.accelerator.teardown()
            self.checkpoint_io.teardown()
            self._checkpoints.finish()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers the strategy's names."""
        from lightning_deepcompile.registry import register_strategies

        register_strategies(strategy_registry)

    # Checkpoints ------------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: checkpoints are loaded into shards, which exist after setup."""
        return True

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Reads and writes full checkpoints."""
        self._checkpoint_io = with_default(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state dict: full on rank 0 and empty on others, or sharded; all ranks must call it."""
        if self._sharded is not None:
            self._sharded.engine.timeline.meet(Where.STATE)
        return self._checkpoints.module_state()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state dict: full on rank 0 and empty on others, or sharded; all ranks must call it."""
        return self._checkpoints.optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Saves a full or sharded checkpoint; all ranks must call it."""
        self._checkpoints.save(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a full or sharded checkpoint, which this strategy, FSDP or a single device saved."""
        checkpoint = self._checkpoints.load(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        model = self._checkpoints.model
        if model is not None and is_averaged(self.lightning_module.trainer):
            distribute_states(checkpoint, model, self.lightning_module)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Copies a checkpoint's state dict into the shards."""
        self._checkpoints.load_module(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Copies a checkpoint's optimizer states into the optimizers."""
        module = self.lightning_module
        assert module is not None
        for callback in callbacks_of(module.trainer):
            if isinstance(callback, BaseFinetuning):
                # It adds the parameter groups of the layers that it thawed before. Lightning has called it already, but
                # gives callbacks their state only now, as checkpoints are loaded after setup.
                BaseFinetuning.on_fit_start(callback, module.trainer, module)
        self._checkpoints.load_optimizers(checkpoint)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a full or sharded checkpoint."""
        self._checkpoints.remove(filepath)

    # Pretrained models ------------------------------------------------------------------------------------------------

    def load_pretrained(self, module: nn.Module, directory: str | os.PathLike[str], *, strict: bool = True) -> None:
        """Gives a model the values of a pretrained folder of safetensors files; all ranks must call it.

        Call it in ``configure_model``, for a model that ``trainer.init_module(empty_init=True)`` built without memory:
        each rank then reads its rows when the model is sharded, and no rank ever holds the whole. A model that has
        memory, or is sharded already, gets its values at once.

        Args:
            module: A model of Transformers, whose names may differ from the folder's as ``from_pretrained`` allows, or
                any module with the folder's names. Add adapters to it afterwards.
            directory: With ``model.safetensors``, or ``model.safetensors.index.json`` and its files.
            strict: Whether missing and unexpected tensors raise. Else a warning names them, and missing ones are
                initialised as the model does it.

        Raises:
            FileNotFoundError: If files are missing; says which.
            ValueError: For damaged files, and for a folder that does not fit the model; names the tensors.
            ImportError: If safetensors is not installed.
        """
        from lightning_deepcompile.checkpoint.load_pretrained import load_pretrained

        engine = self.engine_of_module
        with raise_together(f"Loading the pretrained model {os.fspath(directory)!r}"):
            model = None if engine is None else engine.model
            self._stored |= load_pretrained(module, directory, model, strict=strict)
        if engine is not None:
            engine.parameters_changed()

    def save_pretrained(
        self,
        directory: str | os.PathLike[str],
        module: nn.Module | None = None,
        *,
        max_shard_size: int | str = "5GB",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Saves a model as a folder that its ``from_pretrained`` loads; all ranks must call it.

        Tensors are gathered one after another; rank 0 holds those of one file in host memory. A model with PEFT's
        adapters is not saved itself: the adapters are, as PEFT saves them.

        Args:
            directory: On this machine's file system. An older model there is replaced; other files stay.
            module: The model; by default the only one of the LightningModule that has a ``save_pretrained``.
            max_shard_size: Bytes of a file at most, or a text such as ``"5GB"``.
            dtype: Of floating-point tensors in the files; by default that of the parameters.

        Raises:
            ValueError: If there are several models, or none, and `module` is not given; for a remote path.
            NotADirectoryError: If there is a file in the folder's place.
            RuntimeError: If another rank failed, to write, say; names the error.
            ImportError: If safetensors is not installed.
        """
        from lightning_deepcompile.checkpoint.save_pretrained import find_pretrained, save_pretrained

        assert self.lightning_module is not None
        save_pretrained(
            find_pretrained(self.lightning_module) if module is None else module,
            self.broadcast(directory),
            is_global_zero=self.is_global_zero,
            max_shard_size=max_shard_size,
            dtype=dtype,
        )

    # What users look at -----------------------------------------------------------------------------------------------

    @contextmanager
    def full_parameters(
        self, module: nn.Module | None = None, *, writeback: bool = True
    ) -> Generator[None, None, None]:
        """Returns a context in which the parameters are whole, plain tensors (as under FSDP's ``summon_full_params``).

        All ranks must enter and leave together. Calling a module needs no such context: it gathers for itself. A
        parameter may be replaced by one of another shape in ``setup`` and ``configure_model``.

        Args:
            module: Whose parameters; by default the whole model's, which must then fit into memory.
            writeback: Keep what was written to them, each rank's own rows; otherwise it is dropped.
        """
        with (self.engine_of_module or self.engine).full_parameters(module, writeback=writeback):
            yield

    def grad_norm(self, module: nn.Module | None = None) -> Tensor:
        """Returns the 2-norm of gradients over all ranks, to log in ``on_before_optimizer_step``, say; a collective.

        Args:
            module: Whose parameters' gradients; by default the whole model's.

        Returns:
            A 0-dim tensor, equal on all ranks; the host does not wait for it.
        """
        return self.engine.clipping.total_norm((module or self.engine.module).parameters())

    def estimate(
        self, module: pl.LightningModule, batch: Any, *, ranks: int, device: str = "H100", device_memory: int | str = ""
    ) -> StepEstimate:
        """Predicts, on one process and without a device, what a training step needs and takes; print it for a table.

        Neither the model nor the batch need have memory: build the module on the meta device, or its layers in
        ``configure_model``. It stays as it is. Call it before ``trainer.fit``, in one process.

        Args:
            module: The module.
            batch: What ``training_step`` gets on one rank.
            ranks: Number of devices; with hybrid sharding, of all replicas.
            device: ``"A100"``, ``"H100"``, ``"H200"``, ``"B200"`` or ``"cpu"``.
            device_memory: Memory of each, in bytes or as a text such as ``"80GiB"``; by default the device's own.

        Raises:
            EstimateError: If the step cannot be traced without memory; says why.
            ValueError: For an argument out of range, and a module that cannot be sharded.
        """
        found = device_named(device)
        memory = parse_memory(device_memory) if device_memory != "" else found.memory
        if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MOST_RANKS:
            raise ValueError(f"estimate(ranks={ranks!r}): expected a number of devices from 1 to {MOST_RANKS}.")
        if self._device_mesh is not None and not isinstance(self._device_mesh, tuple | list):
            raise ValueError(
                f"DeepCompileStrategy(device_mesh={self._device_mesh!r}) needs running ranks. Estimate with "
                "device_mesh=(replicas, ranks that share the parameters)."
            )
        plugin = self.precision_plugin
        plugin.mixed_precision = self.mixed_precision

        def prepare(module: pl.LightningModule) -> pl.LightningModule:
            module = cast(pl.LightningModule, plugin.convert_module(module))
            if self._checkpointing_policy is not None:
                checkpoint_activations(module, self._checkpointing_policy)
            return module

        request = Request(
            self.compile,
            self.stage,
            ranks,
            self._device_mesh,
            self._hybrid,
            found,
            memory,
            plugin.dtypes,
            prepare,
            plugin.train_step_context,
        )
        return estimate_step(module, plugin.convert_input(batch), request)


# The engine has done so for the rooms below it; these are imported since.
compat.never_frames("lightning_deepcompile.trainer", "lightning_deepcompile.user_code", "lightning_deepcompile.compat")
