"""The domains in which index notation is evaluated: floating point, and integers modulo a prime."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from taso.graph.index import Array

Floats = NDArray[np.float64]
Residues = NDArray[np.int64]


def _erf(x: Floats) -> Floats:
    return np.vectorize(math.erf, otypes=[np.float64])(x) if x.size else x


def _sigmoid(x: Floats) -> Floats:
    positive = 1 / (1 + np.exp(-np.abs(x)))
    return np.where(x >= 0, positive, 1 - positive)


def _softplus(x: Floats) -> Floats:
    return np.logaddexp(x, 0.0)


def _hard_sigmoid(x: Floats, alpha: Floats, beta: Floats) -> Floats:
    return np.clip(alpha * x + beta, 0, 1)


def _elu(x: Floats, alpha: Floats) -> Floats:
    return np.where(x < 0, alpha * np.expm1(np.minimum(x, 0)), x)


def _selu(x: Floats, alpha: Floats, gamma: Floats) -> Floats:
    return gamma * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def _leaky(x: Floats, slope: Floats) -> Floats:
    return np.where(x < 0, slope * x, x)


def _celu(x: Floats, alpha: Floats) -> Floats:
    return np.maximum(x, 0) + np.minimum(0, alpha * np.expm1(x / alpha))


def _thresholded(x: Floats, alpha: Floats) -> Floats:
    return np.where(x > alpha, x, 0 * alpha)


def _shrink(x: Floats, bias: Floats, bound: Floats) -> Floats:
    return np.where(x < -bound, x + bias, np.where(x > bound, x - bias, 0 * bias))


@dataclass(frozen=True)
class ScalarFunction:
    """A function of one element (of each argument): its value in float64 and what is known of it exactly.

    `exact` is its definition modulo a prime; where it is None the function stands for an unknown one, and a random
    function of its argument takes its place in exact trials.
    """

    arity: int
    floats: Callable[..., Array]
    exact: Callable[..., Residues] | None = None


def _inverse(x: Residues, p: int) -> Residues:
    """1 / x modulo p (x = 0 gives 0: a trial that divides by zero says nothing and is drawn again)."""
    result, base, exponent = np.ones_like(x), x % p, p - 2
    while exponent:
        if exponent & 1:
            result = result * base % p
        base = base * base % p
        exponent >>= 1
    return result


def _signed(x: Residues, p: int) -> Residues:
    """The representative between −p/2 and p/2: the order that max, min and relu follow."""
    return np.where(x > p // 2, x - p, x)


SCALAR_FUNCTIONS: dict[str, ScalarFunction] = {
    "add": ScalarFunction(2, np.add, lambda p, a, b: (a + b) % p),
    "sub": ScalarFunction(2, np.subtract, lambda p, a, b: (a - b) % p),
    "mul": ScalarFunction(2, np.multiply, lambda p, a, b: a * b % p),
    "div": ScalarFunction(2, np.divide, lambda p, a, b: a * _inverse(b, p) % p),
    "neg": ScalarFunction(1, np.negative, lambda p, a: -a % p),
    "reciprocal": ScalarFunction(1, lambda a: 1 / a, lambda p, a: _inverse(a, p)),
    "max": ScalarFunction(2, np.maximum, lambda p, a, b: np.maximum(_signed(a, p), _signed(b, p)) % p),
    "min": ScalarFunction(2, np.minimum, lambda p, a, b: np.minimum(_signed(a, p), _signed(b, p)) % p),
    "relu": ScalarFunction(1, lambda a: np.maximum(a, 0), lambda p, a: np.maximum(_signed(a, p), 0)),
    "abs": ScalarFunction(1, np.abs, lambda p, a: np.abs(_signed(a, p))),
    "sigmoid": ScalarFunction(1, _sigmoid),
    "tanh": ScalarFunction(1, np.tanh),
    "exp": ScalarFunction(1, np.exp),
    "log": ScalarFunction(1, np.log),
    "sqrt": ScalarFunction(1, np.sqrt),
    "erf": ScalarFunction(1, _erf),
    "sin": ScalarFunction(1, np.sin),
    "cos": ScalarFunction(1, np.cos),
    "floor": ScalarFunction(1, np.floor),
    "ceil": ScalarFunction(1, np.ceil),
    "round": ScalarFunction(1, np.rint),
    "sign": ScalarFunction(1, np.sign),
    "softplus": ScalarFunction(1, _softplus),
    "softsign": ScalarFunction(1, lambda x: x / (1 + np.abs(x))),
    "hard_sigmoid": ScalarFunction(3, _hard_sigmoid),
    "elu": ScalarFunction(2, _elu),
    "selu": ScalarFunction(3, _selu),
    "leaky_relu": ScalarFunction(2, _leaky),
    "pow": ScalarFunction(2, np.power),
    "celu": ScalarFunction(2, _celu),
    "thresholded_relu": ScalarFunction(2, _thresholded),
    "shrink": ScalarFunction(3, _shrink),
    "tan": ScalarFunction(1, np.tan),
    "sinh": ScalarFunction(1, np.sinh),
    "cosh": ScalarFunction(1, np.cosh),
    "asin": ScalarFunction(1, np.arcsin),
    "acos": ScalarFunction(1, np.arccos),
    "atan": ScalarFunction(1, np.arctan),
    "asinh": ScalarFunction(1, np.arcsinh),
    "acosh": ScalarFunction(1, np.arccosh),
    "atanh": ScalarFunction(1, np.arctanh),
}


_PART = 1 << 26
"""Bytes of a widened part of a large operand."""


class Float64:
    """Evaluation in double precision. Operands may be of a narrower floating-point type; results never are."""

    def constant(self, value: Fraction) -> Array:
        return np.asarray(float(value))

    def least(self) -> float:
        return -math.inf

    def call(self, function: str, args: Sequence[Array]) -> Array:
        with np.errstate(all="ignore"):
            return SCALAR_FUNCTIONS[function].floats(*(a.astype(np.float64, copy=False) for a in args))

    def reduce(self, kind: str, array: Array, axes: tuple[int, ...]) -> Array:
        operation: np.ufunc = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}[kind]
        array = array.astype(np.float64, copy=False)
        if kind in ("max", "min"):
            first = -math.inf if kind == "max" else math.inf
            return np.asarray(operation.reduce(array, axes, initial=first))
        return np.asarray(operation.reduce(array, axes))

    def matmul(self, left: Array, right: Array) -> Array:
        """Products of batches of matrices; a narrower operand is widened part by part, so that it is not held twice."""
        with np.errstate(all="ignore"):
            if left.dtype == right.dtype == np.float64:
                return np.asarray(np.matmul(left, right))
            if right.size < left.size:
                return np.swapaxes(self.matmul(np.swapaxes(right, 1, 2), np.swapaxes(left, 1, 2)), 1, 2)
            left = left.astype(np.float64, copy=False)
            batches, inner, columns = right.shape
            result: Array = np.empty((left.shape[0], left.shape[1], columns), np.float64)
            step = max(1, _PART // max(8 * batches * inner, 1))
            for start in range(0, columns, step):
                part = right[:, :, start : start + step].astype(np.float64)
                result[:, :, start : start + step] = np.matmul(left, part)
            return result


class Modular:
    """Exact evaluation modulo the prime `p` < 2²⁶; functions without an exact form become random ones.

    A random function is fixed by `seed`: the same argument always gives the same value.
    """

    def __init__(self, p: int, seed: int = 0) -> None:
        if not 2 < p < 1 << 26:
            raise ValueError(f"modulus {p} must lie between 3 and 2**26")
        self.p = p
        self.seed = seed

    def constant(self, value: Fraction) -> Array:
        return np.asarray(value.numerator * pow(value.denominator, -1, self.p) % self.p, np.int64)

    def least(self) -> int:
        return self.p // 2 + 1

    def call(self, function: str, args: Sequence[Array]) -> Array:
        exact = SCALAR_FUNCTIONS[function].exact
        if function == "pow":
            return self._power(args[0], args[1])
        if exact is None:
            return self._random(function, args)
        return exact(self.p, *args)

    def _power(self, base: Array, exponent: Array) -> Residues:
        """x¹, x², x³, √x, 1 / x and 1 / √x as what they are, any other power as an unknown function."""
        found = self._random("pow", (base, exponent))
        squared = self.call("mul", (base, base))
        root = self.call("sqrt", (base,))
        known = {
            Fraction(1): base, Fraction(2): squared, Fraction(3): self.call("mul", (squared, base)),
            Fraction(1, 2): root, Fraction(-1): _inverse(np.asarray(base, np.int64), self.p),
            Fraction(-1, 2): _inverse(np.asarray(root, np.int64), self.p),
        }  # fmt: skip
        for number, value in known.items():
            found = np.where(exponent == self.constant(number), value, found).astype(np.int64)
        return found

    def _random(self, function: str, args: Sequence[Array]) -> Residues:
        """A keyed hash of the arguments, uniform modulo p (splitmix64's finalizer)."""
        state = np.uint64(self._key(function))
        for arg in args:
            state = self._mix(arg.astype(np.uint64) + state)
        return (state % np.uint64(self.p)).astype(np.int64)  # type: ignore[no-any-return]  # NumPy's stubs lose the dtype

    def _key(self, function: str) -> int:
        key = self.seed
        for byte in function.encode():
            key = (key * 1000003 ^ byte) & (1 << 62) - 1
        return key

    @staticmethod
    def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        with np.errstate(over="ignore"):
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return np.asarray(x ^ (x >> np.uint64(31)))

    def reduce(self, kind: str, array: Array, axes: tuple[int, ...]) -> Array:
        if kind == "sum":
            return np.asarray(np.add.reduce(array, axes) % self.p)
        if kind == "prod":
            for axis in sorted(axes, reverse=True):
                moved = np.moveaxis(array, axis, 0)
                array = np.ones(moved.shape[1:], np.int64)
                for part in moved:
                    array = array * part % self.p
            return array
        signed = _signed(array, self.p)  # type: ignore[arg-type]  # arrays of this domain are int64
        if kind == "max":
            return np.asarray(np.maximum.reduce(signed, axes, initial=-(self.p // 2)) % self.p)
        return np.asarray(np.minimum.reduce(signed, axes, initial=self.p // 2) % self.p)

    def matmul(self, left: Array, right: Array) -> Array:
        """Exact below 2048 terms a sum at once; longer sums are taken in parts."""
        total: Array = np.zeros((left.shape[0], left.shape[1], right.shape[2]), np.int64)
        for start in range(0, left.shape[2], 1024):
            stop = start + 1024
            total = (total + np.matmul(left[:, :, start:stop], right[:, start:stop])) % self.p
        return total
