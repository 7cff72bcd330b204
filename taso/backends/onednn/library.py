"""Finding, loading and calling the oneDNN shared library (C API, oneDNN 3.2 and later 3.x).

The library is the one that the Python package `onednn-cpu-gomp` ships; nothing is loaded at import.
`TASO_ONEDNN_LIBRARY` names another build to load instead.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint, c_void_p, cast
from pathlib import Path

from taso.graph.errors import BackendError, BackendUnavailable

MAX_DIMENSIONS = 12

Dims = c_int64 * MAX_DIMENSIONS

_DISTRIBUTION = "onednn-cpu-gomp"
_FILE_NAME = "libdnnl.so.3"
_OVERRIDE = "TASO_ONEDNN_LIBRARY"
_RUNTIME_OMP = 2

_STATUS_NAMES = (
    "success",
    "out_of_memory",
    "invalid_arguments",
    "unimplemented",
    "last_impl_reached",
    "runtime_error",
    "not_required",
    "invalid_graph",
    "invalid_graph_op",
    "invalid_shape",
    "invalid_data_type",
)
_OUT_OF_MEMORY = 1
_UNIMPLEMENTED = 3
_LAST_IMPLEMENTATION = 4

_SYSTEM_PACKAGES = {
    "libgomp.so.1": ("libgomp1", "libgomp"),
    "libstdc++.so.6": ("libstdc++6", "libstdc++"),
    "libgcc_s.so.1": ("libgcc-s1", "libgcc"),
}

_ISA_NAMES = {
    0x0: "default",
    0x1: "sse41",
    0x3: "avx",
    0x7: "avx2",
    0xF: "avx2_vnni",
    0x1F: "avx2_vnni_2",
    0x27: "avx512_core",
    0x67: "avx512_core_vnni",
    0xE7: "avx512_core_bf16",
    0x1EF: "avx512_core_fp16",
    0xFEF: "avx512_core_amx",
    0x1FEF: "avx512_core_amx_fp16",
}


def isa_name(code: int) -> str:
    """The name of oneDNN's `dnnl_cpu_isa_t`. Of a newer one, the most of it that is known by name, and its number:
    each code has the bits of those that it extends."""
    known = max((k for k in _ISA_NAMES if k & code == k), key=int.bit_count)
    return _ISA_NAMES[known] if known == code else f"{_ISA_NAMES[known]}+{code:#x}"


class Unimplemented(BackendError):
    """oneDNN has no implementation of this combination; the caller may take another way knowingly."""


class ExecArg(ctypes.Structure):
    """`dnnl_exec_arg_t`: one argument of a primitive's execution."""

    _fields_ = (("arg", c_int), ("memory", c_void_p))


class _Version(ctypes.Structure):
    _fields_ = (
        ("major", c_int),
        ("minor", c_int),
        ("patch", c_int),
        ("hash", c_char_p),
        ("cpu_runtime", c_uint),
        ("gpu_runtime", c_uint),
    )


_OUT = POINTER(c_void_p)
_DIMS = POINTER(c_int64)
_P = c_void_p
_F = c_float

