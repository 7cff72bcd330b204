"""What a program of many tiny kernels takes per kernel: more than what the executor itself adds to each.

    python benchmarks/overhead.py --kernels 500

compiles a chain of matrix products that compute next to nothing, each a launch of its own, and prints microseconds per
kernel of whole runs on one thread: the executor's share, the call into the library, and oneDNN's own work together.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np

import taso


def chain(kernels: int, size: int) -> taso.Graph:
    """Products of a small matrix with a small matrix: none joins the one before."""
    graph = taso.new_graph()
    value = graph.new_input(dims=(size, size))
    weight = graph.new_weight(dims=(size, size), data=np.eye(size, dtype=np.float32))
    for _ in range(kernels):
        value = graph.matmul(value, weight)
    graph.set_outputs([("y", value)])
    return graph


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=500, help="(default: %(default)s)")
    parser.add_argument("--size", type=int, default=4, help="rows and columns of a matrix (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=1000, help="(default: %(default)s)")
    told = parser.parse_args(arguments)
    graph = chain(told.kernels, told.size)
    program = taso.compile(graph, "onednn", 1)
    feeds = {graph.input_names[0]: np.eye(told.size, dtype=np.float32)}
    times = []
    for _ in range(told.runs):
        started = time.perf_counter()
        program(feeds)
        times.append((time.perf_counter() - started) / program.kernels * 1e6)
    low, middle, high = statistics.quantiles(times, n=4)
    print(f"{program.kernels} kernels: {middle:.2f} µs each (quartiles {low:.2f} to {high:.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
