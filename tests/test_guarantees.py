"""One test (or a few) named after each guarantee, at the level of real workers, real processes and real servers.
What the scripts alone promise (G1, G2, G4, G10, G12) is proved in test_scripts.py; here G1 and G4 go end to end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from chaos import Chaos
from faulty import Faulty, Plan
from fleet import PATIENCE_S, Fleet, Watched, fast, hold
from servers import Server, free_port, keys_without_ttl
from util import wait_until

from coordinator import (
    Cause,
    CoordinatorError,
    Failure,
    InvalidAddress,
    InvalidRoom,
    InvalidStatus,
    JoinRefused,
    Room,
    RoomExists,
    Sight,
    Status,
)
from coordinator.decide.detector import Evidence
from coordinator.store.connect import async_client


@pytest.fixture
def fleet(redis_url: str) -> Iterator[Fleet]:
    with Fleet(redis_url) as fleet:
        yield fleet


@pytest.fixture
def net(redis_server: Server) -> Iterator[Chaos]:
    with Chaos(redis_server.port) as net:
        yield net


def fresh_beats(watched: Watched) -> None:
    """Every loop of the worker comes around again from now on."""
    since = time.monotonic()
    wait_until(
        lambda: max(watched.worker.health()["beats_s_ago"].values()) < time.monotonic() - since,
        PATIENCE_S, f"every loop of {watched.id} beats: {watched.worker.health()['beats_s_ago']}",
    )  # fmt: skip


# -- G1 -----------------------------------------------------------------------------------------------------------


def test_g1_a_join_that_races_a_failure_is_in_the_snapshot_or_refused(fleet: Fleet) -> None:
    """Four threads join without pause while the address fails: each room fails once, is refused, or lives on in the
    next epoch; the snapshot holds only rooms that failed, and none is left in the store under the old epoch."""
    node = fleet.farm.node("life-1")
    a = fleet.worker("a")
    a.join(node.address, [0])
    stop, refused = threading.Event(), threading.Event()
    opened: list[list[Room]] = [[] for _ in range(4)]

    def joiner(lane: int) -> None:
        number = 1_000_000 * (lane + 1)
        while not stop.is_set():
            number += 1
            try:
                opened[lane].append(a.worker.join(node.address, number))
            except JoinRefused:
                refused.set()
            if number % 50 == 0:
                time.sleep(0.001)

    threads = [threading.Thread(target=joiner, args=(lane,)) for lane in range(4)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: sum(map(len, opened)) > 2000, PATIENCE_S, "rooms")
        failure = fleet.worker("b").worker.fail_node(node.address)
        assert refused.wait(PATIENCE_S), "joins are refused while the node has failed"
        wait_until(lambda: a.state(node.address) == "alive", PATIENCE_S, "it answers, so it is revived")
        time.sleep(0.05)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    a.flush()
    rooms = [room for lane in opened for room in lane]
    failed = {room.id for room in rooms if room.failure is not None}
    alive = {room.id for room in rooms if room.failure is None}
    assert fleet.rooms(node.address, a.id) == alive
    snapshot = {room for worker, room in failure.rooms() if worker == a.id}
    assert snapshot <= failed | {0}
    a.await_told(len(failed) + 1)
    assert a.told_rooms() == Counter([0, *failed])


# -- G3 -----------------------------------------------------------------------------------------------------------


def test_g3_every_owner_fails_each_of_its_rooms_once(fleet: Fleet) -> None:
    """Four worker processes, overlapping room numbers, a node process killed by SIGKILL: every open room failed once in
    its owner, rooms at Success and rooms at the other node did not, and all owners read one reason."""
    node, other = fleet.node_process("life-1"), fleet.farm.node("life-1")
    owners = [fleet.process(f"p{n}") for n in range(4)]
    for n, owner in enumerate(owners):
        owner.join(node.address, range(n, n + 200))
        owner.join(other.address, range(50))
        assert owner.do("success", address=node.address, rooms=list(range(n, n + 20))) == 20
    wait_until(lambda: fleet.node(node.address).get("instance") == "life-1", PATIENCE_S, "the node was seen")
    node.kill()
    for owner in owners:
        owner.await_told(180)
    told = [owner.told() for owner in owners]
    for n, failures in enumerate(told):
        assert Counter(room for room, *_ in failures) == Counter(range(n + 20, n + 200))
        statuses = owners[n].do("statuses", address=node.address, rooms=list(range(n, n + 20)))
        assert statuses == [int(Status.SUCCESS)] * 20
    assert {address for failures in told for _, address, *_ in failures} == {node.address}
    assert {cause for failures in told for _, _, cause, *_ in failures} == {"node_failed"}
    assert len({reason for failures in told for *_, reason, _ in failures}) == 1
    assert len(fleet.events(node.address, "failed")) == 1
    for owner in owners:
        assert fleet.rooms(other.address, owner.id) == set(range(50))


def test_g3_whoever_notices_first(fleet: Fleet) -> None:
    """Six workers call fail_node for one epoch at once, while probes see it too: one verdict, each room once."""
    node = fleet.farm.node("life-1")
    workers = [fleet.worker(f"w{n}") for n in range(6)]
    for watched in workers:
        watched.join(node.address, range(50))
    node.stop()
    start = threading.Barrier(len(workers))
    answers: list[Any] = []

    def fail(watched: Watched) -> None:
        start.wait()
        answers.append(watched.worker.fail_node(node.address, watched.id))

    threads = [threading.Thread(target=fail, args=(watched,)) for watched in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(answers) == 6
    assert len({(answer.epoch, answer.reason) for answer in answers}) == 1
    assert {frozenset(answer.counts.items()) for answer in answers} == {frozenset((w.id, 50) for w in workers)}
    for watched in workers:
        watched.await_told(50)
        assert watched.told_rooms() == Counter(range(50))
    assert len({failure.reason for watched in workers for _, failure in watched.told}) == 1
    assert fleet.epoch(node.address) == 2


# -- G4 -----------------------------------------------------------------------------------------------------------


def test_g4_nothing_late_brings_a_room_back(fleet: Fleet) -> None:
    """After the failure, late leaves, updates and failures through old Room objects change neither the new opening of
    the same number nor the store; a worker that closed leaves no key that a late call could fill."""
    node, a = fleet.farm.node("life-1"), fleet.worker("a")
    (old,) = a.join(node.address, [7])
    fleet.fail(node.address)
    a.await_told(1)
    wait_until(lambda: a.state(node.address) == "alive", PATIENCE_S, "it answers, so it is revived")
    (new,) = a.join(node.address, [7])
    for late in (Status.SUCCESS, Status.FAILED, Status.TRANSFERRING):
        assert old.update(late) is False
    assert old.leave() is False
    a.flush()
    assert (new.status, new.failure) == (Status.BOOTSTRAPPING, None)
    assert fleet.rooms(node.address, a.id) == {7}
    assert old.failure is not None
    a.worker.close()
    assert new.update(Status.SUCCESS) is False
    assert a.worker.leave(node.address, 7) in (True, False)
    assert not fleet.redis.exists(fleet.keys.rooms(node.address, a.id))
    assert fleet.listed(node.address) == set()


# -- G5 -----------------------------------------------------------------------------------------------------------


class WildProbe:
    """Raises whatever is next on its list; when that is used up it sees a healthy node."""

    def __init__(self, *errors: BaseException | Sight | object) -> None:
        self.errors, self.calls = list(errors), 0

    async def __call__(self, address: str) -> Sight:
        self.calls += 1
        if not self.errors:
            return Sight(Evidence.OK)
        found = self.errors.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found  # type: ignore[return-value]

    async def aclose(self) -> None:
        raise RuntimeError("even this")


def test_g5_callbacks_that_raise(fleet: Fleet) -> None:
    """on_failure, on_node_ended, on_node_answered and deferred work raise: counted, and every room is still told."""
    node, a = fleet.farm.node("life-1"), fleet.worker("a")
    raised: Counter[str] = Counter()

    def raiser(name: str) -> Callable[..., None]:
        def call(*_: object) -> None:
            raised[name] += 1
            raise ValueError(name)

        return call

    a.worker.on_failure(raiser("failure"))
    a.worker.on_node_ended(raiser("ended"))
    a.worker.on_node_answered(raiser("answered"))
    a.worker.defer(raiser("deferred"))
    a.join(node.address, range(20))
    wait_until(lambda: raised["answered"], PATIENCE_S, "a good probe")
    node.stop()
    a.await_told(20)
    wait_until(lambda: raised["failure"] == 20, PATIENCE_S, "the raising callback was called for each room too")
    assert raised["ended"] >= 1
    assert a.worker.health()["counters"]["callback_errors"] >= 20 + 1 + 1 + 1
    node.start()
    wait_until(lambda: a.state(node.address) == "alive", PATIENCE_S, "detection goes on")
    a.join(node.address, [100])
    node.stop()
    a.await_told(21)
    assert set(a.worker.health()["restarts"].values()) == {0}
    fresh_beats(a)


def test_g5_probes_that_raise(fleet: Fleet) -> None:
    """A probe that raises anything, or answers what is no sight, says nothing about the node and ends nothing."""
    wild = WildProbe(
        ValueError("x"), KeyError("y"), None, 7, RuntimeError("z"), UnicodeDecodeError("utf-8", b"", 0, 1, "w")
    )
    a = fleet.worker("a", probe=wild)
    a.join("10.0.0.1:1", [1])
    wait_until(lambda: wild.calls >= 12, PATIENCE_S, "it is asked again and again")
    health = a.worker.health()
    assert health["counters"]["probe_errors"] == 6
    assert health["restarts"]["heartbeat"] == 0
    assert a.told == []
    fresh_beats(a)


GARBAGE: list[Any] = [
    None, [], ["OK"], "QUEUED", 7, ["OK", "x"], [["OK"]], ["WHAT", "1", "alive"], [None] * 13, ["OK"] * 13, {},
    ["OK", "1", "alive", "-1", "", "", "", "", "0", "0", "1", [], ["seven", "reason"]],
]  # fmt: skip


def test_g5_replies_that_are_garbage(fleet: Fleet) -> None:
    """For a while every reply of the store is nonsense: nothing fails, no loop dies, and afterwards all is right."""
    plan, turn = Plan(), iter(range(10**9))

    def garble(reply: Any) -> Any:
        garbage = GARBAGE[next(turn) % len(GARBAGE)]
        return [garbage] * len(reply) if isinstance(reply, list) else garbage

    node = fleet.farm.node("life-1")
    a = fleet.worker("a", client=lambda: Faulty(async_client(fleet.url, fleet.settings), plan))
    fleet.worker("b").join(node.address, [1])
    a.join(node.address, range(10))
    plan.garble = garble
    before = plan.calls
    a.worker.join(node.address, 10)
    wait_until(lambda: plan.calls >= before + 3 * len(GARBAGE), 40, "each kind of garbage was met")
    assert a.told == []
    plan.garble = None
    wait_until(lambda: fleet.rooms(node.address, a.id) == set(range(11)), PATIENCE_S, "the rooms are in the store")
    fresh_beats(a)
    fleet.fail(node.address)
    a.await_told(11)
    assert a.told_rooms() == Counter(range(11))


def test_g5_a_loop_that_ends_is_started_again(fleet: Fleet) -> None:
    """An exception nobody foresaw ends each loop in turn: counted, it runs again, failures are still told."""
    node, a = fleet.farm.node("life-1"), fleet.worker("a")
    a.join(node.address, [1])
    core = a.worker._core
    for part, name, loop in (
        (core.detector, "due", "heartbeat"), (core.ledger, "due_deadlines", "sync"), (core.ops, "discover", "janitor")
    ):  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(part), name, _broken)
            wait_until(lambda loop=loop: a.worker.health()["restarts"][loop], PATIENCE_S, f"{loop} ended")  # type: ignore[misc]
    fresh_beats(a)
    node.stop()
    a.await_told(1)


def _broken(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("nobody foresaw this")


# -- G6 -----------------------------------------------------------------------------------------------------------


def script_flush(server: Server, settings_lease_s: float) -> None:
    with server.client() as client:
        for _ in range(20):
            client.script_flush()
            time.sleep(0.05)


def flush_all(server: Server, settings_lease_s: float) -> None:
    with server.client() as client:
        client.flushall()


def client_pause(server: Server, lease_s: float) -> None:
    with server.client() as client:
        client.execute_command("CLIENT", "PAUSE", int(2000 * lease_s), "ALL")
    time.sleep(2.0 * lease_s)


def frozen(server: Server, lease_s: float) -> None:
    server.pause()
    time.sleep(2.0 * lease_s)
    server.resume()


def read_only(server: Server, lease_s: float) -> None:
    with server.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
        time.sleep(2.0 * lease_s)
        client.execute_command("REPLICAOF", "NO", "ONE")


def out_of_memory(server: Server, lease_s: float) -> None:
    with server.client() as client:
        client.config_set("maxmemory", "1mb")
        time.sleep(2.0 * lease_s)
        client.config_set("maxmemory", "0")


def killed(server: Server, lease_s: float) -> None:
    server.kill()
    time.sleep(2.0 * lease_s)
    server.start()


def restarted(server: Server, lease_s: float) -> None:
    server.restart()


TROUBLES = [script_flush, flush_all, client_pause, frozen, read_only, out_of_memory, killed, restarted]


@pytest.mark.parametrize("kind", ["valkey", "redis"])
@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda f: f.__name__)
def test_g6_store_trouble_is_not_node_trouble(
    make_server: Callable[..., Server], trouble: Callable[[Server, float], None], kind: str
) -> None:
    """Whatever happens to the store: no node fails, no worker is reaped, no room is told, and the store holds exactly
    the workers' rooms again within two ticks (and slack) after it is back."""
    server = make_server(kind)
    settings = fast(tick_s=0.2, lease_s=1.0)
    with Fleet(server.url, settings=settings) as fleet:
        nodes = [fleet.farm.node("life-1").address for _ in range(2)]
        prefill = fleet.prefill(nodes[0], instance="life-1")
        workers = [fleet.worker(name) for name in "abc"]
        for node in nodes:
            for watched in workers:
                watched.join(node, range(100))
        trouble(server, settings.lease_s)
        back = time.monotonic()
        for watched in workers:
            watched.worker.leave(nodes[0], 0)
            watched.worker.join(nodes[0], 1000)

        def rebuilt() -> bool:
            return all(
                fleet.rooms(nodes[0], w.id) == {*range(1, 100), 1000} and fleet.rooms(nodes[1], w.id) == set(range(100))
                for w in workers
            )

        wait_until(rebuilt, PATIENCE_S, "the state is rebuilt")
        took = time.monotonic() - back
        assert took < 2 * settings.tick_s + 3.0, f"two ticks, one call time-out and slack, not {took:.1f} s"
        ids = {watched.id for watched in workers}
        hold(lambda: all(fleet.listed(n) == ids for n in nodes), 1.5 * settings.lease_s, "every worker is listed")
        for node in nodes:
            assert (fleet.epoch(node), fleet.node(node)["state"]) == (1, "alive")
            for kind_of_event in ("reaped", "failed", "replaced"):
                assert fleet.events(node, kind_of_event) == []
        assert [watched.told for watched in workers] == [[], [], []]
        assert all(watched.worker.health()["status"] == "ok" for watched in workers)
        wait_until(lambda: prefill.health()["status"] == "ok", PATIENCE_S, "the node is announced")


