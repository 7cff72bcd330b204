"""Kernels for operators that oneDNN has not: each runs on them alone, and gives what onnx.reference gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Union

import models
import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, helper, numpy_helper

import taso
from taso.backends.onednn.backend import OneDNNBackend
from taso.graph.errors import BackendUnavailable

Array = NDArray[np.generic]
Given = Union[Array, tuple[int, ...], None]

TOLERANCE = 2e-5


def _has_onednn() -> bool:
    try:
        OneDNNBackend()
    except BackendUnavailable:
        return False
    return True


pytestmark = pytest.mark.skipif(not _has_onednn(), reason="oneDNN does not load here")


def filled(given: Sequence[Given], seed: int = 7) -> list[Array | None]:
    """Arrays as they are, normal numbers for shapes."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(g).astype(np.float32) if isinstance(g, tuple) else g for g in given]


def model_of(
    op: str, arrays: Sequence[Array | None], attrs: Mapping[str, object], weights: Sequence[int] = (),
    outputs: Sequence[str] = ("y0",), opset: int = 21,
) -> tuple[ModelProto, dict[str, Array]]:  # fmt: skip
    names = ["" if a is None else f"x{i}" for i, a in enumerate(arrays)]
    held = {n: np.asarray(a) for n, a in zip(names, arrays, strict=True) if a is not None}
    constant = {names[i] for i in weights}
    node = helper.make_node(op, names, list(outputs))
    node.attribute.extend(helper.make_attribute(n, v) for n, v in attrs.items())
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
         for n, a in held.items() if n not in constant],
        [helper.make_empty_tensor_value_info(n) for n in outputs if n],
        [numpy_helper.from_array(held[n], n) for n in sorted(constant)],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return made, {n: a for n, a in held.items() if n not in constant}


def check(
    op: str, given: Sequence[Given], attrs: Mapping[str, object] | None = None, *, weights: Sequence[int] = (),
    outputs: Sequence[str] = ("y0",), opset: int = 21, oracle: str = "reference", threads: int = 1,
    exact: bool = False, own: bool = True,
) -> None:  # fmt: skip
    model, feeds = model_of(op, filled(given), attrs or {}, weights, outputs, opset)
    program = OneDNNBackend(threads).compile(taso.load(model))
    for _ in range(2):
        found = list(program(feeds).values())
        wanted = models.by_reference(model, feeds) if oracle == "reference" else models.by_onnxruntime(model, feeds)
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            if exact:
                np.testing.assert_array_equal(a, b)
            elif b.size:
                assert np.array_equal(np.isnan(a), np.isnan(b)) if b.dtype.kind == "f" else True
                assert models.relative_error(np.nan_to_num(a), np.nan_to_num(b)) <= TOLERANCE
    assert program.operators
    assert not own or all(how == "own" for _, how in program.operators), program.operators


# ── Attention ────────────────────────────────────────────────────────────────────────────────────────────────────

FOUR, SHARED, BESIDE = (2, 4, 6, 8), (2, 2, 9, 8), (2, 6, 32)
MASK = np.random.default_rng(1).random((6, 9)) > 0.4
MASK[2] = False
SOFT = np.where(MASK, np.float32(0.25), np.float32(-np.inf))
BY_BATCH = np.random.default_rng(2).standard_normal((2, 4, 6, 9)).astype(np.float32)
PAST = (2, 2, 5, 8)
QKV: tuple[Given, ...] = (FOUR, SHARED, SHARED)

