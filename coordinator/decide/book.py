"""One address in a worker's ledger: its rooms, what the store holds of them, and what is known of the node. Pure.

Any thread changes `rooms`, `stored` and `dirty` under `lock`; all other fields belong to the event loop's thread.
One batch is in flight at a time and is repeated, with the same number and rooms, until it is answered, so a lost
reply costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from threading import Lock
from typing import TYPE_CHECKING

from ..protocol import ALIVE, FAILED, Batch, NodeView, Stats, SyncReply, SyncStatus
from ..rooms import Cause, Failure, Status

if TYPE_CHECKING:
    from .ledger import Room
    from .notes import Notes

UNREACHABLE, DRAINING, CLOSED, FORGOTTEN = "unreachable", "draining", "closed", "forgotten"
CHUNK = 1000  # rooms failed under one hold of the lock: joins of other rooms get in between
CLOCK_GRAIN_S = 0.002  # ages travel in whole milliseconds, rounded down at both ends


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an address takes no rooms now."""

    state: str
    reason: str


@dataclass(slots=True)
class Outcome:
    """What an answer means for the world outside: the loop acts on it, outside every lock."""

    failed: list[tuple[Room, Failure]] = field(default_factory=list)
    ended: bool = False  # an epoch ended, or the node failed: what is cached about it is void
    acknowledge: list[str] = field(default_factory=list)  # pending fields whose rooms were taken care of
    expired: tuple[str, ...] = ()  # workers to reap
    turns: int = 0  # to probe, one interval apart, the first in `turn_ms`
    turn_ms: int = 0
    revived: bool = False
    again: bool = False  # sync this address again at once


