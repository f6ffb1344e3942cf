"""Maps old parameters to those that replaced them in sharding: an optimizer may have been built with the old ones.

Sharding gives a module other parameter objects. Holders of old ones find the new ones by identity, for as long as they
keep them; nothing here keeps them alive.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_deepcompile.sharding.parameter import Owner
from lightning_deepcompile.sharding.shards import collect_parameters


class Successors:
    """Maps a module's parameters before sharding to those after it.

    Args:
        module: Before it is sharded.
    """

    def __init__(self, module: nn.Module) -> None:
        first = {parameter: owners[0] for parameter, owners in collect_parameters(module).items()}
        self._owners: MutableMapping[Tensor, Owner] = WeakTensorKeyDictionary(first)
        self._new: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    def settle(self, previous: Iterable[Successors]) -> None:
        """Call when the module is sharded.

        Args:
            previous: Of earlier shardings of it, which are superseded now.
        """
        for old, owner in self._owners.items():
            if (new := owner.module._parameters[owner.name]) is not None and new is not old:
                self._new[old] = new
        self._owners.clear()
        for earlier in previous:
            for old, between in earlier._new.items():
                if (last := self.of(between)) is not None:
                    self._new[old] = last

    def of(self, parameter: Tensor) -> Tensor | None:
        """The replacement of `parameter`; None if it was not replaced."""
        return self._new.get(parameter)
