"""Each gate alone refuses each kind of false rule and false definition; a corrupted gate is caught by another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from taso.graph import index as notation
from taso.graph.index import Call, Meaning, Read, Reduce
from taso.graph.operator import Attrs, MeaningFunction, Operator
from taso.graph.ops import operator_named
from taso.graph.ops.common import output_loops, single_axes
from taso.rules.pattern import Rule, Status
from taso.rules.tester import test_rule as try_rule
from taso.rules.text import parse_rule
from taso.rules.verifier import exhaust, proof, prove, simplify, verify

SECONDS = 60.0


def _rule(text: str) -> Rule:
    """A rule from one line, its condition behind "where", exact where it ends so."""
    return parse_rule(" ".join(text.split()).replace(" where ", "\nwhere ").replace(" exact: ", "\nexact: "))


def by_trials(rule: Rule) -> bool:
    """Whether the trials let a rule pass."""
    return try_rule(rule).status is Status.TESTED


def by_proof(rule: Rule) -> bool:
    found = prove(rule, SECONDS)
    assert "time allowed" not in found.reason
    return found.done


def by_small_sizes(rule: Rule) -> bool:
    found = exhaust(rule, SECONDS, sizes=(2, 3))
    assert "time allowed" not in found.reason
    return found.done


GATES: dict[str, Callable[[Rule], bool]] = {"trials": by_trials, "proof": by_proof, "small sizes": by_small_sizes}

# what each kind of mistake is made in, where it is not made
TRUE = {
    "concat": "Concat(Relu(x), Relu(y), axis=a) => Relu(Concat(x, y, axis=a)) where rank(x) == 2 and rank(y) == 2",
    "split": "Split(Concat(x, y, axis=a), axis=a, split=s, outputs=2) => x | y "
    "where s[0] == dim(x, a) and rank(x) == 2 and rank(y) == 2",
    "axis": "Softmax(Transpose(x, perm=(1, 0)), axis=1) => Transpose(Softmax(x, axis=0), perm=(1, 0)) "
    "where rank(x) == 2",
    "groups": "Concat(Conv(x, w), Conv(y, v), axis=1) => Conv(Concat(x, y, axis=1), Concat(w, v, axis=0), group=2) "
    "where rank(x) == 4 and same_shape(x, y) and same_shape(w, v) and shape(w)[2:] == (1, 1)",
    "sign": "Relu(Mul(Relu(x), c)) => Relu(Mul(Relu(x), c)) where rank(c) == 0",
    "stride": "MaxPool(x, kernel_shape=(1, 1), strides=s) => Conv(x, IdentityKernel(channels=dim(x, 1), like=x, "
    "kernel_shape=(1, 1)), strides=s) where rank(x) == 4",
    "padding": "AveragePool(x, count_include_pad=1, kernel_shape=(3, 3), pads=(1, 1, 1, 1)) => Conv(x, "
    "AveragingKernel(channels=dim(x, 1), like=x, kernel_shape=(3, 3)), group=dim(x, 1), pads=(1, 1, 1, 1)) "
    "where rank(x) == 4",
}  # fmt: skip

WRONG = {
    "concat order": "Concat(Relu(x), Relu(y), axis=a) => Relu(Concat(y, x, axis=a)) where rank(x) == 2 "
    "and same_shape(x, y)",
    "split order": "Split(Concat(x, y, axis=a), axis=a, split=s, outputs=2) => y | x "
    "where s[0] == dim(x, a) and rank(x) == 2 and same_shape(x, y)",
    "wrong axis": "Softmax(Transpose(x, perm=(1, 0)), axis=1) => Transpose(Softmax(x, axis=1), perm=(1, 0)) "
    "where rank(x) == 2",
    "group mismatch": "Concat(Conv(x, w), Conv(y, v), axis=1) => Conv(Concat(x, y, axis=1), Concat(w, v, axis=0), "
    "group=2) where rank(x) == 4 and same_shape(x, y) and shape(w)[1:] == shape(v)[1:] "
    "and (dim(w, 0) + dim(v, 0)) % 2 == 0",
    "missing sign condition": "Mul(Relu(x), c) => Relu(Mul(x, c)) where rank(c) == 0",
    "stride ignored": "MaxPool(x, kernel_shape=(1, 1), strides=s) => Conv(x, IdentityKernel(channels=dim(x, 1), "
    "like=x, kernel_shape=(1, 1))) where rank(x) == 4",
    "padding not counted": "AveragePool(x, kernel_shape=(3, 3), pads=(1, 1, 1, 1)) => Conv(x, "
    "AveragingKernel(channels=dim(x, 1), like=x, kernel_shape=(3, 3)), group=dim(x, 1), pads=(1, 1, 1, 1)) "
    "where rank(x) == 4",
    "padding counted": "AveragePool(x, count_include_pad=1, kernel_shape=(3, 3), pads=(1, 1, 1, 1)) => "
    "AveragePool(x, kernel_shape=(3, 3), pads=(1, 1, 1, 1)) where rank(x) == 4",
}  # fmt: skip


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", TRUE)
def test_what_is_true_passes_each_gate(kind: str, gate: str) -> None:
    assert GATES[gate](_rule(TRUE[kind]))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", WRONG)
def test_a_false_rule_of_each_kind_is_refused_by_each_gate_alone(kind: str, gate: str) -> None:
    assert not GATES[gate](_rule(WRONG[kind]))


@pytest.mark.parametrize("kind", WRONG)
def test_trials_and_small_sizes_give_a_counterexample_to_each_kind(kind: str) -> None:
    rule = _rule(WRONG[kind])
    assert try_rule(rule).certificate.counterexample
    assert exhaust(rule, SECONDS).counterexample


# ── false definitions ────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def redefined(op: Operator, meaning: MeaningFunction) -> Iterator[None]:
    """The operator with another meaning for a while."""
    before = op.meaning
    object.__setattr__(op, "meaning", meaning)
    try:
        yield
    finally:
        object.__setattr__(op, "meaning", before)


def _meaning(op: Operator) -> MeaningFunction:
    assert op.meaning is not None
    return op.meaning


def _with(op: Operator, **changed: int) -> MeaningFunction:
    before = _meaning(op)
    return lambda types, attrs: before(types, Attrs({**attrs, **changed}))


def _changed(op: Operator, by: Callable[[notation.Expr], notation.Expr]) -> MeaningFunction:
    before = _meaning(op)
    return lambda types, attrs: tuple(Meaning(m.axes, by(m.body)) for m in before(types, attrs))


def _reversed_outputs(op: Operator) -> MeaningFunction:
    before = _meaning(op)
    return lambda types, attrs: tuple(reversed(before(types, attrs)))


def _reversed_pieces(body: notation.Expr) -> notation.Expr:
    assert isinstance(body, notation.Pick)
    return notation.Pick(body.loop, tuple(reversed(body.pieces)))


def _without_factor(body: notation.Expr) -> notation.Expr:
    assert isinstance(body, Reduce) and isinstance(body.body, Call)
    return Reduce(body.kind, body.loops, body.body.args[1])


def _unstrided(body: notation.Expr) -> notation.Expr:
    """A convolution's element with the windows at its start one step apart, whatever the stride."""
    assert isinstance(body, Reduce) and isinstance(body.body, Call)
    read, weight = body.body.args
    assert isinstance(read, Read)
    moved = tuple(notation.Affine(((a.terms[0][0], 1), *a.terms[1:]), a.constant) for a in read.index[2:])
    read = Read(read.input, (*read.index[:2], *moved), read.fill)
    return Reduce(body.kind, body.loops, Call("mul", (read, weight)))


