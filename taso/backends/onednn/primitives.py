"""oneDNN primitives for inference as Python objects: build one, ask what it wants, bind it to memory, call
it.

Every builder takes descriptors of its inputs (`MemoryDesc.any` where the layout is the primitive's to choose)
and of its output, and `attributes`. It raises `Unimplemented` where oneDNN has no implementation, and
`BackendError` where shapes, types or parameters do not fit. Creating the code happens at the first `bind`,
asking for layouts is cheap.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_char_p, c_float, c_void_p
from dataclasses import dataclass

from taso.backends.onednn.attributes import (
    BINARY,
    ELTWISE,
    Attributes,
    BinaryPostOp,
    DepthwisePostOp,
    EltwisePostOp,
    PostOp,
    PreluPostOp,
    SumPostOp,
    algorithm,
    attributes_handle,
)
from taso.backends.onednn.library import ExecArg, Library, Unimplemented, status_error
from taso.backends.onednn.memory import (
    DataType,
    Engine,
    Handle,
    Memory,
    MemoryDesc,
    dims_array,
    engine,
)
from taso.backends.places import row_major_strides
from taso.graph.errors import BackendError

__all__ = [
    "Attributes",
    "BIAS",
    "BINARY",
    "BinaryPostOp",
    "BoundCall",
    "DEPTHWISE",
    "DST",
    "DataType",
    "DepthwisePostOp",
    "ELTWISE",
    "EltwisePostOp",
    "Engine",
    "MEAN",
    "Memory",
    "MemoryDesc",
    "PostOp",
    "PreluPostOp",
    "Primitive",
    "REDUCTION",
    "SCALE",
    "SCALES",
    "SCRATCHPAD",
    "SHIFT",
    "SRC",
    "SRC_0",
    "SRC_1",
    "SumPostOp",
    "Unimplemented",
    "VARIANCE",
    "WEIGHTS",
    "WORKSPACE",
    "ZERO_POINTS",
    "batch_normalization",
    "binary",
    "concat",
    "convolution",
    "convolution_weights",
    "deconvolution",
    "deconvolution_weights",
    "eltwise",
    "engine",
    "inner_product",
    "is_slow",
    "layer_normalization",
    "lrn",
    "matmul",
    "multiple_src",
    "pooling",
    "post_op_src",
    "post_op_weights",
    "prelu",
    "reduction",
    "reorder",
    "resampling",
    "shuffle",
    "softmax",
    "sum_of",
]

# Numbers of execution arguments (DNNL_ARG_*).
SRC = SRC_0 = 1
SRC_1 = 2
DST = 17
WEIGHTS = 33
BIAS = 41
MEAN = 49
VARIANCE = 50
SCALE = 51
SHIFT = 52
WORKSPACE = 64
SCRATCHPAD = 80
SCALES = 4096
ZERO_POINTS = 8192
DEPTHWISE = 16384
_MULTIPLE_SRC = 1024
_POST_OP_BASE = 32768

_ARGUMENT_NAMES = {
    **{SRC: "src", SRC_1: "src1", DST: "dst", WEIGHTS: "weights", BIAS: "bias", MEAN: "mean"},
    **{
        VARIANCE: "variance",
        SCALE: "scale",
        SHIFT: "shift",
        WORKSPACE: "workspace",
        SCRATCHPAD: "scratchpad",
    },
}

_FORWARD_INFERENCE = 96
_QUERY_IMPLEMENTATION = 8
_QUERY_SRC = 129
_QUERY_WEIGHTS = 131
_QUERY_DST = 133
_QUERY_WORKSPACE = 135
_QUERY_SCRATCHPAD = 136
_QUERY_ARGUMENT = 255

_CONVOLUTION = {"direct": 0x1, "winograd": 0x2, "auto": 0x3}
_DECONVOLUTION = {"direct": 0xA, "winograd": 0xB}
_POOLING = {"max": 0x1FF, "avg_include_padding": 0x2FF, "avg_exclude_padding": 0x3FF}
_LRN = {"across_channels": 0xAFF, "within_channel": 0xBFF}
_RESAMPLING = {"nearest": 0x2FFF0, "linear": 0x2FFF1}
_SOFTMAX = {"softmax": 0x30000, "logsoftmax": 0x30001}

REDUCTION: Mapping[str, int] = {
    "max": 0x2FFF2,
    "min": 0x2FFF3,
    "sum": 0x2FFF4,
    "mul": 0x2FFF5,
    "mean": 0x2FFF6,
    "norm_lp_max": 0x2FFF7,  # (max(sum |x|**p, eps)) ** (1/p)
    "norm_lp_sum": 0x2FFF8,  # (sum |x|**p + eps) ** (1/p)
    "norm_lp_power_p_max": 0x2FFF9,  # max(sum |x|**p, eps)
    "norm_lp_power_p_sum": 0x2FFFA,  # sum |x|**p + eps
}

_USE_GLOBAL_STATS = 0x1
_USE_SCALE = 0x2
_USE_SHIFT = 0x4
_FUSE_RELU = 0x8

_DEFAULT = Attributes()


def multiple_src(index: int) -> int:
    """Argument number of source `index` of `concat` and `sum_of`."""
    return _MULTIPLE_SRC + index


def post_op_src(index: int) -> int:
    """Argument number of the second source of the binary post-op at this index among the post-ops."""
    return _POST_OP_BASE * (index + 1) | SRC_1


def post_op_weights(index: int) -> int:
    """Argument number of the weights of the PReLU post-op at this index among the post-ops."""
    return _POST_OP_BASE * (index + 1) | WEIGHTS


class _Code(Handle):
    """An executable primitive (`dnnl_primitive_t`)."""


class Primitive(Handle):
    """A primitive descriptor and, once something is bound to it, the primitive itself.

    The number of threads in force when it is made must be in force when it runs.
    """

    def __init__(self, lib: Library, handle: int, recipe: _Recipe, index: int) -> None:
        super().__init__(lib, handle, "dnnl_primitive_desc_destroy")
        self.attributes = recipe.attributes
        self._recipe = recipe
        self._index = index

    def src_desc(self, index: int = 0) -> MemoryDesc:
        """Descriptor of source `index`; `ndims` is 0 if there is none."""
        return self._descriptor(_QUERY_SRC, index)

    def weights_desc(self, index: int = 0) -> MemoryDesc:
        """Descriptor of the weights; index 1 is the bias. `ndims` is 0 if there is none."""
        return self._descriptor(_QUERY_WEIGHTS, index)

    def dst_desc(self, index: int = 0) -> MemoryDesc:
        """Descriptor of the output."""
        return self._descriptor(_QUERY_DST, index)

    def workspace_desc(self) -> MemoryDesc:
        """Descriptor of the workspace; `ndims` is 0 if none is needed."""
        return self._descriptor(_QUERY_WORKSPACE, 0)

    def scratchpad_desc(self) -> MemoryDesc:
        """Descriptor of the scratchpad the caller must give; `ndims` is 0 if none is needed."""
        return self._descriptor(_QUERY_SCRATCHPAD, 0)

    @functools.cached_property
    def implementation(self) -> str:
        """oneDNN's name of the implementation, such as `jit:avx512_core`."""
        text = c_char_p()
        self._library.call("dnnl_primitive_desc_query", self.handle, _QUERY_IMPLEMENTATION, 0, byref(text))
        return (text.value or b"").decode()

    @functools.cached_property
    def arguments(self) -> dict[int, MemoryDesc]:
        """What must be bound: argument number to the descriptor its memory must have."""
        found = {}
        for argument in self._all_candidates():
            desc = self._descriptor(_QUERY_ARGUMENT, argument)
            if desc.ndims:
                found[argument] = desc
        for index, post_op in enumerate(self.attributes.post_ops):
            if isinstance(post_op, PreluPostOp):
                found[post_op_weights(index)] = _prelu_post_op_desc(post_op.mask, self.dst_desc().dims)
        return found

    def next_implementation(self) -> Primitive | None:
        """The same operation by the next of oneDNN's implementations in its order of preference, or None."""
        try:
            return self._recipe.create(self._index + 1)
        except Unimplemented:
            return None

    def bind(self, arguments: Mapping[int, Memory]) -> BoundCall:
        """A call on these memory objects, whose addresses may still be changed.

        Quantization scales and zero points are taken unchecked; of all else `BackendError` names what is
        missing, not asked for, or of another descriptor than `arguments` says.
        """
        self._check(arguments)
        return BoundCall(self, self._code.handle, arguments)

    @functools.cached_property
    def _code(self) -> _Code:
        created = self._library.create("dnnl_primitive_create", self.handle)
        return _Code(self._library, created, "dnnl_primitive_destroy")

    def _descriptor(self, what: int, index: int) -> MemoryDesc:
        pointer = self._library.query_descriptor(self.handle, what, index)
        if pointer is None:
            raise BackendError(f"oneDNN: this primitive has no descriptor for query {what}, index {index}")
        return MemoryDesc.copy_of(pointer)

    def _all_candidates(self) -> tuple[int, ...]:
        extra = [SCRATCHPAD]
        for index, post_op in enumerate(self.attributes.post_ops):
            if isinstance(post_op, BinaryPostOp):
                extra.append(post_op_src(index))
            elif isinstance(post_op, DepthwisePostOp):
                extra += [DEPTHWISE | WEIGHTS, DEPTHWISE | BIAS]
        return (*self._recipe.candidates, *extra)

    def _check(self, arguments: Mapping[int, Memory]) -> None:
        quantization = {SCALES | argument for argument, _ in self.attributes.scales}
        quantization |= {ZERO_POINTS | argument for argument, _ in self.attributes.zero_points}
        wanted = self.arguments
        for argument in (*wanted, *quantization):
            if argument not in arguments:
                raise BackendError(
                    f"the argument {argument_name(argument)} is missing: {wanted.get(argument, '')}"
                )
        for argument, memory in arguments.items():
            if argument in wanted:
                if memory.desc != wanted[argument]:
                    raise BackendError(
                        f"the argument {argument_name(argument)} is {memory.desc}; "
                        f"{wanted[argument]} was expected"
                    )
            elif argument not in quantization:
                raise BackendError(f"the primitive takes no argument {argument_name(argument)}")


