"""Traces a training step of many ranks on one CPU process.

Sharding and capture are those of training. Tensors have no memory, regions are counted in place of being compiled, the
runtime runs nothing, and programs return tensors without memory, so that code behind a break of the graph is traced,
too.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from lightning_deepcompile import compat
from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.capture.fallback import Fallbacks
from lightning_deepcompile.capture.lookups import exchange_lookups
from lightning_deepcompile.capture.steps import CompiledSteps
from lightning_deepcompile.compat.fake import FakeTensorMode, fake_tensors, mode_of
from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.estimate.work import CountedRegions
from lightning_deepcompile.program.executable import Executable
from lightning_deepcompile.program.graph import args_of, output_node
from lightning_deepcompile.program.program import Program
from lightning_deepcompile.ranks.order import Agreement
from lightning_deepcompile.ranks.ranks import Ranks
from lightning_deepcompile.sharding.gradients import GradientSession
from lightning_deepcompile.sharding.shards import ShardedModel, shard_module
from lightning_deepcompile.sharding.wire_dtypes import WireDtypes
from lightning_deepcompile.user_code.appends import Appends
from lightning_deepcompile.user_code.host_calls import HostCalls
from lightning_deepcompile.user_code.log import DeferredLog

_NEVER = timedelta(days=1)


class EstimateError(RuntimeError):
    """A step that cannot be traced without memory; says why, and what to do."""


def without_memory(module: pl.LightningModule, batch: Any) -> tuple[pl.LightningModule, Any, FakeTensorMode]:
    """Copies a module and a batch for their sizes.

    Args:
        module: Its tensors may have memory, be on the meta device, or have none already.
        batch: Likewise.

    Returns:
        The copies, and the context in which to compute with them.
    """
    tensors = [*module.parameters(), *module.buffers()]
    mode = next((found for found in map(mode_of, tensors) if found is not None), None) or fake_tensors()

    def fake(tensor: Tensor) -> Tensor:
        if mode_of(tensor) is mode:
            return tensor.detach()
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, requires_grad=False)

    with mode:
        memo: dict[int, Any] = {}
        for tensor in tensors:
            new = fake(tensor)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
            memo[id(tensor)] = new  # the protocol's own numbers
        copied = copy.deepcopy(module, memo)
        return copied, apply_to_collection(batch, Tensor, fake), mode


@dataclass(eq=False, repr=False)
class _TracedCapture(Capture):
    """Compiles no region, and runs no program."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.regions: Any = CountedRegions(self.config.region_backend)

    def _compile(self, frame: Any, kind: Any, gm: fx.GraphModule, inputs: Sequence[Any]) -> compat.BoxedCallable:
        nodes = args_of(output_node(gm.graph))[0]
        results = [node.meta["val"] if isinstance(node, fx.Node) else node for node in nodes]
        super()._compile(frame, kind, gm, inputs)
        self.frames.executables[-1].calls = 1  # which is what is counted of a step

        return _NotRun(results)


class _NotRun:
    """Stands where an `Executable` would; returns tensors like its results.

    Args:
        results: What the program returns: fake tensors, of which those of the compilation are not to be computed with.
    """

    def __init__(self, results: Sequence[Any]) -> None:
        self._boxed_call = True  # AOTAutograd's mark
        self._results = results

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        args.clear()
        return [_fresh(value) if isinstance(value, Tensor) else value for value in self._results]


def _fresh(value: Tensor) -> Tensor:
    sizes, strides = ([*map(int, numbers)] for numbers in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype)


