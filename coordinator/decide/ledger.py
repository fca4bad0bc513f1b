"""A worker's own truth about its own rooms. Pure: no I/O, and the time comes in.

`join`, `update`, `leave` and `status` are called by any thread, at any rate; each takes one short lock of one
address. Everything else is called by one thread, the worker's event loop: it takes batches out (book.py), brings
answers in, and gets back what to do about them. An illegal move changes nothing.

What is sent is the difference between the rooms that are open and the set the store holds, not a log of
operations: a room that opens and closes between two batches costs the store nothing, and what waits can never
outgrow the rooms that live or are still stored.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from threading import Lock
from types import TracebackType

from ..address import canonical
from ..errors import ConfigError, JoinRefused, RoomExists, WorkerClosed
from ..rooms import MAX_ROOM_ID, STATUSES, Cause, Failure, Status, check_opening, check_room_id, check_status
from .book import CLOSED, FORGOTTEN, Book, Refusal
from .notes import Notes

DEADLINES = 1024  # fewer are not worth a clean-up
_FAILED, _SUCCESS = int(Status.FAILED), int(Status.SUCCESS)
_OPENING = Status.BOOTSTRAPPING  # a global: looking a member up on an enum costs as much as the lock


class Room:
    """One opening of a room by this worker. Safe to use from any thread; after `leave` every move is refused.

    The object is the identity of the opening: the same number opened again is another Room. `id` is the number,
    `opened_s` the ledger's clock when it was opened.
    """

    __slots__ = ("_book", "_failure", "_status", "id", "opened_s")
    # Set by Ledger.join, nowhere else; `_failure` stays unset until the room fails. Opening a room is on the hot path.
    _book: Book
    _failure: Failure
    _status: int
    id: int
    opened_s: float

    @property
    def address(self) -> str:
        """The node's canonical address."""
        return self._book.address

    @property
    def current(self) -> bool:
        """Whether this opening is still in the ledger: not left, not replaced by a later one. No I/O, no lock."""
        return self._book.rooms.get(self.id) is self

    @property
    def status(self) -> Status:
        """Where it stands; the last status if it was left. No I/O, no lock."""
        return STATUSES[self._status]

    @property
    def failure(self) -> Failure | None:
        """Why it failed, or None. The first cause is kept."""
        return getattr(self, "_failure", None)

    def update(self, status: Status, reason: str = "") -> bool:
        """Move up to `status`; False if the room was left, is final, or would not move. Raises InvalidStatus."""
        if type(status) is not Status:
            status = check_status(status)
        book = self._book
        with book.lock:
            if book.rooms.get(self.id) is not self:
                return False
            if 0 < self._status < status < _SUCCESS:
                self._status = status
                return True
            finished = _finish(book, self, status, reason)
        if book.asleep:
            book.stir()
        if finished and book.notes is not None and status == _FAILED:
            book.notes.add([self])
        return finished

    def leave(self) -> bool:
        """Close this opening; False if it was closed already. Never touches a later opening of the same number."""
        book, room_id = self._book, self.id
        with book.lock:
            if book.rooms.get(room_id) is not self:
                return False
            del book.rooms[room_id]
            if room_id in book.stored:
                book.dirty.add(room_id)
            else:
                book.dirty.discard(room_id)
        if book.asleep:
            book.stir()
        return True

    def __enter__(self) -> Room:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.leave()

    def __repr__(self) -> str:
        return f"<Room {self.id} at {self.address} {self.status.name}>"


_new_room: Callable[[type[Room]], Room] = object.__new__


