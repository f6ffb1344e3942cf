"""Random sequences of calls, valid and not: errors are Python exceptions of ours, and values stay right."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from multiprocess import run_ranks
from torch import Tensor

EXAMPLES = int(os.environ.get("LDC_FUZZ_EXAMPLES", "150"))
SHAPES = [(4, 3), (5,), ()]

IDS = st.sampled_from([0, 0, 0, 1, 2, 3, -1, 1 << 33])
GRAPHS = st.sampled_from([0, 0, 0, 1, -2, 7])
DTYPES = st.sampled_from([None, None, None, torch.bfloat16, torch.int8])
SIZES = st.integers(0, len(SHAPES) - 1)
NUMBERS = st.integers(-1, 3)
FLAGS = st.booleans()

CALLS = st.one_of(
    st.tuples(st.sampled_from(["init", "cleanup", "reset"]), st.integers(0, 20)),
    st.tuples(st.just("register_param"), IDS, SIZES, FLAGS, FLAGS),
    st.tuples(st.sampled_from(["register_graph_z1", "register_graph_z2", "register_graph_z3"]), GRAPHS, st.lists(IDS)),
    st.tuples(st.sampled_from(["set_persistent", "invalidate_gathered_param", "update_param_grad_buffer"]), IDS),
    st.tuples(st.sampled_from(["clear_all_gathered_params", "start_forward", "end_forward"])),
    st.tuples(st.sampled_from(["start_backward", "enable_profiling"]), FLAGS),
    st.tuples(st.just("end_backward"), GRAPHS),
    st.tuples(st.just("allgather"), GRAPHS, IDS, DTYPES),
    st.tuples(st.just("prefetch"), GRAPHS, st.lists(IDS), st.lists(DTYPES)),
    st.tuples(st.just("release"), GRAPHS, IDS, NUMBERS),
    st.tuples(st.just("reduce"), GRAPHS, IDS, SIZES),
    st.tuples(st.just("reduce_fused"), GRAPHS, st.lists(IDS)),
    st.tuples(st.just("free"), IDS, FLAGS),
    st.tuples(st.sampled_from(["offload", "wait_offload", "reload", "wait_reload"]), GRAPHS, IDS),
    st.tuples(st.sampled_from(["offload_parameter", "reload_parameter"]), GRAPHS, IDS),
)
# A good start for most sequences: else hardly any would get far.
PREAMBLE: list[tuple[Any, ...]] = [
    ("init", 8), ("register_param", 0, 0, True, False), ("register_param", 1, 1, True, False),
    ("register_graph_z3", 0, [0, 1]), ("start_forward",), ("allgather", 0, 0, None), ("start_backward", True),
]  # fmt: skip


class _Session:
    """Carries out calls on the runtime, and remembers the tensors that they need."""

    def __init__(self) -> None:
        from lightning_deepcompile import dc

        self.dc = dc
        self.shards: dict[int, Tensor] = {}
        self.host: dict[int, Tensor] = {}
        self.profiled = False

    def run(self, call: tuple[Any, ...]) -> None:
        name, *arguments = call
        action: Callable[..., Any] = getattr(self, f"do_{name}", None) or getattr(self.dc, name)
        action(*arguments)

    def do_init(self, size: int) -> None:
        self.dc.init(dist.group.WORLD, {"free_activation_threshold": 8, "double_buffer": size % 2 == 0}, size)
        self.shards.clear()

    def do_cleanup(self, _: int) -> None:
        self.dc.cleanup()

    def do_reset(self, _: int) -> None:
        self.dc.reset()

    def do_register_param(self, ds_id: int, shape: int, trained: bool, broken: bool) -> None:
        size = SHAPES[shape]
        rows = torch.arange(torch.Size(size).numel(), dtype=torch.float32).reshape(size or (1,)) + ds_id
        shard = rows[:-1] if broken else rows
        self.dc.register_param(ds_id, size, shard, torch.zeros_like(shard) if trained else None)
        self.shards[ds_id] = rows.clone().reshape(size)

    def do_update_param_grad_buffer(self, ds_id: int) -> None:
        self.dc.update_param_grad_buffer(ds_id, torch.zeros(SHAPES[0]))

    def do_allgather(self, graph_id: int, ds_id: int, dtype: torch.dtype | None) -> None:
        ops = torch.ops.dc
        launched = ops.allgather_param(torch.empty(0), graph_id, ds_id, dtype)
        full = ops.wait_allgather(launched, graph_id, ds_id)
        assert full.shape == self.shards[ds_id].shape and full.dtype == (dtype or torch.float32)
        self.profiled |= self.dc.is_profiling()
        if not self.dc.is_profiling():
            assert torch.equal(full, self.shards[ds_id].to(full.dtype))

    def do_prefetch(self, graph_id: int, ids: list[int], dtypes: list[torch.dtype | None]) -> None:
        given = [d or torch.float32 for d in dtypes] if dtypes else None
        torch.ops.dc.prefetch_params_fused(graph_id, [], ids, given)

    def do_release(self, graph_id: int, ds_id: int, users: int) -> None:
        torch.ops.dc.release_param(torch.empty(0), graph_id, ds_id, users)

    def do_reduce(self, graph_id: int, ds_id: int, shape: int) -> None:
        torch.ops.dc.reduce_grad(torch.ones(SHAPES[shape]), graph_id, ds_id)

    def do_reduce_fused(self, graph_id: int, ids: list[int]) -> None:
        grads = [torch.ones_like(self.shards[i]) for i in ids if i in self.shards]
        torch.ops.dc.reduce_grads_fused(graph_id, grads, ids)

    def do_free(self, ds_id: int, registered: bool) -> None:
        tensor = self.shards.get(ds_id, torch.zeros(3)).clone() if registered else torch.zeros(9)
        self.dc.free_tensors([tensor])
        assert registered or self.dc.is_profiling() or tensor.numel() == 0

    def do_offload(self, graph_id: int, id_: int) -> None:
        self.host[id_] = torch.ops.dc.offload_tensor(torch.full((5,), float(id_)), graph_id, id_)

    def do_wait_offload(self, graph_id: int, id_: int) -> None:
        assert torch.ops.dc.wait_offload(torch.empty(0), graph_id, id_).eq(id_).all()

    def do_reload(self, graph_id: int, id_: int) -> None:
        torch.ops.dc.reload_tensor(self.host.get(id_, torch.empty(0)), graph_id, id_)

    def do_wait_reload(self, graph_id: int, id_: int) -> None:
        assert torch.ops.dc.wait_reload(torch.empty(0), graph_id, id_).eq(id_).all()

    def do_offload_parameter(self, graph_id: int, ds_id: int) -> None:
        torch.ops.dc.offload_parameter(torch.empty(0), graph_id, ds_id)

    def do_reload_parameter(self, graph_id: int, ds_id: int) -> None:
        torch.ops.dc.reload_parameter(torch.empty(0), graph_id, ds_id)


def _recovers(session: _Session) -> None:
    """Whatever happened, a fresh runtime in the same process works."""
    session.dc.cleanup()
    for call in PREAMBLE:
        session.run(call)
    grad = torch.zeros(4, 3)
    session.dc.update_param_grad_buffer(0, grad)
    torch.ops.dc.reduce_grad(torch.full((4, 3), 2.0), 0, 0)
    session.dc.end_backward(0)
    assert torch.equal(grad, torch.full((4, 3), 2.0))
    session.dc.cleanup()


@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(start=st.sampled_from([PREAMBLE, PREAMBLE, PREAMBLE[:4], []]), calls=st.lists(CALLS, min_size=5, max_size=25))
def _any_sequence(start: list[tuple[Any, ...]], calls: list[tuple[Any, ...]]) -> None:
    session = _Session()
    session.dc.cleanup()
    for call in [*start, *calls]:
        try:
            session.run(call)
        except (ValueError, RuntimeError) as error:
            text = str(error)
            ours = text.startswith(("lightning_deepcompile: ", "dc.", "The dc runtime", "`ds_id`", "`graph_id`"))
            assert ours and "INTERNAL ASSERT" not in text, (call, text)
    _recovers(session)


def _fuzz() -> None:
    from lightning_deepcompile.runtime import load_extension

    load_extension()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _any_sequence()


def test_no_sequence_of_calls_breaks_the_process() -> None:
    run_ranks(_fuzz, 1, timeout=600 if EXAMPLES > 1000 else 120)
