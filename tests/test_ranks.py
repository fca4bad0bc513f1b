"""Ranks: workers of one group open the same rooms; a room that one of them fails by itself fails in all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from fleet import PATIENCE_S, Fleet, Watched, fast, hold
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from scriptlab import A, B, C, Lab, N
from servers import Server
from util import wait_until

from coordinator import Cause, ConfigError, Failure, Sight, Status, Worker
from coordinator.decide.book import Book
from coordinator.decide.detector import Evidence
from coordinator.decide.ledger import Ledger
from coordinator.decide.notes import Notes
from coordinator.errors import ScriptFault
from coordinator.protocol import NodeView, SyncReply, SyncStatus, group_of
from coordinator.runtime import ranks
from coordinator.runtime.ranks import AGAIN_S, OLD_S, PAIRS

SOME = range(10, 20)


@pytest.fixture
def fleet(redis_url: str) -> Iterator[Fleet]:
    with Fleet(redis_url) as fleet:
        yield fleet


def engine(fleet: Fleet, count: int = 3, group: str = "engine", **words: Any) -> list[Watched]:
    """The ranks of one engine."""
    return [fleet.worker(f"tp{i}", group=group, **words) for i in range(count)]


def counter(watched: Watched, name: str) -> int:
    return int(watched.worker.health()["counters"][name])


def idle(watched: Watched) -> bool:
    """Whether nothing waits to be passed on by this worker, for the first or the second time."""
    loop = watched.worker._ranks
    return loop is not None and not loop.notes._notes and not loop._errands


def settle(workers: list[Watched]) -> None:
    """Wait until everything that was passed on has been, twice, and every mark has been met."""
    for watched in workers:
        wait_until(lambda w=watched: idle(w), PATIENCE_S, f"{watched.id} has passed on")  # type: ignore[misc]
    for watched in workers:
        watched.flush()


# -- what is passed on, and to whom -----------------------------------------------------------------------------


def by_id(worker: Worker, address: str, room: int) -> None:
    assert worker.update(address, room, Status.FAILED, "KV transfer failed")


def by_handle(worker: Worker, address: str, room: int) -> None:
    found = worker.find(address, room)
    assert found is not None
    assert found.update(Status.FAILED, "KV transfer failed")


def by_abort(worker: Worker, address: str, room: int) -> None:
    assert worker.abort(address, room, "KV transfer failed")


def and_left(worker: Worker, address: str, room: int) -> None:
    by_id(worker, address, room)
    assert worker.leave(address, room)


@pytest.mark.parametrize(
    ("fail", "cause"),
    [(by_id, "local"), (by_handle, "local"), (by_abort, "aborted"), (and_left, "local")],
    ids=["by-id", "by-handle", "abort", "failed-and-left"],
)
def test_a_room_that_one_rank_fails_fails_in_all(fleet: Fleet, fail: Callable[..., None], cause: str) -> None:
    """Each sibling fails it once, as aborted, with the first cause and its worker; nobody else and no other room."""
    address = fleet.farm.node().address
    first, *siblings = engine(fleet)
    others = [*engine(fleet, 1, "engine2"), fleet.worker("engine"), fleet.worker("tp9")]
    for watched in (first, *siblings, *others):
        watched.join(address, SOME)
    fail(first.worker, address, 13)
    for watched in siblings:
        watched.await_told(1)
        assert watched.told == [
            (13, Failure(Cause.ABORTED, f"{cause} at {first.id}: KV transfer failed", address, 1)),
        ]
    settle([first, *siblings])
    assert [counter(watched, "aborts") for watched in siblings] == [1, 1]
    assert counter(first, "passed_on") == 2
    assert [counter(watched, "passed_on") for watched in siblings] == [0, 0], "a mark is not passed on"
    assert [watched.told for watched in others] == [[], [], []]
    for watched in others:
        assert watched.worker.status(address, 13) is Status.BOOTSTRAPPING
    assert [len(watched.told) for watched in siblings] == [1, 1]
    assert {kind["rooms"] for kind in fleet.events(address, "passed")} == {"1"}


def test_a_deadline_is_passed_on(fleet: Fleet) -> None:
    """The room of a sibling that set no deadline fails with it."""
    address = fleet.farm.node().address
    first, sibling = engine(fleet, 2)
    sibling.join(address, [7])
    first.worker.join(address, 7, deadline_s=0.2)
    sibling.await_told(1)
    assert sibling.told[0][1].reason == f"deadline at {first.id}: the room's deadline passed"
    assert first.told[0][1].cause is Cause.DEADLINE


class Broken:
    """A probe that cannot reach anything."""

    async def __call__(self, address: str) -> Sight:
        return Sight(Evidence.REFUSED, "no route")

    async def aclose(self) -> None:
        """Nothing to release."""


def test_a_node_that_one_rank_cannot_reach_is_passed_on(fleet: Fleet) -> None:
    """Its rooms fail in the whole group, nowhere else, and the siblings still take new ones."""
    address = fleet.farm.node().address
    blind = fleet.worker("tp0", group="engine", probe=Broken(), settings=fast(votes=3, probe_interval_s=0.1))
    seeing = [fleet.worker("tp1", group="engine"), fleet.worker("tp2", group="engine")]
    other = fleet.worker("other")
    for watched in (blind, *seeing, other):
        watched.join(address, SOME)
    for watched in seeing:
        watched.await_told(len(SOME))
        assert {failure.cause for _, failure in watched.told} == {Cause.ABORTED}
        assert all(failure.reason.startswith(f"unreachable at {blind.id}") for _, failure in watched.told)
        watched.worker.join(address, 99).leave()
    settle([blind, *seeing])
    assert max(seeing[0].told_rooms().values()) == 1
    assert other.told == []


@pytest.mark.parametrize("written", [True, False], ids=["written", "not-yet-written"])
@pytest.mark.parametrize("end", ["success", "left", "failed"])
def test_what_a_sibling_has_finished_is_not_touched(fleet: Fleet, end: str, written: bool) -> None:
    """Success, left or failed by itself at the sibling, whether the store knows of it or not: no further failure."""
    address = fleet.farm.node().address
    first, sibling = engine(fleet, 2)
    for watched in (first, sibling):
        watched.join(address, SOME)
    for room in SOME:
        if end == "left":
            assert sibling.worker.leave(address, room)
        else:
            status = Status.SUCCESS if end == "success" else Status.FAILED
            assert sibling.worker.update(address, room, status, "its own")
        if written:
            sibling.flush()
        first.worker.update(address, room, Status.FAILED, "late")
    settle([first, sibling])
    assert sibling.told == []
    if end == "failed":
        room_10 = sibling.worker.find(address, 10)
        assert room_10 is not None
        assert room_10.failure is not None
        assert room_10.failure.cause is Cause.LOCAL


def test_what_reaches_everybody_anyway_is_not_passed_on(fleet: Fleet) -> None:
    """A verdict, a mark of the node, and close: no rank passes them on."""
    node = fleet.farm.node()
    prefill = fleet.prefill(node.address)
    first, sibling = engine(fleet, 2)
    for watched in (first, sibling):
        watched.join(node.address, [*SOME, 99])
    assert prefill.abort(first.id, 99, "no memory")
    first.await_told(1)
    settle([first, sibling])
    assert sibling.told == []
    first.worker.fail_node(node.address)
    first.await_told(11)
    sibling.await_told(11)
    assert {failure.cause for _, failure in sibling.told} == {Cause.NODE_FAILED}
    other = fleet.farm.node().address
    for watched in (first, sibling):
        watched.join(other, SOME)
    first.worker.close()
    settle([sibling])
    assert sibling.worker.status(other, 10) is Status.BOOTSTRAPPING
    assert (counter(first, "passed_on"), counter(sibling, "passed_on")) == (0, 0)


def test_a_failure_just_before_close_is_passed_on(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is told on the way out, also if the loop had no time for it; what is merely open at close is not."""
    address = fleet.farm.node().address
    first = fleet.worker("tp0", group="engine", settings=fast(tick_s=10.0, lease_s=60.0, retention_s=300.0))
    sibling = fleet.worker("tp1", group="engine")
    for watched in (first, sibling):
        watched.join(address, SOME)
    assert first.worker._ranks is not None
    monkeypatch.setattr(first.worker._ranks.notes, "_wake", lambda: None)
    for room in (10, 11):
        first.worker.update(address, room, Status.FAILED, "last word")
    first.worker.close()
    sibling.await_told(2)
    hold(lambda: len(sibling.told) == 2, 0.2, "only what failed")