# Every function here returns dnnl_status_t. Of the arguments, c_void_p is a handle (or a descriptor, or
# NULL), _OUT is the address of a handle to fill in, _DIMS a dnnl_dims_t.
_STATUS_FUNCTIONS: dict[str, tuple[object, ...]] = {
    "dnnl_engine_create": (_OUT, c_int, c_size_t),
    "dnnl_stream_create": (_OUT, _P, c_uint),
    "dnnl_stream_wait": (_P,),
    "dnnl_memory_desc_create_with_strides": (_OUT, c_int, _DIMS, c_int, _DIMS),
    "dnnl_memory_desc_create_with_tag": (_OUT, c_int, _DIMS, c_int, c_int),
    "dnnl_memory_desc_create_submemory": (_OUT, _P, _DIMS, _DIMS),
    "dnnl_memory_desc_reshape": (_OUT, _P, c_int, _DIMS),
    "dnnl_memory_desc_permute_axes": (_OUT, _P, POINTER(c_int)),
    "dnnl_memory_desc_clone": (_OUT, _P),
    "dnnl_memory_desc_query": (_P, c_int, _P),
    "dnnl_memory_desc_destroy": (_P,),
    "dnnl_memory_create": (_OUT, _P, _P, _P),
    "dnnl_memory_set_data_handle": (_P, _P),
    "dnnl_memory_get_data_handle": (_P, _OUT),
    "dnnl_memory_destroy": (_P,),
    "dnnl_post_ops_create": (_OUT,),
    "dnnl_post_ops_append_eltwise": (_P, c_int, _F, _F),
    "dnnl_post_ops_append_sum": (_P, _F, c_int, c_int),
    "dnnl_post_ops_append_binary": (_P, c_int, _P),
    "dnnl_post_ops_append_prelu": (_P, c_int),
    "dnnl_post_ops_append_dw": (_P, c_int, c_int, c_int, c_int64, c_int64, c_int64),
    "dnnl_post_ops_destroy": (_P,),
    "dnnl_primitive_attr_create": (_OUT,),
    "dnnl_primitive_attr_set_fpmath_mode": (_P, c_int),
    "dnnl_primitive_attr_set_scratchpad_mode": (_P, c_int),
    "dnnl_primitive_attr_set_scales_mask": (_P, c_int, c_int),
    "dnnl_primitive_attr_set_zero_points_mask": (_P, c_int, c_int),
    "dnnl_primitive_attr_set_post_ops": (_P, _P),
    "dnnl_primitive_attr_destroy": (_P,),
    "dnnl_primitive_desc_query": (_P, c_int, c_int, _P),
    "dnnl_primitive_desc_next_impl": (_P,),
    "dnnl_primitive_desc_destroy": (_P,),
    "dnnl_primitive_create": (_OUT, _P),
    "dnnl_primitive_execute": (_P, _P, c_int, _P),
    "dnnl_primitive_destroy": (_P,),
    "dnnl_reorder_primitive_desc_create": (_OUT, _P, _P, _P, _P, _P),
    "dnnl_concat_primitive_desc_create": (_OUT, _P, _P, c_int, c_int, _OUT, _P),
    "dnnl_sum_primitive_desc_create": (_OUT, _P, _P, c_int, POINTER(_F), _OUT, _P),
    "dnnl_binary_primitive_desc_create": (_OUT, _P, c_int, _P, _P, _P, _P),
    "dnnl_convolution_forward_primitive_desc_create": (
        *(_OUT, _P, c_int, c_int, _P, _P, _P, _P),
        *(_DIMS, _DIMS, _DIMS, _DIMS, _P),
    ),
    "dnnl_deconvolution_forward_primitive_desc_create": (
        *(_OUT, _P, c_int, c_int, _P, _P, _P, _P),
        *(_DIMS, _DIMS, _DIMS, _DIMS, _P),
    ),
    "dnnl_shuffle_forward_primitive_desc_create": (_OUT, _P, c_int, _P, _P, c_int, c_int64, _P),
    "dnnl_eltwise_forward_primitive_desc_create": (_OUT, _P, c_int, c_int, _P, _P, _F, _F, _P),
    "dnnl_softmax_forward_primitive_desc_create": (_OUT, _P, c_int, c_int, _P, _P, c_int, _P),
    "dnnl_pooling_forward_primitive_desc_create": (
        *(_OUT, _P, c_int, c_int, _P, _P),
        *(_DIMS, _DIMS, _DIMS, _DIMS, _DIMS, _P),
    ),
    "dnnl_prelu_forward_primitive_desc_create": (_OUT, _P, c_int, _P, _P, _P, _P),
    "dnnl_lrn_forward_primitive_desc_create": (_OUT, _P, c_int, c_int, _P, _P, c_int64, _F, _F, _F, _P),
    "dnnl_batch_normalization_forward_primitive_desc_create": (_OUT, _P, c_int, _P, _P, _F, c_uint, _P),
    "dnnl_layer_normalization_forward_primitive_desc_create": (_OUT, _P, c_int, _P, _P, _P, _F, c_uint, _P),
    "dnnl_inner_product_forward_primitive_desc_create": (_OUT, _P, c_int, _P, _P, _P, _P, _P),
    "dnnl_matmul_primitive_desc_create": (_OUT, _P, _P, _P, _P, _P, _P),
    "dnnl_resampling_forward_primitive_desc_create": (_OUT, _P, c_int, c_int, POINTER(_F), _P, _P, _P),
    "dnnl_reduction_primitive_desc_create": (_OUT, _P, c_int, _P, _P, _F, _F, _P),
}


