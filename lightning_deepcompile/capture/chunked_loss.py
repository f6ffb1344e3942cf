"""Computes a loss over many classes in pieces of tokens, so that full logits are never materialised.

In a captured graph, the values computed from a linear layer with more outputs than inputs are followed, as long as
every row of logits is treated separately. If they end in one number that is a sum over rows, or their mean, one call
replaces them all. The call takes the rows in pieces, computes logits, loss and gradients piece by piece, and adds up:
the loss in its own dtype, the gradients of weights in fp32. A weight's gradient is complete when forward ends, so
backward neither recomputes logits nor needs the weight.

Computing gradients together with the loss is an idea of Liger Kernel's cross entropy, which torch's
``linear_cross_entropy`` (2.13) adopted; that one supports fewer losses, and rules out a compiler. Inductor's
``auto_chunker`` does not serve: it needs forward and backward in one graph, and considers only products whose output is
8 times as large as their inputs, which excludes every head whose weight is larger than the hidden states.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from lightning_deepcompile import compat
from lightning_deepcompile.capture.dynamo_graph import erase_unused, name_of
from lightning_deepcompile.capture.rows import ELEMENTWISE, PieceGradients, change_between, same_shape, spans
from lightning_deepcompile.program.graph import args_of
from lightning_deepcompile.runtime.pieces import complete_loss, take_piece

_log = logging.getLogger(__name__)

_MANY_CLASSES = 32_768
"""With fewer, logits are small beside what the layers below save."""

_CLASSWISE = frozenset(["softmax", "log_softmax"])
_LOSSES = {"cross_entropy": inspect.signature(F.cross_entropy), "nll_loss": inspect.signature(F.nll_loss)}
_SHAPES = frozenset(["view", "reshape", "flatten", "contiguous", "clone"])
_SWAPS: frozenset[tuple[Any, ...]] = frozenset(
    [("transpose", 1, 2), ("transpose", 2, 1), ("transpose", -1, -2), ("transpose", -2, -1)]
)
_SWAPS |= frozenset([("permute", 0, 2, 1), ("permute", (0, 2, 1))])


def chunk_losses(gm: fx.GraphModule, pieces: int) -> int:
    """Replaces linear layers and the losses behind them by losses in pieces, in place.

    Args:
        gm: Dynamo's graph, before AOTAutograd.
        pieces: How many; 0: replaces nothing, and counts losses of 32 768 classes and more that could be.

    Returns:
        The number of losses that were, or could be, replaced.
    """
    number = 0
    for linear in [n for n in gm.graph.nodes if n.op == "call_function" and n.target is F.linear and not n.kwargs]:
        hidden, weight = (n.meta["example_value"].shape for n in args_of(linear)[:2])
        if len(hidden) < 2 or len(weight) != 2 or not statically_known_true(weight[0] > weight[1]):
            continue
        classes = weight[0]
        if not pieces and not statically_known_true(classes >= _MANY_CLASSES):
            continue
        found = _Rows(linear)
        try:
            found.follow()
        except _NotByRows as reason:
            if found.losses and pieces:
                _log.info("The loss of %d classes is not chunked: %s.", classes, reason)
            continue
        if found.losses and found.result is not None:
            if pieces:
                found.replace(gm, f"chunked_loss_{number}", pieces)
            number += 1
    if number and pieces:
        gm.recompile()
    return number


class _NotByRows(Exception):
    """The reason why full logits are needed, in words for the user."""


@dataclass(frozen=True)
class _Value:
    """The properties of a node that has a value for every row.

    Args:
        moves: The number of changes of the rows' shape before it.
        classes: Whether its last dimension are the classes; a loss for every row has none.
        swapped: Whether the classes come before the last dimension, as `F.cross_entropy` wants them.
    """

    moves: int
    classes: bool = True
    swapped: bool = False


@dataclass
class _Rows:
    """The computation on a linear layer's output, row by row, down to one number.

    Args:
        linear: The layer.

    Attributes:
        losses: The number of losses over classes.
        result: The number; None if there is none.
    """

    linear: fx.Node
    losses: int = 0
    result: fx.Node | None = None
    _graph: fx.Graph = field(default_factory=fx.Graph)
    _values: dict[fx.Node, _Value] = field(default_factory=dict)
    _sums: set[fx.Node] = field(default_factory=set)
    _copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _moves: list[tuple[Any, ...]] = field(default_factory=list)
    _shared: list[fx.Node] = field(default_factory=list)
    _by_row: dict[fx.Node, bool] = field(default_factory=dict)  # and whether it has something for every class
    _counts: list[_Count] = field(default_factory=list)

    def follow(self) -> None:
        """Follows the values computed from the logits to the end.

        Raises:
            _NotByRows: If they, or values computed from them, are needed whole.
        """
        hidden, weight, *bias = args_of(self.linear)
        self._classes = weight.meta["example_value"].shape[0]
        self._total = self._input("total")
        arguments = (self._input("rows"), self._shared_operand(weight), *(b and self._shared_operand(b) for b in bias))
        self._add(self.linear, _Value(0), self._graph.call_function(F.linear, arguments))
        reason: _NotByRows | None = None
        after = self.linear.next
        while after.op != "root":
            try:
                self._take(after)
            except _NotByRows as found:
                reason = reason or found  # a loss may come later, which makes the reason worth reporting
            after = after.next
        if reason is not None:
            raise reason
        results = [n for n in self._sums if any(u not in self._sums for u in n.users)]
        if len(results) > 1:
            raise _NotByRows("the step uses several sums of it")
        if self._moves and any(v.moves != len(self._moves) for v in self._summed):
            raise _NotByRows("it is summed over other rows, too")
        if not results:
            return
        (self.result,) = results
        self._check_between()

    def replace(self, gm: fx.GraphModule, name: str, pieces: int) -> None:
        """Replaces `result` by a call of a `ChunkedLoss`.

        Args:
            gm: The graph.
            name: The name of the call.
            pieces: How many there are.
        """
        assert self.result is not None
        self._graph.output(self._copies[self.result])
        body = compat.graph_module(nn.Module(), self._graph)
        inputs = [self._copies[n] for n in (*self._shared, *self._by_row)] + [count.node for count in self._counts]
        names = ["rows", "total", *(str(n.target) for n in inputs)]
        wide = list(self._by_row.values())
        loss = _ChunkedLoss(body, names, self._moves, len(self._shared), wide, self._counts, pieces)
        gm.add_submodule(name, loss)
        with gm.graph.inserting_before(self.result):
            call = gm.graph.call_module(name, (args_of(self.linear)[0], *self._shared, *self._by_row))
        call.meta = dict(self.result.meta)
        self.result.replace_all_uses_with(call)
        erase_unused(n for n in self._copies if n not in self._shared and n not in self._by_row)

    @property
    def _summed(self) -> list[_Value]:
        return [self._values[s] for n in self._sums for s in n.all_input_nodes if s in self._values]

    def _add(self, node: fx.Node, value: _Value, copy: fx.Node) -> None:
        if node.meta["example_value"].dtype == torch.float16:
            # Gradients are computed before the loss is scaled, and would underflow.
            raise _NotByRows("it is computed in float16; bfloat16 can be taken apart")
        self._values[node], self._copies[node] = value, copy

    def _take(self, node: fx.Node) -> None:
        """Examines one node of the graph; nodes that do not depend on the logits are skipped."""
        sources = [s for s in node.all_input_nodes if s in self._values]
        if not sources:
            if any(s in self._sums for s in node.all_input_nodes):
                self._take_sum(node)
            return
        name = name_of(node)
        value = self._values[sources[0]]
        if name in _LOSSES:
            self._take_loss(node, name, value)
        elif name in _SHAPES or name == "getitem" or (name, *args_of(node)[1:]) in _SWAPS:
            self._take_shape(node, name, value)
        elif name in ("mean", "sum"):
            self._take_reduction(node, name, value)
        elif name == "logsumexp" or name in _CLASSWISE:
            self._take_classwise(node, name, value)
        elif name in ELEMENTWISE:
            shape = node.meta["example_value"].shape
            alike = all(self._values[s] == value and same_shape(s.meta["example_value"].shape, shape) for s in sources)
            if not alike or value.swapped:  # an outer product of rows, for one, has no separate rows
                self._refuse(node)
            self._add(node, value, self._graph.node_copy(node, lambda n: self._operand(n, node, value)))
        else:
            self._refuse(node)

    def _refuse(self, node: fx.Node) -> NoReturn:
        name = name_of(node) or str(getattr(node.target, "__name__", node.target))
        if node.op == "output":
            raise _NotByRows("the step returns its logits, or breaks the graph behind them")
        raise _NotByRows(f"`{name}` needs its logits whole")

    def _operand(self, operand: fx.Node, node: fx.Node, value: _Value) -> fx.Node:
        """Copies the other operand of an element-wise operator: a number, a value per class, or a value per row."""
        if operand in self._copies:
            return self._copies[operand]
        example = operand.meta.get("example_value")
        if operand in self._sums or not isinstance(example, Tensor):
            self._refuse(node)
        of_classes = any(same_shape(example.shape, shape) for shape in ((self._classes,), (1, self._classes)))
        if example.dim() == 0 or (value.classes and of_classes):
            return self._shared_operand(operand)
        rows = next(s for s in node.all_input_nodes if s in self._values).meta["example_value"].shape
        if not value.classes and same_shape(example.shape, rows):
            return self._row_operand(operand, node)
        self._refuse(node)

    def _input(self, name: str) -> fx.Node:
        """Adds an input to the loss of a piece; inputs come first in a graph."""
        with self._graph.inserting_before(self._copies.get(self.linear)):
            return self._graph.placeholder(name)

    def _shared_operand(self, operand: fx.Node) -> fx.Node:
        if operand not in self._copies:
            self._copies[operand] = self._input(f"shared_{len(self._shared)}")
            self._shared.append(operand)
        return self._copies[operand]

    def _row_operand(self, operand: fx.Node, node: fx.Node, *, wide: bool = False) -> fx.Node:
        if operand.meta["example_value"].requires_grad:
            self._refuse(node)
        if operand not in self._copies:
            self._copies[operand] = self._input(f"by_row_{len(self._by_row)}")
            self._by_row[operand] = wide
        return self._copies[operand]

    def _take_shape(self, node: fx.Node, name: str, value: _Value) -> None:
        source = args_of(node)[0]
        before, after = source.meta["example_value"].shape, node.meta["example_value"].shape
        if name in ("contiguous", "clone") or (not value.classes and name != "getitem" and name in _SHAPES):
            self._add(node, value, self._copies[source])  # copies are not needed, and rows stay in their order
            return
        if not value.classes or value.swapped:
            self._refuse(node)
        if name in ("transpose", "permute"):
            if len(before) != 3:
                self._refuse(node)
            self._add(node, _Value(value.moves, swapped=True), self._copies[source])
            return
        move = _index(args_of(node)[1], len(before)) if name == "getitem" else _lead(after, self._classes)
        if move is None or value.moves not in (len(self._moves), len(self._moves) - 1):
            self._refuse(node)
        if value.moves == len(self._moves):
            self._moves.append(move)
        elif self._moves[value.moves] != move:
            self._refuse(node)
        self._add(node, _Value(value.moves + 1), self._copies[source])

    def _take_classwise(self, node: fx.Node, name: str, value: _Value) -> None:
        given = args_of(node)
        arguments = {"dim": given[1] if len(given) > 1 else None, **node.kwargs}
        kept = {key: arguments.pop(key) for key in ("dtype",) if key in arguments and name in _CLASSWISE}
        rank = given[0].meta["example_value"].dim()
        plain = len(given) <= 2 and arguments.keys() == {"dim"} and arguments["dim"] in (-1, rank - 1)
        if not plain or not value.classes or value.swapped:
            self._refuse(node)
        function = getattr(torch, name)
        copy = self._graph.call_function(function, (self._copies[args_of(node)[0]], -1), kept)
        self._add(node, _Value(value.moves, classes=name != "logsumexp"), copy)

    def _take_loss(self, node: fx.Node, name: str, value: _Value) -> None:
        bound = _LOSSES[name].bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        given = bound.arguments
        source, target, weight = given["input"], given["target"], given["weight"]
        self.losses += 1
        old = given["size_average"] is not None or given["reduce"] is not None
        operands = [target, *([] if weight is None else [weight])]
        if old or not value.classes or any(n in self._values or n in self._sums for n in operands):
            self._refuse(node)
        logits, wanted = source.meta["example_value"], target.meta["example_value"]
        likely = wanted.is_floating_point()
        if logits.dim() != (3 if value.swapped else 2) or (likely and value.swapped):
            self._refuse(node)
        copies = (self._copies[source], self._row_operand(target, node, wide=likely))
        settings: dict[str, Any] = {key: given[key] for key in ("ignore_index", "label_smoothing") if key in given}
        settings["weight"] = None if weight is None else self._shared_operand(weight)
        reduction = "none" if given["reduction"] == "none" else "sum"
        copy = self._graph.call_function(getattr(F, name), copies, {**settings, "reduction": reduction})
        if reduction == "none":
            self._add(node, _Value(value.moves, classes=False), copy)
            return
        if given["reduction"] == "mean":
            of_rows = None if likely else given["ignore_index"]
            count = self._input(f"count_{len(self._counts)}")
            positions = list(self._by_row).index(target), None if weight is None else self._shared.index(weight)
            self._counts.append(_Count(count, *positions, of_rows))
            copy = self._graph.call_function(torch.div, (copy, count))
        self._add(node, value, copy)
        self._end(node)

    def _take_reduction(self, node: fx.Node, name: str, value: _Value) -> None:
        if len(args_of(node)) != 1 or not set(node.kwargs) <= {"dtype"}:
            self._refuse(node)
        copy = self._graph.call_function(torch.sum, (self._copies[args_of(node)[0]],), dict(node.kwargs))
        if name == "mean":
            copy = self._graph.call_function(torch.div, (copy, self._total))
            if value.classes:
                copy = self._graph.call_function(torch.div, (copy, self._classes))
        self._add(node, value, copy)
        self._end(node)

    def _end(self, node: fx.Node) -> None:
        """Marks `node` as a sum over rows."""
        del self._values[node]
        self._sums.add(node)

    def _take_sum(self, node: fx.Node) -> None:
        """Takes a linear function of sums as a sum; others are computed from the result."""
        name, sources = name_of(node), [leaf for leaf in (*node.args, *node.kwargs.values()) if leaf in self._sums]
        others = [n for n in node.all_input_nodes if n not in self._sums]
        if not all(_is_number(n) for n in (node, *others)):
            return
        if name in ("add", "sub"):
            additive = len(sources) == 2 and not node.kwargs
        elif name == "mul":
            additive = len(sources) == 1
        elif name in ("truediv", "div"):
            additive = len(sources) == 1 and node.args[0] in self._sums and not node.kwargs
        else:
            additive = name in ("neg", "float", "double")
        if not additive:
            return
        copy = self._graph.node_copy(node, lambda n: self._copies[n] if n in self._sums else self._shared_operand(n))
        self._copies[node] = copy
        self._sums.add(node)

    def _check_between(self) -> None:
        """Checks that nothing changes between the values and the end, where the call computes them."""
        assert self.result is not None
        change = change_between(self.linear, self.result)
        if change is not None:
            raise _NotByRows(f"`{change}` stands between its logits and it")


def _is_number(node: fx.Node) -> bool:
    """Returns whether `node` is a tensor of one number."""
    example = node.meta.get("example_value")
    return isinstance(example, Tensor) and example.dim() == 0


def _index(index: Any, rank: int) -> tuple[Any, ...] | None:
    """Returns ``logits[index]`` as an index of rows; None if it does more than pick slices of them."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (rank - len(parts) + 1)
    slices = [p for p in parts if isinstance(p, slice)]
    plain = all(isinstance(bound, int | None) for p in slices for bound in (p.start, p.stop, p.step))
    if not plain or len(slices) < len(parts) or (len(parts) == rank and parts[-1] != slice(None)):
        return None
    return ("index", tuple(parts[: rank - 1]))


