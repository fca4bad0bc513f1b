"""What the engines that move bytes have in common: the worker reads its rooms' bytes out of a node's memory.

The worker pulls, the node never writes. So every write into a worker's memory is a transfer that the worker itself
started, and its engine knows when the last of them is over. The other direction cannot be made safe by an engine: NIXL
over UCX goes on writing into memory that was deregistered, and a node that was only hung wakes up and writes on.

The rule: a transfer under way is settled when the library itself says so (done or failed), never before, however long
that takes; neither cancelling nor forgetting a peer stops bytes that are on their way. Until then the peer is
not forgotten and the room's block not given back, though both are refused to everybody at once. A mover thread asks
the library, resolves the futures, and then does what was waiting: first forgets peers, then gives blocks back.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from threading import Condition, Thread
from types import TracebackType
from typing import Any, Protocol

from ..rooms import Failure
from .errors import EngineFailed, EngineMissing, PeerFailed, Withdrawn
from .memory import Block, Memory
from .peers import Peer

log = logging.getLogger("coordinator")

SIZE_BYTES = 64 * 1024 * 1024
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.0005, 0.02
CLOSE_S, ATEXIT_S = 5.0, 0.5


class OpenRoom(Protocol):
    """What an engine wants to know of a room; `coordinator.Room` is one."""

    @property
    def id(self) -> int:
        """Its number."""
        ...

    @property
    def failure(self) -> Failure | None:
        """Why it failed, or None."""
        ...


@dataclass(eq=False, slots=True)
class Session:
    """An endpoint: one connection to one rank of one node. `name` is what the library calls the peer."""

    address: str
    name: str
    forgotten: bool = False


@dataclass(eq=False, slots=True)
class Flight:
    """One read that the library has taken and not yet settled."""

    handle: Any
    session: Session
    transfer: Transfer
    done: Future[None]


@dataclass(eq=False)
class Transfer:
    """The receiving end of one room: a block of ours for the node's bytes. Ends with `end()`, also as a context."""

    engine: PullingEngine
    room: OpenRoom
    block: Block
    over: bool = False
    flights: set[Flight] = field(default_factory=set)

    @property
    def view(self) -> memoryview:
        """The bytes. Raises Withdrawn once the transfer is over: they may be another room's by then."""
        if self.over:
            raise Withdrawn(f"the transfer of room {self.room.id} is over: its memory is not its own any more")
        return self.engine.memory.view(self.block)

    def end(self) -> None:
        """Let go; the block goes back when nothing writes into it any more. Again: nothing."""
        self.engine._let_go([self])

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.end()


