"""Which nodes ONNX Runtime computes as one, and where it has channels in blocks.

Found by looking at what version 1.32 makes of small models; a kernel that is measured is given to it whole, so that
where it does otherwise the cost of the kernel says so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from taso.backends.lowering import (
    BLOCKED,
    PLAIN,
    GraphView,
    Group,
    Kernel,
    Layouts,
    Lowering,
    Operand,
    Step,
    View,
)  # fmt: skip
from taso.graph.errors import BackendError
from taso.graph.operator import Attrs, Operator, Trait
from taso.graph.types import DType, TensorType

N = TypeVar("N", bound=Hashable)
V = TypeVar("V", bound=Hashable)

# ── layouts ──────────────────────────────────────────────────────────────────────────────────────────────────────

CONVOLVED = "convolved"
"""Lying as BLOCKED, and so far a convolution's own result: constants that it is scaled with or added to are folded."""

_ALIGNED = 4
"""Channels are put in blocks where their number is a multiple of this."""
_POOLS = frozenset({"MaxPool", "AveragePool"})
_WHOLE_POOLS = frozenset({"GlobalAveragePool", "GlobalMaxPool"})
_SUMS_AND_PRODUCTS = frozenset({"Add", "Sum", "Mul"})
_FOLLOWING = frozenset({"Relu", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "Gelu"})
_FOLLOWING_CONV = frozenset({"LeakyRelu", "Clip"})


def in_blocks(layout: str | None) -> bool:
    """Whether a layout is one of channels in blocks."""
    return layout in (BLOCKED, CONVOLVED)


@dataclass(frozen=True)
class BlockedChannels(Layouts):
    """Where ONNX Runtime has channels in blocks (NCHWc): what convolutions make, and what follows them."""

    def applies(self, t: TensorType) -> bool:
        return bool(self.block) and _image(t)

    def of_outputs(
        self, op: Operator, attrs: Attrs, types: Sequence[TensorType | None], layouts: Sequence[str | None],
        results: Sequence[TensorType],
    ) -> tuple[str, ...]:  # fmt: skip
        if len(results) != 1 or not self.applies(results[0]):
            return (PLAIN,) * len(results)
        return (self._of(op, attrs, types, layouts, results[0]),)

    def _of(
        self, op: Operator, attrs: Attrs, types: Sequence[TensorType | None], layouts: Sequence[str | None],
        result: TensorType,
    ) -> str:  # fmt: skip
        first = next(iter(layouts), None) or PLAIN
        if op.name == "Conv":
            return CONVOLVED if self._convolves(attrs, types[0], types[1]) else PLAIN
        if op.name in _POOLS or op.name in _WHOLE_POOLS and in_blocks(first):
            return BLOCKED if self._in_whole_blocks(result) else PLAIN
        if op.name == "BatchNormalization" or op.has(Trait.IDENTITY):
            return first
        if op.name in _FOLLOWING or op.name in _FOLLOWING_CONV and first == CONVOLVED:
            return BLOCKED if in_blocks(first) else PLAIN
        if op.name == "Concat":
            whole = all(t is not None and self._in_whole_blocks(t) for t in types)
            return BLOCKED if whole and all(map(in_blocks, layouts)) and attrs.int("axis") in (1, -3) else PLAIN
        if op.name in _SUMS_AND_PRODUCTS:
            return self._of_sum_or_product(op.name == "Mul", types, layouts, result)
        return PLAIN

    def _of_sum_or_product(
        self, product: bool, types: Sequence[TensorType | None], layouts: Sequence[str | None], result: TensorType
    ) -> str:  # fmt: skip
        if all(t == result and in_blocks(x) for t, x in zip(types, layouts, strict=True)):
            return BLOCKED
        rest = [(t, x) for t, x in zip(types, layouts, strict=True) if not (t == result and in_blocks(x))]
        folded = CONVOLVED in layouts
        if len(types) != 2 or len(rest) != 1 or not (product or folded):
            return PLAIN
        t, layout = rest[0]
        scale = t is not None and (_per_channel(t, result) or product and folded and t.static and t.size == 1)
        return (CONVOLVED if folded else BLOCKED) if scale and layout == PLAIN else PLAIN

    def _convolves(self, attrs: Attrs, x: TensorType | None, weight: TensorType | None) -> bool:
        if x is None or weight is None or not (_known(x.dims[1]) and _known(*weight.dims[:2])):
            return False
        groups, inner, outer = attrs.int("group"), weight.dims[1], weight.dims[0]
        if groups == 1:
            return self._direct(inner) or _divides(inner, _ALIGNED)
        depthwise = inner == 1 and outer == groups
        return depthwise or _divides(inner, self.block) and _divides(outer, self.block * groups)

    def _direct(self, channels: object) -> bool:
        """Whether so few channels are read as they come."""
        return isinstance(channels, int) and channels < self.block

    def _in_whole_blocks(self, t: TensorType) -> bool:
        return _divides(t.dims[1], self.block)

    def wanted(self, op: Operator, attrs: Attrs, position: int, t: TensorType, layout: str, out_layout: str) -> str:
        if not self._wants_blocks(op, attrs, position, t, out_layout):
            return PLAIN
        return layout if in_blocks(layout) else BLOCKED

    def _wants_blocks(self, op: Operator, attrs: Attrs, position: int, t: TensorType, out_layout: str) -> bool:
        if not self.applies(t):
            return False
        if op.name == "Conv":
            return position == 0 and (in_blocks(out_layout) if attrs.int("group") > 1 else not self._direct(t.dims[1]))
        if op.name == "Pad":
            # taken in by the convolution behind it
            return in_blocks(out_layout) and not self._direct(t.dims[1])
        follows = op.name in _POOLS | _WHOLE_POOLS | _SUMS_AND_PRODUCTS | _FOLLOWING | _FOLLOWING_CONV
        return in_blocks(out_layout) and (
            follows or op.name in ("BatchNormalization", "Concat") or op.has(Trait.IDENTITY)
        )

    def alike(self, t: TensorType, layout: str, other: str) -> bool:
        return layout == other or not self.applies(t) or in_blocks(layout) and in_blocks(other)

    def possible(
        self, op: Operator, attrs: Attrs, types: Sequence[TensorType | None], result: TensorType
    ) -> tuple[str, ...]:  # fmt: skip
        raise BackendError("ONNX Runtime chooses the layouts of a graph by itself")


