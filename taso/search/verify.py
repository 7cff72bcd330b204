"""The last word: do two graphs give the same outputs, and which one is faster."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from taso.backends.base import Backend, Executable
from taso.backends.lowering import BF16, FLOAT32, FP16, INT8, TF32
from taso.graph.errors import BackendError, GraphError, InputError, NaNWarning
from taso.graph.evaluate import constant_value, evaluate_graph
from taso.graph.graph import Graph, Value
from taso.graph.types import Dim, DType, TensorType, substitute_shape

Array = NDArray[np.generic]
Feeds = dict[str, Array]


@dataclass(frozen=True)
class Check:
    """Whether two graphs agreed: `passed`, the largest relative error of any output, and why not where not.

    `inconclusive` means that nothing contradicts, but that the trials say nothing either.
    """

    passed: bool
    error: float
    reason: str = ""
    trials: int = 0
    inconclusive: bool = False


TOLERANCE = 1e-4
"""Largest max|a − b| / max|b| per output: float32 keeps 2⁻²⁴ per operation, and sums of some 10⁴ terms taken in another
order, through some hundred layers, stay below it; a misplaced weight or a lost factor does not."""

NARROW = {DType.FLOAT16: 2.0**-7, DType.BFLOAT16: 2.0**-4}
"""The same for graphs that hold narrower floats: eight units in the last place, for weights are rounded when folded."""


UNITS = 2.0**-4
"""The same for products of 8-bit integers: sixteen of the 256 units of a result that is rounded to 8 bits. What lies
between two integers goes to the other one at times, and from layer to layer that adds up."""


def tolerance_of(graph: Graph, precision: str = FLOAT32) -> float:
    """The error that is allowed for a graph: that of the narrowest float type in it, or of its products' precision."""
    held = {v.type.dtype for node in graph.nodes for v in node.outputs}
    if precision == BF16:
        held.add(DType.BFLOAT16)
    elif precision in (FP16, TF32):
        # both keep 11 bits of a factor
        held.add(DType.FLOAT16)
    units = [UNITS] if precision == INT8 else []
    return max([TOLERANCE, *units, *(error for dtype, error in NARROW.items() if dtype in held)])


def random_feeds(graph: Graph, sizes: Mapping[str, Dim], seed: int, positive: bool = False) -> Feeds:
    """Random values for every input: normal for floats (their absolute values if `positive`), small for integers.

    An input of whole numbers that has a default keeps it: it is a shape, or axes, or indices.
    """
    rng = np.random.default_rng(seed)
    defaults = {n: w for n, w in graph.info.input_defaults.items() if w.type.dtype.is_integer}
    return {
        name: defaults[name].array() if name in defaults else _random(v.type, sizes, rng, positive)
        for name, v in zip(graph.input_names, graph.inputs, strict=True)
    }


def _random(t: TensorType, sizes: Mapping[str, Dim], rng: np.random.Generator, positive: bool) -> Array:
    if t.other is not None or t.shape is None:
        raise InputError(f"random values cannot be made for an input of type {t}")
    shape = TensorType(t.dtype, substitute_shape(t.shape, sizes)).static_shape
    if t.dtype.is_float:
        values = rng.standard_normal(shape)
        return (np.abs(values) + 0.1 if positive or t.dtype is DType.FLOAT8E8M0 else values).astype(t.dtype.numpy)
    if t.dtype in (DType.COMPLEX64, DType.COMPLEX128):
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(t.dtype.numpy)
    if t.dtype is DType.BOOL:
        return rng.integers(0, 2, shape).astype(bool)
    if t.dtype is DType.STRING:
        return np.asarray(rng.integers(0, 100, shape).astype(str), dtype=object)
    if t.dtype.is_integer:
        # small: they may be indices
        return rng.integers(0, 2, shape).astype(t.dtype.numpy)
    raise InputError(f"random values cannot be made for an input of type {t}")


def relative_error(result: Array, expected: Array) -> float:
    """max|a − b| / max|b|; infinite where shapes, NaN or infinities differ. Non-numeric values must be equal."""
    if result.shape != expected.shape:
        return float("inf")
    if result.size == 0:
        return 0.0
    if expected.dtype.kind in "iu" and result.dtype.kind in "iu":
        return _integer_error(result, expected)
    if expected.dtype.kind in "OUSb" or result.dtype.kind in "OUSb":
        return 0.0 if bool(np.all(result == expected)) else float("inf")
    a, b = np.asarray(result, np.complex128), np.asarray(expected, np.complex128)
    if bool(np.any(np.isnan(a) != np.isnan(b))):
        return float("inf")
    odd = ~np.isfinite(b)
    if bool(np.any(a[odd & ~np.isnan(b)] != b[odd & ~np.isnan(b)])) or bool(np.any(~np.isfinite(a) & ~odd)):
        return float("inf")
    if bool(np.all(odd)):
        return 0.0
    difference = float(np.max(np.abs(a[~odd] - b[~odd])))
    scale = float(np.max(np.abs(b[~odd])))
    return difference / scale if scale else (0.0 if difference == 0 else float("inf"))


