"""The ledger and its books, without a store: batches are taken out by hand and answers are made up.

`Bench` is one worker with a clock of its own and a set that mirrors what a store would hold after each batch.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from coordinator import Cause, Failure, JoinRefused, Room, RoomExists, Settings, Status, WorkerClosed
from coordinator.decide.book import CHUNK, Book, Outcome
from coordinator.decide.detector import Detector
from coordinator.decide.ledger import Ledger
from coordinator.protocol import FAILED, Batch, NodeView, SyncReply, SyncStatus
from coordinator.runtime.core import Core
from coordinator.runtime.deliver import Delivery
from coordinator.store.ops import Ops

NODE, OTHER = "10.0.0.5:8998", "10.0.0.6:8998"
OK, STALE, RESYNC, FENCED = SyncStatus


class Bench:
    """One worker at one address; `now` is its clock."""

    def __init__(self, worker: str = "a#1", address: str = NODE) -> None:
        self.now, self.wakes = 100.0, 0
        self.ledger = Ledger(worker, lambda: self.now, self._wake)
        self.address = address
        self.store: set[int] = set()

    def _wake(self) -> None:
        self.wakes += 1

    @property
    def book(self) -> Book:
        return self.ledger.open_book(self.address)

    def join(self, room_id: int, **options: Any) -> Room:
        return self.ledger.join(self.address, room_id, **options)

    def take(self, limit: int = 500) -> Batch:
        """The next batch; what it does to a store is done to the mirror."""
        return self.book.batch(self.now, limit)

    def apply_to_store(self, batch: Batch) -> None:
        if batch.mode == "reset":
            self.store.clear()
        self.store.update(batch.adds)
        self.store.difference_update(batch.removes)
        assert len(self.store) == batch.count

    def answer(self, batch: Batch, status: SyncStatus = OK, **view: Any) -> Outcome:
        """The answer to `batch`; the node is alive in epoch 1 unless `view` says otherwise."""
        aborted = view.pop("aborted", ())
        if status is OK:
            self.apply_to_store(batch)
        node = NodeView(**{"epoch": 1, **view})
        return self.book.apply(batch, SyncReply(status, node, aborted=aborted), self.now)

    def sync(self, status: SyncStatus = OK, **view: Any) -> Outcome:
        """One batch and its answer."""
        return self.answer(self.take(), status, **view)

    def settle(self, limit: int = 500) -> None:
        """Batches until nothing waits."""
        while self.book.behind:
            self.answer(self.take(limit))


def failed_ids(outcome: Outcome) -> list[int]:
    """Rooms that an outcome failed, in order of number."""
    return sorted(room.id for room, _ in outcome.failed)


def causes(outcome: Outcome) -> set[Cause]:
    """Their causes."""
    return {failure.cause for _, failure in outcome.failed}


@pytest.fixture
def a() -> Bench:
    """Worker A."""
    return Bench()


# -- rooms (CASES 1-9) -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("synced", [False, True])
def test_the_second_join_of_an_open_room_is_refused(a: Bench, synced: bool) -> None:
    """RoomExists, and the first opening stays as it was, written or not (CASE 1)."""
    first = a.join(7)
    first.update(Status.TRANSFERRING)
    if synced:
        a.sync()
    with pytest.raises(RoomExists):
        a.join(7)
    assert a.ledger.find(NODE, 7) is first
    assert first.status is Status.TRANSFERRING
    assert a.book.dirty == (set() if synced else {7})


@pytest.mark.parametrize("left", [False, True])
def test_a_new_opening_shows_nothing_of_a_failed_one(a: Bench, left: bool) -> None:
    """No status, reason or failure of the first opening shows in the second, collected or not (CASE 2)."""
    first = a.join(7)
    a.sync()
    a.sync(STALE, epoch=2, state="alive", failed_age_ms=0, reason="died")
    assert first.failure is not None
    if left:
        assert first.leave()
    a.now += 1
    second = a.join(7)
    assert (second.status, second.failure) == (Status.BOOTSTRAPPING, None)
    a.sync(epoch=2, failed_age_ms=1000, reason="died")
    assert (second.status, second.failure) == (Status.BOOTSTRAPPING, None)
    assert (first.status, first.failure.reason) == (Status.FAILED, "died")
    assert a.store == {7}


@pytest.mark.parametrize("late", [Status.FAILED, Status.SUCCESS, Status.TRANSFERRING])
def test_a_late_move_of_an_earlier_opening_is_ignored(a: Bench, late: Status) -> None:
    """The handle of a closed opening moves nothing, least of all the present one (CASE 3)."""
    first = a.join(7)
    a.sync()
    first.leave()
    second = a.join(7)
    assert not first.update(late)
    assert not first.leave()
    assert (first.status, second.status, second.failure) == (Status.BOOTSTRAPPING, Status.BOOTSTRAPPING, None)
    assert a.ledger.find(NODE, 7) is second


def test_ranks_share_a_number_and_not_a_room() -> None:
    """Four workers open room 7; one leaves; the node fails: the other three are told, each once (CASE 4)."""
    ranks = [Bench(f"rank{i}#1") for i in range(4)]
    for rank in ranks:
        rank.join(7)
        rank.sync()
    ranks[0].ledger.leave(NODE, 7)
    ranks[0].sync()
    assert [rank.store for rank in ranks] == [set(), {7}, {7}, {7}]
    told = [failed_ids(rank.sync(STALE, epoch=2, state=FAILED, failed_age_ms=5)) for rank in ranks]
    again = [failed_ids(rank.sync(STALE, epoch=2, state=FAILED, failed_age_ms=50)) for rank in ranks]
    assert told == [[], [7], [7], [7]]
    assert again == [[]] * 4


def test_the_same_number_at_another_address_is_another_room(a: Bench) -> None:
    """Failing one address leaves room 7 at the other open (CASE 5)."""
    here, there = a.join(7), a.ledger.join(OTHER, 7)
    a.sync()
    assert failed_ids(a.sync(STALE, epoch=2, state=FAILED, failed_age_ms=0)) == [7]
    assert (here.status, there.status) == (Status.FAILED, Status.BOOTSTRAPPING)
    assert a.ledger.join(OTHER, 8).status is Status.BOOTSTRAPPING


@pytest.mark.parametrize("used", [False, True])
def test_a_room_that_is_not_open_has_defined_answers(a: Bench, used: bool) -> None:
    """update and leave answer False, find None; no room and no book comes into being (CASE 6)."""
    if used:
        a.join(1)
        a.sync()
    books = len(a.ledger.books())
    assert a.ledger.update(NODE, 7, Status.TRANSFERRING) is False
    assert a.ledger.update(NODE, 7, Status.FAILED) is False
    assert a.ledger.leave(NODE, 7) is False
    assert a.ledger.find(NODE, 7) is None
    assert a.ledger.fail(NODE, 7, Failure(Cause.ABORTED, "x", NODE)) is None
    assert len(a.ledger.books()) == books
    assert not used or (set(a.book.rooms), a.book.dirty) == ({1}, set())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_a_with_block_leaves_whatever_happens(a: Bench, error: type[BaseException]) -> None:
    """An exception inside the block goes through, and the room is gone (CASE 7)."""
    room = a.join(7)
    a.sync()
    with pytest.raises(error), room:
        raise error
    assert a.ledger.find(NODE, 7) is None
    a.sync()
    assert a.store == set()


def test_leaving_twice_and_after_a_failure(a: Bench) -> None:
    """Each answers once; a room counts once, whatever order it ends in (CASE 8)."""
    left, failed = a.join(1), a.join(2)
    a.sync()
    assert [left.leave(), left.leave(), a.ledger.leave(NODE, 1)] == [True, False, False]
    assert failed_ids(a.sync(STALE, epoch=2, state=FAILED, failed_age_ms=0)) == [2]
    assert [failed.leave(), failed.leave()] == [True, False]
    assert failed.status is Status.FAILED
    a.sync(epoch=2, state=FAILED)
    assert (a.store, a.book.rooms, a.book.dirty) == (set(), {}, set())


def test_leaving_races_failing(a: Bench) -> None:
    """Two threads leave 4,000 rooms while they are failed: each room was left open, or failed first, never neither."""
    for _ in range(10):
        rooms = [a.join(i) for i in range(4000)]
        gate = threading.Barrier(3)
        at_leave: dict[int, bool] = {}
        failed: list[Room] = []

        def leave(part: list[Room], gate: threading.Barrier = gate, seen: dict[int, bool] = at_leave) -> None:
            gate.wait()
            for room in part:
                seen[room.id] = room.leave()

        threads = [threading.Thread(target=leave, args=(rooms[i::2],)) for i in range(2)]
        for thread in threads:
            thread.start()
        gate.wait()
        failed = a.book.fail_rooms(rooms, Failure(Cause.NODE_FAILED, "race", NODE))
        for thread in threads:
            thread.join()
        assert all(at_leave.values())
        assert len(at_leave) == 4000
        assert {room.id for room in failed} == {room.id for room in rooms if room.status is Status.FAILED}
        assert {room.status for room in rooms} <= {Status.FAILED, Status.BOOTSTRAPPING}
        assert a.book.rooms == {}


def test_success_races_failing(a: Bench) -> None:
    """A room ends as Success or as Failed, and whoever was told that it moved is right (G3)."""
    for _ in range(10):
        rooms = [a.join(i) for i in range(3 * CHUNK)]
        succeeded: set[int] = set()
        gate = threading.Barrier(2)

        def finish(rooms: list[Room] = rooms, done: set[int] = succeeded, gate: threading.Barrier = gate) -> None:
            gate.wait()
            done.update(room.id for room in reversed(rooms) if room.update(Status.SUCCESS))

        thread = threading.Thread(target=finish)
        thread.start()
        gate.wait()
        failed = {room.id for room in a.book.fail_rooms(rooms, Failure(Cause.NODE_FAILED, "race", NODE))}
        thread.join()
        assert failed | succeeded == set(range(3 * CHUNK))
        assert failed & succeeded == set()
        for room in rooms:
            assert room.leave()


def test_a_failed_address_refuses_joins_at_once(a: Bench) -> None:
    """The error names the reason; nothing is queued for the store (CASE 9)."""
    a.join(1)
    a.sync()
    a.sync(STALE, epoch=2, state=FAILED, failed_age_ms=0, reason="pulled the plug")
    with pytest.raises(JoinRefused, match="pulled the plug") as caught:
        a.join(2)
    assert (caught.value.address, caught.value.state, caught.value.retry_safe) == (NODE, "failed", True)
    batch = a.take()
    assert (batch.adds, batch.removes, batch.count, batch.node.epoch) == ((), (), 0, 2)


def test_a_deadline_fails_a_room_that_nobody_closes(a: Bench) -> None:
    """At its own deadline, not before, once, with a reason; what was left or reopened is not hit (CASE 9)."""
    late, left = a.join(1, deadline_s=5), a.join(2, deadline_s=5)
    a.join(3)
    a.join(4, deadline_s=9)
    assert a.ledger.next_deadline_s() == 105
    left.leave()
    again = a.join(2)
    a.now = 104.999
    assert list(a.ledger.due_deadlines(a.now)) == []
    a.now = 105
    [(room, failure)] = list(a.ledger.due_deadlines(a.now))
    assert room is late
    assert (failure.cause, failure.reason, failure.address) == (Cause.DEADLINE, "the room's deadline passed", NODE)
    assert again.status is Status.BOOTSTRAPPING
    assert list(a.ledger.due_deadlines(a.now)) == []
    assert a.ledger.next_deadline_s() == 109
    assert a.wakes >= 3, "each deadline wakes the loop, which sleeps until the next one"


# -- who failed it, and why (CASES 11, 57) -----------------------------------------------------------------------------


def test_the_first_cause_is_kept(a: Bench) -> None:
    """A later symptom neither replaces the failure nor tells it again (CASE 11)."""
    local, unreachable = a.join(1), a.join(2)
    a.sync()
    local.update(Status.FAILED, "checksum")
    assert [room.id for room, _ in a.book.fail_unreachable("no route")] == [2]
    outcome = a.sync(STALE, epoch=2, state=FAILED, failed_age_ms=0, reason="dead", by="b#1")
    assert outcome.failed == []
    assert [room.failure and (room.failure.cause, room.failure.reason) for room in (local, unreachable)] == [
        (Cause.LOCAL, "checksum"),
        (Cause.UNREACHABLE, "no route"),
    ]


def test_all_owners_read_the_same_failure() -> None:
    """Whoever is told by the store reads cause, reason, epoch and author of the one verdict (CASE 11)."""
    owners = [Bench(f"w{i}#1") for i in range(3)]
    rooms = [owner.join(7) for owner in owners]
    for i, owner in enumerate(owners):
        owner.sync()
        owner.sync(
            STALE, epoch=2, state=FAILED, failed_age_ms=i, cause="node_failed", reason="refused: port 8998", by="w1#1"
        )
    expected = Failure(Cause.NODE_FAILED, "refused: port 8998", NODE, 1, "w1#1")
    assert [room.failure for room in rooms] == [expected] * 3


@pytest.mark.parametrize(
    ("cause", "read"), [("node_restarted", Cause.NODE_RESTARTED), ("", "node_failed"), ("?", "node_failed")]
)
def test_a_cause_that_is_unknown_reads_as_node_failed(a: Bench, cause: str, read: str) -> None:
    """A newer peer's word breaks nothing."""
    a.join(7)
    a.sync()
    outcome = a.sync(STALE, epoch=2, state="alive", failed_age_ms=0, cause=cause)
    assert causes(outcome) == {Cause(read)}


