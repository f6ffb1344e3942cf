"""Dynamo's graphs as plain data and back; only what a graph of static shapes needs to be compiled."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_deepcompile import compat_frames
from lightning_deepcompile.capture.dynamo_graph import CONSTANTS
from lightning_deepcompile.compat_frames import UntraceableError

__all__ = ["GraphRecord", "Memory", "read_graph", "read_inputs", "record_graph", "record_inputs"]

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


@dataclass(frozen=True)
class _Operator:
    """An operator: its packet's name, and its overload's if the graph calls one; or a higher-order operator."""

    space: str
    name: str
    overload: str | None

    def find(self) -> Any:
        found = getattr(getattr(torch.ops, self.space), self.name)
        return found if self.overload is None else getattr(found, self.overload)


@dataclass(frozen=True)
class _Reference:
    """A node, among the arguments of another."""

    name: str


@dataclass(frozen=True)
class _Fake:
    """A fake tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_parameter: bool


@dataclass(frozen=True)
class Memory:
    """The memory of an input.

    Args:
        number: Tells it from that of other inputs.
        nbytes: Its size.
    """

    number: int
    nbytes: int


@dataclass(frozen=True)
class _Node:
    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    value: Any
    paths: dict[str, str]
    stack_trace: str | None


@dataclass(frozen=True)
class GraphRecord:
    """A graph.

    Args:
        nodes: Its nodes.
        parts: Graphs that it refers to, by name.
    """

    nodes: list[_Node]
    parts: dict[str, GraphRecord]


def record_graph(gm: fx.GraphModule) -> GraphRecord:
    """Writes a graph down.

    Args:
        gm: Of Dynamo's kind.

    Raises:
        UntraceableError: If something in it has no meaning in another process, or is symbolic.
    """
    nodes, parts = [], {}
    for node in gm.graph.nodes:
        target = node.target
        if node.op == "get_attr":
            part = getattr(gm, str(target), None)
            if not isinstance(part, fx.GraphModule):
                raise UntraceableError(f"its graph holds an object of type {type(part).__name__}")
            parts[str(target)] = record_graph(part)
        elif node.op == "call_function":
            target = _record_function(target)
        elif node.op not in ("call_method", "placeholder", "output"):
            raise UntraceableError(f"its graph has a node of the kind {node.op}")
        nodes.append(
            _Node(
                node.op,
                node.name,
                target,
                _record_argument(node.args),
                _record_argument(node.kwargs),
                _record_value(node.meta.get("example_value")),
                {key: path for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items()},
                node.meta.get("stack_trace"),
            )
        )
    return GraphRecord(nodes, parts)


def read_graph(record: GraphRecord, mode: FakeTensorMode, inputs: Sequence[Tensor] = ()) -> fx.GraphModule:
    """Makes the graph anew.

    Args:
        record: What `record_graph` wrote.
        mode: The fake mode of its values; must not be on.
        inputs: Its inputs, if it is a whole graph.
    """
    graph = fx.Graph()
    given = iter(inputs)
    made: dict[str, fx.Node] = {}
    for one in record.nodes:
        target = one.target.find() if isinstance(one.target, _Operator) else one.target
        args, kwargs = _read(one.args, made.__getitem__), _read(one.kwargs, made.__getitem__)
        node = graph.create_node(one.op, target, args, kwargs, one.name)
        if node.name != one.name:
            raise UntraceableError(f"its graph has two nodes {one.name!r}")
        made[one.name] = node
        if one.op == "placeholder" and inputs:
            node.meta["example_value"] = next(given)
        elif one.value is not None:
            node.meta["example_value"] = _read_value(one.value, mode)
        if one.paths:
            node.meta["nn_module_stack"] = {key: (path, nn.Module) for key, path in one.paths.items()}
        if one.stack_trace is not None:
            node.meta["stack_trace"] = one.stack_trace
    root = nn.Module()
    for name, part in record.parts.items():
        root.add_module(name, read_graph(part, mode))
    return fx.GraphModule(root, graph)


def _record_function(target: Any) -> Any:
    # These may take numbers of objects in tables of this process: kernels, streams, generators.
    module = str(getattr(target, "__module__", ""))
    if isinstance(target, torch._ops.HigherOrderOperator) and target is not _CHECKPOINT:
        raise UntraceableError(f"its graph calls the higher-order operator {target}")
    if module.startswith(("torch._dynamo", "torch._higher_order_ops")) or str(target).startswith("streams"):
        raise UntraceableError(f"its graph calls {target}")
    found: Any = target
    if isinstance(target, torch._ops.OpOverload):
        space, _, name = target._schema.name.partition("::")
        found = _Operator(space, name, target._overloadname)
    elif isinstance(target, torch._ops.OpOverloadPacket):
        space, _, name = target._qualified_op_name.partition("::")
        found = _Operator(space, name, None)
    elif isinstance(target, torch._ops.HigherOrderOperator):
        found = _Operator("higher_order", target.name(), None)
    try:
        again = found.find() if isinstance(found, _Operator) else pickle.loads(pickle.dumps(target))
    except (AttributeError, ImportError, TypeError, pickle.PickleError) as error:
        raise UntraceableError(f"its graph calls {target}, which has no name") from error
    if again is not target:
        raise UntraceableError(f"its graph calls {target}, which is something else by its name")
    return found


