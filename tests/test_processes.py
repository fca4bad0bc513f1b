"""Workers as real processes: killed, stopped, starved, forked, spawned, told to end; and what they cost the store."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
from fleet import HERE, PATIENCE_S, Fleet, fast, hold
from util import wait_until

from coordinator.store.embedded import owned_command


@pytest.fixture
def fleet(redis_url: str) -> Iterator[Fleet]:
    with Fleet(redis_url) as fleet:
        yield fleet


class Freed:
    """An on_orphans callback that records rooms by worker."""

    def __init__(self) -> None:
        self.rooms: dict[str, list[int]] = {}

    def __call__(self, worker: str, rooms: list[int]) -> None:
        self.rooms.setdefault(worker, []).extend(rooms)

    def of(self, worker: str) -> list[int]:
        return sorted(self.rooms.get(worker, []))


def told_all(freed: Freed, worker: str, count: int) -> bool:
    """Whether the node was told rooms 0 to count-1 of a worker, each once."""
    return freed.of(worker) == list(range(count))


def script(name: str, fleet: Fleet, address: str) -> subprocess.Popen[str]:
    """One of the child_*.py scripts as a process."""
    given = json.dumps({**asdict(fleet.settings), "url": ""})
    return subprocess.Popen(
        owned_command([sys.executable, str(HERE / name), fleet.url, address, given]),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": f"{HERE.parent}:{HERE}"},
    )  # fmt: skip


def report(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The one JSON line that a script prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the script ended with {process.wait(10)}"
    found = json.loads(line)
    assert isinstance(found, dict)
    return found


# -- SIGKILL ------------------------------------------------------------------------------------------------------


def test_killed_worker_beside_a_living_one(fleet: Fleet) -> None:
    """Only the dead worker's rooms go; the living one's joins keep its own lease alive, not the other's (27)."""
    node, a, freed = fleet.farm.node("life-1"), fleet.worker("a"), Freed()
    fleet.prefill(node.address, instance="life-1", on_orphans=freed)
    p = fleet.process("p")
    p.join(node.address, range(100))
    a.join(node.address, range(50, 80))
    p.kill()
    fresh = 1000
    while p.id in fleet.listed(node.address):
        fresh += 1
        a.join(node.address, [fresh])  # busy as can be
        assert fresh < 1_000_000
    wait_until(lambda: freed.of(p.id) == list(range(100)), PATIENCE_S, "the node is told which rooms died")
    assert fleet.rooms(node.address, p.id) == set()
    assert fleet.rooms(node.address, a.id) == set(range(50, 80)) | set(range(1001, fresh + 1))
    assert a.told == []
    assert set(freed.rooms) == {p.id}


def test_each_orphan_is_reaped_once(fleet: Fleet) -> None:
    """Twenty workers see four others die: each dead one is reaped by one of them, and told to the node once (35)."""
    node, freed = fleet.farm.node("life-1"), Freed()
    fleet.prefill(node.address, instance="life-1", on_orphans=freed)
    workers = [fleet.worker(f"w{n}") for n in range(20)]
    for watched in workers:
        watched.worker.join(node.address, 7)
    doomed = [fleet.process(f"p{n}") for n in range(4)]
    for process in doomed:
        process.join(node.address, range(30))
    for process in doomed:
        process.kill()
    for process in doomed:
        wait_until(partial(told_all, freed, process.id, 30), PATIENCE_S, "told to the node")
    wait_until(lambda: not fleet.redis.exists(fleet.keys.pending(node.address)), PATIENCE_S, "acknowledged")
    reaped = [event["worker"] for event in fleet.events(node.address, "reaped")]
    assert sorted(reaped) == sorted(process.id for process in doomed)
    assert [event["rooms"] for event in fleet.events(node.address, "reaped")] == ["30"] * 4
    assert fleet.listed(node.address) == {watched.id for watched in workers}
    assert [watched.told for watched in workers] == [[]] * 20


def test_ticks_of_many_workers_spread_out(fleet: Fleet) -> None:
    """Twenty workers that start at the same moment do not renew their leases at the same moment (35)."""
    settings = fast(tick_s=1.0, lease_s=10.0, retention_s=60.0)
    node = fleet.farm.node("life-1")
    workers = [fleet.worker(f"w{n}", settings=settings) for n in range(20)]
    for watched in workers:
        watched.worker.join(node.address, 7)
    for watched in workers:
        watched.flush()
    time.sleep(2.5)  # two rounds of ticks; the join itself renewed all leases at one moment
    deadlines = sorted(
        score for _, score in fleet.redis.zrange(fleet.keys.workers(node.address), 0, -1, withscores=True)
    )
    assert len(deadlines) == 20
    assert deadlines[-1] - deadlines[0] > 400, "ms between the first and the last renewal"


