"""Functions of one element on vectors in registers, exact to a few units in the last place of what they are near 1.

exp is 2 to the power of a whole number times a polynomial of the rest; its coefficients are computed here, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from taso.backends.x86.assembler import Assembler, Pooled
from taso.graph.errors import BackendError

_TEMPORARIES, _MOST_TEMPORARIES = 3, {"gelu_erf": 4}
"""Registers that functions overwrite beside the one with argument and result, and which functions overwrite more."""

_DEGREE = 6
_LARGEST_EXPONENT = 126.0
_ERF_SLOPE = 0.3275911
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
"""Abramowitz and Stegun 1964, formula 7.1.26: erf with an error of at most 1.5e-7."""
_FAR = 100.0
_LARGEST = 1e38
"""Parameters from here on are left to others: what is made of them may be more than float32 holds."""


@dataclass(frozen=True)
class Function:
    """A function by oneDNN's name for it (the element-wise algorithms of its guide) and its parameters."""

    name: str
    alpha: float = 0.0
    beta: float = 0.0


def knows(function: Function) -> bool:
    """Whether there is code for a function, whose parameters float32 can hold."""
    parameters = (p for p in (function.alpha, function.beta) if not math.isinf(p))
    return function.name in _WRITERS and all(abs(p) < _LARGEST for p in parameters)


def temporaries_of(function: Function) -> int:
    """How many registers a function overwrites beside the one with its argument and result."""
    return _MOST_TEMPORARIES.get(function.name, _TEMPORARIES)


def write(asm: Assembler, function: Function, x: int, temporaries: Sequence[int]) -> None:
    """Code that replaces the elements in register `x` by the function's values."""
    writer = _WRITERS.get(function.name)
    if writer is None or len(temporaries) < temporaries_of(function):
        raise BackendError(f"there is no machine code for the function {function.name}")
    writer(asm, function, x, temporaries)


@lru_cache(maxsize=1)
def _power_of_two() -> tuple[float, ...]:
    """Coefficients of a polynomial that is 2^f for |f| ≤ ½, the constant one first.

    It meets 2^f at the zeros of a Chebyshev polynomial, so that it is nearly the best one.
    """
    nodes = np.cos((2 * np.arange(_DEGREE + 1) + 1) * np.pi / (2 * _DEGREE + 2)) / 2
    return tuple(float(c) for c in np.polynomial.polynomial.polyfit(nodes, np.exp2(nodes), _DEGREE))


def _exp(asm: Assembler, power: int, temporaries: Sequence[int]) -> None:
    """2 to the `power`, in place; powers above 126 count as 126, what is no number stays so."""
    whole, limit = temporaries[:2]
    coefficients = _power_of_two()
    # of two operands, the second where one is no number
    for name, bound in (("min", _LARGEST_EXPONENT), ("max", asm.least_power)):
        if math.isfinite(bound):
            asm.broadcast(limit, Pooled(bound))
            asm.vector(name, power, limit, power)
    asm.round(whole, power)
    asm.vector("sub", power, power, whole)
    asm.broadcast(limit, Pooled(coefficients[-1]))
    for c in reversed(coefficients[:-1]):
        asm.vector("fma213", limit, power, Pooled(c))
    asm.times_power(power, limit, whole)


def _logistic_into(asm: Assembler, target: int, x: int, slope: float, temporaries: Sequence[int]) -> None:
    """1 / (1 + exp(−slope · x)) in `target`, one of four temporaries."""
    work, *rest = [t for t in temporaries if t != target]
    asm.vector("mul", work, x, Pooled(-slope * math.log2(math.e)))
    _exp(asm, work, (target, rest[0]))
    asm.vector("add", work, work, Pooled(1.0))
    asm.inverse(target, work, rest[0])


def _logistic(asm: Assembler, f: Function, x: int, temporaries: Sequence[int]) -> None:
    _logistic_into(asm, temporaries[0], x, 1.0, temporaries)
    asm.move(x, temporaries[0])


def _swish(asm: Assembler, f: Function, x: int, temporaries: Sequence[int]) -> None:
    _logistic_into(asm, temporaries[0], x, f.alpha, temporaries)
    # what stands for 0 is not, and times a huge number it would be seen
    asm.vector("add", temporaries[0], temporaries[0], Pooled(-(2.0**-_LARGEST_EXPONENT)))
    asm.vector("mul", x, x, temporaries[0])


