"""What is built of the source: the same bytes each time, with all that a packager and a user of the command need."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import taso

ROOT = Path(__file__).parents[1]
TAKEN = ("taso", "tools", "examples", "docs", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
LEFT = shutil.ignore_patterns("__pycache__", "*.egg-info", "site")


def setuptools_version() -> tuple[int, ...]:
    spec = importlib.util.find_spec("setuptools")
    if spec is None:
        return (0,)
    return tuple(int(n) for n in re.findall(r"\d+", importlib.import_module("setuptools").__version__)[:2])


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(setuptools_version() < (77,), reason="the build needs setuptools 77 or newer"),
]


def built(where: Path, epoch: str, umask: str, when: int) -> tuple[Path, Path]:
    """Wheel and source archive of a copy of the source whose files have another time, mode and place."""
    source, out = where / "source", where / "out"
    source.mkdir(parents=True)
    out.mkdir()
    for name in TAKEN:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=LEFT)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    for path in source.rglob("*"):
        os.utime(path, (when, when))
        if path.is_file():
            path.chmod(0o666 & ~int(umask, 8))
    code = (
        "import os, sys; sys.path.insert(0, 'tools'); import reproducible_build as b; "
        f"os.umask(0o{umask}); out = sys.argv[1]; b.build_sdist(out); b.build_wheel(out)"
    )
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch, "PYTHONHASHSEED": umask.lstrip("0")}
    subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=source, check=True, capture_output=True, env=environment
    )
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return built(tmp_path_factory.mktemp("first"), "1700000000", "022", 1_600_000_000)


@pytest.fixture(scope="module")
def metadata(first: tuple[Path, Path]) -> Message:
    with zipfile.ZipFile(first[0]) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        return message_from_bytes(wheel.read(name))


def test_two_builds_of_one_source_are_the_same_bytes(first: tuple[Path, Path], tmp_path: Path) -> None:
    again = built(tmp_path, "1700000000", "077", 1_650_000_000)
    for one, other in zip(first, again, strict=True):
        assert one.name == other.name
        assert one.read_bytes() == other.read_bytes(), one.name


def test_the_epoch_is_what_dates_the_members(first: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(first[0]) as wheel:
        assert {m.date_time for m in wheel.infolist()} == {(2023, 11, 14, 22, 13, 20)}
    with tarfile.open(first[1]) as archive:
        assert {m.mtime for m in archive.getmembers()} == {1_700_000_000}
        assert {(m.uid, m.gid, m.uname, m.gname) for m in archive.getmembers()} == {(0, 0, "", "")}


def test_the_archives_hold_what_runs_and_what_builds(first: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(first[0]) as wheel:
        names = set(wheel.namelist())
        assert wheel.testzip() is None
    for needed in ("taso/py.typed", "taso/rules/rules.proto", "taso/session.py", "taso/__main__.py"):
        assert needed in names
    assert any(n.startswith("taso/rules/library/") and n.endswith(".pb") for n in names)
    assert {n.split("/")[0] for n in names} == {"taso", f"taso-{taso.__version__}.dist-info"}
    with tarfile.open(first[1]) as archive:
        inside = {m.name.split("/", 1)[-1] for m in archive.getmembers()}
    for needed in ("pyproject.toml", "tools/reproducible_build.py", "LICENSE", "examples/resnet50.py", "PKG-INFO"):
        assert needed in inside


def test_the_record_of_the_wheel_fits_its_members(first: tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(first[0]) as wheel:
        record = next(n for n in wheel.namelist() if n.endswith("RECORD"))
        sizes = {line.rsplit(",", 2)[0]: line.rsplit(",", 2)[2] for line in wheel.read(record).decode().split()}
        for member in wheel.infolist():
            assert member.filename == record or sizes[member.filename] == str(member.file_size)


def test_the_metadata_are_complete_for_a_recipe(metadata: Message) -> None:
    for name in ("Name", "Version", "Summary", "License-Expression", "License-File", "Author", "Requires-Python"):
        assert metadata[name], name
    assert metadata.get_all("Project-URL") and metadata.get_all("Classifier") and metadata.get_all("Requires-Dist")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert {"test", "torch", "docs", "onnxruntime"} <= set(metadata.get_all("Provides-Extra") or [])


def test_the_package_announces_its_command_and_its_torch_backend(first: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(first[0]) as wheel:
        said = wheel.read(next(n for n in wheel.namelist() if n.endswith("entry_points.txt"))).decode()
    # pipx runs the command that is called like the package
    assert "[console_scripts]\ntaso = taso.cli:main" in said
    assert "[torch_dynamo_backends]\ntaso = taso.torch_backend:taso_backend" in said


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "taso", "--version"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert taso.__version__ in done.stdout
