"""Writes docs/drawings/*.svg from the code: which folder imports which, and a graph before and after its rewrites.

    python docs/drawings.py
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import taso
from taso.graph.drawing import svg
from taso.graph.picture import OPERATOR, Box, Picture, Step

FOLDER = Path(__file__).parent / "drawings"
PACKAGE = Path(taso.__file__).parent
LAYERS = ("graph", "rules", "backends", "search", "taso")
_NAMES = {"taso": "taso (the public face)"}


def drawings() -> dict[str, str]:
    """The drawings by the names of their files."""
    before, after = example()
    most = max(before.most, after.most)
    return {"layers.svg": svg(layers()), "before.svg": svg(before, most), "after.svg": svg(after, most)}


def layers() -> Picture:
    """A box for each folder of the package, below those whose modules its own modules import."""
    counted: Counter[tuple[str, str]] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        reader = _layer(path.relative_to(PACKAGE).parts)
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("taso."):
                read = _layer(tuple((node.module or "").split(".")[1:]))
                counted[reader, read] += read != reader
    place = {layer: number for number, layer in enumerate(LAYERS)}
    return Picture([
        Box(OPERATOR, [Step(_NAMES.get(layer, f"taso/{layer}"))],
            [(place[read], "imports") for read in LAYERS if counted[layer, read]])
        for layer in LAYERS
    ])  # fmt: skip


def _layer(parts: tuple[str, ...]) -> str:
    return parts[0] if parts and parts[0] in LAYERS else "taso"


def example() -> tuple[Picture, Picture]:
    """Three projections of one value, and what the search makes of them by the formula of costs."""
    graph = taso.new_graph()
    x = graph.new_input(dims=(16, 32), name="tokens")
    for _ in range(3):
        graph.relu(graph.matmul(x, graph.new_weight(dims=(32, 32))))
    report = taso.optimize(graph, backend="reference", search="saturation").report
    if report.before is None or report.after is None:
        raise SystemExit("the report has no pictures")
    return report.before, report.after


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, drawing in drawings().items():
        (FOLDER / name).write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main()