def _dealt(op: Operator) -> MeaningFunction:
    """Output channels dealt to the groups in turn, not in blocks."""
    before = _meaning(op)

    def dealt(types: object, attrs: Attrs) -> tuple[Meaning, ...]:
        (made,) = before(types, attrs)  # type: ignore[arg-type]  # the types of an operator
        channels = made.axes[1]
        return (Meaning((made.axes[0], tuple(reversed(channels)), *made.axes[2:]), made.body),)

    return dealt


def _untransposed(types: object, attrs: Attrs) -> tuple[Meaning, ...]:
    (x,) = types  # type: ignore[misc]  # the types of one input
    loops = output_loops(tuple(x.dims[a] for a in attrs.ints("perm")))
    return (Meaning(single_axes(loops), Read(0, tuple(map(notation.at, loops)), "zero")),)


CONCAT, SPLIT, CONV, AVERAGE, TRANSPOSE = map(operator_named, ("Concat", "Split", "Conv", "AveragePool", "Transpose"))

SPLIT_IN_TWO = "Split(Concat(x, y, axis=a), axis=a, split=s, outputs=2) => x | y where s[0] == dim(x, a) " \
    "and rank(x) == 2 and same_shape(x, y)"

FALSE_DEFINITIONS: dict[str, tuple[str, Operator, Callable[[], MeaningFunction]]] = {
    "concat order": (SPLIT_IN_TWO, CONCAT, lambda: _changed(CONCAT, _reversed_pieces)),
    "split order": (SPLIT_IN_TWO, SPLIT, lambda: _reversed_outputs(SPLIT)),
    "wrong axis": (TRUE["axis"], TRANSPOSE, lambda: _untransposed),
    "group mismatch": (TRUE["groups"], CONV, lambda: _dealt(CONV)),
    "factor dropped": (TRUE["stride"], CONV, lambda: _changed(CONV, _without_factor)),
    "stride ignored": (TRUE["stride"], CONV, lambda: _changed(CONV, _unstrided)),
    "padding not counted": (TRUE["padding"], AVERAGE, lambda: _with(AVERAGE, count_include_pad=0)),
}  # fmt: skip


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", FALSE_DEFINITIONS)
def test_a_false_definition_of_each_kind_is_noticed_by_each_gate_alone(kind: str, gate: str) -> None:
    text, op, meaning = FALSE_DEFINITIONS[kind]
    with redefined(op, meaning()):
        assert not GATES[gate](_rule(text))


