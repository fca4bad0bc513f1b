"""The heartbeat: probes run concurrently, one hung address delays none; what they see goes to the detector, what
the detector wants is done here. Turns come with sync's answers: all workers together probe once an interval.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from ..decide.book import Book
from ..decide.detector import ANSWERS, Act, Evidence
from ..errors import CoordinatorError, StoreUnavailable
from ..protocol import FAILED, NodeView, Registration, Votes
from ..rooms import Cause
from ..store.ops import Op
from ..store.verdict import fail_address_async, new_call, register_async
from .core import Core, log, wait_for
from .probe import Probe, Sight, look
from .supervisor import cancel_all

PULSE_S = 0.05  # the loop comes around at least this often; a longer gap is its own lateness
LATE_S = 0.25
STORE_CALLS = 2  # at once; half of the worker's connections
BALLOTS = 100  # votes in one round trip


@dataclass(slots=True)
class Lateness:
    """Knows when this loop did not get to run: stopped, swapped out, or starved by the process's other threads."""

    beat_s: float
    late_at_s: float = float("-inf")

    def beat(self, now: float) -> None:
        """The loop has come around."""
        if now - self.beat_s > LATE_S:
            self.late_at_s = now
        self.beat_s = now

    def since(self, started_s: float, now: float) -> bool:
        """Whether the loop was late at some time since `started_s`."""
        return now - self.beat_s > LATE_S or self.late_at_s >= started_s


@dataclass(slots=True)
class Ballot:
    """A vote, or its withdrawal, on its way to the store."""

    address: str
    vote: bool
    op: Op[Votes]
    answer: asyncio.Future[Votes | None]

    def settle(self, votes: Votes | None) -> None:
        """The store's answer, None if there is none. The first one counts."""
        if not self.answer.done():
            self.answer.set_result(votes)


