"""Rooms as values: ids that survive exactly, and a lattice that moves up only, also when threads race."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import Cause, ConfigError, InvalidRoom, InvalidStatus, RoomExists, Settings, Status
from coordinator.decide.ledger import Ledger, Room
from coordinator.protocol import Batch, NodeView
from coordinator.rooms import MAX_ROOM_ID, check_opening, check_room_id, check_status, is_final, may_move
from coordinator.store.ops import Ops

NODE = "10.0.0.5:8998"
F, B, W, T, S = Status
PAIRS = [(old, new) for old in Status for new in Status]

# Every pair, written out: from -> the statuses it may go to.
MAY = {F: set(), B: {F, W, T, S}, W: {F, T, S}, T: {F, S}, S: set()}


class Number(enum.IntEnum):
    """A subclass of int, as libraries hand them out."""

    SEVEN = 7


def at(status: Status) -> tuple[Ledger, Room]:
    """A ledger with one room that has reached `status`."""
    ledger = Ledger("w#1", lambda: 0.0)
    room = ledger.join(NODE, 7)
    if status is not B:
        assert room.update(status)
    return ledger, room


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_the_lattice_is_the_table(old: Status, new: Status) -> None:
    """may_move says yes exactly for the pairs written out above (CASE 12)."""
    assert may_move(old, new) == (new in MAY[old])


@pytest.mark.parametrize("through", ["room", "ledger"])
@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_every_pair_behaves_as_the_lattice_says(old: Status, new: Status, through: str) -> None:
    """update answers what the lattice says, and a refused move changes nothing, by handle and by id (CASE 12)."""
    ledger, room = at(old)
    failure = room.failure
    moved = room.update(new) if through == "room" else ledger.update(NODE, 7, new)
    assert moved == may_move(old, new)
    assert room.status == (new if moved else old)
    if not moved:
        assert room.failure is failure
    elif new is F:
        assert room.failure is not None
        assert room.failure.cause is Cause.LOCAL


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_a_number_moves_like_its_status(old: Status, new: Status) -> None:
    """Plain ints, as SGLang's KVPoll sends them, move a room like the enum does."""
    ledger, room = at(old)
    number: Any = int(new)
    assert ledger.update(NODE, 7, number) == may_move(old, new)
    assert type(room.status) is Status


