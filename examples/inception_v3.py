"""Inception-v3 without its auxiliary head, batch normalizations folded (Szegedy et al. 2016; TASO's example)."""

from __future__ import annotations

from common import run

import taso

SIZE = 299
Window = tuple[int, int]


def convolution(
    graph: taso.Graph, x: taso.Tensor, channels: int, window: Window = (1, 1), stride: int = 1, padding: str = "SAME"
) -> taso.Tensor:
    weight = graph.new_weight(dims=(channels, x.dim(1), *window))
    return graph.conv2d(input=x, weight=weight, strides=(stride, stride), padding=padding, activation="RELU")


def chain(graph: taso.Graph, x: taso.Tensor, *layers: tuple[int, Window]) -> taso.Tensor:
    for channels, window in layers:
        x = convolution(graph, x, channels, window)
    return x


def largest(graph: taso.Graph, x: taso.Tensor) -> taso.Tensor:
    return graph.maxpool2d(input=x, kernels=(3, 3), strides=(2, 2), padding="VALID")


def averaged(graph: taso.Graph, x: taso.Tensor, channels: int) -> taso.Tensor:
    x = graph.avgpool2d(input=x, kernels=(3, 3), strides=(1, 1), padding="SAME")
    return convolution(graph, x, channels)


def cell_a(graph: taso.Graph, x: taso.Tensor, channels: int) -> taso.Tensor:
    branches = [
        convolution(graph, x, 64),
        chain(graph, x, (48, (1, 1)), (64, (5, 5))),
        chain(graph, x, (64, (1, 1)), (96, (3, 3)), (96, (3, 3))),
        averaged(graph, x, channels),
    ]
    return graph.concat(1, branches)


def cell_b(graph: taso.Graph, x: taso.Tensor) -> taso.Tensor:
    """Halves the size, from 35×35 to 17×17."""
    twice = chain(graph, x, (64, (1, 1)), (96, (3, 3)))
    branches = [convolution(graph, t, c, (3, 3), 2, "VALID") for t, c in ((x, 384), (twice, 96))]
    return graph.concat(1, [*branches, largest(graph, x)])


def cell_c(graph: taso.Graph, x: taso.Tensor, c: int) -> taso.Tensor:
    branches = [
        convolution(graph, x, 192),
        chain(graph, x, (c, (1, 1)), (c, (1, 7)), (192, (7, 1))),
        chain(graph, x, (c, (1, 1)), (c, (7, 1)), (c, (1, 7)), (c, (7, 1)), (192, (1, 7))),
        averaged(graph, x, 192),
    ]
    return graph.concat(1, branches)


def cell_d(graph: taso.Graph, x: taso.Tensor) -> taso.Tensor:
    """Halves the size, from 17×17 to 8×8."""
    once = convolution(graph, x, 192)
    twice = chain(graph, x, (192, (1, 1)), (192, (1, 7)), (192, (7, 1)))
    branches = [convolution(graph, t, c, (3, 3), 2, "VALID") for t, c in ((once, 320), (twice, 192))]
    return graph.concat(1, [*branches, largest(graph, x)])


def cell_e(graph: taso.Graph, x: taso.Tensor) -> taso.Tensor:
    once = convolution(graph, x, 384)
    twice = chain(graph, x, (448, (1, 1)), (384, (3, 3)))
    pairs = [graph.concat(1, [chain(graph, t, (384, w)) for w in ((1, 3), (3, 1))]) for t in (once, twice)]
    return graph.concat(1, [convolution(graph, x, 320), *pairs, averaged(graph, x, 192)])


def build(graph: taso.Graph) -> None:
    x = graph.new_input(dims=(1, 3, SIZE, SIZE))
    x = convolution(graph, x, 32, (3, 3), 2, "VALID")
    x = convolution(graph, x, 32, (3, 3), 1, "VALID")
    x = largest(graph, convolution(graph, x, 64, (3, 3)))
    x = convolution(graph, x, 80, (1, 1), 1, "VALID")
    x = largest(graph, convolution(graph, x, 192, (3, 3), 1, "VALID"))
    for channels in (32, 64, 64):
        x = cell_a(graph, x, channels)
    x = cell_b(graph, x)
    for channels in (128, 160, 160, 192):
        x = cell_c(graph, x, channels)
    x = cell_e(graph, cell_e(graph, cell_d(graph, x)))
    graph.avgpool2d(input=x, kernels=(x.dim(2), x.dim(3)), strides=(1, 1), padding="VALID")


def main() -> None:
    run(build, "Optimizes Inception-v3 in the shapes of TASO's example.")


if __name__ == "__main__":
    main()
