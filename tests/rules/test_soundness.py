"""Rules that are false on some corner alone are never proved, while a true twin of each is."""

from __future__ import annotations

import time

import numpy as np
import pytest

from taso.graph.errors import GraphError
from taso.graph.ops import operator_named
from taso.graph.types import DType, TensorType
from taso.rules.expression import Bindings, evaluate, parse
from taso.rules.pattern import Rule, Status
from taso.rules.text import parse_rule
from taso.rules.verifier import exhaust, prove, verify
from taso.rules.verifier.facts import Effort, Knowledge, is_zero
from taso.rules.verifier.polynomials import ONE, Poly

SECONDS = 60.0


def _rule(text: str) -> Rule:
    """A rule from one line, its condition behind "where", its exactness behind "exact:"."""
    return parse_rule(" ".join(text.split()).replace(" where ", "\nwhere ").replace(" exact: ", "\nexact: "))


def _proved(text: str) -> bool:
    found = prove(_rule(text), SECONDS)
    assert "time allowed" not in found.reason
    return found.done


# ── where a proof over the real numbers speaks of more than the elements are: integers ────────────────────────────

_ONE_BY_ONE = (
    "Reshape(Conv(Reshape(x, shape=(dim(x, 0) * dim(x, 1), 1, dim(x, 2), dim(x, 3))), w, pads=p), "
    "shape=(dim(x, 0), dim(x, 1), dim(x, 2) + p[0] + p[2] - dim(w, 2) + 1, dim(x, 3) + p[1] + p[3] - dim(w, 3) + 1))"
)
_OF_ONE_CHANNEL = "rank(x) == 4 and shape(w) == (1, 1, 2, 2) and dim(x, 2) == dim(x, 3)"

# kind: (false, true)
_ONES = "Expand(Constant(1, like=y), shape=(1, dim(y, 1), dim(y, 2) + 2, 1))"
_SUMS = "Constant(1, shape=(1, 1, 64, 1), like=y)"
_TURNED = "Slice(Transpose(y, perm=(0, 2, 1, 3)), axes=(2,), starts=(2,), ends=(dim(y, 2),))"
_HALVES = f"Concat(Slice(y, axes=(2,), starts=(0,), ends=(2,)), {_TURNED}, axis=2)"
_SQUARE = "rank(y) == 4 and dim(y, 0) == 1 and dim(y, 1) == dim(y, 2) and dim(y, 3) == 1 and dim(y, 2) >= 4"
_FLAT = "shape=(1, dim(y, 1), dim(y, 2), 1)"
_FIVE = "Pad(Constant(1, shape=(5,), like=x), pads=p)"
_TWO_ROWS = f"Pad(Unsqueeze(Concat({_FIVE}, {_FIVE}, axis=0), axes=(0,)), pads=(0, 1, 0, 1))"
_ONE = "Slice(Pad(Constant(1, shape=(1, 1), like=x), pads=(0, 5 + p[1], 0, 0)), axes=(1,), starts=(0,), ends=(1,))"
_GROWING = "Conv({}, Constant(1, shape=(1, 1, {n}, 1), like={like}), pads=({n1}, 0, 0, 0))"


def _difference(c: str, a: str, b: str, zero: str) -> str:
    return f"ReduceSum(Sub(Mul({c}, {a}), Mul({c}, {b})), axes=(2, 3)) => ReduceSum(Sub({zero}, {zero}), axes=(2, 3))"


_COUNTED = _GROWING.format(_SUMS, n=64, n1=63, like="y")
_ADDED_UP = _GROWING.format("x", n=64, n1=63, like="y")
_LONG = _GROWING.format("x", n=5000, n1=4999, like="x")
_ACROSS = "Transpose(y, perm=(0, 1, 3, 2))"

