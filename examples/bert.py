"""Eight attention blocks of BERT without softmax: 64 tokens, 16 heads, hidden size 1024 (Devlin et al. 2019; TASO).

As in TASO's, a block's last product reads the input of the block; what the attention itself computes is read by no
operator and therefore an output of the graph.
"""

from __future__ import annotations

from common import run

import taso

BLOCKS = 8
TOKENS = 64
HEADS = 16
HIDDEN = 1024


def projection(graph: taso.Graph, x: taso.Tensor) -> taso.Tensor:
    return graph.matmul(x, graph.new_weight(dims=(HIDDEN, HIDDEN)))


def heads(graph: taso.Graph, x: taso.Tensor, perm: tuple[int, int, int]) -> taso.Tensor:
    """A projection cut into heads, which come first."""
    x = graph.reshape(projection(graph, x), shape=(TOKENS, HEADS, HIDDEN // HEADS))
    return graph.transpose(x, perm=perm, shuffle=True)


def attention(graph: taso.Graph, x: taso.Tensor) -> taso.Tensor:
    query, key, value = (heads(graph, x, perm) for perm in ((1, 0, 2), (1, 2, 0), (1, 0, 2)))
    attended = graph.matmul(graph.matmul(query, key), value)
    graph.reshape(graph.transpose(attended, perm=(1, 0, 2), shuffle=True), shape=(TOKENS, HIDDEN))
    return projection(graph, x)


def build(graph: taso.Graph) -> None:
    x = graph.relu(graph.new_input(dims=(TOKENS, HIDDEN)))
    for _ in range(BLOCKS):
        x = attention(graph, x)


def main() -> None:
    run(build, "Optimizes eight attention blocks in the shapes of TASO's BERT example.")


if __name__ == "__main__":
    main()