class PullingEngine(ABC):
    """One process's engine: its memory, its peers, and its reads under way. Thread-safe; an `Engine[Session]`."""

    kind = ""
    progress_s = 0.0  # how often an idle library wants to be called, 0: never

    def __init__(self, size_bytes: int = SIZE_BYTES) -> None:
        self.memory = Memory(size_bytes)
        self._pid = os.getpid()
        self._cond = Condition()
        self._flights: set[Flight] = set()
        self._transfers: set[Transfer] = set()
        self._known: dict[str, int] = {}  # a peer's name -> sessions not forgotten, or waiting to be
        self._leaving: list[Session] = []  # forgotten, with flights that have not settled
        self._closed = self._abandoned = self._ended = False
        self._start()
        self._mover = Thread(target=self._move, name=f"coordinator-{self.kind}", daemon=True)
        self._mover.start()
        atexit.register(self.close, ATEXIT_S)  # the library is not to be torn down under the mover's hands

    # -- the node's side ----------------------------------------------------------------------------------------

    def announcement(self) -> dict[str, Any]:
        """What a worker must know to read here: for `PrefillNode(info={"engine": ...})`. JSON-able."""
        return {"kind": self.kind, **self._announced()}

    def lend(self, length: int) -> Block:
        """A block for a room's bytes, to be filled through `memory.view` and read by a worker. Raises OutOfMemory."""
        return self.memory.take(length)

    def take_back(self, block: Block) -> None:
        """The room is over or its worker is gone. A worker that still reads gets bytes that belong to no room."""
        self.memory.give_back(block)

    # -- the worker's side --------------------------------------------------------------------------------------

    def connect(self, address: str, rank: Hashable, peer: Peer[Session]) -> Session:
        """A session with one rank of a node, from what it announced. May block; raises PeerFailed, EngineFailed."""
        said = peer.info.get("engine")
        if isinstance(said, Mapping) and "ranks" in said:
            said = said["ranks"].get(str(rank))
        if not isinstance(said, Mapping) or said.get("kind") != self.kind:
            raise PeerFailed(f"{address} announced no {self.kind} engine for rank {rank!r}: {str(said)[:80]}")
        with self._cond:
            self._check_open()
            name = self._meet(address, said)
            self._known[name] = self._known.get(name, 0) + 1
        try:
            self._reach(address, name, said)
        except BaseException:
            self.forget(Session(address, name))
            raise
        return Session(address, name)

    def receive(self, room: OpenRoom, length: int) -> Transfer:
        """Memory for one room's bytes. Raises OutOfMemory; Withdrawn if the room has failed."""
        with self._cond:
            self._check_open()
            transfer = Transfer(self, room, self.memory.take(length))
            self._transfers.add(transfer)
        if room.failure is not None:  # it failed before we were listed: nobody will release it
            transfer.end()
            raise Withdrawn(f"room {room.id} failed before its transfer began: {room.failure.reason}")
        return transfer

    def read(self, transfer: Transfer, session: Session, remote: int, offset: int, length: int) -> Future[None]:
        """Read `length` bytes at the node's address `remote` into the transfer's block at `offset`.

        The future raises PeerFailed when the peer broke the transfer, Withdrawn when the room or the peer was let go
        of; so does the call itself.
        """
        if length < 1 or offset < 0 or offset + length > transfer.block.length:
            raise ValueError(f"{length} bytes at {offset} do not lie in a block of {transfer.block.length}")
        with self._cond:
            self._check_open()
            if transfer.over:
                raise Withdrawn(f"the transfer of room {transfer.room.id} is over")
            if session.forgotten:
                raise Withdrawn(f"{session.address} was forgotten")
            handle = self._post(session, transfer.block.address + offset, remote, length)
            flight = Flight(handle, session, transfer, Future())
            self._flights.add(flight)
            transfer.flights.add(flight)
            self._cond.notify_all()
        return flight.done

    # -- what a backend asks for --------------------------------------------------------------------------------

    def forget(self, endpoint: Session) -> None:
        """No new read of this peer from now on; the library forgets it when the reads under way have settled."""
        with self._cond:
            if endpoint.forgotten:
                return
            endpoint.forgotten = True
            self._leaving.append(endpoint)
            self._tidy()
            waiting = [f for f in self._flights if f.session is endpoint]
        for flight in waiting:
            _settle(flight.done, Withdrawn(f"{endpoint.address} was forgotten"))

    def release(self, room_id: int, failure: Failure) -> None:
        """A room failed: its transfers are over; each block goes back when nothing writes into it any more."""
        with self._cond:
            # The number may have been opened again meanwhile: that opening did not fail for this.
            mine = [t for t in self._transfers if t.room.id == room_id and t.room.failure == failure]
        self._let_go(mine)

    def evidence(self, error: BaseException) -> str:
        """PeerFailed speaks about the node, nothing else does."""
        return str(error) if isinstance(error, PeerFailed) else ""

    def health(self) -> dict[str, int]:
        """Numbers for a look inside: peers known, transfers open, reads under way, free bytes."""
        with self._cond:
            return {
                "peers": len(self._known),
                "leaving": len(self._leaving),
                "transfers": sum(not t.over for t in self._transfers),
                "waiting": sum(t.over for t in self._transfers),
                "reads": len(self._flights),
                "free_bytes": self.memory.free_bytes,
            }

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """End: let go of everything, wait for reads under way. False if some had not settled. Again: nothing."""
        if self._ended:
            return not self._abandoned
        self._ended = True
        with self._cond:
            self._closed = True
            self._cond.notify_all()
            everything = list(self._transfers)
        self._let_go(everything)
        if os.getpid() != self._pid:
            return False
        atexit.unregister(self.close)
        self._mover.join(timeout_s)
        with self._cond:
            self._abandoned = bool(self._flights)  # the library may still write: it stays until the process ends
        self._mover.join(timeout_s)
        if self._abandoned:
            log.warning("reads_abandoned engine=%s count=%d", self.kind, len(self._flights))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))  # never collected: its memory stays mapped
            self._abandon([flight.handle for flight in self._flights])
        else:
            self._end()
        return not self._abandoned

    # -- the mover ----------------------------------------------------------------------------------------------

    def _move(self) -> None:
        look_s = SHORTEST_LOOK_S
        while True:
            with self._cond:
                if not self._flights and not self._closed:
                    self._cond.wait(self.progress_s or None)
                self._progress()
                if self._abandoned or (self._closed and not self._flights):
                    return
                if not self._flights:
                    continue
                settled = self._look()
                self._tidy()
            for flight, error in settled:
                _settle(flight.done, error)
            look_s = SHORTEST_LOOK_S if settled else min(LONGEST_LOOK_S, look_s * 1.5)
            time.sleep(look_s)

    def _look(self) -> list[tuple[Flight, BaseException | None]]:
        settled: list[tuple[Flight, BaseException | None]] = []
        for flight in list(self._flights):
            error: BaseException | None = None
            try:
                if not self._is_done(flight.handle):
                    continue
            except PeerFailed as exc:
                error = PeerFailed(f"reading from {flight.session.address} broke: {exc}")
            except Exception as exc:  # what the library raises here ends this read and no other
                log.exception("transfer_crashed address=%s room=%d", flight.session.address, flight.transfer.room.id)
                error = EngineFailed(f"reading from {flight.session.address} failed: {exc}")
            self._flights.discard(flight)
            flight.transfer.flights.discard(flight)
            settled.append((flight, error))
        return settled

    def _tidy(self) -> None:
        """Forget peers and give blocks back, each when no read of theirs is under way. Under the lock."""
        flying = {flight.session for flight in self._flights}
        for session in [s for s in self._leaving if s not in flying]:
            self._leaving.remove(session)
            left = self._known.get(session.name, 0) - 1
            if left > 0:
                self._known[session.name] = left
                continue
            self._known.pop(session.name, None)
            try:
                self._lose(session.name)
            except Exception as exc:  # a peer that the library does not know is forgotten as well
                log.warning("forget_failed address=%s peer=%s error=%s", session.address, session.name, exc)
        for transfer in [t for t in self._transfers if t.over and not t.flights]:
            self._transfers.discard(transfer)
            self.memory.give_back(transfer.block)

    def _let_go(self, transfers: list[Transfer]) -> None:
        with self._cond:
            flights = [flight for transfer in transfers for flight in transfer.flights]
            for transfer in transfers:
                transfer.over = True
            self._tidy()
        for flight in flights:
            _settle(flight.done, Withdrawn(f"the transfer of room {flight.transfer.room.id} is over"))

    def _check_open(self) -> None:
        if self._closed:
            raise Withdrawn(f"the {self.kind} engine is closed")
        if os.getpid() != self._pid:
            raise EngineFailed(f"this {self.kind} engine belongs to the parent of this process: create a new one")

    # -- what a library has to say ------------------------------------------------------------------------------

    @abstractmethod
    def _start(self) -> None:
        """Start the library and register the memory. Raises EngineMissing, EngineFailed."""

    @abstractmethod
    def _announced(self) -> dict[str, Any]:
        """The library's part of the announcement."""

    @abstractmethod
    def _meet(self, address: str, said: Mapping[str, Any]) -> str:
        """Learn a peer from its announcement; its name. Must not block. Under the lock. Raises PeerFailed."""

    def _reach(self, address: str, name: str, said: Mapping[str, Any]) -> None:  # noqa: B027
        """Make sure that the peer answers. May block; not under the lock. Raises PeerFailed."""

    @abstractmethod
    def _post(self, session: Session, local: int, remote: int, length: int) -> Any:
        """Start a read; its handle. Must not block. Under the lock. Raises PeerFailed: then nothing is under way."""

    @abstractmethod
    def _is_done(self, handle: Any) -> bool:
        """Whether a read is over; its handle is released then. Raises PeerFailed when it is over and broke."""

    @abstractmethod
    def _lose(self, name: str) -> None:
        """Forget a peer. Nothing of it is under way. Under the lock."""

    def _progress(self) -> None:  # noqa: B027
        """Let the library work, for peers that read here too. Under the lock."""

    def _abandon(self, handles: list[Any]) -> None:  # noqa: B027
        """Let go of what can be let go of although these reads are under way. The memory stays."""

    def _end(self) -> None:  # noqa: B027
        """Let go of the library. Nothing is under way."""


def _settle(future: Future[None], error: BaseException | None) -> None:
    try:
        future.set_result(None) if error is None else future.set_exception(error)
    except InvalidStateError:
        log.debug("settled_before error=%s", error)  # let go of earlier, or cancelled by its reader


def missing(kind: str, package: str, error: BaseException) -> EngineMissing:
    """The error for a package that cannot be imported."""
    return EngineMissing(f"the {kind} engine needs {package} ({error}): pip install 'coordinator[{kind}]'")
