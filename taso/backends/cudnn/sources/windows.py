"""Pools, sliding normalisation, resizing: each element of the result is made of few elements around a place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from taso.backends.cudnn.sources.fetches import Made, filled, lanes
from taso.backends.cudnn.sources.launches import Sourced
from taso.backends.cudnn.sources.nests import Access, Nest, Parameters, operand_strides
from taso.backends.cudnn.sources.reductions import lowest
from taso.backends.cudnn.sources.results import Loops, made_of, operand_access
from taso.backends.cudnn.sources.scalars import INTEGER, REAL, computed, literal, stored
from taso.backends.lowering import Kernel
from taso.backends.resizing import Taps, axis_taps
from taso.graph.ops.pooling import pool_settings


@dataclass(frozen=True)
class _Sums:
    """What is made of elements that are seen one after the other: `join` of `total` and `x`, then `value`.

    `counted` says that the number of elements inside the data, `count`, is of use.
    """

    start: str
    join: str
    value: str
    counted: bool = False


@dataclass(frozen=True)
class _Axis:
    """One axis of a window: the loop of the result, sizes, and what its places are multiplied by in the data."""

    loop: int
    size: int
    taps: int
    stride: int
    dilation: int
    pad: int
    step: int
    outside: bool

    def place(self, nest: Nest, number: int, lane: bool) -> str:
        own = nest.at(self.loop, lane)
        return f"const I at{number} = {own} * {self.stride} + k{number} * {self.dilation} - {self.pad};"

    def begin(self, number: int) -> list[str]:
        return [f"for (int k{number} = 0; k{number} < {self.taps}; ++k{number}) {{"]

    def test(self, number: int) -> list[str]:
        return [f"if (at{number} < 0 || at{number} >= {self.size}) continue;"] if self.outside else []


def _windows(nest: Nest, pointer: str, data: Access, axes: Sequence[_Axis], sums: _Sums, t: str, array: str,
             width: int) -> list[str]:  # fmt: skip
    """Text that fills `array` with what the sums make of the elements in each window.

    Where windows move along the innermost loop there is one lane; else all lanes have the same window.
    """
    moved = "".join(f" + at{n} * {axis.step}" for n, axis in enumerate(axes))
    wide = width if all(axis.step % width == 0 for axis in axes) else 1 << 30
    lines = [f"{t} total[V];", f"repeated<V>({sums.start}, total);", *(["int count = 0;"] if sums.counted else [])]
    for n, axis in enumerate(axes):
        lines += [*axis.begin(n), axis.place(nest, n, False), *axis.test(n)]
    lines += [
        f"{stored(data.dtype)} seen[V];", filled(nest, data, pointer, wide, "seen", moved),
        *(["++count;"] if sums.counted else []),
        "UNROLL for (int k = 0; k < V; ++k) {", f"    const {t} x = widen(seen[k]);",
        f"    total[k] = {sums.join.format(total='total[k]')};", "}", *("}" for _ in axes),
        f"UNROLL for (int k = 0; k < V; ++k) {{ const {t} sum = total[k]; {array}[k] = {sums.value}; }}",
    ]  # fmt: skip
    return ["{", *lines, "}"]


def pool(kernel: Kernel) -> Sourced | None:
    """MaxPool, AveragePool, LpPool with any pads, strides, dilations and sizes rounded up."""
    step = kernel.steps[0]
    index = step.inputs[0]
    if index is None or index < 0 or len(kernel.results) > 1:
        return None
    operand = kernel.operands[index]
    allowed = REAL | INTEGER if step.op.name == "MaxPool" else REAL
    if operand.type.dtype not in allowed:
        return None
    loops, strides = Loops.of(kernel.results[0]), operand_strides(operand)
    axes = _pool_axes(kernel, loops, strides)
    data = operand_access(kernel, index, loops.strides((*strides[:2], *(0,) * len(axes))))
    t = computed(operand.type.dtype)
    sums = _pool_sums(kernel, t)

    def write(nest: Nest, parameters: Parameters, width: int, array: str) -> list[str]:
        return _windows(nest, parameters.name(data.place, data.dtype), data, axes, sums, t, array, width)

    pinned = frozenset(axis.loop for axis in axes)
    head = Made(operand.type.dtype, (data,), pinned, write, computed=True, together=True)
    return made_of(step.op.name, kernel, head, loops)


def _pool_axes(kernel: Kernel, loops: Loops, strides: Sequence[int]) -> list[_Axis]:
    step, index = kernel.steps[0], kernel.steps[0].inputs[0]
    dims, out = kernel.operands[index or 0].type.static_shape[2:], kernel.results[0].type.static_shape[2:]
    full = pool_settings(step.attrs)
    taps, steps, pads, gaps = (full.ints(n) for n in ("kernel_shape", "strides", "pads", "dilations"))
    found = []
    for a, size in enumerate(dims):
        last = (out[a] - 1) * steps[a] + (taps[a] - 1) * gaps[a] - pads[a]
        outside = pads[a] > 0 or last >= size
        found.append(_Axis(loops.number(2 + a), size, taps[a], steps[a], gaps[a], pads[a], strides[2 + a], outside))
    return found


def _pool_sums(kernel: Kernel, t: str) -> _Sums:
    step = kernel.steps[0]
    if step.op.name == "MaxPool":
        return _Sums(lowest(t), "most({total}, x)", "sum")
    if step.op.name == "AveragePool":
        if step.attrs.int("count_include_pad"):
            taps = 1
            for n in step.attrs.ints("kernel_shape"):
                taps *= n
            return _Sums(f"({t})0", "add({total}, x)", f"sum / ({t}){taps}")
        return _Sums(f"({t})0", "add({total}, x)", f"sum / ({t})count", counted=True)
    p = step.attrs.int("p")
    power = {1: "size_of(x)", 2: "mul(x, x)"}.get(p, f"power(size_of(x), ({t}){p})")
    root = {1: "sum", 2: "sqrt_of(sum)"}.get(p, f"power(sum, {literal(1 / p, t)})")
    return _Sums(f"({t})0", f"add({{total}}, {power})", root)


def lrn(kernel: Kernel) -> Sourced | None:
    """x / (bias + alpha / size · Σ x²)^beta, the sum over `size` neighbouring channels (ONNX LRN 1 and 13)."""
    step, index = kernel.steps[0], kernel.steps[0].inputs[0]
    if index is None or index < 0 or kernel.operands[index].type.dtype not in REAL:
        return None
    operand, loops = kernel.operands[index], Loops.of(kernel.results[0])
    dims, strides, size = operand.type.static_shape, operand_strides(operand), step.attrs.int("size")
    t, channel = computed(operand.type.dtype), loops.number(1)
    around = operand_access(kernel, index, loops.strides([0 if a == 1 else s for a, s in enumerate(strides)]))
    own = operand_access(kernel, index, loops.strides(strides))
    axis = _Axis(channel, dims[1], size, 1, 1, (size - 1) // 2, strides[1], True)
    alpha, bias = literal(step.attrs.float("alpha") / size, t), literal(step.attrs.float("bias"), t)
    value = f"power({bias} + {alpha} * sum, {literal(step.attrs.float('beta'), t)})"
    sums = _Sums(f"({t})0", "add({total}, mul(x, x))", value)

    def write(nest: Nest, parameters: Parameters, width: int, array: str) -> list[str]:
        pointer = parameters.name(around.place, around.dtype)
        lines = _windows(nest, pointer, around, [axis], sums, t, array, width)
        read = f"{pointer}[{nest.offset(own, lanes=True)}]"
        return [*lines, *lanes(nest, [f"{array}[k] = widen({read}) / {array}[k];"])]

    head = Made(operand.type.dtype, (around, own), frozenset({channel}), write, computed=True, together=True)
    return made_of("LRN", kernel, head, loops)


# ── Resize ───────────────────────────────────────────────────────────────────────────────────────────────────────

_MOST_ENTRIES = 1 << 15
"""Entries of a table of places and weights, which is part of the text."""


def resize(kernel: Kernel) -> Sourced | None:
    """Resize 10 to 19: each axis is a sum of few elements, whose places and weights are tables in the text."""
    step, index = kernel.steps[0], kernel.steps[0].inputs[0]
    if index is None or index < 0 or any(r is not None for r in step.inputs[1:]):
        return None
    operand, result = kernel.operands[index], kernel.results[0]
    taps = axis_taps(step.attrs, operand.type, result.type)
    if taps is None or sum(len(t.places) * len(t.places[0]) for t in taps) > _MOST_ENTRIES:
        return None
    weighted = any(t.weights is not None for t in taps)
    if weighted and operand.type.dtype not in REAL:
        return None
    loops, strides, dtype = Loops.of(result), operand_strides(operand), operand.type.dtype
    t = computed(dtype)
    moved = {x.axis for x in taps}
    data = operand_access(kernel, index, loops.strides([0 if a in moved else s for a, s in enumerate(strides)]))
    tables = "\n".join(_table(n, x, t) for n, x in enumerate(taps))

    def write(nest: Nest, parameters: Parameters, width: int, array: str) -> list[str]:
        at = [nest.at(loops.number(x.axis)) for x in taps]
        pointer = parameters.name(data.place, data.dtype)
        where = "".join(
            f" + (I)places{n}[{own} * {len(x.places)} + k{n}] * {strides[x.axis]}"
            for n, (own, x) in enumerate(zip(at, taps, strict=True))
        )
        wide = width if all(strides[x.axis] % width == 0 for x in taps) else 1 << 30
        if not weighted:
            first = [f"const int k{n} = 0;" for n in range(len(taps))]
            return ["{", *first, filled(nest, data, pointer, wide, array, where), "}"]
        weights = " * ".join(
            f"weights{n}[{own} * {len(x.places)} + k{n}]"
            for n, (own, x) in enumerate(zip(at, taps, strict=True)) if x.weights is not None
        )  # fmt: skip
        loop = [f"for (int k{n} = 0; k{n} < {len(x.places)}; ++k{n})" for n, x in enumerate(taps)]
        return [
            f"repeated<V>(({t})0, {array});", *loop, "{", f"    const {t} weight = {weights};",
            f"    {stored(dtype)} seen[V];", "    " + filled(nest, data, pointer, wide, "seen", where),
            f"    UNROLL for (int k = 0; k < V; ++k) {array}[k] += weight * widen(seen[k]);", "}",
        ]  # fmt: skip

    numbers = frozenset(loops.number(x.axis) for x in taps)
    head = Made(dtype, (data,), numbers, write, computed=weighted, together=True)
    return made_of("resize", kernel, head, loops, tables)


def _table(number: int, taps: Taps, t: str) -> str:
    count, length = len(taps.places), len(taps.places[0])
    places = [str(int(taps.places[k][i])) for i in range(length) for k in range(count)]
    text = f"static __device__ const int places{number}[{length * count}] = {{{', '.join(places)}}};"
    if taps.weights is None:
        return text
    weights = [literal(float(taps.weights[k][i]), t) for i in range(length) for k in range(count)]
    return f"{text}\nstatic __device__ const {t} weights{number}[{length * count}] = {{{', '.join(weights)}}};"


WINDOWS: dict[str, Callable[[Kernel], Sourced | None]] = {
    "MaxPool": pool, "AveragePool": pool, "LpPool": pool, "LRN": lrn, "Resize": resize,
}  # fmt: skip

__all__ = ["WINDOWS"]
