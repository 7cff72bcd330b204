"""Kernels of ours behind oneDNN: each row runs on them alone, and gives what onnx.reference or ONNX Runtime gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import models
import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import taso
from taso.backends.onednn.backend import OneDNNBackend
from taso.backends.onednn.executor import Program
from taso.graph.errors import BackendUnavailable
from taso.graph.evaluate import evaluate_graph

TOLERANCE = 2e-5
Arrays = dict[str, NDArray[np.generic]]


def _has_onednn() -> bool:
    try:
        OneDNNBackend()
    except BackendUnavailable:
        return False
    return True


pytestmark = pytest.mark.skipif(not _has_onednn(), reason="oneDNN does not load here")


@dataclass(frozen=True)
class Row:
    """A node: shapes of its float inputs (None: absent), which of them are weights, other inputs as they are."""

    op: str
    shapes: Sequence[tuple[int, ...] | None]
    attrs: Mapping[str, object] = field(default_factory=dict)
    weights: tuple[int, ...] = ()
    given: Mapping[int, NDArray[np.generic]] = field(default_factory=dict)
    outputs: int = 1
    followers: tuple[str, ...] = ()
    oracle: str = "onnxruntime"
    opset: int = 19

    def model(self) -> ModelProto:
        rng = np.random.default_rng(7)
        names = ["" if s is None and i not in self.given else f"x{i}" for i, s in enumerate(self.shapes)]
        inputs, weights = [], []
        for i, shape in enumerate(self.shapes):
            if i in self.given:
                weights.append(numpy_helper.from_array(np.asarray(self.given[i]), f"x{i}"))
            elif shape is not None and i in self.weights:
                values = (rng.standard_normal(shape) / 3).astype(np.float32)
                weights.append(numpy_helper.from_array(values, f"x{i}"))
            elif shape is not None:
                inputs.append(helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, shape))
        outs = [f"y{i}" for i in range(self.outputs)]
        nodes = [helper.make_node(self.op, names, outs, **self.attrs)]
        for number, follower in enumerate(self.followers):
            before = nodes[-1].output[0]
            nodes.append(helper.make_node(follower, [before, "other"] if follower in ("Add", "Mul") else [before],
                                          [f"z{number}"]))  # fmt: skip
        outs[0] = nodes[-1].output[0]
        declared = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outs]
        graph = helper.make_graph(nodes, "g", inputs, declared, weights)
        if {"Add", "Mul"} & set(self.followers):
            channels = self.shapes[0][1]  # type: ignore[index]  # there is a first input
            if self.op == "ConvTranspose":
                channels = self.shapes[1][1] * int(self.attrs.get("group", 1))  # type: ignore[index, call-overload]  # as above
            rank = len(self.shapes[0]) - 2  # type: ignore[arg-type]  # as above
            other = (rng.standard_normal((1, channels, *(1,) * rank))).astype(np.float32)
            graph.initializer.append(numpy_helper.from_array(other, "other"))
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)

    def wanted(self, model: ModelProto, feeds: Arrays) -> Sequence[NDArray[np.generic]]:
        if self.oracle == "reference":
            return models.by_reference(model, feeds)
        if self.oracle == "definition":
            return list(evaluate_graph(taso.load(model), feeds).values())
        return models.by_onnxruntime(model, feeds)


def not_own(program: Program) -> list[str]:
    assert program.operators, "nothing ran"
    return [op for op, how in program.operators if how != "own"]


def check(row: Row) -> None:
    model = row.model()
    program = OneDNNBackend(2).compile(taso.load(model))
    for seed in (1, 2):
        feeds = models.random_feeds(model, seed)
        found, wanted = list(program(feeds).values()), row.wanted(model, feeds)
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == b.dtype
            assert models.relative_error(a, b) <= TOLERANCE
    assert not_own(program) == []


# ── Resize ───────────────────────────────────────────────────────────────────────────────────────────────────────


def resized(shape: tuple[int, ...], scales: Sequence[float] = (), sizes: Sequence[int] = (), **attrs: object) -> Row:
    given = {2: np.asarray(scales, np.float32)} if scales else {3: np.asarray(sizes, np.int64)}
    count = 3 if scales else 4
    # ONNX Runtime has not all of it, and of sizes that are no whole numbers its own idea
    exact = {"axes", "exclude_outside"} & attrs.keys() or any(s != int(s) for s in scales)
    exact = exact or attrs.get("coordinate_transformation_mode") == "half_pixel_symmetric"
    oracle = "reference" if exact else "onnxruntime"
    return Row("Resize", [shape, *[None] * (count - 1)], attrs, given=given, oracle=oracle)


MODES = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric")
RESIZED = {
    **{f"nearest {c} {n} {s}": resized((1, 3, 5, 4), s, mode="nearest", coordinate_transformation_mode=c,
                                       nearest_mode=n)
       for c, n, s in product(MODES, ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"),
                              ((1, 1, 2, 2), (1, 1, 0.6, 1.5)))},
    **{f"linear {c} {s}": resized((2, 3, 5, 4), s, mode="linear", coordinate_transformation_mode=c)
       for c, s in product(MODES, ((1, 1, 2, 2), (1, 1, 0.6, 1.5)))},
    **{f"cubic {c}": resized((1, 2, 6, 5), (1, 1, 1.7, 2), mode="cubic", coordinate_transformation_mode=c)
       for c in MODES[:4]},
    "cubic other a": resized((1, 2, 6, 5), (1, 1, 2, 2), mode="cubic", cubic_coeff_a=-0.5),
    "cubic without what lies outside": resized((1, 2, 6, 5), (1, 1, 2, 2), mode="cubic", exclude_outside=1),
    "nearest to sizes": resized((2, 16, 5, 4), sizes=(2, 16, 10, 12), mode="nearest"),
    "nearest to odd sizes": resized((2, 16, 5, 4), sizes=(2, 16, 7, 3), mode="nearest"),
    "linear to sizes": resized((1, 2, 5, 4), sizes=(1, 2, 9, 7), mode="linear"),
    "linear down to one": resized((1, 2, 5, 4), sizes=(1, 2, 1, 1), mode="linear"),
    "linear up from one": resized((1, 2, 1, 1), sizes=(1, 2, 3, 4), mode="linear"),
    "nothing to do": resized((1, 2, 5, 4), (1, 1, 1, 1), mode="linear"),
    "all axes": resized((2, 2, 3, 4), (2, 2, 2, 2), mode="nearest"),
    "some axes": resized((2, 2, 3, 4), (2, 3), mode="nearest", axes=[3, 2]),
    "one spatial axis": resized((2, 3, 7), (1, 1, 2), mode="linear"),
    "three spatial axes": resized((1, 2, 3, 4, 3), (1, 1, 2, 2, 2), mode="linear"),
}  # fmt: skip


@pytest.mark.parametrize("row", RESIZED.values(), ids=RESIZED.keys())
def test_a_resize_gives_what_onnx_says(row: Row) -> None:
    check(row)


# ── Pad ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def padded(shape: tuple[int, ...], pads: Sequence[int], mode: str) -> Row:
    return Row("Pad", [shape, None], {"mode": mode}, given={1: np.asarray(pads, np.int64)}, oracle="reference")


PADDED = {
    **{f"{mode} one axis": padded((2, 9), (0, 3, 0, 4), mode) for mode in ("reflect", "edge", "wrap")},
    **{f"{mode} all axes": padded((2, 3, 5, 4), (1, 2, 3, 2, 0, 1, 2, 3), mode) for mode in ("reflect", "edge", "wrap")
       if mode != "reflect"},
    "reflect image": padded((2, 3, 5, 4), (0, 0, 3, 2, 0, 0, 2, 3), "reflect"),
    "edge of one element": padded((1, 1), (2, 2, 0, 1), "edge"),
    "nothing to pad": padded((2, 3), (0, 0, 0, 0), "reflect"),
}  # fmt: skip


@pytest.mark.parametrize("row", PADDED.values(), ids=PADDED.keys())
def test_a_pad_gives_what_onnx_says(row: Row) -> None:
    check(row)


# ── ConvTranspose ────────────────────────────────────────────────────────────────────────────────────────────────


def transposed(
    x: tuple[int, ...], w: tuple[int, ...], bias: bool = True, followers: tuple[str, ...] = (),
    weights: tuple[int, ...] = (1, 2), **attrs: object,
) -> Row:  # fmt: skip
    channels = w[1] * int(attrs.get("group", 1))  # type: ignore[call-overload]  # a number
    shapes: list[tuple[int, ...] | None] = [x, w, (channels,)] if bias else [x, w]
    return Row("ConvTranspose", shapes, attrs, weights=weights, followers=followers)


TRANSPOSED = {
    "2x2 by 2": transposed((1, 24, 8, 6), (24, 24, 2, 2), strides=[2, 2]),
    "2x2 by 2 to one channel": transposed((2, 24, 8, 6), (24, 1, 2, 2), strides=[2, 2]),
    "3x3": transposed((1, 16, 7, 5), (16, 32, 3, 3)),
    "3x3 with pads": transposed((2, 16, 7, 5), (16, 8, 3, 3), pads=[1, 1, 1, 1]),
    "odd pads": transposed((1, 4, 7, 5), (4, 8, 3, 3), pads=[0, 1, 2, 1], strides=[2, 1]),
    "output padding": transposed((1, 4, 7, 5), (4, 8, 3, 3), pads=[1, 1, 1, 1], strides=[2, 2], output_padding=[1, 1]),
    "dilated": transposed((1, 4, 7, 5), (4, 8, 3, 3), dilations=[2, 1]),
    "groups": transposed((1, 8, 7, 5), (8, 3, 3, 3), group=2, strides=[2, 2]),
    "depthwise": transposed((1, 16, 7, 5), (16, 1, 3, 3), group=16),
    "without bias": transposed((1, 16, 7, 5), (16, 16, 3, 3), bias=False),
    "one axis": transposed((2, 4, 9), (4, 6, 4), strides=[2]),
    "three axes": transposed((1, 4, 3, 4, 5), (4, 6, 2, 2, 2), strides=[2, 2, 2]),
    "weights that are computed": transposed((1, 8, 5, 5), (8, 8, 3, 3), weights=()),
    "bias behind": transposed((1, 24, 8, 6), (24, 24, 2, 2), bias=False, followers=("Add",), strides=[2, 2]),
    "activation behind": transposed((1, 24, 8, 6), (24, 16, 2, 2), followers=("Relu",), strides=[2, 2]),
    "a chain behind": transposed((1, 24, 8, 6), (24, 16, 2, 2), followers=("Mul", "Add", "Sigmoid"), strides=[2, 2]),
    "a chain behind 3x3": transposed((2, 32, 9, 9), (32, 32, 3, 3), followers=("Add", "Tanh", "Mul"), pads=[1] * 4),
}  # fmt: skip


@pytest.mark.parametrize("row", TRANSPOSED.values(), ids=TRANSPOSED.keys())
def test_a_transposed_convolution_gives_what_onnx_says(row: Row) -> None:
    check(row)


# ── normalisations ───────────────────────────────────────────────────────────────────────────────────────────────


def normed(op: str, shape: tuple[int, ...], scale: tuple[int, ...], weights: tuple[int, ...], **attrs: object) -> Row:
    count = 2 if op == "RMSNormalization" else 3
    opset = {"GroupNormalization": 21, "RMSNormalization": 23}.get(op, 19)
    return Row(op, [shape, *[scale] * (count - 1)], attrs, weights=weights, opset=opset)


NORMED = {
    **{f"{op} {shape} {weights}": normed(op, shape, (shape[1],), weights, **more)
       for op, more in (("InstanceNormalization", {}), ("GroupNormalization", {"num_groups": 2}))
       for shape in ((2, 6, 5, 7), (1, 32, 9), (2, 4, 3, 4, 5), (1, 16, 1, 1), (3, 2, 17, 1))
       for weights in ((1, 2), ())},
    "all channels in one group": normed("GroupNormalization", (2, 6, 5, 7), (6,), (1, 2), num_groups=1, epsilon=0.1),
    "each channel its own group": normed("GroupNormalization", (2, 6, 5, 7), (6,), (1, 2), num_groups=6),
    "a large epsilon": normed("InstanceNormalization", (2, 6, 5, 7), (6,), (1, 2), epsilon=0.5),
    "mean of squares": normed("RMSNormalization", (2, 5, 48), (48,), (1,)),
    "mean of squares of two axes": normed("RMSNormalization", (2, 5, 6, 7), (6, 7), (1,), axis=-2, epsilon=0.3),
    "mean of all squares": normed("RMSNormalization", (2, 33), (2, 33), (), axis=0),
}  # fmt: skip


@pytest.mark.parametrize("row", NORMED.values(), ids=NORMED.keys())
def test_a_normalisation_gives_what_onnxruntime_gives(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("op", ("InstanceNormalization", "GroupNormalization", "RMSNormalization"))
def test_steps_behind_a_normalisation_run_on_kernels(op: str) -> None:
    more: dict[str, object] = {"num_groups": 4} if op == "GroupNormalization" else {}
    scale = (6,) if op == "RMSNormalization" else (8,)
    row = normed(op, (2, 8, 5, 6), scale, (1, 2), **more)
    check(replace(row, followers=("Relu", "Mul", "Sigmoid")))


# ── LSTM, GRU, RNN ───────────────────────────────────────────────────────────────────────────────────────────────

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def running(
    op: str, ways: int = 1, steps: int = 5, batch: int = 3, size: int = 4, hidden: int = 6, bias: bool = True,
    lengths: Sequence[int] = (), initial: bool = False, peepholes: bool = False, weights: tuple[int, ...] = (1, 2, 3),
    oracle: str = "onnxruntime", **attrs: object,
) -> Row:  # fmt: skip
    gates = GATES[op]
    state = (ways, batch, hidden) if initial else None
    shapes: list[tuple[int, ...] | None] = [
        (steps, batch, size), (ways, gates * hidden, size), (ways, gates * hidden, hidden),
        (ways, 2 * gates * hidden) if bias else None, None, state,
    ]  # fmt: skip
    if op == "LSTM":
        shapes += [state, (ways, 3 * hidden) if peepholes else None]
    given = {4: np.asarray(lengths, np.int32)} if lengths else {}
    full = {"hidden_size": hidden, **attrs}
    if ways == 2:
        full["direction"] = "bidirectional"
    return Row(op, shapes, full, weights=weights, given=given, outputs=3 if op == "LSTM" else 2, oracle=oracle)


RUNNING = {
    **{f"{op} {what}": running(op, **more) for op, (what, more) in product(GATES, {
        "plain": {}, "without bias": {"bias": False}, "from a state": {"initial": True},
        "backwards": {"direction": "reverse"}, "both ways": {"ways": 2, "initial": True},
        "lengths": {"lengths": (5, 2, 4)}, "one step": {"steps": 1, "batch": 1, "initial": True},
        # ONNX Runtime does not clip all that is fed to activations
        "clip": {"clip": 0.4, "oracle": "definition"}, "weights that are computed": {"weights": ()},
        "both ways with lengths": {"ways": 2, "lengths": (1, 5, 3)},
    }.items())},
    "LSTM peepholes": running("LSTM", peepholes=True, initial=True, weights=(1, 2, 3, 7)),
    "LSTM coupled": running("LSTM", input_forget=1),
    "LSTM activations": running("LSTM", activations=["HardSigmoid", "Relu", "Tanh"]),
    "LSTM ScaledTanh": running("LSTM", activations=["Sigmoid", "ScaledTanh", "Tanh"], activation_alpha=[1.7],
                               activation_beta=[0.6]),
    "GRU late reset": running("GRU", linear_before_reset=1),
    "RNN Relu": running("RNN", activations=["Relu"]),
}  # fmt: skip


@pytest.mark.parametrize("row", RUNNING.values(), ids=RUNNING.keys())
def test_a_recurrent_operator_gives_what_onnxruntime_gives(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("op", GATES)
def test_a_recurrent_operator_with_batches_first_is_that_with_time_first(op: str) -> None:
    row = running(op, initial=True)
    model = row.model()
    first = OneDNNBackend(2).compile(taso.load(model))
    turned = ModelProto()
    turned.CopyFrom(model)
    turned.graph.node[0].attribute.append(helper.make_attribute("layout", 1))
    for declared in turned.graph.input:
        dims = declared.type.tensor_type.shape.dim
        dims[0].dim_value, dims[1].dim_value = dims[1].dim_value, dims[0].dim_value
    second = OneDNNBackend(2).compile(taso.load(turned))
    feeds = models.random_feeds(model, 3)
    wanted = list(first(feeds).values())
    found = list(second({n: np.ascontiguousarray(np.swapaxes(a, 0, 1)) for n, a in feeds.items()}).values())
    assert np.allclose(found[0], wanted[0].transpose(2, 0, 1, 3), atol=1e-6)
    assert all(np.allclose(a, np.swapaxes(b, 0, 1), atol=1e-6) for a, b in zip(found[1:], wanted[1:], strict=True))
    assert not_own(second) == []


# ── what is not finite ───────────────────────────────────────────────────────────────────────────────────────────

WILD = """<ir_version: 8, opset_import: ["": 17]> g (float[2,6] x) => (float[2,6] y)
  <float[1] low = {0}, int64[1] axes = {1}> {
  m = ReduceMax<axes = [1]>(x)  n = Max(m, low)  d = Sub(x, n)  e = Exp(d)  s = ReduceSum(e, axes)  y = Div(e, s) }"""


@pytest.mark.parametrize("value", [-np.inf, np.nan, np.inf])
def test_what_depends_on_weights_that_are_not_finite_runs_on_kernels_of_ours(value: float) -> None:
    model = parser.parse_model(WILD)
    low = numpy_helper.from_array(np.full(1, value, np.float32), "low")
    model.graph.initializer[0].CopyFrom(low)
    program = OneDNNBackend(1).compile(taso.load(model))
    feeds = models.random_feeds(model, 1)
    (found,), (wanted,) = program(feeds).values(), models.by_onnxruntime(model, feeds)
    assert np.array_equal(np.isnan(found), np.isnan(wanted)) and np.allclose(found, wanted, equal_nan=True, rtol=1e-5)
    assert not_own(program) == []


# ── branches ─────────────────────────────────────────────────────────────────────────────────────────────────────

BRANCHES = """<ir_version: 8, opset_import: ["": 17]> g (float[N,4] x, int64 n) => (float[M,4] y, float[N,4] z)
  <int64 ten = {10}, float[4] w = {1, 2, 3, 4}> {
  z = Mul(x, w)
  c = Equal(n, ten)
  b = If(c) <then_branch = yes () => (p) { p = Concat<axis = 0>(z, x) },
             else_branch = no () => (q) { one = Constant<value = int64[1] {0}>()  s = Slice(z, one, ends)
               ends = Constant<value = int64[1] {1}>()  q = Relu(s) }>
  y = Tanh(b) }"""


def branching() -> ModelProto:
    text = BRANCHES.replace("s = Slice(z, one, ends)\n               ends = Constant<value = int64[1] {1}>()",
                            "ends = Constant<value = int64[1] {1}>()  s = Slice(z, one, ends)")  # fmt: skip
    return parser.parse_model(text)


def test_a_branch_that_is_chosen_at_run_time_runs_on_kernels() -> None:
    model = branching()
    program = OneDNNBackend(1).compile(taso.load(model))
    rng = np.random.default_rng(0)
    for size, number in product((1, 3), (10, 7, 10)):
        feeds: Arrays = {"x": rng.standard_normal((size, 4)).astype(np.float32), "n": np.asarray(number, np.int64)}
        found, wanted = list(program(feeds).values()), models.by_onnxruntime(model, feeds)
        assert [a.shape for a in found] == [a.shape for a in wanted]
        assert all(models.relative_error(a, b) <= TOLERANCE for a, b in zip(found, wanted, strict=True))
        assert not_own(program) == []
        assert ("Concat" in dict(program.operators)) == (number == 10)
        assert [op for op, _ in program.operators].count("If") == 1


def test_an_if_whose_condition_depends_on_shapes_alone_is_gone_from_the_program() -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[N,4] x) => (float[P,Q] y) <int64[1] one = {1}> {
      s = Shape<start = 0, end = 1>(x)  c = Equal(s, one)
      y = If(c) <then_branch = yes () => (p) { p = Neg(x) }, else_branch = no () => (q) { q = Exp(x) }> }"""
    model = parser.parse_model(text)
    program = OneDNNBackend(1).compile(taso.load(model))
    for size, wanted in ((1, "Neg"), (2, "Exp"), (1, "Neg")):
        feeds: Arrays = {"x": np.random.default_rng(0).standard_normal((size, 4)).astype(np.float32)}
        (found,), (expected,) = program(feeds).values(), models.by_onnxruntime(model, feeds)
        assert models.relative_error(found, expected) <= TOLERANCE
        assert program.operators == [(wanted, "own")]


