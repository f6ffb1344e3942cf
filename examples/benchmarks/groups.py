"""Starts the worker processes of one system, watches them, and ends them all when one fails or none progresses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed_setup
from jobs import DEEPSPEED, Case, Job

HERE = Path(__file__).resolve().parent
POLL_S, SETTLE_S, EXIT_S, KILL_S = 0.2, 3.0, 15.0, 30.0


class WorkerGroup:
    """The processes of one job.

    Args:
        job: What to run.
        cache: Inductor's cache directory, shared by the ranks as on a user's node.
    """

    def __init__(self, job: Job, cache: Path) -> None:
        self._job, self._folder = job, Path(job.folder)
        self.finished: list[Case] = []
        job.save(self._folder / "job.json")
        self._workers = [self._spawn(rank, env) for rank, env in enumerate(self._environments(cache))]

    def wait(self, stall_s: float, until: float, on_case: Callable[[Case], None]) -> str | None:
        """Waits for the end of all workers; none of them is left when this returns or raises.

        Args:
            stall_s: The longest time without a case begun or finished.
            until: ``time.time()`` at which the group is ended in any case.
            on_case: Called for each case as soon as every rank has left its numbers.

        Returns:
            None if all is well, else what went wrong.
        """
        self._on_case = on_case
        try:
            return self._watch(stall_s, until)
        finally:
            self.kill()
            self._report()

    def kill(self) -> None:
        """Ends every worker with all its children."""
        for worker in self._workers:
            if worker.poll() is None:
                self._signal(worker, signal.SIGKILL)
        for worker in self._workers:
            try:
                worker.wait(KILL_S)
            except subprocess.TimeoutExpired:
                print(f"worker {worker.pid} does not end: what runs next may find its device busy", flush=True)

    def _report(self) -> None:
        ranks = range(self._job.world)
        for case in self._job.cases:
            if case not in self.finished and all(self._record(case, rank).exists() for rank in ranks):
                self.finished.append(case)
                self._on_case(case)

    def records(self, case: Case) -> list[dict[str, Any]]:
        """The numbers of every rank for a finished case."""
        return [json.loads(self._record(case, rank).read_text()) for rank in range(self._job.world)]

    def running(self) -> Case | None:
        """The case that was begun and not finished."""
        return next((case for case, _ in self.begun() if case not in self.finished), None)

    def begun(self) -> list[tuple[Case, float]]:
        """The cases begun so far, each with the seconds since the workers were started."""
        path = self._folder / "started"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(Case.parse(case), float(seconds)) for case, seconds in lines]

    def log_tail(self, lines: int = 150) -> str:
        """The end of the most telling log: of a rank that failed by itself; of all logs if none did."""
        codes = [worker.poll() for worker in self._workers]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, -signal.SIGKILL)]
        stuck = not failed and all(code == -signal.SIGKILL for code in codes)
        logs = {rank: self._log(rank).read_text(errors="replace") for rank in failed or range(len(codes))}
        telling = next((rank for rank, text in logs.items() if "Traceback" in text), next(iter(logs)))
        ranks = list(logs) if stuck else [telling]
        tails = {rank: "\n".join(logs[rank].splitlines()[-(lines // len(ranks)) :]) for rank in ranks}
        return "\n".join(f"rank {rank}, exit code {codes[rank]}:\n{tail}" for rank, tail in tails.items())

    def _watch(self, stall_s: float, until: float) -> str | None:
        seen, since, done_since = -1, time.time(), None
        while any(worker.poll() is None for worker in self._workers):
            now = time.time()
            if any(worker.poll() for worker in self._workers):
                self._settle()
                break
            self._report()
            progress = len(list(self._folder.glob("*.rank*.json"))) + len(self.begun())
            if progress != seen:
                seen, since = progress, now
            if len(self.finished) == len(self._job.cases):
                done_since = done_since or now
                if now - done_since > EXIT_S:
                    return None  # all numbers are in: a worker that hangs in its teardown costs nothing more
            if now - since > stall_s or now > until:
                for worker in self._workers:
                    if worker.poll() is None:
                        os.kill(worker.pid, signal.SIGUSR1)
                time.sleep(1)
                return f"no progress for {now - since:.0f} s" if now - since > stall_s else "out of time"
            time.sleep(POLL_S)
        return "a worker failed" if any(worker.poll() for worker in self._workers) else None

    def _settle(self) -> None:
        """Gives the other ranks a moment to print why they fail as well."""
        end = time.time() + SETTLE_S
        while time.time() < end and any(worker.poll() is None for worker in self._workers):
            time.sleep(POLL_S)

    def _environments(self, cache: Path) -> list[dict[str, str]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        world = str(self._job.world)
        threads = max(1, min(8, (os.cpu_count() or 1) // self._job.world))
        base = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": str(threads)} | os.environ
        base |= {
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": str(self._job.per_node),
        }
        if self._job.system.kind in DEEPSPEED:
            base |= deepspeed_setup.environment(self._job, cache)
        return [base | {"RANK": str(rank)} | node_environment(self._job, rank) for rank in range(self._job.world)]

    def _spawn(self, rank: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(HERE / "worker.py"), str(self._folder / "job.json")]
        with self._log(rank).open("wb") as log:
            # A process group of its own, so that the worker's compile processes end with it; no session of its own, so
            # that whoever ends the driver's session ends the workers too.
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, process_group=0)

    def _record(self, case: Case, rank: int) -> Path:
        return self._folder / f"{case}.rank{rank}.json"

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    @staticmethod
    def _signal(worker: subprocess.Popen[bytes], number: int) -> None:
        try:
            os.killpg(worker.pid, number)
        except ProcessLookupError:
            pass  # it ended by itself in this moment


def node_environment(job: Job, rank: int) -> dict[str, str]:
    """Returns the variables that tell a rank its node; a rank of several nodes sees the devices of its own alone."""
    node, local_rank = divmod(rank, job.per_node)
    place = {"NODE_RANK": str(node), "LOCAL_RANK": str(local_rank)}
    if job.nodes == 1:
        return place
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(job.world)))).split(",")
    devices = visible[node * job.per_node :][: job.per_node]
    # NCCL believes nodes to be hosts, and connects them by sockets.
    sockets = {"NCCL_HOSTID": f"node{node}", "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo")}
    return place | sockets | {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
