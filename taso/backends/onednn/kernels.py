"""From kernels to oneDNN primitives, and to NumPy where oneDNN has none (or only its slow reference).

`design` makes the recipe of one kernel: the anchor as a primitive that takes along as many of the steps behind it as
oneDNN fuses well, the rest in place behind it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from taso.backends.base import Array
from taso.backends.fallback import element_function, evaluated, mover
from taso.backends.lowering import (
    AXES,
    BF16,
    BLOCKED,
    FLOAT32,
    IN_TURN,
    INT8,
    LAST,
    PLAIN,
    Fusion,
    Kernel,
    Layouts,
    Operand,
    Step,
)
from taso.backends.onednn import (
    attention,
    channelwise,
    contraction,
    depth_first,
    direct,
    panels,
    qdq_kernels,
    quantized,
    winograd,
)
from taso.backends.onednn import primitives as p
from taso.backends.onednn.attributes import Attributes, BinaryPostOp, EltwisePostOp, PostOp, SumPostOp
from taso.backends.onednn.memory import DataType, MemoryDesc
from taso.backends.onednn.narrow import MOVING, STORING
from taso.backends.onednn.places import (
    OPERAND,
    RESULT,
    Block,
    Place,
    describe,
    from_plain,
    is_blocked,
    lay_out,
    layouts_alike,
    logical_spec,
    plain_spec,
    spread_spec,
    to_plain,
)  # fmt: skip
from taso.backends.onednn.primitives import Primitive, Unimplemented, is_slow
from taso.backends.onednn.recipe import ArrayLaunch, PrimitiveLaunch, Recipe, Supply, embed
from taso.backends.onednn.winograd import second_level_cache
from taso.backends.places import row_major_strides
from taso.backends.recipe import BY_DEFINITION, NotInPlace
from taso.backends.running import blocks
from taso.graph.errors import BackendError
from taso.graph.operator import Attrs, Operator, Trait
from taso.graph.ops.linear import conv_settings
from taso.graph.ops.movement import permutation, slice_ranges
from taso.graph.ops.pooling import pool_settings
from taso.graph.ops.reduction import reduced_axes
from taso.graph.types import DType, TensorType

log = logging.getLogger(__name__)

_BY_CODE = {module.NAME: module for module in (panels, channelwise, direct)}
"""Algorithms that are machine code of our own."""

KERNEL_FORMAT = 8
"""Raised whenever kernels change so much that costs measured before no longer hold."""

_MOST_POST_OPS = 32
_FLAT = "flat"
_F32 = DataType.F32


class OneDNNFusion(Fusion):
    """What the kernels here take along: as the general rule, and behind Erf too."""

    def anchors(self, op: Operator, out: TensorType) -> int | None:
        if op.name == "Erf" and out.dtype is DType.FLOAT and out.shape is not None:
            return 5
        return super().anchors(op, out)

    def chains(self, op: Operator, attrs: Attrs, types: Sequence[TensorType | None], out: TensorType) -> bool:
        return depth_first.is_window(op, attrs, types, out)


# ── element-wise steps as post-ops ───────────────────────────────────────────────────────────────────────────────


def _one(algorithm: str, alpha: float = 0.0, beta: float = 0.0) -> Callable[[Attrs], tuple[EltwisePostOp, ...]]:
    return lambda attrs: (EltwisePostOp(algorithm, alpha, beta),)


def _clip(attrs: Attrs) -> tuple[EltwisePostOp, ...]:
    low = -math.inf if attrs["min"] is None else attrs.float("min")
    high = math.inf if attrs["max"] is None else attrs.float("max")
    # where they are the wrong way round, ONNX takes the upper bound last; oneDNN refuses them
    return (EltwisePostOp("clip_v2", min(low, high), high),)


# Neg, Reciprocal, Softplus: by linear, pow and soft_relu at these parameters
_UNARY: dict[str, Callable[[Attrs], tuple[EltwisePostOp, ...]]] = {
    "Relu": _one("relu"),
    "Sigmoid": _one("logistic"),
    "Tanh": _one("tanh"),
    "Exp": _one("exp"),
    "Log": _one("log"),
    "Sqrt": _one("sqrt"),
    "Abs": _one("abs"),
    "Round": _one("round"),
    "Neg": _one("linear", -1.0),
    "Reciprocal": _one("pow", 1.0, -1.0),
    "Softplus": _one("soft_relu", 1.0),
    "HardSwish": _one("hardswish", 1 / 6, 0.5),
    "Mish": _one("mish"),
    "Swish": lambda attrs: (EltwisePostOp("swish", attrs.float("alpha")),),
    "Elu": lambda attrs: (EltwisePostOp("elu", attrs.float("alpha")),),
    "LeakyRelu": lambda attrs: (EltwisePostOp("relu", attrs.float("alpha")),),
    "HardSigmoid": lambda attrs: (EltwisePostOp("hardsigmoid", attrs.float("alpha"), attrs.float("beta")),),
    "Selu": lambda attrs: (EltwisePostOp("elu", attrs.float("alpha")), EltwisePostOp("linear", attrs.float("gamma"))),
    "Gelu": lambda attrs: (EltwisePostOp("gelu_tanh" if attrs.str("approximate") == "tanh" else "gelu_erf"),),
    "Clip": _clip,
}
WHOLE = frozenset({"Gelu", "HardSwish", "Mish", "Swish"})
"""Functions of one element that files have in parts, and oneDNN in one."""
_BINARY = {"Add": "add", "Sum": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Max": "max", "Min": "min"}


def _with_scalar(name: str, value: float, reverse: bool) -> tuple[EltwisePostOp, ...] | None:
    """x op value (value op x if `reverse`) as a function of x alone, None where there is none as good."""
    if name in ("Add", "Sum"):
        return (EltwisePostOp("linear", 1.0, value),)
    if name == "Mul":
        return (EltwisePostOp("linear", value, 0.0),)
    if name == "Sub":
        return (EltwisePostOp("linear", -1.0, value) if reverse else EltwisePostOp("linear", 1.0, -value),)
    if name == "Div" and (reverse or value and math.frexp(value)[0] in (0.5, -0.5)):
        # x / value is x · (1 / value) exactly for powers of two only
        return (EltwisePostOp("pow", value, -1.0) if reverse else EltwisePostOp("linear", 1 / value, 0.0),)
    if name == "Max" and value == 0:
        return (EltwisePostOp("relu"),)
    if name == "Pow" and not reverse and value in (1, 2):
        return (EltwisePostOp("square") if value == 2 else EltwisePostOp("linear", 1.0, 0.0),)
    return None


# ── one kernel ───────────────────────────────────────────────────────────────────────────────────────────────────


def design(
    kernel: Kernel, layouts: Layouts, supply: Supply, in_place: int | None = None, careful: bool = False,
    precision: str = FLOAT32,
) -> Recipe:  # fmt: skip
    """The recipe of `kernel`. With `in_place` its result lies where that operand does, which a sum is added to.

    With `careful` every step is done by NumPy, or evaluated by its definition: for operands that are not finite, with
    which oneDNN's activations and pools do as they like. With `precision` BF16 products that pay round their factors to
    bfloat16, unless the kernel's algorithm is FLOAT32. Operands and results that are narrow are changed to float32 and
    back where there is no primitive that takes them. Raises `NotInPlace` where `in_place` cannot be met,
    `BackendError` where the kernel cannot be built at all.
    """
    empty = any(0 in o.type.static_shape for o in (*kernel.operands, *kernel.results))
    if any(o.narrow for o in (*kernel.operands, *kernel.results)):
        return _narrow(kernel, layouts, supply, in_place, careful, precision)
    if not (careful or empty):
        try:
            if precision == BF16 and not kernel.algorithm and narrows(kernel):
                try:
                    designer = _Designer(kernel, layouts, supply, in_place, True)
                    designer.run()
                    return designer.recipe
                except Unimplemented as reason:
                    log.debug("in float32 after all: %s", reason)
            designer = _Designer(kernel, layouts, supply, in_place, integer=precision == INT8)
            designer.run()
            return designer.recipe
        except Unimplemented as reason:
            if in_place is not None:
                raise NotInPlace(str(reason)) from reason
    elif in_place is not None:
        raise NotInPlace("the kernel does not run in oneDNN")
    elif not empty:
        try:
            designer = _Designer(kernel, layouts, supply, None)
            designer.by_numpy()
            return designer.recipe
        except Unimplemented:
            pass
    fallback = _Designer(kernel, layouts, supply, None)
    fallback.evaluate()
    return fallback.recipe


def _narrow(
    kernel: Kernel, layouts: Layouts, supply: Supply, in_place: int | None, careful: bool, precision: str
) -> Recipe:
    """The recipe of a kernel that reads or makes what lies in memory as bfloat16.

    By primitives that take it as it lies; where there are none, as float32 between changes of the element type.
    """
    step = kernel.anchor
    if not careful and not kernel.algorithm and not kernel.chained and (step is None or step.op.name in STORING):
        try:
            designer = _Designer(kernel, layouts, supply, in_place, narrows(kernel))
            designer.run()
            return designer.recipe
        except Unimplemented as reason:
            log.debug("not as it lies: %s", reason)
    if in_place is not None:
        raise NotInPlace("what is added to is changed to float32 first")
    recipe = Recipe()
    wide = [tuple(replace(o, narrow=False) for o in given) for given in (kernel.operands, kernel.results)]
    found = design(replace(kernel, operands=wide[0], results=wide[1]), layouts, supply, None, careful, precision)
    places: list[list[Place]] = []
    changes: list[PrimitiveLaunch] = []
    for kind, given in ((OPERAND, kernel.operands), (RESULT, kernel.results)):
        places.append([Place(kind, i) for i in range(len(given))])
        for number, operand in enumerate(given):
            if operand.narrow:
                as_it_lies, changed = (
                    describe(operand.type.static_shape, operand.layout, layouts.block or 1, dtype)
                    for dtype in (DataType.BF16, _F32)
                )
                places[-1][number] = scratch = recipe.add_scratch(changed.size)
                if kind == OPERAND:
                    recipe.launches.append(_change(as_it_lies, Place(kind, number), changed, scratch, recipe))
                else:
                    changes.append(_change(changed, scratch, as_it_lies, Place(kind, number), recipe))
    embed(recipe, found, *places)
    recipe.launches += changes
    return recipe


def _change(source: MemoryDesc, at: Place, target: MemoryDesc, to: Place, recipe: Recipe) -> PrimitiveLaunch:
    primitive, arguments = p.reorder(source, target), {p.SRC: at, p.DST: to}
    if p.SCRATCHPAD in primitive.arguments:
        arguments[p.SCRATCHPAD] = recipe.add_scratch(primitive.arguments[p.SCRATCHPAD].size)
    return PrimitiveLaunch(primitive, arguments)


def depth_first_fits(kernel: Kernel, layouts: Layouts, supply: Supply) -> bool:
    """Whether several anchors in a row can be run as one kernel, in bands of rows."""
    if any(0 in o.type.static_shape for o in (*kernel.operands, *kernel.results)):
        return False
    try:
        _Designer(kernel, layouts, supply, None).in_bands()
    except Unimplemented as reason:
        log.debug("not depth first: %s", reason)
        return False
    return True


def narrows(kernel: Kernel) -> bool:
    """Whether a kernel's products are such that rounding their factors to bfloat16 can pay."""
    step = kernel.anchor
    if step is None or step.op.domain or step.op.name not in (*_PRODUCTS, "ConvTranspose") or kernel.chained:
        return False
    lies = [kernel.operands[i].narrow for i in step.inputs[:2] if i is not None and i >= 0]
    if any(lies) or kernel.results[0].narrow and step.op.name == "Conv":
        # what is stored as bfloat16 needs no rounding on the way in, or none behind
        return True
    if step.op.name not in _PRODUCTS:
        return False
    x, w = (kernel.operands[i].type.static_shape if i is not None and i >= 0 else () for i in step.inputs[:2])
    if step.op.name == "Conv":
        return step.attrs.int("group") == 1 and x[1] >= _LEAST_INNER and w[0] >= _LEAST_INNER
    if len(x) < 2 or len(w) < 2:
        return False
    inner = x[0] if step.op.name == "Gemm" and step.attrs.int("transA") else x[-1]
    return math.prod(w) >= _LEAST_INNER**2 and inner >= _LEAST_INNER


