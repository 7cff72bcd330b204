"""Reductions, the softmax family and normalisations, as kernels of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from taso.backends.cudnn.sources.chains import Chain
from taso.backends.cudnn.sources.fetches import Fetch, Straight
from taso.backends.cudnn.sources.launches import Place, Sourced
from taso.backends.cudnn.sources.nests import Access, broadcast_strides, operand_strides
from taso.backends.cudnn.sources.results import LoopOf, Loops, steps_behind
from taso.backends.cudnn.sources.rows import Pass, Rows
from taso.backends.cudnn.sources.scalars import INTEGER, REAL, computed, literal
from taso.backends.lowering import Kernel, Operand
from taso.backends.places import OPERAND, RESULT
from taso.graph.ops.reduction import reduced_axes
from taso.graph.types import DType


def _input(kernel: Kernel, position: int = 0) -> int:
    """The operand that is an input of the anchor."""
    reference = kernel.steps[0].inputs[position]
    if reference is None or reference < 0:
        raise ValueError(f"input {position} of {kernel.steps[0].op.name} is no operand")
    return reference


def _has(kernel: Kernel, position: int) -> bool:
    inputs = kernel.steps[0].inputs
    return position < len(inputs) and inputs[position] is not None


@dataclass(frozen=True)
class _Row:
    """The data of a kernel, its loops in order of memory, and which of them are reduced."""

    kernel: Kernel
    kept: tuple[LoopOf, ...]
    reduced: tuple[LoopOf, ...]

    @staticmethod
    def of(kernel: Kernel, axes: Collection[int], split: dict[int, int] | None = None) -> _Row:
        """Rows over `axes`; of an axis that is split in two only the inner loop is reduced."""
        operand = kernel.operands[_input(kernel)]
        kept, reduced = list[LoopOf](), list[LoopOf]()
        for loop in Loops.of(operand, split).loops:
            # of the two loops of an axis the outer one comes first
            first = loop.axis in (split or {}) and all(x.axis != loop.axis for x in kept)
            (reduced if loop.axis in axes and not first else kept).append(loop)
        return _Row(kernel, tuple(kept), tuple(reduced))

    @property
    def operand(self) -> Operand:
        return self.kernel.operands[_input(self.kernel)]

    @property
    def dtype(self) -> DType:
        return self.operand.type.dtype

    @property
    def length(self) -> int:
        return math.prod(x.extent for x in self.reduced)

    @property
    def loops(self) -> tuple[LoopOf, ...]:
        return self.kept + self.reduced

    def access(self, place: Place, dtype: DType, by_axis: Sequence[int]) -> Access:
        """An access with strides along the axes of the data."""
        return Access(place, dtype, Loops(self.loops).strides(by_axis))

    @property
    def data(self) -> Access:
        return self.access(Place(OPERAND, _input(self.kernel)), self.dtype, operand_strides(self.operand))

    def extra(self, position: int, by_axis: Sequence[int] | None) -> Fetch | None:
        """An input of the anchor, read along the axes of the data."""
        if by_axis is None:
            return None
        index = _input(self.kernel, position)
        return Straight(self.access(Place(OPERAND, index), self.kernel.operands[index].type.dtype, by_axis))

    def of_elements(
        self, name: str, passes: Sequence[Pass], value: str, extras: dict[str, Fetch | None]
    ) -> Sourced | None:  # fmt: skip
        """What makes each element of the result of that of the data and of numbers of its row."""
        found = {n: f for n, f in extras.items() if f is not None}
        behind = steps_behind(self.kernel, Loops(self.loops))
        if behind is None or len(found) != len(extras) or len(self.kernel.results) > 1:
            return None
        result = self.kernel.results[0]
        target = self.access(Place(RESULT), result.type.dtype, operand_strides(result))
        return self._made(name, passes, value, _type_behind(self.kernel), target, behind, True, tuple(found.items()))

    def of_rows(self, name: str, passes: Sequence[Pass], value: str, made: DType, keep: bool) -> Sourced | None:
        """What makes an element of the result of each row."""
        result = self.kernel.results[0]
        axes = {x.axis for x in self.reduced}
        rank = self.operand.type.rank
        # where each axis of the data that is kept stands in the result
        places = {a: a if keep else n for n, a in enumerate(a for a in range(rank) if a not in axes)}
        strides = [operand_strides(result)[places[a]] if a in places else 0 for a in range(rank)]
        renamed = Loops(tuple(LoopOf(x.extent, places[x.axis], x.step) for x in self.kept))
        behind = steps_behind(self.kernel, renamed)
        if behind is None:
            return None
        still = (0,) * len(self.reduced)
        reads: list[Fetch] = [
            Straight(Access(a.place, a.dtype, (*a.strides, *still))) for f in behind[1] for a in f.accesses
        ]
        target = self.access(Place(RESULT), result.type.dtype, strides)
        return self._made(name, passes, value, made, target, (behind[0], reads), False, ())

    def _made(
        self, name: str, passes: Sequence[Pass], value: str, made: DType, target: Access,
        behind: tuple[Chain | None, list[Fetch]], each: bool, extras: tuple[tuple[str, Fetch], ...],
    ) -> Sourced:  # fmt: skip
        extents = [tuple(x.extent for x in part) for part in (self.kept, self.reduced)]
        rows = Rows(
            name, extents[0], extents[1], self.data, target, tuple(passes), value, made, each, extras, behind[0],
            tuple(behind[1]),
        )  # fmt: skip
        found, scratch = rows.launches()
        return Sourced(found, scratch)


def _type_behind(kernel: Kernel) -> DType:
    """The element type of the anchor's result."""
    anchor = kernel.steps[0]
    types = [None if r is None else kernel.operands[r].type for r in anchor.inputs]
    return anchor.op.types_of(types, anchor.attrs)[0].dtype


