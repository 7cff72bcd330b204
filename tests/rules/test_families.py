"""The hand-written families: each rule applies in a real ONNX model and changes nothing; their mutants are refused."""

from __future__ import annotations

import random
import runpy
from fractions import Fraction
from functools import cache
from pathlib import Path

import models
import numpy as np
import onnx.checker
import pytest
from models import Arrays
from searching import ROUNDED, drafted, instances, plant, prepared, run_unoptimized

import taso
from taso.graph.errors import GraphError, RuleError
from taso.graph.evaluate import evaluate_graph
from taso.graph.index import evaluate
from taso.graph.numbers import Float64, Modular
from taso.graph.operator import Attrs
from taso.graph.ops import operator_named
from taso.graph.ops.elementwise import constant
from taso.graph.types import DType, TensorType
from taso.rules.collection import read
from taso.rules.expression import Bindings, ExpressionError, exact_number, parse, reason_against, value_of
from taso.rules.matcher import Matcher
from taso.rules.pattern import Exactness, Rule, Status
from taso.rules.tester import test_rule as try_rule
from taso.rules.text import parse_rule, show_rule
from taso.rules.verifier import prove
from taso.search.result import to_graph
from taso.search.rewrite import Refused
from taso.search.state import Cycle, check
from taso.search.verify import relative_error

LIBRARY = Path(__file__).parents[2] / "taso" / "rules" / "library"
FAMILIES = ("activation", "attention", "convolution", "motion", "normalization", "transpose", "winograd")
SECONDS = 240.0
SECONDS_OF_A_MUTANT = 20.0
"""A proof that does not end is none; those of the rules that mutants are made of mostly take less."""
NEWEST = 21
"""The opset of the models, unless an operator of the rule is newer."""


@cache
def family(name: str) -> tuple[Rule, ...]:
    return tuple(read(LIBRARY / f"{name}.rules"))


RULES = {r.id: r for name in FAMILIES for r in family(name)}


# ── the files ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_rule_of_a_family_stands_twice() -> None:
    rules = [*read(LIBRARY / "core.rules"), *(r for name in FAMILIES for r in family(name))]
    assert len({r.id for r in rules}) == len(rules)
    assert len({(r.name, r.conditions) for r in rules}) == len(rules)


def test_the_winograd_rules_are_what_their_generator_writes() -> None:
    generator = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "winograd_rules.py"))
    assert (LIBRARY / "winograd.rules").read_text() == generator["text"]()


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_of_the_families_is_proved(name: str) -> None:
    proof = prove(RULES[name], SECONDS)
    assert proof.done, proof.reason


# some of each family whose proofs take less than a second
PROVED = (
    "gelu-div", "gelu-mul-half-last", "hardswish-scaled", "prelu-to-leakyrelu", "root", "inverse-root",
    "expand-of-expand",
    "merge-gemm-transposed", "scale-of-queries-into-linear", "matmul-of-transposes", "transpose-of-gemm",
    "pointwise-then-conv", "depthwise-then-pointwise", "residual-into-conv", "batchnorm-before-conv", "groupnorm",
    "batchnorm-into-convtranspose", "batchnorm-batchnorm", "softmax-spelled", "averagepool-before-conv-bias",
    "mean-of-mean",
    "drop-reshape", "split-second-again", "concat-zeros-behind", "transpose-past-relu", "transpose-past-sub-of-last",
    "transpose-into-mean-nhwc", "transpose-past-pad-4", "transpose-past-slice-2",
    "drop-slice-of-two",
    "winograd-3x3-tile-2x2-batchnorm-bias", "winograd-1x7-tile-1x4-bias", "winograd-7x1-tile-2x1",
    "winograd-3x1-tile-4x1-batchnorm",
)  # fmt: skip


@pytest.mark.parametrize("name", PROVED)
def test_some_rules_of_each_family_are_proved(name: str) -> None:
    proof = prove(RULES[name], SECONDS)
    assert proof.done, proof.reason


# ── what each rule does to a model ───────────────────────────────────────────────────────────────────────────────


def modelled(known: Rule, which: int) -> taso.Graph:
    """An ONNX model that holds the source of a rule, written and read again."""
    graph = taso.Graph()
    graph.info.opsets[""] = max(NEWEST, *(node.op.since for node in (*known.source, *known.target)))
    replaced = plant(graph, known, instances(known)[which], random.Random(which), [], apart=True)
    graph.set_outputs([(f"o{i}", v) for i, v in enumerate(replaced)])
    proto = taso.export_onnx(graph)
    onnx.checker.check_model(proto, full_check=True)
    return taso.load_onnx(proto)


