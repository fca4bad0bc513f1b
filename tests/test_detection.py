"""Who is dead and who is not: workers with the real HTTP probe (or one that a test scripts) against nodes that
die, hang, restart, warm up, drain or answer nonsense.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median

import pytest
from fakenode import FakeNode
from fleet import PATIENCE_S, Fleet, Watched, fast, hold
from util import wait_until

from coordinator import Cause, JoinRefused, Sight, Status
from coordinator.decide.detector import Evidence


@pytest.fixture
def fleet(redis_url: str) -> Iterator[Fleet]:
    with Fleet(redis_url) as fleet:
        yield fleet


class ScriptedProbe:
    """A probe that sees what `sees(address)` says; everything is fine by default."""

    def __init__(self, sees: Callable[[str], Sight] = lambda address: Sight(Evidence.OK)) -> None:
        self.sees = sees

    async def __call__(self, address: str) -> Sight:
        return self.sees(address)

    async def aclose(self) -> None:
        pass


def await_first_answer(node: FakeNode, *watchers: Watched) -> None:
    """Wait until one of the workers has got a good answer from the node."""
    wait_until(lambda: any(w.knows(node.address) for w in watchers), PATIENCE_S, "a first good probe")


def await_probes(node: FakeNode, more: int) -> None:
    """Wait until the node was asked `more` times from now on."""
    asked = node.asked
    wait_until(lambda: node.asked >= asked + more, PATIENCE_S, f"{more} more probes")


# -- misses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [500, 503])
def test_every_other_probe_missed_is_no_failure(fleet: Fleet, bad: int) -> None:
    """ok, miss, ok, miss ... over twenty probes never fails a node (case 13)."""
    node = fleet.farm.node("life-1", status=lambda n: 200 if n % 2 else bad)
    a = fleet.worker("a", settings=fast(probe_interval_s=0.05))
    a.join(node.address, [1])
    await_probes(node, 20)
    assert a.told == []
    assert fleet.epoch(node.address) == 1
    assert a.worker.health()["counters"]["votes"] == 0


def test_misses_in_a_row_fail_once(fleet: Fleet) -> None:
    """max_misses in a row fail the node exactly once, however often it is missed afterwards (case 13)."""
    settings = fast(max_misses=3, probe_interval_s=0.1)
    node = fleet.farm.node("life-1")
    a = fleet.worker("a", settings=settings)
    a.join(node.address, [1, 2])
    await_first_answer(node, a)
    node.status = 500
    a.await_told(2)
    await_probes(node, 5)
    assert dict(a.told_rooms()) == {1: 1, 2: 1}
    assert len(fleet.events(node.address, "failed")) == 1
    assert fleet.epoch(node.address) == 2


def test_one_miss_fewer_is_no_failure(fleet: Fleet) -> None:
    """max_misses - 1 misses in a row, then an answer: no vote, no failure (case 13)."""
    node = fleet.farm.node("life-1", status=lambda n: 200 if n % 3 == 1 else 500)
    a = fleet.worker("a", settings=fast(max_misses=3, probe_interval_s=0.05))
    a.join(node.address, [1])
    await_probes(node, 21)
    assert a.told == []
    assert a.worker.health()["counters"]["votes"] == 0


@pytest.mark.parametrize("fault", ["stop", "swallow", "reset", "status", "delay"])
def test_each_way_to_be_dead(fleet: Fleet, fault: str) -> None:
    """Refusing, swallowing, resetting, answering 500 and answering too late all fail the node for both workers."""
    node, a, b = fleet.farm.node("life-1"), fleet.worker("a"), fleet.worker("b")
    a.join(node.address, [1])
    b.join(node.address, [2])
    await_first_answer(node, a, b)
    match fault:
        case "stop":
            node.stop()
        case "swallow":
            node.swallow = True
        case "reset":
            node.reset = True
        case "status":
            node.status = 500
        case "delay":
            node.delay_s = 5.0
    a.await_told(1)
    b.await_told(1)
    assert {(f.cause, f.epoch) for w in (a, b) for _, f in w.told} == {(Cause.NODE_FAILED, 1)}
    assert len({f.reason for w in (a, b) for _, f in w.told}) == 1, "all owners read the same reason"


def test_no_http_at_all_is_dead(fleet: Fleet) -> None:
    """Something that accepts and talks another protocol is not a node: the rooms fail."""
    node = fleet.farm.node("life-1")
    a = fleet.worker("a")
    a.join(node.address, [1])
    await_first_answer(node, a)
    node.status = -1  # "HTTP/1.1 -1 Status" is no HTTP
    a.await_told(1)
    assert a.told[0][1].cause is Cause.NODE_FAILED


# -- restarts -----------------------------------------------------------------------------------------------------


def test_restart_on_the_same_port(fleet: Fleet) -> None:
    """Another instance answers at the port: the old rooms fail as restarted, new rooms live (case 14)."""
    node = fleet.node_process("life-1")
    a, b = fleet.worker("a"), fleet.worker("b")
    a.join(node.address, [1, 2])
    b.join(node.address, [1])
    wait_until(lambda: fleet.node(node.address).get("instance") == "life-1", PATIENCE_S, "the first life is known")
    node.start("life-2")
    a.await_told(2)
    b.await_told(1)
    assert {f.cause for w in (a, b) for _, f in w.told} <= {Cause.NODE_RESTARTED, Cause.NODE_FAILED}
    wait_until(lambda: fleet.node(node.address).get("instance") == "life-2", PATIENCE_S, "the second life is known")
    wait_until(lambda: a.state(node.address) == "alive", PATIENCE_S, "it takes rooms")
    (room,) = a.join(node.address, [1])
    hold(lambda: room.status is Status.BOOTSTRAPPING, 4 * fleet.settings.probe_interval_s, "the new room lives")
    assert fleet.rooms(node.address, a.id) == {1}


def test_late_failure_of_an_older_epoch(fleet: Fleet) -> None:
    """A verdict about generation 1 that comes after generation 2 registered changes nothing (case 15)."""
    node, a = fleet.farm.node("life-1"), fleet.worker("a")
    a.join(node.address, [1])
    wait_until(lambda: fleet.node(node.address).get("instance") == "life-1", PATIENCE_S, "the first life is known")
    old = fleet.epoch(node.address)
    node.instance = "life-2"
    a.await_told(1)
    (room,) = a.join(node.address, [2])
    verdict = fleet.fail(node.address, old, "a late verdict")
    assert (verdict.outcome, verdict.node.epoch) == ("STALE", old + 1)
    hold(lambda: room.status is Status.BOOTSTRAPPING, 0.3, "the room of generation 2 lives")
    assert fleet.rooms(node.address, a.id) == {2}
    assert fleet.node(node.address)["state"] == "alive"


@pytest.mark.parametrize("second", ["life-2", "life-1"])
def test_killed_and_started_again(fleet: Fleet, second: str) -> None:
    """A killed node refuses joins with the reason; once something answers there again they are accepted (case 16)."""
    node = fleet.node_process("life-1")
    a, b = fleet.worker("a"), fleet.worker("b")
    a.join(node.address, [1])
    b.join(node.address, [2])
    wait_until(lambda: fleet.node(node.address).get("instance") == "life-1", PATIENCE_S, "the first life is known")
    node.kill()
    a.await_told(1)
    b.await_told(1)
    with pytest.raises(JoinRefused) as refused:
        a.worker.join(node.address, 3)
    assert (refused.value.state, refused.value.address) == ("failed", node.address)
    assert "refused" in refused.value.reason
    node.start(second)
    wait_until(lambda: {a.state(node.address), b.state(node.address)} == {"alive"}, PATIENCE_S, "both take rooms")
    a.join(node.address, [3])
    b.join(node.address, [3])
    assert fleet.rooms(node.address, a.id) == fleet.rooms(node.address, b.id) == {3}


# -- answers that are no death ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 404])
def test_wrong_path_is_misconfigured_not_dead(fleet: Fleet, status: int, caplog: pytest.LogCaptureFixture) -> None:
    """401 and 404 are reported, once, as a wrong health path; nothing fails (case 17)."""
    node = fleet.farm.node(status=status)
    a = fleet.worker("a", settings=fast(probe_interval_s=0.05))
    a.join(node.address, [1])
    await_probes(node, 8)
    assert a.told == []
    assert a.worker.health()["counters"]["misconfigured"] >= 5
    lines = [r.getMessage() for r in caplog.records if "health_misconfigured" in r.getMessage()]
    assert len(lines) == 1
    assert f"HTTP {status}" in lines[0]
    assert "COORDINATOR_HEALTH_PATH" in lines[0]


def test_503_before_the_first_success_is_warming(fleet: Fleet) -> None:
    """A node that answers 503 from its start is not failed; after one success 503 counts as a miss (case 17)."""
    node = fleet.farm.node("life-1", status=503)
    a = fleet.worker("a", settings=fast(probe_interval_s=0.05))
    a.join(node.address, [1])
    await_probes(node, 8)
    assert a.told == []
    node.status = 200
    await_first_answer(node, a)
    node.status = 503
    a.await_told(1)
    assert a.told[0][1].cause is Cause.NODE_FAILED


def test_proxies_of_the_environment_are_not_used(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With HTTP_PROXY and its kin set, probes go straight to the node and the proxy is never asked (case 21)."""
    with Fleet(redis_url) as fleet:
        proxy, node = fleet.farm.node(status=502), fleet.farm.node("life-1")
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://{proxy.address}")
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        a = fleet.worker("a")
        a.join(node.address, [1])
        await_first_answer(node, a)
        await_probes(node, 3)
        assert proxy.asked == 0
        assert a.told == []