class Library:
    """The loaded library: its functions with declared signatures, and what it says about itself.

    Raises `BackendUnavailable` from the constructor when the file cannot be loaded or is not a usable oneDNN.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._dll = _load(path)
        try:
            self._declare()
        except AttributeError as error:
            raise BackendUnavailable(
                f"{path} is not a oneDNN 3.2 library with OpenMP threads: {error}"
            ) from error
        self._functions: dict[str, Callable[..., int]] = {
            name: getattr(self._dll, name) for name in _STATUS_FUNCTIONS
        }
        self.version: tuple[int, int, int] = self._check_version()

    def _declare(self) -> None:
        dll = self._dll
        for name, arguments in _STATUS_FUNCTIONS.items():
            function = getattr(dll, name)
            function.argtypes = arguments
            function.restype = c_int
        dll.dnnl_version.argtypes = ()
        dll.dnnl_version.restype = POINTER(_Version)
        dll.dnnl_get_effective_cpu_isa.argtypes = ()
        dll.dnnl_get_effective_cpu_isa.restype = c_int
        dll.dnnl_memory_desc_equal.argtypes = (c_void_p, c_void_p)
        dll.dnnl_memory_desc_equal.restype = c_int
        dll.dnnl_memory_desc_get_size.argtypes = (c_void_p,)
        dll.dnnl_memory_desc_get_size.restype = c_size_t
        dll.dnnl_primitive_desc_query_md.argtypes = (c_void_p, c_int, c_int)
        dll.dnnl_primitive_desc_query_md.restype = c_void_p
        # dlsym on a library's handle also looks into what it depends on, so these are the functions of the
        # very OpenMP runtime that this oneDNN uses, whatever other runtimes the process has loaded.
        dll.omp_set_num_threads.argtypes = (c_int,)
        dll.omp_set_num_threads.restype = None
        dll.omp_get_max_threads.argtypes = ()
        dll.omp_get_max_threads.restype = c_int
        # machine code asks for it, nothing else
        self._parallel = (cast(dll.GOMP_parallel, c_void_p).value or 0) if hasattr(dll, "GOMP_parallel") else 0

    def _check_version(self) -> tuple[int, int, int]:
        version = self._dll.dnnl_version().contents
        number = (int(version.major), int(version.minor), int(version.patch))
        if not (3, 2, 0) <= number < (4, 0, 0):
            found = ".".join(map(str, number))
            raise BackendUnavailable(f"{self.path} is oneDNN {found}; 3.2 or a later 3.x is needed")
        if version.cpu_runtime != _RUNTIME_OMP:
            raise BackendUnavailable(
                f"{self.path} is a oneDNN built without OpenMP threads, which are needed"
            )
        return number

    @property
    def version_string(self) -> str:
        """Such as `3.2.0`."""
        return ".".join(map(str, self.version))

    @property
    def isa(self) -> str:
        """Name of the instruction set that oneDNN generates code for here, such as `avx512_core`."""
        code: int = self._dll.dnnl_get_effective_cpu_isa()
        return isa_name(code)

    def set_num_threads(self, count: int) -> None:
        """Sets how many OpenMP threads oneDNN uses when called from the calling thread.

        The number belongs to the calling thread and must be in force both when a primitive is created (its
        work is split then, its scratchpad sized) and when it is executed. Raises `BackendError` for a count
        below 1.
        """
        if count < 1:
            raise BackendError(f"the number of threads must be at least 1, not {count}")
        self._dll.omp_set_num_threads(count)

    @property
    def parallel_address(self) -> int:
        """Where libgomp's GOMP_parallel is, which runs a function on all threads; 0 where there is none."""
        return self._parallel

    def get_max_threads(self) -> int:
        """How many OpenMP threads oneDNN uses when called from the calling thread."""
        count: int = self._dll.omp_get_max_threads()
        return count

    def function(self, name: str) -> Callable[..., int]:
        """The C function of that name that returns a status, for callers that check the status themselves."""
        return self._functions[name]

    def call(self, name: str, *arguments: object) -> None:
        """Calls a C function; a status other than success raises `Unimplemented` or `BackendError`."""
        status = self._functions[name](*arguments)
        if status:
            raise status_error(name, status)

    def create(self, name: str, *arguments: object) -> int:
        """Calls a C function whose first argument is the address of a handle, and returns the handle."""
        handle = c_void_p()
        status = self._functions[name](ctypes.byref(handle), *arguments)
        if status:
            raise status_error(name, status)
        if handle.value is None:
            raise BackendError(f"oneDNN: {name} succeeded and returned no object")
        return handle.value

    def descriptors_equal(self, left: int, right: int) -> bool:
        """`dnnl_memory_desc_equal`."""
        equal: int = self._dll.dnnl_memory_desc_equal(left, right)
        return bool(equal)

    def descriptor_size(self, descriptor: int) -> int:
        """`dnnl_memory_desc_get_size`, in bytes."""
        size: int = self._dll.dnnl_memory_desc_get_size(descriptor)
        return size

    def query_descriptor(self, primitive_descriptor: int, what: int, index: int) -> int | None:
        """`dnnl_primitive_desc_query_md`: a pointer valid as long as the primitive descriptor, or None."""
        pointer: int | None = self._dll.dnnl_primitive_desc_query_md(primitive_descriptor, what, index)
        return pointer


