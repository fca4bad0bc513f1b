"""What sglang_side_by_side.py does inside a decode rank: watch rooms fail, time single calls, force a race.

Each function takes the rank's own manager, receiver class and receivers by room number (tests/plugin/child_decode.py)
and knows only what SGLang gives a scheduler; where stock and plugged in differ, `_failing` and `_books` say how.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

FAILED, SUCCESS = 0, 4  # of SGLang's KVPoll
POLLS = 5  # of each room in one round: as a scheduler, which polls again and again
SETTLE_S = 3.0


def wait_failed(receivers: dict[int, Any], rooms: list[int], cap_s: float, pause_s: float) -> dict[str, Any]:
    """CLOCK_MONOTONIC when the first and the last of `rooms` had failed; None for one that never did within `cap_s`."""
    left, first, last = [receivers[room] for room in rooms], None, None
    end_s = time.monotonic() + cap_s
    while left and time.monotonic() < end_s:
        still = [receiver for receiver in left if receiver.poll() != FAILED]
        if len(still) < len(left):
            last = time.monotonic()
            first = first or last
        left = still
        time.sleep(pause_s)
    return {"first": first, "last": None if left else last, "open": len(left)}


def cost_round(manager: Any, receiver: Any, address: str, numbers: list[int], rest_s: float) -> dict[str, float]:
    """Nanoseconds a call, CPU of this thread and wall, of one receiver's construction, of poll() and of clear()."""
    gc.collect()
    taken: dict[str, float] = {}

    def timed(what: str, calls: int, work: Callable[[], Any]) -> Any:
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        result = work()
        wall, cpu = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
        taken[f"{what}_cpu_ns"], taken[f"{what}_wall_ns"] = cpu / calls, wall / calls
        return result

    def poll() -> None:
        for _ in range(POLLS):
            for room in opened:
                room.poll()

    def clear() -> None:
        for room in opened:
            room.clear()

    opened = timed("receiver", len(numbers), lambda: [receiver(manager, address, number) for number in numbers])
    timed("poll", POLLS * len(numbers), poll)
    time.sleep(rest_s)  # the worker shares them, where there is one
    timed("clear", len(numbers), clear)
    time.sleep(rest_s)
    return taken


def cost(manager: Any, receiver: Any, address: str, numbers: list[int], rounds: int, rest_s: float) -> dict[str, float]:
    """Medians of a few rounds in a row; the parent asks both sides in turn.

    The calling thread stays on one processor meanwhile, the same on both sides; the worker's may run anywhere.
    """
    anywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(anywhere)})
    try:
        all_taken = [cost_round(manager, receiver, address, numbers, rest_s) for _ in range(rounds)]
    finally:
        os.sched_setaffinity(0, anywhere)
    return {what: statistics.median(taken[what] for taken in all_taken) for what in all_taken[0]}


def open_each(manager: Any, receiver: Any, receivers: dict[int, Any], homes: dict[int, str]) -> int:
    """Open each room at its own address, which SGLang asks first; answers how many of the addresses answered.

    Every tenth also asks for the route and enters the pool: it takes as long as all the rest.
    """
    answered = 0
    for number, (room, address) in enumerate(homes.items()):
        answered += bool(manager.try_ensure_parallel_info(address))
        receivers[room] = receiver(manager, address, room)
        if number % 10 == 0:
            receivers[room].init(0)
    return answered


def left(manager: Any) -> dict[str, int]:
    """Entries that a decode manager has left, and threads."""
    return {
        "tracker": len(manager.addr_to_rooms_tracker),
        "pool": len(manager.connection_pool),
        "info": len(manager.prefill_info_table),
        "sessions": len(manager.session_pool),
        "misses": len(manager.heartbeat_failures),
        "statuses": len(manager.request_status),
        "books": len(_books(manager)),
        "threads": threading.active_count(),
    }


def raise_once(manager: Any, address: str) -> None:
    """SGLang's clean-up after a failure of `address` raises, as a backend's hook may."""
    stock = manager._handle_node_failure

    def handle(failed: str) -> None:
        if failed == address:
            raise RuntimeError("a hook of a backend raised")
        stock(failed)

    manager._handle_node_failure = handle


def race(manager: Any, receiver: Any, addresses: list[str]) -> dict[str, int]:
    """At how many of len(addresses) points within a receiver's construction a failing node leaves the room behind.

    At each point the construction stands still while the node is failed completely. Then the node answers again, the
    request goes on as SGLang's scheduler would let it, and the node fails once more: a room that is open after that
    is one that no failure ends.
    """
    fail = _failing(manager)
    for address in addresses:
        assert manager.try_ensure_parallel_info(address), address
    _until(lambda: all(book.node.epoch for book in _books(manager)), SETTLE_S)
    points = _points(lambda: receiver(manager, addresses[0], 1))
    rooms = []
    for number, address in enumerate(addresses[1:]):
        at = round(number * (points - 1) / max(1, len(addresses) - 2))
        rooms.append(_stopped_at(at, partial(fail, address), partial(receiver, manager, address, number + 2)))
    for address in addresses[1:]:
        manager.try_ensure_parallel_info(address)
    for room in rooms:
        room.init(0)
    time.sleep(0.3)
    for address in addresses[1:]:
        fail(address)
    _until(lambda: all(room.poll() in (FAILED, SUCCESS) for room in rooms), SETTLE_S)
    open_rooms = sum(room.poll() not in (FAILED, SUCCESS) for room in rooms)
    return {"races": len(rooms), "open": open_rooms, "points": points}


def _failing(manager: Any) -> Callable[[str], None]:
    """What fails an address here and returns when the tables are clean: SGLang's own function, or the worker's."""
    bridge = getattr(manager, "_coordinator", None)
    if bridge is None:
        return manager._handle_node_failure  # type: ignore[no-any-return]

    def fail(address: str) -> None:
        bridge.worker.fail_node(address, "benchmark")
        _until(lambda: address not in manager.prefill_info_table, 1)

    return fail


def _books(manager: Any) -> list[Any]:
    bridge = getattr(manager, "_coordinator", None)
    return [] if bridge is None else list(bridge.worker._ledger.books())


def _points(work: Callable[[], Any]) -> int:
    """How many instructions of Python `work` runs, in its own frames and those below."""
    return _traced(work, lambda n: None)[1]


def _stopped_at(point: int, meanwhile: Callable[[], None], work: Callable[[], Any]) -> Any:
    """The result of `work`, which stands still before instruction `point` until `meanwhile` is done, or for 1.5 s."""

    def pause(n: int) -> None:
        if n == point:
            other = threading.Thread(target=meanwhile, daemon=True)
            other.start()
            other.join(1.5)

    return _traced(work, pause)[0]


def _traced(work: Callable[[], Any], at: Callable[[int], None]) -> tuple[Any, int]:
    seen = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen
        frame.f_trace_opcodes = True
        if event == "opcode":
            at(seen)
            seen += 1
        return trace

    sys.settrace(trace)
    try:
        result = work()
    finally:
        sys.settrace(None)
    return result, seen


def _until(true: Callable[[], bool], timeout_s: float) -> bool:
    end_s = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.002)
    return True
