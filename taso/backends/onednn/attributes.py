"""Attributes of a primitive: operations fused behind it, quantization, where scratch memory comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from taso.backends.onednn.library import Library
from taso.backends.onednn.memory import DataType, MemoryDesc
from taso.graph.errors import BackendError

_FPMATH_STRICT = 0
_FPMATH_BF16 = 1
_SCRATCHPAD_LIBRARY = 0
_SCRATCHPAD_USER = 1

# Formulas: a = alpha, b = beta, x = the element.
ELTWISE: Mapping[str, int] = {
    "relu": 0x20,  # x if x > 0 else a*x
    "tanh": 0x21,
    "elu": 0x22,  # x if x > 0 else a*(exp(x) - 1)
    "square": 0x23,
    "abs": 0x24,
    "sqrt": 0x25,
    "linear": 0x26,  # a*x + b
    "soft_relu": 0x27,  # log(1 + exp(a*x)) / a
    "hardsigmoid": 0x28,  # max(0, min(1, a*x + b))
    "logistic": 0x29,
    "exp": 0x2A,
    "gelu_tanh": 0x2B,
    "swish": 0x2C,  # x * logistic(a*x)
    "log": 0x2D,
    "clip": 0x2E,  # to [a, b]
    "clip_v2": 0x2F,  # to [a, b]; differs from clip in the gradient only
    "pow": 0x30,  # a * x**b
    "gelu_erf": 0x31,
    "round": 0x32,  # half to even
    "mish": 0x33,
    "hardswish": 0x34,  # x * max(0, min(1, a*x + b))
}

BINARY: Mapping[str, int] = {
    "add": 0x1FFF0,
    "mul": 0x1FFF1,
    "max": 0x1FFF2,
    "min": 0x1FFF3,
    "div": 0x1FFF4,
    "sub": 0x1FFF5,
    "ge": 0x1FFF6,
    "gt": 0x1FFF7,
    "le": 0x1FFF8,
    "lt": 0x1FFF9,
    "eq": 0x1FFFA,
    "ne": 0x1FFFB,
}


def algorithm(table: Mapping[str, int], name: str) -> int:
    """oneDNN's number of an algorithm; `BackendError` lists the names if there is none of that name."""
    value = table.get(name)
    if value is None:
        raise BackendError(f"oneDNN has no algorithm {name!r} here; it has {', '.join(table)}")
    return value


@dataclass(frozen=True)
class EltwisePostOp:
    """`dst = f(dst)` with an algorithm of `ELTWISE`."""

    algorithm: str
    alpha: float = 0.0
    beta: float = 0.0

    @property
    def key(self) -> str:
        """Text for caches."""
        return f"{self.algorithm}({self.alpha!r},{self.beta!r})"

    def append(self, lib: Library, post_ops: int) -> None:
        """Adds it to a C list of post-ops."""
        value = algorithm(ELTWISE, self.algorithm)
        lib.call("dnnl_post_ops_append_eltwise", post_ops, value, self.alpha, self.beta)


@dataclass(frozen=True)
class SumPostOp:
    """`dst = dst + scale * (what dst held before - zero_point)`, read as `dtype` (by default dst's own)."""

    scale: float = 1.0
    zero_point: int = 0
    dtype: DataType | None = None

    @property
    def key(self) -> str:
        """Text for caches."""
        return f"sum({self.scale!r},{self.zero_point},{self.dtype.name.lower() if self.dtype else ''})"

    def append(self, lib: Library, post_ops: int) -> None:
        """Adds it to a C list of post-ops."""
        dtype = 0 if self.dtype is None else int(self.dtype)
        lib.call("dnnl_post_ops_append_sum", post_ops, self.scale, self.zero_point, dtype)


@dataclass(frozen=True)
class BinaryPostOp:
    """`dst = f(dst, src1)` with an algorithm of `BINARY`; a dimension of `src1` is dst's or 1 (broadcast).

    At execution `src1` is the argument `post_op_src(index)`.
    """

    algorithm: str
    src1: MemoryDesc

    @property
    def key(self) -> str:
        """Text for caches."""
        return f"{self.algorithm}[{self.src1.key}]"

    def append(self, lib: Library, post_ops: int) -> None:
        """Adds it to a C list of post-ops."""
        value = algorithm(BINARY, self.algorithm)
        lib.call("dnnl_post_ops_append_binary", post_ops, value, self.src1.handle)


