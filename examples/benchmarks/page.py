r"""Keeps measured results as files beside the documentation, and writes its tables and plots from them.

    python examples/benchmarks/page.py add results/results.json fp8_4xh200 --subject fp8
    python examples/benchmarks/page.py          # writes tables and plots anew
    python examples/benchmarks/page.py --check  # says whether they are up to date

A file in ``docs/benchmarks`` holds the results of ``compare.py``, or ``columns`` and ``rows`` of a table, or ``pairs``
of results (``FILE/CASE/SYSTEM``), and the name of its subject. A page marks what is written by
``<!-- tables: SUBJECT -->``, ``<!-- summary -->``, ``<!-- comparison: NAME -->`` or ``<!-- rows: NAME -->``, up to
``<!-- end -->``. Files with a ``plot`` are drawn as ``docs/images/NAME.png``.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import plot
from jobs import SHAPES
from report import headline, markdown

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "benchmarks"
IMAGES = ROOT / "docs" / "images"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
CURRENT = "2026-11-27"
"""First day of the version that the summary shows."""
_KEPT = (
    "system", "case", "status", "ms", "min_ms", "peak_gib", "optimizer_step_ms", "host_ms", "first_step_s", "losses",
    "predicted",
)  # fmt: skip
_SETTINGS = ("layers", "checkpointing", "steps", "warmup", "world", "precision", "optimizer", "nodes")
_USUAL = "llama3-8b"
_PAIRS = (("deepcompile", "fsdp2"), ("deepcompile-fp8", "fsdp2-fp8"))
_MARK = re.compile(r"(<!-- (tables|summary|comparison|rows)(?:: (\w+))? -->\n).*?(<!-- end -->)", re.DOTALL)
Record = dict[str, Any]


def kept(files: Sequence[Record], subject: str, commit: str | None, date: str) -> Record:
    """Joins result files of one machine: what a reader of the tables can check, without each rank's numbers.

    Args:
        files: Contents of ``results.json``, of runs with the same settings.
        subject: The part of the page that shows them.
        commit: The commit that was measured; None: the files say it.
        date: The day, as in ``2026-11-27``.

    Raises:
        ValueError: If their settings differ, or no commit was measured.
    """
    settings = [_settings(file["settings"]) for file in files]
    if any(other != settings[0] for other in settings):
        raise ValueError(f"the files are of runs with other settings, and make no table: {settings}")
    environment = files[0]["environment"]
    commits = {commit or file["environment"].get("git_commit") or "" for file in files}
    if any(not one or one.endswith("-dirty") for one in commits):
        raise ValueError(f"the files are of {sorted(commits)}, not of commits: measure again, or say --commit")
    results = []
    for one in (one for file in files for one in file["results"]):
        if "time budget" in one.get("reason", ""):
            continue
        short = {key: _rounded(one[key]) for key in _KEPT if one.get(key)}
        results.append(short | ({"reason": headline(one["reason"])[:200]} if "reason" in one else {}))
    return {
        "subject": subject,
        "date": date,
        "commit": ", ".join(sorted(one[:7] for one in commits)),
        "device": environment["device"],
        "torch": environment["torch"],
        **settings[0],
        "results": results,
    }


def _settings(given: Record) -> Record:
    model = _model(given["shape"]) if "shape" in given else _USUAL
    named = {} if model == _USUAL else {"model": model}
    return named | {key: given[key] for key in _SETTINGS if key in given}


def _model(sizes: Record) -> str:
    """Names the shape of these sizes, of which some layers may have been trained."""
    varied = ("layers", "checkpointing", "deferred")
    return next(
        name
        for name, shape in SHAPES.items()
        if all(getattr(shape, key) == value for key, value in sizes.items() if key not in varied)
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


def dumped(record: Record) -> str:
    """Writes a record as JSON with a line for every setting, result and row."""
    parts = []
    for key, value in record.items():
        if key in ("results", "rows", "summary", "pairs"):
            lines = ",\n".join(f"  {json.dumps(one, ensure_ascii=False)}" for one in value)
            parts.append(f" {json.dumps(key)}: [\n{lines}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read(folder: Path) -> dict[str, Record]:
    """Reads all records of a folder by their names: the newest first."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return dict(sorted(found.items(), key=lambda item: item[1]["date"], reverse=True))


def command(record: Record) -> str:
    """The command line that measured a record."""
    if "command" in record:
        return str(record["command"])
    results = record["results"]
    words = ["compare.py", *([f"--shape {record['model']}"] if "model" in record else ())]
    words += [f"--layers {record['layers']}", f"--world {record['world']}"]
    words += ["--checkpointing"] * record.get("checkpointing", False)
    words += [f"--optimizer {record['optimizer']}"] * (record.get("optimizer", "adamw") != "adamw")
    words += [
        f"--{name} " + ",".join(dict.fromkeys(one[name[:-1]] for one in results)) for name in ("systems", "cases")
    ]
    return " ".join(words)