def status_error(name: str, status: int) -> BackendError:
    """The exception for a status that a C function returned."""
    known = 0 <= status < len(_STATUS_NAMES)
    text = _STATUS_NAMES[status] if known else f"unknown status {status}"
    message = f"oneDNN: {name} failed with status {text}"
    if status in (_UNIMPLEMENTED, _LAST_IMPLEMENTATION):
        return Unimplemented(message)
    return BackendError(message)


_lock = threading.Lock()
_loaded: Library | None = None


def library() -> Library:
    """The library, loaded at the first call.

    Raises `BackendUnavailable` where there is none; the message says what to install.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = Library(find_library())
        return _loaded


def find_library() -> str:
    """Path (or, as the last resort, bare name for the system's loader) of the oneDNN library to load.

    Order: `TASO_ONEDNN_LIBRARY`, the files of the installed package, `<sys.prefix>/lib`, the system's loader.
    Raises `BackendUnavailable` if the variable names a file that does not exist.
    """
    override = os.environ.get(_OVERRIDE)
    if override:
        if not Path(override).is_file():
            raise BackendUnavailable(f"{_OVERRIDE} names {override}, which is not a file")
        return override
    for candidate in _installed_files():
        if candidate.is_file():
            return str(candidate)
    return _FILE_NAME


def _installed_files() -> Iterator[Path]:
    import importlib.metadata  # here because it is slow to import and needed only where oneDNN is used

    try:
        files = importlib.metadata.files(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == _FILE_NAME:
            yield Path(str(file.locate())).resolve()
    yield Path(sys.prefix) / "lib" / _FILE_NAME


def _load(path: str) -> ctypes.CDLL:
    try:
        with _short_spin():
            return ctypes.CDLL(path)
    except OSError as error:
        raise BackendUnavailable(explain_load_error(path, str(error))) from error


_SPIN_COUNT = "10000"
"""How often a thread of GNU OpenMP looks before it sleeps: longer than between two kernels of a graph, and short enough
that on a busy machine a waiting thread soon gives its core to the one that it waits for."""


@contextmanager
def _short_spin() -> Iterator[None]:
    """GNU OpenMP reads its settings when it is loaded; what the user has set stands."""
    if any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")):
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]


def explain_load_error(path: str, message: str) -> str:
    """A sentence that says what to install, from the loader's message about the library at `path`."""
    for soname, (deb, rpm) in _SYSTEM_PACKAGES.items():
        if message.startswith(soname):
            return (
                f"oneDNN needs the system library {soname}, which is missing: "
                f"install it with `apt install {deb}` or `dnf install {rpm}`"
            )
    if not os.path.isabs(path) and message.startswith(path):
        return (
            f"the oneDNN library ({_FILE_NAME}) is not installed: "
            f"`pip install {_DISTRIBUTION}` (Linux on x86-64 only)"
        )
    return f"the oneDNN library {path} cannot be loaded: {message}"
