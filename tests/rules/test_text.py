"""Rules as text and as patterns: reading, writing, what is refused, how attributes bind."""

from __future__ import annotations

import pickle

import pytest

from taso.graph.errors import RuleError
from taso.graph.operator import Attrs
from taso.graph.ops import operator_named
from taso.graph.types import DType, SymDim, TensorType
from taso.rules.expression import Bindings, Value
from taso.rules.pattern import Exactness, PatternNode, Port, Rule, Status, settled
from taso.rules.text import parse_rule, parse_rules, show_rule, show_rules

MERGE = """
# Products that share an operand
[merge-matmul]
MatMul(x, a) | MatMul(x, b) =>
    Split(MatMul(x, Concat(a, b, axis=1)), axis=1, split=(dim(a, 1), dim(b, 1)))
  where rank(a) == 2
    and rank(b) == 2
  exact: approximates
"""

EQUATIONS = [
    "Identity(x) => x",
    "Relu(Relu(x)) => Relu(x)",
    "Conv(x, w, _, group=g, strides=s) => Conv(x, w, group=g, strides=s)",
    "Transpose(Transpose(x, perm=p), perm=q) => Transpose(x, perm=compose(p, q))",
    "Split(x, axis=a, split=s, outputs=3)[1] => Identity(Split(x, axis=a, split=s, outputs=3)[1])",
    "Split(x, axis=0, split=(1, 2)) => Split(Identity(x), axis=0, split=(1, 2))",
    "Add(x, x) => Mul(x, Constant(like=x, value=2))",
    "Concat(x, y, x, axis=1) => Concat(x, y, x, axis=1)",
    "Cast(x, to=FLOAT) => Cast(Identity(x), to=FLOAT)",
    "Relu(x) | Relu(y) => Relu(y) | Relu(x)",
]


def test_a_paragraph_says_equation_identifier_conditions_and_exactness() -> None:
    rule = parse_rule(MERGE, "here")
    assert rule.id == "merge-matmul" and rule.origin == "here"
    assert rule.name == (
        "MatMul(x, a) | MatMul(x, b) => Split(MatMul(x, Concat(a, b, axis=1)), axis=1, split=(dim(a, 1), dim(b, 1)))"
    )
    assert [str(c) for c in rule.conditions] == ["rank(a) == 2", "rank(b) == 2"]
    assert rule.exactness is Exactness.APPROXIMATES
    assert rule.status is Status.UNPROVED
    assert rule.outputs == ((Port(0, 0), Port(2, 0)), (Port(1, 0), Port(2, 1)))
    assert [n.op.name for n in rule.target] == ["Concat", "MatMul", "Split"]
    assert rule.target[2].n_outputs == 2
    assert rule.variables == ("x", "a", "b")


@pytest.mark.parametrize("equation", EQUATIONS)
def test_the_text_of_a_rule_reads_back_as_the_rule(equation: str) -> None:
    rule = parse_rule(equation + "\n where (rank(x) == 2 or not rank(x) == 3) and rank(x) > 0\n exact: exact")
    assert rule.name == equation
    assert parse_rule(show_rule(rule)) == rule
    assert parse_rule(equation).exactness is Exactness.REASSOCIATES


def test_several_paragraphs_are_read_in_order_and_written_alike() -> None:
    rules = parse_rules("\n\n".join(["# heading", *EQUATIONS, MERGE]))
    assert [r.name for r in rules[:-1]] == EQUATIONS
    assert parse_rules(show_rules(rules)) == rules


