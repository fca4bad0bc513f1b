"""A worker against a store: its rooms get there, its lease lives, its neighbours are left alone, its log is quiet."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from fleet import PATIENCE_S, Fleet, Watched, fast, hold
from servers import FakeLane, Server
from util import wait_until

import coordinator.worker as worker_module
from coordinator import Cause, ConfigError, Failure, Room, Settings, Status, UnknownAddress, Worker
from coordinator.store.ops import Ops
from coordinator.store.verdict import fail_address_async, register_async

BIG = 8804230600348159981  # past 2**53: no double holds it


@pytest.fixture
def fleet(redis_url: str) -> Iterator[Fleet]:
    with Fleet(redis_url) as fleet:
        yield fleet


@pytest.fixture
def lane_fleet(store_server: FakeLane | Server) -> Iterator[Fleet]:
    """On every lane; the worker is given a client, so that fakeredis can take part."""
    with Fleet(client=store_server.async_client, look=store_server.sync_client) as fleet:
        yield fleet


def failed_once(watched: Watched, rooms: set[int]) -> None:
    """Exactly these rooms were told, each once."""
    watched.await_told(len(rooms))
    assert dict(watched.told_rooms()) == dict.fromkeys(rooms, 1)


# -- the way of a room, on every lane -----------------------------------------------------------------------------


def test_rooms_reach_the_store_and_leave_it(lane_fleet: Fleet) -> None:
    """join and leave end in the set, exactly; statuses move; a finished room is not in the set."""
    node, a = lane_fleet.farm.node("life-1"), lane_fleet.worker("a")
    rooms = a.join(node.address, [0, 7, BIG, 2**63 - 1])
    assert lane_fleet.rooms(node.address, a.id) == {0, 7, BIG, 2**63 - 1}
    assert rooms[1].update(Status.TRANSFERRING)
    assert rooms[1].status is Status.TRANSFERRING
    assert rooms[2].update(Status.SUCCESS)
    assert rooms[0].leave()
    a.flush()
    assert lane_fleet.rooms(node.address, a.id) == {7, 2**63 - 1}
    assert [a.worker.status(node.address, room) for room in (0, 7, BIG)] == [None, Status.TRANSFERRING, Status.SUCCESS]
    assert a.told == []


def test_a_failed_node_is_told_to_every_owner(lane_fleet: Fleet) -> None:
    """fail_node: the open rooms of both workers fail with one cause and reason; finished ones do not."""
    node, a, b = lane_fleet.farm.node("life-1"), lane_fleet.worker("a"), lane_fleet.worker("b")
    a.join(node.address, [1, 2])
    b.join(node.address, [1, 3])
    a.worker.update(node.address, 2, Status.SUCCESS)
    a.flush()
    failure = b.worker.fail_node(node.address, "operator says so")
    assert (failure.epoch, failure.already) == (1, False)
    assert failure.counts == {a.id: 1, b.id: 2}
    assert sorted(failure.rooms()) == sorted([(a.id, 1), (b.id, 1), (b.id, 3)])
    failed_once(a, {1})
    failed_once(b, {1, 3})
    told = {failure for watched in (a, b) for _, failure in watched.told}
    assert told == {Failure(Cause.NODE_FAILED, "operator says so", node.address, 1, b.id)}
    assert lane_fleet.rooms(node.address, a.id) | lane_fleet.rooms(node.address, b.id) == set()


def test_a_killed_node_is_found_and_failed(lane_fleet: Fleet) -> None:
    """A port that refuses fails the node for everybody by votes, without anybody calling fail_node."""
    node, a, b = lane_fleet.farm.node("life-1"), lane_fleet.worker("a"), lane_fleet.worker("b")
    a.join(node.address, [1])
    b.join(node.address, [2])
    wait_until(lambda: a.knows(node.address) or b.knows(node.address), PATIENCE_S, "a first good probe")
    node.stop()
    failed_once(a, {1})
    failed_once(b, {2})
    assert {f.cause for watched in (a, b) for _, f in watched.told} == {Cause.NODE_FAILED}
    assert lane_fleet.node(node.address)["state"] == "failed"
    assert lane_fleet.epoch(node.address) == 2


def test_close_leaves_the_address(lane_fleet: Fleet) -> None:
    """After close nobody is listed, the open rooms are orphans for the node, and were told as closed."""
    node, a = lane_fleet.farm.node("life-1"), lane_fleet.worker("a")
    a.join(node.address, [1, 2])
    a.worker.close()
    assert lane_fleet.listed(node.address) == set()
    assert lane_fleet.redis.smembers(lane_fleet.keys.orphans(node.address, a.id)) == {"1", "2"}
    assert [failure.cause for _, failure in a.told] == [Cause.CLOSED] * 2
    assert a.worker.health()["status"] == "closed"


def test_asyncio_use(redis_url: str) -> None:
    """async with, a coroutine callback, afail_node and aflush work on the caller's loop."""

    async def scene() -> list[tuple[int, Cause]]:
        told: asyncio.Queue[tuple[int, Cause]] = asyncio.Queue()

        async def on_failure(room: Room, failure: Failure) -> None:
            await told.put((room.id, failure.cause))

        async with Worker(redis_url, name="a", settings=fast()) as worker:
            worker.on_failure(on_failure)
            worker.join("127.0.0.1:9", 5)
            assert await worker.aflush(PATIENCE_S)
            assert (await worker.afail_node("127.0.0.1:9")).counts == {worker.id: 1}
            return [await asyncio.wait_for(told.get(), PATIENCE_S)]

    assert asyncio.run(scene()) == [(5, Cause.NODE_FAILED)]


