"""Mooncake: rooms leave the books on the next good beat, once the request table no longer names them.

SGLang's Mooncake manager never removes a finished room from its tracker itself: after each successful heartbeat it
drops the rooms of that address that are gone from its request table. The same happens here, with the order that
leaves no room untracked: a room is in the request table before it is opened.
"""

from __future__ import annotations

from threading import Lock
from typing import TypeVar

from ..decide.ledger import Room
from ..rooms import Status
from ..worker import Worker
from .base import Backend, Engine

E = TypeVar("E")


class MooncakeBackend(Backend[E]):
    """Rooms over a Mooncake transfer engine."""

    name = "mooncake"

    def __init__(self, worker: Worker, engine: Engine[E]) -> None:
        super().__init__(worker, engine)
        self._lock = Lock()
        self._silent: set[str] = set()  # addresses that ended and have not answered since
        self._requests: dict[int, int] = {}  # room id -> how many addresses have a request for it
        worker.on_node_answered(self._good_beat)

    def open(self, address: str, room_id: int, status: Status = Status.BOOTSTRAPPING) -> Room:
        """Enter the request, then open the room. Raises as Worker.join; a refused request is not entered."""
        self._enter(room_id, 1)
        try:
            return super().open(address, room_id, status)
        except BaseException:
            self._enter(room_id, -1)
            raise

    def conclude(self, room: Room) -> None:
        """The request is over (its result was collected): the room leaves at the next good beat of its node, or now
        if it failed or its node is silent."""
        self._enter(room.id, -1)
        if room.status is Status.FAILED or room.address in self._silent:
            room.leave()
            self._forget_empty(room.address)

    def _forget_empty(self, address: str) -> None:
        if not self.worker.rooms(address):
            self._silent.discard(address)

    def _enter(self, room_id: int, by: int) -> None:
        with self._lock:
            left = self._requests.get(room_id, 0) + by
            if left > 0:
                self._requests[room_id] = left
            else:
                self._requests.pop(room_id, None)

    def _ended(self, address: str) -> None:
        super()._ended(address)
        self._silent.add(address)  # no good beat may ever come: what is over leaves now
        self._sweep(address)
        self._forget_empty(address)

    def _good_beat(self, address: str) -> None:
        self._silent.discard(address)
        self._sweep(address)

    def _sweep(self, address: str) -> None:
        # The openings are listed before the table is asked: a room opened later cannot be taken for a finished one.
        for room in self.worker.rooms(address):
            if room.id not in self._requests:
                room.leave()
