"""Operators that are linear in their data and in their weights: products and convolutions."""

from __future__ import annotations

from taso.graph.errors import ShapeError
from taso.graph.index import Affine, Call, Expr, Loop, Meaning, Read, Reduce, at, same
from taso.graph.operator import (
    REQUIRED,
    Attrs,
    AttrValue,
    FileNode,
    Operator,
    Reading,
    Spelling,
    Trait,
    Types,
    Unmodelled,
    register,
)  # fmt: skip
from taso.graph.ops.common import (
    broadcast,
    broadcast_index,
    broadcast_read,
    only_attributes,
    output_loops,
    present,
    require_equal,
    require_rank,
    require_same_dtype,
    single_axes,
)  # fmt: skip
from taso.graph.ops.elementwise import constant
from taso.graph.ops.windows import read_window, spatial_sizes, window_index
from taso.graph.types import Dim, TensorType, show_shape

# ── MatMul ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _matmul_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    a, b = present(types, 0, "MatMul"), present(types, 1, "MatMul")
    if a.rank == 0 or b.rank == 0:
        raise ShapeError("MatMul: a scalar has no rows or columns")
    require_same_dtype(types, "MatMul")
    inner_b = b.dims[-2] if b.rank > 1 else b.dims[0]
    require_equal(
        a.dims[-1], inner_b, "MatMul", f"the inner dimensions of {show_shape(a.shape)} and {show_shape(b.shape)}"
    )
    batch = broadcast([a.dims[:-2], b.dims[:-2]], "MatMul")
    rows = a.dims[-2:-1]
    columns = b.dims[-1:] if b.rank > 1 else ()
    return (a.with_shape((*batch, *rows, *columns)),)


def _matmul_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    a, b = present(types, 0, "MatMul"), present(types, 1, "MatMul")
    (out,) = _matmul_type(types, attrs)
    loops = output_loops(out.dims)
    inner = Loop("k", a.dims[-1])
    tail = (1 if a.rank > 1 else 0) + (1 if b.rank > 1 else 0)
    batch = loops[: len(loops) - tail]
    row = (at(loops[len(batch)]),) if a.rank > 1 else ()
    column = (at(loops[-1]),) if b.rank > 1 else ()
    left = Read(0, (*_batch_index(a.dims[:-2], batch), *row, at(inner)))
    right = Read(1, (*_batch_index(b.dims[:-2], batch), at(inner), *column))
    return (Meaning(single_axes(loops), Reduce("sum", (inner,), Call("mul", (left, right)))),)


def _batch_index(dims: tuple[Dim, ...], loops: tuple[Loop, ...]) -> tuple[Affine, ...]:
    offset = len(loops) - len(dims)
    return tuple(broadcast_index(d, loops[offset + i]) for i, d in enumerate(dims))


MATMUL = register(
    Operator("MatMul", _matmul_type, {}, linear=frozenset({0, 1}), meaning=_matmul_meaning, arity=(2, 2))
)

# ── Gemm ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _gemm_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    a, b = present(types, 0, "Gemm"), present(types, 1, "Gemm")
    require_rank(a, 2, "Gemm", "A")
    require_rank(b, 2, "Gemm", "B")
    require_same_dtype(types, "Gemm")
    rows, inner = a.dims[::-1] if attrs.int("transA") else a.dims
    inner_b, columns = b.dims[::-1] if attrs.int("transB") else b.dims
    require_equal(inner, inner_b, "Gemm", f"the inner dimensions of {show_shape(a.shape)} and {show_shape(b.shape)}")
    out = (rows, columns)
    if len(types) > 2 and types[2] is not None:
        c = present(types, 2, "Gemm")
        if broadcast([out, c.dims], "Gemm") != out:
            raise ShapeError(f"Gemm: C of shape {show_shape(c.shape)} does not broadcast to {show_shape(out)}")
    return (a.with_shape(out),)


def _gemm_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    a = present(types, 0, "Gemm")
    (out,) = _gemm_type(types, attrs)
    i, j = output_loops(out.dims)
    inner = Loop("k", a.dims[0] if attrs.int("transA") else a.dims[1])
    left = Read(0, (at(inner), at(i)) if attrs.int("transA") else (at(i), at(inner)))
    right = Read(1, (at(j), at(inner)) if attrs.int("transB") else (at(inner), at(j)))
    body = _scaled(Reduce("sum", (inner,), Call("mul", (left, right))), attrs.float("alpha"))
    if len(types) > 2 and types[2] is not None:
        bias = broadcast_read(2, present(types, 2, "Gemm"), (i, j))
        body = Call("add", (body, _scaled(bias, attrs.float("beta"))))
    return (Meaning(single_axes((i, j)), body),)


