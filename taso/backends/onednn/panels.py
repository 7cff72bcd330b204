"""Products with constant matrices by machine code of our own (`taso.backends.x86`): the algorithm `panels`.

That is MatMul and Gemm with a constant second matrix, and Conv with filters of one tap, channels last, whose pixels are
the rows. What stands behind runs in registers, as far as there is code for it. Sums of more than `_LONGEST` terms are
taken in parts, so that the rows which all columns need stay in the second-level cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from taso.backends.base import Array
from taso.backends.lowering import LAST, PLAIN, Kernel, Layouts, Operand, Step
from taso.backends.onednn.coded import Host, Planned, isa_here, launch, needed_isa, take
from taso.backends.onednn.library import library
from taso.backends.onednn.places import RESULT, Block, Place, layouts_alike
from taso.backends.onednn.primitives import Unimplemented
from taso.backends.onednn.winograd import second_level_cache
from taso.backends.x86.assembler import Isa
from taso.backends.x86.posts import ByColumn, ByElement
from taso.backends.x86.products import Product, in_panels, most_rows
from taso.graph.ops.linear import conv_settings
from taso.graph.types import DType

NAME = "panels"

_FEWEST_ROWS, _SMALL = 4, 2 << 20
"""Rows below which reading the weights takes all the time there is, if these have more bytes."""
_LONGEST = 1024
"""Terms of a sum that are added up in one go."""
_SHARE = 3
"""What part of the second-level cache the rows of a chunk may take, or their rows of the result with them."""
_LEAST_CHUNK = 28, 112
"""Rows that a chunk has at least, where all weights stay in the cache and where they do not."""
_ITEM = 4


# ── which kernels ────────────────────────────────────────────────────────────────────────────────────────────────


def algorithms(kernel: Kernel, layouts: Layouts) -> tuple[str, ...]:
    """`panels` where a kernel is a product with a constant matrix, and machine code runs here."""
    found = _problem(kernel, layouts)
    return (NAME,) if found is not None and isa_here() is not None else ()


@dataclass(frozen=True)
class _Problem:
    """Sizes of the product that a kernel is, and the factor of its second matrix."""

    rows: int
    inner: int
    columns: int
    factor: float = 1.0


def _problem(kernel: Kernel, layouts: Layouts) -> _Problem | None:
    """The kernel's product where it is one with a constant matrix, else None."""
    step = kernel.anchor
    if step is None or step.op.domain or kernel.chained or step.op.name not in ("Conv", "MatMul", "Gemm"):
        return None
    if any(i is None or i < 0 for i in step.inputs[:2]):
        return None
    x, w = (kernel.operands[i] for i in step.inputs[:2] if i is not None)
    out = kernel.results[0]
    tensors = [o.type for o in (*kernel.operands, *kernel.results)]
    if x.constant or not w.constant or not all(t.static and t.dtype is DType.FLOAT for t in tensors):
        return None
    if any(0 in t.static_shape for t in tensors):
        return None
    found = _conv(step, x, w, out, layouts) if step.op.name == "Conv" else _matrices(step, x, w, out, layouts)
    if found is None or found.rows < _FEWEST_ROWS and w.type.nbytes > _SMALL:
        return None
    if not _is_addable(kernel, step, found.columns):
        return None
    return found if Product(found.rows, found.inner, found.columns, found.inner, found.columns).fits else None


def _is_addable(kernel: Kernel, step: Step, columns: int) -> bool:
    """Whether there is a post for what a product adds: a row for all, or what is constant."""
    index = step.inputs[2] if len(step.inputs) > 2 else None
    return index is None or kernel.operands[index].constant or _is_row(step, kernel.operands[index], columns)


def _is_row(step: Step, operand: Operand, columns: int) -> bool:
    """Whether an operand is added to every row, as it is."""
    beta, dims = step.attrs.float("beta") if step.op.name == "Gemm" else 1.0, operand.type.static_shape
    return beta == 1 and prod(dims) == columns and (not dims or dims[-1] == columns)


def _conv(step: Step, x: Operand, w: Operand, out: Operand, layouts: Layouts) -> _Problem | None:
    full, (n, channels, *sizes) = conv_settings(w.type, step.attrs), x.type.static_shape
    single = set(w.type.static_shape[2:]) == {1} and full.int("group") == 1
    if not single or set(full.ints("strides")) != {1} or set(full.ints("pads")) != {0}:
        return None
    if not all(layouts_alike(layouts, o.type, o.layout, LAST) for o in (x, out)):
        return None
    return _Problem(n * prod(sizes), channels, w.type.static_shape[0])


def _matrices(step: Step, x: Operand, w: Operand, out: Operand, layouts: Layouts) -> _Problem | None:
    left, right = x.type.static_shape, w.type.static_shape
    if not all(layouts_alike(layouts, o.type, o.layout, PLAIN) for o in (x, out)) or min(len(left), len(right)) < 2:
        return None
    if step.op.name == "Gemm":
        columns = right[0] if _by_column(step) else right[1]
        return None if step.attrs.int("transA") else _Problem(left[0], left[1], columns, step.attrs.float("alpha"))
    return _Problem(prod(left[:-1]), left[-1], right[-1]) if prod(right[:-2]) == 1 else None


