"""Every private part of PyTorch that the package leans on is there, and does what it is used for."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from lightning_deepcompile import compat

aten = torch.ops.aten


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def boxed(gm: fx.GraphModule) -> compat.BoxedCallable:
    def run(args: list[Any]) -> Any:
        inputs = tuple(args)
        args.clear()
        return gm(*inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class Compiler:
    """A backend that runs AOTAutograd's graphs as they are, and keeps them."""

    def __init__(self, tag: Callable[[fx.GraphModule], None] = lambda gm: None, **options: Any) -> None:
        self.graphs: dict[str, fx.GraphModule] = {}
        self.tag, self.options = tag, options

    def __call__(self, gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        def keep(kind: str) -> Callable[..., compat.BoxedCallable]:
            def compile(gm: fx.GraphModule, inputs: Any) -> compat.BoxedCallable:
                if kind == "inference":
                    compat.inference_joint_passes(gm)
                self.graphs[kind] = gm
                return self.compiled(kind, gm, inputs)

            return compile

        return compat.capture(
            gm,
            example_inputs,
            forward=keep("forward"),
            backward=keep("backward"),
            inference=keep("inference"),
            partitioner=lambda gm, inputs, **kwargs: compat.partition(gm, inputs, self.tag, **kwargs),
            **self.options,
        )

    def compiled(self, kind: str, gm: fx.GraphModule, inputs: Any) -> compat.BoxedCallable:
        return boxed(gm)

    def targets(self, kind: str) -> list[str]:
        """The targets of a graph's calls."""
        return [str(n.target) for n in self.graphs[kind].graph.nodes if n.op == "call_function"]


def test_capture_calls_each_compiler() -> None:
    compiler = Compiler()
    x, w = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
    step = torch.compile(lambda x, w: (x @ w).tanh().sum(), backend=compiler)
    step(x, w).backward()
    assert set(compiler.graphs) == {"forward", "backward"}
    torch.testing.assert_close(w.grad, torch.autograd.grad((x @ w).tanh().sum(), w)[0])
    with torch.no_grad():
        step(x, w)
    assert "inference" in compiler.graphs


def test_backward_graphs_name_the_gradients_of_outputs_tangents() -> None:
    """Regions use this name to find inputs that exist only once backward has begun."""
    compiler = Compiler()
    torch.compile(lambda w: (w.sin().sum(), w.cos()), backend=compiler)(torch.randn(3, requires_grad=True))[
        0
    ].backward()
    inputs = [n for n in compiler.graphs["backward"].graph.nodes if n.op == "placeholder"]
    assert list(map(compat.is_tangent, inputs)).count(True) == 2
    assert all(map(compat.is_tangent, inputs[-2:]))


@pytest.mark.parametrize("eager", [False, True])
def test_random_operators_are_of_the_kind_asked_for(eager: bool) -> None:
    """Inductor's (named `inductor_*`) are for Inductor alone; the look-ups among them are moved by name."""
    compiler = Compiler(eager=eager)
    step = torch.compile(lambda x, w: F.dropout(x * w, 0.5).sum(), backend=compiler)
    x, w = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    torch.manual_seed(0)
    actual = step(x, w)
    torch.manual_seed(0)
    expected = F.dropout(x * w, 0.5).sum()
    with torch.no_grad():
        step(x, w)
    for kind in ("forward", "inference"):
        calls = [n for n in compiler.graphs[kind].graph.nodes if isinstance(n.target, compat.OpOverload)]
        assert any(compat.is_inductor_random(n.target) for n in calls) != eager
        assert eager or any(map(compat.is_seed, calls))
    if eager:
        assert torch.equal(actual, expected)
    assert not torch._inductor.config.fallback_random


def test_checkpointed_dropout_is_the_same_in_backward() -> None:
    """Run eagerly, Inductor's random operators would give backward another mask: wrong gradients, without a word."""
    compiler = Compiler(eager=True)
    x = torch.randn(64, requires_grad=True)
    step = torch.compile(
        lambda x: checkpoint(lambda x: F.dropout(x.sin(), 0.5), x, use_reentrant=False), backend=compiler
    )
    y = step(x)
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0)