def is_slow(primitive: Primitive) -> bool:
    """Whether this is an implementation to avoid: the plain-C reference, or a GEMM followed by slow post-ops."""
    name = primitive.implementation
    if name.startswith("ref"):
        return True
    return "gemm" in name and any(isinstance(op, BinaryPostOp) for op in primitive.attributes.post_ops)


def argument_name(argument: int) -> str:
    """A name for messages."""
    if argument >= _POST_OP_BASE:
        rest = argument % _POST_OP_BASE
        return f"{_ARGUMENT_NAMES.get(rest, rest)} of post-op {argument // _POST_OP_BASE - 1}"
    for flag, text in ((DEPTHWISE, "depthwise "), (ZERO_POINTS, "zero points of "), (SCALES, "scales of ")):
        if argument & flag:
            return text + argument_name(argument & ~flag)
    if argument >= _MULTIPLE_SRC:
        return f"src{argument - _MULTIPLE_SRC}"
    return _ARGUMENT_NAMES.get(argument, str(argument))


class BoundCall:
    """A primitive with its memory: calling it runs it, by exactly one foreign call.

    `run` is the bare foreign call, for callers that look at the status (0 is success) themselves. The
    interpreter lock is released while it runs. Not to be run by two threads at once.
    """

    __slots__ = ("_keep", "primitive", "run")

    run: Callable[[], int]

    def __init__(self, primitive: Primitive, code: int, arguments: Mapping[int, Memory]) -> None:
        held = engine()
        array = (ExecArg * len(arguments))()
        for slot, (argument, memory) in zip(array, arguments.items(), strict=True):
            slot.arg = argument
            slot.memory = memory.handle
        execute = held.library.function("dnnl_primitive_execute")
        self.primitive = primitive
        self._keep = (array, tuple(arguments.values()))
        self.run = functools.partial(execute, code, held.stream, len(array), ctypes.addressof(array))

    def __call__(self) -> None:
        status = self.run()
        if status:
            raise status_error("dnnl_primitive_execute", status)