def adds_in_place(kernel: Kernel) -> bool:
    """Whether a product by this algorithm may lie where an operand is that it adds: partial sums would overwrite it."""
    step = kernel.anchor
    weight = step.inputs[1] if step is not None else None
    if step is None or weight is None:
        return False
    dims = kernel.operands[weight].type.static_shape
    return (dims[1] if _by_column(step) else dims[-2]) <= _LONGEST


def _by_column(step: Step) -> bool:
    """Whether columns of the second matrix lie together, and not its rows."""
    return step.op.name == "Conv" or step.op.name == "Gemm" and bool(step.attrs.int("transB"))


# ── building ─────────────────────────────────────────────────────────────────────────────────────────────────────


def build(host: Host, step: Step, followers: Sequence[Step]) -> frozenset[int]:
    """Adds the launches of a kernel by this algorithm; the operands whose memory may be the result's.

    Raises `Unimplemented` where the kernel is none for it.
    """
    isa, problem = needed_isa(), _problem(host.kernel, host.layouts)
    if problem is None:
        raise Unimplemented("there is no product by machine code for this kernel")
    planned = [_bias(host, step, problem)] if host.has(step, 2) else []
    axis = 1 if step.op.name == "Conv" else host.kernel.results[0].type.rank - 1
    taken = take(host, followers, axis)
    parts = _launch(host, step, problem, isa, [*planned, *taken.posts])
    host.behind(followers[taken.count :])
    # partial sums would overwrite what is yet to be added
    return taken.added if parts == 1 else frozenset()


def _launch(host: Host, step: Step, problem: _Problem, isa: Isa, planned: Sequence[Planned]) -> int:
    """Launches the product, in as many parts of its sum as it returns."""
    given, weight = host.place(host.index(step, 0)), host.index(step, 1)
    threads = library().get_max_threads()
    count = -(-problem.inner // _LONGEST)
    length = -(-problem.inner // count)
    chunk = _chunk(problem, length, isa)
    # a vector that is added comes first, all else last
    vector = count > 1 and bool(planned) and planned[0].post == ByColumn("add")
    so_far = Planned(ByElement("add"), Place(RESULT))
    for part in range(count):
        start = part * length
        inner = min(length, problem.inner - start)
        own = [] if count > 1 else list(planned)
        if count > 1 and part == 0:
            own = list(planned[:vector])
        elif count > 1:
            own = [so_far, *(planned[vector:] if part == count - 1 else ())]
        product = Product(
            problem.rows, inner, problem.columns, problem.inner, problem.columns, tuple(p.post for p in own),
            chunk=chunk, threads=threads, isa=isa,
        )  # fmt: skip
        left = replace(given, offset=given.offset + start * _ITEM)
        panels = _panels(host, step, weight, problem, isa, start, inner)
        launch(host, product, (left, panels, Place(RESULT)), own)
    return count


def _chunk(problem: _Problem, inner: int, isa: Isa) -> int:
    """Rows that are multiplied with all columns before the next ones are: as many as stay in the cache."""
    cache = second_level_cache() // _SHARE
    weights = inner * problem.columns * _ITEM
    row = (inner + problem.columns if weights <= cache else inner) * _ITEM
    block = most_rows(isa)
    return max(cache // row // block, -(-_LEAST_CHUNK[weights > cache] // block)) * block


def _panels(host: Host, step: Step, index: int, problem: _Problem, isa: Isa, start: int, inner: int) -> Place:
    """The rows of the second matrix from `start` on, in panels."""
    by_column = _by_column(step)

    def make(array: Array) -> Block:
        flat = np.asarray(array, np.float32)
        matrix = flat.reshape(problem.columns, -1).T if by_column else flat.reshape(-1, problem.columns)
        part = matrix[start : start + inner]
        scaled = part if problem.factor == 1 else part * np.float32(problem.factor)
        return Block.of(in_panels(scaled[None], isa))

    return host.constant(index, f"panels {by_column} {problem.factor!r} {start} {inner}", make)


# ── what stands behind ───────────────────────────────────────────────────────────────────────────────────────────


def _bias(host: Host, step: Step, problem: _Problem) -> Planned:
    index = host.index(step, 2)
    if _is_row(step, host.kernel.operands[index], problem.columns):
        return Planned(ByColumn("add"), host.place(index))
    beta = step.attrs.float("beta")

    def make(array: Array) -> Block:
        whole = np.broadcast_to(np.asarray(array, np.float32) * np.float32(beta), (problem.rows, problem.columns))
        return Block.of(np.ascontiguousarray(whole))

    return Planned(ByElement("add"), host.constant(index, f"whole times {beta!r}", make))


__all__ = ["NAME", "adds_in_place", "algorithms", "build"]
