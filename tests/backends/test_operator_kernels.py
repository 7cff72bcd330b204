"""Kernels for operators that oneDNN has not: each runs on them alone, and gives what onnx.reference gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Union

import models
import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, helper, numpy_helper, parser

import taso
from taso.backends.onednn.backend import OneDNNBackend
from taso.graph.errors import BackendUnavailable, TasoError

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
        with np.errstate(all="ignore"):
            wanted = models.by_reference(model, feeds) if oracle == "reference" else models.by_onnxruntime(model, feeds)
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            if exact:
                np.testing.assert_array_equal(a, b)
            else:
                assert models.relative_error(a, b) <= TOLERANCE
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


# ── along an axis ────────────────────────────────────────────────────────────────────────────────────────────────

TIED = np.random.default_rng(5).integers(0, 6, (4, 40)).astype(np.float32)
MANY_TIES = np.random.default_rng(6).integers(0, 50, (3, 5000)).astype(np.float32)
NANS = np.random.default_rng(7).standard_normal((4, 600)).astype(np.float32)
NANS[1, 3] = NANS[1, 599] = NANS[2, 0] = np.nan
NANS[3, 5:9] = -np.inf, np.inf, np.inf, -np.inf
ONE_NAN_AT_THE_END = np.arange(1001, dtype=np.float32)[None] * 0 + 1
ONE_NAN_AT_THE_END[0, -1] = np.nan
SMALLEST = np.full((2, 900), np.iinfo(np.int64).min)
SMALLEST[0, 7] = 3
TO_RANK: dict[str, Array] = {
    "normal": np.random.default_rng(8).standard_normal((3, 900)).astype(np.float32),
    "ties": TIED, "many ties": MANY_TIES, "NaN": NANS, "NaN at the end": ONE_NAN_AT_THE_END,
    "the smallest integers": SMALLEST, "bytes": np.random.default_rng(9).integers(0, 256, (5, 1000)).astype(np.uint8),
    "doubles": np.random.default_rng(10).standard_normal((2, 700)),
    "all equal": np.zeros((2, 1000), np.float32),
    "infinite": np.full((2, 1000), -np.inf, np.float32),
}  # fmt: skip


@pytest.mark.parametrize("largest", (0, 1))
@pytest.mark.parametrize("k", (1, 3, 30))
@pytest.mark.parametrize("x", TO_RANK.values(), ids=TO_RANK.keys())
def test_the_k_greatest_come_in_order_the_first_of_equal_ones_first(x: Array, k: int, largest: int) -> None:
    given = [x, np.array([k], np.int64)]
    check("TopK", given, {"largest": largest}, weights=(1,), outputs=("v", "i"), exact=True)
    check("TopK", [x.T.copy(), given[1]], {"largest": largest, "axis": 0}, weights=(1,), outputs=("v", "i"), exact=True)


@pytest.mark.parametrize("k", (0, 1, 200, 900))
def test_the_k_greatest_of_any_number(k: int) -> None:
    x = np.random.default_rng(11).standard_normal((2, 900, 3)).astype(np.float32)
    check("TopK", [x, np.array([k], np.int64)], {"axis": -2}, weights=(1,), outputs=("v", "i"), exact=True, own=k > 0)


@pytest.mark.parametrize("op", ("ArgMax", "ArgMin"))
@pytest.mark.parametrize("last", (0, 1))
@pytest.mark.parametrize("keep", (0, 1))
@pytest.mark.parametrize("axis", (0, 1, -1))
@pytest.mark.parametrize("x", TO_RANK.values(), ids=TO_RANK.keys())
def test_where_the_greatest_and_the_least_are(x: Array, axis: int, keep: int, last: int, op: str) -> None:
    attrs = {"axis": axis, "keepdims": keep, "select_last_index": last}
    check(op, [x[:, :40].copy()], attrs, exact=True)
    wide = np.repeat(x[:, :40, None], 70, 2) + np.arange(70).astype(x.dtype) % 3
    check(op, [np.moveaxis(wide, axis, 0)[:, :4].copy()], {**attrs, "axis": 0}, exact=True)


def test_where_the_greatest_of_many_planes_is() -> None:
    planes = np.random.default_rng(12).integers(0, 300, (400, 9, 10)).astype(np.int32)
    for last in (0, 1):
        check("ArgMax", [planes], {"axis": 0, "select_last_index": last}, exact=True)


@pytest.mark.parametrize("axis", (0, 1, -1))
def test_a_hardmax_is_one_at_the_first_of_the_greatest(axis: int) -> None:
    check("Hardmax", [TIED], {"axis": axis}, exact=True)


@pytest.mark.parametrize("exclusive", (0, 1))
@pytest.mark.parametrize("reverse", (0, 1))
@pytest.mark.parametrize("axis", (0, 1, -1))
def test_a_running_sum(axis: int, reverse: int, exclusive: int) -> None:
    attrs = {"reverse": reverse, "exclusive": exclusive}
    for shape in ((6, 5, 300), (1, 4), (3, 1, 2)):
        check("CumSum", [shape, np.asarray(axis)], attrs, weights=(1,))
    numbers = np.random.default_rng(13).integers(-9, 9, (5, 7)).astype(np.int32)
    check("CumSum", [numbers, np.asarray(axis, np.int32)], attrs, exact=True)


def test_a_running_sum_along_an_axis_that_is_not_there() -> None:
    model, feeds = model_of("CumSum", filled([(2, 3), np.asarray(5)]), {})
    with pytest.raises(TasoError, match="no axis 5"):
        OneDNNBackend(1).compile(taso.load(model))(feeds)


@pytest.mark.parametrize("p", (1, 2))
@pytest.mark.parametrize("axis", (0, 1, -1))
@pytest.mark.parametrize("size", (1.0, 1e25, 1e-25))
def test_a_vector_is_normalised_also_where_its_squares_are_no_numbers(p: int, axis: int, size: float) -> None:
    x = np.random.default_rng(14).standard_normal((4, 6, 5)).astype(np.float32) * np.float32(size)
    x[1] = 0
    x[:, 2] = 0
    # onnx.reference adds up the elements themselves for p = 1
    model, feeds = model_of("LpNormalization", [x], {"axis": axis, "p": p}, opset=22)
    program = OneDNNBackend(1).compile(taso.load(model))
    norm = np.linalg.norm(x.astype(np.float64), p, axis, keepdims=True)
    wanted = np.divide(x, norm, out=np.zeros(x.shape), where=norm != 0)
    assert models.relative_error(program(feeds)["y0"], wanted.astype(np.float32)) <= TOLERANCE
    assert program.operators == [("LpNormalization", "own")]


@pytest.mark.parametrize("axes", ((0, 2, 3), (1,), (-1, 0)))
def test_mean_and_variance_are_taken_out(axes: Sequence[int]) -> None:
    check("MeanVarianceNormalization", [(2, 3, 5, 4)], {"axes": axes})
    check("MeanVarianceNormalization", [np.full((2, 3, 5, 4), 0.1, np.float32)], {"axes": axes})


# ── turned by an angle ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("interleaved", (0, 1))
@pytest.mark.parametrize("dim", (0, 4))
def test_a_rotary_embedding_gives_what_onnx_says(dim: int, interleaved: int) -> None:
    half = (dim or 8) // 2
    attrs = {"interleaved": interleaved, "rotary_embedding_dim": dim}
    places = np.random.default_rng(15).integers(0, 50, (2, 5))
    for shape, more in (((2, 3, 5, 8), {}), ((2, 5, 24), {"num_heads": 3})):
        check("RotaryEmbedding", [shape, (2, 5, half), (2, 5, half)], {**attrs, **more}, opset=23)
        check("RotaryEmbedding", [shape, (50, half), (50, half), places], {**attrs, **more}, opset=23)


def test_a_place_without_an_angle_is_an_error() -> None:
    places = np.full((1, 2), 9)
    model, feeds = model_of("RotaryEmbedding", filled([(1, 1, 2, 4), (9, 2), (9, 2), places]), {}, opset=23)
    with pytest.raises(TasoError, match="RotaryEmbedding: an index lies outside the 9 elements"):
        OneDNNBackend(1).compile(taso.load(model))(feeds)


# ── moves ────────────────────────────────────────────────────────────────────────────────────────────────────────

TYPES = (np.float32, np.float64, np.int64, np.uint8, np.float16, np.bool_)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("mode", ("DCR", "CRD"))
def test_depth_becomes_space(mode: str, dtype: type[np.generic]) -> None:
    x = np.random.default_rng(16).integers(0, 99, (2, 36, 3, 5)).astype(dtype)
    for size in (1, 2, 3):
        check("DepthToSpace", [x], {"blocksize": size, "mode": mode}, exact=True)


@pytest.mark.parametrize("dtype", TYPES)
def test_space_becomes_depth(dtype: type[np.generic]) -> None:
    x = np.random.default_rng(16).integers(0, 99, (2, 3, 6, 12)).astype(dtype)
    for size in (1, 2, 3):
        check("SpaceToDepth", [x], {"blocksize": size}, exact=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("k", (None, -9, -1, 0, 2, 9))
@pytest.mark.parametrize("upper", (0, 1))
def test_a_triangle_is_cut_out(upper: int, k: int | None, dtype: type[np.generic]) -> None:
    x = np.random.default_rng(17).standard_normal((2, 4, 6)).astype(dtype)
    if np.issubdtype(dtype, np.floating):
        x[0, 0, 5] = x[0, 3, 0] = np.nan
    for weights in ((), (1,)) if k is not None else ((),):
        check("Trilu", [x] if k is None else [x, np.asarray(k)], {"upper": upper}, weights=weights, exact=True)


@pytest.mark.parametrize("time", (0, 1))
def test_sequences_are_reversed_as_far_as_they_go(time: int) -> None:
    lengths = np.array([0, 1, 4, 3], np.int64)
    shape = (4, 4, 3)
    check("ReverseSequence", [shape, lengths], {"time_axis": time, "batch_axis": 1 - time}, exact=True, own=True)


# ── by index ─────────────────────────────────────────────────────────────────────────────────────────────────────

REDUCTIONS = ("none", "add", "mul", "max", "min")


@pytest.mark.parametrize("axis", (0, 1, -1))
def test_elements_are_gathered_also_from_the_end(axis: int) -> None:
    x = np.random.default_rng(18).standard_normal((5, 6, 4)).astype(np.float32)
    indices = np.random.default_rng(19).integers(-4, 4, (3, 2, 4))
    model, feeds = model_of("GatherElements", [x, indices], {"axis": axis})
    program = OneDNNBackend(1).compile(taso.load(model))
    np.testing.assert_array_equal(program(feeds)["y0"], models.by_onnxruntime(model, feeds)[0])
    assert program.operators == [("GatherElements", "own")]


def test_elements_are_gathered_of_more_than_a_few() -> None:
    x, indices = np.random.default_rng(20).standard_normal((300, 20)), np.arange(300 * 20).reshape(300, 20) * 7 % 300
    check("GatherElements", [x, indices], {}, oracle="onnxruntime", exact=True)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("axis", (0, 1, -1))
def test_elements_are_scattered(axis: int, reduction: str) -> None:
    indices = np.random.default_rng(21).integers(-4, 4, (3, 2, 4))
    if reduction == "none":
        # two updates of one element may come in any order
        indices = np.argsort(np.random.default_rng(22).random((4, 4, 4)), axis)[:3, :2]
    for x in (np.float32, np.int32):
        data = (np.random.default_rng(23).standard_normal((4, 4, 4)) * 9).astype(x)
        updates = (np.random.default_rng(24).standard_normal(indices.shape) * 9).astype(x)
        check("ScatterElements", [data, indices, updates], {"axis": axis, "reduction": reduction}, opset=18,
              oracle="onnxruntime")  # fmt: skip


@pytest.mark.parametrize("batch", (0, 1, 2))
def test_positions_are_gathered(batch: int) -> None:
    x = np.random.default_rng(25).standard_normal((2, 3, 4, 5)).astype(np.float32)
    shape = {0: (4,), 1: (2, 4), 2: (2, 3, 2)}[batch]
    for length in (1, 2):
        indices = np.random.default_rng(26).integers(-2, 2, (*shape, length))
        check("GatherND", [x, indices], {"batch_dims": batch}, oracle="onnxruntime", exact=True)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("wide", (3, 200))
def test_positions_are_scattered_to(wide: int, reduction: str) -> None:
    x = np.random.default_rng(27).standard_normal((6, 5, wide)).astype(np.float32)
    for indices in (np.array([[4], [-6], [2]]), np.array([[[4, 0], [-6, -1]], [[2, 2], [3, 3]]])):
        updates = np.random.default_rng(28).standard_normal((*indices.shape[:-1], *x.shape[indices.shape[-1]:]))
        check("ScatterND", [x, indices, updates.astype(np.float32)], {"reduction": reduction}, opset=18)
    if reduction != "none":
        again = np.array([[1], [1], [-5]])
        updates = np.random.default_rng(29).standard_normal((3, 5, wide)).astype(np.float32)
        check("ScatterND", [x, again, updates], {"reduction": reduction}, opset=18)


@pytest.mark.parametrize(("op", "rest"), (
    ("GatherElements", ()), ("GatherND", ()), ("ScatterElements", ((2, 1),)), ("ScatterND", ((2, 3),))))  # fmt: skip
@pytest.mark.parametrize("index", (4, -5))
def test_an_index_outside_is_an_error_that_says_so(op: str, rest: Sequence[tuple[int, ...]], index: int) -> None:
    indices = np.full((2, 1), index)
    model, feeds = model_of(op, filled([(4, 3), indices, *rest]), {})
    with pytest.raises(TasoError, match=f"{op}: an index lies outside the 4 elements"):
        OneDNNBackend(1).compile(taso.load(model))(feeds)


@pytest.mark.parametrize("axis", (0, 1, -1, -3))
def test_one_is_hot_and_none_for_an_index_outside(axis: int) -> None:
    indices = np.array([[0, 4, -1], [-5, 5, -6]], np.int64)
    for values in (np.array([2, 3], np.float32), np.array([0, 1], np.int64)):
        check("OneHot", [indices, np.asarray(5), values], {"axis": axis}, weights=(1, 2), oracle="onnxruntime",
              exact=True)  # fmt: skip


# ── between the elements ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("corners", (0, 1))
@pytest.mark.parametrize("padding", ("zeros", "border", "reflection"))
@pytest.mark.parametrize("mode", ("nearest", "linear", "cubic"))
def test_a_grid_is_sampled(mode: str, padding: str, corners: int) -> None:
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": corners}
    for channels in (2, 9):
        grid = np.random.default_rng(30).uniform(-1.7, 1.7, (2, 4, 3, 2)).astype(np.float32)
        check("GridSample", [(2, channels, 5, 6), grid], attrs, opset=20)
    if mode != "cubic":
        grid = np.random.default_rng(31).uniform(-1.4, 1.4, (1, 2, 3, 2, 3)).astype(np.float32)
        check("GridSample", [(1, 2, 3, 4, 5), grid], attrs, opset=20)


def test_a_grid_far_outside_reads_zeros_also_beside_what_is_infinite() -> None:
    x = np.full((1, 1, 2, 2), np.inf, np.float32)
    x[0, 0, 0, 0] = 1
    grid = np.array([[[[1e30, 0], [-9, -9], [-1, -1], [3, 3]]]], np.float32)
    check("GridSample", [x, grid], {"align_corners": 1}, opset=20)


@pytest.mark.parametrize("half", ("half_pixel", "output_half_pixel"))
@pytest.mark.parametrize("ratio", (0, 1, 2))
def test_regions_are_averaged(ratio: int, half: str) -> None:
    regions = np.array(
        [[0, 0, 6, 5], [-3, 1, 4, 9], [2, 2, 2.5, 2.5], [5, 4, 1, 2], [8, 8, 30, 30], [1, 1, 5.5, 3]], np.float32
    )
    images = np.array([0, 1, 1, 0, 1, 0], np.int64)
    attrs = {"output_height": 3, "output_width": 2, "sampling_ratio": ratio, "spatial_scale": 0.75,
             "coordinate_transformation_mode": half}  # fmt: skip
    check("RoiAlign", [(2, 3, 6, 7), regions, images], attrs, opset=16)
    check("RoiAlign", [(2, 3, 1, 1), regions, images], attrs, opset=16)


def test_a_region_of_an_image_that_is_not_there_is_an_error() -> None:
    model, feeds = model_of("RoiAlign", filled([(1, 1, 4, 4), (1, 4), np.array([1])]), {}, opset=16)
    with pytest.raises(TasoError, match="RoiAlign: an index lies outside the 1 elements"):
        OneDNNBackend(1).compile(taso.load(model))(feeds)


# ── element by element ───────────────────────────────────────────────────────────────────────────────────────────

ODD = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 0.999, 2.5, -1.0, -0.3, 20.0], np.float32)


@pytest.mark.parametrize("op", ("ThresholdedRelu", "Celu", "IsNaN", "Atan", "Asinh", "Sinh", "Cosh", "Tan", "Acosh",
                                "Asin", "Acos", "Atanh"))  # fmt: skip
def test_a_function_of_one_element(op: str) -> None:
    check(op, [ODD])
    check(op, [(2, 16, 5, 5)])


def test_thresholds_and_slopes_are_taken() -> None:
    check("ThresholdedRelu", [ODD], {"alpha": -0.5})
    check("Celu", [ODD], {"alpha": 2.5})


@pytest.mark.parametrize("dtype", (np.int64, np.int32, np.uint8, np.int8))
def test_quotients_of_integers_are_cut_off_towards_zero(dtype: type[np.generic]) -> None:
    a, b = (np.random.default_rng(s).integers(-99 * (dtype != np.uint8), 99, n).astype(dtype) for s, n in
            ((1, (7, 9)), (2, (9,))))  # fmt: skip
    b[b == 0] = 1
    check("Div", [a, b], oracle="reference", exact=True)
    assert (np.trunc(a / b).astype(dtype) != a // b).any() == (dtype != np.uint8)


# ── Einsum ───────────────────────────────────────────────────────────────────────────────────────────────────────

EQUATIONS: dict[str, Sequence[tuple[int, ...]]] = {
    "bhqd,bhkd->bhqk": [(2, 3, 4, 5), (2, 3, 6, 5)],
    "bqhd,bkhd->bhqk": [(2, 4, 3, 5), (2, 6, 3, 5)],
    "bhqk,bkhd->bqhd": [(2, 3, 4, 6), (2, 6, 3, 5)],
    "bsd,dhk->bshk": [(2, 3, 4), (4, 5, 6)],
    "bshk,hkd->bsd": [(2, 3, 5, 6), (5, 6, 4)],
    "bhwc,hkc->bhwk": [(2, 3, 4, 5), (3, 6, 5)],
    "ij,jk": [(3, 4), (4, 5)],
    "ij,kj->ki": [(3, 4), (5, 4)],
    "ijk,jik->k": [(3, 4, 5), (4, 3, 5)],
    "i,j->ij": [(3,), (4,)],
    "i,i->": [(5,), (5,)],
    "i,i->i": [(5,), (5,)],
    "ab,cd->ac": [(2, 3), (4, 5)],
    "abc,cd->d": [(2, 3, 4), (4, 5)],
    "...ij,...jk->...ik": [(2, 3, 4, 5), (3, 5, 6)],
    "...ij,jk->...ik": [(2, 3, 4, 5), (5, 6)],
    "i...,i...->...": [(4, 2, 3), (4, 2, 3)],
    "ii->i": [(4, 4)],
    "ij->ji": [(3, 4)],
    "ij->": [(3, 4)],
    "ij,jk,kl->il": [(3, 4), (4, 5), (5, 6)],
    "iij,jk->ik": [(3, 3, 4), (4, 5)],
    "a b , b c -> a c": [(1, 4), (4, 1)],
}  # fmt: skip


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("constant", ((), (1,)))
def test_an_equation_gives_what_onnx_says(equation: str, constant: tuple[int, ...]) -> None:
    shapes = EQUATIONS[equation]
    if constant and len(shapes) < 2:
        return
    check("Einsum", shapes, {"equation": equation}, weights=constant)


# ── boxes ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("centred", (0, 1))
@pytest.mark.parametrize("most", (0, 3, 500))
@pytest.mark.parametrize("overlap", (0.0, 0.3, 1.0))
def test_boxes_that_overlap_are_suppressed(overlap: float, most: int, centred: int) -> None:
    rng = np.random.default_rng(32)
    boxes = (rng.random((2, 60, 4)) * 10).astype(np.float32)
    boxes[0, 7] = boxes[0, 8] = boxes[0, 9]
    boxes[1, 5, 2:] = boxes[1, 5, :2] if not centred else 0
    scores = rng.integers(0, 20, (2, 3, 60)).astype(np.float32)
    limits = [np.array([most], np.int64), np.array([overlap], np.float32), np.array([4.0], np.float32)]
    attrs = {"center_point_box": centred}
    check("NonMaxSuppression", [boxes, scores, *limits], attrs, weights=(2, 3, 4), exact=True, own=False)
    check("NonMaxSuppression", [boxes, scores, *limits[:2]], attrs, weights=(2, 3), exact=True, own=False)


# ── pads ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("pads", ((1, 2, 0, 3, 2, 0, 3, 1), (0, 0, 2, 2, 0, 0, 2, 2), (0, 0, 0, 1, 0, 0, 0, 0),
                                  (-1, 2, 0, 3, 2, -1, -1, 1), (0, -2, 0, 0, 0, -1, 9, -4)))  # fmt: skip
@pytest.mark.parametrize("mode", ("constant", "reflect", "edge", "wrap"))
def test_a_tensor_is_padded(mode: str, pads: Sequence[int]) -> None:
    if mode != "constant" and (min(pads) < 0 or max(pads) > 3):
        return
    for dtype in (np.float32, np.int32):
        x = (np.random.default_rng(33).standard_normal((4, 4, 5, 6)) * 9).astype(dtype)
        given = [x, np.array(pads, np.int64), *([np.asarray(7, dtype)] if mode == "constant" else [])]
        # onnx.reference cuts nothing off
        oracle = "onnxruntime" if min(pads) < 0 else "reference"
        check("Pad", given, {"mode": mode}, weights=(1, 2)[: len(given) - 1], exact=True, oracle=oracle)


# ── in a search ──────────────────────────────────────────────────────────────────────────────────────────────────

LAYER = """
<ir_version: 10, opset_import: ["": 23]>
layer (float[2, 6, 16] x, float[16, 16] a, float[16, 16] b, float[16, 16] c, float[2, 2, 3, 8] before)
  => (float[2, 6, 16] y, float[2, 2, 9, 8] keys)
{
  q = MatMul (x, a)
  k = MatMul (x, b)
  v = MatMul (x, c)
  z, keys, values = Attention <q_num_heads: int = 2, kv_num_heads: int = 2> (q, k, v, , before, before)
  twice = Add (z, z)
  y = Relu (twice)
}
"""


@pytest.mark.parametrize("objective", ("time", "memory"))
def test_a_graph_with_an_attention_of_which_not_all_is_read_is_optimized(objective: str) -> None:
    model = parser.parse_model(LAYER)
    feeds = models.random_feeds(model)
    best = taso.optimize(model, backend="onednn", threads=1, time_limit=5, objective=objective, progress=False)
    found = taso.compile(best, "onednn", 1)(feeds)
    for a, b in zip(found.values(), models.by_reference(model, feeds), strict=True):
        assert models.relative_error(a, b) <= TOLERANCE


def test_what_nobody_reads_of_an_attention_takes_no_memory() -> None:
    shape = (1, 2, 512, 16)
    model, _ = model_of("Attention", filled([shape] * 3), {}, opset=23)
    peak = OneDNNBackend(1).compile(taso.load(model)).peak_bytes
    # those of one head are there at a time; the scores of both would be 2 MiB
    assert peak < 2 << 20