# -- many nodes ---------------------------------------------------------------------------------------------------


def test_200_nodes_20_of_them_hang_and_one_dies(fleet: Fleet) -> None:
    """Twenty hung nodes do not delay the detection of another one that is killed (case 18)."""
    settings = fast(probe_interval_s=1.0, probe_timeout_s=2.0, tick_s=0.5, lease_s=10.0, retention_s=60.0, max_misses=2)
    nodes = [fleet.farm.node("life-1") for _ in range(200)]
    a = fleet.worker("a", settings=settings)
    for node in nodes:
        a.worker.join(node.address, 1)
    a.flush()
    wait_until(lambda: all(a.knows(node.address) for node in nodes), 60, "every node answered once")
    victim = nodes[100]
    for node in nodes[:20]:
        node.swallow = True
    wait_until(lambda: sum(node.asked for node in nodes[:20]) >= 20, PATIENCE_S, "probes hang")
    started = time.monotonic()
    victim.stop()
    wait_until(lambda: any(f.address == victim.address for _, f in a.told), 60, "the killed node is found")
    took = time.monotonic() - started
    bound = settings.probe_interval_s * settings.max_misses + settings.probe_timeout_s
    assert took < bound + 1.0, f"found after {took:.2f} s"  # one second for a busy machine
    dead = {node.address for node in (*nodes[:20], victim)}
    assert {f.address for _, f in a.told} <= dead, "no node that answers was failed"


