"""Quantised arithmetic. Its meaning, rounding and saturation included, is that of onnx.reference."""

from __future__ import annotations

from taso.graph.errors import ShapeError
from taso.graph.operator import (
    Attrs,
    AttrValue,
    FileNode,
    InferFunction,
    Operator,
    Reading,
    Required,
    Spelling,
    Trait,
    Types,
    Unmodelled,
    register,
)  # fmt: skip
from taso.graph.ops.common import (
    element_type,
    is_given,
    normal_axis,
    only_attributes,
    present,
    require_equal,
    writes_changed,
)  # fmt: skip
from taso.graph.ops.linear import CONV, MATMUL, conv_settings
from taso.graph.ops.windows import read_window
from taso.graph.types import Dim, DType, TensorType, ceil_div

_TYPED = frozenset({Trait.TYPED})

# ── QuantizeLinear, DequantizeLinear: one scale, one for each element of an axis, or one for each block of it ─────


def _check_scale(x: TensorType, scale: TensorType, attrs: Attrs, op: str) -> None:
    """Raises `ShapeError` for a scale that is neither one number, nor fits the axis, nor its blocks."""
    if scale.rank == 0 or scale.dims == (1,) and attrs.int("block_size") == 0:
        return
    axis, block = normal_axis(attrs.int("axis"), x.rank, op), attrs.int("block_size")
    if not block:
        if scale.rank != 1:
            raise ShapeError(f"{op}: a scale of shape {scale} needs a block_size")
        require_equal(scale.dims[0], x.dims[axis], op, f"number of scales and size of axis {axis}")
        return
    if scale.rank != x.rank:
        raise ShapeError(f"{op}: the scales of blocks must have the rank of the input {x}, but are {scale}")
    for a, (s, d) in enumerate(zip(scale.dims, x.dims, strict=True)):
        wanted: Dim = ceil_div(d, block) if a == axis else d
        require_equal(s, wanted, op, f"number of scales along axis {a} and of what they scale")


def _check_zero(types: Types, op: str) -> None:
    if not is_given(types, 2) or all(present(types, i, op).dims in ((), (1,)) for i in (1, 2)):
        return
    if present(types, 2, op).dims != present(types, 1, op).dims:
        raise ShapeError(f"{op}: the zero point {types[2]} must have the shape of the scale {types[1]}")


def _quantize_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    op = "QuantizeLinear"
    x = present(types, 0, op)
    _check_scale(x, present(types, 1, op), attrs, op)
    _check_zero(types, op)
    dtype = attrs.dtype("output_dtype") if attrs["output_dtype"] is not None else DType.UINT8
    return (TensorType(present(types, 2, op).dtype if is_given(types, 2) else dtype, x.dims),)


def _read_linear(node: FileNode) -> Reading:
    attrs = dict(node.attrs)
    for name in ("output_dtype", "precision"):
        if name in attrs:
            attrs[name] = element_type(attrs[name], node.op_type)
    return Reading(attrs, (0, 1, 2) if node.has(2) else (0, 1))


_SINCE = {"axis": 13, "saturate": 19, "block_size": 21, "output_dtype": 21, "precision": 23}
_QUANTIZE: dict[str, AttrValue | Required] = {
    "axis": 1, "block_size": 0, "output_dtype": None, "precision": None, "saturate": 1,
}  # fmt: skip
QUANTIZE_LINEAR = register(
    Operator(
        "QuantizeLinear", _quantize_type, _QUANTIZE, _TYPED, arity=(2, 3), read=_read_linear, since=10,
        write=writes_changed("QuantizeLinear", _QUANTIZE, _SINCE),
    )
)  # fmt: skip


def _dequantize_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    op = "DequantizeLinear"
    x, scale = present(types, 0, op), present(types, 1, op)
    _check_scale(x, scale, attrs, op)
    _check_zero(types, op)
    if is_given(types, 2) and present(types, 2, op).dtype is not x.dtype:
        raise ShapeError(f"{op}: the zero point must be {x.dtype.name} as the input is")
    return (TensorType(attrs.dtype("output_dtype") if attrs["output_dtype"] is not None else scale.dtype, x.dims),)


