"""Transposed and deformable convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from taso.graph.errors import GraphError, ShapeError
from taso.graph.index import Call, Expr, Loop, Meaning, Read, Reduce, at, same
from taso.graph.operator import (
    Array,
    Attrs,
    AttrValue,
    FileNode,
    Operator,
    Reading,
    Spelling,
    Types,
    Unmodelled,
    register,
)  # fmt: skip
from taso.graph.ops.common import (
    is_given,
    only_attributes,
    present,
    require_equal,
    require_rank,
    require_same_dtype,
    single_axes,
)  # fmt: skip
from taso.graph.ops.linear import conv_settings
from taso.graph.ops.windows import read_window, spatial_sizes
from taso.graph.types import Dim, DType, TensorType, show_shape

# ── ConvTranspose ────────────────────────────────────────────────────────────────────────────────────────────────
# weight: input channels × output channels / group × window; pads cut off what the full result has at its ends


def _window(weight: TensorType) -> tuple[int, ...]:
    return weight.with_shape(weight.dims[2:]).static_shape


def _transposed_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    op = "ConvTranspose"
    x, w = present(types, 0, op), present(types, 1, op)
    if x.rank < 3 or x.rank != w.rank:
        raise ShapeError(f"{op}: input {show_shape(x.shape)} and weight {show_shape(w.shape)} must have equal rank ≥ 3")
    require_same_dtype(types, op)
    shown = f"{show_shape(x.shape)} and of the weight {show_shape(w.shape)}"
    require_equal(x.dims[1], w.dims[0], op, f"channels of {shown}")
    group = attrs.int("group")
    if group < 1 or isinstance(x.dims[1], int) and x.dims[1] % group:
        raise ShapeError(f"{op}: {x.dims[1]} channels do not divide into {group} groups")
    channels = w.dims[1] * group
    if is_given(types, 2):
        require_rank(present(types, 2, op), 1, op, "the bias")
        require_equal(present(types, 2, op).dims[0], channels, op, "size of the bias and output channels")
    return (x.with_shape((x.dims[0], channels, *_transposed_sizes(x, w, attrs))),)


def _transposed_sizes(x: TensorType, w: TensorType, attrs: Attrs) -> tuple[Dim, ...]:
    n, full, kernel = x.rank - 2, conv_settings(w, attrs), _window(w)
    extra = attrs.ints("output_padding") or (0,) * n
    strides, pads, dilations = full.ints("strides"), full.ints("pads"), full.ints("dilations")
    for name, given, wanted in (
        ("strides", strides, n), ("pads", pads, 2 * n), ("dilations", dilations, n), ("output_padding", extra, n),
    ):  # fmt: skip
        if len(given) != wanted:
            raise ShapeError(f"ConvTranspose: {name} must have {wanted} numbers, not {len(given)}")
    sizes = tuple(
        _full_size(d, kernel[a], strides[a], dilations[a], extra[a]) - (pads[a] + pads[n + a])
        for a, d in enumerate(x.dims[2:])
    )
    if any(isinstance(d, int) and d < 0 for d in sizes):
        raise ShapeError(f"ConvTranspose: pads {pads} cut off more than the result has")
    return sizes


def _full_size(size: Dim, kernel: int, stride: int, dilation: int, extra: int) -> Dim:
    return (size - 1) * stride + (extra + (kernel - 1) * dilation + 1)


def _read_transposed(node: FileNode) -> Reading:
    """ConvTranspose 1 to 22; auto_pad and output_shape become explicit pads."""
    known = ("auto_pad", "dilations", "group", "kernel_shape", "output_padding", "output_shape", "pads", "strides")
    only_attributes(node, *known)
    weight = node.type(1)
    if not weight.with_shape(weight.dims[2:]).static:
        raise Unmodelled("ConvTranspose with a window of unknown size")
    kernel = _window(weight)
    if node.ints("kernel_shape") not in (None, kernel):
        raise ShapeError(f"ConvTranspose: kernel_shape {node.ints('kernel_shape')} is not that of the weight, {kernel}")
    n = len(kernel)
    attrs: dict[str, AttrValue] = {
        "strides": node.ints("strides") or (1,) * n, "dilations": node.ints("dilations") or (1,) * n,
        "output_padding": node.ints("output_padding") or (0,) * n, "group": node.attrs.get("group", 1),
    }  # fmt: skip
    inputs = (0, 1, 2) if node.has(2) else (0, 1)
    return Reading({**attrs, "pads": _pads(node, Attrs(attrs), kernel)}, inputs)


def _pads(node: FileNode, attrs: Attrs, kernel: tuple[int, ...]) -> tuple[int, ...]:
    n, mode, wanted = len(kernel), node.attrs.get("auto_pad", "NOTSET"), node.ints("output_shape")
    if mode not in ("NOTSET", "", "VALID", "SAME_UPPER", "SAME_LOWER"):
        raise Unmodelled(f"auto_pad {mode!r}")
    if wanted is None and mode not in ("SAME_UPPER", "SAME_LOWER"):
        return (node.ints("pads") or (0,) * (2 * n)) if mode != "VALID" else (0,) * (2 * n)
    strides, dilations, extra = (attrs.ints(k) for k in ("strides", "dilations", "output_padding"))
    begins, ends = [], []
    for a, size in enumerate(node.type(0).dims[2:]):
        # some files give all sizes of the output, some the spatial ones
        goal: Dim = size * strides[a] if wanted is None else wanted[len(wanted) - n + a]
        total = _full_size(size, kernel[a], strides[a], dilations[a], extra[a]) - goal
        if not isinstance(total, int) or total < 0:
            raise Unmodelled("ConvTranspose whose pads depend on a symbol or would be negative")
        half = total // 2
        begins.append(half if mode == "SAME_UPPER" else total - half)
        ends.append(total - half if mode == "SAME_UPPER" else half)
    return (*begins, *ends)


def _write_transposed(attrs: Attrs, types: Types, opset: int) -> Spelling:
    weight = present(types, 1, "ConvTranspose")
    full: dict[str, AttrValue] = {**conv_settings(weight, attrs), "kernel_shape": _window(weight)}
    if any(attrs.ints("output_padding")):
        full["output_padding"] = attrs.ints("output_padding")
    return Spelling("ConvTranspose", full, tuple(range(len(types))))


def _transposed(arrays: Sequence[Array | None], attrs: Attrs) -> tuple[Array, ...]:
    """Adds every input position, times the window, to where the window lies; then cuts the pads off."""
    x, w, bias = (*arrays, None)[:3]
    if x is None or w is None:
        raise GraphError("ConvTranspose needs its inputs 0 and 1")
    n, groups = x.ndim - 2, attrs.int("group")
    full = conv_settings(TensorType(DType.FLOAT, w.shape), attrs)
    strides, pads, dilations = full.ints("strides"), full.ints("pads"), full.ints("dilations")
    extra = attrs.ints("output_padding") or (0,) * n
    grouped = np.asarray(x, np.float64).reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    windows = np.asarray(w, np.float64).reshape(groups, w.shape[0] // groups, *w.shape[1:])
    sizes = [
        (x.shape[2 + a] - 1) * strides[a] + (w.shape[2 + a] - 1) * dilations[a] + 1 + max(extra[a], 0) for a in range(n)
    ]
    total = np.zeros((x.shape[0], groups, w.shape[1], *sizes), np.float64)
    before = (slice(None),) * 3
    for place in np.ndindex(*w.shape[2:]):
        spots = tuple(
            slice(k * d, k * d + (size - 1) * s + 1, s)
            for k, d, s, size in zip(place, dilations, strides, x.shape[2:], strict=True)
        )
        total[before + spots] += np.einsum("bgc...,gco->bgo...", grouped, windows[before + place])
    kept = tuple(slice(pads[a], size - pads[n + a]) for a, size in enumerate(sizes))
    whole = total[before + kept]
    whole = whole.reshape(x.shape[0], groups * w.shape[1], *whole.shape[3:])
    return (whole if bias is None else whole + bias.reshape(-1, *(1,) * n),)


# onnx.reference does not know of groups on all ranks (onnx 1.23), so the definition stands here
def _transposed_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    """Σ over input positions i and window elements k, where i · stride + k · dilation is the position before the cut.

    What evaluates it is `_transposed`: the sum here runs over all pairs, most of which do not meet.
    """
    x, w = present(types, 0, "ConvTranspose"), present(types, 1, "ConvTranspose")
    (out,) = _transposed_type(types, attrs)
    full, groups, n = conv_settings(w, attrs), attrs.int("group"), x.rank - 2
    strides, pads, dilations = full.ints("strides"), full.ints("pads"), full.ints("dilations")
    batch, g, c, o = Loop("n", out.dims[0]), Loop("g", groups), Loop("c", x.dims[1] // groups), Loop("o", w.dims[1])
    spatial = tuple(Loop(f"y{a}", d) for a, d in enumerate(out.dims[2:]))
    position = tuple(Loop(f"i{a}", d) for a, d in enumerate(x.dims[2:]))
    window = tuple(Loop(f"k{a}", d) for a, d in enumerate(w.dims[2:]))
    channel = at(g, c.extent) + at(c)
    meets = same(*(
        (at(spatial[a], 1, pads[a]), at(position[a], strides[a]) + at(window[a], dilations[a])) for a in range(n)
    ))  # fmt: skip
    data = Read(0, (at(batch), channel, *map(at, position)))
    weight = Read(1, (channel, at(o), *map(at, window)))
    body: Expr = Reduce("sum", (c, *position, *window), Call("mul", (data, Call("mul", (weight, meets)))))
    if is_given(types, 2):
        body = Call("add", (body, Read(2, (at(g, o.extent) + at(o),))))
    return (Meaning(((batch,), (g, o), *single_axes(spatial)), body),)


CONV_TRANSPOSE = register(
    Operator(
        "ConvTranspose", _transposed_type,
        {"strides": (), "pads": (), "dilations": (), "output_padding": (), "group": 1}, linear=frozenset({0, 1}),
        meaning=_transposed_meaning, arity=(2, 3), read=_read_transposed, write=_write_transposed, compute=_transposed,
    )
)  # fmt: skip

# ── DeformConv, by onnx.reference: inputs are data, weight, offsets, bias, mask ──────────────────────────────────────


def _deform_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    op = "DeformConv"
    x, w, offset = (present(types, i, op) for i in range(3))
    if x.rank < 3 or not x.rank == w.rank == offset.rank:
        raise ShapeError(f"{op}: input {x}, weight {w} and offsets {offset} must have equal rank ≥ 3")
    require_same_dtype(types, op)
    group, full = attrs.int("group"), conv_settings(w, attrs)
    require_equal(x.dims[1], w.dims[1] * group, op, f"channels of the input and of the weight times {group} groups")
    sizes = spatial_sizes(
        x.dims[2:], _window(w), full.ints("strides"), full.ints("pads"), full.ints("dilations"), op
    )
    for a, b in zip(offset.dims[2:], sizes, strict=True):
        require_equal(a, b, op, "sizes of offsets and output")
    return (x.with_shape((x.dims[0], w.dims[0], *sizes)),)


def _read_deform(node: FileNode) -> Reading:
    only_attributes(node, "dilations", "group", "kernel_shape", "offset_group", "pads", "strides")
    weight = node.type(1)
    if not weight.with_shape(weight.dims[2:]).static or node.ints("kernel_shape") not in (None, _window(weight)):
        raise Unmodelled("DeformConv with another window than that of its weight")
    settings = read_window(node, _window(weight))
    del settings["kernel_shape"]
    groups = {n: node.attrs.get(n, 1) for n in ("group", "offset_group")}
    inputs = tuple(i if node.has(i) else None for i in range(len(node.types)))
    return Reading({**settings, **groups}, inputs)


def _write_deform(attrs: Attrs, types: Types, opset: int) -> Spelling:
    weight = present(types, 1, "DeformConv")
    full: dict[str, AttrValue] = {**conv_settings(weight, attrs), "kernel_shape": _window(weight)}
    inputs = tuple(i if t is not None else None for i, t in enumerate(types))
    return Spelling("DeformConv", {**full, "offset_group": attrs.int("offset_group")}, inputs)


DEFORM_CONV = register(
    Operator(
        "DeformConv", _deform_type, {"strides": (), "pads": (), "dilations": (), "group": 1, "offset_group": 1},
        linear=frozenset({1}), arity=(3, 5), read=_read_deform, write=_write_deform, since=19,
    )
)  # fmt: skip