def cards(record: Record) -> str:
    """The number of GPUs and their name."""
    return str(record.get("cards") or f"{record['world']}×{record['device'].removeprefix('NVIDIA ')}")


def table(record: Record, records: Mapping[str, Record]) -> str:
    """Writes the table of one file, below a line that says what was measured."""
    if "pairs" in record:
        return rows(record, records)
    commit = f"commit {record['commit']}" if record.get("commit") else "an earlier version"
    title = f"**{record['title']}.** " if "title" in record else ""
    line = f"{title}{record['date']}, {commit}, {cards(record)}, PyTorch {record['torch']}; `{command(record)}`"
    if "columns" in record:
        text = f"{line}:\n\n{rows(record, records)}"
    else:
        text = f"{line}. Milliseconds per optimizer step, the median (and the fastest), and peak memory:\n\n"
        text += markdown(_grid(record))
    return text + (f"\n{record['note']}\n" if "note" in record else "")


def rows(record: Record, records: Mapping[str, Record]) -> str:
    """Writes the rows of a file that has rows, or pairs of results, without what was measured."""
    if "pairs" in record:
        lines = [["", "deepcompile", "FSDP2", "faster", "memory", "cards", "date"]]
        for what, *names in record["pairs"]:
            pair = [_result(name, records) for name in names]
            days = " and ".join(dict.fromkeys(one["date"] for one in pair))
            lines.append([what, *_beside(*pair), pair[0]["cards"], days])
        return markdown(lines)
    return markdown([record["columns"], *([_cell(cell) for cell in row] for row in record["rows"])])


def _result(found: str | Record, records: Mapping[str, Record]) -> Record:
    """A result that is named by its file, case and system, or stands there itself."""
    if not isinstance(found, str):
        return found
    name, case, system = found.split("/")
    record = records[name]
    return {**_by_case(record)[case][system], "date": record["date"], "cards": cards(record)}


def _beside(ours: Record, other: Record) -> list[str]:
    figures = [f"{one['ms']:.1f} ms, {one['peak_gib']:.1f} GiB" for one in (ours, other)]
    return [*figures, f"{other['ms'] / ours['ms']:.2f}×", f"{ours['peak_gib'] - other['peak_gib']:+.1f} GiB"]


def _cell(cell: Any) -> str:
    return "" if cell is None else str(cell)


def _grid(record: Record) -> Iterator[list[str]]:
    systems = list(dict.fromkeys(one["system"] for one in record["results"]))
    found = _by_case(record)
    yield ["tokens × batch × accumulation", *(f"`{system}`" for system in systems)]
    for case, ran in found.items():
        trained = [one["ms"] for one in ran.values() if one["status"] == "ok" and one["system"] != "roofline"]
        best = min(trained, default=None)
        row = [case.replace("x", "×")]
        for system in systems:
            one = ran.get(system)
            if one is None or one["status"] != "ok":
                row.append("" if one is None else _failure(one))
                continue
            time = f"**{one['ms']:.1f}**" if one["ms"] == best else f"{one['ms']:.1f}"
            row.append(f"{time} ({one['min_ms']:.1f}), {one['peak_gib']:.1f} GiB" if "min_ms" in one else time)
        yield row


def _failure(result: Record) -> str:
    return "out of memory" if "OutOfMemory" in result.get("reason", "") else "failed"


def _by_case(record: Record) -> dict[str, dict[str, Record]]:
    cases = sorted({one["case"] for one in record["results"]}, key=lambda case: [int(part) for part in case.split("x")])
    return {case: {one["system"]: one for one in record["results"] if one["case"] == case} for case in cases}


def comparison(record: Record) -> str:
    """Writes the table that compares two systems: times, memory, and how they differ."""
    lines = [["tokens × batch × accumulation", "deepcompile", "FSDP2", "faster", "memory"]]
    for case, ran in _by_case(record).items():
        lines.append([case.replace("x", "×"), *_beside(ran["deepcompile"], ran["fsdp2"])])
    return markdown(lines)


