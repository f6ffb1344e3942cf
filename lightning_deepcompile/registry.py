"""The names under which Lightning's Trainer and LightningCLI know our strategies, and the errors of other packages."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

_ZERO1 = "ZeRO stage 1 by compiled programs: optimizer states are sharded, gradients reduced once per optimizer step"
_ZERO2 = "ZeRO stage 2 by compiled programs: gradients and optimizer states are sharded"
_ZERO3 = "ZeRO stage 3 by compiled programs: parameters, gradients and optimizer states are sharded"

#: Each name, what `DeepCompileStrategy` is made with under it, and the description Lightning shows. The names are lower
#: case because the Trainer lowers what it is given. The last two are for LightningCLI, which reads a class path without
#: any argument as a name.
STRATEGIES: dict[str, tuple[dict[str, Any], str]] = {
    "deepcompile": ({}, _ZERO3),
    "deepcompile_stage_1": ({"stage": 1}, _ZERO1),
    "deepcompile_stage_2": ({"stage": 2}, _ZERO2),
    "deepcompile_stage_3": ({"stage": 3}, _ZERO3),
    "deepcompilestrategy": ({}, _ZERO3),
    "lightning_deepcompile.deepcompilestrategy": ({}, _ZERO3),
}


class Registry(Protocol):
    """The members of Lightning's ``StrategyRegistry`` that are used here."""

    def register(
        self, name: str, strategy: Any = None, description: str | None = None, override: bool = False, **parameters: Any
    ) -> Any:
        """Maps a name to the function that makes the strategy."""


def register_strategies(registry: Registry) -> None:
    """Adds our strategies to Lightning's registry; doing it again changes nothing.

    Args:
        registry: ``lightning.pytorch.strategies.StrategyRegistry``.
    """
    for name, (init_params, description) in STRATEGIES.items():
        registry.register(name, _make_strategy, description=description, override=True, **init_params)


def register_refusals(registry: Registry, package: str) -> None:
    """Adds our names to a registry whose owner cannot run our strategies: each raises an error that says what can.

    Args:
        registry: The registry of Fabric, or of the package ``pytorch_lightning``.
        package: Whose registry it is, such as ``"lightning.fabric"``.
    """

    def refuse(**init_params: Any) -> NoReturn:
        raise ImportError(_refusal(package))

    for name, (_, description) in STRATEGIES.items():
        registry.register(name, refuse, description=description, override=True)


def _refusal(package: str) -> str:
    if package.endswith("fabric"):
        return (
            "Fabric(strategy='deepcompile'): the deepcompile strategies compile the steps of a LightningModule, and "
            "Fabric has no such steps. Use lightning.pytorch.Trainer(strategy='deepcompile')."
        )
    return (
        f"{package}.Trainer(strategy='deepcompile'): the deepcompile strategies work with the package `lightning` "
        "alone. Write `from lightning.pytorch import Trainer, LightningModule` (`pip install 'lightning>=2.6,<2.7'`)."
    )


def _make_strategy(**init_params: Any) -> Any:
    # Imported when the strategy is asked for: registering happens while Lightning itself is being imported.
    from lightning_deepcompile import DeepCompileStrategy

    return DeepCompileStrategy(**init_params)
