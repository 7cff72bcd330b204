"""A picture of a graph drawn as SVG, and put into a page in which it can be moved, zoomed and searched.

Every text that comes from a model is escaped here; nothing is fetched from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from html import escape
from importlib import resources

from taso.graph.layered import Layout, Point, layout
from taso.graph.picture import CONSTANT, INPUT, LAYOUT, OPERATOR, OUTPUT, Box, Picture

_LINE, _PAD = 17.0, 7.0
_WIDE, _NARROW = 8.1, 6.9
_MARGIN = 24.0
_LONGEST_EDGE_LABEL = 34
_FAMILIES = {"moves": "#efe6d2", "elementwise": "#dcefdc", "opaque": "#e4e4e7", "": "#d9e6f7"}
_ENDS = {INPUT: "#e9e9ee", OUTPUT: "#e9e9ee", CONSTANT: "#f4f4f5", LAYOUT: "#f4f4f5"}
_HEAT = ((255, 250, 235), (253, 230, 168), (251, 189, 99), (240, 130, 76), (214, 72, 62))


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def safe(text: object) -> str:
    """Text that is no mark-up, in an element or in quotes, and that XML allows."""
    return escape("".join(c if _is_text(c) else "\ufffd" for c in str(text)), quote=True)


def _is_text(c: str) -> bool:
    if c < " " or "\x7f" <= c <= "\x9f":
        return c in "\t\n"
    return not "\ud800" <= c <= "\udfff" and c not in "\ufffe\uffff"


def data_island(name: str, data: object) -> str:
    """Plain data inside a page, as JSON that no content of it can end."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return f'<script type="application/json" id="{safe(name)}">{text}</script>'


def heat(share: float) -> str:
    """The colour of a cost, given as its share of the highest: pale to red, by the square root."""
    place = math.sqrt(min(max(share, 0.0), 1.0)) * (len(_HEAT) - 1)
    low = min(int(place), len(_HEAT) - 2)
    mixed = (a + (b - a) * (place - low) for a, b in zip(_HEAT[low], _HEAT[low + 1], strict=True))
    return "#" + "".join(f"{round(c):02x}" for c in mixed)


def milliseconds(cost: float) -> str:
    """A time in three significant digits."""
    if cost and cost < 0.1:
        return f"{cost * 1e3:.3g} µs"
    return f"{cost:.3f} ms" if cost < 100 else f"{cost:.0f} ms"


def _length(text: str, width: float) -> float:
    """Pixels that a text takes in the widest of the fonts that are asked for."""
    wide = {c: 1.8 if unicodedata.east_asian_width(c) in "WF" else 1.3 if c in "×→⟨⟩mMwW" else 1.0 for c in set(text)}
    return sum(wide[c] for c in text) * width


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def short_type(text: str) -> str:
    """A type without what most values have: "float[1×64]" is "1×64"."""
    return text[len("float[") : -1] if text.startswith("float[") and text.endswith("]") else text


# ── SVG ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def svg(picture: Picture, most_ms: float | None = None) -> str:
    """The picture as an SVG of its own. Colour is cost where costs are known, as a share of `most_ms`, else a family
    of operators."""
    content, width, height = _content(picture, most_ms)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img"><title>graph</title><style>{_asset("drawing.css")}</style>'
        f'<g class="taso-drawing">{content}</g></svg>\n'
    )


def viewer(picture: Picture, name: str, title: str, most_ms: float | None = None) -> str:
    """The picture in an HTML element `name` in which it can be moved and zoomed; needs `page` around it."""
    content, width, height = _content(picture, most_ms)
    buttons = (("out", "−", "zoom out"), ("in", "+", "zoom in"), ("fit", "fit", "show the whole graph"),
               ("top", "top", "go to the inputs"))  # fmt: skip
    changed = sum(bool(box.change) for box in picture.boxes)
    tools = "".join(f'<button type="button" data-do="{d}" title="{t}">{s}</button>' for d, s, t in buttons)
    if changed:
        tools += '<button type="button" data-do="previous" title="previous change">◂</button>'
        tools += f'<span class="count">{changed} changed</span>'
        tools += '<button type="button" data-do="next" title="next change">▸</button>'
    tools += '<input type="search" placeholder="find an operator, a name" aria-label="find an operator or a name">'
    return (
        f'<figure class="viewer" id="{safe(name)}"><figcaption><b>{safe(title)}</b><span class="tools">{tools}</span>'
        f'</figcaption><div class="stage" tabindex="0"><svg class="canvas" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'data-width="{width:.1f}" data-height="{height:.1f}" role="img" aria-label="{safe(title)}">'
        f'<g class="taso-drawing">{content}</g></svg><canvas class="map" aria-hidden="true"></canvas></div>'
        f'<div class="details" hidden></div>{data_island(f"{name}-data", asdict(picture))}</figure>'
    )


def _content(picture: Picture, most_ms: float | None) -> tuple[str, float, float]:
    boxes = picture.boxes
    most = picture.most if most_ms is None else most_ms
    costed = any(box.cost_ms is not None for box in boxes)
    edges = [(maker, number) for number, box in enumerate(boxes) for maker in dict.fromkeys(m for m, _ in box.inputs)]
    placed = layout([_size(box) for box in boxes], edges)
    parts = [*_edges(edges, boxes, placed)]
    parts += [_drawn(n, box, placed.centres[n], most, costed) for n, box in enumerate(boxes)]
    shift = f'<g transform="translate({_MARGIN:.0f} {_MARGIN:.0f})">'
    return shift + "".join(parts) + "</g>", placed.width + 2 * _MARGIN, placed.height + 2 * _MARGIN


