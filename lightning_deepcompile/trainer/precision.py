"""Numeric precision: the dtypes of storage, gathers and compute; loss scaling; gradient clipping."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn
from torch.distributed.fsdp import MixedPrecision as MixedPrecisionDtypes
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from lightning_deepcompile import compat
from lightning_deepcompile.compat.lightning import DefaultDtype
from lightning_deepcompile.sharding.wire_dtypes import WireDtypes

if TYPE_CHECKING:
    from lightning_deepcompile.engine.engine import Engine

PrecisionName = Literal["64-true", "32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"]

_CONVERTED = (DoublePrecision, HalfPrecision, MixedPrecision, FSDPPrecision)


class UnsupportedPrecisionError(ValueError, TypeError):
    """The precision does not exist here. FSDP raises the first type for a flag and the second for a plugin."""


class DeepCompilePrecision(FSDPPrecision):
    """Precision for `DeepCompileStrategy`; Lightning's ``precision=`` flag is converted to it.

    Args:
        precision: ``"32-true"``: everything in fp32. ``"64-true"``, ``"bf16-true"``, ``"16-true"``: parameters,
            buffers, inputs, optimizer states and compute in that dtype. ``"bf16-mixed"``, ``"16-mixed"``: fp32
            parameters and optimizer states; gathered, computed and reduced in 16 bits, with autocast for operators that
            want fp32 (as FSDP does it: the parameters travel in 16 bits). ``"16-mixed"`` scales the loss.
        scaler: Scales the loss of ``"16-mixed"``; by default one with PyTorch's defaults.

    Raises:
        ValueError: For any other precision, and for a scaler that does not check every rank's gradients.
    """

    def __init__(self, precision: PrecisionName = "32-true", scaler: ShardedGradScaler | None = None) -> None:
        if precision not in get_args(PrecisionName):
            raise ValueError(
                f"`precision={precision!r}` is not supported by DeepCompileStrategy. Use one of "
                f"{get_args(PrecisionName)}."
            )
        if scaler is not None and precision != "16-mixed":
            raise ValueError(f"`precision={precision!r}` does not scale the loss; remove the scaler {scaler}.")
        if scaler is not None and not isinstance(scaler, ShardedGradScaler):
            raise ValueError(
                f"The scaler {type(scaler).__name__} decides on one rank's gradients; ranks would skip different "
                "steps. Use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler."
            )
        # The base makes a scaler for GPUs, and warns without them; ours is made when the device is known. The base has
        # no fp64.
        known: Any = {"16-mixed": "bf16-mixed", "64-true": "32-true"}.get(precision, precision)
        super().__init__(known)
        self.precision = precision  # type: ignore[assignment] # of which the base knows fewer
        if precision == "64-true":
            self._desired_input_dtype = torch.float64
        self.scaler = scaler
        self._scaler_state: dict[str, Any] = {}
        self.device_type = "cpu"
        self.engine: Engine | None = None
        self.mixed_precision: MixedPrecisionDtypes | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickles and copies: that before `attach`."""
        return self.__dict__ | {"engine": None}

    @classmethod
    def convert(cls, plugin: Precision | None) -> DeepCompilePrecision:
        """Makes the matching plugin from the one that Lightning built for its ``precision=`` flag.

        Raises:
            UnsupportedPrecisionError: If there is none.
        """
        if plugin is None:
            return cls()
        if isinstance(plugin, cls):
            return plugin
        if type(plugin) is Precision or isinstance(plugin, _CONVERTED):
            converted = cls(plugin.precision)  # type: ignore[arg-type]
            scaler = getattr(plugin, "scaler", None)
            if isinstance(scaler, ShardedGradScaler):
                converted.scaler = scaler
            elif scaler is not None:
                converted._scaler_state = scaler.state_dict()
            return converted
        raise UnsupportedPrecisionError(
            f"The precision plugin {type(plugin).__name__} (precision={plugin.precision!r}) is not supported by "
            f"DeepCompileStrategy. Use `Trainer(precision=...)` with one of {get_args(PrecisionName)}."
        )

    def attach(self, engine: Engine, device_type: str) -> None:
        """Connects the plugin with the strategy's engine; called by the strategy.

        Args:
            engine: Has every parameter's gradient shard.
            device_type: Where autocast applies.
        """
        self.engine = engine
        self.device_type = device_type
        if self.precision == "16-mixed" and self.scaler is None:
            self.scaler = ShardedGradScaler(device=device_type)
            if self._scaler_state:
                self.scaler.load_state_dict(self._scaler_state)

    @property
    def dtypes(self) -> WireDtypes:
        """The dtypes in which parameters and gradients travel."""
        if self.mixed_precision is not None:
            return WireDtypes(self.mixed_precision.param_dtype, self.mixed_precision.reduce_dtype)
        return WireDtypes({"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(self.precision))

    @property
    def mixed_precision_config(self) -> MixedPrecisionDtypes:
        """The dtypes in FSDP's form; Lightning's ThroughputMonitor computes the utilisation from them."""
        if self.mixed_precision is not None:
            return self.mixed_precision
        dtype = self.dtypes.gather or self._desired_input_dtype
        return MixedPrecisionDtypes(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Casts the model for ``64-true``, ``bf16-true`` and ``16-true``, and buffers if `mixed_precision` says so.

        Complex buffers (of rotary embeddings, say) stay complex. With ``32-true`` nothing is cast, as on one device.
        """
        buffers = [(m, name, b) for m in module.modules() for name, b in m._buffers.items() if b is not None]
        if self.precision == "64-true":
            module = module.double()
        elif self.precision != "32-true":
            module = super().convert_module(module)
        for owner, name, buffer in buffers:
            if buffer.is_complex():
                owner._buffers[name] = buffer
        if self.mixed_precision is not None and self.mixed_precision.buffer_dtype is not None:
            for child in module.modules():
                for name, present in child._buffers.items():
                    if present is not None and present.is_floating_point():
                        child._buffers[name] = present.to(self.mixed_precision.buffer_dtype)
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        """Returns autocast for mixed precision, else a context in which new tensors have the parameters' dtype."""
        if (dtype := self.dtypes.gather) in (torch.bfloat16, torch.float16):
            return torch.autocast(self.device_type, dtype=dtype)
        return DefaultDtype(self._desired_input_dtype)

    def optimizer_step(  # type: ignore[override] # Lightning's own have narrower arguments, too
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs the closure (forward, backward), clips, and steps; with a scaler, unless a gradient is not finite."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        # Always here, also for fused optimizers that could do it: their own check sees only this rank's gradients.
        with self._engine().local_shards(optimizer):
            compat.unscale(self.scaler, optimizer)
        self._after_closure(model, optimizer)
        if result is None and model.automatic_optimization:
            return result
        stepped = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return stepped

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scales gradients so that their global norm, over all ranks' shards, is at most `clip_val`.

        Args:
            optimizer: Its parameters' gradients are clipped together.
            clip_val: Largest allowed norm.
        """
        self._engine().clipping.norm(self.main_params(optimizer), clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamps every element of the gradients to ``[-clip_val, clip_val]``.

        Args:
            optimizer: Its parameters' gradients are clipped.
            clip_val: Largest allowed absolute value.
        """
        self._engine().clipping.value(self.main_params(optimizer), clip_val)

    def _engine(self) -> Engine:
        if self.engine is None:
            raise RuntimeError("Gradients can be clipped only while the Trainer is fitting with DeepCompileStrategy.")
        return self.engine
