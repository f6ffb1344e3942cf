"""Checkpoints that are a directory: every rank writes its shards (torch.distributed.checkpoint), rank 0 the rest.

The keys are those of Lightning's FSDP strategy, ``model.*`` and ``optimizer_{i}.*``. Directories of its FSDP2 strategy
(``state_dict.*``) can be read as well. Any number of ranks can read a checkpoint.
"""

from __future__ import annotations

import contextlib
import enum
import io
import logging
import os
import pickle
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from lightning_deepcompile import compat
from lightning_deepcompile.checkpoint.background import BackgroundSaves, copy_to_host
from lightning_deepcompile.checkpoint.disk_space import bytes_of, no_space, no_space_in
from lightning_deepcompile.checkpoint.file import open_synced
from lightning_deepcompile.checkpoint.location import META, find_kind, local_path
from lightning_deepcompile.checkpoint.module_state import CURRENT_STATE, plain_name
from lightning_deepcompile.checkpoint.remote import clear_abandoned, current_folder, new_folder, point_to
from lightning_deepcompile.checkpoint.staging import clear_leftovers, commit, discard, remove, set_aside, staging_path
from lightning_deepcompile.compat.checkpoint import FsspecReader
from lightning_deepcompile.ranks.exchange import from_first, raise_together
from lightning_deepcompile.ranks.ranks import Ranks
from lightning_deepcompile.sharding.composite import unpacked
from lightning_deepcompile.sharding.layout import rows_of

_log = logging.getLogger(__name__)

_MODEL_KEYS = ("model", "state_dict")
_APART = ("state_dict", "optimizer_states", CURRENT_STATE)  # not written to meta.pt


def save_sharded(
    checkpoint: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    is_global_zero: bool,
    background: BackgroundSaves | None = None,
) -> None:
    """Writes a sharded checkpoint; a collective.

    Args:
        checkpoint: Lightning's checkpoint; ``state_dict`` and ``optimizer_states`` hold DTensors.
        path: A directory that all ranks reach, or a URL. What is there is replaced once the new checkpoint is whole.
        is_global_zero: Whether this is rank 0.
        background: If given, the state is only copied now, and this thread writes the copy.

    Raises:
        OSError: If rank 0 cannot write there, or if there is no room; says how much is needed, and how much is free.
        RuntimeError: If any rank cannot write; on all of them. What was there stays, and what was written goes.
    """
    meta = io.BytesIO()
    with raise_together(f"Saving the checkpoint {os.fspath(path)!r}"):
        if is_global_zero:
            torch.save({k: v for k, v in checkpoint.items() if k not in _APART}, meta)
            if (target := local_path(path)) is not None:
                # Now, not when it is written: a background saver may link to it right away.
                target.parent.mkdir(parents=True, exist_ok=True)
    states = {"model": checkpoint["state_dict"]}
    states |= {CURRENT_STATE: checkpoint[CURRENT_STATE]} if CURRENT_STATE in checkpoint else {}
    states |= {f"optimizer_{i}": state for i, state in enumerate(checkpoint.get("optimizer_states", []))}
    if background is None:
        _write(states, meta.getvalue(), path, is_global_zero, None)
    else:
        group = background.group
        background.write(_write, copy_to_host(states), meta.getvalue(), path, is_global_zero, group)


def _write(
    states: dict[str, Any],
    meta: bytes,
    path: str | os.PathLike[str],
    is_global_zero: bool,
    group: dist.ProcessGroup | None,
) -> None:
    target = local_path(path)
    action = f"Saving the checkpoint {os.fspath(path)!r}"
    # Each save has a new name.
    staged: str | Path = from_first(new_folder(path) if target is None else staging_path(target), group)
    with contextlib.ExitStack() as replaced:
        try:
            with raise_together(action, group):
                if is_global_zero:
                    _make_room(staged, path, replaced)
            try:
                _save(states, staged, group)
            except CheckpointException as error:  # on all ranks
                _log.debug("%s failed", action, exc_info=error)
                failure = None
                if is_global_zero:
                    _discard(staged, path)  # before free space is measured
                    failure = _explain(error, action, bytes_of(states), target)
                raise from_first(failure, group) or RuntimeError(f"{action} failed") from None
            with raise_together(action, group):
                if is_global_zero:
                    try:
                        _finish(staged, path, meta)
                    except OSError as error:
                        _discard(staged, path)
                        if target is None or (full := no_space_in(error)) is None:
                            raise
                        raise no_space(full, action, bytes_of(states), target.parent) from None
                    replaced.close()
        except BaseException:
            if is_global_zero:
                _discard(staged, path)
            raise


