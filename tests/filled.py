"""A store with two nodes and three workers in it, written by the scripts themselves, for tests that look at it."""

from __future__ import annotations

from collections.abc import Sequence

import redis

from coordinator.config import Settings
from coordinator.protocol import Batch, NodeView, Stats, Verdict
from coordinator.store.client import SyncStore
from coordinator.store.ops import Ops
from coordinator.store.verdict import fail_address, new_call

N0, N1 = "10.0.0.5:8998", "[2001:db8::1]:8998"
A, B, C = "decode-0#aaaaaaaa", "decode-1#bbbbbbbb", "decode-2#cccccccc"
BIG = 8804230600348159981  # past 2**53: no double holds it


class Filled:
    """Runs Ops on one client. `fill` makes rooms 1, 2, BIG of A and 1 of B at N0, and 7 of C at N1."""

    def __init__(self, client: redis.Redis, namespace: str = "coordinator") -> None:
        self.client, self.ops = client, Ops(Settings(namespace=namespace))
        self.keys = self.ops.keys
        self.store = SyncStore(client)

    def fill(self) -> None:
        self.node(N0, "life-1")
        self.node(N1, "life-9")
        oldest = f"{BIG}:transferring:5000 1:bootstrapping:40"
        self.rooms(N0, A, (1, 2, BIG), stats=Stats(1, 1, 1, oldest))
        self.rooms(N0, B, (1,), stats=Stats(1, 0, 0, "1:bootstrapping:6"))
        self.rooms(N1, C, (7,), stats=Stats(0, 1, 0, "7:waiting_for_input:12"))
        self.store.run(self.ops.discover([N0, N1]))

    def node(self, address: str, instance: str, info: str = "", draining: bool | None = None) -> None:
        self.store.run(self.ops.register_node(address, "start", instance, 0, new_call(), "node", (), info, draining))

    def rooms(self, address: str, worker: str, adds: Sequence[int], stats: Stats | None = None) -> None:
        """One reset batch: these rooms are all that the worker has at the address."""
        batch = Batch(address, worker, 1, "reset", NodeView(1), len(adds), tuple(adds), stats=stats)
        reply = self.store.run(self.ops.sync(batch))
        assert reply.status == "OK", reply

    def fail(self, address: str, reason: str = "test") -> Verdict:
        return fail_address(self.store, self.ops, address, reason, "tester")