def _lead(shape: Sequence[Any], classes: int) -> tuple[Any, ...] | None:
    """Returns a shape of logits as a shape of rows; None if it is none, or has two sizes that change."""
    sizes = [size if isinstance(size, int) else -1 for size in shape[:-1]]
    if len(shape) < 2 or not same_shape(shape[-1:], [classes]) or sizes.count(-1) > 1:
        return None
    return ("shape", tuple(sizes))


@dataclass(frozen=True)
class _Count:
    """The divisor of a mean over rows.

    Args:
        node: Stands for it in the loss of a piece.
        target: Index of the operand of rows with the wanted classes.
        weight: Index of the shared operand with the classes' weights; None: none.
        ignored: The class whose rows do not count; None: all rows count, as targets are probabilities.
    """

    node: fx.Node
    target: int
    weight: int | None
    ignored: int | None

    def of(self, by_row: Sequence[Tensor], shared: Sequence[Tensor]) -> Tensor | int:
        """Computes the divisor.

        Args:
            by_row: Operands with something for every row.
            shared: The others.
        """
        target = by_row[self.target]
        if self.ignored is None:
            return target.shape[0]
        counts = target != self.ignored
        if self.weight is None:
            return counts.sum()
        weights = shared[self.weight].detach()[torch.where(counts, target, 0)]
        return torch.where(counts, weights, 0).sum()