def test_fail_node_twice_and_of_nobody(fleet: Fleet) -> None:
    """A second fail_node says `already` with the first reason and counts; an address nobody ever used is an error."""
    node, a = fleet.farm.node("life-1"), fleet.worker("a")
    a.join(node.address, range(5))
    first = a.worker.fail_node(node.address, "first")
    node.stop()
    second = fleet.worker("b").worker.fail_node(node.address, "second")
    assert (second.already, second.reason, second.counts, second.epoch) == (True, "first", first.counts, first.epoch)
    with pytest.raises(UnknownAddress, match=r"10\.9\.9\.9:1"):
        a.worker.fail_node("10.9.9.9:1")


# -- leases -------------------------------------------------------------------------------------------------------


def test_record_deleted_by_hand_is_restored(fleet: Fleet) -> None:
    """Record, rooms and listing of a live worker are deleted: the next tick puts all of it back (case 28)."""
    node, a = fleet.farm.node("life-1"), fleet.worker("a")
    a.join(node.address, range(50))
    keys = fleet.keys
    fleet.redis.delete(keys.worker(node.address, a.id), keys.rooms(node.address, a.id), keys.workers(node.address))
    wait_until(lambda: fleet.rooms(node.address, a.id) == set(range(50)), PATIENCE_S, "rooms restored")
    wait_until(lambda: fleet.listed(node.address) == {a.id}, PATIENCE_S, "worker listed again")
    assert fleet.redis.exists(keys.worker(node.address, a.id))
    assert a.told == []


def test_rooms_deleted_by_hand_are_restored(fleet: Fleet) -> None:
    """Only the set of rooms is deleted, the record stays: the count in each sync betrays it."""
    node, a = fleet.farm.node("life-1"), fleet.worker("a")
    a.join(node.address, range(50))
    fleet.redis.delete(fleet.keys.rooms(node.address, a.id))
    wait_until(lambda: fleet.rooms(node.address, a.id) == set(range(50)), PATIENCE_S, "rooms restored")


