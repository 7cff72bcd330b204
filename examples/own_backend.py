"""A backend of one's own: costs of a machine that is not here, by a formula, and NumPy to run.

Installed packages announce one as an entry point, `[project.entry-points."taso.backends"]`, and it is known by its
name; an object, as here, needs no package.
"""

from __future__ import annotations

from common import options

import taso
from taso.backends.lowering import Kernel, flops, is_view
from taso.backends.reference import ReferenceBackend

OPERATIONS, BYTES, LAUNCH = 2e12, 5e10, 2e-5
"""What the machine does in a second, moves in a second, and takes to start a kernel: an accelerator, say."""


class Accelerator(ReferenceBackend):
    """Costs of a machine whose kernels are quick and slow to start, so that few and large ones pay."""

    name = "accelerator"

    def device_key(self) -> str:
        """What costs are kept under: all that the formula depends on."""
        return f"accelerator {OPERATIONS:g} {BYTES:g} {LAUNCH:g}"

    def measure(self, kernel: Kernel) -> float:
        """Seconds: starting, and the longer of computing and moving."""
        if is_view(kernel):
            return 0.0
        moved = sum(o.type.nbytes for o in (*kernel.operands, *kernel.results))
        return LAUNCH + max(flops(kernel) / OPERATIONS, moved / BYTES)


def build(graph: taso.Graph) -> None:
    x = graph.new_input(dims=(16, 256))
    for _ in range(4):
        graph.relu(graph.matmul(x, graph.new_weight(dims=(256, 256))))


def main() -> None:
    settings = options("Optimizes four products for a machine that is described by three numbers.").parse_args()
    graph = taso.new_graph()
    build(graph)
    best = taso.optimize(
        graph, settings.alpha, settings.budget, backend=Accelerator(), time_limit=settings.time_limit
    )
    print(best.report)


if __name__ == "__main__":
    main()
