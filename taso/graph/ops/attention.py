"""Attention and rotary embedding. Their meaning is that of onnx.reference."""

from __future__ import annotations

from taso.graph.errors import ShapeError
from taso.graph.operator import Attrs, AttrValue, FileNode, Operator, Reading, Required, Types, register
from taso.graph.ops.common import element_type, is_given, present, require_equal, require_rank, writes_changed
from taso.graph.types import Dim, TensorType

# ── Attention: inputs Q, K, V, mask, past key, past value, lengths of keys; four outputs ─────────────────────────
# tensors of rank 3 hold their heads side by side in the last axis; then attributes give the numbers of heads


def _heads(t: TensorType, count: AttrValue, what: str) -> tuple[Dim, Dim, Dim, Dim]:
    """Batch, heads, length and size of a head."""
    if t.rank == 4:
        batch, heads, length, size = t.dims
        return batch, heads, length, size
    require_rank(t, 3, "Attention", what)
    if not isinstance(count, int) or count < 1:
        raise ShapeError(f"Attention: the number of heads of {what}, {t}, must be given")
    width = t.dims[2]
    if isinstance(width, int) and width % count:
        raise ShapeError(f"Attention: {width} does not divide into {count} heads")
    return t.dims[0], count, t.dims[1], width // count


def _attention_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    q, k, v = (present(types, i, "Attention") for i in range(3))
    if not q.rank == k.rank == v.rank:
        raise ShapeError(f"Attention: Q {q}, K {k} and V {v} must have equal rank")
    batch, heads, length, size = _heads(q, attrs["q_num_heads"], "Q")
    key_batch, key_heads, keys, key_size = _heads(k, attrs["kv_num_heads"], "K")
    value_batch, value_heads, values, value_size = _heads(v, attrs["kv_num_heads"], "V")
    for a, b, what in (
        (batch, key_batch, "batch sizes of Q and K"), (batch, value_batch, "batch sizes of Q and V"),
        (size, key_size, "head sizes of Q and K"), (key_heads, value_heads, "numbers of heads of K and V"),
        (keys, values, "lengths of K and V"),
    ):  # fmt: skip
        require_equal(a, b, "Attention", what)
    past: Dim = 0
    if is_given(types, 4):
        require_rank(present(types, 4, "Attention"), 4, "Attention", "the past key")
        past = present(types, 4, "Attention").dims[2]
    total = past + keys
    out = (batch, heads, length, value_size) if q.rank == 4 else (batch, length, heads * value_size)
    return (
        q.with_shape(out), k.with_shape((batch, key_heads, total, size)),
        v.with_shape((batch, key_heads, total, value_size)), q.with_shape((batch, heads, length, total)),
    )  # fmt: skip


def _read_attention(node: FileNode) -> Reading:
    attrs = dict(node.attrs)
    if "softmax_precision" in attrs:
        attrs["softmax_precision"] = element_type(attrs["softmax_precision"], "Attention")
    inputs: list[int | None] = [i if node.has(i) else None for i in range(len(node.types))]
    while inputs and inputs[-1] is None:
        inputs.pop()
    return Reading(attrs, tuple(inputs))


_ATTENTION: dict[str, AttrValue | Required] = {
    "is_causal": 0, "kv_num_heads": None, "left_window_size": -1, "q_num_heads": None, "qk_matmul_output_mode": 0,
    "right_window_size": -1, "scale": None, "softcap": 0.0, "softmax_precision": None,
}  # fmt: skip
ATTENTION = register(
    Operator(
        "Attention", _attention_type, _ATTENTION, arity=(3, 7), read=_read_attention, since=23,
        write=writes_changed("Attention", _ATTENTION, {"left_window_size": 25, "right_window_size": 25}),
        optional_outputs=frozenset({1, 2, 3}),
    )
)  # fmt: skip

# ── RotaryEmbedding ──────────────────────────────────────────────────────────────────────────────────────────────


def _rotary_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, "RotaryEmbedding")
    if x.rank not in (3, 4):
        raise ShapeError(f"RotaryEmbedding: the input must have 3 or 4 dimensions, not {x.rank}")
    if x.rank == 3 and not attrs.int("num_heads"):
        raise ShapeError("RotaryEmbedding: an input of 3 dimensions needs num_heads")
    return (x,)


_ROTARY: dict[str, AttrValue | Required] = {"interleaved": 0, "num_heads": 0, "rotary_embedding_dim": 0}
ROTARY_EMBEDDING = register(
    Operator(
        "RotaryEmbedding", _rotary_type, _ROTARY, linear=frozenset({0}), arity=(3, 4), since=23,
        write=writes_changed("RotaryEmbedding", _ROTARY),
    )
)  # fmt: skip