def _integer_error(result: Array, expected: Array) -> float:
    """0 where integers are equal, else infinite; a rare step of one is what rounding a float to an integer may do."""
    differ = result != expected
    if not bool(differ.any()):
        return 0.0
    steps = np.abs(result[differ].astype(object) - expected[differ].astype(object))
    return 0.0 if float(np.mean(differ)) <= 1e-3 and int(steps.max()) <= 1 else float("inf")


def has_nan_weights(graph: Graph) -> bool:
    """Whether any float weight holds a NaN."""
    return any(_has_nan(node.output) for node in graph.nodes if node.op.name == "Weight")


def _has_nan(value: Value) -> bool:
    # weight by weight, and a large one part by part
    if not value.type.dtype.is_float:
        return False
    array = constant_value(value)
    if not any(array.strides):
        return bool(np.isnan(array[(slice(0, 1),) * array.ndim]).any())
    flat = array.reshape(-1)
    return any(bool(np.isnan(flat[start : start + _PART]).any()) for start in range(0, flat.size, _PART))


_PART = 1 << 22
"""Elements that are looked at together."""


def compare(
    original: Graph, best: Graph, sizes: Mapping[str, Dim], seed: int = 0, tolerance: float | None = None,
    run: Callable[[Graph, Feeds], Feeds] | None = None,
) -> Check:  # fmt: skip
    """Runs both graphs in float64 on random inputs and compares every output; symbolic ones at other sizes, too.

    Fails, too, where the trial says nothing: an output that is not finite for finite inputs (unless weights are NaN)
    or that does not depend on the inputs.
    """
    nan = has_nan_weights(original)
    if nan:
        warnings.warn("the model has weights that are NaN; NaN counts as equal to NaN", NaNWarning, stacklevel=3)
    at_sizes = _compare(original, best, sizes, seed, tolerance, run, nan)
    if not at_sizes.passed or not sizes:
        return at_sizes
    others = {name: size + 1 + i for i, (name, size) in enumerate(sorted(sizes.items()))}
    elsewhere = _compare(original, best, others, seed, tolerance, run, nan)
    if elsewhere.passed:
        return Check(True, max(at_sizes.error, elsewhere.error), "", at_sizes.trials + elsewhere.trials)
    # sizes that the original itself does not take, or at which it shows nothing, are no objection
    return at_sizes if elsewhere.inconclusive else elsewhere


def _compare(
    original: Graph, best: Graph, sizes: Mapping[str, Dim], seed: int, tolerance: float | None,
    run: Callable[[Graph, Feeds], Feeds] | None, nan: bool,
) -> Check:  # fmt: skip
    tolerance = tolerance_of(original) if tolerance is None else tolerance
    if [v.type.dtype for _, v in original.outputs] != [v.type.dtype for _, v in best.outputs]:
        return Check(False, float("inf"), "the outputs have other element types than the original's")
    evaluate = run or (lambda graph, feeds: evaluate_graph(graph, feeds, wide=True))
    trials: list[Feeds] = []
    worst, failed = 0.0, 0
    for trial in range(MOST_TRIALS + MOST_FAILED):
        try:
            feeds = random_feeds(original, sizes, seed + trial, positive=trial % 2 == 1)
            expected = evaluate(original, feeds)
        except (GraphError, InputError, BackendError) as error:
            # what the original does not take, such as a Loop's count of 0 for onnx.reference, says nothing
            failed += 1
            if failed > MOST_FAILED:
                reason = f"the comparison could not run: {error}"
                return Check(False, float("inf"), reason, len(trials), inconclusive=True)
            continue
        try:
            result = evaluate(best, feeds)
        except (GraphError, InputError, BackendError) as error:
            return Check(False, float("inf"), f"the comparison could not run: {error}", len(trials))
        for name, value in expected.items():
            error_here = relative_error(np.asarray(result[name]), np.asarray(value))
            worst = max(worst, error_here)
            if error_here > tolerance:
                reason = f"output '{name}' differs: relative error {error_here:.2e} where {tolerance:.0e} is allowed"
                return Check(False, error_here, reason, len(trials) + 1)
        trials.append(expected)
        if len(trials) >= 2 and not blind(original, trials, nan):
            return Check(True, worst, "", len(trials))
        if len(trials) == MOST_TRIALS:
            break
    return Check(False, worst, blind(original, trials, nan), len(trials), inconclusive=True)