def _record_argument(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return _Reference(value.name)
    if isinstance(value, slice):
        return slice(*(_record_argument(part) for part in (value.start, value.stop, value.step)))
    if type(value) is torch.Size:
        return torch.Size(value)
    if isinstance(value, tuple | list):
        return (tuple if isinstance(value, tuple) else list)(_record_argument(item) for item in value)
    if isinstance(value, dict):
        if any(type(key) is not str for key in value):
            raise UntraceableError("its graph has a key that is no text")
        return {key: _record_argument(item) for key, item in value.items()}
    if type(value) in CONSTANTS:
        return value
    raise UntraceableError(f"its graph has a constant of type {type(value).__name__}")


def _read(value: Any, node_of: Callable[[str], fx.Node]) -> Any:
    if isinstance(value, _Reference):
        return node_of(value.name)
    if isinstance(value, slice):
        return slice(*(_read(part, node_of) for part in (value.start, value.stop, value.step)))
    if type(value) in (tuple, list):
        return type(value)(_read(item, node_of) for item in value)
    if isinstance(value, dict):
        return {key: _read(item, node_of) for key, item in value.items()}
    return value


def _record_value(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return _record_tensor(value)
    if type(value) in (tuple, list):
        return type(value)(_record_value(item) for item in value)
    if type(value) in CONSTANTS or type(value) is torch.Size:
        return value
    raise UntraceableError(f"its graph has a value of type {type(value).__name__}")


def _record_tensor(value: Tensor) -> _Fake:
    if value.layout is not torch.strided:
        raise UntraceableError(f"its graph has a tensor of layout {value.layout}")
    if not all(type(size) is int for size in (*value.shape, *value.stride(), value.storage_offset())):
        raise UntraceableError("its graph has sizes that vary")
    return _Fake(
        tuple(value.shape),
        value.stride(),
        value.storage_offset(),
        value.dtype,
        value.device,
        value.requires_grad,
        isinstance(value, nn.Parameter),
    )


def _read_value(value: Any, mode: FakeTensorMode) -> Any:
    if isinstance(value, _Fake):
        last = sum((size - 1) * stride for size, stride in zip(value.size, value.stride, strict=True))
        memory = torch.empty(value.offset + max(last, 0) + 1, dtype=value.dtype, device="meta")
        return _fake(value, memory.untyped_storage(), mode)
    if type(value) in (tuple, list):
        return type(value)(_read_value(item, mode) for item in value)
    return value


def record_inputs(record: GraphRecord, inputs: Sequence[Any]) -> list[Memory]:
    """Where a graph's inputs are: those that share memory here do so wherever the graph is read.

    Args:
        record: The graph.
        inputs: The inputs that it was traced with.

    Raises:
        UntraceableError: If they are not what the graph's placeholders say, or belong together in another way.
    """
    numbers: dict[StorageWeakRef, int] = {}
    memories = []
    for value in inputs:
        if not isinstance(value, Tensor) or (value._is_view() and (value.requires_grad or value._base.requires_grad)):
            raise UntraceableError("inputs of its graph are views that need gradients, or no tensors")
        storage = value.untyped_storage()
        memories.append(Memory(numbers.setdefault(StorageWeakRef(storage), len(numbers)), storage.nbytes()))
    expected = [node.value for node in record.nodes if node.op == "placeholder"]
    if expected != [_record_tensor(value) for value in inputs]:
        raise UntraceableError("its graph's inputs are not what they seem")
    return memories


def read_inputs(record: GraphRecord, memories: Sequence[Memory], mode: FakeTensorMode) -> list[Tensor]:
    """Fake inputs of a graph.

    Args:
        record: The graph.
        memories: What `record_inputs` told.
        mode: Their fake mode; must not be on.
    """
    made: dict[int, Tensor] = {}
    inputs = []
    placeholders = [node for node in record.nodes if node.op == "placeholder"]
    for node, memory in zip(placeholders, memories, strict=True):
        if memory.number not in made:
            made[memory.number] = torch.empty(memory.nbytes, dtype=torch.uint8, device="meta")
        inputs.append(_fake(node.value, made[memory.number].untyped_storage(), mode))
    return inputs


def _fake(value: _Fake, storage: torch.UntypedStorage, mode: FakeTensorMode) -> Tensor:
    meta = torch.empty(0, dtype=value.dtype, device="meta")
    meta.set_(storage, value.offset, value.size, value.stride)
    return compat_frames.fake_value(mode, meta, value.device, value.requires_grad, value.is_parameter)