def _image(t: TensorType) -> bool:
    return t.shape is not None and t.rank == 4 and t.dtype is DType.FLOAT and _divides(t.dims[1], _ALIGNED)


def _per_channel(t: TensorType, image: TensorType) -> bool:
    """Whether a tensor holds one element for each channel of an image."""
    shape, channels = t.shape or (), image.dims[1] if image.rank > 1 else None
    return shape[-3:] == (channels, 1, 1) and all(d == 1 for d in shape[:-3])


def _known(*dims: object) -> bool:
    return all(isinstance(d, int) for d in dims)


def _divides(dim: object, by: int) -> bool:
    return isinstance(dim, int) and dim % by == 0


# ── groups ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Read:
    """A value that a node reads."""

    value: Hashable
    type: TensorType
    constant: bool

    @property
    def number(self) -> bool:
        """Whether it is a constant of one element."""
        return self.constant and self.type.static and self.type.size == 1

    def scales(self, image: TensorType) -> bool:
        """Whether it is a constant with a number for each channel of an image."""
        return self.constant and _per_channel(self.type, image)


@dataclass(frozen=True)
class _Pair:
    """What is to be known of a node and the producer of its input number `position`, which nothing else reads.

    It depends on nothing beyond these two, so that a rewrite changes the groups next to it alone. `beside` is what the
    node reads beside the producer's result, `behind` what the producer reads.
    """

    position: int
    out: TensorType
    blocked: bool
    beside: tuple[_Read, ...]
    behind: tuple[_Read, ...]
    attrs: Attrs

    @property
    def number(self) -> bool:
        return any(r.number for r in self.beside)

    @property
    def scale(self) -> bool:
        return any(r.scales(self.out) for r in self.beside)

    @property
    def number_behind(self) -> bool:
        return any(r.number for r in self.behind)

    @property
    def scale_behind(self) -> bool:
        return any(r.scales(self.out) for r in self.behind)

    @property
    def alike(self) -> bool:
        """Whether what else the node reads is computed and of the type of its result."""
        return all(r.type == self.out and not r.constant for r in self.beside)

    @property
    def bias(self) -> bool:
        """Whether the node adds a constant to each row of matrices, or anything to one matrix."""
        return self.out.rank == 2 or all(r.constant and r.type.rank == 1 for r in self.beside)

    @property
    def same(self) -> bool:
        """Whether the node reads besides just what its producer reads."""
        return {r.value for r in self.beside} == {r.value for r in self.behind}


