"""From kernels to launches: cuDNN graphs where cuDNN has a plan, else kernels of ours, moves, or definitions.

`design` makes the recipe of one kernel. A cuDNN graph takes the anchor with all steps behind it; where cuDNN has no
plan for that, it takes fewer and a kernel of ours the rest. What neither does is fetched to the host, evaluated by its
definition there, and brought back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from taso.backends.base import Array
from taso.backends.cudnn import attention as heads
from taso.backends.cudnn.describing import CudnnLaunch, attempts, unbiased, with_addition
from taso.backends.cudnn.description import Tensor
from taso.backends.cudnn.device import Device
from taso.backends.cudnn.frontend import DeviceMemoryFull, GraphUnsupported
from taso.backends.cudnn.launching import GraphLaunch, HostLaunch, KernelLaunch, MoveLaunch, PartLaunch, ProductLaunch
from taso.backends.cudnn.moves import moves
from taso.backends.cudnn.recurrent import RECURRENT, Unrolled, layer_of
from taso.backends.cudnn.sketch import Constant, WeightTooLarge, laid_out
from taso.backends.cudnn.sources.kernels import sourced
from taso.backends.cudnn.sources.launches import OUTSIDE, Sourced, SourceLaunch
from taso.backends.cudnn.sources.winograd import TiledConvolution, tiled_convolution
from taso.backends.fallback import evaluated
from taso.backends.lowering import BLOCKED, FLOAT32, IN_TURN, PLAIN, Kernel, in_parts
from taso.backends.places import (
    CONSTANT,
    OPERAND,
    RESULT,
    SCRATCH,
    ArraySpec,
    Block,
    Place,
    logical_spec,
    plain_spec,
    row_major_strides,
    tensor_bytes,
)  # fmt: skip
from taso.backends.recipe import BY_DEFINITION, Launch, NotInPlace, Recipe, Supply
from taso.backends.tiles import transformed_filter
from taso.graph.errors import BackendError
from taso.graph.types import DType

log = logging.getLogger(__name__)

KERNEL_FORMAT = 1
"""Raised whenever kernels change so much that costs measured before no longer hold."""

OURS, BY_CUDNN, CUBLAS = "ours", "cudnn", "cublas"
"""Ways to compute a kernel beside the usual one: by kernels of ours alone; by cuDNN; its matrix product by cuBLAS."""

_TILES = {"winograd 2x2": (2, 2), "winograd 4x4": (4, 4)}
"""Algorithms that compute 3×3 convolutions in tiles of so many outputs: transforms of ours, the products by cuBLAS."""
_LEAST_CHANNELS = 16
"""Channels below which the products of tiles are too small to pay."""

_PRODUCTS = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm"})
_WINDOWS = frozenset({"MaxPool", "AveragePool"})


def design(
    kernel: Kernel, device: Device, supply: Supply, precision: str = FLOAT32, careful: bool = False,
    in_place: int | None = None,
) -> Recipe:  # fmt: skip
    """The recipe of `kernel` on a device.

    With `careful` cuDNN is left out: for operands that are not finite, with which its operations do as they like.
    Raises `NotInPlace` where `in_place` is asked for: cuDNN adds nothing to what lies there.
    """
    if in_place is not None:
        raise NotInPlace("cuDNN does not add in place")
    for way in _tried(kernel, careful):
        designer = _Designer(kernel, device, supply, precision, careful)
        try:
            if way(designer):
                return designer.recipe
        except DeviceMemoryFull:
            raise
        except BackendError as reason:
            log.warning("a kernel is computed in another way: %s", str(reason))
    designer = _Designer(kernel, device, supply, precision, careful)
    designer.evaluate()
    return designer.recipe


_Way = Callable[["_Designer"], bool]


def _tried(kernel: Kernel, careful: bool) -> tuple[_Way, ...]:
    """How to try to compute a kernel, in order."""
    empty = [0 in r.type.static_shape for r in kernel.results]
    if any(empty):
        return (_Designer.nothing,) if all(empty) else ()
    if kernel.chained:
        alone = careful or kernel.algorithm == IN_TURN
        return (_Designer.in_turn,) if alone else (_Designer.attention, _Designer.in_turn)
    ours = (_Designer.ours, _Designer.moved)
    if kernel.steps and kernel.steps[0].op.name in RECURRENT:
        return (_Designer.recurrent,)
    if any(0 in o.type.static_shape for o in kernel.operands):
        return ours
    if careful:
        # plain products pass on what is not finite
        return (*ours, _Designer.cublas)
    if kernel.algorithm == CUBLAS:
        return (_Designer.cublas, _Designer.cudnn, *ours)
    if kernel.algorithm in _TILES:
        return (_Designer.tiled, _Designer.cudnn, *ours)
    first = kernel.algorithm == BY_CUDNN or kernel.algorithm != OURS and _is_cudnns(kernel)
    # cuDNN plans no products of float32 matrices without TF32
    return (_Designer.cudnn, _Designer.cublas, *ours) if first else (*ours, _Designer.cudnn, _Designer.cublas)


def _is_cudnns(kernel: Kernel) -> bool:
    """Whether cuDNN is who computes such a kernel as a rule: what reads each element often."""
    return kernel.anchor is not None and kernel.anchor.op.name in (*_PRODUCTS, *_WINDOWS)


@lru_cache(maxsize=1 << 14)
def ways(kernel: Kernel, precision: str) -> tuple[str, ...]:
    """Algorithms by which a kernel can be computed beside the usual one."""
    if not kernel.steps or kernel.chained or not all(o.type.static for o in (*kernel.operands, *kernel.results)):
        return ()
    described = any(True for _ in attempts(kernel, precision))
    found = []
    if precision == FLOAT32 and _multiplied(kernel) is not None:
        found.append(CUBLAS)
    if precision == FLOAT32 and _may_be_tiled(kernel):
        found += _TILES
    if described and sourced(kernel) is not None:
        found.append(OURS if _is_cudnns(kernel) else BY_CUDNN)
    return tuple(found)


# ── parts of kernels ─────────────────────────────────────────────────────────────────────────────────────────────


def rest_of(kernel: Kernel, count: int) -> tuple[Kernel, tuple[int | None, ...]]:
    """The steps behind the first `count` as a kernel, whose operand 0 is what these make, of the result's type.

    Beside it the numbers of its operands in the kernel, None for that one.
    """
    found: dict[int | None, int] = {None: 0}
    taken = []
    for step in kernel.steps[count:]:
        inputs: list[int | None] = []
        for reference in step.inputs:
            if reference is None:
                inputs.append(None)
            elif reference >= 0:
                inputs.append(found.setdefault(reference, len(found)))
            else:
                # step k is step k − count here; the one before is operand 0
                inputs.append(0 if -1 - reference < count else reference + count)
        taken.append(replace(step, inputs=tuple(inputs)))
    between = kernel.results[0]
    operands = tuple(between if i is None else kernel.operands[i] for i in found)
    return Kernel(operands, tuple(taken), kernel.results), tuple(found)


def _may_be_tiled(kernel: Kernel) -> bool:
    """Whether a kernel begins with a convolution that pays in tiles, perhaps, of a filter that can be transformed."""
    step = kernel.anchor
    index = step.inputs[1] if step is not None and step.op.name == "Conv" and not step.op.domain else None
    if index is None or not kernel.operands[index].constant:
        return False
    shape = kernel.operands[index].type.static_shape
    if shape[2:] != (3, 3) or min(shape[:2]) < _LEAST_CHANNELS:
        return False
    return tiled_convolution(kernel, 2, 2, Place(SCRATCH, 0), Place(SCRATCH, 1)) is not None


@dataclass(frozen=True)
class _Product:
    """A kernel whose first step is a product of two float32 tensors, and which of these is read turned."""

    kernel: Kernel
    turned: tuple[bool, bool]


def _multiplied(kernel: Kernel) -> _Product | None:
    """The kernel as one that begins with a matrix product, with what a Gemm adds as a step; None where it is not."""
    step = kernel.anchor
    if step is None or step.op.name not in ("MatMul", "Gemm") or step.op.domain or len(kernel.results) != 1:
        return None
    turned = (False, False)
    if step.op.name == "Gemm":
        added = step.inputs[2] if len(step.inputs) > 2 else None
        if step.attrs.float("alpha") != 1 or added is not None and step.attrs.float("beta") != 1:
            return None
        turned = (step.attrs.int("transA") != 0, step.attrs.int("transB") != 0)
        kernel = kernel if added is None else with_addition(kernel, added)
        step = kernel.steps[0]
    given = [kernel.operands[i] if i is not None and i >= 0 else None for i in step.inputs]
    held = [o for o in given if o is not None and o.type.dtype is DType.FLOAT and o.type.rank > 1]
    if len(held) != 2 or any(o.layout == BLOCKED for o in (*held, kernel.results[0])):
        return None
    made = step.op.types_of([o.type for o in held], step.attrs)
    return _Product(kernel, turned) if made[0] == kernel.results[0].type else None


# ── one kernel ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Designer:
    kernel: Kernel
    device: Device
    supply: Supply
    precision: str
    careful: bool = False
    recipe: Recipe = field(default_factory=Recipe)
    constants: dict[int, Place] = field(default_factory=dict)
    shared: list[Place] = field(default_factory=list)
    reported: Place | None = None

    @property
    def name(self) -> str:
        return "+".join(step.op.name for step in self.kernel.steps) or "Reorder"

    def place(self, index: int) -> Place:
        """Where operand `index` is; constants are laid out on the device, plainly."""
        if not self.kernel.operands[index].constant:
            return Place(OPERAND, index)
        if index not in self.constants:
            block = self.supply.keep(index, f"{self.device.label} plain", self.device.lay_out)
            self.constants[index] = self.recipe.add_constant(block)
        return self.constants[index]

    # ── ways ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def nothing(self) -> bool:
        """There is nothing to compute."""
        return True

    def cudnn(self) -> bool:
        """As many steps as cuDNN has a plan for in one graph, the rest by a kernel of ours behind it."""
        return self.planned() or self.planned_without_bias()

    def planned(self) -> bool:
        for precision in dict.fromkeys((self.precision, FLOAT32)):
            for found, left in attempts(self.kernel, precision):
                try:
                    return self.graph(found, len(self.kernel.steps) - len(left))
                except (GraphUnsupported, WeightTooLarge) as reason:
                    log.debug("cuDNN does not run %s: %s", found.name, str(reason))
                    self.recipe, self.constants, self.reported = Recipe(), {}, None
        return False

    def planned_without_bias(self) -> bool:
        """Of some convolutions cuDNN has a plan with nothing added alone: their bias is a step behind them, then."""
        kernel = unbiased(self.kernel)
        if kernel is None:
            return False
        self.kernel = kernel
        return self.planned()

    def cublas(self) -> bool:
        """The matrix product by cuBLAS, the rest by a kernel of ours."""
        found = _multiplied(self.kernel)
        if found is None:
            return False
        self.kernel = found.kernel
        between, rest = self.apart_behind(1)
        indices = [i for i in self.kernel.steps[0].inputs if i is not None]
        given = [plain_spec(self.plain(i), self.kernel.operands[i].type) for i in indices]
        inputs = tuple(_turned(spec) if turned else spec for spec, turned in zip(given, found.turned, strict=True))
        result = self.kernel.results[0]
        made = between if result.layout == PLAIN else self.recipe.add_scratch(tensor_bytes(result.type))
        target = plain_spec(made, result.type)
        self.recipe.launches.append(ProductLaunch(f"cublas:{self.name}", self.device, inputs, target))
        if result.layout != PLAIN:
            self.part(Kernel((replace(result, layout=PLAIN),), (), (result,)), [made], [between])
        self.recipe.launches += rest
        return True

    def plain(self, index: int) -> Place:
        """Where an operand lies plainly, brought there if it does not."""
        operand = self.kernel.operands[index]
        if operand.constant or operand.layout == PLAIN:
            return self.place(index)
        made = self.recipe.add_scratch(tensor_bytes(operand.type))
        self.part(Kernel((operand,), (), (replace(operand, layout=PLAIN),)), [self.place(index)], [made])
        return made

    def apart_behind(self, count: int) -> tuple[Place, list[Launch]]:
        """As `behind`, with the launches for the caller to put behind its own."""
        before, self.recipe.launches = self.recipe.launches, []
        between = self.behind(count)
        rest, self.recipe.launches = self.recipe.launches, before
        return between, rest

    def tiled(self) -> bool:
        """A convolution in tiles: their transform, a batch of matrix products, and the transform of the outputs."""
        found = tiled_convolution(
            self.kernel, *_TILES[self.kernel.algorithm], Place(SCRATCH, 0), Place(SCRATCH, 1)
        )  # fmt: skip
        if found is None or not self.device.compiles:
            return False
        data, products = (
            self.recipe.add_scratch(4 * found.positions * found.tiles * n) for n in (found.channels, found.filters)
        )
        filters = self.filters(found)
        # (positions, tiles, channels) · (positions, channels, filters), or both turned
        sides = [(data, (found.tiles, found.channels)), (filters, (found.channels, found.filters))]
        inputs = [
            _floats(place, (found.positions, *(size if found.last else reversed(size)))) for place, size in sides
        ]
        outer = (found.tiles, found.filters) if found.last else (found.filters, found.tiles)
        operands = [self.place(i) for i in range(len(self.kernel.operands))]
        self.source(found.data, operands, (data, products))
        self.recipe.launches.append(
            ProductLaunch(
                f"cublas:{self.name}", self.device, tuple(inputs if found.last else reversed(inputs)),
                _floats(products, (found.positions, *outer)),
            )
        )  # fmt: skip
        self.source(found.outputs, operands, (data, products))
        return True

    def filters(self, found: TiledConvolution) -> Place:
        """The place of the transformed filters."""
        index = self.kernel.steps[0].inputs[1]
        if index is None or not self.kernel.operands[index].constant:
            raise BackendError("filters that are no constants are not transformed")

        def make(array: Array) -> Block:
            whole = transformed_filter(array, found.rows, found.columns)
            return self.device.lay_out(whole if found.last else whole.transpose(0, 2, 1))

        label = f"{self.device.label} {self.kernel.algorithm} {'last' if found.last else 'plain'}"
        return self.recipe.add_constant(self.supply.keep(index, label, make))

    def behind(self, count: int) -> Place:
        """Launches kernels of ours for the steps behind the first `count`; gives the place of what these make."""
        if count == len(self.kernel.steps):
            return Place(RESULT)
        rest, operands = rest_of(self.kernel, count)
        found = sourced(rest) if self.device.compiles else None
        if found is None:
            raise GraphUnsupported(f"no kernel of ours computes {'+'.join(s.op.name for s in rest.steps)}")
        between = Place(RESULT)
        if 0 not in found.shares:
            between = self.recipe.add_scratch(tensor_bytes(self.kernel.results[0].type))
        self.sources(found, [between if i is None else self.place(i) for i in operands])
        return between

    def attention(self) -> bool:
        """An attention by cuDNN's operation for it, what it reads and makes brought to its type and back."""
        found = heads.attended(self.kernel)
        if found is None or self.precision not in heads.TYPES or not self.device.compiles:
            return False
        dtype = heads.TYPES[self.precision]
        directly = dtype is DType.FLOAT
        description = found.description(self.scale(found), self.precision, directly)
        try:
            planned = self.device.plan(description)
        except GraphUnsupported as reason:
            log.debug("cuDNN does not run an attention: %s", str(reason))
            return False
        arguments = {}
        for uid, factor in ((heads.Q, found.q), (heads.K, found.k), (heads.V, found.v)):
            arguments[uid] = self.place(factor.index)
            if not (directly and factor.side_by_side):
                arguments[uid] = self.recipe.add_scratch(factor.seen.type.size * dtype.itemsize)
                self.part(heads.brought(factor, dtype), [self.place(factor.index)], [arguments[uid]])
        if found.mask is not None:
            arguments[heads.MASK] = self.place(found.mask)
        between, rest = self.apart_behind(found.count)
        made = directly and found.out.innermost
        out = between if made else self.recipe.add_scratch(self.kernel.results[0].type.size * dtype.itemsize)
        arguments[heads.OUT] = out
        workspace = self.recipe.add_scratch(planned.workspace) if planned.workspace else None
        self.recipe.launches.append(GraphLaunch("cudnn:sdpa", planned, arguments, workspace))
        if not made:
            self.part(heads.put_back(self.kernel, dtype), [out], [between])
        self.recipe.launches += rest
        return True

    def scale(self, found: heads.Attended) -> float:
        """What the scores of an attention are multiplied with."""
        scale = 1.0
        for index, divides in found.scales:
            number = float(self.supply.array(index).reshape(()))
            scale = scale / number if divides else scale * number
        return scale

    def in_turn(self) -> bool:
        """Each anchor with what is behind it by itself, one after the other."""
        read = iter(index for step in self.kernel.steps for index in step.inputs if index is not None and index >= 0)
        between: Place | None = None
        parts = in_parts(self.kernel)
        for number, part in enumerate(parts):
            given: list[Place | int] = []
            for position in range(len(part.operands)):
                chained = number > 0 and position == 0
                given.append(between if chained and between is not None else next(read))
            last = number == len(parts) - 1
            made = Place(RESULT) if last else self.recipe.add_scratch(tensor_bytes(part.results[0].type))
            self.part(part, given, [made])
            between = made
        return True

    def part(self, kernel: Kernel, given: Sequence[Place | int], made: Sequence[Place]) -> None:
        """Launches what a part of the kernel does; `given` are places, or numbers of operands of the whole."""
        recipe = design(kernel, self.device, _PartSupply(self.supply, given), self.precision, self.careful)
        # parts run one after the other: they work in the same memory
        for number, size in enumerate(recipe.scratch):
            if number == len(self.shared):
                self.shared.append(self.recipe.add_scratch(0))
            index = self.shared[number].index
            self.recipe.scratch[index] = max(self.recipe.scratch[index], size)
        operands = tuple(
            g if isinstance(g, Place) else Place(OPERAND, g) if o.constant else self.place(g)
            for g, o in zip(given, kernel.operands, strict=True)
        )
        constants = tuple(map(self.recipe.add_constant, recipe.constants))
        scratch = tuple(self.shared[: len(recipe.scratch)])
        self.recipe.launches += [
            PartLaunch(launch, operands, tuple(made), scratch, constants) for launch in recipe.launches
        ]

    def recurrent(self) -> bool:
        """A recurrent layer step by step."""
        layer = layer_of(self.kernel, self.supply.array) if self.device.compiles else None
        if layer is None:
            return False
        scratch = [self.recipe.add_scratch(size) for size in layer.scratch]
        for launch in Unrolled(layer, self.device, self.place, scratch).launches():
            if isinstance(launch, SourceLaunch):
                self.placed(launch, launch.arguments)
            else:
                self.recipe.launches.append(launch)
        return True

    def ours(self) -> bool:
        """All steps by kernels of ours."""
        found = sourced(self.kernel) if self.device.compiles else None
        if found is not None:
            self.sources(found, [self.place(i) for i in range(len(self.kernel.operands))])
            self.recipe.shares = frozenset(i for i in found.shares if not self.kernel.operands[i].constant)
        return found is not None

    def moved(self) -> bool:
        """Moves of elements."""
        found = moves(self.kernel, self.place)
        for source, target in found or ():
            self.recipe.launches.append(MoveLaunch(f"moved:{self.name}", self.device, source, target))
        return found is not None

    # ── launches ─────────────────────────────────────────────────────────────────────────────────────────────────

    def graph(self, found: CudnnLaunch, count: int) -> bool:
        """Launches a cuDNN graph of the first `count` steps, and the rest."""
        planned = self.device.plan(found.description)
        result = self.behind(count)
        operands = [self.place(i) for i in range(len(self.kernel.operands))]
        arguments = {number: _settled(p, operands, result, ()) for number, p in found.arguments.items()}
        for number, constant in found.constants.items():
            arguments[number] = self.laid_out(constant, found.description.by_uid[number])
        workspace = self.recipe.add_scratch(planned.workspace) if planned.workspace else None
        self.recipe.launches.insert(0, GraphLaunch(found.name, planned, arguments, workspace))
        return True

    def laid_out(self, constant: Constant, tensor: Tensor) -> Place:
        """The place of a constant as a cuDNN graph reads it."""

        def make(array: Array) -> Block:
            return self.device.lay_out(laid_out(array, constant, tensor))

        label = f"{self.device.label} {constant.order} {tensor.dims} {tensor.strides} {tensor.dtype.name}"
        return self.recipe.add_constant(self.supply.keep(constant.operand, label, make))

    def sources(self, found: Sourced, operands: Sequence[Place]) -> None:
        """Launches kernels of ours on operands at these places."""
        scratch = [self.recipe.add_scratch(size) for size in found.scratch]
        for launch in found.launches:
            self.source(launch, operands, scratch)

    def source(self, launch: SourceLaunch, operands: Sequence[Place], scratch: Sequence[Place]) -> None:
        """Launches a kernel of ours."""
        given = (self.flag() if a == OUTSIDE else a for a in launch.arguments)
        arguments = tuple(
            _settled(a, operands, Place(RESULT), scratch) if isinstance(a, Place) and a.kind != CONSTANT else a
            for a in given
        )
        self.placed(launch, arguments)

    def placed(self, launch: SourceLaunch, arguments: tuple[Place | int | float, ...]) -> None:
        """Launches a kernel of ours on these arguments, whose places are those of the whole kernel."""
        function = self.device.function(launch.source.code, launch.source.entry)
        self.recipe.launches.append(
            KernelLaunch(launch.source.name, function, launch.grid, launch.block, launch.shared, arguments)
        )

    def flag(self) -> Place:
        """Where a kernel of ours reports an index that points outside."""
        if self.reported is None:
            what = f"{self.name}: an index lies outside what it points into"
            self.reported = self.recipe.add_constant(self.device.flag(what))
        return self.reported

    def evaluate(self) -> None:
        """All steps by their definitions, on the host."""
        operands, results = self.kernel.operands, self.kernel.results
        run, last = evaluated(self.kernel), self.kernel.steps[-1].op.name

        def whole(arrays: Sequence[Array]) -> Sequence[Array]:
            found = run(arrays)
            for array, result in zip(found, results, strict=True):
                if not isinstance(array, np.ndarray) or array.shape != result.type.static_shape:
                    shown = getattr(array, "shape", "no tensor")
                    raise BackendError(f"{last} gave {shown} where {result.type} was declared")
            return found

        inputs = tuple(logical_spec(self.place(i), o.type, o.layout, 1) for i, o in enumerate(operands))
        outs = tuple(logical_spec(Place(RESULT, i), r.type, r.layout, 1) for i, r in enumerate(results))
        self.recipe.launches.append(HostLaunch(f"{BY_DEFINITION}{self.name}", self.device, whole, inputs, outs))


