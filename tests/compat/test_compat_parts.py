"""Small private parts of neighbours: each does what it is used for, and none is without a test."""

from __future__ import annotations

import ast
import re
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.profilers import PyTorchProfiler
from multiprocess import join, run_ranks
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_deepcompile import compat
from lightning_deepcompile.compat import checkpoint, fsdp
from lightning_deepcompile.compat import lightning as compat_lightning
from lightning_deepcompile.compat.fake import FakeTensorMode, fake_ranks, fake_tensors, mode_of, pretended

FOLDER = Path(compat.__file__).parent
# Named for an `isinstance`, an annotation or a base class, or exercised by every test of training.
USED_BY_ALL_TRAINING = {
    "DataFetcher", "DefaultDtype", "NoOptimizer", "SubprocessLauncher", "WrappingCheckpointIO", "is_distributed",
    "default_backend", "init_process_group", "optimizers_to_device", "reduce_over_ranks", "BoxedCallable",
    "FakeTensor",
}  # fmt: skip


def _public(file: Path) -> set[str]:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{file.name} has no __all__")


@pytest.mark.parametrize("file", sorted(FOLDER.glob("[!_]*.py")), ids=lambda file: file.stem)
def test_every_part_has_a_test_and_every_file_says_where_it_was_seen_to_work(file: Path) -> None:
    tests = "".join(test.read_text() for test in Path(__file__).parent.glob("test_*.py"))
    named = set(re.findall(r"\w+", tests.replace('\n    "', ""))) - USED_BY_ALL_TRAINING
    assert _public(file) - USED_BY_ALL_TRAINING <= named
    assert re.search(
        r"Seen to work with (torch|Lightning|transformers) \d+\.\d+\.\d+",
        ast.get_docstring(ast.parse(file.read_text())),
    )


# Autograd -------------------------------------------------------------------------------------------------------------


def test_operators_below_autograd_leave_no_graph() -> None:
    weight = torch.ones(2, requires_grad=True)
    with compat.below_autograd():
        product = weight * 2
    assert not product.requires_grad and product.tolist() == [2, 2]


def test_storages_and_writes_are_counted() -> None:
    tensor = torch.ones(3)
    before, version = compat.storage_uses(tensor), compat.version_of(tensor)
    view = tensor[1:]
    assert compat.storage_uses(tensor) == before + 1
    view.add_(1)
    assert compat.version_of(tensor) == version + 1


def test_transforms_are_seen_and_left() -> None:
    seen: list[bool] = []

    def square(x: Tensor) -> Tensor:
        seen.append(compat.in_function_transform())
        with compat.outside_transforms():
            seen.append(compat.in_function_transform())
            assert type(torch.ones(2) * 2) is Tensor
        return x * x

    assert torch.func.grad(square)(torch.tensor(3.0)) == 6
    assert seen == [True, False] and not compat.in_function_transform()


