"""Two branches on one input, added: the example of TASO's README, whose first convolutions may be merged."""

from __future__ import annotations

from common import run

import taso

CHANNELS, SIZE = 128, 56


def convolution(graph: taso.Graph, x: taso.Tensor, window: int, activation: str) -> taso.Tensor:
    weight = graph.new_weight(dims=(CHANNELS, x.dim(1), window, window))
    return graph.conv2d(input=x, weight=weight, strides=(1, 1), padding="SAME", activation=activation)


def build(graph: taso.Graph) -> None:
    x = graph.new_input(dims=(1, CHANNELS, SIZE, SIZE))
    left = convolution(graph, convolution(graph, x, 3, "RELU"), 3, "NONE")
    right = convolution(graph, x, 1, "RELU")
    graph.relu(graph.add(left, right))


def main() -> None:
    run(build, "Optimizes two convolution branches that read one input.")


if __name__ == "__main__":
    main()