_PRODUCTS = frozenset({"Conv", "MatMul", "Gemm"})
_MOST_BF16 = (2 - 2.0**-7) * 2.0**127
_LEAST_INNER = 16
"""Elements of a sum below which a product is left in float32."""


def ways(kernel: Kernel, layouts: Layouts, precision: str) -> tuple[str, ...]:
    """Algorithms by which a kernel can be computed beside the usual one."""
    if qdq_kernels.concerns(kernel):
        return ()
    other = (FLOAT32,) if precision == BF16 and narrows(kernel) else ()
    if any(o.narrow for o in (*kernel.operands, *kernel.results)):
        return other
    if other:
        return *other, *winograd.algorithms(kernel)
    by_code = (name for module in _BY_CODE.values() for name in module.algorithms(kernel, layouts))
    return (*winograd.algorithms(kernel), *by_code)


@dataclass(frozen=True)
class _Frame:
    """The output as a primitive sees it, which the operands of post-ops have to fit."""

    dims: tuple[int, ...]
    layout: str


@dataclass
class _Stem:
    """A primitive in the making: `make` builds it with post-ops, `arguments` says what it is bound to but those."""

    make: Callable[[Attributes], Primitive]
    arguments: Callable[[Primitive], dict[int, Place]]
    frame: _Frame
    shares: frozenset[int] = frozenset()
    finish: Callable[[], None] | None = None
    posts: tuple[PostOp, ...] = ()
    post_places: tuple[Place | None, ...] = ()
    later: tuple[EltwisePostOp, ...] = ()
    first: bool = True
    takes: Callable[[PostOp], bool] = lambda op: not isinstance(op, SumPostOp)
    extra: Mapping[int, MemoryDesc] = field(default_factory=dict)


@dataclass
class _Posts:
    """A step as post-ops, with the place of each one's second source."""

    ops: tuple[PostOp, ...]
    places: tuple[Place | None, ...]


