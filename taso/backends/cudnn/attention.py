"""Attention as cuDNN's one operation for it, from plain sizes: no kernel of the lowering is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from taso.backends.cudnn.description import FLOAT32, Attribute, Description, Operation, Tensor
from taso.backends.places import row_major_strides
from taso.graph.errors import BackendError
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

    def tensor(self, uid: int, dtype: DType) -> Tensor:
        return Tensor(uid, self.dims, self.strides or tuple(row_major_strides(self.dims)), dtype)


Q, K, V, OUT, MASK = 1, 2, 3, 4, 5
"""Uids of the tensors of `attention`."""


def attention(
    q: Heads, k: Heads, v: Heads, out: Heads, scale: float, causal: bool = False,
    mask: Sequence[int] | None = None, dtype: DType = DType.FLOAT, precision: str = FLOAT32,
) -> Description:  # fmt: skip
    """softmax(scale · Q · Kᵀ + mask) · V; causal: a query sees the keys up to its own place.

    Heads of Q may be a multiple of those of K and V, which are then shared by neighbours. The mask, of four dense
    dimensions that broadcast to (batch, heads, queries, keys), is added. Raises `BackendError` for sizes that do not
    fit each other.
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
        tensors.append(Tensor(MASK, tuple(mask), tuple(row_major_strides(mask)), dtype))
        inputs["bias"] = MASK
    attributes: dict[str, Attribute] = {"attn_scale": scale, "causal": causal}
    operation = Operation.of("sdpa", inputs, {"O": OUT}, attributes)
    return Description(tuple(tensors), (operation,), precision, io=dtype)
