"""What all tests share: a cache folder of their own, the helpers' folders, and a backend whose costs are a formula."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# how long an example takes says something of the machine alone
settings.register_profile("taso", deadline=None)
settings.load_profile("taso")

HERE = Path(__file__).parent
for folder in ("graph", "search"):
    if str(HERE / folder) not in sys.path:
        sys.path.append(str(HERE / folder))

from searching import FormulaBackend  # noqa: E402  # found by the path set above


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Measured costs of a test session live in a folder of its own, whatever the user's cache holds."""
    before = os.environ.get("TASO_CACHE_DIR")
    folder = tmp_path_factory.mktemp("cache")
    os.environ["TASO_CACHE_DIR"] = str(folder)
    yield folder
    if before is None:
        del os.environ["TASO_CACHE_DIR"]
    else:
        os.environ["TASO_CACHE_DIR"] = before


@pytest.fixture
def formula_backend() -> FormulaBackend:
    """Runs with NumPy; layouts, fusion and costs by a formula: cheap, and the same on every machine."""
    return FormulaBackend()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes many minutes runs where TASO_NIGHTLY is set; elsewhere it is skipped and says so."""
    if os.environ.get("TASO_NIGHTLY"):
        return
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.skip(reason="takes many minutes: set TASO_NIGHTLY=1 to run it"))
