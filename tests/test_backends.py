"""Backends over a recorded engine, a real Worker and a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from recorded import RecordedEngine
from util import wait_until

from coordinator import JoinRefused, PrefillNode, Settings, Sight, Status, Worker
from coordinator.backends import Backend, MooncakeBackend, MoriBackend, NixlBackend, PeerCache
from coordinator.decide.detector import Evidence

NODE = "10.0.0.1:80"
LONGER = "10.0.0.1:8000"  # NODE is a prefix of it

FAST = Settings(
    tick_s=0.05, lease_s=1.0, probe_interval_s=0.1, probe_timeout_s=0.3, flush_s=0.002, retention_s=30, linger_s=5
)


class Switch:
    """A probe whose answers are set by the test."""

    def __init__(self) -> None:
        self.dead: set[str] = set()
        self.hold = threading.Event()

    async def __call__(self, address: str) -> Sight:
        """OK unless the address is marked as dead; while held, nothing is known."""
        if self.hold.is_set():
            return Sight(Evidence.UNREADY)
        return Sight(Evidence.REFUSED if address in self.dead else Evidence.OK)

    async def aclose(self) -> None:
        """Nothing to release."""


@pytest.fixture
def probe() -> Switch:
    """Answers for every node."""
    return Switch()


@pytest.fixture
def worker(redis_url: str, probe: Switch) -> Iterator[Worker]:
    """A worker whose nodes answer as `probe` says."""
    with Worker(redis_url, name="decode", settings=FAST, probe=probe) as made:
        yield made


def announce(url: str, address: str, instance: str = "one") -> PrefillNode:
    """A registered node with something to say."""
    node = PrefillNode(address, url, instance=instance, info={"ranks": {"0": f"{address}/r0"}}, settings=FAST)
    assert node.wait_announced()
    return node


def test_failure_evicts_exactly_that_address_and_forgets_each_endpoint_once(redis_url: str, worker: Worker) -> None:
    """22: failing 10.0.0.1:80 leaves 10.0.0.1:8000 cached; each stale endpoint is disconnected once, before release."""
    engine = RecordedEngine()
    backend: Backend[str] = Backend(worker, engine)
    with announce(redis_url, NODE), announce(redis_url, LONGER):
        ends = [backend.endpoint(NODE, rank) for rank in (0, 1)]
        kept = backend.endpoint(LONGER)
        assert backend.endpoint(NODE, 0) == ends[0]
        doomed, other = backend.open(NODE, 1), backend.open(LONGER, 1)
        assert worker.flush(5)
        worker.fail_node(NODE, "test")
        wait_until(lambda: engine.of("release") == [1])
        assert sorted(engine.of("forget")) == sorted(ends)
        assert [kind for kind, _ in engine.calls[-3:]] == ["forget", "forget", "release"]
        assert (doomed.status, other.status) == (Status.FAILED, Status.BOOTSTRAPPING)
        assert backend.endpoint(LONGER) == kept


def test_a_node_that_answers_again_is_fetched_afresh(redis_url: str, worker: Worker, probe: Switch) -> None:
    """After a failure the cache holds nothing old: the next endpoint comes from what the new instance announced."""
    backend: Backend[str] = Backend(worker, RecordedEngine())
    with announce(redis_url, NODE):
        backend.open(NODE, 1)
        first = backend.endpoint(NODE)
        assert worker.flush(5)
        probe.dead.add(NODE)
        wait_until(lambda: worker.health()["addresses"][NODE]["state"] == "failed")
        assert backend.peers.addresses() == []
        with pytest.raises(JoinRefused):
            backend.open(NODE, 2)
    probe.dead.clear()
    with announce(redis_url, NODE, "two"):
        wait_until(lambda: worker.health()["addresses"][NODE]["state"] == "alive")
        assert backend.endpoint(NODE) != first
        assert backend.peers.peer(NODE).instance == "two"
        assert worker._core.detector.watch(NODE).misses == 0
        assert backend.open(NODE, 2).status is Status.BOOTSTRAPPING


def test_transfer_error_is_evidence_only_if_the_engine_says_so(redis_url: str, probe: Switch) -> None:
    """A connection error makes the worker look at the node at once; an error of its own does not; neither fails it."""
    slow = replace(FAST, probe_interval_s=60.0)
    with Worker(redis_url, settings=slow, probe=probe) as worker:
        backend: Backend[str] = Backend(worker, RecordedEngine())
        room = backend.open(NODE, 1)
        assert worker.flush(5)
        wait_until(lambda: worker.health()["counters"]["syncs"] > 4)
        before = worker.health()["counters"]["probes"]
        backend.transfer_failed(NODE, ValueError("bad layout"))
        seen = worker.health()["counters"]["syncs"]
        wait_until(lambda: worker.health()["counters"]["syncs"] > seen + 2)
        assert worker.health()["counters"]["probes"] == before
        backend.transfer_failed(NODE, ConnectionResetError("reset by peer"))
        wait_until(lambda: worker.health()["counters"]["probes"] == before + 1)
        assert room.status is Status.BOOTSTRAPPING


def test_mooncake_drops_finished_rooms_on_a_good_beat(worker: Worker, probe: Switch) -> None:
    """Rooms gone from the request table leave with the next good answer, the others stay."""
    probe.hold.set()
    backend: MooncakeBackend[str] = MooncakeBackend(worker, RecordedEngine())
    done, running = backend.open(NODE, 1), backend.open(NODE, 2)
    done.update(Status.SUCCESS)
    backend.conclude(done)
    assert [room.id for room in worker.rooms(NODE)] == [1, 2]
    probe.hold.clear()
    wait_until(lambda: [room.id for room in worker.rooms(NODE)] == [2])
    assert running.status is Status.BOOTSTRAPPING


def test_mooncake_keeps_nothing_of_a_node_that_never_answers_again(worker: Worker, probe: Switch) -> None:
    """Failed rooms leave when their result was collected, finished ones with the failure."""
    backend: MooncakeBackend[str] = MooncakeBackend(worker, RecordedEngine())
    finished, failed, late = (backend.open(NODE, n) for n in (1, 2, 3))
    for room in (finished, late):
        room.update(Status.SUCCESS)
    wait_until(lambda: worker._core.detector.watch(NODE).ever_ok)
    probe.dead.add(NODE)
    wait_until(lambda: failed.status is Status.FAILED)
    for room in (finished, failed, late):
        backend.conclude(room)
    assert worker.rooms(NODE) == []


def test_mooncake_refused_open_leaves_no_request(worker: Worker) -> None:
    """A join that raises does not stay in the request table."""
    backend: MooncakeBackend[str] = MooncakeBackend(worker, RecordedEngine())
    with pytest.raises(ValueError, match="every interface"):
        backend.open("0.0.0.0:1", 1)
    assert backend._requests == {}


def test_nixl_drops_on_success_and_loses_to_an_earlier_failure(worker: Worker) -> None:
    """Success closes the room at once; after a failure the late notification changes nothing but the collection."""
    backend: NixlBackend[str] = NixlBackend(worker, RecordedEngine())
    good, bad = backend.open(NODE, 1), backend.open(NODE, 2)
    assert worker.flush(5)
    assert backend.succeeded(good)
    worker.fail_node(NODE, "test")
    assert not backend.succeeded(bad)
    assert (good.status, bad.status) == (Status.SUCCESS, Status.FAILED)
    assert worker.rooms(NODE) == []


def test_mori_cleanup_from_its_own_thread(worker: Worker) -> None:
    """cleanup_room leaves once, whatever the room's state, also when the node has failed meanwhile."""
    engine = RecordedEngine()
    backend: MoriBackend[str] = MoriBackend(worker, engine)
    rooms = [backend.open(NODE, n) for n in range(4)]
    assert worker.flush(5)
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.extend(backend.cleanup_room(n) for n in (0, 0, 1)))
    thread.start()
    thread.join()
    assert results == [True, False, True]
    worker.fail_node(NODE, "test")
    wait_until(lambda: sorted(engine.of("release")) == [2, 3])
    assert [room.status for room in rooms[2:]] == [Status.FAILED] * 2
    assert not backend.cleanup_room(2)
    assert backend._rooms == {}


