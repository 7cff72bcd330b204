"""What all examples share: their options, the call of the optimizer, and what is printed of its outcome."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import taso


def options(description: str) -> argparse.ArgumentParser:
    """The command line of an example."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--budget", type=int, default=1000, help="graphs taken off the queue (default: %(default)s)")
    parser.add_argument("--alpha", type=float, default=1.0, help="keep candidates below alpha × the best cost")
    parser.add_argument("--backend", default="auto", help="where to run and to measure (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="threads of the backend (default: its own choice)")
    parser.add_argument("--time-limit", type=float, help="stop the search after so many seconds")
    return parser


def optimized(graph: taso.Graph, settings: argparse.Namespace) -> taso.Graph:
    """The best graph found, after a report of costs, measured times and substitutions."""
    best = taso.optimize(
        graph, alpha=settings.alpha, budget=settings.budget, backend=settings.backend, threads=settings.threads,
        time_limit=settings.time_limit,
    )  # fmt: skip
    print(best.report.summary())
    return best


def run(build: Callable[[taso.Graph], None], description: str) -> None:
    """Optimizes the graph that `build` builds, as the command line says."""
    settings = options(description).parse_args()
    graph = taso.new_graph()
    build(graph)
    try:
        optimized(graph, settings)
    except taso.TasoError as error:
        sys.exit(f"error: {error}")
