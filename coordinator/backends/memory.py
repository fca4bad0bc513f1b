"""The memory that an engine knows: one mapping, registered once, given out in blocks. Never unmapped while in use.

A peer's engine is told addresses in it, so it stays where it is for the life of the process; what comes and goes are
blocks. A block that was given back may be given out again at once: whoever gives one back vouches that nobody writes
into it any more.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import insort
from dataclasses import dataclass
from threading import Lock

from ..errors import ConfigError
from .errors import OutOfMemory

UNIT = 4096


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes at `offset` of the memory, `address` in this process. `length` is what was asked for."""

    offset: int
    length: int
    address: int


class Memory:
    """`size_bytes` of anonymous memory, rounded up to whole pages. Thread-safe."""

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < 1:
            raise ConfigError(f"an engine with {size_bytes} bytes of memory can hold nothing: give it some")
        self.size = _rounded(size_bytes)
        self._map = mmap.mmap(-1, self.size)
        self._view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._lock = Lock()
        self._free: list[tuple[int, int]] = [(0, self.size)]  # (offset, length), sorted, never adjacent

    @property
    def free_bytes(self) -> int:
        """Bytes in no block; `size` when all were given back."""
        with self._lock:
            return sum(length for _, length in self._free)

    def take(self, length: int) -> Block:
        """A block for `length` bytes; its content is whatever was there. Raises OutOfMemory."""
        if length < 1:
            raise ValueError(f"a block of {length} bytes is none")
        wanted = _rounded(length)
        with self._lock:
            for i, (offset, free) in enumerate(self._free):
                if free >= wanted:
                    self._free[i : i + 1] = [(offset + wanted, free - wanted)] if free > wanted else []
                    return Block(offset, length, self.address + offset)
        raise OutOfMemory(
            f"no {length} bytes in one piece are free of {self.size}: give the engine a larger size_bytes"
        )

    def give_back(self, block: Block) -> None:
        """Take a block back. Once per block."""
        with self._lock:
            insort(self._free, (block.offset, _rounded(block.length)))
            joined: list[tuple[int, int]] = []
            for offset, length in self._free:
                if joined and sum(joined[-1]) == offset:
                    offset, length = joined[-1][0], joined.pop()[1] + length  # noqa: PLW2901
                joined.append((offset, length))
            self._free = joined

    def view(self, block: Block) -> memoryview:
        """The bytes of a block, to be read and written in place."""
        return self._view[block.offset : block.offset + block.length]


def _rounded(length: int) -> int:
    return -(-length // UNIT) * UNIT
