"""The gate that proves rules: what it proves, what it must never prove, and that proofs rest on the definitions."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published import published

from taso.graph import index as notation
from taso.graph.errors import GraphError
from taso.graph.index import Call, Loop, Meaning, Read, Reduce, at
from taso.graph.operator import Attrs, MeaningFunction, Operator
from taso.graph.ops import operator_named
from taso.graph.ops.common import output_loops, single_axes
from taso.graph.ops.movement import RESHAPE
from taso.graph.types import DType, TensorType
from taso.rules.pattern import Rule, Status
from taso.rules.tester import test_rule as try_rule
from taso.rules.text import parse_rule, parse_rules
from taso.rules.verifier import prove, verify
from taso.rules.verifier.cases import Case, Trail
from taso.rules.verifier.facts import Effort, Knowledge, is_zero
from taso.rules.verifier.polynomials import ONE, Poly

LIBRARY = Path(__file__).parents[2] / "taso" / "rules" / "library" / "core.rules"
RULES = {r.id: r for r in parse_rules(LIBRARY.read_text(encoding="utf-8"), origin=LIBRARY.name)}
SECONDS = 120.0


def _rule(text: str) -> Rule:
    """A rule from one line, its condition behind "where"."""
    return parse_rule(" ".join(text.split()).replace(" where ", "\nwhere "))


def _effort() -> Effort:
    return Effort(time.monotonic() + SECONDS)


# ── what is proved ───────────────────────────────────────────────────────────────────────────────────────────────

FAMILIES = (
    "drop-identity", "drop-cast", "drop-expand", "drop-add-zero", "relu-twice", "abs-twice", "sum-of-two",
    "concat-concat-last", "concat-of-split", "split-of-concat", "split-first-again", "pad-into-conv",
    "batchnorm-to-scale", "scale-before-conv", "bias-into-gemm", "transpose-into-gemm", "scale-into-matmul",
    "merge-matmul-bias", "matmul-sum-of-products", "chain-matmul", "merge-conv", "enlarge-merge-conv", "factor-conv",
    "merge-groups-2", "relu-after-concat", "sigmoid-before-split", "factor-mul", "div-by-constant",
)  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rule_of_each_family_is_proved(name: str) -> None:
    proof = prove(RULES[name], SECONDS)
    assert proof.done, proof.reason
    assert proof.cases > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_of_the_library_is_proved_and_passes_the_trials_too(name: str) -> None:
    judged = verify(RULES[name])
    assert judged.status is Status.PROVED, judged.certificate.reason
    assert try_rule(RULES[name]).status is Status.TESTED


@pytest.mark.nightly
@pytest.mark.parametrize(("file", "proved"), [("graph_subst.pb", 129), ("generated_depth3.pb", 608)])
def test_all_published_rules_are_proved_but_for_those_that_the_trials_refute(file: str, proved: int) -> None:
    open_ones = [r for r in published(file) if not prove(r, SECONDS).done]
    assert len(published(file)) - len(open_ones) == proved
    assert all(try_rule(r).status is Status.REFUTED for r in open_ones)


# what the library has no rule for, and what wrong definitions below are shown with
SUBSAMPLING = _rule(
    """
    MaxPool(x, kernel_shape=(1, 1), strides=s)
      => Conv(x, IdentityKernel(channels=dim(x, 1), like=x, kernel_shape=(1, 1)), strides=s)
      where rank(x) == 4
    """
)
AVERAGING = _rule(
    """
    AveragePool(x, count_include_pad=1, kernel_shape=(3, 3), pads=(1, 1, 1, 1))
      => Conv(x, AveragingKernel(channels=dim(x, 1), like=x, kernel_shape=(3, 3)), group=dim(x, 1), pads=(1, 1, 1, 1))
      where rank(x) == 4
    """
)


@pytest.mark.parametrize(
    "rule",
    [
        SUBSAMPLING,
        AVERAGING,
        _rule("Softmax(Softmax(x, axis=1), axis=1) => Softmax(Softmax(x, axis=1), axis=1) where rank(x) == 2"),
        _rule("Min(x, y) => Neg(Max(Neg(x), Neg(y)))"),
        _rule("ReduceSum(Add(x, y), axes=a, keepdims=k) => Add(ReduceSum(x, axes=a, keepdims=k), "
                   "ReduceSum(y, axes=a, keepdims=k)) where rank(x) == 2 and same_shape(x, y)"),
        _rule("Relu(MaxPool(x, kernel_shape=(1, 1))) => MaxPool(Relu(x), kernel_shape=(1, 1)) where rank(x) == 4"),
        _rule("MatMul(x, IdentityMatrix(size=dim(x, 1), like=x)) => x where rank(x) == 2"),
    ],
    ids=lambda r: r.name[:60],
)  # fmt: skip
def test_reductions_extremes_and_constants_are_understood(rule: Rule) -> None:
    assert prove(rule, SECONDS).done


def test_the_certificate_says_what_was_shown_and_runs_again() -> None:
    judged = verify(RULES["merge-matmul"])
    assert judged.status is Status.PROVED
    assert "symbolic" in judged.certificate.method and "up to 6 dimensions" in judged.certificate.method
    assert judged.certificate.command == "taso rules verify core.rules --rule merge-matmul"
    assert verify(judged) == judged


def test_the_same_rule_gets_the_same_verdict_in_another_process() -> None:
    code = (
        "from taso.rules.text import parse_rule; from taso.rules.verifier import prove\n"
        "for text in ('Concat(Relu(x), Relu(y), axis=a) => Relu(Concat(y, x, axis=a))\\nwhere same_shape(x, y)',\n"
        "             'Add(Mul(x, z), Mul(y, z)) => Mul(Add(x, y), z)\\nwhere same_shape(x, y)'):\n"
        "    print(prove(parse_rule(text), 120.0))\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(LIBRARY.parents[3])},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert runs[0] == runs[1] and "done=True" in runs[0]


def test_a_time_out_is_no_proof() -> None:
    judged = verify(RULES["merge-conv-bias"], seconds=0.0)
    assert "small sizes" in judged.certificate.reason or "sizes up to" in judged.certificate.reason
    assert judged.status is Status.TESTED
    assert "the time allowed" in judged.certificate.reason


# ── what is never proved ─────────────────────────────────────────────────────────────────────────────────────────

WRONG = {
    "concat order": "Concat(Relu(x), Relu(y), axis=a) => Relu(Concat(y, x, axis=a)) where same_shape(x, y)",
    "concat order in a product": "MatMul(Concat(x, y, axis=1), Concat(a, b, axis=0)) => "
    "Add(MatMul(x, b), MatMul(y, a)) where rank(x) == 2 and rank(a) == 2 and rank(b) == 2 and same_shape(x, y) "
    "and dim(x, 1) == dim(a, 0) and dim(b, 0) == dim(a, 0)",
    "split order": "Split(Concat(x, y, axis=a), axis=a, split=s, outputs=2) => y | x "
    "where same_shape(x, y) and s[0] == dim(x, a)",
    "split elsewhere": "Split(Concat(x, y, axis=a), axis=a, split=s, outputs=2) => x | y",
    "wrong axis": "Softmax(Transpose(x, perm=(1, 0)), axis=1) => Transpose(Softmax(x, axis=1), perm=(1, 0)) "
    "where rank(x) == 2",
    "wrong axis of a concatenation": "MatMul(x, Concat(a, b, axis=0)) => Concat(MatMul(x, a), MatMul(x, b), axis=1) "
    "where rank(x) == 2 and rank(a) == 2 and rank(b) == 2",
    "permutations the other way round": "Transpose(Transpose(x, perm=p), perm=q) => Transpose(x, perm=compose(q, p))",
    "group mismatch": "Concat(Conv(x, w), Conv(y, v), axis=1) => Conv(Concat(x, y, axis=1), Concat(w, v, axis=0), "
    "group=2) where rank(x) == 4 and dim(w, 1) == dim(v, 1) and shape(w)[2:] == shape(v)[2:] "
    "and (dim(w, 0) + dim(v, 0)) % 2 == 0",
    "groups merged without need to divide": "Conv(x, w, group=g) => Conv(x, MergeGroupConv(w, count=2, groups=g), "
    "group=g // 2)",
    "missing sign condition": "Mul(Relu(x), c) => Relu(Mul(x, c)) where rank(c) == 0",
    "relu of a negative": "Relu(Neg(x)) => Neg(Relu(x))",
    "relu of a sum": "Relu(Add(x, y)) => Add(Relu(x), Relu(y)) where same_shape(x, y)",
    "stride ignored": "Add(Conv(x, a, strides=s), Conv(x, b, strides=s)) => Conv(x, Add(a, b)) where same_shape(a, b)",
    "dilation ignored": "MaxPool(x, dilations=d, kernel_shape=(3, 3), pads=(1, 1, 1, 1)) => "
    "MaxPool(x, kernel_shape=(3, 3), pads=(1, 1, 1, 1)) where rank(x) == 4",
    "padding not counted": "AveragePool(x, kernel_shape=(3, 3), pads=(1, 1, 1, 1)) => Conv(x, AveragingKernel("
    "channels=dim(x, 1), like=x, kernel_shape=(3, 3)), group=dim(x, 1), pads=(1, 1, 1, 1)) where rank(x) == 4",
    "pads exchanged": "Conv(Pad(x, pads=q), w) => Conv(x, w, pads=(q[6], q[7], q[2], q[3])) where rank(x) == 4 "
    "and q[0] == 0 and q[1] == 0 and q[4] == 0 and q[5] == 0 and min(q) >= 0",
    "negative padding": "Conv(Pad(x, pads=q), w, pads=p) => Conv(x, w, pads=(p[0] + q[2], p[1] + q[3], p[2] + q[6], "
    "p[3] + q[7])) where rank(x) == 4 and q[0] == 0 and q[1] == 0 and q[4] == 0 and q[5] == 0",
    "enlarged off-centre": "Conv(x, w, pads=(1, 1, 1, 1)) => Conv(x, Enlarge(w, kernel_shape=(5, 5)), "
    "pads=(1, 1, 3, 3)) where rank(x) == 4 and shape(w)[2:] == (3, 3)",
    "enlarged by an odd number": "Conv(x, w, pads=(1, 1, 1, 1)) => Conv(x, Enlarge(w, kernel_shape=(4, 4)), "
    "pads=(2, 2, 1, 1)) where rank(x) == 4 and shape(w)[2:] == (3, 3)",
    "factor dropped": "Mul(Conv(x, w), c) => Conv(x, w) where rank(c) == 0",
    "factor on one term": "Mul(Add(x, y), z) => Add(Mul(x, z), y) where same_shape(x, y) and same_shape(x, z)",
    "epsilon dropped": "BatchNormalization(x, s, b, m, v, epsilon=e) => Add(Mul(Sub(x, Reshape(m, shape=(-1, 1, 1))), "
    "Reshape(Div(s, Sqrt(v)), shape=(-1, 1, 1))), Reshape(b, shape=(-1, 1, 1))) "
    "where rank(x) == 4 and is_float(x) and same_dtype(x, s, b, m, v)",
    "mixed element types": "BatchNormalization(x, s, b, m, v, epsilon=e) => "
    "Add(Mul(Sub(x, Reshape(m, shape=(-1, 1, 1))), Reshape(Div(s, Sqrt(Add(v, Constant(e, like=v)))), "
    "shape=(-1, 1, 1))), Reshape(b, shape=(-1, 1, 1))) where rank(x) == 4",
    "broadcasting forgotten": "Add(x, c) => x where filled(c, 0)",
    "another constant": "Mul(x, c) => x where filled(c, 2) and broadcasts_to(shape(c), shape(x))",
    "pooled sizes alone equal": RULES["maxpool-after-concat"].name,
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_rule_is_not_proved(kind: str) -> None:
    proof = prove(_rule(WRONG[kind]), SECONDS)
    assert not proof.done
    assert proof.reason and "time" not in proof.reason


def _with_inputs_exchanged(rule: Rule) -> Iterator[Rule]:
    """The rule with the first two inputs of one node of its target exchanged, and with a condition left out."""
    for place, node in enumerate(rule.target):
        if len(node.inputs) > 1:
            inputs = (node.inputs[1], node.inputs[0], *node.inputs[2:])
            target = (*rule.target[:place], replace(node, inputs=inputs), *rule.target[place + 1 :])
            yield replace(rule, target=target)
    for place in range(len(rule.conditions)):
        yield replace(rule, conditions=rule.conditions[:place] + rule.conditions[place + 1 :])


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(RULES))
def test_no_variant_of_a_rule_is_both_proved_and_refuted(name: str) -> None:
    for variant in _with_inputs_exchanged(RULES[name]):
        if prove(variant, 10.0).done:
            assert try_rule(variant).status is not Status.REFUTED, variant.name


def test_a_counterexample_outweighs_everything() -> None:
    judged = verify(_rule(WRONG["missing sign condition"]))
    assert judged.status is Status.REFUTED and judged.certificate.counterexample


def test_an_operator_without_meaning_is_told() -> None:
    proof = prove(_rule("Gather(Gather(x, i, axis=0), j, axis=0) => Gather(x, i, axis=0)"), SECONDS)
    assert not proof.done and "no meaning" in proof.reason


# ── proofs rest on the definitions ───────────────────────────────────────────────────────────────────────────────


@contextmanager
def redefined(op: Operator, meaning: MeaningFunction) -> Iterator[None]:
    """The operator with another meaning for a while."""
    before = op.meaning
    object.__setattr__(op, "meaning", meaning)
    try:
        yield
    finally:
        object.__setattr__(op, "meaning", before)


def _changed(op: Operator, by: Callable[[Attrs], Attrs]) -> MeaningFunction:
    """The meaning that an operator has with other settings."""
    before = op.meaning
    assert before is not None
    return lambda types, attrs: before(types, by(attrs))


def _moved(op: Operator, by: Callable[[notation.Expr], notation.Expr]) -> MeaningFunction:
    """The meaning of an operator with its elements changed."""
    before = op.meaning
    assert before is not None
    return lambda types, attrs: tuple(Meaning(m.axes, by(m.body)) for m in before(types, attrs))


def _unstrided(attrs: Attrs) -> Attrs:
    return Attrs({**attrs, "strides": tuple(1 for _ in attrs.ints("strides"))})


def _reversed_pieces(body: notation.Expr) -> notation.Expr:
    assert isinstance(body, notation.Pick)
    return notation.Pick(body.loop, tuple(reversed(body.pieces)))


def _reversed_parts(op: Operator) -> MeaningFunction:
    before = op.meaning
    assert before is not None
    return lambda types, attrs: tuple(reversed(before(types, attrs)))


def _off_centre(body: notation.Expr) -> notation.Expr:
    assert isinstance(body, Read)
    return Read(body.input, (*body.index[:2], *(a + 1 for a in body.index[2:])), body.fill)


def _wrong_slots(types: object, attrs: Attrs) -> tuple[Meaning, ...]:
    """The weight of merged groups with slots that change fastest, not slowest."""
    (w,) = types  # type: ignore[misc]  # the types of one input
    count = attrs.int("count")
    outer, o, slot = Loop("outer", attrs.int("groups") // count), Loop("o", w.dims[0] // attrs.int("groups")), Loop(
        "slot", count
    )
    c, place = Loop("c", w.dims[1]), Loop("place", count)
    window = tuple(Loop(f"k{a}", d) for a, d in enumerate(w.dims[2:]))
    own = Read(0, (at(outer, o.extent * count) + at(o, count) + at(slot), at(c), *map(at, window)))
    body = Call("mul", (own, notation.same((at(slot), at(place)))))
    return (Meaning(((outer, o, slot), (place, c), *((k,) for k in window)), body),)


def _without_factor(body: notation.Expr) -> notation.Expr:
    assert isinstance(body, Reduce) and isinstance(body.body, Call)
    return Reduce(body.kind, body.loops, body.body.args[1])


def _swapped(types: object, attrs: Attrs) -> tuple[Meaning, ...]:
    (x,) = types  # type: ignore[misc]  # the types of one input
    loops = output_loops(x.dims)
    return (Meaning(single_axes(loops), Read(0, tuple(map(at, loops)))),)


CONCAT, SPLIT, CONV, ENLARGE = map(operator_named, ("Concat", "Split", "Conv", "Enlarge"))
MERGE, AVERAGE, GEMM, TRANSPOSE = map(operator_named, ("MergeGroupConv", "AveragePool", "Gemm", "Transpose"))

REDEFINITIONS: list[tuple[str, Rule, Operator, MeaningFunction]] = [
    ("concat order", RULES["split-of-concat"], CONCAT, _moved(CONCAT, _reversed_pieces)),
    ("split order", RULES["split-of-concat"], SPLIT, _reversed_parts(SPLIT)),
    ("split order put together again", RULES["concat-of-split"], SPLIT, _reversed_parts(SPLIT)),
    ("stride ignored", SUBSAMPLING, CONV, _changed(CONV, _unstrided)),
    ("padding not counted", AVERAGING, AVERAGE, _changed(AVERAGE, lambda a: Attrs({**a, "count_include_pad": 0}))),
    ("enlarged off-centre", RULES["enlarge-merge-conv"], ENLARGE, _moved(ENLARGE, _off_centre)),
    ("slots of merged groups", RULES["merge-groups-2"], MERGE, _wrong_slots),
    ("wrong axis", RULES["transpose-into-gemm"], GEMM, _changed(GEMM, lambda a: Attrs({**a, "transA": 0}))),
    ("no transposition", RULES["transpose-into-matmul"], TRANSPOSE, _swapped),
    ("factor dropped", SUBSAMPLING, CONV, _moved(CONV, _without_factor)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "op", "meaning"), [r[1:] for r in REDEFINITIONS], ids=[r[0] for r in REDEFINITIONS])
def test_with_a_wrong_definition_the_proof_fails(rule: Rule, op: Operator, meaning: MeaningFunction) -> None:
    assert prove(rule, SECONDS).done
    with redefined(op, meaning):
        assert not prove(rule, SECONDS).done


def test_a_definition_that_evades_unknown_sizes_is_noticed() -> None:
    def constant(types: object, attrs: Attrs) -> tuple[Meaning, ...]:
        (x,) = types  # type: ignore[misc]  # the types of one input
        length = next(iter(range(x.dims[0], x.dims[0] + 1))) if x.rank else 0
        return (Meaning(single_axes(output_loops(x.dims)), notation.Const(notation.Fraction(length))),)

    relu = operator_named("Relu")
    with redefined(relu, constant):
        proof = prove(_rule("Relu(Relu(x)) => Relu(x) where rank(x) == 1"), SECONDS)
    assert not proof.done and "does not compute with unknown sizes" in proof.reason


def test_a_reshape_is_that_of_its_written_out_shape() -> None:
    """What lets a Reshape whose setting nothing else reads stand for those with 0 and −1."""
    trail, ways = Trail(_effort()), 0
    for _ in trail.ways():
        case = Case(trail)
        x = TensorType(DType.FLOAT, tuple(case.size(f"x.{i}", 1) for i in range(case.choose(4))))
        asked = tuple(case.size(f"s[{i}]", None) for i in range(case.choose(4)))
        try:
            (out,) = RESHAPE.types_of((x,), RESHAPE.complete({"shape": asked}))
        except GraphError:
            continue
        case.in_source = False
        try:
            (again,) = RESHAPE.types_of((x,), RESHAPE.complete({"shape": out.dims}))
        except GraphError:
            assert case.known.impossible
            continue
        pairs = zip(out.dims, again.dims, strict=True)
        same = all(case.known.zero(case.poly(a) - case.poly(b)) for a, b in pairs)
        assert (same and all(case.known.nonneg(case.poly(d) - ONE) for d in out.dims)) or case.known.impossible
        ways += 1
    assert ways > 50


# ── what follows from what ───────────────────────────────────────────────────────────────────────────────────────


def test_equations_are_solved_and_substituted() -> None:
    known = Knowledge(_effort())
    a, b, c = (Poly.atom(known.atom("size", n, 1)) for n in "abc")
    known.assume_zero(a - b * c)
    assert known.zero(a * 2 - b * c * 2) is True
    assert known.quotient(a, b) == c
    assert known.zero(a - b * c - ONE) is False


def test_a_product_of_sizes_that_is_1_makes_each_of_them_1() -> None:
    known = Knowledge(_effort())
    a, b = (Poly.atom(known.atom("size", n, 1)) for n in "ab")
    known.assume_zero(a * b - ONE)
    assert known.now(a) == known.now(b) == ONE


def test_a_rest_is_smaller_than_what_it_is_divided_by() -> None:
    known = Knowledge(_effort())
    a, b = (Poly.atom(known.atom("size", n, 1)) for n in "ab")
    rest = a - b * known.quotient(a, b)
    assert known.nonneg(rest) and known.nonneg(b - ONE - rest)
    assert not known.nonneg(rest - ONE)


def test_a_broadcast_of_broadcasts_does_not_depend_on_the_order() -> None:
    case = Case(Trail(_effort()))
    a, b, c = (Poly.atom(case.known.atom("size", n, 1)) for n in "abc")
    left = case.broadcast(case.broadcast(a, b), c)
    case.in_source = False
    assert case.known.zero(left - case.broadcast(a, case.broadcast(b, c))) is True
    assert case.known.zero(left - a) is None


def test_a_clause_alone_decides_nothing() -> None:
    known = Knowledge(_effort())
    a, b = (Poly.atom(known.atom("size", n, 1)) for n in "ab")
    known.assume_one_of(((is_zero(a - ONE),), (is_zero(a - b),)))
    assert known.zero(a - b) is None and known.zero(a - ONE) is None
    known.assume_nonneg(a - 2)
    assert known.zero(a - b) is True


_SIZES = st.lists(st.integers(1, 6), min_size=3, max_size=3)
_FORMS = st.lists(
    st.tuples(st.integers(-2, 2), st.integers(-2, 2), st.integers(-2, 2), st.integers(-4, 4), st.integers(-1, 1)),
    min_size=1, max_size=4,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(_SIZES, _FORMS, st.integers(2, 4))
def test_whatever_follows_is_true_of_numbers_that_satisfy_the_assumptions(
    sizes: list[int], forms: list[tuple[int, int, int, int, int]], divisor: int
) -> None:
    known = Knowledge(_effort())
    atoms = [Poly.atom(known.atom("size", n, 1)) for n in "abc"]
    quotient, whole = known.quotient(atoms[0] + atoms[1], Poly.number(divisor)), (sizes[0] + sizes[1]) // divisor

    def poly(form: tuple[int, int, int, int, int]) -> Poly:
        p, q, r, s, t = form
        return atoms[0] * p + atoms[1] * atoms[2] * q + quotient * r + Poly.number(s) + atoms[2] * t

    def value(form: tuple[int, int, int, int, int]) -> int:
        p, q, r, s, t = form
        return p * sizes[0] + q * sizes[1] * sizes[2] + r * whole + s + t * sizes[2]

    for form in forms[1:]:
        if value(form) == 0:
            known.assume_zero(poly(form))
        elif value(form) > 0:
            known.assume_nonneg(poly(form))
        else:
            known.assume_nonneg(-poly(form))
    asked = poly(forms[0])
    assert not known.impossible
    assert not known.nonneg(asked) or value(forms[0]) >= 0
    assert known.zero(asked) in (None, value(forms[0]) == 0)
