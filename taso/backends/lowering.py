"""From a graph to kernels: which nodes run as one, and in which layout each value lies.

One local rule decides both, so that the search can re-cost a rewrite by looking at its neighbourhood and the executor
builds the very kernels that were costed. An *anchor* (convolution, matrix product, pool, …) takes along the chain of
single-consumer element-wise nodes behind it; everything between is never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, Protocol, TypeVar

from taso.graph.apart import taken_apart
from taso.graph.composite import gathered
from taso.graph.graph import Graph, Node, Value
from taso.graph.operator import Attrs, Operator, Trait
from taso.graph.ops.movement import permutation, slice_ranges
from taso.graph.types import Dim, DType, Shape, TensorType

PLAIN = "plain"
BLOCKED = "blocked"
LAST = "last"

N = TypeVar("N", bound=Hashable)
V = TypeVar("V", bound=Hashable)


class View(Protocol[N, V]):
    """A graph as lowering and matching see it; types are those to run at, without symbols."""

    def op(self, node: N) -> Operator: ...
    def attrs(self, node: N) -> Attrs: ...
    def inputs(self, node: N) -> Sequence[V | None]: ...
    def outputs(self, node: N) -> Sequence[V]: ...
    def producer(self, value: V) -> N: ...
    def consumers(self, value: V) -> Collection[N]: ...
    def is_output(self, value: V) -> bool: ...
    def is_constant(self, value: V) -> bool: ...
    def type(self, value: V) -> TensorType: ...
    def layout(self, value: V) -> str: ...

    def memo(self, node: N) -> dict[N, int | None]:
        """Where to remember by which input a node joins a kernel."""
        ...


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Operand:
    """An input of a kernel: `constant` ones are laid out once, before the first run.

    A `narrow` one is float32 to the operators and lies in memory as bfloat16.
    """

    type: TensorType
    layout: str
    constant: bool
    narrow: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of memory, of a static type."""
        return stored_bytes(self.type, self.narrow)


def stored_bytes(t: TensorType, narrow: bool) -> int:
    """Bytes of a tensor of a static type that is stored `narrow`, in 2 bytes an element, or as its type says."""
    return t.size * 2 if narrow else t.nbytes


@dataclass(frozen=True)
class Step:
    """One operator inside a kernel. Input i ≥ 0 is operand i, −1 − k the result of step k, None absent."""

    op: Operator
    attrs: Attrs
    inputs: tuple[int | None, ...]


@dataclass(frozen=True)
class Kernel:
    """What runs as one: an anchor step, the element-wise steps fused behind it, and how its operands lie.

    Without steps it is a change of layout of its one operand. Results are those of the last step. `algorithm` names
    how the anchor is computed where a backend knows several ways, "" the one that it takes by itself.
    """

    operands: tuple[Operand, ...]
    steps: tuple[Step, ...]
    results: tuple[Operand, ...]
    algorithm: str = ""

    @cached_property
    def key(self) -> str:
        """A stable name for the cost database: everything that decides how long it takes."""
        operands = ";".join(f"{o.type}{'w' if o.constant else ''}@{_show_lie(o)}" for o in self.operands)
        steps = ">".join(f"{s.op.domain}:{s.op.name}{_show(s.attrs)}({s.inputs})" for s in self.steps)
        results = ";".join(f"{o.type}@{_show_lie(o)}" for o in self.results)
        return f"{operands}|{steps}|{results}" + (f"|{self.algorithm}" if self.algorithm else "")

    @property
    def anchor(self) -> Step | None:
        return self.steps[0] if self.steps else None

    @property
    def chained(self) -> bool:
        """Whether there are anchors behind the first one, each on the result of the one before.

        Steps that dequantise before it and quantise behind it are none.
        """
        first = next((i for i, s in enumerate(self.steps) if s.op.name != "DequantizeLinear"), 0)
        return any(not s.op.has(Trait.ELEMENTWISE) and s.op.name != "QuantizeLinear" for s in self.steps[first + 1 :])


def change_of_layout(t: TensorType, source: str, target: str, narrow: bool = False) -> Kernel:
    """The kernel that puts a tensor which lies as `source` says into another layout."""
    lies, wanted = (Operand(t, layout, False, narrow) for layout in (source, target))
    return Kernel((lies,), (), (wanted,))


IN_TURN = "in turn"
"""The algorithm by which a kernel of several anchors runs one after the other, each as a whole: what its own way is
measured against."""


def in_parts(kernel: Kernel) -> list[Kernel]:
    """The kernels of one anchor each that a kernel of several stands for.

    What lies between lies as its result does, or plainly where that has its axes in another order.
    """
    layout = kernel.results[0].layout
    layout = PLAIN if layout.startswith(AXES) else layout
    types: list[TensorType] = []
    starts = [i for i, s in enumerate(kernel.steps) if i == 0 or not s.op.has(Trait.ELEMENTWISE)]
    parts: list[Kernel] = []
    for step in kernel.steps:
        given = [None if i is None else kernel.operands[i].type if i >= 0 else types[-1 - i] for i in step.inputs]
        types.append(step.op.types_of(given, step.attrs)[0])
    for start, stop in zip(starts, [*starts[1:], len(kernel.steps)], strict=True):
        operands: list[Operand] = []
        steps: list[Step] = []
        for step in kernel.steps[start:stop]:
            inputs: list[int | None] = []
            for i in step.inputs:
                if i is None or -1 - i >= start:
                    inputs.append(i if i is None else i + start)
                    continue
                inputs.append(len(operands))
                operands.append(kernel.operands[i] if i >= 0 else Operand(types[-1 - i], layout, False))
            steps.append(replace(step, inputs=tuple(inputs)))
        last = stop == len(kernel.steps)
        results = kernel.results if last else (Operand(types[stop - 1], layout, False),)
        parts.append(Kernel(tuple(operands), tuple(steps), results))
    return parts