def test_g6_a_full_store(make_server: Callable[..., Server], caplog: pytest.LogCaptureFixture) -> None:
    """maxmemory reached with noeviction: joins wait in the ledger while leaves, leases, verdicts and reaping go on;
    with memory again the joins arrive, and nobody was reaped who was alive (42)."""
    server = make_server("valkey")
    with Fleet(server.url) as fleet:
        node, other = fleet.farm.node("life-1"), fleet.farm.node("life-1")
        a, b, p = fleet.worker("a"), fleet.worker("b"), fleet.process("p")
        for watched in (a, b, p):
            watched.join(node.address, range(100))
        for pair in (a, b):
            pair.join(other.address, range(10))
        prefill = fleet.prefill(node.address, instance="life-1")
        assert prefill.wait_announced(PATIENCE_S)
        wait_until(lambda: a.knows(node.address) or b.knows(node.address), PATIENCE_S, "the node was seen")
        caplog.set_level(logging.INFO, "coordinator")
        fleet.redis.config_set("maxmemory", "1mb")
        for room in range(50):
            a.worker.leave(node.address, room)
        wait_until(lambda: fleet.rooms(node.address, a.id) == set(range(50, 100)), PATIENCE_S, "leaves go on")
        a.worker.join(node.address, 1000)
        assert a.worker.flush(0.1) is False
        wait_until(lambda: a.worker.health()["problems"], PATIENCE_S, "it says why")
        assert a.worker.health()["problems"] == ["store: full, joins wait in this process"]
        assert 1000 not in fleet.rooms(node.address, a.id)
        syncs = a.worker.health()["counters"]["syncs"]
        time.sleep(1.0)
        assert a.worker.health()["counters"]["syncs"] - syncs < 100, (
            "it ticks (20 a second and address), it does not spin"
        )
        a.worker.leave(node.address, 50)  # alone, or with the join, which it then carries along
        wait_until(lambda: 50 not in fleet.rooms(node.address, a.id), PATIENCE_S, "leaves go on")
        p.kill()
        wait_until(lambda: p.id not in fleet.listed(node.address), PATIENCE_S, "reaping goes on")
        assert a.worker.fail_node(other.address).counts == {a.id: 10, b.id: 10}
        b.await_told(10)
        wait_until(lambda: a.state(other.address) == "alive", PATIENCE_S, "a failed node that answers is revived")
        renewals = prefill.counters["renewals"]
        wait_until(lambda: prefill.counters["renewals"] >= renewals + 3, PATIENCE_S, "the node's renewals go on")
        hold(lambda: fleet.listed(node.address) == {a.id, b.id}, 1.5 * fleet.settings.lease_s, "leases are renewed")
        lines = [record.getMessage().split()[0] for record in caplog.records]
        assert (lines.count("store_full"), lines.count("store_away")) == (1, 0), lines
        fleet.redis.config_set("maxmemory", "0")
        a.flush()
        assert fleet.rooms(node.address, a.id) == {*range(51, 100), 1000}
        assert "store" not in str(a.worker.health()["problems"])
        hold(lambda: fleet.listed(node.address) == {a.id, b.id}, 0.5, "no mass reaping afterwards")
        assert [event["worker"] for event in fleet.events(node.address, "reaped")] == [p.id]
        assert {f.address for w in (a, b) for _, f in w.told} == {other.address}
        assert fleet.epoch(node.address) == 1


