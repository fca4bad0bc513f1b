"""The prefill side: a node announces itself, hears whose rooms died, aborts, drains and is superseded."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fleet import PATIENCE_S, Fleet, fast, hold
from servers import FakeLane, Server
from util import wait_until

from coordinator import Cause, ConfigError, InvalidAddress, InvalidRoom, NodeSuperseded, PrefillNode, Status, Worker
from coordinator import WorkerClosed as Closed


@pytest.fixture
def fleet(redis_url: str) -> Iterator[Fleet]:
    with Fleet(redis_url) as fleet:
        yield fleet


@pytest.fixture
def lane_fleet(store_server: FakeLane | Server) -> Iterator[Fleet]:
    with Fleet(client=store_server.async_client, look=store_server.sync_client) as fleet:
        yield fleet


class Freed:
    """An on_orphans callback that records; `fail` makes it raise that many times first."""

    def __init__(self, fail: int = 0) -> None:
        self.fail, self.calls = fail, 0
        self.rooms: dict[str, list[int]] = {}
        self.largest = 0

    def __call__(self, worker: str, rooms: list[int]) -> None:
        self.calls += 1
        self.largest = max(self.largest, len(rooms))
        if self.calls <= self.fail:
            raise RuntimeError("the engine is busy")
        self.rooms.setdefault(worker, []).extend(rooms)

    def of(self, worker: str) -> set[int]:
        return set(self.rooms.get(worker, []))


def test_a_node_is_announced(lane_fleet: Fleet) -> None:
    """Instance and info are in the store and a worker can read them; a renewal changes neither epoch nor state."""
    at = lane_fleet.farm.node("life-1").address
    info = {"ranks": ["10.0.0.5:1", "10.0.0.5:2"], "tp": 2}
    node = lane_fleet.prefill(at, instance="life-1", info=info)
    assert node.wait_announced(PATIENCE_S)
    a = lane_fleet.worker("a")
    a.join(at, [1])
    seen = a.worker.node_info(at)
    assert (seen["instance"], seen["epoch"], seen["state"]) == ("life-1", "1", "alive")
    assert json.loads(seen["info"]) == info
    renewals = node.counters["renewals"]
    wait_until(lambda: node.counters["renewals"] >= renewals + 5, PATIENCE_S, "five renewals")
    assert (lane_fleet.epoch(at), lane_fleet.node(at)["state"]) == (1, "alive")
    health = node.health()
    assert (health["status"], health["state"], health["epoch"], health["error"]) == ("ok", "alive", 1, "")


def test_rooms_of_a_closed_worker_are_told(lane_fleet: Fleet) -> None:
    """Every room that a departing worker had open, and no other, is told and then acknowledged."""
    at, freed = lane_fleet.farm.node("life-1").address, Freed()
    lane_fleet.prefill(at, instance="life-1", on_orphans=freed)
    a, b = lane_fleet.worker("a"), lane_fleet.worker("b")
    a.join(at, range(2500))
    b.join(at, range(3))
    for room in range(500):
        a.worker.update(at, room, Status.SUCCESS)
    a.flush()
    a.worker.close()
    wait_until(lambda: len(freed.of(a.id)) >= 2000, PATIENCE_S, "the rooms of a")
    assert freed.of(a.id) == set(range(500, 2500))
    assert freed.of(b.id) == set()
    assert freed.largest <= 1000
    pending = lane_fleet.keys.pending(at)
    wait_until(lambda: not lane_fleet.redis.exists(pending), PATIENCE_S, "it was acknowledged")
    assert not lane_fleet.redis.exists(lane_fleet.keys.orphans(at, a.id))


def test_a_callback_that_raises_is_told_again(fleet: Fleet) -> None:
    """Rooms are acknowledged only after the callback returned; what it raised is counted, the node goes on."""
    at, freed = fleet.farm.node("life-1").address, Freed(fail=3)
    node = fleet.prefill(at, instance="life-1", on_orphans=freed)
    a = fleet.worker("a")
    a.join(at, range(10))
    a.worker.close()
    wait_until(lambda: freed.of(a.id) == set(range(10)), PATIENCE_S, "told again until it returns")
    assert node.health()["counters"]["callback_errors"] == 3
    wait_until(lambda: not fleet.redis.exists(fleet.keys.pending(at)), PATIENCE_S, "it was acknowledged")


def test_orphans_wait_for_a_node_that_is_away(fleet: Fleet) -> None:
    """A worker that left while no node was announced: the node that comes up is told."""
    at, freed = fleet.farm.node("life-1").address, Freed()
    a = fleet.worker("a")
    a.join(at, range(10))
    a.worker.close()
    fleet.prefill(at, instance="life-1", on_orphans=freed)
    wait_until(lambda: freed.of(a.id) == set(range(10)), PATIENCE_S, "told later")


def test_a_slow_callback_keeps_nobody_waiting(fleet: Fleet) -> None:
    """While on_orphans takes its time, workers sync, join and fail as ever, and close() of the node returns."""
    at, release = fleet.farm.node("life-1").address, threading.Event()
    entered = threading.Event()

    def slow(worker: str, rooms: list[int]) -> None:
        entered.set()
        release.wait(60)

    node = fleet.prefill(at, instance="life-1", on_orphans=slow)
    a, b = fleet.worker("a"), fleet.worker("b")
    a.join(at, [1])
    a.worker.close()
    assert entered.wait(PATIENCE_S)
    try:
        b.join(at, [2])
        assert b.worker.fail_node(at).counts == {b.id: 1}
        assert node.health()["status"] == "ok"
    finally:
        release.set()


def test_abort_of_one_room(lane_fleet: Fleet) -> None:
    """The node aborts one room: its owner fails it with the reason, the neighbour lives; unknown rooms are False."""
    at = lane_fleet.farm.node("life-1").address
    node = lane_fleet.prefill(at, instance="life-1")
    a = lane_fleet.worker("a")
    a.join(at, [1, 2])
    assert node.abort(a.id, 1, "no memory") is True
    assert node.abort(a.id, 99, "no memory") is False
    a.await_told(1)
    assert [(room, f.cause, f.reason) for room, f in a.told] == [(1, Cause.ABORTED, "no memory")]
    a.flush()
    assert lane_fleet.rooms(at, a.id) == {2}
    with pytest.raises(InvalidRoom):
        node.abort(a.id, -1, "no memory")


def test_an_abort_does_not_reach_a_later_opening(fleet: Fleet) -> None:
    """The number aborted was closed and opened again meanwhile: the new opening lives."""
    at = fleet.farm.node("life-1").address
    node = fleet.prefill(at, instance="life-1")
    a = fleet.worker("a", settings=fast(tick_s=0.2, flush_s=0.1))
    a.join(at, [1])
    node.abort(a.id, 1, "meant for the first")
    a.worker.leave(at, 1)  # may come after the abort was heard; the room that lives is the second one
    room = a.worker.join(at, 1)
    a.flush()
    hold(lambda: room.status is Status.BOOTSTRAPPING, 0.6, "the second opening lives")


def test_another_instance_supersedes(fleet: Fleet) -> None:
    """A second instance at the address ends the first one's rooms; the first learns that it must not serve."""
    at = fleet.farm.node().address  # its answers carry no instance
    first = fleet.prefill(at, instance="life-1")
    assert first.wait_announced(PATIENCE_S)
    a = fleet.worker("a")
    a.join(at, [1])
    second = fleet.prefill(at, instance="life-2")
    a.await_told(1)
    assert a.told[0][1].cause is Cause.NODE_RESTARTED
    assert "life-1 was replaced by life-2" in a.told[0][1].reason
    wait_until(lambda: first.superseded, PATIENCE_S, "the first one learns it")
    assert first.health()["status"] == "superseded"
    with pytest.raises(NodeSuperseded, match="life-1"):
        first.wait_announced()
    assert not second.superseded
    hold(lambda: fleet.node(at)["instance"] == "life-2", 0.3, "the first one does not come back")
    (room,) = a.join(at, [2])
    assert room.status is Status.BOOTSTRAPPING


