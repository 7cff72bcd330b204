"""Kernels drawn at random: shapes, layouts, attributes and steps behind, the same on every run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import numpy as np
from hosted import Trial
from trials import F16, F32, LAST, PLAIN, tensor, trial

from taso.backends.lowering import Operand
from taso.graph.errors import GraphError
from taso.graph.operator import operator_named

Draw = np.random.Generator
Steps = list[tuple[str, dict[str, object], tuple[int | None, ...]]]
SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 33)
MOST = 30_000
"""Elements of the largest tensor."""


def shape(draw: Draw, least: int = 1, most: int = 5) -> tuple[int, ...]:
    while True:
        dims = tuple(int(n) for n in draw.choice(SIZES, draw.integers(least, most + 1)))
        if np.prod(dims) <= MOST:
            return dims


def layout(draw: Draw, dims: tuple[int, ...]) -> str:
    return LAST if 3 <= len(dims) <= 5 and draw.random() < 0.4 else PLAIN


def part_of(draw: Draw, dims: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to `dims`."""
    kept = dims[draw.integers(0, len(dims) + 1) :]
    return tuple(n if draw.random() < 0.7 else 1 for n in kept)


def behind(draw: Draw, steps: Steps, operands: list[Operand]) -> None:
    """Adds up to three element-wise steps behind the first."""
    op = operator_named(steps[0][0])
    given = [operands[i].type if i is not None else None for i in steps[0][2]]
    dims = op.types_of(given, op.complete(steps[0][1]))[0].static_shape  # type: ignore[arg-type]  # values of attributes
    for _ in range(draw.integers(0, 4)):
        last = -len(steps)
        name = str(draw.choice(["Relu", "Sigmoid", "Add", "Mul", "Sub", "Max"]))
        if name in ("Relu", "Sigmoid"):
            steps.append((name, {}, (last,)))
            continue
        other = part_of(draw, dims)
        operands.append(
            tensor(other, operands[0].type.dtype, layout(draw, other) if len(other) == len(dims) else PLAIN)
        )
        inputs = (last, len(operands) - 1)
        steps.append((name, {}, inputs if draw.random() < 0.5 else inputs[::-1]))


def chain(draw: Draw) -> tuple[Steps, list[Operand], str]:
    dims, dtype = shape(draw), F16 if draw.random() < 0.3 else F32
    operands = [tensor(dims, dtype, layout(draw, dims)), tensor(part_of(draw, dims), dtype)]
    return [("Add", {}, (0, 1))], operands, layout(draw, dims)


def transpose(draw: Draw) -> tuple[Steps, list[Operand], str]:
    dims = shape(draw, 2)
    perm = tuple(int(a) for a in draw.permutation(len(dims)))
    return [("Transpose", {"perm": perm}, (0,))], [tensor(dims, F32, layout(draw, dims))], layout(draw, dims)


