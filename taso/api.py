"""The public face: TASO's interface, and what this project adds to it."""

from __future__ import annotations

import copy
import logging
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from enum import Enum
from typing import TypeVar, Union

import numpy as np
import onnx
from numpy.typing import NDArray

from taso import doors
from taso.backends.base import Backend, Executable
from taso.backends.costs import CostDatabase
from taso.backends.lowering import Lowering
from taso.backends.onednn.backend import OneDNNBackend
from taso.backends.plans import take_plans, with_plans, with_usual_algorithms
from taso.backends.select import get_backend
from taso.graph import graph as graphs
from taso.graph import onnx_export, onnx_import
from taso.graph.builder import GraphBuilder
from taso.graph.drawing import framed, graph_page, svg
from taso.graph.errors import BackendError, CallbackWarning, GraphError, ModelError, SearchError
from taso.graph.graph import Value
from taso.graph.picture import picture
from taso.machine import this_machine
from taso.rules import collection
from taso.rules.collection import RuleSource
from taso.rules.pattern import Exactness, Rule, Status
from taso.rules.writing import rule
from taso.search import optimize as optimizing
from taso.search.backtracking import Limits
from taso.search.checkpoint import Checkpoint
from taso.search.frugal import Aim
from taso.search.optimize import Settings, measuring_sizes, usable
from taso.search.result import Report
from taso.search.strategies import check_name
from taso.search.verify import random_feeds
from taso.search.watching import Callback, Progress, Watch

log = logging.getLogger(__name__)

Array = NDArray[np.generic]
Tensor = Value
Source = Union[str, "os.PathLike[str]", bytes, onnx.ModelProto]
Loadable = object
"""A `Source`, or a model of PyTorch or TensorFlow, whose types are not known here."""
GraphLike = Union["Graph", Source]


_FRAME_HEIGHT = 520


class Graph(GraphBuilder):
    """A tensor graph: built by TASO's methods, or loaded from ONNX; `optimize` gives a faster equal one."""

    def __init__(self) -> None:
        super().__init__()
        self._report: Report | None = None

    @property
    def report(self) -> Report:
        """What `optimize` did to reach this graph; raises `GraphError` for a graph that it did not make."""
        if self._report is None:
            raise GraphError("this graph has no report: it did not come from taso.optimize")
        return self._report

    def to_svg(self) -> str:
        """A drawing of the graph, an SVG: a box for each operator, its colour the family that it belongs to."""
        return svg(picture(self))

    def to_html(self, title: str = "graph") -> str:
        """A page in which the graph can be moved, zoomed and searched; it needs nothing else."""
        return graph_page(picture(self), title)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return framed(self.to_html(repr(self).strip("<>")), _FRAME_HEIGHT)

    def optimize(self, alpha: float = 1.0, budget: int = 1000, print_subst: bool = False) -> Graph:
        """`taso.optimize` of this graph, which stays as it is."""
        return optimize(self, alpha, budget, print_subst)

    def cost(self, backend: str | Backend = "auto", threads: int | None = None, precision: str = "float32") -> float:
        """Milliseconds for one inference as the sum of measured kernel costs (by a formula where nothing measures)."""
        return optimizing.cost(self, _settings(self, backend, threads, (), {}, precision)) * 1e3

    def run_time(
        self, backend: str | Backend = "auto", threads: int | None = None, seconds: float = 1.0,
        precision: str = "float32",
    ) -> float:  # fmt: skip
        """Milliseconds for one inference, measured: the median over repeated runs for about `seconds`.

        Raises `BackendError` where the graph cannot be run.
        """
        program = compile(self, backend, threads, precision)
        feeds = random_feeds(self, measuring_sizes(self, {}), 0)
        program(feeds)
        times: list[float] = []
        deadline = time.perf_counter() + seconds
        while len(times) < 5 or time.perf_counter() < deadline:
            started = time.perf_counter()
            program(feeds)
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e3


def new_graph(print_measurements: bool = False) -> Graph:
    """An empty graph; with `print_measurements` every cost that is measured for it is printed."""
    graph = Graph()
    if print_measurements:
        graph.print_measurements()
    return graph