MOST_TRIALS = 4
MOST_FAILED = 4
"""Random inputs that the original may refuse before it counts as one that cannot be run."""


def blind(graph: Graph, trials: list[Feeds], nan_weights: bool) -> str:
    """Why trials say nothing about some output, "" where every output was finite and depended on the inputs."""
    live = _depends_on_inputs(graph)
    for name, value in graph.outputs:
        if value not in live:
            continue
        seen = [np.asarray(t[name]) for t in trials]
        numeric = seen[0].dtype.kind in "fc" or value.type.dtype.is_float
        if numeric and not nan_weights and not any(np.isfinite(np.asarray(a, np.complex128)).all() for a in seen):
            return f"output '{name}' is not finite on random inputs, so that equality says nothing"
        if nan_weights and numeric and any(np.isnan(np.asarray(a, np.complex128)).any() for a in seen):
            continue
        if seen[0].size and all(_same(a, seen[0]) for a in seen[1:]):
            return f"output '{name}' does not depend on the inputs, so that equality says nothing"
    return ""


def _same(a: Array, b: Array) -> bool:
    if a.shape != b.shape:
        return False
    equal: NDArray[np.bool_] = np.asarray(a == b)
    if a.dtype.kind in "fc":
        equal = equal | (np.isnan(a) & np.isnan(b))
    return bool(np.all(equal))


def _depends_on_inputs(graph: Graph) -> set[Value]:
    """Values that can change with the contents of the inputs; shapes of static tensors do not."""
    live: set[Value] = set()
    for node in graph.nodes:
        reads = [v for v in node.inputs if v is not None]
        if node.op.name == "Input" or any(v in live for v in reads) and node.op.name not in ("Shape", "Size"):
            live.update(node.outputs)
    return live


@dataclass
class Timing:
    """Seconds of one inference: median of each graph, spread of the ratio, and whether the best is faster for sure.

    `quartiles` are the lower and the upper one of the original's times, then those of the best's; None where they are
    not known any more.
    """

    original: float
    best: float
    low: float
    high: float
    rounds: int = 0
    ratios: list[float] = field(default_factory=list)
    quartiles: tuple[float, float, float, float] | None = None

    @property
    def faster(self) -> bool:
        """Whether even the lower end of the interval of original / best lies above 1."""
        return self.low > 1.0

    @property
    def decided(self) -> bool:
        """Whether the interval leaves 1 on one side."""
        return self.low > 1.0 or self.high < 1.0


def race(
    original: Executable, best: Executable, feeds: Feeds, seconds: float = 2.0, least: int = 12, most: int = 400
) -> Timing:
    """Runs two programs alternately, in both orders, and compares their times pair by pair.

    Stops when the interval of the median ratio (from its order statistics) leaves 1 by far, or the time is up.
    """
    return contest(original, [best], feeds, seconds, least, most)[0]


def contest(
    original: Executable, others: Sequence[Executable], feeds: Feeds, seconds: float = 2.0, least: int = 12,
    most: int = 400,
) -> list[Timing]:  # fmt: skip
    """Runs programs in `turns` and compares each with the original.

    Stops when the intervals of all median ratios (from their order statistics) leave 1 by far, or the time is up.
    """

    def clear(times: Sequence[Sequence[float]]) -> bool:
        rounds = len(times[0])
        return rounds >= 2 * least and rounds % 4 == 0 and all(t.decided for t in _timings(times, _EARLY))

    times = turns([original, *others], feeds, seconds, least, most, clear)
    return _timings(times, _LATE[min(len(others), len(_LATE)) - 1])


def overtime(original: Executable, best: Executable, feeds: Feeds) -> Timing:
    """A longer race of two programs whose contest did not tell which one is faster; nothing is taken over from that.

    It is the second look at the same question, and its interval is that of two.
    """
    times = turns([original, best], feeds, OVERTIME_SECONDS, OVERTIME_ROUNDS, most=1000)
    return _timings(times, _LATE[1])[0]