def _scaled(body: Expr, factor: float) -> Expr:
    return body if factor == 1 else Call("mul", (body, constant(factor)))


def _read_gemm(node: FileNode) -> Reading:
    """Gemm 7 and newer; before, an attribute says whether C broadcasts."""
    if node.version < 7:
        raise Unmodelled(f"Gemm {node.version}")
    only_attributes(node, "alpha", "beta", "transA", "transB")
    inputs = (0, 1, 2) if node.has(2) else (0, 1)
    return Reading({k: (bool(v) * 1 if k.startswith("trans") else v) for k, v in node.attrs.items()}, inputs)


def _write_gemm(attrs: Attrs, types: Types, opset: int) -> Spelling:
    if len(types) < 3 and opset < 11:
        zero = present(types, 0, "Gemm").dtype.numpy.type(0)
        return Spelling("Gemm", {**attrs, "beta": 0.0}, (0, 1, zero.reshape(1)))
    return Spelling("Gemm", attrs, tuple(range(len(types))))


GEMM = register(
    Operator(
        "Gemm", _gemm_type, {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}, linear=frozenset({0, 1}),
        meaning=_gemm_meaning, arity=(2, 3), read=_read_gemm, write=_write_gemm, since=7,
    )
)  # fmt: skip

# ── Conv ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# weight: output channels × input channels / group × window; pads in ONNX's order (all begins, then all ends);
# the window is the weight's own, so kernel_shape is no attribute here. An empty list stands for ones (zeros for pads).


def conv_settings(weight: TensorType, attrs: Attrs) -> Attrs:
    """Strides, pads and dilations written out for the weight's number of spatial axes."""
    n = weight.rank - 2
    full: dict[str, AttrValue] = {
        "strides": attrs.ints("strides") or (1,) * n,
        "pads": attrs.ints("pads") or (0,) * (2 * n),
        "dilations": attrs.ints("dilations") or (1,) * n,
        "group": attrs.int("group"),
    }
    return Attrs(full)


def _kernel(weight: TensorType) -> tuple[int, ...]:
    return weight.with_shape(weight.dims[2:]).static_shape


def _conv_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, w = present(types, 0, "Conv"), present(types, 1, "Conv")
    if x.rank < 3 or x.rank != w.rank:
        raise ShapeError(f"Conv: input {show_shape(x.shape)} and weight {show_shape(w.shape)} must have equal rank ≥ 3")
    require_same_dtype(types, "Conv")
    full, group = conv_settings(w, attrs), attrs.int("group")
    require_equal(
        x.dims[1], w.dims[1] * group, "Conv",
        f"channels of {show_shape(x.shape)} and of the weight {show_shape(w.shape)} times {group} groups",
    )  # fmt: skip
    out_channels = w.dims[0]
    if group < 1 or (isinstance(out_channels, int) and out_channels % group):
        raise ShapeError(f"Conv: {out_channels} output channels do not divide into {group} groups")
    if len(types) > 2 and types[2] is not None:
        bias = present(types, 2, "Conv")
        require_rank(bias, 1, "Conv", "the bias")
        require_equal(bias.dims[0], out_channels, "Conv", "size of the bias and output channels")
    sizes = spatial_sizes(
        x.dims[2:], _kernel(w), full.ints("strides"), full.ints("pads"), full.ints("dilations"), "Conv"
    )
    return (x.with_shape((x.dims[0], out_channels, *sizes)),)