def rewritten(graph: taso.Graph, known: Rule) -> list[taso.Graph]:
    """The model after each match of the rule."""
    start, results = prepared(graph), []
    for match in Matcher([known]).find_all(start.state):
        try:
            state = drafted(start.state, match).commit()
        except (Refused, Cycle, GraphError):
            continue
        check(state)
        result = to_graph(state, graph, start.classes, taso.Graph)
        assert isinstance(result, taso.Graph)
        results.append(result)
    return results


def inputs_of(graph: taso.Graph, positive: bool) -> Arrays:
    rng = np.random.default_rng(7)
    feeds: Arrays = {}
    for name, value in zip(graph.input_names, graph.inputs, strict=True):
        drawn = rng.normal(size=value.type.static_shape)
        feeds[name] = np.asarray(np.abs(drawn) + 0.3 if positive else drawn).astype(value.type.dtype.numpy)
    return feeds


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_rule_applies_in_a_model_which_stays_valid_and_gives_the_same(name: str) -> None:
    known = RULES[name].judged(Status.TESTED, RULES[name].certificate)
    applied = 0
    for which in range(len(instances(known))):
        graph = modelled(known, which)
        for result in rewritten(graph, known)[:1]:
            applied += 1
            _assert_same(graph, result, known, runs=applied == 1)
    assert applied, f"none of {len(instances(known))} models"


def _assert_same(before: taso.Graph, after: taso.Graph, known: Rule, runs: bool) -> None:
    assert [(n, v.type) for n, v in after.outputs] == [(n, v.type) for n, v in before.outputs]
    for positive in (True, False):
        feeds = inputs_of(before, positive)
        with np.errstate(all="ignore"):
            wanted, found = (evaluate_graph(g, feeds, wide=True) for g in (before, after))
        for name, value in wanted.items():
            if known.exactness is Exactness.EXACT:
                assert np.array_equal(found[name], value, equal_nan=True), name
            else:
                assert relative_error(found[name], value) <= ROUNDED, name
    if runs:
        feeds = inputs_of(before, positive=True)
        protos = [taso.export_onnx(g) for g in (before, after)]
        onnx.checker.check_model(protos[1], full_check=True)
        for a, b in zip(*(run_unoptimized(p, feeds) for p in protos), strict=True):
            assert relative_error(b, a) <= 1e-4


def test_where_the_opset_lacks_the_one_operator_a_file_has_its_parts() -> None:
    text = """g (float[2,8] x) => (float[2,8] y) <float r = {1.4142135}, float one = {1.0}, float half = {0.5}> {
      a = Div(x, r)  b = Erf(a)  c = Add(b, one)  d = Mul(x, c)  y = Mul(d, half) }"""
    known = RULES["gelu-div"].judged(Status.TESTED, RULES["gelu-div"].certificate)
    for opset, written in ((17, ["Div", "Erf", "Add", "Mul", "Mul"]), (20, ["Gelu"])):
        (after,) = rewritten(taso.load_onnx(models.model(text, opset=opset)), known)
        assert [n.op.name for n in after.operators] == ["Gelu"]
        assert [n.op_type for n in taso.export_onnx(after).graph.node] == written


# ── mutants ──────────────────────────────────────────────────────────────────────────────────────────────────────

_TILE = "like=x, taps=(3, 3), tile=(2, 2)"

