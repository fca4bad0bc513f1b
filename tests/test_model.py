"""The protocol against a model: hypothesis plays several workers, their nodes, a store that loses things, and time.

Real ledgers drive real Ops on a real script engine; the machine plays the loops, so that it can lose a request, lose
a reply, deliver twice or late, crash a process, empty the store or bring back an older copy of it between any two
steps. It sees every answer, also the lost ones, and so knows what truly happened; `settle` lets everybody sync until
nothing changes and compares.

Time is virtual: a step costs five seconds. The server's clock cannot be moved, so what it has written is moved instead
(`pass_time` shifts every time in the store into the past).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from servers import FakeLane, Server, flush

from coordinator import Cause, Failure, JoinRefused, Room, RoomExists, Settings, Status
from coordinator.decide.book import Book, Outcome
from coordinator.decide.ledger import Ledger
from coordinator.protocol import FAILED, Batch, NodeView, Registration, SyncReply, SyncStatus, Verdict
from coordinator.store.client import SyncStore
from coordinator.store.ops import Op, Ops
from coordinator.store.scripts import load

ADDRESSES = ("10.0.0.1:80", "10.0.0.1:8000")  # one is a prefix of the other
SETTINGS = Settings(lease_s=60.0, tick_s=5.0, namespace="model")
STEP_S = 5.0  # far more than any call takes, so that before and after are never in doubt
GRAIN_S = 2.5
LIMIT = 2  # rooms in a batch
TIMES = ("failed_ms", "seen_ms", "probe_ms", "announced_ms")

address_of = st.sampled_from(ADDRESSES)
room_of = st.integers(0, 3)
which = st.integers(0, 2)
Fault = str
fault_of = st.sampled_from(["none", "none", "none", "request lost", "reply lost", "twice"])


@dataclass(eq=False)
class Process:
    """One decode process: its ledger and the fail_node calls whose answers it still waits for."""

    name: str
    ledger: Ledger
    calls: list[Call] = field(default_factory=list)
    saw: dict[tuple[str, str], float] = field(default_factory=dict)  # (address, instance) -> first seen

    def books(self) -> list[Book]:
        return self.ledger.books()

    def open_rooms(self, book: Book) -> set[int]:
        return {room.id for room in book.rooms.values() if 0 < room.status < 4}


@dataclass(eq=False)
class Call:
    """One fail_node call with all its repetitions."""

    id: str
    process: Process
    address: str
    epoch: int
    first: Verdict | None = None  # what it answered when it ended the epoch
    fallbacks: int = 0  # of the store, before that


@dataclass(eq=False)
class Opening:
    """One opening of a room."""

    process: Process
    room: Room
    opened_s: float
    marked: bool = False  # an abort mark was set for it and not lost since


@dataclass(eq=False)
class End:
    """The end of an epoch, between two times."""

    address: str
    epoch: int
    from_s: float
    to_s: float
    instance: str  # the one that took over, if that was the cause
    fallbacks: int
    ahead: set[Process]  # those who had gone on already: the store had fallen back behind them
    needed: bool = True  # False once the store lost it and the last process that knew it is gone


class World(RuleBasedStateMachine):
    """See the module."""

    lane: ClassVar[FakeLane | Server]
    client: ClassVar[redis.Redis]
    scripts: ClassVar[dict[str, str]] = {}  # texts that replace real ones

    def __init__(self) -> None:
        super().__init__()
        flush(self.lane)
        self.store, self.ops = SyncStore(self.client, 1.0), Ops(SETTINGS)
        self.offset = 0.0
        self.serial = itertools.count(1)
        self.living: list[Process] = []
        self.openings: dict[int, Opening] = {}  # by id() of the Room, which is kept alive here
        self.told: set[int] = set()
        self.ends: list[End] = []
        self.delayed: list[Op[SyncReply]] = []
        self.batch_rooms: dict[tuple[str, str, int], dict[int, Room]] = {}
        self.held: dict[tuple[str, str, int], Room] = {}  # (address, life, room id) -> what the store holds it for
        self.synced_s: dict[tuple[str, str], float] = {}
        self.touched_s: dict[str, float] = {}  # when anybody last used an address
        self.reaped: set[str] = set()
        self.instances = dict.fromkeys(ADDRESSES, 0)
        self.restarted_s: dict[str, float] = {}
        self.saved: dict[str, Any] | None = None
        self.fallbacks = self.restores = 0
        for _ in range(2):
            self.spawn()

    # -- the store ------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return time.monotonic() + self.offset

    def call(self, op: Op[Any]) -> Any:
        text = self.scripts.get(op.script)
        if text is None:
            return self.store.once(op)
        return op.parse(self.client.eval(text, len(op.keys), *op.keys, *map(str, op.args)))

    def pass_time(self, seconds: float) -> None:
        """Move every time in the store into the past, and the workers' clock forward."""
        self.offset += seconds
        self._move(-seconds * 1000)

    def _move(self, ms: float) -> None:
        k, pipe = self.ops.keys, self.client.pipeline(transaction=False)
        for address in ADDRESSES:
            pipe.hmget(k.node(address), TIMES)
            pipe.zrange(k.workers(address), 0, -1, withscores=True)
        found, pipe = pipe.execute(), self.client.pipeline(transaction=False)
        for address, stamps, workers in zip(ADDRESSES, found[::2], found[1::2], strict=True):
            for name, stamp in zip(TIMES, stamps, strict=True):
                if stamp is not None:
                    pipe.hset(k.node(address), name, str(int(float(stamp) + ms)))
            for worker, deadline in workers:
                pipe.zadd(k.workers(address), {worker: int(deadline + ms)})
        pipe.execute()

    def epoch(self, address: str) -> int:
        return int(self.client.hget(self.ops.keys.node(address), "epoch") or 0)

    def listed(self, address: str) -> list[str]:
        found: Any = self.client.zrange(self.ops.keys.workers(address), 0, -1)
        return list(found)

    def members(self, key: str) -> set[int]:
        found: Any = self.client.smembers(key)
        return {int(member) for member in found}

    def rooms(self, address: str) -> dict[str, set[int]]:
        """What the store holds at an address, by worker."""
        prefix = self.ops.keys.rooms(address, "")
        keys: Any = self.client.scan_iter(match=prefix.replace("[", "\\[") + "*", count=1000)
        return {key.removeprefix(prefix): self.members(key) for key in keys}

    # -- processes ------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.living) < 3)
    @rule()
    def spawn(self) -> None:
        name = f"w{next(self.serial)}#x"
        self.living.append(Process(name, Ledger(name, self.now)))

    def pick(self, i: int) -> Process:
        return self.living[i % len(self.living)]

    @precondition(lambda self: len(self.living) > 1)
    @rule(i=which)
    def crash(self, i: int) -> None:
        self.living.remove(self.pick(i))
        self.forget_lost_ends()

    @rule(seconds=st.sampled_from([10.0, 30.0, 75.0]))
    def wait(self, seconds: float) -> None:
        self.pass_time(seconds)

    @rule(i=which, address=address_of, room=room_of, status=st.sampled_from([1, 2]))
    def join(self, i: int, address: str, room: int, status: int) -> None:
        self.pass_time(STEP_S)
        process = self.pick(i)
        book, old = process.ledger.book(address), process.ledger.find(address, room)
        refused = book is not None and book.refused is not None
        opened_s = self.now()
        try:
            opened = process.ledger.join(address, room, Status(status))
        except JoinRefused:
            assert refused
            return
        except RoomExists:
            assert old is not None
            assert 0 < old.status < 4
            return
        assert not refused
        assert old is None or old.status in (0, 4)
        self.openings[id(opened)] = Opening(process, opened, opened_s)

    @rule(i=which, address=address_of, room=room_of)
    def leave(self, i: int, address: str, room: int) -> None:
        process = self.pick(i)
        there = process.ledger.find(address, room) is not None
        assert process.ledger.leave(address, room) == there
        assert process.ledger.find(address, room) is None

    @rule(i=which, address=address_of, room=room_of, status=st.sampled_from(list(Status)))
    def update(self, i: int, address: str, room: int, status: Status) -> None:
        self.pick(i).ledger.update(address, room, status)

    # -- sync -----------------------------------------------------------------------------------------------------

    @rule(i=which, address=address_of, fault=fault_of)
    def sync(self, i: int, address: str, fault: Fault) -> None:
        self.pass_time(STEP_S)
        process = self.pick(i)
        if (book := process.ledger.book(address)) is not None:
            self.sync_book(process, book, fault)

    def sync_book(self, process: Process, book: Book, fault: Fault = "none") -> Outcome | None:
        batch = book.batch(self.now(), LIMIT)
        content = {room_id: book.rooms[room_id] for room_id in batch.adds if room_id in book.rooms}
        self.batch_rooms.setdefault((book.address, batch.worker, batch.number), content)
        op = self.ops.sync(batch)
        if fault != "none":
            self.delayed.append(op)
        if fault == "request lost":
            return None
        reply = self.deliver(op, batch.worker, batch)
        if fault == "twice":
            before = self.rooms(book.address)
            again = self.deliver(op, batch.worker, batch)
            assert (again.status, again.node.epoch, self.rooms(book.address)) == (
                reply.status,
                reply.node.epoch,
                before,
            )
        if fault == "reply lost":
            return None
        outcome = book.apply(batch, reply, self.now())
        self.took(book, outcome, reply.node)
        for name in outcome.acknowledge:
            self.call(self.ops.drain_ack(book.address, name, process.name))
        return outcome

    def deliver(self, op: Op[SyncReply], worker: str, batch: Batch | None = None) -> SyncReply:
        reply: SyncReply = self.call(op)
        address = op.keys[0].split("{")[1].split("}")[0]
        if reply.status is not SyncStatus.FENCED:
            self.synced_s[address, worker] = self.touched_s[address] = self.now()
        if batch is not None and reply.status is SyncStatus.OK:
            for room_id, room in self.batch_rooms[address, worker, batch.number].items():
                self.held[address, worker, room_id] = room
        return reply

    @precondition(lambda self: self.delayed)
    @rule(data=st.data())
    def deliver_late(self, data: st.DataObject) -> None:
        """A request that was lost, or one that was delivered, arrives (again); nobody waits for its answer."""
        op = self.delayed.pop(data.draw(st.integers(0, len(self.delayed) - 1)))
        address = op.keys[0].split("{")[1].split("}")[0]
        before = self.synced_s.get((address, str(op.args[0])))
        self.deliver(op, str(op.args[0]))
        if before is not None:
            self.synced_s[address, str(op.args[0])] = before  # its sender did not sync

    def took(self, book: Book, outcome: Outcome, view: NodeView) -> None:
        """Each failure is the first of its room, at its address, and has a reason that is true."""
        for room, failure in outcome.failed:
            assert id(room) not in self.told, f"{room} failed twice"
            self.told.add(id(room))
            assert room.address == failure.address == book.address
            assert self.true(self.openings[id(room)], failure, view), f"{room} failed by mistake: {failure}"

    def true(self, opening: Opening, failure: Failure, view: NodeView) -> bool:
        if failure.cause is Cause.LEASE_LOST:
            return failure.by in self.reaped
        if failure.cause is Cause.ABORTED:
            return opening.marked or self.restores > 0
        if failure.cause is Cause.NODE_RESTARTED and opening.opened_s < self.restarted_s[failure.address]:
            return True  # also when the store had lost the former instance: the owner knew it
        # At an address that is failed no room is open; otherwise only what was opened before an end fails by it.
        return view.state == FAILED or any(
            end.address == failure.address and opening.opened_s <= end.to_s + GRAIN_S for end in self.ends
        )

    # -- verdicts -------------------------------------------------------------------------------------------------

    @rule(i=which, address=address_of, lose=st.booleans())
    def fail_node(self, i: int, address: str, lose: bool) -> None:
        self.pass_time(STEP_S)
        process = self.pick(i)
        book = process.ledger.book(address)
        if book is None:
            return
        self.sync_book(process, book)
        if book.node.epoch > 0:
            self.attempt(Call(f"call{next(self.serial)}", process, address, book.node.epoch), lose)

    @precondition(lambda self: any(process.calls for process in self.living))
    @rule(lose=st.booleans(), data=st.data())
    def repeat_call(self, lose: bool, data: st.DataObject) -> None:
        self.pass_time(STEP_S)
        call = data.draw(st.sampled_from([c for process in self.living for c in process.calls]))
        self.attempt(call, lose)

    def attempt(self, call: Call, lose: bool = False) -> None:
        """One attempt of the call, as the library makes it; `lose` its answer."""
        address, process = call.address, call.process
        book = process.ledger.book(address)
        assert book is not None
        stored, rooms, began = self.epoch(address), self.rooms(address), self.now()
        verdict = Verdict("RETRY", NodeView(0))
        while verdict.outcome == "RETRY":
            op = self.ops.fail_node(address, call.epoch, call.id, process.name, "operator", verdict.workers)
            verdict = self.call(op)
        if verdict.outcome == "FAILED" and stored == call.epoch:
            assert verdict.counts == {worker: len(ids) for worker, ids in rooms.items() if ids}
            for worker, ids in rooms.items():
                assert self.members(self.ops.keys.lost(address, call.epoch, worker)) == ids
            assert self.rooms(address) == {}
            call.first, call.fallbacks = verdict, self.fallbacks
            self.ended(address, call.epoch, began, "")
        elif call.first is not None and call.fallbacks == self.fallbacks and stored == call.epoch + 1:
            assert verdict == call.first, "a repeated call answers what it answered first"
            assert self.rooms(address) == rooms
        if call not in process.calls:
            process.calls.append(call)
        if lose:
            return
        if verdict.outcome == "FAILED":
            process.calls.remove(call)
            view = NodeView(call.epoch + 1, FAILED, 0, "node_failed", "operator", process.name, book.node.instance)
            if view.epoch > book.node.epoch:
                outcome = Outcome()
                book.learn(view, self.now(), outcome)
                self.took(book, outcome, view)
        elif verdict.node.state == FAILED and verdict.node.epoch >= call.epoch:
            process.calls.remove(call)
        else:  # the epoch has moved, or the store fell back: sync, then the same call for the epoch that is
            self.sync_book(process, book)
            call.epoch, call.first = book.node.epoch, None

    def ended(self, address: str, epoch: int, began: float, instance: str) -> None:
        ahead = {p for p in self.living if (book := p.ledger.book(address)) is not None and book.node.epoch > epoch}
        self.ends.append(End(address, epoch, began, self.now(), instance, self.fallbacks, ahead))

    # -- nodes ----------------------------------------------------------------------------------------------------

    @rule(address=address_of, how=st.sampled_from(["start", "restart", "renew", "past"]), repeat=st.booleans())
    def register(self, address: str, how: str, repeat: bool) -> None:
        """The node starts (again), renews itself, or a former instance still does."""
        self.pass_time(STEP_S)
        if how == "restart" or (how == "start" and self.instances[address] == 0):
            self.instances[address] += 1
            self.restarted_s[address] = self.now()
        number = self.instances[address] - (how == "past")
        if number < 1:
            return
        answer = self.announce(address, "start" if "start" in how else "renew", f"i{number}", 0, repeat)
        if how == "past" and self.fallbacks == 0:
            assert answer.outcome == "PAST"

    @rule(i=which, address=address_of)
    def probe(self, i: int, address: str) -> None:
        """A worker's probe reads the instance that answers."""
        self.pass_time(STEP_S)
        process, instance = self.pick(i), f"i{self.instances[address]}" if self.instances[address] else ""
        book = process.ledger.book(address)
        if book is None:
            return
        process.saw.setdefault((address, instance), self.now())
        other = bool(instance) and book.saw_instance(instance, self.now())
        if book.node.epoch > 0 and (other or book.node.state == FAILED):
            self.announce(address, "probe", instance, book.node.epoch, False)

    def announce(self, address: str, how: str, instance: str, epoch: int, repeat: bool) -> Registration:
        call, workers, rooms, began = f"call{next(self.serial)}", (), self.rooms(address), self.now()
        while True:
            op = self.ops.register_node(address, how, instance, epoch, call, "node", workers)
            answer: Registration = self.call(op)
            if answer.outcome != "RETRY":
                break
            workers = answer.workers  # type: ignore[assignment]
            epoch = epoch if how == "probe" else answer.node.epoch
        if answer.outcome == "REPLACED":
            assert answer.counts == {worker: len(ids) for worker, ids in rooms.items() if ids}
            self.ended(address, answer.node.epoch - 1, began, instance)
        if how != "probe":
            self.touched_s[address] = self.now()
        if repeat:
            before = self.rooms(address)
            again: Registration = self.call(op)
            assert (again.outcome, again.node, again.counts) == (answer.outcome, answer.node, answer.counts)
            assert self.rooms(address) == before
        return answer

    @rule(address=address_of, room=room_of, i=which, repeat=st.booleans())
    def abort(self, address: str, room: int, i: int, repeat: bool) -> None:
        """The node gives one room up."""
        book = self.pick(i).ledger.book(address)
        if book is None:
            return
        op = self.ops.abort_room(address, book.worker, room, "no memory", "node")
        marked = self.call(op)
        if repeat:
            assert self.call(op) == marked
        if marked and (held := self.held.get((address, book.worker, room))) is not None:
            self.openings[id(held)].marked = True

    # -- reaping --------------------------------------------------------------------------------------------------

    @rule(address=address_of, data=st.data(), repeat=st.booleans())
    def reap(self, address: str, data: st.DataObject, repeat: bool) -> None:
        if listed := self.listed(address):
            self.reap_one(address, data.draw(st.sampled_from(sorted(listed))), repeat)

    @rule(i=which, address=address_of, repeat=st.booleans())
    def cut_off(self, i: int, address: str, repeat: bool) -> None:
        """One process does not reach the store for longer than a lease, while the others do."""
        away = self.pick(i)
        for _ in range(5):
            self.pass_time(15.0)
            for process in self.living:
                if process is not away and (book := process.ledger.book(address)) is not None:
                    self.sync_book(process, book)
        book = away.ledger.book(address)
        if book is not None and book.worker in self.listed(address):
            self.reap_one(address, book.worker, repeat)

    def reap_one(self, address: str, worker: str, repeat: bool = False) -> bool:
        """Whoever synced within the last lease stays; the rooms of whoever did not are kept for the node."""
        rooms = self.members(self.ops.keys.rooms(address, worker))
        quiet_s, self.touched_s[address] = self.now() - self.touched_s[address], self.now()
        op = self.ops.reap_worker(address, worker, "judge", "lease expired")
        answer = self.call(op)
        if answer.outcome != "REAPED":
            return False
        self.reaped.add(worker)
        assert self.now() - self.synced_s[address, worker] >= SETTINGS.lease_s - GRAIN_S, f"{worker} was alive"
        assert quiet_s <= SETTINGS.lease_s / 3 + GRAIN_S, "nobody had reached the store: it was away, not the worker"
        assert answer.rooms == len(rooms)
        assert not rooms or self.members(self.ops.keys.orphans(address, worker)) == rooms
        if repeat:
            assert self.call(op) == answer
            assert not rooms or self.members(self.ops.keys.orphans(address, worker)) == rooms
        return True

    # -- the store loses data ---------------------------------------------------------------------------------------

    def save(self) -> None:
        """Keep a copy of everything; times as virtual ones."""
        self._move(self.offset * 1000)
        self.saved = {}
        for key in self.client.scan_iter(count=1000):
            kind: Any = self.client.type(key)
            readers: dict[str, Callable[[str], Any]] = {
                "hash": self.client.hgetall,
                "set": self.client.smembers,
                "zset": lambda key: dict(self.client.zrange(key, 0, -1, withscores=True)),  # type: ignore[arg-type]
            }
            if kind in readers:
                self.saved[key] = readers[kind](key)
        self._move(-self.offset * 1000)

    def restore(self) -> None:
        """A replica that missed the last writes is promoted."""
        assert self.saved is not None
        flush(self.lane)
        for key, value in self.saved.items():
            if isinstance(value, set):
                self.client.sadd(key, *value)
            elif all(isinstance(v, float) for v in value.values()):
                self.client.zadd(key, {member: int(score) for member, score in value.items()})
            else:
                self.client.hset(key, mapping=value)
            self.client.pexpire(key, 600_000)
        self._move(-self.offset * 1000)
        self.restores += 1
        self.lost_data()

    @rule(what=st.sampled_from(["save", "restore", "flush"]))
    def trouble(self, what: str) -> None:
        """An older copy is kept, brought back, or all is lost."""
        if what == "save":
            self.save()
        elif what == "flush" or self.saved is None:
            flush(self.lane)
            self.lost_data()
        else:
            self.restore()

    def lost_data(self) -> None:
        self.fallbacks += 1
        for opening in self.openings.values():
            opening.marked = False
        self.forget_lost_ends()

    def forget_lost_ends(self) -> None:
        """The one case that stays uncovered: the store lost the end, and the last process that knew of it is gone."""
        for end in self.ends:
            known = [book.node.epoch for p in self.living if (book := p.ledger.book(end.address)) is not None]
            if end.fallbacks < self.fallbacks and max([self.epoch(end.address), *known]) <= end.epoch:
                end.needed = False

    # -- quiescence -----------------------------------------------------------------------------------------------

    @rule()
    def settle(self) -> None:
        """Everybody syncs until nothing changes and the dead are reaped; then store and ledgers must agree."""
        quiet = 0
        for _ in range(100):
            self.pass_time(STEP_S)
            changed = False
            for process in self.living:
                for call in list(process.calls):
                    self.attempt(call)
                    changed = True
                for book in process.books():
                    epoch = book.node.epoch
                    outcome = self.sync_book(process, book)
                    assert outcome is not None
                    changed |= outcome.again or bool(outcome.failed) or book.node.epoch != epoch
            changed |= self.reap_dead()
            quiet = 0 if changed else quiet + 1
            if quiet == 2:
                break
        assert quiet == 2, "it does not come to rest"
        self.agree()

    def reap_dead(self) -> bool:
        """Whether somebody who is gone is still listed; tried to reap all of them."""
        lives = {(book.address, book.worker) for process in self.living for book in process.books()}
        dead = [(a, worker) for a in ADDRESSES for worker in self.listed(a) if (a, worker) not in lives]
        for address, worker in dead:
            self.reap_one(address, worker)
        return bool(dead)

    def agree(self) -> None:
        books = [(process, book) for process in self.living for book in process.books()]
        for address in ADDRESSES:
            here = [(process, book) for process, book in books if book.address == address]
            owned = {book.worker: process.open_rooms(book) for process, book in here}
            stored, open_here = self.rooms(address), {worker: ids for worker, ids in owned.items() if ids}
            if self.restores and self.client.hget(self.ops.keys.node(address), "state") == FAILED:
                open_here = {}  # an older copy says that it failed: its rooms are written when a probe answers
            assert stored == open_here, f"{address}: the store holds {stored}, the ledgers {open_here}"
            assert {book.node.epoch for _, book in here} <= {self.epoch(address)}
            assert set(self.listed(address)) == set(owned)
        for opening in self.openings.values():
            room, process = opening.room, opening.process
            if process not in self.living or process.ledger.find(room.address, room.id) is not room:
                continue
            if room.status is Status.FAILED:
                assert room.failure is not None
                assert (id(room) in self.told) == (room.failure.cause is not Cause.LOCAL)
            elif room.status is not Status.SUCCESS:
                assert not opening.marked, f"{room} was aborted and lives on"
                self.outlived_no_end(opening)
        self.no_key_for_ever()

    def outlived_no_end(self, opening: Opening) -> None:
        for end in self.ends:
            if not end.needed or end.address != opening.room.address or opening.opened_s >= end.from_s:
                continue
            seen = opening.process.saw.get((end.address, end.instance), float("inf"))
            excused = opening.process in end.ahead or opening.opened_s >= seen
            assert excused, f"{opening.room} outlived the end of epoch {end.epoch}"

    def no_key_for_ever(self) -> None:
        keys = list(self.client.scan_iter(count=1000))
        pipe = self.client.pipeline(transaction=False)
        for key in keys:
            pipe.pttl(key)
        assert [key for key, ttl in zip(keys, pipe.execute(), strict=True) if ttl < 0] == []

    def teardown(self) -> None:
        self.settle()
        for address in ADDRESSES:
            for i in range(len(self.living)):
                self.probe(i, address)
        self.settle()


