"""How long single operators take, against ONNX Runtime: which of those that models use have no good kernel.

    python benchmarks/operators.py
    python benchmarks/operators.py Attention TopK

makes a model of one operator for each of some sizes, runs it in both on one thread, in short blocks that take turns,
and prints for each the median times, how many times as long as ONNX Runtime's ours is, how it ran (by kernels of ours,
or evaluated by its definition), and the largest relative error against ONNX Runtime's result.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]  # it has no types
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import taso
from taso.backends.onednn.executor import Program
from taso.cli_common import table

Array = NDArray[np.generic]
Floats = NDArray[np.float32]
Feeds = dict[str, Array]

OPSET = 21


@dataclass(frozen=True)
class Case:
    """An operator, what it is fed (None: an input that is absent), what it has as constants, and its attributes."""

    op: str
    size: str
    inputs: Sequence[Array | None]
    attrs: Mapping[str, object] = field(default_factory=dict)
    constants: Sequence[int] = ()
    outputs: int = 1
    opset: int = OPSET
    domain: str = ""


# ── operators ────────────────────────────────────────────────────────────────────────────────────────────────────


def _normal(*shape: int) -> Floats:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def _below(limit: int, *shape: int) -> NDArray[np.int64]:
    return np.random.default_rng(sum(shape)).integers(0, limit, shape)


def _int64(*values: int) -> Array:
    return np.array(values, np.int64)


def _attention() -> list[Case]:
    short, long, few, one = (1, 12, 128, 64), (1, 16, 1024, 64), (1, 4, 1024, 64), (1, 16, 1, 64)
    mask = np.where(_below(9, 1, 1, 128, 128) > 0, np.float32(0), np.float32(-1e4))
    return [
        Case("Attention", "12 heads, 128 × 64", [_normal(*short)] * 3, opset=23),
        Case("Attention", "12 heads, 128 × 64, mask", [*[_normal(*short)] * 3, mask], opset=23),
        Case("Attention", "12 heads side by side, 128 × 64", [_normal(1, 128, 768)] * 3,
             {"q_num_heads": 12, "kv_num_heads": 12}, opset=23),
        Case("Attention", "16 heads, 1024 × 64", [_normal(*long)] * 3, opset=23),
        Case("Attention", "16 heads, 1024 × 64, causal", [_normal(*long)] * 3, {"is_causal": 1}, opset=23),
        Case("Attention", "16 heads on 4, 1024 × 64", [_normal(*long), *[_normal(*few)] * 2], opset=23),
        Case("Attention", "16 heads, 1 of 1024 × 64, past",
             [*[_normal(*one)] * 3, None, *[_normal(1, 16, 1023, 64)] * 2], outputs=3, opset=23),
    ]  # fmt: skip


def _products() -> list[Case]:
    q = _normal(1, 12, 128, 64)
    return [
        Case("Einsum", "bhqd,bhkd->bhqk, 12 × 128 × 64", [q, q], {"equation": "bhqd,bhkd->bhqk"}),
        Case("Einsum", "bqhd,bkhd->bhqk, 12 × 128 × 64", [_normal(1, 128, 12, 64)] * 2,
             {"equation": "bqhd,bkhd->bhqk"}),
        Case("Einsum", "bsd,dhk->bshk, 128 × 768 × 768", [_normal(1, 128, 768), _normal(768, 12, 64)],
             {"equation": "bsd,dhk->bshk"}, (1,)),
        Case("Einsum", "bij,bjk->bik, 8 × 256 × 256", [_normal(8, 256, 256)] * 2, {"equation": "bij,bjk->bik"}),
        Case("Einsum", "bhwc,hkc->bhwk, 16 × 14 × 64", [_normal(16, 14, 14, 64), _normal(14, 14, 64)],
             {"equation": "bhwc,hkc->bhwk"}),
        Case("RotaryEmbedding", "12 heads, 128 × 64",
             [q, *[_normal(1, 128, 32)] * 2], {}, opset=23),
        Case("RotaryEmbedding", "12 heads, 128 × 64, by positions",
             [q, *[_normal(2048, 32)] * 2, _below(2048, 1, 128)], {}, opset=23),
    ]  # fmt: skip


def _along_axes() -> list[Case]:
    image, rows = _normal(1, 64, 56, 56), _normal(1, 32000)
    return [
        Case("TopK", "50 of 32000", [rows, _int64(50)], {}, (1,), 2),
        Case("TopK", "5 of 1000, 64 rows", [_normal(64, 1000), _int64(5)], {}, (1,), 2),
        Case("TopK", "1000 of 20000, 1 row", [_normal(1, 20000), _int64(1000)], {}, (1,), 2),
        Case("ArgMax", "32000", [rows], {"axis": -1, "keepdims": 0}),
        Case("ArgMax", "21 channels of 128 × 128", [_normal(1, 21, 128, 128)], {"axis": 1}),
        Case("ArgMin", "32000, the last", [rows], {"axis": -1, "select_last_index": 1}),
        Case("CumSum", "128 × 1024", [_normal(128, 1024), np.asarray(1)], {}, (1,)),
        Case("CumSum", "128 × 1024, exclusive, along 0", [_normal(128, 1024), np.asarray(0)], {"exclusive": 1}, (1,)),
        Case("LpNormalization", "128 × 768", [_normal(128, 768)], {"axis": -1}),
        Case("LpNormalization", "64 × 56 × 56 by channels", [image], {"axis": 1}),
        Case("ReduceMean", "64 × 56 × 56, axes 2 3", [image, _int64(2, 3)], {}, (1,)),
        Case("ReduceMean", "64 × 56 × 56, axis 1", [image, _int64(1)], {}, (1,)),
        Case("ReduceSum", "128 × 768, axis 0", [_normal(128, 768), _int64(0)], {}, (1,)),
        Case("ReduceMax", "64 × 56 × 56, axes 1 3", [image, _int64(1, 3)], {}, (1,)),
        Case("ReduceL2", "128 × 768", [_normal(128, 768), _int64(1)], {}, (1,)),
        Case("ReduceLogSumExp", "128 × 768", [_normal(128, 768), _int64(1)], {}, (1,)),
        Case("ReduceSum", "int64, 128 × 768", [_below(9, 128, 768), _int64(1)], {}, (1,)),
        Case("Softmax", "64 × 56 × 56 by channels", [image], {"axis": 1}),
        Case("Hardmax", "128 × 768", [_normal(128, 768)]),
        Case("InstanceNormalization", "64 × 56 × 56", [image, _normal(64), _normal(64)], {}, (1, 2)),
        Case("LRN", "64 × 56 × 56", [image], {"size": 5}),
        Case("MeanVarianceNormalization", "64 × 56 × 56", [image], {}),
    ]  # fmt: skip


def _moves() -> list[Case]:
    image, square, edge = _normal(1, 64, 56, 56), _normal(1024, 1024), _int64(0, 0, 2, 2, 0, 0, 2, 2)
    return [
        Case("DepthToSpace", "64 × 56 × 56, DCR", [image], {"blocksize": 2}),
        Case("DepthToSpace", "64 × 56 × 56, CRD", [image], {"blocksize": 2, "mode": "CRD"}),
        Case("SpaceToDepth", "64 × 56 × 56", [image], {"blocksize": 2}),
        Case("Pad", "64 × 56 × 56, constant", [image, edge], {}, (1,)),
        Case("Pad", "64 × 56 × 56, reflect", [image, edge], {"mode": "reflect"}, (1,)),
        Case("Tile", "128 × 768, 4 times", [_normal(128, 768), _int64(4, 1)], {}, (1,)),
        Case("Expand", "768 to 128 × 768", [_normal(1, 768), _int64(128, 768)], {}, (1,)),
        Case("Trilu", "1024 × 1024, lower", [square], {"upper": 0}),
        Case("Transpose", "64 × 56 × 56 to the channels last", [image], {"perm": (0, 2, 3, 1)}),
        Case("Slice", "every second of 64 × 56 × 56",
             [image, _int64(0, 0), _int64(56, 56), _int64(2, 3), _int64(2, 2)], {}, (1, 2, 3, 4)),
        Case("Concat", "2 of 64 × 56 × 56", [image, image], {"axis": 1}),
        Case("ReverseSequence", "128 × 8 × 256", [_normal(128, 8, 256), np.full(8, 100, np.int64)], {}),
        Case("Resize", "64 × 56 × 56 twice, linear", [image, None, np.array([1, 1, 2, 2], np.float32)],
             {"mode": "linear"}, (2,)),
        Case("Resize", "64 × 56 × 56 twice, nearest", [image, None, np.array([1, 1, 2, 2], np.float32)], {}, (2,)),
        Case("Resize", "3 × 320 × 320 to 640, cubic", [_normal(1, 3, 320, 320), None,
             np.array([1, 1, 2, 2], np.float32)], {"mode": "cubic"}, (2,)),
    ]  # fmt: skip


def _indices() -> list[Case]:
    table_, rows = _normal(30000, 768), _normal(1024, 256)
    places = np.random.default_rng(0).permutation(1024)[:256].reshape(256, 1)
    boxes = np.sort(np.random.default_rng(0).random((1, 1000, 2, 2), np.float32) * 200, 2).reshape(1, 1000, 4)
    regions = np.sort(np.random.default_rng(1).random((100, 2, 2), np.float32) * 55, 1).reshape(100, 4)
    return [
        Case("Gather", "128 of 30000 × 768", [table_, _below(30000, 1, 128)], {}, (0,)),
        Case("GatherElements", "1024 × 256", [rows, _below(1024, 1024, 256)]),
        Case("GatherND", "256 rows of 1024 × 256", [rows, places]),
        Case("ScatterElements", "1024 × 256 along 1", [rows, np.argsort(rows, 1), rows], {"axis": 1}),
        Case("ScatterND", "256 rows of 1024 × 256", [rows, places, _normal(256, 256)]),
        Case("ScatterND", "256 rows of 1024 × 256, add", [rows, places, _normal(256, 256)], {"reduction": "add"}),
        Case("OneHot", "128 of 1000", [_below(1000, 128), np.asarray(1000), np.array([0, 1], np.float32)], {}, (1, 2)),
        Case("NonMaxSuppression", "1000 boxes", [
            boxes, np.random.default_rng(2).random((1, 1, 1000), np.float32), _int64(100),
            np.array([0.5], np.float32), np.array([0.1], np.float32)], {}, (2, 3, 4)),
        Case("RoiAlign", "100 regions of 64 × 56 × 56",
             [_normal(1, 64, 56, 56), regions, np.zeros(100, np.int64)],
             {"output_height": 7, "output_width": 7, "sampling_ratio": 2}),
        Case("GridSample", "64 × 56 × 56", [_normal(1, 64, 56, 56), np.tanh(_normal(1, 56, 56, 2))]),
        Case("NonZero", "128 × 768", [_below(2, 128, 768)]),
    ]  # fmt: skip


def _of_elements() -> list[Case]:
    x, y = _normal(1, 128, 768), _normal(1, 128, 1)
    return [
        Case("Where", "128 × 768, scalar", [_below(2, 1, 128, 768) > 0, x, np.asarray(0, np.float32)]),
        Case("Greater", "128 × 768, by rows", [x, y]),
        Case("Equal", "int64, 128 × 768", [_below(9, 128, 768), _below(9, 128, 1)]),
        Case("Add", "int64, 128 × 768", [_below(9, 128, 768), _below(9, 1, 768)]),
        Case("Div", "int64, 128 × 768", [_below(9, 128, 768), _below(9, 1, 768) + 1]),
        Case("Mod", "int64, 128 × 768", [_below(99, 128, 768), _below(9, 1, 768) + 1]),
        Case("Cast", "int64 to float, 128 × 768", [_below(9, 128, 768)], {"to": TensorProto.FLOAT}),
        Case("Cast", "float to int64, 128 × 768", [x], {"to": TensorProto.INT64}),
        Case("Clip", "int64, 128 × 768", [_below(9, 128, 768), np.asarray(2), np.asarray(7)], {}, (1, 2)),
        Case("Pow", "128 × 768, to the 1.5", [np.abs(x), np.asarray(1.5, np.float32)], {}, (1,)),
        Case("Sigmoid", "128 × 768", [x]),
        Case("Swish", "128 × 768, alpha 1.7", [x], {"alpha": 1.7}, opset=24),
        Case("QuickGelu", "128 × 768", [x], {"alpha": 1.702}, domain="com.microsoft"),
        Case("Gelu", "128 × 768", [x]),
        Case("PRelu", "64 × 56 × 56", [_normal(1, 64, 56, 56), _normal(64, 1, 1)], {}, (1,)),
        Case("Erf", "128 × 768", [x]),
        Case("IsNaN", "128 × 768", [x]),
        Case("Sin", "128 × 768", [x]),
        Case("Atan", "128 × 768", [x]),
        Case("ThresholdedRelu", "128 × 768", [x]),
        Case("Celu", "128 × 768", [x]),
    ]  # fmt: skip


def _recurrent() -> list[Case]:
    x = _normal(100, 1, 256)
    return [
        Case(op, "100 steps, 256", [x, *[_normal(1, gates * 256, 256) / np.float32(16)] * 2,
             _normal(1, gates * 512)], {"hidden_size": 256}, (1, 2, 3))
        for op, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1))
    ]  # fmt: skip


GROUPS: tuple[Callable[[], list[Case]], ...] = (
    _attention, _products, _along_axes, _moves, _indices, _of_elements, _recurrent,
)  # fmt: skip

# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────


def model(case: Case) -> tuple[onnx.ModelProto, Feeds]:
    """A model of that operator alone, and what to feed it."""
    names = ["" if a is None else f"x{i}" for i, a in enumerate(case.inputs)]
    held = {n: np.asarray(a) for n, a in zip(names, case.inputs, strict=True) if a is not None}
    constants = {names[i] for i in case.constants}
    results = [f"y{i}" for i in range(case.outputs)]
    node = helper.make_node(case.op, names, results, domain=case.domain)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in case.attrs.items())
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in held.items() if n not in constants
    ]  # fmt: skip
    outputs = [helper.make_empty_tensor_value_info(r) for r in results]
    weights = [numpy_helper.from_array(held[n], n) for n in sorted(constants)]
    opsets = [helper.make_opsetid("", case.opset)]
    if case.domain:
        opsets.append(helper.make_opsetid(case.domain, 1))
    graph = helper.make_graph([node], case.op, inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), {
        n: a for n, a in held.items() if n not in constants
    }


def in_onnxruntime(made: onnx.ModelProto) -> Callable[[Feeds], list[Array]]:
    """The model in ONNX Runtime, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(made.SerializeToString(), options, ["CPUExecutionProvider"])

    def run(feeds: Feeds) -> list[Array]:
        found: list[Array] = session.run(None, feeds)
        return found

    return run


