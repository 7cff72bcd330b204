"""Attention as cuDNN's one operation for it: from plain sizes, and the kernels that it computes.

cuDNN takes queries, keys, values and what it makes in one type: float16 or bfloat16, or float32 of which products round
to TF32. Kernels of ours bring them to that, and side by side as cuDNN wants a head's elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from taso.backends.cudnn.description import BF16, FLOAT32, FP16, TF32, Attribute, Description, Operation, Tensor
from taso.backends.lowering import BLOCKED, PLAIN, Kernel, Operand, Step, axes_of, named_axes
from taso.backends.places import row_major_strides, strides_of
from taso.graph.errors import BackendError
from taso.graph.operator import REGISTRY
from taso.graph.types import DType


@dataclass(frozen=True)
class Heads:
    """Queries, keys or values: batch, heads, length and size of a head, and how they lie (strides in elements)."""

    dims: tuple[int, int, int, int]
    strides: tuple[int, int, int, int] | None = None

    @staticmethod
    def side_by_side(batch: int, heads: int, length: int, size: int) -> Heads:
        """Of a tensor (batch, length, heads · size)."""
        return Heads((batch, heads, length, size), (length * heads * size, size, heads * size, 1))

    @property
    def innermost(self) -> bool:
        """Whether the elements of a head lie one behind the other."""
        return self.strides is None or self.strides[3] == 1

    def tensor(self, uid: int, dtype: DType) -> Tensor:
        return Tensor(uid, self.dims, self.strides or tuple(row_major_strides(self.dims)), dtype)


Q, K, V, OUT, MASK = 1, 2, 3, 4, 5
"""Uids of the tensors of `attention`."""


def attention(
    q: Heads, k: Heads, v: Heads, out: Heads, scale: float, causal: bool = False,
    mask: Sequence[int] | None = None, dtype: DType = DType.FLOAT, precision: str = FLOAT32,
    mask_dtype: DType | None = None,
) -> Description:  # fmt: skip
    """softmax(scale · Q · Kᵀ + mask) · V; causal: a query sees the keys up to its own place.

    Heads of Q may be a multiple of those of K and V, which are then shared by neighbours. The mask, of four dense
    dimensions that broadcast to (batch, heads, queries, keys), is added; its type may be another than `dtype`. Raises
    `BackendError` for sizes that do not fit each other.
    """
    (batch, heads, queries, size), (_, groups, keys, _) = q.dims, k.dims
    fitting = k.dims == (batch, groups, keys, size) and v.dims == (batch, groups, keys, v.dims[3])
    if not fitting or heads % groups or out.dims != (batch, heads, queries, v.dims[3]):
        raise BackendError(f"attention of {q.dims}, {k.dims} and {v.dims} does not give {out.dims}")
    tensors = [x.tensor(uid, dtype) for uid, x in ((Q, q), (K, k), (V, v), (OUT, out))]
    inputs = {"q": Q, "k": K, "v": V}
    if mask is not None:
        whole = (batch, heads, queries, keys)
        if len(mask) != 4 or any(m not in (1, d) for m, d in zip(mask, whole, strict=True)):
            raise BackendError(f"a mask of {tuple(mask)} does not broadcast to {whole}")
        tensors.append(Tensor(MASK, tuple(mask), tuple(row_major_strides(mask)), mask_dtype or dtype))
        inputs["bias"] = MASK
    attributes: dict[str, Attribute] = {"attn_scale": scale, "causal": causal}
    operation = Operation.of("sdpa", inputs, {"O": OUT}, attributes)
    return Description(tuple(tensors), (operation,), precision, io=dtype)


# ── kernels that are attention ───────────────────────────────────────────────────────────────────────────────────

TYPES = {FP16: DType.FLOAT16, BF16: DType.BFLOAT16, TF32: DType.FLOAT}
"""In what cuDNN's operation computes, by precision; for float32 it has no plan."""


@dataclass(frozen=True)
class Factor:
    """Queries, keys or values: operand `index` of the kernel, as `seen` with a row for each of its elements."""

    index: int
    seen: Operand

    @property
    def heads(self) -> Heads:
        """With batch and heads before rows and columns, where it lies."""
        dims = self.seen.type.static_shape
        return Heads(_lifted(dims), _lifted_strides(dims, strides_of(dims, self.seen.layout)))

    @property
    def side_by_side(self) -> bool:
        """Whether cuDNN can read it where it lies: a head's elements one behind the other."""
        return not self.seen.constant and self.heads.innermost


@dataclass(frozen=True)
class Attended:
    """A kernel whose first `count` steps are an attention.

    `scales` are the operands of one element with which scores are multiplied or, with True, by which they are divided;
    `mask` is the operand that is added, its dimensions with ones in front.
    """

    q: Factor
    k: Factor
    v: Factor
    out: Heads
    scales: tuple[tuple[int, bool], ...]
    mask: int | None
    mask_dims: tuple[int, ...] | None
    count: int

    def description(self, scale: float, precision: str, directly: bool = False) -> Description:
        """The graph, of operands brought side by side; `directly`: where they lie and where the result is to."""
        factors = (self.q, self.k, self.v)
        q, k, v = (f.heads if directly and f.side_by_side else Heads(f.heads.dims) for f in factors)
        out = self.out if directly and self.out.innermost else Heads(self.out.dims)
        return attention(q, k, v, out, scale, False, self.mask_dims, TYPES[precision], precision, DType.FLOAT)