PAIRS = {
    "a choice between pieces holds for one position of a sum": (
        f"Conv(Reshape({_HALVES}, {_FLAT}), {_ONES}, pads=(1, 0, 1, 0)) => "
        f"Conv(Reshape(y, {_FLAT}), {_ONES}, pads=(1, 0, 1, 0)) where {_SQUARE}",
        f"Conv(Reshape(Add(y, y), {_FLAT}), {_ONES}, pads=(1, 0, 1, 0)) => "
        f"Conv(Add(Reshape(y, {_FLAT}), Reshape(y, {_FLAT})), {_ONES}, pads=(1, 0, 1, 0)) where {_SQUARE}",
    ),
    "what is read past padding may have no elements": (
        f"Mul(x, {_TWO_ROWS}) => Mul(x, Add({_TWO_ROWS}, {_ONE})) "
        "where rank(x) == 2 and p[0] == 0 and p[1] <= 0 and p[1] >= -5",
        f"Mul(x, {_TWO_ROWS}) => Mul({_TWO_ROWS}, x) where rank(x) == 2 and p[0] == 0 and p[1] <= 0 and p[1] >= -5",
    ),
    "a length that is a coefficient has the index of its sum": (
        _difference(_COUNTED, "y", _ACROSS, "y") + " where rank(y) == 4 and shape(y) == (1, 1, 64, 64)",
        _difference(_COUNTED, "y", "y", "y") + " where rank(y) == 4 and shape(y) == (1, 1, 64, 64)",
    ),
    "a sum's length has the index of another sum": (
        _difference(_ADDED_UP, "y", _ACROSS, "y")
        + " where rank(y) == 4 and rank(x) == 4 and shape(x) == (1, 1, 64, 1) and shape(y) == (1, 1, 64, 64)",
        _difference(_ADDED_UP, "y", "y", "y")
        + " where rank(y) == 4 and rank(x) == 4 and shape(x) == (1, 1, 64, 1) and shape(y) == (1, 1, 64, 64)",
    ),
    "a sum's length moves with the index in it": (
        _difference(
            _LONG, "Pad(u, pads=(0, 0, 3, 0, 0, 0, 0, 0))", "Pad(u, pads=(0, 0, 0, 0, 0, 0, 3, 0))", "x"
        ) + " where rank(u) == 4 and rank(x) == 4 and shape(x) == (1, 1, 5000, 1) and shape(u) == (1, 1, 4997, 1)",
        _difference(_LONG, "Pad(u, pads=(0, 0, 3, 0, 0, 0, 0, 0))", "Pad(u, pads=(0, 0, 3, 0, 0, 0, 0, 0))", "x")
        + " where rank(u) == 4 and rank(x) == 4 and shape(x) == (1, 1, 5000, 1) and shape(u) == (1, 1, 4997, 1)",
    ),
    "a negative power of integers is rounded": (
        "Pow(Pow(x, c), c) => x where filled(c, -1) and rank(c) == 0 exact: exact",
        "Pow(Pow(x, c), c) => x where filled(c, -1) and rank(c) == 0",
    ),
    "a product with a negative power of integers is rounded": (
        "Mul(Pow(x, c), Pow(x, c)) => Pow(Mul(x, x), c) where filled(c, -1) and rank(c) == 0 exact: exact",
        "Mul(Pow(x, c), Pow(x, c)) => Pow(Mul(x, x), c) where filled(c, 2) and rank(c) == 0 exact: exact",
    ),
    "a power that is a fraction of integers is rounded": (
        "Mul(Pow(x, c), y) => Mul(Sqrt(x), y) where filled(c, 0.5) and rank(c) == 0 exact: exact",
        "Mul(Pow(x, c), y) => Mul(Sqrt(x), y) where filled(c, 0.5) and rank(c) == 0",
    ),
    "no integer is one half": (
        "Mul(x, Constant(1, like=x)) => Mul(Mul(x, Constant(0.5, like=x)), Constant(2, like=x)) exact: exact",
        "Mul(x, Constant(1, like=x)) => Mul(Mul(x, Constant(0.5, like=x)), Constant(2, like=x)) "
        "where is_float(x) exact: exact",
    ),
    "the least of all integers is its own contrary": (
        "Neg(Max(Neg(x), Neg(y))) => Min(x, y) exact: exact",
        "Neg(Max(Neg(x), Neg(y))) => Min(x, y)",
    ),
    "the least of all integers is its own contrary among several": (
        "Neg(ReduceMax(Neg(x), axes=(0,))) => ReduceMin(x, axes=(0,)) exact: exact",
        "Neg(ReduceMax(Neg(x), axes=(0,))) => ReduceMin(x, axes=(0,))",
    ),
    "twice an integer wraps around": (
        "Relu(Add(x, x)) => Add(Relu(x), Relu(x)) exact: exact",
        "Relu(Add(x, x)) => Add(Relu(x), Relu(x))",
    ),
    "a multiple of the largest integer wraps around": (
        "ReduceMax(Add(x, x), axes=(0,)) => Add(ReduceMax(x, axes=(0,)), ReduceMax(x, axes=(0,))) exact: exact",
        "ReduceMax(Max(x, x), axes=(0,)) => ReduceMax(x, axes=(0,)) exact: exact",
    ),
    # element types
    "a cast from a type that is not tried": (
        "Cast(x, to=FLOAT) => x where dtype(x) in (FLOAT, FLOAT16)",
        "Cast(x, to=FLOAT) => x where dtype(x) in (FLOAT,)",
    ),
    "a cast from all but some types": (
        "Cast(x, to=FLOAT) => x where is_float(x) and dtype(x) != DOUBLE",
        "Cast(x, to=t) => x where is_float(x) and dtype(x) == t",
    ),
    "a cast from an integer of another size": (
        "Cast(x, to=t) => x where dtype(x) == t or dtype(x) == INT32 exact: exact",
        "Cast(x, to=t) => x where dtype(x) == t exact: exact",
    ),
    "a type that depends on a rank": (
        "Cast(x, to=FLOAT) => x where dtype(x) == (FLOAT if rank(x) < 3 else DOUBLE)",
        "Cast(x, to=FLOAT) => x where dtype(x) == (FLOAT if rank(x) < 3 else FLOAT)",
    ),
    "a type that depends on a size": (
        "Cast(x, to=FLOAT) => x where rank(x) == 2 and dtype(x) == (FLOAT if dim(x, 0) < 3 else DOUBLE)",
        "Cast(x, to=FLOAT) => x where rank(x) == 2 and dtype(x) == (FLOAT if dim(x, 0) < 3 else FLOAT)",
    ),
    "a type that one rank alone has": (
        "Cast(x, to=FLOAT) => x where dtype(x) == FLOAT or (rank(x) == 5 and dtype(x) == DOUBLE)",
        "Cast(x, to=FLOAT) => x where dtype(x) == FLOAT or (rank(x) == 5 and dtype(x) == FLOAT)",
    ),
    "a type that a setting has": (
        "Cast(x, to=t) => Identity(x) where t == dtype(x) or t == FLOAT16",
        "Cast(x, to=t) => Identity(x) where t == dtype(x)",
    ),
    # numbers that are not known
    "a number that is some number": (
        "Gemm(x, w, alpha=a) => Gemm(x, w) where a == 1 or a == 2",
        "Gemm(x, w, alpha=a) => Gemm(x, w) where a == 1",
    ),
    "a number that is not some number": (
        "LeakyRelu(x, alpha=a) => LeakyRelu(x, alpha=a if a != 0.5 else 0.01)",
        "LeakyRelu(LeakyRelu(x, alpha=a), alpha=b) => LeakyRelu(LeakyRelu(x, alpha=a), alpha=b) where a != 0",
    ),
    "a number below another one": (
        "LeakyRelu(x, alpha=a) => LeakyRelu(x, alpha=0.01 if a < 0.5 else a)",
        "LeakyRelu(x, alpha=0.25) => LeakyRelu(x, alpha=0.25 if 0.25 < 0.5 else 0.01)",
    ),
    "bounds of which the smaller is the larger": (
        "Clip(Clip(x, min=a), max=b) => Clip(Clip(x, max=b), min=a)",
        "Clip(Clip(x, min=a), max=b) => Clip(x, min=a, max=b)",
    ),
    "a number that a choice tells apart": (
        "LeakyRelu(x, alpha=a) => LeakyRelu(x, alpha=0.01 if a == 0.5 else a)",
        "LeakyRelu(x, alpha=a) => LeakyRelu(x, alpha=a if a == 0.5 else a)",
    ),
    "a bound that is some number or none": (
        "Clip(Relu(x), max=m, min=n) => Clip(x, max=m, min=0.0) where (n == None or n == 1.0) and m != None",
        "Clip(Relu(x), max=m, min=n) => Clip(x, max=m, min=0.0) where (n == None or n == 0.0) and m != None",
    ),
    # choices that are not decided
    "a choice on a size": (
        "Softmax(x, axis=0) => Softmax(x, axis=0 if dim(x, 0) < 4 else 1) where rank(x) == 2",
        "Softmax(x, axis=0) => Softmax(x, axis=0 if dim(x, 0) < 4 else 0) where rank(x) == 2",
    ),
    # axes written as ()
    "axes that a source leaves out of a slice": (
        "Slice(x, starts=s, ends=e, axes=()) => x where rank(x) == 2",
        "Slice(x, starts=s, ends=e, axes=()) => Slice(x, starts=s, ends=e, axes=(0, 1)) "
        "where rank(x) == 2 and len(s) == 2",
    ),
    "axes that a sum leaves out": (
        "ReduceSum(x, axes=()) => x",
        "ReduceSum(x, axes=()) => ReduceSum(x, axes=range(rank(x)))",
    ),
    # sizes as positions
    "as many axes as a size says": (
        "Softmax(x, axis=0) => Softmax(x) where rank(x) == 1 if rank(x) == 1 else len(range(dim(x, 0))) == 3",
        "Softmax(x, axis=0) => Softmax(x) where rank(x) == 1 if rank(x) == 1 else len(range(rank(x))) == 1",
    ),
    "the sizes behind a size": (
        "Softmax(x, axis=0) => Softmax(x) where rank(x) == 1 or len(shape(x)[dim(x, 0):]) == 1",
        "Softmax(x, axis=0) => Softmax(x) where rank(x) == 1 or len(shape(x)[rank(x):]) == 1",
    ),
    "the size at a size": (
        "Softmax(x, axis=0) => Softmax(x) where rank(x) == 1 or shape(x)[dim(x, 0)] == 1",
        "Softmax(x, axis=0) => Softmax(x) where rank(x) == 1 or shape(x)[0] == shape(x)[0] + 1",
    ),
    "sizes that are symbols": (
        "Softmax(x, axis=0) => Softmax(x) where rank(x) == 1 or not static(dim(x, 0))",
        "Softmax(x, axis=0) => Softmax(x) where rank(x) == 1 and static(dim(x, 0))",
    ),
    # ranks
    "a rank that no proof goes up to": (
        "Softmax(x, axis=a) => Softmax(x, axis=a if rank(x) < 7 else 0)",
        "Softmax(x, axis=a) => Softmax(x, axis=a if rank(x) < 5 else a)",
    ),
    "ranks that a shape tells apart": (
        "Softmax(x, axis=a) => Softmax(x, axis=a if shape(x)[6:] == () else 0)",
        "Softmax(x, axis=a) => Softmax(x, axis=a if shape(x)[2:] == () else a)",
    ),
    "more axes than a proof has": (
        "Softmax(x, axis=a) => Softmax(x, axis=a if rank(x) - 6 <= 0 else 0)",
        "Softmax(x, axis=a) => Softmax(x, axis=a if rank(x) - 2 <= 0 else a)",
    ),
    # elements that are read where a guard says that they lie within
    "rows for columns": (
        f"{_ONE_BY_ONE} => Conv(x, Expand(w, shape=(dim(x, 1),) + shape(w)[1:]), group=dim(x, 1), "
        f"pads=(p[1], p[0], p[3], p[2])) where {_OF_ONE_CHANNEL} and p[0] + p[2] == p[1] + p[3]",
        f"{_ONE_BY_ONE} => Conv(x, Expand(w, shape=(dim(x, 1),) + shape(w)[1:]), group=dim(x, 1), pads=p) "
        f"where {_OF_ONE_CHANNEL}",
    ),
    # functions that have no value for some arguments
    "a quotient that cancels": (
        "Add(x, y) => Add(x, Add(y, Sub(Div(x, y), Div(x, y)))) where same_shape(x, y)",
        "Add(Div(x, y), Div(x, y)) => Div(Add(x, x), y) where same_shape(x, y)",
    ),
    "a logarithm that cancels": (
        "Add(x, y) => Add(x, Add(y, Sub(Log(y), Log(y)))) where same_shape(x, y)",
        "Add(Log(y), x) => Add(x, Log(y)) where same_shape(x, y)",
    ),
    "a root that is multiplied by a constant 0": (
        "Mul(x, Constant(0, like=x)) => Mul(Sqrt(x), Constant(0, like=x))",
        "Mul(Sqrt(x), Constant(0, like=x)) => Mul(Constant(0, like=x), Sqrt(x))",
    ),
    "a quotient that is multiplied by a constant 0, in a sum": (
        "MatMul(x, Constant(0, shape=(2, 2), like=x)) => MatMul(Div(x, x), Constant(0, shape=(2, 2), like=x)) "
        "where rank(x) == 2",
        "MatMul(x, Constant(0, shape=(2, 2), like=x)) => MatMul(Neg(x), Constant(0, shape=(2, 2), like=x)) "
        "where rank(x) == 2",
    ),
    "a root that is multiplied by nothing": (
        "Mul(x, c) => Mul(Sqrt(x), c) where filled(c, 0) and same_shape(x, c)",
        "Mul(Sqrt(x), c) => Mul(c, Sqrt(x)) where filled(c, 0) and same_shape(x, c)",
    ),
}  # fmt: skip