def test_a_sibling_in_another_life_is_found(fleet: Fleet) -> None:
    """A sibling that was reaped comes back as <id>.1: rooms that it opens then are reached, too."""
    address = fleet.farm.node().address
    first, sibling = engine(fleet, 2)
    for watched in (first, sibling):
        watched.join(address, [1])
    fleet.store.run(fleet.ops.reap_worker(address, sibling.id, "tester", "test", leaving=True))
    sibling.await_told(1)
    assert sibling.told[0][1].cause is Cause.LEASE_LOST
    settle([first, sibling])
    assert first.told == [], "a lost lease is not passed on"
    for watched in (first, sibling):
        watched.join(address, SOME)
    assert f"{sibling.id}.1" in fleet.listed(address)
    sibling.worker.update(address, 10, Status.FAILED, "x")
    first.await_told(1)
    assert first.told[0][1].reason == f"local at {sibling.id}.1: x"
    first.worker.update(address, 11, Status.FAILED, "y")
    sibling.await_told(2)
    settle([first, sibling])
    assert (counter(first, "passed_on"), counter(sibling, "passed_on")) == (1, 1)


# -- ranks do not do things in the same moment ------------------------------------------------------------------


def test_a_sibling_that_opens_a_moment_later_is_told(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call reaches what was not open at the first, at a sibling that was not even listed there."""
    monkeypatch.setattr(ranks, "AGAIN_S", 1.0)
    address = fleet.farm.node().address
    first, sibling = engine(fleet, 2)
    first.join(address, [5])
    first.worker.update(address, 5, Status.FAILED, "early")
    wait_until(lambda: first.worker._ranks and any(e.second for e in first.worker._ranks._errands), what="first call")
    sibling.join(address, [5])
    sibling.await_told(1)
    settle([first, sibling])
    assert len(sibling.told) == 1


def test_a_sibling_that_opens_much_later_is_not_told(fleet: Fleet) -> None:
    """After the second call the number is free for another request."""
    address = fleet.farm.node().address
    first, sibling = engine(fleet, 2)
    for watched in (first, sibling):
        watched.join(address, [1])
    first.join(address, [5])
    first.worker.update(address, 5, Status.FAILED, "early")
    settle([first, sibling])
    assert counter(first, "passed_on") == 0
    sibling.join(address, [5])
    hold(lambda: sibling.told == [], 4 * AGAIN_S, "the new room stays open")


def test_a_number_that_is_used_again_is_not_talked_about(fleet: Fleet, redis_server: Server) -> None:
    """Failed while the store is away, left, and opened anew by the same rank: the siblings' new rooms stay open."""
    address = fleet.farm.node().address
    first, sibling = engine(fleet, 2, settings=fast(call_timeout_s=0.2))
    for watched in (first, sibling):
        watched.join(address, SOME)
    redis_server.pause()
    try:
        for room in (10, 11):
            first.worker.update(address, room, Status.FAILED, "old request")
            first.worker.leave(address, room)
            sibling.worker.leave(address, room)
            first.worker.join(address, room)
            sibling.worker.join(address, room)
    finally:
        redis_server.resume()
    settle([first, sibling])
    assert sibling.told == []
    assert sibling.worker.status(address, 10) is Status.BOOTSTRAPPING


def test_a_mark_meets_an_opening_that_is_in_flight() -> None:
    """The store has taken the batch that opened the room; its mark comes with the late answer, and counts."""
    ledger = Ledger("a@g#1", lambda: 100.0)
    ledger.join(N, 7)
    book = ledger.open_book(N)
    batch = book.batch(100.0, 500)
    outcome = book.apply(batch, SyncReply(SyncStatus.OK, NodeView(1), aborted=((7, "local at b@g#2: x"),)), 100.0)
    assert [(room.id, failure.cause) for room, failure in outcome.failed] == [(7, Cause.ABORTED)]


# -- the store is in trouble ------------------------------------------------------------------------------------


def test_a_failure_waits_for_the_store(fleet: Fleet, redis_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed while the store is stopped for a moment: passed on when it is back."""
    monkeypatch.setattr(ranks, "OLD_S", PATIENCE_S)
    address = fleet.farm.node().address
    first, *siblings = engine(fleet, 3, settings=fast(call_timeout_s=0.2))
    for watched in (first, *siblings):
        watched.join(address, SOME)
    redis_server.pause()
    try:
        for room in SOME:
            first.worker.update(address, room, Status.FAILED, "x")
        wait_until(lambda: first.worker._core.store_away, PATIENCE_S, "the store is missed")
    finally:
        redis_server.resume()
    for watched in siblings:
        watched.await_told(len(SOME))
    settle([first, *siblings])
    assert all(max(watched.told_rooms().values()) == 1 for watched in siblings)
    assert counter(first, "not_passed_on") == 0


def test_what_is_too_old_is_dropped_and_counted(
    fleet: Fleet, redis_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """The store is away for longer than a failure is kept: nothing is passed on, the counter and one line say so."""
    address = fleet.farm.node().address
    first, sibling = engine(fleet, 2, settings=fast(call_timeout_s=0.2, lease_s=5.0))
    for watched in (first, sibling):
        watched.join(address, SOME)
    redis_server.pause()
    try:
        for room in SOME:
            first.worker.update(address, room, Status.FAILED, "x")
        wait_until(lambda: counter(first, "not_passed_on") == len(SOME), PATIENCE_S + OLD_S, "dropped")
    finally:
        redis_server.resume()
    settle([first, sibling])
    assert sibling.told == []
    assert counter(first, "passed_on") == 0
    assert sum(record.message.startswith("not_passed_on") for record in caplog.records) == 1


def test_a_full_store_takes_marks(redis_server: Server) -> None:
    """Marks go through where a join would be refused: what they fail will leave the store."""
    with redis_server.sync_client() as client:
        lab = Lab(client)
        lab.open(A, (1, 2))
        lab.open(B, (1,))
        client.config_set("maxmemory", "1mb")
        try:
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                lab.run(lab.batch(A, 2, (3,), count=3))
            assert lab.run(lab.ops.pass_on(N, C, [A, B], [(1, "x"), (2, "y")])) == ((1, 2),)
            assert client.hgetall(lab.keys.aborts(N, A)) == {"1": "x", "2": "y"}
        finally:
            client.config_set("maxmemory", "0")


def test_nothing_ends_the_loop(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that raises, and an answer that nobody understands: tried again, and told in the end."""
    address = fleet.farm.node().address
    first, sibling = engine(fleet, 2)
    for watched in (first, sibling):
        watched.join(address, SOME)
    core = first.worker._core
    real, faults = core.store.many, [ScriptFault("garbage"), RuntimeError("a defect"), ScriptFault("garbage")]

    async def many(ops: list[Any], **words: Any) -> list[Any]:
        if ops and ops[0].script == "pass_on" and faults:
            fault = faults.pop()
            if isinstance(fault, RuntimeError):
                raise fault
            return [fault] * len(ops)
        return list(await real(ops, **words))

    monkeypatch.setattr(core.store, "many", many)
    first.worker.update(address, 10, Status.FAILED, "x")
    sibling.await_told(1)
    assert faults == []
    assert first.worker.health()["restarts"]["ranks"] == 1


# -- many -------------------------------------------------------------------------------------------------------


def test_eight_processes(fleet: Fleet) -> None:
    """Eight real ranks: 50 rooms that one fails fail in the seven others, each once, and in no other engine."""
    node = fleet.node_process()
    ranks8 = [fleet.process(f"tp{i}", "--group", "engine") for i in range(8)]
    other = fleet.process("tp0", "--group", "other")
    for process in (*ranks8, other):
        process.join(node.address, range(200))
    assert ranks8[3].do("fail", address=node.address, rooms=list(range(50))) == 50
    for process in (*ranks8[:3], *ranks8[4:]):
        process.await_told(50)
    for process in (*ranks8[:3], *ranks8[4:]):
        told = process.told()
        assert sorted(room for room, *_ in told) == list(range(50))
        assert {(cause, reason) for _, _, cause, reason, _ in told} == {
            ("aborted", f"local at {ranks8[3].id}: told to"),
        }
    assert other.told() == []
    assert ranks8[3].told() == [], "the process that said so itself is not told"


def test_a_mass_failure_in_all_ranks_does_not_flood(fleet: Fleet) -> None:
    """1,000 rooms fail in eight processes at once: nobody is told one twice, and the store sees few, short calls."""
    node = fleet.node_process()
    ranks8 = [fleet.process(f"tp{i}", "--group", "engine") for i in range(8)]
    for process in ranks8:
        process.join(node.address, range(1000))
    fleet.redis.config_resetstat()
    started = time.monotonic()
    for process in ranks8:
        process.order("fail", address=node.address, rooms=list(range(1000)))
    own = [process.answer() for process in ranks8]
    for process in ranks8:
        wait_until(
            lambda p=process: p.do("health")["addresses"][node.address]["waiting"] == 0,  # type: ignore[misc]
            PATIENCE_S, "all is written",
        )  # fmt: skip
    for process, failed in zip(ranks8, own, strict=True):
        process.await_told(1000 - failed)
    time.sleep(max(0.0, 2 * AGAIN_S - (time.monotonic() - started)))
    for process, failed in zip(ranks8, own, strict=True):
        told = [room for room, *_ in process.told()]
        assert len(told) == len(set(told)) == 1000 - failed
        assert process.do("health")["counters"]["not_passed_on"] == 0
    messages = fleet.redis.info("commandstats")["cmdstat_publish"]["calls"]
    calls = 8 * 2 * (7 * 1000 // PAIRS)
    assert messages <= 2 * calls, "one message a call, however many rooms it marked"


def test_marks_come_in_bounded_calls(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call holds more than PAIRS rooms times siblings, no round trip more than CALLS of them."""
    address = fleet.farm.node().address
    first, *siblings = engine(fleet, 4)
    for watched in (first, *siblings):
        watched.join(address, range(2000))
    core, sizes = first.worker._core, []
    real = core.store.many

    async def many(ops: list[Any], **words: Any) -> list[Any]:
        if ops and ops[0].script == "pass_on":
            sizes.append([len(op.keys) // 2 * (len(op.args) - 5) // 2 for op in ops])
        return list(await real(ops, **words))

    monkeypatch.setattr(core.store, "many", many)
    for room in range(2000):
        first.worker.update(address, room, Status.FAILED, "x")
    for watched in siblings:
        watched.await_told(2000)
    settle([first, *siblings])
    assert max(map(len, sizes)) <= ranks.CALLS
    assert max(map(max, sizes)) <= PAIRS
    assert counter(first, "passed_on") == 6000


# -- small things -----------------------------------------------------------------------------------------------


def test_notes_are_bounded_and_wake_once() -> None:
    """The oldest make room and are counted; only the first note since the last look wakes anybody."""
    wakes: list[int] = []
    notes = Notes(lambda: 5.0, lambda: wakes.append(1), limit=3)
    ledger = Ledger("a@g#1", lambda: 5.0, notes=notes)
    for number in range(5):
        ledger.join(N, number)
        ledger.update(N, number, Status.FAILED, "x")
    taken, dropped = notes.take()
    assert ([note.room.id for note in taken], dropped, len(wakes)) == ([2, 3, 4], 2, 1)
    assert notes.take() == ([], 0)
    ledger.join(N, 9)
    ledger.update(N, 9, Status.SUCCESS)
    assert (notes.take(), len(wakes)) == (([], 0), 1), "success is no failure"


def test_a_note_knows_that_its_number_is_used_again() -> None:
    """Still failed or left: no. Opened anew: yes."""
    notes = Notes(lambda: 5.0, lambda: None)
    ledger = Ledger("a@g#1", lambda: 5.0, notes=notes)
    ledger.join(N, 1).update(Status.FAILED)
    [note], _ = notes.take()
    assert not note.reused
    ledger.leave(N, 1)
    assert not note.reused
    ledger.join(N, 1)
    assert note.reused


def test_a_worker_without_a_group_notes_nothing(fleet: Fleet) -> None:
    """No notes, no loop, the id as ever."""
    alone = fleet.worker("alone")
    address = fleet.farm.node().address
    alone.join(address, [1])
    alone.worker.update(address, 1, Status.FAILED)
    book = alone.worker._ledger.book(address)
    assert isinstance(book, Book)
    assert book.notes is None
    assert "ranks" not in alone.worker.health()["beats_s_ago"]
    assert alone.id.startswith("alone#")


@pytest.mark.parametrize("group", ["a b", "a@b", "a#b", "-a", "x" * 65, 7])
def test_a_bad_group_is_refused(group: Any, redis_url: str) -> None:
    """By name and value, before anything is started."""
    with pytest.raises(ConfigError, match="group"):
        Worker(redis_url, group=group)


def test_the_group_is_in_the_id(fleet: Fleet) -> None:
    """Name, group and start can be told apart, in every life."""
    watched = fleet.worker("tp.0-a", group="engine.7_b")
    name, _, rest = watched.id.partition("@")
    assert (name, rest.partition("#")[0], len(rest.partition("#")[2])) == ("tp.0-a", "engine.7_b", 8)
    assert group_of(watched.id) == group_of(f"{watched.id}.3") == "engine.7_b"
    assert group_of("decode-0#aaaaaaaa.1") == ""


# -- marks in bulk ----------------------------------------------------------------------------------------------


def test_thousands_of_marks_all_reach_their_owner(real_server: Server) -> None:
    """4,500 marks are read in pieces until none is left, however the server lays out the hash that empties."""
    with real_server.sync_client() as client:
        lab, rooms = Lab(client), list(range(4500))
        for start in range(0, len(rooms), 500):
            mode = "delta" if start else "reset"
            adds = rooms[start : start + 500]
            lab.run(lab.batch(A, start // 500 + 1, adds, mode=mode, count=start + 500))
        for room in rooms:
            lab.run(lab.ops.abort_room(N, A, room, "no memory", "node"))
        left, number = set(rooms), 10
        gone: list[int] = []
        while left:
            left.difference_update(gone)
            reply = lab.run(lab.batch(A, number, (), gone, count=len(left)))
            gone, number = [room for room, _ in reply.aborted], number + 1
            assert len(gone) <= 600, "one answer stays small"
            assert gone or not left, f"{len(left)} marks were never told"


# -- the model --------------------------------------------------------------------------------------------------

GROUPS = ("g", "g", "g", "h", "h", "")


class Engines(RuleBasedStateMachine):
    """Two engines and a worker alone at one address. After each step everything settles, and each room of each
    worker stands where the model says, with each failure told once."""

    fleet: Fleet

    def __init__(self) -> None:
        super().__init__()
        self.address = self.fleet.farm.node().address
        self.workers = [self.fleet.worker(f"w{i}", group=group) for i, group in enumerate(GROUPS)]
        self.model: dict[tuple[int, int], Status] = {}  # (worker, room)
        self.told: dict[tuple[int, int], int] = {}
        self.next_room = 0

    def teardown(self) -> None:
        for watched in self.workers:
            watched.worker.close()

    @rule(who=st.sets(st.integers(0, 5), min_size=1))
    def open(self, who: set[int]) -> None:
        """Some workers open a room."""
        for index in who:
            self.workers[index].join(self.address, [self.next_room])
            self.model[index, self.next_room] = Status.BOOTSTRAPPING
        self.next_room += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data(), how=st.sampled_from(["fail", "abort", "success", "leave", "fail and leave"]))
    def end(self, data: st.DataObject, how: str) -> None:
        """One worker ends one of its rooms."""
        index, room = data.draw(st.sampled_from(sorted(self.model)))
        worker, key = self.workers[index].worker, (index, room)
        was_open = self.model[key] is Status.BOOTSTRAPPING
        if how == "success":
            assert worker.update(self.address, room, Status.SUCCESS) is was_open
            self.model[key] = Status.SUCCESS if was_open else self.model[key]
        elif how == "leave":
            assert worker.leave(self.address, room)
            del self.model[key]
        else:
            call = worker.abort if how == "abort" else lambda a, r, why: worker.update(a, r, Status.FAILED, why)
            assert call(self.address, room, "x") is was_open
            if was_open:
                self._failed(key, told=how == "abort")
            if how == "fail and leave":
                assert worker.leave(self.address, room)
                del self.model[key]
        settle([watched for watched in self.workers if watched.worker.group])
        self._compare()

    def _failed(self, key: tuple[int, int], told: bool) -> None:
        index, room = key
        self.model[key] = Status.FAILED
        self.told[key] = int(told)
        for other, group in enumerate(GROUPS):
            same = group and group == GROUPS[index] and other != index
            if same and self.model.get((other, room)) is Status.BOOTSTRAPPING:
                self.model[other, room] = Status.FAILED
                self.told[other, room] = 1

    def _compare(self) -> None:
        for index, watched in enumerate(self.workers):
            rooms = {room.id: room.status for room in watched.worker.rooms(self.address)}
            assert rooms == {room: status for (who, room), status in self.model.items() if who == index}
            expected = {room: times for (who, room), times in self.told.items() if who == index and times}
            wait_until(lambda w=watched, e=expected: w.told_rooms() == e, 2, "told")  # type: ignore[misc]


def test_engines_do_as_the_model_says(fleet: Fleet) -> None:
    """Any order of openings and endings: a room fails at the siblings that have it open, once, and nowhere else."""
    Engines.fleet = fleet
    run_state_machine_as_test(
        Engines,
        settings=settings(
            max_examples=8, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
