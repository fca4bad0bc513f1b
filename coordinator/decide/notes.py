"""Notes of rooms that failed in this worker by themselves, for whoever passes them on to its siblings. Pure.

Written by any thread, outside the book's lock; taken by the event loop's. Bounded: the oldest make room, and are
counted. A worker without a group has no notes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ledger import Room

NOTES = 20_000


@dataclass(frozen=True, slots=True)
class Note:
    """This opening failed here at `at_s`, on the ledger's clock."""

    room: Room
    at_s: float

    @property
    def reused(self) -> bool:
        """Whether the number has been opened again here: a word about it now could meet the siblings' next opening."""
        return self.room._book.rooms.get(self.room.id, self.room) is not self.room


class Notes:
    """What has failed and was not taken yet. `wake` is called when there is something again."""

    def __init__(self, clock: Callable[[], float], wake: Callable[[], None], limit: int = NOTES) -> None:
        self._clock, self._wake = clock, wake
        self._lock = Lock()
        self._notes: deque[Note] = deque(maxlen=limit)
        self._dropped = 0

    def add(self, rooms: Iterable[Room]) -> None:
        """These rooms have just failed by themselves."""
        now = self._clock()
        new = [Note(room, now) for room in rooms]
        with self._lock:
            first = not self._notes
            self._dropped += max(0, len(self._notes) + len(new) - (self._notes.maxlen or 0))
            self._notes.extend(new)
        if first and new:
            self._wake()

    def take(self) -> tuple[list[Note], int]:
        """All notes, oldest first, which are the caller's now; and how many were dropped since the last call."""
        with self._lock:
            taken, dropped = list(self._notes), self._dropped
            self._notes.clear()
            self._dropped = 0
        return taken, dropped