def cut(draw: Draw) -> tuple[Steps, list[Operand], str]:
    dims = shape(draw)
    steps = tuple(int(s) for s in draw.choice([1, 1, 2, 3, -1, -2], len(dims)))
    starts = tuple(int(draw.integers(-n, n)) for n in dims)
    ends = tuple(int(draw.choice([-100, -1, 1, n // 2, n, 100])) for n in dims)
    attrs: dict[str, object] = {"starts": starts, "ends": ends, "axes": tuple(range(len(dims))), "steps": steps}
    return [("Slice", attrs, (0,))], [tensor(dims, F32, layout(draw, dims))], layout(draw, dims)


def pad(draw: Draw) -> tuple[Steps, list[Operand], str]:
    dims, mode = shape(draw, 1, 4), str(draw.choice(["constant", "reflect", "edge", "wrap"]))
    # onnx.reference cuts nothing off, the operator's meaning does with zeros
    low = -1 if mode == "constant" else 0
    pads = tuple(int(p) for p in draw.integers(low, 4, 2 * len(dims)))
    attrs: dict[str, object] = {"pads": pads, "mode": mode, "value": 0}
    return [("Pad", attrs, (0,))], [tensor(dims, F32, layout(draw, dims))], layout(draw, dims)


def reduction(draw: Draw) -> tuple[Steps, list[Operand], str]:
    dims = shape(draw)
    name = str(draw.choice(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2", "ReduceLogSumExp"]))
    axes = tuple(a for a in range(len(dims)) if draw.random() < 0.5) or (len(dims) - 1,)
    keep = int(draw.integers(0, 2))
    given = layout(draw, dims)
    return [(name, {"axes": axes, "keepdims": keep}, (0,))], [tensor(dims, F32, given)], given if keep else PLAIN


def row(draw: Draw) -> tuple[Steps, list[Operand], str]:
    dims = shape(draw)
    name, axis = str(draw.choice(["Softmax", "LogSoftmax", "LpNormalization"])), int(draw.integers(0, len(dims)))
    return [(name, {"axis": axis}, (0,))], [tensor(dims, F32, layout(draw, dims))], layout(draw, dims)


def normalization(draw: Draw) -> tuple[Steps, list[Operand], str]:
    dims = shape(draw, 3)
    kind = draw.integers(0, 3)
    if kind == 0:
        axis = int(draw.integers(0, len(dims)))
        operands = [tensor(dims, F32, layout(draw, dims)), tensor(dims[axis:]), tensor(dims[axis:])]
        return [("LayerNormalization", {"axis": axis}, (0, 1, 2))], operands, layout(draw, dims)
    operands = [tensor(dims, F32, layout(draw, dims)), tensor(dims[1:2]), tensor(dims[1:2])]
    if kind == 1:
        return [("InstanceNormalization", {}, (0, 1, 2))], operands, layout(draw, dims)
    groups = int(draw.choice([g for g in range(1, dims[1] + 1) if dims[1] % g == 0]))
    return [("GroupNormalization", {"num_groups": groups}, (0, 1, 2))], operands, layout(draw, dims)


def pool(draw: Draw) -> tuple[Steps, list[Operand], str]:
    dims = shape(draw, 3)
    n = len(dims) - 2

    def numbers(high: int, low: int = 1, count: int = n) -> tuple[int, ...]:
        return tuple(int(x) for x in draw.integers(low, high + 1, count))

    attrs: dict[str, object] = {
        "kernel_shape": numbers(3), "strides": numbers(3), "dilations": numbers(2), "pads": numbers(1, 0, 2 * n),
        "ceil_mode": int(draw.integers(0, 2)),
    }  # fmt: skip
    name = str(draw.choice(["MaxPool", "AveragePool", "LpPool"]))
    if name == "AveragePool" and not attrs["ceil_mode"]:
        attrs["count_include_pad"] = int(draw.integers(0, 2))
    return [(name, attrs, (0,))], [tensor(dims, F32, layout(draw, dims))], layout(draw, dims)


def repeated(draw: Draw) -> tuple[Steps, list[Operand], str]:
    dims = shape(draw, 1, 4)
    repeats = tuple(int(r) for r in draw.integers(1, 4, len(dims)))
    return [("Tile", {"repeats": repeats}, (0,))], [tensor(dims, F16, layout(draw, dims))], layout(draw, dims)


KINDS: tuple[Callable[[Draw], tuple[Steps, list[Operand], str]], ...] = (
    chain, chain, transpose, cut, pad, reduction, row, normalization, pool, repeated,
)  # fmt: skip


def drawn() -> Iterable[Trial]:
    count = 1500 if os.environ.get("TASO_NIGHTLY") else 150
    for seed in range(count):
        draw = np.random.default_rng([7, seed])
        steps, operands, out = KINDS[seed % len(KINDS)](draw)
        try:
            behind(draw, steps, operands)
            made = trial(f"drawn {seed} {steps[0][0]}", steps, operands, layout=out, tolerance=1e-4)
        except GraphError:
            # a window that does not fit, or the like
            continue
        if operands[0].type.dtype is F16:
            made.tolerance = 3e-3
        if made.kernel.results[0].type.rank not in (3, 4, 5) and out == LAST:
            continue
        yield made