def _conv_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    w = present(types, 1, "Conv")
    (out,) = _conv_type(types, attrs)
    full, groups = conv_settings(w, attrs), attrs.int("group")
    n, g = Loop("n", out.dims[0]), Loop("g", groups)
    o = Loop("o", w.dims[0] // groups)
    spatial = tuple(Loop(f"y{a}", d) for a, d in enumerate(out.dims[2:]))
    window = tuple(Loop(f"k{a}", d) for a, d in enumerate(w.dims[2:]))
    c = Loop("c", w.dims[1])
    data = Read(0, (at(n), at(g, c.extent) + at(c), *window_index(spatial, window, full)), "zero")
    weight = Read(1, (at(g, o.extent) + at(o), at(c), *map(at, window)))
    body: Expr = Reduce("sum", (c, *window), Call("mul", (data, weight)))
    if len(types) > 2 and types[2] is not None:
        body = Call("add", (body, Read(2, (at(g, o.extent) + at(o),))))
    return (Meaning(((n,), (g, o), *single_axes(spatial)), body),)


def _read_conv(node: FileNode) -> Reading:
    """Conv 1 to 22; auto_pad becomes explicit pads."""
    only_attributes(node, "auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    weight = node.type(1)
    if not weight.with_shape(weight.dims[2:]).static:
        raise Unmodelled("Conv with a window of unknown size")
    kernel = _kernel(weight)
    given = node.ints("kernel_shape")
    if given is not None and given != kernel:
        raise ShapeError(f"Conv: kernel_shape {given} is not that of the weight, {kernel}")
    settings = read_window(node, kernel)
    del settings["kernel_shape"]
    return Reading({**settings, "group": node.attrs.get("group", 1)}, (0, 1, 2) if node.has(2) else (0, 1))


def _write_conv(attrs: Attrs, types: Types, opset: int) -> Spelling:
    weight = present(types, 1, "Conv")
    full = {**conv_settings(weight, attrs), "kernel_shape": _kernel(weight)}
    return Spelling("Conv", full, tuple(range(len(types))))


CONV = register(
    Operator(
        "Conv", _conv_type, {"strides": (), "pads": (), "dilations": (), "group": 1}, linear=frozenset({0, 1}),
        meaning=_conv_meaning, arity=(2, 3), read=_read_conv, write=_write_conv,
    )
)  # fmt: skip

# ── Enlarge (internal): the window of a convolution's weight zero-padded, centred ────────────────────────────────
# (target − size) // 2 zeros before, the rest behind; an axis that is larger already stays (TASO's enlarge)


def _enlarge_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    w = present(types, 0, "Enlarge")
    target = attrs.ints("kernel_shape")
    if w.rank != len(target) + 2:
        raise ShapeError(f"Enlarge: a window of {target} does not fit a weight of shape {show_shape(w.shape)}")
    sizes = tuple(max(a, b) for a, b in zip(_kernel(w), target, strict=True))
    return (w.with_shape((*w.dims[:2], *sizes)),)


def _enlarge_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    w = present(types, 0, "Enlarge")
    (out,) = _enlarge_type(types, attrs)
    loops = output_loops(out.dims)
    before = [(big - small) // 2 for big, small in zip(_kernel(out), _kernel(w), strict=True)]
    index = (*map(at, loops[:2]), *(at(loop, 1, -b) for loop, b in zip(loops[2:], before, strict=True)))
    return (Meaning(single_axes(loops), Read(0, index, "zero")),)


ENLARGE = register(
    Operator(
        "Enlarge", _enlarge_type, {"kernel_shape": REQUIRED}, linear=frozenset({0}), meaning=_enlarge_meaning,
        internal=True,
    )
)  # fmt: skip

# ── MergeGroupConv (internal): a grouped convolution's weight with `count` neighbouring groups merged into one ───
# output channel o goes to slot (o div (O / groups)) mod count; the other slots are zero


def _merge_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    w, groups, count = present(types, 0, "MergeGroupConv"), attrs.int("groups"), attrs.int("count")
    if w.rank < 3:
        raise ShapeError(f"MergeGroupConv: {show_shape(w.shape)} is not the shape of a convolution's weight")
    if groups % count:
        raise ShapeError(f"MergeGroupConv: {groups} groups cannot be merged by {count}")
    out_channels = w.dims[0]
    if isinstance(out_channels, int) and out_channels % groups:
        raise ShapeError(f"MergeGroupConv: {out_channels} output channels do not divide into {groups} groups")
    return (w.with_shape((out_channels, w.dims[1] * count, *w.dims[2:])),)


def _merge_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    w, groups, count = present(types, 0, "MergeGroupConv"), attrs.int("groups"), attrs.int("count")
    outer, slot = Loop("outer", groups // count), Loop("slot", count)
    o, c = Loop("o", w.dims[0] // groups), Loop("c", w.dims[1])
    place = Loop("place", count)
    window = tuple(Loop(f"k{a}", d) for a, d in enumerate(w.dims[2:]))
    channel = at(outer, o.extent * count) + at(slot, o.extent) + at(o)
    own = Read(0, (channel, at(c), *map(at, window)))
    body = Call("mul", (own, same((at(slot), at(place)))))
    return (Meaning(((outer, slot, o), (place, c), *single_axes(window)), body),)


MERGE_GROUP_CONV = register(
    Operator(
        "MergeGroupConv", _merge_type, {"groups": REQUIRED, "count": REQUIRED}, linear=frozenset({0}),
        meaning=_merge_meaning, internal=True,
    )
)  # fmt: skip

__all__ = ["CONV", "ENLARGE", "GEMM", "MATMUL", "MERGE_GROUP_CONV", "Trait", "conv_settings"]