def test_join_to_an_address_that_cannot_be_reached(fleet: Fleet) -> None:
    """join does not wait for the network: it returns at once, the failure comes later, by callback (case 19)."""
    gone, hung = fleet.farm.node(), fleet.farm.node(swallow=True)
    gone.stop()
    a = fleet.worker("a")
    times = []
    for address in (gone.address, hung.address):
        for room in range(5):
            started = time.perf_counter()
            a.worker.join(address, room)
            times.append(time.perf_counter() - started)
    assert median(times) < 0.001
    a.await_told(10)
    assert dict(a.told_rooms()) == dict.fromkeys(range(5), 2)


def test_every_node_dead(fleet: Fleet) -> None:
    """With all its nodes dead a worker says degraded and why, and its loops beat on (case 20)."""
    nodes = [fleet.farm.node("life-1") for _ in range(4)]
    a, b = fleet.worker("a"), fleet.worker("b")
    for watched in (a, b):
        for node in nodes:
            watched.join(node.address, [1])
    wait_until(lambda: all(a.knows(n.address) or b.knows(n.address) for n in nodes), PATIENCE_S, "first answers")
    for node in nodes:
        node.stop()
    a.await_told(4)
    b.await_told(4)
    health = a.worker.health()
    assert health["status"] == "degraded"
    assert len(health["problems"]) == 4
    assert health["store"]["reachable"] is True
    counted = a.worker.health()["counters"]["syncs"]
    wait_until(lambda: a.worker.health()["counters"]["syncs"] > counted + 3, PATIENCE_S, "syncs go on")
    assert a.worker.health()["restarts"] == {"sync": 0, "heartbeat": 0, "push": 0, "janitor": 0}


