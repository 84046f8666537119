"""Write small tables as text, HTML and Markdown, for objects that show themselves without pandas; with it, make a DataFrame.

Numbers come in as text that their owner has formatted; this file only aligns and escapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

Row = Sequence[str]


def text_table(rows: Sequence[Row], *, header: Row | None = None, right: Sequence[int] = (), indent: str = "  ") -> str:
    """Return rows as aligned text; the columns in `right` are set flush right. All rows have the same number of cells."""
    every = [*([header] if header else []), *rows]
    if not every:
        return ""
    widths = [max(len(row[i]) for row in every) for i in range(len(every[0]))]
    lines = []
    for row in every:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def html_table(rows: Sequence[Row], *, header: Row | None = None, right: Sequence[int] = (), title: str = "") -> str:
    """Return the rows as an HTML table.

    A row with a single cell is a heading over the whole width. A cell's leading spaces indent it.
    """
    width = max((len(row) for row in [*rows, *([header] if header else [])]), default=1)
    parts = ["<table>"]
    if title:
        parts.append(f'<caption style="text-align:left;font-weight:bold">{escape(title)}</caption>')
    if header:
        parts.append(
            "<thead><tr>" + "".join(_cell("th", c, i in right) for i, c in enumerate(header)) + "</tr></thead>"
        )
    parts.append("<tbody>")
    for row in rows:
        if len(row) == 1:
            parts.append(
                f'<tr><th colspan="{width}" style="text-align:left;padding:.4em .6em 0">{escape(row[0])}</th></tr>'
            )
        else:
            parts.append("<tr>" + "".join(_cell("td", c, i in right) for i, c in enumerate(row)) + "</tr>")
    parts.append("</tbody></table>")
    return "".join(parts)


def markdown_table(rows: Sequence[Row], *, header: Row, right: Sequence[int] = ()) -> str:
    """Return the rows as a table of Markdown; the columns in `right` are set flush right."""
    rule = ["---:" if i in right else "---" for i in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def _cell(tag: str, text: str, right: bool) -> str:
    indent = len(text) - len(text.lstrip(" "))  # HTML has none of its own
    left = 0.6 + 0.5 * indent
    style = f"text-align:{'right' if right else 'left'};padding:0 .6em" + (f" 0 {left:.2g}em" if indent else "")
    return f'<{tag} style="{style}">{escape(text.lstrip(" "))}</{tag}>'


def data_frame(rows: Sequence[Any], columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Return rows, as sequences with `columns` or as dicts, as a DataFrame; one sentence where there is no pandas."""
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Tables need pandas: pip install pandas; print() needs nothing.") from error
    return pandas.DataFrame(rows, columns=None if columns is None else list(columns))
