"""Winograd's transforms compute convolutions: tiles as polynomials, whole tensors by the gates; no others do."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import taso
from taso.graph.errors import TasoError
from taso.graph.index import evaluate
from taso.graph.numbers import Float64, Modular
from taso.graph.operator import REGISTRY, AttrValue
from taso.graph.types import DType, TensorType
from taso.rules import algorithms
from taso.rules.algorithms import Matrix, Transforms, from_points, tile_defect, transforms
from taso.rules.collection import read
from taso.rules.pattern import Exactness, Rule, Status
from taso.rules.tester import test_rule as try_rule
from taso.rules.text import parse_rule, show_rule
from taso.rules.verifier import prove, verify
from taso.rules.verifier.forms import Forms

Array = NDArray[np.generic]
SECONDS = 120.0
RULES = read(Path(taso.__file__).parent / "rules" / "lowering" / "winograd.rules")
TILES = (2, 4, 6)
PARTS = ("output", "filter", "data")


# ── one tile ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("outputs, taps", list(product(range(1, 7), range(1, 6))))
def test_in_one_dimension_every_tile_is_the_convolution(outputs: int, taps: int) -> None:
    if outputs + taps > 2:
        found = transforms(outputs, taps)
        assert (found.outputs, found.taps, found.products) == (outputs, taps, outputs + taps - 1)
        assert tile_defect(found, 1) == ""


@pytest.mark.parametrize("outputs", TILES)
def test_in_two_dimensions_every_tile_is_the_convolution(outputs: int) -> None:
    assert tile_defect(transforms(outputs, 3)) == ""


def _handles(forms: Forms, matrix: Matrix) -> Array:
    return np.asarray([[int(forms.constant(v)) for v in row] for row in matrix], np.int64)


@pytest.mark.parametrize("outputs", TILES)
def test_multiplied_out_as_polynomials_over_symbolic_entries_a_tile_is_the_convolution(outputs: int) -> None:
    """Aᵀ[(G g Gᵀ) ⊙ (Bᵀ d B)]A against the sum that a convolution is, by the domain of the third gate."""
    f, forms = transforms(outputs, 3), Forms(lambda count: None)
    d, g = forms.tensor("d", (f.products, f.products)), forms.tensor("g", (3, 3))

    def both(matrix: Matrix, x: Array) -> Array:
        m = _handles(forms, matrix)
        made: Array = forms.matmul(forms.matmul(m[None], x[None]), m.T[None])[0]
        return made

    made = both(f.output, forms.call("mul", (both(f.filter, g), both(f.data, d))))
    for i, j in np.ndindex(outputs, outputs):
        terms = forms.call("mul", (d[i : i + 3, j : j + 3], g))
        assert made[i, j] == forms.reduce("sum", terms, (0, 1))


def test_other_points_do_as_well_and_too_few_do_not() -> None:
    points = (Fraction(3), Fraction(-5), Fraction(2, 7))
    assert tile_defect(from_points(2, 3, points)) == ""
    for wrong in (points[:2], (*points, Fraction(1)), (points[0], *points[:2])):
        with pytest.raises(TasoError, match="different points"):
            from_points(2, 3, wrong)
    with pytest.raises(TasoError, match="no filter"):
        transforms(0, 3)


def _corrupted(f: Transforms, part: str, row: int, column: int) -> Transforms:
    matrix: Matrix = getattr(f, part)
    changed = tuple(v + (i == row and j == column) for j, v in enumerate(matrix[row]) for i in (row,))
    rows = (*matrix[:row], changed, *matrix[row + 1 :])
    if part == "output":
        return replace(f, output=rows)
    return replace(f, filter=rows) if part == "filter" else replace(f, data=rows)


@pytest.mark.parametrize("outputs, part", list(product(TILES, PARTS)))
def test_a_tile_with_any_entry_changed_is_refused(outputs: int, part: str) -> None:
    f = transforms(outputs, 3)
    matrix: Matrix = getattr(f, part)
    for row, column in product(range(len(matrix)), range(len(matrix[0]))):
        assert "coefficient" in tile_defect(_corrupted(f, part, row, column), 1)
    assert "coefficient" in tile_defect(_corrupted(f, part, 0, 0), 2)


def test_matrices_that_do_not_fit_together_are_an_error() -> None:
    with pytest.raises(TasoError, match="do not fit together"):
        tile_defect(replace(transforms(2, 3), filter=transforms(4, 3).filter))


# ── whole tensors ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_the_rule_of_each_axis_and_tile_is_proved_and_no_trial_refutes_it(rule: Rule) -> None:
    found = verify(rule, seconds=SECONDS, trials=4, small=False)
    assert found.status is Status.PROVED, found.certificate
    assert rule.exactness is Exactness.APPROXIMATES


def test_there_is_a_rule_for_each_axis_and_tile() -> None:
    wanted = {f"winograd-{m}-of-{n}-axis-{a}" for m in TILES for n, a in (("1d", 2), ("2d", 2), ("2d", 3))}
    assert wanted <= {rule.id for rule in RULES}


@pytest.mark.parametrize("part", PARTS)
def test_with_a_wrong_entry_trials_and_proof_refuse_the_rule(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (rule,) = (r for r in RULES if r.id == "winograd-2-of-1d-axis-2")
    wrong = _corrupted(transforms(2, 3), part, 1, 1)
    monkeypatch.setattr(algorithms, "transforms", lambda outputs, taps: wrong)
    assert try_rule(rule).status is Status.REFUTED
    found = prove(rule, SECONDS)
    assert not found.done and "≠" in found.reason


WRONG = {
    "a stride that is left out": (" and s[0] == 1", ""),
    "a dilation that is left out": (" and d[0] == 1", ""),
    "padding the wrong way round": ("(p[0], p[1])", "(p[1], p[0])"),
    "one group too few": ("group=g * 4", "group=4"),
    "another tile behind than before": ("taps=3, tile=2), axes", "taps=3, tile=4), axes"),
    "another tile's filter": ("winograd_filter(w, axis=2, taps=3, tile=2", "winograd_filter(w, axis=2, taps=3, tile=4"),
}


@pytest.mark.parametrize("old, new", list(WRONG.values()), ids=list(WRONG))
def test_a_wrong_statement_is_refused_by_the_proof(old: str, new: str) -> None:
    (rule,) = (r for r in RULES if r.id == "winograd-2-of-1d-axis-2")
    text = show_rule(rule)
    assert old in text
    wrong = parse_rule(text.replace(old, new))
    assert not prove(wrong, SECONDS).done
    assert try_rule(wrong).status is not Status.TESTED


def _apply(name: str, numbers: Modular | Float64, given: list[Array], **attrs: AttrValue) -> Array:
    op = REGISTRY[name]
    types = [TensorType(DType.FLOAT, a.shape) for a in given]
    full = op.complete(attrs)
    op.types_of(types, full)
    assert op.meaning is not None
    return evaluate(op.meaning(types, full)[0], list(given), numbers)


def _winograd(numbers: Modular | Float64, x: Array, w: Array, m: int, pads: tuple[int, ...], group: int) -> Array:
    """A convolution by the rule of axis 3, and by that of axis 2 on the convolution that it leaves."""
    top, left, bottom, right = pads
    sizes = [x.shape[2] + top + bottom - 2, x.shape[3] + left + right - 2]
    for axis, ends in ((3, (left, right)), (2, (top, bottom))):
        x = _apply("winograd_input", numbers, [x], axis=axis, tile=m, taps=3, pads=ends)
        w = _apply("winograd_filter", numbers, [w], axis=axis, tile=m, taps=3)
    y = _apply("Conv", numbers, [x, w], group=group * (m + 2) ** 2)
    for axis in (2, 3):
        y = _apply("winograd_output", numbers, [y], axis=axis, tile=m, taps=3)
    return y[:, :, : sizes[0], : sizes[1]]


@pytest.mark.parametrize("m", TILES)
def test_the_rules_of_both_axes_together_are_the_two_dimensional_convolution_exactly(m: int) -> None:
    rng, draw = np.random.default_rng(m), random.Random(m)
    numbers = Modular(33554393)
    for _ in range(3):
        group, height, width = draw.choice((1, 2)), draw.randint(3, 14), draw.randint(3, 14)
        pads = tuple(draw.randint(0, 2) for _ in range(4))
        x = rng.integers(0, numbers.p, (2, 2 * group, height, width))
        w = rng.integers(0, numbers.p, (3 * group, 2, 3, 3))
        wanted = _apply("Conv", numbers, [x, w], pads=pads, group=group)
        assert np.array_equal(_winograd(numbers, x, w, m, pads, group), wanted)


@pytest.mark.parametrize("m", TILES)
def test_the_rules_of_both_axes_together_are_the_formula_of_one_tile(m: int) -> None:
    f, rng = transforms(m, 3), np.random.default_rng(m)
    a, g, b = (np.asarray([[float(v) for v in row] for row in matrix]) for matrix in (f.output, f.filter, f.data))
    d, k = rng.normal(size=(f.products, f.products)), rng.normal(size=(3, 3))
    formula = a @ ((g @ k @ g.T) * (b @ d @ b.T)) @ a.T
    made = _winograd(Float64(), d[None, None], k[None, None], m, (0, 0, 0, 0), 1)[0, 0]
    assert float(np.abs(np.asarray(made, np.float64) - formula).max()) < 1e-9 * float(np.abs(formula).max())