Handles = Mapping[str, int | None]


@dataclass(frozen=True)
class _Recipe:
    """How to make one primitive descriptor: the C function, and its parameters from descriptors' handles."""

    function: str
    parameters: Callable[[Handles], Sequence[object]]
    descriptors: Mapping[str, MemoryDesc | None]
    attributes: Attributes
    candidates: Sequence[int]
    engine_first: bool = True

    def create(self, index: int = 0) -> Primitive:
        """The primitive by implementation number `index`; `Unimplemented` if there are not so many."""
        lib = engine().library
        primitive = Primitive(lib, self._descriptor(self.descriptors, self.attributes), self, index)
        for _ in range(index):
            lib.call("dnnl_primitive_desc_next_impl", primitive.handle)
        return primitive

    def _descriptor(self, descriptors: Mapping[str, MemoryDesc | None], attributes: Attributes) -> int:
        held = engine()
        handles = {name: None if desc is None else desc.handle for name, desc in descriptors.items()}
        first = (held.handle,) if self.engine_first else ()
        with attributes_handle(held.library, attributes) as handle:
            try:
                return held.library.create(self.function, *first, *self.parameters(handles), handle)
            except BackendError as error:
                kind = Unimplemented if self._only_types_are_wrong(descriptors) else type(error)
                raise kind(f"{error} ({self._description()})") from None

    def _only_types_are_wrong(self, descriptors: Mapping[str, MemoryDesc | None]) -> bool:
        """Whether the same in float32 throughout is valid: some primitives call unsupported types invalid."""
        if all(desc is None or desc.dtype == DataType.F32 for desc in descriptors.values()):
            return False
        try:
            handle = self._descriptor({name: _as_f32(desc) for name, desc in descriptors.items()}, _DEFAULT)
        except Unimplemented:
            return True
        except BackendError:
            return False
        engine().library.call("dnnl_primitive_desc_destroy", handle)
        return True

    def _description(self) -> str:
        given = [f"{name} {desc.key}" for name, desc in self.descriptors.items() if desc is not None]
        if self.attributes.key:
            given.append(f"attributes {self.attributes.key}")
        return ", ".join(given)