_FALSE = [pytest.param(pair[0], id=kind) for kind, pair in PAIRS.items()]
_TRUE = [pytest.param(pair[1], id=kind) for kind, pair in PAIRS.items()]


@pytest.mark.parametrize("text", _FALSE)
def test_what_is_false_on_some_corner_is_not_proved(text: str) -> None:
    assert not _proved(text)


@pytest.mark.parametrize("text", _TRUE)
def test_its_true_twin_is_proved(text: str) -> None:
    assert _proved(text)


# ── the other gates ──────────────────────────────────────────────────────────────────────────────────────────────

REFUTED = (
    "a number that is some number", "a number that a choice tells apart", "a choice on a size",
    "axes that a sum leaves out", "as many axes as a size says", "the sizes behind a size", "the size at a size",
)  # fmt: skip

CHOICES = (
    "Softmax(x, axis=0 if dim(x, 0) == 1 else 1) => Softmax(x, axis=1) where rank(x) == 2",
    "Softmax(x, axis=0) => Softmax(x, axis=1) where rank(x) == 2 "
    "and (dim(x, 0) == 2 if dim(x, 1) == 2 else dim(x, 0) == dim(x, 1))",
    "ReduceSum(x, axes=(0,)) => x where rank(x) == 2 and (dim(x, 0) == 2 if dim(x, 1) == 2 else dim(x, 0) == 1)",
)


