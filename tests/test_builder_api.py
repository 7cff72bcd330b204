"""The interface of TASO 0.1.0: every name, its signature, what it computes, and what it refuses."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

import taso
from taso.graph.builder import GraphBuilder
from taso.graph.errors import TasoError
from taso.graph.evaluate import evaluate_graph, weight_of
from taso.graph.graph import Graph, Node, Value

Array = NDArray[np.generic]

# ── signatures ───────────────────────────────────────────────────────────────────────────────────────────────────
# as published: what stands after `*` may be keyword-only; a default is part of the interface

SIGNATURES = """
new_input(*, dims) / new_weight(*, dims, data=None) / add(x, y) / batchnorm(input, scale, bias, mean, var, epsilon=-1)
cast(*, input, datatype) / ceil(*, input) / concat(axis, inputs) / div(*, x, y) / dropout(input, rate=0)
conv2d(*, input, weight, strides, padding, activation="NONE") / equal(*, x, y) / exp(*, input) / greater(*, x, y)
identity(input) / leakyrelu(input, alpha, inplace=False) / less(*, x, y) / log(*, input) / logical_not(*, input)
matmul(input, weight, activation="NONE") / max(x, y) / min(x, y) / mul(x, y) / sub(*, x, y)
maxpool2d(input, kernels, strides, padding, activation="NONE")
avgpool2d(*, input, kernels, strides, padding, activation="NONE") / prelu(*, x, slope)
reduce_argmax(*, input, axes, keepdims=True) / reduce_argmin(*, input, axes, keepdims=True)
reduce_max(*, input, axes, keepdims=True) / reduce_mean(*, input, axes, keepdims=True)
reduce_min(*, input, axes, keepdims=True) / reduce_prod(*, input, axes, keepdims=True)
reduce_sum(*, input, axes, keepdims=True) / reshape(input, shape) / relu(input, inplace=False)
sigmoid(input, inplace=False) / tanh(input, inplace=False) / round(input) / sqrt(*, input) / shape(input)
size(*, input) / slice(input, start, end, axes, steps) / split(input, axis, sizes) / squeeze(*, input, axes)
unsqueeze(input, axes) / transpose(input, perm, shuffle=False) / print_measurements() / get_operator_list()
get_input_edges(op) / get_operator_type(op) / get_operator_attr(op, name) / get_input_dims(op, idx)
get_output_dims(op, idx) / get_num_outputs(op) / get_split_lens(op) / get_weight_value(op)
"""
ON_TOP = "optimize(alpha, budget, print_subst) / run_time() / cost()"
MODULE = """
new_graph(print_measurements=False) / load_onnx(filename) / load(path_or_model) / export_onnx(graph)
optimize(graph, alpha=1.0, budget=1000, print_subst=False)
"""


def listed(signatures: str) -> list[str]:
    return [s.strip() for s in signatures.replace("\n", "/").split("/") if s.strip()]


def published(text: str) -> inspect.Signature:
    """The signature that `name(parameters)` spells."""
    scope: dict[str, Callable[..., object]] = {}
    exec(f"def wanted{text[text.index('('):]}: ...", scope)
    return inspect.signature(scope["wanted"])


def check(text: str, given: list[inspect.Parameter]) -> None:
    """Whether a callable with the parameters `given` takes what `text` says, and demands nothing else."""
    wanted = list(published(text).parameters.values())
    for position, parameter in enumerate(wanted):
        found = next((p for p in given if p.name == parameter.name), None)
        assert found is not None, f"no argument '{parameter.name}'"
        if parameter.default is not inspect.Parameter.empty:
            assert found.default == parameter.default
        assert found.kind is not inspect.Parameter.POSITIONAL_ONLY
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            assert found.kind is parameter.kind and given[position] is found, "must be given by position too"
    for extra in given[len(wanted) :]:
        assert extra.default is not inspect.Parameter.empty, f"'{extra.name}' is demanded beyond what was published"


@pytest.mark.parametrize("text", listed(SIGNATURES))
def test_every_published_method_takes_the_published_arguments(text: str) -> None:
    method = getattr(GraphBuilder, text[: text.index("(")])
    check(text, list(inspect.signature(method).parameters.values())[1:])


@pytest.mark.parametrize("text", listed(SIGNATURES) + listed(ON_TOP))
def test_the_public_graph_has_every_published_method(text: str) -> None:
    method = getattr(taso.Graph, text[: text.index("(")])
    check(text, list(inspect.signature(method).parameters.values())[1:])


@pytest.mark.parametrize("text", listed(MODULE))
def test_every_published_function_takes_the_published_arguments(text: str) -> None:
    function = getattr(taso, text[: text.index("(")])
    check(text, list(inspect.signature(function).parameters.values()))


def test_the_module_has_the_published_names() -> None:
    assert isinstance(taso.__version__, str)
    assert issubclass(taso.InputNotFoundError, Exception)
    graph = taso.new_graph()
    assert isinstance(graph, taso.Graph) and isinstance(graph, GraphBuilder) and not graph.prints_measurements
    assert taso.new_graph(print_measurements=True).prints_measurements
    assert isinstance(graph.new_input(dims=(1,)), taso.Tensor)


# ── what the operators compute ───────────────────────────────────────────────────────────────────────────────────


def normal(seed: int, *dims: int) -> Array:
    return np.random.default_rng(seed).standard_normal(dims).astype(np.float32)


def outputs_of(build: Callable[..., Value | list[Value]], arrays: Sequence[Array]) -> list[Array]:
    """What `build(graph, *inputs)` gives for `arrays`, as the graph's outputs."""
    graph = GraphBuilder()
    names = {np.dtype(np.float32): "FLOAT", np.dtype(np.bool_): "BOOL", np.dtype(np.int64): "INT64"}
    values = [graph.new_input(dims=a.shape, dtype=names[a.dtype]) for a in arrays]
    built = build(graph, *values)
    wanted = built if isinstance(built, list) else [built]
    assert {id(v) for v in wanted} <= {id(v) for _, v in graph.outputs}
    found = evaluate_graph(graph, dict(zip(graph.input_names, arrays, strict=True)))
    by_value = {id(v): found[name] for name, v in graph.outputs}
    results = [by_value[id(v)] for v in wanted]
    for value, result in zip(wanted, results, strict=True):
        assert tuple(result.shape) == value.type.static_shape and result.dtype == value.type.dtype.numpy
    return results


