"""A decode rank: the real manager of a backend, and rooms through its real receivers.

    python child_decode.py '{"backend": "mooncake", "tp_rank": 0, "tp_size": 1, "plugins": true}'

With "plugins" SGLang's own load_plugins() runs first, as in its scheduler; COORDINATOR_URL says whether ours is active.
First line out: {"pid", "version", "manager", "rank_port"}. Orders, beside those of lines.py, where
`address` is a bootstrap address, `rooms` a list of numbers, a state the name of a KVPoll value:
{"do": "ensure", address}: bool   {"do": "open", address, rooms, "send": true}: seconds taken
{"do": "poll", address?}: {state: count}   {"do": "states", rooms}: {room: state}   {"do": "abort"|"clear", rooms}
{"do": "wait", address, "state": "Failed", "timeout_s": 30}: {"first", "last": CLOCK_MONOTONIC or null, "n", "of"}
{"do": "failure", room}: {"text", "type", "other_rank"} of failure_exception()   {"do": "set", room, "state": state}
{"do": "sizes"}: tracker, pool, info, failures, records, statuses   {"do": "types"}   {"do": "shutdown"}
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import context
import lines
import numpy as np

SETTINGS = lines.settings()
BACKEND: str = SETTINGS.get("backend", "common")
RECEIVER = context.receiver_class(BACKEND)
MANAGER = context.make_manager(
    BACKEND, "decode", tp_rank=SETTINGS.get("tp_rank", 0), tp_size=SETTINGS.get("tp_size", 1)
)
#: The receiver of each room; of a room opened twice the later one.
OPEN: dict[int, Any] = {}


def _open(address: str, rooms: list[int], send: bool = True, init: bool = True) -> float:
    start = time.monotonic()
    indices = np.arange(4, dtype=np.int32)
    for room in rooms:
        receiver = OPEN[room] = RECEIVER(MANAGER, address, room)
        if init:
            receiver.init(0)
            if send and receiver.conclude_state is None:
                receiver.send_metadata(indices, 0)
    return time.monotonic() - start


def _at(address: str | None) -> list[Any]:
    return [r for r in OPEN.values() if address is None or r.bootstrap_addr == address]


def _state(receiver: Any) -> str:
    return context.status_name(receiver.poll())


def _wait(address: str | None = None, state: str = "Failed", timeout_s: float = 30.0) -> dict[str, Any]:
    """When the first and the last of the rooms at `address` polled `state`, asked every millisecond."""
    left, first, last = _at(address), None, None
    of, deadline = len(left), time.monotonic() + timeout_s
    while left and time.monotonic() < deadline:
        before = len(left)
        left = [receiver for receiver in left if _state(receiver) != state]
        if len(left) < before:
            last = time.monotonic()
            first = first or last
        time.sleep(0.001)
    return {"first": first, "last": None if left else last, "n": of - len(left), "of": of}


def _failure(room: int) -> dict[str, Any]:
    try:
        OPEN[room].failure_exception()
    except Exception as exc:
        other = getattr(exc, "is_from_another_rank", None)
        return {"text": str(exc), "type": type(exc).__name__, "other_rank": other}
    raise AssertionError(f"room {room}: failure_exception() raised nothing")


def _each(method: str, rooms: list[int]) -> int:
    for room in rooms:
        getattr(OPEN[room], method)()
    return len(rooms)


def _sizes() -> dict[str, Any]:
    with MANAGER.connection_lock:
        return {
            "tracker": {address: len(rooms) for address, rooms in list(MANAGER.addr_to_rooms_tracker.items())},
            "pool": sorted(MANAGER.connection_pool),
            "info": sorted(MANAGER.prefill_info_table),
            "beats_missed": dict(MANAGER.heartbeat_failures),
            "records": len(MANAGER.failure_records),
            "statuses": len(MANAGER.request_status),
            "sessions": len(MANAGER.session_pool),
        }


def _types() -> dict[str, str]:
    names = ("addr_to_rooms_tracker", "request_status")
    types = {name: type(getattr(MANAGER, name)) for name in names}
    return {name: f"{found.__module__}.{found.__name__}" for name, found in types.items()}


def _shutdown() -> None:
    """As SGLang's teardown where the version has one: the heartbeat thread is told to end."""
    event = getattr(MANAGER, "_heartbeat_shutdown", None)
    if event is not None:
        event.set()


if __name__ == "__main__":
    ORDERS: dict[str, Callable[..., Any]] = {
        "ensure": lambda address: bool(MANAGER.try_ensure_parallel_info(address)),
        "open": _open,
        "poll": lambda address=None: dict(Counter(map(_state, _at(address)))),
        "states": lambda rooms: {room: _state(OPEN[room]) for room in rooms},
        "wait": _wait,
        "clear": lambda rooms: _each("clear", rooms),
        "abort": lambda rooms: _each("abort", rooms),
        "failure": _failure,
        "set": lambda room, state: MANAGER.update_status(room, context.status(state)),
        "sizes": _sizes,
        "types": _types,
        "shutdown": _shutdown,
    }
    NAMES = {"manager": MANAGER, "receiver": RECEIVER, "rooms": OPEN, "context": context, "np": np}
    kind = f"{type(MANAGER).__module__}.{type(MANAGER).__name__}"
    lines.serve(ORDERS, NAMES, manager=kind, rank_port=MANAGER.rank_port)
