"""Mori: each room is cleaned up on its own, from the engine's worker thread, at any moment.

SGLang's Mori manager calls `_cleanup_room_tracking(room)` from its transfer threads while the heartbeat may be
failing the whole address. There it took a room out of a set that another thread was iterating, which once ended
failure detection for good. Here both go through the ledger: whoever comes first decides, and nobody is harmed.
"""

from __future__ import annotations

from threading import Lock
from typing import TypeVar

from ..decide.ledger import Room
from ..rooms import Failure, Status
from ..worker import Worker
from .base import Backend, Engine

E = TypeVar("E")


class MoriBackend(Backend[E]):
    """Rooms over a Mori IO engine. One room number is open at one address at a time, as in Mori's own table."""

    name = "mori"

    def __init__(self, worker: Worker, engine: Engine[E]) -> None:
        super().__init__(worker, engine)
        self._lock = Lock()
        self._rooms: dict[int, Room] = {}

    def open(self, address: str, room_id: int, status: Status = Status.BOOTSTRAPPING) -> Room:
        """Open a room and remember it by its number. Raises as Worker.join."""
        room = super().open(address, room_id, status)
        with self._lock:
            self._rooms[room.id] = room
        return room

    def cleanup_room(self, room_id: int) -> bool:
        """Stop tracking a room, whatever its state; False if it is not tracked any more. From any thread."""
        with self._lock:
            room = self._rooms.pop(room_id, None)
        return room is not None and room.leave()

    def _failed(self, room: Room, failure: Failure) -> None:
        with self._lock:
            if self._rooms.get(room.id) is room:
                del self._rooms[room.id]
        super()._failed(room, failure)
