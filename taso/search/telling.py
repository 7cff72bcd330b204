"""What a report tells, as headings, sentences and tables: the same for every form in which it is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from taso.graph.drawing import milliseconds
from taso.graph.picture import LAYOUT, OPERATOR, Picture

if TYPE_CHECKING:
    from taso.search.result import Report, Rewrite


@dataclass(frozen=True)
class Files:
    """The files that a report speaks of, and their sizes in bytes; None where there is none, or it is not known."""

    model: str = "model"
    output: str | None = None
    model_bytes: int | None = None
    output_bytes: int | None = None


NO_FILES = Files()


@dataclass
class Table:
    """Rows of text. `align` has "<" or ">" for each column, `code` the columns that hold equations or commands."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str
    code: frozenset[int] = frozenset()


@dataclass
class Section:
    """A heading with sentences and a table below it; `name` tells one section from another."""

    name: str
    title: str
    sentences: list[str] = field(default_factory=list)
    table: Table | None = None


@dataclass
class OperatorCost:
    """The kernels that begin with one operator: how many, and their milliseconds, in both graphs."""

    operator: str
    kernels_before: int = 0
    before_ms: float = 0.0
    kernels_after: int = 0
    after_ms: float = 0.0


def sections(report: Report, files: Files) -> list[Section]:
    """All that the report tells, in order; sections without content are left out."""
    found = [
        _outcome(report, files), _rules(report), _in_order("rewrites", "Rewrites in order", report.rewrites),
        _in_order("aside", "Found and not kept", report.set_aside), _operators(report), _course(report),
        _finalists(report), _misses(report), _explained(report), _how(report), _machine(report),
    ]  # fmt: skip
    return [s for s in found if s.sentences or s.table is not None and s.table.rows]


# ── what came of it ──────────────────────────────────────────────────────────────────────────────────────────────


def _outcome(report: Report, files: Files) -> Section:
    rows = [row for row in _compared(report, files) if row[1] or row[2]]
    said = []
    if report.ratio_low is not None and report.ratio_high is not None:
        low, high = report.ratio_low, report.ratio_high
        said.append(f"Time before / after, interval of the median: {low:.3f} to {high:.3f}")
    if report.verified is not None and report.relative_error is not None:
        error = f"equal, largest relative error {report.relative_error:.1e}"
        said.append(f"Outputs compared with the original's: {checked(report) if not report.verified else error}")
    after = "after" if kept(report) else "best found, not kept"
    return Section("outcome", "Before and after", said, Table(("", "before", after), rows, "<>>"))


def kept(report: Report) -> bool:
    """Whether something came back that is not the original, or is to run otherwise."""
    if report.after is None:
        return report.changed or not report.set_aside
    return report.changed or any(box.change for box in report.after.boxes)


def checked(report: Report) -> str:
    """What came of the comparison of outputs."""
    if report.verified is None:
        return "not compared"
    return "equal" if report.verified else f"not shown equal, {report.verification}"


def _compared(report: Report, files: Files) -> Iterator[Sequence[str]]:
    if report.measured_before is not None and report.measured_after is not None:
        yield "whole graph, median", f"{report.measured_before:.3f} ms", f"{report.measured_after:.3f} ms"
    if report.quartiles is not None and len(report.quartiles) == 4:
        a, b, c, d = report.quartiles
        yield "whole graph, quartiles", f"{a:.3f} to {b:.3f} ms", f"{c:.3f} to {d:.3f} ms"
    kind = "measured kernels" if report.costs_are_measured else "by a formula"
    yield f"cost ({kind})", f"{report.cost_before:.3f} ms", f"{report.cost_after:.3f} ms"
    yield "kernels", str(report.kernels_before), str(report.kernels_after)
    if report.before is not None and report.after is not None:
        yield "operators", str(report.before.operators), str(report.after.operators)
    yield "memory between kernels", size(report.peak_before), size(report.peak_after)
    yield "file", size(files.model_bytes), size(files.output_bytes)