@pytest.mark.parametrize("kind", REFUTED)
def test_trials_tell_a_counterexample_to_what_is_false_of_real_numbers(kind: str) -> None:
    judged = verify(_rule(PAIRS[kind][0]), seconds=20.0)
    assert judged.status is Status.REFUTED and judged.certificate.counterexample


@pytest.mark.parametrize("text", CHOICES)
def test_small_sizes_go_through_all_that_a_choice_depends_on(text: str) -> None:
    rule = _rule(text)
    assert not prove(rule, SECONDS).done
    assert exhaust(rule, SECONDS, sizes=(2,)).counterexample


# ── false on some corner of one operator ─────────────────────────────────────────────────────────────────────────

IN_4 = "where rank(x) == 4"
IN_1 = "where rank(x) == 1"

CORNERS = (
    f"Conv(x, w, strides=s) => Conv(x, w, strides=(s[1], s[0])) {IN_4} and shape(w)[2:] == (1, 1)",
    f"Conv(x, w, pads=p) => Conv(x, w, pads=(p[2], p[1], p[0], p[3])) {IN_4} and shape(w)[2:] == (1, 1)",
    f"Conv(x, w, dilations=d) => Conv(x, w) {IN_4} and dim(w, 2) == 1",
    f"Conv(x, w, group=g) => Conv(x, w) {IN_4} and dim(w, 1) == 1",
    "Conv(x, a, group=g) | Conv(x, b, group=g) => Split(Conv(x, Concat(a, b, axis=0), group=g), axis=1, "
    "split=(dim(a, 0), dim(b, 0))) where shape(a)[2:] == shape(b)[2:]",
    "Conv(Pad(x, pads=q), w, pads=p) => Conv(x, w, pads=(p[0] + q[2], p[1] + q[3], p[2] + q[6], p[3] + q[7])) "
    f"{IN_4} and q[0] == 0 and q[1] == 0 and q[4] == 0 and q[5] == 0",
    "Conv(x, w, dilations=d, pads=p) => Conv(x, Enlarge(w, kernel_shape=(3, 3)), dilations=d, "
    f"pads=(p[0] + 1, p[1] + 1, p[2] + 1, p[3] + 1)) {IN_4} and shape(w)[2:] == (1, 1)",
    f"ConvTranspose(x, w, output_padding=o, strides=s) => ConvTranspose(x, w, strides=s) {IN_4}",
    f"MaxPool(x, kernel_shape=k, strides=s, ceil_mode=1) => MaxPool(x, kernel_shape=k, strides=s) {IN_4}",
    f"MaxPool(x, kernel_shape=k, pads=p) => MaxPool(Pad(x, pads=(0, 0, p[0], p[1], 0, 0, p[2], p[3])), "
    f"kernel_shape=k) {IN_4}",
    "AveragePool(x, kernel_shape=k, pads=p, count_include_pad=1) => AveragePool(x, kernel_shape=k, pads=p) "
    f"{IN_4} and p[0] == 0 and p[1] == 0",
    "AveragePool(x, kernel_shape=k, strides=s, ceil_mode=c, count_include_pad=1) => AveragePool(x, kernel_shape=k, "
    f"strides=s, ceil_mode=c) {IN_4}",
    "GlobalAveragePool(x) => ReduceMean(x, axes=(2, 3))",
    "Concat(x, y, axis=a) => Concat(y, x, axis=a) where same_shape(x, y) and dim(x, a) == 1",
    "Split(Concat(x, y, axis=a), axis=a, split=s, outputs=2) => x | y where s[0] == dim(y, a)",
    "Concat(Mul(x, y), Mul(z, y), axis=a) => Mul(Concat(x, z, axis=a), y) where rank(y) <= rank(x)",
    "Concat(Split(x, axis=a, split=s, outputs=2)[0], Split(x, axis=a, split=s, outputs=2)[1], axis=b) => x",
    "Reshape(Reshape(x, shape=s), shape=t) => Reshape(x, shape=t)",
    "Reshape(x, shape=s) => x where size(x) == product(s)",
    "Transpose(Transpose(x, perm=p), perm=p) => x where rank(x) <= 3",
    "Transpose(Softmax(x, axis=a), perm=p) => Softmax(Transpose(x, perm=p), axis=p[a])",
    "Expand(x, shape=s) => x where rank(x) >= len(s)",
    "Add(Expand(x, shape=s), y) => Add(x, y) where rank(y) >= len(s)",
    "Add(Reshape(x, shape=s), Reshape(y, shape=s)) => Reshape(Add(x, y), shape=s) where rank(x) == 2 "
    "and rank(y) == 2 and dim(x, 0) == dim(y, 0)",
    f"Slice(Slice(x, starts=(1,), ends=e, axes=(0,)), starts=(1,), ends=f, axes=(0,)) => "
    f"Slice(x, starts=(2,), ends=f, axes=(0,)) {IN_1}",
    "Slice(x, starts=(-1,), ends=(-1000,), axes=(0,), steps=(-1,)) => x",
    "Slice(Add(x, y), starts=s, ends=e, axes=a) => Add(Slice(x, starts=s, ends=e, axes=a), "
    "Slice(y, starts=s, ends=e, axes=a))",
    f"Pad(Pad(x, pads=p), pads=q) => Pad(x, pads=(p[0] + q[0], p[1] + q[1])) {IN_1} and min(q) >= 0",
    "Pad(Exp(x), pads=p) => Exp(Pad(x, pads=p))",
    "Pad(x, pads=p, mode=\"reflect\") => Pad(x, pads=p)",
    "Pad(x, pads=p, value=v) => Pad(x, pads=p)",
    f"ReduceMax(Pad(x, pads=p), axes=(0,)) => ReduceMax(x, axes=(0,)) {IN_1} and min(p) >= 0",
    "ReduceSum(x, axes=a) => x where len(a) == 0",
    "ReduceSum(ReduceSum(x, axes=(0,), keepdims=0), axes=(1,), keepdims=0) => ReduceSum(x, axes=(0, 1), keepdims=0)",
    "ReduceSum(Add(x, y), axes=(0,)) => Add(ReduceSum(x, axes=(0,)), ReduceSum(y, axes=(0,))) "
    "where rank(x) == rank(y)",
    "ReduceMean(x, axes=(0, 1)) => Mul(ReduceSum(x, axes=(0, 1)), Constant(0.25, like=x)) where dim(x, 0) == 2",
    "ReduceMax(ReduceMin(x, axes=(0,)), axes=(1,)) => ReduceMin(ReduceMax(x, axes=(1,)), axes=(0,)) "
    "where rank(x) == 2",
    "Clip(Clip(x, min=a, max=b), min=c, max=d) => Clip(x, min=c, max=d)",
    "Clip(x, min=3, max=1) => Clip(Clip(x, max=1), min=3)",
    "LeakyRelu(x, alpha=2) => Max(x, Mul(x, Constant(2, like=x)))",
    "Mul(Relu(x), c) => Relu(Mul(x, c)) where rank(c) == 0",
    "Pow(Pow(x, c), d) => x where filled(c, 2) and filled(d, 0.5) and rank(c) == 0 and rank(d) == 0",
    "Sqrt(Mul(x, y)) => Mul(Sqrt(x), Sqrt(y))",
    "Add(x, c) => x where filled(c, 0) and rank(c) == rank(x)",
    "Where(c, x, y) => Where(c, y, x)",
    "Mod(x, y) => x",
    "Gather(x, i, axis=0) => Gather(x, i, axis=1)",
    "Softmax(x, axis=a, flattened=1) => Softmax(x, axis=a) where a >= rank(x) - 2",
    "LayerNormalization(x, w, b, axis=a) => LayerNormalization(x, w, b)",
    "MatMul(Concat(x, y, axis=0), w) => Concat(MatMul(x, w), MatMul(y, w), axis=0) where rank(x) == 3",
    "MatMul(x, w) => Gemm(x, w, transB=1) where rank(x) == 2 and rank(w) == 2 and dim(w, 0) == dim(w, 1)",
    "Add(Gemm(x, w), c) => Gemm(x, w, c) where rank(c) <= 2",
    "MatMul(MatMul(x, y), z) => MatMul(x, MatMul(y, z))",
    # an inequality that becomes an equation while what follows from it is noted
    "Conv(Sub(x, c), w, dilations=d, strides=s) => Conv(x, w, ReduceSum(Mul(w, Reshape(Neg(Reshape(c, shape=(-1,))), "
    "shape=(1, -1) + (1,) * (rank(w) - 2))), axes=range(1, rank(w)), keepdims=0), dilations=d, strides=s) "
    "where is_weight(w) and is_weight(c) and rank(x) == rank(w) and dim(x, 1) == dim(w, 1) "
    "and rank(c) <= rank(w) and rank(c) >= rank(w) - 1 "
    "and shape(c)[rank(c) - rank(w) + 2:] == (1,) * (rank(w) - 2) and dim(c, rank(c) - rank(w) + 1) <= dim(w, 1) "
    "and (rank(c) < rank(w) or dim(c, 0) == 1)",
)  # fmt: skip