def test_a_worker_cannot_touch_anothers_room(a: Bench) -> None:
    """B's leave, update and abort of A's room 7 are refused; A's room is as it was (CASE 57)."""
    room = a.join(7)
    a.sync()
    b = Bench("b#1")
    b.join(8)
    assert not b.ledger.leave(NODE, 7)
    assert not b.ledger.update(NODE, 7, Status.FAILED)
    assert b.ledger.fail(NODE, 7, Failure(Cause.ABORTED, "not yours", NODE)) is None
    assert (b.take().adds, b.take().removes) == ((8,), ())
    assert room.status is Status.BOOTSTRAPPING


# -- what is sent ------------------------------------------------------------------------------------------------------


def test_a_room_opened_and_closed_between_two_batches_costs_nothing(a: Bench) -> None:
    """Left, succeeded or failed before the batch: it is not in it, and nothing waits."""
    a.join(1)
    a.sync()
    a.join(2).leave()
    a.join(3).update(Status.SUCCESS)
    a.join(4).update(Status.FAILED)
    assert a.book.dirty == set()
    assert not a.book.behind
    batch = a.take()
    assert (batch.adds, batch.removes) == ((), ())


def test_a_final_room_leaves_the_store_before_it_is_left(a: Bench) -> None:
    """Only open rooms are stored, so that a snapshot holds exactly what a failure affects."""
    for room_id, status in ((1, Status.SUCCESS), (2, Status.FAILED), (3, Status.TRANSFERRING)):
        a.join(room_id)
        a.sync()
        a.ledger.update(NODE, room_id, status)
    a.sync()
    assert a.store == {3}
    assert set(a.book.rooms) == {1, 2, 3}


