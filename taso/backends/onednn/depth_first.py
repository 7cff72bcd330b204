"""Convolutions and pools in a row, run depth first: a band of rows through all of them, then the next band.

What lies between two layers is then a few rows, which stay in the second-level cache, and never the whole tensor
(Alwani et al. 2016, "Fused-layer CNN accelerators"). Rows that two bands read are kept from one to the next, so nothing
is computed twice. Everything is channels-last, where rows of an image are one stretch of memory, and each layer is the
primitive that it would be on its own, on fewer rows. The result is that of the layers one after the other, and sums are
taken in whatever order oneDNN takes them for so many rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Union

from taso.backends.lowering import LAST, Kernel, Step
from taso.backends.onednn import primitives as p
from taso.backends.onednn.attributes import Attributes, BinaryPostOp, EltwisePostOp, PostOp
from taso.backends.onednn.memory import DataType, MemoryDesc
from taso.backends.onednn.places import RESULT, Place, describe
from taso.backends.onednn.primitives import Primitive, Unimplemented, is_slow
from taso.backends.onednn.recipe import PrimitiveLaunch, Recipe
from taso.graph.operator import Attrs, Operator, Trait
from taso.graph.ops.linear import conv_settings
from taso.graph.ops.pooling import pool_settings
from taso.graph.types import DType, TensorType

_ITEM = 4
_FEWEST_ROWS = 2
"""Rows of the result in a band below which launches cost more than the cache saves."""
_POOLS = ("MaxPool", "AveragePool")

# ── which kernels ────────────────────────────────────────────────────────────────────────────────────────────────


def is_window(op: Operator, attrs: Attrs, types: Sequence[TensorType | None], out: TensorType) -> bool:
    """Whether an operator on pictures can be a layer of such a kernel: a Conv or a pool without gaps in its windows."""
    x = types[0] if types else None
    if op.domain or x is None or not (x.static and out.static) or x.shape is None or x.rank != 4:
        return False
    if x.dtype is not DType.FLOAT or out.dtype is not DType.FLOAT or 0 in (*x.static_shape, *out.static_shape):
        return False
    if op.name == "Conv":
        weight = types[1]
        if weight is None or not weight.static:
            return False
        taps, full = weight.static_shape[2:], conv_settings(weight, attrs)
    elif op.name in _POOLS and not attrs.int("ceil_mode"):
        taps, full = attrs.ints("kernel_shape"), pool_settings(attrs)
    else:
        return False
    pads = full.ints("pads")
    return set(full.ints("dilations")) == {1} and all(pads[i] < taps[i % 2] for i in range(4))


@dataclass(frozen=True)
class _Layer:
    """A convolution or pool with the steps behind it. Sizes are (channels, rows, columns), others by rows alone."""

    step: Step
    followers: tuple[Step, ...]
    x: TensorType
    out: TensorType
    taps: int
    stride: int
    top: int

    @property
    def inner(self) -> int:
        """Elements of a row of what comes in."""
        return _row(self.x)

    def first(self, row: int) -> int:
        """The first row of the data, padding counted, that a row of the result reads."""
        return row * self.stride - self.top


def _row(t: TensorType) -> int:
    return t.static_shape[1] * t.static_shape[3]


def _layers(kernel: Kernel) -> list[_Layer]:
    """The layers of a kernel; raises `Unimplemented` where it is no row of such."""
    layers: list[_Layer] = []
    types: list[TensorType] = []
    for number, step in enumerate(kernel.steps):
        given = [None if i is None else kernel.operands[i].type if i >= 0 else types[-1 - i] for i in step.inputs]
        (out,) = step.op.types_of(given, step.attrs)
        types.append(out)
        if step.op.has(Trait.ELEMENTWISE) and layers:
            if out != layers[-1].out or -number not in step.inputs:
                raise Unimplemented(f"{step.op.name} changes the shape between two layers")
            layers[-1] = replace(layers[-1], followers=(*layers[-1].followers, step))
            continue
        x = given[0]
        if x is None or not is_window(step.op, step.attrs, given, out) or layers and step.inputs[0] != -number:
            raise Unimplemented(f"{step.op.name} is no layer of a row")
        weight = given[1] if step.op.name == "Conv" else None
        full = conv_settings(weight, step.attrs) if weight is not None else pool_settings(step.attrs)
        taps = weight.static_shape[2] if weight is not None else full.ints("kernel_shape")[0]
        layers.append(_Layer(step, (), x, out, taps, full.ints("strides")[0], full.ints("pads")[0]))
    return layers


# ── bands ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Turn:
    """One layer in one band: which rows it reads and makes, and the rows of padding above and below."""

    layer: int
    source: int
    read: int
    above: int
    below: int
    target: int
    made: int


@dataclass(frozen=True)
class _Keep:
    """Rows of what lies before `layer` that the next band reads again: they move to the beginning of its buffer."""

    layer: int
    start: int
    count: int


def _bands(layers: Sequence[_Layer], rows: int) -> Iterator[_Turn | _Keep]:
    """What is done, in order, for bands of `rows` rows of the result; rows are counted in whole tensors."""
    heights = [layers[0].x.static_shape[2], *(layer.out.static_shape[2] for layer in layers)]
    done = [heights[0]] + [0] * len(layers)
    for end in range(rows, heights[-1] + rows, rows):
        wanted = done[:-1] + [min(end, heights[-1])]
        for number in range(len(layers) - 1, 0, -1):
            layer = layers[number]
            wanted[number] = max(done[number], min(layer.first(wanted[number + 1] - 1) + layer.taps, heights[number]))
        for number, layer in enumerate(layers):
            target, made = done[number + 1], wanted[number + 1] - done[number + 1]
            if not made:
                continue
            first, last = layer.first(target), layer.first(target + made - 1) + layer.taps
            start, stop = max(first, 0), min(last, heights[number])
            yield _Turn(number, start, stop - start, start - first, last - stop, target, made)
            done[number + 1] = wanted[number + 1]
        for number in range(1, len(layers)):
            if done[number + 1] < heights[number + 1]:
                start = max(layers[number].first(done[number + 1]), 0)
                yield _Keep(number, min(start, done[number]), max(done[number] - start, 0))


def _room(layers: Sequence[_Layer], plan: Sequence[_Turn | _Keep]) -> list[int] | None:
    """Rows that the buffer before each layer but the first needs; None where rows to be kept would overlap as they
    move."""
    base, most = [0] * len(layers), [0] * len(layers)
    for act in plan:
        if isinstance(act, _Keep):
            if act.count > act.start - base[act.layer] > 0:
                return None
            base[act.layer] = act.start
        elif act.layer + 1 < len(layers):
            most[act.layer + 1] = max(most[act.layer + 1], act.target + act.made - base[act.layer + 1])
    return most[1:]


def _chosen(layers: Sequence[_Layer], cache: int | None) -> tuple[list[_Turn | _Keep], list[int]]:
    """The bands, as high as leaves what lies between the layers in `cache` bytes, and the rows of each buffer."""
    height = layers[-1].out.static_shape[2]
    for count in range(1, height + 1):
        rows = -(-height // count)
        if rows < _FEWEST_ROWS:
            break
        plan = list(_bands(layers, rows))
        room = _room(layers, plan)
        held = [r * layer.inner for r, layer in zip(room or (), layers[1:], strict=room is not None)]
        if room is not None and (cache is None or sum(held) * _ITEM <= cache):
            return plan, room
    raise Unimplemented("rows too long for the cache")


# ── the launches ─────────────────────────────────────────────────────────────────────────────────────────────────


class Host(Protocol):
    """What makes the recipe of a kernel (`taso.backends.onednn.kernels`), as far as it is needed here."""

    @property
    def kernel(self) -> Kernel: ...
    @property
    def recipe(self) -> Recipe: ...
    def index(self, step: Step, position: int) -> int: ...
    def has(self, step: Step, position: int) -> bool: ...
    def place(self, index: int) -> Place: ...
    def weights(self, index: int, plain: MemoryDesc, wanted: MemoryDesc) -> Place: ...
    def window(self, step: Step, dtype: DataType) -> tuple[MemoryDesc, Window]: ...
    def functions(self, step: Step) -> tuple[EltwisePostOp, ...] | None: ...
    def combination(self, step: Step) -> tuple[str, int] | None: ...


class Window(Protocol):
    """Makes the primitive of a convolution; `pads` are above, left, below and right where they are not its own."""

    def __call__(
        self, src: MemoryDesc, dst: MemoryDesc, bias: MemoryDesc | None, attributes: Attributes,
        pads: Sequence[int] | None = None,
    ) -> Primitive: ...  # fmt: skip


def build(host: Host, cache: int | None) -> None:
    """Adds the launches of a kernel of several layers to its recipe; between layers lie at most `cache` bytes.

    With None each layer is computed as a whole before the next.

    Raises `Unimplemented` where it is no row of layers, or oneDNN has no fast primitive for one of them.
    """
    layers = _layers(host.kernel)
    x, out = host.kernel.operands[host.index(layers[0].step, 0)], host.kernel.results[0]
    if x.layout != LAST or out.layout != LAST:
        raise Unimplemented("layers in a row are channels-last")
    plan, room = _chosen(layers, cache)
    _Bands(host, layers, plan, room).run()


Plan = Sequence[Union[_Turn, _Keep]]


class _Bands:
    def __init__(self, host: Host, layers: Sequence[_Layer], plan: Plan, room: Sequence[int]) -> None:
        self.host = host
        self.layers = layers
        self.plan = plan
        sizes = (rows * layer.inner * _ITEM for rows, layer in zip(room, layers[1:], strict=True))
        self.buffers = [host.recipe.add_scratch(size) for size in sizes]
        self.base = [0] * len(layers)
        self.primitives: dict[object, Primitive] = {}
        self.places: dict[object, Place] = {}

    def run(self) -> None:
        for image in range(self.layers[0].x.static_shape[0]):
            self.base = [0] * len(self.layers)
            for act in self.plan:
                if isinstance(act, _Turn):
                    self.compute(image, act)
                else:
                    self.keep(act)

    def at(self, value: int, image: int, row: int) -> Place:
        """Where a row of what lies before layer `value` is; behind the last one lies the result."""
        inside = 0 < value < len(self.layers)
        t = self.layers[value].x if value < len(self.layers) else self.layers[-1].out
        length = _row(t)
        if inside:
            return _moved(self.buffers[value - 1], (row - self.base[value]) * length)
        place = self.host.place(self.host.index(self.layers[0].step, 0)) if value == 0 else Place(RESULT)
        return _moved(place, (image * t.static_shape[2] + row) * length)

    def keep(self, act: _Keep) -> None:
        base, layer = self.base[act.layer], self.layers[act.layer]
        if act.start > base and act.count:
            desc = MemoryDesc.plain((act.count * layer.inner,), DataType.F32)
            move = self.primitive(("move", desc.key), lambda: p.reorder(desc, desc))
            buffer = self.buffers[act.layer - 1]
            self.launch(move, {p.SRC: _moved(buffer, (act.start - base) * layer.inner), p.DST: buffer})
        self.base[act.layer] = act.start

    def compute(self, image: int, turn: _Turn) -> None:
        layer = self.layers[turn.layer]
        src, dst = _rows(layer.x, turn.read), _rows(layer.out, turn.made)
        posts, given = self.posts(layer, image, turn)
        key = (turn.layer, src.key, dst.key, turn.above, turn.below)
        primitive = self.primitive(key, lambda: self.make(layer, src, dst, turn, Attributes(post_ops=posts)))
        arguments = {p.SRC: self.at(turn.layer, image, turn.source), p.DST: self.at(turn.layer + 1, image, turn.target)}
        arguments.update({p.post_op_src(i): place for i, place in enumerate(given) if place is not None})
        if layer.step.op.name == "Conv":
            arguments[p.WEIGHTS] = self.weights(turn.layer, primitive)
            if self.host.has(layer.step, 2):
                arguments[p.BIAS] = self.held(("bias", turn.layer), lambda: self.operand(layer.step, 2))
        self.launch(primitive, arguments)

    def make(self, layer: _Layer, src: MemoryDesc, dst: MemoryDesc, turn: _Turn, attributes: Attributes) -> Primitive:
        step = layer.step
        if step.op.name == "Conv":
            weight, window = self.host.window(step, DataType.F32)
            bias = MemoryDesc.plain((layer.out.static_shape[1],), DataType.F32) if self.host.has(step, 2) else None
            pads = conv_settings(self.type_of(step, 1), step.attrs).ints("pads")
            return window(src, dst, bias, attributes, (turn.above, pads[1], turn.below, pads[3]))
        full = pool_settings(step.attrs)
        pads, kind = full.ints("pads"), "max"
        if step.op.name == "AveragePool":
            kind = "avg_include_padding" if full.int("count_include_pad") else "avg_exclude_padding"
        return p.pooling(
            src, dst, full.ints("kernel_shape"), kind=kind,
            strides=full.ints("strides"), dilations=(1, 1), pads_begin=(turn.above, pads[1]),
            pads_end=(turn.below, pads[3]), attributes=attributes,
        )  # fmt: skip

    def type_of(self, step: Step, position: int) -> TensorType:
        return self.host.kernel.operands[self.host.index(step, position)].type

    def weights(self, number: int, primitive: Primitive) -> Place:
        step, wanted = self.layers[number].step, primitive.weights_desc()
        plain, _ = self.host.window(step, DataType.F32)
        return self.held((number, wanted.key), lambda: self.host.weights(self.host.index(step, 1), plain, wanted))

    def operand(self, step: Step, position: int) -> Place:
        return self.host.place(self.host.index(step, position))

    def held(self, key: object, make: Callable[[], Place]) -> Place:
        if key not in self.places:
            self.places[key] = make()
        return self.places[key]

    def primitive(self, key: object, make: Callable[[], Primitive]) -> Primitive:
        if key not in self.primitives:
            made = make()
            if is_slow(made):
                raise Unimplemented("oneDNN has no fast implementation of a layer")
            self.primitives[key] = made
        return self.primitives[key]

    def launch(self, primitive: Primitive, arguments: dict[int, Place]) -> None:
        if p.SCRATCHPAD in primitive.arguments:
            size = primitive.arguments[p.SCRATCHPAD].size
            # launches run one after the other: they share it
            arguments[p.SCRATCHPAD] = self.held(("scratchpad", size), lambda: self.host.recipe.add_scratch(size))
        self.host.recipe.launches.append(PrimitiveLaunch(primitive, arguments))

    # ── steps behind a layer ─────────────────────────────────────────────────────────────────────────────────────

    def posts(self, layer: _Layer, image: int, turn: _Turn) -> tuple[tuple[PostOp, ...], list[Place | None]]:
        ops: list[PostOp] = []
        places: list[Place | None] = []
        for step in layer.followers:
            functions, combination = self.host.functions(step), self.host.combination(step)
            if functions is not None:
                ops += functions
                places += [None] * len(functions)
            elif combination is None or layer.step.op.name != "Conv":
                raise Unimplemented(f"{step.op.name} between two layers")
            else:
                name, index = combination
                desc, place = self.second(layer, index, image, turn)
                ops.append(BinaryPostOp(name, desc))
                places.append(place)
        return tuple(ops), places

    def second(self, layer: _Layer, index: int, image: int, turn: _Turn) -> tuple[MemoryDesc, Place]:
        """The rows of an operand that a step behind a layer combines its result with."""
        operand = self.host.kernel.operands[index]
        dims = (1,) * (4 - operand.type.rank) + operand.type.static_shape
        if operand.type.dtype is not DType.FLOAT:
            raise Unimplemented("an operand of another element type")
        if math.prod(dims) == 1 or dims[0] == 1 and dims[1] == layer.out.static_shape[1] == math.prod(dims):
            return describe(dims, LAST, 1), self.held(("operand", index), lambda: self.host.place(index))
        if operand.type == layer.out and operand.layout == LAST and not operand.constant:
            start = (image * layer.out.static_shape[2] + turn.target) * _row(layer.out)
            return _rows(layer.out, turn.made), _moved(self.host.place(index), start)
        raise Unimplemented("an operand that is neither whole nor one number for each channel")


def _rows(t: TensorType, count: int) -> MemoryDesc:
    """Rows of one image."""
    _, channels, _, columns = t.static_shape
    return describe((1, channels, count, columns), LAST, 1)


def _moved(place: Place, elements: int) -> Place:
    return replace(place, offset=place.offset + elements * _ITEM)


__all__ = ["Host", "Window", "build", "is_window"]
