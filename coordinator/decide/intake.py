"""Rooms that were opened on a hot thread and are entered in the ledger a moment later, as if they had been there since.

The hot thread only notes what it did, with the time; whoever enters the notes says when each room was opened, and the
book judges it by that time: what an epoch's end covers has failed, whatever came first, the news or the note.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from ..rooms import MAX_ROOM_ID, Failure
from .book import CHUNK, FORGOTTEN, Book, Refusal
from .ledger import Ledger, Room

Opening = tuple[int, float]  # room id, when it was opened on the ledger's clock


@dataclass(slots=True)
class Entered:
    """What became of openings. The rest is open in the ledger."""

    failed: list[tuple[Room, Failure]] = field(default_factory=list)
    refused: list[Opening] = field(default_factory=list)
    refusal: Refusal | None = None


def enter(ledger: Ledger, address: str, openings: Iterable[Opening]) -> Entered:
    """Enter rooms at an address. A number that is open there already is the same room; one that is no room id is left
    out. Raises InvalidAddress, WorkerClosed.
    """
    done = Entered()
    todo = iter(openings)
    while chunk := list(islice(todo, CHUNK)):
        book = ledger.open_book(address)
        left = _enter(book, chunk, done)
        while left and done.refusal is not None and done.refusal.state == FORGOTTEN:
            book = ledger.open_book(address)  # it was forgotten between the look-up and the lock
            left = _enter(book, left, done)
        done.refused += left
        if book.asleep:
            book.stir()
    return done


def _enter(book: Book, openings: list[Opening], done: Entered) -> list[Opening]:
    """One piece under one hold of the lock; answers what the book keeps out."""
    out: list[Opening] = []
    with book.lock:
        rooms, dirty, past = book.rooms, book.dirty, book.past
        done.refusal = book.refusal
        for room_id, opened_s in openings:
            over = past is not None and opened_s < past[0]
            if done.refusal is not None and not over:
                out.append((room_id, opened_s))
                continue
            known = rooms.get(room_id)
            if type(room_id) is not int or not 0 <= room_id <= MAX_ROOM_ID:
                continue
            if known is not None and 0 < known._status < 4:
                continue
            room = rooms[room_id] = Room()
            room._book, room._status, room.id, room.opened_s = book, 1, room_id, opened_s
            if past is not None and over:
                room._failure, room._status = past[1], 0
                done.failed.append((room, past[1]))
            if room._status or room_id in book.stored:
                dirty.add(room_id)
    return out