def test_an_unanswered_batch_is_repeated_unchanged(a: Bench) -> None:
    """Whatever happened since, the same object goes out again until it is answered; then comes the rest."""
    a.join(1)
    first = a.take()
    a.join(2)
    a.ledger.leave(NODE, 1)
    assert a.take() is first
    assert (first.adds, first.number, first.mode) == ((1,), 1, "reset")
    outcome = a.answer(first)
    assert outcome.again
    second = a.take()
    assert (second.adds, second.removes, second.number, second.mode) == ((2,), (1,), 2, "delta")
    assert not a.answer(second).again
    assert a.store == {2}


def test_an_answer_to_another_batch_is_ignored(a: Bench) -> None:
    """A late answer to a batch that was answered already changes nothing."""
    a.join(1)
    first = a.take()
    a.answer(first)
    late = a.book.apply(first, SyncReply(STALE, NodeView(9, FAILED, 0)), a.now)
    assert late == Outcome()
    assert a.book.node.epoch == 1
    assert a.ledger.find(NODE, 1).status is Status.BOOTSTRAPPING  # type: ignore[union-attr]


def test_batches_are_bounded_and_add_up(a: Bench) -> None:
    """1,234 rooms travel in pieces of at most 500, the first of them a reset; each piece says the right count."""
    for i in range(1234):
        a.join(i)
    sizes, modes = [], []
    while a.book.behind:
        batch = a.take(500)
        sizes.append(len(batch.adds) + len(batch.removes))
        modes.append(batch.mode)
        a.answer(batch)
    assert sizes == [500, 500, 234]
    assert modes == ["reset", "delta", "delta"]
    assert a.store == set(range(1234))