@dataclass(slots=True)
class Heartbeat:
    """Probes addresses and acts on verdicts."""

    core: Core
    probe: Probe
    lateness: Lateness = field(default_factory=lambda: Lateness(time.monotonic()))
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    # Hundreds of probes may want to tell the store something at once; sync must not wait for a connection.
    _turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(STORE_CALLS))
    _voting: set[str] = field(default_factory=set)
    _ballots: list[Ballot] = field(default_factory=list)
    _posting: asyncio.Task[None] | None = None
    _warned: set[tuple[str, str]] = field(default_factory=set)

    async def run(self) -> None:
        """Turn for ever; the supervisor restarts it."""
        core = self.core
        self.lateness.beat_s = time.monotonic()
        while True:
            now = time.monotonic()
            core.supervisor.beat("heartbeat")
            self.lateness.beat(now)
            for book in core.ledger.books():
                core.detector.watch(book.address).watchers = book.watchers
            for address in core.detector.due(now, core.store_away):
                task = asyncio.get_running_loop().create_task(self._look(address), name=f"probe {address}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            due_s = core.detector.next_due_s(core.store_away)
            wait = PULSE_S if due_s is None else min(PULSE_S, max(0.001, due_s - time.monotonic()))
            await wait_for(core.probe_wake, wait)

    async def stop(self) -> None:
        """Cancel the probes that are on their way."""
        await cancel_all([*self._tasks, *([self._posting] if self._posting is not None else [])])
        try:
            await self.probe.aclose()
        except Exception:  # a probe is not ours; leaving the addresses must not depend on it
            self.core.count("probe_errors")
            log.exception("probe_close_failed")

    async def _look(self, address: str) -> None:
        """One probe and its consequences; whatever goes wrong ends this look only."""
        core, started = self.core, time.monotonic()
        book = core.ledger.book(address)
        if book is None:
            core.detector.forget(address)
            return
        try:
            epoch = book.node.epoch
            core.count("probes")
            sight = await look(self.probe, address, core.settings.probe_timeout_s)
            now = time.monotonic()
            before = core.detector.watch(address).misses
            act = core.detector.observe(
                address, sight.evidence, now,
                reason=sight.detail,
                late=self.lateness.since(started, now),
                store_away=core.store_away,
                failed=book.node.state == FAILED,
            )  # fmt: skip
            core.count("misses", int(core.detector.watch(address).misses > before))
            if act is Act.AGAIN:
                core.counters["late_dropped"] = core.detector.dropped_late
                core.probe_wake.set()
                return
            await self._seen(book, sight, epoch, now)
            await self._do(book, act, f"{sight.evidence}: {sight.detail}")
        except BaseException as exc:
            task = asyncio.current_task()
            if isinstance(exc, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # this look was cancelled, not something the probe waited for
            core.count("probe_errors")
            core.detector.abandon(address)
            log.exception("probe_failed address=%s", address)

    async def _seen(self, book: Book, sight: Sight, epoch: int, now: float) -> None:
        """The good side of what was seen: reachable again, alive again, or another instance."""
        core = self.core
        if sight.evidence is Evidence.MISCONFIGURED:
            self._misconfigured(book, sight)
        if sight.evidence not in ANSWERS:
            return
        if sight.evidence is Evidence.OK:
            self._warned.discard(("misconfigured", book.address))
        core.answered(book.address)
        if book.unreachable:
            book.reachable()
            log.info("node_reachable address=%s", book.address)
        other = bool(sight.instance) and book.saw_instance(sight.instance, now)
        if epoch == 0 or not (other or book.node.state == FAILED):
            return
        try:
            async with self._turn:
                if core.store_away:
                    raise StoreUnavailable(core.store_error)
                answer = await register_async(
                    core.store, core.ops, book.address, "probe", sight.instance, epoch, book.worker
                )
        except StoreUnavailable:
            self._answers_meanwhile(book, other)
            return
        self._registered(book, answer)

    def _answers_meanwhile(self, book: Book, other: bool) -> None:
        """The store is away: what a good answer means is done here, for this worker alone."""
        core = self.core
        if other and book.node.instance:
            core.ended(book.address)
            core.failed(book.fail_replaced())
        if book.node.state == FAILED:
            book.revive()
            core.detector.renew(book.address)
            log.info("node_answers address=%s hint='the store is away: known here only'", book.address)

    def _misconfigured(self, book: Book, sight: Sight) -> None:
        if self._warn_once("misconfigured", book.address):
            log.error(
                "health_misconfigured address=%s answer=%r path=%s hint='set COORDINATOR_HEALTH_PATH'",
                book.address, sight.detail, self.core.settings.health_path,
            )  # fmt: skip
        self.core.count("misconfigured")

    def _warn_once(self, what: str, address: str) -> bool:
        """True the first time: one line per transition, none per probe."""
        first = (what, address) not in self._warned
        self._warned.add((what, address))
        return first

    def _registered(self, book: Book, answer: Registration) -> None:
        if answer.outcome == "REPLACED":
            self.core.count("instances_replaced")
        if answer.outcome == "PAST" and self._warn_once("past", book.address):
            log.warning("instance_past address=%s hint='several instances answer at one address'", book.address)
        self.core.hurry(book.address)

    async def _do(self, book: Book, act: Act, reason: str) -> None:
        core, address = self.core, book.address
        if act is Act.VOTE:
            if address in self._voting:  # the vote of an earlier probe has not been answered: one at a time
                return
            core.count("votes")
            self._voting.add(address)
            try:
                act = await self._vote(book, reason)
            finally:
                self._voting.discard(address)
        if act is Act.WITHDRAW and book.node.state != FAILED:
            await self._send_vote(book, False, reason)
            core.hurry(address)
        elif act is Act.GIVE_UP and not (book.node.state == FAILED and book.empty):
            core.give_up(book, f"this worker cannot reach it ({reason})")
        elif act is Act.FAIL:
            await self.fail(book, book.node.epoch, reason, book.worker)

    async def _vote(self, book: Book, reason: str) -> Act:
        if book.node.epoch == 0:  # never synced: nobody to agree with yet
            return self.core.detector.uncounted(book.address) if self.core.store_away else Act.NOTHING
        votes = await self._send_vote(book, True, reason)
        if votes is None:
            return self.core.detector.uncounted(book.address)
        return self.core.detector.counted(book.address, votes, time.monotonic())

    async def _send_vote(self, book: Book, vote: bool, reason: str) -> Votes | None:
        core = self.core
        op = core.ops.suspect(book.address, book.worker, book.node.epoch, vote, reason, core.detector.doubtful())
        ballot = Ballot(book.address, vote, op, asyncio.get_running_loop().create_future())
        self._ballots.append(ballot)
        if self._posting is None or self._posting.done():
            self._posting = asyncio.get_running_loop().create_task(self._post(), name="votes")
        return await ballot.answer

    async def _post(self) -> None:
        """Send the votes that wait, many in one round trip: when a rack goes down, a thousand nodes miss at once."""
        core = self.core
        while self._ballots:
            part, self._ballots = self._ballots[:BALLOTS], self._ballots[BALLOTS:]
            due = []
            for ballot in part:
                if ballot.vote and core.detector.watch(ballot.address).voted_s is None:  # it answered meanwhile
                    ballot.settle(Votes(stale=True))
                else:
                    due.append(ballot)
            try:
                answers: list[Any] = await self._call([ballot.op for ballot in due])
                for ballot, answer in zip(due, answers, strict=True):
                    ballot.settle(None if isinstance(answer, CoordinatorError) else answer)
            finally:
                for ballot in due:
                    ballot.settle(None)

    async def _call(self, ops: list[Op[Votes]]) -> list[Any]:
        if not ops or self.core.store_away:
            return [None] * len(ops)
        try:
            return list(await self.core.store.many(ops))
        except CoordinatorError:
            return [None] * len(ops)

    async def fail(self, book: Book, epoch: int, reason: str, by: str, call: str = "") -> None:
        """Carry out a verdict and apply it here: who decided must not wait for the news."""
        core = self.core
        try:
            verdict = await fail_address_async(
                core.store, core.ops, book.address, reason, by, epoch, call or new_call()
            )
        except CoordinatorError as exc:
            if core.detector.uncounted(book.address) is Act.GIVE_UP:
                core.give_up(book, f"{reason}; and {exc}")
            return
        if verdict.outcome == "FAILED":
            core.count("verdicts")
            view = NodeView(
                verdict.node.epoch,
                FAILED,
                0,
                Cause.NODE_FAILED.value,
                reason,
                by,
                book.node.instance,
                book.node.draining,
            )
            core.learn(book, view)
        else:
            core.hurry(book.address)