def _as_f32(desc: MemoryDesc | None) -> MemoryDesc | None:
    if desc is None or desc.dtype == DataType.F32:
        return desc
    if desc.is_plain:
        return MemoryDesc.strided(desc.dims, DataType.F32, desc.strides)
    return MemoryDesc.any(desc.dims, DataType.F32)


def _prelu_post_op_desc(mask: int, dims: Sequence[int]) -> MemoryDesc:
    """float32 weights of a PReLU post-op, which oneDNN takes with dimension 1 (channels) innermost."""
    held = [extent if mask >> axis & 1 else 1 for axis, extent in enumerate(dims)]
    if len(held) < 3:
        return MemoryDesc.plain(held, DataType.F32)
    order = [0, *range(2, len(held)), 1]
    inner = row_major_strides([held[axis] for axis in order])
    strides = [0] * len(held)
    for axis, stride in zip(order, inner, strict=True):
        strides[axis] = stride
    return MemoryDesc.strided(held, DataType.F32, strides)


def _spatial(
    name: str, values: Sequence[int] | None, count: int, default: int, offset: int = 0
) -> ctypes.Array[ctypes.c_int64]:
    """A parameter with one value per spatial dimension, each shifted by `offset`."""
    if values is None:
        values = (default,) * count
    if len(values) != count:
        raise BackendError(
            f"{name} {tuple(values)} must have one value for each of {count} spatial dimensions"
        )
    return dims_array([value + offset for value in values])


def _need_spatial(name: str, desc: MemoryDesc) -> int:
    if desc.ndims < 3:
        raise BackendError(f"{name} needs batch, channels and spatial dimensions, not {desc.dims}")
    return desc.ndims - 2


