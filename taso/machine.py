"""What a report says of the machine and of the versions with which it was made."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from taso.version import __version__

_LIBRARIES = ("numpy", "onnx", "onednn-cpu-gomp", "onnxruntime")


def this_machine() -> dict[str, str]:
    """System, processors, Python and the libraries that decide what a run is like, each with its version."""
    said = {
        "taso": __version__, "python": platform.python_version(), "system": platform.platform(),
        "architecture": platform.machine(), "processors": str(os.cpu_count() or "not known"),
    }  # fmt: skip
    return said | {name: version for name in _LIBRARIES if (version := _version(name))}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
