"""What one room's life costs in the process: join, update, leave, against a dict, a set and a lock doing the same.

One process, one run, alternating rounds, medians; a Worker with its loops runs all the time, over a real server.
Prints nanoseconds a life and the ratios; exits 1 if a ratio is above its bound.

    python benchmarks/hot_path.py [--url redis://...] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from threading import Lock

from coordinator import Sight, Status, Worker
from coordinator.decide.detector import Evidence
from coordinator.store.embedded import EmbeddedServer

ADDRESS = "10.0.0.5:8998"
LIVES, ROUNDS = 2000, 101
BOUND_BY_ID, BOUND_HANDLE = 1.5, 2.0


class Alive:
    """A probe for a node that is not there: it always answers, so that the heartbeat has its usual work."""

    async def __call__(self, address: str) -> Sight:
        """Alive."""
        return Sight(Evidence.OK)

    async def aclose(self) -> None:
        """Nothing to release."""


class Plain:
    """What each process keeps to itself today: a dict of sets, a dict of statuses, a lock. Same checks, no store."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.tracker: defaultdict[str, set[int]] = defaultdict(set)
        self.status: dict[int, Status] = {}

    def join(self, address: str, room: int) -> None:
        """Open a room; refuse one that is open."""
        with self.lock:
            if room in self.status:
                raise KeyError(room)
            self.tracker[address].add(room)
            self.status[room] = Status.BOOTSTRAPPING

    def update(self, address: str, room: int, status: Status) -> bool:
        """Move up only."""
        with self.lock:
            old = self.status.get(room)
            if old is None or not (0 < old < status or status == 0):
                return False
            self.status[room] = status
            return True

    def leave(self, address: str, room: int) -> bool:
        """Close a room."""
        with self.lock:
            self.tracker[address].discard(room)
            return self.status.pop(room, None) is not None


def by_id(table: Plain | Worker) -> float:
    """Nanoseconds of one life through address and room id."""
    join, update, leave = table.join, table.update, table.leave
    up = Status.TRANSFERRING
    start = time.perf_counter_ns()
    for room in range(LIVES):
        join(ADDRESS, room)
        update(ADDRESS, room, up)
        leave(ADDRESS, room)
    return (time.perf_counter_ns() - start) / LIVES


def by_handle(worker: Worker) -> float:
    """Nanoseconds of one life through the Room that join returns."""
    join = worker.join
    up = Status.TRANSFERRING
    start = time.perf_counter_ns()
    for number in range(LIVES):
        room = join(ADDRESS, number)
        room.update(up)
        room.leave()
    return (time.perf_counter_ns() - start) / LIVES


def measure(worker: Worker) -> dict[str, float]:
    """Medians over alternating rounds, and the medians of the ratios round by round."""
    plain = Plain()
    rounds: list[tuple[Callable[[], float], list[float]]] = [
        (lambda: by_id(plain), []),
        (lambda: by_id(worker), []),
        (lambda: by_handle(worker), []),
    ]
    for _ in range(ROUNDS):
        for run, times in rounds:
            times.append(run())
    base, ids, handles = (times for _, times in rounds)
    return {
        "plain_ns": statistics.median(base),
        "by_id_ns": statistics.median(ids),
        "by_handle_ns": statistics.median(handles),
        "by_id_ratio": statistics.median(a / b for a, b in zip(ids, base, strict=True)),
        "by_handle_ratio": statistics.median(a / b for a, b in zip(handles, base, strict=True)),
    }


def main() -> int:
    """Run it, print it, compare it with the bounds."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--url", default="", help="a running store; default: an embedded one for this run")
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    server = None if given.url else EmbeddedServer.start()
    try:
        with Worker(given.url or (server.url if server else ""), name="bench", probe=Alive()) as worker:
            worker.join(ADDRESS, 2**62)  # the address is in use: the loops have something to renew
            worker.flush(5)
            result = measure(worker)
    finally:
        if server is not None:
            server.stop()
    ok = result["by_id_ratio"] <= BOUND_BY_ID and result["by_handle_ratio"] <= BOUND_HANDLE
    if given.json:
        print(json.dumps({"ok": ok, **{k: round(v, 3) for k, v in result.items()}}))
    else:
        print("join + update + leave, the sync loop running")
        print(f"  dict + set + lock   {result['plain_ns']:8.0f} ns   1.00x")
        for name, way, bound in (("by id", "by_id", BOUND_BY_ID), ("Room handle", "by_handle", BOUND_HANDLE)):
            ratio = result[f"{way}_ratio"]
            print(f"  worker, {name:11} {result[f'{way}_ns']:8.0f} ns   {ratio:.2f}x  (at most {bound}x)")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
