"""Writes this rank's last collectives in the format of PyTorch's flight recorder.

``torchfrtrace`` (``python -m torch.distributed.flight_recorder.fr_trace``) reads one such file of every rank, pairs
their operations, and says which rank did not take part in which. PyTorch's own recorder covers only its process groups.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_deepcompile import compat
from lightning_deepcompile.ranks.ranks import Ranks

_log = logging.getLogger(__name__)

_VERSION = "2.10"  # of the format
_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_NAMES = {"gather": "_all_gather_base", "reduction": "_reduce_scatter_base", "reduction over replicas": "all_reduce"}


History = Mapping[str, Sequence[Mapping[str, Any]]]


def write_flight_record(history: History, ranks: Ranks, communicator: str) -> Path | None:
    """Writes the record next to that of PyTorch's own recorder: ``<prefix>deepcompile_<rank>``.

    Args:
        history: Of ``_C.Runtime.history``.
        ranks: Who takes part.
        communicator: Of the runtime.

    Returns:
        The file; None if the environment names no prefix (``TORCH_FR_DUMP_TEMP_FILE``), or writing fails, which only
        warns: a training that fails does so with its own error.
    """
    prefix = next((os.environ[name] for name in _PREFIXES if os.environ.get(name)), "")
    if not prefix or ranks.world_size == 1:
        return None
    path = Path(f"{prefix}deepcompile_{dist.get_rank()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(flight_record(history, ranks, communicator)))
    except OSError as error:
        _log.warning("The flight record could not be written to %s: %s.", path, error)
        return None
    return path


def flight_record(history: History, ranks: Ranks, communicator: str) -> dict[str, Any]:
    """Returns the record as data.

    Args:
        history: Of ``_C.Runtime.history``.
        ranks: Who takes part.
        communicator: Of the runtime: ``"nccl"`` or ``"process_group"``.

    Returns:
        The dictionary that PyTorch's recorder pickles: ``entries``, oldest first, ``pg_config``, ``pg_status``,
        ``version``. Sizes are bytes, one number for a group of tensors; the names of parameters are in an entry's
        ``frames``.
    """
    backend = compat.library_in_flight_records("nccl" if communicator == "nccl" else "gloo")
    entries: list[dict[str, Any]] = []
    config: dict[str, dict[str, str]] = {}
    status: dict[str, dict[str, Any]] = {}
    for number, (name, operations) in enumerate(history.items()):
        group = ranks.replica_group if name.endswith("replicas") else ranks.shard_group
        members = dist.get_process_group_ranks(group)
        process_group = f"deepcompile {name}"
        config[process_group] = {"name": process_group, "desc": name, "ranks": str(members)}
        known = [one for one in operations if one["kind"] in _NAMES]
        finished = [one["number"] for one in known if one["finished"]]
        status[process_group] = {
            "last_enqueued_collective": known[-1]["number"] if known else -1,
            "last_started_collective": known[-1]["number"] if known else -1,
            "last_completed_collective": max(finished, default=-1),
        }
        for one in known:
            parameters = one["first"] + (f" and {one['others']} more" if one["others"] else "")
            entries.append(
                {
                    "pg_id": number,
                    "process_group": (process_group, name),
                    "collective_seq_id": one["number"],
                    "p2p_seq_id": 0,
                    "op_id": one["number"],
                    "profiling_name": f"{backend}:{_NAMES[one['kind']]}",
                    "time_created_ns": one["created"],
                    "input_sizes": [[one["sent"]]],
                    "output_sizes": [[one["received"]]],
                    "input_dtypes": ["Byte"],
                    "output_dtypes": ["Byte"],
                    "state": "completed" if one["finished"] else "started",
                    "time_discovered_started_ns": one["created"],
                    "time_discovered_completed_ns": one["finished"] or None,
                    "retired": bool(one["finished"]),
                    "timeout_ms": 0,
                    "is_p2p": False,
                    "frames": [{"name": parameters, "filename": one["kind"], "line": 0}],
                }
            )
    entries.sort(key=lambda entry: entry["time_created_ns"])
    for number, entry in enumerate(entries):
        entry["record_id"] = number
    return {"version": _VERSION, "entries": entries, "pg_config": config, "pg_status": status}
