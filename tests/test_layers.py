"""The direction of imports inside the package, and what `import taso` pulls in."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import taso
import taso.graph

PACKAGE = Path(taso.graph.__file__).parents[1]
LAYERS: dict[str, set[str]] = {
    "graph": {"graph"},
    "rules": {"graph", "rules"},
    "backends": {"graph", "backends"},
    "search": {"graph", "rules", "backends", "search"},
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def imported(node: ast.AST, package: list[str]) -> list[str]:
    """Full names of the modules that one statement or call imports; `package` is where it stands."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = package[: len(package) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            return [node.args[0].value]
    return []


def imports(tree: ast.AST, package: list[str], lazy: bool = False) -> Iterator[tuple[str, int, bool]]:
    """(module, line, whether inside a function) of each import below `tree`."""
    for node in ast.iter_child_nodes(tree):
        for name in imported(node, package):
            yield name, getattr(node, "lineno", 0), lazy
        yield from imports(node, package, lazy or isinstance(node, FUNCTIONS))


def faults(source: str, path: Path) -> list[str]:
    """What is wrong with the imports of the module `source` at `path` (relative to the package)."""
    layer = path.parts[0] if len(path.parts) > 1 else ""
    found = []
    for name, line, lazy in imports(ast.parse(source), ["taso", *path.parts[:-1]]):
        parts = name.split(".")
        if parts[0] != "taso":
            continue
        if lazy:
            found.append(f"{path}:{line} imports {name} inside a function")
        if layer and (len(parts) < 2 or parts[1] not in LAYERS[layer]):
            found.append(f"{path}:{line} imports {name}, which is not below {layer}")
    return found


def test_no_module_imports_against_the_direction_or_lazily() -> None:
    modules = sorted(PACKAGE.rglob("*.py"))
    assert len(modules) > 10
    assert [f for m in modules for f in faults(m.read_text("utf-8"), m.relative_to(PACKAGE))] == []


@pytest.mark.parametrize(
    "path, source",
    [
        ("graph/x.py", "import taso.rules.match"),
        ("graph/x.py", "from taso.backends import base"),
        ("graph/x.py", "from taso import search"),
        ("graph/x.py", "import taso"),
        ("graph/ops/x.py", "from ...rules import match"),
        ("rules/x.py", "from taso.search.cost import f"),
        ("rules/x.py", "if True:\n    import taso.backends.base"),
        ("backends/x.py", "import taso.rules"),
        ("backends/onednn/x.py", "import importlib\nimportlib.import_module('taso.search')"),
        ("search/x.py", "from taso.api import optimize"),
        ("search/x.py", "def f():\n    from taso.graph import graph"),
        ("search/x.py", "class C:\n    def f(self):\n        return __import__('taso.graph.graph')"),
        ("cli.py", "def f():\n    import taso.search"),
    ],
)
def test_a_forbidden_import_is_found(path: str, source: str) -> None:
    assert faults(source, Path(path))


@pytest.mark.parametrize(
    "path, source",
    [
        ("graph/x.py", "from taso.graph.types import Dim\nimport numpy"),
        ("graph/ops/x.py", "from ..types import Dim"),
        ("rules/x.py", "from taso.graph import ops"),
        ("search/x.py", "import taso.rules.match\nfrom taso.backends.base import Backend"),
        ("api.py", "from taso.search import backtracking"),
        ("backends/x.py", "def f():\n    import ctypes"),
    ],
)
def test_an_import_along_the_direction_is_no_fault(path: str, source: str) -> None:
    assert faults(source, Path(path)) == []


def test_every_folder_of_the_package_is_a_layer() -> None:
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.rglob("*.py"))}
    assert folders <= set(LAYERS)


def test_importing_taso_pulls_in_no_heavy_library() -> None:
    code = "import sys, taso; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    loaded = set(done.stdout.split())
    assert "taso" in loaded
    assert loaded & {"onnxruntime", "cupy", "z3", "torch", "tensorflow", "pytest", "highspy"} == set()


def test_what_only_definitions_need_is_not_loaded_with_the_package(tmp_path: Path) -> None:
    """`onnx.reference` takes ten megabytes: a process that runs a model of known operators does without."""
    model = tmp_path / "model.onnx"
    graph = taso.new_graph()
    graph.relu(graph.matmul(graph.new_input(dims=(4, 8)), graph.new_weight(dims=(8, 4))))
    taso.save(graph, str(model))
    code = (
        "import sys, numpy, taso; "
        f"program = taso.compile(taso.load({str(model)!r})); "
        f"program({{{graph.input_names[0]!r}: numpy.ones((4, 8), numpy.float32)}}); "
        "print('onnx.reference' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
