"""From notes to the ledger: which rooms are where, which wait, which are refused. Pure: the time comes in.

A room counts from when SGLang knew the node it uses. One that is opened before SGLang has fetched the node's
parallel info waits here, unwatched, as in SGLang, which tries a node that is not up yet for a while; it enters the
ledger with the time at which the question was asked that was answered. One that was opened with info that has become
void since, because the node ended, is lost with the node. So neither a slow start nor a restart fails a room of the
new instance, and no room keeps waiting for the old one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..address import canonical
from ..decide.book import DRAINING
from ..decide.intake import Opening, enter
from ..decide.ledger import Ledger, Room
from ..errors import InvalidAddress
from ..rooms import MAX_ROOM_ID, Failure, Status
from .tables import SUCCESS, InfoTable, Notes

log = logging.getLogger("coordinator")

ASK_S = 0.25  # between two probes that a refused room asks for
NOTES = 5000  # entered at a time: the loop has other things to do
NEVER = float("inf")


@dataclass(slots=True)
class Taken:
    """What entering notes led to."""

    failed: list[tuple[Room, Failure]] = field(default_factory=list)
    lost: list[tuple[int, float, str]] = field(default_factory=list)  # (room, opened, reason): never in the ledger
    ask: set[str] = field(default_factory=set)  # canonical addresses to probe now
    dead: set[str] = field(default_factory=set)  # addresses that SGLang reached, and that answered no probe since
    emptied: set[str] = field(default_factory=set)  # addresses whose last room was left
    more: bool = False


@dataclass(slots=True)
class Intake:
    """Enters notes in the ledger, in order. One thread at a time calls it."""

    ledger: Ledger
    notes: Notes
    infos: InfoTable
    hold_s: float  # how long a node that is failed here, though SGLang reached it, has to answer a probe
    homes: dict[int, str] = field(default_factory=dict)  # where each room is that was not left, as SGLang spells it
    counts: dict[str, int] = field(default_factory=dict)  # of those, by address
    names: dict[str, set[str]] = field(default_factory=dict)  # canonical address -> SGLang's spellings
    untracked: int = 0  # rooms that cannot be shared: no valid address or number
    _fresh: dict[str, dict[int, float]] = field(default_factory=dict)
    _waiting: dict[str, dict[int, float]] = field(default_factory=dict)  # for info about the node
    _refused: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)  # (opened, until when to try)
    _bad: set[str] = field(default_factory=set)
    _asked_s: dict[str, float] = field(default_factory=dict)
    spelled: set[str] = field(default_factory=set)  # all of them
    _taken: Taken = field(default_factory=Taken)

    @property
    def restless(self) -> bool:
        """Whether there is something to try again soon."""
        return bool(self._refused)

    def take(self, now: float, store_away: bool) -> Taken:
        """Enter what was noted, and what waited and can be entered now."""
        taken = self._taken = Taken()
        queue = self.notes.queue
        for _ in range(min(len(queue), NOTES)):
            note = queue.popleft()
            if len(note) == 3:
                self._opened(*note)
            elif len(note) == 2:
                self._left(note[1], note[0])
                if note[0] not in self.counts:
                    taken.emptied.add(note[0])
            else:
                self._final(note[1], note[2], note[3], now, store_away, taken)
        self._enter_fresh(now, store_away, taken)
        for address in [a for a in self._waiting if self.infos.period(a)[1] == NEVER]:
            self._enter(address, self._waiting.pop(address), now, store_away, taken)
        refused, self._refused = self._refused, {}
        for address, rooms in refused.items():
            self._retry(address, rooms, now, store_away, taken)
        taken.more = bool(queue) or self.restless
        return taken

    def watch(self, address: str) -> None:
        """SGLang knows this node now: watch it, also while no room is open there."""
        if self._name(address):
            self.ledger.open_book(address)

    # -- notes --------------------------------------------------------------------------------------------------

    def _opened(self, address: str, room: int, opened_s: float) -> None:
        if type(room) is not int or not 0 <= room <= MAX_ROOM_ID:
            self._untracked(repr(room)[:80], f"{room!r:.80} is not a room id")
            return
        if room in self.homes:  # opened again before it was left
            self._left(room)
        if not self._name(address):
            return
        self.homes[room] = address
        self.counts[address] = self.counts.get(address, 0) + 1
        self._fresh.setdefault(address, {})[room] = opened_s

    def _left(self, room: int, address: str = "") -> None:
        home = self.homes.get(room)
        if home is None or address not in ("", home):
            return
        self._gone(room)
        if not any(_drop(table, home, room) for table in (self._fresh, self._waiting, self._refused)):
            self.ledger.leave(home, room)

    def _gone(self, room: int) -> None:
        home = self.homes.pop(room)
        self.counts[home] -= 1
        if not self.counts[home]:
            del self.counts[home]
            self._taken.emptied.add(home)

    def _final(self, room: int, status: int, reason: str, now: float, store_away: bool, taken: Taken) -> None:
        home = self.homes.get(room)
        if home is None:
            return
        if status == SUCCESS:
            self._left(room)
            return
        if room in self._fresh.get(home, {}):
            self._enter_fresh(now, store_away, taken)
        _drop(self._waiting, home, room)
        held = self._refused.get(home, {}).pop(room, None)
        if held is not None:  # perhaps for first contact only: other ranks are to hear of it, it must have been open
            taken.failed += enter(self.ledger, home, [(room, held[0])]).failed
        self.ledger.update(home, room, Status.FAILED, reason)

    # -- into the ledger ----------------------------------------------------------------------------------------

    def _enter_fresh(self, now: float, store_away: bool, taken: Taken) -> None:
        fresh, self._fresh = self._fresh, {}
        for address, rooms in fresh.items():
            self._enter(address, rooms, now, store_away, taken)

    def _enter(self, address: str, rooms: dict[int, float], now: float, store_away: bool, taken: Taken) -> None:
        since, until = self.infos.period(address)
        void_s = self.infos.void(address)
        openings: list[Opening] = []
        for room, opened_s in rooms.items():
            if opened_s < void_s:
                self._lose(room, opened_s, "it was opened with what was known of the node before it ended", taken)
            elif until == NEVER:
                openings.append((room, max(opened_s, since)))
            else:
                self._waiting.setdefault(address, {})[room] = opened_s
        if openings:
            self._admit(address, openings, now + self.hold_s, now, store_away, taken)

    def _admit(
        self, address: str, openings: list[Opening], deadline: float, now: float, store_away: bool, taken: Taken
    ) -> None:
        book = self.ledger.open_book(address)
        if book.node.epoch == 0 and not store_away and now < deadline:
            self._hold(address, openings, deadline)  # until first contact: the store may know that the node has failed
            return
        done = enter(self.ledger, address, openings)
        taken.failed += done.failed
        if not done.refused or done.refusal is None:
            return
        if done.refusal.state in ("failed", "unreachable") and now < deadline:
            if now - self._asked_s.get(book.address, -NEVER) >= ASK_S:  # SGLang has just reached it
                self._asked_s[book.address] = now
                taken.ask.add(book.address)
            self._hold(address, done.refused, deadline)
            return
        if done.refusal.state in ("failed", "unreachable"):
            taken.dead.add(address)
        what = "draining" if done.refusal.state == DRAINING else done.refusal.state
        for room, opened_s in done.refused:
            self._lose(room, opened_s, f"{book.address} is {what}: {done.refusal.reason}", taken)

    def _hold(self, address: str, openings: Iterable[Opening], deadline: float) -> None:
        held = self._refused.setdefault(address, {})
        for room, opened_s in openings:
            held[room] = (opened_s, deadline)

    def _retry(
        self, address: str, rooms: dict[int, tuple[float, float]], now: float, store_away: bool, taken: Taken
    ) -> None:
        if self.infos.period(address)[1] != NEVER:
            self._enter(address, {room: at for room, (at, _) in rooms.items()}, now, store_away, taken)
            return
        by_deadline: dict[float, list[Opening]] = {}
        for room, (opened_s, deadline) in rooms.items():
            by_deadline.setdefault(deadline, []).append((room, opened_s))
        for deadline, openings in by_deadline.items():
            self._admit(address, openings, deadline, now, store_away, taken)

    def _lose(self, room: int, opened_s: float, reason: str, taken: Taken) -> None:
        self._gone(room)
        taken.lost.append((room, opened_s, reason))

    def _name(self, address: str) -> bool:
        """Note a spelling; False if nothing can be known by it."""
        if address in self.spelled:
            return True
        try:
            name = canonical(address)
        except InvalidAddress as exc:
            self._untracked(address, str(exc))
            return False
        self.names.setdefault(name, set()).add(address)
        self.spelled.add(address)
        return True

    def keeps(self, name: str) -> bool:
        """Whether a canonical address is in use: SGLang knows the node, or has a room there."""
        return any(self.infos.period(a)[1] == NEVER or a in self.counts for a in self.names.get(name, ()))

    def forget(self, name: str) -> None:
        """The ledger has forgotten an address."""
        if not self.keeps(name):
            self._asked_s.pop(name, None)
            for address in self.names.pop(name, ()):
                self.spelled.discard(address)
                self.infos.forget(address)

    def _untracked(self, what: str, why: str) -> None:
        self.untracked += 1
        if what not in self._bad and len(self._bad) < 100:
            self._bad.add(what)
            log.warning("room_not_shared reason=%r hint='its node is not watched: only its own timeouts end it'", why)


def _drop(table: Mapping[str, dict[int, Any]], address: str, room: int) -> bool:
    rooms = table.get(address)
    return rooms is not None and rooms.pop(room, None) is not None
