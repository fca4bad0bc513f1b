"""How the bytes of a room travel by a transfer engine: the worker reads them out of the node's memory.

The connection is the one of wire.py and begins with the same line; the node answers `AT <instance> <address> <sum>\n`:
where in its memory the bytes lie, and their CRC-32. The worker reads them piece by piece through its engine, at the
same pace, checks them, and says `DONE\n`. Only then, or when the room is given up, does the node use that memory again.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..backends import (
    Backend,
    Block,
    MooncakeBackend,
    MooncakeEngine,
    NixlBackend,
    NixlEngine,
    PullingEngine,
    Session,
)
from ..backends.mooncake_engine import load as load_mooncake
from ..backends.nixl_engine import load as load_nixl
from ..decide.ledger import Room
from ..worker import Worker
from . import wire
from .roles import MOONCAKE, NIXL

PIECE = round(wire.STREAM_BYTES_PER_S * wire.PACE_S)
OLD_S, OLD_TRIES = 0.2, 25  # a restarted node may be asked before the store knows of it
_CONNECTING = 16
_DONE = b"DONE\n"


def make_engine(transport: str, name: str) -> PullingEngine | None:
    """The engine of a transport; None for plain TCP. Raises EngineMissing, EngineFailed."""
    if transport == MOONCAKE:
        return MooncakeEngine()
    return NixlEngine(name=name) if transport == NIXL else None


def require(transport: str) -> None:
    """Raise EngineMissing if the transport's package cannot be imported here."""
    if transport == MOONCAKE:
        load_mooncake()
    elif transport == NIXL:
        load_nixl()


@dataclass(frozen=True, slots=True)
class Offer:
    """What the node answers: its instance, where the bytes lie, and their sum."""

    instance: str
    address: int
    crc: int

    def encode(self) -> bytes:
        """The line that says so."""
        return f"AT {self.instance} {self.address} {self.crc}\n".encode("ascii")

    @classmethod
    def decode(cls, line: bytes) -> Offer:
        """Read such a line; raise BrokenTransfer for anything else."""
        if not line:
            raise wire.BrokenTransfer("the connection was closed before the node had said where the bytes are")
        words = line.decode("ascii", "replace").split()
        try:
            if not line.endswith(b"\n") or len(words) != 4 or words[0] != "AT":
                raise ValueError("not an offer")
            return cls(words[1], int(words[2]), int(words[3]))
        except ValueError as exc:
            raise wire.BrokenTransfer(f"{line[:80]!r}: {exc}") from None


def fill(engine: PullingEngine, request: wire.RoomRequest) -> tuple[Block, int]:
    """A block with the bytes of a room, and their sum. Raises OutOfMemory."""
    block = engine.lend(request.size)
    view = engine.memory.view(block)
    view[:] = (request.room.to_bytes(8, "big") * (request.size // 8 + 1))[: request.size]
    return block, zlib.crc32(view)


async def offer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: Offer) -> None:
    """Tell the worker where its bytes are and wait until it has them. Raises BrokenTransfer, OSError."""
    writer.write(what.encode())
    await writer.drain()
    if await reader.readline() != _DONE:
        raise wire.BrokenTransfer("the worker went away before it had read everything")


class Puller:
    """The worker's side: the backend of the transport, and rooms received through it."""

    def __init__(self, worker: Worker, engine: PullingEngine) -> None:
        kind = MooncakeBackend if engine.kind == MOONCAKE else NixlBackend
        self.engine, self.backend = engine, kind(worker, engine)
        self._pool = ThreadPoolExecutor(_CONNECTING, "connecting")  # connecting blocks while a node hangs

    async def receive(
        self,
        room: Room,
        size: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        began: Callable[[], None],
    ) -> None:
        """Read one room to its end. Raises BrokenTransfer, OSError, and what the engine raises."""
        at = Offer.decode(await reader.readline())
        session = await self._session(room.address, at.instance)
        with self.engine.receive(room, size) as transfer:
            for offset in range(0, size, PIECE):
                length = min(PIECE, size - offset)
                done = self.engine.read(transfer, session, at.address + offset, offset, length)
                await asyncio.wrap_future(done)
                if offset == 0:
                    began()
                if offset + length < size:
                    await asyncio.sleep(wire.PACE_S)
            if zlib.crc32(transfer.view) != at.crc:
                raise wire.BrokenTransfer("the bytes do not match their sum")
        writer.write(_DONE)
        await writer.drain()

    async def _session(self, address: str, instance: str) -> Session:
        """A session with this very life of the node: what the store and the cache say may be about the one before."""
        loop = asyncio.get_running_loop()
        for _ in range(OLD_TRIES):
            known = await loop.run_in_executor(self._pool, self.backend.peers.peer, address)
            if known.instance == instance:
                return await loop.run_in_executor(self._pool, self.backend.endpoint, address)
            self.backend.drop_peer(address)
            await asyncio.sleep(OLD_S)
        raise wire.BrokenTransfer(f"the store does not know instance {instance} of {address}")

    def leave(self, room: Room) -> bool:
        """Close a room the way the backend does; whether it left now."""
        if isinstance(self.backend, MooncakeBackend):
            self.backend.conclude(room)
        return room.leave()

    def close(self) -> None:
        """Let go of the engine."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.engine.close(1.0)


def report(backend: Backend[Session], address: str, error: BaseException) -> None:
    """Evidence of a broken transfer: what the engine makes of its own errors, and any other as it is."""
    if isinstance(error, OSError | wire.BrokenTransfer):
        backend.worker.report_transfer_error(address, str(error) or type(error).__name__)
    else:
        backend.transfer_failed(address, error)
