"""How often a node is probed: one interval apart by all workers together, however many they are, how often they come
by, and when. A model of the store's turns with real detectors, that model against the script, and real workers.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from fleet import PATIENCE_S, Fleet, Watched, fast
from hypothesis import given, settings
from hypothesis import strategies as st
from scriptlab import A, Lab, N
from servers import FakeLane, Server
from util import wait_until

from coordinator.config import Settings
from coordinator.decide.detector import OWN_ROUNDS, Act, Detector, Evidence
from coordinator.protocol import Batch, NodeView
from coordinator.store.ops import Ops

START_S = 1000.0


def turns(last: int, now: int, claim: int, tick: int, interval: int, lease: int) -> tuple[int, int]:
    """What sync grants: how many turns, and when the first is; all in ms. `last` is the last turn granted before."""
    turn = max(now, last + interval if last <= now + lease else 0)
    if claim == 0 or turn > now + claim * tick:
        return 0, 0
    return 1 + max(0, (now + tick - turn) // interval), turn


@dataclass
class Crowd:
    """N workers at one node. Time is a number; `reach(worker, at_s)` says whether that worker's probe is answered."""

    s: Settings
    n: int
    rng: random.Random
    busy: Sequence[int] = ()  # these sync every few ms
    cut: int | None = None  # this one cannot reach the node, from `cut_s` on
    cut_s: float = 0.0
    stopped: int | None = None  # this one stands still from its next turn on, for `stop_s`
    stop_s: float = 0.0
    last: int = 0
    probes: list[tuple[float, int]] = field(default_factory=list)
    acts: list[tuple[float, int, Act]] = field(default_factory=list)

    def run(self, seconds: float) -> Crowd:
        """Let the time pass. The first sync of each worker comes at once, in random order."""
        self.detectors = [Detector(self.s) for _ in range(self.n)]
        stands_until = [0.0] * self.n
        heap = [(START_S + self.rng.uniform(0, 0.01), k, True) for k in range(self.n)]
        heapq.heapify(heap)
        while heap and heap[0][0] < START_S + seconds:
            now, k, syncs = heapq.heappop(heap)
            if now < stands_until[k]:
                heapq.heappush(heap, (stands_until[k], k, syncs))
                continue
            if syncs:
                if self._sync(k, now) and k == self.stopped and now > START_S + seconds / 2 and not stands_until[k]:
                    stands_until[k] = now + self.stop_s
                pace = self.s.flush_s if k in self.busy else self.s.tick_s
                heapq.heappush(heap, (now + pace * self.rng.uniform(0.9, 1.0), k, True))
            if now >= stands_until[k]:
                self._look(k, now)
            due_s = self.detectors[k].next_due_s(False)
            if due_s is not None and due_s < now + self.s.tick_s:  # it comes around for each sync anyhow
                heapq.heappush(heap, (max(due_s, now), k, False))
        self.probes = [(at - START_S, k) for at, k in self.probes]
        self.acts = [(at - START_S, k, act) for at, k, act in self.acts]
        return self

    def _sync(self, k: int, now: float) -> bool:
        ms, s, detector = round(now * 1000), self.s, self.detectors[k]
        detector.watch(N).watchers = self.n
        interval = round(s.probe_interval_s * 1000)
        claim = detector.claim(N, now)
        count, at = turns(self.last, ms, claim, round(s.tick_s * 1000), interval, round(s.lease_s * 1000))
        if count:
            self.last = at + (count - 1) * interval
            detector.turn(N, max(now, at / 1000), count)
        return bool(count)

    def _look(self, k: int, now: float) -> None:
        """What the heartbeat does when it comes around."""
        detector = self.detectors[k]
        for _ in detector.due(now, False):
            self.probes.append((now, k))
            silent = k == self.cut and now - START_S >= self.cut_s
            act = detector.observe(N, Evidence.UNREACHABLE if silent else Evidence.OK, now)
            self.acts.append((now, k, act))

    def gaps(self) -> list[float]:
        """Between a probe of the node and the next one, by whomever."""
        return [b - a for (a, _), (b, _) in pairwise(self.probes)]

    def waits(self) -> list[float]:
        """The longest time each worker was without a probe of its own after the first second."""
        waits = []
        for k in range(self.n):
            times = [at for at, who in self.probes if who == k]
            waits.append(max(b - a for a, b in zip([0.0, *times], times, strict=False)))
        return waits


NUMBERS = [1, 2, 3, 5, 8, 16, 33, 64]


@pytest.mark.parametrize("n", NUMBERS)
def test_the_rate_does_not_depend_on_the_number_of_workers(n: int) -> None:
    """Random phases, 100 intervals and three rounds: one probe per interval, never two within one, none missing; and
    each worker has its turn every n intervals, so that none has to look for itself."""
    intervals = 100 + 3 * n
    crowd = Crowd(Settings(), n, random.Random(n)).run(intervals)
    assert intervals - 1 <= len(crowd.probes) <= intervals + 1
    assert min(crowd.gaps()) >= 0.95
    assert max(crowd.gaps()) <= 1.05
    assert max(crowd.waits()) <= n + 1