def test_what_follows_a_size_known_at_run_time_only_runs_on_kernels() -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[6] x, float[6,4] t) => (float[P,4] y) {
      e = Exp(x)  r = Relu(x)  k = NonZero(r)  f = Transpose(k)  axis = Constant<value = int64[1] {1}>()
      i = Squeeze(f, axis)  y0 = Gather(t, i)  y = Tanh(y0) }"""
    model = parser.parse_model(text)
    program = OneDNNBackend(1).compile(taso.load(model))
    rng = np.random.default_rng(0)
    for _ in range(4):
        feeds: Arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", (6,)), ("t", (6, 4)))}
        (found,), (wanted,) = program(feeds).values(), models.by_onnxruntime(model, feeds)
        assert found.shape == wanted.shape and models.relative_error(found, wanted) <= TOLERANCE
        assert not_own(program) == ["NonZero"]


UPSIDE_DOWN = {1: np.asarray(3, np.float32), 2: np.asarray(-2, np.float32)}
ODD = {
    "clip-upside-down": Row("Clip", ((2, 3, 5, 5), (), ()), given=UPSIDE_DOWN),
    "clip-upside-down-fused": Row("Clip", ((1, 2, 4, 4), (), ()), given=UPSIDE_DOWN, followers=("Relu",)),
    "output-padding-of-a-stride": Row(
        "ConvTranspose", ((1, 2, 5), (2, 3, 3)), {"dilations": [2], "output_padding": [1], "pads": [1, 1]}, (1,)
    ),
    "dilated-window-of-one": Row(
        "AveragePool", ((1, 2, 5, 5, 5),), {"kernel_shape": [1, 2, 2], "dilations": [2, 1, 1], "strides": [1, 1, 1]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_settings_that_onednn_refuses_are_run_all_the_same(name: str) -> None:
    """ONNX admits them, so that a model must not fail for them."""
    proto = ODD[name].model()
    graph = taso.load(proto)
    feeds = models.random_feeds(proto, 0)
    wanted = evaluate_graph(graph, feeds, wide=True)
    for output, value in OneDNNBackend().compile(graph)(feeds).items():
        assert models.relative_error(np.asarray(value), np.asarray(wanted[output]).astype(np.float32)) < TOLERANCE
