"""What the suite prints: a table for each model, one over all of them, geometric means, and the plot's rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import plot
from results import Case, Ratio, Run, geometric_mean

from taso.cli_common import table

MEGA = 1e6


def details(case: Case) -> str:
    """Everything about one model."""
    needs, peaks = case.needs, case.peaks
    lines = [titled(case)]
    for file, made in case.made.items():
        lines.append(f"  {file}: {made.seconds:.1f} s, {made.decision}")
    reached = "" if case.share is None else f"; taso reaches {case.share:.0%}"
    lines.append(
        f"  limit: {needs.operations / 1e9:.2f} GFLOP and {needs.bytes / MEGA:.1f} MB at {peaks.operations / 1e9:.0f} "
        f"GFLOP/s and {needs.rate / 1e9:.1f} GB/s (from memory {peaks.bytes / 1e9:.1f}) take {needs.seconds * 1e3:.3f} "
        f"ms{reached}"
    )
    heads = ("contestant", "median ms", "quartiles", "runs", "time / taso (95 %)", "error", "running MB", "peak MB",
             "file MB", "start s", "version")  # fmt: skip
    rows = [_row(case, name) for name in case.results if case.ran(name)]
    if rows:
        lines.append(table(heads, rows, "<>>>>>>>>><"))
    lines += [f"  {name} does not run: {r.failure}" for name, r in case.results.items() if r.failure]
    lines.append(f"  largest relative error of any output against any other's: {case.disagreement:.1e}")
    return "\n".join(lines) + "\n"


def titled(case: Case) -> str:
    return f"{case.model}, batch {case.batch}, {threads_of(case.threads)}"


def threads_of(number: int) -> str:
    return "1 thread" if number == 1 else f"{number} threads"


def _row(case: Case, name: str) -> tuple[str, ...]:
    result = case.results[name]
    low, high = result.quartiles
    return (
        name, f"{result.median * 1e3:.3f}", f"{low * 1e3:.3f} to {high * 1e3:.3f}", str(len(result.times)),
        "" if name == "taso" else _shown(case.ratio(name, "taso")), _number(result.error, "{:.1e}"),
        _megabytes(result.memory.running), _megabytes(result.memory.ever), _megabytes(result.file_bytes),
        f"{result.start_seconds:.1f}", result.version,
    )  # fmt: skip


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / MEGA:.1f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _shown(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio[0]:.3f} ({ratio[1]:.3f} to {ratio[2]:.3f})"


# ── over all models ──────────────────────────────────────────────────────────────────────────────────────────────


def whole(run: Run) -> str:
    """Tables and geometric means for each number of threads and batch size."""
    parts = [f"{run.processor}"]
    if run.settings.get("small"):
        parts.append("small pictures: these are not the models' real sizes")
    parts += [_one(cases) for cases in _groups(run.cases)]
    parts += [f"{name} is left out: {reason}" for name, reason in run.left_out.items()]
    return "\n\n".join(parts)


def _groups(cases: Sequence[Case]) -> Iterator[list[Case]]:
    for threads, batch in dict.fromkeys((c.threads, c.batch) for c in cases):
        yield [c for c in cases if (c.threads, c.batch) == (threads, batch)]


def _one(cases: Sequence[Case]) -> str:
    first = cases[0]
    lines = [f"batch {first.batch}, {threads_of(first.threads)}", "", _against_peers(cases), "", _inside(cases), ""]
    lines += [*_means(cases), "", *_verdicts(cases)]
    return "\n".join(lines)


def _against_peers(cases: Sequence[Case]) -> str:
    heads = ("model", "taso ms", "of limit", "faster peer", "its ms", "peer / taso (95 %)", "error / ORT's",
             "memory / OpenVINO's")  # fmt: skip
    rows = []
    for case in cases:
        peer = case.to_beat
        rows.append((
            case.model, _milliseconds(case, "taso"), _number(case.share, "{:.0%}"), peer or "",
            "" if peer is None else _milliseconds(case, peer), _shown(case.gain),
            _number(error_ratio(case), "{:.2f}"), _number(memory_ratio(case), "{:.2f}"),
        ))  # fmt: skip
    return table(heads, rows, "<>><>>>>")


def _inside(cases: Sequence[Case]) -> str:
    heads = ("model", "unoptimized / taso (95 %)", "plan alone / taso (95 %)", "ONNX Runtime: original / exported",
             "optimize s", "for ORT s", "rewrites")  # fmt: skip
    rows = [(
        case.model, _shown(case.ratio("taso-unoptimized", "taso")), _shown(case.ratio("taso-plan", "taso")),
        _shown(case.ratio("onnxruntime", BESIDE)), *(_made(case, f) for f in ("optimized", "exported")),
        str(case.made["optimized"].rewrites) if "optimized" in case.made else "",
    ) for case in cases]  # fmt: skip
    return table(heads, rows, "<>>>>>>")


def _made(case: Case, file: str) -> str:
    return f"{case.made[file].seconds:.1f}" if file in case.made else ""


def _milliseconds(case: Case, name: str) -> str:
    return f"{case.results[name].median * 1e3:.3f}" if case.ran(name) else ""


def error_ratio(case: Case) -> float | None:
    """Our relative error against float64 over that of ONNX Runtime."""
    found = [case.results[name].error for name in ("taso", "onnxruntime") if case.ran(name)]
    ours, theirs = found if len(found) == 2 else (None, None)
    return ours / theirs if ours is not None and theirs else None


def memory_ratio(case: Case) -> float | None:
    """Our peak of resident memory at run time over that of OpenVINO."""
    found = [case.results[name].memory.running for name in ("taso", "openvino") if case.ran(name)]
    ours, theirs = found if len(found) == 2 else (None, None)
    return ours / theirs if ours is not None and theirs else None


def _means(cases: Sequence[Case]) -> Iterator[str]:
    """Geometric means, each over the models where both ran."""
    yield "geometric means (95 %)"
    names = dict.fromkeys(name for case in cases for name in case.results if name not in (*OURS, BESIDE))
    faster = "faster of ONNX Runtime and OpenVINO"
    wanted = [
        *((f"{faster} / {ours}", [c.paired(c.to_beat, ours) for c in cases if c.to_beat]) for ours in OURS),
        ("ONNX Runtime: original / exported", [c.paired("onnxruntime", BESIDE) for c in cases]),
        ("openvino-bf16 / taso-bf16", [c.paired("openvino-bf16", "taso-bf16") for c in cases]),
        *((f"{name} / taso", [c.paired(name, "taso") for c in cases]) for name in names),
    ]
    for text, samples in wanted:
        found = [sample for sample in samples if sample]
        if found:
            yield f"  {text:50} {_shown(geometric_mean(found))}  over {len(found)}"


OURS = ("taso", "taso-bf16")
BESIDE = "onnxruntime-exported"
"""Measured against ONNX Runtime, not against ours."""


def _verdicts(cases: Sequence[Case]) -> Iterator[str]:
    yield _listed("against the faster peer", [(c.model, c.gain) for c in cases])
    exported = [(c.model, c.ratio("onnxruntime", BESIDE)) for c in cases]
    yield _listed("the exported file in ONNX Runtime", exported)


def _listed(what: str, found: Sequence[tuple[str, Ratio | None]]) -> str:
    """Which models win, lose (interval wholly below 1) and which the intervals leave open."""
    known = [(model, ratio) for model, ratio in found if ratio is not None]
    groups = {
        "faster": [m for m, (_, low, _) in known if low > 1],
        "slower": [m for m, (_, _, high) in known if high < 1],
        "undecided": [m for m, (_, low, high) in known if low <= 1 <= high],
    }
    return f"{what}: " + "; ".join(f"{group}: {', '.join(models) or 'none'}" for group, models in groups.items())


def picture(cases: Sequence[Case]) -> str:
    """The plot of all cases, as SVG."""
    several = len({(c.threads, c.batch) for c in cases}) > 1
    rows = []
    for case in cases:
        name = f"{case.model} b{case.batch} t{case.threads}" if several else case.model
        ratios = {who: ratio for who in plot.COLOURS if (ratio := case.ratio(who, "taso")) is not None}
        rows.append(plot.Row(name, ratios))
    first = cases[0] if cases else None
    setting = "" if several or first is None else f", batch {first.batch}, {threads_of(first.threads)}"
    return plot.svg(f"Time of one inference against taso's{setting}", rows)