ATTENTIONS: dict[str, tuple[Sequence[Given], dict[str, object]]] = {
    "as many heads on both sides": ([FOUR, (2, 4, 9, 8), (2, 4, 9, 5)], {}),
    "heads that share keys": (QKV, {}),
    "a scale": (QKV, {"scale": 0.3}),
    "a scale of zero": (QKV, {"scale": 0.0}),
    "a cap": (QKV, {"softcap": 1.5}),
    "causal": (QKV, {"is_causal": 1}),
    "causal with more queries than keys": ([(1, 2, 9, 8), (1, 2, 4, 8), (1, 2, 4, 8)], {"is_causal": 1}),
    "a cap and causal": (QKV, {"is_causal": 1, "softcap": 0.5}),
    "one query, causal": ([(2, 4, 1, 8), SHARED, SHARED], {"is_causal": 1}),
    "heads side by side": ([BESIDE, (2, 9, 16), (2, 9, 16)], {"q_num_heads": 4, "kv_num_heads": 2}),
    "heads side by side, causal": ([BESIDE, BESIDE, BESIDE], {"q_num_heads": 4, "kv_num_heads": 4, "is_causal": 1}),
    "a boolean mask with a row of nothing": ([*QKV, MASK], {}),
    "a mask with a row of nothing": ([*QKV, SOFT], {}),
    "a mask and causal": ([*QKV, SOFT], {"is_causal": 1}),
    "a mask for each head": ([*QKV, BY_BATCH], {}),
    "a mask for each head of all": ([*QKV, BY_BATCH[:1]], {}),
    "a mask for each element of the batch": ([*QKV, BY_BATCH[:, :1]], {}),
    "a mask for keys": ([*QKV, BY_BATCH[:, :1, :1]], {}),
    "a mask for keys of all": ([*QKV, BY_BATCH[0, 0, :1]], {}),
    "a mask of rank 3": ([*QKV, BY_BATCH[0]], {}),
    "a mask of fewer keys": ([*QKV, BY_BATCH[..., :7]], {}),
    "a boolean mask and heads side by side": (
        [BESIDE, (2, 9, 16), (2, 9, 16), MASK], {"q_num_heads": 4, "kv_num_heads": 2, "is_causal": 1}),
}  # fmt: skip


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize(("given", "attrs"), ATTENTIONS.values(), ids=ATTENTIONS.keys())
def test_an_attention_gives_what_onnx_says(given: Sequence[Given], attrs: dict[str, object], threads: int) -> None:
    check("Attention", given, attrs, opset=23, threads=threads)


@pytest.mark.parametrize("mask", (MASK, SOFT, BY_BATCH), ids=("boolean", "added", "by heads"))
@pytest.mark.parametrize("causal", (0, 1))
def test_an_attention_with_a_mask_among_the_weights(mask: Array, causal: int) -> None:
    check("Attention", [*QKV, mask], {"is_causal": causal}, weights=(3,), opset=23)


@pytest.mark.parametrize("causal", (0, 1))
@pytest.mark.parametrize("outputs", (("y", "k", "v"), ("y", "k"), ("y",), ("y", "", "v")), ids=str)
def test_an_attention_goes_on_from_the_past_and_gives_what_is_present(outputs: Sequence[str], causal: int) -> None:
    check("Attention", [*QKV, None, PAST, PAST], {"is_causal": causal}, outputs=outputs, opset=23)
    check("Attention", QKV, {"is_causal": causal}, outputs=outputs, opset=23)
    check("Attention", [BESIDE, BESIDE, BESIDE, None, (2, 4, 3, 8), (2, 4, 3, 8)],
          {"is_causal": causal, "q_num_heads": 4, "kv_num_heads": 4}, outputs=outputs, opset=23)  # fmt: skip


@pytest.mark.parametrize("causal", (0, 1))
def test_an_attention_with_lengths_of_keys(causal: int) -> None:
    lengths = np.array([9, 4], np.int64)
    check("Attention", [*QKV, None, None, None, lengths], {"is_causal": causal}, opset=24)
    check("Attention", [*QKV, SOFT, None, None, lengths], {"is_causal": causal}, opset=24, weights=(6,))


@pytest.mark.parametrize("causal", (0, 1))
@pytest.mark.parametrize("left", (-1, 0, 2))
@pytest.mark.parametrize("right", (-1, 1))
def test_an_attention_with_windows(left: int, right: int, causal: int) -> None:
    attrs = {"left_window_size": left, "right_window_size": right, "is_causal": causal}
    for given in (QKV, [*QKV, SOFT], [*QKV, None, PAST, PAST]):
        check("Attention", given, attrs, opset=25)


@pytest.mark.parametrize("rows", (300, 1100))
@pytest.mark.parametrize("causal", (0, 1))
def test_an_attention_of_many_rows_goes_in_blocks(rows: int, causal: int) -> None:
    shape = (1, 2, rows, 16)
    check("Attention", [shape, shape, shape], {"is_causal": causal}, opset=23, oracle="onnxruntime")
    added = np.random.default_rng(3).standard_normal((rows, rows)).astype(np.float32)
    check("Attention", [shape, shape, shape, added], {}, opset=23, oracle="onnxruntime")
    past = (1, 2, 77, 16)
    check("Attention", [shape, shape, shape, None, past, past], {"is_causal": causal}, opset=23)


def test_an_attention_whose_scores_are_read_is_evaluated_as_before() -> None:
    check("Attention", QKV, {}, outputs=("y", "", "", "scores"), opset=23, own=False)
