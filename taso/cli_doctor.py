"""`taso doctor`: what taso finds on this machine, what is missing, and how to get it."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from taso.backends.costs import cache_folder
from taso.backends.cudnn.device import INSTALL, versions
from taso.backends.onednn.backend import processor
from taso.backends.onednn.library import library
from taso.backends.select import backend_names, get_backend
from taso.cli_cache import files
from taso.cli_common import (
    DONE,
    FAILED,
    Commands,
    add_command,
    add_json,
    bytes_text,
    pairs,
    print_json,
    print_text,
    usable_processors,
)
from taso.graph import plugins
from taso.graph.errors import BackendError
from taso.version import __version__

EXAMPLES = (
    ("taso doctor", "look at the machine"),
    ("taso doctor --json > machine.json", "for a bug report"),
)
REQUIRED = ("numpy", "onnx", "protobuf", "ml_dtypes", "platformdirs", "rich", "highspy")


@dataclass(frozen=True)
class Optional:
    """A package that taso works without: what for, and what installs it."""

    distribution: str
    purpose: str
    install: str

    @property
    def how(self) -> str:
        """What to say where it is missing."""
        return f"missing ({self.purpose}): {self.install}"


OPTIONAL = (
    Optional("onnxruntime", "the backend of that name, taso bench, and the tests", "pip install 'taso[onnxruntime]'"),
    Optional("openvino", "taso bench", "pip install 'taso[openvino]'"),
    Optional("torch", "models of PyTorch, and taso bench", "pip install 'taso[torch]'"),
    Optional("onnxscript", "models of PyTorch", "pip install 'taso[torch]'"),
    Optional("onnx2torch", "taso bench on PyTorch", "pip install 'taso[torch]'"),
    Optional("tf2onnx", "models of TensorFlow and Keras", "pip install tf2onnx tensorflow"),
)
FEATURES = (
    "sse4_1", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
"""Features of x86 and ARM processors, by Linux's names, that decide how fast inference can be."""
VARIABLES = (
    "TASO_CACHE_DIR", "TASO_ONEDNN_LIBRARY", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT",
    "ONEDNN_MAX_CPU_ISA",
)  # fmt: skip


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Adds `taso doctor`."""
    parser = add_command(commands, "doctor", run, "tell what is here and what is missing", EXAMPLES)
    add_json(parser)


def run(settings: argparse.Namespace) -> int:
    """Tells what taso finds on this machine: processor, libraries and versions, GPU, cache; and what is missing.

    The status is 0, or 1 where something is wrong that taso needs: a package, a backend that is made for this machine,
    or a cache that can be written.
    """
    gpus = _gpus()
    backends, wrong = _backends(any(name != "NVIDIA" for name in gpus))
    wrong += [f"{name} is not installed: pip install {name}" for name in REQUIRED if version(name) is None]
    if not cache_is_writable(cache_folder()):
        wrong.append(f"{cache_folder()} cannot be written: costs are measured anew each time; TASO_CACHE_DIR moves it")
    found: dict[str, dict[str, str]] = {
        "taso": {
            "version": __version__, "python": f"{platform.python_version()} ({sys.executable})",
            "system": platform.platform(),
        },
        "processor": _processor(),
        "libraries": {name: version(name) or "missing" for name in REQUIRED},
        "backends": backends,
        "optional": {o.distribution: version(o.distribution) or o.how for o in OPTIONAL},
        "rules of packages": {n: plugins.who(e) for n, e in plugins.announced(plugins.RULES).items()},
        "GPU": {**gpus, **_gpu_packages()},
        "cache": {
            "folder": str(cache_folder()), "size": bytes_text(sum(f.stat().st_size for f in files(cache_folder()))),
        },
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }  # fmt: skip
    if settings.json:
        print_json({**found, "wrong": wrong})
    else:
        parts = [pairs(title, items) for title, items in found.items() if items]
        verdict = ["nothing is wrong"] if not wrong else ["wrong", *(f"  {sentence}" for sentence in wrong)]
        print_text("\n".join([*parts, *verdict]))
    return FAILED if wrong else DONE


def version(distribution: str) -> str | None:
    """The version of an installed package, None where there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> dict[str, str]:
    said = {
        "name": processor(), "architecture": platform.machine(),
        "cores": f"{usable_processors()} of {os.cpu_count()} usable",
        "features": " ".join(f for f in FEATURES if f in processor_flags()) or "not known",
    }  # fmt: skip
    memory = _memory()
    return said if memory is None else {**said, "memory": bytes_text(memory)}


def processor_flags() -> frozenset[str]:
    """What Linux says that the processor can; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(flags.split())
    return frozenset()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _backends(on_gpu: bool) -> tuple[dict[str, str], list[str]]:
    """What each backend says of itself, and sentences on those that are made for this machine and do not work.

    `on_gpu` says whether there is a GPU.
    """
    said, wrong = {}, []
    for name in backend_names():
        if name == "auto":
            continue
        try:
            said[name] = get_backend(name).device_key()
        except BackendError as error:
            said[name] = f"missing: {error}"
            if name == "onednn" and sys.platform == "linux" and platform.machine() == "x86_64":
                wrong.append(f"oneDNN does not work, and models run on the slow reference backend: {error}")
            if name == "cudnn" and on_gpu and versions():
                wrong.append(f"there is a GPU, and cuDNN does not work on it: {error}")
    if not said.get("onednn", "missing").startswith("missing"):
        said["onednn"] += f" ({library().path})"
    return said, wrong


def _gpus() -> dict[str, str]:
    """NVIDIA's devices by number, as its driver's tool tells them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {"NVIDIA": "none found (there is no nvidia-smi)"}
    command = [tool, "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"NVIDIA": f"nvidia-smi fails: {error}"}
    rows = [line.split(", ", 1) for line in done.stdout.splitlines() if ", " in line]
    return {f"NVIDIA {number}": said for number, said in rows} or {"NVIDIA": "none found"}


def _gpu_packages() -> dict[str, str]:
    """What a GPU takes beside its driver, and how to get it where nothing of it is there."""
    return versions() or {"packages": f"missing (the backend cudnn): {INSTALL}"}


def cache_is_writable(folder: Path) -> bool:
    """Whether files can be written in `folder`, or it can be made; nothing is."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
