"""Times a model in rounds: ours optimized, ours unoptimized (same fusion and layouts, search off), ONNX Runtime.

    python benchmarks/compare.py light:resnet50 example:nasrnn --threads 2

Every contestant runs in a process of its own, one short block after the other, so that nobody's spinning threads steal
the cores from whoever comes next. Prints medians, the spread between quartiles, and ratios with a 95 % interval of the
median of the blocks' ratios. Outputs are compared with ONNX Runtime's where it is installed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from models import load

import taso
from taso.search.verify import median_interval, random_feeds, relative_error

Arrays = dict[str, np.ndarray]
Runner = Callable[[Arrays], Arrays]


def ours(path: str, threads: int, optimized: bool) -> tuple[Runner, str]:
    graph = taso.load(path)
    note = ""
    if optimized:
        graph = taso.optimize(graph, threads=threads, progress=False)
        note = graph.report.summary()
    return taso.compile(graph, threads=threads), note


def onnxruntime(path: str, threads: int) -> tuple[Runner, str]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return (lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))), f"ONNX Runtime {ort.__version__}"


def serve(pipe: Connection, who: str, path: str, threads: int) -> None:
    """One contestant: answers "run" with the times of a block, and at first with its outputs and a note."""
    try:
        run, note = onnxruntime(path, threads) if who == "onnxruntime" else ours(path, threads, who == "optimized")
        feeds = random_feeds(taso.load(path), {}, 0)
        pipe.send((run(feeds), note))
    except (ImportError, taso.TasoError) as error:
        pipe.send((None, f"{who} does not run: {error}"))
        return
    while (seconds := pipe.recv()) is not None:
        times: list[float] = []
        run(feeds)
        deadline = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < deadline:
            started = time.perf_counter()
            run(feeds)
            times.append(time.perf_counter() - started)
        pipe.send(times)


def compare(name: str, threads: int, rounds: int, seconds: float) -> None:
    contestants = ["optimized", "unoptimized", "onnxruntime"]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.onnx")
        taso.save(load(name), path)
        context = multiprocessing.get_context("spawn")
        pipes: dict[str, Connection] = {}
        outputs: dict[str, Arrays] = {}
        processes = []
        for who in contestants:
            pipe, other = context.Pipe()
            process = context.Process(target=serve, args=(other, who, path, threads), daemon=True)
            process.start()
            processes.append(process)
            result, note = pipe.recv()
            if who != "unoptimized":
                print(f"--- {name}, {who}: {note}")
            if result is not None:
                pipes[who], outputs[who] = pipe, result
        blocks: dict[str, list[float]] = {who: [] for who in pipes}
        every: dict[str, list[float]] = {who: [] for who in pipes}
        for turn in range(rounds):
            order = list(pipes) if turn % 2 == 0 else list(reversed(pipes))
            for who in order:
                pipes[who].send(seconds)
                times = pipes[who].recv()
                blocks[who].append(statistics.median(times))
                every[who].extend(times)
        for pipe in pipes.values():
            pipe.send(None)
        for process in processes:
            process.join()
    show(name, threads, blocks, every, outputs)


def show(
    name: str, threads: int, blocks: dict[str, list[float]], every: dict[str, list[float]], outputs: dict[str, Arrays]
) -> None:
    print(f"{name}, {threads} threads")
    for who, times in every.items():
        low, middle, high = np.quantile(times, [0.25, 0.5, 0.75]) * 1e3
        print(f"  {who:12} median {middle:9.3f} ms   quartiles {low:.3f} to {high:.3f}   {len(times)} runs")
    for who in blocks:
        if who != "optimized":
            ratios = [a / b for a, b in zip(blocks[who], blocks["optimized"], strict=True)]
            low, high = median_interval(ratios)
            print(f"  {who} / optimized: {statistics.median(ratios):.3f}   (95 % interval {low:.3f} to {high:.3f})")
    if "onnxruntime" in outputs:
        for who in ("optimized", "unoptimized"):
            worst = max(relative_error(outputs[who][k], v) for k, v in outputs["onnxruntime"].items())
            print(f"  largest relative error of {who} against ONNX Runtime: {worst:.1e}")


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