def test_g6_detection_without_the_store(fleet: Fleet, redis_server: Server) -> None:
    """With the store away a dead node's rooms fail in each worker by itself; the living node's rooms do not."""
    dead, alive = fleet.node_process("life-1"), fleet.node_process("life-1")
    workers = [fleet.worker(name) for name in "ab"]
    for watched in workers:
        watched.join(dead.address, range(30))
        watched.join(alive.address, range(30))
    wait_until(lambda: all(w.knows(n.address) for w in workers for n in (dead, alive)), PATIENCE_S, "nodes were seen")
    redis_server.kill()
    wait_until(lambda: not any(w.worker.health()["store"]["reachable"] for w in workers), PATIENCE_S, "it is away")
    dead.kill()
    for watched in workers:
        watched.await_told(30)
    hold(lambda: all(len(w.told) == 30 for w in workers), 1.0, "the other node's rooms live")
    for watched in workers:
        assert watched.told_rooms() == Counter(range(30))
        assert {(f.address, f.cause) for _, f in watched.told} == {(dead.address, Cause.UNREACHABLE)}
        with pytest.raises(JoinRefused):
            watched.worker.join(dead.address, 99)
        watched.worker.join(alive.address, 99)


def test_g6_closing_while_the_store_is_full(make_server: Callable[..., Server]) -> None:
    """A worker with a join that the store did not take still leaves its address, and its other rooms are orphans."""
    server = make_server("valkey")
    with Fleet(server.url) as fleet:
        node = fleet.farm.node("life-1").address
        a = fleet.worker("a")
        a.join(node, range(10))
        fleet.redis.config_set("maxmemory", "1mb")
        a.worker.join(node, 1000)
        wait_until(lambda: a.worker.health()["problems"], PATIENCE_S, "the store is full")
        a.worker.close()
        assert fleet.listed(node) == set()
        assert {int(room) for room in fleet.redis.smembers(fleet.keys.orphans(node, a.id))} == set(range(10))
        fleet.redis.config_set("maxmemory", "0")