MUTANTS = {
    "activation": [
        ("gelu-div", "filled(half, 0.5)", "filled(half, 0.25)"),
        ("gelu-mul", "1 / 1.4142135623730951", "1.4142135623730951"),
        ("gelu-tanh-mul", "0.044715", "0.054715"),
        ("swish-scaled", "alpha=value(c)", "alpha=1.5"),
        ("hardswish-divided", "max=6.0", "max=5.0"),
        ("hardswish-scaled-last", "1 / 6", "1 / 3"),
        ("prelu-to-leakyrelu", "alpha=value(c)", "alpha=0.125"),
        ("max-to-clip", "min=value(c)", "max=value(c)"),
        ("max-to-relu", "filled(c, 0) and ", ""),
        ("square", "filled(c, 2)", "filled(c, 3)"),
        ("root", "filled(c, 0.5)", "filled(c, 0.25)"),
        ("inverse-root", "Reciprocal(Sqrt(x))", "Sqrt(x)"),
        ("neg-by-sub", "broadcasts_to(shape(c), shape(x))", "rank(x) >= 1"),
        ("div-reciprocal", "Mul(x, y)", "Mul(y, y)"),
    ],
    "attention": [
        ("merge-matmul-3", "Concat(a, b, c, axis=1)", "Concat(b, a, c, axis=1)"),
        ("merge-matmul-bias-3", "Concat(p, q, r, axis=0)", "Concat(p, r, q, axis=0)"),
        ("merge-gemm-transposed", "Concat(a, b, axis=0)", "Concat(b, a, axis=0)"),
        ("scale-of-queries-into-linear", "Mul(b, Reshape(c, shape=()))", "b"),
        ("divisor-of-scores-into-gemm", "Div(w, ", "Mul(w, "),
        ("scale-of-heads-into-matmul", "size(c) == 1 and rank(c) == 0", "rank(c) == 1"),
        ("matmul-of-transposes", "MatMul(y, x)", "MatMul(x, y)"),
        ("transpose-of-matmul", " and p == range(rank(x) - 2) + (rank(x) - 1, rank(x) - 2)", ""),
        ("transpose-b-into-gemm", "transB=1 - u", "transB=u"),
        ("matmul-between-reshapes", "t == (dim(x, 0), dim(x, 1)", "t == (dim(x, 1), dim(x, 0)"),
    ],
    "convolution": [
        ("conv-then-pointwise", " and shape(v)[2:] == (1,) * (rank(v) - 2)", ""),
        ("conv-bias-then-pointwise", "MatMul(Reshape(v, shape=(dim(v, 0), dim(v, 1))), b)", "b"),
        ("pointwise-bias-then-conv", "strides=s", "pads=p, strides=s"),
        ("depthwise-then-pointwise", " and dim(w, 1) == 1", ""),
        ("pointwise-bias-then-depthwise-bias", "strides=s", "pads=p, strides=s"),
        ("concat-grouped-conv", " and dim(a, 0) * h == dim(b, 0) * g", ""),
        ("depthwise-of-split", "Concat(a, b, axis=0)", "Concat(b, a, axis=0)"),
        ("merge-depthwise", "group=2 * g", "group=g"),
        ("enlarge-conv-sum-bias", "Add(c, e)", "c"),
        ("residual-into-conv", " and dim(w, 2) % 2 == 1", ""),
        ("residual-into-conv", " and dim(w, 0) == dim(w, 1)", ""),
    ],
    "motion": [
        ("concat-concat-middle-3", "Concat(x, y, z, w, axis=a)", "Concat(x, z, y, w, axis=a)"),
        ("split-of-concat-3", " and s[1] == dim(y, a)", ""),
        ("split-second-again", "(s[0], t[0], t[1])", "(s[0], t[1], t[0])"),
        ("slice-slice", "s[0] + t[0]", "t[0]"),
        ("slice-of-concat-first", " and e[0] <= dim(x, a)", ""),
        ("slices-to-split", "dim(x, a[0]) - e[0])", "e[0])"),
        ("pad-pad-4", "p[7] + q[7]", "q[7]"),
        ("concat-zeros-behind", "filled(z, 0) and ", ""),
        ("concat-zeros-before", "(0,) * a + (dim(z, a),)", "(dim(z, a),) + (0,) * a"),
        ("drop-reshape", "s == shape(x)", "len(s) == rank(x)"),
        ("transpose-to-reshape-3", " and (dim(x, 1) == 1 or dim(x, 2) == 1)", ""),
        ("expand-into-add", "broadcasts_to(s, shape(y)) and ", ""),
        ("gelu-before-split", "(s[0], s[1])", "(s[1], s[0])"),
        ("softmax-after-concat", "a != b", "rank(x) >= 1"),
        ("mul-shared-after-concat", "size(c) == 1", "rank(c) >= 1"),
    ],
    "normalization": [
        ("batchnorm-into-gemm-transposed", "shape=(-1, 1)", "shape=(1, -1)"),
        ("batchnorm-into-matmul-bias", "Sub(b, mean)", "Add(b, mean)"),
        ("batchnorm-into-convtranspose", "shape=(1, -1)", "shape=(-1, 1)"),
        ("batchnorm-before-conv", "strides=s", "pads=p, strides=s"),
        ("add-before-conv", "strides=s", "pads=p, strides=s"),
        ("batchnorm-batchnorm", "Sub(b1, m2)", "Sub(b1, m1)"),
        ("batchnorm-after-concat", "Concat(s1, s2, axis=0)", "Concat(s2, s1, axis=0)"),
        ("scale-before-matmul", "shape=(-1, 1)", "shape=(1, -1)"),
        ("layernorm-squared", "epsilon=value(c)", "epsilon=0.125"),
        ("rmsnorm-squared", "a == range(a[0], rank(x)) and ", ""),
        ("instancenorm-plain", "value=0.0", "value=1.0"),
        ("groupnorm", "filled(zero, 0) and ", ""),
        ("softmax-spelled", "axis=a[0]", "axis=0"),
        ("mean-to-global-pool", " and a == range(2, rank(x))", " and len(a) == 2"),
        ("averagepool-before-conv-bias", "kernel_shape=k,", "count_include_pad=1, kernel_shape=k, pads=p,"),
        ("global-averagepool-before-conv-bias", "GlobalAveragePool(x)", "GlobalMaxPool(x)"),
        ("pad-into-averagepool", "count_include_pad=1, ", ""),
    ],
    "transpose": [
        ("transpose-past-sub-of-last", "p[rank(x) - 1]", "0"),
        ("transpose-past-add", "perm=inverse(p)", "perm=p"),
        ("transposes-past-concat-2", "axis=p[a]", "axis=a"),
        ("transpose-past-split-2", "inverse(p)[a]", "p[a]"),
        ("transpose-past-mean-1", "(p[a[0]],)", "(a[0],)"),
        ("transpose-into-sum-nhwc", "p == (0, 2, 3, 1)", "p == (0, 3, 1, 2)"),
        ("transpose-past-softmax", "axis=p[a]", "axis=inverse(p)[a]"),
        ("transpose-past-pad-3", "permuted(q[:3], inverse(p))", "permuted(q[:3], p)"),
        ("transpose-into-flatten-positions", " and dim(x, 2) == 1", ""),
        ("unsqueeze-of-transpose", "axes=(rank(x),)", "axes=(0,)"),
    ],
    "winograd": [
        ("winograd-3x3-tile-2x2", "blocksize=2", "blocksize=2, mode='CRD'"),
        ("winograd-3x3-tile-2x2", "axis=3, taps=3, tile=2), axis=2,", "axis=2, taps=3, tile=2), axis=3,"),
        ("winograd-3x3-tile-2x2", f"TileOutput({_TILE})", f"Transpose(TileOutput({_TILE}), perm=(1, 0, 2, 3))"),
        ("winograd-3x3-tile-2x2-bias", "Mul(Reshape(TileBias", "Add(Reshape(TileBias"),
        ("winograd-3x3-tile-2x2-batchnorm-bias", "Sub(b, mean)", "Add(b, mean)"),
        ("winograd-1x7-tile-1x2", "shape=(2, 8)), perm=(1, 0))", "shape=(8, 2)), perm=(0, 1))"),
        ("winograd-7x1-tile-2x1", "perm=(0, 2, 1, 3)", "perm=(0, 1, 2, 3)"),
    ],
}  # fmt: skip
CASES = [(name, *change) for name, changes in MUTANTS.items() for change in changes]