def _show_lie(operand: Operand) -> str:
    return f"{operand.layout} in bf16" if operand.narrow else operand.layout


def _show(attrs: Attrs) -> str:
    # an opaque node's serialized form names its values; its cost does not depend on them
    return ",".join(f"{k}={_show_value(v)}" for k, v in attrs.items())


def _show_value(value: object) -> str:
    if isinstance(value, bytes):
        return f"bytes{len(value)}"
    return value.name if isinstance(value, DType) else repr(value)


# ── layouts ──────────────────────────────────────────────────────────────────────────────────────────────────────

AXES = "axes "
"""How a layout's name begins that says in which order the axes lie in memory, the outermost first: "axes 0213"."""


def axes_of(layout: str, rank: int) -> tuple[int, ...]:
    """In which order the axes of a tensor lie in a layout without blocks, the outermost first."""
    if layout == LAST and rank > 2:
        return (0, *range(2, rank), 1)
    return tuple(map(int, layout.removeprefix(AXES))) if layout.startswith(AXES) else tuple(range(rank))


def named_axes(order: Sequence[int], dims: Sequence[Dim]) -> str:
    """The layout of a tensor whose axes lie in that order; axes of size 1 lie wherever the name has them first."""
    single = [a for a in range(len(order)) if dims[a] == 1]
    rest = [a for a in order if dims[a] != 1]
    if rest == sorted(rest):
        return PLAIN
    if len(order) > 2 and rest == [a for a in axes_of(LAST, len(order)) if dims[a] != 1]:
        return LAST
    return AXES + "".join(map(str, (*single, *rest)))