def _make_room(staged: str | Path, path: str | os.PathLike[str], replaced: contextlib.ExitStack) -> None:
    if isinstance(staged, Path):
        clear_leftovers(staged.parent)
        staged.mkdir(parents=True)
    elif find_kind(path) == "file":  # in which no folder can be
        replaced.enter_context(set_aside(path))
    else:
        clear_abandoned(path)


def _discard(staged: str | Path, path: str | os.PathLike[str]) -> None:
    try:
        if isinstance(staged, Path):
            discard(staged)
        elif current_folder(path) != staged:  # else it is complete, and what came after has failed
            remove(staged)
    except Exception as error:  # the original error matters more
        _log.warning("The incomplete checkpoint %s could not be removed: %s", os.fspath(staged), error)


def _save(states: dict[str, Any], staged: str | Path, group: dist.ProcessGroup | None) -> None:
    if isinstance(staged, Path):
        dcp.save(states, storage_writer=_Writer(staged), process_group=group)
    else:
        dcp.save(states, checkpoint_id=staged, process_group=group)


def _finish(staged: str | Path, path: str | os.PathLike[str], meta: bytes) -> None:
    """Completes a checkpoint when all ranks have written, and moves it into place."""
    fs, folder = url_to_fs(os.fspath(staged))
    # PyTorch 2.11 leaves the locations out of the metadata that `save` returns.
    metadata = _Reader(staged, weights_only=True).read_metadata()
    if (damage := _find_damage(fs, folder, metadata)) is not None:
        raise OSError(f"{damage}. All ranks must write to one file system.")
    if isinstance(staged, Path) and (target := local_path(path)) is not None:
        with open_synced(staged / META) as file:
            file.write(meta)
        commit(staged, target)
    else:
        fs.pipe_file(posixpath.join(folder, META), meta)
        point_to(path, os.fspath(staged))


def _find_damage(fs: Any, folder: str, metadata: Metadata) -> str | None:
    """Names a file that is missing or truncated, and how."""
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        file = posixpath.join(folder, name)
        size = fs.size(file) if fs.isfile(file) else None
        if size is None or size < end:
            found = "is missing" if size is None else f"is truncated ({size} bytes of {end})"
            return f"its file {name!r} {found}"
    return None


def _explain(error: CheckpointException, action: str, needed: int, target: Path | None) -> Exception:
    """Returns an error of one line for one that contains the tracebacks of all ranks."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    full = next((found for cause, _ in error.failures.values() if (found := no_space_in(cause)) is not None), None)
    if full is not None and target is not None:
        return no_space(full, action, needed, target.parent)
    return RuntimeError(f"{action} failed on rank {rank}: {type(cause).__name__}: {cause}")


class _Writer(dcp.FileSystemWriter):
    """Writes to a local place, and quotes the system if it is full: other ranks get the error pickled."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            if (full := no_space_in(error)) is not None:
                raise OSError(full.errno, full.strerror) from error
            raise


