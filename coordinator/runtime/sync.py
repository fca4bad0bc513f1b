"""The sync loop: every few ms while rooms change, every tick while nothing does, one batch per address, all
addresses in one round trip. Errors leave the ledger as it is; the same batch goes out again after a back-off.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..decide.book import Book
from ..errors import CoordinatorError, StoreUnavailable
from ..protocol import SUSPECT, Batch, SyncReply, SyncStatus
from ..store.client import delays
from .core import Core, log, wait_for

BUSY_ROUNDS = 20  # quiet rounds at the fast pace before the loop sleeps until the next tick
FULL_PAUSE_S = 1.0  # how long adds wait after the store said that it is full


@dataclass(slots=True)
class SyncLoop:
    """Carries books to the store and answers back."""

    core: Core
    _tick_at: dict[str, float] = field(default_factory=dict)
    _retry_at: dict[str, float] = field(default_factory=dict)
    _said: dict[str, str] = field(default_factory=dict)  # the error logged last, by address
    _blocked_until_s: float = 0.0
    _pause: Callable[[], float] = field(default_factory=delays)
    _quiet: int = 0
    _fed: bool = False  # another feed is due soon

    async def run(self) -> None:
        """Turn for ever; the supervisor restarts it."""
        while True:
            self.core.supervisor.beat("sync")
            self._fed = self.core.feed()
            now = time.monotonic()
            self.core.failed(list(self.core.ledger.due_deadlines(now)))
            if now >= self._blocked_until_s and (due := self._due(now)):
                await self.round(due)
            await wait_for(self.core.sync_wake, self._sleep_s())

    def _due(self, now: float) -> list[Book]:
        urgent, self.core.urgent = self.core.urgent, set()
        found = []
        for book in self.core.ledger.books():
            if book.address not in self._tick_at:
                self._tick_at[book.address] = now + random.uniform(0, self.core.settings.tick_s)
                found.append(book)  # first contact
            elif now < self._retry_at.get(book.address, 0.0):
                continue
            elif self._tick_at[book.address] <= now or book.address in urgent or (book.behind and not book.held(now)):
                found.append(book)
        return found

    async def round(self, books: list[Book]) -> None:
        """Send one batch for each of `books` and bring the answers in."""
        s, now = self.core.settings, time.monotonic()
        batches: list[Batch] = []
        for book in books:
            ticking = self._tick_at.get(book.address, 0.0) <= now
            claim = self.core.detector.claim(book.address, now)
            batches.append(book.batch(now, s.batch_rooms, book.stats(now) if ticking else None, claim))
            if ticking:
                self._tick_at[book.address] = now + s.tick_s * random.uniform(0.9, 1.0)
        replies = await self.core.store.many([self.core.ops.sync(batch) for batch in batches], sync=True)
        now, good, error = time.monotonic(), 0, None
        for book, batch, reply in zip(books, batches, replies, strict=True):
            if isinstance(reply, StoreUnavailable) and reply.word == "OOM":
                good += 1  # it answers; it only has no room for more
                self.core.store_is_full(True)
                book.retract(now + FULL_PAUSE_S)
            elif isinstance(reply, CoordinatorError):
                error = reply
                self._failed(book, reply, now)
            else:
                good += 1
                self._retry_at.pop(book.address, None)
                self._said.pop(book.address, None)
                self._answered(book, batch, reply, now)
        if good:
            self.core.store_works()
            self._pause, self._blocked_until_s = delays(), 0.0
        elif error is not None:
            self.core.store_fails(error)
            self._blocked_until_s = now + self._pause()

    def _failed(self, book: Book, error: CoordinatorError, now: float) -> None:
        self._retry_at[book.address] = now + random.uniform(0.5, 1.0) * self.core.settings.tick_s
        if not isinstance(error, StoreUnavailable) and self._said.get(book.address) != str(error):
            self._said[book.address] = str(error)
            log.error("sync_failed address=%s error=%r", book.address, str(error))

    def _answered(self, book: Book, batch: Batch, reply: SyncReply, now: float) -> None:
        self.core.count("syncs")
        if reply.status is SyncStatus.RESYNC and batch.number > 1:
            self.core.count("resyncs")
            log.warning("resync address=%s worker=%s", book.address, book.worker)
        if reply.status is SyncStatus.FENCED:
            self.core.count("fenced")
            log.warning("lease_lost address=%s worker=%s", book.address, book.worker)
        if batch.adds and reply.status is SyncStatus.OK:
            self.core.store_is_full(False)
        before = book.node.state
        outcome = book.apply(batch, reply, now)
        self.core.act(book, outcome)
        if reply.node.state == SUSPECT != before:  # once: under load an answer comes every few ms
            self.core.suspect(book.address)
        if outcome.again and not book.held(now):
            self.core.urgent.add(book.address)

    def _sleep_s(self) -> float:
        """How long until there is something to do; books are put to sleep before the last look at them."""
        now, core = time.monotonic(), self.core
        if now < self._blocked_until_s:
            return self._blocked_until_s - now
        books = core.ledger.books()
        busy = self._fed or bool(core.urgent) or any(b.behind and not b.held(now) for b in books)
        self._quiet = 0 if busy else self._quiet + 1
        if busy or self._quiet < BUSY_ROUNDS:
            return core.settings.flush_s
        for book in books:
            book.asleep = True
        if any(book.dirty and not book.held(now) for book in books) or not all(feed.rest() for feed in core.feeds):
            return core.settings.flush_s
        wakes = [self._tick_at.get(book.address, now) for book in books]
        wakes += [deadline for deadline in (core.ledger.next_deadline_s(),) if deadline is not None]
        return max(0.0, min([now + core.settings.tick_s, *wakes]) - now)

    def forget(self, address: str) -> None:
        """The address is no longer in use."""
        self._tick_at.pop(address, None)
        self._retry_at.pop(address, None)
        self._said.pop(address, None)
