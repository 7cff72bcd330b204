"""Functions of one element by machine code against float64, over all of what float32 holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from machine_code import Array, by_code, elementwise, isa
from numpy.typing import NDArray

from taso.backends.x86 import functions
from taso.backends.x86.assembler import AVX512, Assembler
from taso.backends.x86.functions import Function, knows, temporaries_of, write
from taso.backends.x86.vectors import assembler
from taso.graph.errors import BackendError

pytestmark = pytest.mark.usefixtures("each_isa")

Wide = NDArray[np.float64]
ULP = 2.0**-23
"""A unit in the last place of float32 numbers in [1, 2)."""
TINY = 2.0**-126
"""The least normal number: below it what is found may be 0."""


@dataclass(frozen=True)
class Case:
    """A function, what it is in float64, and by how much what is found may differ.

    That is `relative` times the result and `absolute`, and `slope` times the argument where a product of it is rounded
    before something is added; all in units in the last place of numbers near 1.
    """

    function: Function
    exact: Callable[[Wide], Wide]
    relative: float = 0.0
    absolute: float = 0.0
    slope: float = 0.0

    def allowed(self, x: Wide, wanted: Wide) -> Wide:
        return ULP * (self.relative * np.abs(wanted) + self.absolute + self.slope * np.abs(x)) + TINY


def logistic(x: Wide) -> Wide:
    # no exponent above 0, so that nothing overflows
    small = np.exp(-np.abs(x))
    return np.where(x < 0, small, 1) / (1 + small)


def gelu(x: Wide) -> Wide:
    return x * 0.5 * np.array([math.erfc(-v / math.sqrt(2)) for v in x])


def hard(alpha: float, beta: float) -> Callable[[Wide], Wide]:
    # the numbers of an instruction are float32
    a, b = float(np.float32(alpha)), float(np.float32(beta))
    return lambda x: np.clip(a * x + b, 0, 1)


def times_hard(alpha: float, beta: float) -> Callable[[Wide], Wide]:
    found = hard(alpha, beta)
    return lambda x: x * found(x)


def linear(alpha: float, beta: float) -> Callable[[Wide], Wide]:
    return lambda x: float(np.float32(alpha)) * x + float(np.float32(beta))


def swish(alpha: float) -> Callable[[Wide], Wide]:
    return lambda x: x * logistic(float(np.float32(alpha)) * x)


def leaky(alpha: float) -> Callable[[Wide], Wide]:
    return lambda x: np.where(x > 0, x, float(np.float32(alpha)) * x)


def clip(low: float, high: float) -> Callable[[Wide], Wide]:
    return lambda x: np.clip(x, np.float32(low), np.float32(high))


# An operation rounds by half a unit of its result, which is ½ ULP below 1 and ¼ below ½. What is exactly rounded, once,
# is off by that alone. A logistic function: exp by its polynomial, whose exponent is rounded too, 1 added to it, one
# step of Newton's; times the argument it is that much of the result, and rounded once more.
CASES = {
    "logistic": Case(Function("logistic"), logistic, absolute=1.5),
    # swish α is swish 1 of α x, by α
    **{f"swish {a}": Case(Function("swish", a), swish(a), relative=2, absolute=1.5 / min(1, abs(a)))
       for a in (1.0, 1.702, 0.01, -1.0)},
    "swish 0": Case(Function("swish", 0.0), swish(0.0), relative=0.5),
    "relu": Case(Function("relu"), lambda x: np.maximum(x, 0)),
    **{f"relu {a}": Case(Function("relu", a), leaky(a), relative=0.5) for a in (0.01, 0.2, 1.0, -2.0, 3.0)},
    **{f"linear {a} {b}": Case(Function("linear", a, b), linear(a, b), relative=0.5, slope=0.5 * abs(a) * (b != 0))
       for a, b in ((2.0, 3.0), (1.0, 0.0), (-1.0, 0.1), (0.3, 0.0), (1.7, -0.3), (1.0, -7.0), (0.0, 4.0))},
    **{f"clip {a} {b}": Case(Function("clip_v2", a, b), clip(a, b))
       for a, b in ((0.0, 6.0), (-1.3, 2.7), (-math.inf, 1.0), (0.5, math.inf), (-math.inf, math.inf), (2.0, 2.0),
                    (-3.4028234663852886e38, 3.4028234663852886e38))},
    **{f"hardsigmoid {a} {b}": Case(Function("hardsigmoid", a, b), hard(a, b), absolute=0.25)
       for a, b in ((0.2, 0.5), (1 / 6, 0.5), (3.0, -1.0))},
    # where it bends to 0 the argument is (1 - β) / α or β / α at most
    **{f"hardswish {a:.1f} {b}": Case(Function("hardswish", a, b), times_hard(a, b), relative=1, absolute=1)
       for a, b in ((1 / 6, 0.5), (0.3, 0.1))},
    "square": Case(Function("square"), np.square, relative=0.5),
    # ½ x of the formula's error, 1.5e-7 = 1.3 ULP, and of a few operations' where there is anything left of it, x < 4
    "gelu": Case(Function("gelu_erf"), gelu, relative=1, absolute=2),
}  # fmt: skip
CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def grid() -> Array:
    """Dense where functions bend, and numbers of every magnitude and sign."""
    random = np.random.default_rng(1)
    bits = random.integers(0, 1 << 32, 40_000, np.uint32).view(np.float32)
    largest = np.finfo(np.float32).max
    huge = np.float32([1e10, 1e15, 1.9e19, 1e20, 1e30, 1e38, 2.36e38, 3e38, largest])
    tiny = np.float32([0.0, 1e-45, 1e-40, TINY, 1e-30, 1e-10])
    parts = [
        np.linspace(-12, 12, 60_001, dtype=np.float32), np.linspace(-130, 130, 20_001, dtype=np.float32),
        np.linspace(-2e4, 2e4, 10_001, dtype=np.float32), np.float32([*huge, *-huge, *tiny, *-tiny]),
        np.float32([n * math.log(2) * s for n in range(60, 130) for s in (0.5, -0.5, 1, -1)]), bits[np.isfinite(bits)],
    ]  # fmt: skip
    return np.concatenate(parts).astype(np.float32)


GRID = grid()


@np.errstate(over="ignore")
def excess(case: Case, run: Callable[[Array], Array], x: Array) -> Wide:
    """By how much of what is allowed each value is off: 1 is just allowed. Infinite where it is no number."""
    found, wanted = run(x).astype(np.float64), case.exact(x.astype(np.float64))
    largest = float(np.finfo(np.float32).max)
    beyond = np.abs(wanted) > largest
    # what is larger than float32 holds is infinite
    assert np.array_equal(found[beyond], np.copysign(np.inf, wanted[beyond]))
    off = np.abs(found - np.where(beyond, 0, wanted)) / case.allowed(x.astype(np.float64), wanted)
    off[beyond] = 0
    off[np.isnan(found)] = np.inf
    return off


@CASE
def test_values_are_off_by_few_units_in_the_last_place(case: Case) -> None:
    off = excess(case, by_code(case.function), GRID)
    at = int(off.argmax())
    assert off[at] <= 1, f"at {GRID[at]!r}"


@CASE
@np.errstate(over="ignore")
def test_the_bounds_are_not_far_from_what_is_found(case: Case) -> None:
    """A constant whose last digits are wrong is seen only where bounds are tight."""
    run = by_code(case.function)
    rounded = np.array_equal(run(GRID), case.exact(GRID.astype(np.float64)).astype(np.float32))
    assert rounded or excess(case, run, GRID).max() > 0.3


@CASE
def test_no_finite_argument_gives_what_is_no_number(case: Case) -> None:
    random = np.random.default_rng(2).integers(0, 1 << 32, 200_000, np.uint32).view(np.float32)
    x = random[np.isfinite(random)]
    assert not np.isnan(by_code(case.function)(x)).any()


@CASE
def test_what_is_no_number_stays_none(case: Case) -> None:
    bits = [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FC0BEEF]
    x = np.array(bits * 7, np.uint32).view(np.float32)
    assert np.isnan(by_code(case.function)(x)).all()


LIMITS = {
    "logistic": (0.0, 1.0), "swish 1.0": (None, math.inf), "relu": (0.0, math.inf), "relu 0.2": (-math.inf, math.inf),
    "linear -1.0 0.1": (math.inf, -math.inf), "clip -1.3 2.7": (np.float32(-1.3), np.float32(2.7)),
    "clip -inf 1.0": (-math.inf, 1.0), "clip 0.5 inf": (0.5, math.inf), "clip -inf inf": (-math.inf, math.inf),
    "hardsigmoid 0.2 0.5": (0.0, 1.0), "hardswish 0.2 0.5": (None, math.inf), "square": (math.inf, math.inf),
    "gelu": (0.0, math.inf),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_infinity_gives_the_limit(name: str) -> None:
    """None: −∞ · 0 by the operator's definition, which is no number."""
    found = by_code(CASES[name].function)(np.array([-np.inf, np.inf], np.float32))
    for value, limit in zip(found, LIMITS[name], strict=True):
        if limit is None:
            assert np.isnan(value)
        else:
            assert value == limit or abs(value - limit) <= TINY