def test_marks_are_set_after_inductors_passes_and_obeyed() -> None:
    """A pass may replace a marked node by one without a mark."""
    seen: list[list[str]] = []

    def tag(gm: fx.GraphModule) -> None:
        seen.append([str(n.target) for n in gm.graph.nodes if n.op == "call_function"])
        for node in gm.graph.nodes:
            if node.target is aten.mm.default:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                node.meta["ac_graph_id"] = 1

    def step(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w) * torch.ones(4)).sin().sum()  # Inductor drops the multiplication by one

    for mark in (tag, lambda gm: None):
        compiler = Compiler(mark)
        w = torch.randn(4, 4, requires_grad=True)
        torch._dynamo.reset()
        torch.compile(step, backend=compiler)(torch.randn(3, 4), w).backward()
        again = compiler.targets("backward").count("aten.mm.default")
        assert again == (2 if mark is tag else 1)
    assert len(seen) == 1 and "aten.mm.default" in seen[0] and "aten.ones.default" not in seen[0]
    assert not any("mul.Tensor" in name for name in compiler.targets("forward"))


def test_the_fake_mode_is_that_of_the_compilation() -> None:
    modes = []

    class Recorder(Compiler):
        def compiled(self, kind: str, gm: fx.GraphModule, inputs: Any) -> compat.BoxedCallable:
            modes.append((compat.current_fake_mode(), inputs[0].fake_mode))
            return super().compiled(kind, gm, inputs)

    x = torch.randn(3, 3, requires_grad=True)
    torch.compile(lambda x: (x @ x).sum(), backend=Recorder())(x).backward()
    assert len(modes) == 2 and all(current is mode for current, mode in modes)
    with pytest.raises((RuntimeError, AttributeError)):
        compat.current_fake_mode()


def test_real_tensors_inside_a_fake_mode() -> None:
    with FakeTensorMode():
        with compat.real_tensors():
            assert torch.arange(3).sum().item() == 3
        assert type(torch.arange(3)) is not Tensor


def test_checkpoints_are_recognised_in_dynamos_graph() -> None:
    found = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        for node in gm.graph.nodes:
            if compat.is_checkpoint(node):
                body, operand = node.args
                found.append((gm.get_submodule(body.target), operand.op))
        return gm

    x = torch.randn(3, requires_grad=True)
    torch.compile(lambda x: checkpoint(torch.sin, x, use_reentrant=False), backend=backend)(x)
    ((body, op),) = found
    assert isinstance(body, fx.GraphModule) and op == "placeholder"
    assert [n.target for n in body.graph.nodes if n.op == "call_function"] == [torch.sin]


def test_calls_of_an_effectful_operator_stay_and_keep_their_order() -> None:
    library = torch.library.Library("ldc_test_compat", "FRAGMENT")
    library.define("log(Tensor x, int number) -> Tensor")
    seen: list[int] = []
    library.impl("log", lambda x, number: (seen.append(number), x.clone())[1], "CompositeExplicitAutograd")
    torch.library.register_fake("ldc_test_compat::log", lambda x, number: torch.empty_like(x), lib=library)
    operator = torch.ops.ldc_test_compat.log.default
    torch.fx.node.has_side_effect(operator)
    compat.mark_effectful(operator)

    def function(x: Tensor) -> Tensor:
        for number in (3, 1, 1, 2):
            operator(x, number)
        return x + 1

    torch.compile(function, fullgraph=True)(torch.zeros(3))
    assert seen == [3, 1, 1, 2]


# Regions --------------------------------------------------------------------------------------------------------------


def _rotated(gm: fx.GraphModule, by: int) -> tuple[fx.GraphModule, list[Any]]:
    """A region of all of `gm`, whose inputs come in another order than the graph's, as those of any region do."""
    graph = fx.Graph()
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    inputs = inputs[by:] + inputs[:by]
    copies = {node: graph.node_copy(node) for node in inputs}
    for node in gm.graph.nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    output = next(n for n in graph.nodes if n.op == "output")
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    return fx.GraphModule(gm, graph), [n.meta["val"] for n in inputs]