# -- G7 -----------------------------------------------------------------------------------------------------------


def test_g7_a_crashed_worker_is_cleaned_up(fleet: Fleet) -> None:
    """SIGKILL of a worker with 1,600 rooms: gone from the store within lease and tick (and slack), the node is told
    all 1,600, each once, and the rooms of the worker beside it stay (26)."""
    node = fleet.farm.node("life-1")
    told: Counter[tuple[str, int]] = Counter()
    fleet.prefill(
        node.address, instance="life-1", on_orphans=lambda worker, rooms: told.update((worker, r) for r in rooms)
    )
    a, p = fleet.worker("a"), fleet.process("p")
    a.join(node.address, range(1600))
    p.join(node.address, range(1600))
    p.kill()
    died = time.monotonic()
    wait_until(lambda: p.id not in fleet.listed(node.address), PATIENCE_S, "off the list")
    took = time.monotonic() - died
    assert took < fleet.settings.lease_s + fleet.settings.tick_s + 2.0, f"reaped after {took:.1f} s"
    assert not fleet.redis.exists(fleet.keys.rooms(node.address, p.id))
    wait_until(lambda: len(told) == 1600, PATIENCE_S, "the node is told")
    assert told == Counter((p.id, room) for room in range(1600))
    assert fleet.rooms(node.address, a.id) == set(range(1600))
    assert a.told == []


