"""Exchanges rows instead of tables: looks rows of an embedding up where they are, without the whole table.

A token needs one row of an embedding's table, and gives a gradient to that one alone. Where nothing else reads the
table, ``F.embedding(tokens, gather(table))`` becomes a look-up on the ranks that hold the rows; the table is neither
gathered nor is its gradient, which is as large, reduced. That is decided by sizes that all ranks know, and by the
graph: never by how many tokens a rank happens to have.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.nn import functional as F

from lightning_deepcompile.capture.dynamo_graph import calls_gather, erase_unused, gathered_id
from lightning_deepcompile.runtime.lookups import lookup_ops
from lightning_deepcompile.sharding.parameter import ShardedParameter
from lightning_deepcompile.sharding.shards import ShardedModel

_log = logging.getLogger(__name__)

_LARGE_TABLE = 64 << 20
"""Bytes, gathered: what moves in less than what the exchange costs in launches (some 0.2 ms) is left to gathers.
An exchange of the embedding of Llama-3-8B's shape makes a step of 144.8 ms one of 139.2 (1024 tokens, 4xH200)."""

_ROWS_PER_RANK = 8192
"""An exchange sends every token's row to every rank, so it sends less than the table as long as a rank has fewer tokens
than it has rows. Batches of more than these are the exception."""

_SIGNATURE = inspect.signature(F.embedding)


@dataclass(frozen=True)
class LookupExchange:
    """The tables that are looked up by exchange, and the ranks among which they are.

    Args:
        tables: By parameter id.
        group: Name of the process group that shares the parameters.
        host_group: Name of one of the same ranks' CPUs.
        reduce_dtype: In which whole gradients travel; None for the one they are computed in.
    """

    tables: dict[int, ShardedParameter]
    group: str
    host_group: str
    reduce_dtype: torch.dtype | None

    def rewrite(self, gm: fx.GraphModule) -> int:
        """Replaces look-ups in gathered tables, in place.

        Args:
            gm: Dynamo's graph, before AOTAutograd.

        Returns:
            The number of look-ups that were replaced.
        """
        gathers: dict[int, list[fx.Node]] = {}
        for node in gm.graph.nodes:
            if calls_gather(node) and (ds_id := gathered_id(node)) in self.tables:
                gathers.setdefault(ds_id, []).append(node)
        replaced = 0
        for ds_id, nodes in gathers.items():
            readers = [(gather, user, _bind(user)) for gather in nodes for user in gather.users]
            if all(_is_plain(gather, arguments) for gather, _, arguments in readers):
                for gather, user, arguments in readers:
                    assert arguments is not None
                    self._replace(self.tables[ds_id], gather, user, arguments)
                replaced += len(readers)
                erase_unused(nodes)
        if replaced:
            gm.recompile()
            _log.info("%d embeddings are looked up on the ranks that hold their rows.", replaced)
        return replaced

    def _replace(self, table: ShardedParameter, gather: fx.Node, user: fx.Node, arguments: dict[str, Any]) -> None:
        shard, *_, dtype = gather.args
        indices, padding, rows = arguments["input"], arguments["padding_idx"], table.layout.spec.shape[0]
        padding = -1 if padding is None else padding % rows
        settings = (table.name, rows, padding, dtype, self.reduce_dtype, self.group)
        graph = user.graph
        count_op, look_up_op, _ = lookup_ops()
        with graph.inserting_before(user):
            most = graph.call_function(count_op, (indices, table.name, self.host_group))
            found = graph.call_function(look_up_op, (shard, indices, most, *settings))
        most.meta["example_value"] = torch.empty((), dtype=torch.int64)
        found.meta = dict(user.meta)
        user.replace_all_uses_with(found)
        graph.erase_node(user)


def exchange_lookups(
    model: ShardedModel,
    stage: int,
    reduce_dtype: torch.dtype | None,
    host_group: dist.ProcessGroup,
    *,
    least_bytes: int = _LARGE_TABLE,
    least_rows: int = _ROWS_PER_RANK,
) -> LookupExchange | None:
    """Decides which tables may be looked up by exchange.

    Args:
        model: The sharded model.
        stage: ZeRO stage; below stage 3, parameters are whole when they are needed.
        reduce_dtype: In which gradients travel.
        host_group: Of the ranks' CPUs.
        least_bytes: Of a gathered table.
        least_rows: That each rank holds of a table.

    Returns:
        The decision; None if there is nothing to exchange.
    """
    ranks = model.ranks
    if stage != 3 or ranks.shards == 1 or ranks.replicas > 1:
        return None

    def pays(parameter: ShardedParameter) -> bool:
        return parameter.info.gathered_bytes >= least_bytes and parameter.layout.rows_padded >= least_rows

    tables = {p.ds_id: p for p in model.parameters if len(p.layout.spec.shape) == 2 and pays(p)}
    if not tables:
        return None
    return LookupExchange(tables, ranks.shard_group.group_name, host_group.group_name, reduce_dtype)


def _bind(node: fx.Node) -> dict[str, Any] | None:
    if node.op != "call_function" or node.target is not F.embedding:
        return None
    bound = _SIGNATURE.bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _is_plain(gather: fx.Node, arguments: dict[str, Any] | None) -> bool:
    """Returns whether the gathered table is used only to look up rows of it."""
    return (
        arguments is not None
        and arguments["weight"] is gather
        and arguments["input"] is not gather
        and arguments["max_norm"] is None
        and not arguments["scale_grad_by_freq"]
        and not arguments["sparse"]
    )