class Book:
    """The rooms one worker has at one address, and its picture of the node."""

    def __init__(
        self,
        address: str,
        worker: str,
        wake: Callable[[], None],
        next_life: Callable[[], str],
        notes: Notes | None = None,
    ) -> None:
        self.address, self.worker, self.notes = address, worker, notes
        self.lock = Lock()
        self.rooms: dict[int, Room] = {}
        self.stored: set[int] = set()  # what the store holds, or may hold, for this worker
        self.dirty: set[int] = set()  # numbers whose membership may differ from `stored`
        self.refusal: Refusal | None = None
        self.closing: Refusal | None = None  # outranks whatever is known of the node
        self.asleep = True  # the first change wakes the loop: it does not know this book yet
        self.node = NodeView(0)
        self.failed_at_s: float | None = None  # when the node's last epoch ended, on the local clock
        self.past: tuple[float, Failure] | None = None  # what was opened here before then failed, and why
        self.unreachable = ""  # why this worker alone has given up on the node
        self.seen_instance = ""  # what a probe of this worker read last, and since when
        self.seen_since_s = 0.0
        self.watchers = 0
        self.synced_s: float | None = None
        self._wake, self._next_life = wake, next_life
        self.undone = 0  # answers after which what had been sent must be sent again
        self._number = 0
        self._flight: Batch | None = None
        self._flight_at_s = 0.0  # when it was built, or last brought up to date
        self._reset = True
        self._hold_adds_until_s = 0.0

    def stir(self) -> None:
        """Wake the loop after a change. Called at most once per sleep."""
        self.asleep = False
        self._wake()

    @property
    def behind(self) -> bool:
        """Whether something waits to be written or answered."""
        return bool(self.dirty) or self._flight is not None or (self._reset and bool(self.rooms))

    @property
    def sent(self) -> int:
        """Number of the last batch built in this life."""
        return self._number

    @property
    def answered(self) -> int:
        """Number of the last batch answered in this life."""
        return self._number if self._flight is None else self._number - 1

    @property
    def unstored(self) -> bool:
        """Whether the store holds less than the batches say: all is to be sent again, or a failed node took nothing."""
        if self.node.state != FAILED:
            return self._reset and bool(self.rooms)
        with self.lock:
            return any(0 < room._status < 4 for room in self.rooms.values())

    @property
    def empty(self) -> bool:
        """Whether no room is open here; what has failed or succeeded and was not left does not count."""
        with self.lock:
            return not any(0 < room._status < 4 for room in self.rooms.values())

    def held(self, now: float) -> bool:
        """Whether all that waits are rooms that a full store did not take."""
        return self._flight is None and now < self._hold_adds_until_s

    @property
    def refused(self) -> Refusal | None:
        """The refusal that the present knowledge implies."""
        if self.closing is not None:
            return self.closing
        if self.node.state == FAILED:
            return Refusal(FAILED, self.node.reason or "the node failed")
        if self.unreachable:
            return Refusal(UNREACHABLE, self.unreachable)
        if self.node.draining:
            return Refusal(DRAINING, "the node is draining")
        return None

    # -- out ----------------------------------------------------------------------------------------------------

    def batch(self, now: float, limit: int, stats: Stats | None = None, claim: int = 1) -> Batch:
        """The next batch, or the one still unanswered. An empty batch renews the lease."""
        if self._flight is not None:
            return self._repeated(self._flight, now)
        adds: list[int] = []
        removes: list[int] = []
        with self.lock:
            mode = "delta"
            if self._reset:
                mode, self._reset = "reset", False
                self.stored, self.dirty = set(), set(self.rooms)
            rooms, stored, dirty = self.rooms, self.stored, self.dirty
            held: list[int] = []
            while dirty and len(adds) + len(removes) < limit:
                room_id = dirty.pop()
                room = rooms.get(room_id)
                if room is not None and 0 < room._status < 4:
                    (adds if now >= self._hold_adds_until_s else held).append(room_id)
                elif room_id in stored:
                    removes.append(room_id)
            dirty.update(held)
            stored.update(adds)
            stored.difference_update(removes)
            count = len(stored)
        self._number += 1
        known = replace(self.node, failed_age_ms=self._age_ms(now))
        self._flight_at_s = now
        self._flight = Batch(
            self.address, self.worker, self._number, mode, known, count, tuple(adds), tuple(removes), stats, claim
        )  # fmt: skip
        return self._flight

    def _repeated(self, flight: Batch, now: float) -> Batch:
        """The batch in flight with the age that its epoch's end has by now: a store that lost its data dates it so."""
        age = flight.node.failed_age_ms
        passed = int((now - self._flight_at_s) * 1000)
        if age is not None and passed > 0:
            self._flight_at_s += passed / 1000  # the rest of a millisecond is not lost
            self._flight = replace(flight, node=replace(flight.node, failed_age_ms=age + passed))
        return self._flight or flight

    def retract(self, hold_adds_until_s: float) -> None:
        """The store is full and took nothing of the batch in flight: for a while send only what frees memory."""
        batch, self._flight = self._flight, None
        if batch is None:
            return
        self._number -= 1
        self.undone += 1
        self._reset |= batch.mode == "reset"
        self._hold_adds_until_s = hold_adds_until_s
        with self.lock:
            self.stored.difference_update(batch.adds)
            self.stored.update(batch.removes)
            self.dirty.update(batch.adds, batch.removes)

    def _age_ms(self, now: float) -> int | None:
        return None if self.failed_at_s is None else max(0, int((now - self.failed_at_s) * 1000))

    def stats(self, now: float) -> Stats:
        """Counts by status and the oldest rooms (dicts keep the order of opening)."""
        with self.lock:
            rooms = list(self.rooms.values())
        counts = [0] * 5
        for room in rooms:
            counts[room._status] += 1
        live = (room for room in islice(rooms, 50) if 0 < room._status < 4)
        oldest = " ".join(
            f"{r.id}:{Status(r._status).name.lower()}:{int((now - r.opened_s) * 1000)}" for r in islice(live, 3)
        )
        return Stats(counts[1], counts[2], counts[3], oldest)

    # -- in -----------------------------------------------------------------------------------------------------

    def apply(self, batch: Batch, reply: SyncReply, now: float) -> Outcome:
        """Bring in the answer to `batch`; says what to do about it."""
        if batch is not self._flight:
            return Outcome()
        self._flight = None
        self.synced_s, self.watchers = now, reply.watchers
        outcome = Outcome(expired=reply.expired, turns=reply.turns, turn_ms=reply.turn_ms)
        self.learn(reply.node, now, outcome)
        self.undone += reply.status is not SyncStatus.OK
        if reply.status is SyncStatus.FENCED:
            self._fenced(outcome)
        elif reply.status is not SyncStatus.OK:
            self._reset = True
        self._abort(reply.aborted, outcome)
        outcome.again = self.behind or self._reset
        return outcome

    def learn(self, seen: NodeView, now: float, outcome: Outcome) -> None:
        """Bring in what the store, or this worker's own verdict, says about the node."""
        known, first = self.node, self.node.epoch == 0
        if seen.epoch < known.epoch:  # the store fell back; the next batch moves it forward
            return
        cutoff = None
        if seen.failed_age_ms is not None:
            # The latest moment at which the epoch can have ended: rooms opened later belong to the new one.
            self.failed_at_s = now - seen.failed_age_ms / 1000
            cutoff = self.failed_at_s + CLOCK_GRAIN_S
            if seen.cause == Cause.NODE_RESTARTED and seen.instance == self.seen_instance != "":
                cutoff = min(cutoff, self.seen_since_s)  # rooms opened since this worker saw it are its own
        outcome.revived |= known.state == FAILED and seen.state != FAILED
        failure = Failure(
            Cause(seen.cause) if seen.cause in set(Cause) else Cause.NODE_FAILED,
            seen.reason, self.address, max(0, seen.epoch - 1), seen.by,
        )  # fmt: skip
        ended = seen.epoch > known.epoch and not first
        with self.lock:
            self.node = seen
            if seen.state != FAILED and (ended or outcome.revived):
                self.unreachable = ""
            self.refusal = self.refused
            victims = list(self.rooms.values()) if ended or first or seen.state == FAILED else []
        if ended:
            # Its set was moved when its own epoch ended, or, if the store was moved forward past it, with the last one.
            epochs = sorted({known.epoch, seen.epoch - 1})
            outcome.acknowledge += [f"lost:{epoch}:{self.worker}" for epoch in epochs]
            self._reset = True
        past = cutoff
        if seen.state == FAILED and (ended or first):
            cutoff = now + 1e9  # a failed address holds no rooms: what slipped in is refused too
        if victims and cutoff is not None:
            outcome.failed += [(room, failure) for room in self.fail_rooms(victims, failure, cutoff)]
        if past is not None and (ended or first or seen.state == FAILED):
            self._passed(past, failure)
        outcome.ended |= ended or (seen.state == FAILED and known.state != FAILED)
        if seen.epoch == known.epoch and FAILED not in (known.state, seen.state):
            self._replaced_unseen(known, now, outcome)

    def _replaced_unseen(self, known: NodeView, now: float, outcome: Outcome) -> None:
        """Another instance in the same epoch: the store lost its data, and that instance registered before this worker
        wrote what it knows. Its rooms of the former one fail all the same."""
        new = self.node.instance
        if not known.instance or not new or known.instance == new:
            return
        reason = f"instance {known.instance} was replaced by {new}"
        failure = Failure(Cause.NODE_RESTARTED, reason, self.address, known.epoch, self.worker)
        with self.lock:
            victims = list(self.rooms.values())
        since = self.seen_since_s if new == self.seen_instance else now
        self._passed(since, failure)
        outcome.failed += [(room, failure) for room in self.fail_rooms(victims, failure, since)]
        outcome.ended = True

    def _fenced(self, outcome: Outcome) -> None:
        """This worker was reaped here: the node was told about what the store held, so those rooms are lost."""
        failure = Failure(
            Cause.LEASE_LOST, "the worker's lease ran out and its rooms were given up",
            self.address, self.node.epoch, self.worker,
        )  # fmt: skip
        with self.lock:
            victims = [room for room_id, room in self.rooms.items() if room_id in self.stored]
        outcome.failed += [(room, failure) for room in self.fail_rooms(victims, failure)]
        self.worker, self._number, self._reset = self._next_life(), 0, True

    def _abort(self, aborted: Iterable[tuple[int, str]], outcome: Outcome) -> None:
        for room_id, reason in aborted:
            with self.lock:
                room = self.rooms.get(room_id)
                # Not flushed since it was opened: the mark was meant for an earlier opening.
                meant = room is not None and room_id in self.stored and room_id not in self.dirty
            if room is not None and meant:
                failure = Failure(Cause.ABORTED, reason, self.address, self.node.epoch)
                outcome.failed += [(r, failure) for r in self.fail_rooms([room], failure)]

    def fail_rooms(self, victims: list[Room], failure: Failure, opened_before_s: float = float("inf")) -> list[Room]:
        """Fail those of `victims` that are still open and were opened before the time given; answers which.

        The list is a snapshot; each room is judged again under the lock, a chunk at a time, so that a racing
        leave or Success wins or loses as a whole and nobody waits for a large failure.
        """
        failed: list[Room] = []
        for start in range(0, len(victims), CHUNK):
            with self.lock:
                rooms, stored, dirty = self.rooms, self.stored, self.dirty
                for room in victims[start : start + CHUNK]:
                    if rooms.get(room.id) is not room or not 0 < room._status < 4 or room.opened_s >= opened_before_s:
                        continue
                    room._failure, room._status = failure, 0
                    if room.id in stored:
                        dirty.add(room.id)
                    else:
                        dirty.discard(room.id)
                    failed.append(room)
        return failed

    def _passed(self, until_s: float, failure: Failure) -> None:
        """Remember until when what was opened here is past, as the first news of an end have it.

        Later answers tell the age of the same end again, and seem later by as much as they took: rooms of the next
        instance may have been opened in between.
        """
        if self.past is not None and (self.past[1].epoch, self.past[1].cause) == (failure.epoch, failure.cause):
            return
        if self.past is None or until_s > self.past[0]:
            self.past = (until_s, failure)

    def void(self, until_s: float) -> list[tuple[Room, Failure]]:
        """What was known of the former instance was in use here until then: what was opened with it is past, too."""
        if self.past is None or until_s <= self.past[0]:
            return []
        failure = self.past[1]
        self.past = (until_s, failure)
        with self.lock:
            victims = list(self.rooms.values())
        return [(room, failure) for room in self.fail_rooms(victims, failure, until_s)]

    def saw_instance(self, instance: str, now: float) -> bool:
        """A probe read `instance`; True if it is another than the store knows."""
        if instance != self.seen_instance:
            self.seen_instance, self.seen_since_s = instance, now
        return instance != self.node.instance

    def fail_replaced(self) -> list[tuple[Room, Failure]]:
        """Another instance answers and the store is away: fail the rooms opened before it was first seen.

        Judged now, not when the store was asked: by then it may have become the instance that the store knows.
        """
        if self.node.instance in ("", self.seen_instance):
            return []
        reason = f"instance {self.node.instance} was replaced by {self.seen_instance}"
        failure = Failure(Cause.NODE_RESTARTED, reason, self.address, self.node.epoch, self.worker)
        with self.lock:
            victims = list(self.rooms.values())
        self._passed(self.seen_since_s, failure)
        return [(room, failure) for room in self.fail_rooms(victims, failure, self.seen_since_s)]

    def fail_unreachable(self, reason: str) -> list[tuple[Room, Failure]]:
        """This worker alone gives up on the node: its own rooms fail, joins are refused until a probe answers."""
        failure = Failure(Cause.UNREACHABLE, reason, self.address, self.node.epoch, self.worker)
        with self.lock:
            self.unreachable = reason
            self.refusal = self.refused
            victims = list(self.rooms.values())
        failed = self.fail_rooms(victims, failure)
        if failed and self.notes is not None:  # a request that one rank cannot finish, no rank can
            self.notes.add(failed)
        return [(room, failure) for room in failed]

    def reachable(self) -> None:
        """A probe answered: this worker no longer gives up on the node."""
        with self.lock:
            self.unreachable = ""
            self.refusal = self.refused

    def revive(self) -> None:
        """A probe answered for a failed node while the store is away: joins are taken here; the next probe after
        the store is back says the same to everybody."""
        with self.lock:
            # Which instance it is the store will say: it may have changed with the failure, in this very epoch.
            self.node = replace(self.node, state=ALIVE, instance=self.seen_instance)
            self.refusal = self.refused

    @property
    def state(self) -> str:
        """alive, suspect, failed, unreachable or draining, as this worker sees it."""
        refusal = self.refused
        return refusal.state if refusal else self.node.state or ALIVE