def race(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls on threads of their own that start together; their answers in order."""
    answers: list[Any] = [None] * len(calls)
    gate = threading.Barrier(len(calls))

    def run(i: int) -> None:
        gate.wait()
        answers[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.parametrize("start", [B, W, T])
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_two_racing_moves_end_as_one_of_the_two_orders(start: Status, one: Status, other: Status) -> None:
    """Answers and end state of a race are those of one move after the other, in some order (CASE 12)."""

    def in_order(first: Status, second: Status) -> tuple[Status, bool, bool]:
        status, answers = start, []
        for new in (first, second):
            answers.append(may_move(status, new))
            status = new if answers[-1] else status
        return status, answers[0], answers[1]

    ends = {in_order(one, other)}
    status, second, first = in_order(other, one)
    ends.add((status, first, second))
    for _ in range(5):
        ledger, room = at(start)
        answers = race(partial(room.update, one), partial(ledger.update, NODE, 7, other))
        assert (room.status, *answers) in ends


@pytest.mark.parametrize("final", [F, S])
def test_of_many_racing_final_moves_one_wins(final: Status) -> None:
    """Eight threads finish a room, four each way: exactly one is told that it did."""
    other = S if final is F else F
    for _ in range(50):
        _, room = at(T)
        answers = race(*[partial(room.update, final)] * 4, *[partial(room.update, other)] * 4)
        assert answers.count(True) == 1
        assert room.status is (final if True in answers[:4] else other)


def test_final_is_failed_and_success() -> None:
    """The two statuses that nothing follows are the two that is_final names."""
    assert {s for s in Status if is_final(s)} == {s for s in Status if not MAY[s]} == {F, S}


def test_the_numbers_are_those_of_kvpoll() -> None:
    """Other processes compare these numbers: they never change."""
    assert [status.value for status in Status] == list(range(5))
    assert [status.name for status in Status][::4] == ["FAILED", "SUCCESS"]


@pytest.mark.parametrize("status", list(Status))
def test_only_two_statuses_open_a_room(status: Status) -> None:
    """A room is opened as BOOTSTRAPPING or WAITING_FOR_INPUT; with another status nothing is opened."""
    ledger = Ledger("w#1", lambda: 0.0)
    if status in (B, W):
        assert ledger.join(NODE, 7, status).status is status
        assert check_opening(status) is status
        return
    with pytest.raises(InvalidStatus, match=f"{status.name} cannot open"):
        ledger.join(NODE, 7, status)
    assert ledger.find(NODE, 7) is None


@pytest.mark.parametrize("value", [5, -1, True, False, None, "3", 3.0, b"3", []], ids=repr)
def test_what_is_no_status_is_refused(value: Any) -> None:
    """Every door names the value and the statuses there are, and the room stays as it was."""
    ledger, room = at(W)
    for call in (
        lambda: check_status(value),
        lambda: room.update(value),
        lambda: ledger.update(NODE, 7, value),
        lambda: ledger.join(NODE, 8, value),
    ):
        with pytest.raises(InvalidStatus, match="TRANSFERRING"):
            call()
    assert room.status is W
    assert ledger.find(NODE, 8) is None


@pytest.mark.parametrize("room_id", [0, 1, 7, 2**53 + 1, 8804230600348159981, MAX_ROOM_ID, Number.SEVEN], ids=repr)
def test_accepted_ids(room_id: int) -> None:
    """0, 2**63 - 1 and what lies between are rooms, as plain ints (CASE 55)."""
    assert check_room_id(room_id) == room_id
    assert type(check_room_id(room_id)) is int
    ledger = Ledger("w#1", lambda: 0.0)
    room = ledger.join(NODE, room_id)
    assert type(room.id) is int
    assert ledger.find(NODE, room_id) is room
    assert ledger.update(NODE, room_id, T)
    assert ledger.leave(NODE, room_id)


REFUSED = [2**63, 2**64, -1, True, False, None, "07", "7", 1.5, 7.0, float("nan"), b"7", (7,), [7], 10**400]


@pytest.mark.parametrize("room_id", REFUSED, ids=lambda value: repr(value)[:20])
def test_refused_ids(room_id: Any) -> None:
    """Every door raises InvalidRoom with the value and the range, and changes nothing (CASE 55, G13)."""
    ledger = Ledger("w#1", lambda: 0.0)
    ledger.join(NODE, 1)
    book = ledger.books()[0]
    with pytest.raises(InvalidRoom) as caught:
        check_room_id(room_id)
    assert ascii(room_id)[:80] in str(caught.value)
    assert "from 0 to 2**63 - 1" in str(caught.value)
    with pytest.raises(InvalidRoom):
        ledger.join(NODE, room_id)
    for call in (
        lambda: ledger.update(NODE, room_id, T),
        lambda: ledger.leave(NODE, room_id),
        lambda: ledger.find(NODE, room_id),
    ):
        with pytest.raises(InvalidRoom):
            call()
    assert set(book.rooms) == {1}
    assert book.dirty == {1}


@given(st.sets(st.integers(0, MAX_ROOM_ID), max_size=20))
def test_random_ids_travel_exactly(ids: set[int]) -> None:
    """What the sync Op sends, and what a reply names, are the same 63 bits: nothing passes through a double."""
    ops = Ops(Settings())
    batch = Batch(NODE, "w#1", 1, "reset", NodeView(0), len(ids), tuple(sorted(ids)))
    sent = ops.sync(batch).args[-len(ids) :] if ids else ()
    assert [str(room) for room in sorted(ids)] == [str(word) for word in sent]
    page = ops.drain_read(NODE, "lost:1:w#1").parse(["ROOMS", "0", " ".join(str(room) for room in sent)])
    assert sorted(ids) == sorted(page.rooms)


def test_a_room_is_open_once() -> None:
    """The second join of an open room is refused by name and the first is untouched; a final one may be reopened."""
    ledger, room = at(T)
    with pytest.raises(RoomExists, match=rf"room 7 is already open at {NODE}"):
        ledger.join(NODE, 7)
    assert room.status is T
    assert ledger.find(NODE, 7) is room
    room.update(S)
    again = ledger.join(NODE, 7)
    assert (again.status, room.status) == (B, S)
    assert not room.leave()
    assert ledger.find(NODE, 7) is again


@pytest.mark.parametrize("deadline", [0, -1, float("nan"), -float("inf")])
def test_a_deadline_is_a_positive_time(deadline: float) -> None:
    """Anything else is refused before the room is opened."""
    ledger = Ledger("w#1", lambda: 0.0)
    with pytest.raises(ConfigError, match="deadline_s"):
        ledger.join(NODE, 7, deadline_s=deadline)
    assert ledger.find(NODE, 7) is None