def _pair(view: View[N, V], producer: N, node: N, position: int) -> _Pair:
    out, inputs = view.outputs(node)[0], view.inputs(node)
    beside, behind = [*inputs[:position], *inputs[position + 1 :]], view.inputs(producer)

    def reads(values: Sequence[V | None]) -> tuple[_Read, ...]:
        return tuple(_Read(v, view.type(v), view.is_constant(v)) for v in values if v is not None)

    return _Pair(
        position, view.type(out), in_blocks(view.layout(out)), reads(beside), reads(behind), view.attrs(producer)
    )


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ACTIVATIONS = _words("Relu Sigmoid Tanh LeakyRelu HardSigmoid HardSwish Clip")

_PAIRS: tuple[tuple[frozenset[str], frozenset[str], Callable[[_Pair], bool]], ...] = (
    # folded into the weights of a convolution
    (_words("Conv BatchNormalization"), _words("BatchNormalization"), lambda p: p.position == 0),
    (_words("Conv BatchNormalization Mul Add"), _words("Mul Add"), lambda p: p.scale),
    (_words("Conv"), _words("Mul"), lambda p: p.number),
    # added to in place, and passed through an activation
    (_words("Conv BatchNormalization Mul Add Sum"), _words("Add Sum"), lambda p: p.blocked and p.alike),
    (_words("Conv BatchNormalization"), _ACTIVATIONS, lambda p: True),
    (_words("Mul Add Sum"), _ACTIVATIONS, lambda p: p.blocked or p.out.rank == 2 or p.scale_behind),
    (_words("Relu"), _words("Clip"), lambda p: True),
    (_words("Pad"), _words("Conv AveragePool"), lambda p: p.position == 0 and _puts_zeros(p.attrs)),
    # products of matrices
    (_words("MatMul"), _words("Add"), lambda p: p.bias),
    (_words("MatMul"), _words("Mul Div"), lambda p: p.number),
    (_words("Gemm"), _ACTIVATIONS, lambda p: True),
    # x · (1 + erf(x / √2)) / 2 is one Gelu, x · sigmoid(x) another
    (_words("Mul Div"), _words("Erf"), lambda p: p.number_behind),
    (_words("Erf"), _words("Add"), lambda p: p.number),
    (_words("Add"), _words("Mul"), lambda p: p.alike and p.number_behind),
    (_words("Mul"), _words("Mul"), lambda p: p.number and not p.number_behind),
    (_words("Sigmoid"), _words("Mul"), lambda p: p.same),
    # along with the sum of the residual before it
    (_words("Add"), _words("LayerNormalization"), lambda p: p.position == 0 and p.out.rank == 3),
)
"""Producers, nodes that may be computed with them, and when: what ONNX Runtime 1.32 fuses at its default level."""


def _puts_zeros(attrs: Attrs) -> bool:
    """Whether a Pad puts zeros around images."""
    pads = attrs.ints("pads")
    zeros = attrs["mode"] == "constant" and attrs["value"] == 0
    return zeros and len(pads) == 8 and min(pads) >= 0 and not any((*pads[:2], *pads[4:6]))