def test_nobody_left_at_an_address(fleet: Fleet) -> None:
    """All workers of an address die and its node is gone: a worker at another address adopts it and reaps them."""
    here, there = fleet.farm.node("life-1"), fleet.farm.node("life-1")
    a = fleet.worker("a")
    a.join(there.address, [1])
    p = fleet.process("p")
    p.join(here.address, range(20))
    wait_until(lambda: fleet.redis.zscore(fleet.keys.addresses, here.address), PATIENCE_S, "the address is indexed")
    p.kill()
    wait_until(lambda: fleet.listed(here.address) == set(), PATIENCE_S, "adopted and reaped")
    assert fleet.rooms(here.address, p.id) == set()
    assert fleet.rooms(there.address, a.id) == {1}
    assert a.told == []


# -- starved, stopped, wrong clock --------------------------------------------------------------------------------


def test_busy_main_thread_stays_listed(fleet: Fleet) -> None:
    """A worker whose main thread runs pure Python for three leases keeps its lease (33)."""
    node, a = fleet.farm.node("life-1"), fleet.worker("a")
    a.join(node.address, [1])  # somebody who would reap it
    p = fleet.process("p")
    p.join(node.address, range(10))
    p.order("busy", s=3 * fleet.settings.lease_s)
    hold(lambda: p.id in fleet.listed(node.address), 2.9 * fleet.settings.lease_s, "a busy worker is listed")
    assert p.answer() > 0
    assert fleet.events(node.address, "reaped") == []
    assert p.told() == []


def test_stopped_worker_learns_that_its_lease_was_lost(fleet: Fleet) -> None:
    """SIGSTOP for more than a lease: reaped; continued, it fails its rooms and touches nothing of a successor (33)."""
    node, a, freed = fleet.farm.node("life-1"), fleet.worker("a"), Freed()
    fleet.prefill(node.address, instance="life-1", on_orphans=freed)
    a.join(node.address, [500])
    p = fleet.process("decode")
    p.join(node.address, range(40))
    p.pause()
    wait_until(lambda: p.id not in fleet.listed(node.address), PATIENCE_S, "reaped after its lease")
    wait_until(lambda: freed.of(p.id) == list(range(40)), PATIENCE_S, "the node is told")
    successor = fleet.process("decode")  # the same name, another start
    successor.join(node.address, range(40))
    p.resume()
    p.await_told(40)
    told = p.told()
    assert sorted(room for room, *_ in told) == list(range(40))
    assert {cause for _, _, cause, *_ in told} == {"lease_lost"}
    p.do("join", address=node.address, rooms=[77])
    assert p.do("flush")
    assert fleet.rooms(node.address, successor.id) == set(range(40))
    assert successor.told() == []
    assert fleet.rooms(node.address, a.id) == {500}
    assert a.told == []
    back = fleet.listed(node.address) - {a.id, successor.id}
    assert len(back) == 1, "it came back, under an id of a new life"
    (life,) = back
    assert life != p.id
    assert life.startswith(p.id)
    assert fleet.rooms(node.address, life) == {77}


def test_stopped_for_less_than_a_lease(fleet: Fleet) -> None:
    """SIGSTOP for half a lease costs nothing: still listed, nothing failed."""
    node, a = fleet.farm.node("life-1"), fleet.worker("a", settings=fast(lease_s=3.0))
    a.join(node.address, [1])
    p = fleet.process("p", settings=fast(lease_s=3.0))
    p.join(node.address, range(10))
    p.pause()
    hold(lambda: p.id in fleet.listed(node.address), 1.5, "a stopped worker is listed while its lease runs")
    p.resume()
    p.join(node.address, [10])
    assert fleet.rooms(node.address, p.id) == set(range(11))
    assert p.told() == []


@pytest.mark.parametrize("off_s", ["600", "-600"])
def test_clock_of_a_host_is_off(fleet: Fleet, off_s: str) -> None:
    """A worker whose wall clock is ten minutes off reaps and fails nobody, and is neither reaped nor failed (32)."""
    node, a = fleet.farm.node("life-1"), fleet.worker("a")
    a.join(node.address, [1])
    p = fleet.process("p", "--clock-off-s", off_s)
    p.join(node.address, [2])
    hold(
        lambda: fleet.listed(node.address) == {a.id, p.id} and fleet.epoch(node.address) == 1,
        2 * fleet.settings.lease_s, "both are listed, the node lives",
    )  # fmt: skip
    assert a.told == []
    assert p.told() == []
    assert fleet.events(node.address, "reaped") == []


# -- fork, spawn --------------------------------------------------------------------------------------------------


