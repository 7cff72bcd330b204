"""Reductions over axes."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from taso.graph.errors import GraphError
from taso.graph.index import Affine, Call, Const, Expr, Inside, Loop, Meaning, Read, Reduce, at
from taso.graph.operator import (
    Attrs,
    AttrValue,
    FileNode,
    MeaningFunction,
    Operator,
    Reading,
    Required,
    Spelling,
    Types,
    Unmodelled,
    Unspellable,
    register,
)  # fmt: skip
from taso.graph.ops.common import (
    normal_axes,
    normal_axis,
    only_attributes,
    present,
    same_as_first,
    small_ints,
    writes_changed,
)  # fmt: skip
from taso.graph.types import Dim, DType, TensorType

# ── ReduceSum and its kin: `axes` counted from the front; none means all axes ────────────────────────────────────


def reduced_axes(t: TensorType, attrs: Attrs, op: str) -> tuple[int, ...]:
    """The axes that are reduced, in ascending order."""
    axes = attrs.ints("axes")
    return tuple(sorted(normal_axes(axes, t.rank, op))) if axes else tuple(range(t.rank))


def _type(op: str, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, op)
    gone = reduced_axes(x, attrs, op)
    keep = attrs.int("keepdims")
    dims: list[Dim] = [1 if a in gone else d for a, d in enumerate(x.dims) if keep or a not in gone]
    return (x.with_shape(dims),)


def _meaning(
    op: str, types: Types, attrs: Attrs, kind: str, inner: Callable[[Expr], Expr], outer: Callable[[Expr], Expr]
) -> tuple[Meaning, ...]:
    x = present(types, 0, op)
    gone = reduced_axes(x, attrs, op)
    keep = attrs.int("keepdims")
    axes: list[tuple[Loop, ...]] = []
    summed: list[Loop] = []
    index: list[Affine] = []
    for a, dim in enumerate(x.dims):
        loop = Loop(f"k{a}" if a in gone else f"i{a}", dim)
        index.append(at(loop))
        if a in gone:
            summed.append(loop)
            if keep:
                axes.append((Loop(f"i{a}", 1),))
        else:
            axes.append((loop,))
    read = Read(0, tuple(index))
    body: Expr = Reduce(kind, tuple(summed), inner(read)) if summed else inner(read)
    if op == "ReduceMean" and summed:
        body = Call("div", (body, Reduce("sum", tuple(summed), Inside(0, tuple(index)))))
    return (Meaning(tuple(axes), outer(body)),)


def _read_reduction(node: FileNode, inputs_since: int) -> Reading:
    """Axes are an attribute up to opset 17 (ReduceSum: 12), then an input."""
    only_attributes(node, "axes", "keepdims", "noop_with_empty_axes")
    axes = node.ints("axes") or ()
    if node.version >= inputs_since and node.has(1):
        axes = small_ints(node, 1)
    if not axes and node.attrs.get("noop_with_empty_axes", 0):
        raise Unmodelled(f"{node.op_type} that reduces nothing")
    x = node.type(0)
    normal = tuple(sorted(normal_axes(axes, x.rank, node.op_type)))
    return Reading({"axes": normal, "keepdims": node.attrs.get("keepdims", 1)}, (0,))


def _write_reduction(op: str, attrs: Attrs, opset: int, inputs_since: int) -> Spelling:
    said: dict[str, AttrValue] = {"keepdims": attrs.int("keepdims")}
    axes = attrs.ints("axes")
    if opset < inputs_since:
        return Spelling(op, {**said, "axes": axes} if axes else said, (0,))
    return Spelling(op, said, (0, np.asarray(axes, np.int64)) if axes else (0,))


_ROUNDED_ON_INTEGERS = {"ReduceMean", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"}


def _reduction(
    name: str, kind: str, inputs_since: int = 18, linear: bool = False, inner: Callable[[Expr], Expr] = lambda e: e,
    outer: Callable[[Expr], Expr] = lambda e: e, meaning: MeaningFunction | None = None,
) -> Operator:  # fmt: skip
    real = meaning or (lambda types, attrs: _meaning(name, types, attrs, kind, inner, outer))

    def means(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
        if name in _ROUNDED_ON_INTEGERS and types[0] is not None and not types[0].dtype.is_float:
            raise GraphError(f"{name} of integers has no meaning over the reals")
        return real(types, attrs)

    return register(
        Operator(
            name, lambda types, attrs: _type(name, types, attrs), {"axes": (), "keepdims": 1},
            linear=frozenset({0} if linear else ()), meaning=means,
            read=lambda node: _read_reduction(node, inputs_since),
            write=lambda attrs, types, opset: _write_reduction(name, attrs, opset, inputs_since),
        )
    )  # fmt: skip


def _square(e: Expr) -> Expr:
    return Call("mul", (e, e))


REDUCE_SUM = _reduction("ReduceSum", "sum", 13, linear=True)
REDUCE_MEAN = _reduction("ReduceMean", "sum", linear=True)
REDUCE_MAX = _reduction("ReduceMax", "max")
REDUCE_MIN = _reduction("ReduceMin", "min")
REDUCE_PROD = _reduction("ReduceProd", "prod")
REDUCE_SUM_SQUARE = _reduction("ReduceSumSquare", "sum", inner=_square)
REDUCE_L1 = _reduction("ReduceL1", "sum", inner=lambda e: Call("abs", (e,)))
REDUCE_L2 = _reduction("ReduceL2", "sum", inner=_square, outer=lambda e: Call("sqrt", (e,)))

_MOST = Fraction(np.finfo(np.float64).max)
REDUCE_LOG_SUM = _reduction("ReduceLogSum", "sum", outer=lambda e: Call("log", (e,)))


def _log_sum_exp(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    """log Σ exp(x − m) + m, where m is the largest x, or the largest double: exp of what is large is not finite."""
    op = "ReduceLogSumExp"
    x, gone = present(types, 0, op), reduced_axes(present(types, 0, op), attrs, op)

    def swept(prefix: str) -> tuple[tuple[Loop, ...], Read]:
        loops = tuple(Loop(f"{prefix if a in gone else 'i'}{a}", d) for a, d in enumerate(x.dims))
        return tuple(loops[a] for a in gone), Read(0, tuple(map(at, loops)))

    (over, along), (within, inner) = swept("k"), swept("m")
    largest: Expr = Reduce("max", within, inner) if gone else inner
    largest = Call("max", (Call("min", (largest, Const(_MOST))), Const(-_MOST)))
    power = Call("exp", (Call("sub", (along, largest)),))
    total = Call("log", (Reduce("sum", over, power) if gone else power,))
    sizes = [(a, 1 if a in gone else d) for a, d in enumerate(x.dims) if a not in gone or attrs.int("keepdims")]
    return (Meaning(tuple((Loop(f"i{a}", d),) for a, d in sizes), Call("add", (total, largest))),)


REDUCE_LOG_SUM_EXP = _reduction("ReduceLogSumExp", "sum", meaning=_log_sum_exp)

# ── CumSum, CumProd: their meaning is that of onnx.reference ─────────────────────────────────────────────────────


def _running(name: str, since: int, linear: bool) -> Operator:
    attrs: dict[str, AttrValue | Required] = {"exclusive": 0, "reverse": 0}
    return register(
        Operator(
            name, same_as_first(name, 1), attrs, linear=frozenset({0} if linear else ()), arity=(2, 2), since=since,
            write=writes_changed(name, attrs),
        )
    )  # fmt: skip


CUM_SUM = _running("CumSum", 11, linear=True)
CUM_PROD = _running("CumProd", 26, linear=False)

# ── ArgMax, ArgMin: their meaning is that of onnx.reference ──────────────────────────────────────────────────────


def _arg_type(op: str, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, op)
    axis = normal_axis(attrs.int("axis"), x.rank, op)
    dims = [1 if a == axis else d for a, d in enumerate(x.dims) if attrs.int("keepdims") or a != axis]
    return (TensorType(DType.INT64, tuple(dims)),)


def _write_arg(op: str, attrs: Attrs, opset: int) -> Spelling:
    said = {n: attrs[n] for n in ("axis", "keepdims")}
    if attrs.int("select_last_index"):
        if opset < 12:
            raise Unspellable(f"{op} of the last of several cannot be written in ONNX opset {opset}")
        said["select_last_index"] = 1
    return Spelling(op, said, (0,))


def _arg(name: str) -> Operator:
    return register(
        Operator(
            name, lambda types, attrs: _arg_type(name, types, attrs),
            {"axis": 0, "keepdims": 1, "select_last_index": 0},
            write=lambda attrs, types, opset: _write_arg(name, attrs, opset),
        )
    )  # fmt: skip


ARG_MAX = _arg("ArgMax")
ARG_MIN = _arg("ArgMin")
