"""Rooms entered as of when they were opened: what an epoch's end covers has failed, whichever came first."""

from __future__ import annotations

import pytest

from coordinator import Cause, Failure, InvalidAddress, Status, WorkerClosed
from coordinator.decide.book import CHUNK, Book, Outcome
from coordinator.decide.intake import enter
from coordinator.decide.ledger import Ledger
from coordinator.protocol import FAILED, NodeView

A = "10.0.0.1:80"


class Clock:
    """Seconds that pass when told so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(clock: Clock) -> Ledger:
    return Ledger("w", clock, lambda: None)


def learn(ledger: Ledger, now: float, view: NodeView) -> Outcome:
    outcome = Outcome()
    ledger.open_book(A).learn(view, now, outcome)
    return outcome


def ended(ledger: Ledger, now: float, age_ms: int = 0, epoch: int = 2) -> Outcome:
    """The node has failed `age_ms` ago."""
    return learn(ledger, now, NodeView(epoch, FAILED, age_ms, Cause.NODE_FAILED.value, "gone", "judge"))


def open_at(ledger: Ledger) -> dict[int, float]:
    return {room.id: room.opened_s for room in ledger.rooms(A) if 0 < room.status < 4}


def test_entered_as_of_then(ledger: Ledger) -> None:
    """A room counts from when it was opened, not from when it was entered, and is to be written."""
    done = enter(ledger, A, [(1, 90.0), (2, 95.0)])
    assert (done.failed, done.refused, done.refusal) == ([], [], None)
    assert open_at(ledger) == {1: 90.0, 2: 95.0}
    assert ledger.open_book(A).dirty == {1, 2}


def test_many_are_entered_in_pieces(ledger: Ledger) -> None:
    """More rooms than one hold of the lock covers: all of them are in."""
    done = enter(ledger, A, [(n, 90.0) for n in range(2 * CHUNK + 1)])
    assert len(open_at(ledger)) == 2 * CHUNK + 1
    assert not done.refused


def test_the_same_number_twice_is_the_same_room(ledger: Ledger) -> None:
    """A number that is open stays as it is; one that has ended begins again."""
    enter(ledger, A, [(1, 90.0)])
    enter(ledger, A, [(1, 95.0)])
    assert open_at(ledger) == {1: 90.0}
    ledger.update(A, 1, Status.FAILED, "it broke")
    enter(ledger, A, [(1, 97.0)])
    assert open_at(ledger) == {1: 97.0}
    room = ledger.find(A, 1)
    assert room is not None
    assert room.failure is None


@pytest.mark.parametrize("room", [-1, 2**63, True, "7", None, 1.0])
def test_no_room_id_is_left_out(ledger: Ledger, room: object) -> None:
    """What is no room id neither raises nor is entered; its neighbours are."""
    done = enter(ledger, A, [(1, 90.0), (room, 90.0), (2, 90.0)])  # type: ignore[list-item]
    assert sorted(open_at(ledger)) == [1, 2]
    assert (done.failed, done.refused) == ([], [])


def test_what_came_before_the_end_has_failed_though_the_news_came_first(ledger: Ledger) -> None:
    """The end of an epoch is known, then rooms from before it are entered: failed with its reason, never open."""
    learn(ledger, 80.0, NodeView(1))
    ended(ledger, 96.0, age_ms=1000)
    learn(ledger, 97.0, NodeView(2, "alive", 2000, Cause.NODE_FAILED.value, "gone", "judge"))
    done = enter(ledger, A, [(1, 94.0), (2, 95.5)])
    assert [(room.id, failure.cause, failure.reason) for room, failure in done.failed] == [
        (1, Cause.NODE_FAILED, "gone")
    ]
    assert open_at(ledger) == {2: 95.5}
    room = ledger.find(A, 1)
    assert room is not None
    assert (room.status, room.failure) == (Status.FAILED, done.failed[0][1])


def test_a_failed_node_refuses_what_came_later(ledger: Ledger) -> None:
    """At a failed node: what was opened before its end has failed with it; what came later is refused and not open."""
    learn(ledger, 80.0, NodeView(1))
    ended(ledger, 95.0)
    done = enter(ledger, A, [(1, 94.0), (2, 96.0)])
    assert [room.id for room, _ in done.failed] == [1]
    assert done.refused == [(2, 96.0)]
    assert done.refusal is not None
    assert done.refusal.state == "failed"
    assert open_at(ledger) == {}


def test_a_failure_that_was_never_stored_is_not_written(ledger: Ledger) -> None:
    """A room that has failed before it was entered is not in the store, so nothing is removed there."""
    learn(ledger, 80.0, NodeView(1))
    ended(ledger, 95.0)
    enter(ledger, A, [(1, 94.0)])
    assert ledger.open_book(A).dirty == set()


def test_an_address_that_was_forgotten_is_opened_again(ledger: Ledger) -> None:
    """The janitor drops the book between two entries: the next one makes another book."""
    old = ledger.open_book(A)
    assert ledger.forget(old)
    enter(ledger, A, [(1, 90.0)])
    assert open_at(ledger) == {1: 90.0}
    assert ledger.book(A) is not old


def test_forgotten_between_look_up_and_lock(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The book that was looked up has been forgotten by the time it is locked: the rooms are entered all the same."""
    old = ledger.open_book(A)
    real, books = ledger.open_book, [old]
    monkeypatch.setattr(ledger, "open_book", lambda address: books.pop() if books else real(address))
    assert ledger.forget(old)
    done = enter(ledger, A, [(1, 90.0), (2, 91.0)])
    assert open_at(ledger) == {1: 90.0, 2: 91.0}
    assert not done.refused
    assert not old.rooms


