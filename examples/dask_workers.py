"""Dask's workers search the pieces of a large graph; any other `concurrent.futures.Executor` plugs in the same way.

Needs the extra `dask` (pip install 'taso[dask]'). `--cluster tcp://host:8786` uses a cluster that is there already,
whose workers have taso installed.
"""

from __future__ import annotations

import sys

import nasrnn
from common import options

import taso

try:
    from distributed import Client, LocalCluster
except ImportError as error:
    Client = None
    missing = str(error)

WORKERS = 2


def build(graph: taso.Graph) -> None:
    nasrnn.build(graph)


def main() -> None:
    parser = options("Optimizes the NAS RNN cell on Dask's workers.")
    parser.add_argument("--cluster", help="address of a scheduler (default: a cluster on this machine)")
    settings = parser.parse_args()
    if Client is None:
        sys.exit(f"error: this example needs Dask: pip install 'taso[dask]' ({missing})")
    graph = taso.new_graph()
    build(graph)
    address = settings.cluster or LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=None)
    with Client(address) as client, client.get_executor() as executor:
        best = taso.optimize(
            graph, settings.alpha, settings.budget, backend=settings.backend, threads=settings.threads,
            time_limit=settings.time_limit, workers=executor,
        )  # fmt: skip
    print(best.report)


if __name__ == "__main__":
    main()
