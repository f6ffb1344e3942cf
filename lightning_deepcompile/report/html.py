"""The parts that pages are made of."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22272e; margin: 0 auto;
  max-width: 1240px; padding: 24px 32px 64px }
h1 { font-size: 26px; margin: 0 } h2 { font-size: 19px; margin: 40px 0 8px; border-bottom: 1px solid #d8dee4 }
h3 { font-size: 15px; margin: 20px 0 4px } p { margin: 6px 0; max-width: 900px } .quiet { color: #59636e }
.limit { font-size: 17px; background: #eef4fb; border-left: 4px solid #3b5b84; padding: 8px 14px; margin: 14px 0 }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 14px 0 }
.card { border: 1px solid #d8dee4; border-radius: 8px; padding: 8px 14px; min-width: 130px }
.card.measured { border-color: #4c6a92; background: #f6f9fd }
.card b { display: block; font-size: 20px; font-variant-numeric: tabular-nums } .card span { color: #59636e }
.wide { overflow-x: auto } table { border-collapse: collapse; margin: 8px 0; font-size: 14px }
th, td { text-align: left; padding: 3px 14px 3px 0; vertical-align: top; border-bottom: 1px solid #eaeef2 }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
pre { background: #f6f8fa; padding: 12px; overflow: auto; font-size: 12px; max-height: 480px }
summary { cursor: pointer; margin: 6px 0 } .warn { background: #fff4d6; padding: 8px 14px; border-radius: 6px }
nav a { margin-right: 16px; color: #3b5b84; white-space: nowrap }
@media (max-width: 700px) {
  body { padding: 12px 10px 40px; font-size: 14px } h1 { font-size: 21px } h2 { font-size: 17px; margin-top: 28px }
  .cards { gap: 8px } .card { padding: 6px 10px; min-width: 92px } .card b { font-size: 16px }
  table { font-size: 13px } th, td { padding-right: 10px }
}
"""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """Returns a table, which scrolls where it is wider than the page.

    Args:
        heads: Of the columns.
        rows: Cells.
        numbers: The columns that are set to the right.
    """
    right = set(numbers)

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if column in right else ''}>{escape(cell)}</{tag}>" for column, cell in enumerate(row)
        )

    head = f"<tr>{cells('th', heads)}</tr>\n" if any(heads) else ""
    lines = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{head}{lines}</table></div>'


def escape(plain: str) -> str:
    """Returns a text with the characters that mean something in HTML escaped."""
    return html.escape(plain)


def quiet(plain: str) -> str:
    """Returns a paragraph of remarks."""
    return f'<p class="quiet">{escape(plain)}</p>'


def ms(seconds: float) -> str:
    """Returns a duration: milliseconds, or seconds from ten on."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"