class Ledger:
    """All rooms of one worker. `clock` is injected (monotonic seconds); `wake` is called when a sleeping book stirs.

    `notes` takes down which rooms failed here by themselves, for a worker that has siblings.
    """

    def __init__(
        self,
        worker: str,
        clock: Callable[[], float],
        wake: Callable[[], None] = lambda: None,
        notes: Notes | None = None,
    ) -> None:
        self.worker, self._clock, self._wake, self._notes = worker, clock, wake, notes
        self._books: dict[str, Book] = {}  # canonical text and every other spelling that was used
        self._lives = itertools.count(1)
        self._forgot = False  # since then every new book gets an id of its own
        self._deadlines: list[tuple[float, int, Room]] = []
        self._deadline_lock = Lock()
        self._deadlines_bound = DEADLINES
        self._closed = False

    # -- any thread ---------------------------------------------------------------------------------------------

    def join(
        self, address: str, room_id: int, status: Status = Status.BOOTSTRAPPING, deadline_s: float | None = None
    ) -> Room:
        """Open a room. No I/O. Raises InvalidAddress, InvalidRoom, InvalidStatus, RoomExists, JoinRefused."""
        try:
            book = self._books[address]
        except (KeyError, TypeError):  # a new address, another spelling, or nothing that could be one
            book = self.open_book(address)
        if type(room_id) is not int or not 0 <= room_id <= MAX_ROOM_ID:
            room_id = check_room_id(room_id)
        if status is not _OPENING or deadline_s is not None:
            status = _checked(room_id, status, deadline_s)
        now = self._clock()
        with book.lock:
            refusal = book.refusal
            if refusal is None:
                rooms = book.rooms
                old = rooms.get(room_id)
                if old is not None and 0 < old._status < _SUCCESS:
                    raise RoomExists(f"room {room_id} is already open at {book.address}: leave it first")
                room = rooms[room_id] = _new_room(Room)  # no __init__: its frame costs as much as all four stores
                room._book = book
                room._status = status
                room.id = room_id
                room.opened_s = now
                book.dirty.add(room_id)
        if refusal is not None:
            if refusal.state == FORGOTTEN and not self._closed:
                if self._books.get(address) is book:  # a spelling that was entered while the book was forgotten
                    self._books.pop(address, None)
                return self.join(address, room_id, status, deadline_s)
            raise self._refused(book, refusal)
        if book.asleep:
            book.stir()
        if deadline_s is not None:
            self._set_deadline(room, now + deadline_s)
        return room

    def update(self, address: str, room_id: int, status: Status, reason: str = "") -> bool:
        """Move a room up; False if it is not open here or would not move. Raises InvalidRoom, InvalidStatus."""
        if type(status) is not Status:
            status = check_status(status)
        try:
            book = self._books[address]
        except (KeyError, TypeError):
            found = self._find(address)
            check_room_id(room_id)
            if found is None:
                return False
            book = found
        if type(room_id) is not int:
            room_id = check_room_id(room_id)
        with book.lock:
            room = book.rooms.get(room_id)
            if room is None:
                check_room_id(room_id)
                return False
            if 0 < room._status < status < _SUCCESS:
                room._status = status
                return True
            finished = _finish(book, room, status, reason)
        if book.asleep:
            book.stir()
        if finished and book.notes is not None and status == _FAILED:
            book.notes.add([room])
        return finished

    def leave(self, address: str, room_id: int) -> bool:
        """Close a room; False if it is not open here. Raises InvalidAddress, InvalidRoom."""
        try:
            book = self._books[address]
        except (KeyError, TypeError):
            found = self._find(address)
            check_room_id(room_id)
            if found is None:
                return False
            book = found
        if type(room_id) is not int:
            room_id = check_room_id(room_id)
        with book.lock:
            if book.rooms.pop(room_id, None) is None:
                check_room_id(room_id)
                return False
            if room_id in book.stored:
                book.dirty.add(room_id)
            else:
                book.dirty.discard(room_id)
        if book.asleep:
            book.stir()
        return True

    def find(self, address: str, room_id: int) -> Room | None:
        """The current opening of a room, or None. Raises InvalidAddress, InvalidRoom."""
        book, room_id = self._find(address), check_room_id(room_id)
        return None if book is None else book.rooms.get(room_id)

    def rooms(self, address: str) -> list[Room]:
        """A copy of what is at an address. Raises InvalidAddress."""
        book = self._find(address)
        if book is None:
            return []
        with book.lock:
            return list(book.rooms.values())

    def fail(self, address: str, room_id: int, failure: Failure) -> Room | None:
        """Fail one room for a cause of its own; None if it is not open here. The first cause is kept."""
        room = self.find(address, room_id)
        return room if room is not None and self._failed_here(room, failure) else None

    def _failed_here(self, room: Room, failure: Failure) -> bool:
        """Fail one room for a cause of this worker alone: its siblings are to hear of it."""
        failed = bool(room._book.fail_rooms([room], failure))
        if failed and self._notes is not None:
            self._notes.add([room])
        return failed

    # -- the event loop's thread --------------------------------------------------------------------------------

    def books(self) -> list[Book]:
        """Every address in use, once."""
        return [book for text, book in self._books.copy().items() if text == book.address]

    def book(self, address: str) -> Book | None:
        """The book of a canonical address."""
        return self._books.get(address)

    def open_book(self, address: str) -> Book:
        """The book of an address, made if needed. Raises InvalidAddress, WorkerClosed."""
        if self._closed:
            raise WorkerClosed(f"worker {self.worker} is closed: create a new Worker")
        name = canonical(address)
        book = self._books.get(name)
        if book is None:
            # setdefault is atomic: two threads that open the same address get one book
            book = self._books.setdefault(name, Book(name, self._life(), self._wake, self.next_life, self._notes))
        if len(self._books) < 100_000:
            self._books.setdefault(address, book)
        return book

    def _life(self) -> str:
        return self.next_life() if self._forgot else self.worker

    def next_life(self) -> str:
        """Another id for the same process at one address: batches of the former one cannot be mistaken for it."""
        return f"{self.worker}.{next(self._lives)}"

    def forget(self, book: Book) -> bool:
        """Drop an address that has no rooms; False if it has some. A join that races it opens a new book."""
        with book.lock:
            if book.rooms:
                return False
            self._forgot = True
            book.refusal = book.closing = Refusal(FORGOTTEN, "no room was open here for long")
            for text in [text for text, known in self._books.copy().items() if known is book]:
                self._books.pop(text, None)
        return True

    def next_deadline_s(self) -> float | None:
        """When the next room's deadline passes, or None."""
        with self._deadline_lock:
            return self._deadlines[0][0] if self._deadlines else None

    def due_deadlines(self, now: float) -> Iterator[tuple[Room, Failure]]:
        """Fail the rooms whose own deadline has passed."""
        while True:
            with self._deadline_lock:
                if not self._deadlines or self._deadlines[0][0] > now:
                    return
                room = heapq.heappop(self._deadlines)[2]
            failure = Failure(Cause.DEADLINE, "the room's deadline passed", room.address, by=self.worker)
            if self._failed_here(room, failure):
                yield room, failure

    def refuse_all(self) -> None:
        """Refuse every further join; open rooms stay open."""
        self._closed = True
        for book in self.books():
            with book.lock:
                book.refusal = book.closing = Refusal(CLOSED, "the worker was closed")

    def fail_all(self) -> list[tuple[Room, Failure]]:
        """Fail what is still open: nobody watches over it any more."""
        failed: list[tuple[Room, Failure]] = []
        for book in self.books():
            failure = Failure(Cause.CLOSED, "the worker was closed", book.address, book.node.epoch, self.worker)
            with book.lock:
                victims = list(book.rooms.values())
            failed += [(room, failure) for room in book.fail_rooms(victims, failure)]
        return failed

    def disown(self) -> None:
        """In a forked child: the rooms are the parent's. Refuse everything; no lock of the parent is waited for."""
        self._closed = True
        self._deadline_lock = Lock()
        for book in self.books():
            book.lock = Lock()
            book.rooms, book.stored, book.dirty = {}, set(), set()
            book.refusal = book.closing = Refusal(CLOSED, "the worker belongs to the parent process")

    # -- slow paths ---------------------------------------------------------------------------------------------

    def _find(self, address: str) -> Book | None:
        return self._books.get(canonical(address))

    def _refused(self, book: Book, refusal: Refusal) -> Exception:
        if self._closed:
            return WorkerClosed(f"worker {self.worker} is closed: create a new Worker")
        return JoinRefused(book.address, refusal.state, refusal.reason)

    def _set_deadline(self, room: Room, at_s: float) -> None:
        with self._deadline_lock:
            heapq.heappush(self._deadlines, (at_s, id(room), room))
            if len(self._deadlines) > self._deadlines_bound:  # most may have been left long before their deadline
                self._deadlines = [item for item in self._deadlines if item[2].current]
                heapq.heapify(self._deadlines)
                self._deadlines_bound = max(DEADLINES, 2 * len(self._deadlines))
        self._wake()


def _checked(room_id: int, status: Status, deadline_s: float | None) -> Status:
    """What is unusual about a join, checked; raises InvalidStatus, ConfigError."""
    if deadline_s is not None and not (type(deadline_s) in (int, float) and 0 < deadline_s < 1e9):
        raise ConfigError(f"deadline_s={deadline_s!r} of room {room_id}: give a positive number of seconds, or None")
    return check_opening(status)


def _finish(book: Book, room: Room, status: int, reason: str) -> bool:
    """The rest of update, under the lock: into a final status, or nowhere."""
    if not 0 < room._status < _SUCCESS or status not in (_FAILED, _SUCCESS):
        return False
    room._status = status
    if status == _FAILED:
        room._failure = Failure(Cause.LOCAL, reason or "failed by its owner", book.address)
    if room.id in book.stored:
        book.dirty.add(room.id)
    else:
        book.dirty.discard(room.id)
    return True