OVERTIME_SECONDS = 10.0
OVERTIME_ROUNDS = 12
"""Fewest rounds of a longer race; programs of which fewer take all its time say no more in it than in a contest."""
_WARM_SECONDS = 0.05
"""A run that takes longer finds its weights as cold after itself as after others."""
_TURN_SECONDS = 1e-3


def turns(
    programs: Sequence[Executable], feeds: Feeds, seconds: float, least: int, most: int,
    clear: Callable[[Sequence[Sequence[float]]], bool] = lambda times: False,
) -> list[list[float]]:  # fmt: skip
    """Seconds of runs of each program, which take turns, every other round the other way round.

    At its turn a program runs once without being counted, so that it does not find the caches as the one before has
    left them, then as often as a clock needs. Ends when `clear` says that the times do, or when `seconds` are over and
    there are `least` rounds.
    """
    estimates = []
    for program in programs:
        program(feeds)
        estimates.append(_seconds(program, feeds, 1))
    # the same for all, or it would be an advantage
    estimate = max(*estimates, 1e-6)
    warm, runs = len(programs) > 1 and estimate < _WARM_SECONDS, math.ceil(_TURN_SECONDS / estimate)
    times: list[list[float]] = [[] for _ in programs]
    deadline = time.perf_counter() + seconds
    while len(times[0]) < most and (len(times[0]) < least or time.perf_counter() < deadline):
        order = range(len(programs))
        for which in order if len(times[0]) % 2 == 0 else reversed(order):
            if warm:
                programs[which](feeds)
            times[which].append(_seconds(programs[which], feeds, runs))
        if clear(times):
            break
    return times


def _seconds(program: Executable, feeds: Feeds, runs: int) -> float:
    """Seconds of one run, the mean of several in a row."""
    started = time.perf_counter()
    for _ in range(runs):
        program(feeds)
    return (time.perf_counter() - started) / runs


_EARLY = 3.5
"""Standard deviations of the interval by which a contest ends early: it is looked at again and again, and one look in
some thousands may be wrong."""
_LATE = (1.96, 2.24, 2.39, 2.5)
"""Those of the last look, for one, two and more programs beside the original: 95 % for all of them together."""


def _timings(times: Sequence[Sequence[float]], deviations: float) -> list[Timing]:
    """What the times of the original, which are the first, and of others in the same rounds say of those."""
    found = []
    for own in times[1:]:
        ratios = [a / b for a, b in zip(times[0], own, strict=True)]
        low, high = median_interval(ratios, deviations)
        medians = statistics.median(times[0]), statistics.median(own)
        found.append(Timing(*medians, low, high, len(ratios), ratios, (*_quartiles(times[0]), *_quartiles(own))))
    return found


def _quartiles(times: Sequence[float]) -> tuple[float, float]:
    if len(times) < 2:
        return times[0], times[0]
    lower, _, upper = statistics.quantiles(times, n=4, method="inclusive")
    return lower, upper


def median_interval(values: list[float], deviations: float = 1.96) -> tuple[float, float]:
    """An interval of the median from order statistics (normal approximation of the binomial), by default of 95 %."""
    ordered = sorted(values)
    n = len(ordered)
    half = deviations / 2 * n**0.5
    first, last = int(max(n / 2 - half, 0)), int(min(n / 2 + half, n - 1))
    return ordered[first], ordered[last]


def check_program(program: Executable, graph: Graph, feeds: Feeds, precision: str = FLOAT32) -> str:
    """How the outputs of a program compiled for that precision differ from what the graph means, "" where they agree.

    An operator's random choices and what the reference cannot run are no reason to differ.
    """
    try:
        expected = evaluate_graph(graph, feeds, wide=True)
    except (GraphError, InputError):
        return ""
    tolerance = tolerance_of(graph, precision)
    found = program(feeds)
    for name, value in graph.outputs:
        error = _program_error(np.asarray(found[name]), np.asarray(expected[name]), value.type.dtype)
        if error > tolerance:
            return f"output '{name}' of the compiled program is off by {error:.1e}, where {tolerance:.0e} is allowed"
    return ""


def _program_error(found: Array, expected: Array, dtype: DType) -> float:
    if dtype.is_integer or dtype is DType.BOOL:
        # an index or a comparison may tip over where its floating-point argument is rounded
        return 0.0 if found.shape == expected.shape and found.size == 0 else float(np.mean(found != expected) > 0.05)
    return relative_error(found, expected)


def programs(backend: Backend, original: Graph, best: Graph, threads: int | None) -> tuple[Executable, Executable]:
    """Both graphs compiled for one backend."""
    return backend.compile(original, threads), backend.compile(best, threads)
