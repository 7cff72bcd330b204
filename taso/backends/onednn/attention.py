"""Attention (ONNX Attention 23 to 25) as products and softmaxes of oneDNN, head by head and in blocks of rows.

The scores of a block stay in the second-level cache; of a causal attention those that nobody reads are not computed.
Key and value heads that several query heads share are read in place. float32 alone, and not where the product of
queries and keys is an output: that is left to the operator's definition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from taso.backends.base import Array
from taso.backends.lowering import PLAIN, Operand, Step
from taso.backends.onednn import primitives as p
from taso.backends.onednn.attributes import Attributes, BinaryPostOp, EltwisePostOp, PostOp
from taso.backends.onednn.memory import DataType, MemoryDesc
from taso.backends.onednn.places import RESULT, ArraySpec, Block, Place
from taso.backends.onednn.primitives import Primitive, Unimplemented, is_slow
from taso.backends.onednn.quantized import Host
from taso.backends.onednn.recipe import ArrayLaunch
from taso.backends.onednn.winograd import second_level_cache
from taso.backends.places import row_major_strides
from taso.graph.types import DType, TensorType

_F32, _ITEM = DataType.F32, 4
_Q, _K, _V, _MASK, _PAST_KEY, _PAST_VALUE, _LENGTHS = range(7)
_FEW = 8192
"""Scores of one head below which several heads are computed at once."""
_LEAST_ROWS = 16
_CAUSAL_ROWS = 128
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Heads:
    """A tensor as batch, heads, rows, columns: sizes, strides in elements, and where it is."""

    place: Place
    dims: tuple[int, ...]
    strides: tuple[int, ...]

    def at(self, *start: int) -> Place:
        """Where the matrix of these indices begins."""
        offset = sum(i * s for i, s in zip(start, self.strides, strict=False))
        return replace(self.place, offset=self.place.offset + offset * _ITEM)

    def desc(self, heads: int, rows: int, columns: int, turned: bool = False) -> MemoryDesc:
        """So many of its matrices, with rows and columns exchanged where they are `turned`."""
        dims, strides = (heads, rows, columns), self.strides[1:]
        if turned:
            dims, strides = (heads, columns, rows), (strides[0], strides[2], strides[1])
        return MemoryDesc.strided(dims, _F32, strides)

    @property
    def whole(self) -> MemoryDesc:
        return MemoryDesc.strided(self.dims, _F32, self.strides)

    @property
    def spec(self) -> ArraySpec:
        return ArraySpec(self.place, np.dtype(np.float32), self.dims, tuple(s * _ITEM for s in self.strides))


def _dense(place: Place, dims: Sequence[int]) -> Heads:
    return Heads(place, tuple(dims), row_major_strides(dims))


def _heads(place: Place, dims: tuple[int, ...], count: object) -> Heads:
    """A tensor of rank 4, or one of rank 3 whose `count` heads lie side by side."""
    if len(dims) == 4:
        if count is not None and count != dims[1]:
            raise Unimplemented("another number of heads than there are")
        return _dense(place, dims)
    if not isinstance(count, int):
        raise Unimplemented("nothing says how many heads there are")
    batch, rows, width = dims
    return Heads(place, (batch, count, rows, width // count), (rows * width, width // count, width, 1))


# ── what is added to the scores ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Bias:
    """What masks, windows and lengths come to: 0 where a query attends to a key, -inf where it does not.

    `mask` are the dimensions of a mask, `before` the keys that come before the queries (None: by the lengths).
    """

    queries: int
    keys: int
    mask: tuple[int, ...] | None
    causal: bool
    left: int
    right: int
    before: int | None

    def __call__(self, mask: Array | None, lengths: Array | None) -> Floats:
        """The sum, in as many dimensions as it needs of batch, heads, queries and keys."""
        total = np.zeros((1, 1, 1, self.keys), np.float32)
        if mask is not None:
            total = self._of_mask(mask)
        if lengths is not None:
            ends = lengths.reshape(-1, 1, 1, 1)
            total = total + _forbidden(np.greater_equal(np.arange(self.keys), ends))
        if self.causal or self.left >= 0 or self.right >= 0:
            before = self.before if lengths is None else lengths.reshape(-1, 1, 1, 1) - self.queries
            ahead = np.arange(self.keys) - np.arange(self.queries)[:, None] - np.asarray(before)
            outside = ahead > 0 if self.causal else np.zeros(ahead.shape, bool)
            if self.left >= 0:
                outside |= -ahead > self.left
            if self.right >= 0:
                outside |= ahead > self.right
            total = total + _forbidden(outside)
        return np.ascontiguousarray(total, np.float32)

    def _of_mask(self, mask: Array) -> Floats:
        hides = mask.dtype == np.bool_
        added = _forbidden(np.logical_not(mask)) if hides else mask.astype(np.float32, copy=False)
        shape = (1,) * (4 - added.ndim) + added.shape
        missing, added = self.keys - shape[-1], added.reshape(shape)
        if missing > 0:
            added = np.pad(added, [(0, 0)] * 3 + [(0, missing)], constant_values=-np.inf)
        return added


def _forbidden(where: Array) -> Floats:
    found: Floats = np.where(where, np.float32(-np.inf), np.float32(0))
    return found


def _hopeless(bias: Array) -> Array:
    """Which rows attend to nothing: their results are 0."""
    found: Array = np.isneginf(bias.max(axis=-1, keepdims=True))
    return found


# ── building ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Part:
    """Rows of some heads of one element of the batch, and the keys from the first on that they attend to."""

    batch: int
    head: int
    heads: int
    row: int
    rows: int
    keys: int


def build(host: Host, step: Step) -> None:
    """Adds the launches of an attention; raises `Unimplemented` for what is left to its definition."""
    _Builder(host, step).run()


class _Builder:
    def __init__(self, host: Host, step: Step) -> None:
        self.host, self.step, self.attrs = host, step, step.attrs
        self.primitives: dict[object, Primitive] = {}
        self.check()
        self.q = self.heads(_Q, "q_num_heads")
        self.k, self.v = self.cached(_K, _PAST_KEY, 1), self.cached(_V, _PAST_VALUE, 2)
        self.batch, self.count, self.queries, self.size = self.q.dims
        self.keys, self.values = self.k.dims[2], self.v.dims[3]
        if self.count % self.k.dims[1]:
            raise Unimplemented("a number of heads that those of the keys do not divide")
        self.out = self.result()
        self.before = self.keys - self.host.operand(step, _K).type.static_shape[-2 if self.q_rank == 4 else 1]
        # one query sees all that came before it, and itself
        told = bool(self.attrs.int("is_causal")) and (self.before + 1 < self.keys or host.has(step, _LENGTHS))
        windows = (self.attrs.int("left_window_size"), self.attrs.int("right_window_size"))
        mask = self.mask_dims
        plain = mask is not None and self.mask_type.dtype is DType.FLOAT and mask[3] == self.keys
        made = windows != (-1, -1) or host.has(step, _LENGTHS) or mask is not None and (told or not plain)
        self.causal = told and not made
        self.bias: Heads | None = None
        if made:
            before = None if host.has(step, _LENGTHS) else self.before
            self.bias = self.made_bias(Bias(self.queries, self.keys, mask, told, *windows, before))
        elif mask is not None:
            self.bias = _dense(host.place(host.index(step, _MASK)), mask)
        if self.bias is None and not self.causal:
            self.share()

    # ── what there is ────────────────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        kernel, attrs, has = self.host.kernel, self.attrs, self.host.has
        needed = [self.host.operand(self.step, i) for i in (_Q, _K, _V, _PAST_KEY, _PAST_VALUE) if has(self.step, i)]
        tensors: list[Operand] = [*needed, *kernel.results]
        if len(kernel.steps) > 1 or len(kernel.results) > 3 or any(o.layout != PLAIN for o in tensors):
            raise Unimplemented("attention is plain, alone, and keeps its scores")
        if any(o.type.dtype is not DType.FLOAT for o in tensors):
            raise Unimplemented("attention is in float32")
        if attrs["softmax_precision"] not in (None, DType.FLOAT):
            raise Unimplemented("a softmax in another precision")
        past = [has(self.step, i) for i in (_PAST_KEY, _PAST_VALUE)]
        if past[0] != past[1] or past[0] and has(self.step, _LENGTHS):
            raise Unimplemented("a past of keys or values alone, or of known length")
        windows = (attrs.int("left_window_size"), attrs.int("right_window_size"))
        if min(windows) < -1 or attrs["scale"] is not None and not attrs.float("scale") >= 0:
            raise Unimplemented("a window or a scale that means nothing")
        if has(self.step, _MASK) and self.mask_type.dtype not in (DType.FLOAT, DType.BOOL):
            raise Unimplemented("a mask of other numbers")

    @property
    def q_rank(self) -> int:
        return self.host.operand(self.step, _Q).type.rank

    @property
    def mask_type(self) -> TensorType:
        return self.host.operand(self.step, _MASK).type

    @cached_property
    def mask_dims(self) -> tuple[int, ...] | None:
        if not self.host.has(self.step, _MASK):
            return None
        dims = self.mask_type.static_shape
        full = (1,) * (4 - len(dims)) + dims
        fits = len(dims) in (1, 2, 3, 4) and full[3] <= self.keys
        if not fits or any(d not in (1, n) for d, n in zip(full[:3], self.q.dims[:3], strict=True)):
            raise Unimplemented("a mask that does not broadcast to the scores")
        return full

    def heads(self, position: int, count: str) -> Heads:
        index = self.host.index(self.step, position)
        dims = self.host.operand(self.step, position).type.static_shape
        return _heads(self.host.place(index), dims, self.attrs[count])

    def cached(self, position: int, past: int, result: int) -> Heads:
        """Keys or values, those of the past in front; copied together where there are any, or where they go out."""
        new = self.heads(position, "kv_num_heads")
        goes_out = len(self.host.kernel.results) > result
        if not goes_out and not self.host.has(self.step, past):
            return new
        parts = [new]
        if self.host.has(self.step, past):
            dims = self.host.operand(self.step, past).type.static_shape
            parts.insert(0, _dense(self.host.place(self.host.index(self.step, past)), dims))
        batch, heads, _, size = new.dims
        dims = (batch, heads, sum(x.dims[2] for x in parts), size)
        to = Place(RESULT, result) if goes_out else self.host.recipe.add_scratch(math.prod(dims) * _ITEM)
        whole, start = _dense(to, dims), 0
        for part in parts:
            target = whole.whole.submemory(part.dims, (0, 0, start, 0))
            self.host.reorder(part.whole, part.place, target, whole.place)
            start += part.dims[2]
        return whole

    def result(self) -> Heads:
        dims = (self.batch, self.count, self.queries, self.values)
        if self.q_rank == 4:
            return _dense(Place(RESULT), dims)
        return _heads(Place(RESULT), (self.batch, self.queries, self.count * self.values), self.count)

    def share(self) -> None:
        """Has query heads that share their keys as one with more rows, where nothing tells their rows apart."""
        heads = self.k.dims[1]
        if self.q_rank == 4 and self.count > heads:
            self.count, self.queries = heads, self.queries * (self.count // heads)
            self.q = _dense(self.q.place, (self.batch, self.count, self.queries, self.size))
            self.out = _dense(self.out.place, (self.batch, self.count, self.queries, self.values))

    # ── bias ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def made_bias(self, bias: Bias) -> Heads:
        """The place of what masks and the like come to: computed beforehand where they are constants."""
        positions = [i for i in (_MASK, _LENGTHS) if self.host.has(self.step, i)]
        operands = {i: self.host.operand(self.step, i) for i in positions}
        dims = self.bias_dims(bias)
        if all(o.constant for o in operands.values()):
            given = {i: self.host.supply.array(self.host.index(self.step, i)) for i in positions}
            known = bias(given.get(_MASK), given.get(_LENGTHS))
            return _dense(self.host.recipe.add_constant(Block.of(known)), dims)
        whole = _dense(self.host.recipe.add_scratch(math.prod(dims) * _ITEM), dims)
        specs = tuple(
            ArraySpec(
                self.host.place(self.host.index(self.step, i)), o.type.dtype.numpy, o.type.static_shape,
                tuple(s * o.type.dtype.itemsize for s in row_major_strides(o.type.static_shape)),
            )
            for i, o in operands.items()
        )  # fmt: skip

        def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
            found = dict(zip(positions, inputs, strict=True))
            np.copyto(outs[0], bias(found.get(_MASK), found.get(_LENGTHS)))

        self.host.recipe.launches.append(ArrayLaunch("numpy:bias", run, specs, (whole.spec,)))
        return whole

    def bias_dims(self, bias: Bias) -> tuple[int, ...]:
        batch, heads, rows, _ = bias.mask or (1, 1, 1, 1)
        if self.host.has(self.step, _LENGTHS):
            batch = self.batch
        if bias.causal or bias.left >= 0 or bias.right >= 0:
            rows = self.queries
        return batch, heads, rows, self.keys

    def clear(self, bias: Heads) -> None:
        """Rows that attend to nothing give 0."""
        constant = None
        if bias.place.kind == "constant":
            block = self.host.recipe.constants[bias.place.index]
            if isinstance(block.owner, np.ndarray):
                constant = _hopeless(block.owner)
                if not constant.any():
                    return

        def run(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
            rows = _hopeless(inputs[0]) if constant is None else constant
            if rows.any():
                np.copyto(outs[0], np.float32(0), where=rows)

        self.host.recipe.launches.append(ArrayLaunch("numpy:clear", run, (bias.spec,), (self.out.spec,)))

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def parts(self) -> Iterator[_Part]:
        threads = p.engine().library.get_max_threads()
        budget = second_level_cache() // 2 * threads // _ITEM
        rows = self.rows_at_once(max(budget // self.keys, _LEAST_ROWS * threads))
        at_once = 1
        alone = self.bias is not None and self.bias.dims[1:3] != (1, 1)
        if self.count == self.k.dims[1] and rows == self.queries and not alone and self.queries > 1:
            fitting = budget // (rows * self.keys)
            at_once = max(1, min(self.count, fitting, max(threads, -(-_FEW // (rows * self.keys)))))
        for batch in range(self.batch):
            for head in range(0, self.count, at_once):
                for row in range(0, self.queries, rows):
                    count = min(rows, self.queries - row)
                    yield _Part(
                        batch, head, min(at_once, self.count - head), row, count, self.keys_until(row + count)
                    )

    def rows_at_once(self, most: int) -> int:
        """Rows of a block: about equally many in each, those of a causal attention few enough to save something."""
        if self.causal and self.queries > 2 * _CAUSAL_ROWS:
            most = min(most, _CAUSAL_ROWS)
        if most >= self.queries:
            return self.queries
        blocks = -(-self.queries // most)
        return min(most, -(-self.queries // blocks // _LEAST_ROWS) * _LEAST_ROWS)

    def keys_until(self, row: int) -> int:
        """How many keys the rows before `row` attend to, a few more so that there are not too many sizes."""
        if not self.causal:
            return self.keys
        step = max(_CAUSAL_ROWS, self.keys // 16)
        return min(self.keys, -(-(self.before + row) // step) * step)

    def run(self) -> None:
        parts = list(self.parts())
        most = max(x.heads * x.rows * x.keys for x in parts)
        scores = self.host.recipe.add_scratch(most * _ITEM)
        triangle = self.triangle(parts) if self.causal else None
        for part in parts:
            self.part(part, scores, triangle)
        if self.bias is not None:
            self.clear(self.bias)

    def triangle(self, parts: Sequence[_Part]) -> tuple[Place, int]:
        """What is added to the scores behind the first that a block's first row does not attend to."""
        width = max(x.keys - self.before - x.row - 1 for x in parts)
        rows = max(x.rows for x in parts)
        array = _forbidden(np.arange(max(width, 1)) >= np.arange(rows)[:, None])
        return self.host.recipe.add_constant(Block.of(array)), array.shape[1]

    def part(self, part: _Part, scores: Place, triangle: tuple[Place, int] | None) -> None:
        kv_head = part.head // (self.count // self.k.dims[1])
        dims = (part.heads, part.rows, part.keys)
        lies = MemoryDesc.plain(dims, _F32)
        q = self.q.desc(part.heads, part.rows, self.size)
        turned = self.k.desc(part.heads, part.keys, self.size, turned=True)
        given = {
            p.SRC: self.q.at(part.batch, part.head, part.row), p.WEIGHTS: self.k.at(part.batch, kv_head),
            p.DST: scores,
        }  # fmt: skip
        posts = self.scaling()
        added = None if self.bias is None else self.bias_of(self.bias, part)
        behind = () if added is None else (BinaryPostOp("add", MemoryDesc.plain(added.dims, _F32)),)
        scored = self.product(q, turned, lies, (*posts, *behind))
        if added is not None and scored is not None:
            given[p.post_op_src(len(posts))] = added.place
        self.host.launch(scored or self.fast(self.product(q, turned, lies, posts)), given)
        if added is not None and scored is None:
            self.add(part, scores, added)
        if triangle is not None:
            self.forbid(part, scores, *triangle)
        self.host.launch(self.softmax(part.heads * part.rows, part.keys), {p.SRC: scores, p.DST: scores})
        v = self.v.desc(part.heads, part.keys, self.values)
        out = self.out.desc(part.heads, part.rows, self.values)
        to = self.out.at(part.batch, part.head, part.row)
        gathered = self.fast(self.product(lies, v, out))
        self.host.launch(gathered, {p.SRC: scores, p.WEIGHTS: self.v.at(part.batch, kv_head), p.DST: to})

    def scaling(self) -> tuple[PostOp, ...]:
        """Scale and cap behind the product of queries and keys."""
        given = self.attrs["scale"]
        scale = 1 / math.sqrt(self.size) if given is None else self.attrs.float("scale")
        cap = self.attrs.float("softcap")
        if cap <= 0:
            return (EltwisePostOp("linear", scale, 0.0),)
        return EltwisePostOp("linear", scale / cap, 0.0), EltwisePostOp("tanh"), EltwisePostOp("linear", cap, 0.0)

    def bias_of(self, bias: Heads, part: _Part) -> Heads:
        """What is added to the scores of a part."""
        batches, heads, rows, _ = bias.dims
        at = bias.at(part.batch * (batches > 1), part.head * (heads > 1), part.row * (rows > 1))
        return _dense(at, (1, part.rows if rows > 1 else 1, part.keys))

    def add(self, part: _Part, scores: Place, added: Heads) -> None:
        dims = (part.heads, part.rows, part.keys)
        self.host.recipe.launches.append(
            ArrayLaunch("numpy:add", _add, (added.spec,), (_dense(scores, dims).spec,))
        )

    def product(
        self, a: MemoryDesc, b: MemoryDesc, out: MemoryDesc, posts: tuple[PostOp, ...] = ()
    ) -> Primitive | None:
        """A product of matrices, one primitive for all parts that are alike; None where oneDNN has no fast one."""
        key = (a.key, b.key, out.key, posts)
        if key not in self.primitives:
            self.primitives[key] = p.matmul(a, b, out, attributes=Attributes(post_ops=posts))
        made = self.primitives[key]
        return None if is_slow(made) else made

    def fast(self, product: Primitive | None) -> Primitive:
        if product is None:
            raise Unimplemented("oneDNN has no fast product of these sizes")
        return product

    def softmax(self, rows: int, columns: int) -> Primitive:
        flat = MemoryDesc.plain((rows, columns), _F32)
        if flat.key not in self.primitives:
            self.primitives[flat.key] = p.softmax(flat, flat, 1)
        return self.primitives[flat.key]

    def forbid(self, part: _Part, scores: Place, triangle: Place, width: int) -> None:
        """Adds the triangle to the scores of the keys that come behind a block's first query."""
        start = self.before + part.row + 1
        if start >= part.keys:
            return
        wide = part.keys - start
        strides = tuple(s * _ITEM for s in row_major_strides((part.heads, part.rows, part.keys)))
        seen = replace(scores, offset=scores.offset + start * _ITEM)
        read = ArraySpec(triangle, np.dtype(np.float32), (part.rows, wide), (width * _ITEM, _ITEM))
        written = ArraySpec(seen, np.dtype(np.float32), (part.heads, part.rows, wide), strides)

        self.host.recipe.launches.append(ArrayLaunch("numpy:triangle", _add, (read,), (written,)))


def _add(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
    np.add(outs[0], inputs[0], out=outs[0])


__all__ = ["build"]
