"""Uses a worker, forks, and reports as one JSON line what the child may do and what is left of the parent.

python child_fork.py URL ADDRESS SETTINGS
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from coordinator import PrefillNode, Settings, Worker


def outcome(call: Callable[[], Any]) -> Any:
    """What the call answers, or the name of its error."""
    try:
        value = call()
    except Exception as exc:
        return type(exc).__name__
    return value if isinstance(value, (bool, str, int, type(None))) else type(value).__name__


def main(url: str, address: str, given: str) -> None:
    settings = Settings(**{**json.loads(given), "url": url})
    worker = Worker(url, name="parent", settings=settings)
    node = PrefillNode(address, url, instance="life-1", settings=settings)
    node.wait_announced(10)
    told: list[int] = []
    worker.on_failure(lambda room, failure: told.append(room.id))
    room = worker.join(address, 1)
    worker.flush(10)
    reader, writer = os.pipe()
    if os.fork() == 0:
        seen = {
            "join": outcome(lambda: worker.join(address, 2)),
            "join_elsewhere": outcome(lambda: worker.join("127.0.0.1:9", 2)),
            "leave": outcome(lambda: worker.leave(address, 1)),
            "update": outcome(lambda: room.update(4)),  # type: ignore[arg-type]
            "room_leave": outcome(room.leave),
            "status": outcome(lambda: worker.status(address, 1)),
            "flush": outcome(lambda: worker.flush(1)),
            "fail_node": outcome(lambda: worker.fail_node(address)),
            "health": outcome(worker.health),
            "drain": outcome(node.drain),
            "close": outcome(worker.close),
            "node_close": outcome(node.close),
        }
        with Worker(url, name="child", settings=settings) as own:  # an identity and connections of its own
            seen["own_id_differs"] = own.id != worker.id
            seen["own_join"] = outcome(lambda: own.join(address, 1))
            seen["own_flush"] = own.flush(10)
        os.write(writer, json.dumps(seen).encode())
        os.close(writer)
        sys.exit(0)  # through atexit: the parent's worker must not be closed by it
    os.close(writer)
    with os.fdopen(reader) as pipe:
        child = json.loads(pipe.read())
    os.wait()
    worker.flush(10)
    parent = {"id": worker.id, "status": worker.status(address, 1), "told": told, "flush": worker.flush(10)}
    print(json.dumps({"child": child, "parent": parent}), flush=True)
    sys.stdin.readline()  # until the test has looked at the store
    worker.close()
    node.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