@dataclass
class _Designer:
    kernel: Kernel
    layouts: Layouts
    supply: Supply
    in_place: int | None
    narrow: bool = False
    integer: bool = False
    recipe: Recipe = field(default_factory=Recipe)

    # ── what there is ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def out(self) -> Operand:
        return self.kernel.results[0]

    @property
    def out_dims(self) -> tuple[int, ...]:
        return self.out.type.static_shape or (1,)

    @property
    def element_dims(self) -> tuple[int, ...]:
        """Dimensions under which the result is worked on element by element.

        Trailing axes of size 1 are left out: with them oneDNN 3.2's binary reads the wrong channel in a post-op.
        """
        dims = self.out_dims
        if self.out.layout.startswith(AXES):
            return dims
        return dims[:2] if len(dims) > 2 and all(d == 1 for d in dims[2:]) else dims

    @property
    def block(self) -> int:
        return self.layouts.block or 1

    def operand(self, step: Step, position: int) -> Operand:
        return self.kernel.operands[self.index(step, position)]

    def index(self, step: Step, position: int) -> int:
        reference = step.inputs[position] if position < len(step.inputs) else None
        if reference is None or reference < 0:
            raise Unimplemented(f"input {position} of {step.op.name} is not an operand of the kernel")
        return reference

    def has(self, step: Step, position: int) -> bool:
        return position < len(step.inputs) and step.inputs[position] is not None

    def place(self, index: int) -> Place:
        """Where operand `index` is, constants as they are."""
        if not self.kernel.operands[index].constant:
            return Place(OPERAND, index)
        return self.constant(index, "plain", lambda array: Block.of(array))

    def constant(self, index: int, label: str, make: Callable[[Array], Block]) -> Place:
        def contiguous(array: Array) -> Block:
            dense = np.ascontiguousarray(array)
            # what a file holds may begin anywhere
            return make(dense if dense.flags.aligned else dense.copy())

        return self.recipe.add_constant(self.supply.keep(index, label, contiguous))

    def lies(self, operand: Operand, layout: str) -> MemoryDesc:
        """Descriptor of an operand that lies as `layout` says, or as good as."""
        if not layouts_alike(self.layouts, operand.type, operand.layout, layout):
            raise Unimplemented(f"an operand lies {operand.layout} and is needed {layout}")
        return describe(operand.type.static_shape, layout, self.block, self.dtype(operand))

    def dtype(self, operand: Operand) -> DataType:
        if operand.narrow:
            return DataType.BF16
        return quantized.TYPES.get(operand.type.dtype, _F32)

    def inner(self, kernel: Kernel, supply: Supply) -> Recipe:
        """The recipe of a part of the kernel."""
        return design(kernel, self.layouts, supply, precision=INT8 if self.integer else FLOAT32)

    def fuse(
        self, make: Callable[[Attributes], Primitive], arguments: Callable[[Primitive], dict[int, Place]],
        frame: tuple[tuple[int, ...], str], followers: Sequence[Step], extra: Mapping[int, MemoryDesc],
        finish: Callable[[], None] | None = None, posts: tuple[PostOp, ...] = (),
    ) -> int | None:  # fmt: skip
        """As `take`, of a product of integers, which adds to nothing in place."""
        stem = _Stem(make, arguments, _Frame(*frame), finish=finish, posts=posts, post_places=(None,) * len(posts))
        stem.extra, stem.first = extra, False
        return self.take(stem, followers)

    # ── launches ─────────────────────────────────────────────────────────────────────────────────────────────────

    def launch(
        self, primitive: Primitive, arguments: dict[int, Place], extra: Mapping[int, MemoryDesc] | None = None
    ) -> None:
        """`extra` describes arguments of which the primitive says nothing itself."""
        if p.SCRATCHPAD in primitive.arguments:
            size = primitive.arguments[p.SCRATCHPAD].size
            arguments = {**arguments, p.SCRATCHPAD: self.recipe.add_scratch(size)}
        self.recipe.launches.append(PrimitiveLaunch(primitive, arguments, extra or {}))

    def reorder(self, source: MemoryDesc, at: Place, target: MemoryDesc, to: Place) -> None:
        self.launch(p.reorder(source, target), {p.SRC: at, p.DST: to})

    def emit(self, stem: _Stem, followers: Sequence[Step]) -> None:
        """Launches `stem` with as many followers as it takes along well; the others run in place behind it."""
        count = self.take(stem, followers)
        if count is None:
            raise Unimplemented(f"oneDNN has no fast implementation of {self.kernel.steps[0].op.name} here")
        self.behind(followers[count:])

    def take(self, stem: _Stem, followers: Sequence[Step]) -> int | None:
        """Launches `stem` and says how many followers it took along; None, and no launch, where oneDNN has it not."""
        found = [self.posts(step, stem.frame) for step in followers]
        limit = next((i for i, f in enumerate(found) if f is None), len(found))
        for count in range(0 if stem.later else limit, -1, -1):
            taken = [f for f in found[:count] if f is not None]
            primitive = self.attempt(stem, (*stem.posts, *(op for f in taken for op in f.ops)))
            if primitive is not None:
                places = (*stem.post_places, *(place for f in taken for place in f.places))
                arguments = stem.arguments(primitive)
                arguments.update({p.post_op_src(i): x for i, x in enumerate(places) if x is not None})
                self.launch(primitive, arguments, stem.extra)
                self.run_later(stem)
                if stem.finish is not None:
                    stem.finish()
                self.note_sharing(stem, followers[:count], taken)
                return count
        return None

    def run_later(self, stem: _Stem) -> None:
        """The rest of a function that takes several of oneDNN's, which its eltwise does not fuse."""
        desc = describe(stem.frame.dims, stem.frame.layout, self.block, self.dtype(self.out))
        for op in stem.later:
            primitive = p.eltwise(desc, desc, op.algorithm, alpha=op.alpha, beta=op.beta)
            self.launch(primitive, {p.SRC: Place(RESULT), p.DST: Place(RESULT)})

    def attempt(self, stem: _Stem, ops: tuple[PostOp, ...]) -> Primitive | None:
        if len(ops) > _MOST_POST_OPS or not all(map(stem.takes, ops)):
            return None
        try:
            primitive = stem.make(Attributes(post_ops=ops))
        except Unimplemented:
            return None
        return None if is_slow(primitive) else primitive

    def note_sharing(self, stem: _Stem, followers: Sequence[Step], taken: Sequence[_Posts]) -> None:
        if not stem.first:
            return
        summed = any(isinstance(op, SumPostOp) for f in taken for op in f.ops)
        if self.in_place is not None and not summed:
            raise NotInPlace("the sum does not run inside the primitive")
        if stem.shares:
            used = [i for s in self.kernel.steps for i in s.inputs if i is not None and i >= 0]
            self.recipe.shares = frozenset(i for i in stem.shares if used.count(i) == 1)
        elif stem.finish is None:
            self.recipe.sums = tuple(i for step in followers if (i := self.addend(step)) is not None)

    def addend(self, step: Step) -> int | None:
        """The operand that a follower adds, where it could be added to in place."""
        if step.op.name != "Add":
            return None
        index = next(i for i in step.inputs if i is not None and i >= 0)
        operand = self.kernel.operands[index]
        uses = [i for s in self.kernel.steps for i in s.inputs].count(index)
        alike = replace(operand, constant=False) == self.out
        return index if alike and uses == 1 and not operand.constant else None

    def behind(self, followers: Sequence[Step]) -> None:
        """Runs steps in place on the result."""
        out, frame = Place(RESULT), _Frame(self.element_dims, self.out.layout)
        desc = describe(self.element_dims, self.out.layout, self.block, self.dtype(self.out))
        while followers:
            posts = self.posts(followers[0], frame)
            stem = None if posts is None else self.in_place_stem(posts, desc, frame, out)
            count = None if stem is None else self.take(stem, followers[1:])
            if count is None:
                self.chained(followers[0])
            followers = followers[1 + (count or 0) :]

    def in_place_stem(self, posts: _Posts, desc: MemoryDesc, frame: _Frame, out: Place) -> _Stem | None:
        first, at = posts.ops[0], posts.places[0]
        if isinstance(first, EltwisePostOp):
            function = first
            stem = _Stem(
                lambda a: p.eltwise(
                    desc, desc, function.algorithm, alpha=function.alpha, beta=function.beta, attributes=a
                ),
                lambda _: {p.SRC: out, p.DST: out}, frame,
            )  # fmt: skip
        elif isinstance(first, BinaryPostOp) and at is not None:
            name, other, second = first.algorithm, first.src1, at
            stem = _Stem(
                lambda a: p.binary(desc, other, desc, name, attributes=a),
                lambda _: {p.SRC_0: out, p.SRC_1: second, p.DST: out}, frame,
            )  # fmt: skip
        else:
            return None
        stem.posts, stem.post_places, stem.first = posts.ops[1:], posts.places[1:], False
        return stem

    # ── steps as post-ops ────────────────────────────────────────────────────────────────────────────────────────

    def posts(self, step: Step, frame: _Frame) -> _Posts | None:
        functions, combination = self.functions(step), self.combination(step)
        if functions is not None:
            return _Posts(functions, (None,) * len(functions))
        if combination is None:
            return None
        name, index = combination
        if index == self.in_place:
            return _Posts((SumPostOp(),), (None,))
        found = self.second(index, frame)
        return None if found is None else _Posts((BinaryPostOp(name, found[0]),), (found[1],))

    def functions(self, step: Step) -> tuple[EltwisePostOp, ...] | None:
        """A step as functions of the result so far alone, None where it is more than that."""
        unary = _UNARY.get(step.op.name)
        if unary is not None:
            return unary(step.attrs)
        index = next((i for i in step.inputs if i is not None and i >= 0), None)
        if step.op.name not in _BINARY or index is None or len(step.inputs) != 2:
            return None
        scalar = self.scalar(index)
        return _with_scalar(step.op.name, scalar, step.inputs[0] == index) if scalar is not None else None

    def combination(self, step: Step) -> tuple[str, int] | None:
        """oneDNN's name of a binary step and the operand that the result so far is combined with, or None."""
        index = next((i for i in step.inputs if i is not None and i >= 0), None)
        if step.op.name not in _BINARY or index is None or len(step.inputs) != 2:
            return None
        turned = step.inputs[0] == index and not step.op.has(Trait.COMMUTATIVE)
        return None if turned else (_BINARY[step.op.name], index)

    def scalar(self, index: int) -> float | None:
        operand = self.kernel.operands[index]
        if not operand.constant or operand.type.size != 1 or operand.type.rank > len(self.out_dims):
            return None
        return float(self.supply.array(index).reshape(()).item())

    def second(self, index: int, frame: _Frame) -> tuple[MemoryDesc, Place] | None:
        """Descriptor and place of an operand that broadcasts to `frame`, None where it does not as it lies."""
        operand = self.kernel.operands[index]
        dims = operand.type.static_shape
        if operand.type.dtype is not DType.FLOAT:
            return None
        if dims == self.out.type.static_shape:
            return self.whole(index, operand, frame)
        if math.prod(dims) == 1:
            return describe((1,) * len(frame.dims), PLAIN, 1, self.dtype(operand)), self.place(index)
        if frame.layout == _FLAT:
            return None
        extended = (1,) * (len(self.out_dims) - len(dims)) + dims
        if frame.dims == self.out_dims[: len(frame.dims)]:
            return self.part(index, operand, frame, extended[: len(frame.dims)])
        if math.prod(dims) == dims[-1] == frame.dims[-1]:
            # leading axes are one in this frame
            desc = describe((*(1 for _ in frame.dims[1:]), dims[-1]), PLAIN, 1, self.dtype(operand))
            return desc, self.place(index)
        return None

    def whole(self, index: int, operand: Operand, frame: _Frame) -> tuple[MemoryDesc, Place] | None:
        if frame.layout == _FLAT:
            as_result = layouts_alike(self.layouts, operand.type, operand.layout, self.out.layout)
            fits = as_result and (not operand.constant or self.out.layout == PLAIN)
            return (MemoryDesc.plain(frame.dims, self.dtype(operand)), self.place(index)) if fits else None
        target = describe(frame.dims, frame.layout, self.block, self.dtype(operand))
        if operand.constant:
            plain = MemoryDesc.plain(frame.dims, _F32)
            return target, self.constant(index, f"as {target.key}", lambda a: lay_out(a, plain, target))
        if not layouts_alike(self.layouts, operand.type, operand.layout, frame.layout):
            return None
        return target, self.place(index)

    def part(
        self, index: int, operand: Operand, frame: _Frame, dims: tuple[int, ...]
    ) -> tuple[MemoryDesc, Place] | None:
        if not layouts_alike(self.layouts, operand.type, operand.layout, PLAIN):
            return None
        by_channel = len(dims) > 2 and all(d == 1 for d in dims[2:])
        # with one position per channel all layouts have the same bytes, and oneDNN is fast where the name agrees
        layout = frame.layout if by_channel else PLAIN
        return describe(dims, layout, self.block, self.dtype(operand)), self.place(index)

    # ── anchors ──────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        if not self.kernel.steps:
            return self.relayout()
        if self.integer and qdq_kernels.concerns(self.kernel):
            return qdq_kernels.build(self)
        if self.kernel.chained:
            return self.in_bands()
        step, followers = self.kernel.steps[0], self.kernel.steps[1:]
        by_code = _BY_CODE.get(self.kernel.algorithm)
        if by_code is not None:
            return self.share(by_code.build(self, step, followers), "product")
        if step.op.name in MOVING and any(o.narrow != self.out.narrow for o in self.kernel.operands if not o.constant):
            if step.op.name not in ("Concat", "Split", "Slice", "Transpose"):
                return self.reshape(step, followers)
        anchor = _ANCHORS.get(step.op.name, _TAKEN_APART.get(step.op.name)) if not step.op.domain else None
        if anchor is not None and (self.floats(step) or self.integer and step.op.name in ("MaxPool", "Transpose")):
            return anchor(self, step, followers)
        if step.op.has(Trait.ELEMENTWISE):
            return self.elementwise(step, followers)
        if step.op.name == "Attention" and not step.op.domain:
            return attention.build(self, step)
        of_integers = quantized.ANCHORS.get(step.op.name) if not step.op.domain else None
        if of_integers is not None and not followers and self.lie_plainly():
            return of_integers(self, step)
        self.move(step)

    def lie_plainly(self) -> bool:
        return all(o.constant or o.layout == PLAIN for o in (*self.kernel.operands, *self.kernel.results))

    def lie_plainly_here(self, step: Step) -> None:
        """Raises `Unimplemented` where a step's first operand or the kernel's result lies otherwise than plainly."""
        for operand in (self.operand(step, 0), self.out):
            self.lies(operand, PLAIN)

    def floats(self, step: Step) -> bool:
        given = [self.kernel.operands[i] for i in step.inputs if i is not None and i >= 0]
        return all(o.type.dtype is DType.FLOAT for o in (*given, *self.kernel.results))

    def relayout(self) -> None:
        source, target = self.kernel.operands[0], self.out
        if source.type.dtype in quantized.TYPES:
            a = describe(source.type.static_shape, source.layout, self.block, self.dtype(source))
            b = describe(target.type.static_shape, target.layout, self.block, self.dtype(target))
            return self.reorder(a, self.place(0), b, Place(RESULT))
        block = self.block
        read = logical_spec(self.place(0), source.type, source.layout, block)
        written = logical_spec(Place(RESULT), target.type, target.layout, block)

        def copy(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
            plain = to_plain(inputs[0], source.type, source.layout, block)
            from_plain(outs[0], plain, target.type, target.layout, block)

        self.recipe.launches.append(ArrayLaunch("copy", copy, (read,), (written,)))

    def in_bands(self) -> None:
        if self.in_place is not None or self.narrow:
            raise Unimplemented("several layers in a row run in float32 and away from their operands")
        # the other half is for weights, and for what comes in and goes out
        depth_first.build(self, None if self.kernel.algorithm == IN_TURN else second_level_cache() // 2)

    def conv(self, step: Step, followers: Sequence[Step]) -> None:
        if self.kernel.algorithm not in ("", FLOAT32):
            return self.conv_in_tiles(step, followers)
        x = self.operand(step, 0)
        pairs = [(x.layout, self.out.layout), (self.out.layout,) * 2, (LAST, LAST), (PLAIN, PLAIN)]
        dtype = _F32
        if self.narrow:
            self.check_narrow(step)
            dtype = DataType.BF16
            if self.layouts.innermost:
                pairs.insert(0, (LAST, LAST))
        for source, target in dict.fromkeys(pairs):
            stem = self.conv_stem(step, source, target, dtype)
            if stem is not None:
                return self.emit(stem, followers)
        raise Unimplemented("oneDNN has no fast convolution of these sizes")

    def share(self, added: frozenset[int], what: str) -> None:
        """Notes which operands' memory may be the result's; raises `NotInPlace` where another one's is to be."""
        fitting = [i for follower in self.kernel.steps[1:] if (i := self.addend(follower)) is not None]
        self.recipe.shares = added.intersection(fitting)
        if self.in_place is not None and self.in_place not in self.recipe.shares:
            raise NotInPlace(f"the sum does not run with the {what}")

    def conv_in_tiles(self, step: Step, followers: Sequence[Step]) -> None:
        self.share(winograd.build(self, step, followers), "convolution")

    def conv_stem(self, step: Step, source: str, target: str, dtype: DataType) -> _Stem | None:
        """The convolution with data and weights of that type; what comes out is float32, or as it is stored."""
        src = describe(self.operand(step, 0).type.static_shape, source, self.block, dtype)
        dst = describe(self.out_dims, target, self.block, self.dtype(self.out))
        bias = MemoryDesc.plain(self.operand(step, 2).type.static_shape, _F32) if self.has(step, 2) else None
        weight, build = self.window(step, dtype)

        def make(attributes: Attributes) -> Primitive:
            return build(src, dst, bias, attributes)

        try:
            if is_slow(make(Attributes())):
                return None
        except Unimplemented:
            return None
        into = Place(RESULT) if target == self.out.layout else None

        def arguments(primitive: Primitive) -> dict[int, Place]:
            nonlocal into
            given = {p.SRC: self.brought(step, source, src)}
            given[p.WEIGHTS] = self.weights(self.index(step, 1), weight, primitive.weights_desc())
            if bias is not None:
                given[p.BIAS] = self.place(self.index(step, 2))
            if into is None:
                into = self.recipe.add_scratch(dst.size)
            given[p.DST] = into
            return given

        def finish() -> None:
            if into is not None:
                lies = describe(self.out_dims, self.out.layout, self.block, dst.dtype)
                self.reorder(dst, into, lies, Place(RESULT))

        away = target != self.out.layout
        return _Stem(
            make, arguments, _Frame(self.out_dims, target), finish=finish if away else None, takes=lambda op: True
        )

    def window(self, step: Step, dtype: DataType) -> tuple[MemoryDesc, depth_first.Window]:
        """How the weights of a convolution, or of a transposed one, lie, and what makes its primitive."""
        w = self.operand(step, 1)
        full, n = conv_settings(w.type, step.attrs), w.type.rank - 2
        groups, own = full.int("group"), full.ints("pads")
        weight, transposed = MemoryDesc.plain(w.type.static_shape, _F32), step.op.name == "ConvTranspose"
        extra = step.attrs.ints("output_padding") or (0,) * n if transposed else (0,) * n
        if any(more >= stride for more, stride in zip(extra, full.ints("strides"), strict=True) if more):
            raise Unimplemented("an output padding that is not below the stride")
        if transposed:
            weight = p.deconvolution_weights(weight, groups)
        elif groups > 1:
            weight = p.convolution_weights(weight, groups)

        def build(
            src: MemoryDesc, dst: MemoryDesc, bias: MemoryDesc | None, attributes: Attributes,
            pads: Sequence[int] | None = None,
        ) -> Primitive:
            pads = own if pads is None else pads
            return (p.deconvolution if transposed else p.convolution)(
                src, MemoryDesc.any(weight.dims, dtype), dst, bias=bias, strides=full.ints("strides"),
                dilations=full.ints("dilations"), pads_begin=tuple(pads[:n]),
                pads_end=tuple(pad - more for pad, more in zip(pads[n:], extra, strict=True)), groups=groups,
                attributes=attributes,
            )  # fmt: skip

        return weight, build

    def brought(self, step: Step, layout: str, desc: MemoryDesc) -> Place:
        """The place of a step's first operand in `layout`, changed into it where it lies otherwise."""
        index, x = self.index(step, 0), self.operand(step, 0)
        if desc.dtype == self.dtype(x) and layouts_alike(self.layouts, x.type, x.layout, layout):
            return self.place(index)
        return self.changed(index, describe(x.type.static_shape, x.layout, self.block, self.dtype(x)), desc)

    def weights(self, index: int, plain: MemoryDesc, wanted: MemoryDesc, factor: float = 1.0) -> Place:
        """The place of weights in the layout that a primitive wants: laid out once where they are constant."""
        if self.kernel.operands[index].constant:
            def make(array: Array) -> Block:
                scaled = array if factor == 1 else (array * np.float32(factor)).astype(np.float32)
                return lay_out(scaled, plain, wanted)

            return self.constant(index, f"weights {factor!r} {plain.key} as {wanted.key}", make)
        return self.changed(index, plain, wanted)

    def changed(self, index: int, lies: MemoryDesc, wanted: MemoryDesc) -> Place:
        """The place of an operand as `wanted` describes it, changed where it lies otherwise."""
        if lies == wanted:
            return self.place(index)
        scratch = self.recipe.add_scratch(wanted.size)
        self.reorder(lies, self.place(index), wanted, scratch)
        return scratch

    def matmul(self, step: Step, followers: Sequence[Step]) -> None:
        a, b = (self.operand(step, i).type.static_shape for i in range(2))
        left = (1, *a) if len(a) == 1 else a
        right = (*b, 1) if len(b) == 1 else b
        rows, inner, columns = left[-2], left[-1], right[-1]
        lie = [self.operand(step, 0).layout, self.operand(step, 1).layout, self.out.layout]
        if any(layout != PLAIN for layout in lie):
            return self.product_of_turned(step, followers)
        if math.prod(right[:-2]) == 1 and self.flattens(followers):
            rows, batch = math.prod(left[:-1]), tuple[int, ...]()
            left, right = (rows, inner), (inner, columns)
        else:
            rank = max(len(left), len(right))
            left = (1,) * (rank - len(left)) + left
            right = (1,) * (rank - len(right)) + right
            batch = tuple(max(x, y) for x, y in zip(left[:-2], right[:-2], strict=True))
        first, second = self.described(step, (left, right), (PLAIN, PLAIN))
        self.product(step, followers, first, second, (*batch, rows, columns))

    def described(self, step: Step, dims: Sequence[tuple[int, ...]], layouts: Sequence[str]) -> list[MemoryDesc]:
        """The factors of a product under these dimensions, in these layouts."""
        types = [self.dtype(self.operand(step, i)) for i in range(2)]
        return [describe(d, x, 1, t) for d, x, t in zip(dims, layouts, types, strict=True)]

    def product_of_turned(self, step: Step, followers: Sequence[Step]) -> None:
        """The product of as many matrices on both sides, whose axes lie in any order."""
        given = [self.operand(step, i) for i in range(2)]
        if any(o.type.rank != len(self.out_dims) for o in given):
            raise Unimplemented("matrices that lie otherwise than one after the other, on one side")
        a, b = self.described(step, [o.type.static_shape for o in given], [o.layout for o in given])
        self.product(step, followers, a, b, self.out_dims)

    def flattens(self, followers: Sequence[Step]) -> bool:
        """Whether all operands of the steps behind fit a result whose leading axes are one."""
        given = [self.kernel.operands[i].type for s in followers for i in s.inputs if i is not None and i >= 0]
        return all(t.size == 1 or t == self.out.type or t.size == t.dims[-1] == self.out_dims[-1] for t in given)

    def product(
        self, step: Step, followers: Sequence[Step], a: MemoryDesc, b: MemoryDesc, out: tuple[int, ...],
        factor: float = 1.0, bias: int | None = None, posts: _Posts | None = None,
    ) -> None:  # fmt: skip
        """The matmul of operands 0 and 1 of `step` as these descriptors read them."""
        dst, index = describe(out, self.out.layout, 1, self.dtype(self.out)), self.index(step, 1)
        constant = self.kernel.operands[index].constant
        narrow = self.narrow
        if narrow:
            self.check_narrow(step)
        # what changes with every run oneDNN rounds as it goes, of two float32 that come out as one
        rounds = narrow and (constant or DataType.BF16 in (a.dtype, b.dtype, dst.dtype))
        src = MemoryDesc.plain(a.dims, DataType.BF16) if rounds and a.dtype == _F32 else a
        loose = MemoryDesc.any(b.dims, src.dtype) if constant else b
        if rounds and not constant and b.dtype == _F32:
            loose = MemoryDesc.plain(b.dims, DataType.BF16)
        bias_desc = describe((*(1 for _ in out[1:]), out[-1]), PLAIN, 1) if bias is not None else None

        def arguments(primitive: Primitive) -> dict[int, Place]:
            given = {p.SRC: self.changed(self.index(step, 0), a, src), p.DST: Place(RESULT)}
            given[p.WEIGHTS] = self.weights(index, b, primitive.weights_desc(), factor)
            if bias is not None:
                given[p.BIAS] = self.place(bias)
            return given

        def make(attributes: Attributes) -> Primitive:
            return p.matmul(src, loose, dst, bias=bias_desc, attributes=replace(attributes, bf16=narrow))

        # into axes in another order oneDNN 3.2 crashes with a binary operation behind the product
        plain = self.out.layout == PLAIN
        stem = _Stem(
            make, arguments, _Frame(out, self.out.layout), takes=lambda op: plain or isinstance(op, EltwisePostOp)
        )
        if posts is not None:
            stem.posts, stem.post_places = posts.ops, posts.places
        self.emit(stem, followers)

    def check_narrow(self, step: Step) -> None:
        """Raises `Unimplemented` for weights that are finite and would be infinite in bfloat16."""
        index = self.index(step, 1)
        if self.kernel.operands[index].constant and self.kernel.operands[index].type.size:
            values = self.supply.array(index)
            if max(float(values.max()), -float(values.min())) > _MOST_BF16:
                raise Unimplemented("weights beyond what bfloat16 holds")

    def gemm(self, step: Step, followers: Sequence[Step]) -> None:
        alpha, beta = step.attrs.float("alpha"), step.attrs.float("beta")
        a = self.matrix(step, 0, step.attrs.int("transA"))
        b = self.matrix(step, 1, step.attrs.int("transB"))
        constant = self.operand(step, 1).constant
        ops: list[PostOp] = [] if constant or alpha == 1 else [EltwisePostOp("linear", alpha, 0.0)]
        places: list[Place | None] = [None] * len(ops)
        bias = None
        if self.has(step, 2) and beta != 0:
            c = self.index(step, 2)
            shape = self.kernel.operands[c].type.static_shape
            if beta == 1 and not ops and math.prod(shape) == self.out_dims[1] == (shape or (0,))[-1]:
                bias = c
            else:
                op, place = self.scaled_addend(c, beta)
                ops.append(op)
                places.append(place)
        factor = alpha if constant else 1.0
        self.product(step, followers, a, b, self.out_dims, factor, bias, _Posts(tuple(ops), tuple(places)))

    def matrix(self, step: Step, position: int, transposed: int) -> MemoryDesc:
        rows, columns = self.operand(step, position).type.static_shape
        if transposed:
            return MemoryDesc.strided((columns, rows), self.dtype(self.operand(step, position)), (1, columns))
        return MemoryDesc.plain((rows, columns), self.dtype(self.operand(step, position)))

    def scaled_addend(self, index: int, beta: float) -> tuple[PostOp, Place]:
        operand = self.kernel.operands[index]
        dims = (1,) * (2 - operand.type.rank) + operand.type.static_shape
        if beta == 1:
            return BinaryPostOp("add", describe(dims, PLAIN, 1)), self.place(index)
        if not operand.constant:
            raise Unimplemented("a factor of a bias that is no constant")

        def scaled(array: Array) -> Block:
            return Block.of((array * np.float32(beta)).astype(np.float32))

        return BinaryPostOp("add", describe(dims, PLAIN, 1)), self.constant(index, f"times {beta!r}", scaled)

    def pool(self, step: Step, followers: Sequence[Step]) -> None:
        full = pool_settings(step.attrs)
        kernel, strides = full.ints("kernel_shape"), full.ints("strides")
        # a window of one element has no gaps; oneDNN refuses dilations there in 3-D
        dilations = tuple(d if k > 1 else 1 for d, k in zip(full.ints("dilations"), kernel, strict=True))
        n, sizes = len(kernel), self.operand(step, 0).type.static_shape[2:]
        begin, end = full.ints("pads")[:n], list(full.ints("pads")[n:])
        for a in range(n):
            reach = (kernel[a] - 1) * dilations[a] + 1
            if step.attrs.int("ceil_mode"):
                end[a] = (self.out_dims[2 + a] - 1) * strides[a] + reach - sizes[a] - begin[a]
            if max(begin[a], end[a]) >= reach:
                raise Unimplemented("a window of a pool lies wholly in the padding")
        kind = "max"
        if step.op.name == "AveragePool":
            kind = "avg_include_padding" if step.attrs.int("count_include_pad") else "avg_exclude_padding"
        self.pooling(step, followers, kind, kernel, strides, dilations, begin, end)

    def pooling(
        self, step: Step, followers: Sequence[Step], kind: str, kernel: Sequence[int], strides: Sequence[int],
        dilations: Sequence[int], begin: Sequence[int], end: Sequence[int],
    ) -> None:  # fmt: skip
        # oneDNN 3.2 takes sums and binary operations behind a pool and leaves out some, or reads the wrong element
        layout = self.operand(step, 0).layout
        src, dst = self.lies(self.operand(step, 0), layout), self.lies(self.out, layout)
        stem = _Stem(
            lambda attributes: p.pooling(
                src, dst, kernel, kind=kind, strides=strides, dilations=dilations, pads_begin=begin, pads_end=end,
                attributes=attributes,
            ),
            self.through(step), _Frame(self.out_dims, layout), takes=lambda op: isinstance(op, EltwisePostOp),
        )  # fmt: skip
        self.emit(stem, followers)

    def through(self, step: Step) -> Callable[[Primitive], dict[int, Place]]:
        """Arguments of a primitive from operand 0 to the result."""
        return lambda _: {p.SRC: self.place(self.index(step, 0)), p.DST: Place(RESULT)}

    def global_pool(self, step: Step, followers: Sequence[Step]) -> None:
        x = self.operand(step, 0)
        mean, sizes = step.op.name == "GlobalAveragePool", x.type.static_shape[2:]
        if x.layout != PLAIN:
            n = len(sizes)
            kind = "avg_exclude_padding" if mean else "max"
            return self.pooling(step, followers, kind, sizes, sizes, (1,) * n, (0,) * n, (0,) * n)
        self.reduced(step, followers, "mean" if mean else "max", math.prod(sizes))

    def reduced(self, step: Step, followers: Sequence[Step], algorithm: str, columns: int) -> None:
        """The reduction of the last `columns` elements, as they lie."""
        if columns == 1:
            # oneDNN refuses a reduction that reduces nothing
            return self.move(step)
        rows = math.prod(self.out_dims)
        src = describe((rows, columns), PLAIN, 1, self.dtype(self.operand(step, 0)))
        dst = describe((rows, 1), PLAIN, 1, self.dtype(self.out))
        stem = _Stem(
            lambda attributes: p.reduction(src, dst, algorithm, attributes=attributes), self.through(step),
            _Frame((rows, 1), PLAIN),
        )  # fmt: skip
        self.emit(stem, followers)

    def reduction(self, step: Step, followers: Sequence[Step]) -> None:
        x = self.operand(step, 0)
        axes = reduced_axes(x.type, step.attrs, step.op.name)
        behind = tuple(range(x.type.rank - len(axes), x.type.rank))
        if axes != behind or not axes:
            return self.move(step)
        algorithm = step.op.name.removeprefix("Reduce").lower()
        self.reduced(step, followers, algorithm, math.prod(x.type.static_shape[axes[0] :]))

    def batch_norm(self, step: Step, followers: Sequence[Step]) -> None:
        """x · scale + shift by oneDNN's binary, which is faster than its batch normalization and takes more along."""
        if not all(self.operand(step, i).constant for i in range(1, 5)):
            raise Unimplemented("statistics that are no constants")
        layout, index, dims = self.operand(step, 0).layout, self.index(step, 0), self.element_dims
        self.lies(self.out, layout)
        data = describe(dims, layout, self.block, self.alone(index))
        vector = describe((1, dims[1], *(1 for _ in dims[2:])), layout, self.block)
        scale, shift = self.norm(step)
        stem = _Stem(
            lambda attributes: p.binary(data, vector, data, "mul", attributes=attributes),
            lambda _: {p.SRC_0: self.place(index), p.SRC_1: scale, p.DST: Place(RESULT)},
            _Frame(dims, layout), frozenset({index}), posts=(BinaryPostOp("add", vector),),
            post_places=(shift,),
        )  # fmt: skip
        self.emit(stem, followers)

    def alone(self, index: int) -> DataType:
        """The one element type in which an operand and the result lie; `Unimplemented` where there are two."""
        operand = self.kernel.operands[index]
        if operand.narrow != self.out.narrow:
            raise Unimplemented("one element type comes in and another one goes out")
        return self.dtype(operand)

    def norm(self, step: Step) -> tuple[Place, Place]:
        """Scale and shift of a batch normalization, computed in float64."""
        scale, bias, mean, variance = (self.supply.array(self.index(step, i)).astype(np.float64) for i in range(1, 5))
        factor = scale / np.sqrt(variance + step.attrs.float("epsilon"))
        # several operands make them, so they are kept with this kernel alone
        both = (Block.of(v.astype(np.float32)) for v in (factor, bias - mean * factor))
        first, second = map(self.recipe.add_constant, both)
        return first, second

    def softmax(self, step: Step, followers: Sequence[Step]) -> None:
        dims, log = self.out_dims, step.op.name == "LogSoftmax"
        self.lie_plainly_here(step)
        axis = step.attrs.int("axis") % len(dims)
        if step.attrs.int("flattened") or axis == len(dims) - 1:
            rows = math.prod(dims[:axis])
            flat = (rows, math.prod(dims) // rows)
            return self.emit(self.softmax_stem(step, log, flat), followers)
        if self.operand(step, 0).narrow or self.out.narrow:
            raise Unimplemented("a softmax along another axis than the last")
        order = [a for a in range(len(dims)) if a != axis] + [axis]
        inner, strides = row_major_strides([dims[a] for a in order]), [0] * len(dims)
        for a, stride in zip(order, inner, strict=True):
            strides[a] = stride
        plain, turned = MemoryDesc.plain(dims, _F32), MemoryDesc.strided(dims, _F32, strides)
        scratch = self.recipe.add_scratch(turned.size)
        self.reorder(plain, self.place(self.index(step, 0)), turned, scratch)
        stem = _Stem(
            lambda attributes: p.softmax(turned, turned, axis, log=log, attributes=attributes),
            lambda _: {p.SRC: scratch, p.DST: scratch}, _Frame(dims, "turned"),
            finish=lambda: self.reorder(turned, scratch, plain, Place(RESULT)),
            # off the last axis oneDNN 3.2 reads the second source of a binary post-op wrongly
            takes=lambda op: isinstance(op, EltwisePostOp),
        )  # fmt: skip
        self.emit(stem, followers)

    def softmax_stem(self, step: Step, log: bool, dims: tuple[int, ...]) -> _Stem:
        src, dst = (MemoryDesc.plain(dims, self.dtype(o)) for o in (self.operand(step, 0), self.out))
        return _Stem(
            lambda attributes: p.softmax(src, dst, 1, log=log, attributes=attributes), self.through(step),
            _Frame(dims, PLAIN),
        )  # fmt: skip

    def layer_norm(self, step: Step, followers: Sequence[Step]) -> None:
        self.lie_plainly_here(step)
        axis = step.attrs.int("axis") % len(self.out_dims)
        rows = math.prod(self.out_dims[:axis])
        flat = (rows, math.prod(self.out_dims) // rows)
        src, dst = (MemoryDesc.plain(flat, self.dtype(o)) for o in (self.operand(step, 0), self.out))
        shift = self.has(step, 2)

        def arguments(_: Primitive) -> dict[int, Place]:
            given = {**self.through(step)(_), p.SCALE: self.place(self.index(step, 1))}
            return {**given, p.SHIFT: self.place(self.index(step, 2))} if shift else given

        epsilon = step.attrs.float("epsilon")
        stem = _Stem(
            lambda attributes: p.layer_normalization(src, dst, epsilon, shift=shift, attributes=attributes),
            arguments, _Frame(flat, PLAIN),
        )  # fmt: skip
        self.emit(stem, followers)

    def group_norm(self, step: Step, followers: Sequence[Step]) -> None:
        """By the layer normalization of each group, which lies in one stretch; then scale and shift by channel.

        InstanceNormalization is that with one group for each channel.
        """
        dims, x = self.out_dims, self.index(step, 0)
        self.lie_plainly_here(step)
        groups = dims[1] if step.op.name == "InstanceNormalization" else step.attrs.int("num_groups")
        rows = dims[0] * groups
        flat = MemoryDesc.plain((rows, math.prod(dims) // rows), _F32)
        centred = p.layer_normalization(flat, flat, step.attrs.float("epsilon"), scale=False, shift=False)
        if is_slow(centred):
            raise Unimplemented("oneDNN has no fast layer normalization")
        self.launch(centred, {p.SRC: self.place(x), p.DST: Place(RESULT)})
        scale, shift = (self.place(self.index(step, i)) for i in (1, 2))
        data = describe(self.element_dims, PLAIN, 1)
        vector = describe((1, dims[1], *(1 for _ in self.element_dims[2:])), PLAIN, 1)
        self.scaled(data, vector, scale, Place(RESULT), followers, (BinaryPostOp("add", vector),), (shift,))

    def scaled(
        self, data: MemoryDesc, factor: MemoryDesc, at: Place, source: Place, followers: Sequence[Step],
        posts: tuple[PostOp, ...], places: tuple[Place | None, ...],
    ) -> None:  # fmt: skip
        """A tensor times one that broadcasts to it, into the result, behind a kernel of ours."""
        stem = _Stem(
            lambda attributes: p.binary(data, factor, data, "mul", attributes=attributes),
            lambda _: {p.SRC_0: source, p.SRC_1: at, p.DST: Place(RESULT)}, _Frame(data.dims, PLAIN), posts=posts,
            post_places=places, first=False,
        )  # fmt: skip
        self.emit(stem, followers)

    def rms_norm(self, step: Step, followers: Sequence[Step]) -> None:
        """x · s / √(mean of x² + ε): squares, their means to the power −½, and two products."""
        dims, index = self.out_dims, self.index(step, 0)
        axis = step.attrs.int("axis") % len(dims)
        rows, columns = math.prod(dims[:axis]), math.prod(dims[axis:])
        self.lie_plainly_here(step)
        if self.operand(step, 1).type.static_shape != dims[axis:] or columns == 1:
            raise Unimplemented("a scale that is not one number for each element that is averaged")
        flat, single = MemoryDesc.plain((rows, columns), _F32), MemoryDesc.plain((rows, 1), _F32)
        squares, roots = self.recipe.add_scratch(flat.size), self.recipe.add_scratch(single.size)
        self.launch(p.eltwise(flat, flat, "square"), {p.SRC: self.place(index), p.DST: squares})
        inverse = (EltwisePostOp("linear", 1.0, step.attrs.float("epsilon")), EltwisePostOp("pow", 1.0, -0.5))
        mean = p.reduction(flat, single, "mean", attributes=Attributes(post_ops=inverse))
        if is_slow(mean):
            raise Unimplemented("oneDNN has no fast mean")
        self.launch(mean, {p.SRC: squares, p.DST: roots})
        vector, scale = MemoryDesc.plain((1, columns), _F32), self.place(self.index(step, 1))
        self.scaled(flat, single, roots, self.place(index), followers, (BinaryPostOp("mul", vector),), (scale,))

    def lrn(self, step: Step, followers: Sequence[Step]) -> None:
        layout, attrs = self.operand(step, 0).layout, step.attrs
        desc = self.lies(self.operand(step, 0), layout)
        self.lies(self.out, layout)
        alpha, beta, bias = (attrs.float(n) for n in ("alpha", "beta", "bias"))
        stem = _Stem(
            lambda attributes: p.lrn(desc, desc, attrs.int("size"), alpha, beta, bias, attributes=attributes),
            self.through(step), _Frame(self.out_dims, layout),
        )  # fmt: skip
        self.emit(stem, followers)

    def concat(self, step: Step, followers: Sequence[Step]) -> None:
        axis = step.attrs.int("axis") % len(self.out_dims)
        sources = [self.lies(self.operand(step, i), self.out.layout) for i in range(len(step.inputs))]
        dst = describe(self.out_dims, self.out.layout, self.block, self.dtype(self.out))
        if len({desc.dtype for desc in (*sources, dst)}) > 1:
            return self.put_together(step, sources, axis, dst, followers)
        stem = _Stem(
            lambda attributes: p.concat(sources, axis, dst, attributes=attributes),
            lambda _: {
                **{p.multiple_src(i): self.place(self.index(step, i)) for i in range(len(sources))},
                p.DST: Place(RESULT),
            },
            _Frame(self.out_dims, self.out.layout),
        )  # fmt: skip
        self.emit(stem, followers)

    def put_together(
        self, step: Step, sources: Sequence[MemoryDesc], axis: int, dst: MemoryDesc, followers: Sequence[Step]
    ) -> None:
        """A Concat of parts that lie in several element types: each is changed as it is put in its place."""
        start = 0
        for position, source in enumerate(sources):
            region = dst.submemory(source.dims, [start if a == axis else 0 for a in range(dst.ndims)])
            self.reorder(source, self.place(self.index(step, position)), region, Place(RESULT))
            start += source.dims[axis]
        self.behind(followers)

    def reshape(self, step: Step, followers: Sequence[Step]) -> None:
        """What moves nothing, as a copy that changes the element type."""
        x = self.operand(step, 0)
        if step.op.has(Trait.IDENTITY) and x.layout != self.out.layout or followers:
            raise Unimplemented(f"{step.op.name} changes the layout")
        if not step.op.has(Trait.IDENTITY):
            self.lie_plainly_here(step)
        source, target = (MemoryDesc.plain((x.type.size,), self.dtype(o)) for o in (x, self.out))
        self.reorder(source, self.place(self.index(step, 0)), target, Place(RESULT))

    def split(self, step: Step, followers: Sequence[Step]) -> None:
        x = self.operand(step, 0)
        axis, start = step.attrs.int("axis") % x.type.rank, 0
        layout = self.out.layout
        whole = self.lies(x, layout)
        for number, part in enumerate(self.kernel.results):
            offsets = [start if a == axis else 0 for a in range(x.type.rank)]
            source = whole.submemory(part.type.static_shape, offsets)
            self.reorder(source, self.place(self.index(step, 0)), self.lies(part, layout), Place(RESULT, number))
            start += part.type.static_shape[axis]

    def slice(self, step: Step, followers: Sequence[Step]) -> None:
        x = self.operand(step, 0)
        ranges = slice_ranges(x.type, step.attrs)
        if any(r[2] != 1 for r in ranges.values()):
            return self.move(step)
        offsets = [ranges[a][0] if a in ranges else 0 for a in range(x.type.rank)]
        source = self.lies(x, PLAIN).submemory(self.out_dims, offsets)
        self.reorder(source, self.place(self.index(step, 0)), self.lies(self.out, PLAIN), Place(RESULT))

    def transpose(self, step: Step, followers: Sequence[Step]) -> None:
        x = self.operand(step, 0)
        if x.type.rank < 2:
            return self.move(step)
        # of one element type in and out, what lies otherwise than plainly is a view
        lies = describe(x.type.static_shape, x.layout, self.block, self.dtype(x))
        source = lies.permute(permutation(x.type.rank, step.attrs))
        target = describe(self.out_dims, self.out.layout, self.block, self.dtype(self.out))
        self.reorder(source, self.place(self.index(step, 0)), target, Place(RESULT))

    def regrouped(self, step: Step, followers: Sequence[Step]) -> None:
        """DepthToSpace and SpaceToDepth: a transpose of six axes."""
        x = self.operand(step, 0)
        self.lie_plainly_here(step)
        dims, order = blocks(step.attrs, x.type.static_shape, step.op.name == "DepthToSpace")
        source = MemoryDesc.plain(dims, _F32).permute(order)
        target = MemoryDesc.plain([dims[a] for a in order], _F32)
        self.reorder(source, self.place(self.index(step, 0)), target, Place(RESULT))

    def einsum(self, step: Step, followers: Sequence[Step]) -> None:
        shapes = [self.operand(step, i).type.static_shape for i in range(len(step.inputs))]
        found = contraction.contraction(step.attrs.str("equation"), shapes)
        if found is None:
            return self.move(step)
        try:
            contraction.build(self, step, found)
        except Unimplemented:
            self.recipe = Recipe()
            self.move(step)

    # ── element by element ───────────────────────────────────────────────────────────────────────────────────────

    def elementwise(self, step: Step, followers: Sequence[Step]) -> None:
        stem = self.element_stem(step) if self.floats(step) else None
        if stem is not None:
            try:
                return self.emit(stem, followers)
            except Unimplemented:
                self.recipe = Recipe()
        self.elements(step, {})
        if followers and self.in_place is not None:
            raise NotInPlace("the kernel starts in NumPy")
        self.behind(followers)

    def element_stem(self, step: Step) -> _Stem | None:
        frame = _Frame(self.element_dims, self.out.layout)
        desc = describe(self.element_dims, self.out.layout, self.block, self.dtype(self.out))
        unary = _UNARY.get(step.op.name)
        if unary is not None:
            return self.unary_stem(self.index(step, 0), unary(step.attrs), desc, frame)
        if step.op.name == "Erf":
            return self.erf_stem(step)
        if step.op.name not in (*_BINARY, "Pow") or len(step.inputs) != 2:
            return None
        return self.binary_stem(step, desc, frame)

    def unary_stem(self, index: int, ops: tuple[EltwisePostOp, ...], desc: MemoryDesc, frame: _Frame) -> _Stem | None:
        if self.kernel.operands[index].type != self.out.type:
            return None
        self.alone(index)
        self.lies(self.kernel.operands[index], self.out.layout)
        first, rest = ops[0], ops[1:]
        return _Stem(
            lambda a: p.eltwise(desc, desc, first.algorithm, alpha=first.alpha, beta=first.beta, attributes=a),
            lambda _: {p.SRC: self.place(index), p.DST: Place(RESULT)}, frame, frozenset({index}), later=rest,
        )  # fmt: skip

    def erf_stem(self, step: Step) -> _Stem:
        """erf(y) = (2 gelu(z) − z) / z with z = √2 y, z kept off 0; beyond |z| = 14 erf is ±1.

        As a product with √2 and one with 1, since oneDNN's binary fuses what its eltwise does not.
        """
        index = self.index(step, 0)
        self.lies(self.operand(step, 0), self.out.layout)
        flat = (1, math.prod(self.out_dims))
        desc, single = MemoryDesc.plain(flat, _F32), MemoryDesc.plain((1, 1), _F32)
        root, one = (self.recipe.add_constant(Block.of(np.full(1, v, np.float32))) for v in (math.sqrt(2), 1.0))
        scratch = self.recipe.add_scratch(desc.size)
        posts = (EltwisePostOp("clip_v2", -14.0, 14.0), EltwisePostOp("linear", 1.0, 1e-30))
        prepare = p.binary(desc, single, desc, "mul", attributes=Attributes(post_ops=posts))
        self.launch(prepare, {p.SRC_0: self.place(index), p.SRC_1: root, p.DST: scratch})
        return _Stem(
            lambda a: p.binary(desc, single, desc, "mul", attributes=a),
            lambda _: {p.SRC_0: scratch, p.SRC_1: one, p.DST: Place(RESULT)}, _Frame(flat, _FLAT),
            posts=(
                EltwisePostOp("gelu_erf"), EltwisePostOp("linear", 2.0, 0.0), BinaryPostOp("sub", desc),
                BinaryPostOp("div", desc),
            ),
            post_places=(None, None, scratch, scratch), first=False,
        )  # fmt: skip

    def binary_stem(self, step: Step, desc: MemoryDesc, frame: _Frame) -> _Stem | None:
        first, second = self.index(step, 0), self.index(step, 1)
        for index, other, reverse in ((first, second, False), (second, first, True)):
            scalar = self.scalar(other)
            simple = _with_scalar(step.op.name, scalar, reverse) if scalar is not None else None
            if simple is not None:
                return self.unary_stem(index, simple, desc, frame)
        if step.op.name not in _BINARY:
            return None
        if self.kernel.operands[first].type != self.out.type:
            first, second = second, first
        swapped = first != self.index(step, 0)
        if self.kernel.operands[first].type != self.out.type or swapped and step.op.name == "Div":
            return None
        if self.kernel.operands[first].narrow != self.out.narrow:
            if self.kernel.operands[second].type != self.out.type or swapped or not step.op.has(Trait.COMMUTATIVE):
                return None
            first, second = second, first
        if self.kernel.operands[first].constant:
            return None
        self.alone(first)
        found = self.second(second, frame)
        if found is None:
            return None
        self.lies(self.kernel.operands[first], self.out.layout)
        other_desc, at = found
        # a − b is −(b − a)
        negate = (EltwisePostOp("linear", -1.0, 0.0),) if swapped and step.op.name == "Sub" else ()
        return _Stem(
            lambda a: p.binary(desc, other_desc, desc, _BINARY[step.op.name], attributes=a),
            lambda _: {p.SRC_0: self.place(first), p.SRC_1: at, p.DST: Place(RESULT)}, frame, frozenset({first}),
            posts=negate, post_places=(None,) * len(negate),
        )  # fmt: skip

    def elements(self, step: Step, given: dict[int, tuple[Operand, Place]]) -> None:
        """A step by NumPy, on tensors that all lie as the result does; `given` are inputs that are no operands."""
        inputs = [given[i] if i in given else self.read(step, i) for i in range(len(step.inputs))]
        if self.out.narrow or any(o.narrow for o, _ in inputs):
            raise Unimplemented("NumPy has no bfloat16")
        function = element_function(step.op, [o.type for o, _ in inputs], self.out.type)
        if function is None:
            raise Unimplemented(f"NumPy has no {step.op.name} of these element types")
        spread = is_blocked(self.out.type.static_shape, self.out.layout, self.block)
        specs = []
        for operand, place in inputs:
            whole = operand.type.shape == self.out.type.shape
            layout = PLAIN if operand.constant else operand.layout
            if whole and not operand.constant:
                self.lies(operand, self.out.layout)
                # its bytes are those of the result's layout, by whichever name it goes
                layout = self.out.layout
            if not whole and not layouts_alike(self.layouts, operand.type, layout, PLAIN):
                raise Unimplemented("a part of a blocked tensor broadcasts")
            if spread:
                specs.append(spread_spec(place, operand.type, layout if whole else PLAIN, self.out_dims, self.block))
            else:
                specs.append(logical_spec(place, operand.type, layout if whole else PLAIN, self.block))
        target = logical_spec(Place(RESULT), self.out.type, self.out.layout, self.block)

        def run(arrays: Sequence[Array], outs: Sequence[Array]) -> None:
            function(arrays, outs[0], step.attrs)

        self.recipe.launches.append(ArrayLaunch(f"numpy:{step.op.name}", run, tuple(specs), (target,)))

    def by_numpy(self) -> None:
        """All steps by NumPy, which passes on what is not finite as the operators say."""
        if not self.kernel.steps:
            return self.relayout()
        first = self.kernel.steps[0]
        if first.op.has(Trait.ELEMENTWISE):
            self.elements(first, {})
        elif len(self.kernel.steps) == 1:
            return self.move(first)
        else:
            raise Unimplemented(f"NumPy does no steps behind {first.op.name}")
        for step in self.kernel.steps[1:]:
            self.chained(step)

    def chained(self, step: Step) -> None:
        """A step by NumPy in place on the result."""
        entry = next(i for i, x in enumerate(step.inputs) if x is not None and x < 0)
        self.elements(step, {entry: (self.out, Place(RESULT))})

    def read(self, step: Step, position: int) -> tuple[Operand, Place]:
        index = self.index(step, position)
        return self.kernel.operands[index], self.place(index)

    # ── NumPy ────────────────────────────────────────────────────────────────────────────────────────────────────

    def move(self, step: Step) -> None:
        """A kernel of one step by NumPy between plain arrays."""
        if any(o.narrow for o in (*self.kernel.operands, *self.kernel.results)):
            raise Unimplemented("NumPy has no bfloat16")
        if len(self.kernel.steps) > 1 or any(r.layout != PLAIN for r in self.kernel.results):
            raise Unimplemented(f"{step.op.name} is plain and alone only")
        types = [None if i is None else self.kernel.operands[i].type for i in step.inputs]
        run = mover(step.op, step.attrs, types, [r.type for r in self.kernel.results])
        if run is None:
            raise Unimplemented(f"NumPy has no {step.op.name} with these attributes")
        present = [position for position, t in enumerate(types) if t is not None]
        inputs = []
        for position in present:
            operand, place = self.read(step, position)
            if not layouts_alike(self.layouts, operand.type, operand.layout, PLAIN):
                raise Unimplemented(f"{step.op.name} reads plain tensors only")
            inputs.append(plain_spec(place, operand.type))
        outs = tuple(plain_spec(Place(RESULT, i), r.type) for i, r in enumerate(self.kernel.results))
        count = len(types)

        def with_absent(arrays: Sequence[Array], targets: Sequence[Array]) -> None:
            full: list[Array | None] = [None] * count
            for position, array in zip(present, arrays, strict=True):
                full[position] = array
            run(full, targets)

        self.recipe.launches.append(ArrayLaunch(f"numpy:{step.op.name}", with_absent, tuple(inputs), outs))

    def evaluate(self) -> None:
        """All steps by their definitions."""
        if not self.kernel.steps:
            return self.relayout()
        operands, results, block = self.kernel.operands, self.kernel.results, self.block
        run, last = evaluated(self.kernel), self.kernel.steps[-1].op.name

        def whole(arrays: Sequence[Array], outs: Sequence[Array]) -> None:
            plain = [to_plain(a, o.type, o.layout, block) for a, o in zip(arrays, operands, strict=True)]
            for target, found, result in zip(outs, run(plain), results, strict=True):
                if not isinstance(found, np.ndarray) or found.shape != result.type.static_shape:
                    shown = getattr(found, "shape", "no tensor")
                    raise BackendError(f"{last} gave {shown} where {result.type} was declared")
                from_plain(target, found, result.type, result.layout, block)

        inputs = tuple(logical_spec(self.place(i), o.type, o.layout, block) for i, o in enumerate(operands))
        outs = tuple(logical_spec(Place(RESULT, i), r.type, r.layout, block) for i, r in enumerate(results))
        name = "+".join(step.op.name for step in self.kernel.steps)
        self.recipe.launches.append(ArrayLaunch(f"{BY_DEFINITION}{name}", whole, inputs, outs))


_Anchor = Callable[[_Designer, Step, Sequence[Step]], None]

_ANCHORS: dict[str, _Anchor] = {
    "Conv": _Designer.conv,
    "ConvTranspose": _Designer.conv,
    "MatMul": _Designer.matmul,
    "Gemm": _Designer.gemm,
    "MaxPool": _Designer.pool,
    "AveragePool": _Designer.pool,
    "GlobalAveragePool": _Designer.global_pool,
    "GlobalMaxPool": _Designer.global_pool,
    "ReduceSum": _Designer.reduction,
    "ReduceMean": _Designer.reduction,
    "ReduceMax": _Designer.reduction,
    "ReduceMin": _Designer.reduction,
    "BatchNormalization": _Designer.batch_norm,
    "Softmax": _Designer.softmax,
    "LogSoftmax": _Designer.softmax,
    "LayerNormalization": _Designer.layer_norm,
    "InstanceNormalization": _Designer.group_norm,
    "GroupNormalization": _Designer.group_norm,
    "RMSNormalization": _Designer.rms_norm,
    "LRN": _Designer.lrn,
    "Concat": _Designer.concat,
    "Split": _Designer.split,
    "Slice": _Designer.slice,
    "Transpose": _Designer.transpose,
}
"""Operators that become primitives; `taso/rules/lowering` has a proved rule for each."""

_TAKEN_APART: dict[str, _Anchor] = {
    "Einsum": _Designer.einsum,
    "DepthToSpace": _Designer.regrouped,
    "SpaceToDepth": _Designer.regrouped,
}
"""Operators whose data is read under other axes first, which moves nothing: what is left is a product or a reorder."""

__all__ = ["BLOCKED", "KERNEL_FORMAT", "NotInPlace", "WHOLE", "OneDNNFusion", "design"]