def turns(runs: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Median seconds of each, in blocks that take turns."""
    times: list[list[float]] = [[] for _ in runs]
    stop = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < stop or len(times[-1]) < 3:
        for run, found in zip(runs, times, strict=True):
            end = time.perf_counter() + seconds / 5
            while True:
                started = time.perf_counter()
                run()
                now = time.perf_counter()
                found.append(now - started)
                if now >= end:
                    break
    return [statistics.median(t) for t in times]


def difference(ours: Sequence[Array], theirs: Sequence[Array]) -> float:
    """max |a − b| / max |b| over all outputs; 1 where the shapes differ."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape:
            return 1.0
        if b.size:
            apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
            worst = max(worst, float(apart.max()) / max(float(np.abs(b.astype(np.float64)).max()), 1e-30))
    return worst


def measured(case: Case, seconds: float) -> tuple[float, tuple[str, ...]]:
    """The ratio (0 where there is none), and a row of the table."""
    made, feeds = model(case)
    program = taso.compile(taso.load(made), "onednn", 1)
    assert isinstance(program, Program)
    found: dict[str, list[Array]] = {}
    times: dict[str, str] = {}
    runs: dict[str, Callable[[], Sequence[Array]]] = {"ours": lambda: list(program(feeds).values())}
    try:
        session = in_onnxruntime(made)
        runs["theirs"] = lambda: session(feeds)
    except Exception as reason:  # ONNX Runtime's errors have no class in common
        times["theirs"] = _first_words(reason)
    for name, run in list(runs.items()):
        try:
            found[name] = list(run())
        except Exception as reason:
            times[name] = _first_words(reason)
            del runs[name]
    medians = dict(zip(runs, turns(list(runs.values()), seconds), strict=True))
    times.update({name: f"{median * 1e3:.3f}" for name, median in medians.items()})
    both = len(medians) == 2
    ratio = medians["ours"] / medians["theirs"] if both else 0.0
    how = ", ".join(dict.fromkeys(way for _, way in program.operators)) or "evaluated"
    error = f"{difference(found['ours'], found['theirs']):.0e}" if both else ""
    return ratio, (
        case.op, case.size, times["theirs"], times["ours"], f"{ratio:.2f}" if both else "", how, error
    )  # fmt: skip


def _first_words(reason: Exception) -> str:
    return "fails: " + " ".join(str(reason).split())[:30]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", help="operators to measure (default: all that there are sizes for)")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each runtime and case (default: %(default)s)")
    parser.add_argument("--sort", action="store_true", help="the slowest against ONNX Runtime first")
    told = parser.parse_args(arguments)
    rows = []
    for case in (case for group in GROUPS for case in group()):
        if not told.operators or case.op in told.operators:
            rows.append(measured(case, told.seconds))
    if told.sort:
        rows.sort(key=lambda r: -r[0])
    heads = ("operator", "size", "ONNX Runtime ms", "taso ms", "times as long", "how", "difference")
    print(table(heads, [row for _, row in rows], "<<>>><>"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