def _lines(box: Box) -> list[tuple[str, str]]:
    """(in bold, beside it) of each line of a box."""
    lines = []
    for step in box.steps:
        weights = " ".join(f"⟨{short_type(w)}⟩" for w in step.weights[:2])
        named = step.name if box.kind in (INPUT, OUTPUT) else ""
        if box.kind in (INPUT, OUTPUT):
            weights = short_type(box.outputs[0]) if box.outputs else ""
        beside = "  ".join(filter(None, (_cut(named, 40), _cut(step.detail, 40), _cut(weights, 36))))
        lines.append((_cut(step.operator, 40), beside))
    return lines


def _footer(box: Box) -> str:
    cost = "" if box.cost_ms is None else milliseconds(box.cost_ms) if box.cost_ms else "no cost"
    return " · ".join(filter(None, (cost, box.algorithm, box.layout)))


def _size(box: Box) -> tuple[float, float]:
    footer = _footer(box)
    widths = [_length(a, _WIDE) + (_length(b, _NARROW) + 8 if b else 0) for a, b in _lines(box)]
    widths.append(_length(footer, _NARROW))
    return max(widths) + 2 * _PAD + 4, _LINE * (len(box.steps) + bool(footer)) + 2 * _PAD - 3


def _drawn(number: int, box: Box, centre: Point, most: float, costed: bool) -> str:
    width, height = _size(box)
    left, top = centre[0] - width / 2, centre[1] - height / 2
    classes = " ".join(filter(None, ("box", box.kind, box.change)))
    rect = f'width="{width:.1f}" height="{height:.1f}" rx="{12 if box.kind in (INPUT, OUTPUT) else 5}"'
    parts = [f'<title>{safe(_said(box))}</title><rect {rect} fill="{_colour(box, most, costed)}"/>']
    y = _PAD + 11.0
    for bold, beside in _lines(box):
        spaced = f'<tspan class="beside" dx="8">{safe(beside)}</tspan>' if beside else ""
        parts.append(f'<text x="{_PAD + 2}" y="{y:.0f}"><tspan class="op">{safe(bold)}</tspan>{spaced}</text>')
        y += _LINE
    footer = _footer(box)
    if footer:
        parts.append(f'<text class="cost" x="{_PAD + 2}" y="{y:.0f}">{safe(footer)}</text>')
    return (
        f'<g class="{classes}" data-box="{number}" transform="translate({left:.1f} {top:.1f})">{"".join(parts)}</g>'
    )


def _colour(box: Box, most: float, costed: bool) -> str:
    if box.kind != OPERATOR and not box.cost_ms:
        return _ENDS[box.kind]
    if costed:
        return "#f4f4f5" if not box.cost_ms or not most else heat(box.cost_ms / most)
    return _FAMILIES[box.steps[0].family] if box.steps else _FAMILIES[""]


def _said(box: Box) -> str:
    lines = [f"{s.operator} {s.name}" for s in box.steps]
    lines += [f"made by {rule}" for rule in dict.fromkeys(s.rule for s in box.steps if s.rule)]
    return "\n".join(_cut(line, 400) for line in (*lines, *filter(None, (_footer(box),))))


def _edges(edges: Sequence[tuple[int, int]], boxes: Sequence[Box], placed: Layout) -> Iterator[str]:
    labelled: set[int] = set()
    for (maker, reader), points in zip(edges, placed.routes, strict=True):
        end = points[-1]
        yield (
            f'<path class="edge" data-from="{maker}" data-to="{reader}" d="{_path(points)}"/>'
            f'<path class="tip" d="M{end[0] - 3:.1f} {end[1] - 5:.1f}h6l-3 5z"/>'
        )
        if maker not in labelled:
            labelled.add(maker)
            said = " | ".join(dict.fromkeys(map(short_type, boxes[maker].outputs)))
            if boxes[maker].kind != INPUT:
                at = f'x="{points[0][0] + 5:.1f}" y="{points[0][1] + 13:.1f}"'
                yield f'<text class="type" {at}>{safe(_cut(said, _LONGEST_EDGE_LABEL))}</text>'


def _path(points: Sequence[Point]) -> str:
    """Straight through layers, in a curve between them."""
    said = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (x, y), (u, v) in zip(points, points[1:], strict=False):
        middle = (y + v) / 2
        if abs(x - u) < 0.5:
            said.append(f"V{v:.1f}")
        else:
            said.append(f"C{x:.1f} {middle:.1f} {u:.1f} {middle:.1f} {u:.1f} {v:.1f}")
    return "".join(said)


# ── page ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def page(title: str, body: str, styles: Sequence[str] = ()) -> str:
    """An HTML page that holds all it needs; it may run its own script only, and can reach nothing outside itself."""
    script = _asset("viewer.js")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{allowed}'"
    style = "\n".join((_asset("drawing.css"), _asset("viewer.css"), *styles))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{safe(title)}</title><style>{style}</style></head>\n<body>{body}\n<script>{script}</script></body></html>\n"
    )


def graph_page(picture: Picture, title: str) -> str:
    """A page of one graph alone."""
    return page(title, f'<main class="alone">{viewer(picture, "graph", title)}</main>')


def framed(html: str, height: int) -> str:
    """A page inside another one, as notebooks show it: neither's styles and scripts meet the other's."""
    return (
        f'<iframe srcdoc="{escape(html, quote=True)}" sandbox="allow-scripts" '
        f'style="width:100%;height:{height}px;border:1px solid #d4d4d8;border-radius:6px"></iframe>'
    )


@lru_cache
def _asset(name: str) -> str:
    return (resources.files("taso.graph") / "viewer" / name).read_text("utf-8").strip()


__all__ = ["data_island", "framed", "graph_page", "heat", "milliseconds", "page", "safe", "short_type", "svg", "viewer"]