# ── ReduceSum and its kin ────────────────────────────────────────────────────────────────────────────────────────


def lowest(t: str) -> str:
    """Below every number of a type, or the least of them."""
    if t in ("float", "double"):
        return literal(-math.inf, t)
    return "false" if t == "bool" else literal(-(1 << int(t[1:]) - 1) if t[0] == "i" else 0, t)


def _highest(t: str) -> str:
    if t in ("float", "double"):
        return literal(math.inf, t)
    return "true" if t == "bool" else literal((1 << int(t[1:]) - (t[0] == "i")) - 1, t)


# what is added up of each element, and what is made of the sum of `n` of them
_SUMS: dict[str, tuple[str, str]] = {
    "ReduceSum": ("x", "sum"), "ReduceMean": ("x", "sum / ({t}){n}"), "ReduceSumSquare": ("mul(x, x)", "sum"),
    "ReduceL1": ("size_of(x)", "sum"), "ReduceL2": ("mul(x, x)", "sqrt_of(sum)"), "ReduceLogSum": ("x", "log_of(sum)"),
}  # fmt: skip
_OF_INTEGERS = frozenset({"ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceProd", "ReduceMax", "ReduceMin"})


def reduction(kernel: Kernel) -> Sourced | None:
    step, name = kernel.steps[0], kernel.steps[0].op.name
    x = kernel.operands[_input(kernel)].type
    t = computed(x.dtype)
    if x.dtype not in REAL and not (x.dtype in INTEGER and name in _OF_INTEGERS):
        if x.dtype is not DType.BOOL or name not in ("ReduceMax", "ReduceMin"):
            return None
    row, keep = _Row.of(kernel, reduced_axes(x, step.attrs, name)), bool(step.attrs.int("keepdims"))
    return row.of_rows(name, *_reduced(name, t, row.length), x.dtype, keep)


def _reduced(name: str, t: str, n: int) -> tuple[list[Pass], str]:
    """The passes of a reduction of `n` elements, and what is made of them."""
    if name == "ReduceMax":
        return [Pass("top", t, lowest(t), "x", "Most")], "top"
    if name == "ReduceMin":
        return [Pass("bottom", t, _highest(t), "x", "Least")], "bottom"
    if name == "ReduceProd":
        return [Pass("product", t, f"({t})1", "x", "Mul")], "product"
    if name == "ReduceLogSumExp":
        # exp of a distance from what is not finite is not a number: the largest one is not taken beyond
        most = "1.7976931348623157e308" if t == "double" else "3.4028234663852886e38f"
        top = Pass("top", t, lowest(t), "x", "Most", (f"top = least(most(top, -{most}), {most});",))
        return [top, Pass("sum", t, f"({t})0", "exp_of(x - top)", "Add")], "log_of(sum) + top"
    element, value = _SUMS[name]
    return [Pass("sum", t, f"({t})0", element, "Add")], value.format(t=t, n=n)