def test_idle_worker_stays_listed(fleet: Fleet) -> None:
    """A worker whose rooms are all closed is listed, with a lease that lives, for 3 leases (case 29)."""
    settings = fast(lease_s=0.8)
    node, a = fleet.farm.node("life-1"), fleet.worker("a", settings=settings)
    fleet.worker("b", settings=settings).join(node.address, [1])  # somebody who would reap it
    a.join(node.address, [1])
    a.worker.leave(node.address, 1)
    a.flush()
    hold(lambda: a.id in fleet.listed(node.address), 3 * settings.lease_s, "an idle worker is listed")
    assert fleet.events(node.address, "reaped") == []


def test_one_of_three_closes(fleet: Fleet) -> None:
    """When one of three workers closes, the other two keep their rooms, leases and records (case 31)."""
    node = fleet.farm.node("life-1")
    a, b, c = (fleet.worker(name) for name in "abc")
    for n, watched in enumerate((a, b, c)):
        watched.join(node.address, range(n, n + 10))
    b.worker.close()
    assert fleet.listed(node.address) == {a.id, c.id}
    assert fleet.rooms(node.address, a.id) == set(range(10))
    assert fleet.rooms(node.address, c.id) == set(range(2, 12))
    assert fleet.rooms(node.address, b.id) == set()
    assert fleet.redis.exists(fleet.keys.worker(node.address, a.id), fleet.keys.worker(node.address, c.id)) == 2
    assert a.told == c.told == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lease_s": 0.15, "tick_s": 0.05}, "lease_s > 3 * tick_s does not hold"),
        ({"lease_s": -1.0}, "lease_s is -1.0"),
        ({"lease_s": float("nan")}, "lease_s is nan"),
        ({"lease_s": float("inf")}, "lease_s is inf"),
        ({"lease_s": "5"}, "lease_s must be a number"),
        ({"retention_s": 5.0, "lease_s": 2.0}, "retention_s >= 4 * lease_s does not hold"),
    ],
)
def test_impossible_lease_is_refused(given: dict[str, object], says: str) -> None:
    """A lease under three ticks, negative, NaN or no number is refused with the relation that is broken (case 30)."""
    with pytest.raises(ConfigError) as error:
        fast(**given)
    assert says in str(error.value)


def test_empty_lease_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty COORDINATOR_LEASE_S is an error that names the variable, not a default (case 30)."""
    monkeypatch.setenv("COORDINATOR_LEASE_S", "")
    with pytest.raises(ConfigError, match="COORDINATOR_LEASE_S=''"):
        Worker("redis://127.0.0.1:1/0")


def test_same_host_and_pid_are_different_workers(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers with one host name, pid 1 and one random seed have different worker ids (case 34)."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(socket, "gethostname", lambda: "decode")
    ids = []
    for _ in range(2):
        random.seed(0)
        with Worker(redis_url, name="decode", settings=fast()) as worker:
            ids.append(worker.id)
    assert len(set(ids)) == 2
    assert all(name.startswith("decode#") for name in ids)


# -- being told ---------------------------------------------------------------------------------------------------


def test_told_by_removal_not_by_a_time_out(fleet: Fleet) -> None:
    """With leases and probe intervals far longer than the wait, an owner still learns at once (case 36)."""
    slow = fast(lease_s=60.0, probe_interval_s=60.0, retention_s=300.0)
    node = fleet.farm.node("life-1")
    a, b = fleet.worker("a", settings=slow), fleet.worker("b", settings=slow)
    a.join(node.address, [1])
    b.join(node.address, [2])
    started = time.monotonic()
    a.worker.fail_node(node.address)
    failed_once(b, {2})
    assert time.monotonic() - started < 15


def test_rooms_of_another_worker_cannot_be_touched(fleet: Fleet) -> None:
    """leave, update, abort and status of another worker's room answer False or None and change nothing (case 57)."""
    node, a, b = fleet.farm.node("life-1"), fleet.worker("a"), fleet.worker("b")
    (room,) = a.join(node.address, [7])
    b.join(node.address, [8])
    assert b.worker.leave(node.address, 7) is False
    assert b.worker.update(node.address, 7, Status.FAILED) is False
    assert b.worker.abort(node.address, 7, "not mine") is False
    assert b.worker.status(node.address, 7) is None
    b.flush()
    assert fleet.rooms(node.address, a.id) == {7}
    assert room.status is Status.BOOTSTRAPPING
    assert a.told == []


