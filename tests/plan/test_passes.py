"""The default schedule, as a person reads it, and its promises for any program."""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from tracing import Captured, Simulator, capture

from lightning_deepcompile.plan.known_passes import DEFAULT_PASSES
from lightning_deepcompile.plan.optimize import apply_passes
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.program.functional import functional_program
from lightning_deepcompile.program.printer import format_program
from lightning_deepcompile.program.program import CompiledRegion, ParamInfo, Program, RegionInfo, collective_sequence
from lightning_deepcompile.program.regions import Region
from lightning_deepcompile.runtime import load_extension

# Golden programs ------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Three equal layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def _captured() -> Captured:
    return capture(Net(), torch.arange(6).view(2, 3))


def _schedule(program: Program, prefetch: int) -> Program:
    return apply_passes(program, PlanSettings(prefetch_blocks=prefetch))


def _instructions(program: Program) -> str:
    """The printed program without sizes: what runs in which order."""
    _, *lines = format_program(program).splitlines()
    return "\n".join(re.sub(r" \(.*\)| = r\d+ .*", "", line.strip()) for line in lines)


def _columns(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_a_program_prints_what_moves_and_how_much() -> None:
    printed = format_program(_schedule(_captured().lower("forward"), prefetch=1))
    assert printed == _FORWARD_IN_FULL


_FORWARD_IN_FULL = """\
forward [lower -> zero3 -> prefetch]: 5 regions, 4 distinct
  gather   embed (1 param, 384 B float32)
  gather   layers.0 (2 params, 288 B float32)
  wait     embed (1 param, 384 B float32)
  compute  region_0 = r0 (embed; 1 ops)
  release  embed (1 param, 384 B float32)
  gather   layers.1 (2 params, 288 B float32)
  wait     layers.0 (2 params, 288 B float32)
  compute  region_1 = r1 (layers.0; 3 ops)
  release  layers.0 (2 params, 288 B float32)
  gather   layers.2 (2 params, 288 B float32)
  wait     layers.1 (2 params, 288 B float32)
  compute  region_2 = r2 (layers.1; 5 ops)
  release  layers.1 (2 params, 288 B float32)
  gather   head (2 params, 432 B float32)
  wait     layers.2 (2 params, 288 B float32)
  compute  region_3 = r2 (layers.2; 5 ops)
  release  layers.2 (2 params, 288 B float32)
  wait     head (2 params, 432 B float32)
  compute  region_4 = r3 (head; 6 ops)
  release  head (2 params, 432 B float32)"""


def test_forward_without_prefetch_gathers_right_before_use() -> None:
    program = _schedule(_captured().lower("forward"), prefetch=0)
    assert program.kept == ()
    assert _instructions(program) == _columns("""
        gather   embed
        wait     embed
        compute  region_0
        release  embed
        gather   layers.0
        wait     layers.0
        compute  region_1
        release  layers.0
        gather   layers.1
        wait     layers.1
        compute  region_2
        release  layers.1
        gather   layers.2
        wait     layers.2
        compute  region_3
        release  layers.2
        gather   head
        wait     head
        compute  region_4
        release  head
    """)


def test_forward_with_two_blocks_ahead() -> None:
    program = _schedule(_captured().lower("forward"), prefetch=2)
    assert _instructions(program) == _columns("""
        gather   embed
        gather   layers.0
        gather   layers.1
        wait     embed
        compute  region_0
        release  embed
        gather   layers.2
        wait     layers.0
        compute  region_1
        release  layers.0
        gather   head
        wait     layers.1
        compute  region_2
        release  layers.1
        wait     layers.2
        compute  region_3
        release  layers.2
        wait     head
        compute  region_4
        release  head
    """)


def test_backward_releases_what_was_kept_and_reduces_each_block() -> None:
    """The head's bias was kept with its block though backward does not read it: it goes first."""
    captured = _captured()
    kept = tuple(captured.ids("head.weight", "head.bias"))
    program = _schedule(captured.lower("backward", kept=kept), prefetch=1)
    assert _instructions(program) == _columns("""
        release  head
        gather   head
        gather   layers.2
        wait     head
        compute  region_0
        release  head
        reduce   head
        gather   layers.1
        wait     layers.2
        compute  region_1
        release  layers.2
        reduce   layers.2
        gather   layers.0
        wait     layers.1
        compute  region_2
        release  layers.1
        reduce   layers.1
        wait     layers.0
        compute  region_3
        release  layers.0
        reduce   layers.0
        compute  region_4
        reduce   embed
        end of backward
    """)


def test_tied_weights_are_gathered_where_they_are_read_and_reduced_once() -> None:
    net = Net()
    net.head.weight = net.embed.weight
    captured = capture(net, torch.arange(6).view(2, 3))
    (tied,) = captured.ids("embed.weight")
    forward = _schedule(captured.lower("forward"), prefetch=2)
    backward = _schedule(captured.lower("backward"), prefetch=2)
    assert [tied in ids for ids in _collectives(forward, "gather")] == [True, False, False, False, True]
    assert sum(ids.count(tied) for ids in _collectives(backward, "reduce")) == 1


def test_a_pass_leaves_its_argument_as_it_is() -> None:
    program = _captured().lower("backward")
    before = dict(program.values), dict(program.regions), program.schedule
    _schedule(program, prefetch=2)
    assert (program.values, program.regions, program.schedule) == before


# Promises -------------------------------------------------------------------------------------------------------------


@dataclass
class Shape:
    """A program to be made up.

    Args:
        kind: Its kind.
        reads: Parameters that each region reads.
        grads: Parameters whose gradients each region produces.
        kept: Parameters that a forward program left gathered.
    """

    kind: Any
    reads: list[list[int]]
    grads: list[list[int]]
    kept: tuple[int, ...]


_PARAMS = 6


@st.composite
def shapes(draw: Callable[..., Any]) -> Shape:
    kind = draw(st.sampled_from(["forward", "backward", "inference"]))
    ids = st.integers(0, _PARAMS - 1)
    reads = draw(st.lists(st.lists(ids, max_size=3, unique=True), min_size=1, max_size=8))
    grads: list[list[int]] = [[] for _ in reads]
    kept: tuple[int, ...] = ()
    if kind == "backward":
        for ds_id in draw(st.sets(ids)):
            grads[draw(st.integers(0, len(reads) - 1))].append(ds_id)
        kept = tuple(sorted(draw(st.sets(ids, max_size=3))))
    return Shape(kind, reads, grads, kept)


def _full() -> dict[int, Tensor]:
    return {k: torch.full((2,), float(k + 1)) for k in range(_PARAMS)}


def _program(shape: Shape) -> Program:
    """A program as of `lower`: a gather for every region that reads a parameter, reductions after their region."""
    load_extension()
    graph = fx.Graph()
    regions, compiled = [], []
    shards = [graph.placeholder(f"shard_{k}") for k in range(_PARAMS)]
    value = graph.placeholder("x")
    gather = torch.ops.dc.gather.default
    whole = [graph.call_function(gather, (shard, k, [2], torch.float32)) for k, shard in enumerate(shards)]
    outputs: list[fx.Node] = []
    for index, (reads, grads) in enumerate(zip(shape.reads, shape.grads, strict=True)):

        def run(args: list[Any], index: int = index, grads: list[int] = grads) -> list[Tensor]:
            x, *parameters = args
            args.clear()
            # As regions do, it returns memory of its own: the runtime's is gone once the parameters are released.
            x = x * 0.5 + sum((p * (i + 1) for i, p in enumerate(parameters)), torch.zeros(2))
            return [x, *(x * (index + k + 1) for k in grads)]

        gathers = [whole[k] for k in reads]
        call = graph.call_function(run, ([value, *gathers],))
        made = [graph.call_function(operator.getitem, (call, i)) for i in range(1 + len(grads))]
        regions.append(Region([call, *made], inputs=[value, *gathers], outputs=made))
        compiled.append(CompiledRegion(run, RegionInfo(str(index), (), 1)))
        value, *produced = made
        for k, grad in zip(grads, produced, strict=True):
            outputs.append(graph.call_function(torch.ops.dc.reduce.default, (grad, k, [1], torch.float32)))
    graph.output((value, *outputs))
    params = {k: ParamInfo(k, f"p{k}", f"block{k // 2}", 8, torch.float32) for k in range(_PARAMS)}
    gm = fx.GraphModule(nn.Module(), graph)
    program = functional_program(gm, regions, compiled, name="synthetic", kind=shape.kind, graph_id=7, params=params)
    return program.with_kept(shape.kept)


def _run(program: Program, kept: tuple[int, ...] = (), boundary: bool = True) -> tuple[Tensor, Simulator]:
    full = _full()
    simulator = Simulator(full, boundary, gathered={k: full[k].clone() for k in kept})
    run = simulator.generate(program)
    value, *grads = run([*(torch.zeros(1) for _ in range(_PARAMS)), torch.ones(2)])
    if program.history[-1] != "lower":
        assert grads == [None] * len(grads), "the runtime accumulates gradients: none may leave the program"
    return value, simulator


@settings(deadline=None, max_examples=150)
@given(shape=shapes(), prefetch=st.integers(0, 3))
def test_schedules_keep_their_promises(shape: Shape, prefetch: int) -> None:
    base = _program(shape)
    plan = PlanSettings(prefetch_blocks=prefetch)
    program, unmoved = (apply_passes(base, plan, passes) for passes in (DEFAULT_PASSES, DEFAULT_PASSES[:1]))
    expected, functional = _run(base)
    value, simulator = _run(program, shape.kept)

    # Same values, each gradient reduced once.
    torch.testing.assert_close(value, expected, rtol=0, atol=0)
    assert simulator.reductions == {k: 1 for grads in shape.grads for k in grads}
    assert all(torch.equal(simulator.grads[k], functional.grads[k]) for k in functional.grads)

    # Every wait has one launch before it and no release in between; what is gathered is released.
    events: dict[int, str] = defaultdict(str)
    for name, ids in simulator.log:
        for k in ids:
            events[k] += {"launch": "L", "wait": "W", "release": "R"}.get(name, "")
    for k, history in events.items():
        unread = k in shape.kept and not any(k in reads for reads in shape.reads)
        assert re.fullmatch("R" if unread else "(LW+R)*", history), f"parameter {k}: {history}"
    assert not simulator.gathered

    # Launches keep their order (all ranks issue the same collectives) and run at most `prefetch` groups ahead.
    for kind in ("gather", "reduce"):
        assert _collectives(program, kind) == _collectives(unmoved, kind)
    for ahead, needed in zip(_launches_before_waits(program), _launches_before_waits(unmoved), strict=True):
        assert needed <= ahead <= needed + prefetch

    # Backward says that it is over, after everything else.
    ends = [name for name, _ in simulator.log].count("end_backward")
    assert ends == (shape.kind == "backward") and (not ends or simulator.log[-1][0] == "end_backward")


def _collectives(program: Program, kind: str) -> list[tuple[int, ...]]:
    return [ids for name, ids in collective_sequence(program) if name == kind]


def _launches_before_waits(program: Program) -> list[int]:
    counts, launched = [], 0
    for instruction in program.schedule.instructions:
        launched += instruction.op == "gather"
        if instruction.op == "wait":
            counts.append(launched)
    return counts


def test_launches_move_as_far_ahead_as_asked() -> None:
    """Every parameter is read once, so launches reach the bound of the test above."""
    shape = Shape("forward", [[0], [], [1, 2], [3], [4], [5]], [[]] * 6, ())
    for prefetch, expected in enumerate([[1, 2, 3, 4, 5], [2, 3, 4, 5, 5], [3, 4, 5, 5, 5]]):
        program = apply_passes(_program(shape), PlanSettings(prefetch_blocks=prefetch))
        assert _launches_before_waits(program) == expected


def test_a_launch_stays_behind_the_release_of_its_own_parameter() -> None:
    """Launched before, it would find the parameter there, and the release would take it away again."""
    shape = Shape("forward", [[0], [1], [0], [2]], [[]] * 4, ())
    program = apply_passes(_program(shape), PlanSettings(prefetch_blocks=3))
    assert _launches_before_waits(program) == [2, 4, 4, 4]
