r"""Keeps measured results as files beside the documentation, and writes the tables of its pages from them.

    python examples/benchmarks/page.py add results/results.json fp8_4xh200 --commit 59ad5bd --date 2026-11-27
    python examples/benchmarks/page.py          # writes the tables anew
    python examples/benchmarks/page.py --check  # says whether they are up to date

A page marks a table by ``<!-- results: NAME -->`` and ``<!-- end of results -->``; what lies between is written from
``docs/benchmarks/NAME.json``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import markdown

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "benchmarks"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "low_precision.md")
_KEPT = (
    "system", "case", "status", "reason", "ms", "min_ms", "max_ms", "peak_gib", "reserved_gib", "states_gib",
    "optimizer_step_ms", "host_ms", "first_step_s", "tflops_per_gpu", "tokens_per_s_per_gpu", "losses", "predicted",
)  # fmt: skip
_SETTINGS = ("layers", "checkpointing", "steps", "warmup", "world", "precision", "optimizer", "nodes")
_MARK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def kept(files: Sequence[dict[str, Any]], commit: str, date: str) -> dict[str, Any]:
    """Joins result files of one machine: what a reader of the tables can check, without each rank's numbers.

    Args:
        files: Contents of ``results.json``, of runs with the same settings.
        commit: The commit that was measured.
        date: The day, as in ``2026-11-27``.

    Raises:
        ValueError: If their settings differ.
    """
    settings = [{key: file["settings"][key] for key in _SETTINGS if key in file["settings"]} for file in files]
    if any(other != settings[0] for other in settings):
        raise ValueError(f"the files are of runs with other settings, and make no table: {settings}")
    environment = files[0]["environment"]
    results = [{key: one[key] for key in _KEPT if key in one} for file in files for one in file["results"]]
    return {
        "commit": commit,
        "date": date,
        "device": environment["device"],
        "torch": environment["torch"],
        "nccl": environment.get("nccl"),
        **settings[0],
        "results": [one for one in results if "reason" not in one or "time budget" not in one["reason"]],
    }


def table(record: dict[str, Any]) -> str:
    """Writes the table of one file, and the line above it that says what was measured."""
    systems = list(dict.fromkeys(one["system"] for one in record["results"]))
    cases = list(dict.fromkeys(one["case"] for one in record["results"]))
    cases.sort(key=lambda case: [int(part) for part in case.split("x")])
    found = {(one["case"], one["system"]): one for one in record["results"]}
    rows = [["tokens × batch × accumulation", *(f"`{system}`" for system in systems)]]
    for case in cases:
        ran = {name: one for name in systems if (one := found.get((case, name))) and one["status"] == "ok"}
        best = min((one["ms"] for one in ran.values()), default=None)
        row = [case.replace("x", "×")]
        for name in systems:
            if name in ran:
                one = ran[name]
                time = f"**{one['ms']:.1f}**" if one["ms"] == best else f"{one['ms']:.1f}"
                row.append(f"{time} ({one['min_ms']:.1f}), {one['peak_gib']:.1f} GiB")
            else:
                row.append("failed" if (case, name) in found else "")
        rows.append(row)
    line = (
        f"{record['date']}, commit {record['commit']}, {record['world']}×{record['device'].removeprefix('NVIDIA ')}, "
        f"PyTorch {record['torch']}, {record['layers']} layers. Milliseconds per optimizer step, the median (and the "
        "fastest), and peak memory:\n"
    )
    return f"{line}\n{markdown(rows)}"


def written(text: str, folder: Path) -> str:
    """Returns a page with the tables of the files in `folder`."""

    def fill(match: re.Match[str]) -> str:
        record = json.loads((folder / f"{match[2]}.json").read_text())
        return f"{match[1]}{table(record)}{match[3]}"

    return _MARK.sub(fill, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if `--check` finds a table that is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a table is out of date")
    add = parser.add_subparsers(dest="command").add_parser("add", help="keep results of one machine")
    add.add_argument("files", type=Path, nargs="+", metavar="results.json")
    add.add_argument("name", help="name of the table")
    add.add_argument("--commit", required=True)
    add.add_argument("--date", default=datetime.date.today().isoformat())
    options = parser.parse_args(arguments)
    if options.command == "add":
        record = kept([json.loads(file.read_text()) for file in options.files], options.commit, options.date)
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{options.name}.json").write_text(json.dumps(record, indent=1) + "\n")
        return 0
    stale = [page for page in PAGES if written(page.read_text(), FOLDER) != page.read_text()]
    for page in stale:
        if options.check:
            print(f"{page.relative_to(ROOT)}: a table is not that of its file; run {Path(__file__).name}")
        else:
            page.write_text(written(page.read_text(), FOLDER))
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
