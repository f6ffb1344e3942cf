"""``python -m lightning_deepcompile estimate module:function``: whether a step fits, before there is a GPU."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, get_args

import lightning.pytorch as pl

from lightning_deepcompile.compat.fake import fake_tensors
from lightning_deepcompile.estimate.tracing import EstimateError
from lightning_deepcompile.plan.command_line import fail
from lightning_deepcompile.plan.devices import DEVICES
from lightning_deepcompile.trainer.precision import DeepCompilePrecision, PrecisionName
from lightning_deepcompile.trainer.strategy import DeepCompileStrategy

_RETURNS = (
    "a LightningModule with an `example_input_array`, (module, batch), or (module, batch, strategy), of which `batch` "
    "is what `training_step` gets on one rank"
)


def main(arguments: Sequence[str]) -> None:
    """Estimates a step; needs neither ranks, a device, nor memory for the model.

    Ends with status 1 if the step does not fit, and with 2 for what cannot be estimated.

    Args:
        arguments: Command line behind ``estimate``.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lightning_deepcompile estimate",
        description="Predicts on a CPU whether a training step fits, what is moved for it, its memory by use, and its "
        "duration. The exit status is 1 if the step does not fit.",
    )
    parser.add_argument("function", metavar="module:function", help=f"called without arguments; returns {_RETURNS}")
    parser.add_argument("--ranks", type=int, default=8, help="devices, of all replicas together (default: 8)")
    parser.add_argument("--device", default="H100", help=f"one of {', '.join(DEVICES)} (default: H100)")
    parser.add_argument("--device-memory", default="", help="memory of each, such as 80GiB (default: the device's own)")
    parser.add_argument(
        "--precision", choices=get_args(PrecisionName), default="bf16-mixed", help="as of the Trainer (bf16-mixed)"
    )
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), help="ZeRO stage, if the function returns no strategy")
    parser.add_argument("--programs", action="store_true", help="print the programs, too")
    options = parser.parse_args(arguments)
    try:
        with fake_tensors():  # neither the model nor the batch takes memory
            module, batch, strategy = _called(_found(options.function), options.function)
        if strategy is not None and options.stage is not None:
            raise ValueError(f"--stage {options.stage}: {options.function} returns a strategy, which has its own.")
        strategy = strategy or DeepCompileStrategy(options.stage)
        strategy.precision_plugin = DeepCompilePrecision(options.precision)
        estimate = strategy.estimate(
            module, batch, ranks=options.ranks, device=options.device, device_memory=options.device_memory
        )
    except (EstimateError, ValueError, TypeError) as error:
        fail("estimate", error)
    print(estimate)
    if options.programs:
        print("\n\n".join(estimate.programs.values()))
    if not estimate.fits:
        raise SystemExit(1)


def _found(name: str) -> Callable[[], Any]:
    """The function that ``module:function`` names; modules of the working directory are found, too."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"{name!r}: expected module:function, such as train:build for `def build()` in train.py.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"{name!r}: importing {module_name} failed: {error}.") from error
        raise ValueError(
            f"{name!r}: there is no module {error.name!r} in {os.getcwd()} or in Python's path."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = sorted(n for n, value in vars(module).items() if callable(value) and not n.startswith("_"))
        raise ValueError(f"{name!r}: {module_name} has no function {function_name!r}; it has {', '.join(names)}.")
    return function


def _called(function: Callable[[], Any], name: str) -> tuple[pl.LightningModule, Any, DeepCompileStrategy | None]:
    try:
        made = function()
    except Exception as error:  # of a user's code
        raise EstimateError(
            f"{name} failed: {type(error).__name__}: {error}. It runs with tensors that have no memory: it can read no "
            "values of them, and no weights from files (build the model from its configuration)."
        ) from error
    if isinstance(made, pl.LightningModule):
        if made.example_input_array is None:
            raise ValueError(
                f"{name} returned a {type(made).__name__} without an `example_input_array`: set it to a batch of one "
                "rank, or return (module, batch)."
            )
        return made, made.example_input_array, None
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], pl.LightningModule):
        module, batch, *rest = made
        if all(isinstance(one, DeepCompileStrategy) for one in rest):
            return module, batch, rest[0] if rest else None
    raise ValueError(f"{name} returned {_described(made)}: expected {_RETURNS}.")


def _described(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(one).__name__ for one in made)})"
    return "nothing" if made is None else f"a {type(made).__name__}"