def test_what_waits_never_outgrows_the_rooms_that_live_or_are_stored(a: Bench) -> None:
    """100,000 rooms open and close during an outage, with a batch unanswered: nothing piles up."""
    for i in range(100):
        a.join(i)
    a.sync()
    for i in range(100, 200):
        a.join(i)
    lost, book, most = a.take(), a.book, 0
    for i in range(1000, 101_000):
        a.join(i)
        if i >= 1020:
            a.ledger.leave(NODE, i - 20)
        most = max(most, len(book.dirty))
        assert len(book.dirty) <= len(book.rooms) + len(book.stored)
    assert most <= 21
    assert len(a.book.stored) == 200
    a.answer(lost)
    a.settle()
    assert a.store == {*range(200), *range(100_980, 101_000)}


def test_a_reopened_number_is_sent_again(a: Bench) -> None:
    """Closed and opened between two batches: the store is told, so that marks of the old opening go."""
    a.join(7)
    a.sync()
    a.ledger.leave(NODE, 7)
    a.join(7)
    batch = a.take()
    assert (batch.adds, batch.removes, batch.count) == ((7,), (), 1)


def test_statistics_are_gathered_while_rooms_change(a: Bench) -> None:
    """Four threads open and close rooms for all of 300 statistics and batches: no error anywhere (CASE 59)."""
    errors: list[BaseException] = []
    stop = threading.Event()

    def churn(base: int) -> None:
        try:
            i = base
            while not stop.is_set():
                room = a.join(i)
                room.update(Status.TRANSFERRING)
                a.join(i + 1).update(Status.SUCCESS)
                room.leave()
                a.ledger.leave(NODE, i + 1)
                i += 2
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=churn, args=(base * 10**9,)) for base in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            stats = a.book.stats(a.now)
            assert stats.bootstrapping + stats.waiting_for_input + stats.transferring <= 8
            a.ledger.books()
            a.sync()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []


def test_statistics_count_open_rooms_and_name_the_oldest(a: Bench) -> None:
    """Counts by status, and the three oldest open rooms with their ages in ms."""
    a.join(1).update(Status.SUCCESS)
    for i in range(2, 7):
        a.now += 1
        a.join(i)
    a.ledger.update(NODE, 3, Status.WAITING_FOR_INPUT)
    a.ledger.update(NODE, 4, Status.TRANSFERRING)
    stats = a.book.stats(a.now)
    assert (stats.bootstrapping, stats.waiting_for_input, stats.transferring) == (3, 1, 1)
    assert stats.oldest == "2:bootstrapping:4000 3:waiting_for_input:3000 4:transferring:2000"


# -- an epoch ends -----------------------------------------------------------------------------------------------------


def test_rooms_opened_before_the_end_fail_and_later_ones_are_stamped_anew(a: Bench) -> None:
    """The node failed 3 s ago and is back: age decides, and the survivors are sent again under the new epoch."""
    before = a.join(1)
    a.sync()
    a.now += 10  # 110: the node fails at 109
    after = a.join(2)
    a.now += 2
    outcome = a.sync(STALE, epoch=2, state="alive", failed_age_ms=3000)
    assert failed_ids(outcome) == [1]
    assert (before.status, after.status) == (Status.FAILED, Status.BOOTSTRAPPING)
    assert (outcome.ended, outcome.again) == (True, True)
    assert outcome.acknowledge == ["lost:1:a#1"]
    batch = a.take()
    assert (batch.mode, batch.adds, batch.node.epoch) == ("reset", (2,), 2)
    a.answer(batch, epoch=2)
    assert a.store == {2}


@pytest.mark.parametrize(
    ("opened_after_ms", "fails"), [(-5, True), (-1, True), (0, True), (1, True), (3, False), (50, False)]
)
def test_the_end_of_an_epoch_is_known_to_two_milliseconds(a: Bench, opened_after_ms: int, fails: bool) -> None:
    """Ages are whole milliseconds, rounded down at both ends: within that grain a room fails rather than hangs."""
    a.join(1)
    a.sync()
    a.now = 110 + opened_after_ms / 1000
    room = a.join(2)
    a.now = 111
    a.sync(STALE, epoch=2, state="alive", failed_age_ms=1000)
    assert (room.status is Status.FAILED) == fails