_DEQUANTIZE: dict[str, AttrValue | Required] = {"axis": 1, "block_size": 0, "output_dtype": None}
DEQUANTIZE_LINEAR = register(
    Operator(
        "DequantizeLinear", _dequantize_type, _DEQUANTIZE, _TYPED, arity=(2, 3), read=_read_linear, since=10,
        write=writes_changed("DequantizeLinear", _DEQUANTIZE, {**_SINCE, "output_dtype": 23}),
    )
)  # fmt: skip


def _dynamic_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, "DynamicQuantizeLinear")
    return TensorType(DType.UINT8, x.dims), TensorType(DType.FLOAT, ()), TensorType(DType.UINT8, ())


DYNAMIC_QUANTIZE_LINEAR = register(Operator("DynamicQuantizeLinear", _dynamic_type, {}, _TYPED, since=11))

# ── products of integers ─────────────────────────────────────────────────────────────────────────────────────────


def _product(a: TensorType, b: TensorType, result: DType) -> TensorType:
    """The type of a matrix product of two tensors whose element types may differ."""
    (found,) = MATMUL.types_of((a, TensorType(a.dtype, b.shape)), MATMUL.complete({}))
    return TensorType(result, found.dims)


def _matmul_integer_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (_product(present(types, 0, "MatMulInteger"), present(types, 1, "MatMulInteger"), DType.INT32),)


MATMUL_INTEGER = register(Operator("MatMulInteger", _matmul_integer_type, arity=(2, 4), since=10))


def _qlinear_matmul_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    a, b, zero = (present(types, i, "QLinearMatMul") for i in (0, 3, 7))
    return (_product(a, b, zero.dtype),)


QLINEAR_MATMUL = register(Operator("QLinearMatMul", _qlinear_matmul_type, {}, _TYPED, arity=(8, 8), since=10))

# ── convolutions of integers: attributes as those of Conv ────────────────────────────────────────────────────────


def _convolution(x: TensorType, w: TensorType, bias: TensorType | None, attrs: Attrs, result: DType) -> TensorType:
    given = (x, TensorType(x.dtype, w.shape), *(() if bias is None else (TensorType(x.dtype, bias.shape),)))
    (found,) = CONV.types_of(given, CONV.complete(attrs))
    return TensorType(result, found.dims)


def _read_convolution(node: FileNode, weight_at: int) -> Reading:
    only_attributes(node, "auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    weight = node.type(weight_at)
    window = weight.with_shape(weight.dims[2:])
    if not window.static or node.ints("kernel_shape") not in (None, window.static_shape):
        raise Unmodelled(f"{node.op_type} with another window than that of its weight")
    settings = read_window(node, window.static_shape)
    del settings["kernel_shape"]
    inputs = tuple(i if node.has(i) else None for i in range(len(node.types)))
    return Reading({**settings, "group": node.attrs.get("group", 1)}, inputs)


def _write_convolution(op: str, weight_at: int, attrs: Attrs, types: Types) -> Spelling:
    weight = present(types, weight_at, op)
    window = weight.with_shape(weight.dims[2:]).static_shape
    inputs = tuple(i if t is not None else None for i, t in enumerate(types))
    return Spelling(op, {**conv_settings(weight, attrs), "kernel_shape": window}, inputs)


def _integer_convolution(name: str, infer: InferFunction, weight_at: int, arity: tuple[int, int]) -> Operator:
    return register(
        Operator(
            name, infer, {"strides": (), "pads": (), "dilations": (), "group": 1}, _TYPED, arity=arity, since=10,
            read=lambda node: _read_convolution(node, weight_at),
            write=lambda attrs, types, opset: _write_convolution(name, weight_at, attrs, types),
        )
    )  # fmt: skip


def _conv_integer_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, w = present(types, 0, "ConvInteger"), present(types, 1, "ConvInteger")
    return (_convolution(x, w, None, attrs, DType.INT32),)


CONV_INTEGER = _integer_convolution("ConvInteger", _conv_integer_type, 1, (2, 4))


def _qlinear_conv_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, w, zero = (present(types, i, "QLinearConv") for i in (0, 3, 7))
    bias = present(types, 8, "QLinearConv") if is_given(types, 8) else None
    return (_convolution(x, w, bias, attrs, zero.dtype),)


QLINEAR_CONV = _integer_convolution("QLinearConv", _qlinear_conv_type, 3, (8, 9))