class Loud(Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "intercepted"


class Quiet(Tensor):
    __torch_function__ = compat.NO_TORCH_FUNCTION


def test_subclasses_are_treated_as_tensors() -> None:
    loud, quiet = torch.ones(2).as_subclass(Loud), torch.ones(2).as_subclass(Quiet)
    assert torch.neg(loud) == "intercepted" and type(torch.neg(quiet)) is Tensor
    with compat.plain_functions():
        assert torch.neg(loud).tolist() == [-1, -1]


def test_a_backward_pass_says_which_leaves_it_reaches_and_calls_back() -> None:
    reached, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen: list[Any] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.append((compat.is_accumulated(reached), compat.is_accumulated(other)))
            compat.after_backward(lambda: seen.append(reached.grad.tolist()))
            return gradient

    (other.sum() + Look.apply(reached * 3).sum()).backward(inputs=[reached])
    assert seen == [(True, False), [3, 3]]


def test_profilers_and_backward_passes_that_keep_their_graphs_are_seen() -> None:
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.append(compat.keeps_graph())
            return gradient

    loss = Look.apply(torch.ones(2, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert seen == [True, False]
    assert not compat.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert compat.is_profiling()


def test_what_is_unrecorded_is_in_no_profile() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with compat.unrecorded():
            torch.ones(2).cos()
        torch.ones(2).sin()
    names = {event.name for event in profiler.events()}
    assert "aten::sin" in names and "aten::cos" not in names


def test_operators_say_what_they_write_to_and_view() -> None:
    aten, (a, b) = torch.ops.aten, torch.ones(2, 3)
    assert compat.name_of_operator(aten.add_.Tensor) == "add_"
    assert [one is a for one in compat.written_by(aten.add_.Tensor, (a, b), {})] == [True]
    assert [one is b for one in compat.written_by(aten.add.out, (a, a), {"out": b})] == [True]
    assert len(compat.written_by(aten._foreach_mul_.Scalar, ([a, b], 2.0), {})) == 2
    assert compat.written_by(aten.add.Tensor, (a, b), {}) == []
    views = aten.slice.Tensor, aten.split.Tensor, aten.detach.default
    assert all(map(compat.is_view, views)) and not any(map(compat.is_view, (aten.add.Tensor, aten.zero_.default)))


def test_hooks_for_gradients_are_seen() -> None:
    plain, hooked, behind = (torch.ones(2, requires_grad=True) for _ in range(3))
    hooked.register_hook(lambda gradient: None)
    calls: list[Tensor] = []
    handle = behind.register_post_accumulate_grad_hook(calls.append)
    assert [compat.has_hooks(leaf) for leaf in (plain, hooked, behind)] == [False, True, False]
    assert compat.take_accumulation_hooks(plain) is None
    taken = compat.take_accumulation_hooks(behind)
    behind.sum().backward()
    assert taken is not None and list(taken.values()) == [calls.append] and not calls
    behind.register_post_accumulate_grad_hook(calls.append)
    behind.sum().backward()
    assert len(calls) == 1 and calls[0] is behind
    handle.remove()
    assert not taken


class Empty(Tensor):
    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(function))


def test_a_stand_in_has_a_shape_and_no_memory() -> None:
    made = compat.stand_in(Empty, (1 << 20, 1 << 20), torch.bfloat16, torch.device("cpu"))
    assert type(made) is Empty and made.shape == (1 << 20, 1 << 20) and made.dtype == torch.bfloat16


def test_assertions_on_the_device_say_what_is_wrong() -> None:
    compat.assert_on_device(torch.tensor(True), "fits")
    with pytest.raises(RuntimeError, match="does not fit"):
        compat.assert_on_device(torch.tensor(False), "does not fit")


# Graphs and Dynamo ----------------------------------------------------------------------------------------------------


def test_operators_have_schemas() -> None:
    schema = compat.schema_of(torch.ops.aten.add_.Tensor)
    assert isinstance(torch.ops.aten.add_.Tensor, compat.OpOverload)
    assert schema.name == "aten::add_" and schema.arguments[0].alias_info.is_write
    assert compat.schema_of(compat.UNSAFE_VIEW).name == "aten::_unsafe_view"


def test_attention_on_cpus_has_the_formulas_of_gpus() -> None:
    from torch.utils.flop_counter import flop_registry

    q = torch.ones(1, 2, 4, 8)
    for operator, on_gpus in compat.GPU_ATTENTION.items():
        assert on_gpus in flop_registry
        names = [[argument.name for argument in op.default._schema.arguments] for op in (operator, on_gpus)]
        assert names[0][:3] == names[1][:3] or names[0][:4] == names[1][:4]
    found: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        kinds = ("forward", "backward", "inference", "partitioner")
        return compat.capture(gm, inputs, **{kind: keep for kind in kinds})

    def keep(gm: fx.GraphModule, inputs: Any) -> compat.BoxedCallable:
        found.extend(getattr(node.target, "overloadpacket", None) for node in gm.graph.nodes)
        return compat.compile_region(gm, inputs, is_backward=False, is_inference=True)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(lambda q: nn.functional.scaled_dot_product_attention(q, q, q), backend=backend)(q)
    assert next(iter(compat.GPU_ATTENTION)) in found


def test_functions_for_global_state_are_those_that_graphs_call() -> None:
    found: set[Any] = set()

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        found.update(node.target for node in gm.graph.nodes)
        return gm

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x
        with torch.no_grad():
            return y + x

    torch._dynamo.reset()
    torch.compile(step, backend=backend)(torch.ones(2, 2, requires_grad=True))
    assert {compat.ENTER_AUTOCAST, compat.EXIT_AUTOCAST, compat.SET_GRADIENTS} <= found
    assert callable(compat.LOG_USE)


@torch.compiler.allow_in_graph
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_calls_of_an_autograd_function_are_equal() -> None:
    nodes: list[fx.Node] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        nodes.extend(node for node in gm.graph.nodes if node.op.startswith("call_"))
        return gm

    torch._dynamo.reset()
    torch.compile(lambda x: Doubled.apply(Doubled.apply(x)).sum(), backend=backend)(torch.ones(2, requires_grad=True))
    assert nodes[0].target != nodes[1].target
    assert list(map(compat.called_by, nodes)) == [Doubled.apply, Doubled.apply, "sum"]


def test_code_of_its_own_is_compiled_apart() -> None:
    compiled: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        compiled.append(gm)
        return gm

    def step(x: Tensor) -> Tensor:
        return x + 1

    torch._dynamo.reset()
    for function in (step, compat.with_own_code(step)):
        for _ in range(2):
            assert torch.compile(function, backend=backend)(torch.ones(())) == 2
    assert len(compiled) == 2

    def skipped(x: Tensor) -> Tensor:
        return x + 2

    compat.never_code(skipped.__code__)
    assert torch.compile(skipped, backend=backend)(torch.ones(())) == 3 and len(compiled) == 2


def test_a_part_is_captured_without_the_whole_learning_of_it() -> None:
    found: list[str] = []

    def keep(kind: str) -> Any:
        def compile(gm: fx.GraphModule, inputs: Any) -> compat.BoxedCallable:
            found.append(kind)
            return compat.compile_region(gm, inputs, is_backward=kind == "backward", is_inference=False)

        return compile

    def backend(gm: fx.GraphModule, inputs: list[Tensor]) -> Any:
        like = compat.current_fake_mode().from_tensor(inputs[0])
        fake = compat.fake_tensor(torch.empty(2, 3, device="meta"), like)
        assert fake.device == like.device and fake.fake_mode is compat.current_fake_mode()
        assert compat.fake_tensor(fake, like) is fake
        compilers = {kind: keep(kind) for kind in ("forward", "backward", "inference")}
        compat.capture_apart(gm, [like], partitioner=partition, **compilers)
        return gm

    def partition(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        return compat.partition(gm, inputs, lambda gm: None, **kwargs)

    torch._dynamo.reset()
    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda x: (x.sin() * x).sum(), backend=backend)(x).backward()
    assert found == ["forward", "backward"]


def test_a_size_has_the_number_of_the_traced_batch_unless_it_depends_on_data() -> None:
    found: list[int | None] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        values = [node.meta["example_value"] for node in gm.graph.nodes if "example_value" in node.meta]
        found.extend(compat.hint_of(size) for value in values if isinstance(value, Tensor) for size in value.shape)
        return gm

    torch._dynamo.reset()
    x = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
    torch._dynamo.mark_dynamic(x, 0)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(lambda x: x.nonzero() + 1, backend=backend)(x)
    assert found == [5, None, 1, None, 1]
    assert compat.hint_of(3) == 3


def test_what_backward_computes_again_was_traced_in_the_forward_pass() -> None:
    found: dict[str, set[bool]] = {}

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return compat.capture(
            gm, inputs, forward=boxed, backward=look, inference=boxed,
            partitioner=lambda gm, inputs, **kwargs: compat.partition(gm, inputs, lambda gm: None, **kwargs),
        )  # fmt: skip

    def boxed(gm: fx.GraphModule, inputs: Any) -> compat.BoxedCallable:
        return compat.compile_region(gm, inputs, is_backward=False, is_inference=False)

    def look(gm: fx.GraphModule, inputs: Any) -> compat.BoxedCallable:
        for node in gm.graph.nodes:
            if node.op == "call_function":
                found.setdefault(str(node.target), set()).add(compat.is_of_forward(node))
        return compat.compile_region(gm, inputs, is_backward=True, is_inference=False)

    torch._dynamo.reset()
    x = torch.ones(3, requires_grad=True)
    block = lambda x: x.tanh().exp()  # noqa: E731
    checkpointed = torch.utils.checkpoint.checkpoint
    torch.compile(lambda x: checkpointed(block, x, use_reentrant=False).sum(), backend=backend)(x).backward()
    assert found["aten.tanh.default"] == {True} and found["aten.exp.default"] == {True}
    assert False in set().union(*found.values())


def test_graphs_that_are_kept_can_be_used_twice() -> None:
    torch._dynamo.reset()
    x = torch.ones(2, requires_grad=True)
    with compat.keeping_graphs():
        loss = torch.compile(lambda x: (x.sin() * x).sum(), backend="aot_eager")(x)
        loss.backward(retain_graph=True)
        loss.backward()
    assert torch.allclose(x.grad, 2 * (x.cos() * x + x.sin()).detach())


# Distributed ----------------------------------------------------------------------------------------------------------


def _collectives() -> tuple[list[float], list[float], list[float], bool]:
    join("cpu")
    rank, group = dist.get_rank(), dist.group.WORLD
    swapped, mean = torch.zeros(2), torch.zeros(1)
    compat.all_to_all_into(swapped, torch.tensor([10.0 * rank, 10.0 * rank + 1]), group)
    compat.reduce_scatter_mean_into(mean, torch.tensor([1.0, 3.0]) * (rank + 1), group)
    # Rank 0 keeps one element and sends two; rank 1 sends nothing.
    uneven, out = torch.zeros((1, 2)[rank]), ([1, 2], [0, 0])[rank]
    sent = torch.tensor([1.0, 2.0, 3.0][: sum(out)])
    compat.all_to_all_uneven(uneven, sent, ([1, 0], [2, 0])[rank], out, group)()
    compat.store().set(f"here{rank}", "")
    compat.store().wait([f"here{1 - rank}"])
    dist.barrier()  # the store ends with the rank that serves it
    on_cpu = compat.device_of_objects(group) == compat.device_of_objects(None) == "cpu"
    return swapped.tolist(), mean.tolist(), uneven.tolist(), on_cpu


def test_collectives_and_the_store() -> None:
    assert run_ranks(_collectives, 2) == [([0, 10], [1.5], [1], True), ([1, 11], [4.5], [2, 3], True)]


def _wholes() -> bool:
    join("cpu")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wholes = [torch.arange(2.0 * rows).view(rows, 2) for rows in (1, 4, 5, 7)]
    tensors = [distribute_tensor(whole, mesh, [placement]) for whole in wholes for placement in (Shard(0), Replicate())]
    tensors.append(distribute_tensor(torch.ones(3, 5), mesh, [Shard(1)]))
    results = [torch.equal(compat.full_tensor(one), one.full_tensor()) for one in tensors]
    for whole in wholes:
        mine = distribute_tensor(whole, mesh, [Shard(0)]).to_local()
        results.append(torch.equal(compat.gather_rows(mine, len(whole), dist.group.WORLD), whole))
    dist.barrier()
    return all(results)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_whole_tensors_are_those_of_pytorch(ranks: int) -> None:
    assert run_ranks(_wholes, ranks) == [True] * ranks


def test_local_tensors_are_the_ones_inside(mesh: DeviceMesh) -> None:
    sharded = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    compat.local_of(sharded).add_(1)
    assert sharded.to_local().tolist() == [2, 2] and compat.local_of(sharded) is compat.local_of(sharded)


def test_data_of_dtensors_can_be_assigned(mesh: DeviceMesh) -> None:
    sharded = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    assignable = compat.AssignableDTensor.like(sharded)
    assert compat.local_of(assignable) is compat.local_of(sharded) and assignable.requires_grad and assignable.is_leaf
    assignable.data = assignable.data * 3
    assert sharded.to_local().tolist() == [3, 3] and type(assignable.data + 1) is DTensor


def test_modes_see_operations_and_collectives(mesh: DeviceMesh) -> None:
    seen: list[str] = []

    class Seeing(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.namespace)
            return func(*args, **(kwargs or {}))

    with Seeing():
        torch.distributed.all_reduce(torch.ones(2) * 2, group=mesh.get_group())
    assert {"aten", "c10d"} <= set(seen)


# Modules, optimizers, files -------------------------------------------------------------------------------------------


def test_what_a_call_of_a_module_runs() -> None:
    layer, calls = nn.Linear(2, 2), []
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    x = torch.ones(1, 2)
    assert torch.equal(compat.hooked_forward(layer)(x), layer.forward(x)) and calls == ["before"]
    assert {nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm} <= set(_subclasses(compat.BatchNorm))


def _subclasses(kind: type) -> list[type]:
    return [kind, *(one for child in kind.__subclasses__() for one in _subclasses(child))]


def test_functions_of_many_tensors() -> None:
    tensors = [torch.tensor([3.0, -4.0]), torch.tensor([6.0])]
    assert [float(norm) for norm in compat.norms(tensors, torch.float64)] == [5, 6]
    compat.scale(tensors, torch.tensor(2.0))
    compat.clamp(tensors, 7.0)
    assert [tensor.tolist() for tensor in tensors] == [[6, -7], [7]]


def test_a_scaler_tells_fused_optimizers_what_they_understand(mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    for gradient, found in ((2.0, 0.0), (float("inf"), 1.0)):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler = ShardedGradScaler(device="cpu", init_scale=2.0, process_group=mesh.get_group())
        scaler.scale(torch.ones(()))
        parameter.grad = torch.full((2,), gradient)
        compat.unscale(scaler, optimizer)
        (value,) = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        assert value.shape == () and float(value) == found
        assert found or parameter.grad.tolist() == [1, 1]


def test_names_of_fsdp_and_of_checkpoints() -> None:
    assert fsdp.HYBRID_SHARD_GRAD_OP.name == "_HYBRID_SHARD_ZERO2"
    assert {"read_data", "read_metadata"} <= set(dir(checkpoint.FsspecReader))


# Without memory and ranks --------------------------------------------------------------------------------------------


def test_fake_tensors_have_sizes_and_fake_ranks_answer_at_once() -> None:
    run_ranks(_fakes, 1)  # other tests of this file leave a process group


def _fakes() -> None:
    mode = fake_tensors()
    with mode:
        large = torch.zeros(1 << 20, 1 << 20)  # four terabytes
        product = large @ large
    assert isinstance(mode, FakeTensorMode) and mode_of(product) is mode and product.shape == large.shape
    assert mode_of(torch.zeros(1)) is None
    with fake_ranks(16):
        assert dist.get_world_size() == 16 and dist.get_rank() == 0
        number = torch.ones(1)
        dist.all_reduce(number)
        assert number.item() == 1  # nobody else adds anything
    assert not dist.is_initialized()
    with fake_ranks(2):
        assert _rows_of_a_view() == 2
    dist.init_process_group("fake", rank=1, world_size=2)
    assert _rows_of_a_view() == 1  # as before a training that follows an estimate


def _rows_of_a_view() -> int:
    """Returns the rows that this rank has of a view of three rows."""
    mesh = init_device_mesh("cpu", (2,))
    rows = DTensor.from_local(
        torch.ones(2 - dist.get_rank(), 3), mesh, [Shard(0)], run_check=False, shape=(3, 3), stride=(3, 1)
    )
    return len(rows.view_as(rows).to_local())


def test_pretended_ranks_stand_where_the_real_ones_do_and_wait_for_nobody() -> None:
    run_ranks(_pretends, 2)


def _pretends() -> None:
    join("cpu")
    real = init_device_mesh("cpu", (2,))
    for _ in range(2):
        with pretended(dist.group.WORLD, "cpu") as mesh:
            assert mesh.size() == 2 and mesh.get_local_rank() == dist.get_rank()
            if dist.get_rank() == 1:  # alone
                rows = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
                assert rows.shape == (4, 3) and rows.sum().full_tensor().item() == 6  # nobody else adds anything
        dist.new_group([0, 1])
        rows = DTensor.from_local(torch.ones(2, 3), real, [Shard(0)], run_check=False)
        assert rows.sum().full_tensor().item() == 12


# Lightning ------------------------------------------------------------------------------------------------------------


class Own(LightningOptimizer):
    pass


def test_stores_of_one_host_and_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compat_lightning.is_interactive()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store = compat.store_of_one_host("127.0.0.1", port, 0, 1, timedelta(seconds=5))
    assert store is not None
    store.set("key", "value")
    assert store.get("key") == b"value"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert compat.store_of_one_host("127.0.0.1", port, 0, 1, timedelta(seconds=5)) is None


def test_parts_of_a_trainer() -> None:
    callback = pl.Callback()
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[callback], enable_checkpointing=False)
    assert callback in compat_lightning.callbacks_of(trainer)
    assert type(compat_lightning.signal_connector(trainer)) is compat_lightning.SignalConnector
    assert type(trainer.fit_loop.epoch_loop) is compat_lightning.TrainingEpochLoop
    assert type(trainer.validate_loop) is type(trainer.test_loop) is compat_lightning.EvaluationLoop
    assert type(trainer.predict_loop) is compat_lightning.PredictionLoop
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    assert isinstance(compat_lightning.wrap_optimizer(Own, optimizer, trainer.strategy), Own)


def test_threads_are_divided_unless_the_environment_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        compat_lightning.divide_threads(10_000)
        assert torch.get_num_threads() == before
        monkeypatch.delenv("OMP_NUM_THREADS")
        compat_lightning.divide_threads(10_000)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_averages_and_profilers() -> None:
    callback = WeightAveraging(device="cpu")
    assert compat_lightning.average_of(callback) is None
    assert torch.device(compat_lightning.average_device(callback)) == torch.device("cpu")
    found = [compat_lightning.records_modules(PyTorchProfiler(record_module_names=on)) for on in (True, False)]
    assert found == [True, False]


def test_a_size_is_written_from_its_symbols() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(lambda x: x.flatten() * 2, tracing_mode="symbolic")(torch.ones(3, 5))
    (x,) = (node for node in gm.graph.nodes if node.op == "placeholder")
    size = 3 * x.meta["val"].numel() + 1
    output = next(iter(reversed(gm.graph.nodes)))
    with gm.graph.inserting_before(output):
        known = {
            str(n): gm.graph.call_function(torch.ops.aten.sym_size.int, (x, i))
            for i, n in enumerate(x.meta["val"].shape)
        }
        for node, number in zip(known.values(), x.meta["val"].shape, strict=True):
            node.meta["val"] = number
        assert {str(symbol) for symbol in compat.symbols_of(size)} == set(known)
        written = compat.write_size(gm.graph, size, known)
    assert str(written.meta["val"]) == str(size)
    output.args = (written,)
    gm.recompile()
    assert gm(torch.ones(4, 7)) == 85
