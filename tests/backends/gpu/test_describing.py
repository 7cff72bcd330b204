"""cuDNN graphs of kernels, interpreted by NumPy, against the operators' definitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from describing_cases import Array, Given, Part, apart, arrays_of, by_definition, by_graph, made, part
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from taso.backends.cudnn.attention import MASK, OUT, Heads, K, Q, V, attention
from taso.backends.cudnn.describing import attempts, described, unbiased, without_epilogue
from taso.backends.cudnn.description import BF16, FLOAT32, FP16, TF32, Description, Operation, Tensor
from taso.backends.cudnn.elementwise import RULES
from taso.backends.cudnn.interpreted import interpret, viewed
from taso.backends.cudnn.sketch import CudnnLaunch, laid_out
from taso.backends.lowering import LAST, PLAIN, Kernel
from taso.graph.errors import BackendError, ShapeError
from taso.graph.operator import AttrValue
from taso.graph.types import DType

CLOSE = 1e-6
"""Rounding of some operations in float32, each computed in float64."""


def checked(kernel: Kernel, precision: str = FLOAT32, close: float = CLOSE, positive: bool = False) -> CudnnLaunch:
    """The whole kernel's graph, which gives what the operators' definitions do."""
    launch = described(kernel, precision)
    assert launch is not None
    arrays = arrays_of(kernel, positive=positive)
    assert apart(by_graph(kernel, launch, arrays), by_definition(kernel, arrays)) <= close
    return launch


def kinds(launch: CudnnLaunch) -> list[str]:
    return [op.word("mode") if op.kind == "pointwise" else op.kind for op in launch.description.operations]


# ── convolutions ─────────────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def convolutions(draw: st.DrawFn, transposed: bool = False) -> Kernel:
    n = draw(st.integers(1, 3))
    groups = draw(st.sampled_from((1, 2, 3)))
    inner, outer = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = [draw(st.integers(3, 6)) for _ in range(n)]
    kernel = [draw(st.integers(1, 3)) for _ in range(n)]
    attrs: dict[str, AttrValue] = {
        "group": groups, "strides": tuple(draw(st.integers(1, 3)) for _ in range(n)),
        "dilations": tuple(draw(st.integers(1, 2)) for _ in range(n)),
        "pads": tuple(draw(st.integers(0, 2)) for _ in range(2 * n)),
    }  # fmt: skip
    if transposed:
        attrs["output_padding"] = tuple(draw(st.integers(0, 1)) for _ in range(n))
    layout = draw(st.sampled_from((PLAIN, LAST)))
    weight = (groups * inner, outer) if transposed else (groups * outer, inner)
    operands = [
        Given((draw(st.integers(1, 2)), groups * inner, *sizes), layout),
        Given((*weight, *kernel), constant=draw(st.booleans())),
    ]
    inputs: list[int | None] = [0, 1]
    if draw(st.booleans()):
        operands.append(Given((groups * outer,), constant=True))
        inputs.append(2)
    anchor = part("ConvTranspose" if transposed else "Conv", *inputs, **attrs)
    try:
        alone = made(operands, [anchor], layout)
    except ShapeError:
        assume(False)
    out = alone.results[0].type.static_shape
    assume(0 not in out)
    parts = [anchor]
    if draw(st.booleans()):
        operands.append(Given(draw(st.sampled_from((out, (out[1], *(1,) * n)))), layout))
        parts.append(part("Add", *draw(st.permutations((-1, len(operands) - 1)))))
    if draw(st.booleans()):
        parts.append(part("Relu", -1))
    return made(operands, parts, layout)


@settings(max_examples=150)
@given(convolutions())
def test_convolutions_of_all_attributes_are_forward_convolutions(kernel: Kernel) -> None:
    assert "conv_fprop" in kinds(checked(kernel))


@settings(max_examples=150)
@given(convolutions(transposed=True))
def test_transposed_convolutions_are_data_gradients_or_nothing(kernel: Kernel) -> None:
    launch = described(kernel)
    if launch is not None:
        assert "conv_dgrad" in kinds(checked(kernel))
        return
    attrs = kernel.steps[0].attrs
    assert any(more >= s for more, s in zip(attrs.ints("output_padding"), attrs.ints("strides"), strict=True))


@settings(max_examples=40)
@given(convolutions(), st.sampled_from((TF32, FP16, BF16)))
def test_precisions_round_factors_and_nothing_else(kernel: Kernel, precision: str) -> None:
    launch = described(kernel, precision)
    assert launch is not None and launch.description.precision == precision
    arrays, dtype = arrays_of(kernel), {FP16: np.dtype(np.float16), BF16: DType.BFLOAT16.numpy}.get(precision)
    rounded = [a.astype(dtype).astype(np.float32) if dtype and i < 2 else a for i, a in enumerate(arrays)]
    assert apart(by_graph(kernel, launch, arrays), by_definition(kernel, rounded)) <= CLOSE


def test_a_depthwise_convolution_of_uneven_pads_is_one_operation() -> None:
    kernel = made(
        [Given((2, 8, 7, 9), LAST), Given((8, 1, 3, 5), constant=True), Given((8,), constant=True)],
        [part("Conv", 0, 1, 2, group=8, pads=(1, 0, 2, 3), strides=(2, 1)), part("Relu", -1)], LAST,
    )  # fmt: skip
    launch = checked(kernel)
    assert kinds(launch) == ["conv_fprop", "add", "relu"]
    op = launch.description.operations[0]
    assert op.ints("pre_padding") == (1, 0) and op.ints("post_padding") == (2, 3)
    data, weight = (launch.description.by_uid[op.input(role)] for role in ("image", "weight"))
    assert data.strides[1] == weight.strides[1] == 1 and data.dims[1] // weight.dims[1] == 8


def test_negative_pads_are_not_described() -> None:
    kernel = made([Given((1, 2, 6, 6)), Given((3, 2, 3, 3))], [part("Conv", 0, 1, pads=(-1, 0, 0, 0))])
    assert described(kernel) is None


# ── matrix products ──────────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def products(draw: st.DrawFn) -> Kernel:
    whole = draw(st.lists(st.integers(1, 3), max_size=3))
    rows, inner, columns = (draw(st.integers(1, 4)) for _ in range(3))

    def batch() -> tuple[int, ...]:
        kept = whole[draw(st.integers(0, len(whole))) :]
        return tuple(draw(st.sampled_from((1, d))) for d in kept)

    left = (inner,) if draw(st.integers(0, 5)) == 0 else (*batch(), rows, inner)
    right = (inner,) if draw(st.integers(0, 5)) == 0 else (*batch(), inner, columns)
    operands = [Given(left), Given(right, constant=draw(st.booleans()))]
    parts = [part("MatMul", 0, 1)]
    out = made(operands, parts).results[0].type.static_shape
    for name in draw(st.lists(st.sampled_from(("Add", "Mul", "Gelu", "Sub")), max_size=3)):
        if name == "Gelu":
            parts.append(part(name, -1))
            continue
        cut = draw(st.integers(0, len(out)))
        dims = tuple(draw(st.sampled_from((1, d))) for d in out[cut:])
        operands.append(Given(dims, constant=draw(st.booleans())))
        parts.append(part(name, *draw(st.permutations((-1, len(operands) - 1)))))
    return made(operands, parts)


@settings(max_examples=300)
@given(products())
def test_products_with_all_batches_and_epilogues_are_matmuls(kernel: Kernel) -> None:
    assert "matmul" in kinds(checked(kernel))


def test_the_rows_of_a_batch_are_one_product_where_all_operands_allow_it() -> None:
    bias, whole, rows = Given((16,), constant=True), Given((2, 5, 16)), Given((5, 1))
    for extra, rank in (((bias, whole), 10), ((bias, rows), 5)):
        operands = [Given((2, 5, 8)), Given((8, 16), constant=True), *extra]
        launch = checked(made(operands, [part("MatMul", 0, 1), part("Add", -1, 2), part("Add", 3, -1)]))
        op = launch.description.operations[0]
        assert launch.description.by_uid[op.input("A")].dims[-2] == rank


@pytest.mark.parametrize("turned", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("alpha, beta", [(1.0, 1.0), (0.5, 1.0), (1.0, -2.0), (1.5, 0.0)])
@pytest.mark.parametrize("c", [None, (3,), (4, 1), (4, 3), ()])
@pytest.mark.parametrize("constant", [False, True])
def test_gemm_of_all_attributes_is_a_matmul(
    turned: tuple[int, int], alpha: float, beta: float, c: tuple[int, ...] | None, constant: bool
) -> None:
    a, b = ((5, 4) if turned[0] else (4, 5)), ((3, 5) if turned[1] else (5, 3))
    operands = [Given(a), Given(b, constant=constant), *([Given(c, constant=True)] if c is not None else [])]
    gemm = part("Gemm", *range(len(operands)), transA=turned[0], transB=turned[1], alpha=alpha, beta=beta)
    checked(made(operands, [gemm, part("Relu", -1)]))
    assert described(made(operands, [gemm]), FP16) is not None
    checked(made(operands, [gemm]), FP16, close=5e-3)


# ── pools, reductions, normalisations ────────────────────────────────────────────────────────────────────────────


@st.composite
def pools(draw: st.DrawFn) -> Kernel:
    n = draw(st.integers(1, 3))
    name = draw(st.sampled_from(("MaxPool", "AveragePool")))
    attrs: dict[str, AttrValue] = {
        "kernel_shape": tuple(draw(st.integers(1, 3)) for _ in range(n)),
        "strides": tuple(draw(st.integers(1, 3)) for _ in range(n)),
        "pads": tuple(draw(st.integers(0, 2)) for _ in range(2 * n)),
        "dilations": tuple(draw(st.integers(1, 2)) for _ in range(n)),
        "ceil_mode": draw(st.integers(0, 1)),
    }  # fmt: skip
    if name == "AveragePool":
        attrs["count_include_pad"] = 0 if attrs["ceil_mode"] else draw(st.integers(0, 1))
    layout = draw(st.sampled_from((PLAIN, LAST)))
    operands = [Given((2, 3, *(draw(st.integers(2, 6)) for _ in range(n))), layout)]
    try:
        kernel = made(operands, [part(name, 0, **attrs), part("Relu", -1)], layout)
    except ShapeError:
        assume(False)
    assume(0 not in kernel.results[0].type.static_shape)
    return kernel


@settings(max_examples=200)
@given(pools())
def test_pools_are_resamples_unless_they_are_dilated(kernel: Kernel) -> None:
    launch, attrs = described(kernel), kernel.steps[0].attrs
    if launch is not None:
        checked(kernel)
        return
    full = zip(attrs.ints("dilations"), attrs.ints("kernel_shape"), strict=True)
    by_ceiling = bool(attrs.int("ceil_mode"))
    assert any(d > 1 and k > 1 for d, k in full) or by_ceiling


@pytest.mark.parametrize("name", ["GlobalAveragePool", "GlobalMaxPool"])
@pytest.mark.parametrize("dims", [(2, 3, 5), (2, 3, 4, 5), (2, 3, 2, 3, 4)])
@pytest.mark.parametrize("layout", [PLAIN, LAST])
def test_global_pools_are_reductions(name: str, dims: tuple[int, ...], layout: str) -> None:
    operands = [Given(dims, layout), Given((3, *(1,) * (len(dims) - 2)))]
    checked(made(operands, [part(name, 0), part("Mul", -1, 1)], layout))


@pytest.mark.parametrize("name", [
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
    "ReduceLogSum",
])  # fmt: skip
@pytest.mark.parametrize("axes", [(), (0,), (2,), (0, 2), (1, 2)])
@pytest.mark.parametrize("keep", [0, 1])
def test_reductions_over_all_axes_are_reductions(name: str, axes: tuple[int, ...], keep: int) -> None:
    checked(made([Given((3, 4, 5))], [part(name, 0, axes=axes, keepdims=keep)]), positive=True, close=2e-6)


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("axis, flattened", [(0, 0), (1, 0), (-1, 0), (1, 1), (0, 1)])
def test_softmax_is_reductions_and_pointwise_operations(name: str, axis: int, flattened: int) -> None:
    checked(made([Given((3, 4, 5))], [part(name, 0, axis=axis, flattened=flattened), part("Exp", -1)]))


@pytest.mark.parametrize("dims", [(4, 3), (2, 3, 5), (2, 3, 4, 5), (1, 3, 2, 2, 2)])
@pytest.mark.parametrize("layout", [PLAIN, LAST])
@pytest.mark.parametrize("constant", [False, True])
def test_batch_normalization_is_pointwise(dims: tuple[int, ...], layout: str, constant: bool) -> None:
    vectors = [Given((3,), constant=constant)] * 4
    operands = [Given(dims, layout), *vectors]
    checked(made(operands, [part("BatchNormalization", 0, 1, 2, 3, 4, epsilon=1e-3)], layout), positive=True)


@pytest.mark.parametrize("axis", [-1, 1, 2])
@pytest.mark.parametrize("inputs", [(0, 1), (0, 1, 2)])
def test_layer_normalization_is_of_rows(axis: int, inputs: Sequence[int]) -> None:
    shape = (2, 3, 4, 5)[axis:] if axis >= 0 else (5,)
    operands = [Given((2, 3, 4, 5)), Given(shape, constant=True), Given(shape)][: len(inputs)]
    launch = checked(made(operands, [part("LayerNormalization", *inputs, axis=axis, epsilon=1e-2)]))
    assert kinds(launch) == ["layernorm"]


def test_rms_normalization_is_of_rows_unless_its_scale_broadcasts() -> None:
    checked(made([Given((2, 3, 5)), Given((5,))], [part("RMSNormalization", 0, 1, axis=-1), part("Mul", -1, 0)]))
    assert described(made([Given((2, 3, 5)), Given((1,))], [part("RMSNormalization", 0, 1, axis=-1)])) is None


@pytest.mark.parametrize("dims", [(2, 3, 5), (2, 3, 4, 5), (1, 3, 2, 2, 2)])
@pytest.mark.parametrize("layout", [PLAIN, LAST])
def test_instance_normalization_is_one_operation(dims: tuple[int, ...], layout: str) -> None:
    operands = [Given(dims, layout), Given((3,), constant=True), Given((3,))]
    checked(made(operands, [part("InstanceNormalization", 0, 1, 2, epsilon=1e-2)], layout))


# ── element-wise ─────────────────────────────────────────────────────────────────────────────────────────────────

_ATTRS: dict[str, tuple[dict[str, AttrValue], ...]] = {
    "Elu": ({}, {"alpha": 0.5}), "Celu": ({}, {"alpha": 2.0}), "Selu": ({},), "LeakyRelu": ({"alpha": 0.3},),
    "HardSigmoid": ({}, {"alpha": 0.4, "beta": 0.1}), "Swish": ({}, {"alpha": 1.5}),
    "Gelu": ({}, {"approximate": "tanh"}),
    "Clip": ({}, {"min": -0.5}, {"max": 0.5}, {"min": -0.5, "max": 0.7}, {"min": 0.7, "max": -0.5}),
}  # fmt: skip
_TWO = {"Add", "Sub", "Mul", "Div", "Pow", "PRelu", "Sum", "Mean", "Max", "Min"}
_POSITIVE = {"Log", "Sqrt", "Pow", "Reciprocal"}
FUNCTIONS = [(name, attrs) for name in RULES for attrs in _ATTRS.get(name, ({},))]


@pytest.mark.parametrize("name, attrs", FUNCTIONS, ids=lambda x: str(x))
@pytest.mark.parametrize("layout", [PLAIN, LAST])
def test_every_pointwise_operator_means_what_onnx_says(name: str, attrs: dict[str, AttrValue], layout: str) -> None:
    inputs = (0, 1) if name in _TWO else (0,)
    operands = [Given((2, 3, 4, 5), layout), Given((3, 1, 1), constant=True)][: len(inputs)]
    checked(made(operands, [part(name, *inputs, **attrs)], layout), positive=name in _POSITIVE)


@pytest.mark.parametrize("name, attrs", FUNCTIONS, ids=lambda x: str(x))
def test_every_pointwise_operator_can_follow_a_convolution(name: str, attrs: dict[str, AttrValue]) -> None:
    positive = name in _POSITIVE
    operands = [Given((1, 3, 5, 5)), Given((4, 3, 3, 3)), Given((4,)), Given((1, 4, 1, 3))]
    inputs = (-1, 3) if name in _TWO else (-1,)
    kernel = made(operands, [part("Conv", 0, 1, 2), part(name, *inputs, **attrs)])
    steep = positive or name in ("Div", "Tan")
    checked(kernel, positive=positive, close=1e-4 if steep else CLOSE)


@pytest.mark.parametrize("name", ["Round", "Sign", "Atan", "Shrink", "ThresholdedRelu"])
def test_functions_that_cudnn_does_not_have_are_not_described(name: str) -> None:
    assert described(made([Given((2, 3, 4))], [part(name, 0)])) is None


@pytest.mark.parametrize("dtype", [DType.DOUBLE, DType.INT32])
def test_types_that_cudnn_does_not_compute_in_are_not_described(dtype: DType) -> None:
    assert described(made([Given((2, 3, 4), dtype=dtype)] * 2, [part("Add", 0, 1)])) is None


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_narrow_tensors_are_computed_in_float32(dtype: DType) -> None:
    operands = [Given((1, 8, 5, 5), dtype=dtype), Given((4, 8, 3, 3), dtype=dtype, constant=True)]
    kernel = made(operands, [part("Conv", 0, 1)])
    launch = described(kernel)
    assert launch is not None and launch.description.io is dtype and launch.description.compute is DType.FLOAT
    arrays = arrays_of(kernel)
    wide = replace(kernel, operands=tuple(replace(o, type=replace(o.type, dtype=DType.FLOAT)) for o in kernel.operands))
    found = by_graph(kernel, launch, arrays)
    wanted = by_definition(
        replace(wide, results=tuple(replace(r, type=replace(r.type, dtype=DType.FLOAT)) for r in kernel.results)),
        [a.astype(np.float32) for a in arrays],
    )  # fmt: skip
    assert apart(found, wanted.astype(dtype.numpy)) <= 0.004


# ── parts of a kernel ────────────────────────────────────────────────────────────────────────────────────────────


def block() -> Kernel:
    weights = [Given((8, 8, 3, 3), constant=True), Given((8,), constant=True)]
    operands = [Given((1, 8, 6, 6)), *weights, Given((1, 8, 6, 6))]
    return made(operands, [part("Conv", 0, 1, 2, pads=(1, 1, 1, 1)), part("Add", -1, 3), part("Relu", -1)])


def test_the_anchor_alone_gives_what_the_steps_behind_it_start_from() -> None:
    kernel = block()
    found = without_epilogue(kernel)
    assert found is not None
    launch, rest = found
    assert kinds(launch) == ["conv_fprop", "add"] and rest == kernel.steps[1:]
    arrays = arrays_of(kernel)
    alone = replace(kernel, steps=kernel.steps[:1])
    assert apart(by_graph(kernel, launch, arrays), by_definition(alone, arrays)) <= CLOSE


def test_attempts_leave_ever_more_steps_and_all_of_them_are_right() -> None:
    kernel = block()
    found = list(attempts(kernel))
    assert [len(rest) for _, rest in found] == [0, 0, 1, 1, 2]
    assert kinds(found[0][0]) == ["conv_fprop", "add", "add", "relu"]
    arrays = arrays_of(kernel)
    for launch, rest in found:
        part_of = replace(kernel, steps=kernel.steps[: len(kernel.steps) - len(rest)])
        assert apart(by_graph(kernel, launch, arrays), by_definition(part_of, arrays)) <= CLOSE


@pytest.mark.parametrize("name, weight", [("Conv", (5, 4, 3, 3)), ("ConvTranspose", (4, 5, 3, 3))])
def test_a_bias_as_a_step_behind_gives_the_same(name: str, weight: tuple[int, ...]) -> None:
    operands = [Given((1, 4, 6, 6)), Given(weight), Given((5,), constant=True), Given((5, 1, 1))]
    kernel = made(operands, [part(name, 0, 1, 2), part("Mul", -1, 3), part("Relu", -1)])
    found = unbiased(kernel)
    assert found is not None and [s.op.name for s in found.steps] == [name, "Add", "Mul", "Relu"]
    arrays = arrays_of(kernel)
    turned = [a.reshape(o.type.static_shape) for a, o in zip(arrays, found.operands, strict=True)]
    assert apart(by_definition(found, turned), by_definition(kernel, arrays)) <= CLOSE
    checked(found)


def test_kernels_without_a_bias_have_none_to_move() -> None:
    assert unbiased(made([Given((2, 3)), Given((3, 2))], [part("MatMul", 0, 1)])) is None
    assert unbiased(made([Given((1, 4, 6, 6)), Given((4, 4, 3, 3))], [part("Conv", 0, 1)])) is None


def test_attempts_at_half_precision_end_with_one_that_keeps_as_many_bits() -> None:
    kernel = made([Given((4, 8)), Given((8, 8))], [part("MatMul", 0, 1)])
    assert [launch.description.precision for launch, _ in attempts(kernel, FP16)] == [FP16, TF32]
    assert [launch.description.precision for launch, _ in attempts(kernel, TF32)] == [TF32]


def test_a_residual_comes_before_the_bias_in_the_first_attempt() -> None:
    launch = described(block())
    assert launch is not None
    second = launch.description.operations[1]
    residual = launch.description.by_uid[second.input("IN_1")]
    assert residual.dims == (1, 8, 6, 6)


def test_equal_kernels_have_equal_keys_and_others_have_not() -> None:
    one, other = described(block()), described(block())
    assert one is not None and other is not None and one.description.key == other.description.key
    assert hash(one.description) == hash(other.description)
    keys = {launch.description.key for launch, _ in attempts(block())}
    narrow = described(block(), TF32)
    assert len(keys) == 5 and narrow is not None and narrow.description.key not in keys


def test_a_precision_that_there_is_not_is_refused() -> None:
    with pytest.raises(BackendError, match="fp8.*tf32"):
        described(block(), "fp8")


def test_weights_beyond_half_are_refused_when_they_are_laid_out() -> None:
    launch = described(block(), FP16)
    assert launch is not None
    (uid, constant), *_ = launch.constants.items()
    with pytest.raises(BackendError, match="beyond what FLOAT16 holds"):
        laid_out(np.full((8, 8, 3, 3), 1e6, np.float32), constant, launch.description.by_uid[uid])


# ── attention ────────────────────────────────────────────────────────────────────────────────────────────────────


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    result: Array = powers / powers.sum(-1, keepdims=True)
    return result


@pytest.mark.parametrize("mask", [None, (1, 1, 5, 7), (2, 1, 1, 7)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_is_what_its_formula_says(mask: tuple[int, ...] | None, causal: bool, groups: int) -> None:
    batch, heads, queries, keys, size, values = 2, 4, 5, 7, 8, 6
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(d).astype(np.float32) for d in (
        (batch, queries, heads, size), (batch, keys, groups, size), (batch, keys, groups, values)))  # fmt: skip
    added = rng.standard_normal(mask).astype(np.float32) if mask else np.zeros((1, 1, 1, 1), np.float32)
    description = attention(
        Heads.side_by_side(batch, heads, queries, size), Heads.side_by_side(batch, groups, keys, size),
        Heads.side_by_side(batch, groups, keys, values), Heads.side_by_side(batch, heads, queries, values), 0.4, causal,
        mask,
    )  # fmt: skip
    out = np.zeros(batch * queries * heads * values, np.float32)
    memories = {Q: q.reshape(-1), K: k.reshape(-1), V: v.reshape(-1), OUT: out}
    interpret(description, memories | ({MASK: added.reshape(-1)} if mask else {}))
    shared = heads // groups
    scores = 0.4 * np.einsum("bqhd,bkhd->bhqk", q, np.repeat(k, shared, 2)).astype(np.float64) + added
    if causal:
        scores = np.where(np.tril(np.ones((queries, keys), bool)), scores, -np.inf)
    wanted = np.einsum("bhqk,bkhd->bqhd", softmax(scores), np.repeat(v, shared, 2))
    assert apart(out.reshape(wanted.shape), wanted) <= CLOSE


def test_attention_of_sizes_that_do_not_fit_is_refused() -> None:
    with pytest.raises(BackendError, match="does not give"):
        attention(Heads((1, 4, 5, 8)), Heads((1, 3, 7, 8)), Heads((1, 3, 7, 8)), Heads((1, 4, 5, 8)), 1.0)


# ── corrupted graphs are caught ──────────────────────────────────────────────────────────────────────────────────


def with_setting(launch: CudnnLaunch, name: str, value: tuple[int, ...]) -> CudnnLaunch:
    first, *rest = launch.description.operations
    changed = Operation.of(first.kind, dict(first.inputs), dict(first.outputs), {**first.settings, name: value})
    return replace(launch, description=replace(launch.description, operations=(changed, *rest)))


def with_tensor(launch: CudnnLaunch, uid: int, strides: tuple[int, ...]) -> CudnnLaunch:
    tensors = tuple(replace(t, strides=strides) if t.uid == uid else t for t in launch.description.tensors)
    return replace(launch, description=replace(launch.description, tensors=tensors))


def caught(kernel: Kernel, launch: CudnnLaunch) -> bool:
    """Whether the comparison of these tests fails for a graph, or it does not run at all."""
    arrays = arrays_of(kernel)
    try:
        return apart(by_graph(kernel, launch, arrays), by_definition(kernel, arrays)) > 100 * CLOSE
    except BackendError:
        return True


@pytest.mark.parametrize("name, value", [
    ("pre_padding", (1, 2)), ("pre_padding", (2, 1)), ("stride", (1, 2)), ("dilation", (2, 1)),
])  # fmt: skip
def test_a_wrong_attribute_is_caught(name: str, value: tuple[int, ...]) -> None:
    kernel = made([Given((1, 4, 8, 8)), Given((4, 4, 3, 3))], [part("Conv", 0, 1, pads=(1, 1, 1, 1))])
    launch = described(kernel)
    assert launch is not None and not caught(kernel, launch)
    assert caught(kernel, with_setting(launch, name, value))


def test_pads_on_the_wrong_side_are_caught() -> None:
    kernel = made([Given((1, 4, 8, 8)), Given((4, 4, 3, 3))], [part("Conv", 0, 1, pads=(2, 1, 0, 1))])
    launch = described(kernel)
    assert launch is not None and not caught(kernel, launch)
    turned = with_setting(with_setting(launch, "pre_padding", (0, 1)), "post_padding", (2, 1))
    assert caught(kernel, turned)


@pytest.mark.parametrize("role", ["image", "weight"])
def test_wrong_strides_are_caught(role: str) -> None:
    kernel = made([Given((1, 4, 4, 4)), Given((4, 4, 4, 4))], [part("Conv", 0, 1, pads=(1, 1, 1, 1))])
    launch = described(kernel)
    assert launch is not None and not caught(kernel, launch)
    uid = launch.description.operations[0].input(role)
    assert caught(kernel, with_tensor(launch, uid, (64, 16, 1, 4)))
    assert caught(kernel, with_tensor(launch, uid, (64, 1, 16, 4)))


def test_wrong_strides_of_the_result_are_caught() -> None:
    kernel = made([Given((1, 4, 4, 4)), Given((4, 4, 3, 3))], [part("Conv", 0, 1, pads=(1, 1, 1, 1))])
    launch = described(kernel)
    assert launch is not None
    assert caught(kernel, with_tensor(launch, launch.description.operations[-1].output, (64, 1, 16, 4)))


def test_an_epilogue_in_the_wrong_order_is_caught() -> None:
    operands = [Given((1, 4, 6, 6)), Given((4, 4, 3, 3)), Given((1, 4, 6, 6))]
    parts = [part("Conv", 0, 1, pads=(1, 1, 1, 1)), part("Add", -1, 2), part("Relu", -1)]
    kernel = made(operands, parts)
    turned = described(made(operands, [parts[0], parts[2], parts[1]]))
    assert turned is not None and caught(kernel, turned)


@pytest.mark.parametrize("name", ["Sub", "Div", "Pow"])
def test_arguments_the_wrong_way_round_are_caught(name: str) -> None:
    operands = [Given((2, 3, 4)), Given((2, 3, 4))]
    kernel, turned = made(operands, [part(name, 0, 1)]), described(made(operands, [part(name, 1, 0)]))
    assert turned is not None
    bound = {uid: p for uid, p in turned.arguments.items()}
    arrays = arrays_of(kernel, positive=True)
    assert apart(by_graph(kernel, replace(turned, arguments=bound), arrays), by_definition(kernel, arrays)) > 1e-3


# ── graphs that are none ─────────────────────────────────────────────────────────────────────────────────────────


def one(uid: int, virtual: bool = False) -> Tensor:
    return Tensor(uid, (1, 2, 3), (6, 3, 1), DType.FLOAT, virtual)


def relu(source: int, target: int) -> Operation:
    return Operation.of("pointwise", {"IN_0": source}, {"OUT_0": target}, {"mode": "relu"})


@pytest.mark.parametrize("tensors, operations, match", [
    ((one(1), one(1)), (), "one uid"),
    ((one(1), one(2)), (relu(3, 2),), "not there yet"),
    ((one(1), one(2)), (relu(1, 2), relu(1, 2)), "twice"),
    ((one(1), one(2, True)), (), "nothing makes"),
    ((one(1), one(2, True), one(3)), (relu(2, 3), relu(1, 2)), "not there yet"),
    ((Tensor(1, (2, 3), (1,), DType.FLOAT),), (), "do not fit"),
])  # fmt: skip
def test_a_graph_whose_operations_do_not_fit_its_tensors_is_refused(
    tensors: tuple[Tensor, ...], operations: tuple[Operation, ...], match: str
) -> None:
    with pytest.raises(BackendError, match=match):
        Description(tensors, operations)


def test_memory_that_is_missing_or_too_short_is_refused() -> None:
    graph = Description((one(1), one(2)), (relu(1, 2),))
    with pytest.raises(BackendError, match="no memory"):
        interpret(graph, {1: np.zeros(6, np.float32)})
    with pytest.raises(BackendError, match="does not hold"):
        viewed(one(1), np.zeros(5, np.float32))
    with pytest.raises(BackendError, match="does not hold"):
        viewed(one(1), np.zeros(6, np.float64))


def test_parts_are_what_the_cases_say() -> None:
    assert part("Clip", -1, min=0.0) == Part("Clip", (-1,), (("min", 0.0),))