def convolution_weights(desc: MemoryDesc, groups: int) -> MemoryDesc:
    """ONNX's (M, C/groups, k...) as oneDNN's (groups, M/groups, C/groups, k...), on the same bytes."""
    if groups < 1 or desc.dims[0] % groups:
        raise BackendError(
            f"{groups} groups do not divide the {desc.dims[0]} output channels of weights {desc.dims}"
        )
    return desc.reshape((groups, desc.dims[0] // groups, *desc.dims[1:]))


def deconvolution_weights(desc: MemoryDesc, groups: int = 1) -> MemoryDesc:
    """ONNX's ConvTranspose weights (C, M/groups, k...) in oneDNN's order of dimensions, on the same bytes.

    That is (M, C, k...), or (groups, M/groups, C/groups, k...) if there are groups.
    """
    rest = tuple(range(2, desc.ndims))
    if groups == 1:
        return desc.permute((1, 0, *rest))
    if groups < 1 or desc.dims[0] % groups:
        raise BackendError(
            f"{groups} groups do not divide the {desc.dims[0]} input channels of weights {desc.dims}"
        )
    split = desc.reshape((groups, desc.dims[0] // groups, *desc.dims[1:]))
    return split.permute((0, 2, 1, *(axis + 1 for axis in rest)))


def convolution(
    src: MemoryDesc,
    weights: MemoryDesc,
    dst: MemoryDesc,
    *,
    bias: MemoryDesc | None = None,
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    pads_begin: Sequence[int] | None = None,
    pads_end: Sequence[int] | None = None,
    groups: int = 1,
    algorithm: str = "direct",
    attributes: Attributes = _DEFAULT,
) -> Primitive:
    """Convolution in one to three spatial dimensions (oneDNN convolution; ONNX Conv).

    src (N, C, ...), weights (M, C/groups, k...) or, with groups, also (groups, M/groups, C/groups, k...), dst
    (N, M, ...). Dilation 1 is dense, as in ONNX; pads may differ at both ends. `weights_desc()` of the result
    has the grouped dimensions if groups > 1. Algorithms: direct, winograd, auto.
    """
    count = _need_spatial("a convolution", src)
    if groups != 1 and weights.ndims == src.ndims:
        weights = convolution_weights(weights, groups)
    _check_groups(src, weights, groups)
    kind = _algorithm(_CONVOLUTION, algorithm)
    window = _window(count, strides, dilations, pads_begin, pads_end)
    return _Recipe(
        "dnnl_convolution_forward_primitive_desc_create",
        lambda h: (_FORWARD_INFERENCE, kind, h["src"], h["weights"], h["bias"], h["dst"], *window),
        {"src": src, "weights": weights, "bias": bias, "dst": dst},
        attributes,
        (SRC, WEIGHTS, BIAS, DST),
    ).create()


def deconvolution(
    src: MemoryDesc,
    weights: MemoryDesc,
    dst: MemoryDesc,
    *,
    bias: MemoryDesc | None = None,
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    pads_begin: Sequence[int] | None = None,
    pads_end: Sequence[int] | None = None,
    groups: int = 1,
    algorithm: str = "direct",
    attributes: Attributes = _DEFAULT,
) -> Primitive:
    """Transposed convolution (oneDNN deconvolution; ONNX ConvTranspose).

    As `convolution`, with weights in oneDNN's order, which `deconvolution_weights` gives. ONNX's
    output_padding is to be taken from `pads_end`.
    """
    count = _need_spatial("a deconvolution", src)
    _check_groups(src, weights, groups)
    kind = _algorithm(_DECONVOLUTION, algorithm)
    window = _window(count, strides, dilations, pads_begin, pads_end)
    return _Recipe(
        "dnnl_deconvolution_forward_primitive_desc_create",
        lambda h: (_FORWARD_INFERENCE, kind, h["src"], h["weights"], h["bias"], h["dst"], *window),
        {"src": src, "weights": weights, "bias": bias, "dst": dst},
        attributes,
        (SRC, WEIGHTS, BIAS, DST),
    ).create()


_algorithm = algorithm


def _check_groups(src: MemoryDesc, weights: MemoryDesc, groups: int) -> None:
    grouped = weights.ndims == src.ndims + 1
    if not (grouped or weights.ndims == src.ndims) or (grouped and weights.dims[0] != groups):
        raise BackendError(f"weights {weights.dims} do not fit a source {src.dims} and {groups} groups")
    if not grouped and groups != 1:
        raise BackendError(f"weights {weights.dims} need a first dimension for the {groups} groups")


def _window(
    count: int,
    strides: Sequence[int] | None,
    dilations: Sequence[int] | None,
    pads_begin: Sequence[int] | None,
    pads_end: Sequence[int] | None,
) -> tuple[ctypes.Array[ctypes.c_int64], ...]:
    return (
        _spatial("strides", strides, count, 1),
        _spatial("dilations", dilations, count, 1, -1),
        _spatial("pads_begin", pads_begin, count, 0),
        _spatial("pads_end", pads_end, count, 0),
    )


def pooling(
    src: MemoryDesc,
    dst: MemoryDesc,
    kernel: Sequence[int],
    *,
    kind: str,
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    pads_begin: Sequence[int] | None = None,
    pads_end: Sequence[int] | None = None,
    attributes: Attributes = _DEFAULT,
) -> Primitive:
    """Pooling: `kind` is max, avg_include_padding or avg_exclude_padding (ONNX MaxPool, AveragePool).

    Dilation 1 is dense. ONNX's ceil_mode is a matter of dst's dimensions and `pads_end`.
    """
    count = _need_spatial("a pooling", src)
    number = _algorithm(_POOLING, kind)
    stride_array, *rest = _window(count, strides, dilations, pads_begin, pads_end)
    kernel_array = _spatial("kernel", kernel, count, 1)
    return _Recipe(
        "dnnl_pooling_forward_primitive_desc_create",
        lambda h: (_FORWARD_INFERENCE, number, h["src"], h["dst"], stride_array, kernel_array, *rest),
        {"src": src, "dst": dst},
        attributes,
        (SRC, DST),
    ).create()


def matmul(
    src: MemoryDesc,
    weights: MemoryDesc,
    dst: MemoryDesc,
    *,
    bias: MemoryDesc | None = None,
    attributes: Attributes = _DEFAULT,
) -> Primitive:
    """Matrix product (..., m, k) x (..., k, n) -> (..., m, n) (oneDNN matmul; ONNX MatMul, Gemm).

    All have the same number of dimensions, 2 or more; batch dimensions are equal or 1, those of `bias` dst's
    or 1.
    """
    return _Recipe(
        "dnnl_matmul_primitive_desc_create",
        lambda h: (h["src"], h["weights"], h["bias"], h["dst"]),
        {"src": src, "weights": weights, "bias": bias, "dst": dst},
        attributes,
        (SRC, WEIGHTS, BIAS, DST),
    ).create()


def inner_product(
    src: MemoryDesc,
    weights: MemoryDesc,
    dst: MemoryDesc,
    *,
    bias: MemoryDesc | None = None,
    attributes: Attributes = _DEFAULT,
) -> Primitive:
    """src (N, C, ...) x weights (M, C, ...) -> dst (N, M), summed over all but the first dimension."""
    return _Recipe(
        "dnnl_inner_product_forward_primitive_desc_create",
        lambda h: (_FORWARD_INFERENCE, h["src"], h["weights"], h["bias"], h["dst"]),
        {"src": src, "weights": weights, "bias": bias, "dst": dst},
        attributes,
        (SRC, WEIGHTS, BIAS, DST),
    ).create()


def eltwise(
    src: MemoryDesc,
    dst: MemoryDesc,
    algorithm: str,
    *,
    alpha: float = 0.0,
    beta: float = 0.0,
    attributes: Attributes = _DEFAULT,
) -> Primitive:
    """One function on each element, by an algorithm of `ELTWISE`; src and dst may be one memory."""
    number = _algorithm(ELTWISE, algorithm)
    return _Recipe(
        "dnnl_eltwise_forward_primitive_desc_create",
        lambda h: (_FORWARD_INFERENCE, number, h["src"], h["dst"], alpha, beta),
        {"src": src, "dst": dst},
        attributes,
        (SRC, DST),
    ).create()


def binary(
    src0: MemoryDesc,
    src1: MemoryDesc,
    dst: MemoryDesc,
    algorithm: str,
    *,
    attributes: Attributes = _DEFAULT,
) -> Primitive:
    """`f(src0, src1)` by an algorithm of `BINARY`; all have the same number of dimensions, 1 broadcasts."""
    number = _algorithm(BINARY, algorithm)
    return _Recipe(
        "dnnl_binary_primitive_desc_create",
        lambda h: (number, h["src0"], h["src1"], h["dst"]),
        {"src0": src0, "src1": src1, "dst": dst},
        attributes,
        (SRC_0, SRC_1, DST),
    ).create()


def concat(
    sources: Sequence[MemoryDesc],
    axis: int,
    dst: MemoryDesc | None = None,
    *,
    attributes: Attributes = _DEFAULT,
) -> Primitive:
    """Sources one behind the other along `axis`; without `dst` oneDNN chooses its layout."""
    _need_sources(sources)
    _check_axis(axis, sources[0])
    return _Recipe(
        "dnnl_concat_primitive_desc_create",
        lambda h: (h["dst"], len(sources), axis, _source_handles(h)),
        {**_named(sources), "dst": dst},
        attributes,
        (*map(multiple_src, range(len(sources))), DST),
    ).create()


def sum_of(
    sources: Sequence[MemoryDesc],
    scales: Sequence[float] | None = None,
    dst: MemoryDesc | None = None,
    *,
    attributes: Attributes = _DEFAULT,
) -> Primitive:
    """Sum of `scale * source` over sources of the same dimensions (oneDNN sum; ONNX Sum, Add)."""
    _need_sources(sources)
    factors = (1.0,) * len(sources) if scales is None else tuple(scales)
    if len(factors) != len(sources):
        raise BackendError(f"{len(sources)} sources cannot have the scales {factors}")
    scale_array = (c_float * len(factors))(*factors)
    return _Recipe(
        "dnnl_sum_primitive_desc_create",
        lambda h: (h["dst"], len(sources), scale_array, _source_handles(h)),
        {**_named(sources), "dst": dst},
        attributes,
        (*map(multiple_src, range(len(sources))), DST),
    ).create()


def _need_sources(sources: Sequence[MemoryDesc]) -> None:
    if not sources:
        raise BackendError("at least one source is needed")


def _named(sources: Sequence[MemoryDesc]) -> dict[str, MemoryDesc | None]:
    return {f"src{index}": desc for index, desc in enumerate(sources)}


def _source_handles(handles: Handles) -> ctypes.Array[c_void_p]:
    sources = [handle for name, handle in handles.items() if name != "dst"]
    return (c_void_p * len(sources))(*sources)


def _check_axis(axis: int, desc: MemoryDesc) -> None:
    if not 0 <= axis < desc.ndims:
        raise BackendError(f"there is no axis {axis} in dimensions {desc.dims}")


def softmax(
    src: MemoryDesc,
    dst: MemoryDesc,
    axis: int,
    *,
    log: bool = False,
    attributes: Attributes = _DEFAULT,
) -> Primitive:
    """Softmax or, with `log`, its logarithm along one axis (ONNX Softmax and LogSoftmax from opset 13 on)."""
    _check_axis(axis, src)
    kind = _SOFTMAX["logsoftmax" if log else "softmax"]
    return _Recipe(
        "dnnl_softmax_forward_primitive_desc_create",
        lambda h: (_FORWARD_INFERENCE, kind, h["src"], h["dst"], axis),
        {"src": src, "dst": dst},
        attributes,
        (SRC, DST),
    ).create()


def batch_normalization(
    src: MemoryDesc,
    dst: MemoryDesc,
    epsilon: float,
    *,
    scale: bool = True,
    shift: bool = True,
    relu: bool = False,
    attributes: Attributes = _DEFAULT,
) -> Primitive:
    """Batch normalization with given statistics: float32 vectors MEAN, VARIANCE, and SCALE, SHIFT if asked
    for.
    """
    flags = _USE_GLOBAL_STATS | _USE_SCALE * scale | _USE_SHIFT * shift | _FUSE_RELU * relu
    return _Recipe(
        "dnnl_batch_normalization_forward_primitive_desc_create",
        lambda h: (_FORWARD_INFERENCE, h["src"], h["dst"], epsilon, flags),
        {"src": src, "dst": dst},
        attributes,
        (SRC, DST, MEAN, VARIANCE, *((SCALE,) if scale else ()), *((SHIFT,) if shift else ())),
    ).create()


def layer_normalization(
    src: MemoryDesc,
    dst: MemoryDesc,
    epsilon: float,
    *,
    scale: bool = True,
    shift: bool = True,
    attributes: Attributes = _DEFAULT,
) -> Primitive:
    """Normalization over the last dimension by its own statistics (ONNX LayerNormalization with axis -1).

    SCALE and SHIFT are float32 vectors of that dimension.
    """
    flags = _USE_SCALE * scale | _USE_SHIFT * shift
    return _Recipe(
        "dnnl_layer_normalization_forward_primitive_desc_create",
        lambda h: (_FORWARD_INFERENCE, h["src"], h["dst"], None, epsilon, flags),
        {"src": src, "dst": dst},
        attributes,
        (SRC, DST, *((SCALE,) if scale else ()), *((SHIFT,) if shift else ())),
    ).create()


def lrn(
    src: MemoryDesc,
    dst: MemoryDesc,
    local_size: int,
    alpha: float,
    beta: float,
    k: float,
    *,
    kind: str = "across_channels",
    attributes: Attributes = _DEFAULT,
) -> Primitive:
    """`x / (k + alpha / n * sum of squares over the window of n) ** beta`; `kind` across_channels or
    within_channel.

    Across channels n is `local_size` (ONNX LRN, its bias is k); within a channel the window is local_size in
    every spatial dimension and n its volume.
    Raises `Unimplemented` for an even size, for which oneDNN's window is one element smaller than ONNX's.
    """
    if local_size % 2 == 0:
        raise Unimplemented(f"oneDNN has no window of the even size {local_size} as ONNX means it")
    number = _algorithm(_LRN, kind)
    return _Recipe(
        "dnnl_lrn_forward_primitive_desc_create",
        lambda h: (_FORWARD_INFERENCE, number, h["src"], h["dst"], local_size, alpha, beta, k),
        {"src": src, "dst": dst},
        attributes,
        (SRC, DST),
    ).create()


def reduction(
    src: MemoryDesc,
    dst: MemoryDesc,
    algorithm: str,
    *,
    p: float = 0.0,
    epsilon: float = 0.0,
    attributes: Attributes = _DEFAULT,
) -> Primitive:
    """Reduces the dimensions that are 1 in dst, by an algorithm of `REDUCTION`; `p` and `epsilon` are of the
    norms.
    """
    number = _algorithm(REDUCTION, algorithm)
    return _Recipe(
        "dnnl_reduction_primitive_desc_create",
        lambda h: (number, h["src"], h["dst"], p, epsilon),
        {"src": src, "dst": dst},
        attributes,
        (SRC, DST),
    ).create()


def resampling(
    src: MemoryDesc,
    dst: MemoryDesc,
    kind: str,
    *,
    factors: Sequence[float] | None = None,
    attributes: Attributes = _DEFAULT,
) -> Primitive:
    """Resizes spatial dimensions, by `nearest` or `linear`, centres of pixels aligned (half_pixel in ONNX
    Resize).

    Without `factors` they follow from the dimensions.
    """
    count = _need_spatial("a resampling", src)
    array = None
    if factors is not None:
        if len(factors) != count:
            raise BackendError(
                f"factors {tuple(factors)} must have one value for each of {count} spatial dimensions"
            )
        array = (c_float * count)(*factors)
    number = _algorithm(_RESAMPLING, kind)
    return _Recipe(
        "dnnl_resampling_forward_primitive_desc_create",
        lambda h: (_FORWARD_INFERENCE, number, array, h["src"], h["dst"]),
        {"src": src, "dst": dst},
        attributes,
        (SRC, DST),
    ).create()


def prelu(
    src: MemoryDesc,
    weights: MemoryDesc,
    dst: MemoryDesc,
    *,
    attributes: Attributes = _DEFAULT,
) -> Primitive:
    """`x if x > 0 else x * w`; weights have as many dimensions as src, 1 broadcasts (ONNX PRelu)."""
    return _Recipe(
        "dnnl_prelu_forward_primitive_desc_create",
        lambda h: (_FORWARD_INFERENCE, h["src"], h["weights"], h["dst"]),
        {"src": src, "weights": weights, "dst": dst},
        attributes,
        (SRC, WEIGHTS, DST),
    ).create()


def shuffle(
    src: MemoryDesc,
    dst: MemoryDesc,
    axis: int,
    group_size: int,
    *,
    attributes: Attributes = _DEFAULT,
) -> Primitive:
    """Reads the axis as (rest, group_size), transposes that, and flattens it again."""
    _check_axis(axis, src)
    if group_size < 1:
        raise BackendError(f"the group size must be at least 1, not {group_size}")
    return _Recipe(
        "dnnl_shuffle_forward_primitive_desc_create",
        lambda h: (_FORWARD_INFERENCE, h["src"], h["dst"], axis, group_size),
        {"src": src, "dst": dst},
        attributes,
        (SRC, DST),
    ).create()


def reorder(src: MemoryDesc, dst: MemoryDesc, *, attributes: Attributes = _DEFAULT) -> Primitive:
    """Copies between layouts and element types (SRC to DST), of the same dimensions."""
    held = engine()
    return _Recipe(
        "dnnl_reorder_primitive_desc_create",
        lambda h: (h["src"], held.handle, h["dst"], held.handle),
        {"src": src, "dst": dst},
        attributes,
        (SRC, DST),
        engine_first=False,
    ).create()
