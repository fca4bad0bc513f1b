"""The race this project began with: a backend's cleanup leaves rooms while the heartbeat's verdict fails them.

In the original the handler iterated the live set while another thread discarded from it; the exception escaped the
heartbeat thread, and detection was off for good, silently.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

import pytest
from util import wait_until

from coordinator import Cause, Failure, JoinRefused, Room, Settings, Sight, Status, Worker
from coordinator.decide.detector import Evidence

NODE = "10.0.0.5:8998"
ROOMS, ROUNDS, THREADS = 50_000, 100, 4
PATIENCE_S = 60


class Alive:
    """A node that always answers: it is failed by verdict only, and the next probe revives it."""

    async def __call__(self, address: str) -> Sight:
        return Sight(Evidence.OK)

    async def aclose(self) -> None:
        return


@dataclass
class Told:
    """What on_failure was called with."""

    times: Counter[int] = field(default_factory=Counter)
    causes: set[Cause] = field(default_factory=set)

    def __call__(self, room: Room, failure: Failure) -> None:
        self.times[room.id] += 1
        self.causes.add(failure.cause)


def cleanup(
    worker: Worker, rooms: list[Room], gate: threading.Barrier, left: list[int], errors: list[Exception]
) -> None:
    """A Mori-like cleanup thread: leaves each of its rooms, by id or by handle, whatever became of it."""
    gate.wait()
    try:
        for room in rooms:
            done = room.leave() if room.id % 2 else worker.leave(NODE, room.id)
            if done:
                left.append(room.id)
    except Exception as exc:
        errors.append(exc)


def join_all(worker: Worker, first: int) -> list[Room]:
    """ROOMS openings, as soon as the node takes rooms again."""

    def takes_rooms() -> bool:
        try:
            worker.join(NODE, 0).leave()
        except JoinRefused:
            return False
        return True

    wait_until(takes_rooms, PATIENCE_S, "the node takes rooms again")
    return [worker.join(NODE, first + i) for i in range(ROOMS)]


@pytest.mark.timeout(900)
def test_four_cleanups_leave_rooms_while_their_address_fails(redis_url: str) -> None:
    """100 times 50,000 rooms: no exception, each room left or failed once, totals exact, the heartbeat still beats."""
    s = Settings(
        url=redis_url,
        probe_interval_s=0.05,
        batch_rooms=5000,
        tick_s=0.1,
        lease_s=30.0,
        linger_s=0.0,
        retention_s=600.0,
    )
    told, errors = Told(), list[Exception]()
    total_failed = total_left_open = 0
    with (
        Worker(redis_url, name="decode", settings=s, probe=Alive()) as worker,
        Worker(redis_url, name="judge", settings=s, probe=Alive()) as judge,
    ):
        worker.on_failure(told)
        for n in range(ROUNDS):
            rooms = join_all(worker, 1 + n * ROOMS)
            assert worker.flush(PATIENCE_S)
            told.times.clear()
            probes = worker.health()["counters"]["probes"]
            gate, left = threading.Barrier(THREADS + 1), [list[int]() for _ in range(THREADS)]
            threads = [
                threading.Thread(target=cleanup, args=(worker, rooms[i::THREADS], gate, left[i], errors))
                for i in range(THREADS)
            ]
            for thread in threads:
                thread.start()
            gate.wait()
            verdict = (worker if n % 2 else judge).fail_node(NODE, f"round {n}")
            for thread in threads:
                thread.join()
            assert errors == []
            assert not verdict.already
            # If all rooms were left before the news came, nothing else says that they have come.
            wait_until(lambda n=n: worker.health()["counters"]["epochs_ended"] > n, PATIENCE_S, "the news")  # type: ignore[misc]
            failed = {room.id for room in rooms if room.status is Status.FAILED}
            wait_until(lambda failed=failed: len(told.times) >= len(failed), PATIENCE_S, "every failure is told")  # type: ignore[misc]

            assert sorted(i for part in left for i in part) == [room.id for room in rooms], "each was left once"
            assert {room.status for room in rooms} <= {Status.FAILED, Status.BOOTSTRAPPING}
            assert told.times == Counter(failed), "each failed room was told once, and no other"
            assert verdict.counts.get(worker.id, 0) <= ROOMS
            assert len(failed) <= ROOMS
            assert worker.health()["addresses"][NODE]["rooms"] == 0
            wait_until(lambda probes=probes: worker.health()["counters"]["probes"] > probes, PATIENCE_S, "a probe")  # type: ignore[misc]
            total_failed += len(failed)
            total_left_open += ROOMS - len(failed)

        assert told.causes == {Cause.NODE_FAILED}
        assert total_failed + total_left_open == ROOMS * ROUNDS
        assert min(total_failed, total_left_open) > 0, "verdict and cleanup did not meet: no race was run"
        health = worker.health()
        assert health["counters"]["rooms_failed"] == total_failed
        assert health["counters"]["epochs_ended"] == ROUNDS
        assert health["counters"]["callback_errors"] == 0
        assert all(age < PATIENCE_S for age in health["beats_s_ago"].values())
        assert not any(health["restarts"].values())
