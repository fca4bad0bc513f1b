"""What the tests of decode processes share: a store of their own, a fast pace, and what to wait for."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest
from bed import Bed, Child, Decode, FakePrefill
from servers import MissingLane, Server
from util import wait_until

from coordinator.store.keys import Keys

PATIENCE_S = 20.0
KEYS = Keys("coordinator")


def pace(**more: Any) -> dict[str, str]:
    """COORDINATOR_* variables of a fast decode process: a dead node is found in about 0.4 s."""
    times = {
        "probe_interval_s": 0.2, "probe_timeout_s": 3.0, "tick_s": 0.1, "lease_s": 2.0, "retention_s": 60.0, **more
    }  # fmt: skip
    return {f"COORDINATOR_{name.upper()}": str(value) for name, value in times.items()}


def own_server() -> Generator[Server, None, None]:
    """A store that outlives a test, for processes that do."""
    try:
        server = Server("valkey")
    except MissingLane:
        try:
            server = Server("redis")
        except MissingLane as missing:
            pytest.fail(f"missing lane: {missing}")
    server.start()
    yield server
    server.stop()


def shared(store: Server, address: str) -> dict[str, set[int]]:
    """By worker, the rooms at an address: SMEMBERS of the rooms keys."""
    with store.client() as client:
        workers: Any = client.zrange(KEYS.workers(address), 0, -1)
        found: dict[str, Any] = {worker: client.smembers(KEYS.rooms(address, worker)) for worker in workers}
    return {worker: {int(room) for room in rooms} for worker, rooms in found.items()}


def await_shared(store: Server, address: str, rooms: set[int], workers: int = 1) -> None:
    """`workers` workers have exactly these rooms at the address; with no rooms, no worker has any."""

    def seen() -> bool:
        found = [their for their in shared(store, address).values() if their]
        return found == ([rooms] * workers if rooms else [])

    wait_until(seen, PATIENCE_S, f"{workers} workers share {sorted(rooms)[:5]} at {address}: {shared(store, address)}")


def python(child: Child, code: str, **names: Any) -> Any:
    """Run `code` in the child with plain values as names; its answer is what it leaves in `result`."""
    head = "".join(f"{name} = json.loads({json.dumps(json.dumps(value))})\n" for name, value in names.items())
    return child.ask(do="python", code=f"import json, time, threading\n{head}{code}")


def health(child: Child) -> dict[str, Any]:
    """Of the bridge between SGLang and its worker."""
    found: dict[str, Any] = python(child, "result = manager._coordinator.health()")
    return found


def reached(child: Decode, *nodes: Any) -> None:
    """SGLang knows these nodes."""
    for node in nodes:
        assert child.ask(do="ensure", address=node.address)


def await_states(child: Decode, rooms: list[int], state: str, timeout_s: float = PATIENCE_S) -> None:
    """All of these rooms poll `state`."""

    def seen() -> bool:
        return set(child.ask(do="states", rooms=rooms).values()) == {state}

    wait_until(seen, timeout_s, f"rooms {rooms[:5]} are {state}: {child.ask(do='states', rooms=rooms)}")


def await_clean(child: Decode, *addresses: str) -> None:
    """Nothing of these addresses is left in SGLang's tables."""

    def left() -> list[str]:
        sizes = child.ask(do="sizes")
        keys = [*sizes["tracker"], *sizes["info"], *(key.rsplit("_", 3)[0] for key in sizes["pool"])]
        return [key for key in keys if key in addresses]

    wait_until(lambda: not left(), PATIENCE_S, f"nothing is left of {addresses}: {left()}")


def fake(bed: Bed) -> FakePrefill:
    """A new prefill node in this process."""
    [made] = bed.fakes(1)
    return made