@dataclass(frozen=True)
class _PartSupply:
    """The constants of a part of a kernel, by the numbers that they have in the whole."""

    whole: Supply
    given: Sequence[Place | int]

    def array(self, operand: int) -> Array:
        return self.whole.array(self._number(operand))

    def keep(self, operand: int, label: str, make: Callable[[Array], Block]) -> Block:
        return self.whole.keep(self._number(operand), label, make)

    def _number(self, operand: int) -> int:
        found = self.given[operand]
        if isinstance(found, Place):
            raise BackendError("a part of a kernel takes for a constant what is computed")
        return found


def attends(device: Device, precision: str, kernel: Kernel) -> bool:
    """Whether a kernel of several anchors is an attention of which cuDNN has a plan on a device."""
    found = heads.attended(kernel)
    if found is None or precision not in heads.TYPES or not device.compiles:
        return False
    try:
        # the scale is passed by value: another number changes nothing
        device.plan(found.description(1.0, precision, heads.TYPES[precision] is DType.FLOAT))
    except BackendError as reason:
        log.debug("cuDNN does not run an attention: %s", str(reason))
        return False
    return True


def _floats(place: Place, shape: Sequence[int]) -> ArraySpec:
    """A plain array of float32 numbers."""
    strides = tuple(4 * s for s in row_major_strides(shape))
    return ArraySpec(place, np.dtype(np.float32), tuple(shape), strides)


def _turned(spec: ArraySpec) -> ArraySpec:
    """A matrix read with its axes exchanged."""
    return replace(spec, shape=spec.shape[::-1], strides=spec.strides[::-1])


def _settled(place: Place, operands: Sequence[Place], result: Place, scratch: Sequence[Place]) -> Place:
    """A place of a part of the kernel, as one of the kernel."""
    if place.kind == RESULT:
        found = replace(result, index=place.index) if result.kind == RESULT else result
    else:
        found = (operands if place.kind == OPERAND else scratch)[place.index]
    return replace(found, offset=found.offset + place.offset)


__all__ = ["BY_CUDNN", "CUBLAS", "KERNEL_FORMAT", "OURS", "attends", "design", "rest_of", "ways"]
