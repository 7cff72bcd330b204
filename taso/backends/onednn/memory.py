"""oneDNN's element types, engine, descriptors (shape, type, layout) and memory objects over addresses."""

from __future__ import annotations

import ctypes
import enum
import functools
import math
from collections.abc import Sequence
from ctypes import byref, c_int, c_int64, c_void_p

import numpy as np
from numpy.typing import NDArray

from taso.backends.onednn.library import MAX_DIMENSIONS, Dims, Library, library, status_error
from taso.backends.pages import zeroed
from taso.backends.places import row_major_strides
from taso.graph.errors import BackendError

_CPU = 1
_IN_ORDER = 1
_FORMAT_ANY = 1
_FORMAT_BLOCKED = 2

_QUERY_STRIDES = 14
_QUERY_NDIMS = 256
_QUERY_DIMS = 257
_QUERY_DATA_TYPE = 258
_QUERY_OFFSET = 259
_QUERY_PADDED_DIMS = 260
_QUERY_FORMAT_KIND = 262
_QUERY_INNER_COUNT = 263
_QUERY_INNER_BLOCKS = 264
_QUERY_INNER_INDICES = 265

_TAG_ANY = 1

# Values of dnnl_format_tag_t for layouts whose channels are blocked, which a C++ user knows as nChw16c and
# the like. Plain layouts of any order are made from strides; blocked weights come from a primitive's own
# choice (`any`).
_BLOCKED_TAGS = {
    **{"aBc4b": 60, "aBc8b": 69, "aBc16b": 56, "aBc32b": 59},
    **{"aBcd4b": 84, "aBcd8b": 102, "aBcd16b": 78, "aBcd32b": 83},
    **{"aBcde4b": 128, "aBcde8b": 142, "aBcde16b": 121, "aBcde32b": 127},
}


class DataType(enum.IntEnum):
    """Element types of oneDNN's CPU engine; the value is that of `dnnl_data_type_t`.

    Moving S32 (reorder, concat) is exact; oneDNN's elementwise, pooling and reduction primitives compute it
    in float32 and so round what has more than 24 bits. Sums of products of U8 and S8 are exact on processors
    with VNNI; on others two products added may saturate at 16 bits, unless the U8 values stay below 128.
    """

    F16 = 1
    BF16 = 2
    F32 = 3
    S32 = 4
    S8 = 5
    U8 = 6

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEM_SIZES[self]

    @staticmethod
    def of_numpy(dtype: np.dtype[np.generic]) -> DataType:
        """The element type of a NumPy dtype (bfloat16 by its name); `BackendError` if there is none."""
        found = _FROM_NUMPY.get(dtype.name)
        if found is None or not dtype.isnative:
            raise BackendError(f"oneDNN has no element type for NumPy's {dtype}")
        return found


_ITEM_SIZES = {
    **{DataType.F16: 2, DataType.BF16: 2, DataType.F32: 4},
    **{DataType.S32: 4, DataType.S8: 1, DataType.U8: 1},
}
_FROM_NUMPY = {
    **{"float16": DataType.F16, "bfloat16": DataType.BF16, "float32": DataType.F32},
    **{"int32": DataType.S32, "int8": DataType.S8, "uint8": DataType.U8},
}


class Engine:
    """The CPU engine and its one in-order stream; use `engine()`, which makes it once per process.

    Neither is ever destroyed: primitives and memory objects refer to them until the process ends.
    """

    def __init__(self, lib: Library) -> None:
        self.library = lib
        self.handle = lib.create("dnnl_engine_create", _CPU, 0)
        self.stream = lib.create("dnnl_stream_create", self.handle, _IN_ORDER)


@functools.lru_cache(maxsize=1)
def engine() -> Engine:
    """The process's engine. Raises `BackendUnavailable` if the library cannot be loaded."""
    return Engine(library())


class Handle:
    """Owner of one C object, which is destroyed with it."""

    _handle: int | None = None

    def __init__(self, lib: Library, handle: int, destroy: str) -> None:
        self._library = lib
        self._destroy = lib.function(destroy)
        self._handle = handle

    @property
    def handle(self) -> int:
        """Address of the C object."""
        if self._handle is None:
            raise BackendError(f"oneDNN: this {type(self).__name__} was not created")
        return self._handle

    def __del__(self) -> None:
        if self._handle is not None:
            self._destroy(self._handle)
            self._handle = None


def dims_array(values: Sequence[int]) -> ctypes.Array[c_int64]:
    """A `dnnl_dims_t`; `BackendError` for more values than oneDNN has dimensions."""
    if len(values) > MAX_DIMENSIONS:
        raise BackendError(f"oneDNN has at most {MAX_DIMENSIONS} dimensions, not {len(values)}")
    return Dims(*values)