def _is_taken_in(perm: Sequence[int]) -> bool:
    """Whether a product of matrices can read its operand through this transposition: of its last two axes, of the
    first axis behind the others of the batch, or of both."""
    rank = len(perm)
    last = [*range(rank - 2), rank - 1, rank - 2]
    first = [*range(1, rank - 1), 0, rank - 1]
    return rank >= 2 and list(perm) in (last, first, [*range(1, rank), 0])


@dataclass(frozen=True)
class RuntimeLowering(Lowering):
    """Groups of nodes that ONNX Runtime may compute as one.

    A chain, in which each node joins its producer, and before a product of matrices the transpositions and scalings
    that it takes in. Groups are measured whole: what is wider than what ONNX Runtime fuses costs what it costs.
    """

    def entry(self, view: View[N, V], node: N) -> int | None:
        memo = view.memo(node)
        if node not in memo:
            memo[node] = self._joined(view, node)
        return memo[node]

    def _joined(self, view: View[N, V], node: N) -> int | None:
        outputs = view.outputs(node)
        if len(outputs) != 1 or view.is_constant(outputs[0]):
            return None
        for position, value in enumerate(view.inputs(node)):
            if value is not None and self._follows(view, node, position, value):
                return position
        return None

    def _follows(self, view: View[N, V], node: N, position: int, value: V) -> bool:
        """Whether `node` may be computed along with the producer of its input number `position`."""
        if not _is_inner(view, node, value):
            return False
        producer, out = view.producer(value), view.outputs(node)[0]
        before, name = view.op(producer).name, view.op(node).name
        alike = view.type(value) == view.type(out) and in_blocks(view.layout(value)) == in_blocks(view.layout(out))
        if before != "Pad" and not alike:
            return False
        rows = [holds for producers, nodes, holds in _PAIRS if before in producers and name in nodes]
        if not rows:
            return False
        pair = _pair(view, producer, node, position)
        return any(holds(pair) for holds in rows)

    def _product(self, view: View[N, V], node: N) -> N | None:
        """The product of matrices that takes `node` in."""
        name = view.op(node).name
        if name not in ("Transpose", "Mul", "Div") or self.entry(view, node) is not None:
            return None
        value = view.outputs(node)[0]
        consumers = view.consumers(value)
        if len(consumers) != 1:
            return None
        product = next(iter(consumers))
        if view.op(product).name != "MatMul" or not _is_inner(view, product, value):
            return None
        if name == "Transpose":
            return product if _is_taken_in(view.attrs(node).ints("perm")) else None
        position = list(view.inputs(product)).index(value)
        factors = _pair(view, node, product, position).behind
        return product if any(r.number for r in factors[name == "Div" :]) else None

    def _before(self, view: View[N, V], product: N) -> list[N]:
        """What a product of matrices takes in."""
        if view.op(product).name != "MatMul":
            return []
        producers = [view.producer(v) for v in view.inputs(product) if v is not None and not view.is_constant(v)]
        return [p for p in producers if self._product(view, p) == product]

    def anchor_of(self, view: View[N, V], node: N) -> N:
        product = self._product(view, node)
        root = super().anchor_of(view, node if product is None else product)
        return next(iter(self._before(view, root)), root)

    def group(self, view: View[N, V], anchor: N) -> Group[N, V]:
        product = self._product(view, anchor)
        if product is None:
            return super().group(view, anchor)
        before, chain = self._before(view, product), super().group(view, product)
        return Group((*before, *chain.nodes), (*(None for _ in before), *chain.entries))

    def kernel(self, view: View[N, V], group: Group[N, V]) -> tuple[Kernel, tuple[V, ...]]:
        operands: dict[V, int] = {}
        described: list[Operand] = []
        steps: list[Step] = []
        made = {view.outputs(node)[0]: -1 - number for number, node in enumerate(group.nodes[:-1])}
        outs = view.outputs(group.last)
        out_layouts = [view.layout(v) for v in outs]
        for node in group.nodes:
            op, attrs = view.op(node), view.attrs(node)
            inputs: list[int | None] = []
            for position, value in enumerate(view.inputs(node)):
                if value is not None and value not in made and value not in operands:
                    operands[value] = len(described)
                    operand = self._operand(view, op, attrs, position, value, out_layouts[0])
                    described.append(replace(operand, layout=_lying(operand.layout)))
                inputs.append(None if value is None else made[value] if value in made else operands[value])
            steps.append(Step(op, attrs, tuple(inputs)))
        results = tuple(Operand(view.type(v), _lying(x), False) for v, x in zip(outs, out_layouts, strict=True))
        kernel = Kernel(tuple(described), tuple(steps), results, _named_opset(view))
        return _with_folded(kernel, tuple(operands))