# -- G8 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["probe", "registration"])
def test_g8_a_restart_is_a_failure(fleet: Fleet, how: str) -> None:
    """Another instance, seen in a header or registered by the node itself: the old rooms fail, without one missed
    probe, and rooms opened afterwards live."""
    slow = fast(probe_interval_s=30.0) if how == "registration" else fleet.settings
    node = fleet.farm.node("life-1" if how == "probe" else "")
    a, b = fleet.worker("a", settings=slow), fleet.worker("b", settings=slow)
    if how == "registration":
        fleet.prefill(node.address, instance="life-1").wait_announced(PATIENCE_S)
    for watched in (a, b):
        watched.join(node.address, range(20))
    wait_until(lambda: fleet.node(node.address).get("instance") == "life-1", PATIENCE_S, "the first life is known")
    if how == "probe":
        node.instance = "life-2"
    else:
        fleet.prefill(node.address, instance="life-2")
    for watched in (a, b):
        watched.await_told(20)
        assert watched.told_rooms() == Counter(range(20))
        assert {f.cause for _, f in watched.told} == {Cause.NODE_RESTARTED}
        assert {f.reason for _, f in watched.told} == {"instance life-1 was replaced by life-2"}
        watches = watched.worker._core.detector.watches
        assert watches[node.address].misses == 0
        assert watched.worker.health()["counters"]["votes"] == 0
    (room,) = a.join(node.address, [500])
    hold(lambda: room.status is Status.BOOTSTRAPPING, 0.5, "a room of the second life lives")
    assert (fleet.epoch(node.address), fleet.node(node.address)["state"]) == (2, "alive")


