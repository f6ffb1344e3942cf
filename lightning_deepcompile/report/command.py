"""``python -m lightning_deepcompile report PROFILE.json``: plans a measured step, and writes a report of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_deepcompile.plan.command_line import fail, read_profile
from lightning_deepcompile.plan.costs import ProfileError
from lightning_deepcompile.plan.known_passes import DEFAULT_SCHEDULE, resolve_passes
from lightning_deepcompile.plan.link_options import add_link_options, rank_counts, with_links
from lightning_deepcompile.plan.scaling import scaling
from lightning_deepcompile.plan.step_pass import PassError
from lightning_deepcompile.report.comparison import compare
from lightning_deepcompile.report.figures import can_draw
from lightning_deepcompile.report.page import NO_CHARTS, write_page
from lightning_deepcompile.report.record import plan_record
from lightning_deepcompile.report.trace import write_trace


def main(arguments: Sequence[str]) -> None:
    """Writes a report, and a trace file if asked to; needs neither ranks nor a device.

    Args:
        arguments: Command line behind ``report``.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lightning_deepcompile report",
        description="Plans a measured step, and writes what it does as one page for a browser that needs no network. "
        "`strategy.save_report()` writes the same with what was measured under the plan.",
    )
    parser.add_argument("profile", type=Path, nargs="?", help="what `strategy.profile().to_json()` gave")
    parser.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("BEFORE.html", "AFTER.html"),
        help="instead: print in which figures and settings two reports differ",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="the page (report.html)")
    parser.add_argument("--trace", type=Path, help="also a file for Perfetto or Chrome's about:tracing, such as t.json")
    add_link_options(parser)
    parser.add_argument("--passes", default=",".join(DEFAULT_SCHEDULE[-1]["passes"]), help="separated by commas")
    options = parser.parse_args(arguments)
    if options.compare is not None:
        _compare(*options.compare)
        return
    if options.profile is None:
        parser.error("name a profile, or --compare two reports")
    try:
        measured = read_profile(options.profile)
        counts = rank_counts(options, measured)
        elsewhere = {ranks: with_links(measured, options, ranks) for ranks in counts}
        passes = resolve_passes(options.passes.split(","), profiled=True)
        print(f"Planning with {len(measured.regions)} regions; large models take a minute.", file=sys.stderr)
        record = plan_record(elsewhere[counts[0]] if len(counts) == 1 else measured, passes)
        if len(counts) > 1:
            record = replace(record, scaling=scaling(measured, counts, elsewhere.__getitem__, passes))
        if not can_draw():
            print(f"{NO_CHARTS} The page has its tables.", file=sys.stderr)
        print(write_page(record, options.output))
        if options.trace is not None:
            print(write_trace(record, options.trace))
    except (ProfileError, PassError, ValueError) as error:
        fail("report", error)
    except OSError as error:
        fail("report", f"{error.filename} cannot be written: {error.strerror}.")


def _compare(before: Path, after: Path) -> None:
    try:
        print(compare(before, after))
    except ValueError as error:
        fail("report", error)
    except OSError as error:
        fail("report", f"{error.filename} cannot be read: {error.strerror}.")
