"""Asks cuDNN for plans of graphs on a GPU that is described and not there: `plan.py DESCRIPTIONS COMPUTE`.

DESCRIPTIONS is a pickled dict of descriptions by name, COMPUTE 80 or 90. Prints, as JSON, what was found for each: the
names of plans that build, or why there are none. Run with the library made of `libcuda.c` where libcuda.so.1 is looked
for.
"""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from pathlib import Path

from taso.backends.cudnn.frontend import frontend, planned
from taso.graph.errors import BackendError

DEVICE = {
    "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
    "smCountOrigin": 0, "warpSize": 32, "maxSharedMemoryPerBlock": 49152, "reservedSharedMemoryPerBlock": 1024,
    "oversizedSharedMemoryPerBlock": 0, "maxRegistersPerSM": 65536, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048, "pciDeviceId": 0, "isTccDriver": 0, "supportCoopLaunch": 1,
    "totalGlobalMem": 85899345920, "memoryBusWidth": 5120, "cudaDeviceId": 0, "driverVer": 12090,
}  # fmt: skip
BY_COMPUTE = {
    "80": {
        "multiProcessorCount": 108, "deviceVer": 800, "maxSharedMemoryPerBlockOptin": 166912, "smClockRateKHz": 1410000,
        "memClockRateKHz": 1593000, "l2CacheSize": 41943040, "deviceName": "NVIDIA A100-SXM4-80GB",
    },
    "90": {
        "multiProcessorCount": 132, "deviceVer": 900, "maxSharedMemoryPerBlockOptin": 232448, "smClockRateKHz": 1980000,
        "memClockRateKHz": 2619000, "l2CacheSize": 52428800, "deviceName": "NVIDIA H100 80GB HBM3",
    },
}  # fmt: skip


def main(path: str, compute: str) -> None:
    module = frontend()
    properties = importlib.import_module("cudnn").create_device_properties(json.dumps(DEVICE | BY_COMPUTE[compute]))
    settings = {"device_property": properties, "sm_version": int(compute)}
    found = {}
    for name, description in pickle.loads(Path(path).read_bytes()).items():
        try:
            graph = planned(module, description, lambda: 0, settings)
            found[name] = {"plans": [graph.name, *(p.name for _, p in zip(range(2), graph._further, strict=False))]}
        except BackendError as error:
            found[name] = {"error": type(error).__name__, "reason": str(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
