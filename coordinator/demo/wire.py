"""How the bytes of a room travel: one TCP connection a room, on the port after the node's own.

The worker writes one line, `ROOM <worker> <room> <tokens>\n`. The node answers with BYTES_PER_TOKEN bytes a token,
at STREAM_BYTES_PER_S so that rooms stay open for some hundred ms, then the CRC-32 of them in 4 bytes, and closes.
Everything else that a reader meets is a BrokenTransfer: too few bytes, a wrong sum, a connection refused or reset.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from ..rooms import check_room_id

BYTES_PER_TOKEN = 16
STREAM_BYTES_PER_S = 400_000
PACE_S = 0.06
_PIECE = round(STREAM_BYTES_PER_S * PACE_S)
_READ = 64 * 1024
_LINE = 256
MAX_TOKENS = 10_000_000


class BrokenTransfer(Exception):
    """The bytes of a room did not arrive; the message says how."""


@dataclass(frozen=True, slots=True)
class RoomRequest:
    """What a worker asks a node for."""

    worker: str
    room: int
    tokens: int

    @property
    def size(self) -> int:
        """Bytes that the node will stream, without the sum."""
        return max(1, self.tokens) * BYTES_PER_TOKEN

    def encode(self) -> bytes:
        """The line that asks for it."""
        return f"ROOM {self.worker} {self.room} {self.tokens}\n".encode("ascii")

    @classmethod
    def decode(cls, line: bytes) -> RoomRequest:
        """Read such a line; raise BrokenTransfer for anything else."""
        words = line.decode("ascii", "replace").split()
        try:
            if not line.endswith(b"\n") or len(line) > _LINE or len(words) != 4 or words[0] != "ROOM":
                raise ValueError("not a request for a room")
            tokens = int(words[3])
            if not 0 <= tokens <= MAX_TOKENS:
                raise ValueError(f"tokens must be from 0 to {MAX_TOKENS}")
            return cls(words[1], check_room_id(int(words[2])), tokens)
        except ValueError as exc:
            raise BrokenTransfer(f"{line[:80]!r}: {exc}") from None


def stream_port(address: str) -> int:
    """The port of a node's streams: the one after its address's."""
    return int(address.rpartition(":")[2]) + 1


async def send(writer: asyncio.StreamWriter, request: RoomRequest) -> None:
    """Stream one room at its pace and close. Raises OSError when the peer goes away."""
    pattern = request.room.to_bytes(8, "big") * (_PIECE // 8)
    left, crc = request.size, 0
    while left:
        piece = pattern[:left]
        writer.write(piece)
        crc = zlib.crc32(piece, crc)
        left -= len(piece)
        await writer.drain()
        if left:
            await asyncio.sleep(PACE_S)
    writer.write(crc.to_bytes(4, "big"))
    await writer.drain()


async def receive(reader: asyncio.StreamReader, size: int, began: Callable[[], None] = lambda: None) -> None:
    """Read one room to its end; `began` is called with its first bytes. Raises BrokenTransfer."""
    left, crc = size, 0
    try:
        while left:
            piece = await reader.read(min(left, _READ))
            if not piece:
                raise BrokenTransfer(f"the connection was closed {left} bytes before the end")
            if left == size:
                began()
            crc = zlib.crc32(piece, crc)
            left -= len(piece)
        told = await reader.readexactly(4)
    except asyncio.IncompleteReadError:
        raise BrokenTransfer("the connection was closed before the sum") from None
    except OSError as exc:
        raise BrokenTransfer(str(exc) or type(exc).__name__) from None
    if told != crc.to_bytes(4, "big"):
        raise BrokenTransfer("the bytes do not match their sum")