def play(lane: FakeLane | Server, examples: int, steps: int, shrink: bool = True, **scripts: str) -> None:
    """Run the machine on a lane; `scripts` replace real ones."""
    phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if shrink else [])]
    with lane.sync_client() as client:
        machine = type("World", (World,), {"lane": lane, "client": client, "scripts": scripts})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                derandomize=True,
                deadline=None,
                database=None,
                phases=phases,
                suppress_health_check=list(HealthCheck),
            ),
        )


def test_the_protocol_keeps_its_promises_on_a_fake_store(lanes: Any) -> None:
    """Whatever happens in whatever order, store and ledgers agree in the end and each room fails once, rightly."""
    play(lanes.get("fake"), examples=30, steps=40)


def test_the_protocol_keeps_its_promises_on_a_real_store(redis_server: Server) -> None:
    """The same machine against a real server, with more and longer stories: its scripts run twenty times faster."""
    play(redis_server, examples=100, steps=50)


# -- the machine must notice ------------------------------------------------------------------------------------------

# What the first idea of such a script looks like: read, delete, return.
PLAIN = """
local counts = {}
for i = 9, #ARGV do
    local rooms = KEYS[6 + 2 * (i - 9)]
    local found = redis.call('SMEMBERS', rooms)
    redis.call('DEL', rooms)
    if #found > 0 then
        counts[#counts + 1] = ARGV[i]
        counts[#counts + 1] = tostring(#found)
    end
end
redis.call('HSET', KEYS[1], 'epoch', tonumber(ARGV[1]) + 1, 'state', 'failed', 'reason', ARGV[4])
return {'FAILED', tostring(tonumber(ARGV[1]) + 1), counts}
"""


