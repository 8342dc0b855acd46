"""What a step holds: the curve over its nodes, who keeps what, and the largest batch that fits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ortrain.autodiff.held import Moment, bytes_of, curve, peak
from ortrain.errors import SaveError
from ortrain.files.replacing import replace_file
from ortrain.program import Program, Role, origin_of
from ortrain.units import megabytes

# Of a drawing, in points.
_WIDTH, _HEIGHT, _MARGIN = 720, 240, 48
# A batch that is searched for.
_MOST = 1 << 20


@dataclass(frozen=True)
class StepMemory:
    """The tensors that a training step holds beyond weights, optimizer states and inputs.

    Predicted from shapes and lifetimes, before the step runs. What kernels take for themselves, and
    what the C library keeps of freed memory, comes on top.

    Attributes:
        programs: the forward and the pieces of the backward.
        sizes: of the call: value of each symbolic dimension.
        most_tokens: gives of sizes how many tokens are read at most, where some are left out.
    """

    programs: Sequence[Program]
    sizes: Mapping[str, int]
    most_tokens: Callable[[Mapping[str, int]], dict[str, int]]

    @property
    def batch(self) -> str:
        """The symbol of the first axis of the first input; empty where it has a fixed size."""
        for value in self.programs[0].inputs(Role.USER_INPUT):
            for dim in value.shape or ():
                return "" if isinstance(dim, int) else dim.value or ""
        return ""

    def curve(self, **sizes: int) -> list[Moment]:
        """What is held while each node runs, in bytes; sizes in the place of the call's."""
        return curve(self.programs, self._at(sizes))

    def peak(self, **sizes: int) -> int:
        """The most that is held, in bytes; sizes in the place of the call's."""
        return peak(self.programs, self._at(sizes))

    def _at(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """All sizes, where some are others than the call's."""
        known = {**self.sizes, **sizes}
        return known | self.most_tokens(known)

    def kept(self) -> Counter[str]:
        """Bytes that are kept for the backward, by the part of the module that made them."""
        made_by = {v.name: origin_of(n) for n in self.programs[0].graph for v in n.outputs}
        found: Counter[str] = Counter()
        for value in self.programs[0].outputs(Role.SAVED):
            found[_layer(made_by.get(value.name, ""))] += bytes_of(value, self.sizes)
        return found

    def largest_batch(self, limit: int) -> int:
        """The largest batch whose step holds no more than ``limit`` bytes; 0 where none does.

        Raises:
            ValueError: the batch has a fixed size.
        """
        if not self.batch:
            raise ValueError("the graph was captured for one batch size")
        low, high = 0, 1
        while high < _MOST and self.peak(**{self.batch: high}) <= limit:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.peak(**{self.batch: middle}) <= limit
            low, high = (middle, high) if fits else (low, middle)
        return low

    def __str__(self) -> str:
        moments = self.curve()
        top = max(moments, key=lambda moment: moment.held)
        counted = self.most_tokens(self.sizes)
        given = {name: size for name, size in self.sizes.items() if name not in counted}
        named = ", ".join(f"{name}={size}" for name, size in given.items())
        where = origin_of(top.node) or top.node.op_type
        when = "forward" if top.piece == 0 else "backward"
        rows = [
            "memory beyond weights, optimizer and inputs" + (f", at {named}" if named else ""),
            f"  at most {megabytes(top.held)}, in the {when} of {where}",
            f"  {_bars(moments)}",
        ]
        kept = self.kept()
        total = sum(kept.values())
        rows.append(f"  saved for the backward {megabytes(total)}")
        for name, count in kept.most_common(6):
            rows.append(f"    {name or 'elsewhere':<44}{megabytes(count):>14}")
        if len(kept) > 6:
            rest = total - sum(count for _, count in kept.most_common(6))
            rows.append(f"    {f'and {len(kept) - 6} more':<44}{megabytes(rest):>14}")
        return "\n".join(rows)

    def save_svg(self, path: str | Path) -> None:
        """Draws the curve.

        Raises:
            SaveError: the file cannot be written.
        """
        try:
            replace_file(Path(path), [self._svg().encode()], "the curve of memory")
        except OSError as error:
            raise SaveError(f"{path} cannot be written", because=str(error)) from error

    def _svg(self) -> str:
        moments = self.curve()
        most = max((m.held for m in moments), default=0) or 1
        wide, high = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN
        count = max(len(moments) - 1, 1)
        points = [
            (_MARGIN + wide * i / count, _HEIGHT - _MARGIN - high * m.held / most)
            for i, m in enumerate(moments)
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        turn = next((i for i, m in enumerate(moments) if m.piece), len(moments) - 1)
        at = _MARGIN + wide * turn / count
        base = _HEIGHT - _MARGIN
        return "\n".join(
            [
                (
                    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
                    'font-family="sans-serif" font-size="12">'
                ),
                f"<title>Memory of a training step, at most {megabytes(most)}</title>",
                f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>',
                (
                    f'<line x1="{_MARGIN}" y1="{base}" x2="{_WIDTH - _MARGIN}" y2="{base}" '
                    'stroke="#888"/>'
                ),
                (
                    f'<line x1="{at:.1f}" y1="{_MARGIN}" x2="{at:.1f}" y2="{base}" stroke="#888" '
                    'stroke-dasharray="4"/>'
                ),
                f'<text x="{_MARGIN}" y="{_MARGIN - 8}">{megabytes(most)}</text>',
                f'<text x="{_MARGIN}" y="{base + 18}">forward</text>',
                f'<text x="{at + 4:.1f}" y="{base + 18}">backward</text>',
                "</svg>",
            ]
        )


def _layer(origin: str) -> str:
    """The layer of a place in the module: its path as far as the last number in it."""
    path = origin.partition(" ")[0]
    found = re.match(r"(.*\.\d+)(\.|$)", path)
    return found.group(1) if found else path


def _bars(moments: Sequence[Moment], count: int = 60) -> str:
    """The curve as a row of bars, each the most of its part of the step."""
    most = max(m.held for m in moments) or 1
    share = max(len(moments) / count, 1)
    parts = [
        moments[int(i * share) : max(int((i + 1) * share), int(i * share) + 1)]
        for i in range(min(count, len(moments)))
    ]
    blocks = " ▁▂▃▄▅▆▇█"
    return "".join(blocks[round(8 * max(m.held for m in part) / most)] for part in parts if part)