def _lifted(dims: Sequence[int]) -> tuple[int, int, int, int]:
    batch, heads, rows, columns = (dims[0], 1, *dims[1:]) if len(dims) == 3 else dims
    return batch, heads, rows, columns


def _lifted_strides(dims: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int, int]:
    batch, heads, rows, columns = (strides[0], strides[0], *strides[1:]) if len(dims) == 3 else strides
    return batch, heads, rows, columns


def attended(kernel: Kernel) -> Attended | None:
    """The attention that a kernel begins with: a product, scales, a mask, a softmax and a product; None where none is.

    Everything is float32 and has three axes or four; keys come in turned, as the first product reads them.
    """
    tensors = (*kernel.operands, *kernel.results)
    if len(kernel.results) != 1 or len(kernel.steps) < 3 or any(
        not o.type.static or o.type.dtype is not DType.FLOAT or o.layout == BLOCKED or 0 in o.type.static_shape
        for o in tensors
    ):
        return None
    if any(i is not None and i < 0 and i != -n for n, s in enumerate(kernel.steps) for i in s.inputs):
        return None
    first, last = kernel.steps[0], next((n for n, s in enumerate(kernel.steps) if n and s.op.name == "MatMul"), 0)
    softmax, second = kernel.steps[last - 1], kernel.steps[last]
    if last < 2 or not _is_plain(first, "MatMul") or not _is_plain(softmax, "Softmax"):
        return None
    between = _between(kernel, kernel.steps[1 : last - 1])
    given = (*first.inputs, second.inputs[1])
    if between is None or second.inputs[0] != -last or any(i is None or i < 0 for i in given):
        return None
    q, k, v = (Factor(i, kernel.operands[i]) for i in given if i is not None)
    rank = q.seen.type.rank
    if not rank == k.seen.type.rank == v.seen.type.rank == kernel.results[0].type.rank or rank not in (3, 4):
        return None
    if softmax.attrs.int("axis") % rank != rank - 1:
        return None
    k = replace(k, seen=_turned(k.seen))
    result = kernel.results[0]
    dims = result.type.static_shape
    out = Heads(_lifted(dims), _lifted_strides(dims, strides_of(dims, result.layout)))
    scales, mask = between
    mask_dims = None if mask is None else _with_ones(kernel.operands[mask].type.static_shape, rank)
    found = Attended(q, k, v, out, scales, mask, mask_dims, last + 1)
    try:
        found.description(1.0, TF32)
    except BackendError:
        # sizes that broadcast otherwise than heads do
        return None
    return found


def _is_plain(step: Step, name: str) -> bool:
    return step.op.name == name and not step.op.domain


def _with_ones(dims: Sequence[int], rank: int) -> tuple[int, ...]:
    whole = (1,) * (rank - len(dims)) + tuple(dims)
    return (whole[0], 1, *whole[1:]) if rank == 3 else whole


def _between(kernel: Kernel, steps: Sequence[Step]) -> tuple[tuple[tuple[int, bool], ...], int | None] | None:
    """The scales and the mask of the steps between product and softmax, None where one of them is neither."""
    scales: list[tuple[int, bool]] = []
    mask: int | None = None
    for step in steps:
        others = [i for i in step.inputs if i is not None and i >= 0]
        if step.op.domain or len(others) != 1 or len(step.inputs) != 2 or mask is not None:
            return None
        index, operand = others[0], kernel.operands[others[0]]
        divides = step.op.name == "Div" and step.inputs[1] == index
        if divides or step.op.name == "Mul":
            if not operand.constant or operand.type.size != 1:
                return None
            scales.append((index, divides))
        elif step.op.name == "Add" and (operand.constant or operand.layout == PLAIN):
            mask = index
        else:
            return None
    return tuple(scales), mask


def _turned(operand: Operand) -> Operand:
    """The operand with its last two axes exchanged, in the same memory."""
    dims, rank = operand.type.static_shape, operand.type.rank
    order = [*range(rank - 2), rank - 1, rank - 2]
    turned = [dims[a] for a in order]
    lies = [order.index(a) for a in axes_of(operand.layout, rank)]
    return replace(operand, type=operand.type.with_shape(turned), layout=named_axes(lies, turned))


def brought(factor: Factor, dtype: DType) -> Kernel:
    """The kernel that brings a factor to a type, its rows plainly one after the other."""
    return _cast(replace(factor.seen, constant=False), Operand(replace(factor.seen.type, dtype=dtype), PLAIN, False))


def put_back(kernel: Kernel, dtype: DType) -> Kernel:
    """The kernel that brings what was computed plainly in a type to a kernel's result."""
    result = kernel.results[0]
    return _cast(Operand(replace(result.type, dtype=dtype), PLAIN, False), result)


def _cast(source: Operand, target: Operand) -> Kernel:
    cast = REGISTRY["Cast"]
    return Kernel((source,), (Step(cast, cast.complete({"to": target.type.dtype}), (0,)),), (target,))


__all__ = ["MASK", "OUT", "TYPES", "Attended", "Factor", "Heads", "K", "Q", "V", "attended", "attention", "brought",
           "put_back"]  # fmt: skip
