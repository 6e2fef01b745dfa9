"""HTML that cannot hold a stranger's markup: only `el` makes `Html`, and it escapes every string that is not `Html`.

Names come from untrusted models. Besides `< > & " '`, characters that do not print (newlines, other control characters,
bidirectional overrides, lone surrogates) are spelled out as `\\n`, `\\x00`, `\\u202e`. Others beyond ASCII become
character references, so that the page does not depend on the encoding it is written in.
`Html + str` is a plain `str` again, so what is glued together by hand is escaped too.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Sequence
from typing import Literal

VOID_TAGS = frozenset(["br", "input", "meta"])


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


NOTHING = Html("")
Attribute = str | int | float | None


def escape(text: str) -> Html:
    """The HTML that shows a text, whatever it holds."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return Html(html.escape(text).encode("ascii", "xmlcharrefreplace").decode("ascii"))


def join(parts: Iterable[str]) -> Html:
    """Parts one after the other; those that are not `Html` are escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def el(tag: str, *children: str, **attributes: Attribute) -> Html:
    """An element.

    Args:
        tag: written by us, never from data.
        children: `Html`, or text that is escaped.
        attributes: `class_` gives `class`, `stroke_width` gives `stroke-width`; None leaves one out.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in VOID_TAGS:
        return Html(f"<{tag}{written}>")
    return Html(f"<{tag}{written}>{join(children)}</{tag}>")


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; a "name" column holds names or prose: wide, and it breaks anywhere."""

    title: str
    kind: Literal["text", "number", "name"] = "text"


def section(anchor: str, title: str, *blocks: str) -> Html:
    """A titled section, or nothing when every block is empty."""
    content = join(blocks)
    return el("section", el("h2", title), content, id=anchor) if content else NOTHING


def block(title: str, *content: str) -> Html:
    """A part of a section, or nothing when it has no content."""
    inner = join(content)
    return el("div", el("h3", title), inner, class_="block") if inner else NOTHING


def fold(summary: str, *content: str) -> Html:
    """Content behind a line to click on."""
    return el("details", el("summary", summary), *content)


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], filterable: bool = False) -> Html:
    """A table, or nothing when it has no rows.

    Args:
        columns: headings.
        rows: one cell per column.
        filterable: long tables: fixed height, and a search field where scripts run.
    """
    if not rows:
        return NOTHING
    kinds = [None if column.kind == "text" else column.kind for column in columns]
    head = el("tr", *(el("th", c.title, class_=kind, scope="col") for c, kind in zip(columns, kinds, strict=True)))
    body = (el("tr", *(el("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True))) for row in rows)
    content = el("table", el("thead", head), el("tbody", *body), data_filter="rows" if filterable else None)
    return el("div", content, class_="scroll tall" if filterable else "scroll")


def long_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], keep: int = 12) -> Html:
    """A table whose rows after the first few are folded away."""
    if len(rows) <= keep + 3:
        return table(columns, rows)
    rest = fold(f"{len(rows) - keep} more rows", table(columns, rows[keep:], filterable=True))
    return join([table(columns, rows[:keep]), rest])


def names(items: Sequence[str], keep: int = 6) -> Html:
    """Node or tensor names; those after the first few are folded away."""
    if len(items) <= keep + 2:
        return _name_list(items)
    return join([_name_list(items[:keep]), fold(f"{len(items) - keep} more", _name_list(items[keep:]))])


def code(text: str) -> Html:
    """A name in a fixed-width font."""
    return el("code", text)


def command(text: str) -> Html:
    """What to type; stays on one line."""
    return el("code", text, class_="command")


def note(*text: str) -> Html:
    """A paragraph in small print."""
    return el("p", *text, class_="note")


def _name_list(items: Sequence[str]) -> Html:
    return el("ul", *(el("li", code(item)) for item in items), class_="names")