def test_signs_of_zero_are_kept_where_the_definition_keeps_them() -> None:
    x = np.array([0.0, -0.0], np.float32)
    for name in ("swish 1.0", "hardswish 0.2 0.5", "relu 0.2", "clip -1.3 2.7", "linear 1.0 0.0", "linear 0.3 0.0"):
        assert np.array_equal(np.signbit(by_code(CASES[name].function)(x)), [False, True]), name


@CASE
def test_elements_do_not_see_each_other(case: Case) -> None:
    run, random = by_code(case.function), np.random.default_rng(3)
    width = isa().width
    x = random.standard_normal(width).astype(np.float32) * 4
    alone = np.concatenate([run(np.repeat(v, width))[:1] for v in x])
    x[3], x[6] = np.nan, np.inf
    rest = [i for i in range(width) if i not in (3, 6)]
    assert np.array_equal(run(x)[rest], alone[rest])


@CASE
def test_only_the_temporaries_are_overwritten(case: Case) -> None:
    """Registers hold sums while a function runs on one of them."""
    # and no more of them than it says
    temporaries = ((4, 9, 20, 31) if isa() == AVX512 else (4, 9, 10, 14))[: temporaries_of(case.function)]
    others = [z for z in range(1, isa().registers) if z not in temporaries]
    x = np.linspace(-5, 5, 16).astype(np.float32)

    def writing(asm: Assembler) -> None:
        for z in others:
            asm.move(z, 0)
        write(asm, case.function, 0, temporaries)
        asm.move(4, 0)
        for z in others:
            # what was kept differs from the argument by 0
            asm.vector("sub", 9, z, others[0])
            asm.vector("add", 4, 4, 9)
        asm.move(0, 4)

    assert np.array_equal(elementwise(writing)(x), by_code(case.function)(x))


