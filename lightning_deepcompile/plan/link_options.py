"""Command-line options for the ranks, nodes and links on which a profile is simulated."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import get_args

from lightning_deepcompile.plan.costs import Link, Profile
from lightning_deepcompile.plan.topology import Algorithm, Topology, TopologyError

_GIGA, _MICRO = 1e9, 1e-6


def add_link_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `rank_counts` and `with_links` read."""
    add = parser.add_argument_group("ranks and links").add_argument
    add("--world", help="number of ranks; several, as in 8,64,512, give a table of weak and strong scaling")
    add("--bandwidth", type=float, help="GB/s that a ring moves per rank, for gathers and reductions")
    add("--gather-bandwidth", type=float, help="the same for gathers alone")
    add("--reduce-bandwidth", type=float, help="the same for reductions alone")
    add("--latency", type=float, help="microseconds of a group of collectives, beside those of its steps")
    add("--ranks-per-node", type=int, help="ranks of a node; without it, all ranks are connected alike")
    add("--node-bandwidth", type=float, help="GB/s that leave a node, over all its links together")
    add("--step-latency", type=float, help="microseconds of each step of a collective inside of a node (0)")
    add("--node-latency", type=float, help="microseconds of each of its steps between nodes (0)")
    add("--replicas", type=int, help="hybrid sharding: parts of the ranks that each share all parameters (1)")
    add("--lanes", type=int, help="operations of a group that are under way at a time (all): 2 with gloo")
    add("--algorithm", choices=get_args(Algorithm), help="how collectives get to all ranks (ring)")


def rank_counts(options: argparse.Namespace, profile: Profile) -> list[int]:
    """Returns the numbers of ranks that ``--world`` asks for; that of the profile by default.

    Raises:
        ValueError: If it is no list of positive numbers.
    """
    if options.world is None:
        return [profile.world_size * (options.replicas or 1)]
    try:
        counts = [int(part) for part in options.world.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ValueError(f"--world {options.world}: expected a positive number, or several like 8,64,512.")
    return counts


def with_links(profile: Profile, options: argparse.Namespace, ranks: int) -> Profile:
    """Returns `profile` for `ranks` ranks, with the nodes and links that `options` give.

    Args:
        profile: As measured.
        options: With those of `add_link_options`.
        ranks: Of all replicas.

    Raises:
        ValueError: Names the option that does not fit, its value, and what to do.
    """
    given = options.gather_bandwidth is not None and options.reduce_bandwidth is not None
    if profile.world_size == 1 and ranks > 1 and options.bandwidth is None and not given:
        raise ValueError(
            f"--world {ranks}: the profile is of one rank, and knows no link between ranks. "
            "Say how fast it is: --bandwidth 50."
        )
    try:
        shards, topology = _topology(options, ranks)
        if shards != profile.world_size or topology is not None:
            profile = profile.for_ranks(shards, topology)
    except TopologyError as error:
        given_as = [f"--world {ranks}", f"--ranks-per-node {options.ranks_per_node}", f"--replicas {options.replicas}"]
        raise ValueError(f"{' '.join(text for text in given_as if 'None' not in text)}: {error}") from error
    links = [_link(profile.gather, options, "gather"), _link(profile.reduce, options, "reduce")]
    return replace(profile, gather=links[0], reduce=links[1])


def _topology(options: argparse.Namespace, ranks: int) -> tuple[int, Topology | None]:
    """Returns the number of ranks that share the parameters, and the nodes; None if all ranks are connected alike."""
    replicas = 1 if options.replicas is None else options.replicas
    if replicas < 1 or ranks % replicas:
        raise ValueError(
            f"--replicas {options.replicas}: expected a number that divides the {ranks} ranks (--world) evenly."
        )
    if options.ranks_per_node is not None and options.ranks_per_node < 1:
        raise ValueError(f"--ranks-per-node {options.ranks_per_node}: expected a positive number.")
    for name in ("node_bandwidth", "node_latency"):
        if getattr(options, name) is not None and options.ranks_per_node is None:
            raise ValueError(
                f"{_option(name)} {getattr(options, name):g}: without nodes it means nothing. Say how many ranks each "
                "has: --ranks-per-node 8."
            )
    of_topology = ("ranks_per_node", "step_latency", "replicas", "algorithm", "lanes")
    if all(getattr(options, name) is None for name in of_topology):
        return ranks, None
    bandwidth = _checked(options, "node_bandwidth", _GIGA)
    return ranks // replicas, Topology(
        options.ranks_per_node or ranks,
        bandwidth,
        _checked(options, "step_latency", _MICRO) or 0.0,
        _checked(options, "node_latency", _MICRO) or 0.0,
        replicas,
        options.algorithm or "ring",
        options.lanes,
    )


def _link(link: Link, options: argparse.Namespace, kind: str) -> Link:
    bandwidth = _checked(options, "bandwidth", _GIGA)
    own = _checked(options, f"{kind}_bandwidth", _GIGA)
    latency = _checked(options, "latency", _MICRO)
    speed = own if own is not None else bandwidth
    return Link(link.latency if latency is None else latency, link.bandwidth if speed is None else speed)


def _checked(options: argparse.Namespace, name: str, unit: float) -> float | None:
    """Returns an option's value in bytes per second, or in seconds; None if it is not given."""
    value: float | None = getattr(options, name)
    if value is None:
        return None
    if unit == _GIGA and not 0 < value < math.inf:
        raise ValueError(f"{_option(name)} {value:g}: expected GB/s, more than 0.")
    if unit == _MICRO and not 0 <= value < math.inf:
        raise ValueError(f"{_option(name)} {value:g}: expected microseconds, at least 0.")
    return value * unit


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
