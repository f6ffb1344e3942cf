import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
sys.path.append(str(BENCHMARKS))

import compare  # noqa: E402
import deepspeed_setup  # noqa: E402
import page  # noqa: E402
import plot  # noqa: E402
import report  # noqa: E402
from groups import node_environment  # noqa: E402
from jobs import DEEPSPEED, SHAPES, Case, Job, System  # noqa: E402
from profile_trace import kernel_kind, overlap, summarize, total, union  # noqa: E402

BUILT = importlib.util.find_spec("lightning_deepcompile._C") is not None
TINY = ["--device", "cpu", "--world", "2", "--shape", "tiny", "--steps", "2", "--warmup", "1"]


def run_compare(folder: Path, *options: str, **variables: str) -> tuple[int, dict, str]:
    """Runs the script with its scratch below ``folder``; returns exit code, results.json and what it printed."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(BENCHMARKS / "compare.py"), *TINY, "--out", str(folder / "out"), *options]
    env = os.environ | {"TMPDIR": str(folder)} | variables
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert (folder / "out" / "results.json").exists(), done.stdout + done.stderr
    return done.returncode, json.loads((folder / "out" / "results.json").read_text()), done.stdout


def by_system(results: dict, case: str) -> dict[str, dict]:
    return {r["system"]: r for r in results["results"] if r["case"] == case}


@pytest.mark.parametrize("text", ["", "512", "512x1", "0x1x1", "512x1x1x1", "ax1x1", "-4x1x1"])
def test_case_says_what_it_expects(text: str) -> None:
    with pytest.raises(ValueError, match="SEQxBATCHxACCUMULATION"):
        Case.parse(text)


@pytest.mark.parametrize(
    "text", ["fsdp3", "fsdp@forward_prefetch=1", "deepcompile@schedule", "deepspeed@compile", "@a=1"]
)
def test_system_refuses_what_it_cannot_run(text: str) -> None:
    with pytest.raises(ValueError, match="system"):
        System.parse(text)


def test_system_options_keep_their_types() -> None:
    system = System.parse("deepcompile@memory_budget=3+region_backend=eager+symmetric_memory=false")
    assert system.options == {"memory_budget": 3, "region_backend": "eager", "symmetric_memory": False}


def make_job(system: str, *cases: Case, **more: object) -> Job:
    fixed = {"shape": SHAPES["tiny"], "world": 2, "device": "cpu", "precision": "fp32", "steps": 1, "warmup": 1}
    fixed |= {"folder": "f", "out": "o", "spawned": 1.5, "deadline": 2.5}
    return Job(system=System.parse(system), cases=list(cases), **(fixed | more))


def test_deepspeed_is_configured_for_the_case() -> None:
    config = deepspeed_setup.configuration(make_job("deepspeed", Case(8, 2, 4), precision="bf16"))
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (2, 4)
    assert config["bf16"]["enabled"] and config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["zero_optimization"]["reduce_bucket_size"] == 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160
    text = "deepspeed-deepcompile@offload_optimizer=cpu+reduce_bucket_size=7+compile.double_buffer=false"
    job = make_job(text, Case(8, 1, 1), device="cuda", precision="bf16")
    config = deepspeed_setup.configuration(job)
    assert "data_types" not in config, "nothing is added up"
    assert config["compile"] == {"deepcompile": True, "double_buffer": False}
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert config["zero_optimization"]["reduce_bucket_size"] == 7


def test_flops_of_llama3_8b() -> None:
    matmul_parameters = 8_030_261_248 - 128256 * 4096 - 65 * 4096  # all but the embedding and the norms
    assert SHAPES["llama3-8b"].flops_per_token(1024) == 6 * matmul_parameters + 6 * 32 * 4096 * 1024


@pytest.mark.parametrize("name", ["tiny", "mixtral-tiny", "olmoe-tiny"])
def test_a_captured_step_makes_no_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from captured import attend_without_mask
    from models import build_model
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: True)  # as while a graph is captured
    tokens = torch.arange(24).view(2, 12)
    losses, masks = [], []
    for prepare in (lambda _: None, attend_without_mask):
        model = build_model(SHAPES[name], "cpu")
        prepare(model)
        model.model.layers[0].register_forward_pre_hook(
            lambda _, args, given: masks.append(given["attention_mask"]), with_kwargs=True
        )
        losses.append(model(input_ids=tokens, labels=tokens).loss)
    assert isinstance(masks[0], torch.Tensor) and masks[1] is None
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.experts > 1])
def test_flops_count_the_experts_that_a_token_uses(name: str) -> None:
    import models

    shape = SHAPES[name]
    model = models.build_model(shape, "meta")
    matrices = {key: p.numel() for key, p in model.named_parameters() if p.dim() > 1 and "embed" not in key}
    experts = sum(size for key, size in matrices.items() if "experts" in key)
    used = sum(matrices.values()) - experts + experts * shape.experts_used // shape.experts
    assert shape.flops_per_token(64) == 6 * used + 6 * shape.layers * shape.hidden * 64
    assert shape.parameters == sum(p.numel() for p in model.parameters() if p.dim() > 1)
    block = models.block_class(shape)
    assert [type(layer) for layer in model.model.layers] == [block] * shape.layers


def test_a_model_that_cannot_fit_is_refused_with_its_size() -> None:
    shape, memory = SHAPES["mixtral-8x7b"], 80 * 2**30
    reason = compare.too_large(System.parse("fsdp2"), shape, memory)
    assert reason is not None and "46.7e9 parameters" in reason and "174 GiB" in reason and "--layers than 32" in reason
    smaller = replace(shape, layers=8)
    assert compare.too_large(System.parse("fsdp2"), smaller, memory) is None
    assert "AdamW's states" in (compare.too_large(System.parse("ddp"), smaller, memory) or "")
    assert compare.too_large(System.parse("ddp"), shape, None) is None


@pytest.mark.parametrize(
    "options",
    [
        ["--systems", "fsdp2,fsdp2"],
        ["--cases", "4x1"],
        ["--steps", "0"],
        ["--profile", "fsdp2:4x1x1"],
        ["--device", "cuda", "--world", "1000"],
        ["--nodes", "3"],
    ],
)
def test_bad_command_lines_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.parse_arguments(["--out", "unused", "--device", "cpu", *options])
    assert options[0] in capsys.readouterr().err


def kernel(name: str, start: float, length: float, stream: int) -> dict:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": length, "args": {"stream": stream}}


def test_trace_summary_separates_hidden_from_exposed_communication() -> None:
    events = [
        kernel("triton_poi_fused_0", 1000, 1000, 7),
        kernel("nvjet_tst_gemm", 2000, 2000, 7),
        kernel("ncclDevKernel_AllGather_RING", 1500, 3000, 9),  # 500 us of it beside nothing
        kernel("ncclDevKernel_ReduceScatter_Sum", 6000, 1000, 11),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 99999, "args": {}},
    ]
    summary = summarize(events)
    assert summary["span_ms"] == 6.0
    assert summary["compute_stream_busy_ms"] == 3.0
    assert (summary["nccl_gather_ms"], summary["nccl_reduce_ms"]) == (3.0, 1.0)
    assert summary["exposed_communication_ms"] == 1.5
    assert summary["idle_ms"] == 1.5
    assert summary["ms_by_kind"] == {"nccl": 4.0, "matmul": 2.0, "triton": 1.0}
    assert summary["top_kernels"][0]["calls"] == 1
    assert "note" in summarize([])


def record(ms: float, **more: object) -> dict:
    return {"ms": [ms, ms + 2, ms + 1], "host_ms": [3.0], "losses": [2.0], "first_step_s": 1.0, "wall_s": 2.0, **more}


def test_tables_compare_with_the_product_and_the_roofline() -> None:
    case, shape = Case(4, 1, 2), SHAPES["tiny"]
    product, peer, bound = (System.parse(name) for name in ("deepcompile", "fsdp2", "roofline"))
    compiled = {"regions_compiled": 3, "regions_total": 9, "compile_seconds": 12.3}
    parts = {
        "forward_backward_ms": 20.0,
        "gather_ms": 3.0,
        "reduce_ms": 3.0,
        "optimizer_ms": 1.0,
        "gather_busbw_gbs": 300.0,
        "reduce_busbw_gbs": 290.0,
    }
    slow = {**parts, "forward_backward_ms": 22.0, "gather_busbw_gbs": 280.0}
    results = [
        report.join_ranks(
            product, case, shape, [record(49, compiled=compiled, peak_gib=2.0), record(49, peak_gib=3.0)]
        ),
        report.join_ranks(peer, case, shape, [record(74), record(74)]),
        report.join_ranks(bound, case, shape, [record(0) | parts, record(0) | slow]),
        report.missing(peer, Case(8, 1, 1), "failed", "a worker failed\nlog\n[rank1]: ValueError: no luck\nmore"),
    ]
    assert results[0]["ms"] == 50
    assert results[0]["peak_gib"] == 3.0
    assert (results[2]["ms"], results[2]["gather_busbw_gbs"]) == (45.0, 280.0)
    text = report.tables(results, [product, peer, bound], [case, Case(8, 1, 1)])
    assert "| 4x1x2 | 50.0 (49.0) | 75.0 (74.0) 1.50x | 45.0 |" in text
    assert "| 0.90 |" in text
    assert "| 3/9 | 12.3 |" in text
    assert "fsdp2 failed: a worker failed: ValueError: no luck (8x1x1)" in text


@pytest.mark.skipif(not plot.can_draw(), reason="matplotlib is not installed")
@pytest.mark.parametrize(("compiling", "steps"), [(0, 3), (1, 3), (4, 5)])
def test_a_capture_waits_until_nothing_compiles(compiling: int, steps: int) -> None:
    import torch
    from captured import warm_up

    compiled = torch.compile(lambda x, n: x + n, backend="eager", dynamic=False)
    ran = []

    def step() -> None:
        ran.append(compiled(torch.ones(2), min(len(ran) + 1, compiling) if compiling else 0))

    try:
        assert warm_up(step) == steps == len(ran)
    finally:
        torch.compiler.reset()


def test_a_model_that_compiles_in_every_step_is_not_captured() -> None:
    import torch
    from captured import warm_up

    with pytest.raises(RuntimeError, match="still compiles after 12 steps"):
        warm_up(lambda: (torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)), torch.compiler.reset()))


def test_muon_with_adamw_steps_as_the_two_do() -> None:
    import torch
    from models import build_model, make_optimizer

    ours, theirs = (build_model(SHAPES["tiny"], "cpu") for _ in range(2))
    optimizer = make_optimizer(ours, SHAPES["tiny"], "muon")
    matrices = [p for p in theirs.model.layers.parameters() if p.dim() == 2]
    assert len(optimizer.param_groups[0]["params"]) == len(matrices) == 14
    others = [p for p in theirs.parameters() if all(p is not matrix for matrix in matrices)]
    pair = (
        torch.optim.Muon(matrices, lr=1e-4, weight_decay=0.0),
        torch.optim.AdamW(others, lr=1e-4, weight_decay=0.0),
    )
    for seed in range(2):
        for model in (ours, theirs):
            generator = torch.Generator().manual_seed(seed)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        for one in pair:
            one.step()
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)


def test_results_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.image

    def result(case: str, system: str, ms: float) -> dict:
        return {"case": case, "system": system, "status": "ok", "ms": ms}

    results = [result("4x1x1", "a", 20.0), result("4x1x1", "b", 30.0), result("4x1x1", "roofline", 10.0)]
    results += [result("8x1x1", "a", 50.0), {"case": "8x1x1", "system": "b", "status": "failed", "reason": "no luck"}]
    sizes = []
    for chosen in (results, [r for r in results if r["system"] != "roofline"]):
        (tmp_path / "results.json").write_text(json.dumps({"results": chosen}))
        monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path / "results.json"), str(tmp_path / "plot.png")])
        assert plot.main() == 0
        image = matplotlib.image.imread(tmp_path / "plot.png")
        sizes.append(image.shape[0])
        assert image.min() < 0.2, "it is not blank"
    assert sizes[0] > sizes[1], "with a roofline there is a second panel"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.png", "results.json"]
    (tmp_path / "results.json").write_text(json.dumps({"results": results[-1:]}))
    assert plot.main() == 1


@pytest.mark.skipif(not plot.can_draw(), reason="matplotlib is not installed")
def test_budgets_are_drawn_as_a_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def result(budget: int, ms: float, away: int) -> dict:
        summary = {"sharded_bytes_per_rank": 100, "offloaded_bytes": away}
        found = {"system": f"memory_budget={budget}GiB", "status": "ok", "ms": ms, "budget_gib": float(budget)}
        return found | {"peak_gib": budget - 0.5, "summary": summary, "predicted": {"ms": ms + 1, "peak_gib": budget}}

    results = [result(80, 100.0, 0), result(40, 130.0, 50), result(24, 200.0, 200)]
    results.append({"system": "memory_budget=16GiB", "status": "failed", "reason": "too little", "budget_gib": 16.0})
    results.append({"system": "fsdp2", "status": "ok", "ms": 150.0})
    panel = Figure().subplots()
    plot._budgets(panel, results)
    measured, predicted, *_ = panel.get_lines()
    assert list(measured.get_xdata()) == [24, 40, 80], "budgets are numbers, in their order"
    assert list(measured.get_ydata()) == [200, 130, 100] and list(predicted.get_ydata()) == [201, 131, 101]
    assert [text.get_text() for text in panel.texts] == [
        "peak 23.5 GiB\n100% of states away",
        "peak 39.5 GiB\n25% of states away",
        "peak 79.5 GiB\n0% of states away",
    ]
    names = [text.get_text() for text in panel.get_legend().get_texts()]
    assert names == ["measured", "predicted", "does not fit", "fsdp2"]
    for number, chosen in enumerate((results, results[:1], results[3:])):
        assert plot.draw_sweep(chosen, tmp_path / f"{number}.png"), "one budget is no curve"
    assert not plot.draw_sweep(results[3:4], tmp_path / "none.png")
    (tmp_path / "sweep.json").write_text(json.dumps({"results": results}))  # no `case`, as compare.py's results have
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path / "sweep.json"), str(tmp_path / "sweep.png")])
    assert plot.main() == 0 and (tmp_path / "sweep.png").is_file()


def test_a_rank_of_a_node_sees_the_devices_of_its_node_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    of_node = [node_environment(make_job("ddp", world=4, nodes=2), rank) for rank in range(4)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in of_node] == ["7,5", "7,5", "3,1", "3,1"]
    assert [one["NCCL_HOSTID"] for one in of_node] == ["node0", "node0", "node1", "node1"]
    places = [one["NODE_RANK"] + "." + one["LOCAL_RANK"] for one in of_node]
    assert places == ["0.0", "0.1", "1.0", "1.1"]
    alone = [node_environment(make_job("ddp", world=4), rank) for rank in range(4)]
    assert [one["LOCAL_RANK"] for one in alone] == ["0", "1", "2", "3"] and "NCCL_HOSTID" not in alone[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [[], pytest.param(["fsdp2-hsdp", "fsdp2-pieces@pieces=3"], marks=pytest.mark.extensive)], ids=str
)
def test_compare_measures_systems_that_run_without_gpus(more: list[str], tmp_path: Path) -> None:
    systems = ",".join(["ddp", "fsdp", "fsdp2", "fsdp2-graphs", "roofline", *more])
    options = ["--systems", systems, "--cases", "16x1x1,16x1x2", "--profile", "fsdp2:16x1x2", "--nodes", "2"]
    code, results, printed = run_compare(tmp_path, *options, TORCH_COMPILE_DISABLE="1")
    assert code == 0, printed
    for case in ("16x1x1", "16x1x2"):
        found = by_system(results, case)
        assert found["fsdp"]["status"] == found["fsdp2-graphs"]["status"] == "skipped"
        for name in ("fsdp2", *more):
            assert found[name]["losses"] == pytest.approx(found["ddp"]["losses"], rel=1e-5)
        assert len(found["fsdp2"]["losses"]) == 3
        assert all(len(rank["ms"]) == 2 for name in ("ddp", "fsdp2") for rank in found[name]["ranks"])
        assert found["roofline"]["ms"] > found["roofline"]["optimizer_ms"] > 0
    assert results["environment"]["torch"]
    out = tmp_path / "out"
    kept = {"results.json", "table.md", "log.txt", "profile_fsdp2_16x1x2.json", "profile_fsdp2_16x1x2.trace.json.gz"}
    kept |= {"plot.png"} if plot.can_draw() else set()
    assert {path.name for path in out.iterdir()} == kept
    assert (out / "table.md").read_text() in printed


@pytest.mark.slow
@pytest.mark.extensive
def test_a_system_that_fails_or_stands_still_leaves_the_others_alone(tmp_path: Path) -> None:
    code, results, printed = run_compare(
        tmp_path / "a", "--systems", "deepcompile@no_such_option=1,ddp", "--cases", "16x1x1"
    )
    found = by_system(results, "16x1x1")
    assert code == 1
    assert found["ddp"]["status"] == "ok", printed
    broken = found["deepcompile@no_such_option=1"]
    assert broken["status"] == "failed"
    assert "Traceback" in broken["reason"] and "Error" in report.headline(broken["reason"])

    code, results, printed = run_compare(
        tmp_path / "b", "--systems", "ddp", "--cases", "16x1x1,32x1x1", "--case-limit", "0.5"
    )
    assert code == 1
    assert [r["status"] for r in results["results"]] == ["failed", "failed"]
    assert "no progress" in results["results"][0]["reason"]
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(str(tmp_path).encode() in command for command in commands)


def test_a_missing_deepspeed_is_skipped_with_its_reason(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden" / "deepspeed"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'hjson'\")")
    path = os.pathsep.join(filter(None, [str(hidden.parent), os.environ.get("PYTHONPATH")]))
    code, results, printed = run_compare(
        tmp_path, "--systems", ",".join(DEEPSPEED), "--cases", "16x1x1,16x1x2", PYTHONPATH=path
    )
    assert code == 0, "to skip is not to fail"
    assert [r["status"] for r in results["results"]] == ["skipped"] * 4
    found = by_system(results, "16x1x1")
    assert "pip install deepspeed" in found["deepspeed"]["reason"]
    assert "No module named 'hjson'" in found["deepspeed"]["reason"]
    assert "needs GPUs" in found["deepspeed-deepcompile"]["reason"]
    assert "deepspeed skipped: DeepSpeed cannot be imported" in printed


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.skipif(shutil.which("ninja") is None, reason="DeepSpeed compiles its collectives on CPU with ninja")
def test_deepspeed_trains_as_ddp_does(tmp_path: Path) -> None:
    fresh = "stage3_max_reuse_distance=0+stage3_max_live_parameters=0"  # else nothing is freed of so small a model
    systems = [f"deepspeed@{fresh}", f"deepspeed@compile=true+{fresh}", "ddp"]
    code, results, printed = run_compare(
        tmp_path,
        *("--systems", ",".join(systems), "--cases", "16x1x2"),
        TORCH_COMPILE_DISABLE="1",
        TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"),
    )
    assert code == 0, printed
    found = by_system(results, "16x1x2")
    for system in systems[:-1]:
        assert found[system]["losses"] == pytest.approx(found["ddp"]["losses"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.extensive
def test_an_exhausted_time_budget_skips_what_is_left(tmp_path: Path) -> None:
    code, results, printed = run_compare(tmp_path, "--systems", "ddp", "--cases", "16x1x1,32x1x1", "--time-budget", "1")
    assert code == 0, printed
    assert [r["status"] for r in results["results"]] == ["ok", "skipped"]
    assert "time budget" in results["results"][1]["reason"]


@pytest.mark.slow
@pytest.mark.extensive
@pytest.mark.skipif(not BUILT, reason="the extension is not built")
def test_deepcompile_trains_as_fsdp2_does(tmp_path: Path) -> None:
    product = "deepcompile@region_backend=eager+schedule=null"  # systems that plan have processes per case
    systems = f"{product},fsdp2-eager"
    code, results, printed = run_compare(tmp_path, "--systems", systems, "--cases", "16x1x1,16x1x2", "--warm")
    assert code == 0, printed
    for case in ("16x1x1", "16x1x2"):
        found = by_system(results, case)
        assert found[product]["losses"] == pytest.approx(found["fsdp2-eager"]["losses"], rel=1e-5)
        assert found[product]["summary"]["regions_total"] > 0
        assert found[product]["compiled"]["graphs"] == (case == "16x1x1")  # the second case meets the same shapes
    assert by_system(results, "16x1x1")[product]["warm_first_step_s"] > 0


@pytest.mark.slow
@pytest.mark.extensive
@pytest.mark.skipif(not BUILT, reason="the extension is not built")
@pytest.mark.parametrize("shape", ["mixtral-tiny", "olmoe-tiny"])
def test_experts_train_alike_under_all_systems(tmp_path: Path, shape: str) -> None:
    systems = ["deepcompile@region_backend=eager", "fsdp2-eager", "ddp"]
    options = ("--shape", shape, "--systems", ",".join(systems), "--cases", "16x1x2", "--checkpointing")
    code, results, printed = run_compare(tmp_path, *options)
    assert code == 0, printed
    found = by_system(results, "16x1x2")
    for system in systems[:-1]:
        assert found[system]["losses"] == pytest.approx(found["ddp"]["losses"], rel=1e-5)
    assert found[systems[0]]["summary"]["graphs"] == 1 and not found[systems[0]]["summary"]["uncompiled"]


def test_a_sweep_says_what_it_compares() -> None:
    import sweep  # needs torch, as its settings train in the same processes

    arguments = sweep.parse_arguments(
        ["--out", "unused", "--ablation", "--fsdp2", "--option", "memory_budget", "--values", "9GiB", "8GiB",
         "--fixed", "offload=auto", "reduce=boundary"]
    )  # fmt: skip
    systems = sweep.settings(arguments)
    assert [s.name for s in systems] == [*sweep.ABLATION, "memory_budget=9GiB", "memory_budget=8GiB", "fsdp2"]
    assert systems[1].options == {"offload": "auto", "reduce": "boundary", "schedule": sweep.ABLATION["+ fuse"]}
    assert systems[4].options == {"offload": "auto", "reduce": "boundary", "memory_budget": "9GiB"}
    assert systems[-1].options == {}
    with pytest.raises(SystemExit):
        sweep.parse_arguments(["--out", "unused", "--fsdp2", "--deferred-init"])
    ran = {"status": "ok", "system": "a", "ms": 200.0, "min_ms": 190.0, "first_step_s": 3.0, "tflops_per_gpu": 9.5}
    ran["summary"] = {"offloaded_bytes": 2**30, "offloaded_parameter_bytes": 2**30, "offload_moved_bytes": 2**31}
    ran["summary"] |= {"sharded_bytes_per_rank": 2**30, "offloaded_activation_bytes": 2**30}
    ran["predicted"] = {"ms": 210.0, "peak_gib": 7.0, "exposed_ms": 4.0}
    failed = report.missing(systems[5], arguments.case, "failed", "the budget is too little")
    rows = sweep.table([failed, ran, ran | {"system": "b", "ms": 300.0}]).splitlines()
    assert rows[2].startswith("| memory_budget=8GiB | the budget is too little |")
    assert rows[3].startswith(
        "| a | 200.00 | 190.00 | 1.00 | 9.50 | - | 3.00 | 0.50 | 4.00 | 3.00 | 210.00 | 7.00 | 4.00 |"
    )
    assert rows[4].startswith("| b | 300.00 | 190.00 | 1.50 |")
    assert len({row.count("|") for row in rows}) == 1
    assert [sweep.budget_gib(system) for system in (systems[0], systems[4])] == [None, 9.0]


@pytest.mark.parametrize("options", [["--option", "reduce"], ["--values", "1"], []])
def test_a_sweep_without_settings_is_refused(options: list[str]) -> None:
    import sweep

    with pytest.raises(SystemExit):
        sweep.parse_arguments(["--out", "unused", *options])


@pytest.mark.extensive
def test_ranks_agree_with_one_process_and_resume_on_another_number() -> None:
    command = [sys.executable, str(BENCHMARKS / "many_ranks.py"), "--ranks", "2,4", "--steps", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "saved by 2 ranks, resumed by 4" in done.stdout and "saved by 4 ranks, resumed by 2" in done.stdout


@pytest.mark.slow
@pytest.mark.extensive
@pytest.mark.parametrize("system", ["deepcompile", "fsdp2"])
def test_ragged_batches_are_measured_with_both_systems(system: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--backend=eager", "--steps=12", "--rows=3", "--longest=20", f"--system={system}"]
    run = subprocess.run(
        [*command, str(BENCHMARKS / "ragged.py"), *options], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert re.search(rf"{system} tiny \(eager\), 2 ranks, 12 steps: [\d.]+ ms per 1000 tokens", run.stdout)


def test_pages_and_plots_show_the_results_that_are_kept() -> None:
    assert page.main(["--check"]) == 0


def _measured(**more: object) -> dict:
    result = {"case": "8x1x1", "status": "ok", "ms": 2.04321, "min_ms": 1.5, "peak_gib": 3.0}
    failed = {"status": "failed", "reason": "a worker failed\nOutOfMemoryError: no more"}
    return {
        "settings": dict.fromkeys(page._SETTINGS, 2) | {"optimizer": "adamw", "checkpointing": False, "nodes": 1},
        "environment": {"device": "NVIDIA H200", "torch": "2.11.0", "host": "name"},
        "results": [
            {"system": "deepcompile", **result, "reserved_gib": 1.0},
            {"system": "fsdp2", **result, "ms": 5.0, "peak_gib": 2.0},
            {"system": "fsdp2-eager", "case": "8x1x1", **failed},
            {"system": "fsdp2-eager", "case": "9x1x1", "status": "skipped", "reason": "the time budget is over"},
        ],
        **more,
    }


def test_a_page_is_written_from_records() -> None:
    record = page.kept([_measured()], "mine", "abc", page.CURRENT)
    assert json.loads(page.dumped(record)) == record and "host" not in page.dumped(record)
    rows = {"subject": "mine", "title": "More", "date": "2026-01-02", "cards": "8×H100", "torch": "2.11", "note": "So."}
    rows |= {"command": "a.py", "columns": ["x", ""], "rows": [[1, None], ["b", 2.5]]}
    given = {"ms": 10.0, "peak_gib": 2.5, "date": "2026-01-02", "cards": "8×H100"}
    pairs = [["equal", "one/8x1x1/deepcompile", given], ["named", given, "one/8x1x1/fsdp2"]]
    records = {"one": record, "two": rows, "three": {"subject": "mine", "date": page.CURRENT, "pairs": pairs}}
    marks = ["summary", "tables: mine", "comparison: one", "rows: two"]
    text = "x\n" + "\n".join(f"<!-- {mark} -->\nold\n<!-- end -->" for mark in marks) + "\ny"
    text = page.written(text, records)
    assert "old" not in text and text.startswith("x\n") and text.endswith("\ny")
    line = "compare.py --layers 2 --world 2 --systems deepcompile,fsdp2,fsdp2-eager --cases 8x1x1"
    figures = "2.0 ms, 3.0 GiB | 5.0 ms, 2.0 GiB | 2.45×"
    assert f"| 2 layers, bf16, 8×1×1 | {figures} | 2×H200 | {page.CURRENT} | abc |\n" in text
    assert text.count(f"\n\n- abc, 2×H200: `{line}`\n<!-- end -->") == 1
    assert "| 8×1×1 | **2.0** (1.5), 3.0 GiB | 5.0 (1.5), 2.0 GiB | out of memory |" in text
    assert f"| 8×1×1 | {figures} | +1.0 GiB |" in text
    assert "**More.** 2026-01-02, an earlier version, 8×H100, PyTorch 2.11; `a.py`:\n\n| x |  |" in text
    days = f"{page.CURRENT} and 2026-01-02"
    assert f"| equal | 2.0 ms, 3.0 GiB | 10.0 ms, 2.5 GiB | 4.89× | +0.5 GiB | 2×H200 | {days} |" in text
    assert "| named | 10.0 ms, 2.5 GiB | 5.0 ms, 2.0 GiB | 0.50× | +0.5 GiB | 8×H100 | 2026-01-02 and " in text
    assert text.count("| 1 |  |\n| b | 2.5 |\n") == 2 and text.count("\nSo.\n") == 1
    assert page.written(text, records) == text


def test_results_of_another_model_name_it() -> None:
    measured = _measured()
    measured["settings"] |= {"shape": asdict(replace(SHAPES["olmoe-1b-7b"], layers=2)), "checkpointing": True}
    record = page.kept([measured], "mine", "abc", page.CURRENT)
    text = page.written("<!-- summary -->\n<!-- end -->", {"one": record})
    assert "| olmoe-1b-7b, 2 layers, bf16, 8×1×1, checkpointing | 2.0 ms" in text
    assert "`compare.py --shape olmoe-1b-7b --layers 2 --world 2 --checkpointing --systems" in text
    with pytest.raises(ValueError, match="other settings"):
        page.kept(
            [measured, {**measured, "settings": {**measured["settings"], "shape": asdict(SHAPES["tiny"])}}],
            "mine",
            "abc",
            page.CURRENT,
        )


def test_results_are_kept_with_the_commit_that_was_measured() -> None:
    file = _measured()
    with pytest.raises(ValueError, match="not of commits"):
        page.kept([file], "mine", None, "2026-01-02")
    file["environment"]["git_commit"] = "0123456789"
    assert page.kept([file], "mine", None, "2026-01-02")["commit"] == "0123456"
    file["environment"]["git_commit"] = "0123456789-dirty"
    with pytest.raises(ValueError, match="not of commits"):
        page.kept([file], "mine", None, "2026-01-02")
    assert page.kept([file], "mine", "abc", "2026-01-02")["commit"] == "abc"


def test_one_command_adds_results_to_page_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "results.json").write_text(json.dumps(_measured()))
    (document := tmp_path / "page.md").write_text("<!-- tables: mine -->\n<!-- end -->\n")
    (folder := tmp_path / "kept").mkdir()
    for name, value in {"PAGES": (document,), "FOLDER": folder, "IMAGES": tmp_path}.items():
        monkeypatch.setattr(page, name, value)
    add = ["add", str(tmp_path / "results.json"), "one", "--subject", "mine", "--commit", "abc"]
    assert page.main(add) == 0 and "| 8×1×1 | **2.0**" in document.read_text()
    record = json.loads((folder / "one.json").read_text())
    (folder / "one.json").write_text(page.dumped(record | {"plot": "bars"}))
    assert page.main(["--check"]) == 1 and page.main([]) == 0 == page.main(["--check"])
    assert page.main(add) == 0 and json.loads((folder / "one.json").read_text())["plot"] == "bars"
    record["results"][0]["ms"] = 2.01  # rounded as before, but drawn otherwise
    (folder / "one.json").write_text(page.dumped(record | {"plot": "bars"}))
    assert page.main(["--check"]) == 1 and page.main([]) == 0
    (folder / "other.json").write_text(page.dumped(record | {"subject": "another"}))
    assert page.main(["--check"]) == 1


@pytest.mark.slow
@pytest.mark.extensive
def test_curves_of_both_systems_are_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--shape=tiny", "--steps=20", "--rows=2", "--length=32", "--device=cpu", f"--out={tmp_path}"]
    systems = "--systems=fsdp2,deepcompile@stage=1+schedule=null"
    script = str(BENCHMARKS / "curves.py")
    run = subprocess.run([*command, script, *options, systems], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    assert "20 steps equal to fsdp2's to 1e-5" in run.stdout
    if plot.can_draw():
        subprocess.run([sys.executable, script, "--plot", str(tmp_path)], check=True, timeout=100)
        assert (tmp_path / "curves.png").is_file()


def test_interval_arithmetic() -> None:
    merged = union([(5, 6), (0, 2), (1, 3), (3, 4)])
    assert merged == [(0, 4), (5, 6)]
    assert total(merged) == 5
    assert overlap(merged, [(3.5, 5.5)]) == 1.0
    assert kernel_kind("void at::native::unrolled_elementwise_kernel") == "other"


def test_results_of_other_settings_make_no_table() -> None:
    file = _measured()
    other = {**file, "settings": {**file["settings"], "layers": 3}}
    assert page.kept([file, file], "mine", "abc", "2026-01-02")["layers"] == 2
    with pytest.raises(ValueError, match="other settings"):
        page.kept([file, other], "mine", "abc", "2026-01-02")
