"""Models the time of collectives among ranks in nodes, with fast links inside of a node and slower ones between nodes.

A step of a collective costs a latency; bytes cost their time on the narrowest link on their way (alpha-beta models).
Rings and trees move (n - 1) / n of the bytes over every rank's link, which is the least possible (Thakur, Rabenseifner
and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005). Of the n - 1 steps of a ring, one less
than there are nodes is between nodes, as in NCCL's own estimates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Algorithm = Literal["ring", "hierarchical", "tree"]
"""``"ring"`` passes through all ranks; ``"hierarchical"`` is a ring over nodes, and then one inside of each; ``"tree"``
is the same with recursive doubling in place of rings."""


class TopologyError(ValueError):
    """Nodes that ranks do not fill, or a group that splits a node unevenly."""


class RankGroup(NamedTuple):
    """Ranks of one collective.

    Args:
        members: The number of them in each node.
        nodes: The number of nodes that they are in.
        sharing: Groups like this one that use a node's links at the same time.
    """

    members: int
    nodes: int
    sharing: int = 1


@dataclass(frozen=True)
class Topology:
    """The nodes of ranks, and their links. Ranks are numbered node by node, and neighbours share parameters.

    Args:
        ranks_per_node: Ranks of a node.
        node_bandwidth: Bytes per second that leave a node over all its links together; None where there is one node.
        step_latency: Seconds of a step between ranks of a node.
        node_latency: Seconds of a step between nodes.
        replicas: Ranks that hold the same shards (hybrid sharding); gradients are averaged over them.
        algorithm: The algorithm of collectives.
        lanes: The number of operations of one group that overlap, and so do not wait for each other's latency:
            2 with gloo, with NCCL as many as it has channels for; None: all of them.
    """

    ranks_per_node: int
    node_bandwidth: float | None = None
    step_latency: float = 0.0
    node_latency: float = 0.0
    replicas: int = 1
    algorithm: Algorithm = "ring"
    lanes: int | None = None

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "replicas"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise TopologyError(f"{name} is {getattr(self, name)!r}: expected a positive integer.")
        if self.lanes is not None and (not isinstance(self.lanes, int) or self.lanes < 1):
            raise TopologyError(f"lanes is {self.lanes!r}: expected a positive integer, or None.")
        for name in ("step_latency", "node_latency"):
            if not 0 <= getattr(self, name) < math.inf:
                raise TopologyError(f"{name} is {getattr(self, name)!r}: expected seconds, at least 0.")
        if self.node_bandwidth is not None and not 0 < self.node_bandwidth < math.inf:
            raise TopologyError(f"node_bandwidth is {self.node_bandwidth!r}: expected bytes per second, more than 0.")
        if self.algorithm not in get_args(Algorithm):
            raise TopologyError(f"algorithm is {self.algorithm!r}: expected one of {', '.join(get_args(Algorithm))}.")

    def check(self, shards: int) -> None:
        """Raises unless ranks fill the nodes evenly, and none of the groups splits one.

        Raises:
            TopologyError: Says which number to change.
        """
        ranks, per_node = shards * self.replicas, self.ranks_per_node
        if ranks > per_node and ranks % per_node:
            raise TopologyError(
                f"{ranks} ranks do not fill nodes of {per_node}: use a multiple of {per_node} ranks, or another number "
                "of ranks per node."
            )
        if self.replicas > 1 and ranks > per_node and shards % per_node and per_node % shards:
            raise TopologyError(
                f"{self.replicas} replicas of {ranks} ranks leave {shards} ranks that share the parameters, which "
                f"splits nodes of {per_node} unevenly: choose replicas so that those ranks divide a node, or are whole "
                "nodes."
            )
        if ranks > per_node and self.node_bandwidth is None:
            raise TopologyError(
                f"{ranks} ranks are on {ranks // per_node} nodes, and nothing is known of the links between them: say "
                "how many GB/s leave a node (node bandwidth)."
            )

    def shard_group(self, shards: int) -> RankGroup:
        """The group that gathers parameters, and reduces gradients."""
        members = min(shards, self.ranks_per_node)
        return RankGroup(members, shards // members)

    def replica_group(self, shards: int) -> RankGroup:
        """The group that averages one shard of the gradients."""
        members = min(max(self.ranks_per_node // shards, 1), self.replicas)
        return RankGroup(members, self.replicas // members, min(shards, self.ranks_per_node))

    def gather_seconds(self, size: int, shards: int, bandwidth: float, operations: int = 1) -> float:
        """Seconds of a group of all-gathers of `size` bytes in all; those of reduce-scatters are the same.

        Args:
            size: Bytes of the whole tensors.
            shards: Ranks that share them.
            bandwidth: Bytes per second that a rank moves inside of its node.
            operations: All-gathers of the group.
        """
        return self.one_way_seconds(size, self.shard_group(shards), bandwidth, operations)

    def reduce_seconds(
        self, size: int, shards: int, bandwidth: float, *, all_reduces: bool = False, operations: int = 1
    ) -> float:
        """Seconds of a reduce-scatter of `size` bytes, and of the all-reduce of each part over the replicas.

        Args:
            size: Bytes of the whole tensors.
            shards: Ranks that share them.
            bandwidth: Bytes per second of the tensors that a rank moves inside of its node.
            all_reduces: Whether the reduce-scatter is an all-reduce of which most is dropped, as gloo's is: it moves
                everything twice, as `bandwidth` has it already.
            operations: Reduce-scatters of the group.
        """
        group = self.shard_group(shards)
        if all_reduces:
            scatter = self.all_reduce_seconds(size, group, 2 * bandwidth, operations)
        else:
            scatter = self.one_way_seconds(size, group, bandwidth, operations)
        return scatter + self.all_reduce_seconds(size / shards, self.replica_group(shards), bandwidth, operations)

    def all_reduce_seconds(self, size: float, group: RankGroup, bandwidth: float, operations: int = 1) -> float:
        """Seconds of all-reduces, each of which is a reduce-scatter and an all-gather."""
        return 2 * self.one_way_seconds(size, group, bandwidth, operations)

    def one_way_seconds(self, size: float, group: RankGroup, bandwidth: float, operations: int = 1) -> float:
        """Seconds of `operations` all-gathers or reduce-scatters of `size` bytes in all, over `group`."""
        turns = 1 if self.lanes is None else -(-operations // self.lanes)
        members, nodes, sharing = group
        inside = size / bandwidth
        between = 0.0 if nodes == 1 else size * sharing / (self.node_bandwidth or bandwidth)
        if self.algorithm == "ring":
            ranks = members * nodes
            slowest = max(inside if members > 1 else 0.0, between)
            return turns * self._latency(ranks - nodes, nodes - 1) + (ranks - 1) / ranks * slowest
        moved = (members - 1) / members * inside + (nodes - 1) / nodes * between
        if self.algorithm == "tree":
            return turns * self._latency(math.ceil(math.log2(members)), math.ceil(math.log2(nodes))) + moved
        return turns * self._latency(members - 1, nodes - 1) + moved

    def _latency(self, steps: int, between: int) -> float:
        return steps * self.step_latency + between * self.node_latency