@dataclass
class ShardedCheckpoint:
    """An opened sharded checkpoint: it was checked to be complete, and none of its tensors was read yet.

    Args:
        path: The directory.
        meta: The contents of ``meta.pt``.
        metadata: The contents of ``.metadata``.
        weights_only: As for ``torch.load``.
    """

    path: str | os.PathLike[str]
    meta: dict[str, Any]
    metadata: Metadata
    weights_only: bool | None

    @classmethod
    def open(cls, path: str | os.PathLike[str], weights_only: bool | None) -> ShardedCheckpoint:
        """Reads the small files, and checks that the rest is there; no collective.

        Args:
            path: The directory.
            weights_only: As for ``torch.load``: only False admits pickled objects of any class.

        Raises:
            ValueError: If a file is missing or truncated, or the keys are not those of a Lightning checkpoint.
        """
        path = current_folder(path)
        fs, folder = url_to_fs(os.fspath(path))
        if not fs.isfile(posixpath.join(folder, ".metadata")):
            raise _invalid(path, "it has no file '.metadata'")
        with fs.open(posixpath.join(folder, META), "rb") as file:
            meta = torch.load(file, map_location="cpu", weights_only=weights_only)
        metadata = _Reader(path, weights_only).read_metadata()
        if (damage := _find_damage(fs, folder, metadata)) is not None:
            raise _invalid(path, damage)
        checkpoint = cls(path, meta, metadata, weights_only)
        if checkpoint.model_key is None:
            keys = sorted({key[0] for key in checkpoint._paths().values()})
            raise _invalid(path, f"it holds neither 'model' nor 'state_dict', but {keys}")
        return checkpoint

    def _paths(self) -> dict[str, tuple[Any, ...]]:
        """The place of the value of every flat key, such as ``("optimizer_0", "state", "head.weight", "step")``."""
        return self.metadata.planner_data or {
            key: tuple(key.split(".", 1)) for key in self.metadata.state_dict_metadata
        }

    @property
    def model_key(self) -> str | None:
        """The key of the model; None if there is none."""
        found = {key[0] for key in self._paths().values()}
        return next((key for key in _MODEL_KEYS if key in found), None)

    @property
    def optimizers(self) -> int | None:
        """The number of optimizers with states; None if only the model was saved."""
        count = len({path[0] for path in self._paths().values() if re.fullmatch(r"optimizer_\d+", str(path[0]))})
        return count if count or "lr_schedulers" in self.meta else None

    def load(
        self,
        ranks: Ranks | None,
        is_sharded: Callable[[str, torch.Size], bool],
        owners: Sequence[Mapping[str, int]] = (),
        *,
        with_optimizers: bool,
    ) -> dict[str, Any]:
        """Reads this rank's part into host memory; a collective.

        Args:
            ranks: The ranks that share parameters; None if nothing is sharded.
            is_sharded: Tells by a parameter's or buffer's name and a tensor's shape whether to read this rank's rows
                only.
            owners: For each optimizer, by names of parameters, the shard rank that reads all of their states.
            with_optimizers: Whether to read optimizer states.

        Returns:
            Lightning's checkpoint: `meta`, ``state_dict`` and, if asked, ``optimizer_states``. Tensors are on the CPU;
            those of which only rows were read are DTensors, sharded on dim 0.

        Raises:
            RuntimeError: If any rank cannot read; on all of them.
        """
        optimizers = [f"optimizer_{i}" for i in range(self.optimizers or 0)] if with_optimizers else []
        wanted = {self.model_key, CURRENT_STATE, *optimizers}
        paths = {key: path for key, path in self._paths().items() if path[0] in wanted}
        owner_of = {(f"optimizer_{i}", name): owner for i, each in enumerate(owners) for name, owner in each.items()}
        flat: dict[str, Any] = {}
        for key, path in paths.items():
            stored = self.metadata.state_dict_metadata[key]
            if isinstance(stored, BytesStorageMetadata):
                flat[key] = None  # replaced by an object
                continue
            shape, dtype = stored.size, stored.properties.dtype
            name = str(path[1] if path[0] in (self.model_key, CURRENT_STATE) else path[2])
            owner = owner_of.get((path[0], plain_name(name))) if path[1] == "state" else None
            if owner is not None and (ranks is None or owner != ranks.shard_rank):
                continue
            rows_only = shape.numel() > 0 and len(shape) > 0 and is_sharded(name, shape) and owner is None
            divided = ranks if rows_only and ranks is not None and ranks.shards > 1 else None
            if path[1] == "state" and len(stored.chunks) == 1:  # one rank wrote all of it
                flat[key] = _AsStored.of(shape, dtype, divided)
            elif divided is not None:
                flat[key] = _empty_rows(shape, dtype, divided)
            else:
                flat[key] = torch.empty(shape, dtype=dtype)
        try:
            dcp.load(flat, storage_reader=_Reader(self.path, self.weights_only), planner=_Planner(self.weights_only))
        except CheckpointException as error:
            raise RuntimeError(f"The checkpoint {os.fspath(self.path)!r} could not be read: {error}") from error
        nested: dict[str, Any] = {}
        for key, value in flat.items():
            _insert(nested, paths[key], value.stored if isinstance(value, _AsStored) else value)
        checkpoint = dict(self.meta)
        checkpoint["state_dict"] = nested.get(str(self.model_key), {})
        if CURRENT_STATE in nested:
            checkpoint[CURRENT_STATE] = nested[CURRENT_STATE]
        if with_optimizers and self.optimizers is not None:
            # Without any state (SGD) there is no key for it.
            checkpoint["optimizer_states"] = [{"state": {}, **nested[key]} for key in optimizers]
        return checkpoint


