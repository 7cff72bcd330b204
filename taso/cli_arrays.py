"""Arrays from .npy and .npz files as the inputs of a graph, and its outputs as an .npz file."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping, Sequence

import numpy as np

from taso.backends.base import Array
from taso.graph.errors import InputError
from taso.graph.graph import Graph
from taso.search.optimize import given_sizes, measuring_sizes
from taso.search.verify import random_feeds

Feeds = dict[str, Array]


def feeds_of(
    graph: Graph, files: Sequence[str], shapes: Mapping[str, Sequence[int]], seed: int
) -> tuple[Feeds, list[str]]:
    """Values for all inputs of `graph`: those of `files`, and random ones for the rest, whose names come along.

    A file is "name.npz", "name.npy" where one input has no values yet, or "INPUT=name.npy". Random values take the
    sizes of symbolic dimensions from `files`, then from `shapes`. Raises `InputError` where anything does not fit.
    """
    given: Feeds = {}
    for file in files:
        _take(graph, file, given)
    missing = [name for name in graph.input_names if name not in given]
    if not missing:
        return given, []
    known = {name: array.shape for name, array in given.items() if 0 not in array.shape}
    sizes = {**measuring_sizes(graph, shapes), **given_sizes(graph, {**shapes, **known})}
    chosen = random_feeds(graph, sizes, seed)
    return {**{name: chosen[name] for name in missing}, **given}, missing


def _take(graph: Graph, file: str, given: Feeds) -> None:
    """Adds what one file holds to `given`."""
    name, equals, path = file.rpartition("=")
    if equals and os.path.exists(file):
        name, equals, path = "", "", file
    found = _read(path)
    if isinstance(found, dict):
        if equals:
            raise InputError(f"'{path}' names its arrays itself: give it without '{name}='")
        named = found
    else:
        open_inputs = [n for n in graph.input_names if n not in given]
        if not equals and len(open_inputs) != 1:
            raise InputError(f"'{path}' is for one of the inputs {open_inputs}: say which, as in NAME={path}")
        named = {name if equals else open_inputs[0]: found}
    types = dict(zip(graph.input_names, (v.type for v in graph.inputs), strict=True))
    for key, array in named.items():
        if key not in types:
            raise InputError(f"'{path}' gives '{key}', but the inputs are {list(types)}")
        if key in given:
            raise InputError(f"the input '{key}' is given twice")
        stored = types[key]
        if array.dtype.kind == "V" and stored.other is None and stored.dtype.itemsize == array.dtype.itemsize:
            # NumPy's files do not know bfloat16 and its like
            array = array.view(stored.dtype.numpy)
        given[key] = array.astype(object) if array.dtype.kind == "U" else array


def _read(path: str) -> Array | Feeds:
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.lib.npyio.NpzFile):
            with found:
                return {name: found[name] for name in found.files}
    except OSError as error:
        raise InputError(f"'{path}' cannot be read: {error.strerror or 'it is no .npy or .npz file'}") from error
    except (ValueError, EOFError, zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"'{path}' is no .npy or .npz file of numbers or strings") from error
    array: Array = found
    return array


def npz(arrays: Mapping[str, Array]) -> bytes:
    """The content of an .npz file; raises `InputError` for what no array is, such as a sequence."""
    # np.savez takes names as keywords, and some of them for its own
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray):
                raise InputError(f"the output '{name}' is no array, and an .npz file holds nothing else")
            plain = array.astype(str) if array.dtype == object else array
            with archive.open(name + ".npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(plain), allow_pickle=False)
    return buffer.getvalue()