_FOLLOWS = frozenset(
    {"MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "BatchNormalization", "LRN", "Identity", "Dropout"}
)
_ALONG_CHANNELS = frozenset({"Concat", "Split"})
_NAMED = (PLAIN, LAST, BLOCKED)


@dataclass(frozen=True)
class Layouts:
    """A backend's layouts: as ONNX has it (PLAIN), channels in blocks (BLOCKED), channels innermost (LAST).

    `block` channels lie together in the blocked one; 0 means that the backend has only the plain one. Of a tensor whose
    channels are no whole number of blocks, BLOCKED is the same as PLAIN. With `innermost` convolutions have their
    channels last unless a plan says otherwise. With `permuted` axes may lie in any order: a Transpose then moves
    nothing, and products of matrices read and write what lies so.
    """

    block: int = 0
    innermost: bool = False
    permuted: bool = False

    def applies(self, t: TensorType) -> bool:
        """Whether values of the type may lie otherwise than plainly."""
        return bool(self.block) and _image(t) and t.dtype is DType.FLOAT

    def of_outputs(
        self, op: Operator, attrs: Attrs, types: Sequence[TensorType | None], layouts: Sequence[str | None],
        results: Sequence[TensorType],
    ) -> tuple[str, ...]:  # fmt: skip
        """The layout in which each output comes out when nobody asks for another one."""
        return tuple(self._of_output(op, attrs, types, layouts, r) for r in results)

    def _of_output(
        self, op: Operator, attrs: Attrs, types: Sequence[TensorType | None], layouts: Sequence[str | None],
        result: TensorType,
    ) -> str:  # fmt: skip
        if not self.block or not _image(result) or result.dtype is not DType.FLOAT:
            return PLAIN
        if op.name == "Conv":
            return self._of_conv(attrs, types, layouts)
        if op.name in _FOLLOWS and not _dilated(attrs) or op.name in _ALONG_CHANNELS and _by_channels(attrs, result):
            data = layouts if op.name == "Concat" else layouts[:1]
            first = data[0]
            if first not in _NAMED or any(x != first for x in data):
                return PLAIN
            return PLAIN if first == BLOCKED and not self._whole(op, attrs, types) else first
        if op.has(Trait.ELEMENTWISE):
            same = [x for t, x in zip(types, layouts, strict=True) if t is not None and t.shape == result.shape]
            if LAST in same or BLOCKED in same:
                return LAST if LAST in same else BLOCKED
            # what broadcasts has no place among axes that lie in another order
            whole = len(same) + sum(t is not None and t.static and t.size == 1 for t in types) == len(types)
            return (same[0] or PLAIN) if whole and len(set(same)) == 1 else PLAIN
        if self._turns(op, result) and layouts[0] not in (None, BLOCKED):
            return self._turned(attrs, result, layouts[0] or PLAIN)
        return PLAIN

    def _turns(self, op: Operator, result: TensorType) -> bool:
        """Whether an operator is a Transpose that another order of axes can stand for."""
        return self.permuted and op.name == "Transpose" and not op.domain and self.applies(result) and result.static

    def _turned(self, attrs: Attrs, result: TensorType, layout: str) -> str:
        """How a Transpose's result lies where its operand does, which lies so."""
        perm = permutation(result.rank, attrs)
        return named_axes([perm.index(a) for a in axes_of(layout, result.rank)], result.dims)

    def _of_conv(self, attrs: Attrs, types: Sequence[TensorType | None], layouts: Sequence[str | None]) -> str:
        """BLOCKED where that is possible, else LAST.

        What comes in with its channels last goes out so: it then lies well for all that follows.
        """
        last = self.innermost or layouts[0] == LAST or not self._conv_in_blocks(attrs, types)
        return LAST if last else BLOCKED

    def _conv_in_blocks(self, attrs: Attrs, types: Sequence[TensorType | None]) -> bool:
        """Whether whole blocks of channels meet in a convolution, or an image of few channels comes in."""
        x, w = types[0], types[1]
        if x is None or w is None:
            return False
        groups, (inner, outer) = attrs.int("group"), (x.dims[1], w.dims[0])
        whole = _divides(outer, self.block) and (_divides(inner, self.block) or _below(inner, 8))
        if groups > 1:
            depthwise = x.rank == 4 and inner == outer == groups
            step = self.block * groups
            whole = whole and (depthwise or _divides(inner, step) and _divides(outer, step))
        return whole and _small_pads(attrs, w)

    def possible(
        self, op: Operator, attrs: Attrs, types: Sequence[TensorType | None], result: TensorType
    ) -> tuple[str, ...]:  # fmt: skip
        """All layouts in which an output of an operator may come out.

        Two of them may be alike for the output: what the operator reads then lies differently.
        """
        if not self.applies(result):
            return (PLAIN,)
        if op.name == "Conv":
            return (BLOCKED, LAST) if self._conv_in_blocks(attrs, types) else (LAST,)
        if self._turns(op, result):
            return tuple(dict.fromkeys((self._turned(attrs, result, PLAIN), PLAIN, LAST)))
        if self.permuted and op.name == "MatMul" and _turnable(types, result):
            # the heads of an attention, put side by side
            order = [*range(result.rank - 3), result.rank - 2, result.rank - 3, result.rank - 1]
            return tuple(dict.fromkeys((PLAIN, named_axes(order, result.dims))))
        if op.name in _FOLLOWS and not _dilated(attrs) or op.name in _ALONG_CHANNELS and _by_channels(attrs, result):
            return (PLAIN, LAST, BLOCKED) if self._whole(op, attrs, types) else (PLAIN, LAST)
        return (PLAIN, LAST, BLOCKED) if op.has(Trait.ELEMENTWISE) else (PLAIN,)

    def canonical(self, t: TensorType, layout: str) -> str:
        """The one name among those of layouts in which the tensor's bytes are the same."""
        if layout.startswith(AXES):
            return named_axes(axes_of(layout, t.rank), t.dims)
        return next(x for x in _NAMED if self.alike(t, x, layout))

    def _whole(self, op: Operator, attrs: Attrs, types: Sequence[TensorType | None]) -> bool:
        """Whether all parts of a Concat or Split along channels are whole blocks."""
        if op.name == "Split":
            return all(size % self.block == 0 for size in attrs.ints("split"))
        return op.name != "Concat" or all(t is not None and _divides(t.dims[1], self.block) for t in types)

    def wanted(self, op: Operator, attrs: Attrs, position: int, t: TensorType, layout: str, out_layout: str) -> str:
        """The layout in which a kernel reads its input number `position`, given how the value lies."""
        if not self.block or t.shape is None or not _image(t):
            return PLAIN
        if op.name == "Conv":
            # few channels (an image) are read as they come
            few = out_layout == BLOCKED and not _divides(t.dims[1], self.block)
            return PLAIN if position > 0 or few else out_layout
        if op.name in _FOLLOWS or op.name in _ALONG_CHANNELS or op.has(Trait.ELEMENTWISE):
            return layout if self.alike(t, layout, out_layout) else self._for(t, out_layout)
        if self._turns(op, t) and out_layout != BLOCKED:
            perm = permutation(t.rank, attrs)
            return named_axes([perm[a] for a in axes_of(out_layout, t.rank)], t.dims)
        if self.permuted and op.name == "MatMul" and layout.startswith(AXES) and t.dtype is DType.FLOAT:
            return layout if _rows_together(layout, t, position) else PLAIN
        return PLAIN

    def _for(self, t: TensorType, layout: str) -> str:
        """`layout` for a tensor that broadcasts to one that lies so."""
        return layout if _names_axes(layout, t.rank) else PLAIN

    def alike(self, t: TensorType, layout: str, other: str) -> bool:
        """Whether a tensor's bytes are the same in both layouts, so that going from one to the other costs nothing."""
        if t.shape is None or not _image(t):
            return True
        if layout.startswith(AXES) or other.startswith(AXES):
            if BLOCKED in (layout, other) or not all(_names_axes(x, t.rank) for x in (layout, other)):
                return layout == other
            one, two = ([a for a in axes_of(x, t.rank) if t.dims[a] != 1] for x in (layout, other))
            return one == two
        blocked = BLOCKED if self.block and _divides(t.dims[1], self.block) else PLAIN
        pair = {blocked if x == BLOCKED else x for x in (layout, other)}
        if len(pair) == 1 or all(d == 1 for d in t.dims[2:]):
            return True
        if pair == {PLAIN, LAST}:
            return t.dims[1] == 1
        return pair == {BLOCKED, LAST} and t.dims[1] == self.block


def _image(t: TensorType) -> bool:
    return t.shape is not None and t.rank in (3, 4, 5)


def _names_axes(layout: str, rank: int) -> bool:
    """Whether a layout is one of tensors of that rank: others broadcast to one that lies so."""
    return not layout.startswith(AXES) or len(layout) == len(AXES) + rank


def _turnable(types: Sequence[TensorType | None], result: TensorType) -> bool:
    """Whether a product is one of as many matrices on both sides, which may lie otherwise than one after the other."""
    return all(t is not None and t.rank == result.rank and t.dims[:-2] == result.dims[:-2] for t in types)


def _rows_together(layout: str, t: TensorType, position: int) -> bool:
    """Whether the matrices of an operand lie so that products read them: of the second one also turned."""
    innermost = next(a for a in reversed(axes_of(layout, t.rank)) if t.dims[a] != 1)
    return innermost == t.rank - 1 or position == 1 and innermost == t.rank - 2


def _divides(dim: object, block: int) -> bool:
    return isinstance(dim, int) and dim % block == 0


def _below(dim: object, bound: int) -> bool:
    return isinstance(dim, int) and dim < bound


def _by_channels(attrs: Attrs, result: TensorType) -> bool:
    return attrs.int("axis") % result.rank == 1


def _dilated(attrs: Attrs) -> bool:
    return "dilations" in attrs and any(d != 1 for d in attrs.ints("dilations"))


def _small_pads(attrs: Attrs, weight: TensorType) -> bool:
    """Whether every window of a convolution meets the data."""
    n = weight.rank - 2
    pads, dilations = attrs.ints("pads") or (0,) * (2 * n), attrs.ints("dilations") or (1,) * n
    reach = [(k - 1) * d if isinstance(k, int) else 0 for k, d in zip(weight.dims[2:], dilations, strict=True)]
    return all(pad <= reach[axis % n] for axis, pad in enumerate(pads))


# ── groups ───────────────────────────────────────────────────────────────────────────────────────────────────────

_ANCHORS = {
    "Conv": 0, "Gemm": 0, "MatMul": 0, "ConvTranspose": 0, "BatchNormalization": 2, "AveragePool": 2, "MaxPool": 2,
    "GlobalAveragePool": 2, "GlobalMaxPool": 2, "Softmax": 3, "LayerNormalization": 3, "Concat": 9,
}  # fmt: skip
_UNARY = frozenset(
    {
        "Relu", "Sigmoid", "Tanh", "Exp", "Log", "Sqrt", "Abs", "Elu", "LeakyRelu", "Gelu", "HardSwish", "Mish",
        "Swish", "Clip", "HardSigmoid", "Softplus", "Neg", "Round", "Reciprocal",
    }
)  # fmt: skip
_BINARY = frozenset({"Add", "Mul", "Max", "Min"})
_ORDERED = frozenset({"Sub", "Div"})


class Fusion:
    """Which element-wise nodes an anchor takes along: the part of lowering that a backend may narrow."""

    least_between = 1 << 19
    """Bytes between two anchors below which they are not looked at as one kernel: a cache holds so much."""

    def anchors(self, op: Operator, out: TensorType) -> int | None:
        """Rank of `op` as an anchor (lower is preferred), None where nothing can follow it."""
        if out.dtype is not DType.FLOAT or out.shape is None:
            return None
        found = _ANCHORS.get(op.name)
        if found is not None:
            return found if found < 9 else None
        return 5 if op.name in _UNARY or op.name in _BINARY or op.name in _ORDERED else None

    def follows(
        self, op: Operator, attrs: Attrs, position: int, types: Sequence[TensorType | None], out: TensorType
    ) -> bool:
        """Whether `op` can run on a result while it is still in registers; `position` is the input it comes in by."""
        chained = types[position]
        if out.dtype is not DType.FLOAT or chained is None or chained != out:
            return False
        if op.name in _UNARY:
            return True
        if op.name in _BINARY and len(types) == 2 or op.name in _ORDERED and position == 0:
            other = types[1 - position]
            return other is not None and other.dtype is out.dtype and _operand_shape(other, out)
        return False

    def chains(self, op: Operator, attrs: Attrs, types: Sequence[TensorType | None], out: TensorType) -> bool:
        """Whether an operator may be one of several anchors in a row that run as one kernel."""
        return False

    def reads_beside(self, op: Operator) -> bool:
        """Whether an anchor behind another in one kernel may read, beside that one's result, what is no constant."""
        return False


def _operand_shape(t: TensorType, out: TensorType) -> bool:
    """Whether `t` broadcasts along whole axes only, up to the shape of `out`."""
    offset = out.rank - t.rank
    return offset >= 0 and all(d in (1, out.dims[offset + i]) for i, d in enumerate(t.dims))


@dataclass(frozen=True)
class Group(Generic[N, V]):
    """The nodes of one kernel, anchor first, each with the input by which the chain enters it (None: the anchor)."""

    nodes: tuple[N, ...]
    entries: tuple[int | None, ...]

    @property
    def anchor(self) -> N:
        return self.nodes[0]

    @property
    def last(self) -> N:
        return self.nodes[-1]


def no_others(kernel: Kernel) -> tuple[str, ...]:
    """Of a backend that computes everything in one way."""
    return ()


def nowhere(kernel: Kernel) -> tuple[int, ...]:
    """Of a backend that writes no result over an operand."""
    return ()


def no_scratch(kernel: Kernel) -> int:
    """Of a backend whose kernels work in their operands and results alone."""
    return 0


def none_chained(kernel: Kernel) -> bool:
    """Of a backend that runs every anchor by itself."""
    return False


FLOAT32, TF32, FP16, BF16, INT8 = "float32", "tf32", "fp16", "bf16", "int8"
"""Precisions of products: everything in float32; factors rounded to 11 bits (TF32), to float16 or to bfloat16 (8 bits),
sums in float32; factors that the model has as 8-bit integers multiplied as such, all others in float32."""


@dataclass(frozen=True)
class Lowering:
    """The local rule that turns a graph into kernels for one backend.

    `algorithms` names the ways to compute a kernel beside the usual one. For plans of memory, `in_place` are operands
    of a kernel whose memory its result takes where nobody needs them any more, in the order in which that is tried,
    and `scratch` the bytes that it works in beside. `precision` is that of products of float32 tensors, by which a
    backend may have several lowerings. `whole` are operators for which there are kernels and which files have in parts.
    `runs_chain` says whether a kernel of several anchors can be run. `apart` are operators without kernels of which
    there are others that they are made of. `takes_algorithms` says whether the search takes rules that make another
    algorithm of an operator's definition, for a backend that has none of its own.
    """

    layouts: Layouts = field(default_factory=Layouts)
    fusion: Fusion = field(default_factory=Fusion)
    algorithms: Callable[[Kernel], tuple[str, ...]] = no_others
    in_place: Callable[[Kernel], tuple[int, ...]] = nowhere
    scratch: Callable[[Kernel], int] = no_scratch
    precision: str = FLOAT32
    whole: frozenset[str] = frozenset()
    runs_chain: Callable[[Kernel], bool] = none_chained
    apart: frozenset[str] = frozenset()
    takes_algorithms: bool = False

    def entry(self, view: View[N, V], node: N) -> int | None:
        """The input by which `node` joins the kernel of that input's producer, or None where it starts its own."""
        memo = view.memo(node)
        if node not in memo:
            memo[node] = self._entry(view, node)
        return memo[node]

    def _entry(self, view: View[N, V], node: N) -> int | None:
        if not view.op(node).has(Trait.ELEMENTWISE):
            return None
        outputs = view.outputs(node)
        if len(outputs) != 1 or view.is_constant(outputs[0]):
            return None
        best: tuple[int, int] | None = None
        for position, value in enumerate(view.inputs(node)):
            # one kernel, one layout: else its anchor would have to work in the layout of what comes last
            if value is None or view.layout(value) != view.layout(outputs[0]):
                continue
            rank = self.joins(view, node, position)
            if rank is not None and (best is None or (rank, position) < best):
                best = (rank, position)
        return best[1] if best is not None else None

    def joins(self, view: View[N, V], node: N, position: int) -> int | None:
        """Rank of what makes an input as a place to join, None where `node` cannot join it; layouts left aside."""
        value = view.inputs(node)[position]
        if value is None or not view.op(node).has(Trait.ELEMENTWISE) or len(view.outputs(node)) != 1:
            return None
        if view.is_constant(value) or view.is_output(value) or len(view.consumers(value)) != 1:
            return None
        producer = view.producer(value)
        rank = self.fusion.anchors(view.op(producer), view.type(value))
        if rank is None or len(view.outputs(producer)) != 1:
            return None
        inputs = view.inputs(node)
        if sum(v == value for v in inputs) != 1:
            return None
        types = [view.type(v) if v is not None else None for v in inputs]
        out = view.type(view.outputs(node)[0])
        return rank if self.fusion.follows(view.op(node), view.attrs(node), position, types, out) else None

    def continues(self, view: View[N, V], node: N) -> bool:
        """Whether `node` may be an anchor behind the one that makes its input 0, in one kernel that a plan asks for."""
        inputs = view.inputs(node)
        value = inputs[0] if inputs else None
        if value is None or len(view.outputs(node)) != 1 or view.op(node).has(Trait.ELEMENTWISE):
            return False
        if view.is_constant(value) or view.is_output(value) or len(view.consumers(value)) != 1:
            return False
        if value in inputs[1:]:
            return False
        constant = all(v is None or view.is_constant(v) for v in inputs[1:])
        if not constant and not self.fusion.reads_beside(view.op(node)):
            return False
        types = [view.type(v) if v is not None else None for v in inputs]
        return self.fusion.chains(view.op(node), view.attrs(node), types, view.type(view.outputs(node)[0]))

    def anchor_of(self, view: View[N, V], node: N) -> N:
        """The anchor of the kernel that `node` runs in."""
        while True:
            entry = self.entry(view, node)
            value = None if entry is None else view.inputs(node)[entry]
            if value is None:
                return node
            node = view.producer(value)

    def group(self, view: View[N, V], anchor: N) -> Group[N, V]:
        """The kernel that starts at `anchor`."""
        nodes: list[N] = [anchor]
        entries: list[int | None] = [None]
        while len(view.outputs(nodes[-1])) == 1:
            value = view.outputs(nodes[-1])[0]
            consumers = view.consumers(value)
            if len(consumers) != 1 or view.is_output(value):
                break
            follower = next(iter(consumers))
            entry = self.entry(view, follower)
            if entry is None or view.inputs(follower)[entry] != value:
                break
            nodes.append(follower)
            entries.append(entry)
        return Group(tuple(nodes), tuple(entries))

    def may_join(self, op: Operator) -> bool:
        """Whether an operator may run in the kernel of what it reads."""
        return op.has(Trait.ELEMENTWISE)

    def spares(self, view: View[N, V], node: N) -> bool:
        """Whether a node need not run, since all who read it go without."""
        return False

    def beside(self, view: View[N, V], group: Group[N, V]) -> Hashable:
        """What else than the nodes of a group decides what kernel it is."""
        return len(self.made(view, group.last)) if view.op(group.last).optional_outputs else None

    def minds_readers(self, op: Operator) -> bool:
        """Whether it matters to the kernel of an operator of several readers who they are."""
        return bool(op.optional_outputs)

    def made(self, view: View[N, V], node: N) -> Sequence[V]:
        """The outputs of a node that its kernel computes: optional ones behind the last that is read are left out."""
        outs = view.outputs(node)
        count = len(outs)
        optional = view.op(node).optional_outputs
        while count > 1 and count - 1 in optional:
            last = outs[count - 1]
            if view.is_output(last) or view.consumers(last):
                break
            count -= 1
        return outs[:count]

    def narrow(self, view: View[N, V], value: V) -> bool:
        """Whether a value lies in memory as bfloat16."""
        return False

    def kernel(self, view: View[N, V], group: Group[N, V]) -> tuple[Kernel, tuple[V, ...]]:
        """The kernel of a group, and the values that are its operands, in order."""
        operands: dict[V, int] = {}
        described: list[Operand] = []
        steps = []
        outs = self.made(view, group.last)
        out_layouts = [view.layout(v) for v in outs]
        for number, (node, entry) in enumerate(zip(group.nodes, group.entries, strict=True)):
            op, attrs = view.op(node), view.attrs(node)
            inputs: list[int | None] = []
            for position, value in enumerate(view.inputs(node)):
                if value is None:
                    inputs.append(None)
                elif position == entry:
                    inputs.append(-number)
                else:
                    if value not in operands:
                        operands[value] = len(described)
                        described.append(self._operand(view, op, attrs, position, value, out_layouts[0]))
                    inputs.append(operands[value])
            steps.append(Step(op, attrs, tuple(inputs)))
        results = tuple(
            Operand(view.type(v), x, False, self.narrow(view, v)) for v, x in zip(outs, out_layouts, strict=True)
        )
        return Kernel(tuple(described), tuple(steps), results), tuple(operands)

    def _operand(self, view: View[N, V], op: Operator, attrs: Attrs, position: int, value: V, out: str) -> Operand:
        t = view.type(value)
        constant = view.is_constant(value)
        layout = PLAIN if constant else self.layouts.wanted(op, attrs, position, t, view.layout(value), out)
        return Operand(t, layout, constant, not constant and self.narrow(view, value))


_VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})


