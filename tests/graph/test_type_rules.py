"""The type rule of every operator agrees with ONNX's inference and with what onnx.reference computes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import models
import numpy as np
import onnx
import onnx.checker
import onnx.defs
import onnx.parser
import onnx.shape_inference
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, ValueInfoProto, helper

from taso.graph.errors import GraphError, ShapeError
from taso.graph.evaluate import evaluate_graph
from taso.graph.onnx_export import export
from taso.graph.onnx_import import load
from taso.graph.onnx_protos import type_proto
from taso.graph.operator import REGISTRY, AttrValue, Trait
from taso.graph.types import DType, SymDim, TensorType

NEWEST = onnx.defs.onnx_opset_version()


@dataclass(frozen=True)
class Row:
    """One node as ONNX text, the inputs (and constants) it reads, and the opset it is meant in."""

    node: str
    inputs: str
    opset: int = NEWEST
    constants: str = ""

    @property
    def op(self) -> str:
        return onnx.parser.parse_node(self.node).op_type

    def __str__(self) -> str:
        return f"{self.node} of {self.inputs} at {self.opset}"

    def model(self) -> ModelProto:
        """The node as a model whose outputs state what ONNX infers of them."""
        node = onnx.parser.parse_node(self.node)
        constants = f"<{self.constants}>" if self.constants else ""
        graph = onnx.parser.parse_graph(f"g ({self.inputs}) => () {constants} {{}}")
        graph.node.append(node)
        graph.output.extend(ValueInfoProto(name=name) for name in node.output if name)
        opsets = [helper.make_opsetid("", self.opset)]
        proto = helper.make_model(graph, opset_imports=opsets, ir_version=10 if self.opset > 10 else 8)
        # inference of this one's body does not pass its own strict mode (onnx 1.23)
        strict = node.op_type != "MeanVarianceNormalization"
        return onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=strict, data_prop=True)


def rows(nodes: str, inputs: str, *opsets: int, constants: str = "") -> list[Row]:
    """A row for each of the lines of `nodes` at each opset."""
    lines = [line.strip() for line in nodes.strip().splitlines()]
    return [Row(line, inputs, opset, constants) for line in lines for opset in opsets or (NEWEST,)]


def unary(names: str, *opsets: int, dtype: str = "float") -> list[Row]:
    lines = "\n".join(f"y = {name}(x)" for name in names.split())
    return [*rows(lines, f"{dtype}[2,3] x", *opsets), *rows(lines, f"{dtype} x"), *rows(lines, f"{dtype}[N,1,M] x")]


def binary(names: str, *opsets: int, dtype: str = "float", attributes: str = "") -> list[Row]:
    lines = "\n".join(f"y = {name}{attributes}(a, b)" for name in names.split())
    shapes = ((f"{dtype}[2,3] a, {dtype}[2,3] b"), f"{dtype}[4,1,3] a, {dtype}[2,1] b", f"{dtype}[N,3] a, {dtype} b")
    return [row for shape in shapes for row in rows(lines, shape, *opsets)]


ELEMENTWISE = [
    *unary("Relu Sigmoid Tanh Exp Log Sqrt Neg Abs Reciprocal Floor Ceil Softplus Softsign", 7, NEWEST),
    *unary("Sin Cos Tan Asin Acos Atan", 7, NEWEST), *unary("Sinh Cosh Asinh Acosh Atanh Erf Sign", 9, NEWEST),
    *unary("Round", 11), *unary("Mish", 18, 22), *unary("HardSwish", 14, 22), *unary("Gelu", 20), *unary("Swish", 24),
    *unary("Elu Selu LeakyRelu HardSigmoid", 7, 22), *unary("Celu", 12), *unary("ThresholdedRelu", 10, 22),
    *unary("Shrink", 9), *unary("Shrink", dtype="int32"), *unary("IsNaN", 9, 20), *unary("IsInf", 10, 20),
    *unary("Not", 7, dtype="bool"), *unary("BitwiseNot", 18, dtype="uint8"), *unary("Identity Dropout", 7, 22),
    *rows("y = IsInf<detect_negative=0>(x)\ny = Celu<alpha=2.0>(x)\ny = Shrink<bias=1.5, lambd=0.25>(x)\n"
          "y = Swish<alpha=0.5>(x)\ny = Gelu<approximate=\"tanh\">(x)\ny = Clip(x, low)\ny = Clip(x, \"\", low)",
          "float[2,3] x", NEWEST, constants="float low = {0.5}"),
    *rows("y = Clip<min=0.0, max=1.0>(x)", "float[2,3] x", 6, 10),
    *binary("Add Sub Mul Div", 7, 13, 14), *binary("Add Sub Mul Div", 14, dtype="int32"), *binary("Pow", 7, 15),
    *binary("Max Min", 8, 13), *binary("Sum Mean", 8, 13), *binary("Max Min", 13, dtype="int64"),
    *binary("Equal Greater Less", 11, 13), *binary("GreaterOrEqual LessOrEqual", 12, 16),
    *binary("And Or Xor", 7, dtype="bool"), *binary("BitwiseAnd BitwiseOr BitwiseXor", 18, dtype="int32"),
    *binary("BitShift", 11, dtype="uint32", attributes='<direction="LEFT">'),
    *binary("Mod", 10, 13, dtype="int64"), *binary("Mod", 13, attributes="<fmod=1>"),
    *rows("y = PRelu(x, s)", "float[2,3,4] x, float[3,1] s", 9, 16),
    *rows("y = Where(c, a, b)", "bool[3] c, float[2,1] a, float b", 9, 16),
    *rows("y = Where(c, a, b)", "bool[3] c, int64[2,M] a, int64[3] b", 16),
    *rows("y = SwiGLU(a, b)", "float[2,3] a, float[2,3] b", 28),
    *rows("y = SwiGLU(a, b)", "float[N,3] a, float[N,3] b", 28),
    *rows("y = Cast<to=10>(x)\ny = Cast<to=7>(x)", "float[2,3] x", 9, 13, 19, 24),
    *rows("y = Cast<to=16>(x)", "float[2,3] x", 13),
    *rows("y = Cast<to=17, saturate=0>(x)", "float[2,3] x", 19, 24), *rows("y = Cast<to=1>(x)", "bool[2] x", 9),
    *rows("y = Cast<to=24, round_mode=\"down\">(x)", "float[2,3] x", 24),
    *rows("y = MeanVarianceNormalization<axes=[0, -1]>(x)", "float[2,3] x", 13),
    *rows("y = CastLike(x, t)", "float[2,3] x, float16[5] t", 15, 19, 24),
    *rows("y = BitCast<to=6>(x)", "float[2,3] x", 26),
]

REDUCTIONS = [
    *rows("""
        y = ReduceSum(x, axes)
        y = ReduceSum<keepdims=0>(x, axes)
        y = ReduceSum(x)""", "float[2,3,4] x", 13, NEWEST, constants="int64[2] axes = {0, -1}"),
    *[row for name in ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
                       "ReduceLogSum", "ReduceLogSumExp") for row in [
        *rows(f"y = {name}<axes=[1]>(x)\ny = {name}<axes=[-1, 0], keepdims=0>(x)\ny = {name}(x)",
              "float[2,3,4] x", 7, 13),
        *rows(f"y = {name}(x, axes)\ny = {name}<keepdims=0>(x, axes)", "float[2,3,N] x", 18,
              constants="int64[1] axes = {1}"),
    ]],
    *rows("y = ArgMax<axis=1>(x)\ny = ArgMin<axis=-1, keepdims=0>(x)", "float[2,3,N] x", 7, 13),
    *rows("y = ArgMax<axis=0, select_last_index=1>(x)\ny = ArgMin<select_last_index=1>(x)", "float[2,3] x", 12, 13),
    *rows("y = CumSum(x, axis)\ny = CumSum<exclusive=1, reverse=1>(x, axis)", "float[2,3] x, int64 axis", 11, 14),
    *rows("y = CumProd(x, axis)\ny = CumProd<exclusive=1, reverse=1>(x, axis)", "float[2,3] x, int64 axis", 26),
    *rows("v, i = TopK<axis=1>(x, k)\nv, i = TopK(x, k)", "float[3,5,4] x", 10, 11, 24, constants="int64[1] k = {2}"),
    *rows("v, i = TopK<axis=0, largest=0>(x, k)", "float[3,N] x", 11, 24, constants="int64[1] k = {2}"),
    *rows("v, i = TopK<k=2>(x)", "float[3,5] x", 7, 9),
]

PRODUCTS = [
    *rows("y = MatMul(a, b)", "float[2,1,3,4] a, float[5,4,6] b", 9, 13),
    *rows("y = MatMul(a, b)", "float[3] a, float[2,3,4] b", 13),
    *rows("y = MatMul(a, b)", "float[2,3] a, float[3] b", 13),
    *rows("y = MatMul(a, b)", "float[N,3] a, float[3,M] b", 13),
    *rows("y = Gemm<alpha=0.5, transA=1>(a, b, c)\ny = Gemm<transA=1>(a, b)", "float[3,2] a, float[3,4] b, float[4] c",
          11, 13),
    *rows("y = Einsum<equation=\"ij,jk->ik\">(a, b)\ny = Einsum<equation=\"ij,jk\">(a, b)\n"
          "y = Einsum<equation=\"ij, jk -> \">(a, b)", "float[2,3] a, float[3,4] b", 12, 28),
    *rows("y = Einsum<equation=\"...ij,...jk->...ik\">(a, b)", "float[5,2,3] a, float[1,3,4] b", 12),
    *rows("y = Einsum<equation=\"bii->bi\">(a)\ny = Einsum<equation=\"bij->b\">(a)\n"
          "y = Einsum<equation=\"...i->...\">(a)",
          "float[2,3,3] a", 12),
    *rows("y = Einsum<equation=\"i,j,k->kji\">(a, b, c)", "float[2] a, float[3] b, float[4] c", 12),
    *rows("y = Einsum<equation=\"bij,bjk->bik\">(a, b)", "float[N,2,3] a, float[N,3,M] b", 12),
    *rows("y = Conv<pads=[1,0,2,1], strides=[2,1]>(x, w, b)\ny = Conv<auto_pad=\"SAME_UPPER\", strides=[2,2]>(x, w)\n"
          "y = Conv<dilations=[2,1]>(x, w)", "float[2,4,8,9] x, float[6,4,3,3] w, float[6] b", 7, 11, 22),
    *rows("y = Conv<group=2>(x, w)", "float[N,4,9] x, float[6,2,3] w", 11),
    *rows("y = Conv(x, w)", "float[1,2,5,6,7] x, float[3,2,2,3,2] w", 11),
    *rows("""
        y = ConvTranspose(x, w, b)
        y = ConvTranspose<strides=[3,2], output_padding=[1,1], pads=[1,0,2,1]>(x, w)
        y = ConvTranspose<dilations=[2,1]>(x, w)
        y = ConvTranspose<strides=[3,2], output_shape=[12,8]>(x, w)
        y = ConvTranspose<auto_pad="SAME_UPPER", strides=[2,2]>(x, w)
        y = ConvTranspose<auto_pad="SAME_LOWER", strides=[2,2]>(x, w)
        y = ConvTranspose<auto_pad="VALID">(x, w)""",
          "float[2,4,4,5] x, float[4,3,3,3] w, float[3] b", 9, 11, 22),
    *rows("y = ConvTranspose<group=2, strides=[2]>(x, w)", "float[N,4,5] x, float[4,3,3] w", 11),
    *rows("y = DeformConv<kernel_shape=[2,2], pads=[1,1,0,0]>(x, w, o)",
          "float[1,1,3,3] x, float[1,1,2,2] w, float[1,8,3,3] o",
          19, 22),
    *rows("y = DeformConv<offset_group=2>(x, w, o, b, m)",
          "float[1,2,3,3] x, float[1,2,2,2] w, float[1,16,2,2] o, float[1] b, float[1,8,2,2] m", 19),
]

POOLS = [
    *[row for name in ("MaxPool", "AveragePool", "LpPool") for row in [
        *rows(f"y = {name}<kernel_shape=[3,2]>(x)\ny = {name}<kernel_shape=[3,3], strides=[2,2], pads=[1,0,1,0]>(x)\n"
              f"y = {name}<kernel_shape=[3,3], auto_pad=\"SAME_LOWER\", strides=[2,2]>(x)", "float[2,3,9,8] x", 8, 22),
        *rows(f"y = {name}<kernel_shape=[3,2], strides=[2,3], ceil_mode=1>(x)", "float[2,3,8,8] x", 22),
        *rows(f"y = {name}<kernel_shape=[3], dilations=[2]>(x)", "float[2,3,9] x", 22),
    ]],
    *rows("y = AveragePool<kernel_shape=[3], pads=[1,1], count_include_pad=1>(x)\ny = LpPool<kernel_shape=[3], p=3>(x)",
          "float[2,3,9] x", 11, 22),
    *rows("y = GlobalAveragePool(x)\ny = GlobalMaxPool(x)", "float[2,3,4,5] x", 7, 22),
    *rows("y = GlobalAveragePool(x)\ny = GlobalMaxPool(x)\ny = GlobalLpPool(x)", "float[N,3,H,5] x", 21),
    *rows("y = GlobalLpPool(x)\ny = GlobalLpPool<p=1>(x)", "float[2,3,4,5] x", 7, 21),
]

NORMALIZATIONS = [
    *rows("y = BatchNormalization(x, s, b, m, v)", "float[2,3,4] x, float[3] s, float[3] b, float[3] m, float[3] v",
          9, 15),
    *rows("y = InstanceNormalization(x, s, b)\ny = InstanceNormalization<epsilon=0.5>(x, s, b)",
          "float[2,3,4,5] x, float[3] s, float[3] b", 7, 22),
    *rows("y = GroupNormalization<num_groups=2>(x, s, b)\ny = GroupNormalization<num_groups=4, epsilon=0.5>(x, s, b)",
          "float[2,4,3,5] x, float[4] s, float[4] b", 21),
    *rows("y = LayerNormalization(x, s)\ny = LayerNormalization<epsilon=0.5>(x, s, b)",
          "float[N,3,4] x, float[4] s, float[4] b", 17),
    *rows("y = LayerNormalization<axis=1>(x, s)", "float[2,3,4] x, float[3,4] s", 17),
    *rows("y = RMSNormalization(x, s)\ny = RMSNormalization<epsilon=0.5, axis=1>(x, s)", "float[2,3,4] x, float[4] s",
          23),
    *rows("y = RMSNormalization<axis=-2>(x, s)", "float[N,3,4] x, float[3,4] s", 23),
    *rows("y = MeanVarianceNormalization(x)\ny = MeanVarianceNormalization<axes=[1, 2]>(x)", "float[2,3,4,5] x", 13),
    *rows("y = LpNormalization(x)\ny = LpNormalization<axis=1, p=1>(x)", "float[2,3,4] x", 7, 22),
    *rows("y = LRN<size=3>(x)\ny = LRN<size=5, alpha=0.1, beta=0.5, bias=2.0>(x)", "float[2,5,3,4] x", 7, 13),
    *rows("y = Softmax(x)\ny = LogSoftmax(x)\ny = Softmax<axis=0>(x)", "float[2,3] x", 7, 11, 13),
    *rows("y = Hardmax(x)", "float[2,3] x", 7, 11, 13), *rows("y = Hardmax<axis=0>(x)", "float[2,3] x", 13),
    *rows("l = NegativeLogLikelihoodLoss(x, t)\n"
          "l = NegativeLogLikelihoodLoss<reduction=\"none\", ignore_index=1>(x, t, w)",
          "float[2,3,4] x, int64[2,4] t, float[3] w", 12, 13, 22),
    *rows("l = SoftmaxCrossEntropyLoss(x, t)\nl, p = SoftmaxCrossEntropyLoss<reduction=\"sum\">(x, t, w)\n"
          "l = SoftmaxCrossEntropyLoss<reduction=\"none\">(x, t)", "float[2,3,4] x, int64[2,4] t, float[3] w", 12, 13),
]

MOVES = [
    *rows("y = Concat<axis=1>(a, b)\ny = Concat<axis=-2>(a, b)", "float[2,3,4] a, float[2,5,4] b", 7, 13),
    *rows("y = Concat<axis=0>(a, b)", "float[N,3] a, float[2,3] b", 13),
    *rows("a, b = Split<axis=1, split=[1,3]>(x)\na, b = Split<axis=-1>(x)", "float[2,4] x", 7, 11),
    *rows("a, b = Split<axis=1>(x, s)", "float[2,4] x", 13, 18, constants="int64[2] s = {1, 3}"),
    *rows("a, b, c = Split<axis=1, num_outputs=3>(x)", "float[2,7] x", 18),
    *rows("y = Slice<starts=[1,0], ends=[3,-1]>(x)\ny = Slice<starts=[-2], ends=[100], axes=[1]>(x)", "float[4,5] x",
          7, 9),
    *rows("y = Slice(x, s, e, a, t)\ny = Slice(x, s, e)", "float[4,5] x", 10, 13,
          constants="int64[2] s = {3, 0}, int64[2] e = {-9, 4}, int64[2] a = {0, -1}, int64[2] t = {-1, 2}")[:2],
    *rows("y = Transpose(x)\ny = Transpose<perm=[1,2,0]>(x)", "float[2,N,4] x", 7, 13),
    *rows("y = Reshape(x, s)", "float[2,3,4] x", 7, 14, constants="int64[2] s = {0, -1}"),
    *rows("y = Reshape<allowzero=1>(x, s)", "float[0,3] x", 14, constants="int64[2] s = {7, 0}"),
    *rows("y = Flatten(x)\ny = Flatten<axis=0>(x)\ny = Flatten<axis=-1>(x)", "float[2,3,4] x", 11, 13),
    *rows("y = Squeeze<axes=[0,2]>(x)\ny = Squeeze(x)\ny = Unsqueeze<axes=[0,4]>(x)", "float[1,3,1] x", 7, 11),
    *rows("y = Squeeze(x, a)\ny = Unsqueeze(x, a)", "float[1,3,1] x", 13, constants="int64[2] a = {0, -1}"),
    *rows("y = Expand(x, s)", "float[3,1] x", 8, 13, constants="int64[3] s = {2, 1, 4}"),
    *rows("y = Tile(x, r)", "float[3,N] x", 7, 13, constants="int64[2] r = {2, 3}"),
    *rows("y = Pad<pads=[0,1,2,-1]>(x)\ny = Pad<pads=[0,1,2,1], mode=\"edge\">(x)", "float[3,4] x", 7, 10),
    *rows("y = Pad(x, p)\ny = Pad(x, p, v)\ny = Pad<mode=\"reflect\">(x, p)", "float[3,4] x", 11, 13, 19,
          constants="int64[4] p = {0, 1, 2, 1}, float v = {1.5}"),
    *rows("y = Pad(x, p, \"\", a)", "float[3,N] x", 18, constants="int64[2] p = {1, 2}, int64[1] a = {0}"),
    *rows("y = Gather<axis=1>(x, i)\ny = Gather(x, i)", "float[2,3] x, int64[4,5] i", 7, 13),
    *rows("y = Shape(x)", "float[2,3,4] x", 7, 13), *rows("y = Shape<start=1, end=-1>(x)", "float[2,3,4] x", 15),
    *rows("y = Size(x)", "float[2,3,4] x", 7, 13),
    *rows("y = DepthToSpace<blocksize=2>(x)", "float[2,8,3,N] x", 7, 11, 13, 28),
    *rows("y = DepthToSpace<blocksize=2, mode=\"CRD\">(x)", "float[2,8,3,4] x", 11, 13, 28),
    *rows("y = SpaceToDepth<blocksize=2>(x)", "float[2,3,4,6] x", 7, 13, 28),
    *rows("y = SpaceToDepth<blocksize=2, mode=\"CRD\">(x)", "float[2,3,4,6] x", 28),
]

INDEXING = [
    *rows("y = GatherElements<axis=1>(x, i)", "float[2,3] x, int64[2,5] i", 11, 13),
    *rows("y = GatherElements(x, i)", "float[2,N] x, int64[5,N] i", 11, 13),
    *rows("y = GatherND(x, i)", "float[2,3,4] x, int64[5,2] i", 11, 12, 13),
    *rows("y = GatherND<batch_dims=1>(x, i)", "float[2,3,4] x, int64[2,1] i", 12, 13),
    *rows("y = GatherND(x, i)", "float[2,3,N] x, int64[M,1] i", 13),
    *rows("y = ScatterElements<axis=1>(x, i, u)", "float[2,3] x, int64[2,1] i, float[2,1] u", 11, 13, 16, 18),
    *rows("y = ScatterElements<axis=1, reduction=\"add\">(x, i, u)", "float[2,3] x, int64[2,1] i, float[2,1] u",
          16, 18),
    *rows("y = ScatterElements<reduction=\"max\">(x, i, u)", "float[2,3] x, int64[1,3] i, float[1,3] u", 18),
    *rows("y = ScatterND(x, i, u)", "float[4,3] x, int64[2,1] i, float[2,3] u", 11, 13, 16, 18),
    *rows("y = ScatterND<reduction=\"mul\">(x, i, u)", "float[4,3] x, int64[2,1] i, float[2,3] u", 16, 18),
    *rows("y = ScatterND<reduction=\"min\">(x, i, u)", "float[4,N] x, int64[2,1] i, float[2,N] u", 18),
    *rows("y = TensorScatter(c, u)\ny = TensorScatter<mode=\"circular\">(c, u, w)",
          "float[2,5,3] c, float[2,2,3] u, int64[2] w", 24),
    *rows("y = OneHot(i, d, v)\ny = OneHot<axis=0>(i, d, v)", "int64[2,3] i, float[2] v",
          9, 11, constants="int64 d = {4}"),
    *rows("y = OneHot<axis=1>(i, d, v)", "int64[N,3] i, int32[2] v", 11, constants="float[1] d = {4.0}"),
    *rows("y = Trilu(x)\ny = Trilu<upper=0>(x, k)", "float[2,3,N] x, int64 k", 14),
    *rows("y = EyeLike(x)\ny = EyeLike<dtype=7, k=1>(x)", "float[3,4] x", 9, 22),
    *rows("y = Range(a, b, c)", "", 11, constants="float a = {1.0}, float b = {4.5}, float c = {0.5}"),
    *rows("y = Range(a, b, c)", "", 11, 27, constants="int64 a = {10}, int64 b = {1}, int64 c = {-3}"),
    *rows("y = ReverseSequence(x, l)\ny = ReverseSequence<time_axis=1, batch_axis=0>(x, l)",
          "float[4,4,2] x, int64[4] l", 10),
]

SPATIAL = [
    *rows('y = Resize<mode="linear", coordinate_transformation_mode="tf_crop_and_resize", '
          'extrapolation_value=2.0>(x, r, "", z)', "float[1,2,4,5] x", 13, 18, 19,
          constants="int64[4] z = {1, 2, 3, 9}, float[8] r = {0, 0, 0.2, 0.3, 1, 1, 1.3, 0.9}"),
    *rows("y = Resize(x, s)", "float[1,2,4,5] x", 10, constants="float[4] s = {1.0, 1.0, 2.0, 1.5}"),
    *rows("""
        y = Resize(x, r, s)
        y = Resize<mode="linear", coordinate_transformation_mode="pytorch_half_pixel">(x, r, s)
        y = Resize<mode="cubic", cubic_coeff_a=-0.5, exclude_outside=1>(x, r, s)
        y = Resize<nearest_mode="floor", coordinate_transformation_mode="asymmetric">(x, r, e, z)""",
          "float[1,2,4,5] x", 11, constants="float[0] r = {}, float[0] e = {}, float[4] s = {1.0, 1.0, 2.0, 0.7}, "
          "int64[4] z = {1, 2, 3, 9}"),
    *rows("""
        y = Resize(x, "", s)
        y = Resize<mode="linear">(x, "", "", z)
        y = Resize<mode="linear", coordinate_transformation_mode="tf_crop_and_resize">(x, r, "", z)""",
          "float[1,2,4,5] x", 13, 18, 19, constants="float[4] s = {1.0, 1.0, 2.0, 0.7}, int64[4] z = {1, 2, 3, 9}, "
          "float[8] r = {0, 0, 0.2, 0.3, 1, 1, 0.8, 0.9}"),
    *rows("""
        y = Resize<axes=[3, 2]>(x, "", s)
        y = Resize<axes=[2, 3], keep_aspect_ratio_policy="not_larger">(x, "", "", z)
        y = Resize<axes=[2, 3], keep_aspect_ratio_policy="not_smaller">(x, "", "", z)
        y = Resize<mode="linear", antialias=1, axes=[2, 3]>(x, "", s)""",
          "float[1,2,4,5] x", 18, 19, constants="float[2] s = {0.5, 0.6}, int64[2] z = {7, 8}"),
    *rows("y = GridSample(x, g)\ny = GridSample<mode=\"nearest\", padding_mode=\"border\", align_corners=1>(x, g)",
          "float[2,3,4,5] x, float[2,6,7,2] g", 16, 20, 22),
    *rows("y = GridSample<mode=\"bicubic\">(x, g)", "float[2,3,4,5] x, float[2,6,7,2] g", 16),
    *rows("y = GridSample<mode=\"cubic\">(x, g)", "float[2,3,4,5] x, float[2,6,7,2] g", 20),
    *rows("y = RoiAlign<output_height=2, output_width=3>(x, r, b)\n"
          "y = RoiAlign<mode=\"max\", sampling_ratio=2>(x, r, b)",
          "float[2,2,5,6] x, float[3,4] r, int64[3] b", 10, 16, 22),
    *rows("y = RoiAlign<coordinate_transformation_mode=\"output_half_pixel\">(x, r, b)",
          "float[2,2,5,6] x, float[3,4] r, int64[3] b", 16, 22),
    *rows("y = MaxRoiPool<pooled_shape=[2,3]>(x, r)", "float[2,2,5,6] x, float[4,5] r", 7, 21),
]

QUANTIZED = [
    *rows("y = QuantizeLinear(x, s)\ny = QuantizeLinear(x, s, z)", "float[2,3] x, float s, int8 z", 10, 13, 19, 21, 23),
    *rows("y = QuantizeLinear<axis=0>(x, s, z)", "float[2,3] x, float[2] s, uint8[2] z", 13, 19, 21),
    *rows("y = QuantizeLinear<output_dtype=5>(x, s)\ny = QuantizeLinear<block_size=2, axis=1>(x, b)",
          "float[2,4] x, float s, float[2,2] b", 21, 23),
    *rows("y = QuantizeLinear<saturate=0>(x, s, z)", "float[2,4] x, float s, float8e4m3fn z", 19, 21),
    *rows("y = DequantizeLinear(x, s)\ny = DequantizeLinear(x, s, z)", "uint8[2,3] x, float s, uint8 z",
          10, 13, 19, 21, 23),
    *rows("y = DequantizeLinear<axis=-2>(x, s, z)", "int8[2,3] x, float[2] s, int8[2] z", 13, 21),
    *rows("y = DequantizeLinear<block_size=2, axis=1>(x, s)", "int8[2,4] x, float16[2,2] s", 21, 23),
    *rows("y = DequantizeLinear<output_dtype=10>(x, s)", "int8[2,4] x, float s", 23),
    *rows("y, s, z = DynamicQuantizeLinear(x)", "float[2,N] x", 11),
    *rows("y = MatMulInteger(a, b)\ny = MatMulInteger(a, b, p, q)", "uint8[5,2,3] a, int8[3,4] b, uint8 p, int8 q", 10),
    *rows("y = QLinearMatMul(a, s, z, b, t, w, u, v)",
          "uint8[2,3] a, float s, uint8 z, int8[3,4] b, float t, int8 w, float u, int8 v", 10, 21),
    *rows("y = ConvInteger(x, w)\ny = ConvInteger<pads=[1,1,0,0], strides=[2,1]>(x, w, p)",
          "uint8[1,2,6,6] x, uint8[3,2,3,3] w, uint8 p", 10),
    *rows("y = QLinearConv(x, s, z, w, t, v, u, q)\ny = QLinearConv<pads=[1,1,1,1]>(x, s, z, w, t, v, u, q, b)",
          "uint8[1,2,6,6] x, float s, uint8 z, uint8[3,2,3,3] w, float t, uint8 v, float u, uint8 q, int32[3] b", 10),
]  # fmt: skip


def recurrent(name: str, gates: int, outputs: str, inputs: str, changed: str) -> list[Row]:
    """Rows of a recurrent operator; `inputs` are all that it takes, `changed` attributes unlike the defaults."""
    one = (
        f"float[5,2,3] x, float[1,{4 * gates},3] w, float[1,{4 * gates},4] r, float[1,{8 * gates}] b, int32[2] n, "
        "float[1,2,4] h0, float[1,2,4] c0, float[1,12] p"
    )
    two = f"float[5,2,3] x, float[2,{4 * gates},3] w, float[2,{4 * gates},4] r, int32[2] n"
    state = outputs.split(", ")[1]
    return [
        *rows(f"""
            {outputs} = {name}<hidden_size=4>(x, w, r)
            {outputs} = {name}<hidden_size=4>({inputs})
            {outputs} = {name}<hidden_size=4, direction="reverse">({inputs})
            {outputs} = {name}<hidden_size=4, {changed}>({inputs})
            y = {name}<hidden_size=4>(x, w, r, b)
            "", {state} = {name}<hidden_size=4>(x, w, r)""", one, 7, 14, 22),
        *rows(f'{outputs} = {name}<hidden_size=4, direction="bidirectional">(x, w, r, "", n)', two, 7, 14, 22),
        *rows(f"{outputs} = {name}<hidden_size=4>(x, w, r)", one.replace("[5,2,3]", "[T,N,3]"), 14),
    ]


def batch_first(name: str, gates: int, outputs: str) -> list[Row]:
    """ONNX Runtime does not have the layout, so the reference is the oracle: with its defaults."""
    inputs = f"float[2,5,3] x, float[1,{4 * gates},3] w, float[1,{4 * gates},4] r"
    return rows(f"{outputs} = {name}<hidden_size=4, layout=1>(x, w, r)", inputs, 14, 22)


RECURRENT = [
    *recurrent("LSTM", 4, "y, h, c", "x, w, r, b, n, h0, c0, p",
               'activations=["HardSigmoid", "LeakyRelu", "Softsign"], activation_alpha=[0.3, 0.2], '
               'activation_beta=[0.4]'),
    *rows("y, h, c = LSTM<hidden_size=4, input_forget=1>(x, w, r)", "float[5,2,3] x, float[1,16,3] w, float[1,16,4] r",
          14),
    *recurrent("GRU", 3, "y, h", "x, w, r, b, n, h0",
               'linear_before_reset=1, activations=["Affine", "ScaledTanh"], activation_alpha=[0.3, 0.2], '
               "activation_beta=[0.4, 0.6]"),
    *rows("y, h = GRU<hidden_size=4, clip=0.5>(x, w, r)", "float[5,2,3] x, float[1,12,3] w, float[1,12,4] r", 14),
    *rows("y, h = RNN<hidden_size=4, clip=0.5>(x, w, r)", "float[5,2,3] x, float[1,4,3] w, float[1,4,4] r", 14),
    *recurrent("RNN", 1, "y, h", "x, w, r, b, n, h0", 'activations=["Elu"], activation_alpha=[0.3]'),
    *batch_first("LSTM", 4, "y, h, c"), *batch_first("GRU", 3, "y, h"), *batch_first("RNN", 1, "y, h"),
]

ATTENTION = [
    *rows("y = Attention(q, k, v)\ny = Attention<is_causal=1, scale=0.5, softcap=2.0>(q, k, v)\n"
          "y = Attention(q, k, v, m)",
          "float[2,4,5,8] q, float[2,2,6,8] k, float[2,2,6,10] v, float[5,6] m", 23, 24, 25),
    *rows("y, p, w, s = Attention(q, k, v, \"\", a, b)", "float[2,4,5,8] q, float[2,2,6,8] k, float[2,2,6,10] v, "
          "float[2,2,3,8] a, float[2,2,3,10] b", 23, 24),
    *rows("y = Attention<q_num_heads=4, kv_num_heads=2>(q, k, v)", "float[2,5,32] q, float[2,6,16] k, float[2,6,20] v",
          23),
    *rows("y = Attention(q, k, v)", "float[N,4,S,8] q, float[N,4,S,8] k, float[N,4,S,8] v", 23),
    *rows("y = RotaryEmbedding(x, c, s, p)\ny = RotaryEmbedding<interleaved=1>(x, c, s, p)",
          "float[2,4,3,8] x, float[50,4] c, float[50,4] s, int64[2,3] p", 23),
    *rows("y = RotaryEmbedding<num_heads=4>(x, c, s)", "float[2,3,32] x, float[2,3,4] c, float[2,3,4] s", 23),
]

TABLE = [
    *ELEMENTWISE, *REDUCTIONS, *PRODUCTS, *POOLS, *NORMALIZATIONS, *MOVES, *INDEXING, *SPATIAL, *QUANTIZED, *RECURRENT,
    *ATTENTION,
]  # fmt: skip
OPERATORS = sorted({row.op for row in TABLE})
# NumPy arrays of ONNX Runtime hold these and no others
PLAIN = {1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13}
SIZES = {"N": 2, "M": 3, "H": 4, "S": 5, "T": 6}


def modelled(row: Row) -> tuple[ModelProto, list[TensorType]]:
    proto = row.model()
    graph = load(proto)
    node = graph.outputs[0][1].node
    assert not node.op.has(Trait.OPAQUE), f"{row} is opaque"
    assert node.op.name == row.op
    return proto, [value.type for _, value in graph.outputs]


def contradictions(ours: TensorType, theirs: onnx.TypeProto) -> list[str]:
    """Where two types differ; ours may know more."""
    if theirs.WhichOneof("value") is None:
        return []
    stated = theirs.tensor_type
    found = [] if stated.elem_type == ours.dtype.value else [f"element type {ours.dtype} and {stated.elem_type}"]
    if stated.HasField("shape"):
        if len(stated.shape.dim) != ours.rank:
            return [*found, f"rank of {ours} and {len(stated.shape.dim)}"]
        for mine, dim in zip(ours.dims, stated.shape.dim, strict=True):
            if dim.HasField("dim_value") and dim.dim_value != mine:
                found.append(f"{mine} and {dim.dim_value}")
            if dim.dim_param in SIZES and not (isinstance(mine, SymDim) and mine.symbol == dim.dim_param):
                found.append(f"{mine} and {dim.dim_param}")
    return found


@pytest.mark.parametrize("op", OPERATORS)
def test_types_are_those_of_onnx(op: str) -> None:
    wrong = []
    for row in (r for r in TABLE if r.op == op):
        proto, types = modelled(row)
        for ours, theirs in zip(types, (v.type for v in proto.graph.output), strict=True):
            wrong.extend(f"{row}: {what}" for what in contradictions(ours, theirs))
    assert not wrong


def feeds(proto: ModelProto) -> dict[str, NDArray[np.generic]]:
    """Random values below 1, zeros and ones for integers: indices, counts and axes that fit everywhere."""
    found = models.random_feeds(proto, symbols=SIZES)
    for name, array in found.items():
        if name == "n":
            # lengths of sequences: what comes of an empty one ONNX leaves open
            found[name] = np.arange(1, array.size + 1, dtype=array.dtype)
        elif array.dtype.kind in "iu":
            found[name] = np.abs(array.astype(np.int64)).clip(0, 1).astype(array.dtype)
        elif array.dtype.kind == "f":
            found[name] = np.abs(array).clip(0.01, 0.99).astype(array.dtype)
        found[name] = np.asarray(found[name])
    return found


def state_shapes(proto: ModelProto, types: Sequence[TensorType]) -> None:
    """Gives outputs of which ONNX infers no shape the shape that ours have; the checker wants one."""
    for declared, ours in zip(proto.graph.output, types, strict=True):
        if not declared.type.tensor_type.HasField("shape"):
            declared.type.CopyFrom(type_proto(ours))


def computed(proto: ModelProto, given: dict[str, NDArray[np.generic]]) -> Sequence[NDArray[np.generic]]:
    """Outputs of ONNX Runtime, or of onnx.reference where that has no kernel for the node."""
    try:
        if any(v.type.tensor_type.elem_type not in PLAIN for v in proto.graph.output):
            return models.by_reference(proto, given)
        return models.by_onnxruntime(proto, given)
    except Exception:
        with np.errstate(all="ignore"):
            return models.by_reference(proto, given)


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_values_have_the_types_and_come_through_export(op: str) -> None:
    wrong = []
    for row in (r for r in TABLE if r.op == op):
        proto, types = modelled(row)
        state_shapes(proto, types)
        given = feeds(proto)
        wanted = computed(proto, given)
        graph = load(proto)
        again = export(graph)
        onnx.checker.check_model(again, full_check=True)
        names = [name for name, _ in graph.outputs]
        evaluated, wide = evaluate_graph(graph, given), evaluate_graph(graph, given, wide=True)
        for name, ours, b, c in zip(names, types, wanted, computed(again, given), strict=True):
            a = evaluated[name]
            bound = ours.bind(SIZES)
            if (bound.shape, bound.dtype.numpy) != (np.shape(b), np.asarray(b).dtype):
                wrong.append(f"{row}: {ours} is not the type of {np.asarray(b).dtype}{np.shape(b)}")
                continue
            # a Cast to a narrow float is left undone among doubles
            double = a if op == "Cast" else np.asarray(wide[name]).astype(b.dtype)
            for what, found in (("evaluated", a), ("evaluated in doubles", double), ("exported", c)):
                error = models.relative_error(np.asarray(found), np.asarray(b))
                if error > 1e-2 if b.dtype.itemsize < 4 else error > 1e-5:
                    wrong.append(f"{row}: {what}, the relative error is {error}")
    assert not wrong


def test_every_operator_stands_in_the_table() -> None:
    known = {op.name for op in REGISTRY.values() if not op.internal}
    assert known - set(OPERATORS) == set()


# ── what does not fit is refused ─────────────────────────────────────────────────────────────────────────────────


def t(*dims: int, dtype: DType = DType.FLOAT) -> TensorType:
    return TensorType(dtype, dims)


U8, I64 = DType.UINT8, DType.INT64
REFUSED: list[tuple[str, tuple[TensorType | None, ...], dict[str, AttrValue], str]] = [
    ("Einsum", (t(2, 3), t(4, 5)), {"equation": "ij,jk->ik"}, "j is both 3 and 4"),
    ("Einsum", (t(2, 3),), {"equation": "ijk->k"}, "does not fit an input of 2 dimensions"),
    ("Einsum", (t(2, 3),), {"equation": "ij->z"}, "letter that no input has"),
    ("Einsum", (t(2, 3), t(3)), {"equation": "ij->i"}, "has 1 inputs, not 2"),
    ("Einsum", (t(2, 3),), {"equation": "i?->i"}, "is no equation"),
    ("ConvTranspose", (t(1, 4, 5), t(3, 2, 3)), {}, "channels"),
    ("ConvTranspose", (t(1, 4, 5), t(4, 2, 3), t(3)), {}, "size of the bias"),
    ("ConvTranspose", (t(1, 4, 5), t(4, 2, 3)), {"group": 3}, "do not divide into 3 groups"),
    ("ConvTranspose", (t(1, 4, 2), t(4, 2, 1)), {"pads": (2, 2)}, "cut off more"),
    ("DeformConv", (t(1, 1, 3, 3), t(1, 1, 2, 2), t(1, 8, 3, 3)), {}, "sizes of offsets and output"),
    ("InstanceNormalization", (t(2, 3, 4), t(3), t(4)), {}, "size of the bias"),
    ("GroupNormalization", (t(2, 3, 4), t(3), t(3)), {"num_groups": 2}, "do not divide into 2 groups"),
    ("RMSNormalization", (t(2, 3), t(2, 2, 3)), {}, "does not broadcast"),
    ("MeanVarianceNormalization", (t(2, 3),), {"axes": (0, 2)}, "axis 2 is outside"),
    ("Hardmax", (t(2, 3),), {"axis": 2}, "axis 2 is outside"),
    ("GatherElements", (t(2, 3), t(2, dtype=I64)), {}, "differ in rank"),
    ("GatherND", (t(2, 3), t(5, 3, dtype=I64)), {}, "positions of 3 numbers"),
    ("GatherND", (t(2, 3), t(2, 1, dtype=I64)), {"batch_dims": 2}, "batch_dims 2"),
    ("ScatterND", (t(4, 3), t(2, 1, dtype=I64), t(2, 4)), {}, "sizes of updates"),
    ("ScatterElements", (t(4, 3), t(2, 3, dtype=I64), t(2, 3, dtype=I64)), {}, "updates are INT64"),
    ("TopK", (t(2, 3),), {"k": 4}, "4 elements cannot be taken"),
    ("OneHot", (t(2, dtype=I64), t(3)), {"depth": 4}, "number of values"),
    ("EyeLike", (t(2, 3, 4),), {}, "must have 2 dimensions"),
    ("Trilu", (t(3),), {}, "at least 2 dimensions"),
    ("ReverseSequence", (t(2, 3), t(2, dtype=I64)), {}, "number of lengths"),
    ("DepthToSpace", (t(1, 6, 2, 2),), {"blocksize": 2}, "no multiple of 4"),
    ("SpaceToDepth", (t(1, 6, 3, 2),), {"blocksize": 2}, "the height 3 is no multiple"),
    ("Resize", (t(1, 2, 3),), {"scales": (1.0, 2.0)}, "2 numbers were given for 3 axes"),
    ("Resize", (t(1, 2),), {"scales": (1.0, -2.0)}, "is not above 0"),
    ("GridSample", (t(2, 3, 4, 5), t(2, 6, 7, 3)), {}, "last size of the grid"),
    ("RoiAlign", (t(1, 2, 5, 6), t(3, 5), t(3, dtype=I64)), {}, "numbers that describe a region"),
    ("QuantizeLinear", (t(2, 3), t(2)), {}, "number of scales"),
    ("DequantizeLinear", (t(2, 3, dtype=U8), t(), t(dtype=I64)), {}, "the zero point must be UINT8"),
    ("QLinearMatMul", (t(2, 3, dtype=U8), t(), t(dtype=U8), t(2, 3, dtype=U8), t(), t(dtype=U8), t(), t(dtype=U8)), {},
     "inner dimensions"),
    ("LSTM", (t(5, 2, 3), t(1, 16, 3), t(1, 12, 4)), {}, "sizes of input 2"),
    ("LSTM", (t(5, 2, 3), t(1, 16, 3), t(1, 16, 4)), {"direction": "bidirectional"}, "sizes of input 1"),
    ("GRU", (t(5, 2, 3), t(1, 12, 3), t(1, 12, 4)), {"hidden_size": 5}, "hidden_size"),
    ("RNN", (t(5, 2, 3), t(1, 4, 3), t(1, 4, 4), None, t(3, dtype=DType.INT32)), {}, "sizes of input 4"),
    ("Attention", (t(2, 4, 5, 8), t(2, 2, 6, 7), t(2, 2, 6, 8)), {}, "head sizes of Q and K"),
    ("Attention", (t(2, 5, 32), t(2, 6, 16), t(2, 6, 16)), {}, "must be given"),
    ("SoftmaxCrossEntropyLoss", (t(2, 3, 4), t(2, 3, dtype=I64)), {}, "sizes of targets"),
    ("SwiGLU", (t(2, 3), t(2, 4)), {}, "sizes of gate and value"), ("BitCast", (t(2),), {"to": I64}, "different sizes"),
]  # fmt: skip


@pytest.mark.parametrize("name, types, attrs, message", REFUSED, ids=[f"{r[0]}-{r[3]}" for r in REFUSED])
def test_inputs_that_do_not_fit_are_refused(
    name: str, types: tuple[TensorType | None, ...], attrs: dict[str, AttrValue], message: str
) -> None:
    op = REGISTRY[name]
    with pytest.raises(ShapeError, match=re.escape(message)) as caught:
        op.types_of(types, op.complete(attrs))
    assert name in str(caught.value) or name.startswith("QLinear")


def test_activations_that_there_are_not_are_refused() -> None:
    op = REGISTRY["RNN"]
    arrays = [np.zeros((5, 2, 3)), np.zeros((1, 4, 3)), np.zeros((1, 4, 4))]
    for given, message in (("Sine", "no activation 'Sine'"), ("Affine", "'Affine' needs its alpha and beta")):
        with pytest.raises(GraphError, match=message):
            assert op.compute is not None
            op.compute(arrays, op.complete({"activations": (given,)}))
