"""SGLang's decode tables and their way into a ledger, without SGLang, store or threads: time passes when told so."""

from __future__ import annotations

from typing import Any

from coordinator import Cause
from coordinator.address import canonical
from coordinator.decide.book import Outcome
from coordinator.decide.ledger import Ledger, Room
from coordinator.protocol import FAILED, NodeView
from coordinator.rooms import Failure
from coordinator.sglang.intake import Intake, Taken
from coordinator.sglang.tables import BOOTSTRAPPING, SUCCESS, InfoTable, Notes, Rooms, StatusTable, Tracker

A, B = "127.0.0.1:1234", "127.0.0.1:12345"  # one is a prefix of the other
HOLD_S = 4.0


class Lab:
    """What decode.Bridge ties together, its loop turned by `take`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.wakes = 0
        self.records: dict[int, str] = {}
        self.told: list[tuple[int, str]] = []  # rooms failed by the coordinator, with the reason
        self.changed: list[tuple[str, bool, float]] = []
        self.ledger = Ledger("w", lambda: self.now, lambda: None)
        self.notes = Notes(self._wake)
        self.statuses = StatusTable(self.notes, self.records)
        self.infos = InfoTable(self._info_changed, lambda: self.now)
        self.intake = Intake(self.ledger, self.notes, self.infos, HOLD_S)
        self.tracker = Tracker(self._view)
        self.store_away = False

    def _wake(self) -> None:
        self.wakes += 1

    def _view(self, address: str) -> Rooms:
        return Rooms(
            address, self.notes, self.statuses, self.records, self._forget,
            lambda a: [], lambda a: self.intake.counts.get(a, 0), lambda: self.now,
        )  # fmt: skip

    def _forget(self, room: int, now: float) -> None:
        self.statuses.forget(room, now)

    def _info_changed(self, address: str) -> None:
        since, until = self.infos.period(address)
        known = until == float("inf")
        self.changed.append((address, known, since if known else until))

    # -- what SGLang does

    def open(self, address: str, *rooms: int) -> None:
        for room in rooms:
            self.tracker[address].add(room)
            self.statuses.setdefault(room, BOOTSTRAPPING)

    def clear(self, address: str, *rooms: int) -> None:
        for room in rooms:
            self.statuses.pop(room, None)
            self.tracker[address].discard(room)

    def info(self, address: str) -> None:
        self.infos[address] = "info"

    def drop(self, address: str) -> None:
        self.infos.pop(address, None)

    # -- what the loop does

    def take(self, passed: float = 0.0) -> Taken:
        """One turn, `passed` seconds later; failures reach the statuses as on the delivery thread."""
        self.now += passed
        while self.changed:
            address, known, at_s = self.changed.pop(0)
            if known:
                self.intake.watch(address)
            elif address in self.intake.spelled:
                book = self.ledger.book(canonical(address))
                if book is not None:
                    self.deliver(book.void(at_s))
        taken = self.intake.take(self.now, self.store_away)
        self.deliver(taken.failed)
        for room, opened_s, reason in taken.lost:
            if self.statuses.fail(room, opened_s, reason):
                self.told.append((room, reason))
        for address in taken.emptied:
            if address not in self.intake.counts:
                self.tracker.pop(address, None)
        return taken

    def deliver(self, pairs: list[tuple[Room, Failure]]) -> None:
        for room, failure in pairs:
            if self.statuses.fail(room.id, room.opened_s, failure.reason):
                self.told.append((room.id, failure.reason))

    def learn(self, address: str, view: NodeView) -> None:
        outcome = Outcome()
        self.ledger.open_book(address).learn(view, self.now, outcome)
        self.deliver(outcome.failed)

    def alive(self, address: str, epoch: int = 1, failed_age_ms: int | None = None, instance: str = "") -> None:
        cause = Cause.NODE_FAILED.value if failed_age_ms is not None else ""
        self.learn(address, NodeView(epoch, "alive", failed_age_ms, cause, "gone", "judge", instance))

    def failed(self, address: str, epoch: int = 2) -> None:
        self.learn(address, NodeView(epoch, FAILED, 0, Cause.NODE_FAILED.value, "gone", "judge"))

    def open_in_ledger(self, address: str) -> dict[int, float]:
        return {room.id: room.opened_s for room in self.ledger.rooms(address) if 0 < room.status < SUCCESS}

    def open_in_sglang(self) -> set[int]:
        return {room for room, status in self.statuses.items() if 0 < status < SUCCESS}

    def waiting(self) -> set[int]:
        """Rooms on any of the intake's lists."""
        intake: Any = self.intake
        lists = [*intake._fresh.values(), *intake._waiting.values(), *intake._refused.values()]
        return {room for rooms in lists for room in rooms}
