"""Rules of TASO's published format as rules of ours.

The published format leaves much unsaid; what it means is decided here, and becomes part of each rule as its condition:

- element-wise operators work on equal shapes, `matmul` on two dimensions, `conv2d` and pools on four;
- a convolution's window is the one its file names; SAME pads as ONNX's SAME_LOWER; an activation is a node of its own;
- the number of groups of a convolution follows from the shapes. A source binds it, and a target's convolution divides
  the channels of its input by those of its weight, on condition that this comes out even. Where a rule joins channels,
  its equation is about ungrouped convolutions and its source asks for one group;
- average pools count the padding where a rule turns them into convolutions, else the source binds whether they do;
- a split cuts where the concatenation whose record its input carries had joined;
- the shape of a constant follows from its use, each use having its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Union

from taso.graph.errors import RuleError
from taso.graph.operator import Operator
from taso.graph.ops import operator_named
from taso.graph.ops.windows import output_size
from taso.graph.types import Atom, Dim, FloorDiv, SymDim, ceil_div, substitute, symbols_of
from taso.rules.constants import AVERAGING_KERNEL, IDENTITY_KERNEL, IDENTITY_MATRIX, ONES
from taso.rules.expression import Binary, Call, Compare, Expr, Literal, Name, Tuple, literal, parse
from taso.rules.pattern import Exactness, PatternNode, Port, Ref, Rule
from taso.rules.solving import quotient, solve

# operator numbers of the published format, by the name of what they become
NUMBERS: dict[str, int] = {
    "Conv": 3, "Dropout": 4, "MaxPool": 6, "AveragePool": 7, "Relu": 8, "Sigmoid": 9, "Tanh": 10,
    "BatchNormalization": 11, "Concat": 12, "Split": 13, "Reshape": 14, "Transpose": 15, "Add": 16, "Mul": 17,
    "MatMul": 18, "Enlarge": 20, "MergeGroupConv": 21, "IdentityMatrix": 22, "IdentityKernel": 23, "Ones": 24,
    "AveragingKernel": 25,
}  # fmt: skip

_CONV, _MAX_POOL, _AVERAGE_POOL, _CONCAT, _SPLIT, _TRANSPOSE, _ADD, _MUL = 3, 6, 7, 12, 13, 15, 16, 17
_MATMUL, _SCALE, _ENLARGE, _MERGE = 18, 19, 20, 21
_IDENTITY_MATRIX, _IDENTITY_KERNEL, _ONES, _AVERAGING_KERNEL = 22, 23, 24, 25
_UNARY = {4: "Dropout", 8: "Relu", 9: "Sigmoid", 10: "Tanh"}
_CONSTANTS = {_IDENTITY_MATRIX: 2, _IDENTITY_KERNEL: 4, _ONES: None, _AVERAGING_KERNEL: 4}
_MOVES_OR_CLAMPS = {_MAX_POOL, 4, 8, _CONCAT, _SPLIT, _TRANSPOSE, _ENLARGE}

# parameter keys
_KERNEL, _STRIDE, _PAD, _ACTIVATION, _RANK, _AXIS, _PERM, _COUNT, _OUTPUTS = (4, 5), (6, 7), 8, 9, 10, 11, 12, 14, 2
_ACTIVATIONS = {0: None, 1: "Sigmoid", 2: "Relu", 3: "Tanh"}


@dataclass(frozen=True)
class PublishedOperator:
    """`inputs` holds (operator, output), the operator negative for a variable; `settings` the parameters by key."""

    type: int
    inputs: tuple[tuple[int, int], ...]
    settings: Mapping[int, int]

    def setting(self, key: int, default: int | None = None) -> int:
        """The value of a parameter; raises `RuleError` where it is missing and has no default."""
        value = self.settings.get(key, default)
        if value is None:
            raise RuleError(f"an operator of number {self.type} lacks its parameter {key}")
        return value

    def pair(self, keys: tuple[int, int]) -> tuple[int, int]:
        first, second = self.setting(keys[0]), self.setting(keys[1])
        if first < 1 or second < 1:
            raise RuleError(f"an operator of number {self.type} has a window or stride of {first}×{second}")
        return first, second


@dataclass(frozen=True)
class Published:
    """A rule as TASO writes it; `outputs` holds (source operator, its output, target operator, its output)."""

    source: tuple[PublishedOperator, ...]
    target: tuple[PublishedOperator, ...]
    outputs: tuple[tuple[int, int, int, int], ...]


def from_published(published: Published, origin: str = "") -> Rule:
    """The rule that a published one means; raises `RuleError` where it means nothing."""
    return converted(published, Conversion, origin)


def converted(published: Published, conversion: type[Conversion], origin: str) -> Rule:
    """`from_published` where `conversion` may know operators beyond TASO's."""
    for side, ops in (("source", published.source), ("target", published.target)):
        if len(ops) > 256:
            raise RuleError(f"the {side} of a rule has {len(ops)} operators, more than 256")
    return conversion(published).rule(origin)


# ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────

_Key = tuple[str, int, int]


class _Ranks:
    """The number of dimensions of each value, as far as the rule's operators fix it, on both sides at once."""

    def __init__(self, published: Published, uneven: Mapping[int, tuple[tuple[int, ...], int]]) -> None:
        self._uneven = uneven
        self._parent: dict[_Key, _Key] = {}
        self._rank: dict[_Key, int] = {}
        for side, ops in (("source", published.source), ("target", published.target)):
            for number, op in enumerate(ops):
                self._operator(side, number, op)

    def of(self, key: _Key) -> int | None:
        return self._rank.get(self._root(key))

    def _operator(self, side: str, number: int, op: PublishedOperator) -> None:
        inputs = [_key(side, ref) for ref in op.inputs]
        outputs = [(side, number, i) for i in range(_output_count(op))]
        fixed = self._fixed(op)
        if fixed is not None:
            for key in (*inputs, *outputs):
                self._set(key, fixed)
        elif op.type in self._uneven:
            ranks, result = self._uneven[op.type]
            for key, rank in zip((*inputs, *outputs), (*ranks, result), strict=True):
                self._set(key, rank)
        elif op.type == _SCALE:
            self._same([*inputs[:1], *outputs])
            self._set(inputs[1], 0)
        else:
            self._same([*inputs, *outputs])

    @staticmethod
    def _fixed(op: PublishedOperator) -> int | None:
        if op.type in (_CONV, _MAX_POOL, _AVERAGE_POOL, _ENLARGE, _MERGE, _IDENTITY_KERNEL, _AVERAGING_KERNEL):
            return 4
        if op.type in (_MATMUL, _IDENTITY_MATRIX):
            return 2
        return op.settings.get(_RANK)

    def _root(self, key: _Key) -> _Key:
        while key in self._parent:
            key = self._parent[key]
        return key

    def _set(self, key: _Key, rank: int) -> None:
        root = self._root(key)
        if self._rank.setdefault(root, rank) != rank:
            raise RuleError(f"a tensor would have both {self._rank[root]} and {rank} dimensions")

    def _same(self, keys: Sequence[_Key]) -> None:
        for key in keys[1:]:
            first, other = self._root(keys[0]), self._root(key)
            if first != other:
                self._parent[other] = first
                if other in self._rank:
                    self._set(first, self._rank.pop(other))


def _key(side: str, ref: tuple[int, int]) -> _Key:
    return ("variable", ref[0], 0) if ref[0] < 0 else (side, *ref)


def _output_count(op: PublishedOperator) -> int:
    count = op.setting(_OUTPUTS) if op.type == _SPLIT else 1
    if not 1 <= count <= 64:
        raise RuleError(f"a split into {count} parts")
    return count


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Join:
    """Along one axis: the sizes that a concatenation joined, and what each part carried itself."""

    sizes: tuple[Dim, ...]
    parts: tuple[_Join | None, ...]


@dataclass(frozen=True)
class Operand:
    """A value during conversion.

    `dims` is None where the rule leaves the number of dimensions open; then `like` is a variable of the same shape.
    `dtype` is a variable of the same element type; `joins` what the concatenations before it left, per axis.
    """

    ref: Ref
    dims: tuple[Dim, ...] | None
    like: str
    dtype: str
    joins: tuple[_Join | None, ...] = ()

    @property
    def shape(self) -> tuple[Dim, ...]:
        if self.dims is None:
            raise RuleError("an operator needs a number of dimensions that the rule leaves open")
        return self.dims

    def join(self, axis: int) -> _Join | None:
        return self.joins[axis] if axis < len(self.joins) else None


Late = Union[Expr, Callable[[], Expr]]


@dataclass
class _Draft:
    """A node whose attributes may still wait for shapes to become known."""

    op: Operator
    inputs: tuple[Ref, ...]
    attrs: dict[str, Late]
    n_outputs: int = 1

    def node(self) -> PatternNode:
        attrs = tuple((name, value() if callable(value) else value) for name, value in self.attrs.items())
        return PatternNode(self.op, self.inputs, attrs, self.n_outputs)


@dataclass
class Side:
    name: str
    ops: tuple[PublishedOperator, ...]
    drafts: list[_Draft] = field(default_factory=list)
    done: dict[int, tuple[Operand, ...]] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)

    @property
    def is_source(self) -> bool:
        return self.name == "source"


_SCALARS, _WEIGHTS, _DATA, _GROUPS = "srt", "wvu", "xyzabcdef", "ghkl"