class _AsStored(Tensor):
    """Stands for a state while it is read, and takes it in the form in which it was stored, such as quantised.

    Of a sharded state it takes this rank's rows as plain numbers: blocks of quantisation need not end between rows.
    """

    stored: Tensor
    ranks: Ranks | None

    __torch_function__ = compat.NO_TORCH_FUNCTION  # type: ignore[assignment] # PyTorch says what to assign

    @staticmethod
    def of(shape: torch.Size, dtype: torch.dtype, ranks: Ranks | None) -> _AsStored:
        made: _AsStored = compat.stand_in(_AsStored, shape, dtype, torch.device("cpu"))
        made.ranks = ranks
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # of a Tensor it is a static method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.copy_.default:
            args[0].receive(args[1])
            return args[0]
        raise NotImplementedError(
            f"While a checkpoint is read, {func} cannot be applied to its tensors. This is a bug."
        )

    def receive(self, whole: Tensor) -> None:
        """Takes the state, or this rank's rows of it."""
        self.stored = whole
        if self.ranks is not None:
            self.stored = _empty_rows(self.shape, self.dtype, self.ranks)
            compat.local_of(self.stored).copy_(unpacked(whole)[slice(*_own_rows(self.shape, self.ranks))])


def _invalid(path: str | os.PathLike[str], reason: str) -> ValueError:
    return ValueError(
        f"The path {os.fspath(path)!r} does not point to a valid checkpoint: {reason}. Was it saved by another "
        "program, or copied incompletely?"
    )


def _empty_rows(shape: torch.Size, dtype: torch.dtype, ranks: Ranks) -> DTensor:
    """Returns a DTensor of global `shape`, sharded on dim 0, on the CPU."""
    low, high = _own_rows(shape, ranks)
    rows = torch.empty(high - low, *shape[1:], dtype=dtype, device="meta")
    strides = torch.empty(shape, device="meta").stride()
    # `from_local` would move real memory to the mesh's device.
    sharded = ranks.distribute(rows, shape, strides)
    return cast(DTensor, torch.empty_like(sharded, device="cpu"))


def _own_rows(shape: torch.Size, ranks: Ranks) -> tuple[int, int]:
    return rows_of(shape[0], -(-shape[0] // ranks.shards), ranks.shard_rank)


def _insert(root: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    """Sets ``root[path[0]][path[1]]...``; where a number follows, the container is a list."""
    here: Any = root
    for key, following in zip(path, (*path[1:], None), strict=True):
        fresh = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(here, list):
            here.extend([None] * (key + 1 - len(here)))
            here[key] = fresh if here[key] is None else here[key]
        else:
            here.setdefault(key, fresh)
        here = here[key]


class _Planner(dcp.DefaultLoadPlanner):
    """Reads pickled entries as ``torch.load`` would; DCP itself unpickles anything."""

    def __init__(self, weights_only: bool | None) -> None:
        super().__init__()
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=self._weights_only)


class _Reader(FsspecReader):
    """Reads from local and remote places, and unpickles only DCP's own classes."""

    def __init__(self, path: str | os.PathLike[str], weights_only: bool | None) -> None:
        super().__init__(os.fspath(path))
        self._weights_only = weights_only

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._weights_only is False:
            return super().read_metadata(*args, **kwargs)
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    _ALLOWED = {
        "collections": {"OrderedDict"},
        "pathlib": {"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
        "pathlib._local": {"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
        "torch": {"Size", "device"},
        "torch.serialization": {"_get_layout"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.distributed.checkpoint.metadata": {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
    }

    def find_class(self, module: str, name: str) -> Any:
        if name in self._ALLOWED.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name), torch.dtype)
        ):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickle a member of an enum with it
            return _enum_member
        raise pickle.UnpicklingError(
            f"The file '.metadata' refers to {module}.{name}, which no distributed checkpoint needs. It is not loaded."
        )


def _enum_member(kind: Any, name: str) -> Any:
    if isinstance(kind, enum.EnumType) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"The file '.metadata' asks for {name!r} of {kind!r}, which is no member of an enum.")