@dataclass(frozen=True)
class PreluPostOp:
    """`dst = dst if dst > 0 else dst * w`; bit i of `mask` says that w differs along dimension i.

    At execution w is the argument `post_op_weights(index)`, of `Primitive.arguments`' descriptor.
    """

    mask: int

    @property
    def key(self) -> str:
        """Text for caches."""
        return f"prelu({self.mask})"

    def append(self, lib: Library, post_ops: int) -> None:
        """Adds it to a C list of post-ops."""
        lib.call("dnnl_post_ops_append_prelu", post_ops, self.mask)


@dataclass(frozen=True)
class DepthwisePostOp:
    """A depthwise convolution behind a 1x1 convolution in two spatial dimensions.

    `kernel`, `stride` and `pad` (top and left) hold for both dimensions; oneDNN's CPU engine takes few of
    them. The primitive's dst is then the depthwise convolution's. At execution its weights (channels, 1, 1,
    kernel, kernel) and bias are the arguments `DEPTHWISE | WEIGHTS` and `DEPTHWISE | BIAS`.
    """

    kernel: int
    stride: int = 1
    pad: int = 0
    weights_dtype: DataType = DataType.F32
    bias_dtype: DataType | None = None
    dst_dtype: DataType = DataType.F32

    @property
    def key(self) -> str:
        """Text for caches."""
        bias = self.bias_dtype.name.lower() if self.bias_dtype else ""
        types = f"{self.weights_dtype.name.lower()},{bias},{self.dst_dtype.name.lower()}"
        return f"depthwise({self.kernel},{self.stride},{self.pad},{types})"

    def append(self, lib: Library, post_ops: int) -> None:
        """Adds it to a C list of post-ops."""
        bias = 0 if self.bias_dtype is None else int(self.bias_dtype)
        types = (int(self.weights_dtype), bias, int(self.dst_dtype))
        lib.call("dnnl_post_ops_append_dw", post_ops, *types, self.kernel, self.stride, self.pad)


PostOp = EltwisePostOp | SumPostOp | BinaryPostOp | PreluPostOp | DepthwisePostOp


@dataclass(frozen=True)
class Attributes:
    """What modifies a primitive.

    `post_ops` run in order on the result. `scales` and `zero_points` give, for an argument, the mask of
    dimensions along which its (f32) scales or (s32) zero points differ; they are passed as `SCALES |
    argument` and `ZERO_POINTS | argument`. With `user_scratchpad` the caller passes `SCRATCHPAD` if
    `arguments` lists it. float32 is computed in float32, whatever the environment says, unless `bf16` allows a product
    of float32 matrices to round them to bfloat16 first (oneDNN's `fpmath_mode`); it adds in float32 all the same.
    """

    post_ops: tuple[PostOp, ...] = ()
    scales: tuple[tuple[int, int], ...] = ()
    zero_points: tuple[tuple[int, int], ...] = ()
    user_scratchpad: bool = True
    bf16: bool = False

    @property
    def key(self) -> str:
        """Text that is equal for attributes that make equal primitives, for caches."""
        parts = [post_op.key for post_op in self.post_ops]
        parts += [f"scale{argument}/{mask}" for argument, mask in self.scales]
        parts += [f"zero{argument}/{mask}" for argument, mask in self.zero_points]
        parts += ["bf16"] * self.bf16
        return ";".join(parts)


@contextmanager
def attributes_handle(lib: Library, attributes: Attributes) -> Iterator[int]:
    """A C attributes object that lives inside the `with` (oneDNN copies it into what it creates)."""
    handle = lib.create("dnnl_primitive_attr_create")
    try:
        mode = _SCRATCHPAD_USER if attributes.user_scratchpad else _SCRATCHPAD_LIBRARY
        lib.call("dnnl_primitive_attr_set_scratchpad_mode", handle, mode)
        lib.call("dnnl_primitive_attr_set_fpmath_mode", handle, _FPMATH_BF16 if attributes.bf16 else _FPMATH_STRICT)
        for argument, mask in attributes.scales:
            lib.call("dnnl_primitive_attr_set_scales_mask", handle, argument, mask)
        for argument, mask in attributes.zero_points:
            lib.call("dnnl_primitive_attr_set_zero_points_mask", handle, argument, mask)
        if attributes.post_ops:
            _set_post_ops(lib, handle, attributes.post_ops)
        yield handle
    finally:
        lib.call("dnnl_primitive_attr_destroy", handle)


def _set_post_ops(lib: Library, attributes: int, post_ops: tuple[PostOp, ...]) -> None:
    handle = lib.create("dnnl_post_ops_create")
    try:
        for post_op in post_ops:
            post_op.append(lib, handle)
        lib.call("dnnl_primitive_attr_set_post_ops", attributes, handle)
    finally:
        lib.call("dnnl_post_ops_destroy", handle)
