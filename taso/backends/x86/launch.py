"""Kernels of machine code as launches of a recipe (`taso.backends.recipe`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from taso.backends.places import Place
from taso.backends.recipe import Call
from taso.backends.x86 import depthwise, products, tiles
from taso.backends.x86.depthwise import Depthwise
from taso.backends.x86.products import Product
from taso.backends.x86.tiles import RowOfTiles, Transform

NAME = "x86:avx512"
"""What these launches are called beside those of oneDNN."""


@dataclass(frozen=True)
class ProductLaunch:
    """A product and the buffers of its matrices and of what its posts read.

    `parallel` is the address of libgomp's GOMP_parallel.
    """

    product: Product
    parallel: int
    left: Place
    panels: Place
    out: Place
    others: tuple[Place, ...] = ()

    @property
    def name(self) -> str:
        return NAME

    def bind(self, address: Callable[[Place], int]) -> tuple[Call, object]:
        code = products.compiled(self.product, self.parallel)
        return code.bind(
            address(self.left), address(self.panels), address(self.out), [address(place) for place in self.others]
        )

    def moved(self, to: Callable[[Place], Place]) -> ProductLaunch:
        """The same on other buffers."""
        others = tuple(to(place) for place in self.others)
        return replace(self, left=to(self.left), panels=to(self.panels), out=to(self.out), others=others)


@dataclass(frozen=True)
class TransformLaunch:
    """A transform of rows of tiles, and the buffers of the picture, of the tiles and of what its posts read."""

    transform: Transform
    parallel: int
    rows: tuple[RowOfTiles, ...]
    picture: Place
    tiles: Place
    others: tuple[Place, ...] = ()

    @property
    def name(self) -> str:
        return NAME

    def bind(self, address: Callable[[Place], int]) -> tuple[Call, object]:
        code = tiles.compiled(self.transform, self.parallel)
        return code.bind(
            self.rows, address(self.picture), address(self.tiles), [address(place) for place in self.others]
        )

    def moved(self, to: Callable[[Place], Place]) -> TransformLaunch:
        """The same on other buffers."""
        others = tuple(to(place) for place in self.others)
        return replace(self, picture=to(self.picture), tiles=to(self.tiles), others=others)


@dataclass(frozen=True)
class DepthwiseLaunch:
    """A depthwise convolution and the buffers of its data, filters and result and of what its posts read."""

    problem: Depthwise
    parallel: int
    data: Place
    filters: Place
    out: Place
    others: tuple[Place, ...] = ()

    @property
    def name(self) -> str:
        return NAME

    def bind(self, address: Callable[[Place], int]) -> tuple[Call, object]:
        code = depthwise.compiled(self.problem, self.parallel)
        return code.bind(
            address(self.data), address(self.filters), address(self.out), [address(place) for place in self.others]
        )

    def moved(self, to: Callable[[Place], Place]) -> DepthwiseLaunch:
        """The same on other buffers."""
        others = tuple(to(place) for place in self.others)
        return replace(self, data=to(self.data), filters=to(self.filters), out=to(self.out), others=others)


CodeLaunch = (ProductLaunch, TransformLaunch, DepthwiseLaunch)
"""All launches of machine code."""
