"""Who may use a GPU's multiprocessors, and when: what programs tell, what the runtime knows, what cuBLAS is told."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CASES, assert_same_training, same_bits_every_time, train
from multiprocess import GPU_RANKS, join, run_ranks
from test_codegen import Builder, adding

from lightning_deepcompile import CompileConfig
from lightning_deepcompile.program.codegen import generate
from lightning_deepcompile.program.executable import Executable
from lightning_deepcompile.program.program import Program


class Divider:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def divide(self) -> None:
        self.told.append("divide")

    def end(self) -> None:
        self.told.append("end")


def _program(fails: bool = False) -> Program:
    builder, divided = Builder(), adding(2.0)

    def second(args: list[Any]) -> list[Any]:
        if fails:
            raise ValueError("a region that fails")
        return divided(args)

    first, *_ = builder.region(adding(2.0), builder.graph.placeholder("x"), outputs=3)
    last, *_ = builder.region(second, first, outputs=3)
    return builder.program(last)


def test_programs_say_where_they_compute_and_when_they_are_done() -> None:
    divider, checked = Divider(), []
    executable = Executable(_program(), _program(), lambda: None, checked.append, divider=divider)
    assert executable([torch.ones(())]) == (4.0,)
    assert divider.told == ["divide", "divide", "end"] and len(checked) == 1
    assert executable.source.count("divide()") == 2
    assert "divide" not in generate(_program())[1]


def test_a_region_that_fails_leaves_nothing_divided() -> None:
    divider = Divider()
    with pytest.raises(ValueError, match="a region that fails"):
        Executable(_program(fails=True), _program(fails=True), lambda: None, lambda _: None, divider=divider)(
            [torch.ones(())]
        )
    assert divider.told[-1] == "end"


def _communicates() -> list[bool]:
    """What the runtime says, from launch to wait, of a gather and of reductions."""
    from lightning_deepcompile.runtime import load_extension

    device = join("cpu")
    runtime = load_extension().Runtime(dist.group.WORLD, dist.group.WORLD, device, reduce_window=1)
    graph, shard = runtime.serial << 32, torch.zeros(2)
    ids = [graph, graph | 1]
    for id_ in ids:
        runtime.setup.register_param(id_, f"p{id_ - graph}", [4], shard.clone(), shard.clone())
    runtime.setup.register_graph(graph, ids)
    ops, said = torch.ops.dc, [runtime.communicates()]
    ops.prefetch_params_fused(graph, [], ids)
    said.append(runtime.communicates())
    ops.wait_allgather_fused(graph, ids)
    said.append(runtime.communicates())
    ops.prefetch_params_fused(graph, [], ids)  # they are there: nothing travels
    said.append(runtime.communicates())
    ops.release_params_fused(graph, ids)
    runtime.gradients.start_backward(ids)
    ops.reduce_grads_fused(graph, [torch.ones(4), torch.ones(4)], ids)
    said.append(runtime.communicates())
    runtime.gradients.finish_backward()
    said.append(runtime.communicates())
    runtime.close()
    dist.destroy_process_group()
    return said


def test_the_runtime_knows_what_is_under_way() -> None:
    for said in run_ranks(_communicates, 2, timeout=60):
        assert said == [False, True, False, False, True, False]


def test_two_limits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_ctas=8, communication_sms=24.*one of them"):
        CompileConfig(max_ctas=8, communication_sms=24)
    with pytest.raises(ValueError, match="communication_sms=-1"):
        CompileConfig(communication_sms=-1)


class _Says:
    """A runtime that communicates, or does not."""

    now = True

    def communicates(self) -> bool:
        return self.now


def _train(sms: int) -> Any:
    from lightning_deepcompile import DeepCompileStrategy
    from lightning_deepcompile.runtime.multiprocessors import Multiprocessors

    same_bits_every_time()
    strategy = DeepCompileStrategy(compile=CompileConfig(communication_sms=sms, region_backend="eager"))
    record = train(CASES["gpt_tied"], strategy, world_size=GPU_RANKS, rank=int(os.environ["RANK"]), accelerator="gpu")
    device, says = torch.device("cuda", torch.cuda.current_device()), _Says()
    divided = Multiprocessors(device, 24, says)
    counts = [divided.current()]
    for says.now in (True, True, False, True):
        divided.divide()
        counts.append(divided.current())
    divided.end()
    counts.append(divided.current())
    with pytest.raises(ValueError, match=r"communication_sms=100.*multiprocessors"):
        Multiprocessors(device, 100, says)
    return record, counts, divided.compute, [e.divider is not None for e in strategy.engine.capture.executables]


@pytest.mark.gpu
def test_on_gpus() -> None:
    expected = train(CASES["gpt_tied"], "auto", world_size=1, rank=0, data_world=GPU_RANKS, accelerator="gpu")
    for record, counts, compute, dividing in run_ranks(_train, GPU_RANKS, 24, timeout=200):
        assert_same_training(record, expected, params=True)
        assert counts == [0, compute, compute, 0, compute, 0]
        assert dividing and all(dividing)