def is_view(kernel: Kernel) -> bool:
    """Whether a kernel moves nothing: its results lie where its operands do, or its operands where its result does.

    Reshapes in the plain layout always; Split, Slice and Concat where each part is one stretch of memory. The operands
    of such a Concat are computed in place; one that cannot be (it already lies inside something else) is copied.
    """
    step = kernel.anchor
    if step is None or len(kernel.steps) != 1 or not kernel.operands or not kernel.results:
        return False
    operand, result = kernel.operands[0], kernel.results[0]
    if len({o.narrow for o in (*kernel.operands, *kernel.results)}) > 1:
        return False
    if step.op.has(Trait.IDENTITY):
        return operand.layout == result.layout
    if step.op.name in _VIEWS:
        return operand.layout == PLAIN
    if step.op.name == "Transpose":
        return _is_turned(step.attrs, operand, result)
    if step.op.name == "Split":
        if any(part.layout != result.layout for part in kernel.results):
            return False
        # the parts lie in their own layout; that of the whole may be another name for its bytes, and not for theirs
        return _stretches(replace(operand, layout=result.layout), step.attrs.int("axis") % operand.type.rank)
    if step.op.name == "Slice":
        return operand.layout == PLAIN and _is_stretch(operand.type, step.attrs)
    if step.op.name == "Concat":
        apart = len(set(kernel.steps[0].inputs)) == len(kernel.operands) == len(step.inputs)
        free = apart and not any(o.constant or o.type.dtype is DType.STRING for o in kernel.operands)
        return free and _stretches(result, step.attrs.int("axis") % result.type.rank)
    return False


