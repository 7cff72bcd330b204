"""Pools."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from taso.graph.errors import ShapeError
from taso.graph.index import Call, Const, Expr, Inside, Loop, Meaning, Read, Reduce, at
from taso.graph.operator import (
    REQUIRED,
    Attrs,
    AttrValue,
    FileNode,
    Operator,
    Reading,
    Spelling,
    Types,
    Unmodelled,
    Unspellable,
    register,
)  # fmt: skip
from taso.graph.ops.common import one_output, only_attributes, output_loops, present, single_axes
from taso.graph.ops.windows import read_window, spatial_sizes, window_index
from taso.graph.types import TensorType

_WINDOW: dict[str, AttrValue] = {"strides": (), "pads": (), "dilations": (), "ceil_mode": 0}


def pool_settings(attrs: Attrs) -> Attrs:
    """kernel_shape, strides, pads and dilations written out for every spatial axis."""
    n = len(attrs.ints("kernel_shape"))
    return Attrs(
        {
            **attrs,
            "strides": attrs.ints("strides") or (1,) * n,
            "pads": attrs.ints("pads") or (0,) * (2 * n),
            "dilations": attrs.ints("dilations") or (1,) * n,
        }
    )


def _pool_type(op: str, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, full = present(types, 0, op), pool_settings(attrs)
    if x.rank < 3:
        raise ShapeError(f"{op}: {x} has no axis behind batch and channels to pool over")
    sizes = spatial_sizes(
        x.dims[2:], full.ints("kernel_shape"), full.ints("strides"), full.ints("pads"), full.ints("dilations"), op,
        bool(attrs.int("ceil_mode")),
    )  # fmt: skip
    _require_data(op, x, full)
    return (x.with_shape((*x.dims[:2], *sizes)),)


def _require_data(op: str, x: TensorType, full: Attrs) -> None:
    """Raises `ShapeError` where a window could lie in the padding alone: what that gives, runtimes do not agree on."""
    kernel, pads, dilations = full.ints("kernel_shape"), full.ints("pads"), full.ints("dilations")
    n = len(kernel)
    for axis in range(n):
        reach = dilations[axis] * (kernel[axis] - 1)
        both, size = (pads[axis], pads[n + axis]), x.dims[2 + axis]
        steps_over = isinstance(size, int) and size < dilations[axis] and dilations[axis] > 1
        if any(p > reach for p in both) or (steps_over and any(p > 0 for p in both)):
            raise ShapeError(f"{op}: with pads {pads} a window of {kernel} can lie beside {x} altogether")


def _loops(op: str, types: Types, attrs: Attrs) -> tuple[tuple[Loop, ...], tuple[Loop, ...], tuple[Loop, ...]]:
    (out,) = _pool_type(op, types, attrs)
    loops = output_loops(out.dims)
    return loops[:2], loops[2:], tuple(Loop(f"k{a}", k) for a, k in enumerate(attrs.ints("kernel_shape")))


def _read_pool(node: FileNode, *more: str) -> Reading:
    one_output(node)
    known = ("auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides", "storage_order")
    only_attributes(node, *known, *more)
    kernel = node.ints("kernel_shape")
    if kernel is None:
        raise Unmodelled(f"{node.op_type} without kernel_shape")
    settings = read_window(node, kernel)
    ceil = node.attrs.get("ceil_mode", 0)
    if ceil and node.attrs.get("auto_pad", "NOTSET") not in ("NOTSET", ""):
        raise Unmodelled(f"{node.op_type} with both ceil_mode and auto_pad")
    extra = {name: node.attrs[name] for name in more if name in node.attrs}
    return Reading({**settings, "ceil_mode": ceil, **extra}, (0,))


def _write_pool(op: str, attrs: Attrs, opset: int, ceil_since: int, dilations_since: int) -> Spelling:
    said: dict[str, AttrValue] = {**pool_settings(attrs)}
    plain = {"ceil_mode": not attrs.int("ceil_mode"), "dilations": all(d == 1 for d in attrs.ints("dilations"))}
    for name, since in (("ceil_mode", ceil_since), ("dilations", dilations_since)):
        if opset < since:
            if not plain[name]:
                raise Unspellable(f"{op} with {name} cannot be written in ONNX opset {opset}")
            del said[name]
    if said.get("count_include_pad") == 0 and opset < 7:
        del said["count_include_pad"]
    return Spelling(op, said, (0,))


# ── MaxPool ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _max_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    outer, spatial, window = _loops("MaxPool", types, attrs)
    read = Read(0, (*map(at, outer), *window_index(spatial, window, pool_settings(attrs))), "least")
    return (Meaning(single_axes(outer + spatial), Reduce("max", window, read)),)


MAX_POOL = register(
    Operator(
        "MaxPool", lambda types, attrs: _pool_type("MaxPool", types, attrs), {"kernel_shape": REQUIRED, **_WINDOW},
        meaning=_max_meaning, read=_read_pool,
        write=lambda attrs, types, opset: _write_pool("MaxPool", attrs, opset, 10, 10),
    )
)  # fmt: skip

# ── AveragePool ──────────────────────────────────────────────────────────────────────────────────────────────────
# count_include_pad counts explicit pads, never what ceil_mode adds behind them


def _average_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    outer, spatial, window = _loops("AveragePool", types, attrs)
    index = (*map(at, outer), *window_index(spatial, window, pool_settings(attrs)))
    total = Reduce("sum", window, Read(0, index, "zero"))
    counted: Expr = Const(Fraction(1)) if attrs.int("count_include_pad") else Inside(0, index)
    body = Call("div", (total, Reduce("sum", window, counted)))
    return (Meaning(single_axes(outer + spatial), body),)


def _read_average(node: FileNode) -> Reading:
    """AveragePool 1 to 22. Counting the padding together with ceil_mode is left to ONNX's reference."""
    if node.attrs.get("ceil_mode", 0) and node.attrs.get("count_include_pad", 0):
        raise Unmodelled("AveragePool with ceil_mode and count_include_pad")
    return _read_pool(node, "count_include_pad")