def test_a_failed_address_holds_no_room_at_all(a: Bench) -> None:
    """While it is failed, rooms that slipped in after the end fail too: nobody serves them."""
    a.join(1)
    a.sync()
    a.now += 10
    a.join(2)
    assert failed_ids(a.sync(STALE, epoch=2, state=FAILED, failed_age_ms=5000)) == [1, 2]


def test_success_is_not_failed(a: Bench) -> None:
    """A room that had reached Success stays so, with its epoch over (G3)."""
    done = a.join(1)
    a.sync()
    done.update(Status.SUCCESS)
    assert a.sync(STALE, epoch=2, state=FAILED, failed_age_ms=0).failed == []
    assert (done.status, done.failure) == (Status.SUCCESS, None)


def test_revival_reopens_the_address(a: Bench) -> None:
    """The same epoch, alive again: joins are accepted, nothing fails, and the outcome says so (CASE 16)."""
    a.join(1)
    a.sync()
    a.sync(STALE, epoch=2, state=FAILED, failed_age_ms=0)
    a.now += 3
    outcome = a.sync(epoch=2, state="alive", failed_age_ms=3000)
    assert (outcome.revived, outcome.ended, outcome.failed) == (True, False, [])
    room = a.join(2)
    a.sync(epoch=2, state="alive", failed_age_ms=3000)
    assert room.status is Status.BOOTSTRAPPING
    assert a.store == {2}


def test_many_epochs_may_end_between_two_syncs(a: Bench) -> None:
    """From 1 to 4 in one answer: old rooms fail once, and both snapshots that can exist are acknowledged."""
    a.join(1)
    a.sync()
    a.now += 1
    outcome = a.sync(STALE, epoch=4, state="alive", failed_age_ms=100)
    assert failed_ids(outcome) == [1]
    assert outcome.acknowledge == ["lost:1:a#1", "lost:3:a#1"]
    assert outcome.failed[0][1].epoch == 3


@pytest.mark.parametrize(
    ("view", "failed"),
    [
        ({"epoch": 5}, []),
        ({"epoch": 5, "failed_age_ms": 60_000}, []),
        ({"epoch": 5, "failed_age_ms": 1500}, [1]),
        ({"epoch": 5, "failed_age_ms": 0}, [1, 2]),
        ({"epoch": 5, "state": FAILED, "failed_age_ms": 60_000}, [1, 2]),
    ],
)
def test_the_first_answer_adopts_the_epoch(a: Bench, view: dict[str, Any], failed: list[int]) -> None:
    """A newcomer takes the epoch as it is; rooms it opened before the last end, or at a failed node, fail."""
    a.join(1)
    a.now += 1
    a.join(2)
    a.now += 1
    batch = a.take()
    assert batch.node.epoch == 0
    outcome = a.answer(batch, **view)
    assert failed_ids(outcome) == failed
    assert outcome.acknowledge == []
    assert a.book.node.epoch == 5


def test_a_lower_epoch_is_ignored(a: Bench) -> None:
    """The store fell back: nothing fails, nothing is learned, and the next batch carries the higher epoch."""
    room = a.join(1)
    a.sync(epoch=3)
    for view in (NodeView(2, FAILED, 0, reason="old"), NodeView(1), NodeView(0)):
        outcome = Outcome()
        a.book.learn(view, a.now, outcome)
        assert outcome == Outcome()
    a.sync(RESYNC, epoch=2, state=FAILED, failed_age_ms=0)
    assert room.status is Status.BOOTSTRAPPING
    batch = a.take()
    assert (batch.node.epoch, batch.mode, batch.adds) == (3, "reset", (1,))


def test_the_batch_carries_what_a_store_that_fell_back_must_learn(a: Bench) -> None:
    """State, cause, reason and age of the last end travel with each batch; the age grows with the clock."""
    a.join(1)
    a.sync()
    a.sync(STALE, epoch=2, state=FAILED, failed_age_ms=250, cause="node_failed", reason="dead", by="b#1", instance="i1")
    a.now += 1
    assert a.take().node == NodeView(2, FAILED, 1250, "node_failed", "dead", "b#1", "i1")


def test_an_own_verdict_outlives_a_late_answer(a: Bench) -> None:
    """A batch of the old epoch is in flight when this worker itself fails the node: its answer revives nothing."""
    room = a.join(1)
    a.sync()
    a.join(2)
    flight = a.take()
    outcome = Outcome()
    a.book.learn(NodeView(2, FAILED, 0, "node_failed", "operator", "a#1"), a.now, outcome)
    assert failed_ids(outcome) == [1, 2]
    assert outcome.acknowledge == ["lost:1:a#1"]
    late = a.answer(flight, OK, epoch=1)
    assert (late.failed, late.revived, late.ended) == ([], False, False)
    assert room.status is Status.FAILED
    with pytest.raises(JoinRefused, match="operator"):
        a.join(3)
    batch = a.take()
    assert (batch.mode, batch.count, batch.node.epoch, batch.node.state) == ("reset", 0, 2, FAILED)