class _Namer:
    """Fresh names from a row of letters, numbered once the row is used up."""

    def __init__(self, letters: str) -> None:
        self._letters = letters
        self._used = 0

    def next(self) -> str:
        place, self._used = self._used, self._used + 1
        letter = self._letters[place % len(self._letters)]
        return letter if place < len(self._letters) else f"{letter}{place // len(self._letters)}"


Reader = Callable[["Conversion", Side, PublishedOperator, Sequence[Operand]], Operand]
"""Reads one operator, whose operands are read: appends its nodes to the side and gives its value."""


# ── conversion ───────────────────────────────────────────────────────────────────────────────────────────────────


class Conversion:
    """One rule on its way from TASO's terms to ours.

    `readers` holds what reads each operator number, `uneven` the ranks of inputs and output where they differ.
    """

    readers: Mapping[int, Reader]
    uneven: Mapping[int, tuple[tuple[int, ...], int]] = {}

    def __init__(self, published: Published) -> None:
        self._published = published
        self._ranks = _Ranks(published, self.uneven)
        self._sides = (Side("source", published.source), Side("target", published.target))
        self._known: dict[str, Dim] = {}
        self._dtype_of: dict[str, str] = {}
        self._like_of: dict[str, str] = {}
        self._conditions: list[Expr] = []
        self.floats: list[str] = []
        self._hidden = 0
        self._groups = _Namer(_GROUPS)
        self._group_of: list[tuple[Dim, Dim, Dim]] = []
        self._one_group = _joins_channels(published)
        self._names = _variable_names(published)
        self._order = {name: i for i, name in enumerate(self._names.values())}
        self._variables = {number: self._variable(number, name) for number, name in self._names.items()}

    def rule(self, origin: str) -> Rule:
        source, target = self._sides
        # the whole source first: what it fixes is given, what the target asks beyond that is a condition
        befores = [self._mapped(source, m[:2]) for m in self._published.outputs]
        afters = [self._mapped(target, m[2:]) for m in self._published.outputs]
        pairs: list[tuple[Port, Ref]] = []
        for before, after in zip(befores, afters, strict=True):
            if isinstance(before, str):
                raise RuleError("an output of the source is a variable")
            pairs.append((before, after))
        types = {op.type for op in (*self._published.source, *self._published.target)}
        self._conditions.extend(_call("is_float", _root(self._dtype_of, name)) for name in self.floats)
        return Rule(
            tuple(d.node() for d in source.drafts), tuple(d.node() for d in target.drafts), tuple(pairs),
            tuple(dict.fromkeys(self._conditions)),
            Exactness.EXACT if types <= _MOVES_OR_CLAMPS else Exactness.REASSOCIATES, origin=origin,
        )  # fmt: skip

    def _mapped(self, side: Side, ref: tuple[int, int]) -> Ref:
        if ref[0] >= 0 and ref[0] < len(side.ops) and side.ops[ref[0]].type in _CONSTANTS:
            raise RuleError("a rule cannot replace a constant, whose shape only its use would tell")
        return self._operand(side, ref).ref

    def _variable(self, number: int, name: str) -> Operand:
        rank = self._ranks.of(("variable", number, 0))
        self._dtype_of[name] = self._like_of[name] = name
        if rank is None:
            return Operand(name, None, name, name)
        self._conditions.append(_equals(Call("rank", (Name(name),)), Literal(rank)))
        return Operand(name, tuple(SymDim.named(f"dim({name}, {i})") for i in range(rank)), name, name)

    # shapes

    def _now(self, dim: Dim) -> Dim:
        return substitute(dim, self._known)

    def _fresh(self) -> Dim:
        self._hidden += 1
        return SymDim.named(f"?{self._hidden}")

    def equate(self, left: Dim, right: Dim, given: bool) -> None:
        """Takes two sizes as equal. Unless an operator of the source makes them so (`given`), that is a condition."""
        now = self._now(left), self._now(right)
        if now[0] == now[1]:
            return
        if not given and not any(map(_hidden, now)):
            pair = now if _hidden(left) or _hidden(right) else (left, right)
            self._conditions.append(_equals(*map(self._shown, pair)))
        solved = solve(*now, self._preference)
        if solved is not None:
            name, value = solved
            self._known = {n: substitute(d, {name: value}) for n, d in self._known.items()}
            self._known[name] = value

    def _preference(self, symbol: str) -> int:
        """Which symbol to express by the others: a constant's size first, then a late dimension, never a setting."""
        if symbol.startswith("?"):
            return 1 << 20
        if not symbol.startswith("dim("):
            return -1
        name, axis = symbol[4:-1].split(", ")
        return self._order[name] * 16 + int(axis)

    def _equal_shapes(self, side: Side, left: Operand, right: Operand) -> Operand:
        """Both operands of an element-wise operator have one shape; the left one, with its shape known."""
        if left.dims is None or right.dims is None:
            return self._equal_open_shapes(left, right)
        pairs = list(zip(left.dims, right.dims, strict=True))
        named = isinstance(left.ref, str) and isinstance(right.ref, str)
        if named and any(self._now(a) != self._now(b) for a, b in pairs):
            self._conditions.append(_call("same_shape", left.like, right.like))
        for a, b in pairs:
            self.equate(a, b, given=named)
        return left

    def _equal_open_shapes(self, left: Operand, right: Operand) -> Operand:
        if not left.like or not right.like:
            known, constant = (left, right) if left.like else (right, left)
            self._like_of[str(constant.ref)] = known.like
            return known
        first, second = (_root(self._like_of, t.like) for t in (left, right))
        if first != second:
            self._conditions.append(_call("same_shape", first, second))
            self._like_of[second] = first
        return left

    def equal_dtypes(self, tensors: Sequence[Operand], given: bool) -> None:
        for t in tensors[1:]:
            first, second = _root(self._dtype_of, tensors[0].dtype), _root(self._dtype_of, t.dtype)
            if first == second:
                continue
            if first.startswith("?"):
                first, second = second, first
            if not given and not second.startswith("?"):
                self._conditions.append(_call("same_dtype", first, second))
            self._dtype_of[second] = first

    # operators

    def _operand(self, side: Side, ref: tuple[int, int]) -> Operand:
        number, output = ref
        if number < 0:
            if number not in self._variables:
                raise RuleError(f"the target reads variable {number}, which the source does not have")
            return self._variables[number]
        if number >= len(side.ops):
            raise RuleError(f"the {side.name} reads operator {number}, but has {len(side.ops)}")
        if side.ops[number].type in _CONSTANTS:
            return self._constant(side, side.ops[number], (side.name, *ref))
        if number not in side.done:
            if number in side.open:
                raise RuleError(f"the {side.name} has a cycle through operator {number}")
            side.open.add(number)
            side.done[number] = self._operator(side, side.ops[number])
        if not 0 <= output < len(side.done[number]):
            raise RuleError(f"operator {number} of the {side.name} has no output {output}")
        return side.done[number][output]

    def _operator(self, side: Side, op: PublishedOperator) -> tuple[Operand, ...]:
        inputs = [self._operand(side, ref) for ref in op.inputs]
        if op.type == _SPLIT:
            return self._split(side, op, take(op, inputs, 1)[0])
        if op.type in _UNARY:
            (x,) = take(op, inputs, 1)
            attrs: dict[str, Late] = {"ratio": Name("q")} if op.type == 4 and side.is_source else {}
            return (self.emit(side, _UNARY[op.type], [x], attrs, x.dims, x.joins),)
        reader = self.readers.get(op.type)
        if reader is None:
            raise RuleError(f"operators of number {op.type} cannot stand in a rule of TASO's format")
        result = reader(self, side, op, inputs)
        activation = _ACTIVATIONS.get(op.setting(_ACTIVATION, 0))
        if op.setting(_ACTIVATION, 0) not in _ACTIVATIONS:
            raise RuleError(f"there is no activation number {op.setting(_ACTIVATION)}")
        if activation is not None and op.type in (_CONV, _MATMUL, _MAX_POOL, _AVERAGE_POOL):
            result = self.emit(side, activation, [result], {}, result.dims, result.joins)
        return (result,)

    def emit(
        self, side: Side, name: str | Operator, inputs: Sequence[Operand], attrs: Mapping[str, Late],
        dims: tuple[Dim, ...] | None, joins: tuple[_Join | None, ...] = (),
    ) -> Operand:  # fmt: skip
        op = operator_named(name) if isinstance(name, str) else name
        side.drafts.append(_Draft(op, tuple(t.ref for t in inputs), dict(attrs)))
        first = inputs[0] if inputs else None
        like = first.like if first is not None and dims is None else ""
        if first is None:
            self._hidden += 1
            dtype = f"?{self._hidden}"
            self._dtype_of[dtype] = dtype
        else:
            dtype = first.dtype
        return Operand(Port(len(side.drafts) - 1, 0), dims, like, dtype, joins)

    def elementwise(
        self, side: Side, op: PublishedOperator, inputs: Sequence[Operand], name: str | None = None
    ) -> Operand:  # fmt: skip
        """An operator of two operands of one shape: `name`, or what the number says."""
        left, right = take(op, inputs, 2)
        self.equal_dtypes([left, right], given=side.is_source)
        shaped = self._equal_shapes(side, left, right)
        joins = self.agreeing([left, right])
        name = name or ("Add" if op.type == _ADD else "Mul")
        made = self.emit(side, name, [left, right], {}, shaped.dims, joins)
        return Operand(made.ref, made.dims, shaped.like, made.dtype, joins)

    def _scale(self, side: Side, op: PublishedOperator, inputs: Sequence[Operand]) -> Operand:
        x, scalar = take(op, inputs, 2)
        self.equal_dtypes([x, scalar], given=side.is_source)
        made = self.emit(side, "Mul", [x, scalar], {}, x.dims, x.joins)
        return Operand(made.ref, x.dims, x.like, made.dtype, x.joins)

    def _matmul(self, side: Side, op: PublishedOperator, inputs: Sequence[Operand]) -> Operand:
        left, right = take(op, inputs, 2)
        self.equal_dtypes([left, right], given=side.is_source)
        self.equate(left.shape[1], right.shape[0], given=side.is_source)
        joins = (left.join(0), right.join(1))
        return self.emit(side, "MatMul", [left, right], {}, (left.shape[0], right.shape[1]), joins)

    def _conv(self, side: Side, op: PublishedOperator, inputs: Sequence[Operand]) -> Operand:
        x, w = take(op, inputs, 2)
        kernel = op.pair(_KERNEL)
        self.equal_dtypes([x, w], given=side.is_source)
        for axis, size in enumerate(kernel, 2):
            self.equate(w.shape[axis], size, given=False)
        if _hidden(self._now(w.shape[0])):
            # a constant kernel gives back as many channels as it gets
            self.equate(w.shape[0], x.shape[1], given=True)
        attrs: dict[str, Late] = dict(self._window(op, kernel, x))
        group = self._source_group(x, w) if side.is_source else self._target_group(x, w)
        if group != Literal(1):
            attrs["group"] = group
        dims = (x.shape[0], w.shape[0], *self._positions(op, kernel, x))
        return self.emit(side, "Conv", [x, w], attrs, dims, (x.join(0), w.join(0), None, None))

    def _source_group(self, x: Operand, w: Operand) -> Expr:
        channels, per_group = self._now(x.shape[1]), self._now(w.shape[1])
        if self._one_group or channels == per_group or _hidden(per_group) or _hidden(channels):
            self.equate(channels, per_group, given=True)
            return Literal(1)
        name = next((g for c, p, g in self._group_of if self._now(c) == channels and self._now(p) == per_group), None)
        if name is None:
            name = SymDim.named(self._groups.next())
            self._group_of.append((channels, per_group, name))
            self.equate(channels, per_group * name, given=True)
        return dim_expr(name)

    def _target_group(self, x: Operand, w: Operand) -> Expr:
        channels, per_group, outputs = (self._now(d) for d in (x.shape[1], w.shape[1], w.shape[0]))
        if _hidden(per_group) or _hidden(channels):
            self.equate(channels, per_group, given=True)
            return Literal(1)
        group = next((g for c, p, g in self._group_of if (self._now(c), self._now(p)) == (channels, per_group)), None)
        if group is None:
            group = quotient(channels, per_group)
        if group is None:
            parts = self._shown(x.shape[1]), self._shown(w.shape[1])
            self._conditions.append(_equals(Binary("%", *parts), Literal(0)))
            shown: Expr = Binary("//", *parts)
        else:
            shown = self._shown(group)
        even = group is not None and (group == 1 or quotient(outputs, group) is not None)
        if not even and group not in [g for _, _, g in self._group_of]:
            self._conditions.append(_equals(Binary("%", self._shown(w.shape[0]), shown), Literal(0)))
        return shown

    def _window(self, op: PublishedOperator, kernel: tuple[int, int], x: Operand) -> dict[str, Late]:
        """Strides and pads of a convolution or pool, left out where they are the default."""
        strides, attrs = op.pair(_STRIDE), dict[str, Late]()
        if strides != (1, 1):
            attrs["strides"] = literal(strides)
        if op.setting(_PAD) not in (0, 1):
            raise RuleError(f"there is no padding number {op.setting(_PAD)}")
        if op.setting(_PAD) == 1:
            return attrs
        if strides == (1, 1):
            pads = tuple(k // 2 for k in kernel) + tuple((k - 1) // 2 for k in kernel)
            if any(pads):
                attrs["pads"] = literal(pads)
        else:
            attrs["pads"] = lambda: Call("same_pads", (literal(kernel), literal(strides), self.sizes(x.shape[2:])))
        return attrs

    def _positions(self, op: PublishedOperator, kernel: tuple[int, int], x: Operand) -> tuple[Dim, ...]:
        strides = op.pair(_STRIDE)
        if op.setting(_PAD) == 0:
            return tuple(ceil_div(self._now(d), s) for d, s in zip(x.shape[2:], strides, strict=True))
        sizes = zip(x.shape[2:], kernel, strides, strict=True)
        return tuple(output_size(self._now(d), k, s, (0, 0), 1) for d, k, s in sizes)

    def _pool(self, side: Side, op: PublishedOperator, inputs: Sequence[Operand]) -> Operand:
        (x,) = take(op, inputs, 1)
        kernel = op.pair(_KERNEL)
        attrs: dict[str, Late] = {"kernel_shape": literal(kernel), **self._window(op, kernel, x)}
        if op.type == _AVERAGE_POOL:
            attrs["count_include_pad"] = self._counting()
            self.floats.append(x.dtype)
        dims = (*x.shape[:2], *self._positions(op, kernel, x))
        name = "AveragePool" if op.type == _AVERAGE_POOL else "MaxPool"
        return self.emit(side, name, [x], attrs, dims, (x.join(0), x.join(1), None, None))

    def _counting(self) -> Expr:
        """Whether an average counts the padding: it must where a convolution stands for it."""
        source, target = ({op.type for op in ops} for ops in (self._published.source, self._published.target))
        free = _AVERAGE_POOL in source and not {_AVERAGING_KERNEL, _IDENTITY_KERNEL} & (source | target)
        return Name("p") if free else Literal(1)

    def _concat(self, side: Side, op: PublishedOperator, inputs: Sequence[Operand]) -> Operand:
        if not inputs:
            raise RuleError("a concatenation of nothing")
        axis, first = op.setting(_AXIS), inputs[0]
        if not 0 <= axis < len(first.shape):
            raise RuleError(f"a concatenation along axis {axis} of {len(first.shape)}")
        self.equal_dtypes(inputs, given=side.is_source)
        total: Dim = 0
        for t in inputs:
            for other in range(len(first.shape)):
                if other != axis:
                    self.equate(first.shape[other], t.shape[other], given=side.is_source)
            total = total + t.shape[axis]
        dims = (*first.shape[:axis], total, *first.shape[axis + 1 :])
        joins = list(self.agreeing(inputs))
        joins[axis] = _Join(tuple(t.shape[axis] for t in inputs), tuple(t.join(axis) for t in inputs))
        return self.emit(side, "Concat", inputs, {"axis": literal(axis)}, dims, tuple(joins))

    def _split(self, side: Side, op: PublishedOperator, x: Operand) -> tuple[Operand, ...]:
        axis, count = op.setting(_AXIS), _output_count(op)
        if not 0 <= axis < len(x.shape):
            raise RuleError(f"a split along axis {axis} of {len(x.shape)}")
        join = x.join(axis)
        if join is None or len(join.sizes) < count:
            raise RuleError(f"a split into {count} parts along axis {axis} that no concatenation has joined")
        sizes, parts = join.sizes, join.parts
        if len(sizes) > count:
            # the last joins are the most recent ones
            head = len(sizes) - count + 1
            first: Dim = 0
            for size in sizes[:head]:
                first = first + size
            sizes, parts = (first, *sizes[head:]), (_Join(sizes[:head], parts[:head]), *parts[head:])
        attrs: dict[str, Late] = {"axis": literal(axis), "split": lambda: self.sizes(sizes)}
        made = self.emit(side, "Split", [x], attrs, x.dims)
        side.drafts[-1].n_outputs = count
        place = len(side.drafts) - 1
        return tuple(
            Operand(
                Port(place, i), (*x.shape[:axis], size, *x.shape[axis + 1 :]), "", made.dtype,
                tuple(parts[i] if a == axis else x.join(a) for a in range(len(x.shape))),
            )
            for i, size in enumerate(sizes)
        )  # fmt: skip

    def _transpose(self, side: Side, op: PublishedOperator, inputs: Sequence[Operand]) -> Operand:
        (x,) = take(op, inputs, 1)
        perm = _permutation(op.setting(_PERM), len(x.shape))
        dims, joins = tuple(x.shape[p] for p in perm), tuple(x.join(p) for p in perm)
        return self.emit(side, "Transpose", [x], {"perm": literal(perm)}, dims, joins)

    def _enlarge(self, side: Side, op: PublishedOperator, inputs: Sequence[Operand]) -> Operand:
        w = inputs[0] if len(inputs) in (1, 2) else take(op, inputs, 1)[0]
        target = inputs[1].shape[2:] if len(inputs) == 2 else op.pair(_KERNEL)
        sizes = tuple(self._enlarged(self._now(w.shape[2 + i]), self._now(target[i])) for i in range(2))
        return self.emit(
            side, "Enlarge", [w], {"kernel_shape": lambda: self.sizes(target)}, (*w.shape[:2], *sizes),
            (w.join(0), w.join(1), None, None),
        )  # fmt: skip

    def _enlarged(self, size: Dim, target: Dim) -> Dim:
        """The window after enlarging; a SAME convolution stays the same only where it grows by an even number."""
        if not (isinstance(size, int) and isinstance(target, int)):
            shown = dim_expr(size), dim_expr(target)
            self._conditions.append(Compare(shown[0], ("<=",), (shown[1],)))
            self._conditions.append(_equals(Binary("%", Binary("-", shown[1], shown[0]), Literal(2)), Literal(0)))
            return target
        if target > size and (target - size) % 2:
            raise RuleError(f"a window of {size} enlarged to {target} shifts its convolution by half an element")
        return max(size, target)

    def _merge(self, side: Side, op: PublishedOperator, inputs: Sequence[Operand]) -> Operand:
        (w,), count = take(op, inputs, 1), op.setting(_COUNT)
        if count < 1:
            raise RuleError(f"{count} groups cannot be merged into one")
        group = next((g for _, p, g in self._group_of if self._now(p) == self._now(w.shape[1])), None)
        if group is None:
            raise RuleError("the number of groups that are merged is not that of a convolution of the source")
        self._conditions.append(_equals(Binary("%", dim_expr(group), Literal(count)), Literal(0)))
        attrs: dict[str, Late] = {"groups": dim_expr(group), "count": literal(count)}
        return self.emit(side, "MergeGroupConv", [w], attrs, (w.shape[0], w.shape[1] * count, *w.shape[2:]))

    def _constant(self, side: Side, op: PublishedOperator, key: _Key) -> Operand:
        """A constant, made anew for each use: its sizes are unknown until that use fixes them."""
        dims: tuple[Dim, ...] | None
        if op.type == _IDENTITY_MATRIX:
            size = self._fresh()
            dims, made = (size, size), IDENTITY_MATRIX
            attrs: dict[str, Late] = {"size": lambda: self._size(size)}
        elif op.type == _ONES:
            rank = self._ranks.of(key)
            shape = None if rank is None else tuple(self._fresh() for _ in range(rank))
            ref = str(Port(len(side.drafts), 0))
            dims, made, attrs = shape, ONES, {"shape": lambda: self._shape(shape, ref)}
        else:
            kernel, channels = op.pair(_KERNEL), self._fresh()
            made = IDENTITY_KERNEL if op.type == _IDENTITY_KERNEL else AVERAGING_KERNEL
            dims = (channels, channels if made is IDENTITY_KERNEL else 1, *kernel)
            attrs = {"channels": lambda: self._size(channels), "kernel_shape": literal(kernel)}
        result = self.emit(side, made, [], attrs, dims)
        side.drafts[-1].attrs["dtype"] = lambda: _call("dtype", self._dtype(result))
        if made is AVERAGING_KERNEL:
            self.floats.append(result.dtype)
        return result

    def _dtype(self, t: Operand) -> str:
        """A variable of the same element type."""
        name = _root(self._dtype_of, t.dtype)
        if name.startswith("?"):
            raise RuleError("the element type of a constant does not follow from its use")
        return name

    # expressions

    def _shown(self, dim: Dim, settings: bool = True) -> Expr:
        """A size, as a dimension of a variable where it is one and would read worse otherwise.

        Without `settings`, where it is an attribute variable too.
        """
        now = dim if not _hidden(dim) else self._now(dim)
        lone = now.symbol if isinstance(now, SymDim) else ""
        if lone is None or (not settings and lone and not lone.startswith("dim(")):
            for t in self._variables.values():
                for axis, own in enumerate(t.dims or ()):
                    if self._now(own) == self._now(now):
                        return Call("dim", (Name(t.like), Literal(axis)))
        return dim_expr(now)

    def _size(self, dim: Dim) -> Expr:
        now = self._now(dim)
        if _hidden(now):
            raise RuleError("the shape of a constant does not follow from its use")
        return self._shown(now, settings=False)

    def sizes(self, dims: Sequence[Dim]) -> Tuple:
        return Tuple(tuple(self._size(d) for d in dims))

    def _shape(self, dims: tuple[Dim, ...] | None, ref: str) -> Expr:
        if dims is None:
            if ref not in self._like_of:
                raise RuleError("the shape of a constant does not follow from its use")
            return _call("shape", self._like_of[ref])
        now = tuple(map(self._now, dims))
        for t in self._variables.values():
            if t.dims is not None and tuple(map(self._now, t.dims)) == now:
                return _call("shape", t.like)
        return self.sizes(dims)

    def agreeing(self, tensors: Sequence[Operand]) -> tuple[_Join | None, ...]:
        """What all operands carry alike, axis by axis."""
        length = max((len(t.dims or ()) for t in tensors), default=0)
        kept: list[_Join | None] = []
        for axis in range(length):
            joins = [self._settled(t.join(axis)) for t in tensors]
            kept.append(joins[0] if all(j == joins[0] for j in joins) else None)
        return tuple(kept)

    def _settled(self, join: _Join | None) -> _Join | None:
        if join is None:
            return None
        return _Join(tuple(map(self._now, join.sizes)), tuple(map(self._settled, join.parts)))


READERS: dict[int, Reader] = {
    _CONV: Conversion._conv, _MAX_POOL: Conversion._pool, _AVERAGE_POOL: Conversion._pool,
    _CONCAT: Conversion._concat, _TRANSPOSE: Conversion._transpose, _ADD: Conversion.elementwise,
    _MUL: Conversion.elementwise, _MATMUL: Conversion._matmul, _SCALE: Conversion._scale,
    _ENLARGE: Conversion._enlarge, _MERGE: Conversion._merge,
}  # fmt: skip
Conversion.readers = READERS


def take(op: PublishedOperator, inputs: Sequence[Operand], count: int) -> Sequence[Operand]:
    if len(inputs) != count:
        raise RuleError(f"an operator of number {op.type} has {len(inputs)} inputs instead of {count}")
    return inputs


def _root(parents: Mapping[str, str], name: str) -> str:
    while parents[name] != name:
        name = parents[name]
    return name


def _hidden(dim: Dim) -> bool:
    return any(s.startswith("?") for s in symbols_of(dim))


def _permutation(code: int, rank: int) -> tuple[int, ...]:
    """The digits of `code` in base `rank`, most significant first."""
    digits = []
    for _ in range(rank):
        digits.append(code % rank)
        code //= rank
    if sorted(digits) != list(range(rank)) or code:
        raise RuleError(f"a permutation of {rank} axes has other digits")
    return tuple(reversed(digits))


def _variable_names(published: Published) -> dict[int, str]:
    """A letter for each variable of the source, in order of appearance: weights, scalars and the rest apart."""
    ops = (*published.source, *published.target)
    scalars = {op.inputs[1][0] for op in ops if op.type == _SCALE and len(op.inputs) == 2}
    weights = {op.inputs[1][0] for op in ops if op.type == _CONV and len(op.inputs) == 2}
    weights |= {op.inputs[0][0] for op in ops if op.type in (_ENLARGE, _MERGE) and op.inputs}
    data = {op.inputs[0][0] for op in ops if op.type in (_CONV, _MATMUL) and op.inputs}
    rows = {kind: _Namer(letters) for kind, letters in (("s", _SCALARS), ("w", _WEIGHTS), ("x", _DATA))}
    names: dict[int, str] = {}
    for op in published.source:
        for number, _ in op.inputs:
            if number < 0 and number not in names:
                kind = "s" if number in scalars else "w" if number in weights - data else "x"
                names[number] = rows[kind].next()
    return names


def _joins_channels(published: Published) -> bool:
    """Whether a side concatenates what becomes the channels of a convolution's input or weight."""
    return any(
        _joined(ops, op.inputs[0], {1}) or _joined(ops, op.inputs[1], {0, 1})
        for ops in (published.source, published.target)
        for op in ops
        if op.type == _CONV and len(op.inputs) == 2
    )


def _joined(ops: Sequence[PublishedOperator], ref: tuple[int, int], axes: set[int]) -> bool:
    """Whether a concatenation along one of `axes` stands before `ref`."""
    seen: set[int] = set()
    waiting = [ref[0]]
    while waiting:
        number = waiting.pop()
        if number < 0 or number >= len(ops) or number in seen:
            continue
        seen.add(number)
        if ops[number].type == _CONCAT and ops[number].setting(_AXIS) in axes:
            return True
        waiting.extend(r[0] for r in ops[number].inputs)
    return False


def _call(function: str, *names: str) -> Expr:
    return Call(function, tuple(map(Name, names)))


def _equals(left: Expr, right: Expr) -> Expr:
    return Compare(left, ("==",), (right,))


def dim_expr(dim: Dim) -> Expr:
    """A size whose symbols are named by expressions, as an expression."""
    if isinstance(dim, int):
        return literal(dim)
    terms = sorted(dim.terms, key=lambda t: t[1] < 0)
    shown: Expr | None = None
    for monomial, coefficient in terms:
        factor = _product(monomial, abs(coefficient) if shown is not None else coefficient)
        shown = factor if shown is None else Binary("-" if coefficient < 0 else "+", shown, factor)
    return shown if shown is not None else Literal(0)


def _product(monomial: Sequence[Atom], coefficient: int) -> Expr:
    factors = [_atom(a) for a in monomial]
    if coefficient != 1 or not factors:
        factors.insert(0, literal(coefficient))
    product = factors[0]
    for factor in factors[1:]:
        product = Binary("*", product, factor)
    return product


def _atom(atom: Atom) -> Expr:
    if isinstance(atom, str):
        return parse(atom)
    if isinstance(atom, FloorDiv):
        return Binary("//", dim_expr(atom.dividend), Literal(atom.divisor))
    raise RuleError(f"the size {atom} cannot be written as an expression")
