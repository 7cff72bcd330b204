"""The operators that graphs are enumerated from, each with settings of its own.

A template says of small concrete tensors what the operator makes of them (shape and value), and of a rule how it is
written down: as an operator of TASO's format, or as one of those that `statement` adds to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from taso.rules.generator import arithmetic
from taso.rules.generator.arithmetic import PRIME, Values
from taso.rules.taso_files import NUMBERS

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Template:
    """An operator with its settings.

    `shape` gives the shape that comes out of input shapes, or None where the operator does not take them; `value` takes
    and gives tensors with a leading axis that counts them, one array for each of the `outputs`. `number` and
    `settings` write it down (`taso_files.PublishedOperator`).
    """

    name: str
    arity: int
    shape: Callable[..., Shape | None]
    value: Callable[..., tuple[Values, ...]]
    number: int
    settings: Mapping[int, int] = field(default_factory=dict, hash=False)
    commutative: bool = False
    outputs: int = 1
    undone: Callable[..., tuple[Values, ...]] | None = None
    """Of an operator that undoes another one, what it would be without: an equation that holds with that as well does
    not rest on x − x = 0 or x / x = 1, which are true of numbers and not of floating point."""


IMAGE, CHANNELS, SIDE = (3, 4), 2, 3
"""Height and width of images, channels, and the side of matrices: small, and told apart where they can be."""

# parameters of the published format
_OUTPUTS, _KERNEL, _STRIDE, _PAD, _ACTIVATION, RANK, AXIS, _PERM = 2, (4, 5), (6, 7), 8, 9, 10, 11, 12


def first(of: Callable[..., Values], *operands: Values) -> tuple[Values, ...]:
    return (of(*operands),)


def reduced(of: Callable[..., Values], *operands: Values) -> tuple[Values, ...]:
    return (of(*operands) % PRIME,)


def same(*shapes: Shape) -> Shape | None:
    return shapes[0] if all(s == shapes[0] for s in shapes) else None


def _elementwise(name: str, number: int, of: Callable[[Values, Values], Values], commutative: bool = True) -> Template:
    return Template(name, 2, same, partial(reduced, of), number, {}, commutative)


def _with_axes(shape: Shape) -> Shape | None:
    return shape if shape else None


def as_function(name: str, number: int) -> Template:
    """A function of one number, taken as any function."""
    return Template(name, 1, _with_axes, partial(first, partial(arithmetic.random_function, number)), number)


def _scaled(data: Shape, scalar: Shape) -> Shape | None:
    return data if data and not scalar else None


def _scale(a: Values, s: Values) -> Values:
    return np.asarray(a * s.reshape(-1, *[1] * (a.ndim - 1)))


def multiplied(rank: int, a: Shape, b: Shape) -> Shape | None:
    fits = len(a) == len(b) == rank and a[-1] == b[-2] and a[:-2] == b[:-2]
    return (*a[:-1], b[-1]) if fits else None


def _transposed(shape: Shape) -> Shape | None:
    return shape[::-1] if len(shape) == 2 else None


def _transpose(a: Values) -> Values:
    return np.swapaxes(a, 1, 2)


def _joined(rank: int, axis: int, most: int, a: Shape, b: Shape) -> Shape | None:
    fits = len(a) == len(b) == rank and a[:axis] == b[:axis] and a[axis + 1 :] == b[axis + 1 :]
    if not fits or a[axis] + b[axis] > most:
        return None
    return (*a[:axis], a[axis] + b[axis], *a[axis + 1 :])


def _join(axis: int, a: Values, b: Values) -> Values:
    return np.concatenate((a, b), axis + 1)


def _concat(rank: int, axis: int, most: int) -> Template:
    """Of up to `most` elements along its axis: more are of no use to small graphs."""
    shape, value = partial(_joined, rank, axis, most), partial(first, partial(_join, axis))
    return Template(f"concat{rank}.{axis}", 2, shape, value, NUMBERS["Concat"], {RANK: rank, AXIS: axis})


def _halved(axis: int, a: Shape) -> Shape | None:
    """Cut in the middle, where two blocks of variables meet."""
    if len(a) <= max(axis, 1):
        return None
    unit = SIDE if len(a) == 2 else 1 if axis == 0 and a[2:] == IMAGE else CHANNELS
    return (*a[:axis], a[axis] // 2, *a[axis + 1 :]) if a[axis] % (2 * unit) == 0 else None


def _halves(axis: int, a: Values) -> tuple[Values, ...]:
    first, second = np.split(a, 2, axis + 1)
    return first, second


def _split(axis: int) -> Template:
    shape, value = partial(_halved, axis), partial(_halves, axis)
    return Template(f"split.{axis}", 1, shape, value, NUMBERS["Split"], {_OUTPUTS: 2, AXIS: axis}, outputs=2)


def _windowed(kernel: tuple[int, int]) -> dict[int, int]:
    return {
        **dict(zip(_KERNEL, kernel, strict=True)), **dict.fromkeys(_STRIDE, 1), _PAD: 0, _ACTIVATION: 0,
    }  # fmt: skip


def _convolved(kernel: tuple[int, int], x: Shape, w: Shape) -> Shape | None:
    """With one group, or one for each channel: others hold for some numbers of channels only."""
    if len(x) != 4 or len(w) != 4 or w[2:] != kernel or not (x[1] == w[1] or (w[1] == 1 and w[0] == x[1])):
        return None
    return (x[0], w[0], *x[2:])


def _activated(x: Values, w: Values) -> Values:
    return arithmetic.random_function(NUMBERS["Relu"], arithmetic.convolution(x, w))


def _convolution(kernel: tuple[int, int], relu: bool = False) -> Template:
    name = f"conv{kernel[0]}{kernel[1]}" + (".relu" if relu else "")
    value = partial(first, _activated if relu else arithmetic.convolution)
    settings = _windowed(kernel) | ({_ACTIVATION: 2} if relu else {})
    return Template(name, 2, partial(_convolved, kernel), value, NUMBERS["Conv"], settings)


def _pooled(x: Shape) -> Shape | None:
    return x if len(x) == 4 and min(x[2:]) >= 3 else None


def _pool(name: str, of: Callable[[tuple[int, int], Values], Values]) -> Template:
    """With a window of 3×3."""
    return Template(name, 1, _pooled, partial(first, partial(of, (3, 3))), NUMBERS[name], _windowed((3, 3)))


def _enlarged(w: Shape) -> Shape | None:
    return (*w[:2], 3, 3) if len(w) == 4 and w[2:] == (1, 3) else None


def _fixed(shape: Shape) -> Shape:
    return shape


def _held(value: Values) -> tuple[Values, ...]:
    return (value[None],)


def _constant(name: str, label: str, value: Values, settings: Mapping[int, int]) -> Template:
    return Template(label, 0, partial(_fixed, value.shape), partial(_held, value), NUMBERS[name], settings)


def _identity_kernel(channels: int) -> Values:
    kernel = np.zeros((channels, channels, 3, 3), np.int64)
    kernel[range(channels), range(channels), 1, 1] = 1
    return kernel


# ── TASO's own ───────────────────────────────────────────────────────────────────────────────────────────────────

RELU = as_function("relu", NUMBERS["Relu"])
ADD = _elementwise("add", NUMBERS["Add"], np.add)
MUL = _elementwise("mul", NUMBERS["Mul"], np.multiply)
SCALE = Template("scale", 2, _scaled, partial(reduced, _scale), 19)
MATMUL = Template(
    "matmul", 2, partial(multiplied, 2), partial(first, arithmetic.matmul), NUMBERS["MatMul"], {_ACTIVATION: 0}
)
TRANSPOSE = Template(
    "transpose", 1, _transposed, partial(first, _transpose), NUMBERS["Transpose"], {RANK: 2, _PERM: 2}
)
CONCATS = tuple(_concat(rank, axis, 4 * unit) for rank, unit in ((2, SIDE), (4, CHANNELS)) for axis in (0, 1))
SPLITS = tuple(_split(axis) for axis in (0, 1))
CONVOLUTIONS = tuple(_convolution(k, relu) for k in ((3, 3), (1, 3)) for relu in (False, True))
POOLS = (_pool("MaxPool", arithmetic.max_pool), _pool("AveragePool", arithmetic.average_pool))
ENLARGE = Template(
    "enlarge", 1, _enlarged, partial(first, partial(arithmetic.enlarge, (3, 3))), NUMBERS["Enlarge"], {4: 3, 5: 3}
)
IDENTITY_MATRIX = _constant("IdentityMatrix", "identity", np.eye(SIDE, dtype=np.int64), {})
IDENTITY_KERNEL = _constant("IdentityKernel", "identity-kernel", _identity_kernel(CHANNELS), {4: 3, 5: 3})
ONES = _constant("Ones", "ones", np.ones((SIDE, SIDE), np.int64), {})
ONES_IMAGE = _constant("Ones", "ones-image", np.ones((1, CHANNELS, *IMAGE), np.int64), {})
AVERAGING_KERNEL = _constant(
    "AveragingKernel", "averaging-kernel", np.full((CHANNELS, 1, 3, 3), pow(9, -1, PRIME), np.int64), {4: 3, 5: 3}
)