def test_equal_terms_are_one_node_and_order_of_nodes_does_not_matter() -> None:
    rule = parse_rule("Add(Relu(x), Relu(x)) => Mul(Relu(x), Constant(2, like=x))")
    assert [n.op.name for n in rule.source] == ["Relu", "Add"]
    relu, add = operator_named("Relu"), operator_named("Add")
    shuffled = (
        PatternNode(add, (Port(2, 0), Port(1, 0))), PatternNode(relu, ("x",)), PatternNode(relu, ("x",)),
        PatternNode(relu, (Port(0, 0),)),
    )  # fmt: skip
    built = Rule(shuffled, rule.target, ((Port(0, 0), rule.outputs[0][1]),))
    assert built.source == rule.source and built == rule


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("x => Relu(x)", "'x' alone"),
        ("Relu(x) => Relu(y)", "'y'"),
        ("Relu(x) => Relu(x) => x", "one '=>'"),
        ("Relu(x)", "one '=>'"),
        ("Relu(x) | Relu(y) => Relu(x)", "2 outputs"),
        ("Nonsense(x) => x", "Nonsense"),
        ("Relu(x, y) => x", "1 inputs"),
        ("Relu(x, alpha=1) => x", "alpha"),
        ("Concat(x, y) => x", "axis"),
        ("Relu(x) => LeakyRelu(x, alpha=a)", "'a'"),
        ("Relu(x) => x\n where rank(z) == 1", "'z'"),
        ("Relu(x) => x\n where rank(x) = 1", "not an expression"),
        ("Relu(x) => x\n where rank(x) == 1\n where rank(x) == 2", "twice"),
        ("Relu(x) => x\n exact: roughly", "roughly"),
        ("LeakyRelu(x, alpha=x) => x", "both a tensor and an attribute"),
        ("Relu(Split(x, axis=0, split=(1, 2))) => x", "say which"),
        ("Split(x, axis=0, split=(1, 2))[2] => x", "output 2"),
        ("Relu(1) => x", "neither"),
        ("Relu(x.y) => x", "neither"),
        ("Relu(FLOAT) => FLOAT", "FLOAT"),
        ("[only-an-identifier]", "without an equation"),
        ("Split(x, split=s, outputs=0) => x", "outputs="),
        ("Relu(*x) => x", "neither"),
        ("Relu(**x) => x", "names"),
        ("Relu(" + "1+" * 3000 + "1) => x", ""),
        ("Relu(" * 90 + "x" + ")" * 90 + " => x", "deep"),
    ],
)
def test_what_is_no_rule_is_refused_in_one_sentence_with_the_line(text: str, word: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse_rules("\n\n" + text, "my.rules")
    assert str(caught.value).startswith("my.rules, line 3: ") and word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cycles_and_nodes_that_do_not_exist_are_refused() -> None:
    relu = operator_named("Relu")
    for source in ((PatternNode(relu, (Port(0, 0),)),), (PatternNode(relu, (Port(3, 0),)),)):
        with pytest.raises(RuleError):
            Rule(source, (), ((Port(0, 0), "x"),))


def test_rules_survive_pickling_for_process_pools() -> None:
    rule = parse_rule("Add(x, x) => Mul(x, Constant(like=x, value=2))")
    assert pickle.loads(pickle.dumps(rule)) == rule


# ── attributes ───────────────────────────────────────────────────────────────────────────────────────────────────

X, W = TensorType(DType.FLOAT, (1, 4, 9, 9)), TensorType(DType.FLOAT, (8, 2, 3, 3))


def _bind(equation: str, attrs: dict[str, object], bound: dict[str, Value] | None = None) -> str | None:
    node = parse_rule(equation).source[0]
    return node.bind((X, W), node.op.complete(attrs), {} if bound is None else bound)  # type: ignore[arg-type]  # plain values


def test_an_attribute_not_mentioned_must_have_its_default_however_it_is_written() -> None:
    equation = "Conv(x, w, group=2) => x"
    assert _bind(equation, {"group": 2}) is None
    assert _bind(equation, {"group": 2, "strides": (1, 1), "pads": (0, 0, 0, 0), "dilations": (1, 1)}) is None
    for wrong in ({"strides": (2, 1)}, {"pads": (0, 1, 0, 0)}, {"dilations": (1, 2)}):
        reason = _bind(equation, {"group": 2, **wrong})
        assert reason is not None and next(iter(wrong)) in reason and "default" in reason


def test_a_bare_name_binds_the_written_out_value_once() -> None:
    bound: dict[str, Value] = {}
    assert _bind("Conv(x, w, group=g, strides=s) => x", {"group": 2}, bound) is None
    assert bound == {"g": 2, "s": (1, 1)}
    reason = _bind("Conv(x, w, group=g) => x", {"group": 1}, {"g": 2})
    assert reason is not None and "2" in reason and "1" in reason


def test_computed_attributes_of_a_source_are_compared_after_the_match() -> None:
    rule = parse_rule("Conv(x, w, group=dim(x, 1) // dim(w, 1), pads=same_pads(shape(w)[2:])) => Identity(x)")
    env = Bindings({"x": X, "w": W})
    conv = operator_named("Conv")
    right = settled(conv, (X, W), conv.complete({"group": 2, "pads": (1, 1, 1, 1)}))
    wrong = settled(conv, (X, W), conv.complete({"group": 2, "pads": (1, 1, 1, 0)}))
    assert rule.check_attributes(env, [right]) is None
    assert "pads" in (rule.check_attributes(env, [wrong]) or "")


def test_conditions_give_the_reason_with_the_values_they_met() -> None:
    rule = parse_rule("Relu(x) => x\n where rank(x) == 4 and dim(x, 1) == 3")
    reason = rule.check_conditions(Bindings({"x": X}))
    assert reason is not None and "dim(x, 1) == 3" in reason and "1×4×9×9" in reason
    assert rule.check_conditions(Bindings({"x": X.with_shape((1, 3, 1, 1))})) is None


def test_a_target_attribute_that_would_be_symbolic_is_refused() -> None:
    rule = parse_rule(MERGE)
    n = SymDim.named("n")
    types = {v: TensorType(DType.FLOAT, (4, n)) for v in rule.variables}
    with pytest.raises(RuleError, match="symbolic"):
        rule.target[2].attributes((types["a"],), Bindings(types))


@pytest.mark.parametrize(
    ("op", "short", "written"),
    [
        ("Transpose", {}, {"perm": (3, 2, 1, 0)}),
        ("Concat", {"axis": -1}, {"axis": 3}),
        ("ReduceSum", {"axes": (-1, 1)}, {"axes": (1, 3)}),
        ("ReduceSum", {}, {"axes": (0, 1, 2, 3)}),
        ("Slice", {"starts": (0,), "ends": (1,)}, {"starts": (0,), "ends": (1,), "axes": (0,), "steps": (1,)}),
        ("MaxPool", {"kernel_shape": (2, 2)}, {"kernel_shape": (2, 2), "strides": (1, 1), "pads": (0,) * 4}),
    ],
)
def test_short_forms_of_attributes_are_written_out(op: str, short: dict[str, int], written: dict[str, int]) -> None:
    operator = operator_named(op)
    found = settled(operator, (X,), operator.complete(short))
    assert isinstance(found, Attrs) and {n: found[n] for n in written} == written
