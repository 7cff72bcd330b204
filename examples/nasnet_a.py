"""NASNet-A: three stages of normal cells, each with a reduction cell behind it (Zoph et al. 2018; TASO's example).

As in TASO's, a cell's separable convolution is one convolution in as many groups as it has channels and one with a
window of 1, and the two inputs of a cell are brought to its number of channels first.
"""

from __future__ import annotations

from common import run

import taso

SIZE = 224
CHANNELS = 128
STAGES = 3
CELLS = 5


def convolution(graph: taso.Graph, x: taso.Tensor, channels: int, window: int, stride: int = 1) -> taso.Tensor:
    weight = graph.new_weight(dims=(channels, x.dim(1), window, window))
    return graph.conv2d(input=x, weight=weight, strides=(stride, stride), padding="SAME", activation="RELU")


def separable(graph: taso.Graph, x: taso.Tensor, channels: int, window: int, stride: int = 1) -> taso.Tensor:
    weight = graph.new_weight(dims=(channels, x.dim(1) // channels, window, window))
    x = graph.conv2d(input=x, weight=weight, strides=(stride, stride), padding="SAME")
    weight = graph.new_weight(dims=(channels, x.dim(1), 1, 1))
    return graph.conv2d(input=x, weight=weight, strides=(1, 1), padding="SAME")


def average(graph: taso.Graph, x: taso.Tensor, stride: int = 1) -> taso.Tensor:
    return graph.avgpool2d(input=x, kernels=(3, 3), strides=(stride, stride), padding="SAME")


def largest(graph: taso.Graph, x: taso.Tensor) -> taso.Tensor:
    return graph.maxpool2d(input=x, kernels=(3, 3), strides=(2, 2), padding="SAME")


def adjusted(
    graph: taso.Graph, before: taso.Tensor, x: taso.Tensor, channels: int
) -> tuple[taso.Tensor, taso.Tensor]:
    """Both inputs of a cell with the same size and number of channels."""
    x = convolution(graph, x, channels, 1)
    if before.dim(2) == x.dim(2):
        return convolution(graph, before, channels, 1), x
    return convolution(graph, before, channels, 3, 2), x


def normal_cell(graph: taso.Graph, before: taso.Tensor, x: taso.Tensor, channels: int) -> taso.Tensor:
    before, x = adjusted(graph, before, x, channels)
    sums = [
        graph.add(separable(graph, x, channels, 3), x),
        graph.add(separable(graph, before, channels, 3), separable(graph, x, channels, 3)),
        graph.add(average(graph, x), before),
        graph.add(average(graph, before), average(graph, before)),
        graph.add(separable(graph, before, channels, 3), separable(graph, before, channels, 3)),
    ]
    return graph.concat(1, sums)


def reduction_cell(graph: taso.Graph, before: taso.Tensor, x: taso.Tensor, channels: int) -> taso.Tensor:
    before, x = adjusted(graph, before, x, channels)
    first = graph.add(separable(graph, before, channels, 7, 2), separable(graph, x, channels, 5, 2))
    second = graph.add(largest(graph, x), separable(graph, before, channels, 7, 2))
    third = graph.add(average(graph, x, 2), separable(graph, before, channels, 5, 2))
    fourth = graph.add(largest(graph, x), separable(graph, first, channels, 3))
    fifth = graph.add(average(graph, first), second)
    return graph.concat(1, [first, second, third, fourth, fifth])


def build(graph: taso.Graph) -> None:
    x = graph.new_input(dims=(1, 3, SIZE, SIZE))
    x = largest(graph, convolution(graph, x, 64, 7, 2))
    channels = CHANNELS
    for _ in range(STAGES):
        before = x
        for _ in range(CELLS):
            before, x = x, normal_cell(graph, before, x, channels)
        channels *= 2
        x = reduction_cell(graph, before, x, channels)


def main() -> None:
    run(build, "Optimizes NASNet-A in the shapes of TASO's example.")


if __name__ == "__main__":
    main()