def test_an_address_that_begins_like_another(fleet: Fleet) -> None:
    """Failing 10.0.0.1:80 touches nothing at 10.0.0.1:8000, and the other way round (case 22)."""
    short, long = "10.0.0.1:80", "10.0.0.1:8000"
    a, b = (fleet.worker(name, probe=ScriptedProbe()) for name in "ab")
    for watched in (a, b):
        watched.join(short, [1, 2])
        watched.join(long, [1, 2])
    a.worker.fail_node(short, "test")
    a.await_told(2)
    b.await_told(2)
    assert {f.address for w in (a, b) for _, f in w.told} == {short}
    assert fleet.rooms(long, a.id) == fleet.rooms(long, b.id) == {1, 2}
    assert (fleet.epoch(short), fleet.epoch(long)) == (2, 1)
    a.worker.fail_node(long, "test")
    b.await_told(4)
    assert fleet.epoch(short) == 2


def test_a_worker_whose_own_network_is_gone(fleet: Fleet) -> None:
    """One of three workers sees nothing any more: it fails its own rooms only, nobody else's (case 23)."""
    nodes = [f"10.0.0.{n}:8998" for n in range(1, 7)]
    sick = ScriptedProbe()
    a = fleet.worker("a", probe=sick)
    others = [fleet.worker(name, probe=ScriptedProbe()) for name in "bc"]
    for node in nodes:
        for watched in (a, *others):
            watched.join(node, [1])
    wait_until(lambda: all(a.knows(node) for node in nodes), PATIENCE_S, "it saw every node once")
    sick.sees = lambda address: Sight(Evidence.UNREACHABLE, detail="no route to host")
    a.await_told(6)
    assert {f.cause for _, f in a.told} == {Cause.UNREACHABLE}
    with pytest.raises(JoinRefused, match="unreachable"):
        a.worker.join(nodes[0], 2)
    assert [watched.told for watched in others] == [[], []]
    for node in nodes:
        assert fleet.epoch(node) == 1
        assert fleet.events(node, "failed") == []
        assert [fleet.rooms(node, watched.id) for watched in others] == [{1}, {1}]
    sick.sees = lambda address: Sight(Evidence.OK)
    wait_until(lambda: {a.state(node) for node in nodes} == {"alive"}, PATIENCE_S, "it takes rooms again")
    a.join(nodes[0], [2])


# -- own lateness, drain, evidence from transfers -----------------------------------------------------------------


def test_what_a_stopped_worker_missed_is_not_the_nodes_miss(fleet: Fleet) -> None:
    """SIGSTOP for longer than a probe's time-out with a probe on its way: dropped as late, no miss (case 24)."""
    settings = fast(
        max_misses=1, probe_interval_s=0.2, probe_timeout_s=1.5, lease_s=30.0, retention_s=120.0, call_timeout_s=5.0,
        retry_s=10.0,
    )  # fmt: skip
    node = fleet.farm.node("life-1", delay_s=0.4)  # so that a probe is on its way most of the time
    p = fleet.process("p", settings=settings)
    p.join(node.address, [1])
    wait_until(lambda: node.asked >= 3, PATIENCE_S, "probes")

    def dropped_one() -> bool:
        p.pause()
        time.sleep(2.0)
        p.resume()
        asked = node.asked
        wait_until(lambda: node.asked >= asked + 2, PATIENCE_S, "it probes again")
        return bool(p.do("health")["counters"]["late_dropped"])

    wait_until(dropped_one, 60, "a probe on its way during the stop")
    assert p.told() == []
    assert fleet.epoch(node.address) == 1
    assert p.do("health")["counters"]["votes"] == 0


