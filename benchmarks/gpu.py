"""The benchmark on an NVIDIA GPU: TASO's five models and the rest of the suite on taso and on others, in one run.

    python benchmarks/gpu.py --json gpu.json
    python benchmarks/gpu.py bert_base --batch 1 16 --on taso-cuda,torch-cuda-compile
    python benchmarks/gpu.py --groups               the experiment of TASO's paper on grouped convolutions

Inputs and outputs stay on the GPU. Beside the ratios stand the figures that TASO's authors published for their GPU of
2019 (Jia et al., SOSP 2019): other hardware, other libraries, other years. docs/gpu.md says what has been run so far.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import onnx
import roofline
import suite
import zoo
from results import Case, Run

import taso
from taso.backends.base import Backend
from taso.backends.lowering import Kernel, lower
from taso.backends.select import get_backend
from taso.cli_common import table
from taso.graph.errors import BackendError

FIVE = ("resnet50", "resnext50", "nasnet_a", "nasrnn", "bert_base")
"""The models of TASO's paper."""
PUBLISHED = {"resnext50": 3.1, "bert_base": 1.5, "nasnet_a": 1.3}
"""Times faster than the best of TensorFlow, XLA and TensorRT that TASO's authors say their graphs ran."""
CHANNELS, SIDE, GROUPS = 512, 28, 32
"""Of the grouped convolution in TASO's experiment."""
OURS = "taso-cuda"


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────


def measured(name: str, batch: int, settings: suite.Settings) -> Case:
    """Builds, optimizes for the GPU and times a model."""
    with tempfile.TemporaryDirectory(prefix="taso_gpu_") as folder:
        paths = {"original": str(Path(folder) / "original.onnx")}
        size = zoo.ZOO[name].small if settings.small else None
        onnx.save(zoo.build(name, batch, settings.seed, size), paths["original"])
        feeds = suite.random_feeds(taso.load(paths["original"]), settings.seed)
        case = Case(name, batch, 1, roofline.Needs(0, 0, 0, 0), roofline.Peaks(0, 0))
        for file in dict.fromkeys(suite.VARIANTS[on].file for on in settings.on):
            if file in suite.MADE:
                suite.say(f"{name}: optimizing ({file})")
                case.made[file] = suite.apart(suite.optimized, paths["original"], file, None, settings)
                paths[file] = case.made[file].path
        suite.say(f"{name}: evaluating in float64")
        exact = suite.apart(suite.evaluated, paths["original"], feeds)
        suite.contest(case, paths, feeds, exact, settings)
    return case


def shown(case: Case) -> str:
    """A table of one model: times, and how much longer than ours others take."""
    rows = []
    for name, result in case.results.items():
        if not result.ran:
            rows.append((name, "", "", "", "", result.failure))
            continue
        low, high = result.quartiles
        ratio = case.ratio(name, OURS)
        against = "" if ratio is None or name == OURS else f"{ratio[0]:.3f} ({ratio[1]:.3f} to {ratio[2]:.3f})"
        quartiles = f"{low * 1e3:.3f} to {high * 1e3:.3f}"
        rows.append((name, f"{result.median * 1e3:.3f}", quartiles, against, f"{result.error:.1e}", result.version))
    heads = ("contestant", "median ms", "quartiles", "time / taso (95 %)", "error", "version")
    made = [f"  {file}: {m.seconds:.1f} s, {m.rewrites} rewrites, {m.decision}" for file, m in case.made.items()]
    published = PUBLISHED.get(case.model)
    seed = [] if published is None else [f"  TASO's paper: {published} times faster than TensorFlow, XLA and TensorRT"]
    return "\n".join([f"{case.model}, batch {case.batch}", *made, table(heads, rows, "<>>>><"), *seed]) + "\n"


# ── grouped convolutions ─────────────────────────────────────────────────────────────────────────────────────────


def grouped(groups: int) -> taso.Graph:
    """A convolution of so many groups, with a 3×3 window, between as many channels as in TASO's experiment."""
    graph = taso.new_graph()
    x = graph.new_input(dims=(1, CHANNELS, SIDE, SIDE))
    weight = graph.new_weight(dims=(CHANNELS, CHANNELS // groups, 3, 3))
    graph.conv2d(input=x, weight=weight, strides=(1, 1), padding="SAME")
    return graph


def groups_of(graph: taso.Graph) -> int:
    """The number of groups of the one convolution in a graph; 0 where there is another number of convolutions."""
    found = [node.attrs.int("group") for node in graph.operators if node.op.name == "Conv"]
    return found[0] if len(found) == 1 else 0


def merging(backend: Backend, budget: int) -> tuple[list[tuple[int, float, float]], int]:
    """For each merge factor the seconds of its kernel and of its program; and the factor that the search comes to."""
    rows = []
    for factor in (1, 2, 4, 8, 16, 32):
        graph = grouped(GROUPS // factor)
        rows.append((factor, backend.measure(_kernel(graph, backend)), graph.run_time(backend) / 1e3))
    best = taso.optimize(grouped(GROUPS), backend=backend, budget=budget, never_slower=False, progress=False)
    left = groups_of(best)
    return rows, GROUPS // left if left else 0


def _kernel(graph: taso.Graph, backend: Backend) -> Kernel:
    (job,) = lower(graph, backend.lowering).jobs
    return job.kernel


def experiment(backend: Backend, budget: int) -> int:
    """Prints the experiment; 1 where the search does not come to the best factor that was measured."""
    rows, found = merging(backend, budget)
    heads = ("merge factor", "groups", "kernel ms", "program ms")
    shown_rows = [(str(f), str(GROUPS // f), f"{k * 1e3:.4f}", f"{p * 1e3:.4f}") for f, k, p in rows]
    print(f"{CHANNELS} channels, {SIDE}×{SIDE}, {GROUPS} groups on {backend.device_key()}")
    print(table(heads, shown_rows, ">>>>"))
    best = min(rows, key=lambda row: row[1])[0]
    print(f"fastest kernel: merge factor {best}; the search comes to {found or 'none'}")
    return int(found != best)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; 1 where a contestant failed, where there is no GPU, or where the experiment fails."""
    parser = suite.options()
    parser.description, parser.usage = __doc__, None
    parser.set_defaults(on=list(suite.ON_GPU))
    parser.add_argument("--groups", action="store_true", help="the experiment on grouped convolutions alone")
    parser.add_argument("--backend", default="cudnn", help="where the experiment runs (default: %(default)s)")
    told = parser.parse_args(arguments)
    try:
        backend = get_backend(told.backend)
    except BackendError as reason:
        print(f"nothing can be measured: {reason}", file=sys.stderr)
        return 1
    if told.groups:
        return experiment(backend, told.budget)
    on, left_out = suite.contestants(told.on)
    settings = suite.settings_of(told, on)
    run = Run(backend.device_key(), asdict(settings), left_out)
    for batch in told.batch:
        for name in told.models or (*FIVE, *(n for n in zoo.ZOO if n not in FIVE)):
            run.cases.append(measured(name, batch, settings))
            print(shown(run.cases[-1]), flush=True)
            if told.json is not None:
                run.write(told.json)
    for name, reason in left_out.items():
        print(f"{name} is left out: {reason}")
    return max(int(any(r.failure for c in run.cases for r in c.results.values())), experiment(backend, told.budget))


if __name__ == "__main__":
    sys.exit(main())
