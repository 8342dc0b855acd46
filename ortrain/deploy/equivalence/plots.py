"""Plots as SVG: bars before and after, and how many differences are in each decade."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

_WIDTH = 640
_LABEL = 190
_VALUE = 110
_BAR = 11
_GAP = 4
_LETTERS = 28


def pairs(
    title: str,
    rows: Sequence[tuple[str, float | None, float | None]],
    told: Callable[[float | None], str],
    largest: float | None = None,
) -> str:
    """Two bars a row, before and after.

    Args:
        title: of the plot, for those who do not see it as well.
        rows: name, before and after; None has no bar.
        told: a value as a text.
        largest: the value at the end of the axis; by default the largest that is there.
    """
    values = [v for _, *both in rows for v in both if v is not None and 0 <= v < float("inf")]
    end = max(values, default=0.0) if largest is None else largest
    room = _WIDTH - _LABEL - _VALUE
    step = 2 * _BAR + 3 * _GAP + 6
    parts = []
    for number, (name, *both) in enumerate(rows):
        top = number * step + _GAP
        parts.append(
            f'<text class="name" x="{_LABEL - 8}" y="{top + _BAR + 5}" text-anchor="end">'
            f"<title>{text(name)}</title>{text(_cut(name))}</text>"
        )
        for index, (value, kind) in enumerate(zip(both, ("before", "after"), strict=True)):
            y = top + index * (_BAR + _GAP)
            length = 0.0 if value is None or not end else room * min(max(value / end, 0.0), 1.0)
            length = 0.0 if length != length else length
            parts.append(
                f'<rect class="{kind}" x="{_LABEL}" y="{y}" width="{max(length, 1):.1f}" '
                f'height="{_BAR}" rx="2"/>'
                f'<text class="value" x="{_LABEL + max(length, 1) + 6:.1f}" y="{y + _BAR - 1}">'
                f"{text(told(value))}</text>"
            )
    return _drawing(title, "".join(parts), len(rows) * step + _GAP)


def columns(title: str, rows: Sequence[tuple[str, int]]) -> str:
    """One column each, on a root scale so that a single one among millions is seen.

    Args:
        title: of the plot.
        rows: name and count.
    """
    height, base = 120, 140
    width = _WIDTH / max(len(rows), 1)
    most = max((count for _, count in rows), default=0) or 1
    parts = []
    for number, (name, count) in enumerate(rows):
        x = number * width
        tall = height * (count / most) ** 0.5 if count else 0.0
        tall = max(tall, 2.0) if count else 0.0
        parts.append(
            f'<rect class="after" x="{x + 4:.1f}" y="{base - tall:.1f}" width="{width - 8:.1f}" '
            f'height="{tall:.1f}" rx="2"/>'
            f'<text class="value" x="{x + width / 2:.1f}" y="{base - tall - 4:.1f}" '
            f'text-anchor="middle">{count if count else ""}</text>'
            f'<text class="name" x="{x + width / 2:.1f}" y="{base + 16}" text-anchor="middle">'
            f"{text(name)}</text>"
        )
    return _drawing(title, "".join(parts), base + 24)


# Overrides, embeddings, isolates and marks of direction.
_TURNING = frozenset(map(chr, (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))))


def text(value: object) -> str:
    """A value as characters of the page, whatever it holds; what no page may hold as U+FFFD.

    So is what turns the direction of all that follows. A name of blanks alone stands in quotes.
    """
    shown = "".join(c if _may_be(c) else "�" for c in str(value))
    if shown and not shown.strip():
        shown = repr(shown)
    return escape(shown, quote=True)


def _may_be(character: str) -> bool:
    if character in "\t\n":
        return True
    return ord(character) >= 32 and character != "\x7f" and character not in _TURNING


def _cut(name: str) -> str:
    return name if len(name) <= _LETTERS else name[: _LETTERS - 1] + "…"


def _drawing(title: str, content: str, height: int) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{text(title)}" '
        f'preserveAspectRatio="xMinYMin meet"><title>{text(title)}</title>{content}</svg>'
    )
