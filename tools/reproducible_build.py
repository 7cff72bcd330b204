"""The build backend: setuptools, with archives that are the same bytes for the same source.

Names are sorted, times are SOURCE_DATE_EPOCH (or the first day that a zip file can tell), owners are nobody, and modes
do not depend on the umask. See reproducible-builds.org for what the variable means.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

Settings = Mapping[str, object]

FIRST_DAY = 315532800
"""1980-01-01, before which no zip file can date a member."""


def build_sdist(sdist_directory: str, config_settings: Settings | None = None) -> str:
    """Builds the source archive (PEP 517)."""
    name: str = build_meta.build_sdist(sdist_directory, config_settings)
    _repack_tar(Path(sdist_directory, name))
    return name


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Builds the wheel (PEP 517)."""
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    _repack_zip(Path(wheel_directory, name))
    return name


build_editable = build_meta.build_editable


def _epoch() -> int:
    return max(int(os.environ.get("SOURCE_DATE_EPOCH") or FIRST_DAY), FIRST_DAY)


def _mode(executable: bool) -> int:
    return 0o755 if executable else 0o644


def _repack_tar(path: Path) -> None:
    """Writes a .tar.gz anew, in the order of names."""
    packed = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda m: m.name):
            clean = tarfile.TarInfo(member.name)
            clean.type, clean.size, clean.mtime = member.type, member.size, _epoch()
            clean.linkname = member.linkname
            clean.mode = _mode(member.isdir() or bool(member.mode & 0o100))
            new.addfile(clean, old.extractfile(member) if member.isfile() else None)
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=_epoch()) as zipped:
        zipped.write(packed.getvalue())


def _repack_zip(path: Path) -> None:
    """Writes a wheel anew: the metadata last, as the format advises, otherwise in the order of names."""
    packed = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for member in sorted(old.infolist(), key=lambda m: (".dist-info/" in m.filename, m.filename)):
            clean = zipfile.ZipInfo(member.filename, time.gmtime(_epoch())[:6])
            clean.compress_type, clean.create_system = zipfile.ZIP_DEFLATED, 3
            clean.external_attr = (0o100000 | _mode(bool(member.external_attr >> 16 & 0o100))) << 16
            new.writestr(clean, old.read(member))
    path.write_bytes(packed.getvalue())


__all__ = [
    "build_editable", "build_sdist", "build_wheel", "get_requires_for_build_editable", "get_requires_for_build_sdist",
    "get_requires_for_build_wheel", "prepare_metadata_for_build_editable", "prepare_metadata_for_build_wheel",
]  # fmt: skip
