"""The objects that take the place of SGLang's own in a decode manager. SGLang's threads call them; nothing here does
I/O, raises what SGLang's objects would not raise, or waits for more than a dict operation of another thread.

What a scheduler thread does to a room is noted with its time in `Notes`, an append to a deque; the worker's loop
enters it in the ledger within milliseconds, as of that time (see decide/intake.py). Statuses are read from a plain
dict in this process.

SGLang keys a status by the room number alone, so a number that is opened again is told apart by when it was opened.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

FAILED, BOOTSTRAPPING, WAITING_FOR_INPUT, _, SUCCESS = range(5)  # of SGLang's KVPoll, which are Status's

#: (address, room, when) opened; (address or "", room) left; ("", room, status, reason) reached a final status.
Note = tuple[str, int, float] | tuple[str, int] | tuple[str, int, int, str]


class Notes:
    """What the threads of SGLang did, in order. `wake` is called for the first note after `asleep` was set."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.queue: deque[Note] = deque()
        self.asleep = True
        self._wake = wake

    def stir(self) -> None:
        """Wake the loop; once per sleep."""
        self.asleep = False
        self._wake()

    def add(self, note: Note) -> None:
        """Note something."""
        self.queue.append(note)
        if self.asleep:
            self.stir()


class StatusTable(dict[int, int]):
    """`request_status`: reads are a dict's own; a write moves a room up the lattice or does nothing.

    Only an opening status creates a room, Failed and Success are final, and all writes but the opening one happen
    under a lock: a late Success can neither override a failure nor bring back a room that was cleared. `pop` is a
    dict's; the room is left.
    """

    def __init__(self, notes: Notes, records: dict[int, str]) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.opened: dict[int, float] = {}  # when the present life of a number began
        self._notes, self._records = notes, records
        lock, note, forget_life, take = self.lock, notes.queue.append, self.opened.pop, super().pop

        def pop(room: int, *default: Any) -> Any:
            with lock:
                forget_life(room, None)
                value = take(room, *default)
            note(("", room))
            if notes.asleep:
                notes.stir()
            return value

        self.pop = pop  # type: ignore[method-assign]  # a closure: each request ends with it on a scheduler thread

    def __setitem__(self, room: int, status: int) -> None:
        if status == BOOTSTRAPPING:
            self.setdefault(room, status)
            return
        with self.lock:
            if status == WAITING_FOR_INPUT and room not in self:
                super().__setitem__(room, status)
        self.move(room, status)

    def move(self, room: int, status: int) -> None:
        """Move a room that is here up to `status`; nothing if it is not, or would not move."""
        with self.lock:
            old = self.get(room, FAILED)
            if 0 < old < SUCCESS and (status == FAILED or status > old):
                super().__setitem__(room, status)
                if status in (FAILED, SUCCESS):
                    self._notes.add(("", room, int(status), self._records.get(room, "")))

    def fail(self, room: int, opened_s: float, reason: str) -> bool:
        """The coordinator says that the opening of `room` that it knows since `opened_s` has failed.

        True if it was open. A later life of the number, and one that has succeeded, is not touched; an opening whose
        status is not written yet starts as failed. An empty reason leaves the record to SGLang, which then names
        another rank.
        """
        with self.lock:
            began = self.opened.get(room)
            if began is None or began > opened_s or self.get(room, BOOTSTRAPPING) in (FAILED, SUCCESS):
                return False
            super().__setitem__(room, FAILED)
            if reason:
                self._records.setdefault(room, reason)
            return True

    def forget(self, room: int, now: float) -> bool:
        """A number begins another life: nothing of an earlier one that has ended is inherited. False if it is open."""
        with self.lock:
            self.opened[room] = now
            if 0 < self.get(room, FAILED) < SUCCESS:
                return False
            super().pop(room, None)
            self._records.pop(room, None)
            return True

    def __delitem__(self, room: int) -> None:
        self.pop(room)


