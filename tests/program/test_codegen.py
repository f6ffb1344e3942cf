"""Generated code computes what the graph says, under any names, and keeps nothing alive that is no longer needed."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shuffle import KEEPING
from torch import Tensor, fx, nn
from tracing import Simulator, capture

from lightning_deepcompile.plan.known_passes import DEFAULT_PASSES
from lightning_deepcompile.plan.optimize import apply_passes
from lightning_deepcompile.plan.reductions import merge_reductions
from lightning_deepcompile.plan.settings import PlanSettings
from lightning_deepcompile.program.codegen import generate
from lightning_deepcompile.program.functional import functional_program
from lightning_deepcompile.program.program import CompiledRegion, ParamInfo, Program, RegionInfo
from lightning_deepcompile.program.regions import Region
from lightning_deepcompile.program.reschedule import reschedule
from lightning_deepcompile.program.schedule import ProgramKind, ScheduleError
from lightning_deepcompile.runtime import load_extension


class Builder:
    """Writes a program by hand."""

    def __init__(self) -> None:
        load_extension()
        self.graph = fx.Graph()
        self.regions: list[Region] = []
        self.compiled: list[CompiledRegion] = []

    def region(self, run: Callable[[list[Any]], Sequence[Any]], *args: Any, outputs: int = 1) -> list[fx.Node]:
        """Calls `run`; returns the elements of its result."""
        call = self.graph.call_function(lambda *inputs: run(list(inputs)), args)
        made = [self.graph.call_function(operator.getitem, (call, i)) for i in range(outputs)]
        self.regions.append(Region([call, *made], inputs=list(args), outputs=made))
        self.compiled.append(CompiledRegion(run, RegionInfo("key", (), 1)))
        return made

    @property
    def gm(self) -> fx.GraphModule:
        return fx.GraphModule(nn.Module(), self.graph)

    def program(self, *outputs: Any, kind: ProgramKind = "forward") -> Program:
        self.graph.output(outputs)
        parts = self.gm, self.regions, self.compiled
        params = {0: ParamInfo(0, "weight", "block", 8, torch.float32)}
        return functional_program(*parts, name="test", kind=kind, graph_id=7, params=params)


def adding(weight: float) -> Callable[[list[Any]], Sequence[Any]]:
    def run(args: list[Any]) -> list[Any]:
        total = sum(args) * weight
        args.clear()
        return [total, total + 1, total + 2]

    return run


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_code_computes_what_interpretation_computes(data: st.DataObject) -> None:
    """Random straight lines of regions and scalar functions, with unread values, over awkward names."""
    names = ["args", "inputs", "run", "_", "region", "add", "mul", "const_1", "x", "args_", "del_", "None_"]
    builder = Builder()
    count = data.draw(st.integers(1, 4))
    values: list[fx.Node] = []
    for name in data.draw(st.permutations(names))[:count]:
        values.append(builder.graph.create_node("placeholder", name, name=name))
    for _ in range(data.draw(st.integers(0, 6))):
        chosen = [data.draw(st.sampled_from(values)) for _ in range(data.draw(st.integers(1, 3)))]
        if data.draw(st.booleans()):
            made = builder.region(adding(data.draw(st.integers(1, 3))), *chosen, outputs=3)
            values += data.draw(st.lists(st.sampled_from(made), unique=True))
        else:
            target = data.draw(st.sampled_from([operator.add, operator.mul]))
            other = data.draw(st.sampled_from([1.5, -2, float("inf"), True]))
            values.append(builder.graph.call_function(target, (chosen[0], other)))
    outputs = [data.draw(st.sampled_from([*values, None, 3])) for _ in range(data.draw(st.integers(0, 3)))]
    program = builder.program(*outputs)
    run, source = generate(program)
    args: list[Any] = [float(i + 1) for i in range(count)]
    expected = fx.Interpreter(builder.gm).run(*args)
    assert repr(list(run(args))) == repr(list(expected)), source  # nan, too
    assert args == [], "the arguments were handed over: the caller must not keep them alive"


def test_a_scheduled_program_computes_what_its_graphs_compute() -> None:
    """Cutting, scheduling and code generation together, against the partitioned graphs as they were."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True) for _ in "ab")
            self.head = nn.Linear(8, 11)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(x).logsumexp(-1).mean() + self.layers[0].linear1.weight.square().sum()

    torch.manual_seed(0)
    captured = capture(Net(), torch.arange(10).view(2, 5))
    assert captured.forward is not None and captured.backward is not None
    reference = Simulator(captured.full)
    forward = reference.interpret(captured.forward, captured.args)
    tangents = [torch.ones(())]
    reference.interpret(captured.backward, [*forward[captured.num_outputs :], *tangents])

    for prefetch, passes in ((0, DEFAULT_PASSES), (1, KEEPING), (2, KEEPING)):
        simulator = Simulator(captured.full)
        plan = PlanSettings(prefetch_blocks=prefetch)
        program = apply_passes(captured.lower("forward"), plan, passes)
        outputs = simulator.generate(program)(list(captured.args))
        torch.testing.assert_close(list(outputs), list(forward), rtol=0, atol=0)
        assert set(simulator.gathered) == set(program.kept) and bool(program.kept) == (passes is KEEPING)
        program = apply_passes(captured.lower("backward", kept=program.kept), plan)
        grads = simulator.generate(program)([*outputs[captured.num_outputs :], *tangents])
        assert all(grad is None for grad in grads)
        assert not simulator.gathered
        assert simulator.grads.keys() == reference.grads.keys() == captured.full.keys()
        for ds_id, grad in reference.grads.items():
            torch.testing.assert_close(simulator.grads[ds_id], grad, rtol=1e-6, atol=1e-7)
        assert set(simulator.reductions.values()) == {1}


