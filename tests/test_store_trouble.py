"""The store goes away, comes back empty, cuts, lies or says nothing: workers live on and everything converges."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis.exceptions as rex
from chaos import Chaos
from faulty import Faulty, Plan
from fleet import HERE, PATIENCE_S, Fleet, Watched, fast, hold
from servers import Server
from util import wait_until

from coordinator import Cause, Settings, Status
from coordinator.store.connect import async_client
from coordinator.store.embedded import owned_command


@pytest.fixture
def fleet(redis_url: str) -> Iterator[Fleet]:
    with Fleet(redis_url) as fleet:
        yield fleet


@pytest.fixture
def net(redis_server: Server) -> Iterator[Chaos]:
    """A proxy in front of the one real server."""
    with Chaos(redis_server.port) as net:
        yield net


def restarts(watched: Watched) -> int:
    """How often the loops that matter were started again."""
    counted = watched.worker.health()["restarts"]
    return int(sum(n for name, n in counted.items() if name != "push"))


# -- away ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "away_s"), [("kill", 5.0), ("kill", 1.0), ("pause", 5.0)])
def test_store_away_for_longer_than_a_lease(fleet: Fleet, redis_server: Server, how: str, away_s: float) -> None:
    """Killed or frozen for several leases: no process dies, a node that dies meanwhile is found by each worker for
    itself, rooms come and go in memory, and afterwards the store holds what the workers hold (39)."""
    alive, doomed = fleet.farm.node("life-1"), fleet.farm.node("life-1")
    a, p = fleet.worker("a"), fleet.process("p")
    a.join(alive.address, range(100))
    a.join(doomed.address, range(10))
    p.join(alive.address, range(100))
    p.join(doomed.address, range(20))
    wait_until(lambda: a.knows(doomed.address) and a.knows(alive.address), PATIENCE_S, "first good probes")
    wait_until(lambda: not p.do("health")["problems"], PATIENCE_S, "p is well")
    began = time.monotonic()
    redis_server.kill() if how == "kill" else redis_server.pause()
    wait_until(lambda: a.worker.health()["store"]["reachable"] is False, PATIENCE_S, "the worker notices")
    for room in range(50):
        assert a.worker.leave(alive.address, room)
        a.worker.join(alive.address, 1000 + room)
    doomed.stop()
    a.await_told(10)
    p.await_told(20)
    assert {f.cause for _, f in a.told} == {Cause.UNREACHABLE}
    assert {cause for _, _, cause, *_ in p.told()} == {"unreachable"}
    time.sleep(max(0.0, began + away_s - time.monotonic()))
    assert p.process.poll() is None
    redis_server.start() if how == "kill" else redis_server.resume()
    mine = set(range(50, 100)) | set(range(1000, 1050))
    wait_until(lambda: fleet.rooms(alive.address, a.id) == mine, PATIENCE_S, "a's rooms are in the store")
    wait_until(lambda: fleet.rooms(alive.address, p.id) == set(range(100)), PATIENCE_S, "p's rooms too")
    wait_until(lambda: not fleet.rooms(doomed.address, a.id), PATIENCE_S, "failed rooms are gone")
    wait_until(lambda: not fleet.rooms(doomed.address, p.id), PATIENCE_S, "failed rooms are gone")
    assert fleet.epoch(alive.address) == 1
    assert fleet.events(alive.address, "reaped") == []
    assert {f.address for _, f in a.told} == {doomed.address}
    assert {address for _, address, *_ in p.told()} == {doomed.address}
    assert dict(a.told_rooms()) == dict.fromkeys(range(10), 1)
    assert restarts(a) == 0


def test_client_pause_longer_than_two_leases(fleet: Fleet) -> None:
    """CLIENT PAUSE for 2.5 leases: no node fails, no worker is reaped, no room is told (40)."""
    settings = fast(lease_s=1.2)
    node = fleet.farm.node("life-1")
    a, b = fleet.worker("a", settings=settings), fleet.worker("b", settings=settings)
    p = fleet.process("p", settings=settings)
    for watched in (a, b, p):
        watched.join(node.address, range(50))
    fleet.redis.execute_command("CLIENT", "PAUSE", 3000, "ALL")
    wait_until(lambda: not a.worker.health()["store"]["reachable"], PATIENCE_S, "the pause is felt")
    a.worker.join(node.address, 1000)
    wait_until(lambda: fleet.rooms(node.address, a.id) == {*range(50), 1000}, PATIENCE_S, "and over")
    hold(
        lambda: fleet.listed(node.address) == {a.id, b.id, p.id} and fleet.epoch(node.address) == 1,
        1.5 * settings.lease_s, "all are listed, the node lives",
    )  # fmt: skip
    assert fleet.events(node.address, "reaped") == fleet.events(node.address, "failed") == []
    assert a.told == b.told == []
    assert p.told() == []


@pytest.mark.parametrize("how", ["flushall", "restart"])
def test_the_store_forgets_everything(fleet: Fleet, redis_server: Server, how: str) -> None:
    """FLUSHALL, and a restart without persistence, with three live workers: the rooms are back in two ticks (44)."""
    settings = fast(tick_s=1.0, lease_s=10.0, retention_s=60.0)
    nodes = [fleet.farm.node("life-1") for _ in range(2)]
    workers = [fleet.worker(name, settings=settings) for name in "abc"]
    for node in nodes:
        for watched in workers:
            watched.join(node.address, range(300))
    if how == "flushall":
        fleet.redis.flushall()
    else:
        redis_server.restart()
    started = time.monotonic()
    for node in nodes:
        for watched in workers:
            name = watched.id
            wait_until(lambda a=node.address, w=name: len(fleet.rooms(a, w)) == 300, PATIENCE_S, "rooms are back")  # type: ignore[misc]
    took = time.monotonic() - started
    assert took < 2 * settings.tick_s + 1.5, f"two ticks and some slack, not {took:.1f} s"
    for node in nodes:
        assert fleet.listed(node.address) == {watched.id for watched in workers}
        assert fleet.node(node.address)["state"] == "alive"
    assert [watched.told for watched in workers] == [[], [], []]


def test_a_verdict_survives_the_loss_of_the_store(fleet: Fleet) -> None:
    """The node failed, then FLUSHALL: whoever knew the verdict carries it back, epoch and reason included."""
    node = fleet.farm.node("life-1")
    a, b = fleet.worker("a"), fleet.worker("b")
    a.join(node.address, [1])
    b.join(node.address, [2])
    node.stop()
    a.worker.fail_node(node.address, "operator")
    b.await_told(1)
    fleet.redis.flushall()
    wait_until(lambda: fleet.node(node.address).get("state") == "failed", PATIENCE_S, "the verdict is back")
    assert (fleet.epoch(node.address), fleet.node(node.address)["reason"]) == (2, "operator")
    assert dict(a.told_rooms()) == {1: 1}
    assert dict(b.told_rooms()) == {2: 1}


# -- silence ------------------------------------------------------------------------------------------------------


def test_half_open_subscription(fleet: Fleet, net: Chaos) -> None:
    """A subscription that stays open and hears nothing: failures are still learned, by polling (46)."""
    node, a = fleet.farm.node("life-1"), fleet.worker("a", url=net.url)
    wait_until(lambda: a.worker.health()["store"]["push_connected"], PATIENCE_S, "subscribed")
    a.join(node.address, [1])
    net.mute(b"SUBSCRIBE")
    pushed = a.worker.health()["counters"]["push_messages"]
    fleet.worker("b").join(node.address, [2])
    fleet.fail(node.address)
    a.await_told(1)
    assert a.told[0][1].cause is Cause.NODE_FAILED
    assert a.worker.health()["counters"]["push_messages"] == pushed, "it was not told by push"


def test_killed_between_snapshot_and_notification(fleet: Fleet, net: Chaos) -> None:
    """Who failed the node is SIGKILLed right after the script, and no push gets through: the owners learn (38)."""
    node = fleet.farm.node("life-1")
    a, b = fleet.worker("a", url=net.url), fleet.worker("b", url=net.url)
    for watched in (a, b):
        watched.join(node.address, range(10))
    net.mute(b"SUBSCRIBE")
    argv = [sys.executable, str(HERE / "child_failer.py"), fleet.url, node.address, fleet.settings.namespace]
    done = subprocess.run(
        owned_command(argv), capture_output=True, text=True, env={"PYTHONPATH": str(HERE.parent)}, check=False
    )
    assert (done.returncode, done.stdout) == (-9, "FAILED"), done.stderr
    for watched in (a, b):
        watched.await_told(10)
        assert dict(watched.told_rooms()) == dict.fromkeys(range(10), 1)
        assert {f.reason for _, f in watched.told} == {"killed right after"}


@pytest.mark.parametrize("script", ["sync", "fail_node"])
def test_a_lost_reply_of_a_worker(fleet: Fleet, net: Chaos, script: str) -> None:
    """The reply is cut after the server has executed the script; it is repeated, nothing is lost or doubled."""
    node = fleet.farm.node("life-1")
    a, b = fleet.worker("a", url=net.url), fleet.worker("b")
    a.join(node.address, range(10))
    b.join(node.address, range(10))
    if script == "sync":
        cut = net.cut_reply(b"1234567")
        a.worker.join(node.address, 1234567)
        a.flush()
        assert cut.is_set()
        assert fleet.rooms(node.address, a.id) == {*range(10), 1234567}
    else:
        cut = net.cut_reply(b"the reply is lost")
        failure = a.worker.fail_node(node.address, "the reply is lost")
        assert cut.is_set()
        assert (failure.already, failure.counts) == (False, {a.id: 10, b.id: 10})
        for watched in (a, b):
            watched.await_told(10)
            assert dict(watched.told_rooms()) == dict.fromkeys(range(10), 1)
        assert fleet.epoch(node.address) == 2


def test_slow_store(fleet: Fleet, net: Chaos) -> None:
    """Every answer takes a fifth of a second: rooms arrive, verdicts arrive, nobody is reaped."""
    net.delay_s = 0.1  # each way
    node = fleet.farm.node("life-1")
    a, b = fleet.worker("a", url=net.url), fleet.worker("b", url=net.url)
    for watched in (a, b):
        watched.join(node.address, range(10))
    hold(lambda: fleet.listed(node.address) == {a.id, b.id}, fleet.settings.lease_s, "both are listed")
    assert a.worker.fail_node(node.address).counts == {a.id: 10, b.id: 10}
    b.await_told(10)
    assert restarts(a) == restarts(b) == 0


# -- an error at every call ---------------------------------------------------------------------------------------

ERRORS: dict[str, Callable[[], BaseException]] = {
    "cut": lambda: rex.ConnectionError("injected"),
    "timeout": lambda: rex.TimeoutError("injected"),
    "busy": lambda: rex.ResponseError("BUSY injected"),
    "refused": lambda: rex.NoPermissionError("injected"),
    "unheard of": lambda: RuntimeError("injected"),
}


def faulty_client(url: str, settings: Settings, plan: Plan) -> Callable[[], Any]:
    return lambda: Faulty(async_client(url, settings), plan)


@pytest.mark.parametrize("late", [False, True], ids=["not sent", "reply lost"])
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_at_every_single_store_call(redis_url: str, kind: str, late: bool) -> None:
    """For k = 1 to 12: the k-th call of a worker fails, while it joins, leaves, is failed and goes on. Each time
    everything converges: rooms exact, each failure told once, snapshots acknowledged, beats fresh (48)."""
    for k in range(1, 13):
        plan = Plan(lambda n, k=k: ERRORS[kind]() if n == k else None, late)  # type: ignore[misc]
        with Fleet(redis_url, settings=fast(namespace=f"k{k}")) as fleet:
            node, b = fleet.farm.node("life-1"), fleet.worker("b")
            b.join(node.address, [1])
            a = fleet.worker("a", client=faulty_client(redis_url, fleet.settings, plan))
            a.join(node.address, range(10))
            a.worker.leave(node.address, 0)
            a.worker.update(node.address, 1, Status.SUCCESS)
            a.flush()
            assert fleet.rooms(node.address, a.id) == set(range(2, 10)), f"k={k}"
            fleet.fail(node.address)
            a.await_told(8)
            b.await_told(1)
            assert dict(a.told_rooms()) == dict.fromkeys(range(2, 10), 1), f"k={k}"
            wait_until(lambda: a.state(node.address) == "alive", PATIENCE_S, f"k={k}: it answers, so it is revived")  # noqa: B023
            a.join(node.address, [100])
            assert fleet.rooms(node.address, a.id) == {100}, f"k={k}"
            pending = fleet.keys.pending(node.address)
            wait_until(lambda: not fleet.redis.exists(pending), PATIENCE_S, f"k={k}: acknowledged")  # noqa: B023
            wait_until(lambda: plan.calls >= k, PATIENCE_S, f"the call {k}")  # noqa: B023
            assert plan.faults == 1
            ages = a.worker.health()["beats_s_ago"]
            assert max(ages.values()) < 5, f"k={k}: {ages}"


def test_every_third_call_fails(fleet: Fleet) -> None:
    """Of all the calls of a worker every third fails, in turn in every way: rooms and failures still arrive (48)."""
    kinds = list(ERRORS.values())
    plan = Plan(lambda n: kinds[n % len(kinds)]() if n % 3 == 0 else None)
    node, b = fleet.farm.node("life-1"), fleet.worker("b")
    b.join(node.address, [1])
    a = fleet.worker("a", client=faulty_client(fleet.url, fleet.settings, plan))
    for start in range(0, 500, 50):
        a.join(node.address, range(start, start + 50))
    assert fleet.rooms(node.address, a.id) == set(range(500))
    fleet.fail(node.address)
    a.await_told(500)
    assert dict(a.told_rooms()) == dict.fromkeys(range(500), 1)
    assert plan.faults > 5
    assert fleet.epoch(node.address) == 2