def global_pool(kernel: Kernel) -> Sourced | None:
    step, x = kernel.steps[0], kernel.operands[_input(kernel)].type
    t = computed(x.dtype)
    if x.dtype not in REAL:
        return None
    row = _Row.of(kernel, range(2, x.rank))
    if step.op.name == "GlobalLpPool":
        p = step.attrs.int("p")
        passes = [Pass("sum", t, f"({t})0", _to_power("size_of(x)", p, t), "Add")]
        return row.of_rows("GlobalLpPool", passes, _root("sum", p, t), x.dtype, True)
    name = {"GlobalAveragePool": "ReduceMean", "GlobalMaxPool": "ReduceMax"}[step.op.name]
    return row.of_rows(step.op.name, *_reduced(name, t, row.length), x.dtype, True)


def _to_power(text: str, p: int, t: str) -> str:
    return text if p == 1 else f"mul({text}, {text})" if p == 2 else f"power({text}, ({t}){p})"


def _root(text: str, p: int, t: str) -> str:
    return text if p == 1 else f"sqrt_of({text})" if p == 2 else f"power({text}, {literal(1 / p, t)})"


def arg(kernel: Kernel) -> Sourced | None:
    step, x = kernel.steps[0], kernel.operands[_input(kernel)].type
    if x.dtype not in REAL | INTEGER:
        return None
    t, largest = computed(x.dtype), "true" if step.op.name == "ArgMax" else "false"
    first = "false" if step.attrs.int("select_last_index") else "true"
    found = Pass("best", f"Found<{t}>", f"{{({t})0, -1}}", f"Found<{t}>{{x, at_k}}", f"Extreme<{largest}, {first}>")
    row = _Row.of(kernel, (step.attrs.int("axis") % x.rank,))
    return row.of_rows(step.op.name, [found], "best.place", DType.INT64, bool(step.attrs.int("keepdims")))


# ── Softmax, LogSoftmax, Hardmax ─────────────────────────────────────────────────────────────────────────────────


def softmax(kernel: Kernel) -> Sourced | None:
    step, x = kernel.steps[0], kernel.operands[_input(kernel)].type
    if x.dtype not in REAL:
        return None
    t, axis = computed(x.dtype), step.attrs.int("axis") % x.rank
    axes = range(axis, x.rank) if step.attrs.int("flattened") else (axis,)
    log = step.op.name == "LogSoftmax"
    # a quotient for each row, a product for each element
    after = f"const {t} scale = {'log_of(sum)' if log else f'({t})1 / sum'};"
    passes = [
        Pass("top", t, lowest(t), "x", "Most"),
        Pass("sum", t, f"({t})0", "exp_of(x - top)", "Add", (after,)),
    ]
    value = "x - top - scale" if log else "exp_of(x - top) * scale"
    return _Row.of(kernel, axes).of_elements(step.op.name, passes, value, {})


def hardmax(kernel: Kernel) -> Sourced | None:
    step, x = kernel.steps[0], kernel.operands[_input(kernel)].type
    if x.dtype not in REAL:
        return None
    t = computed(x.dtype)
    found = Pass("best", f"Found<{t}>", f"{{({t})0, -1}}", f"Found<{t}>{{x, at_k}}", "Extreme<true, true>")
    row = _Row.of(kernel, (step.attrs.int("axis") % x.rank,))
    return row.of_elements("Hardmax", [found], f"({t})(best.place == at_k)", {})


# ── normalisations ───────────────────────────────────────────────────────────────────────────────────────────────


def _moments(t: str, n: int, after: str) -> list[Pass]:
    """Mean and variance: the second from what is left once the first is taken away, in a pass of its own."""
    return [
        Pass("mean", t, f"({t})0", "x", "Add", (f"mean = mean / ({t}){n};",)),
        Pass("variance", t, f"({t})0", "mul(x - mean, x - mean)", "Add", (f"variance = variance / ({t}){n};", after)),
    ]


def _all_real(kernel: Kernel) -> bool:
    """Whether the anchor reads floats alone; float64 only by itself."""
    dtypes = {kernel.operands[r].type.dtype for r in kernel.steps[0].inputs if r is not None and r >= 0}
    return dtypes <= REAL and (DType.DOUBLE not in dtypes or len(dtypes) == 1)