@pytest.mark.parametrize("text", CORNERS)
def test_what_is_false_on_a_corner_of_its_operators_is_not_proved(text: str) -> None:
    assert not _proved(text)


# ── what the proofs rest on ──────────────────────────────────────────────────────────────────────────────────────


def test_what_follows_from_a_contradiction_is_not_remembered_for_other_ways() -> None:
    effort = Effort(time.monotonic() + SECONDS)

    def asked(contradictory: bool) -> bool | None:
        known = Knowledge(effort)
        a, b = (Poly.atom(known.atom("size", n, 1)) for n in "ab")
        known.assume_one_of(((is_zero(a - ONE),), (is_zero(a - b),)))
        if contradictory:
            known.assume_zero(ONE)
        return known.zero(a - b)

    assert asked(contradictory=True) is True
    assert asked(contradictory=False) is None


@pytest.mark.parametrize(("dtype", "given", "asked", "holds"), [
    (np.int64, 0, "0.5", False), (np.int64, 1, "1", True), (np.int64, 1, "1.0", True), (np.int8, 0, "0.9", False),
    (np.float32, 0.1, "0.1", True), (np.float32, 0.5, "0.5", True), (np.float32, 0.0, "0.5", False),
])  # fmt: skip
def test_a_weight_is_filled_with_a_number_as_its_type_holds_it(
    dtype: type[np.generic], given: float, asked: str, holds: bool
) -> None:
    array = np.full(3, given, dtype)
    type = TensorType(DType.from_numpy(array.dtype), array.shape)
    env = Bindings({"c": type}, weights=frozenset({"c"}), contents={"c": array})
    assert evaluate(parse(f"filled(c, {asked})"), env) is holds


@pytest.mark.parametrize("dtype", [DType.INT64, DType.UINT8, DType.BOOL])
def test_no_constant_of_integers_is_a_fraction(dtype: DType) -> None:
    constant, kernel = operator_named("Constant"), operator_named("AveragingKernel")
    with pytest.raises(GraphError, match="1/2 is no number of"):
        constant.types_of((), constant.complete({"value": 0.5, "dtype": dtype}))
    with pytest.raises(GraphError, match="1/9 is no number of"):
        kernel.types_of((), kernel.complete({"channels": 1, "kernel_shape": (3, 3), "dtype": dtype}))
    assert constant.types_of((), constant.complete({"value": 2.0, "dtype": dtype}))[0].dtype is dtype