def _overwritten(compile_region: Callable[..., compat.BoxedCallable]) -> bool:
    """Returns whether a region compiled inside of AOTAutograd's compilation of backward overwrites a user tensor."""
    results = []

    class Regions(Compiler):
        def compiled(self, kind: str, gm: fx.GraphModule, inputs: Any) -> compat.BoxedCallable:
            if kind == "forward":
                return boxed(gm)
            names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
            donated = TracingContext.get().fw_metadata.bw_donated_idxs
            assert donated, "nothing is donated: the case tests nothing"
            # The user's tensor comes where the outer graph has an activation that it may overwrite.
            place = max(donated)
            by = (names.index("primals_1") - place) % len(names)
            region, fakes = _rotated(gm, by)
            run = compile_region(region, fakes)

            def backward(args: list[Any]) -> Any:
                mine = args[by:] + args[:by]
                args.clear()
                user, before = mine[place], mine[place].clone()
                result = run(mine)
                results.append(not torch.equal(user, before))
                return result

            backward._boxed_call = True  # type: ignore[attr-defined]
            return backward

    torch._dynamo.reset()
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    # Caches off: they do not tell a graph whose inputs may be overwritten from one whose inputs may not.
    with torch._inductor.config.patch(force_disable_caches=True):
        step = torch.compile(lambda x, w: (x.sin() @ w).exp().sum() + x.tanh().sum(), backend=Regions())
        step(x, w).backward()
    (result,) = results
    return result


@pytest.mark.slow
def test_a_region_does_not_overwrite_its_inputs() -> None:
    """AOTAutograd's context says which inputs of the *outer* backward graph may be overwritten, by position."""

    def in_the_outer_context(gm: fx.GraphModule, inputs: list[Any]) -> compat.BoxedCallable:
        from torch._inductor.compile_fx import compile_fx_inner

        return compile_fx_inner(gm, inputs, is_backward=True, is_inference=False, static_input_idxs=())

    assert _overwritten(in_the_outer_context), "the trap is gone from PyTorch, or this test no longer finds it"
    assert not _overwritten(lambda gm, inputs: compat.compile_region(gm, inputs, is_backward=True, is_inference=False))


