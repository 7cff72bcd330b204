"""Rules of one's own: an equation and a function. Both are proved before they are used, and a false one is refused."""

from __future__ import annotations

import sys

from common import options

import taso

EQUATION = "Mul(Mul(x, c), d) => Mul(x, Mul(c, d)) where is_weight(c) and is_weight(d)"
FALSE = "Relu(Neg(x)) => Neg(Relu(x))"


@taso.rule(where="is_weight(a) and is_weight(b) and rank(x) == 2 and rank(a) == 2 and rank(b) == 2")
def fold_products(op, x, a, b):  # type: ignore[no-untyped-def]  # terms of a rule, all of one type
    """x · a · b has its two weights multiplied beforehand."""
    return op.MatMul(op.MatMul(x, a), b), op.MatMul(x, op.MatMul(a, b))


def build(graph: taso.Graph) -> None:
    x = graph.new_input(dims=(64, 256))
    for width in (512, 256):
        x = graph.matmul(x, graph.new_weight(dims=(x.dim(1), width)))
    for factor in (2.0, 0.25):
        x = graph.mul(x, graph.new_weight(dims=(1,), data=[factor]))


def main() -> None:
    settings = options("Optimizes a chain of products with two rules of its own.").parse_args()
    graph = taso.new_graph()
    build(graph)
    try:
        best = taso.optimize(
            graph, settings.alpha, settings.budget, rules=[fold_products, EQUATION], backend=settings.backend,
            threads=settings.threads, time_limit=settings.time_limit,
        )  # fmt: skip
        print(best.report)
        taso.optimize(graph, rules=FALSE)
    except taso.RuleError as error:
        print(f"refused, as it should be: {error}")
    except taso.TasoError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
