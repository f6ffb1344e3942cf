"""Nodes on one Linux machine: network namespaces behind a bridge, each with a limit on what leaves it.

Needs root, or whatever else lets a process make network namespaces, and the kernel's token bucket filter (``tbf``).
"""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["INTERFACE", "address", "enter", "make_nodes", "node_command"]

INTERFACE = "eth0"
"""Of every node, towards the others."""
_INSIDE = "BENCHMARK_NAMESPACE"


def enter() -> None:
    """Starts this script again in namespaces of its own, which end with it, and returns there.

    Raises:
        SystemExit: With the status of the script that was started, or if there are no namespaces to be had.
    """
    if os.environ.get(_INSIDE):
        subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)  # where `ip` keeps names of namespaces
        os.makedirs("/run/netns")
        return
    command = ["unshare", "--net", "--mount", sys.executable, *sys.argv]
    raise SystemExit(subprocess.run(command, env=os.environ | {_INSIDE: "1"}).returncode)


def make_nodes(count: int, mbit: float) -> None:
    """Makes `count` nodes out of which `mbit` megabits a second go each. Inside of one, nothing is limited."""
    _ip("link", "add", "name", "switch", "type", "bridge")
    _ip("link", "set", "switch", "up")
    for node in range(count):
        name = f"node{node}"
        _ip("netns", "add", name)
        _ip("link", "add", "name", f"to{node}", "type", "veth", "peer", "name", INTERFACE, "netns", name)
        _ip("link", "set", f"to{node}", "master", "switch", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "addr", "add", f"{address(node)}/24", "dev", INTERFACE)
        _ip("-n", name, "link", "set", INTERFACE, "up")
        bucket = ["tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "400ms"]
        subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *bucket], check=True)


def address(node: int) -> str:
    """Of a node, for the others."""
    return f"10.77.0.{node + 1}"


def node_command(node: int) -> list[str]:
    """Returns the prefix of a command that runs it on a node."""
    return ["ip", "netns", "exec", f"node{node}"]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