def test_abort_of_an_own_room(fleet: Fleet) -> None:
    """abort fails one room with its reason; the second abort and its neighbour are untouched."""
    node, a = fleet.farm.node("life-1"), fleet.worker("a")
    a.join(node.address, [7, 8])
    assert a.worker.abort(node.address, 7, "client hung up") is True
    assert a.worker.abort(node.address, 7, "again") is False
    failed_once(a, {7})
    assert a.told[0][1].reason == "client hung up"
    a.flush()
    assert fleet.rooms(node.address, a.id) == {8}


def test_deadline_fails_a_room_nobody_closes(fleet: Fleet) -> None:
    """A room with a deadline fails by itself with that cause; one that left before does not."""
    node, a = fleet.farm.node("life-1"), fleet.worker("a")
    a.worker.join(node.address, 1, deadline_s=0.1)
    a.worker.join(node.address, 2, deadline_s=0.1).leave()
    a.worker.join(node.address, 3)
    failed_once(a, {1})
    assert a.told[0][1].cause is Cause.DEADLINE
    a.flush()
    assert fleet.rooms(node.address, a.id) == {3}


# -- start, log ---------------------------------------------------------------------------------------------------


def test_store_not_up_yet(make_server: Callable[..., Server]) -> None:
    """A worker that starts before its store takes joins at once and carries them there when it comes (case 62)."""
    server = make_server("valkey")
    server.kill()
    with Fleet(server.url) as fleet:
        a = fleet.worker("a")
        room = a.worker.join("127.0.0.1:9", 1, Status.WAITING_FOR_INPUT)
        wait_until(lambda: a.worker.health()["counters"]["sync_errors"] >= 3, PATIENCE_S, "three failed tries")
        assert a.worker.flush(0.05) is False
        assert a.worker.health()["store"]["reachable"] is False
        server.start()
        a.flush()
        assert fleet.listed("127.0.0.1:9") == {a.id}
        if room.failure is None:  # nobody listens at that address, so it may have failed by now
            assert fleet.rooms("127.0.0.1:9", a.id) == {1}


