"""All small sizes: that they are all gone through, and that equal polynomials, and only these, have one handle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taso.graph.index import Array
from taso.rules.instances import Instance
from taso.rules.text import parse_rule
from taso.rules.verifier.forms import LEAST, ONE, ZERO, Forms, NotPolynomial
from taso.rules.verifier.small import NotEnumerable, Small

SHAPES = [shape for rank in range(5) for shape in product((1, 2), repeat=rank)]


def small(text: str, largest: int = 2) -> list[Instance]:
    return list(Small(parse_rule(text), largest, lambda: None).instances())


def shapes_of(instances: list[Instance]) -> set[tuple[tuple[int, ...], ...]]:
    return {tuple(t.static_shape for t in i.types.values()) for i in instances}


def admitted(operation: Callable[..., object], tensors: int) -> set[tuple[tuple[int, ...], ...]]:
    """The shapes that NumPy takes."""
    found = set()
    for shapes in product(SHAPES, repeat=tensors):
        try:
            operation(*map(np.zeros, shapes))
        except ValueError:
            continue
        found.add(shapes)
    return found


# ── what is gone through ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text, operation",
    [
        ("Relu(x) => Relu(x)", lambda x: x), ("Add(x, y) => Add(y, x)", np.add),
        ("MatMul(x, y) => MatMul(x, y)", np.matmul),
        ("Add(MatMul(x, y), x) => Add(x, MatMul(x, y))", lambda x, y: np.add(np.matmul(x, y), x)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_every_shape_that_numpy_takes_is_gone_through_once(text: str, operation: Callable[..., object]) -> None:
    instances = small(text)
    tensors = len(instances[0].types)
    assert shapes_of(instances) == admitted(operation, tensors)
    assert len(instances) == len(shapes_of(instances))


def test_every_permutation_and_every_way_to_split_is_gone_through() -> None:
    turned = small("Transpose(x, perm=p) => Transpose(x, perm=p)")
    assert len(turned) == sum(math.factorial(len(shape)) for shape in SHAPES)
    cut = small("Split(x, axis=a, split=s, outputs=2) => Split(x, axis=a, split=s, outputs=2)", 3)
    wanted = {
        (shape, axis, (first, shape[axis] - first))
        for rank in range(1, 5) for shape in product((1, 2, 3), repeat=rank)
        for axis in range(rank) for first in range(1, shape[axis])
    }  # fmt: skip
    assert {(i.types["x"].static_shape, i.attrs["a"], i.attrs["s"]) for i in cut} == wanted


def convolutions(largest: int) -> Iterator[tuple[object, ...]]:
    sizes = range(1, largest + 1)
    for n, c, h, o, k, stride in product(sizes, sizes, sizes, sizes, sizes, (1, 2)):
        for pads in product((0, 1), repeat=2):
            if h + sum(pads) >= k:
                yield (n, c, h), (o, c, k), pads, (stride,)


def test_every_window_stride_and_padding_is_gone_through() -> None:
    found = small("Conv(x, w, pads=p, strides=s) => Conv(x, w, pads=p, strides=s)\nwhere rank(x) == 3 and rank(w) == 3")
    told = [(i.types["x"].static_shape, i.types["w"].static_shape, i.attrs["p"], i.attrs["s"]) for i in found]
    assert sorted(told) == sorted(convolutions(2))


def test_conditions_leave_out_what_they_do_not_admit() -> None:
    found = small("Add(x, y) => Add(y, x)\nwhere same_shape(x, y) and rank(x) == 2 and dim(x, 0) != dim(x, 1)", 3)
    wanted = {(s, s) for s in product((1, 2, 3), repeat=2) if s[0] != s[1]}
    assert shapes_of(found) == wanted and len(found) == len(wanted)


def test_axes_of_reductions_are_gone_through() -> None:
    found = small("ReduceSum(x, axes=a, keepdims=k) => ReduceSum(x, axes=a, keepdims=k)\nwhere rank(x) == 3")
    subsets = {axes for count in range(4) for axes in combinations(range(3), count)}
    assert {(i.attrs["a"], i.attrs["k"]) for i in found} == set(product(subsets, (0, 1)))


def test_what_depends_on_the_content_of_a_weight_is_not_gone_through() -> None:
    with pytest.raises(NotEnumerable, match="what a weight holds"):
        small("Mul(x, c) => Identity(x)\nwhere value(c) == 1")


# ── polynomials ──────────────────────────────────────────────────────────────────────────────────────────────────


def unknowns(forms: Forms, count: int) -> list[int]:
    return [int(h) for h in forms.tensor("x", (count,))]


def call(forms: Forms, function: str, *args: int) -> int:
    return int(forms.call(function, [np.asarray(a) for a in args]))


def number(forms: Forms, value: Fraction | int) -> int:
    return int(forms.constant(Fraction(value)))


def test_0_and_1_have_the_handles_that_padding_and_counting_use() -> None:
    forms = Forms(lambda count: None)
    assert (number(forms, 0), number(forms, 1)) == (ZERO, ONE)


_OPERATIONS = st.lists(st.tuples(st.sampled_from(["add", "sub", "mul", "neg"]), st.integers(0, 9), st.integers(0, 9)))


@settings(max_examples=200, deadline=None)
@given(_OPERATIONS, st.lists(st.integers(-50, 50), min_size=3, max_size=3))
def test_equal_handles_have_equal_values_and_unequal_ones_differ_somewhere(
    operations: list[tuple[str, int, int]], point: list[int]
) -> None:
    forms = Forms(lambda count: None)
    handles, rng = unknowns(forms, 3), np.random.default_rng(0)
    drawn = [rng.integers(-(10**6), 10**6, 3).tolist() for _ in range(2)]
    points = [[Fraction(v) for v in p] for p in (point, *drawn)]
    values = [[p[i] for p in points] for i in range(3)]
    for function, a, b in operations[:6]:
        left, right = a % len(handles), b % len(handles)
        if function == "neg":
            handles.append(call(forms, "neg", handles[left]))
            values.append([-v for v in values[left]])
            continue
        handles.append(call(forms, function, handles[left], handles[right]))
        by = {"add": lambda u, v: u + v, "sub": lambda u, v: u - v, "mul": lambda u, v: u * v}[function]
        values.append([by(u, v) for u, v in zip(values[left], values[right], strict=True)])
    for i, j in combinations(range(len(handles)), 2):
        if handles[i] == handles[j]:
            assert values[i] == values[j]
        else:
            # a polynomial of degree 64 that is not 0 has few roots among a million numbers
            assert values[i][1:] != values[j][1:]


def test_reciprocals_cancel_what_they_are_of() -> None:
    forms = Forms(lambda count: None)
    x, y, z = unknowns(forms, 3)
    product_of_two = call(forms, "mul", x, y)
    assert call(forms, "div", product_of_two, y) == x
    assert call(forms, "reciprocal", call(forms, "reciprocal", x)) == x
    assert call(forms, "div", z, product_of_two) == call(forms, "div", call(forms, "div", z, y), x)
    doubled = call(forms, "mul", number(forms, 2), call(forms, "add", x, y))
    half = call(forms, "mul", number(forms, Fraction(1, 2)), call(forms, "reciprocal", call(forms, "add", x, y)))
    assert call(forms, "reciprocal", doubled) == half
    with pytest.raises(NotPolynomial, match="division"):
        call(forms, "reciprocal", ZERO)


def test_a_maximum_is_that_of_a_set() -> None:
    forms = Forms(lambda count: None)
    x, y, z = unknowns(forms, 3)
    one_way = call(forms, "max", call(forms, "max", x, y), z)
    assert one_way == call(forms, "max", z, call(forms, "max", y, x)) == call(forms, "max", one_way, y)
    assert call(forms, "relu", call(forms, "relu", x)) == call(forms, "relu", x) != x
    assert call(forms, "min", x, y) == call(forms, "neg", call(forms, "max", *(call(forms, "neg", v) for v in (x, y))))
    assert call(forms, "max", number(forms, 3), number(forms, Fraction(7, 2))) == number(forms, Fraction(7, 2))
    assert call(forms, "max", LEAST, x) == x
    with pytest.raises(NotPolynomial, match="below every number"):
        call(forms, "add", LEAST, x)


def test_functions_of_equal_arguments_are_equal_and_of_others_unknown() -> None:
    forms = Forms(lambda count: None)
    x, y, _ = unknowns(forms, 3)
    both = call(forms, "add", x, y)
    assert call(forms, "exp", both) == call(forms, "exp", call(forms, "add", y, x)) != call(forms, "exp", x)
    assert call(forms, "abs", call(forms, "abs", x)) == call(forms, "abs", x)
    assert call(forms, "tanh", ZERO) == ZERO != call(forms, "exp", ZERO)
    assert forms.show(call(forms, "mul", call(forms, "exp", x), y)) in ("x[1]·exp(x[0])", "exp(x[0])·x[1]")


def test_sums_products_and_contractions_are_those_of_fractions() -> None:
    forms = Forms(lambda count: None)
    rng = np.random.default_rng(3)
    left, right = rng.integers(-5, 6, (2, 3, 4)), rng.integers(-5, 6, (2, 4, 2))
    handles = [np.vectorize(lambda v: number(forms, int(v)))(a).astype(np.int64) for a in (left, right)]

    def values(array: Array) -> list[str]:
        return [forms.show(int(h)) for h in array.ravel()]

    assert values(forms.matmul(*handles)) == [str(v) for v in (left @ right).ravel()]
    for kind, by in (("sum", np.sum), ("prod", np.prod), ("max", np.max), ("min", np.min)):
        assert values(forms.reduce(kind, handles[0], (0, 2))) == [str(v) for v in by(left, (0, 2))]
