"""Steps of a recurrent cell in the space of ENAS: nodes that choose a predecessor and a function (Pham et al. 2018).

Each node is a highway c · f(z) + (1 − c) · z of one before it, with a product for c and one for f; the state is the
mean of the nodes that no other reads. Every step has the same weights.
"""

from __future__ import annotations

from common import run

import taso

STEPS = 3
HIDDEN = 512
NODES = ((0, "relu"), (0, "tanh"), (1, "sigmoid"), (1, "relu"), (2, "tanh"), (4, "identity"), (3, "relu"))
"""For each node after the first its predecessor and its function."""

Weights = list[tuple[taso.Tensor, taso.Tensor]]


def gates(graph: taso.Graph, z: taso.Tensor, weights: tuple[taso.Tensor, taso.Tensor]) -> list[taso.Tensor]:
    return [graph.matmul(z, w) for w in weights]


def highway(
    graph: taso.Graph, z: taso.Tensor, gate: taso.Tensor, value: taso.Tensor, function: str
) -> taso.Tensor:
    """c · f + (1 − c) · z, written as z + c · (f − z)."""
    c, f = graph.sigmoid(gate), getattr(graph, function)(value)
    return graph.add(z, graph.mul(c, graph.sub(x=f, y=z)))


def step(graph: taso.Graph, x: taso.Tensor, h: taso.Tensor, inward: Weights, weights: Weights) -> taso.Tensor:
    """The next state."""
    sums = [graph.add(a, b) for a, b in zip(gates(graph, x, inward[0]), gates(graph, h, inward[1]), strict=True)]
    nodes = [highway(graph, h, *sums, "tanh")]
    for (before, function), own in zip(NODES, weights, strict=True):
        nodes.append(highway(graph, nodes[before], *gates(graph, nodes[before], own), function))
    read = {before for before, _ in NODES}
    loose = [node for i, node in enumerate(nodes) if i not in read]
    total = loose[0]
    for node in loose[1:]:
        total = graph.add(total, node)
    return graph.mul(total, graph.new_weight(dims=(1,), data=[1 / len(loose)]))


def pairs(graph: taso.Graph, count: int) -> Weights:
    return [
        (graph.new_weight(dims=(HIDDEN, HIDDEN)), graph.new_weight(dims=(HIDDEN, HIDDEN))) for _ in range(count)
    ]


def build(graph: taso.Graph) -> None:
    inputs = [graph.new_input(dims=(1, HIDDEN)) for _ in range(STEPS)]
    inward, weights = pairs(graph, 2), pairs(graph, len(NODES))
    state = graph.new_input(dims=(1, HIDDEN), name="state")
    for x in inputs:
        state = step(graph, x, state, inward, weights)


def main() -> None:
    run(build, "Optimizes steps of a recurrent cell in the search space of ENAS.")


if __name__ == "__main__":
    main()