def test_errors_are_told(ledger: Ledger) -> None:
    """No address, and a closed worker, raise what join raises."""
    with pytest.raises(InvalidAddress):
        enter(ledger, "nowhere", [(1, 90.0)])
    ledger.refuse_all()
    with pytest.raises(WorkerClosed):
        enter(ledger, A, [(1, 90.0)])


# -- Book.past and Book.void ------------------------------------------------------------------------------------


def book_with(ledger: Ledger, *openings: tuple[int, float]) -> Book:
    enter(ledger, A, openings)
    return ledger.open_book(A)


def test_void_reaches_further_than_the_end(ledger: Ledger) -> None:
    """What was known of the former instance was in use until later: rooms opened until then fail, too, once."""
    book = book_with(ledger)
    learn(ledger, 80.0, NodeView(1))
    learn(ledger, 96.0, NodeView(2, "alive", 1000, Cause.NODE_RESTARTED.value, "restarted", "judge"))
    enter(ledger, A, [(1, 95.5), (2, 96.5)])
    failed = book.void(96.0)
    assert [(room.id, failure.reason) for room, failure in failed] == [(1, "restarted")]
    assert book.void(96.0) == []
    assert open_at(ledger) == {2: 96.5}
    assert [room.id for room, _ in enter(ledger, A, [(3, 95.9)]).failed] == [3]


def test_void_without_an_end_is_nothing(ledger: Ledger) -> None:
    """No epoch has ended here: there is nothing that could be void."""
    book = book_with(ledger, (1, 90.0))
    assert book.void(99.0) == []
    assert book.past is None
    assert open_at(ledger) == {1: 90.0}


def test_the_past_never_moves_back(ledger: Ledger) -> None:
    """An older end that is told late does not shorten what is past."""
    book = book_with(ledger)
    learn(ledger, 80.0, NodeView(1))
    ended(ledger, 96.0)
    past = book.past
    assert past is not None
    assert 96.0 <= past[0] < 96.1
    ended(ledger, 97.0, age_ms=5000)
    assert book.past == past
    assert isinstance(past[1], Failure)


def test_what_never_ended_has_no_past(ledger: Ledger) -> None:
    """A node that lives, known for the first time: nothing is past."""
    learn(ledger, 99.0, NodeView(3))
    assert ledger.open_book(A).past is None


def test_first_contact_with_a_node_that_failed_long_ago(ledger: Ledger) -> None:
    """An end from before this worker came: rooms opened since are the living epoch's, earlier ones have failed."""
    learn(ledger, 100.0, NodeView(5, "alive", 10_000, Cause.NODE_FAILED.value, "long ago", "judge"))
    done = enter(ledger, A, [(1, 89.0), (2, 91.0)])
    assert [room.id for room, _ in done.failed] == [1]
    assert open_at(ledger) == {2: 91.0}


def test_what_is_said_again_about_an_end_does_not_make_it_later(ledger: Ledger) -> None:
    """Answers that took 50 ms tell the age of the same end again: a room of the next instance is not drawn into it."""
    ended(ledger, 100.0)
    ended(ledger, 100.07, age_ms=20)
    learn(ledger, 100.1, NodeView(2, "alive", 20, Cause.NODE_FAILED.value, "gone", "judge"))
    done = enter(ledger, A, [(1, 99.9), (2, 100.02)])
    assert [room.id for room, _ in done.failed] == [1]
    assert open_at(ledger) == {2: 100.02}


def test_another_end_is_another_past(ledger: Ledger) -> None:
    """The next epoch ends, too: what was opened before that is past."""
    ended(ledger, 100.0)
    ended(ledger, 105.0, epoch=3)
    learn(ledger, 105.1, NodeView(3, "alive", 100, Cause.NODE_FAILED.value, "gone", "judge"))
    assert [room.id for room, _ in enter(ledger, A, [(1, 104.9), (2, 105.02)]).failed] == [1]