@pytest.mark.gpu
def test_a_region_of_symbolic_sizes_does_not_depend_on_thresholds() -> None:
    """Inductor joins both gradients of a norm from certain numbers of rows on; a guard on each would cost a graph."""

    class Regions(Compiler):
        def compiled(self, kind: str, gm: fx.GraphModule, inputs: Any) -> compat.BoxedCallable:
            kinds.append(kind)
            return compat.compile_region(gm, inputs, is_backward=kind == "backward", is_inference=False)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (2048,), weight).square().sum()

    kinds: list[str] = []
    step, weight = (
        torch.compile(norm, backend=Regions()),
        torch.randn(2048, device="cuda", dtype=torch.float64, requires_grad=True),
    )
    for rows in (64, 3000, 9000):
        x = torch.randn(rows, 2048, device="cuda", dtype=torch.float64, requires_grad=True)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        found = torch.autograd.grad(step(x, weight), [x, weight])
        expected = torch.autograd.grad(norm(x, weight), [x, weight])
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert kinds == ["forward", "backward"]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_compiled_region_rounds_casts_and_writes_to_an_input(device: str) -> None:
    """Regions that derive values from shards return nothing, and must round like a cast of the whole parameter."""
    runs = []

    def backend(gm: fx.GraphModule, inputs: list[Tensor]) -> Any:
        graph, cast = fx.Graph(), torch.ops.prims.convert_element_type.default
        x, made = graph.placeholder("x"), graph.placeholder("made")
        values = [compat.current_fake_mode().from_tensor(torch.empty(64, device=device)) for _ in range(2)]
        x.meta["val"], made.meta["val"] = values
        narrow = graph.call_function(cast, (x, torch.bfloat16))
        wide = graph.call_function(cast, (narrow, torch.float32))
        three = graph.call_function(torch.ops.aten.mul.Tensor, (wide, 3.0))
        written = graph.call_function(torch.ops.aten.copy_.default, (made, three))
        narrow.meta["val"] = torch.empty_like(values[0], dtype=torch.bfloat16)
        for node in (wide, three, written):
            node.meta["val"] = torch.empty_like(values[0])
        graph.output(()).meta["user_visible_output_idxs"] = []
        region = fx.GraphModule(torch.nn.Module(), graph)
        runs.append(compat.compile_region(region, values, is_backward=False, is_inference=True, rounds=True))
        return gm

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2, device=device))
    x, made = torch.randn(64, device=device), torch.zeros(64, device=device)
    runs[0]([x, made])
    assert made.equal(x.bfloat16().float() * 3) == compat.rounds_casts([x])


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
def test_arguments_of_operators_lie_in_memory_as_a_key_says(turned: bool) -> None:
    """Without it, Inductor lays them out as it likes: a kernel that gets addresses would compute something else."""
    seen, runs = [], []

    @torch.library.custom_op(f"compat_tests::strides_{turned}", mutates_args=())
    def strides(x: Tensor) -> Tensor:
        seen.append(x.stride())
        return x.clone()

    strides.register_fake(lambda x: torch.empty_like(x))

    def backend(gm: fx.GraphModule, inputs: list[Tensor]) -> Any:
        graph, mode = fx.Graph(), compat.current_fake_mode()
        x = graph.placeholder("x")
        x.meta["val"] = mode.from_tensor(torch.empty(4, 6))
        double = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2.0))
        double.meta["val"] = torch.empty_like(x.meta["val"])
        result = graph.call_function(strides._opoverload, (double,))
        result.meta["val"] = torch.empty_like(x.meta["val"])
        with mode:
            result.meta[compat.EXACT_STRIDES] = (torch.empty(6, 4).t() if turned else torch.empty(4, 6),), {}
        graph.output((result,)).meta["user_visible_output_idxs"] = [0]
        region = fx.GraphModule(torch.nn.Module(), graph)
        runs.append(compat.compile_region(region, [x.meta["val"]], is_backward=False, is_inference=True))
        return gm

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    x = torch.randn(4, 6)
    (result,) = runs[0]([x])
    assert result.equal(x * 2) and seen == [(1, 4) if turned else (6, 1)]


@pytest.mark.slow
def test_a_compiled_region_takes_its_inputs_and_keeps_its_strides() -> None:
    """The next region was traced with these strides, and Inductor asserts them; inputs can be freed while it runs."""

    class Regions(Compiler):
        def compiled(self, kind: str, gm: fx.GraphModule, inputs: Any) -> compat.BoxedCallable:
            gm, fakes = _rotated(gm, 0)
            run = compat.compile_region(gm, fakes, is_backward=kind == "backward", is_inference=kind == "inference")

            def checked(args: list[Any]) -> Any:
                outputs = run(args)
                assert args == []
                output = next(n for n in gm.graph.nodes if n.op == "output")
                for value, node in zip(outputs, output.args[0], strict=True):
                    if isinstance(node, fx.Node) and isinstance(value, Tensor):
                        assert value.stride() == node.meta["val"].stride(), node
                return outputs

            checked._boxed_call = True  # type: ignore[attr-defined]
            return checked

    convolution = nn.Conv2d(3, 4, 3)

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ w).t().sin().exp(), convolution(x.unflatten(1, (3, 4, 4)).permute(0, 1, 3, 2)).tanh()

    x, w = torch.randn(4, 48), torch.randn(48, 6, requires_grad=True)
    compiled = torch.compile(step, backend=Regions())
    actual, expected = compiled(x, w), step(x, w)
    torch.testing.assert_close(actual, expected)
    sum(value.sum() for value in actual).backward()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, w), expected)