def mutant(name: str, old: str, new: str) -> Rule:
    text = show_rule(RULES[name])
    assert old in text, text
    return parse_rule(text.replace(old, new))


@pytest.mark.parametrize(("kind", "name", "old", "new"), CASES, ids=[f"{c[1]}: {c[2]}" for c in CASES])
def test_a_mutant_of_a_rule_is_neither_proved_nor_passes_its_trials(kind: str, name: str, old: str, new: str) -> None:
    assert RULES[name] in family(kind)
    wrong = mutant(name, old, new)
    assert not prove(wrong, SECONDS_OF_A_MUTANT).done
    assert try_rule(wrong).status is Status.REFUTED


# ── what the families brought: numbers of weights, exact constants, powers, slices, transposed convolutions ──────


def _of(**contents: object) -> Bindings:
    arrays = {n: np.asarray(v, np.float32) for n, v in contents.items()}
    types = {n: TensorType(DType.FLOAT, a.shape) for n, a in arrays.items()}
    return Bindings(types, {}, frozenset(arrays), arrays)


def test_the_value_of_a_weight_is_the_number_that_all_its_elements_are() -> None:
    assert value_of(parse("value(c)"), _of(c=[[2.5, 2.5]])) == 2.5
    assert value_of(parse("value(c)"), _of(c=1e-5)) == float(np.float32(1e-5))


@pytest.mark.parametrize("content", [[1.0, 2.0], [], [float("nan")]])
def test_a_weight_without_one_number_has_no_value(content: list[float]) -> None:
    with pytest.raises(ExpressionError, match="'c'"):
        value_of(parse("value(c)"), _of(c=content))
    assert "has no value" in (reason_against(parse("value(c) >= 0"), _of(c=content)) or "")