def load(path_or_model: Loadable, *, example_inputs: object = None, dynamic_shapes: object = None) -> Graph:
    """A graph from an ONNX file, the bytes of one, or an `onnx.ModelProto`; or from a model of another framework.

    A `torch.nn.Module` or exported program goes through `torch.onnx`, on `example_inputs`: a tensor, a sequence of
    tensors or a mapping from names; `dynamic_shapes` is that of `torch.export`. The folder of a TensorFlow SavedModel
    and a Keras file (`.keras`, `.h5`) go through tf2onnx. Raises `ModelError` (`InputNotFoundError` where a node reads
    what nothing makes) naming what is wrong, or what has to be installed.
    """
    if doors.is_pytorch(path_or_model) or doors.is_tensorflow(path_or_model):
        with doors.onnx_file(path_or_model, example_inputs, dynamic_shapes) as path:
            return onnx_import.load(path, graph_class=Graph)
    if not isinstance(path_or_model, (str, bytes, os.PathLike, onnx.ModelProto)):
        kind = type(path_or_model).__name__
        raise ModelError(f"expected a path, bytes, an onnx.ModelProto or a PyTorch module, not {kind}")
    if example_inputs is not None:
        raise ModelError("example_inputs is for PyTorch models: an ONNX model says itself what its inputs are")
    graph = onnx_import.load(path_or_model, graph_class=Graph)
    take_plans(graph)
    return graph


def load_onnx(filename: str | os.PathLike[str]) -> Graph:
    """A graph from an ONNX file (TASO's name for `load`)."""
    return load(filename)


def export_onnx(
    graph: Graph, *, opset: int | None = None, fold_limit: int = onnx_export.SLACK
) -> onnx.ModelProto:
    """The graph as ONNX, in the opset that it came in or the given one. Raises `ModelError` where ONNX cannot say it.

    An operator on weights that a rewrite made is written as its result where that adds at most `fold_limit` bytes.
    """
    return onnx_export.export(with_plans(_graph(graph)), opset=opset, fold_limit=fold_limit)


def save(
    graph: Graph, path: str | os.PathLike[str], *, opset: int | None = None, external_data: bool | None = None,
    fold_limit: int = onnx_export.SLACK,
) -> None:  # fmt: skip
    """Writes the graph as an ONNX file, which appears whole or not at all.

    Weights go to a file beside it, `path`.data, above 2 GB or where `external_data` says so. `opset` and `fold_limit`
    are those of `export_onnx`.
    """
    onnx_export.save(with_plans(_graph(graph)), path, opset=opset, external_data=external_data, fold_limit=fold_limit)


def compile(
    graph: GraphLike, backend: str | Backend = "auto", threads: int | None = None, precision: str = "float32"
) -> Executable:
    """A program that runs the graph: `program({"input": array})` gives `{"output": array}`.

    With `precision="bf16"` the oneDNN backend rounds the factors of large products (convolutions, matrix products) to
    bfloat16, which has 8 bits of precision, and adds them in float32: faster on processors that have the instructions,
    and less exact. Values between products, pools, norms and activations are stored in bfloat16, too. Finite data
    beyond bfloat16's range (3.39e38) becomes infinite. Products of two tensors neither of which is a constant, and that
    are not stored so, are rounded only where the processor multiplies matrices (AMX). The cuDNN backend has "tf32" and
    "fp16" beside, whose factors have 11 bits; float16 ends at 65504. By default products on GPUs are in float32, not in
    TF32. Programs there take arrays that lie on the GPU, too, and then give such.

    With `precision="int8"` it multiplies integers in models that are quantised already, by QuantizeLinear and
    DequantizeLinear around their operators or by operators of integers. What is rounded to 8 bits may come out one unit
    higher or lower where it lies between two. A model without such products is an error.

    Raises `BackendError` where the backend cannot run it; calling it with other names, element types or shapes than the
    graph's inputs raises `InputError`.
    """
    return get_backend(backend, threads, precision).compile(_graph(graph), threads)