def test_gathering_into_one_tensor_warns_of_nothing(mesh: DeviceMesh) -> None:
    whole = torch.zeros(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.all_gather_into(whole, torch.ones(3), mesh.get_group())
    assert whole.tolist() == [1, 1, 1]


def test_a_subclass_of_dtensor_is_asked(mesh: DeviceMesh) -> None:
    asked: list[str] = []

    @compat.dispatches
    class Asked(DTensor):
        __slots__ = ()

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(compat.name_of_operator(function))
            return function(*fx.node.map_aggregate(args, local), **(kwargs or {}))

    def local(one: Any) -> Any:
        return compat.local_of(one) if isinstance(one, DTensor) else one

    tensor: Any = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False)
    tensor.__class__ = Asked
    assert type(tensor.sum()) is Tensor and type(torch.stack([torch.ones(3), tensor])) is Tensor
    assert asked == ["sum", "stack"] or asked == ["sum", "cat"], asked


def test_attributes_of_many_tensors_are_read_without_python(mesh: DeviceMesh) -> None:
    @compat.dispatches
    class Asked(DTensor):
        __slots__ = ()

    tensor: Any = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False)
    tensor.__class__ = Asked
    called: list[str] = []
    with compat.reading_attributes():
        sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
        read = tensor.grad, tensor.requires_grad, tensor._version
        tensor.grad = None
        sys.setprofile(None)
    assert read == (None, False, 0) and called == []


def test_flight_records_name_libraries_that_the_analyser_knows() -> None:
    from torch.distributed.flight_recorder.components.types import Op

    def read(library: str) -> str:
        event = dict.fromkeys("collective_seq_id p2p_seq_id time_created_ns".split(), 0)
        event |= dict.fromkeys("input_sizes output_sizes input_dtypes output_dtypes".split(), [])
        event |= {"profiling_name": f"{library}:_all_gather_base", "state": "started", "process_group": ("0", "")}
        return Op(event, {"0": {0}}, "0").type

    for library in ("nccl", "gloo"):
        known_as = compat.library_in_flight_records(library)
        assert read(known_as) == "_all_gather_base"
        if known_as != library:
            with pytest.raises(AssertionError, match=library):
                read(library)


def test_process_groups_are_found_by_their_names(mesh: DeviceMesh) -> None:
    group = mesh.get_group()
    assert compat.process_group(group.group_name) is group


# Optimizers -----------------------------------------------------------------------------------------------------------


class Sub(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, Sub])
def test_a_step_without_hooks_steps_and_calls_none(kind: type[torch.optim.Optimizer]) -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer, calls = kind([parameter], lr=0.5), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("second"))
    compat.run_first_after_step(optimizer, lambda *_: calls.append("first"))
    with compat.unhooked_step(optimizer) as step:
        step(optimizer)
    assert calls == [] and bool((parameter < 1).all())
    optimizer.step()
    # PyTorch runs the hooks again for a step of a base class that was wrapped before.
    assert calls[-2:] == ["first", "second"] and "before" in calls


@pytest.mark.filterwarnings("error")
def test_schedulers_neither_replace_a_counted_step_nor_warn_about_it() -> None:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.5)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
    theirs, steps = optimizer.step, []
    assert hasattr(theirs, "_wrapped_by_lr_sched"), "schedulers mark steps in another way by now"

    def step() -> None:
        steps.append(theirs())

    optimizer.step = compat.counted_step(step)  # type: ignore[method-assign]
    schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    assert optimizer.step is step
    optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
    assert len(steps) == 1


