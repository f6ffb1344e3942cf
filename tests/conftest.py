"""Shared fixtures; makes `tests/` importable for spawned ranks and keeps compile caches of a test run together."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Tracing allocates many objects that live long: the default looks for garbage every 700 of them, a seventh of the time.
gc.set_threshold(100_000, 50, 1000)

_TESTS = Path(__file__).resolve().parent
# Tests of one room use models of another's.
sys.path[:0] = [str(folder) for folder in (_TESTS, *sorted({file.parent for file in _TESTS.glob("*/test_*.py")}))]
# A result that aliases an argument is a warning for PyTorch, and an error only under CI=1. Ranks inherit this.
os.environ.setdefault("TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING", "1")
# Tests run beside each other: Inductor's pool of up to 32 processes for each of them would cost more than it saves.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# It compiles and runs a program for each kind of vector instructions, anew in each cache folder.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# OpenMP's threads spin while they wait for work: as many tests run beside each other as there are cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# pytest listens to loggers that do not propagate: to this one PyTorch writes all graphs, and more, if anybody listens.
if "TORCH_TRACE" not in os.environ:
    logging.getLogger("torch.__trace").propagate = True
    logging.getLogger("torch.__trace").handlers.clear()
# Ranks measure copies with tensors of 32 MiB, which glibc would take from the system, page by page, each time.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(33 * 2**20))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**28))


def _take_two_gpus() -> None:
    """Gives each of pytest-xdist's workers two GPUs of its own, where there are that many: tests use no more."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER"), torch.cuda.device_count()
    if worker is None or count < 4:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    pair = 2 * (int(worker.removeprefix("gw")) % (count // 2))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[pair : pair + 2])


_take_two_gpus()  # before anything starts CUDA


@pytest.fixture(autouse=True, scope="module")
def nothing_left_behind() -> Iterator[None]:
    """A Trainer that runs in this process leaves a process group and variables behind: not for the next file."""
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"):
        if name not in before:
            os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def gpus_may_be_shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a test marked `gpu` share GPUs if there are fewer than ranks."""
    from multiprocess import GPU_TEST  # not before the path is set

    if (marker := request.node.get_closest_marker("gpu")) is not None and not marker.args:
        monkeypatch.setenv(GPU_TEST, "1")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class _Failures:
    """Prints the name of a test as soon as it fails: a run that is cut off has no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            message = report.longreprtext.strip().splitlines()[-1:]
            terminal.write_line(" ".join([f"\nFAILED {report.nodeid} ({report.when})", *message]), red=True)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the printing of failures in the process that prints: workers of pytest-xdist report to it."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where there are fewer GPUs than they need (one, if they do not say), and says so.

    So with those marked `extensive`, unless all are wanted. Limits of time are those of a usual machine.
    """
    from multiprocess import SLOWEST  # not before the path is set

    found = torch.cuda.device_count()
    for item in items:
        limit = item.get_closest_marker("timeout")
        usual = item.config.getoption("timeout", None) or item.config.getini("timeout")
        seconds = float(limit.args[0] if limit is not None else usual)
        item.add_marker(pytest.mark.timeout(SLOWEST * seconds), append=False)
        if item.get_closest_marker("extensive") is not None and "TEST_ALL" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="runs with TEST_ALL=1 (make test-all)"))
        if (marker := item.get_closest_marker("gpu")) is None:
            continue
        needed = marker.args[0] if marker.args else 1
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, found {found}"))


def pytest_collection_finish() -> None:
    """Garbage is not looked for in what was imported: as in `multiprocess`."""
    gc.freeze()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Dynamo has compiled nothing before the test, and keeps nothing of it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
