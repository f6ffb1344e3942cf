"""Compute by block, and communication against its link, as sections of a page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from lightning_deepcompile.plan.costs import Link, Profile
from lightning_deepcompile.plan.simulate import Prediction
from lightning_deepcompile.program.printer import format_bytes, format_count
from lightning_deepcompile.program.schedule import Schedule
from lightning_deepcompile.report.html import ms, quiet, table
from lightning_deepcompile.report.names import blocks_of, compress

_SHOWN = 24
_SEEN = 0.05
"""The least part of the time of transfers that tells anything about the bandwidth: the rest is latency."""


def blocks_table(
    schedules: Sequence[Schedule], profile: Profile, operations: Mapping[str, int], peak: float | None
) -> str:
    """Returns a table of the compute of a micro-batch by block, in the order of the model.

    Args:
        schedules: The programs.
        profile: Has times and names.
        operations: Floating-point operations of regions, by key.
        peak: What the device can do in a second; None if that is not known.
    """
    seconds: defaultdict[tuple[str, ...], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for schedule in schedules:
        for position in schedule.at("compute"):
            instruction = schedule.instructions[position]
            found = seconds[tuple(blocks_of(instruction, schedule, profile)) or (instruction.region,)]
            key = f"{schedule.name}/{instruction.region}"
            found[schedule.kind] += profile.regions[key].seconds
            found["operations"] += operations.get(key, 0)
    total = sum(row["forward"] + row["backward"] for row in seconds.values())
    slowest = sorted(seconds, key=lambda names: -(seconds[names]["forward"] + seconds[names]["backward"]))[:_SHOWN]
    rows = []
    for names in [one for one in seconds if one in set(slowest)]:
        row = seconds[names]
        both = row["forward"] + row["backward"]
        rate = row["operations"] / both if both else 0.0
        rows.append(
            (
                compress(names),
                ms(row["forward"]),
                ms(row["backward"]),
                f"{both / total:.1%}" if total else "-",
                f"{row['operations'] / 1e9:.1f}" if row["operations"] else "-",
                _rate(rate) if rate else "-",
                f"{rate / peak:.0%}" if rate and peak else "-",
            )
        )
    note = (
        f"A micro-batch computes {ms(total)}, and the optimizer's step takes {ms(profile.optimizer_seconds)}. "
        "Operations are those of matrix products, convolutions and attention, recomputation excluded."
    )
    if len(seconds) > _SHOWN:
        note += f" Shown are the slowest {_SHOWN} of {format_count(len(seconds), 'group')} of blocks."
    if peak is None:
        note += " MFU is not known, as the device's peak is not."
    heads = ("blocks", "forward", "backward", "part of compute", "GFLOP", "FLOP/s", "MFU")
    return quiet(note) + table(heads, rows, numbers=range(1, 7))


def _rate(rate: float) -> str:
    return f"{rate / 1e12:.1f} T" if rate >= 1e11 else f"{rate / 1e9:.1f} G"


def links_table(schedules: Sequence[Schedule], profile: Profile, prediction: Prediction) -> str:
    """Returns a table of what gathers and reductions move in a step, and how fast; empty on one rank."""
    if profile.world_size == 1:
        return ""
    rows = []
    for name, subject, link, stream, busy in (
        ("gathers", "parameters", profile.gather, "gather", prediction.gather_seconds),
        ("reductions", "gradients", profile.reduce, "reduce", prediction.reduce_seconds),
    ):
        spans = [span for span in prediction.spans if span.stream == stream]
        size = _moved(schedules, subject, [span.label for span in spans])
        sent = size * (profile.world_size - 1) / profile.world_size
        rows.append((name, str(len(spans)), format_bytes(size), ms(busy), *_speeds(sent, busy, len(spans), link)))
    note = (
        "A link's bandwidth and latency are fitted to the times of every group in a measured step. Many small groups "
        "reach less of it, as each costs the latency."
    )
    heads = ("", "groups a step", "bytes", "time", "achieved", "link", "latency", "part of the link")
    return quiet(note) + table(heads, rows, numbers=range(1, 8))


def _moved(schedules: Sequence[Schedule], subject: str, labels: Sequence[str]) -> int:
    sizes = {
        f"{schedule.name}/{instruction.text}": instruction.bytes
        for schedule in schedules
        for instruction in schedule.instructions
        if instruction.traits.effect == ("launch", subject)
    }
    return sum(sizes.get(label, 0) for label in labels)


def _speeds(sent: float, busy: float, groups: int, link: Link) -> tuple[str, str, str, str]:
    achieved = sent / busy if busy else 0.0
    shown = [f"{achieved / 1e9:.2f} GB/s", f"{link.bandwidth / 1e9:.2f} GB/s", f"{link.latency * 1e6:.0f} µs"]
    if busy - groups * link.latency < _SEEN * busy:
        return shown[0], "hidden by latency", shown[2], "-"
    return shown[0], shown[1], shown[2], f"{achieved / link.bandwidth:.0%}"
