"""The search for the longest sequence that fits, without GPUs: its order, restarted processes, and budgets on CPU."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from multiprocess import run_ranks

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
sys.path.append(str(BENCHMARKS))

BUILT = importlib.util.find_spec("lightning_deepcompile._C") is not None
pytestmark = pytest.mark.skipif(not BUILT, reason="the extension is not built")

FAKE = """
import json, os, sys, time
from pathlib import Path
import torch
sys.path.append({folder!r})
import longest

def run(job, rank):
    length = job.cases[0].seq
    if length > 48 and job.system.name != "offload":
        if rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        time.sleep(600)  # inside of a collective
    if job.system.name == "both":
        raise ValueError("a defect")
    if length > 80:
        return "the budget is too little"
    numbers = dict(ms=[length], host_ms=[1.0], losses=[2.0], first_step_s=1.0, wall_s=2.0, peak_gib=1 + rank)
    folder = Path(job.folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{{job.cases[0]}}.rank{{rank}}.json").write_text(json.dumps(numbers))
    return ""

longest.run = run
sys.exit(longest.main())
"""


def try_all(longest: int, **more: int) -> tuple[list[int], dict[int, bool]]:
    from longest import Search

    search = Search(**({"first": 8, "step": 2, "most": 1000} | more))
    fits: dict[int, bool] = {}
    while (length := search.next(fits)) is not None:
        fits[length] = length <= longest
    return list(fits), fits


def test_lengths_are_doubled_and_bisected() -> None:
    assert try_all(23)[0] == [8, 16, 32, 24, 20, 22]
    assert try_all(3)[0] == [8, 4, 2], "below the first one, too"
    assert try_all(1)[0] == [8, 4, 2]
    assert try_all(5000, most=41)[0] == [8, 16, 32, 40], "no longer than the longest"
    assert try_all(5, first=1)[0] == [2, 4, 8, 6]
    for longest in range(2, 60):
        assert max(length for length, good in try_all(longest)[1].items() if good) == longest // 2 * 2


def test_a_command_line_says_what_it_misses(capsys: pytest.CaptureFixture[str]) -> None:
    import longest

    for options in ([], ["--memory-budget", "much"], ["--memory-budget", "1GiB", "--first", "0"]):
        with pytest.raises(SystemExit):
            longest.parse_arguments(["--out", "unused", *options])
    assert "positive" in capsys.readouterr().err
    arguments = longest.parse_arguments(["--out", "unused", "--memory-budget", "1GiB", "--first", "8", "16"])
    assert arguments.budget == 2**30
    assert longest._job(arguments, "both", 16, 2).system.options["offload"] == "auto"
    assert longest._job(arguments, "both", 16, 2).shape.checkpointing and arguments.settings == list(longest.SETTINGS)
    peers = longest.parse_arguments(["--out", "unused", "--memory-budget", "1GiB", "--settings", "--fsdp2"])
    assert peers.settings == ["fsdp2", "fsdp2-checkpointing"]
    jobs = [longest._job(peers, setting, 16, 2) for setting in peers.settings]
    assert [job.shape.checkpointing for job in jobs] == [False, True]
    assert all(job.system.kind == "fsdp2-pieces" and job.system.options == {"pieces": 8} for job in jobs)


@pytest.mark.slow
@pytest.mark.extensive
def test_a_rank_without_memory_ends_a_trial_alone(tmp_path: Path) -> None:
    """The others wait inside of a collective: all are started again, and go on with the next length."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE.format(folder=str(BENCHMARKS)))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "4"]
    options = ["--out", tmp_path / "out", "--memory-budget", "3GiB", "--first", "32", "--step", "16", "--shape", "tiny"]
    options += ["--settings", "neither", "offload", "both"]
    done = subprocess.run(
        [sys.executable, *launch, script, *options], capture_output=True, text=True, timeout=170, cwd=tmp_path
    )
    kept = json.loads((tmp_path / "out" / "longest.json").read_text())
    tried = [(trial["setting"], trial["seq"], trial["reason"][:20]) for trial in kept["trials"]]
    shortage = "OutOfMemoryError: CU"
    assert tried == [
        ("neither", 32, ""),
        ("neither", 64, shortage),
        ("neither", 48, ""),
        ("offload", 32, ""),
        ("offload", 64, ""),
        ("offload", 128, "the budget is too li"),
        ("offload", 96, "the budget is too li"),
        ("offload", 80, ""),
    ], done.stderr[-3000:]
    assert done.returncode == 0 and kept["broken"] == {"both": "processes ended at 32"}
    rows = (tmp_path / "out" / "longest.md").read_text().splitlines()
    assert rows[2].startswith("| neither | 48 | 48.0 | 1000 | 2.00 | 0.00 | 1.0 | 64: OutOfMemoryError: CUDA out of")
    assert rows[3].startswith("| offload | 80 |") and rows[3].endswith("| 96: the budget is too little |")


@pytest.mark.slow
@pytest.mark.extensive
def test_a_budget_decides_what_fits(tmp_path: Path) -> None:
    options = ["--out", str(tmp_path), "--memory-budget", "800000", "--first", "32", "--step", "32", "--warmup", "6"]
    options += ["--shape", "tiny", "--layers", "1", "--steps", "1", "--settings", "neither"]
    codes = run_ranks(_search, 2, [*options, "--fixed", "region_backend=eager"])
    kept = json.loads((tmp_path / "longest.json").read_text())
    reasons = {trial["seq"]: trial["reason"] for trial in kept["trials"]}
    assert codes == [0, 0]
    assert reasons[32] == "" and "need" in reasons[64], reasons


@pytest.mark.slow
@pytest.mark.extensive
def test_so_it_does_of_fsdp2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    options = ["--out", str(tmp_path), "--memory-budget", "2MiB", "--first", "64", "--step", "64", "--warmup", "1"]
    options += ["--shape", "tiny", "--layers", "1", "--steps", "1", "--settings", "--fsdp2", "--pieces", "4"]
    assert run_ranks(_search, 2, options) == [0, 0]
    kept = json.loads((tmp_path / "longest.json").read_text())
    found = {(trial["setting"], trial["seq"]): trial["reason"] for trial in kept["trials"]}
    for setting in ("fsdp2", "fsdp2-checkpointing"):
        assert found[setting, 64] == "", found
        assert any("GiB was measured" in reason for (name, _), reason in found.items() if name == setting), found
    rows = (tmp_path / "longest.md").read_text().splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| fsdp2", "| fsdp2-checkpointing"]


def _search(options: list[str]) -> int:
    sys.path.append(str(BENCHMARKS))
    import longest

    return longest.main(options)