def test_draining_node(fleet: Fleet) -> None:
    """drain: new joins are refused as draining, open rooms finish; undrain: joins are accepted (case 25)."""
    node, a = fleet.farm.node("life-1"), fleet.worker("a")
    prefill = fleet.prefill(node.address, instance="life-1")
    (room,) = a.join(node.address, [1])
    prefill.drain()
    wait_until(lambda: a.state(node.address) == "draining", PATIENCE_S, "the worker knows")
    with pytest.raises(JoinRefused) as refused:
        a.worker.join(node.address, 2)
    assert refused.value.state == "draining"
    assert room.update(Status.TRANSFERRING)
    assert room.update(Status.SUCCESS)
    a.flush()
    assert fleet.rooms(node.address, a.id) == set()
    prefill.undrain()
    wait_until(lambda: a.state(node.address) == "alive", PATIENCE_S, "the worker knows")
    a.join(node.address, [2])
    assert a.told == []


def test_transfer_error_makes_a_probe_at_once(fleet: Fleet) -> None:
    """A reported transfer error is evidence: a dead node is found long before the next interval; a live one lives."""
    slow = fast(probe_interval_s=30.0, lease_s=5.0)
    dead, alive = fleet.farm.node("life-1"), fleet.farm.node("life-1")
    a = fleet.worker("a", settings=slow)
    a.join(dead.address, [1])
    (kept,) = a.join(alive.address, [1])
    await_first_answer(dead, a)
    await_first_answer(alive, a)
    dead.stop()
    for _ in range(50):  # errors come in floods
        a.worker.report_transfer_error(dead.address, "connection reset")
        a.worker.report_transfer_error(alive.address, "connection reset")
    a.await_told(1, 15)
    assert a.told[0][1].address == dead.address
    assert kept.status is Status.BOOTSTRAPPING
    assert alive.asked < 10, "a flood of errors is not a flood of probes"


def test_one_probe_an_interval_by_all_workers_together(fleet: Fleet) -> None:
    """Six workers watch one node: it is asked once per interval, not six times."""
    settings = fast(probe_interval_s=0.4)
    node = fleet.farm.node("life-1")
    workers = [fleet.worker(f"w{n}", settings=settings) for n in range(6)]
    for watched in workers:
        watched.join(node.address, [1])
    wait_until(lambda: all(w.knows(node.address) for w in workers), PATIENCE_S, "each had a turn")
    asked, started = node.asked, time.monotonic()
    wait_until(lambda: node.asked >= asked + 20, 60, "20 more probes")
    intervals = (time.monotonic() - started) / settings.probe_interval_s
    counters = [w.worker.health()["counters"] for w in workers]
    again = sum(c["late_dropped"] + c["misses"] for c in counters)  # looked at once more, on a busy machine
    assert intervals + 2 + again >= 20


def test_two_of_five_workers_lose_their_network(fleet: Fleet) -> None:
    """Two workers, enough to fail one node, lose sight of all six at once: they doubt themselves, and no node fails."""
    nodes = [f"10.0.0.{n}:8998" for n in range(1, 7)]
    sick = ScriptedProbe()
    pair = [fleet.worker(name, probe=sick) for name in "ab"]
    others = [fleet.worker(name, probe=ScriptedProbe()) for name in "cde"]
    for node in nodes:
        for watched in (*pair, *others):
            watched.join(node, [1])
    wait_until(lambda: all(w.knows(node) for node in nodes for w in pair), PATIENCE_S, "they saw every node once")
    sick.sees = lambda address: Sight(Evidence.TIMEOUT)
    for watched in pair:
        watched.await_told(6)
    assert {f.cause for w in pair for _, f in w.told} == {Cause.UNREACHABLE}
    assert [watched.told for watched in others] == [[], [], []]
    assert [fleet.epoch(node) for node in nodes] == [1] * 6