# ── a gate that is broken itself ─────────────────────────────────────────────────────────────────────────────────


def test_a_prover_that_drops_guards_proves_what_the_trials_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = _rule(
        "Conv(x, w, pads=(1, 1, 1, 1)) => Conv(x, Enlarge(w, kernel_shape=(5, 5)), pads=(1, 1, 3, 3)) "
        "where rank(x) == 4 and shape(w)[2:] == (3, 3)"
    )
    assert not prove(rule, SECONDS).done
    monkeypatch.setattr(simplify.Simplifier, "_guards", lambda self, guards: ())
    monkeypatch.setattr(proof.algebra, "text", lambda terms, names: "the same whatever it is")
    assert prove(rule, SECONDS).done
    judged = verify(rule)
    assert judged.status is Status.REFUTED and judged.certificate.counterexample
    assert exhaust(rule, SECONDS).counterexample


def test_trials_that_pass_everything_do_not_make_a_false_rule_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = _rule(WRONG["concat order"])
    monkeypatch.setattr("taso.rules.tester._difference", lambda left, right: None)
    assert by_trials(rule)
    judged = verify(rule)
    assert judged.status is Status.REFUTED and "polynomial identity" in judged.certificate.method


# ── what no proof is found of ────────────────────────────────────────────────────────────────────────────────────

UNREACHED = (
    "Conv(Concat(x, y, axis=1), Concat(w, v, axis=0), group=2) => Concat(Conv(x, w), Conv(y, v), axis=1) "
    "where rank(x) == 4 and same_shape(x, y) and same_shape(w, v) and dim(w, 1) == dim(x, 1) and dim(x, 0) == 1 "
    "and shape(w)[2:] == (1, 1) and shape(x)[2:] == (1, 2)"
)


def test_what_is_not_proved_but_holds_on_all_small_sizes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = _rule(UNREACHED)
    monkeypatch.setattr("taso.rules.verifier.prove", lambda rule, seconds: proof.Proof(False, "it is out of reach"))
    judged = verify(rule)
    assert judged.status is Status.BOUNDED
    said = judged.certificate
    assert "all sizes up to 4" in said.method and "up to 4 dimensions" in said.method and "16 cases" in said.method
    assert "of at most" in said.method and "not proved: it is out of reach" in said.reason
    assert said.command.startswith("taso rules verify ")
    assert verify(rule, small=False).status is Status.TESTED


def test_small_sizes_that_take_too_long_say_so() -> None:
    found = exhaust(_rule(TRUE["padding"]), 0.0)
    assert not found.done and not found.counterexample and "time allowed" in found.reason


def test_settings_that_have_no_bounds_are_not_gone_through() -> None:
    found = exhaust(_rule("Gather(x, i, axis=0) => Gather(x, i, axis=0)"), SECONDS)
    assert not found.done and "no meaning" in found.reason


@pytest.mark.parametrize("text", [
    "Add(ReduceMean(x, axes=(0,)), ReduceMean(y, axes=(0,))) => ReduceMean(Add(x, y), axes=(0,))\n"
    "  where same_shape(x, y)\n  exact: exact",
    "Mul(Div(x, y), y) => x\n  where same_shape(x, y)\n  exact: exact",
    "Div(Add(x, y), z) => Add(Div(x, z), Div(y, z))\n  where same_shape(x, y) and same_shape(x, z)\n  exact: exact",
    "ReduceL2(Abs(x), axes=(0,)) => ReduceL2(x, axes=(0,))\n  exact: exact",
])  # fmt: skip
def test_no_gate_admits_integers_where_an_operator_rounds_them(text: str) -> None:
    """An exact rule applies to integers, of which a mean, a quotient and a root are no real numbers."""
    rule = parse_rule(text)
    assert not prove(rule, 20.0).done
    assert not exhaust(rule, 20.0, sizes=(2,)).done
    assert verify(rule, seconds=20.0).status not in (Status.PROVED, Status.BOUNDED)
