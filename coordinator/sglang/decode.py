"""The decode side of the plug-in: one Worker behind each of SGLang's decode managers.

`addr_to_rooms_tracker`, `request_status`, `prefill_info_table` and `connection_pool` are replaced when the manager is
made (tables.py); SGLang's heartbeat thread is not started, the worker watches the nodes. When a node ends, its rooms
fail in the status table at once, and SGLang's own `_handle_node_failure` cleans up after it (cleanup.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..address import canonical
from ..config import Settings
from ..decide.ledger import Room
from ..errors import CoordinatorError
from ..rooms import Cause, Failure
from ..worker import Worker
from . import compat
from .cleanup import Cleaner
from .intake import NEVER, Intake
from .naming import rank_names
from .tables import BOOTSTRAPPING, FAILED, ConnectionPool, InfoTable, Notes, Rooms, StatusTable, Tracker

log = logging.getLogger("coordinator")

ATTRIBUTE = "_coordinator"
NODE_CAUSES = (Cause.NODE_FAILED, Cause.NODE_RESTARTED, Cause.UNREACHABLE)
MANAGER = "sglang.srt.disaggregation.common.conn.CommonKVManager"

Hook = tuple[str, Callable[..., Any], str]


def hooks() -> list[Hook]:
    """What to register with SGLang's HookRegistry: (target, hook, type)."""
    return [
        (f"{MANAGER}.__init__", init, "around"),
        (f"{MANAGER}._start_heartbeat_checker_thread", start_heartbeat, "around"),
        (f"{MANAGER}.try_ensure_parallel_info", ensure_info, "around"),
    ]