def test_fork_after_use(fleet: Fleet) -> None:
    """The child gets WorkerClosed or a defined answer from each call, may make its own worker, and the parent's
    room, listing and lease are untouched by everything the child did and by its end (58)."""
    node = fleet.farm.node("life-1")
    with script("child_fork.py", fleet, node.address) as process:
        seen = report(process)
        parent = seen["parent"]
        assert seen["child"] == {
            "join": "WorkerClosed", "join_elsewhere": "WorkerClosed", "leave": False, "update": False,
            "room_leave": False, "status": None, "flush": "WorkerClosed", "fail_node": "WorkerClosed",
            "health": "dict", "drain": "WorkerClosed", "close": None, "node_close": None,
            "own_id_differs": True, "own_join": "Room", "own_flush": True,
        }  # fmt: skip
        assert (parent["status"], parent["told"], parent["flush"]) == (1, [], True)
        assert fleet.rooms(node.address, parent["id"]) == {1}
        assert parent["id"] in fleet.listed(node.address)
        assert fleet.events(node.address, "failed") == []
        process.communicate("\n", 20)
        assert process.returncode == 0
    assert fleet.listed(node.address) == set()


def test_spawned_child(fleet: Fleet) -> None:
    """A multiprocessing child by spawn has a worker of its own; the parent's room is untouched (58)."""
    node = fleet.farm.node("life-1")
    with script("child_spawn.py", fleet, node.address) as process:
        seen = report(process)
        process.communicate(timeout=20)
        assert process.returncode == 0
    name, flushed, code = seen["child"]
    assert (flushed, code) == (True, 0)
    assert name != seen["id"]
    assert seen["status"] == 1
    left = {event["worker"] for event in fleet.events(node.address, "left")}
    assert left == {name, seen["id"]}


# -- the end of a process -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["sigterm", "with"])
def test_clean_end_reports_the_rooms(fleet: Fleet, how: str) -> None:
    """SIGTERM with a handler that closes, or the end of `with`: rooms are reported, the address is left (64)."""
    node, freed = fleet.farm.node("life-1"), Freed()
    fleet.prefill(node.address, instance="life-1", on_orphans=freed)
    p = fleet.process("p", "--close-on-sigterm" if how == "sigterm" else "--with-exit")
    p.join(node.address, range(1600))
    started = time.monotonic()
    if how == "sigterm":
        p.send(signal.SIGTERM)
    else:
        assert p.process.stdin is not None
        p.process.stdin.close()
    assert p.process.wait(20) == 0
    took = time.monotonic() - started
    assert took < 5, f"a grace period is seldom longer, and this took {took:.1f} s"
    assert fleet.listed(node.address) == set()
    wait_until(lambda: freed.of(p.id) == list(range(1600)), PATIENCE_S, "the node is told all rooms")
    assert [event["rooms"] for event in fleet.events(node.address, "left")] == ["1600"]
    assert fleet.events(node.address, "reaped") == []


def test_end_with_the_store_away(fleet: Fleet, redis_server: Any) -> None:
    """SIGTERM while the store hangs: the process ends within its grace period all the same (64)."""
    node = fleet.farm.node("life-1")
    p = fleet.process("p", "--close-on-sigterm")
    p.join(node.address, [1])
    redis_server.pause()
    try:
        started = time.monotonic()
        p.send(signal.SIGTERM)
        assert p.process.wait(30) == 0
        assert time.monotonic() - started < 8
    finally:
        redis_server.resume()


# -- what a process costs -----------------------------------------------------------------------------------------


def test_connections_per_process_are_few_and_constant(redis_url: str) -> None:
    """Six processes, then 12 addresses and thousands of rooms in each: the same few connections as before (51)."""
    calm = fast(
        probe_interval_s=5.0, probe_timeout_s=5.0, lease_s=10.0, retention_s=60.0, call_timeout_s=5.0, retry_s=10
    )
    with Fleet(redis_url, settings=calm) as fleet:
        processes = [fleet.process(f"p{n}") for n in range(6)]
        nodes = [fleet.farm.node("life-1").address for _ in range(12)]

        def connections() -> int:
            return len(fleet.redis.client_list()) - 1  # this one is ours

        for process in processes:
            process.join(nodes[0], [1])
        wait_until(lambda: connections() >= 2 * len(processes), PATIENCE_S, "a listener and a writer each")
        for number in range(3):
            for process in processes:
                for node in nodes:
                    process.do("join", address=node, rooms=list(range(100 * number + 10, 100 * number + 60)))
            for process in processes:
                assert process.do("flush", timeout_s=30)
            assert connections() <= 5 * len(processes)
        hold(lambda: connections() <= 5 * len(processes), 3.0, "flat over time")