def test_an_own_verdict_that_answers_after_the_revival_fails_nothing() -> None:
    """fail_node's reply was lost and its repetition answers late: rooms opened since the revival live (G2, G4)."""
    a = Bench()
    s = Settings()
    core = Core(s, Ops(s), None, a.ledger, Detector(s), Delivery("none"))  # type: ignore[arg-type]
    a.join(1)
    a.sync()
    a.sync(STALE, epoch=2, state=FAILED, failed_age_ms=10)
    a.now += 1
    a.sync(epoch=2, state="alive", failed_age_ms=1010)
    room = a.join(2)
    core.learn(a.book, NodeView(2, FAILED, 0, "node_failed", "operator", "a#1"))
    assert room.status is Status.BOOTSTRAPPING
    assert a.join(3).status is Status.BOOTSTRAPPING
    assert core.urgent == {NODE}


# -- restarts ----------------------------------------------------------------------------------------------------------


def test_rooms_opened_since_the_new_instance_was_seen_belong_to_it(a: Bench) -> None:
    """A probe saw i2 at 110, a room was opened at 111, the store heard of i2 at 112: the room lives (CASE 14)."""
    old = a.join(1)
    a.sync(instance="i1")
    a.now = 110
    assert a.book.saw_instance("i2", a.now)
    a.now = 111
    new = a.join(2)
    assert a.book.saw_instance("i2", a.now), "seen again: the time of the first sight stays"
    a.now = 112
    outcome = a.sync(STALE, epoch=2, failed_age_ms=0, cause="node_restarted", instance="i2")
    assert failed_ids(outcome) == [1]
    assert causes(outcome) == {Cause.NODE_RESTARTED}
    assert (old.status, new.status) == (Status.FAILED, Status.BOOTSTRAPPING)
    assert not a.book.saw_instance("i2", a.now)


def test_a_failure_of_the_instance_that_was_seen_fails_its_rooms(a: Bench) -> None:
    """i2 was first seen at 110, failed at 120 and answers again: its rooms opened in between are lost too (G3)."""
    a.join(1)
    a.sync(instance="i1")
    a.now = 110
    a.book.saw_instance("i2", a.now)
    a.sync(STALE, epoch=2, failed_age_ms=0, cause="node_restarted", instance="i2")
    a.now = 115
    room = a.join(2)
    a.sync(epoch=2, failed_age_ms=5000, cause="node_restarted", instance="i2")
    a.now = 121
    after = a.join(3)
    a.now = 122
    outcome = a.sync(STALE, epoch=3, failed_age_ms=2000, cause="node_failed", instance="i2")
    assert failed_ids(outcome) == [2]
    assert (room.status, after.status) == (Status.FAILED, Status.BOOTSTRAPPING)


def test_a_restart_is_seen_without_the_store(a: Bench) -> None:
    """The store is away: rooms opened before the first sight of the new instance fail here, once."""
    a.join(1)
    a.sync(instance="i1")
    a.now = 110
    a.book.saw_instance("i2", a.now)
    a.join(2)
    told = a.book.fail_replaced()
    assert [room.id for room, _ in told] == [1]
    assert told[0][1].cause is Cause.NODE_RESTARTED
    assert a.book.fail_replaced() == []
    assert failed_ids(a.sync(STALE, epoch=2, failed_age_ms=0, cause="node_restarted", instance="i2")) == []


# -- fenced, resync, aborted, full -------------------------------------------------------------------------------------


def test_a_fenced_worker_loses_what_the_store_held_and_comes_back_as_another(a: Bench) -> None:
    """Stored rooms fail as LEASE_LOST; the rest goes out under a new id with batch 1 of a reset (CASE 33)."""
    held = a.join(1)
    a.sync()
    renewal = a.take()
    fresh = a.join(2)
    outcome = a.answer(renewal, FENCED)
    assert (failed_ids(outcome), causes(outcome)) == ([1], {Cause.LEASE_LOST})
    assert (held.status, fresh.status) == (Status.FAILED, Status.BOOTSTRAPPING)
    batch = a.take()
    assert (batch.worker, batch.number, batch.mode, batch.adds) == ("a#1.1", 1, "reset", (2,))
    a.store.clear()
    a.answer(batch)
    assert a.sync(FENCED).failed != []
    assert a.take().worker == "a#1.2"


@pytest.mark.parametrize("limit", [500, 2])
def test_resync_sends_everything_again(a: Bench, limit: int) -> None:
    """The store lost data: nothing fails, and all open rooms go out from a reset on."""
    for i in range(5):
        a.join(i)
    a.ledger.update(NODE, 4, Status.SUCCESS)
    a.settle()
    a.store.clear()  # FLUSHALL
    outcome = a.sync(RESYNC)
    assert (outcome.failed, outcome.again) == ([], True)
    first = a.take(limit)
    assert first.mode == "reset"
    a.answer(first)
    a.settle(limit)
    assert a.store == {0, 1, 2, 3}


def test_an_abort_mark_fails_its_room(a: Bench) -> None:
    """The reason travels, the room leaves the store, and a mark that is repeated changes nothing."""
    a.join(7)
    a.sync()
    outcome = a.sync(aborted=((7, "no memory"),))
    [(room, failure)] = outcome.failed
    assert (room.id, failure.cause, failure.reason) == (7, Cause.ABORTED, "no memory")
    assert outcome.again
    assert a.sync(aborted=((7, "no memory"),)).failed == []
    assert a.store == set()


