"""Sliding windows: the arithmetic that convolutions and pools share."""

from __future__ import annotations

from collections.abc import Sequence

from taso.graph.errors import ShapeError
from taso.graph.index import Affine, Loop, at
from taso.graph.operator import Attrs, AttrValue, FileNode, Unmodelled
from taso.graph.types import Dim, ceil_div, show_shape


def output_size(
    size: Dim, kernel: int, stride: int, pads: tuple[int, int], dilation: int, ceil_mode: bool = False
) -> Dim:
    """Number of window positions along one axis (ONNX Conv 11, MaxPool 12).

    With `ceil_mode` a last window that would start in the padding behind the data is dropped (MaxPool 22).
    """
    span = size + (pads[0] + pads[1] - dilation * (kernel - 1) - 1)
    if not ceil_mode:
        return span // stride + 1
    count = ceil_div(span, stride) + 1
    if isinstance(count, int) and isinstance(size, int) and (count - 1) * stride >= size + pads[0]:
        count -= 1
    return count


def spatial_sizes(
    sizes: Sequence[Dim], kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int],
    op: str, ceil_mode: bool = False,
) -> tuple[Dim, ...]:  # fmt: skip
    """Output sizes of all spatial axes; raises `ShapeError` for settings that fit no window."""
    n = len(sizes)
    for name, given, wanted in (
        ("kernel_shape", kernel, n), ("strides", strides, n), ("pads", pads, 2 * n), ("dilations", dilations, n),
    ):  # fmt: skip
        if len(given) != wanted:
            raise ShapeError(f"{op}: {name} must have {wanted} numbers for {n} spatial axes, not {len(given)}")
    if any(n < 1 for n in (*kernel, *strides, *dilations)):
        raise ShapeError(f"{op}: kernel_shape, strides and dilations must be at least 1")
    out = tuple(
        output_size(sizes[a], kernel[a], strides[a], (pads[a], pads[n + a]), dilations[a], ceil_mode) for a in range(n)
    )
    if any(isinstance(d, int) and d < 0 for d in out):
        shown = show_shape(tuple(sizes))
        raise ShapeError(f"{op}: a window of {tuple(kernel)} does not fit into {shown} with pads {tuple(pads)}")
    return out


def window_index(spatial: Sequence[Loop], window: Sequence[Loop], attrs: Attrs) -> tuple[Affine, ...]:
    """Position that window element `window` of output position `spatial` looks at, per axis."""
    strides, pads, dilations = attrs.ints("strides"), attrs.ints("pads"), attrs.ints("dilations")
    return tuple(
        at(spatial[a], strides[a]) + at(window[a], dilations[a], 0 - pads[a]) for a in range(len(spatial))
    )


def same_pads(size: Dim, kernel: int, stride: int, dilation: int, lower: bool) -> tuple[int, int] | None:
    """SAME padding of one axis (auto_pad of Conv 11), or None where it depends on a symbol."""
    if isinstance(size, int):
        total = max((ceil_div_int(size, stride) - 1) * stride + dilation * (kernel - 1) + 1 - size, 0)
    elif stride == 1:
        total = dilation * (kernel - 1)
    else:
        return None
    half = total // 2
    return (total - half, half) if lower else (half, total - half)


def ceil_div_int(a: int, b: int) -> int:
    return -(-a // b)


def read_window(node: FileNode, kernel: tuple[int, ...]) -> dict[str, AttrValue]:
    """kernel_shape, strides, dilations and explicit pads of a file's node; auto_pad is resolved here."""
    n = len(kernel)
    strides = node.ints("strides") or (1,) * n
    dilations = node.ints("dilations") or (1,) * n
    mode = node.attrs.get("auto_pad", "NOTSET")
    pads = node.ints("pads") or (0,) * (2 * n)
    if mode == "VALID":
        pads = (0,) * (2 * n)
    elif mode in ("SAME_UPPER", "SAME_LOWER"):
        sizes = node.type(0).dims[2:]
        pairs = [same_pads(sizes[a], kernel[a], strides[a], dilations[a], mode == "SAME_LOWER") for a in range(n)]
        if any(p is None for p in pairs):
            raise Unmodelled(f"auto_pad {mode} at a stride above 1 on a symbolic size")
        known = [p for p in pairs if p is not None]
        pads = tuple(p[0] for p in known) + tuple(p[1] for p in known)
    elif mode not in ("NOTSET", ""):
        raise Unmodelled(f"auto_pad {mode!r}")
    return {"kernel_shape": kernel, "strides": strides, "pads": pads, "dilations": dilations}
