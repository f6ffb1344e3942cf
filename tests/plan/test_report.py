"""`python -m lightning_deepcompile`: it matters most where the installation is broken."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_simulate import SLOT, compute, gather, profile, reduce, release, schedule, wait

from lightning_deepcompile import __main__ as report
from lightning_deepcompile.plan.costs import Resident
from lightning_deepcompile.plan.offload import StatePlaces
from lightning_deepcompile.plan.plan_file import Setting, write_plan
from lightning_deepcompile.plan.tracing import Tracing

COMMANDS_ON_LINKS = ("simulate", "report")


def _printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["lightning_deepcompile", *arguments])
    report.main()
    return capsys.readouterr().out


def test_json_holds_every_section(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    sections = json.loads(_printed(monkeypatch, capsys, "--json"))
    assert sections["versions"]["torch"]
    assert sections["extension"]["mode"] in ("cpu", "cuda")
    assert sections["communicators"]["process_group"] == "yes"
    assert sections["environment"]["NCCL_DEBUG"] == "WARN"


def test_a_missing_extension_is_reported_with_the_command_that_builds_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lightning_deepcompile._C", None)
    printed = _printed(monkeypatch, capsys)
    missing = printed.partition("\nmissing\n")[2]
    assert "C++ runtime does not load" in missing
    assert "setup.py build_ext --inplace" in missing or "pip install" in missing
    assert "no: the extension is not usable" in printed


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ({"url": "file:///home/me/my%20folder", "dir_info": {}}, "'/home/me/my folder'"),
        ({"url": "https://a.b/c.git", "vcs_info": {"vcs": "git", "commit_id": "12ab"}}, "git+https://a.b/c.git@12ab"),
        ({"url": "file:///wheels/x.whl", "archive_info": {}}, "/path/to/the/source/of/lightning_deepcompile"),
        (None, "/path/to/the/source/of/lightning_deepcompile"),
    ],
)
def test_what_builds_an_installed_package_again_names_where_it_came_from(
    address: dict[str, object] | None, source: str, tmp_path: Path
) -> None:
    package, info = tmp_path / "lightning_deepcompile", tmp_path / "lightning_deepcompile-0.1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(Path(report.__file__).with_name("installation.py"), package)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-deepcompile\nVersion: 0.1.0\n")
    if address is not None:
        (info / "direct_url.json").write_text(json.dumps(address))
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from lightning_deepcompile.installation import rebuild_command as command; print(command())"
    )
    done = subprocess.run([sys.executable, "-S", "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith(f" --force-reinstall {source}")


def test_a_missing_torch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    sections = report.collect()
    assert 'pip install "torch' in sections["missing"][0]
    assert report.render(sections)


def test_what_may_go_wrong_is_said_before_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = SimpleNamespace(device_count=lambda: 3, can_device_access_peer=lambda a, b: (a, b) != (1, 2))
    stand_in = SimpleNamespace(cuda=gpus, uint8=None, empty=lambda *_, **__: None)
    devices, backends = {f"cuda:{index}": "GPU" for index in range(3)}, {"nccl": "2.27.5"}
    monkeypatch.setattr(report.resource, "getrlimit", lambda what: (report.resource.RLIM_INFINITY,) * 2)
    monkeypatch.setattr(report.os, "sched_getaffinity", lambda process: range(6))
    monkeypatch.setattr(report.os, "statvfs", lambda path: SimpleNamespace(f_bavail=2**20, f_frsize=4096))
    peers, nccl = report._risks(stand_in, devices, backends)
    assert "1 of 3 pairs of GPUs have no peer access (cuda:1 and cuda:2 first)" in peers
    assert "need 2.28 or newer" in nccl

    def out_of_memory(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore")

    stand_in.empty, gpus.can_device_access_peer = out_of_memory, lambda a, b: True
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setattr(report.resource, "getrlimit", lambda what: (1024, 1024))
    monkeypatch.setattr(report.os, "sched_getaffinity", lambda process: range(2))
    monkeypatch.setattr(report.os, "statvfs", lambda path: SimpleNamespace(f_bavail=64, f_frsize=2**20))
    said = "\n".join(report._risks(stand_in, devices, {"nccl": "2.28.3"}))
    for part in ("may use 2 cores, for 3 GPUs", "`ulimit -u` is 1024", "64 MiB free", "NCCL_P2P_DISABLE is set"):
        assert part in said, said
    assert "cannot be pinned (CUDA error: out of memory)" in said and "2.28 or" not in said
    assert report._risks(None, {"cpu": "2 cores"}, {}) == report._thread_risks({}) + report._host_memory_risks()


def test_gpus_that_a_cpu_build_of_pytorch_does_not_see_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "_GPUS", tmp_path)
    for cuda, gpus, told in (("no", 0, False), ("no", 1, True), ("13.0", 1, False)):
        for number in range(gpus):
            (tmp_path / f"0000:0{number}").touch()
        said = report._risks(None, {"cpu": "2 cores", "torch's CUDA": cuda}, {})
        assert any("CPU build, which does not see them" in one for one in said) == told


@pytest.mark.parametrize(
    ("build", "gpus", "said"),
    [
        ({"state": "not usable"}, 1, "no: the extension is not usable"),
        ({"state": "loaded", "mode": "cpu", "reason": "missing: nccl.h"}, 1, "built without NCCL (missing: nccl.h)"),
        ({"state": "loaded", "mode": "cuda", "nccl found": "none"}, 1, "no: libnccl.so.2 is not found"),
        ({"state": "loaded", "mode": "cuda", "nccl found": "2.28.9"}, 0, "no: no CUDA device"),
        ({"state": "loaded", "mode": "cuda", "nccl found": "2.28.9"}, 1, "yes"),
    ],
    ids=["no extension", "CPU build", "no NCCL", "no GPU", "all there"],
)
def test_what_keeps_nccl_from_use_is_one_line(build: dict[str, str], gpus: int, said: str) -> None:
    found = report._communicators(build, {f"cuda:{index}": "H100" for index in range(gpus)}, {"nccl": "2.28.9"})
    assert said in found["nccl"] and "\n" not in found["nccl"]


def test_switched_off_autoload_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert any("TORCH_DEVICE_BACKEND_AUTOLOAD" in sentence for sentence in report.collect()["missing"])


def test_a_profile_is_planned_for_other_ranks_links_and_budgets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    parts = [(gather(k), wait(k), compute(k, k), release(k)) for k in range(3)]
    step = [schedule(kind, *(i for part in parts for i in part)) for kind in ("forward", "backward")]
    path = tmp_path / "profile.json"
    path.write_text(profile(step).to_json())
    plain = _printed(monkeypatch, capsys, "simulate", str(path), "--passes", "zero3,prefetch")
    assert "2 ranks" in plain and "zero3 -> prefetch  12000.0 ms" in plain
    planned = _printed(monkeypatch, capsys, "simulate", str(path))
    assert "parameters kept for backward: 0 become" in planned and "needs at least" in planned
    (idle,) = (line for line in planned.splitlines() if line.startswith("  changed nothing: "))
    assert "offload_optimizer" in idle and planned.count("offload_optimizer") == 1 and "unshard" not in idle
    tight = _printed(monkeypatch, capsys, "simulate", str(path), "--budget", "1566")
    assert "kept for backward" not in tight
    wide = _printed(monkeypatch, capsys, "simulate", str(path), "--world", "64", "--bandwidth", "1000")
    assert "64 ranks" in wide and "1000.00 GB/s" in wide and "6000.0 ms" in wide
    roomy = _printed(monkeypatch, capsys, "simulate", str(path), "--offload-activations", "auto")
    assert "offload_activation" in roomy and "activations in host memory" not in roomy
    path.write_text(profile([*step, schedule("backward", reduce(0))], micro_batches=2, hold_seconds=0.0).to_json())
    every, late, auto = (
        _printed(monkeypatch, capsys, "simulate", str(path), "--passes", "zero3,reduce_late", *when)
        for when in (("--reduce", "every"), ("--reduce", "boundary"), ("--rounding", "any"))
    )
    first = [next(line for line in text.splitlines() if "zero3" in line).split()[1] for text in (every, late, auto)]
    assert first == ["28000.0", "26000.0", "28000.0"]
    assert "26000.0 ms" in auto and "gradients reduced at the boundary: 0 become 1" in auto
    wrong = [
        ["--copy-bandwidth", "-1"],
        ["--offload-activations", "some"],
        ["--world", "0"],
        ["--bandwidth", "-1"],
    ]
    path.write_text(profile(step).to_json())
    once = _printed(monkeypatch, capsys, "simulate", str(path), "--reduce", "boundary")
    assert "--reduce boundary changes nothing: a step is one micro-batch" in once
    apart = ["--gather-bandwidth", "3000", "--reduce-bandwidth", "50"]
    split = _printed(monkeypatch, capsys, "simulate", str(path), *apart)
    assert "gathers 3000.00 GB/s; reductions 50.00 GB/s" in split
    path.write_text(profile(step, micro_batches=2).to_json())
    unknown = _printed(monkeypatch, capsys, "simulate", str(path), "--rounding", "any")
    assert "every micro-batch's gradients are reduced: the profile does not say" in unknown
    wrong.append(["--reduce", "boundary"])
    for arguments in (*wrong, ["--budget", "much"], ["--passes", "zero9"]):
        with pytest.raises(SystemExit):
            _printed(monkeypatch, capsys, "simulate", str(path), *arguments)


def _fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        _printed(monkeypatch, capsys, *arguments)
    printed = capsys.readouterr()
    return int(str(ended.value)), printed.out, printed.err


def test_many_ranks_in_nodes_are_one_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    step = [schedule(kind, gather(0), wait(0), compute(0, 0), release(0)) for kind in ("forward", "backward")]
    path = tmp_path / "profile.json"
    path.write_text(replace(profile(step), resident=Resident(shards=16)).to_json())
    nodes = ("--ranks-per-node", "8", "--node-bandwidth", "1e-6", "--node-latency", "5e5")  # 1000 B/s and half a second
    one = _printed(monkeypatch, capsys, "simulate", str(path), "--world", "64", *nodes, "--passes", "zero3,prefetch")
    assert "64 ranks on 8 nodes, 1 micro-batch" in one
    # A gather: seven steps between nodes and 63/64 of 1024 bytes, at 512 B/s inside of a node. Twice, and two regions.
    assert f"{1e3 * (2 * (7 * 0.5 + 63 / 64 * 2) + 2):.1f} ms" in one
    table = _printed(monkeypatch, capsys, "simulate", str(path), "--world", "2,16,64", *nodes, "--passes", "zero3")
    rows = [line.split() for line in table.splitlines()]
    assert rows[0][:3] == ["ranks", "step", "exposed"] and [row[0] for row in rows[1:]] == ["2", "16", "64"]
    assert rows[1][-2:] == ["1.00", "100%"]
    assert [row[7] for row in rows[1:]] == sorted((row[7] for row in rows[1:]), key=lambda t: -int(t[:-1]))
    hybrid = _printed(
        monkeypatch, capsys, "simulate", str(path), "--world", "64", "--replicas", "8", *nodes, "--passes", "zero3"
    )
    assert "64 ranks on 8 nodes in 8 replicas" in hybrid and f"{1e3 * (2 * 7 / 8 * 2 + 2):.1f} ms" in hybrid


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--world 8,x", "--world 8,x: expected a positive number, or several"),
        ("--world 12 --ranks-per-node 8", "--world 12 --ranks-per-node 8: 12 ranks do not fill nodes of 8"),
        ("--world 16 --ranks-per-node 8", "16 ranks are on 2 nodes, and nothing is known of the links between them"),
        ("--world 16 --replicas 3", "--replicas 3: expected a number that divides the 16 ranks"),
        (
            "--world 24 --ranks-per-node 8 --replicas 4 --node-bandwidth 1",
            "--ranks-per-node 8 --replicas 4: 4 replicas of 24 ranks leave 6 ranks",
        ),
        ("--world 16 --node-bandwidth 50", "--node-bandwidth 50: without nodes it means nothing"),
        ("--world 16 --lanes 0", "--world 16: lanes is 0: expected a positive integer"),
        ("--ranks-per-node 0", "--ranks-per-node 0: expected a positive number"),
        ("--world 16 --ranks-per-node 8 --node-bandwidth nan", "--node-bandwidth nan: expected GB/s, more than 0"),
        ("--step-latency -3", "--step-latency -3: expected microseconds, at least 0"),
        ("--latency inf", "--latency inf: expected microseconds"),
    ],
)
def test_ranks_and_links_that_cannot_be_end_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: str,
    message: str,
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile([schedule("forward", gather(0), wait(0), compute(0, 0), release(0))]).to_json())
    for command in COMMANDS_ON_LINKS:
        status, _, wrong = _fails(capsys, monkeypatch, command, str(path), *arguments.split())
        assert status == 2 and wrong.count("\n") == 1 and message in wrong, wrong


def test_a_budget_that_nothing_fits_into_ends_with_the_least_that_would(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    step = [schedule(kind, gather(0), wait(0), compute(0, 0), release(0)) for kind in ("forward", "backward")]
    path = tmp_path / "profile.json"
    path.write_text(profile(step).to_json())
    status, printed, _ = _fails(capsys, monkeypatch, "simulate", str(path), "--budget", "1000")
    least = 30 + SLOT  # the region's peak and the slot of what it reads
    assert status == 1 and f"does not fit: the budget is 1000 bytes, and {least} bytes" in printed
    fits = _printed(monkeypatch, capsys, "simulate", str(path), "--budget", str(least))
    assert "does not fit" not in fits and f"needs at least {least} bytes" in fits


def test_one_ranks_profile_bounds_what_many_would_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole = replace(profile([schedule("forward", compute(0))]), world_size=1, resident=Resident(shards=3_000_000_000))
    path = tmp_path / "profile.json"
    path.write_text(whole.to_json())
    assert "1 rank, 1 micro-batch a step" in _printed(monkeypatch, capsys, "simulate", str(path))
    status, _, wrong = _fails(capsys, monkeypatch, "simulate", str(path), "--world", "3")
    assert status == 2 and "Say how fast it is: --bandwidth" in wrong
    printed = _printed(monkeypatch, capsys, "simulate", str(path), "--world", "3", "--bandwidth", "2")
    # Two gathers and a reduction of 3 GB, two thirds of it over a link of 2 GB/s, beside a second of compute.
    assert "a step takes 3000.0 ms if all of it hides behind compute, and 4000.0 ms if none does" in printed


def test_the_commands_are_listed_and_files_that_cannot_be_read_end_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, printed, _ = _fails(capsys, monkeypatch, "--help")
    assert status == 0 and all(f"\n    {name} " in printed for name in ("info", "simulate", "report", "plan"))
    assert _fails(capsys, monkeypatch, "--version")[1] == "lightning-deepcompile 0.1.0\n"
    step = [schedule("forward", gather(0), wait(0), compute(0, 0), release(0))]
    good = json.loads(profile(step).to_json())
    path = tmp_path / "file.json"
    instructions = [{**i, "op": "gather_all"} for i in good["schedules"][0]["instructions"]]
    broken = {
        "": "This is not a profile",
        json.dumps({**good, "version": 99}): "has version 99; this release reads",
        json.dumps(
            {**good, "regions": {"forward/region_0": {"seconds": "long"}}}
        ): "seconds is 'long'; expected a number",
        json.dumps({**good, "micro_batches": 0}): "micro_batches is 0; expected a positive integer",
        json.dumps(
            {**good, "schedules": [{**good["schedules"][0], "instructions": instructions}]}
        ): ".op is 'gather_all'; expected one of",
        json.dumps({**good, "regions": {}}): "no times of forward/region_0",
    }
    for text, message in broken.items():
        path.write_text(text)
        for command in ("simulate", "report"):
            status, _, wrong = _fails(capsys, monkeypatch, command, str(path))
            assert status == 2 and wrong.count("\n") == 1 and str(path) in wrong and message in wrong
    for text, message in (("", "it is no JSON"), ('{"version": 9, "setting": {}, "programs": {}}', "it has version 9")):
        path.write_text(text)
        status, _, wrong = _fails(capsys, monkeypatch, "plan", str(path))
        assert status == 2 and wrong.count("\n") == 1 and message in wrong and "the next training writes" in wrong
    path.write_text(json.dumps(good))
    status, _, wrong = _fails(capsys, monkeypatch, "plan", str(path))
    assert status == 2 and "it is a profile: `python" in wrong and "Remove" not in wrong
    setting = Setting(world_size=1, stage=3, device_type="cpu")
    path.write_text(write_plan([], setting))
    for command in ("simulate", "report"):
        assert (
            "This is a plan, not a profile. `python -m lightning_deepcompile plan` shows it."
            in _fails(capsys, monkeypatch, command, str(path))[2]
        )
    assert "cannot be read: No such file" in _fails(capsys, monkeypatch, "plan", str(tmp_path / "none.json"))[2]


def test_a_plan_file_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    forward = schedule("forward", gather(0, 1), wait(0, 1), compute(0, 0, 1), release(0), kept=(1,))
    path = tmp_path / "plan.json"
    tracing = Tracing(uncheckpointed=2, sparing=True, chunked_losses=8, chunked_mlps=16)
    setting, states = Setting(8, 3, "cuda", "24GiB", rounding="any"), StatePlaces(1 << 30, 3)
    path.write_text(write_plan([replace(forward, content="a")], setting, states, tracing))
    printed = _printed(monkeypatch, capsys, "plan", str(path), "--instructions")
    assert "a plan for 8 ranks (cuda), stage 3, memory_budget: '24GiB', rounding: any" in printed
    assert (
        "keep their activations: 2" in printed
        and "backward recomputes cheap operators" in printed
        and "losses over many classes are computed in 8 chunks" in printed
    )
    assert "optimizer states in host memory: 1.0 GiB (3 slots)" in printed
    row = next(line for line in printed.splitlines() if line.startswith("  forward")).split()
    assert row == ["forward", "1", "1", "2.0", "KiB", "0", "0", "B", "1", "0", "B"]
    assert "  gather               0, 1 (2.0 KiB)" in printed


def test_a_report_and_a_trace_are_made_of_a_profile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("plotly")
    parts = [(gather(k), wait(k), compute(k, k), release(k)) for k in range(3)]
    step = [schedule(kind, *(i for part in parts for i in part)) for kind in ("forward", "backward")]
    path, page, trace = tmp_path / "profile.json", tmp_path / "report.html", tmp_path / "trace.json"
    path.write_text(profile(step).to_json())
    printed = _printed(monkeypatch, capsys, "report", str(path), "-o", str(page), "--trace", str(trace))
    assert printed.split() == [str(page), str(trace)]
    assert "parameters kept for backward: 0 become" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    assert "scaling-figure" not in page.read_text()
    nodes = ("--ranks-per-node", "8", "--node-bandwidth", "1e-6")
    _printed(monkeypatch, capsys, "report", str(path), "-o", str(page), "--world", "8,64,4096", *nodes)
    drawn = page.read_text()
    assert "scaling-figure" in drawn and "<td class=n>4096</td>" in drawn and "weak scaling" in drawn
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    report.main()
    assert "pip install plotly" in capsys.readouterr().err and "scaling-figure" not in page.read_text()