def _is_turned(attrs: Attrs, operand: Operand, result: Operand) -> bool:
    """Whether a Transpose's result is its operand, axes named otherwise."""
    if not _image(result.type) or BLOCKED in (operand.layout, result.layout) or not result.type.static:
        return False
    perm, dims = permutation(result.type.rank, attrs), result.type.dims
    found = [perm.index(a) for a in axes_of(operand.layout, len(dims))]
    wanted = axes_of(result.layout, len(dims))
    return [a for a in found if dims[a] != 1] == [a for a in wanted if dims[a] != 1]


def _stretches(whole: Operand, axis: int) -> bool:
    """Whether parts of a tensor along `axis` lie one behind the other."""
    if whole.layout == BLOCKED:
        return all(d == 1 for d in whole.type.dims[:axis])
    order = axes_of(whole.layout, whole.type.rank)
    return all(whole.type.dims[a] == 1 for a in order[: order.index(axis)])


def _is_stretch(t: TensorType, attrs: Attrs) -> bool:
    """Whether a slice of a plain tensor is one stretch of memory: whole behind the one axis that it cuts."""
    cut = {a: r for a, r in slice_ranges(t, attrs).items() if (r[0], r[1], r[2]) != (0, t.dims[a], 1)}
    if not cut:
        return True
    axis = min(cut)
    return len(cut) == 1 and cut[axis][2] == 1 and all(d == 1 for d in t.dims[:axis])


