"""The suite's plot: how much longer others take than ours, a row for each model, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

Ratio = tuple[float, float, float]
"""A ratio and the ends of its interval."""

X = Callable[[float], float]
"""From a ratio to its place."""

COLOURS = {
    "onnxruntime": "#0072b2", "openvino": "#d55e00", "torch": "#cc79a7", "torch-compile": "#009e73", "xla": "#888888",
    "taso-unoptimized": "#000000",
}  # fmt: skip
LEFT, RIGHT, TOP, ROW, WIDTH = 150, 30, 70, 40, 860
TICKS = (0.5, 0.7, 1, 1.4, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


@dataclass(frozen=True)
class Row:
    """A model, and for each other contestant its time over ours."""

    name: str
    ratios: Mapping[str, Ratio]


def svg(title: str, rows: Sequence[Row]) -> str:
    """A picture with a logarithmic axis; right of 1 ours is faster. Whiskers are the intervals."""
    found = [end for row in rows for ratio in row.ratios.values() for end in ratio]
    low, high = math.log(min([0.8, *found]) * 0.95), math.log(max([1.5, *found]) * 1.05)
    height = TOP + ROW * len(rows) + 50

    def x(ratio: float) -> float:
        return LEFT + (math.log(ratio) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="13"><rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="22" text-anchor="middle" font-size="15">{escape(title)}</text>',
        *_legend([name for name in COLOURS if any(name in row.ratios for row in rows)]),
        *_axis(x, low, high, height),
    ]
    for number, row in enumerate(rows):
        parts += _row(row, TOP + ROW * (number + 0.5), x)
    return "\n".join([*parts, "</svg>", ""])


def _legend(names: Sequence[str]) -> list[str]:
    step = (WIDTH - 2 * RIGHT) / max(len(names), 1)
    return [
        f'<circle cx="{RIGHT + i * step + 5:.1f}" cy="44" r="5" fill="{COLOURS[name]}"/>'
        f'<text x="{RIGHT + i * step + 15:.1f}" y="48">{escape(name)}</text>'
        for i, name in enumerate(names)
    ]


def _axis(x: X, low: float, high: float, height: int) -> list[str]:
    bottom = height - 45
    parts = []
    for tick in TICKS:
        if low <= math.log(tick) <= high:
            width, at = 2 if tick == 1 else 0.5, f"{x(tick):.1f}"
            parts.append(
                f'<line x1="{at}" y1="{TOP - 8}" x2="{at}" y2="{bottom}" stroke="#666" stroke-width="{width}"/>'
                f'<text x="{at}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
            )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{height - 8}" text-anchor="middle">time of others / time of taso</text>')
    return parts


def _row(row: Row, y: float, x: X) -> list[str]:
    parts = [f'<text x="{LEFT - 12}" y="{y + 4:.1f}" text-anchor="end">{escape(row.name)}</text>']
    shown = [name for name in COLOURS if name in row.ratios]
    for number, name in enumerate(shown):
        middle, low, high = (x(end) for end in row.ratios[name])
        # beside each other, so that equal ones do not hide each other
        at = y + (number - (len(shown) - 1) / 2) * 4
        parts.append(
            f'<line x1="{low:.1f}" y1="{at:.1f}" x2="{high:.1f}" y2="{at:.1f}" stroke="{COLOURS[name]}" '
            f'stroke-width="2"/><circle cx="{middle:.1f}" cy="{at:.1f}" r="4" fill="{COLOURS[name]}"/>'
        )
    return parts
