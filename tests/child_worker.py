"""A worker as a process of its own, told what to do by JSON lines on stdin, answering each with one JSON line.

    python child_worker.py URL NAME SETTINGS [--group G] [--clock-off-s N] [--close-on-sigterm] [--with-exit]

{"do": "join", "address": a, "rooms": [...]}   {"do": "success"|"fail"|"leave", "address": a, "rooms": [...]}
{"do": "flush"}   {"do": "health"}   {"do": "told"}: [[room, address, cause, reason, epoch, ms since start], ...]
{"do": "busy", "s": x}: pure Python on the main thread   {"do": "fail_node", "address": a}   {"do": "close"}
{"do": "join_refused", "address": a}: the state that a join is refused with, or ""
With --with-exit the process ends after stdin does, through `with Worker(...)`; else it waits for a signal.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from coordinator import Failure, JoinRefused, Room, Settings, Status, Worker

TOLD: list[tuple[int, str, str, str, int]] = []


def main(url: str, name: str, settings: str, *flags: str) -> None:
    if "--clock-off-s" in flags:
        off, real = float(flags[flags.index("--clock-off-s") + 1]), time.time
        time.time = lambda: real() + off
    group = flags[flags.index("--group") + 1] if "--group" in flags else ""
    with Worker(url, name=name, group=group, settings=Settings(**{**json.loads(settings), "url": url})) as worker:
        worker.on_failure(_told)
        if "--close-on-sigterm" in flags:
            signal.signal(signal.SIGTERM, lambda *_: _close_and_exit(worker))
        say({"id": worker.id, "pid": os.getpid()})
        for line in sys.stdin:
            say(do(worker, **json.loads(line)))
        if "--with-exit" not in flags:
            signal.pause()


def _told(room: Room, failure: Failure) -> None:
    TOLD.append((room.id, failure.address, str(failure.cause), failure.reason, failure.epoch))


def _close_and_exit(worker: Worker) -> None:
    worker.close()
    sys.exit(0)


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def do(worker: Worker, **order: Any) -> Any:
    address, rooms = order.get("address", ""), order.get("rooms", [])
    match order["do"]:
        case "join":
            return len([worker.join(address, room) for room in rooms])
        case "success":
            return sum(worker.update(address, room, Status.SUCCESS) for room in rooms)
        case "fail":
            return sum(worker.update(address, room, Status.FAILED, "told to") for room in rooms)
        case "leave":
            return sum(worker.leave(address, room) for room in rooms)
        case "statuses":
            return [worker.status(address, room) for room in rooms]
        case "flush":
            return worker.flush(order.get("timeout_s", 10.0))
        case "health":
            return worker.health()
        case "told":
            return TOLD
        case "busy":
            return _busy(order["s"])
        case "fail_node":
            return worker.fail_node(address, "told to").counts
        case "join_refused":
            return _join_refused(worker, address)
        case "close":
            return worker.close()
    raise ValueError(f"unknown order {order}")


def _busy(seconds: float) -> int:
    end, turns = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        turns += 1
    return turns


def _join_refused(worker: Worker, address: str) -> str:
    try:
        worker.join(address, 2**62).leave()
    except JoinRefused as exc:
        return exc.state
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
