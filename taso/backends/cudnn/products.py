"""Convolutions and matrix products as cuDNN operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from taso.backends.cudnn.description import Attribute
from taso.backends.cudnn.frames import Frame, Unmapped, spatial
from taso.backends.cudnn.sketch import Sketch
from taso.backends.lowering import LAST, PLAIN, Step
from taso.backends.places import row_major_strides, strides_of
from taso.graph.ops.linear import conv_settings


@dataclass(frozen=True)
class Stem:
    """What an anchor makes: its uid and the frame of all that follows.

    `bias` is still to be added to it. `strides` are those of the result where the frame does not say them.
    """

    uid: int
    frame: Frame
    bias: int | None = None
    strides: tuple[int, ...] | None = None


def result_strides(s: Sketch, frame: Frame) -> tuple[int, ...]:
    """Strides of the kernel's result in the graph."""
    return frame.placed(s.out_dims, strides_of(s.out_dims, s.out.layout))[1]


# ── convolutions ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Window:
    """Attributes of a convolution for at least two axes."""

    begin: tuple[int, ...]
    end: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    @staticmethod
    def of(s: Sketch, step: Step) -> _Window:
        w = s.given(step, 1).type
        full, n = conv_settings(w, step.attrs), w.rank - 2
        pads = full.ints("pads")
        if any(p < 0 for p in pads):
            raise Unmapped("negative pads")
        lifted, ones = ((0,), (1,)) if n == 1 else ((), ())
        return _Window(lifted + pads[:n], lifted + pads[n:], ones + full.ints("strides"), ones + full.ints("dilations"))

    @property
    def attributes(self) -> dict[str, Attribute]:
        return {
            "pre_padding": self.begin, "post_padding": self.end, "stride": self.stride, "dilation": self.dilation,
        }  # fmt: skip


def convolution(s: Sketch, step: Step, followers: Sequence[Step]) -> Stem:
    """Conv as conv_fprop, whose groups follow from the channels of data and weights."""
    window, frame = _Window.of(s, step), spatial(s.out_dims)
    y = s.apply(
        "conv_fprop", {"image": _image(s, step), "weight": _filter(s, step)}, "Y", frame.shape,
        result_strides(s, frame), window.attributes,
    )  # fmt: skip
    return Stem(y, frame, _bias(s, step, frame))


def transposed(s: Sketch, step: Step, followers: Sequence[Step]) -> Stem:
    """ConvTranspose as the gradient by the data of the convolution that goes the other way."""
    window, frame = _Window.of(s, step), spatial(s.out_dims)
    y_dims, x_dims = frame.shape, spatial(s.dims(step, 0)).shape
    kernel = _lifted(s.dims(step, 1))
    for a in range(2, len(y_dims)):
        i = a - 2
        reach = (kernel[a] - 1) * window.dilation[i] + 1
        if (y_dims[a] + window.begin[i] + window.end[i] - reach) // window.stride[i] + 1 != x_dims[a]:
            raise Unmapped("a transposed convolution that no convolution is the other way of")
    y = s.apply(
        "conv_dgrad", {"loss": _image(s, step), "filter": _filter(s, step)}, "DX", y_dims, result_strides(s, frame),
        window.attributes,
    )  # fmt: skip
    return Stem(y, frame, _bias(s, step, frame))


def _lifted(dims: Sequence[int]) -> tuple[int, ...]:
    return spatial(dims).shape


def _image(s: Sketch, step: Step) -> int:
    index, x = s.index(step, 0), s.given(step, 0)
    dims, strides = spatial(x.type.static_shape).placed(x.type.static_shape, strides_of(x.type.static_shape, x.layout))
    return s.rounded(s.constant(index, dims, strides) if x.constant else s.data(index, dims, strides))


def _filter(s: Sketch, step: Step) -> int:
    """The weights, channels innermost where they are so in the data and the weights can be laid out for it."""
    index, w = s.index(step, 1), s.given(step, 1)
    dims = _lifted(w.type.static_shape)
    if w.constant:
        layout = LAST if s.given(step, 0).layout == LAST else PLAIN
        return s.constant(index, dims, strides_of(dims, layout), s.narrow)
    if w.layout != PLAIN:
        raise Unmapped("weights that do not lie plainly")
    return s.rounded(s.data(index, dims, row_major_strides(dims)))


def _bias(s: Sketch, step: Step, frame: Frame) -> int | None:
    return s.vector(s.index(step, 2), len(frame.groups)) if s.has(step, 2) else None


# ── matrix products ──────────────────────────────────────────────────────────────────────────────────────────────


def matmul(s: Sketch, step: Step, followers: Sequence[Step]) -> Stem:
    """MatMul, its batches taken as one axis or its rows as one batch where all operands of the kernel allow it."""
    a, b = s.dims(step, 0), s.dims(step, 1)
    left = a if len(a) > 1 else (1, *a)
    right = b if len(b) > 1 else (*b, 1)
    rank = max(len(left), len(right))
    left, right = ((1,) * (rank - len(d)) + d for d in (left, right))
    rows, columns = len(a) > 1, len(b) > 1
    for batch, flat in _batches(left[:-2], right[:-2]):
        frame = Frame(s.out_dims, _with_matrix(batch, flat, rank - 2, rows, columns))
        factors = _factors(s, step, left, right, batch, flat) if fits(s, frame, followers) else None
        if factors is not None:
            first, second = (_matrix(s, step, position, *placed) for position, placed in enumerate(factors))
            return Stem(s.apply("matmul", {"A": first, "B": second}, "C", frame.shape, result_strides(s, frame)), frame)
    raise Unmapped("a batch of products whose operands broadcast in different ways")