# ── choices ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Choices:
    """What is decided of one graph's plan otherwise than by the local rule; by places of nodes in the graph's order.

    `layouts` are those in which outputs (node, number of the output) come out, `entries` the input by which a node
    joins a kernel (None: it starts one), `algorithms` those of kernels, by their anchors. `operators` are the names of
    all nodes and where each of their inputs comes from: the choices are for such a graph alone.
    """

    operators: tuple[str, ...]
    layouts: Mapping[tuple[int, int], str] = field(default_factory=dict)
    entries: Mapping[int, int | None] = field(default_factory=dict)
    algorithms: Mapping[int, str] = field(default_factory=dict)

    def fits(self, graph: Graph) -> bool:
        """Whether the graph has the operators that these are choices for."""
        return self.operators == structure(graph)


def structure(graph: Graph) -> tuple[str, ...]:
    """What each node is and where its inputs come from, by places in the graph's order."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    return tuple(
        f"{n.op.name} {' '.join('-' if v is None else f'{place[v.node]}.{v.index}' for v in n.inputs)}" for n in place
    )


def with_wholes(graph: Graph, lowering: Lowering) -> Graph:
    """The graph with the operators of `Lowering.whole` as one node each where it has them in parts, and with those of
    `Lowering.apart` in parts; its plans too."""
    apart = _planned(graph, *taken_apart(graph, lowering.apart))
    return _planned(apart, *gathered(apart, lowering.whole))


def _planned(graph: Graph, found: Graph, nodes: Mapping[Node, Node]) -> Graph:
    """`found` with the plans of `graph`, whose nodes are these there."""
    if found is not graph:
        plans = {name: plan for name, plan in graph.plans.items() if isinstance(plan, Choices) and plan.fits(graph)}
        found.plans = {name: _moved(plan, graph, found, nodes) for name, plan in plans.items()}
    return found


def _moved(choices: Choices, graph: Graph, other: Graph, same: Mapping[Node, Node]) -> Choices:
    """Choices for `graph` as those for `other`, in which `same` are its nodes."""
    place = {node: i for i, node in enumerate(other.nodes)}
    moved = {i: place[same[node]] for i, node in enumerate(graph.nodes) if same.get(node) in place}
    joins = {
        moved[i]: entry if entry is None or other.nodes[moved[i]].inputs[entry:] else 0
        for i, entry in choices.entries.items() if i in moved
    }  # fmt: skip
    layouts = {(moved[i], output): layout for (i, output), layout in choices.layouts.items() if i in moved}
    algorithms = {moved[i]: name for i, name in choices.algorithms.items() if i in moved}
    return Choices(structure(other), layouts, joins, algorithms)


def choices_of(graph: Graph, backend: str) -> Choices | None:
    """What was chosen for the graph on the backend of that name."""
    found = graph.plans.get(backend)
    return found if isinstance(found, Choices) else None


# ── a whole graph ────────────────────────────────────────────────────────────────────────────────────────────────


class GraphView:
    """A `Graph` of static types as lowering sees it, by the local rule or as `choices` have it."""

    def __init__(self, graph: Graph, layouts: Layouts, choices: Choices | None = None) -> None:
        self.graph = graph
        self._consumers = graph.consumers()
        self._outputs = {v for _, v in graph.outputs}
        self._memo: dict[Node, int | None] = {}
        self._layouts: dict[Value, str] = {}
        chosen = choices.layouts if choices is not None else {}
        nodes = graph.nodes
        for place, node in enumerate(nodes):
            types = [v.type if v is not None else None for v in node.inputs]
            given = [self._layouts[v] if v is not None else None for v in node.inputs]
            found = layouts.of_outputs(node.op, node.attrs, types, given, [v.type for v in node.outputs])
            plain = node.constant or node.op.has(Trait.SOURCE)
            for value, layout in zip(node.outputs, found, strict=True):
                asked = chosen.get((place, value.index), layout)
                # at other sizes than those it was chosen for a layout may be none
                possible = asked == layout or asked in layouts.possible(node.op, node.attrs, types, value.type)
                self._layouts[value] = PLAIN if plain else asked if possible else layout
        if choices is not None:
            self._memo.update((nodes[place], entry) for place, entry in choices.entries.items())

    def op(self, node: Node) -> Operator:
        return node.op

    def attrs(self, node: Node) -> Attrs:
        return node.attrs

    def inputs(self, node: Node) -> Sequence[Value | None]:
        return node.inputs

    def outputs(self, node: Node) -> Sequence[Value]:
        return node.outputs

    def producer(self, value: Value) -> Node:
        return value.node

    def consumers(self, value: Value) -> Collection[Node]:
        return self._consumers.get(value, ())

    def is_output(self, value: Value) -> bool:
        return value in self._outputs

    def is_constant(self, value: Value) -> bool:
        return value.node.constant

    def type(self, value: Value) -> TensorType:
        return value.type

    def layout(self, value: Value) -> str:
        return self._layouts[value]

    def memo(self, node: Node) -> dict[Node, int | None]:
        return self._memo


@dataclass(frozen=True)
class Job:
    """A kernel in a plan with the values it reads and makes."""

    kernel: Kernel
    operands: tuple[Value, ...]
    results: tuple[Value, ...]


@dataclass(frozen=True)
class Plan:
    """A graph lowered: kernels in an order to run them in, and how every value lies when it is made.

    Changes of layout are not jobs of their own: a job whose operand asks for a layout that the value does not have
    implies one, shared by all who ask for the same. `narrow` are the values that lie in memory as bfloat16.
    """

    jobs: tuple[Job, ...]
    layouts: dict[Value, str]
    narrow: frozenset[Value] = frozenset()


def lower(graph: Graph, lowering: Lowering, choices: Choices | None = None) -> Plan:
    """The kernels of a graph of static types, by the local rule or as `choices` have it where these fit.

    Weight-only nodes are no jobs: they are computed beforehand.
    """
    choices = _fitting(choices, graph, lowering)
    view = GraphView(graph, lowering.layouts, choices)
    jobs: list[Job] = []
    seen: set[Node] = set()
    position = {node: i for i, node in enumerate(graph.nodes)}
    groups = []
    for node in graph.run_time_nodes:
        anchor: Node = lowering.anchor_of(view, node)
        if anchor not in seen:
            seen.add(anchor)
            if not lowering.spares(view, anchor):
                groups.append(lowering.group(view, anchor))
    # a kernel runs when its last node could: by then all its operands are there
    for group in sorted(groups, key=lambda g: position[g.last]):
        kernel, operands = lowering.kernel(view, group)
        algorithm = choices.algorithms.get(position[group.anchor]) if choices is not None else None
        if algorithm is not None and algorithm in lowering.algorithms(kernel):
            kernel = replace(kernel, algorithm=algorithm)
        jobs.append(Job(kernel, operands, group.last.outputs[: len(kernel.results)]))
    layouts = {v: view.layout(v) for node in position for v in node.outputs}
    return Plan(tuple(jobs), layouts, frozenset(v for v in layouts if lowering.narrow(view, v)))


def _fitting(choices: Choices | None, graph: Graph, lowering: Lowering) -> Choices | None:
    """The choices where they are for this graph, and where nodes still join each other at its sizes."""
    if choices is None or not choices.fits(graph):
        return None
    local, nodes = GraphView(graph, lowering.layouts), graph.nodes
    joined = [(nodes[place], entry) for place, entry in choices.entries.items() if entry is not None]
    if not all(
        lowering.joins(local, node, entry) is not None or entry == 0 and lowering.continues(local, node)
        for node, entry in joined
    ):
        return None
    view = GraphView(graph, lowering.layouts, choices)
    for node in graph.run_time_nodes:
        anchor: Node = lowering.anchor_of(view, node)
        group = lowering.group(view, anchor)
        out = group.last.outputs[0]
        if any(not lowering.may_join(n.op) for n in group.nodes[1:]) and not lowering.runs_chain(
            lowering.kernel(view, group)[0]
        ):
            return None
        types = [v.type if v is not None else None for v in anchor.inputs]
        possible = lowering.layouts.possible(anchor.op, anchor.attrs, types, anchor.outputs[0].type)
        if view.layout(out) not in (*possible, local.layout(out)):
            # what an operator runs in is the layout of the last one in its kernel
            return None
    return choices


def flops(kernel: Kernel) -> float:
    """Multiplications and additions of a kernel, roughly: what a formula can say of its time. A symbol counts as 1."""
    total = 0.0
    for step in kernel.steps:
        size = _product(kernel.results[0].type.shape or ()) if kernel.results else 1.0
        if step.op.name == "Conv":
            weight = _input_shape(kernel, step, 1)
            total += 2 * size * _product(weight[1:])
        elif step.op.name in ("MatMul", "Gemm"):
            left = _input_shape(kernel, step, 0)
            inner = left[0] if step.op.name == "Gemm" and step.attrs.int("transA") else left[-1]
            total += 2 * size * _product((inner,))
        else:
            total += size
    return total


def _input_shape(kernel: Kernel, step: Step, position: int) -> Shape:
    reference = step.inputs[position]
    if reference is None or reference < 0:
        return kernel.results[0].type.dims
    return kernel.operands[reference].type.dims


def _product(shape: Shape) -> float:
    result = 1.0
    for d in shape:
        result *= float(d) if isinstance(d, int) else 1.0
    return result