class Tracker(dict[str, "Rooms"]):
    """`addr_to_rooms_tracker`: for each address, as SGLang spells it, a view of the rooms there.

    A view holds nothing itself: one that is dropped and made again shows the same rooms. No empty set stays behind.
    """

    def __init__(self, view: Callable[[str], Rooms]) -> None:
        super().__init__()
        self._view = view

    def __missing__(self, address: str) -> Rooms:
        return self.setdefault(address, self._view(address))


class Rooms:
    """The rooms at one address, with what SGLang calls of a set.

    `add` and `discard` only note. Iterating lists the rooms that a failure of the node is to clean up after: those
    that the coordinator failed, and not the ones opened at the node's next instance.
    """

    __slots__ = ("_count", "_lost", "add", "address", "discard")

    def __init__(
        self,
        address: str,
        notes: Notes,
        statuses: StatusTable,
        records: dict[int, str],
        forget: Callable[[int, float], None],
        lost: Callable[[str], list[int]],
        count: Callable[[str], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address, self._lost, self._count = address, lost, count
        append, begin = notes.queue.append, statuses.opened.setdefault

        # Closures: this is what opening a room costs a scheduler thread.
        def add(room: int) -> None:
            now = clock()
            if begin(room, now) is not now or (records and room in records):
                forget(room, now)
            append((address, room, now))
            if notes.asleep:
                notes.stir()

        def discard(room: int) -> None:
            append((address, room))
            if notes.asleep:
                notes.stir()

        self.add, self.discard = add, discard

    def __iter__(self) -> Iterator[int]:
        return iter(self._lost(self.address))

    def __len__(self) -> int:
        return self._count(self.address)

    def copy(self) -> list[int]:
        """As iterating."""
        return self._lost(self.address)

    def __repr__(self) -> str:
        return f"<{len(self)} rooms at {self.address}>"


class InfoTable(dict[str, Any]):
    """`prefill_info_table`: as a dict, and it remembers from when to when each address's present entry was valid."""

    def __init__(self, changed: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._changed, self._clock = changed, clock
        self._periods: dict[str, tuple[float, float]] = {}
        self._voids: dict[str, float] = {}
        self.asked: dict[str, float] = {}  # when the question was asked whose answer is about to be entered

    def __setitem__(self, address: str, info: Any) -> None:
        self._periods[address] = (self.asked.pop(address, self._clock()), float("inf"))
        super().__setitem__(address, info)
        self._changed(address)

    def pop(self, address: str, *default: Any) -> Any:
        """As a dict's; what is opened from now on waits for a new entry."""
        since, until = self._periods.get(address, (0.0, 0.0))
        value = super().pop(address, *default)
        if until == float("inf"):
            now = self._voids[address] = self._clock()
            self._periods[address] = (since, now)
            self._changed(address)
        return value

    def __delitem__(self, address: str) -> None:
        self.pop(address)

    def period(self, address: str) -> tuple[float, float]:
        """Since when, until when the last entry of an address was valid: (0, 0) if there was none."""
        return self._periods.get(address, (0.0, 0.0))

    def void(self, address: str) -> float:
        """Until when an earlier entry of an address was in use, also if there is a new one by now: 0 if never."""
        return self._voids.get(address, 0.0)

    def forget(self, address: str) -> None:
        """Nothing waits for the address, and nothing is known of it."""
        if address not in self:
            self._periods.pop(address, None)
            self._voids.pop(address, None)


class PoolKey(str):
    """A key of the connection pool, `<address>_<dp>_<cp>_<tp>`: it starts with its own address and with no other."""

    __slots__ = ()

    def startswith(self, prefix: Any, *bounds: Any) -> bool:
        """As text's, but 10.0.0.1:80 is no beginning of 10.0.0.1:8000_0_0_0."""
        if bounds or not isinstance(prefix, str):
            return super().startswith(prefix, *bounds)
        return self == prefix or super().startswith(f"{prefix}_")


class ConnectionPool(dict[str, Any]):
    """`connection_pool`: a dict whose keys, when listed, match exact addresses only."""

    def __iter__(self) -> Iterator[str]:
        return map(PoolKey, super().__iter__())