def test_peer_cache_eviction_while_connecting() -> None:
    """An endpoint that was being connected when its node failed is handed back as stale, and never cached."""
    stale: list[str] = []
    cache: PeerCache[str] = PeerCache(lambda address: ("one", {}), stale.extend)
    made = iter(["old", "new"])

    def connect(peer: object) -> str:
        end = next(made)
        if end == "old":
            assert cache.evict(NODE) == []
        return end

    assert cache.endpoint(NODE, 0, connect) == "new"
    assert stale == ["old"]
    assert cache.evict(NODE) == ["new"]
    assert cache.evict(NODE) == []


def test_peer_cache_one_endpoint_for_racing_threads() -> None:
    """Two threads that connect the same rank share one endpoint; the other is handed back once."""
    stale: list[int] = []
    cache: PeerCache[int] = PeerCache(lambda address: ("one", {}), stale.extend)
    both = threading.Barrier(2)
    numbers = iter(range(100))
    got: list[int] = []

    def connect(peer: object) -> int:
        both.wait(5)
        return next(numbers)

    threads = [threading.Thread(target=lambda: got.append(cache.endpoint(NODE, 0, connect))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(set(got)) == 1
    assert len(got) == 2
    assert sorted([got[0], *stale]) == [0, 1]


def test_peer_cache_keeps_nothing_of_a_failed_fetch() -> None:
    """A miss is not remembered: the next caller asks again."""
    answers = iter([ConnectionError("not yet"), ("two", {"tp": 8})])

    def fetch(address: str) -> tuple[str, dict[str, int]]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]

    cache: PeerCache[str] = PeerCache(fetch, lambda ends: None)
    with pytest.raises(ConnectionError, match="not yet"):
        cache.peer(NODE)
    assert cache.peer(NODE).info == {"tp": 8}