class _ChunkedLoss(nn.Module):
    """A loss in pieces.

    Args:
        body: The loss of a piece.
        names: Of its inputs: the piece of the layer's input, the number of all rows, shared operands, operands of rows,
            divisors.
        moves: The changes of the rows' shape before.
        shared: The number of operands that all rows share: the layer's weight is the first of them.
        wide: Of the operands of rows, whether they have something for every class; the others are flattened.
        counts: Divisors of means.
        pieces: How many there are.
    """

    def __init__(
        self,
        body: fx.GraphModule,
        names: Sequence[str],
        moves: Sequence[tuple[Any, ...]],
        shared: int,
        wide: Sequence[bool],
        counts: Sequence[_Count],
        pieces: int,
    ) -> None:
        super().__init__()
        self.body = body
        self._names = tuple(names)
        self._moves, self._shared, self._wide = tuple(moves), shared, tuple(wide)
        self._counts, self._pieces = tuple(counts), pieces

    def forward(self, hidden: Tensor, *operands: Tensor) -> Tensor:
        """Computes the whole loss.

        Args:
            hidden: The layer's input.
            *operands: Shared operands, operands of rows.
        """
        for kind, arguments in self._moves:
            hidden = hidden[arguments] if kind == "index" else hidden.reshape(*arguments, hidden.shape[-1])
        rows = hidden.flatten(0, -2)
        shared, by_row = operands[: self._shared], operands[self._shared :]
        by_row = tuple(t if wide else t.flatten() for t, wide in zip(by_row, self._wide, strict=True))
        if torch.is_grad_enabled() and any(t.requires_grad for t in (rows, *shared)):
            return _Differentiated.apply(self, len(shared), rows, *shared, *by_row)
        total, _ = self.compute(rows, shared, by_row, [False] * (1 + len(shared)))
        return total

    def compute(
        self, rows: Tensor, shared: Sequence[Tensor], by_row: Sequence[Tensor], wanted: Sequence[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Computes the loss and its gradients.

        Args:
            rows: The layer's input, of shape ``(n, inputs)``.
            shared: Operands of all rows.
            by_row: Operands with one item for every row.
            wanted: Of `rows` and `shared`, whether their gradient is.

        Returns:
            The loss; the gradients, each in its operand's dtype.
        """
        number = rows.shape[0]
        counts = [count.of(by_row, shared) for count in self._counts]
        bounds = spans(number, self._pieces)
        taken = [[take_piece(t.detach(), low, high) for t in (rows, *by_row)] for low, high in bounds]
        total: Tensor | None = None
        gradients = PieceGradients(shared, wanted)
        with torch.set_grad_enabled(any(wanted)):
            for piece, *targets in taken:
                piece = gradients.leaf(piece)
                given = (piece, number, *gradients.leaves, *targets, *counts)
                loss = self.body(**dict(zip(self._names, given, strict=True)))
                total = loss.detach() if total is None else total + loss.detach()
                if any(wanted):
                    gradients.add(loss, piece)
        assert total is not None
        return total, gradients.finish()


class _Differentiated(torch.autograd.Function):
    """A loss whose gradients are computed with it; backward scales them."""

    @staticmethod
    def forward(ctx: Any, loss: _ChunkedLoss, shared: int, rows: Tensor, *operands: Tensor) -> Tensor:
        wanted = ctx.needs_input_grad[2 : 3 + shared]
        total, gradients = loss.compute(rows, operands[:shared], operands[shared:], wanted)
        found = [g for g in gradients if g is not None]
        ctx.there = [g is not None for g in gradients]
        ctx.others = len(operands) - shared
        ctx.save_for_backward(*found)
        return complete_loss(total, found)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        return None, None, *(next(saved) * upstream if there else None for there in ctx.there), *[None] * ctx.others