def relative_error(a: Array, b: Array) -> float:
    wide_a, wide_b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    scale = float(np.max(np.abs(wide_b), initial=0.0)) or 1.0
    return float(np.max(np.abs(wide_a - wide_b), initial=0.0)) / scale


@dataclass(frozen=True)
class Row:
    """One method on some arrays, and the same in NumPy."""

    name: str
    build: Callable[..., Value | list[Value]]
    twin: Callable[..., Array | list[Array]]
    arrays: tuple[Array, ...]


X, Y, V, W = normal(1, 2, 3, 4), normal(2, 3, 1), normal(3, 4), normal(4, 4, 5)
BATCHES = (normal(5, 2, 1, 3, 4), normal(6, 5, 4, 2))
POSITIVE = np.abs(X) + np.float32(0.5)
WHOLE = np.round(X)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


ROWS = [
    Row("add", lambda g, x, y: g.add(x, y), np.add, (X, Y)),
    Row("sub", lambda g, x, y: g.sub(x=x, y=y), np.subtract, (X, Y)),
    Row("mul", lambda g, x, y: g.mul(x, y), np.multiply, (X, V)),
    Row("div", lambda g, x, y: g.div(x=x, y=y), np.divide, (Y, POSITIVE)),
    Row("max", lambda g, x, y: g.max(x, y), np.maximum, (X, Y)),
    Row("min", lambda g, x, y: g.min(x, y), np.minimum, (X, Y)),
    Row("equal", lambda g, x, y: g.equal(x=x, y=y), np.equal, (WHOLE, np.zeros((4,), np.float32))),
    Row("greater", lambda g, x, y: g.greater(x=x, y=y), np.greater, (X, Y)),
    Row("less", lambda g, x, y: g.less(x=x, y=y), np.less, (X, Y)),
    Row("prelu", lambda g, x, s: g.prelu(x=x, slope=s), lambda x, s: np.where(x < 0, s * x, x), (X, Y)),
    Row("relu", lambda g, x: g.relu(x), lambda x: np.maximum(x, 0), (X,)),
    Row("relu in place", lambda g, x: g.relu(x, True), lambda x: np.maximum(x, 0), (X,)),
    Row("sigmoid", lambda g, x: g.sigmoid(x, inplace=True), sigmoid, (X,)),
    Row("tanh", lambda g, x: g.tanh(x), np.tanh, (X,)),
    Row("leakyrelu", lambda g, x: g.leakyrelu(x, 0.3), lambda x: np.where(x < 0, 0.3 * x, x), (X,)),
    Row("exp", lambda g, x: g.exp(input=x), np.exp, (X,)),
    Row("log", lambda g, x: g.log(input=x), np.log, (POSITIVE,)),
    Row("sqrt", lambda g, x: g.sqrt(input=x), np.sqrt, (POSITIVE,)),
    Row("ceil", lambda g, x: g.ceil(input=x), np.ceil, (X,)),
    Row("round", lambda g, x: g.round(x), np.rint, (np.array([-2.5, -1.5, 0.5, 1.5, 2.4], np.float32),)),
    Row("logical_not", lambda g, x: g.logical_not(input=x), np.logical_not, (X > 0,)),
    Row("identity", lambda g, x: g.identity(x), lambda x: x, (X,)),
    Row("dropout", lambda g, x: g.dropout(x, 0.3), lambda x: x, (X,)),
    Row("matmul", lambda g, x, w: g.matmul(x, w), np.matmul, (X, W)),
    Row("matmul of vectors", lambda g, x, w: g.matmul(x, w), np.matmul, (V, normal(4, 4))),
    Row("matmul, batches broadcast", lambda g, x, w: g.matmul(x, w), np.matmul, BATCHES),
    Row("matmul, then relu", lambda g, x, w: g.matmul(x, w, "RELU"), lambda x, w: np.maximum(x @ w, 0), (X, W)),
    Row("matmul, then sigmoid", lambda g, x, w: g.matmul(x, w, "SIGMOID"), lambda x, w: sigmoid(x @ w), (X, W)),
    Row("matmul, then tanh", lambda g, x, w: g.matmul(x, w, activation="TANH"), lambda x, w: np.tanh(x @ w), (X, W)),
    Row("reduce_max", lambda g, x: g.reduce_max(input=x, axes=(0, 2)), lambda x: x.max((0, 2), keepdims=True), (X,)),
    Row("reduce_mean", lambda g, x: g.reduce_mean(input=x, axes=(-1,), keepdims=False), lambda x: x.mean(-1), (X,)),
    Row("reduce_min", lambda g, x: g.reduce_min(input=x, axes=[1]), lambda x: x.min(1, keepdims=True), (X,)),
    Row("reduce_prod", lambda g, x: g.reduce_prod(input=x, axes=(1, 0), keepdims=0), lambda x: x.prod((0, 1)), (X,)),
    Row("reduce_sum", lambda g, x: g.reduce_sum(input=x, axes=(0, 1, 2)), lambda x: x.sum(keepdims=True), (X,)),
    Row("reduce_argmax", lambda g, x: g.reduce_argmax(input=x, axes=(1,)), lambda x: x.argmax(1, keepdims=True), (X,)),
    Row("reduce_argmin", lambda g, x: g.reduce_argmin(input=x, axes=(-1,), keepdims=0), lambda x: x.argmin(-1), (X,)),
    Row("concat", lambda g, x, y: g.concat(-1, [x, y]), lambda x, y: np.concatenate([x, y], -1), (X, X[..., :2])),
    Row("concat of many", lambda g, x: g.concat(1, [x] * 40), lambda x: np.concatenate([x] * 40, 1), (X,)),
    Row("split", lambda g, x: g.split(x, 2, [1, 3]), lambda x: np.split(x, [1], 2), (X,)),
    Row("split into equal parts", lambda g, x: g.split(x, -1, 2), lambda x: np.split(x, 2, -1), (X,)),
    Row("slice", lambda g, x: g.slice(x, [1, -1], [9, 0], [0, 2], [1, -2]), lambda x: x[1:9, :, -1:0:-2], (X,)),
    Row("slice, no axes", lambda g, x: g.slice(x, (0, 1), (1, 3), None, None), lambda x: x[:1, 1:3], (X,)),
    Row("slice, empty axes", lambda g, x: g.slice(x, (1,), (2,), (), ()), lambda x: x[1:2], (X,)),
    Row("transpose", lambda g, x: g.transpose(x, (2, 0, 1), shuffle=True), lambda x: x.transpose(2, 0, 1), (X,)),
    Row("transpose, not shuffled", lambda g, x: g.transpose(x, perm=(1, 2, 0)), lambda x: x.transpose(1, 2, 0), (X,)),
    Row("reshape", lambda g, x: g.reshape(x, shape=(0, -1, 2)), lambda x: x.reshape(2, 6, 2), (X,)),
    Row("squeeze", lambda g, x: g.squeeze(input=x, axes=(-1,)), lambda x: x[:, 0], (Y,)),
    Row("unsqueeze", lambda g, x: g.unsqueeze(x, (0, -1)), lambda x: x[None, :, :, None], (Y,)),
    Row("shape", lambda g, x: g.shape(x), lambda x: np.array(x.shape), (X,)),
    Row("size", lambda g, x: g.size(input=x), lambda x: np.array(x.size), (X,)),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_method_computes_what_numpy_computes(row: Row) -> None:
    expected = row.twin(*row.arrays)
    found = outputs_of(row.build, row.arrays)
    for got, want in zip(found, expected if isinstance(expected, list) else [expected], strict=True):
        assert got.shape == want.shape
        assert relative_error(got, want) <= 1e-6


CASTS = {
    "FLOAT": np.float32, "DOUBLE": np.float64, "FLOAT16": np.float16, "INT8": np.int8, "UINT8": np.uint8,
    "INT32": np.int32, "INT64": np.int64, "BOOL": np.bool_,
}  # fmt: skip


@pytest.mark.parametrize("name", CASTS)
def test_cast_gives_the_named_element_type(name: str) -> None:
    x = np.abs(WHOLE) * 3
    (found,) = outputs_of(lambda g, v: g.cast(input=v, datatype=name), (x,))
    assert found.dtype == CASTS[name]
    assert np.array_equal(found, x.astype(CASTS[name]))


# ── windows: ONNX Runtime resolves SAME_LOWER for itself ─────────────────────────────────────────────────────────


def runtime(op: str, arrays: Sequence[Array], **attrs: object) -> Array:
    """One ONNX operator run by ONNX Runtime with its optimizations off."""
    names = [f"i{n}" for n in range(len(arrays))]
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in zip(names, arrays, strict=True)]
    node = helper.make_node(op, names, ["y"], **attrs)
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(
        helper.make_graph([node], "one", inputs, [output]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    result: Array = session.run(None, dict(zip(names, arrays, strict=True)))[0]
    return result


AUTO = {"SAME": "SAME_LOWER", "VALID": "VALID"}
WINDOWS = [
    (size, kernel, stride)
    for size in ((7, 8), (5, 6))
    for kernel in ((1, 1), (3, 3), (2, 4), (5, 3))
    for stride in ((1, 1), (2, 1), (3, 2))
]  # fmt: skip


@pytest.mark.parametrize("padding", AUTO)
@pytest.mark.parametrize("size, kernel, stride", WINDOWS)
def test_a_convolution_pads_like_onnx(
    size: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], padding: str
) -> None:
    x, w = normal(1, 2, 4, *size), normal(2, 6, 2, *kernel)
    expected = runtime("Conv", (x, w), auto_pad=AUTO[padding], strides=stride, group=2)
    (found,) = outputs_of(
        lambda g, a, b: g.conv2d(input=a, weight=b, strides=stride, padding=padding), (x, w)
    )
    assert found.shape == expected.shape
    assert relative_error(found, expected) <= 1e-5


# ONNX Runtime refuses to pool at a stride above the window, where it takes the padding for negative
@pytest.mark.parametrize("padding", AUTO)
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("size, kernel, stride", [w for w in WINDOWS if w[2][0] <= w[1][0] and w[2][1] <= w[1][1]])
def test_a_pool_pads_like_onnx_and_never_counts_the_padding(
    op: str, size: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], padding: str
) -> None:
    x = normal(3, 2, 3, *size) + np.float32(5)
    more = {"count_include_pad": 0} if op == "AveragePool" else {}
    expected = runtime(op, (x,), auto_pad=AUTO[padding], strides=stride, kernel_shape=kernel, **more)

    def build(g: GraphBuilder, v: Value) -> Value:
        if op == "MaxPool":
            return g.maxpool2d(v, kernel, stride, padding)
        return g.avgpool2d(input=v, kernels=kernel, strides=stride, padding=padding)

    (found,) = outputs_of(build, (x,))
    assert found.shape == expected.shape
    assert relative_error(found, expected) <= 1e-5


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("kernel", range(1, 6))
@pytest.mark.parametrize("stride", range(1, 4))
def test_same_padding_follows_its_formula_with_the_larger_half_first(size: int, kernel: int, stride: int) -> None:
    graph = GraphBuilder()
    x = graph.new_input(dims=(1, 1, size, size + 1))
    w = graph.new_weight(dims=(1, 1, kernel, kernel))
    y = graph.conv2d(input=x, weight=w, strides=(stride, stride), padding="SAME")
    pads = graph.get_operator_attr(graph.get_operator_list()[0], "pads")
    assert isinstance(pads, list)
    for axis, n in enumerate((size, size + 1)):
        out = math.ceil(n / stride)
        total = max((out - 1) * stride + kernel - n, 0)
        assert y.dim(2 + axis) == out
        assert (pads[axis], pads[2 + axis]) == (math.ceil(total / 2), total // 2)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_convolution_infers_its_groups_from_the_weight(groups: int) -> None:
    graph = GraphBuilder()
    x = graph.new_input(dims=(1, 4, 5, 5))
    w = graph.new_weight(dims=(8, 4 // groups, 3, 3))
    graph.conv2d(input=x, weight=w, strides=(1, 1), padding="SAME")
    assert graph.get_operator_attr(graph.get_operator_list()[0], "group") == groups


@pytest.mark.parametrize("method", ["conv2d", "maxpool2d", "avgpool2d", "matmul"])
@pytest.mark.parametrize(
    "activation, follower", [("NONE", []), ("RELU", ["Relu"]), ("SIGMOID", ["Sigmoid"]), ("TANH", ["Tanh"])]
)
def test_an_activation_is_a_second_operator(method: str, activation: str, follower: list[str]) -> None:
    graph = GraphBuilder()
    x = graph.new_input(dims=(1, 2, 4, 4))
    if method == "conv2d":
        w = graph.new_weight(dims=(2, 2, 3, 3))
        graph.conv2d(input=x, weight=w, strides=(1, 1), padding="VALID", activation=activation)
    elif method == "matmul":
        graph.matmul(x, graph.new_weight(dims=(4, 4)), activation)
    else:
        getattr(graph, method)(input=x, kernels=(2, 2), strides=(2, 2), padding="VALID", activation=activation)
    types = [graph.get_operator_type(op) for op in graph.get_operator_list()]
    assert types[1:] == follower
    assert len(graph.outputs) == 1


@pytest.mark.parametrize("given, meant", [(-1, 1e-5), (-0.5, 1e-5), (0, 0.0), (0.01, 0.01)])
def test_batchnorm_uses_its_epsilon_and_a_negative_one_means_the_default(given: float, meant: float) -> None:
    x, scale, bias, mean = normal(1, 2, 3, 4, 5), normal(2, 3), normal(3, 3), normal(4, 3)
    var = np.array([1e-3, 0.5, 2.0], np.float32)

    def channel(v: Array) -> Array:
        return np.asarray(v, np.float64)[:, None, None]

    expected = channel(scale) * (x - channel(mean)) / np.sqrt(channel(var) + meant) + channel(bias)
    (found,) = outputs_of(lambda g, *v: g.batchnorm(*v, epsilon=given), (x, scale, bias, mean, var))
    assert relative_error(found, expected) <= 1e-6
    graph = GraphBuilder()
    x1, s1 = graph.new_input(dims=(1, 3, 2, 2)), graph.new_weight(dims=(3,))
    graph.batchnorm(x1, s1, s1, s1, s1, given)
    assert graph.get_operator_attr(graph.get_operator_list()[0], "epsilon") == meant


# ── inputs, weights, outputs ─────────────────────────────────────────────────────────────────────────────────────


def test_inputs_are_named_in_order_and_take_names_and_types() -> None:
    graph = GraphBuilder()
    first, second = graph.new_input(dims=(1, 2)), graph.new_input(dims=[3])
    named, after = graph.new_input(dims=(), name="state", dtype="INT64"), graph.new_input(dims=("batch", 4))
    assert graph.input_names == ["input", "input_1", "state", "input_2"]
    assert (first.nDim, first.dim(0), first.dim(1), second.nDim, named.nDim) == (2, 1, 2, 1, 0)
    assert str(named.type.dtype.name) == "INT64" and str(after.type.dims[0]) == "batch"


@pytest.mark.parametrize(
    "data",
    [np.arange(6.0).reshape(2, 3), np.arange(6), list(range(6)), tuple(map(float, range(6))), [[0, 1, 2], [3, 4, 5]]],
    ids=["array", "flat array", "list", "tuple", "nested"],
)
def test_a_weight_holds_what_it_is_given_as_float(data: object) -> None:
    graph = GraphBuilder()
    x = graph.new_input(dims=(2, 3))
    graph.add(x, graph.new_weight(dims=(2, 3), data=data))  # type: ignore[arg-type]  # nested lists work too
    found = evaluate_graph(graph, {"input": np.zeros((2, 3), np.float32)})["output"]
    assert found.dtype == np.float32
    assert np.array_equal(found, np.arange(6.0).reshape(2, 3))


def test_a_weight_keeps_its_values_when_the_array_changes_later() -> None:
    graph, data = GraphBuilder(), np.ones((2,), np.float32)
    weight = graph.new_weight(dims=(2,), data=data)
    graph.add(graph.new_input(dims=(2,)), weight)
    data[:] = 7
    assert evaluate_graph(graph, {"input": np.zeros(2, np.float32)})["output"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "dims, fan_in", [((64, 32, 3, 3), 32 * 9), ((300, 200), 300), ((4, 100, 50), 100), ((64, 1, 7, 7), 49)]
)
def test_random_weights_are_normal_with_the_deviation_of_their_fan_in(dims: tuple[int, ...], fan_in: int) -> None:
    graph = GraphBuilder()
    values = weight_of(graph.new_weight(dims=dims)).array() / math.sqrt(2 / fan_in)
    count = values.size
    assert abs(values.mean()) < 5 / math.sqrt(count)
    assert abs((values**2).mean() - 1) < 5 * math.sqrt(2 / count)
    assert abs((np.abs(values) < 1).mean() - math.erf(math.sqrt(0.5))) < 3 / math.sqrt(count)


def test_random_weights_depend_on_their_order_alone() -> None:
    def weights(first: tuple[int, ...]) -> list[Array]:
        graph = GraphBuilder()
        made = [graph.new_weight(dims=first), graph.new_weight(dims=(3, 4)), graph.new_weight(dims=(3, 4))]
        return [weight_of(w).array() for w in reversed(made)]

    one, two = weights((5, 5)), weights((2,))
    assert np.array_equal(one[0], two[0]) and np.array_equal(one[1], two[1])
    assert not np.array_equal(one[0], one[1])


def copied(graph: Graph, node: Node, inputs: tuple[Value | None, ...]) -> tuple[Value, ...]:
    return graph.make(node.op, inputs, node.attrs, [v.type for v in node.outputs]).outputs


def test_random_weights_of_a_later_graph_differ_from_those_it_was_made_from() -> None:
    graph = GraphBuilder()
    first = graph.new_weight(dims=(3, 4))
    copy = graph.rebuilt(copied)
    assert isinstance(copy, GraphBuilder)
    assert not np.array_equal(weight_of(copy.new_weight(dims=(3, 4))).array(), weight_of(first).array())


def test_random_vectors_may_serve_as_variances() -> None:
    graph = GraphBuilder()
    x = graph.new_input(dims=(1, 200, 2, 2))
    graph.batchnorm(x, *(graph.new_weight(dims=(200,)) for _ in range(4)))
    found = evaluate_graph(graph, {"input": normal(1, 1, 200, 2, 2)})["output"]
    assert np.isfinite(found).all()


def test_deep_graphs_of_random_weights_stay_finite_and_alive() -> None:
    graph = GraphBuilder()
    t = graph.new_input(dims=(1, 64))
    for _ in range(60):
        t = graph.matmul(t, graph.new_weight(dims=(64, 64)), "RELU")
    found = evaluate_graph(graph, {"input": normal(1, 1, 64)})["output"]
    assert 1e-3 < np.abs(found).max() < 1e3


def test_every_value_that_nothing_consumes_is_an_output() -> None:
    graph = GraphBuilder()
    x = graph.new_input(dims=(1, 4))
    left = graph.relu(x)
    parts = graph.split(left, 1, [1, 3])
    graph.tanh(parts[1])
    unused = graph.sigmoid(x)
    assert [name for name, _ in graph.outputs] == ["output", "output_1", "output_2"]
    assert [v for _, v in graph.outputs][0] is parts[0] and unused in [v for _, v in graph.outputs]


def test_a_refused_call_leaves_the_graph_as_it_was() -> None:
    graph = GraphBuilder()
    x, w = graph.new_input(dims=(1, 2, 4, 4)), graph.new_weight(dims=(2, 2, 3, 3))
    before = [graph.relu(x), len(graph.nodes)]
    with pytest.raises(TasoError):
        graph.conv2d(input=x, weight=w, strides=(1, 1), padding="SAME", activation="GELU")
    with pytest.raises(TasoError):
        graph.add(x, graph.new_weight(dims=(3,)))
    assert [graph.outputs[0][1], len(graph.nodes)] == before and len(graph.outputs) == 1


# ── questions ────────────────────────────────────────────────────────────────────────────────────────────────────


def small_network() -> GraphBuilder:
    graph = GraphBuilder()
    x = graph.new_input(dims=(2, 4, 7, 8))
    w = graph.new_weight(dims=(6, 2, 2, 3), data=np.arange(72))
    y = graph.conv2d(input=x, weight=w, strides=(2, 1), padding="SAME", activation="RELU")
    y = graph.maxpool2d(y, (3, 2), (1, 2), "VALID")
    first, second = graph.split(y, 1, [2, 4])
    second = graph.transpose(second, (0, 2, 3, 1))
    second = graph.unsqueeze(second, (1,))
    graph.concat(1, [first, first])
    graph.squeeze(input=second, axes=(1,))
    graph.reduce_sum(input=second, axes=(-1, 1))
    return graph


def test_operators_come_in_order_without_inputs_and_weights() -> None:
    graph = small_network()
    types = [graph.get_operator_type(op) for op in graph.get_operator_list()]
    assert types == [
        "Conv", "Relu", "MaxPool", "Split", "Transpose", "Unsqueeze", "Concat", "Squeeze", "ReduceSum",
    ]  # fmt: skip
    guids = [op["guid"] for op in graph.get_operator_list()]
    assert len(set(guids)) == len(guids) and all(isinstance(g, int) for g in guids)


def test_edges_say_where_each_input_comes_from() -> None:
    graph = small_network()
    by_type = {graph.get_operator_type(op): op for op in graph.get_operator_list()}
    edges = graph.get_input_edges(by_type["Conv"])
    assert [(e["srcIdx"], e["dstIdx"]) for e in edges] == [(0, 0), (0, 1)]
    assert [graph.get_operator_type(e["srcOp"]) for e in edges] == ["Input", "Weight"]
    assert all(e["dstOp"]["guid"] == by_type["Conv"]["guid"] for e in edges)
    (edge,) = graph.get_input_edges(by_type["Transpose"])
    assert edge["srcOp"]["guid"] == by_type["Split"]["guid"] and edge["srcIdx"] == 1
    assert [e["dstIdx"] for e in graph.get_input_edges(by_type["Concat"])] == [0, 1]
    assert graph.get_input_edges(edges[0]["srcOp"]) == []


@pytest.mark.parametrize(
    "type, name, value",
    [
        ("Conv", "kernel_shape", [2, 3]), ("Conv", "strides", [2, 1]), ("Conv", "pads", [1, 1, 0, 1]),
        ("Conv", "group", 2), ("MaxPool", "kernel_shape", [3, 2]), ("MaxPool", "strides", [1, 2]),
        ("MaxPool", "pads", [0, 0, 0, 0]), ("Split", "axis", 1), ("Split", "split", [2, 4]),
        ("Transpose", "perm", (0, 2, 3, 1)), ("Concat", "axis", 1), ("Squeeze", "axes", [1]),
        ("Unsqueeze", "axes", [1]), ("ReduceSum", "axes", [1, 4]),
    ],
)  # fmt: skip
def test_attributes_are_told_by_their_onnx_names(type: str, name: str, value: object) -> None:
    graph = small_network()
    op = next(o for o in graph.get_operator_list() if graph.get_operator_type(o) == type)
    assert graph.get_operator_attr(op, name) == value


def test_shapes_parts_and_weights_are_told() -> None:
    graph = small_network()
    by_type = {graph.get_operator_type(op): op for op in graph.get_operator_list()}
    assert graph.get_input_dims(by_type["Conv"], 0) == [2, 4, 7, 8]
    assert graph.get_input_dims(by_type["Conv"], 1) == [6, 2, 2, 3]
    assert graph.get_output_dims(by_type["Conv"], 0) == [2, 6, 4, 8]
    assert graph.get_num_outputs(by_type["Split"]) == 2 and graph.get_num_outputs(by_type["Conv"]) == 1
    assert graph.get_output_dims(by_type["Split"], 1)[1] == 4
    assert graph.get_split_lens(by_type["Split"]) == [2, 4]
    weight = graph.get_input_edges(by_type["Conv"])[1]["srcOp"]
    assert list(graph.get_weight_value(weight)) == [float(i) for i in range(72)]
    assert graph.get_input_dims(weight, 0) == [6, 2, 2, 3]


def test_an_operator_may_be_asked_about_by_its_bare_guid() -> None:
    graph = small_network()
    op = graph.get_operator_list()[0]
    assert graph.get_operator_type({"guid": op["guid"]}) == "Conv"
    assert graph.get_operator_list()[0] == op


def test_a_script_can_write_the_graph_to_onnx_through_the_questions_alone() -> None:
    graph = small_network()
    nodes, initializers, consumed, produced = [], {}, set(), {}
    listed = {
        "Conv": ("group", "kernel_shape", "pads", "strides"), "MaxPool": ("kernel_shape", "pads", "strides"),
        "Split": ("axis", "split"), "Transpose": ("perm",), "Unsqueeze": ("axes",), "Concat": ("axis",),
        "Squeeze": ("axes",), "ReduceSum": ("axes",),
    }  # fmt: skip
    for op in graph.get_operator_list():
        kind, names = graph.get_operator_type(op), []
        for edge in graph.get_input_edges(op):
            source = graph.get_operator_type(edge["srcOp"])
            name = "input" if source == "Input" else f"v{edge['srcOp']['guid']}_{edge['srcIdx']}"
            if source == "Weight":
                dims = graph.get_input_dims(op, edge["dstIdx"])
                values = graph.get_weight_value(edge["srcOp"])
                initializers[name] = helper.make_tensor(name, TensorProto.FLOAT, dims, values)
            names.append(name)
            consumed.add(name)
        outputs = [f"v{op['guid']}_{i}" for i in range(graph.get_num_outputs(op))]
        produced.update({name: graph.get_output_dims(op, i) for i, name in enumerate(outputs)})
        attrs = {name: graph.get_operator_attr(op, name) for name in listed.get(kind, ())}
        nodes.append(helper.make_node(kind, names, outputs, **attrs))
    free = [helper.make_tensor_value_info(n, TensorProto.FLOAT, d) for n, d in produced.items() if n not in consumed]
    given = [helper.make_tensor_value_info("input", TensorProto.FLOAT, [2, 4, 7, 8])]
    built = helper.make_graph(nodes, "script", given, free, list(initializers.values()))
    model = helper.make_model(built, opset_imports=[helper.make_opsetid("", 11)], ir_version=6)
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = normal(9, 2, 4, 7, 8)
    ours = evaluate_graph(graph, {"input": x})
    assert len(free) == len(ours)
    for got, want in zip(ours.values(), session.run(None, {"input": x}), strict=True):
        assert relative_error(got, want) <= 1e-5


def test_print_measurements_is_remembered_in_graphs_made_from_it() -> None:
    graph = GraphBuilder()
    assert not graph.prints_measurements
    graph.relu(graph.new_input(dims=(2,)))
    graph.print_measurements()
    copy = graph.rebuilt(copied)
    assert isinstance(copy, GraphBuilder) and copy.prints_measurements


# ── refusals: the method and the argument at fault, by name ──────────────────────────────────────────────────────

def conv(graph: GraphBuilder, x: object, w: object, **changed: object) -> Value:
    """A convolution that is right but for what is `changed`."""
    given = {"input": x, "weight": w, "strides": (1, 1), "padding": "SAME", **changed}
    return graph.conv2d(**given)  # type: ignore[arg-type]  # wrong arguments are the point


REFUSALS: list[tuple[str, str, Callable[[GraphBuilder, Value, Value], object]]] = [
    ("conv2d", "padding", lambda g, x, w: conv(g, x, w, padding="FULL")),
    ("conv2d", "padding", lambda g, x, w: conv(g, x, w, padding=1)),
    ("conv2d", "activation", lambda g, x, w: conv(g, x, w, activation="relu")),
    ("conv2d", "strides", lambda g, x, w: conv(g, x, w, strides=(0, 1))),
    ("conv2d", "strides", lambda g, x, w: conv(g, x, w, strides=2)),
    ("conv2d", "strides", lambda g, x, w: conv(g, x, w, strides=(1.5, 1))),
    ("conv2d", "input", lambda g, x, w: conv(g, None, w)),
    ("conv2d", "input", lambda g, x, w: conv(g, g.new_input(dims=(3, 4)), w)),
    ("conv2d", "weight", lambda g, x, w: conv(g, x, g.new_weight(dims=(3, 3, 1, 1)))),
    ("conv2d", "padding", lambda g, x, w: conv(g, g.new_input(dims=(1, 4, "h", 3)), w, strides=(2, 1))),
    ("matmul", "weight", lambda g, x, w: g.matmul(x, np.ones((4, 4)))),
    ("matmul", "activation", lambda g, x, w: g.matmul(x, x, activation=None)),
    ("maxpool2d", "kernels", lambda g, x, w: g.maxpool2d(x, (2,), (1, 1), "SAME")),
    ("avgpool2d", "padding", lambda g, x, w: g.avgpool2d(input=x, kernels=(2, 2), strides=(1, 1), padding="same")),
    ("maxpool2d", "input", lambda g, x, w: g.maxpool2d(g.new_input(dims=(4, 4)), (2, 2), (1, 1), "SAME")),
    ("cast", "datatype", lambda g, x, w: g.cast(input=x, datatype="float")),
    ("new_input", "dims", lambda g, x, w: g.new_input(dims=(1, -2))),
    ("new_input", "dims", lambda g, x, w: g.new_input(dims=7)),
    ("new_input", "dims", lambda g, x, w: g.new_input(dims=(1.0, 2))),
    ("new_input", "dtype", lambda g, x, w: g.new_input(dims=(1,), dtype="real")),
    ("new_input", "name", lambda g, x, w: g.new_input(dims=(1,), name="")),
    ("input", "input", lambda g, x, w: g.new_input(dims=(1,), name="input")),
    ("new_weight", "dims", lambda g, x, w: g.new_weight(dims=(2, -1))),
    ("new_weight", "dims", lambda g, x, w: g.new_weight(dims=("n", 2))),
    ("new_weight", "data", lambda g, x, w: g.new_weight(dims=(2, 3), data=[1.0] * 5)),
    ("new_weight", "data", lambda g, x, w: g.new_weight(dims=(2, 3), data=np.ones((3, 2)))),
    ("new_weight", "data", lambda g, x, w: g.new_weight(dims=(2,), data=["a", "b"])),
    ("add", "x", lambda g, x, w: g.add(1, x)),
    ("add", "y", lambda g, x, w: g.add(x, GraphBuilder().new_input(dims=(1, 4, 3, 3)))),
    ("prelu", "slope", lambda g, x, w: g.prelu(x=x, slope=0.1)),
    ("relu", "input", lambda g, x, w: g.relu("x")),
    ("leakyrelu", "alpha", lambda g, x, w: g.leakyrelu(x, "0.1")),
    ("dropout", "rate", lambda g, x, w: g.dropout(x, 1.5)),
    ("logical_not", "input", lambda g, x, w: g.logical_not(input=x)),
    ("batchnorm", "epsilon", lambda g, x, w: g.batchnorm(x, x, x, x, x, None)),
    ("batchnorm", "var", lambda g, x, w: g.batchnorm(x, x, x, x, None)),
    ("concat", "inputs", lambda g, x, w: g.concat(0, [])),
    ("concat", "inputs[1]", lambda g, x, w: g.concat(0, [x, 3])),
    ("concat", "axis", lambda g, x, w: g.concat(4, [x, x])),
    ("concat", "axis", lambda g, x, w: g.concat(None, [x, x])),
    ("split", "sizes", lambda g, x, w: g.split(x, 1, 3)),
    ("split", "sizes", lambda g, x, w: g.split(x, 1, "11")),
    ("Split", "axis", lambda g, x, w: g.split(x, 1, [1, 2])),
    ("slice", "axes", lambda g, x, w: g.slice(x, (0,), (1,), (0, 1), None)),
    ("slice", "axis", lambda g, x, w: g.slice(x, (0,), (1,), (7,), None)),
    ("transpose", "perm", lambda g, x, w: g.transpose(x, (0, 1, 1, 2))),
    ("reshape", "shape", lambda g, x, w: g.reshape(x, 36)),
    ("Reshape", "(5, 5)", lambda g, x, w: g.reshape(x, (5, 5))),
    ("Reshape", "(-1, -1)", lambda g, x, w: g.reshape(x, (-1, -1))),
    ("Squeeze", "axis 1", lambda g, x, w: g.squeeze(input=x, axes=(1,))),
    ("unsqueeze", "axis", lambda g, x, w: g.unsqueeze(x, (9,))),
    ("reduce_sum", "axes", lambda g, x, w: g.reduce_sum(input=x, axes=())),
    ("reduce_sum", "axes", lambda g, x, w: g.reduce_sum(input=x, axes=1)),
    ("reduce_max", "axis", lambda g, x, w: g.reduce_max(input=x, axes=(1, 1))),
    ("reduce_argmax", "axes", lambda g, x, w: g.reduce_argmax(input=x, axes=(0, 1))),
    ("Add", "broadcast", lambda g, x, w: g.add(x, g.new_weight(dims=(2,)))),
    ("MatMul", "inner dimensions", lambda g, x, w: g.matmul(x, g.new_weight(dims=(2, 5)))),
    ("get_operator_type", "op", lambda g, x, w: g.get_operator_type(100)),
    ("get_operator_type", "guid", lambda g, x, w: g.get_operator_type({"guid": -1})),
    ("get_operator_attr", "alpha", lambda g, x, w: g.get_operator_attr(operator(g, x), "alpha")),
    ("get_input_dims", "idx", lambda g, x, w: g.get_input_dims(operator(g, x), 1)),
    ("get_output_dims", "idx", lambda g, x, w: g.get_output_dims(operator(g, x), -1)),
    ("get_split_lens", "Relu", lambda g, x, w: g.get_split_lens(operator(g, x))),
    ("get_weight_value", "Relu", lambda g, x, w: g.get_weight_value(operator(g, x))),
]  # type: ignore[list-item, arg-type]  # fmt: skip  # wrong arguments are the point


def operator(graph: GraphBuilder, x: Value) -> dict[str, int]:
    return {"guid": graph.relu(x).node.guid}


@pytest.mark.parametrize("method, argument, call", REFUSALS, ids=lambda v: v if isinstance(v, str) else "")
def test_a_wrong_argument_is_named_in_a_sentence(
    method: str, argument: str, call: Callable[[GraphBuilder, Value, Value], object]
) -> None:
    graph = GraphBuilder()
    x, w = graph.new_input(dims=(1, 4, 3, 3)), graph.new_weight(dims=(2, 4, 2, 2))
    with pytest.raises(TasoError) as caught:
        call(graph, x, w)
    assert method in str(caught.value) and argument in str(caught.value)
    assert "\n" not in str(caught.value)
