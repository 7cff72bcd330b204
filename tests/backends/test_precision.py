"""bfloat16 products: only on request, within what eight bits of precision allow, and planned for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import taso
from taso.backends.lowering import BF16, BLOCKED, FLOAT32, LAST, PLAIN, Kernel, Layouts, Operand, Step, choices_of
from taso.backends.onednn import kernels
from taso.backends.onednn.backend import OneDNNBackend, checked_precision
from taso.backends.onednn.kernels import design, narrows
from taso.backends.onednn.library import library
from taso.backends.onednn.measuring import RandomSupply
from taso.backends.select import get_backend
from taso.graph.errors import BackendError, BackendUnavailable
from taso.graph.evaluate import evaluate_graph
from taso.graph.operator import Attrs
from taso.graph.ops.structure import DROPOUT
from taso.graph.types import DType, TensorType
from taso.search.verify import random_feeds, relative_error


def available() -> str:
    """Why there are no bfloat16 products here, "" where there are."""
    try:
        OneDNNBackend(1, BF16)
    except BackendUnavailable as error:
        return str(error)
    return ""


needs_bf16 = pytest.mark.skipif(bool(available()), reason=available() or "there are products of bfloat16 here")

ROUNDING = 2.0**-8
"""Relative error of one rounding to bfloat16, which keeps 8 bits."""


Floats = NDArray[np.float32]


def drawn(*dims: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(dims, np.float32) / np.float32(np.sqrt(np.prod(dims[1:])))


def convolution(channels: int = 32, kernel: int = 3, group: int = 1, size: int = 14) -> taso.Graph:
    graph = taso.new_graph()
    x = graph.new_input(dims=(1, channels, size, size))
    dims = (64, channels // group, kernel, kernel)
    weight = graph.new_weight(dims=dims, data=drawn(*dims))
    graph.set_outputs([("y", graph.relu(graph.conv2d(input=x, weight=weight, padding="SAME", strides=(1, 1))))])
    return graph


def product(rows: int = 32, inner: int = 64, columns: int = 48, constant: bool = True) -> taso.Graph:
    graph = taso.new_graph()
    x = graph.new_input(dims=(rows, inner))
    data = drawn(columns, inner).T.copy()
    y = graph.new_weight(dims=(inner, columns), data=data) if constant else graph.new_input(dims=(inner, columns))
    graph.set_outputs([("y", graph.relu(graph.matmul(x, y)))])
    return graph


GRAPHS = {
    "3x3": convolution, "1x1": lambda: convolution(64, 1), "odd channels": lambda: convolution(40, 3),
    "a large window": lambda: convolution(16, 5, size=9), "matmul": product,
    "matmul of one row": lambda: product(1, 256, 128), "matmul of two inputs": lambda: product(64, 64, 64, False),
}  # fmt: skip


@needs_bf16
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", GRAPHS)
def test_products_are_off_by_the_rounding_of_their_factors_and_by_no_more(name: str, threads: int) -> None:
    graph = GRAPHS[name]()
    feeds = random_feeds(graph, {}, 0)
    wanted = evaluate_graph(graph, feeds, wide=True)["y"]
    exact, narrow = (taso.compile(graph, "onednn", threads, p)(feeds)["y"] for p in (FLOAT32, BF16))
    assert relative_error(exact, wanted) < 1e-5
    if name == "matmul of two inputs" and "amx" not in library().isa and relative_error(narrow, wanted) < 1e-5:
        pytest.skip("without AMX oneDNN may round no factor that it would first have to lay out anew")
    # of factors that are rounded independently the errors add up as a random walk: far below both roundings at worst
    assert 1e-5 < relative_error(narrow, wanted) < 2 * ROUNDING
    by_hand = {k: rounded(v) for k, v in feeds.items()}
    assert relative_error(narrow, with_rounded_weights(graph, by_hand)) < 1e-5


def rounded(array: NDArray[np.generic]) -> Floats:
    """The nearest numbers of 8 bits, ties to even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def with_rounded_weights(graph: taso.Graph, feeds: Mapping[str, Floats]) -> NDArray[np.generic]:
    proto = taso.export_onnx(graph)
    for tensor in proto.graph.initializer:
        tensor.raw_data = rounded(np.frombuffer(tensor.raw_data, np.float32)).tobytes()
    return np.asarray(evaluate_graph(taso.load(proto), feeds, wide=True)["y"])


@needs_bf16
def test_a_rounding_too_many_would_be_seen() -> None:
    graph = product()
    feeds = random_feeds(graph, {}, 0)
    narrow = taso.compile(graph, "onednn", 1, BF16)(feeds)["y"]
    twice = {k: rounded(rounded(v) * np.float32(1 + ROUNDING)) for k, v in feeds.items()}
    assert relative_error(narrow, with_rounded_weights(graph, twice)) > 1e-4


@needs_bf16
def test_what_does_not_pay_stays_in_float32() -> None:
    graph = convolution(8)
    feeds = random_feeds(graph, {}, 0)
    exact, narrow = (taso.compile(graph, "onednn", 1, p)(feeds)["y"] for p in (FLOAT32, BF16))
    assert np.array_equal(exact, narrow)


