"""Passes on to the siblings of a worker, those of its group, which rooms failed here by themselves.

Speed and order, never truth: a sibling that has no such room is not touched, and what nobody was told in a few
seconds is told by time-outs. Only rooms that this worker had open itself are named, and only to its own group.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..decide.notes import NOTES, Note, Notes
from ..errors import CoordinatorError, StoreUnavailable
from ..protocol import clean_text, group_of
from ..store.ops import Op
from .core import Core, log, wait_for

PAIRS = 200  # (room, sibling)s in one call: it holds the server for about a millisecond
CALLS = 8  # in one round trip
AGAIN_S = 0.075  # a sibling that opens the room a moment later: asked once more, after this
OLD_S = 2.0  # later than this nothing is passed on: the number may be in use for another request
PAUSE_S = 0.05  # after a call that was not answered

Passed = tuple[tuple[int, int], ...]  # (index of the sibling, room): not open there


@dataclass(slots=True)
class Errand:
    """One room to pass on, to all siblings but those that know."""

    note: Note
    due_s: float
    told: frozenset[str] = frozenset()
    second: bool = False  # the first call has been answered
    over: bool = False

    @property
    def words(self) -> tuple[int, str]:
        """The room, and why it failed here."""
        room = self.note.room
        failure = room.failure
        why = f"{failure.cause} at {room._book.worker}: {failure.reason}" if failure else room._book.worker
        return room.id, clean_text(why)


@dataclass(slots=True)
class Ranks:
    """The loop of a worker that has a group."""

    core: Core
    notes: Notes
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    _errands: list[Errand] = field(default_factory=list)

    async def run(self) -> None:
        """Turn for ever; the supervisor restarts it."""
        while True:
            self.core.supervisor.beat("ranks")
            await self.round(time.monotonic())
            now, tick_s = time.monotonic(), self.core.settings.tick_s
            next_s = min((errand.due_s - now for errand in self._errands), default=tick_s)
            await wait_for(self.wake, max(0.0, min(next_s, tick_s)))

    async def round(self, now: float) -> None:
        """Pass on what is due; what the store does not answer stays for the next round."""
        self._collect(now)
        by_address: dict[str, list[Errand]] = {}
        for errand in self._errands:
            if errand.due_s <= now:
                errand.due_s = now + PAUSE_S  # unless it is answered
                by_address.setdefault(errand.note.room.address, []).append(errand)
        for address, errands in by_address.items():
            if self.core.store_away:
                break
            try:
                await self._pass_on(address, errands)
            except StoreUnavailable as exc:
                log.debug("pass_on_waits address=%s error=%r", address, str(exc))
        self._errands = [errand for errand in self._errands if not errand.over]

    async def finish(self) -> None:
        """The worker leaves: pass on, once, what has not been."""
        for errand in self._errands:
            if not errand.second:  # the loop may have been ended in the middle of it
                errand.due_s = 0.0
        await self.round(time.monotonic())

    def _collect(self, now: float) -> None:
        """Take new notes; drop what has become too old or too much, and what a new opening has overtaken."""
        notes, dropped = self.notes.take()
        self._errands += [Errand(note, now) for note in notes]
        kept: list[Errand] = []
        for errand in self._errands:
            if now - errand.note.at_s > OLD_S:
                dropped += not errand.second
            elif not errand.note.reused:
                kept.append(errand)
        dropped += max(0, len(kept) - NOTES)
        self._errands = kept[-NOTES:]
        if dropped:
            self.core.count("not_passed_on", dropped)
            log.warning("not_passed_on count=%d hint='too old or too many; the siblings time out instead'", dropped)

    async def _pass_on(self, address: str, errands: list[Errand]) -> None:
        core, me = self.core, self.core.ledger.worker
        siblings = await self._siblings(address)
        calls: list[tuple[tuple[str, ...], list[Errand]]] = []
        groups: dict[tuple[str, ...], list[Errand]] = {}
        for errand in errands:
            groups.setdefault(tuple(name for name in siblings if name not in errand.told), []).append(errand)
        for names, group in groups.items():
            if not names:
                self._answered(group, (), ())
                continue
            size = max(1, PAIRS // len(names))
            calls += [(names, group[start : start + size]) for start in range(0, len(group), size)]
        before = core.counters["passed_on"]
        for start in range(0, len(calls), CALLS):
            part = calls[start : start + CALLS]
            ops: list[Op[Passed]] = [core.ops.pass_on(address, me, names, [e.words for e in es]) for names, es in part]
            answers = await core.store.many(ops)
            for (names, group), answer in zip(part, answers, strict=True):
                if isinstance(answer, StoreUnavailable):
                    continue
                if isinstance(answer, CoordinatorError):
                    log.error("pass_on_failed address=%s error=%r", address, str(answer))
                    continue
                self._answered(group, names, answer)
        if marked := core.counters["passed_on"] - before:
            log.info(
                "passed_on address=%s rooms=%d siblings=%d marked=%d", address, len(errands), len(siblings), marked
            )

    async def _siblings(self, address: str) -> list[str]:
        """Who of this group is listed there; a worker that was fenced, or had left for a while, as `<id>.N`."""
        me = self.core.ledger.worker
        listed = await self.core.store.command("ZRANGE", self.core.ops.keys.workers(address), "0", "-1")
        others: Iterable[str] = (str(name) for name in listed)
        return [
            name
            for name in others
            if group_of(name) == group_of(me) and name != me and not name.startswith(f"{me}.")
        ]  # fmt: skip

    def _answered(self, errands: list[Errand], names: tuple[str, ...], unknown: Passed) -> None:
        """The store has marked these rooms; who did not have one open yet is asked once more."""
        missing: dict[int, set[str]] = {}
        for index, room in unknown:
            missing.setdefault(room, set()).add(names[index])
        self.core.count("passed_on", len(names) * len(errands) - len(unknown))
        due_s = time.monotonic() + AGAIN_S
        for errand in errands:
            errand.told |= frozenset(names) - missing.get(errand.note.room.id, set())
            errand.over, errand.second, errand.due_s = errand.second, True, due_s