class MemoryDesc(Handle):
    """An immutable memory descriptor: logical dimensions, element type, and how elements lie in memory.

    Equality is oneDNN's own (`dnnl_memory_desc_equal`). Make one with a class method; invalid dimensions,
    strides or tags raise `BackendError`.
    """

    def __init__(self, handle: int) -> None:
        super().__init__(library(), handle, "dnnl_memory_desc_destroy")

    @classmethod
    def plain(cls, dims: Sequence[int], dtype: DataType) -> MemoryDesc:
        """Dense, last dimension innermost: NumPy's C order."""
        return cls.strided(dims, dtype, row_major_strides(dims))

    @classmethod
    def strided(cls, dims: Sequence[int], dtype: DataType, strides: Sequence[int]) -> MemoryDesc:
        """Without blocks, with the given strides in elements."""
        _check_dims(dims)
        if len(strides) != len(dims):
            raise BackendError(f"strides {tuple(strides)} do not fit dimensions {tuple(dims)}")
        create = "dnnl_memory_desc_create_with_strides"
        return cls(library().create(create, len(dims), dims_array(dims), int(dtype), dims_array(strides)))

    @classmethod
    def tagged(cls, dims: Sequence[int], dtype: DataType, tag: str) -> MemoryDesc:
        """By a format tag in oneDNN's letters: any order such as `acdb` (NHWC), or `aBcd16b` (nChw16c) and
        its like.

        Blocked tags are those with channels in blocks of 4, 8, 16 or 32 and one to three spatial dimensions.
        """
        _check_dims(dims)
        if sorted(tag) == [chr(ord("a") + axis) for axis in range(len(dims))]:
            return cls._ordered(dims, dtype, [ord(letter) - ord("a") for letter in tag])
        value = _BLOCKED_TAGS.get(tag)
        if value is None:
            raise BackendError(f"there is no format tag {tag!r} for {len(dims)} dimensions")
        return cls._with_tag(dims, dtype, value)

    @classmethod
    def any(cls, dims: Sequence[int], dtype: DataType) -> MemoryDesc:
        """Layout left to the primitive that it is given to."""
        _check_dims(dims)
        return cls._with_tag(dims, dtype, _TAG_ANY)

    @classmethod
    def of_array(cls, array: NDArray[np.generic]) -> MemoryDesc:
        """Of a NumPy array with one dimension at least, with its strides."""
        item = array.itemsize
        if any(stride < 0 or stride % item for stride in array.strides):
            raise BackendError(f"oneDNN cannot address an array with byte strides {array.strides}")
        strides = [stride // item for stride in array.strides]
        return cls.strided(array.shape, DataType.of_numpy(array.dtype), strides)

    @classmethod
    def _ordered(cls, dims: Sequence[int], dtype: DataType, order: Sequence[int]) -> MemoryDesc:
        inner = row_major_strides([dims[axis] for axis in order])
        strides = [0] * len(dims)
        for axis, stride in zip(order, inner, strict=True):
            strides[axis] = stride
        return cls.strided(dims, dtype, strides)

    @classmethod
    def _with_tag(cls, dims: Sequence[int], dtype: DataType, tag: int) -> MemoryDesc:
        create = "dnnl_memory_desc_create_with_tag"
        return cls(library().create(create, len(dims), dims_array(dims), int(dtype), tag))

    @classmethod
    def copy_of(cls, pointer: int) -> MemoryDesc:
        """A copy of a descriptor that something else owns."""
        return cls(library().create("dnnl_memory_desc_clone", pointer))

    def clone(self) -> MemoryDesc:
        """A second descriptor, equal to this one."""
        return MemoryDesc.copy_of(self.handle)

    def with_any_layout(self) -> MemoryDesc:
        """The same dimensions and element type, layout left open."""
        return MemoryDesc.any(self.dims, self.dtype)

    def submemory(self, dims: Sequence[int], offsets: Sequence[int]) -> MemoryDesc:
        """The region of these dimensions that starts at these logical offsets; on the same address."""
        if len(dims) != self.ndims or len(offsets) != self.ndims:
            raise BackendError(
                f"region {tuple(dims)} at {tuple(offsets)} does not fit dimensions {self.dims}"
            )
        create = "dnnl_memory_desc_create_submemory"
        return MemoryDesc(self._library.create(create, self.handle, dims_array(dims), dims_array(offsets)))

    def reshape(self, dims: Sequence[int]) -> MemoryDesc:
        """The same elements under other dimensions; `BackendError` where that needs data to move."""
        _check_dims(dims)
        create = "dnnl_memory_desc_reshape"
        return MemoryDesc(self._library.create(create, self.handle, len(dims), dims_array(dims)))

    def permute(self, order: Sequence[int]) -> MemoryDesc:
        """The same elements, dimension `i` of the result being `order[i]` of this (as in NumPy's
        transpose).
        """
        if sorted(order) != list(range(self.ndims)):
            raise BackendError(f"{tuple(order)} is not a permutation of {self.ndims} dimensions")
        target = (c_int * self.ndims)()
        for position, axis in enumerate(order):
            target[axis] = position
        return MemoryDesc(self._library.create("dnnl_memory_desc_permute_axes", self.handle, target))

    @functools.cached_property
    def ndims(self) -> int:
        """Number of dimensions; 0 for the descriptor of something that a primitive does not have."""
        return self._integer(_QUERY_NDIMS)

    @functools.cached_property
    def dims(self) -> tuple[int, ...]:
        """Logical dimensions."""
        return self._vector(_QUERY_DIMS, self.ndims)

    @functools.cached_property
    def padded_dims(self) -> tuple[int, ...]:
        """Dimensions rounded up to whole blocks."""
        return self._vector(_QUERY_PADDED_DIMS, self.ndims)

    @functools.cached_property
    def dtype(self) -> DataType:
        """Element type."""
        return DataType(self._integer(_QUERY_DATA_TYPE))

    @functools.cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements (of a blocked dimension, from block to block); empty if `any` or opaque."""
        return self._vector(_QUERY_STRIDES, self.ndims) if self._format == _FORMAT_BLOCKED else ()

    @functools.cached_property
    def inner_blocks(self) -> tuple[tuple[int, int], ...]:
        """`(axis, block size)` of the inner blocks, outermost first."""
        if self._format != _FORMAT_BLOCKED:
            return ()
        count = self._integer(_QUERY_INNER_COUNT)
        axes = self._vector(_QUERY_INNER_INDICES, count)
        return tuple(zip(axes, self._vector(_QUERY_INNER_BLOCKS, count), strict=True))

    @functools.cached_property
    def offset(self) -> int:
        """Elements before the first one, from the memory's address on; not 0 for a region only."""
        return self._integer64(_QUERY_OFFSET)

    @functools.cached_property
    def size(self) -> int:
        """Bytes that a memory object of this descriptor may touch, from its address on; 0 for `any`.

        With padding, and for a region with what lies before and between its elements.
        """
        if self.offset:
            return (self.offset + self._span()) * self.dtype.itemsize
        return self._library.descriptor_size(self.handle) if self.ndims else 0

    @functools.cached_property
    def key(self) -> str:
        """Text that is equal for equal descriptors in every process, for use in caches.

        Element type, dimensions and strides, then blocks, offset, and size where these do not follow.
        """
        if not self.ndims:
            return "none"
        head = f"{self.dtype.name.lower()}:{'x'.join(map(str, self.dims))}"
        if self.is_any:
            return f"{head}:any"
        if self._format != _FORMAT_BLOCKED:
            return f"{head}:opaque:{self.size}"
        parts = [head, ",".join(map(str, self.strides))]
        if self.inner_blocks:
            parts.append("".join(f"{size}{_letter(axis)}" for axis, size in self.inner_blocks))
            # Some layouts carry compensation terms behind the elements, which nothing but the size tells.
            parts.append(f"{'x'.join(map(str, self.padded_dims))}:{self.size}")
        if self.offset:
            parts.append(f"@{self.offset}")
        return ":".join(parts)

    @functools.cached_property
    def layout(self) -> str:
        """The format in oneDNN's letters, such as `abcd`, `acdb`, `aBcd16b`; `any` and `opaque` for those."""
        if self.is_any:
            return "any"
        if self._format != _FORMAT_BLOCKED:
            return "opaque"
        blocked = {axis for axis, _ in self.inner_blocks}
        order = sorted(range(self.ndims), key=lambda axis: (-self.strides[axis], axis))
        outer = "".join(_letter(axis).upper() if axis in blocked else _letter(axis) for axis in order)
        return outer + "".join(f"{size}{_letter(axis)}" for axis, size in self.inner_blocks)

    @property
    def is_any(self) -> bool:
        """Whether the layout is left open."""
        return self._format == _FORMAT_ANY

    @property
    def is_plain(self) -> bool:
        """Whether strides alone say where each element is (no blocks, not opaque)."""
        return self._format == _FORMAT_BLOCKED and not self.inner_blocks

    @property
    def is_dense_row_major(self) -> bool:
        """Whether this is the layout of a C-ordered NumPy array."""
        if not self.is_plain or self.offset:
            return False
        wanted = row_major_strides(self.dims)
        return all(
            extent <= 1 or stride == expected
            for extent, stride, expected in zip(self.dims, self.strides, wanted, strict=True)
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MemoryDesc):
            return NotImplemented
        return self is other or self._library.descriptors_equal(self.handle, other.handle)

    def __hash__(self) -> int:
        return hash((self.ndims, self.dims))

    def __repr__(self) -> str:
        return f"MemoryDesc({self.key})"

    @functools.cached_property
    def _format(self) -> int:
        return self._integer(_QUERY_FORMAT_KIND)

    def _span(self) -> int:
        if 0 in self.dims:
            return 0
        block = math.prod(size for _, size in self.inner_blocks)
        outer = list(self.padded_dims)
        for axis, size in self.inner_blocks:
            outer[axis] //= size
        return sum((count - 1) * stride for count, stride in zip(outer, self.strides, strict=True)) + block

    def _integer(self, what: int) -> int:
        value = c_int()
        self._library.call("dnnl_memory_desc_query", self.handle, what, byref(value))
        return value.value

    def _integer64(self, what: int) -> int:
        value = c_int64()
        self._library.call("dnnl_memory_desc_query", self.handle, what, byref(value))
        return value.value

    def _vector(self, what: int, count: int) -> tuple[int, ...]:
        values = ctypes.POINTER(c_int64)()
        self._library.call("dnnl_memory_desc_query", self.handle, what, byref(values))
        return tuple(values[:count]) if count else ()


def _check_dims(dims: Sequence[int]) -> None:
    if not 1 <= len(dims) <= MAX_DIMENSIONS:
        raise BackendError(f"oneDNN takes 1 to {MAX_DIMENSIONS} dimensions, not {tuple(dims)}")


def _letter(axis: int) -> str:
    return chr(ord("a") + axis)


class Memory(Handle):
    """A memory object: a descriptor together with an address, which the caller (or `owner`) keeps alive.

    Raises `BackendError` for a descriptor whose layout is open.
    """

    def __init__(self, desc: MemoryDesc, address: int | None = None, owner: object = None) -> None:
        if desc.is_any:
            raise BackendError(f"a memory object needs a layout: {desc}")
        held = engine()
        created = held.library.create("dnnl_memory_create", desc.handle, held.handle, address)
        super().__init__(held.library, created, "dnnl_memory_destroy")
        self.desc = desc
        self._owner = owner
        self._set_address = held.library.function("dnnl_memory_set_data_handle")

    @classmethod
    def from_array(cls, array: NDArray[np.generic], desc: MemoryDesc | None = None) -> Memory:
        """Over a NumPy array's data, which stays alive with it; `desc` reads the same bytes in another way.

        Raises `BackendError` if `desc` needs more bytes than the array has.
        """
        if desc is None:
            return cls(MemoryDesc.of_array(array), array.ctypes.data, array)
        if not array.flags.c_contiguous or array.nbytes < desc.size:
            raise BackendError(f"{desc} needs {desc.size} contiguous bytes; the array has {array.nbytes}")
        return cls(desc, array.ctypes.data, array)

    @classmethod
    def allocate(cls, desc: MemoryDesc) -> Memory:
        """Over fresh, zeroed memory of its own."""
        buffer = zeroed(desc.size)
        return cls(desc, buffer.ctypes.data, buffer)

    def set_data_handle(self, address: int, owner: object = None) -> None:
        """Moves it to another address; calls that it is bound to follow at their next run."""
        status = self._set_address(self._handle, address)
        if status:
            raise status_error("dnnl_memory_set_data_handle", status)
        self._owner = owner

    @property
    def address(self) -> int:
        """Where its first byte is; 0 if it was never set."""
        address = c_void_p()
        self._library.call("dnnl_memory_get_data_handle", self.handle, byref(address))
        return address.value or 0

    def array(self) -> NDArray[np.generic]:
        """A NumPy view of it (bfloat16 as uint16), alive as long as the view is.

        Raises `BackendError` for a layout with blocks, which NumPy cannot address.
        """
        desc = self.desc
        if not desc.is_plain:
            raise BackendError(
                f"NumPy cannot address the layout {desc.layout}; reorder it to a plain one first"
            )
        dtype = _TO_NUMPY[desc.dtype]
        return np.asarray(_Exposed(self, dtype))


class _Exposed:
    """What NumPy reads to view a plain memory; it keeps the memory alive for as long as the view is."""

    def __init__(self, memory: Memory, dtype: np.dtype[np.generic]) -> None:
        desc = memory.desc
        self.memory = memory
        self.__array_interface__ = {
            "version": 3,
            "shape": desc.dims,
            "typestr": dtype.str,
            "data": (memory.address + desc.offset * dtype.itemsize, False),
            "strides": tuple(stride * dtype.itemsize for stride in desc.strides),
        }


_TO_NUMPY: dict[DataType, np.dtype[np.generic]] = {
    DataType.F16: np.dtype(np.float16),
    DataType.BF16: np.dtype(np.uint16),
    DataType.F32: np.dtype(np.float32),
    DataType.S32: np.dtype(np.int32),
    DataType.S8: np.dtype(np.int8),
    DataType.U8: np.dtype(np.uint8),
}
