"""Edges that reading the scripts beside the ledger brought up, each on every lane."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from scriptlab import A, Lab, N
from servers import FakeLane, Server, free_port
from util import wait_until

from coordinator import Settings, StoreUnavailable, Worker
from coordinator.decide.book import Book, Outcome
from coordinator.decide.ledger import Ledger
from coordinator.inspect import answering
from coordinator.protocol import NodeView
from coordinator.rooms import Cause
from coordinator.store.client import AsyncStore, SyncStore
from coordinator.store.connect import async_client, sync_client
from coordinator.store.ops import Ops


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


def test_G6_a_cluster_that_cannot_be_reached_is_a_store_that_is_away() -> None:
    """The driver's exception for it, which is no RedisError, reads as StoreUnavailable everywhere; no loop ends."""
    url = f"redis+cluster://127.0.0.1:{free_port()}"
    settings = Settings(call_timeout_s=0.1, retry_s=0.1)
    op = Ops(settings).discover([N])

    async def ask() -> list[object]:
        store = AsyncStore(async_client(url, settings), settings.retry_s)
        try:
            answers: list[object] = [*await store.many([op, op])]
            for call in (store.run(op), store.command("HGET", "k", "f")):
                answers += await asyncio.gather(call, return_exceptions=True)
            return answers
        finally:
            await store.aclose()

    assert [type(answer) for answer in asyncio.run(ask())] == [StoreUnavailable] * 4
    with pytest.raises(StoreUnavailable), answering():  # the blocking client looks for its cluster when it is made
        SyncStore(sync_client(url, settings), settings.retry_s).run(op)
    with Worker(url, settings=replace(settings, tick_s=0.05, lease_s=1.0)) as worker:
        worker.join("127.0.0.1:9", 7)
        wait_until(lambda: worker.health()["counters"]["sync_errors"] >= 3, 20, "the sync loop notices")
        assert not worker.health()["store"]["reachable"]
        assert worker.health()["restarts"]["sync"] == worker.health()["restarts"]["heartbeat"] == 0
