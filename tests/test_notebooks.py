"""The notebooks of the examples run from top to bottom, and graphs, reports and progress show in them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
MISSING = [name for name in ("nbclient", "nbformat", "ipykernel") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install '.[notebook]'"),
]


@pytest.fixture
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings, and no history, of whoever runs the tests; the package of this folder in the kernel."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    yield


def executed(cells: list[str], folder: Path) -> list[list[dict[str, object]]]:
    """The outputs of each cell."""
    import nbformat

    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    return run(made, folder)


def run(notebook: object, folder: Path) -> list[list[dict[str, object]]]:
    import nbclient
    from jupyter_client import KernelManager
    from jupyter_client.kernelspec import KernelSpecManager

    # the interpreter of the tests, whatever kernels are registered on this machine
    specs = KernelSpecManager(ensure_native_kernel=True, kernel_dirs=[])
    manager = KernelManager(kernel_name="python3", kernel_spec_manager=specs, transport="ipc", ip=str(folder / "k"))
    client = nbclient.NotebookClient(notebook, km=manager, timeout=600, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return [cell.outputs for cell in client.nb.cells if cell.cell_type == "code"]


def shown(outputs: list[dict[str, object]], kind: str) -> list[str]:
    """What outputs hold of a kind, as text."""
    found = []
    for output in outputs:
        data = output.get("data", {})
        if isinstance(data, dict) and kind in data:
            found.append(str(data[kind]))
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path, own_settings: None) -> None:
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    outputs = run(notebook, tmp_path)
    frames = [said for cell in outputs for said in shown(cell, "text/html") if said.startswith("<iframe")]
    assert len(frames) >= 3
    assert not [o for cell in outputs for o in cell if o["output_type"] == "error" or o.get("name") == "stderr"]


def test_a_notebook_is_kept_without_outputs() -> None:
    import nbformat

    assert NOTEBOOKS
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in cells)


def test_a_search_shows_its_progress_in_a_notebook(tmp_path: Path, own_settings: None) -> None:
    search = """import taso
graph = taso.new_graph()
x = graph.new_input(dims=(4, 8))
graph.relu(graph.relu(graph.tanh(x)))
best = taso.optimize(graph, backend="reference", budget=5)"""
    first, second, third = executed([search, "best", "best.report"], tmp_path)
    lines = shown(first, "text/html")
    assert len(lines) == 1 and "candidates" in lines[0] and "ms" in lines[0]
    assert not [o for o in first if o["output_type"] == "stream"]
    assert shown(second, "text/html")[0].startswith("<iframe") and "Tanh" in shown(second, "text/html")[0]
    assert "Relu(Relu(x)) =&amp;gt; Relu(x)" in shown(third, "text/html")[0]