def test_any_temporaries_in_any_order_do() -> None:
    x = GRID[::97]
    for case in CASES.values():
        of_all = ((31, 17, 5, 8), (8, 30, 2, 16)) if isa() == AVX512 else ((14, 11, 5, 8), (8, 13, 2, 9))
        for temporaries in ((1, 2, 3, 4), *of_all):
            run = elementwise(lambda asm, c=case, t=temporaries: write(asm, c.function, 0, t))
            assert np.array_equal(run(x), by_code(case.function)(x))


@pytest.mark.parametrize("name", ["tanh", "gelu_tanh", "exp", "pow", "", "Swish"])
def test_a_function_without_code_is_refused(name: str) -> None:
    assert not knows(Function(name))
    with pytest.raises(BackendError, match="no machine code"):
        write(assembler(isa()), Function(name), 0, (1, 2, 3, 4))


def test_every_function_that_there_is_code_for_is_tested() -> None:
    assert {case.function.name for case in CASES.values()} == set(functions._WRITERS)


def test_too_few_temporaries_are_refused() -> None:
    for case in CASES.values():
        count = temporaries_of(case.function)
        assert count == (4 if case.function.name == "gelu_erf" else 3)
        with pytest.raises(BackendError):
            write(assembler(isa()), case.function, 0, range(1, count))


@CASE
def test_as_many_temporaries_as_are_said_are_enough(case: Case) -> None:
    temporaries = range(1, 1 + temporaries_of(case.function))
    found = elementwise(lambda asm: write(asm, case.function, 0, temporaries))(GRID[::97])
    assert np.array_equal(found, by_code(case.function)(GRID[::97]))


@pytest.mark.parametrize("name, attribute, value", [
    ("gelu", "_ERF", (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.06141)),
    ("gelu", "_ERF_SLOPE", 0.32760), ("gelu", "_FAR", 3.0), ("logistic", "_DEGREE", 4),
    ("swish 1.0", "_DEGREE", 4), ("swish 1.0", "_LARGEST_EXPONENT", 20.0),
])  # fmt: skip
def test_a_constant_that_is_a_little_off_is_caught(
    name: str, attribute: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions._power_of_two.cache_clear()
    monkeypatch.setattr(functions, attribute, value)
    try:
        assert excess(CASES[name], by_code(CASES[name].function), GRID).max() > 1
    finally:
        functions._power_of_two.cache_clear()
