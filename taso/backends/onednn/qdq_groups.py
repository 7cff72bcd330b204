"""Which operators between DequantizeLinear and QuantizeLinear run as one kernel, on the integers themselves.

A convolution or a matrix product whose factors are dequantised reads the integers, and so do functions of elements, a
MaxPool and what only moves data, wherever in a kernel they are: kernels begin with copies of the DequantizeLinear that
their operators go without, and a QuantizeLinear behind joins them. A DequantizeLinear of which all readers go without
does not run.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from taso.backends.lowering import (
    BLOCKED,
    LAST,
    PLAIN,
    GraphView,
    Group,
    Kernel,
    Layouts,
    Lowering,
    N,
    Operand,
    Step,
    V,
    View,
)  # fmt: skip
from taso.graph.graph import Graph
from taso.graph.operator import Attrs, Operator, Trait
from taso.graph.ops.structure import IDENTITY
from taso.graph.types import DType, TensorType

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
PRODUCTS = frozenset({"Conv", "MatMul", "Gemm"})
OF_INTEGERS = frozenset({"ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"})
VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
UNARY = frozenset(
    {
        "Relu", "Sigmoid", "Tanh", "Exp", "Sqrt", "Abs", "Elu", "LeakyRelu", "Gelu", "HardSwish", "Mish", "Swish",
        "Clip", "HardSigmoid", "Softplus", "Neg",
    }
)  # fmt: skip
BINARY = frozenset({"Add", "Mul"})
MOVED = frozenset({"MaxPool", "Transpose", "Concat"}) | VIEWS
"""What gives the same of integers as of the numbers that they stand for, as long as these are the same ones."""
NARROW = frozenset({DType.UINT8, DType.INT8})
_WITH_BODIES = frozenset({"If", "Loop", "Scan"})
_ALL = (PLAIN, LAST, BLOCKED)
_SPARED = Operand(TensorType(DType.UINT8, (0,)), PLAIN, True)


@dataclass(frozen=True)
class IntegerLayouts(Layouts):
    """Layouts in which images of 8-bit integers may lie as those of floats do."""

    def applies(self, t: TensorType) -> bool:
        return super().applies(TensorType(DType.FLOAT, t.shape) if t.dtype in NARROW else t)

    def of_outputs(
        self, op: Operator, attrs: Attrs, types: Sequence[TensorType | None], layouts: Sequence[str | None],
        results: Sequence[TensorType],
    ) -> tuple[str, ...]:  # fmt: skip
        if _follows(op) and layouts[0] is not None and self.applies(results[0]):
            return (layouts[0],)
        return super().of_outputs(op, attrs, types, layouts, results)

    def possible(
        self, op: Operator, attrs: Attrs, types: Sequence[TensorType | None], result: TensorType
    ) -> tuple[str, ...]:  # fmt: skip
        if result.dtype in NARROW:
            return _ALL if _follows(op) and self.applies(result) else (PLAIN,)
        return _ALL if _follows(op) and self.applies(result) else super().possible(op, attrs, types, result)

    def wanted(self, op: Operator, attrs: Attrs, position: int, t: TensorType, layout: str, out_layout: str) -> str:
        if _follows(op) and position == 0 and self.applies(t):
            return layout if self.alike(t, layout, out_layout) else out_layout
        return super().wanted(op, attrs, position, t, layout, out_layout)


def _follows(op: Operator) -> bool:
    return not op.domain and op.name in (QUANTIZE, DEQUANTIZE)


@dataclass(frozen=True)
class IntegerLowering(Lowering):
    """The local rule with kernels that read and make 8-bit integers."""

    def _entry(self, view: View[N, V], node: N) -> int | None:
        if not _is(view, node, QUANTIZE):
            return super()._entry(view, node)
        return 0 if self.joins(view, node, 0) is not None else None

    def joins(self, view: View[N, V], node: N, position: int) -> int | None:
        if not _is(view, node, QUANTIZE):
            return super().joins(view, node, position)
        value = view.inputs(node)[0]
        narrow = view.type(view.outputs(node)[0]).dtype in NARROW
        if position or value is None or not narrow or not one_number(view, node):
            return None
        alone = len(view.consumers(value)) == 1 and not view.is_output(value) and not view.is_constant(value)
        producer = view.producer(value)
        if not alone or len(view.outputs(producer)) != 1 or view.type(value).dtype is not DType.FLOAT:
            return None
        if view.op(producer).name in MOVED:
            return 0 if integers(view, producer) else None
        return self.fusion.anchors(view.op(producer), view.type(value))

    def may_join(self, op: Operator) -> bool:
        return op.name == QUANTIZE and not op.domain or super().may_join(op)

    def spares(self, view: View[N, V], node: N) -> bool:
        if not _is(view, node, DEQUANTIZE):
            return False
        (value,) = view.outputs(node)
        readers = view.consumers(value)
        if view.is_output(value) or not readers:
            return False
        return all(_goes_without(view, reader, value) for reader in readers)

    def beside(self, view: View[N, V], group: Group[N, V]) -> Hashable:
        if _is(view, group.anchor, DEQUANTIZE):
            return self.spares(view, group.anchor)
        return super().beside(view, group), tuple(view.producer(value) for value in _without(view, group))

    def minds_readers(self, op: Operator) -> bool:
        return op.name == DEQUANTIZE and not op.domain or super().minds_readers(op)

    def kernel(self, view: View[N, V], group: Group[N, V]) -> tuple[Kernel, tuple[V, ...]]:
        if self.spares(view, group.anchor):
            return Kernel((_SPARED,), (Step(IDENTITY, Attrs({}), (0,)),), (_SPARED,)), tuple(view.outputs(group.anchor))
        plain, values = super().kernel(view, group)
        without = _without(view, group)
        return self._between(view, group, plain, without) if without else (plain, values)

    def _between(
        self, view: View[N, V], group: Group[N, V], plain: Kernel, without: dict[V, tuple[N, int]]
    ) -> tuple[Kernel, tuple[V, ...]]:
        """The kernel with steps in front that dequantise what its nodes read."""
        out = plain.results[0].layout
        places: dict[V, int] = {}
        described: list[Operand] = []
        steps: list[Step] = []

        def read(node: N, position: int, value: V) -> int:
            if value not in places:
                places[value] = len(described)
                described.append(self._operand(view, view.op(node), view.attrs(node), position, value, out))
            return places[value]

        made: dict[V, int] = {}
        for value, (reader, at) in without.items():
            node = view.producer(value)
            # how data are to lie, who reads them says
            refs = tuple(
                None if v is None else read(node, i, v) if i else read(reader, at, v)
                for i, v in enumerate(view.inputs(node))
            )
            made[value] = -1 - len(steps)
            steps.append(Step(view.op(node), view.attrs(node), refs))
        first = len(steps)
        for number, (node, entry) in enumerate(zip(group.nodes, group.entries, strict=True)):
            inputs: list[int | None] = []
            whole = integers(view, node)
            for position, given in enumerate(view.inputs(node)):
                if given is None:
                    inputs.append(None)
                elif position == entry:
                    inputs.append(-first - number)
                elif position in whole:
                    inputs.append(made[given])
                else:
                    inputs.append(read(node, position, given))
            steps.append(Step(view.op(node), view.attrs(node), tuple(inputs)))
        return Kernel(tuple(described), tuple(steps), plain.results), tuple(places)


def _is(view: View[N, V], node: N, name: str) -> bool:
    op = view.op(node)
    return op.name == name and not op.domain


def _without(view: View[N, V], group: Group[N, V]) -> dict[V, tuple[N, int]]:
    """The dequantised values that the nodes of a kernel go without, each with the first to do so and its input."""
    found: dict[V, tuple[N, int]] = {}
    for node in group.nodes:
        given = view.inputs(node)
        for position in integers(view, node):
            value = given[position]
            if value is not None:
                found.setdefault(value, (node, position))
    return found


def _goes_without(view: View[N, V], node: N, value: V) -> bool:
    without = integers(view, node)
    return all(i in without for i, v in enumerate(view.inputs(node)) if v == value)


def integers(view: View[N, V], node: N) -> tuple[int, ...]:
    """The inputs of a node that it reads as the integers that they were."""
    op, given = view.op(node), view.inputs(node)
    elements = op.name in UNARY or op.name in BINARY
    if op.domain or not (elements or op.name in PRODUCTS or op.name in MOVED):
        return ()
    if len(view.outputs(node)) != 1 or view.is_constant(view.outputs(node)[0]):
        return ()
    if elements:
        return _elements(view, node)
    if given[0] is None or not dequantised(view, given[0]):
        return ()
    if op.name in PRODUCTS:
        return (0, 1) if _multiplies(view, node) else ()
    return tuple(range(len(given))) if all(v is not None and dequantised(view, v) for v in given) else ()


def _elements(view: View[N, V], node: N) -> tuple[int, ...]:
    """Of an element-wise operator: what was dequantised, if some of it has the shape of the result."""
    given, out = view.inputs(node), view.type(view.outputs(node)[0])
    found = [i for i, v in enumerate(given) if v is not None and dequantised(view, v)]
    if len(set(given)) < len(given) or len(given) > 2:
        return ()
    return tuple(found) if any(view.type(v) == out for i in found if (v := given[i]) is not None) else ()


def dequantised(view: View[N, V], value: V) -> bool:
    """Whether a value that is computed at run time is float32 made of 8-bit integers with one scale."""
    node = view.producer(value)
    if not _is(view, node, DEQUANTIZE) or view.is_constant(value):
        return False
    source = view.inputs(node)[0]
    narrow = source is not None and view.type(source).dtype in NARROW
    return narrow and view.type(value).dtype is DType.FLOAT and one_number(view, node)


def one_number(view: View[N, V], node: N) -> bool:
    """Whether scale and zero point of a node are a constant each."""
    beside = [v for v in view.inputs(node)[1:] if v is not None]
    return not view.attrs(node).int("block_size") and all(
        view.is_constant(v) and view.type(v).dims in ((), (1,)) for v in beside
    )


def _multiplies(view: View[N, V], node: N) -> bool:
    """Whether the second factor is integers too: constant ones, with a scale for each column at most, or data."""
    value, name, attrs = view.inputs(node)[1], view.op(node).name, view.attrs(node)
    if value is None or name == "Gemm" and not _is_plain_product(attrs):
        return False
    if not view.is_constant(value):
        return name == "MatMul" and view.inputs(node)[0] != value and dequantised(view, value)
    maker = view.producer(value)
    if not _is(view, maker, DEQUANTIZE) or view.attrs(maker).int("block_size"):
        return False
    source, rank = view.inputs(maker)[0], view.type(value).rank
    if source is None or view.type(source).dtype not in NARROW or view.type(value).dtype is not DType.FLOAT:
        return False
    if one_number(view, maker):
        return name != "MatMul" or rank == 2
    columns = 0 if name == "Conv" or name == "Gemm" and attrs.int("transB") else 1
    return view.attrs(maker).int("axis") % rank == columns and (name == "Conv" or rank == 2)


def _is_plain_product(attrs: Attrs) -> bool:
    return attrs.float("alpha") == 1 and attrs.float("beta") == 1 and not attrs.int("transA")


def multiplies_integers(graph: Graph) -> bool:
    """Whether some product of the graph is one of integers; bodies of control flow are not looked into, and may be."""
    view, nodes = GraphView(graph, Layouts()), graph.run_time_nodes
    if any(n.op.has(Trait.OPAQUE) and n.op.label in _WITH_BODIES for n in nodes):
        return True
    own = [n for n in nodes if not n.op.domain]
    return any(n.op.name in OF_INTEGERS or n.op.name in PRODUCTS and bool(integers(view, n)) for n in own)


__all__ = ["IntegerLayouts", "IntegerLowering", "multiplies_integers"]