def summary(records: Mapping[str, Record]) -> str:
    """Writes the table of the current version, and below it the commands that measured it."""
    lines = [["what", "deepcompile", "FSDP2", "faster", "cards", "date", "commit"]]
    ran_by: dict[str, None] = {}
    for record in sorted(records.values(), key=lambda record: record["subject"] != "llama"):
        if record["date"] < CURRENT or "pairs" in record:
            continue
        where = [cards(record), record["date"], _cell(record.get("commit"))]
        before = len(lines)
        lines += [[*map(_cell, row), *where] for row in record.get("summary", [])]
        for case, ran in _by_case(record).items() if "results" in record else ():
            for ours, other in _PAIRS:
                pair = [ran.get(name, {}) for name in (ours, other)]
                if any(one.get("status") != "ok" for one in pair):
                    continue
                kind = "FP8" if "fp8" in ours else "Muon" if record.get("optimizer") == "muon" else "bf16"
                what = f"{record['layers']} layers, {kind}, {case.replace('x', '×')}"
                what = f"{record['model']}, {what}" if "model" in record else what
                what += ", checkpointing" * bool(record.get("checkpointing"))
                lines.append([what, *_beside(*pair)[:3], *where])
        if len(lines) > before:
            ran_by[f"- {where[-1]}, {where[0]}: `{command(record)}`\n"] = None
    return markdown(lines) + "\n" + "".join(ran_by)


def written(text: str, records: Mapping[str, Record]) -> str:
    """Returns a page with its marked parts written from records."""

    def fill(match: re.Match[str]) -> str:
        kind, name = match[2], match[3]
        if kind == "tables":
            body = "\n".join(table(one, records) for one in records.values() if one["subject"] == name)
        elif kind == "summary":
            body = summary(records)
        else:
            body = comparison(records[name]) if kind == "comparison" else rows(records[name], records)
        return f"{match[1]}{body}{match[4]}"

    return _MARK.sub(fill, text)


def drawn(record: Record) -> list[Record]:
    """The results that a plot shows: of ``compare.py``, or of a table with a column of budgets."""
    if "results" in record:
        return list(record["results"])
    results = []
    for row in record["rows"]:
        one = dict(zip(record["columns"], row, strict=True))
        result = {"system": f"{one['budget, GiB']} GiB", "status": "ok", "ms": one["ms"], "peak_gib": one["peak, GiB"]}
        if one["in host memory"] == "nothing":
            results.append(result | {"system": f"nothing leaves: {one['peak, GiB']:.1f} GiB"})
        else:
            predicted = {"ms": one["predicted, ms"], "peak_gib": one["predicted peak, GiB"]}
            results.append(result | {"budget_gib": one["budget, GiB"], "predicted": predicted})
    return results


def digest(record: Record) -> str:
    """Names what a plot shows; the plot's file holds it."""
    return hashlib.sha256(json.dumps(drawn(record), sort_keys=True).encode()).hexdigest()


def stale(records: Mapping[str, Record]) -> list[str]:
    """Says which plots are not of their files, and which files no page shows."""
    pages = "".join(page.read_text() for page in PAGES)
    problems = []
    for name, record in records.items():
        image = IMAGES / f"{name}.png"
        if record.get("plot") and not (image.is_file() and digest(record).encode() in image.read_bytes()):
            problems.append(f"{image.name}: not drawn from {name}.json")
        if f"<!-- tables: {record['subject']} -->" not in pages:
            problems.append(f"{name}.json: no page has tables of {record['subject']!r}")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if `--check` finds something that is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something is out of date")
    add = parser.add_subparsers(dest="command").add_parser("add", help="keep results of one machine")
    add.add_argument("files", type=Path, nargs="+", metavar="results.json")
    add.add_argument("name", help="name of the file")
    add.add_argument("--subject", required=True, help="the part of the page that shows it")
    add.add_argument("--commit", help="that was measured, if the files do not say it")
    add.add_argument("--date", default=datetime.date.today().isoformat())
    options = parser.parse_args(arguments)
    if options.command == "add":
        files = [json.loads(file.read_text()) for file in options.files]
        record = kept(files, options.subject, options.commit, options.date)
        target = FOLDER / f"{options.name}.json"
        before = json.loads(target.read_text()) if target.exists() else {}
        shown = {key: before[key] for key in ("plot", "title", "note") if key in before}
        target.write_text(dumped({"subject": options.subject, **shown, **record}))
    records = read(FOLDER)
    texts = {page: (page.read_text(), written(page.read_text(), records)) for page in PAGES}
    if options.check:
        problems = [f"{page.name}: a table is not that of its file" for page, (old, new) in texts.items() if old != new]
        problems += stale(records)
        print("\n".join(problems))
        return 1 if problems else 0
    for page, (old, new) in texts.items():
        if old != new:
            page.write_text(new)
    for name, record in records.items() if plot.can_draw() else ():
        if record.get("plot"):
            draw = plot.draw if "results" in record else plot.draw_sweep
            draw(drawn(record), IMAGES / f"{name}.png", digest(record))
    print("\n".join(problems := stale(records)))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