def _with_folded(kernel: Kernel, values: tuple[V, ...]) -> tuple[Kernel, tuple[V, ...]]:
    """A kernel, and the values that are its operands, with what is folded into a convolution as its bias.

    However a convolution's scales and shifts are written, it is one kernel then, and measured once.
    """
    folded = _folded(kernel)
    if not folded:
        return kernel, values
    conv = kernel.steps[0]
    data, weight, bias = (*conv.inputs, None)[:3]
    operands, taken = list(kernel.operands), list(values)
    if bias is None:
        weights = operands[weight or 0].type
        bias = len(operands)
        operands.append(Operand(TensorType(weights.dtype, weights.dims[:1]), PLAIN, True))
        # some constant that goes into it
        taken.append(values[next(i for i in kernel.steps[1].inputs if i is not None and i >= 0)])
    rest = (replace(s, inputs=tuple(_moved(i, folded) for i in s.inputs)) for s in kernel.steps[1 + folded :])
    steps = (replace(conv, inputs=(data, weight, bias)), *rest)
    read = sorted({i for s in steps for i in s.inputs if i is not None and i >= 0})
    place = {old: new for new, old in enumerate(read)}
    steps = tuple(replace(s, inputs=tuple(place.get(i, i) if i is not None else None for i in s.inputs)) for s in steps)
    return replace(kernel, operands=tuple(operands[i] for i in read), steps=steps), tuple(taken[i] for i in read)


def _folded(kernel: Kernel) -> int:
    """How many steps behind a convolution are folded into it: those that read constants besides."""
    if not kernel.steps or kernel.steps[0].op.name != "Conv":
        return 0
    count = 0
    for step in kernel.steps[1:]:
        beside = [kernel.operands[i] for i in step.inputs if i is not None and i >= 0]
        if step.op.name not in ("BatchNormalization", "Mul", "Add") or not all(o.constant for o in beside):
            break
        count += 1
    return count


def _moved(reference: int | None, folded: int) -> int | None:
    """What names a step's result when so many steps behind the first are gone."""
    return reference if reference is None or reference >= -1 else min(reference + folded, -1)


def _lying(layout: str) -> str:
    """A layout as a kernel sees it."""
    return BLOCKED if in_blocks(layout) else layout


def _is_inner(view: View[N, V], node: N, value: V) -> bool:
    """Whether a value is computed for `node` alone, which reads it once."""
    if view.is_constant(value) or view.is_output(value) or len(view.consumers(value)) != 1:
        return False
    return len(view.outputs(view.producer(value))) == 1 and sum(v == value for v in view.inputs(node)) == 1


# ── opsets ───────────────────────────────────────────────────────────────────────────────────────────────────────

OPSET = 21
"""The opset of a kernel that does not name its own, such as a change of layout."""
_NAMED = "opset "


def opset_of(kernel: Kernel) -> int:
    """The opset that the nodes of a kernel are written in.

    It is named as the kernel's algorithm, since ONNX Runtime may have another one for an operator of another opset.
    """
    said = kernel.algorithm
    return int(said.removeprefix(_NAMED)) if said.startswith(_NAMED) else OPSET


def _named_opset(view: View[N, V]) -> str:
    known = view.graph.info.opset if isinstance(view, GraphView) else getattr(view, "opset", OPSET)
    return f"{_NAMED}{known}"