def size(count: int | None) -> str:
    """Bytes in the unit that suits them, "" for None."""
    if count is None:
        return ""
    for unit, least in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= least:
            return f"{count / least:.2f} {unit}"
    return f"{count} bytes"


# ── rewrites ─────────────────────────────────────────────────────────────────────────────────────────────────────


def by_rule(rewrites: Sequence[Rewrite]) -> list[tuple[str, int, float]]:
    """(equation, times taken, milliseconds saved) for each rule, the most useful first."""
    found: dict[str, tuple[int, float]] = {}
    for rewrite in rewrites:
        count, gain = found.get(rewrite.rule, (0, 0.0))
        found[rewrite.rule] = (count + 1, gain + rewrite.gain_ms)
    return sorted(((r, c, g) for r, (c, g) in found.items()), key=lambda t: (-t[2], t[0]))


def _rules(report: Report) -> Section:
    about = {rewrite.rule: rewrite for rewrite in report.rewrites}
    rows = [
        (str(count), rule, saved(gain), about[rule].identifier, about[rule].exactness, certified(about[rule]),
         about[rule].command)
        for rule, count, gain in by_rule(report.rewrites)
    ]  # fmt: skip
    headers = ("times", "rule", "saves", "name", "exactness", "certificate", "judge it again")
    return Section("rules", "Rules that were used", [], Table(headers, rows, "><><<<<", frozenset({1, 6})))


def certified(rewrite: Rewrite) -> str:
    """The status of a rewrite's rule, and how it was reached."""
    return f"{rewrite.status}: {rewrite.certificate}" if rewrite.certificate else rewrite.status


def saved(gain: float) -> str:
    """What a rewrite saves by the costs of kernels; less than nothing for a step that paves the way."""
    return f"{gain:.3f} ms"


def _in_order(name: str, title: str, rewrites: Sequence[Rewrite]) -> Section:
    rows = [
        (str(number), rewrite.rule, rewrite.where, saved(rewrite.gain_ms), rewrite.status)
        for number, rewrite in enumerate(rewrites, start=1)
    ]
    headers = ("", "rule", "where", "saves", "status")
    return Section(name, title, [], Table(headers, rows, "><<><", frozenset({1})))


# ── costs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def operator_costs(before: Picture, after: Picture) -> list[OperatorCost]:
    """Costs by the first operator of each kernel, the highest first; changes of layout stand by themselves."""
    found: dict[str, OperatorCost] = {}
    for box in (b for b in before.boxes if b.kind in (OPERATOR, LAYOUT)):
        its = found.setdefault(box.steps[0].operator, OperatorCost(box.steps[0].operator))
        its.kernels_before += 1
        its.before_ms += box.cost_ms or 0.0
    for box in (b for b in after.boxes if b.kind in (OPERATOR, LAYOUT)):
        its = found.setdefault(box.steps[0].operator, OperatorCost(box.steps[0].operator))
        its.kernels_after += 1
        its.after_ms += box.cost_ms or 0.0
    return sorted(found.values(), key=lambda c: (-max(c.before_ms, c.after_ms), c.operator))


def _operators(report: Report) -> Section:
    if report.before is None or report.after is None:
        return Section("operators", "")
    costs = operator_costs(report.before, report.after)
    totals = sum(c.before_ms for c in costs), sum(c.after_ms for c in costs)
    rows = [
        (c.operator, str(c.kernels_before), _cost(c.before_ms), _share(c.before_ms, totals[0]), str(c.kernels_after),
         _cost(c.after_ms), _share(c.after_ms, totals[1]))
        for c in costs
    ]  # fmt: skip
    unknown = [
        sum(b.cost_ms is None for b in p.boxes if b.kind in (OPERATOR, LAYOUT)) for p in (report.before, report.after)
    ]
    said = ["A kernel counts for the operator that it begins with; views of memory cost nothing"]
    if any(unknown):
        said.append(f"Kernels without a known cost, not counted: {unknown[0]} before, {unknown[1]} after")
    headers = ("operator", "kernels", "before", "share", "kernels", "after", "share")
    return Section("operators", "Cost by operator", said, Table(headers, rows, "<>>>>>>"))


