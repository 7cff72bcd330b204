"""The report of `taso optimize` as a document: plain data for JSON, Markdown, a page, or the picture of the search."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from taso.cli_common import to_json, write_whole
from taso.graph.errors import TasoError
from taso.graph.onnx_export import checked_target
from taso.search.result import Report
from taso.search.telling import Files, operator_costs
from taso.version import __version__

Document = dict[str, object]


def check_report_path(path: str) -> None:
    """Raises `TasoError` where no report can be written to `path`: its suffix says the form."""
    if Path(path).suffix.lower() not in _FORMS:
        forms = ".html, .md, .json or .svg"
        raise TasoError(f"the form of the report follows from the suffix, {forms}: '{path}' has none of them")
    checked_target(path)


def document(report: Report, model: str, output: str | None) -> Document:
    """The report, and which files it speaks of (their sizes in bytes; weights in files beside them not counted)."""
    files = _files(model, output)
    drawn = report.before is not None and report.after is not None
    costs = operator_costs(report.before, report.after) if report.before and report.after and drawn else []
    return {
        "taso": __version__, "model": model, "output": output, "model_bytes": files.model_bytes,
        "output_bytes": files.output_bytes, "operator_costs": [asdict(cost) for cost in costs], **report.to_dict(),
    }  # fmt: skip


def write_report(path: str, report: Report, model: str, output: str | None) -> None:
    """Writes the report in the form that the suffix of `path` says; raises `TasoError` where that is not possible."""
    check_report_path(path)
    text = _FORMS[Path(path).suffix.lower()](report, model, output)
    write_whole(path, (text.rstrip("\n") + "\n").encode("utf-8", "replace"))


def _json(report: Report, model: str, output: str | None) -> str:
    return to_json(document(report, model, output))


def _svg(report: Report, model: str, output: str | None) -> str:
    return report.course_svg()


def _html(report: Report, model: str, output: str | None) -> str:
    return report.to_html(_files(model, output))


def _markdown(report: Report, model: str, output: str | None) -> str:
    return report.to_markdown(_files(model, output))


_FORMS = {".html": _html, ".json": _json, ".md": _markdown, ".svg": _svg}


def _files(model: str, output: str | None) -> Files:
    return Files(model, output, _size(model), _size(output))


def _size(path: str | None) -> int | None:
    return os.path.getsize(path) if path is not None and os.path.isfile(path) else None
