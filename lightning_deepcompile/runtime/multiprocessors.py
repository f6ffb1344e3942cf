"""Divides a GPU's multiprocessors between communication and the matrix products that run beside it.

cuBLAS launches as many thread blocks as a GPU has multiprocessors. While a collective occupies some of these, the last
blocks wait until the others are done: a product takes up to twice as long. Told of fewer multiprocessors cuBLAS divides
its work in another way, which takes a sixth longer and fits beside the collective. (PyTorch's issue 143988 describes
the effect.) That works only if a collective's blocks lie in pairs: cuBLAS launches clusters of blocks, and loses a
multiprocessor whose neighbour is taken. So communicators are told, too (the runtime's ``cta_cluster``).
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch

__all__ = ["PAIR", "Multiprocessors"]

PAIR = 2
"""Thread blocks of a collective that lie side by side, where multiprocessors are divided."""


class Multiprocessors:
    """Tells cuBLAS how many multiprocessors it may count on; one per engine.

    Args:
        device: A CUDA device.
        communication: How many a collective may occupy.
        runtime: ``_C.Runtime``, which knows whether a collective may be running.

    Raises:
        ValueError: If that leaves less than half of the device's to compute.
        RuntimeError: If PyTorch's cuBLAS cannot be told.
    """

    def __init__(self, device: torch.device, communication: int, runtime: Any) -> None:
        total = torch.cuda.get_device_properties(device).multi_processor_count
        if 2 * communication > total:
            raise ValueError(
                f"CompileConfig(communication_sms={communication}): {device} has {total} multiprocessors, and at least "
                "half of them must be left to compute. NCCL takes 16 to 32 by itself."
            )
        self.compute = total - communication
        self._runtime = weakref.ref(runtime)  # programs, which know this object, outlive it
        self._divided = False
        self._set, self._get = _functions()

    def divide(self) -> None:
        """Call before compute that is queued on this thread's current stream."""
        runtime = self._runtime()
        self._count_on_part(runtime is not None and runtime.communicates())

    def end(self) -> None:
        """Call when a program has queued all of its compute: what follows may count on all multiprocessors."""
        self._count_on_part(False)

    def current(self) -> int:
        """What cuBLAS counts on, on this thread's current stream; 0: all there are."""
        count = ctypes.c_int()
        _check(self._get(torch.cuda.current_blas_handle(), ctypes.byref(count)), "cublasGetSmCountTarget")
        return count.value

    # A handle belongs to a thread, and so does a program's run, which ends as it began: one memory will do for all.
    def _count_on_part(self, part: bool) -> None:
        if part is not self._divided:
            count = self.compute if part else 0
            _check(self._set(torch.cuda.current_blas_handle(), count), "cublasSetSmCountTarget")
            self._divided = part


def _functions() -> tuple[Any, Any]:
    torch.cuda.current_blas_handle()  # loads the library
    try:
        library = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}")  # the one that is loaded
        setter, getter = library.cublasSetSmCountTarget, library.cublasGetSmCountTarget
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            f"CompileConfig(communication_sms=...): this cuBLAS cannot be told of multiprocessors ({error}). Use 0."
        ) from error
    setter.argtypes = [ctypes.c_void_p, ctypes.c_int]
    getter.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return setter, getter


def _check(status: int, function: str) -> None:
    if status != 0:
        raise RuntimeError(f"{function} failed with cuBLAS' status {status}.")