@given(
    n=st.integers(1, 20),
    tick_s=st.sampled_from([0.05, 0.1, 0.3, 0.5, 0.7, 1.0]),
    interval_s=st.sampled_from([0.2, 0.5, 1.0, 3.0]),
    busy=st.integers(0, 4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_whatever_the_pace(n: int, tick_s: float, interval_s: float, busy: int, seed: int) -> None:
    """Ticks longer than an interval, workers that sync every few ms among idle ones: the rate and the longest gap are
    the same, and nobody waits for three rounds."""
    s = Settings(tick_s=tick_s, probe_interval_s=interval_s, flush_s=0.03)
    intervals = 20 + 3 * n
    crowd = Crowd(s, n, random.Random(seed), range(min(n, busy))).run(intervals * interval_s)
    assert len(crowd.probes) <= intervals + 1
    assert max(crowd.gaps()) <= 1.02 * interval_s + 0.025
    assert max(crowd.waits()) <= OWN_ROUNDS * n * max(interval_s, tick_s)


@pytest.mark.parametrize("n", [2, 3, 8, 33])
def test_a_stopped_worker_costs_one_interval(n: int) -> None:
    """It stands still with a turn that is its own, for longer than its lease: the next turn is another's."""
    crowd = Crowd(Settings(), n, random.Random(n), stopped=1, stop_s=20.0).run(60 + 6 * n)
    assert 1.9 <= max(crowd.gaps()) <= 2.05
    assert sum(gap > 1.1 for gap in crowd.gaps()) == 1
    assert len(crowd.probes) <= 60 + 6 * n + 1


@pytest.mark.parametrize("n", [1, 2, 3, 8, 33, 64])
def test_who_alone_cannot_reach_a_node_finds_out_in_its_turn(n: int) -> None:
    """Nobody tells it and no transfer breaks: its first miss comes within a round and an interval, its vote within the
    next two; from then on it looks every interval without a turn, and the others' turns are as close as ever."""
    crowd = Crowd(Settings(), n, random.Random(n), cut=0, cut_s=3.0 + n).run(3.0 + 4 * n + 10)
    votes = [at for at, who, act in crowd.acts if act is Act.VOTE and who == 0]
    assert 3.0 + n < votes[0] <= 3.0 + n + (n + 1) + 2
    good = [at for at, who in crowd.probes if who != 0]
    if n > 1:
        gaps = [b - a for a, b in pairwise(good)]
        assert max(gap for gap, at in zip(gaps, good, strict=False) if at > votes[0] + 1) <= 1.05
        assert max(gaps) <= 3.05


def test_without_any_turn_it_finds_out_after_three_rounds() -> None:
    """The store grants it none, for whatever reason: it looks for itself."""
    d = Detector(Settings())
    d.watch(N).watchers = 8
    d.due(0.0, False)
    times = [at / 100 for at in range(10_000) if d.due(at / 100, False) and d.observe(N, Evidence.OK, at / 100)]
    assert times == [24.0, 48.0, 72.0, 96.0]


# -- the script --------------------------------------------------------------------------------------------------------


@pytest.fixture
def lab(store_server: FakeLane | Server) -> Iterator[Lab]:
    with store_server.sync_client() as client:
        yield Lab(client, declared=store_server.kind == "strict")


def _granted(lab: Lab, last_ms: int | None, claim: int, tick_ms: int, interval_ms: int) -> tuple[int, int, int]:
    """Turns, ms until the first, and ms until the last turn that the store then knows; `last_ms` counts from now."""
    lab.client.flushdb()
    lab.open(A, (1,))
    seconds, micros = lab.client.time()
    now = seconds * 1000 + micros // 1000
    if last_ms is None:
        lab.client.hdel(lab.keys.node(N), "probe_ms")
    else:
        lab.client.hset(lab.keys.node(N), "probe_ms", now + last_ms)
    ops = Ops(Settings(tick_s=tick_ms / 1000, probe_interval_s=interval_ms / 1000, lease_s=5.0))
    reply = lab.run(ops.sync(Batch(N, A, 2, "delta", NodeView(1), 1, claim=claim)))
    return reply.turns, reply.turn_ms, int(lab.client.hget(lab.keys.node(N), "probe_ms") or 0) - now


ROWS = [
    # last turn granted (ms from now, None: never), claim, tick, interval; turns, ms until the first
    (None, 1, 500, 1000, 1, 0),
    (None, 2, 500, 1000, 1, 0),
    (None, 0, 500, 1000, 0, 0),
    (-5000, 1, 500, 1000, 1, 0),
    (-1000, 1, 500, 1000, 1, 0),
    (-700, 1, 500, 1000, 1, 300),
    (-300, 1, 500, 1000, 0, 0),
    (-300, 2, 500, 1000, 1, 700),
    (-300, 0, 500, 1000, 0, 0),
    (200, 2, 500, 1000, 0, 0),
    # It comes by less often than the interval: all turns until it comes again, and one if that is farther ahead.
    (-5000, 1, 500, 200, 3, 0),
    (-50, 1, 500, 200, 2, 150),
    (150, 1, 500, 200, 1, 350),
    (450, 2, 500, 200, 1, 650),
    (450, 1, 500, 200, 0, 0),
    # The server's clock stepped back: by less than a lease nobody has a turn for so long, by more it starts anew.
    (4000, 2, 500, 1000, 0, 0),
    (3_600_000, 1, 500, 1000, 1, 0),
]


@pytest.mark.parametrize("row", ROWS)
def test_the_script_grants_what_the_model_grants(lab: Lab, row: tuple[int | None, int, int, int, int, int]) -> None:
    """Each row, on each kind of server: how many turns, and when; the store knows the last of them."""
    last, claim, tick, interval, count, first = row
    now = 1_000_000_000
    assert turns(0 if last is None else now + last, now, claim, tick, interval, 5000) == (
        (count, now + first) if count else (0, 0)
    )
    found, in_ms, stored = _granted(lab, last, claim, tick, interval)
    assert found == count
    assert in_ms == pytest.approx(first, abs=40)  # the server's clock goes on between the two calls
    if count:
        assert stored == pytest.approx(first + (count - 1) * interval, abs=40)


def test_a_repeated_batch_has_the_same_turn(lab: Lab) -> None:
    """Not another one, at the same time of the server's clock, also when that is past."""
    op = lab.batch(A, 1, (1,), mode="reset")
    first = lab.run(op)
    record = lab.client.hmget(lab.keys.worker(N, A), ["turns", "turn_ms"])
    assert (first.turns, first.turn_ms) == (1, 0)
    time.sleep(0.05)
    again = lab.run(op)
    assert again.turns == 1
    assert -2000 < again.turn_ms <= -45
    assert lab.client.hmget(lab.keys.worker(N, A), ["turns", "turn_ms"]) == record
    assert lab.run(lab.batch(A, 2, count=1)).turns == 0


# -- real workers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def fleet(redis_url: str) -> Iterator[Fleet]:
    with Fleet(redis_url) as fleet:
        yield fleet


def _extra(workers: list[Watched]) -> int:
    """Probes made again because a worker was late, or to be sure: not turns."""
    counters = [w.worker.health()["counters"] for w in workers]
    return sum(c["late_dropped"] + c["misses"] for c in counters)


@pytest.mark.parametrize("n", [1, 8])
def test_nodes_are_asked_once_an_interval_from_the_first_on(fleet: Fleet, n: int) -> None:
    """One worker or eight, idle or opening rooms all the time, four nodes: as many requests as intervals, counted
    from the moment at which the first room opens, and each worker has seen each node."""
    interval_s = 0.2
    nodes = [fleet.farm.node("life-1") for _ in range(4)]
    workers = [fleet.worker(f"w{k}", settings=fast(probe_interval_s=interval_s)) for k in range(n)]
    started = time.monotonic()
    for watched in workers:
        for node in nodes:
            watched.join(node.address, [1])
    room, end = 2, started + 4.0
    while time.monotonic() < end:
        for node in nodes:
            workers[0].worker.join(node.address, room).leave()
        room += 1
        time.sleep(0.003)
    asked = [node.asked for node in nodes]
    intervals = (time.monotonic() - started) / interval_s
    assert max(asked) <= intervals + 1 + _extra(workers), (asked, intervals)
    assert min(asked) >= 0.5 * intervals, (asked, intervals)
    wait_until(lambda: all(w.knows(node.address) for w in workers for node in nodes), PATIENCE_S, "each had its turn")


def test_a_failed_node_is_asked_once_an_interval(fleet: Fleet) -> None:
    """Eight workers whose node has failed and refuses: it is looked at in turns, not by each for itself."""
    node = fleet.farm.node("life-1")
    workers = [fleet.worker(f"w{k}") for k in range(8)]
    for watched in workers:
        watched.join(node.address, [1])
    wait_until(lambda: workers[0].knows(node.address), PATIENCE_S, "a first answer")
    node.status = 500
    for watched in workers:
        watched.await_told(1)
    wait_until(lambda: all(w.state(node.address) == "failed" for w in workers), PATIENCE_S, "all know")
    wait_until(lambda: _given_up(workers, node.address), PATIENCE_S, "each has looked twice")
    asked, started = node.asked, time.monotonic()
    time.sleep(3.0)
    intervals = (time.monotonic() - started) / fleet.settings.probe_interval_s
    assert node.asked - asked <= intervals + 2, "one an interval"
    node.status = 200
    wait_until(lambda: all(w.state(node.address) == "alive" for w in workers), PATIENCE_S, "its answer is seen")


def _given_up(workers: list[Watched], address: str) -> bool:
    return all(w.worker._core.detector.watch(address).given_up for w in workers)