def test_a_mark_for_an_earlier_opening_does_not_hit_a_later_one(a: Bench) -> None:
    """Left and opened anew before the mark arrived: the new opening is not what was meant (G4)."""
    a.join(7)
    a.sync()
    renewal = a.take()
    a.ledger.leave(NODE, 7)
    again = a.join(7)
    assert a.answer(renewal, aborted=((7, "first opening"), (8, "unknown"))).failed == []
    assert again.status is Status.BOOTSTRAPPING
    a.sync()
    assert failed_ids(a.sync(aborted=((7, "second opening"),))) == [7]


def test_a_mark_for_a_room_that_was_never_written_is_not_meant(a: Bench) -> None:
    """Nobody can have aborted what the store has not seen."""
    a.join(1)
    a.sync()
    renewal = a.take()
    room = a.join(7)
    a.answer(renewal, aborted=((7, "before it was there"),))
    assert room.status is Status.BOOTSTRAPPING


def test_a_full_store_gets_removals_and_renewals_and_later_the_rest(a: Bench) -> None:
    """OOM took nothing: adds are held back for a while, removals go out, then the adds follow (CASE 42)."""
    for i in range(3):
        a.join(i)
    a.sync()
    for i in range(3, 6):
        a.join(i)
    a.ledger.leave(NODE, 0)
    refused = a.take()
    a.book.retract(a.now + 1)
    assert a.book.held(a.now)
    a.ledger.leave(NODE, 1)
    a.ledger.leave(NODE, 5)
    second = a.take()
    assert (second.number, second.mode) == (refused.number, "delta")
    assert (second.adds, sorted(second.removes), second.count) == ((), [0, 1], 1)
    a.answer(second)
    assert a.book.dirty == {3, 4}
    assert not a.book.held(a.now + 1)
    a.now += 1
    a.sync()
    assert a.store == {2, 3, 4}
    assert a.book.dirty == set()


def test_a_full_store_that_refused_a_reset_gets_a_reset(a: Bench) -> None:
    """The first batch of all was refused: the next is a reset again, and nothing is lost."""
    a.join(1)
    assert a.take().mode == "reset"
    a.book.retract(a.now + 1)
    held = a.take()
    assert (held.number, held.mode, held.adds, held.count) == (1, "reset", (), 0)
    a.answer(held)
    a.now += 1
    a.sync()
    assert a.store == {1}


def test_a_retraction_without_a_batch_is_nothing(a: Bench) -> None:
    """Nothing in flight, nothing taken back."""
    a.join(1)
    a.sync()
    number = a.book.sent
    a.book.retract(a.now + 1)
    assert a.book.sent == number
    assert not a.book.behind


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_draining_node_refuses_joins_and_open_rooms_finish(a: Bench) -> None:
    """JoinRefused with its state; the open room goes on to Success (CASE 25)."""
    room = a.join(1)
    a.sync(draining=True)
    with pytest.raises(JoinRefused) as caught:
        a.join(2)
    assert caught.value.state == "draining"
    assert room.update(Status.TRANSFERRING)
    assert room.update(Status.SUCCESS)
    a.sync(draining=False)
    assert a.join(2).status is Status.BOOTSTRAPPING


def test_an_unreachable_node_refuses_joins_until_a_probe_answers(a: Bench) -> None:
    """What this worker alone cannot reach fails here only, and comes back with the first answer."""
    a.join(1)
    a.sync()
    assert [room.id for room, _ in a.book.fail_unreachable("timeout")] == [1]
    with pytest.raises(JoinRefused, match=r"unreachable \(timeout\)"):
        a.join(2)
    a.sync()
    with pytest.raises(JoinRefused):
        a.join(2)
    a.book.reachable()
    assert a.join(2).status is Status.BOOTSTRAPPING
    assert a.book.state == "alive"


def test_a_new_epoch_forgets_that_the_old_one_was_unreachable(a: Bench) -> None:
    """Another instance registered: whether it can be reached is asked anew."""
    a.join(1)
    a.sync(instance="i1")
    a.book.fail_unreachable("timeout")
    a.sync(STALE, epoch=2, state="alive", failed_age_ms=0, instance="i2")
    assert a.join(2).status is Status.BOOTSTRAPPING


# -- forgetting, closing, forking --------------------------------------------------------------------------------------


def test_an_address_with_rooms_is_not_forgotten(a: Bench) -> None:
    """Final rooms count too: their owner has not collected them yet."""
    room = a.join(1)
    book = a.book
    assert not a.ledger.forget(book)
    room.update(Status.SUCCESS)
    assert not a.ledger.forget(book)
    room.leave()
    assert a.ledger.forget(book)
    assert a.ledger.books() == []


def test_a_forgotten_address_comes_back_under_another_id(a: Bench) -> None:
    """A delayed batch of the former life cannot be mistaken for one of the new (every spelling is dropped)."""
    a.ledger.join("[2001:DB8::1]:80", 1)
    a.ledger.join("[2001:db8::1]:80", 2)
    [book] = a.ledger.books()
    a.ledger.leave("[2001:DB8::1]:80", 1)
    a.ledger.leave("[2001:DB8::1]:80", 2)
    assert a.ledger.forget(book)
    again = a.ledger.join("[2001:DB8::1]:80", 1)
    (new,) = a.ledger.books()
    assert new is not book
    assert (book.worker, new.worker) == ("a#1", "a#1.1")
    assert a.ledger.find("[2001:db8::1]:80", 1) is again


