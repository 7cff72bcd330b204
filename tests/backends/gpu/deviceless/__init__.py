"""cuDNN's own planner, asked without a GPU: for a device that is described."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from taso.backends.cudnn.description import Description

HERE = Path(__file__).parent


def missing() -> str:
    """What is missing to ask cuDNN for plans here, "" where nothing is."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        return "a C compiler (cc) on Linux makes the library that stands in for the driver"
    absent = [name for name in ("cudnn", "cupy") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def plans(descriptions: Mapping[str, Description], compute: int, folder: Path) -> dict[str, dict[str, object]]:
    """What cuDNN says to each description for a GPU of that compute capability: `plans`, or `error` and `reason`."""
    library = folder / "libcuda.so.1"
    if not library.exists():
        command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, HERE / "libcuda.c"]
        subprocess.run(command, check=True, capture_output=True)
    given = folder / "descriptions.pickle"
    given.write_bytes(pickle.dumps(dict(descriptions)))
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder), "CUDNN_LOGLEVEL_DBG": "0"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[3]), *sys.path])
    ran = subprocess.run(
        [sys.executable, str(HERE / "plan.py"), str(given), str(compute)], env=env, capture_output=True, text=True,
        timeout=500,
    )  # fmt: skip
    if ran.returncode:
        raise RuntimeError(f"asking cuDNN for plans failed ({ran.returncode}): {ran.stderr[-2000:]}")
    return cast("dict[str, dict[str, object]]", json.loads(ran.stdout.splitlines()[-1]))
