"""What is done with each element of a result before it is stored, while it is in a register."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

from taso.backends.x86.assembler import RAX, Assembler, Mem
from taso.backends.x86.functions import Function, write
from taso.backends.x86.worker import Worker


@dataclass(frozen=True)
class ByColumn:
    """Combines each row of the result with a vector: add, mul or sub."""

    operation: str


@dataclass(frozen=True)
class ByElement:
    """Combines the result with a tensor that lies as it does: add, mul or sub."""

    operation: str


Post = Union[ByColumn, ByElement, Function]
"""What is done with each element of a result, in order."""


@dataclass(frozen=True)
class Element:
    """A vector of a result: its register, how far it is behind the result's and the column's address, and its mask."""

    register: int
    offset: int
    column: int = 0
    mask: int = 0


def numbered(posts: Sequence[Post]) -> list[tuple[int, Post]]:
    """Posts, each with the number of its operand."""
    count, found = 0, list[tuple[int, Post]]()
    for post in posts:
        found.append((count, post))
        count += not isinstance(post, Function)
    return found


def operands(posts: Sequence[Post], result: int, addresses: Sequence[int]) -> list[int]:
    """What a worker's further arguments are: addresses of vectors, and how far tensors are behind the result."""
    own = [post for post in posts if not isinstance(post, Function)]
    return [at - result if isinstance(post, ByElement) else at for post, at in zip(own, addresses, strict=True)]


@dataclass(frozen=True)
class Finish:
    """Writes posts: `base` is the register with the address of the result, `column` that with how many bytes of a row
    are before it, `spare` registers that functions overwrite. RAX is overwritten, too."""

    asm: Assembler
    worker: Worker
    base: int
    column: int
    spare: tuple[int, ...]

    def vector(self, number: int) -> None:
        """RAX: where the vector of operand `number` has the columns at hand."""
        self.worker.other(RAX, number)
        self.asm.add_register(RAX, self.column)

    def write(self, posts: Sequence[tuple[int, Post]], elements: Sequence[Element]) -> None:
        for number, post in posts:
            if isinstance(post, Function):
                for element in elements:
                    write(self.asm, post, element.register, self.spare)
                continue
            if isinstance(post, ByColumn):
                self.vector(number)
            else:
                self.worker.other(RAX, number)
                self.asm.add_register(RAX, self.base)
            for e in elements:
                at = Mem(RAX, e.column if isinstance(post, ByColumn) else e.offset)
                self.asm.vector(post.operation, e.register, e.register, at, mask=e.mask)