def layer_normalization(kernel: Kernel) -> Sourced | None:
    x = kernel.operands[_input(kernel)].type
    row = _Row.of(kernel, range(kernel.steps[0].attrs.int("axis") % x.rank, x.rank))
    dims = x.static_shape
    extras = {"scale": row.extra(1, broadcast_strides(kernel.operands[_input(kernel, 1)], dims))}
    if _has(kernel, 2):
        extras["bias"] = row.extra(2, broadcast_strides(kernel.operands[_input(kernel, 2)], dims))
    return _normalized(row, extras)


def group_normalization(kernel: Kernel) -> Sourced | None:
    x = kernel.operands[_input(kernel)].type
    channels = x.static_shape[1] // kernel.steps[0].attrs.int("num_groups")
    return _by_channel(_Row.of(kernel, range(1, x.rank), {1: channels}))


def instance_normalization(kernel: Kernel) -> Sourced | None:
    x = kernel.operands[_input(kernel)].type
    return _by_channel(_Row.of(kernel, range(2, x.rank)))


def _by_channel(row: _Row) -> Sourced | None:
    steps = [int(a == 1) for a in range(row.operand.type.rank)]
    return _normalized(row, {"scale": row.extra(1, steps), "bias": row.extra(2, steps)})


def _normalized(row: _Row, extras: dict[str, Fetch | None]) -> Sourced | None:
    """(x − mean) / √(variance + ε) · scale + bias."""
    if not _all_real(row.kernel):
        return None
    t, step = computed(row.dtype), row.kernel.steps[0]
    after = f"const {t} rate = ({t})1 / sqrt_of(variance + {literal(step.attrs.float('epsilon'), t)});"
    value = "(x - mean) * rate * scale" + (" + bias" if "bias" in extras else "")
    return row.of_elements(step.op.name, _moments(t, row.length, after), value, extras)


def rms_normalization(kernel: Kernel) -> Sourced | None:
    step, x = kernel.steps[0], kernel.operands[_input(kernel)].type
    if not _all_real(kernel):
        return None
    t, row = computed(x.dtype), _Row.of(kernel, range(step.attrs.int("axis") % x.rank, x.rank))
    epsilon = literal(step.attrs.float("epsilon"), t)
    after = f"const {t} rate = ({t})1 / sqrt_of(sum / ({t}){row.length} + {epsilon});"
    scale = row.extra(1, broadcast_strides(kernel.operands[_input(kernel, 1)], x.static_shape))
    passes = [Pass("sum", t, f"({t})0", "mul(x, x)", "Add", (after,))]
    return row.of_elements("RMSNormalization", passes, "x * rate * scale", {"scale": scale})


def mean_variance_normalization(kernel: Kernel) -> Sourced | None:
    step, x = kernel.steps[0], kernel.operands[_input(kernel)].type
    if not _all_real(kernel):
        return None
    t, row = computed(x.dtype), _Row.of(kernel, {a % x.rank for a in step.attrs.ints("axes")})
    after = f"const {t} rate = ({t})1 / (sqrt_of(variance) + {literal(1e-9, t)});"
    return row.of_elements("MeanVarianceNormalization", _moments(t, row.length, after), "(x - mean) * rate", {})


def lp_normalization(kernel: Kernel) -> Sourced | None:
    """Where the norm is 0 all elements are."""
    step, x = kernel.steps[0], kernel.operands[_input(kernel)].type
    p = step.attrs.int("p")
    if x.dtype not in REAL or p not in (1, 2):
        return None
    t, row = computed(x.dtype), _Row.of(kernel, (step.attrs.int("axis") % x.rank,))
    after = f"const {t} norm = {_root('sum', p, t)};"
    passes = [Pass("sum", t, f"({t})0", _to_power("size_of(x)", p, t), "Add", (after,))]
    return row.of_elements("LpNormalization", passes, f"(norm == ({t})0 ? ({t})0 : x / norm)", {})


REDUCERS: dict[str, Callable[[Kernel], Sourced | None]] = {
    **dict.fromkeys((*_SUMS, "ReduceMax", "ReduceMin", "ReduceProd", "ReduceLogSumExp"), reduction),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"), global_pool),
    "ArgMax": arg, "ArgMin": arg, "Softmax": softmax, "LogSoftmax": softmax, "Hardmax": hardmax,
    "LayerNormalization": layer_normalization, "GroupNormalization": group_normalization,
    "InstanceNormalization": instance_normalization, "RMSNormalization": rms_normalization,
    "MeanVarianceNormalization": mean_variance_normalization, "LpNormalization": lp_normalization,
}  # fmt: skip

__all__ = ["REDUCERS", "lowest"]
