"""A report as one HTML page: what came of it, both graphs to look at, and the tables that the other forms have, too."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import PurePath
from typing import TYPE_CHECKING

from taso.graph.drawing import heat, milliseconds, page, safe, viewer
from taso.graph.picture import PLANNED, REWRITTEN, Picture
from taso.search.telling import Files, Section, Table, checked, kept, operator_costs, sections, size

if TYPE_CHECKING:
    from taso.search.result import Report, Rewrite

def html(report: Report, files: Files) -> str:
    """The report as a page."""
    name = PurePath(files.model).name
    found = {section.name: section for section in sections(report, files)}
    drawn = report.before is not None and report.after is not None
    parts = [_head(report, files, name), _navigation(found, drawn), _tiles(report, files)]
    if report.before is not None and report.after is not None:
        parts.append(_graphs(report, report.before, report.after))
    parts += [_section(report, section) for section in found.values()]
    return page(f"{name}, optimized", f'<main class="report">{"".join(parts)}</main>', (_style(),))


def _head(report: Report, files: Files, name: str) -> str:
    written = f" → {safe(PurePath(files.output).name)}" if files.output else ""
    return f'<h1>{safe(name)}{written}</h1><p class="decision">{safe(report.decision)}</p>'


def _navigation(found: dict[str, Section], drawn: bool) -> str:
    links = [("graphs", "Graphs")] if drawn else []
    links += [(section.name, section.title) for section in found.values()]
    shown = "".join(f'<a href="#{safe(name)}">{safe(title)}</a>' for name, title in links)
    return f"<nav>{shown}</nav>"


# ── tiles ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _tiles(report: Report, files: Files) -> str:
    tiles = "".join(
        f'<div class="tile"><span>{safe(what)}</span><b>{safe(value)}</b><span>{safe(more)}</span></div>'
        for what, value, more in _figures(report, files)
    )
    return f'<div class="tiles">{tiles}</div>'


def _figures(report: Report, files: Files) -> Iterator[tuple[str, str, str]]:
    """(what, figure, what else) of each tile."""
    before, after = report.measured_before, report.measured_after
    aside = "" if kept(report) else " (not kept)"
    if before is not None and after:
        low, high = report.ratio_low, report.ratio_high
        sure = "" if low is None or high is None else f"interval {low:.2f} to {high:.2f}"
        yield f"speed-up of the whole graph{aside}", f"{before / after:.2f}×", sure
        spread = report.quartiles
        told = "" if not spread or len(spread) != 4 else f"quartiles {spread[2]:.3g} to {spread[3]:.3g} ms"
        yield f"time of the whole graph{aside}", f"{before:.3g} → {after:.3g} ms", told
    kind = "sum of measured kernels" if report.costs_are_measured else "by a formula, not measured"
    yield f"cost{aside}", f"{report.cost_before:.3g} → {report.cost_after:.3g} ms", kind
    count = len(report.rewrites)
    yield f"kernels{aside}", f"{report.kernels_before} → {report.kernels_after}", f"{count} rewrite{'s' * (count != 1)}"
    if report.peak_before is not None and report.peak_after is not None:
        yield "memory between kernels", f"{size(report.peak_before)} → {size(report.peak_after)}", "at its peak"
    if files.model_bytes is not None:
        written = "not written" if files.output_bytes is None else size(files.output_bytes)
        yield "file", f"{size(files.model_bytes)} → {written}", ""
    if report.verified is not None and report.relative_error is not None:
        yield "largest relative error", f"{report.relative_error:.1e}", f"against the original: {checked(report)}"


# ── graphs ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _graphs(report: Report, before: Picture, after: Picture) -> str:
    most = max(before.most, after.most)
    changes = {box.change for picture in (before, after) for box in picture.boxes}
    legend = [_ramp(most, report.costs_are_measured)] if most else []
    if REWRITTEN in changes:
        legend.append(_key("border:3px solid #6d28d9", "rewritten"))
    if PLANNED in changes:
        legend.append(_key("border:2px dashed #0e7490", "same operators, run otherwise (fusion, layout, algorithm)"))
    legend.append("<span>wheel: zoom · drag: move · click: details · n, p: next and previous change</span>")
    views = [
        viewer(picture, name, f"{title}: {picture.operators} operators", most)
        for name, title, picture in (("before", "before", before), ("after", "after", after))
    ]
    shown = f'<div class="legend">{"".join(legend)}</div><div class="pair">{"".join(views)}</div>'
    return f'<h2 id="graphs">Graphs</h2>{shown}'


def _ramp(most: float, measured: bool) -> str:
    stops = ", ".join(f"{heat((i / 8) ** 2)} {i / 8:.1%}" for i in range(9))
    kind = "cost of a kernel, measured" if measured else "cost of a kernel, by a formula"
    ramp = f'<i class="ramp" style="background:linear-gradient(90deg,{stops})"></i>'
    return f"<span>{kind}: 0 {ramp} {safe(milliseconds(most))}</span>"


def _key(style: str, text: str) -> str:
    return f'<span><i style="{style}"></i>{safe(text)}</span>'


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _section(report: Report, section: Section) -> str:
    head = f'<h2 id="{safe(section.name)}">{safe(section.title)}</h2>'
    said = "".join(f"<li>{safe(sentence)}</li>" for sentence in section.sentences)
    said = f"<ul>{said}</ul>" if said else ""
    if section.name == "course" and section.table is not None:
        plot = f'<div class="course-plot">{report.course_svg()}</div>' if report.course else ""
        return f"{head}{said}{plot}<details><summary>as a table</summary>{_table(section.table)}</details>"
    if section.name == "operators" and report.before is not None and report.after is not None:
        return f"{head}{_operator_table(report.before, report.after, section)}{said}"
    marked = _marks(report.rewrites) if section.name == "rewrites" else None
    table = _table(section.table, marked) if section.table is not None and section.table.rows else ""
    return f"{head}{table}{said}"


def _marks(rewrites: Sequence[Rewrite]) -> list[str]:
    """What each row of rewrites says to the script: which operators it made, and from which."""
    return [
        f' data-rule="{safe(r.rule)}" data-where="{safe(json.dumps(r.where.split(", ")))}" title="show in the graphs"'
        for r in rewrites
    ]


def _table(table: Table, marks: Sequence[str] | None = None) -> str:
    named = zip(table.headers, table.align, strict=True)
    heads = "".join(f"<th{_side(side)}>{safe(said)}</th>" for said, side in named)
    rows = []
    for number, row in enumerate(table.rows):
        cells = "".join(_cell(table, i, cell) for i, cell in enumerate(row))
        rows.append(f"<tr{marks[number] if marks else ''}>{cells}</tr>")
    head = f"<thead><tr>{heads}</tr></thead>" if any(table.headers) else ""
    return f'<div class="wide"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _side(side: str) -> str:
    return ' class="r"' if side == ">" else ""


def _cell(table: Table, column: int, text: str) -> str:
    if column in table.code and text:
        return f'<td class="w"><code>{safe(text)}</code></td>'
    return f"<td{_side(table.align[column])}>{safe(text)}</td>"


def _operator_table(before: Picture, after: Picture, section: Section) -> str:
    """The costs by operator with bars, the highest as long as the column."""
    costs = operator_costs(before, after)
    most = max((max(c.before_ms, c.after_ms) for c in costs), default=0.0)
    rows = zip(costs, section.table.rows if section.table is not None else (), strict=True)
    told = "".join(
        f"<tr><td>{safe(cells[0])}</td>{_half(cells[1:4], c.before_ms, most)}{_half(cells[4:7], c.after_ms, most)}</tr>"
        for c, cells in rows
    )
    half = '<th class="r">kernels</th><th class="r">cost</th><th class="r">share</th>'
    head = f"<tr><th>operator</th>{half}<th>before</th>{half}<th>after</th></tr>"
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{told}</tbody></table></div>'


def _half(cells: Sequence[str], cost: float, most: float) -> str:
    numbers = "".join(f'<td class="r">{safe(cell)}</td>' for cell in cells)
    bar = f'<i class="bar" style="width:{100 * cost / most:.1f}%;background:{heat(cost / most)}"></i>' if cost else ""
    return f'{numbers}<td style="min-width:12em">{bar}</td>'


@lru_cache
def _style() -> str:
    return (resources.files("taso.search") / "report.css").read_text("utf-8").strip()


__all__ = ["html"]