@dataclass(eq=False)
class _CountedReads:
    """Gives code that is not compiled whole parameters without memory, in place of an `Uncompiled`, and counts.

    Args:
        model: The sharded module.
        noticed: Called when such code reads a parameter.

    Attributes:
        blocks: Bytes of every block that was gathered, by name.
        saved: Bytes of the memory that autograd saves of such code.
    """

    model: ShardedModel
    noticed: Callable[[], None]
    blocks: dict[str, int] = field(default_factory=dict)
    saved: dict[StorageWeakRef, int] = field(default_factory=dict)
    is_idle: bool = False
    _whole: dict[Tensor, Tensor] = field(default_factory=dict)
    _kept: list[Tensor] = field(default_factory=list)
    _depth: int = 0

    @property
    def gathered(self) -> int:
        """Bytes of the two largest blocks: the one in use and the one before it stay."""
        return sum(sorted(self.blocks.values())[-2:])

    def read(self, module: nn.Module, parameter: Tensor, *, by_hand: bool = False) -> Tensor:
        """Returns the whole parameter."""
        self.noticed()
        if parameter not in self._whole:
            own = self.model.by_parameter[parameter]
            spec = own.layout.spec
            members = [p for p in self.model.parameters if p.layout.spec.block == spec.block]
            self.blocks[spec.block] = sum(p.info.gathered_bytes for p in members)
            whole = torch.empty(spec.shape, dtype=own.info.dtype, requires_grad=spec.requires_grad)
            self._whole[parameter] = whole
        return self._whole[parameter]

    def check_thread(self, what: str) -> None:
        """Does nothing: nothing is gathered."""

    def call(self, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a module, and counts what autograd saves of it."""
        if self._depth:
            return run(*args, **kwargs)
        self._depth += 1
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
                return run(*args, **kwargs)
        finally:
            self._depth -= 1

    call_outside = call

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage)
        if all(StorageWeakRef(whole.untyped_storage()) != key for whole in self._whole.values()):
            self.saved[key] = storage.nbytes()
            self._kept.append(tensor)
        return tensor


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for what a runtime would do."""


def _no_runtime() -> Any:
    """An object with the parts of ``_C.Runtime`` that sharding and capture call; they do nothing."""
    gradients: dict[int, Tensor] = {}

    def empty(numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    def register(ds_id: int, name: str, shape: list[int], leaf: Tensor, gradient: Tensor | None, *wire: Any) -> None:
        if gradient is not None:
            gradients[ds_id] = gradient

    def free(ids: list[int]) -> None:
        for ds_id in ids:
            gradients[ds_id].untyped_storage().resize_(0)

    return SimpleNamespace(
        serial=0,
        setup=SimpleNamespace(register_param=register, register_graph=_nothing),
        gradients=SimpleNamespace(free=free, replace=_nothing),
        parameters=SimpleNamespace(invalidate=_nothing),
        memory=SimpleNamespace(host_shard=empty, host_of=lambda tensor: tensor),
    )


class TracedStep:
    """The training step of a module that is sharded among ranks, of which this process is the first.

    Args:
        module: Without memory; sharded in place.
        batch: Of one rank, likewise.
        mode: In which they were made.
        ranks: The ranks.
        config: Settings, in which is decided what sizes decide before a model is sharded.
        stage: ZeRO stage.
        dtypes: The dtypes in which parameters and gradients travel.
        around: Gives the context that a training step runs in.
        hosted: Indices of the layouts whose shards live in host memory.
        nothing_moves: As of the `Capture`.

    Attributes:
        model: The sharded module.
        capture: Traces the step.
        reads: Of code that is not compiled.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        batch: Any,
        mode: FakeTensorMode,
        ranks: Ranks,
        config: CompileConfig,
        *,
        stage: int,
        dtypes: WireDtypes,
        around: Callable[[], contextlib.AbstractContextManager[Any]],
        hosted: frozenset[int],
        nothing_moves: bool,
    ) -> None:
        self._module, self._batch, self._mode, self._around = module, batch, mode, around
        runtime = _no_runtime()
        with mode:
            self.model = shard_module(module, runtime, ranks, dtypes=dtypes, hosted=hosted)
            gradients = GradientSession(runtime, self.model, ranks.group, holds_back=config.reduction(stage) != "every")
        self.capture = _TracedCapture(
            config,
            self.model,
            runtime,
            gradients,
            Agreement(dist.HashStore(), 0, 1, _NEVER, "estimate"),
            stage,
            lookups=exchange_lookups(self.model, stage, dtypes.reduce, ranks.group),
            nothing_moves=nothing_moves,
        )
        self.fallbacks = Fallbacks(config.fallback, 0)
        self._steps = CompiledSteps(module, config, self.capture, self.fallbacks)
        self.reads = _CountedReads(self.model, self.fallbacks.noticed)
        self.model.state.path = self.reads  # type: ignore[assignment] # has what compiled modules ask for
        self._log, self._appends = DeferredLog(module), Appends(module)
        if not module.automatic_optimization:
            _replace_manual_calls(module, self.optimizers)
            self.capture.several_backward_passes = True
        self._host_calls = HostCalls(module, after_toggle=_nothing)

    def trace(self) -> list[Program]:
        """Traces the step, as the capture's `tracing` says.

        Returns:
            The programs of a micro-batch, in the order in which they run.

        Raises:
            EstimateError: If the step needs values, which there are none of, or is no step.
        """
        module, capture = self._module, self.capture
        self._steps.forget("training_step")
        module.__dict__["log"] = _nothing  # there is no trainer that would log
        # As Lightning passes them: by position, whatever their names.
        numbered = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        capture.entry.begin_step()
        try:
            with self._tracing(), self._steps.running("training_step") as step:
                loss = step(self._batch, *(0,) * numbered)
        except Exception as error:
            raise EstimateError(
                f"The training step of {type(module).__name__} cannot be traced without values: "
                f"{type(error).__name__}: {error}"
            ) from error
        if loss is None and module.automatic_optimization:
            raise EstimateError(f"The training step of {type(module).__name__} returns no loss, so it skips the batch.")
        return [executable.program for executable in self.executables()]

    def executables(self) -> list[Executable]:
        """Returns the training step's, in the order in which they run."""
        forwards = [e for e in self.capture.frames.executables if e.program.kind == "forward"]
        backwards = [e for e in self.capture.frames.executables if e.program.kind == "backward"]
        return [*forwards, *reversed(backwards)]

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        appended = self._appends.deferred(self._steps.mentions("training_step").only_appended)
        with self._mode, self._around(), self._log.deferred(), self._host_calls.outside_graphs([]), appended:
            yield

    def optimizers(self) -> list[Optimizer]:
        """Returns what the module configures.

        Raises:
            Exception: What ``configure_optimizers`` raises, which may ask for a trainer.
        """
        with self._mode:
            return _optimizers_in(self._module.configure_optimizers())


def _optimizers_in(configured: Any) -> list[Optimizer]:
    """Returns the optimizers of what ``configure_optimizers`` returns in any of its forms."""
    if isinstance(configured, Optimizer):
        return [configured]
    if isinstance(configured, dict):
        return _optimizers_in(configured.get("optimizer"))
    if isinstance(configured, list | tuple):
        return [optimizer for one in configured for optimizer in _optimizers_in(one)]
    return []


class _Stepped:
    """Stands for an optimizer, or its scheduler, that a step calls itself: the optimizer, which does not step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["optimizer"], name)

    @torch.compiler.disable(recursive=False)
    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Calls the closure, if that is what is passed."""
        return closure() if callable(closure) else None

    @torch.compiler.disable
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing."""

    @contextlib.contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Returns a context that does nothing."""
        yield


def _replace_manual_calls(module: pl.LightningModule, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
    """Replaces the methods of a module that need a running Trainer.

    Args:
        module: With manual optimization.
        optimizers: Returns what it configures.
    """
    made: list[_Stepped] = []

    def stepped(*args: Any, **kwargs: Any) -> Any:
        if not made:
            made.extend(map(_Stepped, optimizers()))
        return made[0] if len(made) == 1 else made

    def nothing(*args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    calls = dict.fromkeys(("manual_backward", "clip_gradients", "toggle_optimizer", "untoggle_optimizer"), nothing)
    vars(module).update(calls, optimizers=stepped, lr_schedulers=stepped)
