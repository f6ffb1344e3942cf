"""Traces one of several equal blocks, and makes a step's graph call the result.

A template is a block's forward and backward graph, as AOTAutograd and the partitioner make them of the block alone.
While the whole step is traced, a block is one call of an opaque operator and its derivative another (`run_block`); both
know only the shapes of their results. `capture/inlining.py` replaces them by the template's nodes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_deepcompile import compat
from lightning_deepcompile.capture.partition import partition
from lightning_deepcompile.capture.repeats import Block, body_of, call_blocks, find_repeats
from lightning_deepcompile.program.graph import args_of, is_element, is_random, is_scalar, is_view, output_node

_log = logging.getLogger(__name__)


class UnsuitableBlockError(Exception):
    """A block does something that can be traced only in the whole graph; the text is the reason."""


@dataclass(frozen=True)
class Template:
    """The traced graphs of a block.

    Args:
        forward: From the block's inputs to its outputs, followed by the values made for backward.
        outputs: Number of the block's outputs.
        backward: From saved values, and the gradients of outputs, to the gradients of inputs. None without gradients.
        saved: The first tensors that `backward` reads: an input's number, or ``~n`` for the n-th value that `forward`
            returns.
        tangents: The outputs whose gradients are its next inputs.
        gradients: For every input its gradient's place in the results of `backward`, or None.
        sizes: The symbolic sizes that `backward` reads.
    """

    forward: fx.GraphModule
    outputs: int
    backward: fx.GraphModule | None = None
    saved: tuple[int, ...] = ()
    tangents: tuple[int, ...] = ()
    gradients: tuple[int | None, ...] = ()
    sizes: tuple[torch.SymInt, ...] = ()

    @functools.cached_property
    def made(self) -> list[Tensor]:
        """Fake tensors like those that `forward` returns."""
        return [node.meta["val"] for node in args_of(output_node(self.forward.graph))[0]]

    @functools.cached_property
    def saved_bytes(self) -> int:
        """Bytes that are kept for backward and are neither inputs nor outputs of the block."""

        def memory(values: Iterable[Tensor]) -> dict[StorageWeakRef, int]:
            storages = [v.untyped_storage() for v in values]
            return {StorageWeakRef(storage): compat.hint_of(storage.nbytes()) or 0 for storage in storages}

        outputs = memory(self.made[: self.outputs])
        saved = memory(self.made[~place] for place in self.saved if place < 0)
        return sum(size for key, size in saved.items() if key not in outputs)

    @functools.cached_property
    def found(self) -> list[Tensor]:
        """Fake tensors like the gradients that `backward` returns."""
        assert self.backward is not None
        return [node.meta["val"] for node in _outputs(self.backward) if node is not None]

    @functools.cached_property
    def expected(self) -> list[Tensor]:
        """Fake tensors like the gradients that `backward` reads."""
        assert self.backward is not None
        return [node.meta["val"] for node in _placeholders(self.backward) if not is_scalar(node)][len(self.saved) :]


@dataclass(frozen=True)
class Instance:
    """One of several equal blocks.

    Args:
        template: Its graphs.
        ids: The template's number of every parameter to this block's.
        uncheckpointed: Its graphs without the model's activation checkpointing; None if it is not checkpointed, or
            they were not asked for.
    """

    template: Template
    ids: dict[int, int]
    uncheckpointed: Template | None = None

    @property
    def checkpointed_bytes(self) -> int:
        """Bytes that are not kept for backward because the model checkpoints them."""
        other = self.uncheckpointed
        return 0 if other is None else max(other.saved_bytes - self.template.saved_bytes, 0)


def call_repeats(
    gm: fx.GraphModule,
    block_of: Callable[[int], str],
    *,
    eager: bool,
    uncheckpointed: int | None = None,
    sparing: bool = False,
) -> tuple[fx.GraphModule, list[Instance]]:
    """Traces each kind of block that `gm` repeats once.

    Args:
        gm: Dynamo's graph; it does not change.
        block_of: Parameter id to the name of the layout's block.
        eager: As in `compat.capture`.
        uncheckpointed: How many of the last blocks that the model checkpoints run without that; None: there will never
            be any, and nothing is traced for it.
        sparing: As in `partition`.

    Returns:
        A graph that calls the blocks, and the blocks; `gm` itself and none if no block is worth it.
    """
    found: list[tuple[Block, Instance]] = []
    for equal in find_repeats(gm, block_of):
        other = None
        try:
            template = trace_block(gm, equal[0], eager=eager, sparing=sparing)
            if uncheckpointed is not None and any(map(compat.is_checkpoint, equal[0].nodes)):
                other = trace_block(gm, equal[0], eager=eager, checkpointed=False, sparing=sparing)
        except UnsuitableBlockError as reason:
            _log.info("%d equal blocks are traced one by one: %s.", len(equal), reason)
            continue
        found += [(one, Instance(template, dict(zip(equal[0].ids, one.ids, strict=True)), other)) for one in equal]
    if not found:
        return gm, []
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    found.sort(key=lambda pair: order[pair[0].nodes[0]])
    instances = [instance for _, instance in found]
    saving = [number for number, instance in enumerate(instances) if instance.checkpointed_bytes > 0]
    for number in saving[::-1][: uncheckpointed or 0]:
        other = instances[number].uncheckpointed
        assert other is not None
        instances[number] = replace(instances[number], template=other)
    return call_blocks(gm, [block for block, _ in found], run_block), instances


def trace_block(
    gm: fx.GraphModule, block: Block, *, eager: bool, checkpointed: bool = True, sparing: bool = False
) -> Template:
    """Traces and partitions a block.

    Args:
        gm: Dynamo's graph.
        block: A block of it.
        eager: As in `compat.capture`.
        checkpointed: As in `partition`.
        sparing: As in `partition`.

    Raises:
        UnsuitableBlockError: If it writes to its inputs, draws random numbers, returns parts of its inputs, or cannot
            be traced by itself.
    """
    traced: dict[str, fx.GraphModule] = {}

    def cut(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        if kwargs["num_fwd_outputs"] != len(block.outputs):
            raise UnsuitableBlockError("it writes to its inputs")
        forward, backward = partition(gm, inputs, checkpointed=checkpointed, sparing=sparing, **kwargs)
        traced.update(forward=forward, backward=backward)
        return forward, backward

    def record(kind: str, gm: fx.GraphModule, inputs: Sequence[Any]) -> compat.BoxedCallable:
        traced.setdefault(kind, gm)
        return _never

    try:
        compat.capture_apart(
            body_of(gm, block),
            [node.meta["example_value"] for node in block.inputs],
            forward=functools.partial(record, "forward"),
            backward=functools.partial(record, "backward"),
            inference=functools.partial(record, "forward"),
            partitioner=cut,
            eager=eager,
        )
    except UnsuitableBlockError:
        raise
    except Exception as error:  # a block may need the whole graph; if it is wrong, the whole graph will fail
        raise UnsuitableBlockError(f"one alone cannot be traced: {type(error).__name__}: {error}") from error
    needs_gradient = [node.meta["example_value"].requires_grad for node in block.outputs]
    return _read(traced["forward"], traced.get("backward"), len(block.inputs), needs_gradient)


def _never(args: list[Any]) -> Sequence[Any]:
    raise RuntimeError("A template ran. This is a bug: please report it.")


def _read(
    forward: fx.GraphModule, backward: fx.GraphModule | None, inputs: int, needs_gradient: Sequence[bool]
) -> Template:
    for node in (*forward.graph.nodes, *(backward.graph.nodes if backward is not None else ())):
        _check(node)
    outputs = len(needs_gradient)
    results = cast("list[fx.Node]", _outputs(forward))
    bases = Counter(_base(node) for node in results[:outputs])
    if len(_placeholders(forward)) != inputs or any(n > 1 or b.op != "call_function" for b, n in bases.items()):
        raise UnsuitableBlockError("it returns its inputs, or one memory twice")
    if backward is None:
        if len(results) != outputs:
            raise UnsuitableBlockError("it writes to its inputs")
        return Template(forward, outputs)
    reads = [node for node in _placeholders(backward) if not is_scalar(node)]
    tangents = tuple(place for place, needed in enumerate(needs_gradient) if needed)
    saved = [node.name for node in reads if not compat.is_tangent(node)]
    gradients = _outputs(backward)
    if len(reads) - len(saved) != len(tangents) or len(gradients) != inputs:
        raise UnsuitableBlockError("its gradients do not follow its outputs and inputs one by one")
    made = results[:outputs]
    kept = [node for node in dict.fromkeys(results[outputs:]) if not is_scalar(node)]
    made += [node for node in kept if node not in made and node.op != "placeholder"]
    output_node(forward.graph).args = (made,)
    places = {node.name: number for number, node in enumerate(_placeholders(forward))}
    places |= {node.name: ~place for place, node in enumerate(made)}
    if not all(name in places for name in saved):
        raise UnsuitableBlockError("its backward graph reads what its forward graph does not return")
    number = itertools.count()
    return Template(
        forward,
        outputs,
        backward,
        tuple(places[name] for name in saved),
        tangents,
        tuple(None if gradient is None else next(number) for gradient in gradients),
        tuple(node.meta["val"] for node in _placeholders(backward) if is_scalar(node)),
    )


def _check(node: fx.Node) -> None:
    """Raises for an operator that a block must not contain: one with a side effect, or random numbers."""
    if node.op != "call_function" or node.target is operator.getitem or is_scalar(node):
        return
    if not isinstance(node.target, compat.OpOverload):
        raise UnsuitableBlockError(f"it calls {node.target}")
    if compat.schema_of(node.target).is_mutable:
        raise UnsuitableBlockError(f"it writes to memory ({node.target})")
    if is_random(node):
        raise UnsuitableBlockError(f"it draws random numbers ({node.target})")


def _base(node: fx.Node) -> fx.Node:
    """The node that made the memory of `node`."""
    while is_view(node) or is_element(node):
        node = args_of(node)[0]
    return node


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def _outputs(gm: fx.GraphModule) -> list[fx.Node | None]:
    return list(args_of(output_node(gm.graph))[0])


_instances: ContextVar[Sequence[Instance]] = ContextVar("instances")


@contextlib.contextmanager
def tracing_blocks(instances: Sequence[Instance]) -> Iterator[None]:
    """Returns a context in which `run_block` can be traced; its blocks are `instances`."""
    _register()
    token = _instances.set(instances)
    try:
        yield
    finally:
        _instances.reset(token)


def run_block(block: int, *inputs: Tensor | torch.SymInt) -> tuple[Tensor, ...]:
    """Stands for a block in a graph that AOTAutograd traces, and for its derivative."""
    return _Block.apply(block, *inputs)


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: int, *inputs: Any) -> tuple[Tensor, ...]:
        template = _instances.get()[block].template
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        sizes = [value for value in inputs if not isinstance(value, Tensor)]
        made = torch.ops.deepcompile.block_forward(tensors, block, sizes)
        if template.backward is not None:
            ctx.block = block
            ctx.save_for_backward(*(made[~place] if place < 0 else inputs[place] for place in template.saved))
            unneeded = set(range(template.outputs)) - set(template.tangents)
            ctx.mark_non_differentiable(*(made[place] for place in sorted(unneeded)))
        return tuple(made[: template.outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        template = _instances.get()[ctx.block].template
        tangents = [gradients[place] for place in template.tangents]
        tangents = [_laid_out_like(*pair) for pair in zip(tangents, template.expected, strict=True)]
        found = torch.ops.deepcompile.block_backward([*ctx.saved_tensors, *tangents], ctx.block, template.sizes)
        return None, *(None if place is None else found[place] for place in template.gradients)


def _laid_out_like(gradient: Tensor, expected: Tensor) -> Tensor:
    """Returns `gradient` with the strides that the template was traced with."""
    if gradient.stride() == expected.stride():
        return gradient
    if expected.is_contiguous():
        return gradient.contiguous()
    return gradient.new_empty_strided(expected.shape, expected.stride()).copy_(gradient)


def called_body(node: fx.Node, instances: Sequence[Instance]) -> tuple[fx.GraphModule, dict[int, int]] | None:
    """The graph that `node` stands for, forward or backward, and its parameters; None if it is no block.

    Args:
        node: The node.
        instances: The blocks that the graph was traced with.
    """
    if node.op != "call_function" or getattr(node.target, "namespace", None) != _NAMESPACE:
        return None
    instance = instances[args_of(node)[1]]
    backward = node.target is torch.ops.deepcompile.block_backward.default
    body = instance.template.backward if backward else instance.template.forward
    assert body is not None
    return body, instance.ids


_NAMESPACE = "deepcompile"


def _fresh(values: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]


@functools.cache
def _register() -> None:
    """Defines the two operators. They have no kernels: no program contains them."""
    fakes: dict[str, Callable[[Template], list[Tensor]]] = {
        "block_forward": lambda template: template.made,
        "block_backward": lambda template: template.found,
    }
    for name, results in fakes.items():
        torch.library.define(f"{_NAMESPACE}::{name}", "(Tensor[] inputs, int block, SymInt[] sizes) -> Tensor[]")

        def fake(inputs: list[Tensor], block: int, sizes: list[int], results: Any = results) -> list[Tensor]:
            return _fresh(results(_instances.get()[block].template))

        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake)