def optimize(
    graph: GraphLike,
    alpha: float = 1.0,
    budget: int = 1000,
    print_subst: bool = False,
    *,
    search: str = "auto",
    backend: str | Backend = "auto",
    threads: int | None = None,
    precision: str = "float32",
    rules: RuleSource | None = None,
    time_limit: float | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    freeze: bool = False,
    rule_statuses: Sequence[str] = ("proved",),
    exactness: Sequence[str] = ("exact", "reassociates"),
    verify: bool = True,
    never_slower: bool = True,
    seed: int = 0,
    progress: bool | None = None,
    explain: str | Sequence[str] = (),
    checkpoint: str | os.PathLike[str] | None = None,
    search_memory_limit: int | None = None,
    objective: str = "time",
    memory_limit: int | None = None,
    pieces: bool = True,
    workers: int | Executor | None = None,
    callback: Callback | None = None,
) -> Graph:
    """The fastest graph found that computes what `graph` computes; `best.report` says how it came about.

    `alpha` and `budget` are TASO's: a candidate is kept while its cost is below `alpha` times the best, and
    `budget` bounds the graphs taken off the queue. `rules` (below) and `exactness` ("exact", "reassociates",
    "approximates") say which rewrites to take; with "reassociates" among them kernels may use such algorithms as
    libraries for float32 use by themselves (Winograd's for convolutions). `time_limit` bounds measuring and search
    together, in seconds; the final comparison comes on top. `input_shapes` gives the shapes to measure at where they
    are symbolic; with `freeze` the result is for these shapes alone, and its inputs, outputs and value infos say so.
    `verify` compares outputs with the original's on random inputs; `never_slower` ends with a measurement of both whole
    graphs and gives the original back unless the best is faster. `graph` itself is never changed.

    `search` is "backtracking" (TASO's, as published), "mcts" (Monte Carlo tree search, which draws from `seed`),
    "saturation" (all rewrites at once in an e-graph, from which the cheapest graph is taken) or "auto" (a backtracking
    that ends where nothing on the queue is below `alpha` times the best, saturation, and backtracking from what that
    found). `alpha` is for backtracking alone; `budget` bounds the graphs expanded by each search of "auto", and the
    iterations of saturation.

    `precision` is what the result is to be computed in, as in `taso.compile`, which has to be told the same: "bf16" is
    faster where the processor has the instructions, and less exact; so are "tf32" and "fp16" on GPUs; "int8" is for
    models that are quantised already. Costs are then measured so, and the graph is planned for it.

    The best few graphs are planned exactly in the end: fusions, layouts and algorithms are chosen together by measured
    costs. Then they run side by side with the original, and the measurement decides. The graph that comes back knows
    its plan, which `taso.compile` follows on the same backend; `taso.save` and `export_onnx` write it down as metadata
    of the nodes, which other runtimes pass over, and `taso.load` reads it.

    `rules` are the packaged ones, or one of these, or a list of these, read from left to right:

    - the path of a rule file, TASO's or ours, or of a text ("….rules");
    - an equation, `"Relu(Relu(x)) => Relu(x)"`, with its condition and exactness behind it if need be
      (`"… => … where rank(x) == 2 exact: exact"`; the language is that of `taso.rules.text`), or a `taso.rule`;
    - `"-NAME"`, which takes away the rule of that name, or `"+NAME"`, which adds a packaged one; * stands for any
      letters. Where a list begins with a name the packaged rules come first: `["-merge-*"]` is the library without
      some of its rules, `["+*", "my.rules"]` the library and a file.
    - `"@NAME"`, rules of an installed package, which announces them as an entry point of the group "taso.rules": a
      rule, an equation, a path, a list of these, or a function that returns such. What cannot be used is passed over,
      with a `PluginWarning`;
    - a mapping of names to True or False (not in a list) switches packaged rules on or off.

    What is not in the library is judged before it is used, as `taso rules verify` does. Of a file the rules that are
    not proved are passed over, with a warning; for an equation that is a `RuleError`, which tells the counterexample.
    `rule_statuses` may admit "bounded" and "tested" beside "proved".

    `explain` has the report tell why a rule did not apply: a rule's name (* stands for any letters) or equation, the
    name of a node or of a value, or a list of these. For each place where the rule's shape fits, on the original graph
    and on the best one, it says what stands against it or what it would cost (`Report.explanations`).

    `checkpoint` names a file that keeps the state of the search, written every half minute and at the end. Where it is
    there already, made of the same graph, rules, costs and `alpha`, the search goes on from it and comes to what it
    would have come to at once; `budget` counts what was expanded before, `time_limit` does not. A file that is damaged
    or of another search is moved aside, with a warning. `search_memory_limit` is by how many bytes this process may
    grow while it searches, weights not counted that are there before. Time, memory or Ctrl-C end a search early: the
    best so far comes back, and the report says what ended it.

    `memory_limit` is in bytes what the values between kernels may take together, scratch memory included (what the
    report calls `peak_after`): the fastest graph found that keeps to it comes back. With `objective="memory"` it is the
    graph that needs the least, of those that need as much the fastest. Both trade time for memory, so that a graph may
    come back that is slower than the original, but none that needs more memory, or more than is allowed. Where the
    original keeps to the limit, `never_slower` holds as always. A limit that no graph found keeps to gives the graph
    that needs the least, and the report says by how much it is missed.

    With `pieces` a large graph is cut at narrow places first. Each piece is searched once however often it is repeated,
    with its neighbours after that, and what is found is applied wherever it holds; the search of the whole graph starts
    from there. `workers` searches so many pieces at once, each in a process of its own, or on any
    `concurrent.futures.Executor`; without a time limit the result does not depend on it. A checkpoint keeps whole
    graphs alone, and with one there are no pieces.

    `callback` is called with a `taso.Progress` at the beginning of each phase, for each better graph, and otherwise
    some ten times a second while a search runs (after each piece where a large graph is cut). Where it returns True the
    search ends and the best so far comes back.
    What it raises is logged with its place and ends the calls, not the search: the graph comes back, the report says
    what happened, and a `CallbackWarning` tells it (as an error, where `warnings` has been told so, it carries the
    graph as `error.graph`). KeyboardInterrupt in it is Ctrl-C.

    What happens on the way is told to the loggers below `logging.getLogger("taso")`, and warnings are `TasoWarning`s.

    With `TASO_CHECK_EVERY_STEP=1` in the environment all that a search follows from step to step is recomputed after
    each and compared, which is slow and for tests: a difference is a `SearchError`.

    Raises `SearchError` for settings that make no sense, `RuleError` for rules that cannot be read or used,
    `ModelError` for a model that cannot be read.
    """
    given = _graph(graph)
    limits, aim = Limits(alpha, budget, time_limit, memory=search_memory_limit), Aim(objective, memory_limit)
    check_name(search)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise SearchError(f"the seed is a whole number of at least 0, not {seed!r}")
    if freeze:
        given = _same_class(optimizing.frozen(given, input_shapes or {}))
    levels = _chosen("exactness", exactness, Exactness)
    statuses = _chosen("rule_statuses", rule_statuses, collection.ADMISSIBLE)
    known = collection.library() if rules is None else collection.admitted(rules, statuses)
    settings = _settings(given, backend, threads, known, input_shapes or {}, precision)
    settings.rules = _usable(known, levels, statuses, settings.backend.lowering, rules)
    settings.limits, settings.aim, settings.verify, settings.never_slower = limits, aim, verify, never_slower
    settings.seed, settings.progress, settings.search = seed, progress, search
    settings.watch = Watch(_checked_callback(callback), budget)
    settings.algorithms = Exactness.REASSOCIATES in levels
    if not settings.algorithms:
        given = _same_class(with_usual_algorithms(given))
    settings.explain = [explain] if isinstance(explain, str) else explain
    settings.pieces, settings.workers = pieces, _checked_workers(workers)
    settings.checkpoint = None if checkpoint is None else Checkpoint(checkpoint).path
    settings.check_every_step = os.environ.get("TASO_CHECK_EVERY_STEP", "") not in ("", "0")
    best, report = optimizing.optimize(given, settings)
    best = _same_class(copy.copy(best) if best is given else best)
    report.machine = this_machine()
    best._report = report
    if print_subst:
        for rewrite in report.rewrites:
            print(rewrite.rule)
    _complain(settings.watch, best)
    return best


