"""Tables as HTML for notebooks: escaped, with headings for screen readers, without colours or scripts."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

_CELL = "text-align:left;vertical-align:top;padding:0.1em 1.2em 0.1em 0"  # notebooks align to the right
_SHORT, _LAST = "white-space:nowrap", "min-width:14em"  # else a narrow notebook makes columns of a few letters


class HtmlPage:
    """Collects output as HTML. It has the console's methods; `html` returns the page."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def info(self, message: str, *, title: str | None = None) -> None:
        """Adds preformatted text."""
        heading = "" if title is None else f"<p><strong>{escape(title)}</strong></p>"
        self._parts.append(f"{heading}<pre>{escape(message)}</pre>")

    def header(self, rows: Mapping[str, str], *, title: str = "redeqx") -> None:
        """Adds names and values."""
        lines = (
            f'<tr><th scope="row" style="{_CELL}">{escape(name)}</th>{_cell(value)}</tr>' for name, value in rows.items()
        )
        self._add(title, "", lines)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Adds a table whose first column names the rows."""
        head = "".join(f'<th scope="col" style="{_CELL}">{escape(column)}</th>' for column in columns)
        first_cell = f'<th scope="row" style="{_CELL};{_SHORT};font-weight:normal">'
        lines = (f"<tr>{first_cell}{escape(first)}</th>{_cells(rest)}</tr>" for first, *rest in rows)
        self._add(title, f"<thead><tr>{head}</tr></thead>", lines)

    def warnings(self, messages: Sequence[str]) -> None:
        """Adds a list of warnings, if there are any."""
        if messages:
            items = "".join(f"<li>{escape(message)}</li>" for message in messages)
            self._parts.append(f"<p><strong>Warnings</strong></p><ul>{items}</ul>")

    def html(self) -> str:
        """Returns the HTML of everything that was added."""
        return f"<div>{''.join(self._parts)}</div>"

    def _add(self, title: str, head: str, lines: Iterable[str]) -> None:
        caption = f'<caption style="text-align:left;color:inherit"><strong>{escape(title)}</strong></caption>'
        table = f'<table style="margin:0.6em 0">{caption}{head}<tbody>{"".join(lines)}</tbody></table>'
        self._parts.append(f'<div style="overflow-x:auto">{table}</div>')  # a narrow notebook would cut it


def _cells(values: Sequence[str]) -> str:
    return "".join(_cell(value, _SHORT if i < len(values) else _LAST) for i, value in enumerate(values, 1))


def _cell(value: str, style: str = _LAST) -> str:
    return f'<td style="{_CELL};{style}">{escape(value).replace(chr(10), "<br>")}</td>'