def test_what_is_no_weight_has_no_value() -> None:
    with pytest.raises(RuleError):
        value_of(parse("value(x)"), Bindings({"x": TensorType(DType.FLOAT, ())}))


def test_constants_of_conditions_are_exact() -> None:
    assert exact_number(parse("1 / 1.5")) == Fraction(2, 3)
    assert exact_number(parse("-(2 * 0.1 - 1)")) == Fraction(4, 5)
    assert exact_number(parse("1 / 0")) is None and exact_number(parse("dim(x, 0)")) is None


def test_powers_modulo_a_prime_are_products_roots_and_reciprocals() -> None:
    numbers = Modular(33554393, 3)
    x = np.arange(1, 9)

    def power(exponent: float) -> object:
        return numbers.call("pow", [x, np.asarray(numbers.constant(constant(exponent).value))]).tolist()

    root = numbers.call("sqrt", [x])
    assert power(2) == (x * x).tolist() and power(3) == (x * x * x).tolist() and power(1) == x.tolist()
    assert power(0.5) == root.tolist()
    assert power(-0.5) == numbers.call("reciprocal", [root]).tolist()
    assert power(-1) == numbers.call("reciprocal", [x]).tolist()
    assert power(5) != numbers.call("mul", [x * x * x, x * x]).tolist()


def test_a_slice_takes_what_python_takes() -> None:
    op = operator_named("Slice")
    for size in range(1, 5):
        for start in range(-6, 7):
            for end in range(-6, 7):
                for step in (-3, -2, -1, 1, 2, 3):
                    attrs = op.complete({"starts": (start,), "ends": (end,), "steps": (step,)})
                    (t,) = op.types_of([TensorType(DType.FLOAT, (size,))], attrs)
                    stop = None if step < 0 and end < -size else end
                    wanted = np.arange(size)[slice(start, stop, step)]
                    assert op.meaning is not None
                    (meaning,) = op.meaning([TensorType(DType.FLOAT, (size,))], attrs)
                    assert t.dims == wanted.shape
                    assert evaluate(meaning, [np.arange(size)], Float64()).tolist() == wanted.tolist()


@pytest.mark.parametrize("seed", range(40))
def test_a_transposed_convolution_is_what_its_meaning_says(seed: int) -> None:
    rng, op = random.Random(seed), operator_named("ConvTranspose")
    assert op.meaning is not None and op.compute is not None
    rank, groups = rng.choice((1, 2)), rng.choice((1, 1, 2))
    x = (2, groups * rng.choice((1, 2)), *(rng.randint(2, 4) for _ in range(rank)))
    w = (x[1], rng.choice((1, 2)), *(rng.randint(2, 3) for _ in range(rank)))
    attrs: Attrs = op.complete({
        "strides": tuple(rng.randint(1, 3) for _ in range(rank)), "group": groups,
        "dilations": tuple(rng.randint(1, 2) for _ in range(rank)),
        "pads": tuple(rng.randint(0, 1) for _ in range(2 * rank)),
        "output_padding": tuple(rng.randint(0, 1) for _ in range(rank)),
    })  # fmt: skip
    shapes = (x, w, (w[1] * groups,)) if rng.random() < 0.5 else (x, w)
    arrays = [np.random.default_rng(seed).normal(size=s) for s in shapes]
    (meaning,) = op.meaning([TensorType(DType.DOUBLE, s) for s in shapes], attrs)
    (wanted,) = op.compute(arrays, attrs)
    assert relative_error(evaluate(meaning, arrays, Float64()), wanted) < 1e-12


def test_a_positive_factor_leaves_a_maximum_and_a_negative_one_does_not() -> None:
    equation = "Div(Max(x, y), c) => Max(Div(x, c), Div(y, c))\n where filled(c, 4) and same_shape(x, y, c)"
    assert prove(parse_rule(equation), SECONDS).done
    assert not prove(parse_rule(equation.replace("filled(c, 4)", "filled(c, -4)")), SECONDS).done


def test_a_number_that_is_divided_by_cancels_only_what_it_is() -> None:
    assert prove(parse_rule("ReduceMean(Expand(x, shape=(5, 7)), axes=(0, 1)) => Reshape(x, shape=(1, 1))\n"
                            " where rank(x) == 0"), SECONDS).done  # fmt: skip
    assert not prove(parse_rule("ReduceMean(Expand(x, shape=(5, 7)), axes=(0, 1)) => Reshape(Mul(x, x), shape=(1, 1))\n"
                                " where rank(x) == 0"), SECONDS).done  # fmt: skip
