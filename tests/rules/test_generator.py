"""The generator finds what is equal, keeps what says something new, and nothing false gets through its gates."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from published import FOLDER

from taso.graph.errors import RuleError
from taso.graph.evaluate import evaluate
from taso.graph.numbers import Modular
from taso.graph.types import DType, TensorType
from taso.rules.expression import Value
from taso.rules.format import read_published
from taso.rules.generator import SPACES, Generated, Space, generate, levels
from taso.rules.generator import ours as o
from taso.rules.generator import templates as t
from taso.rules.generator.arithmetic import PRIME, Values, drawn, fingerprints
from taso.rules.generator.coverage import derivable_from
from taso.rules.generator.egraph import EGraph, Limits, evaluated, follows, minimal, values_of
from taso.rules.generator.equations import Equation, Node, Writer
from taso.rules.generator.generality import generalised
from taso.rules.generator.levels import Enumeration
from taso.rules.generator.spaces import MATRIX
from taso.rules.generator.statement import rewriting, rules
from taso.rules.generator.templates import Shape, Template
from taso.rules.generator.universe import Terms
from taso.rules.instances import Bindings, types_of_nodes
from taso.rules.pattern import Status
from taso.rules.text import parse_rule
from taso.rules.verifier import verify

SMALL = Space(
    "small", (t.RELU, t.ADD, t.MATMUL, t.TRANSPOSE, t.CONCATS[1], t.SPLITS[1]),
    (("x", MATRIX), ("y", MATRIX), ("z", MATRIX)), 3,
)  # fmt: skip


@pytest.fixture(scope="module")
def small() -> Generated:
    return generate(SMALL, general=False)


def names(found: Generated) -> set[str]:
    return {rule.name for rule in found.rules}


# ── what the templates compute ───────────────────────────────────────────────────────────────────────────────────

RANDOM_FUNCTIONS = {"relu", "exp", "sigmoid", "tanh", "softmax", "conv33.relu", "conv13.relu", "MaxPool"}
OPERANDS: dict[str, tuple[Shape, ...]] = {
    "add": ((3, 3), (3, 3)), "mul": ((3, 3), (3, 3)), "sub": ((2, 3), (2, 3)), "div": ((2, 3), (2, 3)),
    "scale": ((3, 3), ()), "matmul": ((3, 3), (3, 3)), "transpose": ((3, 6),), "concat2.0": ((3, 3), (6, 3)),
    "concat2.1": ((3, 3), (3, 6)), "concat4.0": ((1, 2, 3, 4), (1, 2, 3, 4)), "concat4.1": ((1, 2, 3, 4), (1, 2, 3, 4)),
    "conv33": ((1, 2, 3, 4), (4, 2, 3, 3)), "conv13": ((1, 2, 3, 4), (2, 2, 1, 3)), "AveragePool": ((1, 2, 3, 4),),
    "enlarge": ((2, 2, 1, 3),), "sum": ((2, 3),), "mean": ((2, 3),),
    "sub.column": ((2, 3), (2, 1)), "mul.column": ((2, 3), (2, 1)), "div.column": ((2, 3), (2, 1)),
    "matmul.batched": ((2, 2, 3), (2, 3, 3)), "matmul.stacked": ((2, 2, 3), (3, 3)), "merge": ((2, 2, 3),),
    "swap": ((2, 2, 3),), "depthwise": ((1, 2, 3, 4), (2, 1, 3, 3)),
}  # fmt: skip
EVERY = {template.name: template for space in SPACES.values() for template in space.templates}


def meant(template: Template, operands: Sequence[Values]) -> Values:
    """What the operator that a template is written as means, by its own definition."""
    tree = Node(0, 0, tuple(range(len(operands))))
    rule = rewriting([tree], [tree], [template], "")
    types = {n: TensorType(DType.FLOAT, a.shape) for n, a in zip(rule.variables, operands, strict=True)}
    settings: dict[str, Value] = {"p": 1}
    if template.number == 3:
        settings["g"] = operands[0].shape[1] // operands[1].shape[1]
    ((inputs, attrs, _),) = types_of_nodes(rule.source, types, Bindings(types, settings, frozenset(), {}))
    meaning = rule.source[0].op.meaning
    assert meaning is not None
    return np.asarray(evaluate(meaning(inputs, attrs)[0], list(operands), Modular(PRIME, 0)))


@pytest.mark.parametrize("name", sorted(set(EVERY) - RANDOM_FUNCTIONS))
def test_a_template_computes_what_its_operator_means(name: str) -> None:
    template = EVERY[name]
    if template.arity == 0 or template.outputs > 1:
        pytest.skip("constants and splits stand in no rule alone: the rules found hold them to account")
    operands = [drawn(shape, i) for i, shape in enumerate(OPERANDS[name])]
    assert template.shape(*OPERANDS[name]) is not None
    (made,) = template.value(*(a[None] for a in operands))
    assert np.array_equal(made[0], meant(template, operands))


def test_fingerprints_tell_values_and_shapes_apart() -> None:
    values = np.stack([drawn((2, 6), seed) for seed in range(500)])
    assert len(set(fingerprints(values).tolist())) == 500
    assert fingerprints(values[:1]) != fingerprints(values[:1].reshape(1, 3, 4))
    changed = values[:1].copy()
    changed[0, 1, 5] += 1
    assert fingerprints(changed) != fingerprints(values[:1])


# ── what is enumerated ───────────────────────────────────────────────────────────────────────────────────────────


def test_no_kept_term_is_a_renaming_of_another(tmp_path: Path) -> None:
    enumeration = Enumeration(SMALL, tmp_path)
    (*_, last) = enumeration.stages()
    keys = enumeration.universe.all_keys(last.rows.terms)
    for group in np.unique(last.rows.groups):
        rows = np.flatnonzero(last.rows.groups == group)
        alone = last.lower[rows[0]] < 0
        # terms of one class may be renamings of one another, where the class is the same under it; of two, never
        others = np.flatnonzero((last.rows.groups != group) & (last.lower < 0))
        if alone:
            assert not np.intersect1d(keys[rows].min(1), keys[others].min(1)).size
    assert enumeration.counts.renamings > enumeration.counts.graphs / 2


DEEP = Space("deep", (t.RELU, t.ADD, t.MATMUL, t.CONCATS[1]), (("x", MATRIX), ("y", MATRIX)), 4)


def test_renaming_a_class_is_renaming_its_variables(tmp_path: Path) -> None:
    """Each class is evaluated again on the tensors of the other variables, and met where the table says."""
    enumeration = Enumeration(replace(DEEP, size=5), tmp_path)
    stages = enumeration.stages()
    for _ in range(4):
        next(stages)
    universe = enumeration.universe
    writer, inputs = Writer(universe), [universe.values(np.array([i])) for i in range(2)]
    classes = np.arange(len(universe))
    swapped = universe.renamings_of(classes)[:, 1]
    assert universe.renamings[1] == (1, 0)
    rng = np.random.default_rng(0)
    for number in rng.choice(classes, 300, replace=False).tolist():
        value = evaluated(writer.of_class(number), DEEP.templates, {0: inputs[1], 1: inputs[0]})
        assert swapped[number] == universe.find(fingerprints(value))[0]
    # from four operators on a renaming may be counted as of another size: the case must be met
    made = Terms(*(universe.column(name)[2:] for name in ("symbol", "left", "right")))
    assert (universe.counted(made) != universe.column("size")[2:]).any()


def test_every_class_of_the_largest_size_is_met_under_one_of_its_names(tmp_path: Path) -> None:
    """Against all terms, none left out as a renaming: what has an equal among them is kept."""
    enumeration = Enumeration(DEEP, tmp_path)
    *_, last = enumeration.stages()
    universe = enumeration.universe
    terms = Terms.joined(list(universe.candidates(DEEP.size)))
    prints = universe.prints(terms)
    others = universe.prints(universe.of_keys(universe.all_keys(terms)[:, 1]))
    canonical = np.minimum(prints, others)
    distinct, count = np.unique(canonical, return_counts=True)
    wanted = {p for p, c in zip(distinct.tolist(), count.tolist(), strict=True) if c > 2}
    found = set(universe.prints(last.rows.terms).tolist())
    assert wanted <= found


def test_a_space_gives_the_laws_of_its_operators(small: Generated) -> None:
    wanted = {
        "Transpose(Transpose(x, perm=(1, 0)), perm=(1, 0)) => x",
        "MatMul(MatMul(x, y), z) => MatMul(x, MatMul(y, z))",
        "Transpose(Relu(x), perm=(1, 0)) => Relu(Transpose(x, perm=(1, 0)))",
        "MatMul(Add(x, y), z) => Add(MatMul(x, z), MatMul(y, z))",
        "Concat(Relu(x), Relu(y), axis=1) => Relu(Concat(x, y, axis=1))",
        "MatMul(x, y) | MatMul(x, z) => "
        "Split(MatMul(x, Concat(y, z, axis=1)), axis=1, split=(dim(y, 1), dim(z, 1)))",
    }
    assert wanted <= {rule.name for rule in small.rules}
    assert all(rule.status is Status.PROVED for rule in small.rules)


def test_what_follows_from_others_is_not_kept(small: Generated) -> None:
    inputs = values_of(SMALL.variables)
    for place, equation in enumerate(small.equations):
        others = [e for i, e in enumerate(small.equations) if i != place]
        kept = minimal([*others, equation], SMALL.templates, inputs, Limits())
        assert equation in kept or len(kept) < len(small.equations) + 1


def test_every_equation_left_out_follows(small: Generated, tmp_path: Path) -> None:
    """What two more operators could say of sums and products is explained by what was kept."""
    inputs = values_of(SMALL.variables)
    x, y, z = range(3)

    def op(name: str, *operands: int | Node) -> Node:
        return Node([u.name for u in SMALL.templates].index(name), 0, operands)

    consequences = [
        (op("add", op("add", x, y), z), op("add", op("add", z, y), x)),
        (op("matmul", op("relu", op("transpose", x)), op("transpose", y)),
         op("transpose", op("matmul", y, op("relu", x)))),
    ]  # fmt: skip
    false = (op("matmul", x, y), op("matmul", y, x))
    for left, right in consequences:
        assert _follows(left, right, small.equations, inputs)
    assert not _follows(*false, small.equations, inputs)


def _follows(left: Node, right: Node, equations: Sequence[Equation], inputs: dict[int, Values]) -> bool:
    graph = EGraph(SMALL.templates, inputs)
    goal = graph.add(left), graph.add(right)
    assert goal[0] is not None and goal[1] is not None
    return follows(graph, [(goal[0], goal[1])], equations, Limits())


def test_a_false_equation_joins_nothing() -> None:
    """An e-graph that is told something false keeps apart what has other values."""
    inputs = values_of(SMALL.variables)
    matmul = [u.name for u in SMALL.templates].index("matmul")
    x, y = 0, 1
    lie = Equation(Node(matmul, 0, (x, y)), Node(matmul, 0, (y, x)))
    assert not _follows(Node(matmul, 0, (x, y)), Node(matmul, 0, (y, x)), [lie], inputs)


# ── gates ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _identity(a: Values) -> tuple[Values, ...]:
    return (a,)


def test_a_corrupted_kernel_makes_no_false_rule(small: Generated) -> None:
    """A transpose that does nothing on the tensors of the space suggests nonsense, which the trials refuse."""
    broken = replace(t.TRANSPOSE, value=_identity)
    space = replace(SMALL, templates=tuple(broken if u is t.TRANSPOSE else u for u in SMALL.templates), size=2)
    found = generate(space, general=False)
    assert found.refused
    assert not any(rule.name == "Transpose(x, perm=(1, 0)) => x" for rule in found.rules)
    for rule in found.rules:
        assert verify(rule).status is Status.PROVED


def test_equations_true_on_the_tensors_of_the_space_only_are_refused() -> None:
    """On matrices of one row and one column products commute."""
    tiny = Space("tiny", (t.MATMUL, t.TRANSPOSE, t.ADD), (("x", (1, 1)), ("y", (1, 1))), 2)
    found = generate(tiny, general=False)
    assert any(isinstance(e.left, Node) and e.left.template == 0 for e in found.refused)
    assert all(rule.status is Status.PROVED for rule in found.rules)
    assert "MatMul(x, y) => MatMul(y, x)" not in {rule.name for rule in found.rules}


def test_nothing_is_found_that_holds_of_numbers_and_not_of_floating_point() -> None:
    """x − x is 0 and (x + y) − y is x for numbers; where x is infinite or y large they are not."""
    space = Space("differences", (t.ADD, o.SUB, o.DIV, t.MUL), (("x", (2, 3)), ("y", (2, 3)), ("z", (2, 3))), 2)
    found = generate(space, general=False)
    said = {rule.name for rule in found.rules}
    assert "Sub(Sub(x, y), z) => Sub(x, Add(y, z))" in said
    assert "Div(Div(x, y), z) => Div(x, Mul(y, z))" in said
    for rule in found.rules:
        assert set(rule.variables) == {r for n in rule.target for r in n.inputs if isinstance(r, str)}
    assert found.refused


def test_a_rule_is_made_as_general_as_its_proof_allows() -> None:
    narrow = verify(parse_rule(
        "Conv(Concat(x, y, axis=0), w, pads=(1, 1, 1, 1)) => "
        "Concat(Conv(x, w, pads=(1, 1, 1, 1)), Conv(y, w, pads=(1, 1, 1, 1)), axis=0)\n"
        "  where rank(x) == 4 and rank(y) == 4 and rank(w) == 4 and dim(w, 2) == 3 and dim(w, 3) == 3"
    ))  # fmt: skip
    assert narrow.status is Status.PROVED
    (wide,) = generalised([narrow])
    bound = dict(wide.source[-1].attrs)
    assert {"pads", "strides", "dilations"} <= set(bound)
    assert not any("== 3" in str(c) for c in wide.conditions)
    assert verify(wide).status is Status.PROVED


def test_generality_stops_where_the_rule_is_false() -> None:
    """A pool and a sum commute for averages only; the conditions that make a rule true stay."""
    rule = verify(parse_rule(
        "MatMul(Concat(x, y, axis=1), Concat(z, v, axis=0)) => Add(MatMul(x, z), MatMul(y, v))\n"
        "  where rank(x) == 2 and rank(y) == 2 and rank(z) == 2 and rank(v) == 2 and dim(x, 1) == dim(z, 0)"
    ))  # fmt: skip
    (wide,) = generalised([rule])
    assert any("dim(x, 1) == dim(z, 0)" in str(c) for c in wide.conditions)


# ── work in pieces ───────────────────────────────────────────────────────────────────────────────────────────────


def statements(found: Generated) -> list[str]:
    return [f"{rule.name} {[str(c) for c in rule.conditions]}" for rule in found.rules]


def test_shares_of_the_fingerprints_give_the_same_rules(small: Generated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "SHARE", 100)
    assert statements(generate(SMALL, general=False)) == statements(small)


def test_processes_give_the_same_rules(small: Generated) -> None:
    with ProcessPoolExecutor(2) as executor:
        assert statements(generate(SMALL, executor=executor, general=False)) == statements(small)


def test_dask_gives_the_same_rules(small: Generated) -> None:
    distributed = pytest.importorskip("distributed", reason="Dask's executor is shown where `distributed` is installed")
    logging.getLogger("distributed").setLevel(logging.ERROR)
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        with distributed.Client(cluster) as client:
            executor: Executor = client.get_executor()
            assert statements(generate(SMALL, executor=executor, general=False)) == statements(small)


class _Killed(BaseException):
    pass


def test_a_run_that_was_killed_goes_on_where_it_was(
    small: Generated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    made = levels.make_piece
    calls: Iterator[int] = iter(range(100))

    def dying(folder: Path, piece: levels.Piece) -> tuple[int, int]:
        if next(calls) == 3:
            raise _Killed
        return made(folder, piece)

    monkeypatch.setattr(levels, "make_piece", dying)
    with pytest.raises(_Killed):
        generate(SMALL, folder=tmp_path, general=False)
    monkeypatch.setattr(levels, "make_piece", made)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("piece-*")}
    assert len(before) == 3
    assert statements(generate(SMALL, folder=tmp_path, general=False)) == statements(small)
    assert all(p.stat().st_mtime_ns == time for p, time in before.items())


def test_a_folder_of_another_space_is_refused(tmp_path: Path) -> None:
    generate(replace(SMALL, size=1), folder=tmp_path, general=False)
    with pytest.raises(RuleError, match="another space"):
        generate(SMALL, folder=tmp_path, general=False)


def test_a_piece_that_is_damaged_is_made_again(
    small: Generated, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    generate(SMALL, folder=tmp_path, general=False)
    first, second, third, *_ = sorted(tmp_path.glob("piece-*"))
    first.write_bytes(b"")
    second.write_bytes(second.read_bytes()[: second.stat().st_size // 2])
    third.write_bytes(b"nothing of the kind")
    assert statements(generate(SMALL, folder=tmp_path, general=False)) == statements(small)
    assert sum("is damaged" in message for message in caplog.messages) == 3


def test_a_piece_in_the_place_of_another_is_made_again(small: Generated, tmp_path: Path) -> None:
    generate(SMALL, folder=tmp_path, general=False)
    first, second, *_ = sorted(tmp_path.glob("piece-*"))
    second.write_bytes(first.read_bytes())
    assert statements(generate(SMALL, folder=tmp_path, general=False)) == statements(small)


def test_classes_that_lie_in_a_folder_are_not_trusted(small: Generated, tmp_path: Path) -> None:
    generate(SMALL, folder=tmp_path, general=False)
    (tmp_path / "universe.pickle").write_bytes(b"\x80nothing")
    for piece in tmp_path.glob("piece-*"):
        piece.unlink()
    assert statements(generate(SMALL, folder=tmp_path, general=False)) == statements(small)


def test_a_folder_that_was_emptied_between_is_filled_anew(small: Generated, tmp_path: Path) -> None:
    generate(replace(SMALL, size=2), folder=tmp_path, general=False)
    for file in tmp_path.iterdir():
        file.unlink()
    assert statements(generate(SMALL, folder=tmp_path, general=False)) == statements(small)


def test_pieces_of_another_version_of_a_template_are_refused(tmp_path: Path) -> None:
    generate(SMALL, folder=tmp_path, general=False)
    changed = replace(SMALL, templates=(replace(t.RELU, value=_identity), *SMALL.templates[1:]))
    with pytest.raises(RuleError, match="another space or version"):
        generate(changed, folder=tmp_path, general=False)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuleError, match="cannot be made"):
        generate(SMALL, folder=tmp_path / "file" / "inside", general=False)


# ── TASO's rules ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["graph_subst.pb", "generated_depth3.pb"])
def test_every_true_rule_of_tasos_follows_from_what_its_own_space_gives(name: str) -> None:
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"TASO's rule file is not at {path}")
    with ProcessPoolExecutor(2) as executor:
        found = [generate(SPACES[s], executor=executor, general=False) for s in ("taso-matrices", "taso-images")]
    missing = [i for i, p in enumerate(read_published(path)) if not derivable_from(p, found)]
    refuted = {"graph_subst.pb": [99, 100, 130, 131], "generated_depth3.pb": REFUTED}
    assert missing == refuted[name]


REFUTED = [150, 386, 387, 440, 441, 442, 443, 487, 488, 494, 495]
"""Those of the 619 that the verifier refutes: see docs/rules.md."""


def test_statements_of_both_directions_are_made() -> None:
    relu, transpose = 0, 1
    equation = Equation(Node(transpose, 0, (Node(relu, 0, (0,)),)), Node(relu, 0, (Node(transpose, 0, (0,)),)))
    assert len(rules(equation, (t.RELU, t.TRANSPOSE), "")) == 2
