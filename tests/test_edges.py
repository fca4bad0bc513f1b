"""Edges that reading the scripts beside the ledger brought up, each on every lane."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scriptlab import A, Lab, N
from servers import FakeLane, Server

from coordinator.decide.book import Book, Outcome
from coordinator.decide.ledger import Ledger
from coordinator.protocol import NodeView
from coordinator.rooms import Cause


@pytest.fixture
def lab(store_server: FakeLane | Server) -> Iterator[Lab]:
    with store_server.sync_client() as client:
        yield Lab(client, declared=store_server.kind == "strict")


def test_G4_a_mark_of_an_ended_epoch_does_not_abort_the_next_opening(lab: Lab) -> None:
    """A room is marked, its node restarts, its owner opens the number again at once: the new opening lives."""
    ledger = Ledger(A, lambda: 1.0)
    lab.node("life-1")
    ledger.join(N, 7)
    book = ledger.book(N)
    assert book is not None
    round_trip(lab, book, now=2.0)
    lab.run(lab.ops.abort_room(N, A, 7, "no memory", "node"))
    lab.node("life-2", workers=[A])
    outcome = round_trip(lab, book, now=3.0)  # STALE
    assert [(room.id, failure.cause) for room, failure in outcome.failed] == [(7, Cause.NODE_RESTARTED)]
    ledger.leave(N, 7)
    again = replace_clock(ledger, 4.0).join(N, 7)
    for now in (5.0, 6.0, 7.0):
        assert round_trip(lab, book, now).failed == []
    assert again.failure is None


def test_G8_a_store_clock_that_stepped_back_saves_no_room_of_the_old_instance(lab: Lab) -> None:
    """The end of the epoch lies in the store's future: its age counts as 0, and the old instance's rooms fail."""
    ledger = Ledger(A, lambda: 1.0)
    lab.node("life-1")
    ledger.join(N, 7)
    book = ledger.book(N)
    assert book is not None
    round_trip(lab, book, now=2.0)
    lab.node("life-2", workers=[A])
    failed_ms = int(str(lab.client.hget(lab.keys.node(N), "failed_ms")))
    lab.client.hset(lab.keys.node(N), "failed_ms", failed_ms + 60_000)
    outcome = round_trip(lab, book, now=3.0)
    assert [(room.id, failure.cause) for room, failure in outcome.failed] == [(7, Cause.NODE_RESTARTED)]


def round_trip(lab: Lab, book: Book, now: float) -> Outcome:
    batch = book.batch(now, 100)
    return book.apply(batch, lab.run(lab.ops.sync(batch)), now)


def replace_clock(ledger: Ledger, now: float) -> Ledger:
    ledger._clock = lambda: now
    return ledger


def test_G8_a_restart_is_seen_even_if_the_store_lost_its_data_in_the_same_moment(lab: Lab) -> None:
    """Emptied, and the next instance registers before the owner syncs: the epoch is 1 again, the old rooms fail."""
    ledger = Ledger(A, lambda: 1.0)
    lab.node("life-1")
    ledger.join(N, 7)
    book = ledger.book(N)
    assert book is not None
    for now in (2.0, 2.5):
        round_trip(lab, book, now)
    lab.client.flushall()
    lab.node("life-2")
    outcome = round_trip(lab, book, now=3.0)
    assert [(room.id, failure.cause) for room, failure in outcome.failed] == [(7, Cause.NODE_RESTARTED)]
    assert outcome.ended
    replace_clock(ledger, 4.0).join(N, 8)
    for now in (5.0, 6.0, 7.0):
        assert round_trip(lab, book, now).failed == []
    assert lab.client.smembers(lab.keys.rooms(N, A)) == {"8"}


def test_G6_an_instance_that_became_known_meanwhile_replaced_nobody() -> None:
    """A probe saw it before the store knew any; the store's answer came before its own trouble: no room fails."""
    ledger = Ledger(A, lambda: 1.0)
    ledger.join(N, 7)
    book = ledger.book(N)
    assert book is not None
    assert book.saw_instance("life-1", 2.0)
    book.learn(NodeView(1, instance="life-1"), 3.0, Outcome())
    assert book.fail_replaced() == []
    assert book.saw_instance("life-2", 4.0)
    assert [room.id for room, _ in book.fail_replaced()] == [7]