AVERAGE_POOL = register(
    Operator(
        "AveragePool", lambda types, attrs: _pool_type("AveragePool", types, attrs),
        {"kernel_shape": REQUIRED, **_WINDOW, "count_include_pad": 0}, linear=frozenset({0}), meaning=_average_meaning,
        read=_read_average, write=lambda attrs, types, opset: _write_pool("AveragePool", attrs, opset, 10, 19),
    )
)  # fmt: skip

# ── GlobalAveragePool, GlobalMaxPool ─────────────────────────────────────────────────────────────────────────────


def _global_type(op: str, types: Types) -> tuple[TensorType, ...]:
    x = present(types, 0, op)
    return (x.with_shape((*x.dims[:2], *(1 for _ in x.dims[2:]))),)


def _global_reads(op: str, types: Types) -> tuple[Sequence[Loop], Sequence[Loop], Read]:
    x = present(types, 0, op)
    (out,) = _global_type(op, types)
    loops = output_loops(out.dims)
    window = tuple(Loop(f"k{a}", d) for a, d in enumerate(x.dims[2:]))
    return loops, window, Read(0, (*map(at, loops[:2]), *map(at, window)))


def _global_average(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    loops, window, read = _global_reads("GlobalAveragePool", types)
    ones = Reduce("sum", tuple(window), Inside(0, read.index))
    body = Call("div", (Reduce("sum", tuple(window), read), ones))
    return (Meaning(single_axes(loops), body),)


def _global_max(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    loops, window, read = _global_reads("GlobalMaxPool", types)
    return (Meaning(single_axes(loops), Reduce("max", tuple(window), read)),)


GLOBAL_AVERAGE_POOL = register(
    Operator(
        "GlobalAveragePool", lambda types, attrs: _global_type("GlobalAveragePool", types), linear=frozenset({0}),
        meaning=_global_average,
    )
)  # fmt: skip
GLOBAL_MAX_POOL = register(
    Operator("GlobalMaxPool", lambda types, attrs: _global_type("GlobalMaxPool", types), meaning=_global_max)
)

# ── LpPool, GlobalLpPool: (Σ |x|^p)^(1/p); nothing is added in the padding ───────────────────────────────────────


def _lp(reads: Expr, window: Sequence[Loop], attrs: Attrs) -> Expr:
    p = Const(Fraction(attrs.int("p")))
    total = Reduce("sum", tuple(window), Call("pow", (Call("abs", (reads,)), p)))
    return Call("pow", (total, Const(Fraction(1, attrs.int("p")))))


def _lp_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    outer, spatial, window = _loops("LpPool", types, attrs)
    read = Read(0, (*map(at, outer), *window_index(spatial, window, pool_settings(attrs))), "zero")
    return (Meaning(single_axes(outer + spatial), _lp(read, window, attrs)),)


def _read_lp(node: FileNode) -> Reading:
    if node.version < 2 or node.attrs.get("p", 2) == 0:
        raise Unmodelled(f"{node.op_type} of version 1, or of p = 0")
    return _read_pool(node, "p")


LP_POOL = register(
    Operator(
        "LpPool", lambda types, attrs: _pool_type("LpPool", types, attrs),
        {"kernel_shape": REQUIRED, **_WINDOW, "p": 2}, meaning=_lp_meaning, read=_read_lp, since=2,
        write=lambda attrs, types, opset: _write_pool("LpPool", attrs, opset, 18, 18),
    )
)  # fmt: skip


def _global_lp(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    loops, window, read = _global_reads("GlobalLpPool", types)
    return (Meaning(single_axes(loops), _lp(read, window, attrs)),)


GLOBAL_LP_POOL = register(
    Operator(
        "GlobalLpPool", lambda types, attrs: _global_type("GlobalLpPool", types), {"p": 2}, meaning=_global_lp, since=2
    )
)
