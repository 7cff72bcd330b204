"""Five steps of the recurrent cell that neural architecture search found (Zoph and Le 2017; TASO's example).

As in TASO's, every step has weights of its own, and the first state is a constant.
"""

from __future__ import annotations

from common import run

import taso

STEPS = 5
HIDDEN = 512
LEAVES = ("relu", "sigmoid", "tanh", "sigmoid", "sigmoid", "tanh", "sigmoid", "relu")
"""What is applied to each of the eight sums x·W + h·U; neighbours belong together."""
PAIRS = (("add", "tanh"), ("add", "sigmoid"), ("mul", "tanh"), ("mul", "tanh"))
"""How two leaves become one, and what is applied to it."""


def leaf(graph: taso.Graph, x: taso.Tensor, h: taso.Tensor, function: str) -> taso.Tensor:
    products = [graph.matmul(t, graph.new_weight(dims=(t.dim(1), HIDDEN))) for t in (x, h)]
    return apply(graph, function, graph.add(*products))


def apply(graph: taso.Graph, function: str, *tensors: taso.Tensor) -> taso.Tensor:
    result: taso.Tensor = getattr(graph, function)(*tensors)
    return result


def step(graph: taso.Graph, x: taso.Tensor, h: taso.Tensor) -> taso.Tensor:
    """The next state: a binary tree over eight leaves, each of the input and the state."""
    leaves = [leaf(graph, x, h, function) for function in LEAVES]
    a, b, c, d = (
        apply(graph, function, apply(graph, how, *leaves[2 * i : 2 * i + 2])) for i, (how, function) in enumerate(PAIRS)
    )
    inner, outer = graph.tanh(graph.add(b, c)), graph.tanh(graph.mul(a, d))
    return graph.tanh(graph.mul(inner, outer))


def build(graph: taso.Graph) -> None:
    inputs = [graph.new_input(dims=(1, HIDDEN)) for _ in range(STEPS)]
    state = graph.new_weight(dims=(1, HIDDEN))
    for x in inputs:
        state = step(graph, x, state)


def main() -> None:
    run(build, "Optimizes five steps of the NAS RNN cell in the shapes of TASO's example.")


if __name__ == "__main__":
    main()