FUNCTIONAL: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"fused": True, "amsgrad": True, "maximize": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.Adam, {"foreach": True, "weight_decay": 0.1, "betas": (0.5, 0.6)}),
    (torch.optim.Adam, {"foreach": False, "amsgrad": True, "maximize": True, "eps": 1e-3}),
    (torch.optim.Adam, {"fused": True, "decoupled_weight_decay": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "foreach": True}),
    (torch.optim.SGD, {"momentum": 0.9, "maximize": True, "fused": True, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("kind", "settings"), FUNCTIONAL)
def test_a_functional_step_is_that_of_the_class(kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> None:
    def build() -> tuple[list[Tensor], torch.optim.Optimizer]:
        generator = torch.Generator().manual_seed(1)
        shapes = [(3, 5), (), (7,), (0, 2)]
        parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        if not settings.get("fused"):
            parameters.append(nn.Parameter(torch.randn(3, generator=generator, dtype=torch.complex64)))
        return parameters, kind(parameters, lr=0.1, **settings)

    (ours, optimizer), (theirs, reference) = build(), build()
    assert compat.has_functional_step(optimizer)
    generator = torch.Generator().manual_seed(2)
    for step in range(6):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator, dtype=mine.dtype)
            other.grad = mine.grad.clone()
        optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.1 / (1 + step)
        reference.step()
        (group,) = optimizer.param_groups
        if step == 0:
            optimizer.step()
            continue
        names = compat.names_of_states(optimizer, group)
        assert names is not None
        states = {name: [optimizer.state[p][name] for p in ours] for name in names}
        compat.functional_step(optimizer, group, list(ours), [p.grad for p in ours], states)
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other) and torch.equal(mine.grad, other.grad), step
            assert set(names) == {name for name, value in reference.state[other].items() if value is not None}
            assert all(torch.equal(optimizer.state[mine][name], reference.state[other][name]) for name in names)


def test_steps_that_only_the_class_knows() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    assert not compat.has_functional_step(Sub(parameters))
    assert not compat.has_functional_step(torch.optim.RMSprop(parameters))
    for optimizer in (
        torch.optim.Adam(parameters, differentiable=True),
        torch.optim.SGD(parameters, fused=True),  # it looks at dtypes first
    ):
        assert compat.names_of_states(optimizer, optimizer.param_groups[0]) is None
    optimizer = torch.optim.Adam(parameters, foreach=True)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    assert compat.names_of_states(optimizer, optimizer.param_groups[0]) is None


def test_a_dtensor_of_memory_elsewhere(mesh: Any) -> None:
    like = DTensor.from_local(torch.empty(3, 2, device="meta"), mesh, [Shard(0)])
    local = torch.ones(3, 2)
    made = compat.with_local(like, local)
    assert made.to_local().data_ptr() == local.data_ptr() and made.shape == (3, 2) and made.placements == (Shard(0),)


def test_graph_modules_write_no_code_until_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    python_code = fx.Graph.python_code

    def count(graph: fx.Graph, *args: Any, **kwargs: Any) -> Any:
        written.append(len(graph.nodes))
        return python_code(graph, *args, **kwargs)

    monkeypatch.setattr(fx.Graph, "python_code", count)
    root, graph = nn.Module(), fx.Graph()
    root.register_buffer("two", torch.tensor(2.0))
    product = graph.call_function(aten.mul.Tensor, (graph.placeholder("x"), graph.get_attr("two")))
    graph.output(product)
    gm = compat.graph_module(root, graph)
    product.target = aten.add.Tensor
    gm.recompile()
    twin = copy.deepcopy(gm)
    assert not written
    assert gm(torch.ones(())) == twin(torch.ones(())) == 3
    assert written == [4, 4]


def test_minima_of_numbers_are_right_or_refused() -> None:
    """PyTorch 2.11 computes them in integers on CPUs; a step with one then runs uncompiled."""

    class Region(Compiler):
        def compiled(self, kind: str, gm: fx.GraphModule, inputs: Any) -> compat.BoxedCallable:
            gm.graph.find_nodes(op="output")[0].meta["user_visible_output_idxs"] = [0]
            return compat.compile_region(gm, inputs, is_backward=False, is_inference=True)

    def step(x: Tensor, number: int) -> Tensor:
        return x * min(1.0, (number + 1) / 10)

    with torch._dynamo.config.patch(suppress_errors=False):
        try:
            compiled = torch.compile(step, backend=Region(), dynamic=True)
            for number in (2, 3, 4):
                assert float(compiled(torch.ones(()), number)) == pytest.approx((number + 1) / 10)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            assert torch.__version__ < "2.13" and "in integers on CPUs" in str(error)
