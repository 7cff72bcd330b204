"""The report of `taso optimize` as a document: plain data for JSON, and Markdown."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from taso.cli_common import bytes_text, to_json, write_whole
from taso.graph.errors import TasoError
from taso.graph.onnx_export import checked_target
from taso.search.result import Report, by_rule
from taso.version import __version__

Document = dict[str, object]


def check_report_path(path: str) -> None:
    """Raises `TasoError` where no report can be written to `path`: its suffix says the form."""
    suffix = Path(path).suffix.lower()
    if suffix == ".html":
        raise TasoError("reports in HTML are not part of this version of taso: name a file .md, .json or .svg")
    if suffix not in _FORMS:
        forms = ".md, .json or .svg"
        raise TasoError(f"the form of the report follows from the suffix, {forms}: '{path}' has none of them")
    checked_target(path)


def document(report: Report, model: str, output: str | None) -> Document:
    """The report, and which files it speaks of (their sizes in bytes; weights in files beside them not counted)."""
    return {
        "taso": __version__, "model": model, "output": output, "model_bytes": _size(model),
        "output_bytes": _size(output), **report.to_dict(),
    }  # fmt: skip


def write_report(path: str, report: Report, model: str, output: str | None) -> None:
    """Writes the report in the form that the suffix of `path` says; raises `TasoError` where that is not possible."""
    check_report_path(path)
    text = _FORMS[Path(path).suffix.lower()](report, model, output)
    write_whole(path, (text.rstrip("\n") + "\n").encode())


def markdown(report: Report, model: str, output: str | None) -> str:
    """The report for people, as Markdown."""
    return "\n".join(_lines(report, model, output))


def _json(report: Report, model: str, output: str | None) -> str:
    return to_json(document(report, model, output))


def _svg(report: Report, model: str, output: str | None) -> str:
    return report.course_svg()


_FORMS = {".json": _json, ".md": markdown, ".svg": _svg}


def _size(path: str | None) -> int | None:
    return os.path.getsize(path) if path is not None and os.path.isfile(path) else None


def _lines(report: Report, model: str, output: str | None) -> Iterator[str]:
    yield f"# {_escaped(Path(model).name)}, optimized\n"
    yield f"{_escaped(report.decision)}.\n"
    yield "| | before | after |\n| --- | ---: | ---: |"
    kind = "measured kernels" if report.costs_are_measured else "by a formula"
    yield f"| cost ({kind}) | {report.cost_before:.3f} ms | {report.cost_after:.3f} ms |"
    if report.measured_before is not None and report.measured_after is not None:
        yield f"| whole graph, measured | {report.measured_before:.3f} ms | {report.measured_after:.3f} ms |"
    yield f"| kernels | {report.kernels_before} | {report.kernels_after} |"
    sizes = _size(model), _size(output)
    yield f"| file | {' | '.join('' if s is None else bytes_text(s) for s in sizes)} |\n"
    if report.ratio_low is not None:
        yield f"Before / after, 95 % interval of the median: {report.ratio_low:.3f} to {report.ratio_high:.3f}.\n"
    if report.verified is not None and report.relative_error is not None:
        said = f"equal, largest relative error {report.relative_error:.1e}"
        yield f"Outputs compared: {said if report.verified else 'not shown equal, ' + _escaped(report.verification)}.\n"
    yield from _rewrites("Rewrites", report, kept=True)
    yield from _rewrites("Found and not kept", report, kept=False)
    yield "## How\n"
    yield f"- taso {__version__}, backend {report.backend}: {_escaped(report.device)}"
    yield f"- {report.total_seconds:.2f} s in all"
    yield (
        f"- {report.expanded} graphs expanded, {report.candidates} candidates, {report.duplicates} duplicates; "
        f"{report.search_seconds:.2f} s of search, of which {report.measuring_seconds:.2f} s measuring "
        f"({report.kernels_measured} kernels measured, {report.kernels_known} known)"
    )
    if report.phases:
        yield f"- seconds: {', '.join(f'{phase} {seconds:.2f}' for phase, seconds in report.phases.items())}"
    yield from (f"- {_escaped(message)}" for message in report.messages)
    if report.explanations:
        yield "\n## Explained\n\n| rule | graph | | nodes | ms | why |\n| --- | --- | --- | --- | ---: | --- |"
    for it in report.explanations:
        change = "" if it.change_ms is None else f"{it.change_ms:+.3f}"
        why = "; ".join(filter(None, (it.reason, it.not_used)))
        cells = it.identifier or it.rule or it.asked, it.graph, it.outcome, ", ".join(it.nodes), change, why
        yield f"| {' | '.join(map(_escaped, cells))} |"


def _rewrites(title: str, report: Report, kept: bool) -> Iterator[str]:
    taken = report.rewrites if kept else report.set_aside
    if taken:
        yield f"## {title}\n\n| times | rule | saves |\n| ---: | --- | ---: |"
        for rule, count, gain in by_rule(taken):
            yield f"| {count} | `{rule.replace('|', chr(92) + '|')}` | {gain:.3f} ms |"
        yield ""


def _escaped(text: str) -> str:
    """Text in which Markdown finds no marks of its own."""
    return "".join("\\" + c if c in "\\`*_[]<>|#" else c for c in text).replace("\n", " ")