def test_drain_on_every_lane(lane_fleet: Fleet) -> None:
    """drain and undrain are flags in the store; another instance starts undrained."""
    at = lane_fleet.farm.node().address
    node = lane_fleet.prefill(at, instance="life-1")
    node.drain()
    assert lane_fleet.node(at)["draining"] == "1"
    assert node.health()["draining"] is True
    node.undrain()
    assert lane_fleet.node(at)["draining"] == "0"
    node.drain()
    node.close()
    lane_fleet.prefill(at, instance="life-2").wait_announced(PATIENCE_S)
    wait_until(lambda: lane_fleet.node(at)["draining"] == "0", PATIENCE_S, "the next life takes rooms")


def test_close_keeps_the_rooms(fleet: Fleet) -> None:
    """A node that closes cleanly only stops announcing: rooms go on until a probe or their owner decides."""
    at = fleet.farm.node("life-1").address
    node = fleet.prefill(at, instance="life-1")
    a = fleet.worker("a")
    (room,) = a.join(at, [1])
    node.close()
    node.close()
    hold(lambda: room.status is Status.BOOTSTRAPPING, 0.5, "the room lives")
    with pytest.raises(Closed):
        node.drain()


def test_an_expired_worker_is_reaped_by_the_node_alone(fleet: Fleet) -> None:
    """All workers are dead: the node by itself reaps them within two leases and frees their rooms."""
    at, freed = fleet.farm.node("life-1").address, Freed()
    node = fleet.prefill(at, instance="life-1", on_orphans=freed)
    p = fleet.process("p")
    p.join(at, range(100))
    p.kill()
    wait_until(lambda: freed.of(p.id) == set(range(100)), PATIENCE_S, "the rooms of the dead worker")
    assert node.health()["counters"]["workers_reaped"] == 1
    assert fleet.listed(at) == set()


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"address": "0.0.0.0:8998"}, InvalidAddress, "every interface"),
        ({"address": "prefill"}, InvalidAddress, "host:port"),
        ({"instance": "two words"}, ConfigError, "two words"),
        ({"instance": ""}, ConfigError, "instance ''"),
        ({"info": {"x": "y" * 70000}}, ConfigError, "at most 65536"),
        ({"url": "http://127.0.0.1:1"}, ConfigError, "scheme"),
    ],
)
def test_bad_arguments(given: dict[str, Any], error: type[Exception], says: str, redis_url: str) -> None:
    """A bad address, instance, info or URL is refused with its value before anything starts."""
    before = threading.active_count()
    with pytest.raises(error, match=says):
        PrefillNode(given.pop("address", "10.0.0.5:8998"), given.pop("url", redis_url), **given)
    assert threading.active_count() == before


