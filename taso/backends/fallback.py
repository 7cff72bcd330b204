"""What a kernel library lacks, done with NumPy into memory that is there already.

Two kinds: functions of elements, which work on tensors in any layout as long as all lie alike, and moves of data
between plain tensors. What neither covers is evaluated from the operator's definition (`evaluated`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from taso.backends.base import Array
from taso.backends.lowering import Kernel
from taso.backends.picking import PICKERS, Run
from taso.backends.recurrent import RECURRENT, recurrent
from taso.backends.regions import REGIONS
from taso.backends.resizing import resize
from taso.backends.running import RUNNERS
from taso.graph.errors import BackendError
from taso.graph.evaluate import evaluate_operator
from taso.graph.operator import Attrs, Operator, Types
from taso.graph.ops.movement import permutation, slice_ranges
from taso.graph.ops.reduction import reduced_axes
from taso.graph.types import DType, TensorType

ElementFunction = Callable[[Sequence[Array], Array, Attrs], object]
OptionalRun = Callable[[Sequence["Array | None"], Sequence[Array]], object]

_REAL = frozenset({DType.FLOAT, DType.DOUBLE})
_INTEGER = frozenset(
    {
        *(DType.INT8, DType.INT16, DType.INT32, DType.INT64),
        *(DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64),
    }
)
_NUMBER = _REAL | _INTEGER | {DType.FLOAT16}
_HELD = _NUMBER | {DType.BOOL}

# ── functions of elements ────────────────────────────────────────────────────────────────────────────────────────


def _ufunc(function: np.ufunc) -> ElementFunction:
    return lambda inputs, out, attrs: function(*inputs, out=out, casting="unsafe")


def _divide(inputs: Sequence[Array], out: Array, attrs: Attrs) -> None:
    """Quotients; those of integers are cut off towards 0."""
    a, b = (cast("NDArray[np.float32]", x) for x in inputs)
    if out.dtype.kind not in "iu":
        np.divide(a, b, out=out)
        return
    # neither may be the memory of the result where signs matter
    signs = out.dtype.kind == "i" and bool((a < 0).any() or (b < 0).any())
    rounded = np.floor_divide(a, b) if signs else np.floor_divide(a, b, out=cast("NDArray[np.float32]", out))
    if signs:
        down = ((a < 0) != (b < 0)) & (rounded * b != a) & (b != 0)
        np.add(rounded, down, out=out, casting="unsafe")


def _chain(function: np.ufunc) -> ElementFunction:
    def run(inputs: Sequence[Array], out: Array, attrs: Attrs) -> None:
        if len(inputs) == 1:
            return np.copyto(out, inputs[0])
        # the first two in one pass: either may be `out`
        function(inputs[0], inputs[1], out=out)
        for array in inputs[2:]:
            function(out, array, out=out)

    return run


def _mean(inputs: Sequence[Array], out: Array, attrs: Attrs) -> None:
    _chain(np.add)(inputs, out, attrs)
    np.divide(out, len(inputs), out=out)


def _clip(inputs: Sequence[Array], out: Array, attrs: Attrs) -> None:
    np.copyto(out, inputs[0])
    if attrs["min"] is not None:
        np.maximum(out, out.dtype.type(attrs.float("min")), out=out)
    if attrs["max"] is not None:
        np.minimum(out, out.dtype.type(attrs.float("max")), out=out)


def _where(inputs: Sequence[Array], out: Array, attrs: Attrs) -> None:
    np.copyto(out, inputs[2])
    np.copyto(out, inputs[1], where=inputs[0])


def _softsign(inputs: Sequence[Array], out: Array, attrs: Attrs) -> None:
    np.abs(inputs[0], out=out)
    np.add(out, 1, out=out)
    np.divide(inputs[0], out, out=out)


def _leaky(inputs: Sequence[Array], out: Array, attrs: Attrs) -> None:
    np.copyto(out, inputs[0])
    slope = inputs[1] if len(inputs) > 1 else attrs.float("alpha")
    np.multiply(inputs[0], slope, out=out, where=np.less(inputs[0], 0))


def _thresholded(inputs: Sequence[Array], out: Array, attrs: Attrs) -> None:
    alpha = inputs[0].dtype.type(attrs.float("alpha"))
    bits = np.dtype(f"i{out.dtype.itemsize}")
    kept = np.negative(np.greater(inputs[0], alpha).astype(bits))
    np.bitwise_and(inputs[0].view(bits), kept, out=out.view(bits))


def _celu(inputs: Sequence[Array], out: Array, attrs: Attrs) -> None:
    alpha = out.dtype.type(attrs.float("alpha"))
    below = np.minimum(inputs[0], 0)
    np.divide(below, alpha, out=below)
    np.expm1(below, out=below)
    np.multiply(below, alpha, out=below)
    np.maximum(inputs[0], 0, out=out)
    np.add(out, below, out=out)


def _copy(inputs: Sequence[Array], out: Array, attrs: Attrs) -> None:
    np.copyto(out, inputs[0], casting="unsafe")


_ELEMENTS: dict[str, tuple[ElementFunction, frozenset[DType]]] = {
    "Add": (_ufunc(np.add), _NUMBER),
    "Sub": (_ufunc(np.subtract), _NUMBER),
    "Mul": (_ufunc(np.multiply), _NUMBER),
    "Div": (_divide, _REAL | _INTEGER),
    "Pow": (_ufunc(np.power), _REAL),
    "Max": (_chain(np.maximum), _NUMBER),
    "Min": (_chain(np.minimum), _NUMBER),
    "Sum": (_chain(np.add), _REAL),
    "Mean": (_mean, _REAL),
    "Neg": (_ufunc(np.negative), _REAL | {DType.INT32, DType.INT64}),
    "Abs": (_ufunc(np.absolute), _NUMBER),
    "Sign": (_ufunc(np.sign), _NUMBER),
    "Sqrt": (_ufunc(np.sqrt), _REAL),
    "Exp": (_ufunc(np.exp), _REAL),
    "Log": (_ufunc(np.log), _REAL),
    "Tanh": (_ufunc(np.tanh), _REAL),
    "Sin": (_ufunc(np.sin), _REAL),
    "Cos": (_ufunc(np.cos), _REAL),
    "Tan": (_ufunc(np.tan), _REAL),
    "Asin": (_ufunc(np.arcsin), _REAL),
    "Acos": (_ufunc(np.arccos), _REAL),
    "Atan": (_ufunc(np.arctan), _REAL),
    "Sinh": (_ufunc(np.sinh), _REAL),
    "Cosh": (_ufunc(np.cosh), _REAL),
    "Asinh": (_ufunc(np.arcsinh), _REAL),
    "Acosh": (_ufunc(np.arccosh), _REAL),
    "Atanh": (_ufunc(np.arctanh), _REAL),
    "ThresholdedRelu": (_thresholded, _REAL),
    "Celu": (_celu, _REAL),
    "IsNaN": (_ufunc(np.isnan), _REAL),
    "Floor": (_ufunc(np.floor), _REAL),
    "Ceil": (_ufunc(np.ceil), _REAL),
    "Round": (_ufunc(np.rint), _REAL),
    "Reciprocal": (_ufunc(np.reciprocal), _REAL),
    "Relu": (lambda inputs, out, attrs: np.maximum(inputs[0], 0, out=out), _NUMBER),
    "Clip": (_clip, _REAL),
    "Softsign": (_softsign, _REAL),
    "LeakyRelu": (_leaky, _REAL),
    "PRelu": (_leaky, _REAL),
    "Equal": (_ufunc(np.equal), _HELD),
    "Greater": (_ufunc(np.greater), _NUMBER),
    "Less": (_ufunc(np.less), _NUMBER),
    "GreaterOrEqual": (_ufunc(np.greater_equal), _NUMBER),
    "LessOrEqual": (_ufunc(np.less_equal), _NUMBER),
    "And": (_ufunc(np.logical_and), frozenset({DType.BOOL})),
    "Or": (_ufunc(np.logical_or), frozenset({DType.BOOL})),
    "Xor": (_ufunc(np.logical_xor), frozenset({DType.BOOL})),
    "Not": (_ufunc(np.logical_not), frozenset({DType.BOOL})),
    "Where": (_where, _HELD),
    "Cast": (_copy, _HELD),
    "Identity": (_copy, _HELD),
    "Dropout": (_copy, _HELD),
}


def element_function(op: Operator, types: Types, result: TensorType) -> ElementFunction | None:
    """What computes `op` from arrays that broadcast to its result, None where only its definition does."""
    function, dtypes = _ELEMENTS.get(op.name, (None, frozenset[DType]()))
    if op.domain or function is None or any(t is None or t.dtype not in dtypes for t in types):
        return None
    if op.name == "Cast" and not _plain_cast(types, result):
        return None
    return function if result.dtype in _HELD else None


def _plain_cast(types: Types, result: TensorType) -> bool:
    """Whether NumPy converts as ONNX says; numbers that a narrower integer does not hold are left to its reference."""
    source = types[0]
    if source is None or result.dtype not in _HELD:
        return False
    return result.dtype not in _INTEGER or source.dtype in _INTEGER or source.dtype is DType.BOOL


# ── moves of data, and sums, between plain tensors ───────────────────────────────────────────────────────────────


def mover(op: Operator, attrs: Attrs, types: Types, results: Sequence[TensorType]) -> OptionalRun | None:
    """What computes `op` from plain arrays (None: an absent input) into plain ones, None if only its definition can."""
    if any(t is None for t in types) or op.name in RECURRENT:
        return recurrent(op, attrs, types)
    run = _mover(op, attrs, types, results)
    return None if run is None else lambda inputs, outs: run([a for a in inputs if a is not None], outs)


def _mover(op: Operator, attrs: Attrs, types: Types, results: Sequence[TensorType]) -> Run | None:
    first = types[0] if types else None
    if op.domain or first is None or any(t is not None and t.dtype not in _HELD for t in (*types, *results)):
        return None
    if op.name in _OTHERS:
        return _OTHERS[op.name](attrs, types, results)
    make = _MOVERS.get(op.name)
    return make(attrs, first, results[0]) if make is not None else None


def _transpose(attrs: Attrs, x: TensorType, out: TensorType) -> Run | None:
    order = permutation(x.rank, attrs)
    return lambda inputs, outs: np.copyto(outs[0], inputs[0].transpose(order))


def _slice(attrs: Attrs, x: TensorType, out: TensorType) -> Run | None:
    index = [slice(None)] * x.rank
    for axis, (start, count, step) in slice_ranges(x, attrs).items():
        stop = start + count * step
        index[axis] = slice(start, stop if stop >= 0 else None, step) if count else slice(0, 0)
    cut = tuple(index)
    return lambda inputs, outs: np.copyto(outs[0], inputs[0][cut])


def _split(attrs: Attrs, x: TensorType, out: TensorType) -> Run | None:
    axis = attrs.int("axis") % x.rank
    cuts, start = [], 0
    for size in attrs.ints("split"):
        cuts.append((*(slice(None),) * axis, slice(start, start + size)))
        start += size

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        for cut, part in zip(cuts, outs, strict=True):
            np.copyto(part, inputs[0][cut])

    return run


def _concat(attrs: Attrs, x: TensorType, out: TensorType) -> Run | None:
    axis = attrs.int("axis") % x.rank
    return lambda inputs, outs: np.concatenate(inputs, axis, out=outs[0])


def _expand(attrs: Attrs, x: TensorType, out: TensorType) -> Run | None:
    return lambda inputs, outs: np.copyto(outs[0], inputs[0])


def _tile(attrs: Attrs, x: TensorType, out: TensorType) -> Run | None:
    repeats = attrs.ints("repeats")
    split = [n for pair in zip(repeats, x.static_shape, strict=True) for n in pair]
    once = [n for size in x.static_shape for n in (1, size)]
    return lambda inputs, outs: np.copyto(outs[0].reshape(split), inputs[0].reshape(once))


def _pad(attrs: Attrs, x: TensorType, out: TensorType) -> Run | None:
    if attrs.str("mode") != "constant":
        return _pad_by_index(attrs, x)
    pads, sizes, wide = attrs.ints("pads"), x.static_shape, out.static_shape
    before = pads[: x.rank]
    source = tuple(slice(max(0, -b), max(0, min(n, w - b))) for b, n, w in zip(before, sizes, wide, strict=True))
    target = tuple(
        slice(max(0, b), max(0, b) + s.stop - s.start) for b, s in zip(before, source, strict=True)
    )  # fmt: skip
    value = np.asarray(attrs["value"]).astype(out.dtype.numpy)
    edges = list(_edges(target, wide))

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        for edge in edges:
            outs[0][edge] = value
        np.copyto(outs[0][target], inputs[0][source])

    return run


def _edges(target: Sequence[slice], wide: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """What lies around a part of a tensor, axis by axis."""
    for axis, (part, size) in enumerate(zip(target, wide, strict=True)):
        for start, stop in ((0, part.start), (part.stop, size)):
            if start < stop:
                yield (*target[:axis], slice(start, stop))


def _pad_by_index(attrs: Attrs, x: TensorType) -> Run | None:
    """Padding with elements of the tensor itself: which one goes where is known beforehand."""
    mode, pads = attrs.str("mode"), attrs.ints("pads")
    if mode not in ("reflect", "edge", "wrap") or min(pads) < 0 or 0 in x.static_shape:
        return None
    sides = list(zip(x.static_shape, pads[: x.rank], pads[x.rank :], strict=True))
    places = [np.pad(np.arange(n), (before, after), mode=mode) for n, before, after in sides]  # type: ignore[call-overload]  # a mode of NumPy's by now
    target = tuple(slice(before, before + n) for n, before, _ in sides)
    # each axis from what is there by then, all of the ones behind it
    copies = []
    for axis in reversed(range(x.rank)):
        n, before, after = sides[axis]
        for start, stop in ((0, before), (before + n, before + n + after)):
            if start < stop:
                edge = (*target[:axis], slice(start, stop))
                copies.append((edge, target[:axis], axis, places[axis][start:stop] + before))

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        out = outs[0]
        np.copyto(out[target], inputs[0])
        for edge, inside, axis, found in copies:
            out[edge] = out[inside].take(found, axis, mode="clip")

    return run


def _gather(attrs: Attrs, x: TensorType, out: TensorType) -> Run | None:
    axis, size = attrs.int("axis") % x.rank, x.static_shape[attrs.int("axis") % x.rank]

    def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        indices = inputs[1]
        if indices.size and not (-size <= int(indices.min()) and int(indices.max()) < size):
            raise BackendError(f"Gather: an index lies outside the {size} elements of axis {axis}")
        # in range, so that wrapping is what a negative index means; other modes copy twice
        inputs[0].take(indices.astype(np.intp, copy=False), axis, out=outs[0], mode="wrap")

    return run


_REDUCERS: dict[str, np.ufunc] = {
    "ReduceSum": np.add, "ReduceMean": np.add, "ReduceMax": np.maximum, "ReduceMin": np.minimum,
    "ReduceProd": np.multiply, "ReduceL2": np.add, "ReduceSumSquare": np.add, "ReduceL1": np.add,
}  # fmt: skip


def _reduce(name: str) -> Callable[[Attrs, TensorType, TensorType], Run | None]:
    def make(attrs: Attrs, x: TensorType, out: TensorType) -> Run | None:
        if x.dtype not in _REAL or 0 in x.static_shape:
            return None
        axes = reduced_axes(x, attrs, name)
        kept = tuple(1 if a in axes else n for a, n in enumerate(x.static_shape))
        factor = 1 / math.prod(x.static_shape[a] for a in axes)

        def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
            array, result = inputs[0], outs[0].reshape(kept)
            if name in ("ReduceL2", "ReduceSumSquare"):
                array = np.square(array)
            elif name == "ReduceL1":
                array = np.abs(array)
            _REDUCERS[name].reduce(array, axes, out=result, keepdims=True)
            if name == "ReduceMean":
                np.multiply(result, factor, out=result)
            elif name == "ReduceL2":
                np.sqrt(result, out=result)

        return run

    return make


def _matmul(attrs: Attrs, x: TensorType, out: TensorType) -> Run | None:
    if x.dtype not in _REAL or out.rank < 1:
        return None
    return lambda inputs, outs: np.matmul(inputs[0], inputs[1], out=outs[0])


_MOVERS: dict[str, Callable[[Attrs, TensorType, TensorType], Run | None]] = {
    "Transpose": _transpose,
    "Slice": _slice,
    "Split": _split,
    "Concat": _concat,
    "Expand": _expand,
    "Tile": _tile,
    "Pad": _pad,
    "Resize": resize,
    "Gather": _gather,
    "MatMul": _matmul,
    **{name: _reduce(name) for name in _REDUCERS},
}

_OTHERS = {**PICKERS, **RUNNERS, **REGIONS}

# ── anything else ────────────────────────────────────────────────────────────────────────────────────────────────


def evaluated(kernel: Kernel) -> Callable[[Sequence[Array]], tuple[Array, ...]]:
    """All steps of `kernel` by the operators' definitions: results from operands, plain arrays (or objects) both."""

    def run(operands: Sequence[Array]) -> tuple[Array, ...]:
        held: list[tuple[tuple[Array, ...], list[TensorType]]] = []
        for number, step in enumerate(kernel.steps):
            arrays: list[Array | None] = []
            types: list[TensorType | None] = []
            for reference in step.inputs:
                if reference is None:
                    arrays.append(None)
                    types.append(None)
                elif reference >= 0:
                    arrays.append(operands[reference])
                    types.append(kernel.operands[reference].type)
                else:
                    arrays.append(held[-1 - reference][0][0])
                    types.append(held[-1 - reference][1][0])
            last = number == len(kernel.steps) - 1
            outs = [r.type for r in kernel.results] if last else list(step.op.types_of(types, step.attrs))
            held.append((evaluate_operator(step.op, step.attrs, types, outs, arrays), outs))
        return held[-1][0][: len(kernel.results)]

    return run
