"""Seconds of collectives over nodes: closed forms, and algorithms that are carried out message by message."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_simulate import SIZE, compute, gather, profile, reduce, release, schedule, wait

from lightning_deepcompile.plan.costs import Link, Profile, ProfileError, RegionCost, Resident
from lightning_deepcompile.plan.simulate import simulate
from lightning_deepcompile.plan.topology import RankGroup, Topology, TopologyError

BANDWIDTH, OUT = 400e9, 100e9

_numbers = st.floats(1e-7, 1e-3)
_sizes = st.integers(1, 1 << 32)


@given(size=_sizes, ranks=st.integers(1, 64), step=_numbers)
def test_on_one_node_rings_and_trees_are_those_of_textbooks(size: int, ranks: int, step: float) -> None:
    wire = (ranks - 1) / ranks * size / BANDWIDTH
    ring = Topology(64, step_latency=step)
    assert ring.gather_seconds(size, ranks, BANDWIDTH) == pytest.approx((ranks - 1) * step + wire)
    reduced = ring.all_reduce_seconds(size, RankGroup(ranks, 1), BANDWIDTH)
    assert reduced == pytest.approx(2 * (ranks - 1) * step + 2 * wire)
    tree = replace(ring, algorithm="tree")
    assert tree.gather_seconds(size, ranks, BANDWIDTH) == pytest.approx((ranks - 1).bit_length() * step + wire)
    link = Link(0.0, BANDWIDTH)
    assert replace(ring, step_latency=0.0).gather_seconds(size, ranks, BANDWIDTH) == pytest.approx(
        link.seconds(size, ranks)
    )


def _carried_out(algorithm: str, nodes: int, members: int, size: float, topology: Topology) -> float:
    """Seconds of an all-gather whose every message is sent: in each round all ranks send, and wait for the slowest."""
    ranks = nodes * members
    held = [{rank} for rank in range(ranks)]  # parts of the whole

    def node(rank: int) -> int:
        return rank // members

    def round_of(pairs: dict[int, tuple[int, set[int]]]) -> float:
        """Returns the time of one round, in which `pairs` says who sends what to whom."""
        inside, leaving = [0.0], [0.0] * nodes
        for sender, (receiver, parts) in pairs.items():
            if node(sender) == node(receiver):
                inside.append(len(parts) * size / ranks / BANDWIDTH)
            else:
                leaving[node(sender)] += len(parts) * size / ranks / OUT
        crosses = any(node(a) != node(b) for a, (b, _) in pairs.items())
        for receiver, parts in list(pairs.values()):
            held[receiver] |= parts
        return max(*inside, *leaving) + (topology.node_latency if crosses else topology.step_latency)

    def along(groups: list[list[int]]) -> float:
        """All groups at once, which have the same sizes: a ring, or recursive doubling."""
        count, seconds = len(groups[0]), 0.0
        if algorithm == "tree":
            for distance in [1 << k for k in range(count.bit_length() - 1)]:
                at = {group[i]: (group[i ^ distance], set(held[group[i]])) for group in groups for i in range(count)}
                seconds += round_of(at)
            return seconds
        fresh = {rank: set(held[rank]) for group in groups for rank in group}
        for _ in range(count - 1):
            sent = {group[i]: (group[(i + 1) % count], fresh[group[i]]) for group in groups for i in range(count)}
            fresh = {receiver: parts for receiver, parts in sent.values()}
            seconds += round_of(sent)
        return seconds

    if algorithm == "ring":
        seconds = along([list(range(ranks))])
    else:
        seconds = along([[n * members + m for n in range(nodes)] for m in range(members)])
        seconds += along([[n * members + m for m in range(members)] for n in range(nodes)])
    assert all(parts == set(range(ranks)) for parts in held), "everybody has everything"
    return seconds


@given(
    algorithm=st.sampled_from(["ring", "hierarchical", "tree"]),
    nodes=st.sampled_from([1, 2, 4, 8]),
    members=st.sampled_from([1, 2, 4]),
    size=_sizes,
    latencies=st.tuples(_numbers, _numbers),
)
def test_what_is_carried_out_message_by_message_takes_as_long(
    algorithm: Any, nodes: int, members: int, size: int, latencies: tuple[float, float]
) -> None:
    if algorithm == "ring":  # in lock-step, all wait for the slower kind of step: a real ring goes on
        latencies = (latencies[0],) * 2
    topology = Topology(members, OUT, *latencies, algorithm=algorithm)
    expected = _carried_out(algorithm, nodes, members, size, topology)
    assert topology.gather_seconds(size, nodes * members, BANDWIDTH) == pytest.approx(expected)


def test_a_ring_over_nodes_has_one_slow_step_less_than_nodes() -> None:
    topology = Topology(8, OUT, 1e-6, 1e-5)
    assert topology.gather_seconds(0, 4096, BANDWIDTH) == pytest.approx(511e-5 + (4095 - 511) * 1e-6)
    tree = replace(topology, algorithm="tree")
    assert tree.gather_seconds(0, 4096, BANDWIDTH) == pytest.approx(9e-5 + 3e-6)


@pytest.mark.parametrize(
    ("shards", "replicas", "inside", "across"),
    [
        (8, 4, RankGroup(8, 1), RankGroup(1, 4, 8)),  # shards in a node, replicas in others: eight averages share links
        (4, 8, RankGroup(4, 1), RankGroup(2, 4, 4)),  # two replicas in each node
        (16, 2, RankGroup(8, 2), RankGroup(1, 2, 8)),  # shards over two nodes
        (4, 2, RankGroup(4, 1), RankGroup(2, 1, 4)),  # all of it in one node
    ],
)
def test_replicas_average_the_parts_that_shards_were_reduced_to(
    shards: int, replicas: int, inside: RankGroup, across: RankGroup
) -> None:
    topology = Topology(8, OUT, 1e-6, 1e-5, replicas)
    topology.check(shards)
    assert (topology.shard_group(shards), topology.replica_group(shards)) == (inside, across)
    size = 1 << 30
    one_way = [
        topology.one_way_seconds(part, group, BANDWIDTH) for part, group in ((size, inside), (size / shards, across))
    ]
    assert topology.reduce_seconds(size, shards, BANDWIDTH) == pytest.approx(one_way[0] + 2 * one_way[1])
    doubled = topology.reduce_seconds(size, shards, BANDWIDTH, all_reduces=True) - 2 * one_way[1]
    if inside.nodes == 1:  # the measured bandwidth has it that everything moves twice; the steps are twice as many
        assert doubled == pytest.approx(one_way[0] + (shards - 1) * 1e-6)
    else:
        assert doubled == pytest.approx(2 * one_way[0]), "what leaves nodes is twice as much"
    if (shards, replicas) == (8, 4):  # by hand
        within = 7e-6 + 7 / 8 * size / BANDWIDTH
        average = 2 * (3e-5 + 3 / 4 * size / OUT)  # eight eighths at a time
        assert topology.reduce_seconds(size, shards, BANDWIDTH) == pytest.approx(within + average)


@pytest.mark.parametrize(
    ("fields", "shards", "message"),
    [
        ({"ranks_per_node": 8}, 12, "12 ranks do not fill nodes of 8: use a multiple of 8"),
        ({"ranks_per_node": 8, "replicas": 4}, 6, "4 replicas of 24 ranks leave 6 ranks .* splits nodes of 8 unevenly"),
        ({"ranks_per_node": 8, "node_bandwidth": None}, 16, "16 ranks are on 2 nodes, .* how many GB/s leave a node"),
        ({"ranks_per_node": 0}, 8, "ranks_per_node is 0: expected a positive integer"),
        ({"ranks_per_node": 8, "node_bandwidth": -1.0}, 8, "node_bandwidth is -1.0: expected bytes per second"),
        ({"ranks_per_node": 8, "node_latency": math.nan}, 8, "node_latency is nan: expected seconds"),
        ({"ranks_per_node": 8, "algorithm": "star"}, 8, "algorithm is 'star': expected one of ring, "),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], shards: int, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Topology(**{"node_bandwidth": OUT, **fields}).check(shards)


# A step on other ranks ------------------------------------------------------------------------------------------------


def _step() -> list[Any]:
    forward = schedule("forward", gather(0), wait(0), compute(0, 0), release(0))
    return [forward, schedule("backward", compute(0), reduce(0))]


def test_a_step_on_nodes_takes_the_collectives_seconds() -> None:
    base = replace(profile(_step()), gather=Link(0.125, SIZE / 2), reduce=Link(0.125, SIZE / 2))
    topology = Topology(2, SIZE / 4, 0.25, 1.0, replicas=2)
    there = Profile.from_json(base.for_ranks(4, topology).to_json())
    assert there.topology == topology
    result = simulate(there.schedules, there)
    # Four ranks on two nodes: three steps, one between nodes, and three quarters of the bytes through the slow link.
    one_way = 2 * 0.25 + 1.0 + 3 / 4 * SIZE / (SIZE / 4)
    # Two ranks of a node average a quarter each with the other replica: 2 * SIZE / 4 bytes share the link, both ways.
    average = 2 * (1.0 + 1 / 2 * (2 * SIZE / 4) / (SIZE / 4))
    assert result.gather_seconds == pytest.approx(0.125 + one_way)
    assert result.reduce_seconds == pytest.approx(2 * 0.125 + one_way + average)


def test_on_more_ranks_less_is_resident_and_rows_are_padded_to_other_numbers() -> None:
    base = replace(profile(_step()), rows={"0": 4}, resident=Resident(shards=6, states=2))
    costs = {key: RegionCost(1.0, 0.0, 10, 30, 20) for key in base.regions}
    for device_type in ("cuda", "cpu"):
        there = replace(base, regions=costs, device_type=device_type).for_ranks(8)
        assert there.resident == Resident(1, 0)
        # What was 6 + 2 bytes on 2 ranks is 1 + 0 on 8; a host that computes does not count it.
        less = 8 - 1 if device_type == "cuda" else 0
        assert {(c.before, c.peak, c.after) for c in there.regions.values()} == {(10 - less, 30 - less, 20 - less)}
        assert {i.bytes for s in there.schedules for i in s.instructions if i.sizes} == {2 * SIZE}, "8 rows for 4"
    assert base.for_ranks(4).schedules == base.schedules, "4 rows, one for each"
    assert base.for_ranks(3).schedules[0].instructions[0].sizes == (SIZE * 6 // 4,), "3 ranks with 2 rows each"


def test_a_part_of_the_batch_has_fewer_micro_batches_then_smaller_ones() -> None:
    base = replace(profile(_step(), micro_batches=4), resident=Resident(shards=8))
    half = base.for_share(1 / 2)
    assert (half.micro_batches, half.regions) == (2, base.regions)
    eighth = base.for_share(1 / 8)
    assert eighth.micro_batches == 1
    assert set(eighth.regions.values()) == {RegionCost(0.5, 0.0, 8 + 1, 8 + 11, 8 + 6)}


def test_a_damaged_topology_is_refused() -> None:
    text = profile(_step()).for_ranks(4, Topology(2, OUT)).to_json()
    with pytest.raises(ProfileError, match="damaged .*ranks_per_node is 0"):
        Profile.from_json(text.replace('"ranks_per_node": 2', '"ranks_per_node": 0'))


@given(sizes=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=12), lanes=st.integers(1, 4))
def test_operations_of_a_lane_wait_for_each_other(sizes: list[int], lanes: int) -> None:
    ranks, step = 8, 1e-5
    link, topology = Link(0.25, BANDWIDTH), Topology(64, step_latency=step, lanes=lanes)
    measured = replace(profile([]), world_size=ranks, gather=link, reduce=link, topology=topology, device_type="cuda")
    wire = (ranks - 1) / ranks * sum(sizes) / BANDWIDTH
    expected = 0.25 - (-len(sizes) // lanes) * (ranks - 1) * step + wire
    assert measured.gather_seconds(sizes) == pytest.approx(expected)
    assert measured.reduce_seconds(sizes) == pytest.approx(expected)