class Ambush:
    """A lock that lets something happen just before it is taken for the first time."""

    def __init__(self, lock: Any, first: Any) -> None:
        self.lock, self.first = lock, first

    def __enter__(self) -> None:
        first, self.first = self.first, None
        if first:
            first()
        self.lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self.lock.release()


def test_a_join_that_meets_a_forgotten_book_opens_a_new_one(a: Bench) -> None:
    """The thread had looked the book up when it was forgotten: the room lands in the new book, none is lost."""
    old = a.book
    real = old.lock

    def forget() -> None:
        old.lock = real
        assert a.ledger.forget(old)

    old.lock = Ambush(real, forget)  # type: ignore[assignment]
    room = a.join(7)
    assert old.rooms == {}
    assert a.book is not old
    assert a.ledger.find(NODE, 7) is room
    assert a.take().adds == (7,)


def test_forgetting_races_joining(a: Bench) -> None:
    """A thread forgets the address again and again while another opens and closes rooms there: none goes astray."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def forget() -> None:
        try:
            while not stop.is_set():
                for book in a.ledger.books():
                    a.ledger.forget(book)
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=forget)
    thread.start()
    try:
        for i in range(3000):
            room = a.join(i)
            assert a.ledger.find(NODE, i) is room
            assert a.ledger.leave(NODE, i)
    finally:
        stop.set()
        thread.join()
    assert errors == []


def test_threads_that_open_an_address_get_one_book(a: Bench) -> None:
    """Eight threads, one address, no book before: every room is in the same book."""
    for n in range(50):
        address = f"10.0.1.{n}:80"
        gate = threading.Barrier(8)

        def join(i: int, address: str = address, gate: threading.Barrier = gate) -> None:
            gate.wait()
            a.ledger.join(address, i)

        threads = [threading.Thread(target=join, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        book = a.ledger.book(address)
        assert book is not None
        assert set(book.rooms) == set(range(8))


def test_a_closed_ledger_refuses_and_fails_what_is_open(a: Bench) -> None:
    """Joins raise WorkerClosed at known and new addresses; open rooms fail once as CLOSED; leave still works."""
    room, done = a.join(1), a.join(2)
    done.update(Status.SUCCESS)
    a.sync()
    a.ledger.refuse_all()
    for address in (NODE, OTHER):
        with pytest.raises(WorkerClosed, match="a#1 is closed"):
            a.ledger.join(address, 3)
    assert room.status is Status.BOOTSTRAPPING, "open rooms may still be reported to the store"
    told = a.ledger.fail_all()
    assert [(r.id, f.cause) for r, f in told] == [(1, Cause.CLOSED)]
    assert a.ledger.fail_all() == []
    assert room.leave()


def test_closing_outranks_what_the_store_says(a: Bench) -> None:
    """An answer that comes after the end does not open the address again."""
    a.join(1)
    flight = a.take()
    book = a.book
    a.ledger.refuse_all()
    book.apply(flight, SyncReply(OK, NodeView(1)), a.now)
    with pytest.raises(WorkerClosed):
        a.join(2)


def test_a_forked_child_owns_nothing_and_waits_for_nobody(a: Bench) -> None:
    """The parent held the locks when it forked: the child's ledger is empty, refuses, and does not hang (CASE 58)."""
    room = a.join(1, deadline_s=5)
    a.book.lock.acquire()
    a.ledger._deadline_lock.acquire()
    a.ledger.disown()
    assert not room.leave()
    assert not room.update(Status.TRANSFERRING)
    assert a.ledger.find(NODE, 1) is None
    with pytest.raises(WorkerClosed):
        a.join(2)


def test_a_sleeping_book_wakes_the_loop_once(a: Bench) -> None:
    """The first change after the loop went to sleep wakes it; the following ones cost nothing."""
    a.join(1)
    a.sync()
    before = a.wakes
    a.book.asleep = True
    a.join(2)
    a.join(3)
    a.ledger.leave(NODE, 1)
    assert a.wakes == before + 1
    a.book.asleep = True
    a.ledger.update(NODE, 2, Status.TRANSFERRING)
    assert a.wakes == before + 1, "a move between open statuses changes nothing in the store"
    a.ledger.update(NODE, 2, Status.SUCCESS)
    assert a.wakes == before + 2


def test_a_batch_that_is_repeated_tells_the_true_age_of_the_end(a: Bench) -> None:
    """The store was away for a minute and comes back empty: it must not date the node's failure a minute too late."""
    a.join(1)
    a.sync()
    a.sync(STALE, epoch=2, state="alive", failed_age_ms=1000)
    a.join(2)
    first = a.take()
    assert first.node.failed_age_ms == 1000
    for _ in range(3):
        a.now += 20.0005
        again = a.take()
    assert again == replace(first, node=replace(first.node, failed_age_ms=61001))
    a.sync(STALE, epoch=3, failed_age_ms=0)
    assert a.book.node.epoch == 3


def test_a_batch_in_flight_keeps_the_age_of_its_own_epochs_end(a: Bench) -> None:
    """A verdict of this worker's own came in between: the batch goes on to tell of the end before that."""
    a.join(1)
    a.sync()
    a.sync(STALE, epoch=2, state="alive", failed_age_ms=1000)
    a.take()
    a.now += 5
    a.book.learn(NodeView(3, FAILED, 0), a.now, Outcome())
    a.now += 1
    assert (a.take().node.epoch, a.take().node.failed_age_ms) == (2, 7000)