def _relu(asm: Assembler, f: Function, x: int, temporaries: Sequence[int]) -> None:
    zero, low = temporaries[:2]
    asm.vector("xor", zero, zero, zero)
    if f.alpha:
        asm.vector("min", low, zero, x)
        asm.vector("max", x, zero, x)
        asm.broadcast(zero, Pooled(f.alpha))
        asm.vector("fma231", x, low, zero)
    else:
        asm.vector("max", x, zero, x)


def _linear(asm: Assembler, f: Function, x: int, temporaries: Sequence[int]) -> None:
    if f.alpha != 1:
        asm.vector("mul", x, x, Pooled(f.alpha))
    if f.beta:
        asm.vector("add", x, x, Pooled(f.beta))


def _clip(asm: Assembler, f: Function, x: int, temporaries: Sequence[int]) -> None:
    for name, bound, idle in (("max", f.alpha, -math.inf), ("min", f.beta, math.inf)):
        if bound != idle:
            asm.broadcast(temporaries[0], Pooled(bound))
            asm.vector(name, x, temporaries[0], x)


def _hard(asm: Assembler, f: Function, target: int, x: int, temporary: int) -> None:
    """min(max(alpha · x + beta, 0), 1) in `target`."""
    asm.broadcast(target, Pooled(f.alpha))
    asm.vector("fma213", target, x, Pooled(f.beta))
    asm.vector("xor", temporary, temporary, temporary)
    asm.vector("max", target, temporary, target)
    asm.broadcast(temporary, Pooled(1.0))
    asm.vector("min", target, temporary, target)


def _hard_sigmoid(asm: Assembler, f: Function, x: int, temporaries: Sequence[int]) -> None:
    _hard(asm, f, temporaries[0], x, temporaries[1])
    asm.move(x, temporaries[0])


def _hard_swish(asm: Assembler, f: Function, x: int, temporaries: Sequence[int]) -> None:
    _hard(asm, f, temporaries[0], x, temporaries[1])
    asm.vector("mul", x, x, temporaries[0])


def _square(asm: Assembler, f: Function, x: int, temporaries: Sequence[int]) -> None:
    asm.vector("mul", x, x, x)


def _gelu(asm: Assembler, f: Function, x: int, temporaries: Sequence[int]) -> None:
    """x · ½ (1 + erf(x / √2)): erf by formula 7.1.26, whose sign is that of x."""
    t, e, work, other = temporaries[:4]
    # t = 1 / (1 + slope |x| / √2), of which infinity has none by `Assembler.inverse`
    asm.absolute(work, x, other)
    asm.broadcast(other, Pooled(_FAR))
    asm.vector("min", work, other, work)
    asm.vector("mul", work, work, Pooled(_ERF_SLOPE / math.sqrt(2)))
    asm.vector("add", work, work, Pooled(1.0))
    asm.inverse(t, work, other)
    # e = exp(−x² / 2)
    asm.vector("mul", e, x, x)
    asm.vector("mul", e, e, Pooled(-0.5 * math.log2(math.e)))
    _exp(asm, e, (work, other))
    # erf(|x| / √2) = 1 − (polynomial of t) · t · e
    asm.broadcast(work, Pooled(_ERF[-1]))
    for c in reversed(_ERF[:-1]):
        asm.vector("fma213", work, t, Pooled(c))
    asm.vector("mul", work, work, t)
    asm.vector("mul", work, work, e)
    # ½ x (1 + erf) = max(x, 0) − ½ |x| · (1 − erf |x|)
    asm.absolute(e, x, other)
    # what lies beyond has nothing taken off, nor has infinity
    asm.broadcast(other, Pooled(_FAR))
    asm.vector("min", e, other, e)
    asm.vector("mul", e, e, Pooled(0.5))
    asm.vector("xor", other, other, other)
    asm.vector("max", x, other, x)
    asm.vector("fnma231", x, e, work)


_WRITERS: dict[str, Callable[[Assembler, Function, int, Sequence[int]], None]] = {
    "logistic": _logistic, "swish": _swish, "relu": _relu, "linear": _linear, "clip_v2": _clip,
    "hardsigmoid": _hard_sigmoid, "hardswish": _hard_swish, "square": _square, "gelu_erf": _gelu,
}  # fmt: skip
