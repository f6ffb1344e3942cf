"""Whole parameters for code that is not compiled: gathered block by block, and dropped in the order of reads.

What is gathered and dropped follows from the order in which code reads parameters, never from when memory happens to be
freed, so that ranks that run the same code gather alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_deepcompile import compat
from lightning_deepcompile.program.program import LOCAL_ID
from lightning_deepcompile.sharding.parameter import ShardedParameter

_RESIDENT = 2
"""Blocks that stay whole: the one in use, and the one before it, which a backward pass begins with."""


@dataclass(eq=False)
class WholeBlock:
    """Parameters that are gathered together, each in a dtype, and their whole forms.

    Args:
        parameters: In registration order.
        dtypes: In which they are gathered.
        whole: Each parameter, plain, without history.
        tracked: The same memory, with gradients that go to the shards; made when first read with gradients on.
        versions: PyTorch's counts of writes to both, of those that are known.
    """

    parameters: list[ShardedParameter]
    dtypes: list[torch.dtype]
    whole: dict[ShardedParameter, Tensor] = field(default_factory=dict)
    tracked: dict[ShardedParameter, Tensor] = field(default_factory=dict)
    versions: dict[ShardedParameter, int] = field(default_factory=dict)


class WholeBlocks:
    """Gathers blocks, keeps the last ones, and copies what code writes to them to the shards.

    Args:
        parameters: All sharded parameters.
        stays: Whether parameters stay whole until they change (stages 1 and 2).
        compare: Called with the communication to come: ``"gather"`` or ``"reduce"``, and parameters by local id
            with the dtypes of their gathered forms, or of their gradients. A function that it returns is called
            afterwards.
        written: Called when code wrote to parameters: programs' gathered copies are out of date.
        noticed: Called when code that is not compiled gathers a block for the first time.

    Attributes:
        stored: Whether code reads parameters as they are stored, not as steps compute with them.
        gathered: The number of blocks gathered so far.
        uneven: Called with the number of a block before it is gathered, while ranks gather at their own pace: it
            returns when all ranks gather that block. None: ranks run the same code, and gather alike.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        *,
        stays: bool,
        compare: Callable[[str, Sequence[tuple[int, str]]], Callable[[], None] | None],
        written: Callable[[], None],
        noticed: Callable[[], None],
    ) -> None:
        blocks: dict[str, list[ShardedParameter]] = {}
        for parameter in parameters:
            blocks.setdefault(parameter.layout.spec.block, []).append(parameter)
        self._members = {parameter: members for members in blocks.values() for parameter in members}
        self._stays, self._compare, self._written, self._tell = stays, compare, written, noticed
        self._resident: dict[tuple[ShardedParameter, bool], WholeBlock] = {}  # by their first parameters; oldest first
        self._owners: dict[torch.UntypedStorage, tuple[ShardedParameter, bool]] = {}
        self._held: dict[ShardedParameter, Tensor] = {}  # whole, as stored: code may write to them until the step ends
        self._noticed: set[ShardedParameter] = set()
        self.stored = False
        self.gathered = 0
        self.uneven: Callable[[int], None] | None = None

    def clear(self) -> None:
        """Drops whole parameters; call when parameters may have changed, on all ranks alike."""
        self._resident.clear()
        self._owners.clear()
        self._held.clear()

    def settle(self) -> None:
        """Copies what code wrote to whole parameters to this rank's rows."""
        wrote = self._keep_held(self._held)
        for block in self._resident.values():
            wrote |= self._keep_writes(block)
        if wrote:
            self._written()

    def owner_of(self, tensor: Tensor) -> tuple[ShardedParameter, bool] | None:
        """The parameter of whose whole form `tensor` is a part, and whether as it is stored; None for any other."""
        return self._owners.get(storage) if (storage := compat.storage_of(tensor)) is not None else None

    def _keep_held(self, parameters: Iterable[ShardedParameter]) -> bool:
        held = [parameter for parameter in parameters if parameter in self._held]
        with torch.no_grad():
            for parameter in held:
                # Without a count of the write: graphs under way gather again, as PyTorch's would read the new values.
                parameter.local.data.copy_(parameter.rows(self._held[parameter]))
        return bool(held)

    def hold(self, parameter: ShardedParameter) -> Tensor:
        """Returns the whole parameter in its stored form, for code that may write to it; valid until the step ends."""
        same = not parameter.is_cast
        if parameter not in self._held:
            with compat.outside_transforms():
                self._held[parameter] = self.gather(parameter, stored=not same).whole[parameter]
        if not same:  # the form for computing would not show the writes
            self._evict((self._members[parameter][0], False))
        return self._held[parameter]

    def gather(self, parameter: ShardedParameter, stored: bool) -> WholeBlock:
        """Returns the block of a parameter, whole.

        Args:
            parameter: The parameter.
            stored: Whether in its stored form.
        """
        members = self._members[parameter]
        key = (members[0], stored)
        block = self._resident.pop(key, None)
        if block is None:
            while len(self._resident) >= _RESIDENT and not self._stays:
                self._evict(next(iter(self._resident)))
            if self._keep_held(members):
                self._written()
            if self.uneven is not None:
                self.uneven(_number(members, stored))
            else:
                self._notice(members[0])
            block = self._gather_block(members, stored)
            self.gathered += 1
        self._resident[key] = block  # the newest
        return block

    def take_part(self, number: int) -> None:
        """Gathers a block that another rank needs.

        Args:
            number: The argument of `uneven` on that rank.
        """
        members = next(m for m in self._members.values() if _number(m, False) == number & ~1)
        stored = bool(number & 1)
        with torch.no_grad(), compat.below_autograd():
            for parameter in members:
                dtype = parameter.leaf.dtype if stored else parameter.info.dtype
                if not _is_there(parameter, dtype):
                    _gather(parameter, dtype)

    def _notice(self, first: ShardedParameter) -> None:
        if not self.stored and first not in self._noticed:
            self._noticed.add(first)
            self._tell()

    def _gather_block(self, members: list[ShardedParameter], stored: bool) -> WholeBlock:
        dtypes = [p.leaf.dtype if stored else p.info.dtype for p in members]
        block = WholeBlock(members, dtypes)
        there: dict[ShardedParameter, Tensor] = {}
        absent: list[tuple[ShardedParameter, torch.dtype]] = []
        for parameter, dtype in zip(members, dtypes, strict=True):
            held = self._held.get(parameter)
            if held is not None and held.dtype == dtype:
                there[parameter] = held
            elif _is_there(parameter, dtype):
                there[parameter] = compat.alias(parameter.leaf)
            # At their own pace, other ranks do not know that this one has it.
            if not _is_there(parameter, dtype) and (parameter not in there or self.uneven is not None):
                absent.append((parameter, dtype))
        with self.compared("gather", absent), torch.no_grad(), compat.below_autograd():
            for parameter, dtype in absent:
                whole = _gather(parameter, dtype)
                if parameter not in there:
                    there[parameter] = whole
                    self._owners[whole.untyped_storage()] = (parameter, stored)
        for parameter in members:
            block.whole[parameter] = there[parameter]
            block.versions[parameter] = compat.version_of(there[parameter])
        return block

    @contextlib.contextmanager
    def compared(self, kind: str, parameters: Iterable[tuple[ShardedParameter, torch.dtype]]) -> Iterator[None]:
        """Returns a context for communication that is compared with the other ranks'.

        Args:
            kind: ``"gather"`` or ``"reduce"``.
            parameters: The parameters, with the dtypes that travel.
        """
        behind = None
        if self.uneven is None:
            lines = [(p.ds_id & LOCAL_ID, str(dtype).removeprefix("torch.")) for p, dtype in parameters]
            behind = self._compare(kind, lines)
        yield
        if behind is not None:
            behind()

    def _evict(self, key: tuple[ShardedParameter, bool]) -> None:
        block = self._resident.get(key)
        if block is None:
            return
        if self._keep_writes(block):
            self._written()
        del self._resident[key]
        for whole in block.whole.values():
            self._owners.pop(whole.untyped_storage(), None)

    def _keep_writes(self, block: WholeBlock) -> bool:
        """Keeps in-place writes of a module's own code to its parameters, which PyTorch's counts reveal."""
        wrote = False
        for parameter, whole in block.whole.items():
            tracked = block.tracked.get(parameter)
            version = compat.version_of(whole) + (0 if tracked is None else compat.version_of(tracked))
            if version == block.versions[parameter]:
                continue
            block.versions[parameter] = version
            if parameter in self._held:
                continue
            wrote = True
            with torch.no_grad():
                rows, local = parameter.rows(whole), parameter.local
                # Elements that did not change keep their stored precision.
                local.data.copy_(torch.where(rows == local.to(rows.dtype), local, rows.to(local.dtype)))
        return wrote


def _number(members: Sequence[ShardedParameter], stored: bool) -> int:
    """Number of a block, stored or as steps compute with it; never 0, and the same on all ranks."""
    return (members[0].ds_id & LOCAL_ID) + 1 << 1 | stored


def _is_there(parameter: ShardedParameter, dtype: torch.dtype) -> bool:
    """Returns whether there is nothing to gather, and nothing to release."""
    return parameter.is_whole and dtype == parameter.leaf.dtype


def _gather(parameter: ShardedParameter, dtype: torch.dtype) -> Tensor:
    whole: Tensor = torch.ops.dc.gather(parameter.leaf, parameter.ds_id, parameter.layout.spec.shape, dtype)
    return whole
