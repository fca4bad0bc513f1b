"""The decode side's public object: one per process. Joins, updates and leaves touch memory only; a thread with
one event loop writes them to the shared store, watches the nodes and brings back which rooms failed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from .address import canonical
from .config import Settings, check_name
from .decide.book import CLOSED, Book
from .decide.detector import Detector
from .decide.ledger import Ledger, Room
from .decide.notes import Notes
from .errors import StoreUnavailable, UnknownAddress, WorkerClosed
from .protocol import FAILED, NodeView, Page, Verdict, clean_text, worker_id
from .rooms import Cause, Failure, Status
from .runtime.core import Core
from .runtime.deliver import Callback, Delivery
from .runtime.heartbeat import Heartbeat
from .runtime.janitor import Janitor
from .runtime.loop import LoopThread
from .runtime.probe import HttpProbe, Probe
from .runtime.push import Listener
from .runtime.ranks import Ranks
from .runtime.sync import SyncLoop
from .store.client import AsyncStore
from .store.connect import async_client, parse_url, redact
from .store.discover import find_store
from .store.ops import Op, Ops
from .store.verdict import fail_address_async, new_call

log = logging.getLogger("coordinator")

CLOSE_S = 3.0
PAGE = 250  # of a snapshot; one read holds the server for less than a millisecond


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """What failing a node did: the epoch that ended and how many rooms each worker had open there.

    `already`: that epoch had ended before, with that `reason` (a failure, or a restart); this call changed nothing.
    """

    address: str
    epoch: int
    reason: str
    counts: dict[str, int]
    already: bool = False
    _read: Callable[[str, str], Page] = field(repr=False, default=lambda field, cursor: Page("0", ()))

    def rooms(self) -> Iterator[tuple[str, int]]:
        """(worker, room id) of the snapshot, read in bounded pieces; each once.

        The snapshot is readable until `linger_s` after its owner acknowledged it. Raises StoreUnavailable.
        """
        for worker in self.counts:
            seen: set[int] = set()  # SSCAN may repeat an element
            cursor = "0"
            while True:
                page = self._read(f"lost:{self.epoch}:{worker}", cursor)
                for room in page.rooms:
                    if room not in seen:
                        seen.add(room)
                        yield worker, room
                cursor = page.cursor
                if cursor == "0":
                    break


class Worker:
    """Shares this process's rooms through the store and is told which of them failed. Thread-safe.

    `url` is the store (see the README for the order in which one is found without it), `name` a readable name;
    the id is `<name>#<8 hex>`, new with every start. Workers of one `group` open the same rooms (the ranks of one
    engine; their id is `<name>@<group>#<8 hex>`): a room that fails at one of them by itself fails at all.
    `settings` are taken as they are; else they come from COORDINATOR_* variables. `probe` replaces the HTTP /health
    probe. The store need not be up yet. Raises ConfigError, StoreNotFound.
    """

    def __init__(
        self,
        url: str = "",
        *,
        name: str = "worker",
        group: str = "",
        settings: Settings | None = None,
        probe: Probe | None = None,
        client: Callable[[], Any] | None = None,
    ) -> None:
        self.group = check_name(group, "group") if group else ""
        self.id = worker_id(check_name(name), self.group, secrets.token_hex(4))
        self.settings = Settings.load(url=url or None) if settings is None else settings
        found = "" if client else find_store(url or self.settings.url).url
        self.url = parse_url(found).url if found else ""  # refused before a thread starts
        self._client = client or (lambda: async_client(self.url, self.settings))
        self._closed = False
        self._thread = LoopThread(f"coordinator {self.id}")
        notes = Notes(time.monotonic, self._wake_ranks) if self.group else None
        self._ledger = Ledger(self.id, time.monotonic, self._wake, notes)
        self._delivery = Delivery(f"coordinator delivery {self.id}")
        try:
            self._thread.run(self._start(probe, notes))
        except BaseException:  # a URL or client that cannot be used: leave no thread behind
            self._thread.stop()
            raise
        # The hot path without a frame of its own: the same as the methods below.
        self.join = self._ledger.join  # type: ignore[method-assign]
        self.update = self._ledger.update  # type: ignore[method-assign]
        self.leave = self._ledger.leave  # type: ignore[method-assign]
        _living.add(self)
        log.info("worker_started id=%s store=%s", self.id, redact(self.url))

    async def _start(self, probe: Probe | None, notes: Notes | None) -> None:
        s = self.settings
        store = AsyncStore(self._client(), s.retry_s)
        core = self._core = Core(s, Ops(s), store, self._ledger, Detector(s), self._delivery)
        self._sync = SyncLoop(core)
        self._heartbeat = Heartbeat(core, probe or HttpProbe(s))
        self._janitor = Janitor(core, self._sync.forget)
        self._listener = Listener(
            store.client, core.ops.keys.channel, self._heard, lambda: core.supervisor.beat("push")
        )
        core.supervisor.start("sync", self._sync.run)
        core.supervisor.start("heartbeat", self._heartbeat.run)
        core.supervisor.start("push", self._listener.run)
        core.supervisor.start("janitor", self._janitor.run)
        self._ranks = None if notes is None else Ranks(core, notes)
        if self._ranks is not None:
            core.supervisor.start("ranks", self._ranks.run)

    def _wake(self) -> None:
        self._thread.soon(self._core.sync_wake.set)

    def _wake_ranks(self) -> None:
        if self._ranks is not None:
            self._thread.soon(self._ranks.wake.set)

    def _heard(self, kind: str, address: str) -> None:
        if self._ledger.book(address) is not None:
            self._core.count("push_messages")
            self._core.hurry(address)
            if kind == "suspect":
                self._core.suspect(address)

    # -- rooms: no I/O ------------------------------------------------------------------------------------------

    def join(
        self, address: str, room_id: int, status: Status = Status.BOOTSTRAPPING, deadline_s: float | None = None
    ) -> Room:
        """Open a room. No I/O. After `deadline_s` seconds it fails by itself.

        Raises InvalidAddress, InvalidRoom, InvalidStatus, RoomExists (the open one is untouched) and JoinRefused (the
        node has failed, cannot be reached or drains: take another).
        """
        return self._ledger.join(address, room_id, status, deadline_s)

    def room(
        self, address: str, room_id: int, status: Status = Status.BOOTSTRAPPING, deadline_s: float | None = None
    ) -> Room:
        """As join, for `with worker.room(address, room_id) as room:`, which leaves on the way out, whatever happens."""
        return self._ledger.join(address, room_id, status, deadline_s)

    def update(self, address: str, room_id: int, status: Status, reason: str = "") -> bool:
        """Move a room up; False if it is not open here, is final, or would not move. No I/O.

        A room that is set to FAILED fails at the other workers of this group, too, as "aborted".

        Raises InvalidAddress, InvalidRoom, InvalidStatus.
        """
        return self._ledger.update(address, room_id, status, reason)

    def leave(self, address: str, room_id: int) -> bool:
        """Close a room; False if it is not open here. No I/O. Raises InvalidAddress, InvalidRoom."""
        return self._ledger.leave(address, room_id)

    def status(self, address: str, room_id: int) -> Status | None:
        """Where a room of this worker stands, or None if it is not here. No I/O."""
        room = self._ledger.find(address, room_id)
        return None if room is None else room.status

    def find(self, address: str, room_id: int) -> Room | None:
        """The present opening of a room of this worker, or None. No I/O."""
        return self._ledger.find(address, room_id)

    def rooms(self, address: str) -> list[Room]:
        """This worker's rooms at an address, also those that failed or succeeded and were not left. No I/O."""
        return self._ledger.rooms(address)

    def abort(self, address: str, room_id: int, reason: str) -> bool:
        """Fail one room of this worker, and so of its group; False if it is not open here.

        Rooms of others cannot be aborted from here.
        """
        failure = Failure(Cause.ABORTED, clean_text(reason), canonical(address), by=self.id)
        room = self._ledger.fail(address, room_id, failure)
        if room is not None:
            self._delivery.failed([(room, failure)])
            self._wake()
        return room is not None

    def on_failure(self, callback: Callback) -> None:
        """Call `callback(room, failure)` once for each room that fails from now on, on a thread of its own.

        A coroutine function runs on the event loop that is running here. What it raises is logged and counted.
        Not called for rooms that this process failed itself by `update`.
        """
        self._delivery.on_failure(callback)

    def on_node_ended(self, hook: Callable[[str], object]) -> None:
        """Call `hook(address)` when a node failed, restarted or cannot be reached: before its rooms are told.

        It runs on the worker's loop: drop what is cached, queue the rest with `defer`, and return.
        """
        self._core.on_ended.append(hook)

    def on_node_answered(self, hook: Callable[[str], object]) -> None:
        """Call `hook(address)` after each good probe, on the worker's loop: be quick, or use `defer`."""
        self._core.on_answer.append(hook)

    def defer(self, work: Callable[[], object]) -> None:
        """Do `work` on the delivery thread, after what was queued before; what it raises is logged and counted."""
        self._delivery.do(work)

    # -- evidence and verdicts ----------------------------------------------------------------------------------

    def report_transfer_error(self, address: str, text: str = "") -> None:
        """A transfer from this node broke: the node is probed at once. Evidence, not a verdict. No I/O here."""
        name = canonical(address)
        log.debug("transfer_error address=%s text=%r", name, clean_text(text))
        if self._ledger.book(name) is not None:
            self._thread.soon(lambda: self._core.suspect(name))

    def fail_node(self, address: str, reason: str = "operator", timeout_s: float | None = None) -> NodeFailure:
        """Fail the node for everybody now. Its rooms in this process have failed when this returns.

        Raises InvalidAddress, UnknownAddress, StoreUnavailable (repeating the call is safe).
        """
        return self._thread.run(self._fail_node(canonical(address), clean_text(reason)), timeout_s)

    async def afail_node(self, address: str, reason: str = "operator") -> NodeFailure:
        """As fail_node, for asyncio."""
        work = self._fail_node(canonical(address), clean_text(reason))
        return await asyncio.wrap_future(self._thread.submit(work))

    async def _fail_node(self, address: str, reason: str) -> NodeFailure:
        self._core.feed()
        core, book = self._core, self._ledger.book(address)
        deadline = time.monotonic() + self.settings.retry_s
        call = new_call()
        while True:
            if book is not None:  # so that the snapshot names what was joined just now; a full store may not take it
                await self._flush_until([book], min(deadline, time.monotonic() + self.settings.call_timeout_s))
            epoch = book.node.epoch if book is not None else await self._stored_epoch(address)
            if epoch == 0:
                raise UnknownAddress(
                    f"{address}: no worker or node has used it in namespace {self.settings.namespace!r}"
                )
            verdict = await fail_address_async(core.store, core.ops, address, reason, self.id, epoch, call)
            if verdict.outcome == "FAILED":
                if book is not None:
                    view = NodeView(epoch + 1, FAILED, 0, Cause.NODE_FAILED.value, reason, self.id, book.node.instance)
                    core.learn(book, view)
                core.count("verdicts")
                return NodeFailure(address, epoch, reason, verdict.counts, False, self._reader(address))
            # The epoch that was meant has ended, by whatever came first; what lives there now is another generation.
            if verdict.node.epoch > epoch or (verdict.node.state == FAILED and verdict.node.epoch == epoch):
                while book is not None and book.node.epoch < verdict.node.epoch and time.monotonic() < deadline:
                    core.hurry(address)  # the next sync tells it all, the instance too
                    await asyncio.sleep(self.settings.flush_s)
                return await self._already(address, verdict)
            if time.monotonic() >= deadline:
                raise StoreUnavailable(f"{address}: the store's epoch ({verdict.node.epoch}) keeps moving: try again")
            await asyncio.sleep(self.settings.flush_s)

    async def _stored_epoch(self, address: str) -> int:
        key = self._core.ops.keys.node(address)
        return int(await self._core.store.retry(lambda: self._core.store.command("HGET", key, "epoch")) or 0)

    async def _already(self, address: str, verdict: Verdict) -> NodeFailure:
        """The node had failed: name the snapshot that is still there."""
        epoch, core = verdict.node.epoch - 1, self._core
        words = str(await core.store.command("HGET", core.ops.keys.node(address), "verdict_counts") or "").split()
        counts = {worker: int(n) for worker, n in zip(words[::2], words[1::2], strict=True)}
        return NodeFailure(address, epoch, verdict.node.reason, counts, True, self._reader(address))

    def _reader(self, address: str) -> Callable[[str, str], Page]:
        def read(name: str, cursor: str) -> Page:
            return self._thread.run(self._core.store.run(self._core.ops.drain_read(address, name, cursor, PAGE)))

        return read

    # -- the store ----------------------------------------------------------------------------------------------

    def flush(self, timeout_s: float = 1.0) -> bool:
        """Wait until everything written before this call is in the store; False if it is not within `timeout_s`."""
        return self._thread.run(self._flush(timeout_s))

    async def aflush(self, timeout_s: float = 1.0) -> bool:
        """As flush, for asyncio."""
        return await asyncio.wrap_future(self._thread.submit(self._flush(timeout_s)))

    async def _flush(self, timeout_s: float) -> bool:
        self._core.feed()
        return await self._flush_until(self._ledger.books(), time.monotonic() + timeout_s)

    async def _flush_until(self, books: list[Book], deadline: float) -> bool:
        waiting = {book: set(book.dirty) for book in books}
        undone = {book: book.undone for book in books}
        settled: dict[Book, int] = {}
        while True:
            for book in list(waiting):
                if book.undone != undone[book] or book.unstored:  # what was on its way must be sent again
                    with book.lock:
                        waiting[book], undone[book] = book.dirty | book.rooms.keys(), book.undone
                    settled.pop(book, None)
                else:
                    waiting[book] &= book.dirty
                    if not waiting[book] and book.node.epoch:
                        settled.setdefault(book, book.sent)
                        if book.answered >= settled[book]:
                            del waiting[book]
                if book in waiting:
                    self._core.urgent.add(book.address)
            if not waiting:
                return True
            if time.monotonic() >= deadline:
                return False
            self._core.sync_wake.set()
            await asyncio.sleep(0.001)

    def node_info(self, address: str) -> dict[str, str]:
        """What the store holds about a node: epoch, state, instance, info (the text it announced) and times.

        Empty if it never registered. Raises InvalidAddress, StoreUnavailable (safe to retry).
        """
        return self._thread.run(self._node_info(canonical(address)))

    async def _node_info(self, address: str) -> dict[str, str]:
        key = self._core.ops.keys.node(address)
        found = await self._core.store.retry(lambda: self._core.store.command("HGETALL", key))
        items = found.items() if isinstance(found, dict) else zip(found[::2], found[1::2], strict=True)
        return {str(k): str(v) for k, v in items}

    def health(self) -> dict[str, Any]:
        """Plain data about this worker: never blocks, never raises. `status` is "ok", "degraded" or "closed"."""
        core, now = self._core, time.monotonic()
        addresses = {}
        watches = core.detector.watches  # read only: the loop's thread owns it
        for book in self._ledger.books():
            addresses[book.address] = {
                "state": book.state,
                "epoch": book.node.epoch,
                "rooms": len(book.rooms),
                "waiting": len(book.dirty),
                "watchers": book.watchers,
                "last_probe": str(((watch := watches.get(book.address)) and watch.last) or ""),
                "synced_s_ago": None if book.synced_s is None else round(now - book.synced_s, 3),
            }
        problems = [f"{a} is {view['state']}" for a, view in addresses.items() if view["state"] != "alive"]
        problems += [
            f"{a}: {self.settings.health_path} answers 4xx"
            for a, v in addresses.items()
            if v["last_probe"] == "misconfigured"
        ]
        if not self._closed and not self._thread.alive:
            problems.append("the worker's event loop has ended: nothing is watched any more")
        if core.store_away:
            problems.append(f"store: {core.store_error}")
        if core.store_full:
            problems.append("store: full, joins wait in this process")
        counters = {**core.counters, "callback_errors": core.counters["callback_errors"] + self._delivery.errors}
        return {
            "id": self.id,
            "status": CLOSED if self._closed else "degraded" if problems else "ok",
            "problems": problems,
            "beats_s_ago": {name: round(age, 3) for name, age in core.supervisor.ages().items()},
            "restarts": {name: pulse.restarts for name, pulse in core.supervisor.pulses.items()},
            "store": {
                "url": redact(self.url),
                "reachable": core.store_ok_s is not None and not core.store_away,
                "answered_s_ago": None if core.store_ok_s is None else round(now - core.store_ok_s, 3),
                "error": core.store_error,
                "push_connected": self._listener.connected,
            },
            "addresses": addresses,
            "counters": counters,
        }

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Leave all addresses and end the threads; open rooms are reported to their nodes and fail as "closed".

        At most `timeout_s` is spent on a store that does not answer: then the lease runs out instead. Repeatable.
        """
        if self._closed or os.getpid() != self._thread.pid:
            return
        self._closed = True
        _living.discard(self)
        self._ledger.refuse_all()
        with contextlib.suppress(
            TimeoutError, WorkerClosed
        ):  # a loop that has ended must not keep the rooms from failing
            self._thread.run(self._stop(timeout_s), timeout_s + 2.0)
        self._delivery.failed(self._ledger.fail_all())
        self._thread.stop()
        self._delivery.stop()
        log.info("worker_closed id=%s", self.id)

    async def aclose(self, timeout_s: float = CLOSE_S) -> None:
        """As close, for asyncio."""
        await asyncio.to_thread(self.close, timeout_s)

    async def _stop(self, timeout_s: float) -> None:
        core = self._core
        try:
            async with asyncio.timeout(timeout_s):
                await core.supervisor.stop()
                await self._heartbeat.stop()
                if self._ranks is not None:  # what failed just now is still passed on
                    await self._ranks.finish()
                await self._say_goodbye()
        except (TimeoutError, StoreUnavailable):
            log.warning("close_incomplete id=%s hint='the lease runs out instead'", self.id)
        finally:
            await core.store.aclose()

    async def _say_goodbye(self) -> None:
        core = self._core
        books = [book for book in self._ledger.books() if book.sent]
        behind = [book for book in books if book.behind and not book.held(time.monotonic())]
        while behind:
            await self._sync.round(behind)
            answered = [book for book in behind if book.answered == book.sent]
            if not answered and len(behind) == len(books):
                raise StoreUnavailable(core.store_error)
            behind = [book for book in answered if book.behind and not book.held(time.monotonic())]
        ops: list[Op[Any]] = [
            core.ops.reap_worker(b.address, b.worker, b.worker, "worker closed", leaving=True) for b in books
        ]
        ops += [core.ops.drain_ack(address, name, self.id) for address, name in core.acknowledge]
        await core.store.many(ops)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Worker:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<Worker {self.id} {redact(self.url)}>"


_living: weakref.WeakSet[Worker] = weakref.WeakSet()


def _close_all() -> None:
    for worker in list(_living):
        worker.close()


def _disown_all() -> None:
    for worker in list(_living):
        worker._ledger.disown()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown_all)