def test_values_die_before_their_last_consumer_runs() -> None:
    """A region owns what it is handed last: when it drops its inputs, they are gone."""
    alive: dict[str, weakref.ref[Tensor]] = {}
    seen: list[set[str]] = []

    def produce(*names: str) -> Callable[[list[Any]], Sequence[Any]]:
        def run(args: list[Any]) -> list[Tensor]:
            args.clear()
            seen.append({name for name, ref in alive.items() if ref() is not None})
            made = [torch.zeros(1) for _ in names]
            alive.update((name, weakref.ref(tensor)) for name, tensor in zip(names, made, strict=True))
            return made

        return run

    builder = Builder()
    x, unused = builder.graph.placeholder("x"), builder.graph.placeholder("unused")
    a, b, unread = builder.region(produce("a", "b", "unread"), x, outputs=3)
    (c,) = builder.region(produce("c"), a, b)
    (d,) = builder.region(produce("d"), a, c)
    e = builder.graph.call_function(torch.neg, (b,))
    builder.region(produce("f"), d, e)
    del unused, unread
    run, _ = generate(builder.program(c))
    arguments = [torch.zeros(1), torch.zeros(1)]
    alive.update(x=weakref.ref(arguments[0]), unused=weakref.ref(arguments[1]))
    run(arguments)
    assert seen == [set(), {"a", "b"}, {"b", "c"}, {"c"}]


def test_gradients_of_one_parameter_are_told_apart_by_name() -> None:
    """Two of one region, one of another, and one whose result the program reads: names tell them apart in any order."""
    builder = Builder()
    x, size = builder.graph.placeholder("x"), builder.graph.placeholder("size")  # a symbolic size of the shard
    first, second, _ = builder.region(adding(2), x, outputs=3)
    reduce = torch.ops.dc.reduce.default
    early = [builder.graph.call_function(reduce, (value, 0, [size], torch.float32)) for value in (first, second)]
    third, *_ = builder.region(adding(10), first, outputs=3)
    late, read = (builder.graph.call_function(reduce, (third, 0, [2], torch.float32)) for _ in range(2))
    used, *_ = builder.region(adding(3), read, outputs=3)
    base = builder.program(*early, late, used, kind="backward")
    scheduled = apply_passes(base, PlanSettings())
    merged = merge_reductions(scheduled.schedule, *scheduled.schedule.at("reduce"))
    for program in (scheduled, reschedule(scheduled, merged, "merged")):
        names = [name for group in program.schedule.groups("reduce") for name in group.values]
        assert len(names) == len(set(names)) == 3
        simulator = Simulator({0: torch.zeros(2)})
        results = simulator.generate(program)([torch.ones(2), 2])
        assert simulator.grads[0].tolist() == [2 + 3 + 20 + 20] * 2 and simulator.reductions == {0: 4}
        assert [value is None for value in results] == [True, True, True, False]
    with pytest.raises(ScheduleError, match="computes or reduces other values"):
        turned = scheduled.schedule.groups("reduce")[0].part([1, 0])
        parts = [turned if i.op == "reduce" and len(i.ids) == 2 else i for i in scheduled.schedule.instructions]
        reschedule(scheduled, scheduled.schedule.with_instructions(parts), "turned")


def test_an_unknown_kind_of_node_is_refused() -> None:
    builder = Builder()
    x = builder.graph.placeholder("x")
    with pytest.raises(RuntimeError, match="test: neg is a call_method"):
        builder.program(builder.graph.call_method("neg", (x,)))
