"""What the loops of one worker share, and the one place where an outcome becomes action.

All methods run on the worker's event loop. `act` is called outside every lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ..config import Settings
from ..decide.book import Book, Outcome
from ..decide.detector import Detector
from ..decide.ledger import Ledger, Room
from ..protocol import NodeView
from ..rooms import Cause, Failure
from ..store.client import AsyncStore
from ..store.ops import Ops
from .deliver import Delivery
from .supervisor import Supervisor

log = logging.getLogger("coordinator")


class Feed(Protocol):
    """Enters in the ledger what other threads have noted, from the worker's loop."""

    def feed(self, now: float) -> bool:
        """Enter what is there; True to be asked again within `flush_s`."""
        ...

    def rest(self) -> bool:
        """The loop is going to sleep: call `Core.wake` on the next note from here on; False if something waits."""
        ...

    def keeps(self, address: str) -> bool:
        """Whether this address is to be watched also while no room is open there."""
        ...


COUNTERS = (
    "syncs",
    "sync_errors",
    "resyncs",
    "fenced",
    "rooms_failed",
    "epochs_ended",
    "give_ups",
    "votes",
    "verdicts",
    "probes",
    "misses",
    "probe_errors",
    "late_dropped",
    "instances_replaced",
    "revived",
    "workers_reaped",
    "aborts",
    "passed_on",
    "not_passed_on",
    "acks",
    "push_messages",
    "callback_errors",
    "misconfigured",
)


@dataclass(slots=True)
class Core:
    """State shared by sync, heartbeat, push and janitor."""

    settings: Settings
    ops: Ops
    store: AsyncStore
    ledger: Ledger
    detector: Detector
    delivery: Delivery
    supervisor: Supervisor = field(default_factory=Supervisor)
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    on_ended: list[Callable[[str], object]] = field(default_factory=list)
    on_answer: list[Callable[[str], object]] = field(default_factory=list)
    feeds: list[Feed] = field(default_factory=list)
    urgent: set[str] = field(default_factory=set)  # addresses to sync at once
    acknowledge: list[tuple[str, str]] = field(default_factory=list)  # (address, pending field)
    reap: dict[tuple[str, str], None] = field(default_factory=dict)  # (address, worker), in order
    sync_wake: asyncio.Event = field(default_factory=asyncio.Event)
    probe_wake: asyncio.Event = field(default_factory=asyncio.Event)
    chore_wake: asyncio.Event = field(default_factory=asyncio.Event)
    store_ok_s: float | None = None
    store_errors: int = 0  # failed rounds since the last good one
    store_error: str = ""
    store_full: bool = False  # it refuses what needs memory: joins wait here

    @property
    def store_away(self) -> bool:
        """Whether the last round of syncs failed."""
        return self.store_errors > 0

    def count(self, name: str, by: int = 1) -> None:
        """Move a counter."""
        self.counters[name] += by

    def hurry(self, address: str) -> None:
        """Sync this address at once."""
        self.urgent.add(address)
        self.sync_wake.set()

    def suspect(self, address: str) -> None:
        """Probe this address soon."""
        self.detector.ask(address)
        self.probe_wake.set()

    def learn(self, book: Book, view: NodeView) -> None:
        """Bring in what another call than sync said about a node: news only, as such a call may answer late."""
        if view.epoch > book.node.epoch:
            outcome = Outcome()
            book.learn(view, time.monotonic(), outcome)
            self.act(book, outcome)
        self.hurry(book.address)

    def act(self, book: Book, outcome: Outcome) -> None:
        """Do what an outcome asks for."""
        address = book.address
        if outcome.ended:
            self.count("epochs_ended")
            self.ended(address)
        if outcome.revived:
            self.count("revived")
            log.info("node_revived address=%s epoch=%d", address, book.node.epoch)
        if outcome.ended or outcome.revived:
            self.detector.renew(address)
        self.failed(outcome.failed)
        self.count("aborts", sum(failure.cause is Cause.ABORTED for _, failure in outcome.failed))
        for name in outcome.acknowledge:
            self.acknowledge.append((address, name))
        for worker in outcome.expired:
            self.reap[address, worker] = None
        if outcome.acknowledge or outcome.expired:
            self.chore_wake.set()
        if outcome.turns:
            self.detector.turn(address, time.monotonic() + outcome.turn_ms / 1000, outcome.turns)
            self.probe_wake.set()

    def feed(self) -> bool:
        """Enter in the ledger what was noted elsewhere; whether there is more to come."""
        more = False
        for feed in self.feeds:
            try:
                more |= feed.feed(time.monotonic())
            except Exception:  # not ours: the rooms of the ledger must not depend on it
                self.count("callback_errors")
                log.exception("feed_failed")
        return more

    def ended(self, address: str) -> None:
        """What is cached about the node is void; hooks may only drop it and queue the rest."""
        for hook in self.on_ended:
            self._hook(hook, address)

    def answered(self, address: str) -> None:
        """A probe got a good answer (a "good beat")."""
        for hook in self.on_answer:
            self._hook(hook, address)

    def _hook(self, hook: Callable[[str], object], address: str) -> None:
        try:
            hook(address)
        except BaseException:  # a hook is not ours; failing the rooms must not depend on it
            self.count("callback_errors")
            log.exception("hook_failed address=%s", address)

    def failed(self, pairs: list[tuple[Room, Failure]]) -> None:
        """Count, log and tell about failed rooms."""
        if not pairs:
            return
        self.count("rooms_failed", len(pairs))
        failure = pairs[0][1]
        log.warning(
            "rooms_failed address=%s count=%d cause=%s epoch=%d by=%s reason=%r",
            failure.address, len(pairs), failure.cause, failure.epoch, failure.by, failure.reason,
        )  # fmt: skip
        self.delivery.failed(pairs)

    def give_up(self, book: Book, reason: str) -> None:
        """Fail this worker's own rooms at a node that it alone cannot reach."""
        self.count("give_ups")
        log.warning("node_unreachable address=%s reason=%r", book.address, reason)
        pairs = book.fail_unreachable(reason)
        self.ended(book.address)
        self.failed(pairs)
        self.sync_wake.set()

    def store_works(self) -> None:
        """A round of syncs succeeded."""
        if self.store_errors:
            log.info("store_back after_errors=%d", self.store_errors)
        self.store_ok_s, self.store_errors, self.store_error = time.monotonic(), 0, ""

    def store_is_full(self, full: bool) -> None:
        """The store refused rooms for want of memory, or took some."""
        if full and not self.store_full:
            log.warning("store_full hint='joins wait in this process: raise maxmemory'")
        if self.store_full and not full:
            log.info("store_takes_rooms")
        self.store_full = full

    def store_fails(self, error: Exception) -> None:
        """A round of syncs failed."""
        if not self.store_errors:
            log.warning("store_away error=%r", str(error))
        self.store_errors += 1
        self.store_error = str(error)
        self.count("sync_errors")


async def wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until `event` is set or the time is over; clears it."""
    if not event.is_set() and timeout_s > 0:
        handle = asyncio.get_running_loop().call_later(timeout_s, event.set)
        try:
            await event.wait()
        finally:
            handle.cancel()
    else:
        await asyncio.sleep(0)
    event.clear()
