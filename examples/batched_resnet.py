"""Several nets of one shape that share their weights, each on an input of its own (after TASO's example).

What they share is one tensor of the graph, which several operators read: a rewrite for one net must not change it for
the others.
"""

from __future__ import annotations

from common import run

import taso

NETS = 2
CHANNELS, SIZE, BLOCKS = 256, 56, 3


def weights(graph: taso.Graph) -> list[list[taso.Tensor]]:
    """Three weights for each block: to a quarter of the channels, 3×3 among these, and back."""
    inner = CHANNELS // 4
    shapes = ((inner, CHANNELS, 1, 1), (inner, inner, 3, 3), (CHANNELS, inner, 1, 1))
    return [[graph.new_weight(dims=dims) for dims in shapes] for _ in range(BLOCKS)]


def bottleneck(graph: taso.Graph, x: taso.Tensor, shared: list[taso.Tensor]) -> taso.Tensor:
    """relu(x + three convolutions)."""
    y = x
    for weight, activation in zip(shared, ("RELU", "RELU", "NONE"), strict=True):
        y = graph.conv2d(input=y, weight=weight, strides=(1, 1), padding="SAME", activation=activation)
    return graph.relu(graph.add(x, y))


def build(graph: taso.Graph) -> None:
    shared = weights(graph)
    for _ in range(NETS):
        x = graph.new_input(dims=(1, CHANNELS, SIZE, SIZE))
        for block in shared:
            x = bottleneck(graph, x, block)


def main() -> None:
    run(build, "Optimizes several nets that share their weights.")


if __name__ == "__main__":
    main()
