"""Products of 8-bit integers on oneDNN are as defined: whole numbers exactly, rounded ones to the unit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import taso
from taso.backends.onednn import quantized
from taso.backends.onednn.executor import Program
from taso.backends.onednn.library import library
from taso.backends.onednn.quantized import SATURATING
from taso.graph.errors import BackendUnavailable
from taso.graph.evaluate import evaluate_graph

ROOT = Path(__file__).resolve().parent.parent.parent
Array = NDArray[np.generic]
Values = dict[str, Array]


def whole(rng: np.random.Generator, dtype: type[np.generic], *shape: int, narrow: bool = False) -> Array:
    info = np.iinfo(dtype)
    low, high = (64, 192) if narrow and info.min == 0 else (info.min, info.max + 1)
    return rng.integers(low, high, shape).astype(dtype)


def model(
    op: str, inputs: Values, constants: Values, order: str, out: int, attrs: dict[str, object] | None = None
) -> onnx.ModelProto:
    """One node, whose inputs come in this order; of names that are nowhere it has none."""
    names = ["" if n not in inputs and n not in constants else n for n in order.split()]
    while names and not names[-1]:
        names.pop()
    node = helper.make_node(op, names, ["y"], **(attrs or {}))
    types = {n: helper.np_dtype_to_tensor_dtype(v.dtype) for n, v in inputs.items()}
    given = [helper.make_tensor_value_info(n, types[n], v.shape) for n, v in inputs.items()]
    stored = [numpy_helper.from_array(v, n) for n, v in constants.items()]
    graph = helper.make_graph([node], "g", given, [helper.make_tensor_value_info("y", out, None)], stored)
    whole_model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    return onnx.shape_inference.infer_shapes(whole_model)


def run(proto: onnx.ModelProto, feeds: Values) -> tuple[Array, Array, Array, Program]:
    """What oneDNN, the definition and ONNX Runtime make of it."""
    program = taso.compile(taso.load(proto), "onednn", 2)
    assert isinstance(program, Program)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (theirs,) = session.run(None, feeds)
    return program(feeds)["y"], np.asarray(evaluate_graph(taso.load(proto), feeds)["y"]), theirs, program


def own(program: Program) -> bool:
    return all(how == "own" for _, how in program.operators)


def _saturates() -> bool:
    try:
        return library().isa in SATURATING
    except BackendUnavailable:
        return False


multiplies = pytest.mark.skipif(_saturates(), reason="the processor has no products of 8-bit integers that are exact")
"""What saturates there does so in ONNX Runtime, too, and has the definition here."""


CONVOLUTIONS = {
    "plain": ((1, 8, 9, 10), (16, 8, 3, 3), {"pads": [1, 1, 1, 1]}),
    "strided": ((2, 16, 11, 8), (32, 16, 3, 3), {"strides": [2, 2], "pads": [0, 1, 1, 0]}),
    "pointwise": ((1, 64, 7, 7), (24, 64, 1, 1), {}),
    "grouped": ((1, 32, 8, 8), (64, 8, 3, 3), {"group": 4, "pads": [1, 1, 1, 1]}),
    "depthwise": ((1, 32, 8, 8), (32, 1, 3, 3), {"group": 32}),
    "dilated": ((1, 8, 12, 12), (16, 8, 3, 3), {"dilations": [2, 2]}),
    "of one axis": ((1, 16, 20), (16, 16, 3), {"pads": [1, 1]}),
}  # fmt: skip
ORDER = "x xs xz w ws wz ys yz b"


@multiplies
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_of_integers_is_exact(name: str, dtype: type[np.generic]) -> None:
    x, w, attrs = CONVOLUTIONS[name]
    rng = np.random.default_rng(0)
    feeds = {"x": whole(rng, dtype, *x)}
    constants = {"w": whole(rng, np.int8, *w), "xz": np.array(100 if dtype is np.uint8 else -3, dtype)}
    if dtype is np.int8:
        # ONNX Runtime has data of uint8 alone
        proto = model("ConvInteger", feeds, constants, "x w xz", TensorProto.INT32, attrs)
        program = taso.compile(taso.load(proto), "onednn", 1)
        assert isinstance(program, Program) and own(program)
        assert np.array_equal(program(feeds)["y"], np.asarray(evaluate_graph(taso.load(proto), feeds)["y"]))
        return
    proto = model("ConvInteger", feeds, constants, "x w xz", TensorProto.INT32, attrs)
    ours, defined, theirs, program = run(proto, feeds)
    assert own(program) and np.array_equal(ours, defined) and np.array_equal(ours, theirs)


@multiplies
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_rounded_convolution_is_off_by_a_unit_at_most_and_hardly_anywhere(
    name: str, dtype: type[np.generic], by_channel: bool
) -> None:
    x, w, attrs = CONVOLUTIONS[name]
    rng = np.random.default_rng(1)
    scales = rng.uniform(0.005, 0.02, w[0] if by_channel else ()).astype(np.float32)
    weights = whole(rng, np.int8, *w)
    constants = {
        "xs": np.array(0.03, np.float32), "xz": np.array(120 if dtype is np.uint8 else 5, dtype),
        "w": weights, "ws": scales, "wz": np.zeros(scales.shape, np.int8), "ys": np.array(0.35, np.float32),
        "yz": np.array(110 if dtype is np.uint8 else -9, dtype), "b": rng.integers(-5000, 5000, w[0]).astype(np.int32),
    }  # fmt: skip
    feeds = {"x": whole(rng, dtype, *x)}
    out = TensorProto.UINT8 if dtype is np.uint8 else TensorProto.INT8
    ours, defined, theirs, program = run(model("QLinearConv", feeds, constants, ORDER, out, attrs), feeds)
    assert own(program) and len(np.unique(ours)) > 50
    # onnx.reference gives scales of channels another axis than that of a convolution of one axis
    for other in (theirs,) if by_channel and len(x) == 3 else (defined, theirs):
        off = np.abs(ours.astype(int) - other.astype(int))
        assert off.max() <= 1 and np.mean(off) < 0.01


@multiplies
@pytest.mark.parametrize("weights", [np.int8, np.uint8])
@pytest.mark.parametrize("shape", [(5, 32), (3, 7, 32), (1, 32)])
def test_a_matrix_product_of_integers_is_exact(shape: tuple[int, ...], weights: type[np.generic]) -> None:
    rng = np.random.default_rng(2)
    feeds = {"x": whole(rng, np.uint8, *shape)}
    w = whole(rng, weights, 32, 24)
    # a zero point off the middle would leave more than int8 holds
    w = np.maximum(w, 1) if weights is np.uint8 else w
    zero = np.array(128, weights) if weights is np.uint8 else np.array(0, weights)
    constants = {"w": w, "xz": np.array(77, np.uint8), "wz": zero}
    proto = model("MatMulInteger", feeds, constants, "x w xz wz", TensorProto.INT32)
    ours, defined, theirs, program = run(proto, feeds)
    assert own(program) and np.array_equal(ours, defined) and np.array_equal(ours, theirs)


@multiplies
@pytest.mark.parametrize("by_column", [False, True])
def test_a_rounded_matrix_product_is_off_by_a_unit_at_most(by_column: bool) -> None:
    rng = np.random.default_rng(3)
    scales = rng.uniform(0.005, 0.02, 24 if by_column else ()).astype(np.float32)
    constants = {
        "xs": np.array(0.02, np.float32), "xz": np.array(120, np.uint8), "w": whole(rng, np.int8, 32, 24), "ws": scales,
        "wz": np.zeros(scales.shape, np.int8), "ys": np.array(0.1, np.float32), "yz": np.array(128, np.uint8),
    }  # fmt: skip
    feeds = {"x": whole(rng, np.uint8, 9, 32)}
    ours, defined, theirs, program = run(model("QLinearMatMul", feeds, constants, ORDER, TensorProto.UINT8), feeds)
    assert own(program) and len(np.unique(ours)) > 50
    for other in (defined, theirs):
        assert np.abs(ours.astype(int) - other.astype(int)).max() <= 1


@pytest.mark.parametrize(("axis", "scales"), [(1, ()), (1, (6,)), (0, (4,)), (-1, (5,))])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_rounding_to_8_bits_and_back_is_as_defined(dtype: type[np.generic], axis: int, scales: tuple[int, ...]) -> None:
    rng = np.random.default_rng(4)
    scale = np.asarray(rng.uniform(0.01, 0.05, scales), np.float32)
    constants = {"s": scale, "z": whole(rng, dtype, *scales)}
    x = (rng.standard_normal((4, 6, 5)) * 4).astype(np.float32)
    # halves, which go to the even neighbour
    x[:2] = np.rint(x[:2]) * np.float32(0.5) * scale.reshape(-1)[0]
    kind = TensorProto.UINT8 if dtype is np.uint8 else TensorProto.INT8
    ours, defined, theirs, program = run(
        model("QuantizeLinear", {"x": x}, constants, "x s z", kind, {"axis": axis}), {"x": x}
    )  # fmt: skip
    assert own(program) and np.array_equal(ours, defined) and np.array_equal(ours, theirs)
    given = {"x": whole(rng, dtype, 4, 6, 5)}
    ours, defined, theirs, program = run(
        model("DequantizeLinear", given, constants, "x s z", TensorProto.FLOAT, {"axis": axis}), given
    )  # fmt: skip
    assert own(program) and np.array_equal(ours, defined) and np.array_equal(ours, theirs)


def test_what_oneDNN_cannot_is_computed_by_definition() -> None:
    rng = np.random.default_rng(5)
    x, w = whole(rng, np.uint8, 4, 8), whole(rng, np.uint8, 8, 6)
    # uint8 less 3 does not fit int8; a row each with its own zero point; weights that are no constants
    cases: list[tuple[Values, Values]] = [
        ({"x": x}, {"w": w, "xz": np.array(3, np.uint8), "wz": np.array(3, np.uint8)}),
        ({"x": x, "w": w.astype(np.int8)}, {"xz": np.array(3, np.uint8), "wz": np.array(0, np.int8)}),
        ({"x": x, "xz": np.array(3, np.uint8)}, {"w": w.astype(np.int8)}),
    ]
    for feeds, constants in cases:
        ours, defined, theirs, program = run(
            model("MatMulInteger", feeds, constants, "x w xz wz", TensorProto.INT32), feeds
        )  # fmt: skip
        assert not own(program) and np.array_equal(ours, defined) and np.array_equal(ours, theirs)


def test_a_processor_whose_sums_saturate_leaves_it_to_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "SATURATING", (quantized.library().isa,))
    rng = np.random.default_rng(6)
    feeds, constants = {"x": whole(rng, np.uint8, 4, 8)}, {"w": whole(rng, np.int8, 8, 6)}
    ours, defined, _, program = run(model("MatMulInteger", feeds, constants, "x w", TensorProto.INT32), feeds)
    assert not own(program) and np.array_equal(ours, defined)


@multiplies
@pytest.mark.parametrize("inner", [600, 4096])
def test_sums_of_more_than_24_bits_are_exact(inner: int) -> None:
    rng = np.random.default_rng(8)
    x, w = np.full((8, inner), 255, np.uint8), np.full((inner, 32), 127, np.int8)
    x[:, 0], w[0] = np.arange(1, 9), 1
    w[1] = rng.integers(-100, 100, 32)
    proto = model("MatMulInteger", {"x": x}, {"w": w, "xz": np.array(7, np.uint8)}, "x w xz", TensorProto.INT32)
    ours, defined, theirs, program = run(proto, {"x": x})
    assert np.abs(ours).max() > 1 << 24
    assert own(program) and np.array_equal(ours, defined) and np.array_equal(ours, theirs)
    image = np.full((1, inner // 9, 5, 5), 255, np.uint8)
    image[0, 0] = np.arange(25).reshape(5, 5)
    kernel = np.full((8, inner // 9, 3, 3), 127, np.int8)
    attrs: dict[str, object] = {"pads": [1, 1, 1, 1]}
    constants: Values = {"w": kernel, "xz": np.array(7, np.uint8)}
    ours, defined, theirs, _ = run(
        model("ConvInteger", {"x": image}, constants, "x w xz", TensorProto.INT32, attrs), {"x": image}
    )  # fmt: skip
    assert np.array_equal(ours, defined) and np.array_equal(ours, theirs)


SHARED = """
import numpy as np, taso
from onnx import TensorProto as T, helper as h, numpy_helper as n
rng = np.random.default_rng(0)
w, f = (rng.integers(-128, 128, s).astype(np.int8) for s in ((64, 48), (32, 16, 3, 3)))
u, s = rng.integers(0, 256, (5, 64)).astype(np.uint8), rng.integers(-128, 128, (5, 64)).astype(np.int8)
i, j = rng.integers(0, 256, (1, 16, 6, 6)).astype(np.uint8), rng.integers(-128, 128, (1, 16, 6, 6)).astype(np.int8)
nodes = [
    h.make_node("MatMulInteger", ["u", "w", "z"], ["a"]), h.make_node("MatMulInteger", ["s", "w"], ["b"]),
    h.make_node("ConvInteger", ["i", "f", "z"], ["c"]), h.make_node("ConvInteger", ["j", "f"], ["d"]),
]
feeds = {"u": u, "s": s, "i": i, "j": j}
given = [h.make_tensor_value_info(k, h.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in feeds.items()]
made = [h.make_tensor_value_info(k, T.INT32, None) for k in "abcd"]
stored = [n.from_array(w, "w"), n.from_array(f, "f"), n.from_array(np.array(128, np.uint8), "z")]
opsets = [h.make_opsetid("", 19)]
proto = h.make_model(h.make_graph(nodes, "g", given, made, stored), opset_imports=opsets, ir_version=9)
found = taso.compile(taso.load(proto), "onednn", 1)(feeds)
wanted = taso.compile(taso.load(proto), "reference")(feeds)
for k, v in wanted.items():
    assert np.array_equal(found[k], v), k
"""


@pytest.mark.parametrize("isa", ["AVX2_VNNI", "AVX512_CORE_VNNI", "AVX512_CORE_BF16", "AVX2", "ALL"])
def test_products_of_different_data_share_weights_and_not_what_was_summed_for_one_of_them(isa: str) -> None:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", SHARED], check=True, env=environment)


def test_a_scalar_is_rounded_to_8_bits_and_back() -> None:
    constants: Values = {"s": np.array(0.1, np.float32), "z": np.array(5, np.uint8)}
    x = np.array(3.3, np.float32)
    ours, defined, _, _ = run(model("QuantizeLinear", {"x": x}, constants, "x s z", TensorProto.UINT8), {"x": x})
    assert ours.shape == () and ours == defined == 38
    q = np.array(38, np.uint8)
    ours, defined, _, _ = run(model("DequantizeLinear", {"x": q}, constants, "x s z", TensorProto.FLOAT), {"x": q})
    assert ours.shape == () and ours == defined


@multiplies
def test_a_zero_point_that_is_left_out_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    feeds: Values = {"x": whole(rng, np.uint8, 1, 8, 6, 6)}
    constants: Values = {"w": whole(rng, np.int8, 16, 8, 3, 3), "xz": np.array(9, np.uint8)}
    monkeypatch.setattr(quantized.Product, "number", lambda *given, **others: None)
    ours, defined, _, program = run(model("ConvInteger", feeds, constants, "x w xz", TensorProto.INT32), feeds)
    assert own(program) and not np.array_equal(ours, defined)