def test_async_with(redis_url: str) -> None:
    """A node and a worker as async context managers: announced inside, silent afterwards."""
    import asyncio

    async def scene() -> str:
        async with (
            PrefillNode("127.0.0.1:9", redis_url, instance="life-1", settings=fast()) as node,
            Worker(redis_url, name="a", settings=fast()) as worker,
        ):
            assert await asyncio.to_thread(node.wait_announced, PATIENCE_S)
            return str((await asyncio.to_thread(worker.node_info, node.address))["instance"])

    assert asyncio.run(scene()) == "life-1"
    assert not [t for t in threading.enumerate() if t.name.startswith("coordinator")]


def test_a_number_that_lives_in_another_worker_is_seen(lane_fleet: Fleet) -> None:
    """A node can ask whether a listed worker has the same number open; what the dead had does not count."""
    at = lane_fleet.farm.node("life-1").address
    node = lane_fleet.prefill(at, instance="life-1")
    a, b = lane_fleet.worker("a"), lane_fleet.worker("b")
    a.join(at, [1, 2, 2**63 - 1])
    b.join(at, [2, 3])
    a.worker.close()
    wait_until(lambda: node.open_among([1, 2, 3, 4, 2**63 - 1]) == {2, 3}, PATIENCE_S, "only what b has open")
    assert node.open_among([]) == set()
    with pytest.raises(InvalidRoom):
        node.open_among([-1])