@needs_bf16
@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize(("rows", "inner", "narrow"), [(64, 4, False), (8, 512, True)])
def test_what_is_summed_decides_whether_a_gemm_is_rounded(transposed: int, rows: int, inner: int, narrow: bool) -> None:
    shape = (inner, rows) if transposed else (rows, inner)
    node = helper.make_node("Gemm", ["x", "w"], ["y"], transA=transposed)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", shape), ("y", [rows, 512])))
    stored = [numpy_helper.from_array(drawn(inner, 512), "w")]
    graph = taso.load(helper.make_model(helper.make_graph([node], "g", [x], [y], stored)))
    feeds = random_feeds(graph, {}, 0)
    exact, found = (taso.compile(graph, "onednn", 1, p)(feeds)["y"] for p in (FLOAT32, BF16))
    assert (relative_error(found, exact) > 1e-5) is narrow


@needs_bf16
@pytest.mark.parametrize("name", ["matmul", "3x3"])
def test_weights_beyond_bfloat16_stay_in_float32(name: str) -> None:
    proto = taso.export_onnx(GRAPHS[name]())
    (weight,) = proto.graph.initializer
    values = np.frombuffer(weight.raw_data, np.float32).copy()
    values[0] = np.finfo(np.float32).min
    weight.raw_data = values.tobytes()
    graph = taso.load(proto)
    feeds = {k: np.zeros_like(v) for k, v in random_feeds(graph, {}, 0).items()}
    assert np.isfinite(taso.compile(graph, "onednn", 1, BF16)(feeds)["y"]).all()


@needs_bf16
def test_float32_is_computed_in_float32_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    graph = product()
    feeds = random_feeds(graph, {}, 0)
    wanted = evaluate_graph(graph, feeds, wide=True)["y"]
    for run in (graph, taso.optimize(graph, progress=False)):
        program = taso.compile(run, "onednn")
        assert relative_error(program(feeds)["y"], wanted) < 1e-5


@needs_bf16
def test_a_graph_is_optimized_for_the_precision_that_it_is_to_run_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASO_CACHE_DIR", str(tmp_path))
    graph = convolution(64)
    best = taso.optimize(graph, backend="onednn", threads=1, precision=BF16, never_slower=False, progress=False)
    assert best.report.backend == "onednn bf16" and "bf16" in best.report.device
    feeds = random_feeds(graph, {}, 0)
    wanted = evaluate_graph(graph, feeds, wide=True)
    (name,) = wanted
    planned = choices_of(best, "onednn bf16")
    # another algorithm than the usual one, chosen by its measured cost, computes in float32
    least = 0.0 if planned is not None and planned.algorithms else 1e-5
    for precision, low, high in ((BF16, least, 2 * ROUNDING), (FLOAT32, 0.0, 1e-5)):
        error = relative_error(taso.compile(best, "onednn", 1, precision)(feeds)[name], wanted[name])
        assert low <= error < high
    assert choices_of(best, "onednn") is None, "a plan made for one precision is no plan for the other"


@needs_bf16
def test_either_precision_is_an_algorithm_of_its_own() -> None:
    backend = OneDNNBackend(1, BF16)
    x, w, y = (TensorType(DType.FLOAT, d) for d in ((32, 64), (64, 48), (32, 48)))
    matmul = next(n.op for n in product().operators if n.op.name == "MatMul")
    operands = Operand(x, PLAIN, False), Operand(w, PLAIN, True)
    kernel = Kernel(operands, (Step(matmul, Attrs({}), (0, 1)),), (Operand(y, PLAIN, False),))
    assert narrows(kernel) and kernels.FLOAT32 in backend.lowering.algorithms(kernel)
    assert kernels.FLOAT32 not in OneDNNBackend(1).lowering.algorithms(kernel)
    assert backend.device_key() != OneDNNBackend(1).device_key()
    assert backend.measure(kernel) > 0


def test_a_precision_that_is_none_or_not_here_is_one_sentence() -> None:
    with pytest.raises(BackendError, match="the precision is 'float32', 'bf16' or 'int8', not 'half'"):
        get_backend("onednn", 1, "half")
    with pytest.raises(BackendUnavailable, match="no instructions for products of bfloat16"):
        checked_precision(BF16, "avx2")
    for name in ("reference", "onnxruntime"):
        with pytest.raises(BackendError, match=f"'{name}' computes in float32 alone"):
            get_backend(name, 1, BF16)
    with pytest.raises(BackendError, match="that was given computes in float32"):
        get_backend(OneDNNBackend(1), 1, BF16)


def test_a_step_by_numpy_reads_what_lies_alike_under_another_name() -> None:
    # one pixel: channels in blocks, last or first are the same bytes
    t = TensorType(DType.FLOAT, (1, 64, 1, 1))
    for given in (PLAIN, LAST, BLOCKED):
        for made in (PLAIN, LAST, BLOCKED):
            step = Step(DROPOUT, Attrs({}), (0,))
            kernel = Kernel((Operand(t, given, False),), (step,), (Operand(t, made, False),))
            recipe = design(kernel, Layouts(16), RandomSupply(kernel))
            source, target = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
            for call, _ in recipe.bind([source.ctypes.data], [target.ctypes.data], []):
                call()
            assert np.array_equal(source, target)