def _cost(cost: float) -> str:
    return milliseconds(cost) if cost else ""


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole and part else ""


# ── how it came about ────────────────────────────────────────────────────────────────────────────────────────────


def _course(report: Report) -> Section:
    said = [
        f"{report.expanded} graphs expanded, {report.candidates} candidates, {report.duplicates} duplicates, in "
        f"{report.search_seconds:.2f} s"
    ]
    if report.stopped:
        said.append(f"stopped by {report.stopped}")
    rows = [(f"{second:.3f}", f"{cost:.3f} ms") for second, cost in report.course]
    return Section("course", "The search", said, Table(("seconds", "best cost"), rows, ">>"))


def _finalists(report: Report) -> Section:
    rows = [
        (str(t.rewrites), f"{t.predicted_ms:.3f} ms", "not run" if t.measured_ms is None else f"{t.measured_ms:.3f} ms",
         "" if t.ratio_low is None or t.ratio_high is None else f"{t.ratio_low:.3f} to {t.ratio_high:.3f}")
        for t in report.finalists
    ]  # fmt: skip
    headers = ("rewrites", "sum of kernels", "whole graph", "before / after")
    return Section("finalists", "Graphs that came last", [], Table(headers, rows, ">>>>"))


def _misses(report: Report) -> Section:
    closest: dict[str, float] = {}
    for rule, change in report.near_misses if not report.rewrites else ():
        closest.setdefault(rule, change)
    rows = [(f"{change:+.3f} ms", rule) for rule, change in closest.items()]
    title = "Closest rewrites that did not pay"
    return Section("misses", title, [], Table(("costs", "rule"), rows, "><", frozenset({1})))


def _explained(report: Report) -> Section:
    rows = []
    for it in report.explanations:
        change = "" if it.change_ms is None else f"{it.change_ms:+.3f}"
        why = "; ".join(filter(None, (it.reason, it.not_used)))
        named = it.identifier or it.rule or it.asked
        rows.append((named, it.graph, it.outcome, ", ".join(it.nodes), change, why))
    return Section("explained", "Explained", [], Table(("rule", "graph", "", "nodes", "ms", "why"), rows, "<<<<><"))


_SHORT = 0.005
"""Seconds of a phase below which it is not told."""


def _how(report: Report) -> Section:
    said = [
        f"{report.total_seconds:.2f} s in all, of which {report.measuring_seconds:.2f} s measuring "
        f"({report.kernels_measured} kernels measured, {report.kernels_known} known)"
    ]
    if report.phases:
        spent = sorted(((n, s) for n, s in report.phases.items() if s >= _SHORT), key=lambda p: -p[1])
        said.append(f"seconds: {', '.join(f'{phase} {seconds:.2f}' for phase, seconds in spent)}")
    for name, told in (("plan", report.plan), (report.search, report.search_details)):
        if told:
            said.append(f"{name}: {', '.join(detail(k, v) for k, v in told.items())}")
    return Section("how", "How", [*said, *report.messages])


def detail(name: str, value: float | str) -> str:
    """One thing that is told of a plan or a search."""
    return f"{name.replace('_', ' ')} {value:.4g}" if isinstance(value, float) else f"{name.replace('_', ' ')} {value}"


def _machine(report: Report) -> Section:
    rows = [("backend", report.backend), ("device", report.device), *report.machine.items()]
    return Section("machine", "Machine and versions", [], Table(("", ""), rows, "<<"))


__all__ = [
    "NO_FILES", "Files", "OperatorCost", "Section", "Table", "by_rule", "checked", "kept", "operator_costs", "sections",
    "size",
]  # fmt: skip