def _complain(watch: Watch, best: Graph) -> None:
    """Warns where a callback failed; a caller who made errors of warnings gets the result with the error."""
    try:
        watch.complain()
    except CallbackWarning as error:
        error.graph = best
        raise


def _checked_callback(callback: object) -> Callback | None:
    if callback is None or callable(callback):
        return callback
    raise SearchError(f"callback is a function that takes a taso.Progress, not {callback!r}")


def _checked_workers(workers: object) -> int | Executor | None:
    if workers is None or isinstance(workers, Executor):
        return workers
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= _MOST_WORKERS:
        raise SearchError(
            f"workers is a whole number from 1 to {_MOST_WORKERS}, or a concurrent.futures.Executor, not {workers!r}"
        )
    return workers


_MOST_WORKERS = 256


def _same_class(graph: graphs.Graph) -> Graph:
    if not isinstance(graph, Graph):
        raise GraphError("a public graph became one of another kind")
    return graph


def _settings(
    graph: Graph, backend: str | Backend, threads: int | None, rules: Sequence[Rule],
    input_shapes: Mapping[str, Sequence[int]], precision: str = "float32",
) -> Settings:  # fmt: skip
    chosen = get_backend(backend, threads, precision)
    if isinstance(chosen, OneDNNBackend):
        chosen.check(graph)
    return Settings(
        chosen, rules, _database(), threads=threads,
        sizes={k: v for k, v in measuring_sizes(graph, input_shapes).items() if isinstance(v, int)},
        print_measurements=graph.prints_measurements,
    )  # fmt: skip