def changed(script: str, old: str, new: str) -> str:
    """A script's text with one piece replaced."""
    text = load(script).text
    assert text.count(old) == 1, f"{script} no longer contains {old!r} once: plant the bug anew"
    return text.replace(old, new)


BAD_SCRIPTS: dict[str, tuple[str, Callable[[], str], str]] = {
    "fail_node reads, deletes and returns": ("fail_node", lambda: PLAIN, ""),
    "fail_node does not know its own repetition": (
        "fail_node",
        lambda: changed("fail_node", "if n[3] == call and stored == epoch + 1 then", "if false then"),
        "a repeated call answers what it answered first",
    ),
    "register_node does not know its own repetition": (
        "register_node", lambda: changed("register_node", "if n[7] == call then", "if false then"), ""
    ),
    "reap_worker leaves no fence": (
        "reap_worker", lambda: changed("reap_worker", "redis.call('HSET', record, 'fenced', n)", ""), ""
    ),
    "reap_worker does not forgive a stall": (
        "reap_worker",
        lambda: changed("reap_worker", "local stalled = forgive_stall(node, workers, now, lease)", "local stalled"),
        "it was away",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BAD_SCRIPTS)
def test_the_machine_notices_a_planted_script(bug: str, redis_server: Server) -> None:
    """Each of these changes to a script breaks a promise, and the machine finds the story that shows it."""
    script, text, message = BAD_SCRIPTS[bug]
    with pytest.raises(AssertionError, match=message or None):
        play(redis_server, 800, 50, shrink=False, **{script: text()})


def fails_all_alike(self: Book, victims: list[Room], failure: Failure, before: float = 0.0) -> list[Room]:
    """Does not ask when a room was opened."""
    return REAL_FAIL_ROOMS(self, victims, failure)


def fails_none(self: Book, victims: list[Room], failure: Failure, before: float = 0.0) -> list[Room]:
    """Drops every failure."""
    return []


def fails_again(self: Book, victims: list[Room], failure: Failure, before: float = 0.0) -> list[Room]:
    """Does not ask whether a room has failed already."""
    failed = REAL_FAIL_ROOMS(self, victims, failure, before)
    return failed + [room for room in victims if room.failure is not None and room not in failed]


def stays_the_same(self: Book, outcome: Outcome) -> None:
    """Comes back after its lease was lost under the id that was reaped."""
    worker = self.worker
    REAL_FENCED(self, outcome)
    self.worker = worker


REAL_FAIL_ROOMS, REAL_FENCED = Book.fail_rooms, Book._fenced
BAD_BOOKS: dict[str, tuple[str, Any, str]] = {
    "all rooms fail, whenever they were opened": ("fail_rooms", fails_all_alike, "by mistake"),
    "a failure is dropped": ("fail_rooms", fails_none, ""),
    "a failure is told twice": ("fail_rooms", fails_again, "failed twice"),
    "a reaped id is used again": ("_fenced", stays_the_same, "does not come to rest"),
}


@pytest.mark.parametrize("bug", BAD_BOOKS)
def test_the_machine_notices_a_planted_ledger(bug: str, redis_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these changes to the book breaks a promise, and the machine finds the story that shows it."""
    method, planted, message = BAD_BOOKS[bug]
    monkeypatch.setattr(Book, method, planted)
    with pytest.raises(AssertionError, match=message or None):
        play(redis_server, 800, 50, shrink=False)