# -- G9 -----------------------------------------------------------------------------------------------------------


def test_g9_nobody_waits(fleet: Fleet, net: Chaos) -> None:
    """With every byte to and from the store held back, and a node that swallows, 5,000 joins, updates, statuses and
    leaves from two threads take as long as ever: no call waits for I/O or for a lock held across it."""
    node, hung = fleet.farm.node("life-1"), fleet.farm.node(swallow=True)
    patient = fast(probe_timeout_s=5.0, call_timeout_s=5.0, retry_s=10.0, lease_s=10.0, retention_s=60.0)
    a = fleet.worker("a", url=net.url, settings=patient)
    a.join(node.address, range(100))
    a.worker.join(hung.address, 1)
    net.blackhole = True
    times: list[float] = []

    def caller(first: int) -> None:
        for room in range(first, first + 2500):
            for call in (
                lambda r=room: a.worker.join(node.address, r),
                lambda r=room: a.worker.update(node.address, r, Status.TRANSFERRING),
                lambda r=room: a.worker.status(node.address, r),
                lambda r=room: a.worker.leave(node.address, r),
            ):
                started = time.perf_counter()
                call()
                times.append(time.perf_counter() - started)

    threads = [threading.Thread(target=caller, args=(first,)) for first in (10_000, 20_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(times) == 20_000
    times.sort()
    assert times[len(times) // 2] < 0.001
    assert times[int(len(times) * 0.999)] < 0.05, "one in a thousand may have lost the processor"
    assert times[-1] < 1.0, "nothing comes near a time-out of the store"
    began = time.perf_counter()
    health = a.worker.health()
    assert time.perf_counter() - began < 1.0
    assert health["addresses"][node.address]["waiting"] >= 0
    assert a.worker.flush(0.05) in (True, False)
    net.heal()
    a.flush()
    assert fleet.rooms(node.address, a.id) == set(range(100))


# -- G11 ----------------------------------------------------------------------------------------------------------


def test_g11_nothing_leaks(make_server: Callable[..., Server]) -> None:
    """Thousands of rooms, two failures, a crashed worker, orphans and votes: no key without TTL at any time, and when
    all have closed and retention has passed the key count is back at zero."""
    server = make_server("valkey")
    settings = fast(tick_s=0.05, lease_s=0.4, retention_s=1.6, linger_s=0.2)
    with Fleet(server.url, settings=settings) as fleet:
        nodes = [fleet.farm.node("life-1") for _ in range(3)]
        prefill = fleet.prefill(nodes[0].address, instance="life-1", on_orphans=lambda worker, rooms: None)
        workers = [fleet.worker(name) for name in "abc"]
        for turn in range(4):
            for node in nodes:
                for watched in workers:
                    for room in range(200):
                        watched.worker.join(node.address, turn * 1000 + room)
            for watched in workers:
                watched.flush()
            for node in nodes:
                for watched in workers:
                    for room in range(150):
                        watched.worker.leave(node.address, turn * 1000 + room)
            assert keys_without_ttl(server) == []
        p = fleet.process("p")
        p.join(nodes[0].address, range(10))
        p.kill()
        workers[0].worker.fail_node(nodes[1].address)
        nodes[2].stop()
        for watched in workers:
            watched.await_told(4 * 50)
        assert keys_without_ttl(server) == []
        for watched in workers:
            watched.worker.close()
        prefill.close()
        assert keys_without_ttl(server) == []
        wait_until(lambda: fleet.redis.dbsize() == 0, PATIENCE_S, "every key is gone")


def test_g11_closed_rooms_leave_only_what_the_listing_needs(fleet: Fleet) -> None:
    """With the workers alive but every room closed, the keys are those of an address with two listed workers."""
    node = fleet.farm.node("life-1")
    workers = [fleet.worker(name) for name in "ab"]
    for watched in workers:
        watched.join(node.address, [1])
        watched.worker.leave(node.address, 1)
        watched.flush()
    keys = set(fleet.redis.scan_iter())
    for watched in workers:
        watched.join(node.address, range(3000))
        for room in range(3000):
            watched.worker.update(node.address, room, Status.SUCCESS)
            watched.worker.leave(node.address, room)
        watched.flush()
    fixed = keys | {fleet.keys.addresses, fleet.keys.events(node.address)}
    assert set(fleet.redis.scan_iter()) <= fixed
    for watched in workers:
        held = watched.worker.health()["addresses"][node.address]
        assert (held["rooms"], held["waiting"]) == (0, 0)


# -- G13 ----------------------------------------------------------------------------------------------------------

A, R = "10.0.0.5:8998", 7
BAD_ADDRESSES: list[Any] = [
    "", "h", "h:", ":1", "h:0", "h:70000", "h:-1", "h:1.5", "h:０１", "[::1", "::1:80", "2001:db8::1", "0.0.0.0:8998",
    "[::]:1", "h {x}:1", "{h}:1", "h*:1", "a:b:1", "h\r\n:1", "h\x00:1", "\N{PILE OF POO}:1", "\ud800:1",
    "x" * 10240 + ":1", "1.2.3:1", "1.2.3.4.5:1", "256.1.1.1:1", None, 7, b"h:1", ["h", 1],
]  # fmt: skip
BAD_ROOMS: list[Any] = [2**63, -1, True, None, "07", "7", 1.5, b"7", [7], float("nan"), 2**64]
BAD_OPENINGS: list[Any] = [
    Status.FAILED,
    Status.TRANSFERRING,
    Status.SUCCESS,
    3,
    -1,
    5,
    "BOOTSTRAPPING",
    None,
    True,
    1.0,
]
BAD_STATUSES: list[Any] = [-1, 5, "SUCCESS", None, True, 4.0, [4]]


def shown(value: object) -> str:
    """A part of the value that a message must contain."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 4:
        return Status(value).name
    return ascii(value)[:30].rstrip("'")


def test_g13_bad_input_is_refused(fleet: Fleet) -> None:
    """Every bad address, room id and status, through every public call: a typed error that names the value, and not one
    key, room or counter differs afterwards."""
    a = fleet.worker("a")
    node = fleet.farm.node("life-1").address
    (room,) = a.join(node, [R])
    a.flush()
    w = a.worker
    at_address: list[Callable[[Any], object]] = [
        lambda bad: w.join(bad, R), lambda bad: w.room(bad, R), lambda bad: w.update(bad, R, Status.SUCCESS),
        lambda bad: w.leave(bad, R), lambda bad: w.status(bad, R), lambda bad: w.abort(bad, R, "x"),
        w.fail_node, w.report_transfer_error, w.node_info,
    ]  # fmt: skip
    at_room: list[Callable[[Any], object]] = [
        lambda bad: w.join(node, bad), lambda bad: w.room(node, bad), lambda bad: w.update(node, bad, Status.SUCCESS),
        lambda bad: w.leave(node, bad), lambda bad: w.status(node, bad), lambda bad: w.abort(node, bad, "x"),
    ]  # fmt: skip
    at_opening: list[Callable[[Any], object]] = [lambda bad: w.join(node, 99, bad)]
    at_status: list[Callable[[Any], object]] = [lambda bad: w.update(node, R, bad), room.update]
    calls: list[tuple[Callable[[Any], object], type[CoordinatorError], Any]] = [
        (call, error, bad)
        for ways, error, values in (
            (at_address, InvalidAddress, BAD_ADDRESSES), (at_room, InvalidRoom, BAD_ROOMS),
            (at_opening, InvalidStatus, BAD_OPENINGS), (at_status, InvalidStatus, BAD_STATUSES),
        )
        for bad in values
        for call in ways
    ]  # fmt: skip
    settled = (fleet.keys.addresses, fleet.keys.events(node))  # written by the first discovery, the first good probe
    wait_until(lambda: fleet.redis.exists(*settled) == 2, PATIENCE_S, "the keys of an address in use")
    before = (sorted(fleet.redis.scan_iter()), fleet.rooms(node, a.id), set(w.health()["addresses"]))
    wrong = []
    for call, error, value in calls:
        try:
            answer = call(value)
        except error as exc:
            if shown(value) not in str(exc):
                wrong.append(f"{value!a}: the message does not name it: {exc}")
        except Exception as exc:
            wrong.append(f"{value!a}: {type(exc).__name__} instead of {error.__name__}: {exc}")
        else:
            wrong.append(f"{value!a}: no error, answered {answer!r}")
    assert wrong == []
    a.flush()
    assert (sorted(fleet.redis.scan_iter()), fleet.rooms(node, a.id), set(w.health()["addresses"])) == before
    assert (room.status, a.told) == (Status.BOOTSTRAPPING, [])


def test_g13_the_borders_are_accepted(fleet: Fleet) -> None:
    """0 and 2**63 - 1 are rooms; two spellings of an IPv6 address are one; the second opening is RoomExists."""
    a = fleet.worker("a")
    node = fleet.farm.node("life-1").address
    a.join(node, [0, 2**63 - 1])
    assert fleet.rooms(node, a.id) == {0, 2**63 - 1}
    with pytest.raises(RoomExists, match=str(2**63 - 1)):
        a.worker.join(node, 2**63 - 1)
    room = a.worker.join("[0:0::0001]:8998", R)  # the loopback: it is probed
    assert room.address == "[::1]:8998"
    with pytest.raises(RoomExists):
        a.worker.join("[::1]:8998", R)
    assert a.worker.status("[0:0:0:0:0:0:0:1]:8998", R) is not None


def test_g13_failure_values_are_plain(fleet: Fleet) -> None:
    """A reason with line breaks, control characters, surrogates and 10 KB arrives as one short printable line."""
    node, a = fleet.farm.node("life-1").address, fleet.worker("a")
    a.join(node, [1])
    a.worker.fail_node(node, "line\r\nbreak \x00 \ud800 " + "x" * 10240)
    a.await_told(1)
    failure: Failure = a.told[0][1]
    assert failure.reason.startswith("line break ? x") or failure.reason.startswith(
        "line break \N{REPLACEMENT CHARACTER} x"
    )
    assert len(failure.reason) <= 256
    assert failure.reason.isprintable()