_Groups = tuple[tuple[int, ...], ...]


def _batches(left: Sequence[int], right: Sequence[int]) -> list[tuple[_Groups, bool]]:
    """Ways to take batch axes together, best first; with True all of them go to the rows."""
    axes = range(len(left))
    found: list[tuple[_Groups, bool]] = []
    if math.prod(right) == 1:
        found.append(((tuple(axes),), True))
    merged: list[list[int]] = []
    for a in axes:
        same = bool(merged) and all(_spread(left, right, a) == _spread(left, right, other) for other in merged[-1])
        if same:
            merged[-1].append(a)
        else:
            merged.append([a])
    together = tuple(map(tuple, merged)) or ((),)
    found.append((together, False))
    single = tuple((a,) for a in axes) or ((),)
    return found if single == together else [*found, (single, False)]


def _spread(left: Sequence[int], right: Sequence[int], axis: int) -> tuple[bool, bool]:
    """Which of two operands are repeated along an axis."""
    size = max(left[axis], right[axis])
    return left[axis] != size, right[axis] != size


def _with_matrix(batch: _Groups, flat: bool, axes: int, rows: bool, columns: bool) -> _Groups:
    """Groups of the result's axes: those of the batch, then rows and columns where it has them."""
    row = (axes,) if rows else ()
    column = (axes + rows,) if columns else ()
    return ((), (*batch[0], *row), column) if flat else (*batch, row, column)


_Placed = tuple[tuple[int, ...], tuple[int, ...]]


def _factors(
    s: Sketch, step: Step, left: Sequence[int], right: Sequence[int], batch: _Groups, flat: bool
) -> tuple[_Placed, _Placed] | None:
    """Dimensions and strides of the factors with batch axes taken together; None where they do not lie as one."""
    axes = len(left) - 2
    shared = tuple(max(x, y) for x, y in zip(left[:-2], right[:-2], strict=True))
    plain: _Groups = (*batch, (axes,), (axes + 1,))
    a_groups: _Groups = ((), (*batch[0], axes), (axes + 1,)) if flat else plain
    b_groups: _Groups = ((*batch[0],), (axes,), (axes + 1,)) if flat else plain
    try:
        return (
            _placed(s, step, 0, left, Frame((*shared, *left[-2:]), a_groups)),
            _placed(s, step, 1, right, Frame((*(right[:-2] if flat else shared), *right[-2:]), b_groups)),
        )
    except Unmapped:
        return None


def _placed(s: Sketch, step: Step, position: int, dims: Sequence[int], frame: Frame) -> _Placed:
    """A factor in a frame; its dimensions, with a row or a column added to a vector and ones in front, are `dims`."""
    operand = s.given(step, position)
    own = strides_of(operand.type.static_shape, operand.layout)
    if operand.type.rank == 1:
        own = (dims[-1], 1) if position == 0 else (1, 1)
    return frame.placed(dims[len(dims) - len(own) :], own)


def _matrix(s: Sketch, step: Step, position: int, size: tuple[int, ...], strides: tuple[int, ...]) -> int:
    index = s.index(step, position)
    if s.kernel.operands[index].constant:
        return s.constant(index, size, None, s.narrow)
    return s.rounded(s.data(index, size, strides))


def gemm(s: Sketch, step: Step, followers: Sequence[Step]) -> Stem:
    """alpha · A · B + beta · C, transposed factors by their strides."""
    frame = Frame(s.out_dims, ((), (0,), (1,)))
    a, b = (_transposable(s, step, i, step.attrs.int(name)) for i, name in enumerate(("transA", "transB")))
    y = s.apply("matmul", {"A": a, "B": b}, "C", frame.shape, result_strides(s, frame))
    alpha, beta = step.attrs.float("alpha"), step.attrs.float("beta")
    if alpha != 1:
        y = s.pointwise("mul", y, s.scalar(alpha, 3))
    if not s.has(step, 2) or beta == 0:
        return Stem(y, frame)
    c = s.operand(s.index(step, 2), frame)
    return Stem(y, frame, c if beta == 1 else s.pointwise("mul", c, s.scalar(beta, 3)))


def _transposable(s: Sketch, step: Step, position: int, turned: int) -> int:
    index, operand = s.index(step, position), s.given(step, position)
    rows, columns = operand.type.static_shape
    dims = (1, columns, rows) if turned else (1, rows, columns)
    if operand.constant and s.narrow is not None:
        return s.constant(index, dims, None, s.narrow, (1, 0) if turned else (0, 1))
    strides = (rows * columns, 1, columns) if turned else (rows * columns, columns, 1)
    return s.rounded(s.data(index, dims, strides))


def fits(s: Sketch, frame: Frame, followers: Sequence[Step]) -> bool:
    """Whether the result and all operands of the steps behind it can be seen in a frame."""
    indices = {i for step in followers for i in step.inputs if i is not None and i >= 0}
    try:
        for operand in (s.out, *(s.kernel.operands[i] for i in indices)):
            dims = operand.type.static_shape
            frame.placed(dims, strides_of(dims, operand.layout))
    except Unmapped:
        return False
    return True
