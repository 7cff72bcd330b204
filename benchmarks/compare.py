"""Times a model in rounds: ours optimized, ours unoptimized (same fusion and layouts, search off), ONNX Runtime.

    python benchmarks/compare.py light:resnet50 example:nasrnn --threads 2

Every contestant runs in a process of its own, in short blocks that take turns (`taso.cli_contest`; `taso bench` does
the same for one file, on more runtimes). Prints medians, the spread between quartiles, and ratios with a 95 % interval
of the median of the blocks' ratios. Outputs are compared with ONNX Runtime's where it is installed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from models import load

import taso
from taso.cli_contest import Contestant, Result, contest
from taso.search.optimize import measuring_sizes
from taso.search.verify import random_feeds


def compare(name: str, threads: int, rounds: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        original, optimized = (str(Path(folder) / f"{which}.onnx") for which in ("original", "optimized"))
        taso.save(load(name), original)
        graph = taso.load(original)
        best = taso.optimize(graph, threads=threads, progress=False)
        taso.save(best, optimized)
        print(f"--- {name}: {best.report.summary()}")
        contestants = [
            Contestant("auto", optimized, "optimized"),
            Contestant("auto", original, "unoptimized"),
            Contestant("onnxruntime", original, "onnxruntime"),
        ]
        feeds = random_feeds(graph, measuring_sizes(graph, {}), 0)
        results = contest(contestants, feeds, threads, rounds, seconds)
    show(name, threads, results)


def show(name: str, threads: int, results: list[Result]) -> None:
    print(f"{name}, {threads} threads")
    for result in results:
        who = result.contestant.label
        if result.failure:
            print(f"  {who} does not run: {result.failure}")
            continue
        low, high = (q * 1e3 for q in result.quartiles)
        middle, runs = result.median * 1e3, len(result.times)
        spread = f"quartiles {low:.3f} to {high:.3f}   {runs} runs   {result.version}"
        print(f"  {who:12} median {middle:9.3f} ms   {spread}")
    optimized, *others = results
    if optimized.failure:
        return
    for other in others:
        if not other.failure:
            ratio, low, high = optimized.faster_than(other)
            print(f"  {other.contestant.label} / optimized: {ratio:.3f}   (95 % interval {low:.3f} to {high:.3f})")
    runtime = results[-1]
    for result in results[:-1]:
        if not (result.failure or runtime.failure):
            worst = result.error_against(runtime)
            print(f"  largest relative error of {result.contestant.label} against ONNX Runtime: {worst:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="light:NAME, example:NAME or the path of an ONNX file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20, help="blocks for each contestant")
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a block")
    settings = parser.parse_args()
    for name in settings.models:
        compare(name, settings.threads, settings.rounds, settings.seconds)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
