"""The prefill side's public object: announces a node, renews it, and is told which rooms died with their workers.

The node's own rooms are not listed here: what it needs is to hear, soon, whose KV it may free.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from .address import canonical
from .config import Settings
from .errors import ConfigError, CoordinatorError, NodeSuperseded, StoreUnavailable
from .protocol import Registration, clean_text
from .rooms import check_room_id
from .runtime.core import wait_for
from .runtime.deliver import Delivery
from .runtime.loop import LoopThread
from .runtime.probe import clean_instance
from .runtime.push import Listener
from .runtime.supervisor import Supervisor
from .store.client import AsyncStore, delays
from .store.connect import async_client, parse_url, redact
from .store.discover import find_store
from .store.ops import Ops
from .store.verdict import register_async

log = logging.getLogger("coordinator")

INFO_LIMIT = 65536
MARK_LEASES = 0.25  # pace of marking the address as used
PAGE = 250  # of a snapshot; one read holds the server for less than a millisecond

OnOrphans = Callable[[str, list[int]], object]


class PrefillNode:
    """Announces this process as the node at `address`.

    `instance` is the identity of this life of the process (default: random); another one at the same address ends
    the rooms of the former. Serve it in the X-Coordinator-Instance header of /health, so that a worker's probe can
    see a restart too. `info` is any JSON object for the decode side (rank endpoints, parallel sizes), up to 64 KiB.
    `on_orphans(worker_id, room_ids)` is called on a thread of its own with the rooms of a dead or departed worker,
    at most 250 at a time; they are acknowledged after it returned, and told again if it raised or this process
    dies before. The store need not be up yet. Raises InvalidAddress, ConfigError, StoreNotFound.
    """

    def __init__(
        self,
        address: str,
        url: str = "",
        *,
        instance: str | None = None,
        info: Mapping[str, Any] | None = None,
        settings: Settings | None = None,
        on_orphans: OnOrphans | None = None,
        client: Callable[[], Any] | None = None,
    ) -> None:
        self.address = canonical(address)
        self.instance = secrets.token_hex(8) if instance is None else clean_instance(instance)
        if not self.instance:
            raise ConfigError(f"instance {instance!r}: use 1-128 printable ASCII characters without spaces")
        self._info = json.dumps(dict(info or {}), sort_keys=True)
        if len(self._info) > INFO_LIMIT:
            raise ConfigError(f"info of {self.address} has {len(self._info)} bytes as JSON: at most {INFO_LIMIT}")
        self.settings = Settings.load(url=url or None) if settings is None else settings
        found = "" if client else find_store(url or self.settings.url).url
        self.url = parse_url(found).url if found else ""  # refused before a thread starts
        self._client = client or (lambda: async_client(self.url, self.settings))
        self._on_orphans = on_orphans
        self._delivery = Delivery(f"coordinator orphans {self.address}")
        self._draining: bool | None = None
        self._closed = self._superseded = False
        self._announced_s: float | None = None
        self._mark_at_s = 0.0
        self._error = ""
        self._last: Registration | None = None
        self.counters = dict.fromkeys(
            ("renewals", "renew_errors", "orphans_told", "workers_reaped", "callback_errors"), 0
        )
        self._thread = LoopThread(f"coordinator node {self.address}")
        try:
            self._thread.run(self._start())
        except BaseException:  # a URL or client that cannot be used: leave no thread behind
            self._thread.stop()
            raise
        _living.add(self)
        log.info("node_started address=%s instance=%s store=%s", self.address, self.instance, redact(self.url))

    async def _start(self) -> None:
        self._ops = Ops(self.settings)
        self._store = AsyncStore(self._client(), self.settings.retry_s)
        self._woken, self._told, self._registering = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._orphaned: list[str] = []
        self._pending_s: dict[str, float] = {}  # snapshots by the time they were first heard of
        self._supervisor = Supervisor()
        channel = self._ops.keys.channel
        listener = Listener(self._store.client, channel, self._heard, lambda: self._supervisor.beat("push"))
        self._supervisor.start("announce", self._announce)
        self._supervisor.start("push", listener.run)
        if self._on_orphans is not None:
            self._supervisor.start("orphans", self._hand_over)

    def _heard(self, kind: str, address: str) -> None:
        if address == self.address and kind in ("reaped", "failed"):
            self._woken.set()

    # -- the loop -----------------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        pause = delays()
        while not self._superseded:
            self._supervisor.beat("announce")
            wait_s = self.settings.tick_s
            try:
                answer = await self._register()
                pause = delays()
                await self._follow(answer)
            except StoreUnavailable as exc:
                self._trouble(exc)
                wait_s = min(wait_s, pause())
            except CoordinatorError as exc:
                self._trouble(exc)
            await wait_for(self._woken, wait_s)
        await asyncio.Event().wait()  # superseded: nothing to announce, and nothing to restart either

    async def _register(self) -> Registration:
        async with self._registering:  # an earlier call that answers late must not hide what a later one was told
            return await self._register_now()

    async def _register_now(self) -> Registration:
        how = "start" if self._announced_s is None else "renew"
        epoch = self._last.node.epoch if self._last else 0
        answer = await register_async(
            self._store, self._ops, self.address, how, self.instance, epoch, f"node:{self.instance}",
            self._info, self._draining,
        )  # fmt: skip
        if time.monotonic() >= self._mark_at_s:
            await self._store.run(self._ops.discover([self.address]))
            self._mark_at_s = time.monotonic() + MARK_LEASES * self.settings.lease_s
        self._announced_s, self._last, self._error = time.monotonic(), answer, ""
        self.counters["renewals"] += 1
        return answer

    def _trouble(self, exc: CoordinatorError) -> None:
        self.counters["renew_errors"] += 1
        if not self._error:
            log.warning("announce_failed address=%s error=%r", self.address, str(exc))
        self._error = str(exc)

    async def _follow(self, answer: Registration) -> None:
        """Do what the answer tells: stop if superseded, reap expired workers, take over orphans."""
        if answer.outcome == "PAST":
            self._superseded = True
            log.error("node_superseded address=%s instance=%s", self.address, self.instance)
            return
        me = f"node:{self.instance}"
        for worker in answer.expired:
            reaped = await self._store.run(self._ops.reap_worker(self.address, worker, me, "lease expired"))
            if reaped.outcome == "REAPED":
                self.counters["workers_reaped"] += 1
                log.warning("worker_reaped address=%s worker=%s rooms=%d", self.address, worker, reaped.rooms)
                self._woken.set()
        now = time.monotonic()
        for name in answer.pending:
            self._pending_s.setdefault(name, now)
        # Nobody acknowledges the snapshot of an owner that died: when its set has expired, its entry goes too.
        old = [name for name, since in self._pending_s.items() if now - since > self.settings.retention_s]
        for name in old[:PAGE]:
            del self._pending_s[name]
            await self._store.run(self._ops.drain_drop(self.address, name, me))
        self._orphaned = [name for name in answer.pending if name.startswith("orphans:")]
        if self._orphaned:
            self._told.set()

    async def _hand_over(self) -> None:
        """Tell about orphans; a loop of its own, as the callback may take long and the node must go on announcing."""
        while True:
            self._supervisor.beat("orphans")
            todo, self._orphaned = self._orphaned, []
            for name in todo:
                try:
                    await self._take_over(name)
                except StoreUnavailable as exc:  # named again by the next renewal
                    self._trouble(exc)
            await wait_for(self._told, self.settings.tick_s)

    async def _take_over(self, name: str) -> None:
        worker, cursor = name.removeprefix("orphans:"), "0"
        while True:
            page = await self._store.run(self._ops.drain_read(self.address, name, cursor, PAGE))
            for start in range(0, len(page.rooms), PAGE):
                rooms = list(page.rooms[start : start + PAGE])
                try:
                    await self._tell(worker, rooms)
                except Exception:
                    self.counters["callback_errors"] += 1
                    return  # not acknowledged: told again at the next tick
                self.counters["orphans_told"] += len(rooms)
            cursor = page.cursor
            if cursor == "0":
                break
        await self._store.run(self._ops.drain_ack(self.address, name, f"node:{self.instance}"))

    async def _tell(self, worker: str, rooms: list[int]) -> None:
        """Call back on a daemon thread: a callback that hangs must not keep the process from ending."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle(error: BaseException | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(RuntimeError(repr(error)))

        def call() -> None:
            error: BaseException | None = None
            try:
                assert self._on_orphans is not None
                self._on_orphans(worker, rooms)
            except BaseException as exc:
                error = exc
                log.exception("callback_failed address=%s worker=%s", self.address, worker)
            self._thread.soon(lambda: settle(error))

        self._delivery.do(call)
        await done

    # -- public -------------------------------------------------------------------------------------------------

    def wait_announced(self, timeout_s: float = 5.0) -> bool:
        """Wait until the store knows this node; False if it does not within `timeout_s`.

        Raises NodeSuperseded when another instance has taken the address.
        """
        deadline = time.monotonic() + timeout_s
        while self._announced_s is None and time.monotonic() < deadline:
            time.sleep(0.002)
        if self._superseded:
            raise NodeSuperseded(f"{self.address}: instance {self.instance} was replaced by another one: stop serving")
        return self._announced_s is not None

    def drain(self) -> None:
        """Refuse new joins from now on; open rooms finish. Raises StoreUnavailable (safe to retry)."""
        self._set_draining(True)

    def undrain(self) -> None:
        """Accept joins again. Raises StoreUnavailable (safe to retry)."""
        self._set_draining(False)

    def _set_draining(self, flag: bool) -> None:
        self._draining = flag
        self._thread.run(self._register())

    def abort(self, worker_id: str, room_id: int, reason: str) -> bool:
        """Ask `worker_id` to fail one of its rooms here; False if the store does not know it as open.

        Raises InvalidRoom, StoreUnavailable (safe to retry).
        """
        room, by = check_room_id(room_id), f"node:{self.instance}"
        return self._thread.run(self._abort(worker_id, room, clean_text(reason), by))

    async def _abort(self, worker_id: str, room: int, reason: str, by: str) -> bool:
        """A worker that was fenced here, or had left for a while, is listed as `<id>.N`."""
        if await self._store.run(self._ops.abort_room(self.address, worker_id, room, reason, by)):
            return True
        key = self._ops.keys.workers(self.address)
        listed = await self._store.retry(lambda: self._store.command("ZRANGE", key, "0", "-1"))
        for life in (str(worker) for worker in listed):
            if life.startswith(f"{worker_id}.") and await self._store.run(
                self._ops.abort_room(self.address, life, room, reason, by)
            ):
                return True
        return False

    def open_among(self, room_ids: Sequence[int]) -> set[int]:
        """Those of `room_ids` that a worker which is listed here has open: the same number may be open in several.

        What a worker opened within its last `flush_s` is not seen. Raises InvalidRoom, StoreUnavailable (retry).
        """
        return self._thread.run(self._open_among([check_room_id(room) for room in room_ids]))

    async def _open_among(self, rooms: list[int]) -> set[int]:
        keys, store = self._ops.keys, self._store
        listed = await store.retry(lambda: store.command("ZRANGE", keys.workers(self.address), "0", "-1"))
        found: set[int] = set()
        for worker in listed:
            calls = [("SISMEMBER", keys.rooms(self.address, str(worker)), str(room)) for room in rooms]
            replies = await store.retry(lambda calls=calls: store.commands(calls))  # type: ignore[misc]
            found |= {room for room, there in zip(rooms, replies, strict=True) if int(there)}
        return found

    @property
    def superseded(self) -> bool:
        """Whether another instance has registered at this address since: this process must not serve there."""
        return self._superseded

    def health(self) -> dict[str, Any]:
        """Plain data about this node: never blocks, never raises."""
        ago = None if self._announced_s is None else round(time.monotonic() - self._announced_s, 3)
        return {
            "address": self.address,
            "instance": self.instance,
            "status": "superseded" if self._superseded else "degraded" if self._error or ago is None else "ok",
            "state": self._last.node.state if self._last else "unknown",
            "epoch": self._last.node.epoch if self._last else 0,
            "draining": self._last.node.draining if self._last else False,
            "announced_s_ago": ago,
            "error": self._error,
            "beats_s_ago": {name: round(age, 3) for name, age in self._supervisor.ages().items()},
            "counters": dict(self.counters),
        }

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop announcing. Rooms that are open here go on until their owners or a probe decide. Repeatable."""
        if self._closed or os.getpid() != self._thread.pid:
            return
        self._closed = True
        _living.discard(self)
        with contextlib.suppress(TimeoutError):
            self._thread.run(self._stop(), timeout_s)
        self._thread.stop()
        self._delivery.stop(0.1)

    async def _stop(self) -> None:
        await self._supervisor.stop()
        await self._store.aclose()

    async def aclose(self) -> None:
        """As close, for asyncio."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> PrefillNode:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> PrefillNode:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()


_living: weakref.WeakSet[PrefillNode] = weakref.WeakSet()


def _close_all() -> None:
    for node in list(_living):
        node.close()


atexit.register(_close_all)