def test_idle_ticks_log_nothing(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """Thirty ticks with open rooms, probes and a node's renewals write not one line (case 61)."""
    node, a = fleet.farm.node("life-1"), fleet.worker("a")
    fleet.prefill(node.address, instance="life-1").wait_announced()
    a.join(node.address, range(10))
    wait_until(lambda: a.knows(node.address), PATIENCE_S, "a first good probe")
    caplog.set_level(logging.INFO, "coordinator")
    caplog.clear()
    syncs = a.worker.health()["counters"]["syncs"]
    wait_until(lambda: a.worker.health()["counters"]["syncs"] >= syncs + 30, PATIENCE_S, "30 ticks")
    assert [record.getMessage() for record in caplog.records] == []


def test_one_failure_logs_one_line_a_transition(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """1,000 rooms failed and the node back: one line says that they failed, one that it lives (case 61)."""
    node, a = fleet.farm.node("life-1"), fleet.worker("a")
    a.join(node.address, range(1000))
    caplog.set_level(logging.INFO, "coordinator")
    caplog.clear()
    a.worker.fail_node(node.address, "operator")
    a.await_told(1000)
    wait_until(lambda: a.state(node.address) == "alive", PATIENCE_S, "the node answers, so it is revived")
    syncs = a.worker.health()["counters"]["syncs"]
    wait_until(lambda: a.worker.health()["counters"]["syncs"] >= syncs + 10, PATIENCE_S, "10 more ticks")
    events = [record.getMessage().split()[0] for record in caplog.records]
    assert sorted(events) == ["node_revived", "rooms_failed"]
    assert "count=1000" in caplog.text


def test_store_away_and_back_logs_two_lines(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, redis_server: Server
) -> None:
    """Ten failed rounds and the return of the store: one line each, however many tries (case 61)."""
    node, a = fleet.farm.node("life-1"), fleet.worker("a")
    a.join(node.address, [1])
    caplog.set_level(logging.INFO, "coordinator")
    caplog.clear()
    redis_server.kill()
    wait_until(lambda: a.worker.health()["counters"]["sync_errors"] >= 10, PATIENCE_S, "ten failed rounds")
    redis_server.start()
    wait_until(lambda: fleet.rooms(node.address, a.id) == {1}, PATIENCE_S, "the rooms are back")
    events = [record.getMessage().split()[0] for record in caplog.records]
    assert events.count("store_away") == 1
    assert events.count("store_back") == 1
    assert len(events) <= 5, events  # push_lost and resync may add one each


def test_each_namespace_is_its_own_world(fleet: Fleet) -> None:
    """Workers of two namespaces on one store do not see each other's rooms or verdicts."""
    node, a = fleet.farm.node("life-1"), fleet.worker("a")
    other = fleet.worker("b", settings=replace(fleet.settings, namespace="other"))
    a.join(node.address, [1])
    other.join(node.address, [1])
    assert a.worker.fail_node(node.address).counts == {a.id: 1}
    failed_once(a, {1})
    assert other.worker.status(node.address, 1) is Status.BOOTSTRAPPING
    assert other.worker.health()["addresses"][node.address]["epoch"] == 1


def test_settings_come_from_the_environment(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without arguments a worker takes its URL and times from COORDINATOR_* variables."""
    monkeypatch.setenv("COORDINATOR_URL", redis_url)
    monkeypatch.setenv("COORDINATOR_TICK_S", "0.07")
    with Worker(name="a") as worker:
        assert (worker.url, worker.settings.tick_s) == (redis_url, 0.07)
        assert worker.settings == Settings(url=redis_url, tick_s=0.07)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "redis://", "redis://127.0.0.1:1/x"])
def test_bad_url_is_refused_and_leaves_no_thread(url: str) -> None:
    """A URL that cannot mean a store is a ConfigError that names it, and no thread is left behind."""
    before = threading.active_count()
    with pytest.raises(ConfigError, match=re.escape(repr(url))):
        Worker(url)
    assert threading.active_count() == before


def test_fail_node_never_fails_the_generation_after_the_one_that_was_meant(fleet: Fleet) -> None:
    """An operator's call that races a restart finds its epoch ended and leaves the new instance's rooms alone (15)."""
    node = fleet.farm.node("life-1")
    a = fleet.worker("a")
    a.join(node.address, [1])
    epoch = fleet.epoch(node.address)

    async def after_a_restart(store: Any, ops: Ops, address: str, *rest: Any) -> Any:
        await register_async(store, ops, address, "start", "life-2", epoch, "node:life-2")
        return await fail_address_async(store, ops, address, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module, "fail_address_async", after_a_restart)
        failure = a.worker.fail_node(node.address, "operator")
    assert (failure.already, failure.epoch) == (True, epoch)
    assert fleet.epoch(node.address) == epoch + 1
    assert a.worker.status(node.address, 1) is Status.FAILED


def test_a_loop_that_has_ended_is_seen_and_does_not_keep_close_from_failing_the_rooms(fleet: Fleet) -> None:
    """health() says so instead of "ok"; close() raises nothing, and what was open fails as closed, once."""
    node, a = fleet.farm.node("life-1"), fleet.worker("a")
    room = a.join(node.address, [1])[0]
    assert a.worker.health()["status"] == "ok"
    a.worker._thread.stop()
    health = a.worker.health()
    assert health["status"] == "degraded"
    assert any("event loop has ended" in problem for problem in health["problems"])
    a.worker.close()
    assert room.failure is not None
    assert room.failure.cause is Cause.CLOSED
    failed_once(a, {1})