def init(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's own, then the tables of a decode manager are replaced. Trouble is one line, and stock behaviour."""
    original(manager, *args, **kwargs)
    try:
        if manager.disaggregation_mode.value == "decode":
            if missing := compat.lacks(manager):
                log.warning("rooms_not_shared reason='%s has no %s'", type(manager).__name__, missing)
                return
            settings = Settings.load()
            name, group = rank_names(manager)
            worker = Worker(settings.url, name=name, group=group, settings=settings)
            try:
                setattr(manager, ATTRIBUTE, Bridge(manager, worker))
            except BaseException:
                worker.close()
                raise
    except CoordinatorError as exc:
        log.warning("rooms_not_shared reason=%r hint='SGLang runs as without the coordinator'", str(exc))
    except Exception as exc:
        log.exception("rooms_not_shared reason=%r hint='SGLang runs as without the coordinator'", repr(exc))


def start_heartbeat(original: Callable[..., Any], manager: Any) -> Any:
    """The thread that SGLang joins when it tears the manager down; the worker ends with it."""
    bridge: Bridge | None = getattr(manager, ATTRIBUTE, None)
    return original(manager) if bridge is None else bridge.start_heartbeat()


def ensure_info(original: Callable[..., Any], manager: Any, bootstrap_addr: str) -> Any:
    """SGLang's own; what the node answers counts from when it was asked."""
    bridge: Bridge | None = getattr(manager, ATTRIBUTE, None)
    if bridge is None or bootstrap_addr in bridge.infos:
        return original(manager, bootstrap_addr)
    asked = bridge.infos.asked
    asked[bootstrap_addr] = time.monotonic()
    try:
        return original(manager, bootstrap_addr)
    finally:
        asked.pop(bootstrap_addr, None)


class Bridge:
    """Between one decode manager and its worker."""

    def __init__(self, manager: Any, worker: Worker) -> None:
        self.manager, self.worker = manager, worker
        self._core, s = worker._core, worker.settings
        self._changed: deque[tuple[str, bool, float]] = deque()
        records: dict[int, str] = manager.failure_records
        self.notes = Notes(worker._wake)
        self.statuses = StatusTable(self.notes, records)
        self.infos = InfoTable(self._info_changed)
        self.intake = Intake(worker._ledger, self.notes, self.infos, 2 * (s.probe_timeout_s + s.probe_interval_s))
        self.tracker = Tracker(
            lambda address: Rooms(
                address, self.notes, self.statuses, records, self._forget_room, self._lost, self._count
            )
        )
        self.pool = ConnectionPool(manager.connection_pool)
        self.cleaner = Cleaner(
            manager, self.infos, self.pool, self.tracker, lambda: self._core.count("callback_errors")
        )
        stock_update, stock_record = manager.update_status, manager.record_failure
        statuses, cleaning = self.statuses, self.cleaner.works_here
        setdefault = statuses.setdefault

        def update_status(bootstrap_room: int, status: int) -> None:
            if status == BOOTSTRAPPING:  # SGLang's own does nothing more for a decode manager
                setdefault(bootstrap_room, BOOTSTRAPPING)
            elif status == FAILED and cleaning():
                return
            elif bootstrap_room in statuses:  # SGLang's own reads, then writes: a clear between would be undone
                statuses.move(bootstrap_room, status)
            else:
                stock_update(bootstrap_room, status)

        def record_failure(bootstrap_room: int, failure_reason: str) -> None:
            if not cleaning():
                stock_record(bootstrap_room, failure_reason)

        self._core.feeds.append(self)
        worker.on_failure(self._failed)
        worker.on_node_ended(self._ended)
        stock_beat = getattr(_common_manager(manager), "_on_heartbeat_success", None)
        if getattr(type(manager), "_on_heartbeat_success", None) is not stock_beat:
            worker.on_node_answered(self._answered)
        # Last: nothing of the manager is changed unless all of it is.
        manager.request_status, manager.addr_to_rooms_tracker = self.statuses, self.tracker
        manager.prefill_info_table, manager.connection_pool = self.infos, self.pool
        manager.update_status, manager.record_failure = update_status, record_failure
        common = _common_manager(manager)
        if common is not None and type(manager).check_status is common.check_status:
            manager.check_status = self.statuses.__getitem__  # what it does, without a frame of its own: each poll
        log.info("rooms_shared worker=%s manager=%s", worker.id, type(manager).__name__)

    # -- the worker's loop: a Feed ------------------------------------------------------------------------------

    def feed(self, now: float) -> bool:
        """Enter what SGLang's threads have noted."""
        core = self._core
        while self._changed:
            address, known, at_s = self._changed.popleft()
            if known:
                self.intake.watch(address)
                if address in self.intake.spelled:
                    core.detector.heard(canonical(address))
                    core.probe_wake.set()
            elif address in self.intake.spelled:  # what SGLang knew of the node was in use until now
                book = core.ledger.book(canonical(address))
                if book is not None:
                    core.failed(book.void(at_s))
        taken = self.intake.take(now, core.store_away)
        core.failed(taken.failed)
        if taken.lost:
            self.worker.defer(lambda: [self.statuses.fail(*room) for room in taken.lost])
        for address in taken.ask:
            core.suspect(address)
        for address in taken.dead:  # no epoch ends again: without this SGLang would send requests there for ever
            if address in self.infos:
                self.cleaner.clean(address)
        for address in taken.emptied:
            if address not in self.intake.counts:
                self.tracker.pop(address, None)
                self._forget_unknown(address)
        return taken.more

    def _forget_unknown(self, address: str) -> None:
        """Of an address whose node was never known nothing is kept: the janitor only sees those in the ledger."""
        if address in self.intake.spelled:
            name = canonical(address)
            if self._core.ledger.book(name) is None:
                self.intake.forget(name)

    def rest(self) -> bool:
        """Whether nothing waits; from here on a note wakes the loop."""
        self.notes.asleep = True
        return not (self.notes.queue or self._changed or self.intake.restless)

    def keeps(self, address: str) -> bool:
        """Whether SGLang uses this address."""
        return self.intake.keeps(address)

    def _ended(self, address: str) -> None:
        book = self._core.ledger.book(address)
        if book is None:  # forgotten: no room was there for long, and SGLang knows nothing of it
            self.intake.forget(address)
            return
        void_s = NEVER if book.unreachable or book.past is None else book.past[0]
        for spelling in list(self.intake.names.get(address, ())):
            since, until = self.infos.period(spelling)
            fresh = until == NEVER and since >= void_s  # fetched from the next instance already
            if not fresh and (until == NEVER or spelling in self.intake.counts):
                self.cleaner.clean(spelling)

    def _answered(self, address: str) -> None:
        for spelling in list(self.intake.names.get(address, ())):
            if spelling in self.infos:
                self.cleaner.good_beat(spelling, self._drop_view)

    def _drop_view(self, address: str) -> None:
        """A backend's hook may have looked into the tracker, which makes a view."""
        if address not in self.intake.counts:
            self.tracker.pop(address, None)

    # -- failures -----------------------------------------------------------------------------------------------

    def _failed(self, room: Room, failure: Failure) -> None:
        """On the delivery thread: the room fails in SGLang."""
        self.statuses.fail(room.id, room.opened_s, self._reason(failure))

    def _reason(self, failure: Failure) -> str:
        """What SGLang's exception will say; nothing if it was another rank's failure, which SGLang says itself."""
        if failure.cause is Cause.ABORTED and self.worker.group and f"@{self.worker.group}#" in failure.reason:
            return ""
        if failure.cause in (Cause.ABORTED, Cause.LEASE_LOST, Cause.CLOSED):
            return f"{failure.cause}: {failure.reason}"
        where = f"Lost connection with prefill instance (bootstrap_addr: {failure.address})"
        return f"{where}: {failure.cause}: {failure.reason}"

    def _lost(self, address: str) -> list[int]:
        """The rooms at an address that failed with the node and are not cleared yet."""
        began = self.statuses.opened
        try:
            rooms = self.worker.rooms(address)
        except CoordinatorError:
            return []
        return [
            room.id
            for room in rooms
            if room.failure is not None
            and room.failure.cause in NODE_CAUSES
            and began.get(room.id, NEVER) <= room.opened_s
        ]

    # -- SGLang's threads ---------------------------------------------------------------------------------------

    def _info_changed(self, address: str) -> None:
        """Under connection_lock, or on a scheduler thread."""
        since, until = self.infos.period(address)
        self._changed.append((address, until == NEVER, since if until == NEVER else until))
        if self.notes.asleep:
            self.notes.stir()

    def _forget_room(self, room: int, now: float) -> None:
        """A number is opened again: nothing is inherited from an earlier request."""
        if self.statuses.forget(room, now):
            self.manager.required_prefill_response_num_table.pop(room, None)
            self.manager.prefill_response_tracker.pop(room, None)

    def _count(self, address: str) -> int:
        return self.intake.counts.get(address, 0)

    def start_heartbeat(self) -> threading.Thread:
        """A thread that ends, and the worker with it, when SGLang sets the manager's `_heartbeat_shutdown`."""
        shutdown = getattr(self.manager, "_heartbeat_shutdown", None) or threading.Event()

        def wait() -> None:
            shutdown.wait()
            self.close()

        thread = threading.Thread(target=wait, name="HeartbeatChecker", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Leave all addresses; what is open fails. Repeatable."""
        self.worker.close()

    def health(self) -> dict[str, Any]:
        """The worker's health, and what concerns SGLang."""
        return {
            **self.worker.health(),
            "sglang": {
                "untracked": self.intake.untracked,
                "cleaned": self.cleaner.cleaned,
                "errors": self.cleaner.errors,
            },
        }


def _common_manager(manager: Any) -> Any:
    return next((c for c in type(manager).__mro__ if c.__name__ == "CommonKVManager"), None)