def _usable(
    rules: Sequence[Rule], levels: Sequence[Exactness], statuses: Sequence[Status], lowering: Lowering,
    source: RuleSource | None,
) -> list[Rule]:  # fmt: skip
    """Of `rules`, which came of `source`, those that a search may take for a backend.

    Packaged rules that spell an algorithm are for backends without algorithms of their own, unless they are asked for
    by name; there they are allowed where kernels may compute by such algorithms.
    """
    spelled = collection.spelled_algorithms(rules, source)
    taken = usable([r for r in rules if r not in spelled], levels, statuses)
    if not lowering.takes_algorithms:
        return taken
    allowed = [*levels, Exactness.APPROXIMATES] if Exactness.REASSOCIATES in levels else levels
    return taken + usable(spelled, allowed, statuses)


Member = TypeVar("Member", bound=Enum)


def _chosen(setting: str, names: Sequence[str], members: Iterable[Member]) -> list[Member]:
    """The members that a setting names, which may also be one name alone."""
    known = {m.value: m for m in members}
    names = [names] if isinstance(names, str) else names
    for name in names:
        if name not in known:
            raise SearchError(f"{setting} is a list of {', '.join(known)}; '{name}' is none of these")
    return [known[name] for name in names]


_databases: dict[str, CostDatabase] = {}


def _database() -> CostDatabase:
    from_environment = os.environ.get("TASO_CACHE_DIR", "")
    if from_environment not in _databases:
        _databases[from_environment] = CostDatabase()
    return _databases[from_environment]


def _graph(graph: GraphLike) -> Graph:
    if isinstance(graph, Graph):
        return graph
    if isinstance(graph, (str, bytes, os.PathLike, onnx.ModelProto)):
        return load(graph)
    raise ModelError(f"expected a taso.Graph, a path, bytes or an onnx.ModelProto, not {type(graph).__name__}")


__all__ = [
    "BackendError", "Graph", "Progress", "Report", "Tensor", "compile", "export_onnx", "load", "load_onnx", "new_graph",
    "optimize", "rule", "save",
]  # fmt: skip
