"""The janitor: acknowledges snapshots, reaps expired workers, adopts addresses that nobody uses any more, and
forgets addresses that this worker no longer uses. Nothing here is urgent and everything is idempotent.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import CoordinatorError, StoreUnavailable
from ..protocol import FAILED
from ..store.ops import Op
from .core import Core, log, wait_for

FORGET_LEASES = 60  # an address without rooms for this many leases is left
FORGET_FAILED_LEASES = 6  # failed or out of reach: whoever comes back learns at first contact if it has failed
MARK_LEASES = 0.25  # pace of marking addresses as used: found unused, forgiven and reaped within two leases
BATCH = 200


@dataclass(slots=True)
class Janitor:
    """Chores of one worker."""

    core: Core
    forgotten: Callable[[str], object] = lambda address: None
    _drop_at: list[tuple[float, str, str]] = field(default_factory=list)
    _adopted: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _adopted_s: dict[str, float] = field(default_factory=dict)
    _discover_at_s: float = 0.0
    _empty_since: dict[str, float] = field(default_factory=dict)

    async def run(self) -> None:
        """Turn for ever; the supervisor restarts it."""
        self._discover_at_s = time.monotonic() + random.uniform(0.5, 1.0) * MARK_LEASES * self.core.settings.lease_s
        while True:
            self.core.supervisor.beat("janitor")
            with contextlib.suppress(StoreUnavailable):  # the sync loop says so; chores wait for the next tick
                if not self.core.store_away:
                    await self._acknowledge()
                    await self._drop(time.monotonic())
                    await self._reap()
                    await self._discover(time.monotonic())
                    await self._forget(time.monotonic())
            await wait_for(self.core.chore_wake, self.core.settings.tick_s)

    async def _many(self, ops: list[Op[Any]]) -> list[Any]:
        return list(await self.core.store.many(ops)) if ops else []

    async def _acknowledge(self) -> None:
        """Say that the rooms of a snapshot were failed here; it stays readable for a while, then it is freed."""
        core = self.core
        todo, linger = core.acknowledge[:BATCH], core.settings.linger_s
        ops = [core.ops.drain_ack(address, name, core.ledger.worker, linger) for address, name in todo]
        answers = await self._many(ops)
        del core.acknowledge[: len(todo)]  # only now: what raised above is tried again
        for (address, name), answer in zip(todo, answers, strict=True):
            if isinstance(answer, CoordinatorError):
                core.acknowledge.append((address, name))
            else:
                core.count("acks")
                if linger > 0:
                    self._drop_at.append((time.monotonic() + 0.9 * linger, address, name))

    async def _drop(self, now: float) -> None:
        """Free snapshots a little before they would expire: UNLINK frees in the background, expiry may not."""
        due = [item for item in self._drop_at if item[0] <= now][:BATCH]
        ops = [self.core.ops.drain_drop(address, name, self.core.ledger.worker) for _, address, name in due]
        for item, answer in zip(due, await self._many(ops), strict=True):
            if not isinstance(answer, CoordinatorError):
                self._drop_at.remove(item)

    async def _reap(self) -> None:
        core = self.core
        todo = list(core.reap)[:BATCH]
        for item in todo:
            core.reap.pop(item, None)
        todo += [(address, worker) for address, workers in self._adopted.items() for worker in workers]
        me = core.ledger.worker
        ops = [core.ops.reap_worker(address, worker, me, "lease expired") for address, worker in todo]
        for (address, worker), answer in zip(todo, await self._many(ops), strict=True):
            if isinstance(answer, CoordinatorError):
                continue
            if answer.outcome == "REAPED":
                core.count("workers_reaped")
                log.warning("worker_reaped address=%s worker=%s rooms=%d", address, worker, answer.rooms)
            if answer.outcome != "ALIVE" and address in self._adopted:
                left = tuple(w for w in self._adopted[address] if w != worker)
                self._adopted[address] = left
                if not left:
                    del self._adopted[address], self._adopted_s[address]

    async def _discover(self, now: float) -> None:
        """Keep the index fresh; adopt addresses where workers are listed and nobody syncs any more."""
        if now < self._discover_at_s:
            return
        core = self.core
        self._discover_at_s = now + random.uniform(0.8, 1.0) * MARK_LEASES * core.settings.lease_s
        used = [book.address for book in core.ledger.books()]
        answer = await core.store.once(core.ops.discover(used))
        unused = set(answer).difference(used)
        for address in list(self._adopted):  # it came back into use, here or, if nothing was reaped, elsewhere
            if address in used or now - self._adopted_s[address] > 3 * core.settings.lease_s:
                del self._adopted[address], self._adopted_s[address]
        for address in unused - set(self._adopted):
            listed = await core.store.command("ZRANGE", core.ops.keys.workers(address), "0", "-1")
            if listed:
                log.info("address_adopted address=%s workers=%d", address, len(listed))
                self._adopted[address], self._adopted_s[address] = tuple(str(worker) for worker in listed), now

    async def _forget(self, now: float) -> None:
        """Leave addresses that had no room for long: nodes come and go, a worker lives for weeks."""
        core = self.core
        for book in core.ledger.books():
            if book.rooms or any(feed.keeps(book.address) for feed in core.feeds):
                self._empty_since.pop(book.address, None)
                continue
            since = self._empty_since.setdefault(book.address, now)
            leases = FORGET_FAILED_LEASES if book.node.state == FAILED or book.unreachable else FORGET_LEASES
            if now - since < leases * core.settings.lease_s or book.behind:  # a lease is renewed: at the next tick
                continue
            if core.ledger.forget(book):
                self._empty_since.pop(book.address, None)
                core.detector.forget(book.address)
                self.forgotten(book.address)
                core.ended(book.address)  # nobody watches the node from here: what is cached about it would outlive it
                await core.store.run(
                    core.ops.reap_worker(book.address, book.worker, book.worker, "no rooms for long", leaving=True)
                )
