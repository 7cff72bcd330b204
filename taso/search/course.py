"""A picture of a search: the best cost against the seconds it took to find it, as an SVG that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 20, 44, 52
_STYLE = (
    ".course text{font:12px sans-serif;fill:#333}.course .title{font-weight:bold}.course .axis{stroke:#333;fill:none}"
    ".course .grid{stroke:#ddd}.course .best{stroke:#0a6;stroke-width:2;fill:none}.course .found{fill:#0a6}"
)


def course_svg(course: Sequence[tuple[float, float]], seconds: float, title: str) -> str:
    """An SVG of `course`, pairs of seconds and of the best cost (milliseconds) from then on, up to `seconds`.

    Costs are drawn as a step line, for a cost stays the best until a better one is found.
    """
    if not course:
        return _document(title, ['<text x="50%" y="50%" text-anchor="middle">nothing was searched</text>'])
    end = max(seconds, course[-1][0], 1e-9)
    low, high = _range([cost for _, cost in course])

    def x(second: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * second / end

    def y(cost: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (cost - low) / (high - low)

    parts = []
    for tick in _ticks(low, high):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    for tick in _ticks(0.0, end):
        parts.append(f'<text x="{x(tick):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:.3g}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}"/>')
    steps = "".join(f"H{x(second):.1f}V{y(cost):.1f}" for second, cost in course[1:])
    parts.append(f'<path class="best" d="M{x(course[0][0]):.1f} {y(course[0][1]):.1f}{steps}H{x(end):.1f}"/>')
    for second, cost in course:
        said = f"<title>{cost:.6g} ms after {second:.3f} s</title>"
        parts.append(f'<circle class="found" cx="{x(second):.1f}" cy="{y(cost):.1f}" r="3">{said}</circle>')
    parts.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">seconds</text>')
    parts.append(f'<text x="{_LEFT}" y="{_TOP - 8}" text-anchor="end">ms</text>')
    return _document(title, parts)


def _document(title: str, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
            'class="course">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
            f'<text class="title" x="{_WIDTH / 2}" y="20" text-anchor="middle">{escape(title)}</text>',
            *parts,
            "</svg>",
        ]
    )


def _range(costs: Sequence[float]) -> tuple[float, float]:
    low, high = min(costs), max(costs)
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float) -> list[float]:
    """Some five round numbers in between."""
    rough = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(s * size for s in (1, 2, 5, 10) if s * size >= rough)
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step) + 1)]


__all__ = ["course_svg"]
