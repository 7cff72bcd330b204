"""Attention and Einsum taken apart: equal to their definitions (onnx.reference, NumPy) in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import taso
from taso.backends.lowering import Choices, Lowering, structure, with_wholes
from taso.graph.apart import taken_apart
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Graph

Array = NDArray[np.generic]
NAMES = ("Attention", "Einsum")


def model(
    op: str, feeds: Mapping[str, Array], outputs: Sequence[str] = ("y",), constants: Sequence[str] = (),
    opset: int = 24, inputs: Sequence[str] | None = None, **attrs: object,
) -> onnx.ModelProto:  # fmt: skip
    node = helper.make_node(op, list(feeds) if inputs is None else inputs, outputs, **attrs)
    given = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
             for n, a in feeds.items() if n not in constants]  # fmt: skip
    made = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs if n]
    weights = [numpy_helper.from_array(feeds[n], n) for n in constants]
    graph = helper.make_graph([node], "g", given, made, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def check(proto: onnx.ModelProto, feeds: Mapping[str, Array]) -> Graph:
    """The parts, once they give what onnx.reference gives."""
    graph = taso.load(proto)
    apart, _ = taken_apart(graph, NAMES)
    assert not {"Attention", "Einsum"} & {n.op.name for n in apart.nodes}
    given = {name: feeds[name] for name in graph.input_names}
    wanted = ReferenceEvaluator(proto).run(None, given)
    found = evaluate_graph(apart, given, wide=True)
    assert list(found) == [name for name, _ in graph.outputs]
    for (_, array), truth in zip(found.items(), wanted, strict=True):
        assert array.shape == truth.shape and np.isfinite(truth).all()
        assert np.abs(array - truth).max() <= 2e-6 * np.abs(truth).max()
    return apart


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


# ── Attention ────────────────────────────────────────────────────────────────────────────────────────────────────

FOUR = {"q": random(2, 4, 5, 8), "k": random(2, 4, 7, 8), "v": random(2, 4, 7, 6)}
THREE = {"q": random(2, 5, 32), "k": random(2, 7, 32), "v": random(2, 7, 24)}
SHARED = {"q": random(2, 4, 5, 8), "k": random(2, 2, 7, 8), "v": random(2, 2, 7, 6)}


def floats(*shape: int) -> Array:
    """A mask some of whose numbers are −∞, a whole row too."""
    mask = random(*shape)
    mask[np.random.default_rng(3).random(shape) < 0.3] = -np.inf
    mask[..., 0] = 0
    return mask


def dead(mask: Array) -> Array:
    """With a row that sees no key."""
    mask = mask.copy()
    mask[..., 1, :] = False if mask.dtype == bool else -np.inf
    return mask


MASKS = {
    "of numbers": floats(2, 4, 5, 7), "of two axes": floats(5, 7), "of three axes": floats(4, 5, 7),
    "that broadcasts": floats(2, 1, 1, 7), "of truths": floats(2, 1, 5, 7) > -9, "with a dead row": dead(floats(5, 7)),
    "of truths with a dead row": dead(floats(2, 1, 5, 7) > -9),
}  # fmt: skip


@pytest.mark.parametrize("opset", (23, 24))
@pytest.mark.parametrize("attrs", ({}, {"scale": 0.3}, {"is_causal": 1}))
@pytest.mark.parametrize("feeds", (FOUR, THREE, SHARED))
def test_attention_is_its_parts(feeds: dict[str, Array], attrs: dict[str, object], opset: int) -> None:
    heads = {"q_num_heads": 4, "kv_num_heads": 4} if feeds is THREE else {}
    check(model("Attention", feeds, opset=opset, **attrs, **heads), feeds)


@pytest.mark.parametrize("name", MASKS)
def test_attention_with_a_mask_is_its_parts(name: str) -> None:
    feeds = {**FOUR, "m": MASKS[name]}
    check(model("Attention", feeds), feeds)


@pytest.mark.parametrize("name", [n for n in MASKS if "dead" not in n])
@pytest.mark.parametrize("causal", (0, 1))
def test_attention_with_a_constant_mask_is_its_parts(name: str, causal: int) -> None:
    if causal and MASKS[name].shape[-2] == 1:
        pytest.skip("onnx.reference takes what is_causal says from the rows of the mask: left to it")
    feeds = {**FOUR, "m": MASKS[name]}
    apart = check(model("Attention", feeds, constants=("m",), is_causal=causal), feeds)
    assert "ReduceMax" not in {n.op.name for n in apart.nodes}


def test_keys_and_values_that_are_outputs_come_out_with_their_heads() -> None:
    check(model("Attention", THREE, ("y", "pk", "pv"), q_num_heads=4, kv_num_heads=4), THREE)


PAST = {**FOUR, "pk": random(2, 4, 3, 8), "pv": random(2, 4, 3, 6)}
LEFT = {
    "a cap": model("Attention", FOUR, softcap=2.0),
    "scores that are read": model("Attention", FOUR, ("y", "", "", "s")),
    "what came before": model("Attention", PAST, inputs=("q", "k", "v", "", "pk", "pv")),
    "a computed mask and is_causal": model("Attention", {**FOUR, "m": floats(5, 7)}, is_causal=1),
    "a constant mask with a dead row": model("Attention", {**FOUR, "m": dead(floats(5, 7))}, constants=("m",)),
    "is_causal and a mask of one row": model(
        "Attention", {**FOUR, "m": floats(2, 1, 1, 7)}, constants=("m",), is_causal=1
    ),
    "a short mask": model("Attention", {**FOUR, "m": floats(5, 3)}),
    "an ellipsis": model("Einsum", {"a": random(2, 3)}, equation="...i->i..."),
    "a diagonal": model("Einsum", {"a": random(3, 3)}, equation="ii->i"),
    "three operands": model("Einsum", {n: random(3, 3) for n in "abc"}, equation="ij,jk,kl->il"),
}  # fmt: skip


@pytest.mark.parametrize("what", LEFT)
def test_what_has_no_parts_stays_as_it_is(what: str) -> None:
    graph = taso.load(LEFT[what])
    assert taken_apart(graph, NAMES)[0] is graph


# ── Einsum ───────────────────────────────────────────────────────────────────────────────────────────────────────

SIZES = dict(zip("abcdefgh", (2, 3, 4, 5, 1, 6, 2, 3), strict=True))


@pytest.mark.parametrize("equation", (
    "ab,bc->ac", "ab,bc", "ba,cb->ca", "abc,abd->acd", "abc,dbc->ad", "acb,adb->dca", "abcd,aefd->bcef", "a,b->ab",
    "a,a->", "ab,ab->", "ab,ab->ab", "abc,cd->abd", "dc,abc->bda", "abd,ceb->ac", "ab,cd->dacb", "abc,b->ca",
    "abc->cab", "abc->b", "ab->", "abcd,abed->bcea",
))  # fmt: skip
def test_an_einsum_is_a_product_of_matrices(equation: str) -> None:
    terms = equation.split("->")[0].split(",")
    feeds = {f"x{i}": random(*(SIZES[c] for c in t), seed=i) for i, t in enumerate(terms)}
    apart = check(model("Einsum", feeds, equation=equation), feeds)
    wanted = np.einsum(equation, *(a.astype(np.float64) for a in feeds.values()))
    (found,) = evaluate_graph(apart, feeds, wide=True).values()
    assert np.abs(found - wanted).max() <= 2e-6 * np.abs(wanted).max()
    assert [n.op.name for n in apart.nodes].count("MatMul") == len(terms) - 1


# ── in a lowering ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_backend_says_what_it_wants_in_parts_and_plans_stay_with_their_nodes() -> None:
    node = helper.make_node("Einsum", ["a", "b"], ["t"], equation="ij,jk->ik")
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["a"]), node, helper.make_node("Exp", ["t"], ["y"])], "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, (3, 3)) for n in "xb"],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (3, 3))],
    )  # fmt: skip
    given = taso.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))
    place = {n.op.name: i for i, n in enumerate(given.nodes)}
    given.plans["some"] = Choices(structure(given), algorithms={place["Exp"]: "quick", place["Einsum"]: "none"})
    assert with_wholes(given, Lowering()) is given
    apart = with_wholes(given, Lowering(apart=frozenset({"Einsum"})))
    plan, names = apart.plans["some"], [n.op.name for n in apart.nodes]
    assert isinstance(plan, Choices) and plan.fits(apart) and "Einsum" not in names
    assert {names[i]: way for i, way in plan.algorithms.items()} == {"Exp": "quick"}
