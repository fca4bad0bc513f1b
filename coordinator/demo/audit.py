"""What came of the faults, from what every process recorded. Pure: facts in, numbers out.

A room is one (worker, address, room). It is open from `opened` to its first `succeeded` or `failed`, or to the kill of
its worker. Only facts are believed, never what should have happened. The rules:

1. Address faults (kill-node, stop-node, restart-node at A). The fault's time is read just before the signal was sent.
   `until` is when A is back: the next `announced` of a process at A (rooms opened before it belong to the epoch that
   ends with the announcement), or the `back` of a stopped one; else never.
   The fault affects every room at A that was opened before `until` and not ended before the fault. That includes
   rooms which a worker opened at the dead node because it did not know yet. Of these
   - failed: `on_failure` was called for a cause that a node's end can have (NODE_CAUSES);
   - missed: the worker lived to the end of the run and recorded no end, or (stop-node) the room only succeeded after
     the node went on: its owner had waited through the hang;
   - not counted: it succeeded (its last bytes were in flight), or its worker was killed before it could act.
   `affected` is failed + missed. A room belongs to one fault: to the first that affects it.
2. kill-worker. Affected are the rooms that the dead worker had open. failed: their node was told (`orphans`).
   missed: it was not. Not counted if untold: rooms of which the store never heard (opened a moment before the kill,
   not in a `stored` fact), rooms at a node that an address fault struck between their opening and the end (their node's
   memory is gone, or their epoch has ended), rooms whose only record a flush-store after the kill erased.
3. failed_twice: more than one `failed` for a room (rule 1), more than one `orphans` naming it at one node (rule 2).
4. first_ms, all_ms: from the fault until the first and the last owner had failed the last of its rooms; spread_ms is
   the difference. Owners are workers (rule 1) or nodes (rule 2). null without failed rooms.
5. false_failures: failed rooms that no address fault affects and for which none was less than MARGIN_NS over (a worker
   may read the end of an epoch some ms late); a cause no node's end can have; `failed` after `succeeded`; orphans
   of a worker that was not killed, while it had the room open.
6. pause-store, flush-store and start-node affect no room: every failure they cause is a false one.
7. open_at_end: rooms of living workers without an end, whatever the reason. Cause "closed" is no end.
8. Noticed: an address fault if rooms failed or the store's epoch of A rose; start-node if somebody opened a room there
   (asked only if enough rooms were opened later to expect one).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .facts import Fact
from .faults import FAILING, FLUSH_STORE, KILL_WORKER, START_NODE, STOP_NODE

NODE_CAUSES = frozenset({"node_failed", "node_restarted", "unreachable"})
MARGIN_NS = 250_000_000
_NEVER = 2**63
_ENOUGH_ROOMS = 40
_SETTLED_NS = 3_000_000_000


@dataclass(slots=True)
class RoomRecord:
    """One opening, as its worker recorded it."""

    worker: str
    address: str
    room: int
    opened: int
    died: int = _NEVER  # when its worker was killed
    stored: bool = False
    succeeded: int | None = None
    failed: list[Fact] = field(default_factory=list)

    @property
    def ended(self) -> int:
        """When it ended; the kill of its worker counts; _NEVER while open."""
        first = self.failed[0]["t"] if self.failed else _NEVER
        return int(min(first, _NEVER if self.succeeded is None else self.succeeded, self.died))

    @property
    def orphaned(self) -> bool:
        """Open when its worker was killed."""
        return self.died < _NEVER and self.succeeded is None and not self.failed


@dataclass(slots=True)
class FaultReport:
    """One line of the result. Times are ms after the fault."""

    kind: str
    t: int
    address: str = ""
    worker: str = ""
    until: int = _NEVER
    finished: int = 0
    failed: int = 0
    failed_twice: int = 0
    missed: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    owners: dict[str, int] = field(default_factory=dict)  # owner -> when it had failed its last room
    noticed: bool = True

    def count_failed(self, owner: str, t: int, times: int, cause: str) -> None:
        """One more failed room of `owner`, failed at `t`, `times` times in all."""
        self.failed += 1
        self.failed_twice += times > 1
        self.causes[cause] += 1
        self.owners[owner] = max(t, self.owners.get(owner, 0))

    def plain(self, start: int) -> dict[str, Any]:
        """As in the JSON result."""
        first, last = (min(self.owners.values()), max(self.owners.values())) if self.owners else (None, None)
        return {
            "kind": self.kind,
            "address": self.address,
            "affected": self.failed + self.missed,
            "failed": self.failed,
            "failed_twice": self.failed_twice,
            "missed": self.missed,
            "first_ms": None if first is None else _ms(first - self.t),
            "all_ms": None if last is None else _ms(last - self.t),
            "spread_ms": None if first is None or last is None else _ms(last - first),
            "at_s": round((self.t - start) / 1e9, 2),
            "worker": self.worker,
            "owners": len(self.owners),
            "finished": self.finished,
            "causes": dict(sorted(self.causes.items())),
            "noticed": self.noticed,
        }


@dataclass(frozen=True, slots=True)
class Audit:
    """The verdict on a run. `problems` says in words why it is not ok; empty means ok."""

    opened: int
    succeeded: int
    failed: int
    orphaned: int
    open_at_end: int
    false_failures: int
    faults: tuple[FaultReport, ...]
    problems: tuple[str, ...]


def audit(processes: Iterable[Sequence[Fact]], log: Sequence[Fact]) -> Audit:
    """Judge a run by each process's facts and by the orchestrator's own `log` of faults."""
    workers, nodes = _by_role(processes)
    faults = _faults(log, nodes)
    rooms = _rooms(workers, {fault.worker: fault.t for fault in faults if fault.kind == KILL_WORKER})
    false: list[str] = []
    for room in rooms.values():
        _judge_room(room, faults, false)
    told = _told(nodes)
    for fault in faults:
        if fault.kind == KILL_WORKER:
            _judge_orphans(fault, [r for r in rooms.values() if r.worker == fault.worker], faults, told)
    _find_false_orphans(told, rooms, false)
    for fault in faults:
        fault.noticed = _noticed(fault, rooms.values(), log)
    unended = [room for room in rooms.values() if room.ended == _NEVER]
    return Audit(
        opened=len(rooms),
        succeeded=sum(room.succeeded is not None for room in rooms.values()),
        failed=sum(bool(room.failed) and room.succeeded is None for room in rooms.values()),
        orphaned=sum(room.orphaned for room in rooms.values()),
        open_at_end=len(unended),
        false_failures=len(false),
        faults=tuple(faults),
        problems=tuple(_problems(faults, unended, false)),
    )


def _by_role(processes: Iterable[Sequence[Fact]]) -> tuple[dict[str, Sequence[Fact]], list[tuple[str, Sequence[Fact]]]]:
    workers: dict[str, Sequence[Fact]] = {}
    nodes: list[tuple[str, Sequence[Fact]]] = []
    for facts in processes:
        start = next((fact for fact in facts if fact["event"] == "start"), None)
        if start is None:
            continue  # killed before it had begun
        if start["role"] == "worker":
            workers[start["id"]] = facts
        else:
            nodes.append((start["address"], facts))
    return workers, nodes


def _faults(log: Sequence[Fact], nodes: Sequence[tuple[str, Sequence[Fact]]]) -> list[FaultReport]:
    reports = []
    for fact in log:
        if fact["event"] == "fault":
            reports.append(FaultReport(fact["kind"], fact["t"], fact.get("address", ""), fact.get("worker", "")))
    for report in reports:
        if report.kind in FAILING or report.kind == START_NODE:
            lives = [facts for address, facts in nodes if address == report.address]
            known = [f["t"] for facts in lives for f in facts if f["event"] == "announced"]
            back = [f["t"] for f in log if f["event"] == "back" and f["address"] == report.address]
            report.until = min((t for t in known + back if t > report.t), default=_NEVER)
    return reports


def _rooms(workers: dict[str, Sequence[Fact]], kills: dict[str, int]) -> dict[tuple[str, str, int], RoomRecord]:
    rooms: dict[tuple[str, str, int], RoomRecord] = {}
    for worker, facts in workers.items():
        for fact in facts:
            event = fact["event"]
            if event == "stored":
                for address, number in fact["rooms"]:
                    rooms[worker, address, number].stored = True
                continue
            if event not in ("opened", "succeeded", "failed") or fact.get("cause") == "closed":
                continue
            key = (worker, fact["address"], fact["room"])
            # on_failure may be called before the thread that joined has recorded it: any of them may come first
            room = rooms.setdefault(key, RoomRecord(*key, opened=fact["t"], died=kills.get(worker, _NEVER)))
            if event == "failed":
                room.failed.append(fact)
            elif event == "succeeded" and room.succeeded is None:
                room.succeeded = fact["t"]
    return rooms


def _judge_room(room: RoomRecord, faults: Sequence[FaultReport], false: list[str]) -> None:
    here = [f for f in faults if f.kind in FAILING and f.address == room.address and room.ended >= f.t]
    fault = next((f for f in here if room.opened < f.until), None)
    name = f"room {room.room} of {room.worker} at {room.address}"
    if room.failed:
        fault = fault or next((f for f in here if room.opened < f.until + MARGIN_NS), None)
        cause, first = room.failed[0]["cause"], room.failed[0]["t"]
        if room.succeeded is not None and room.succeeded <= first:
            false.append(f"{name} had succeeded and failed afterwards ({cause})")
        elif fault is None or cause not in NODE_CAUSES:
            false.append(
                f"{name} failed ({cause}: {room.failed[0].get('reason', '')}) without a fault that explains it"
            )
        else:
            fault.count_failed(room.worker, first, len(room.failed), cause)
    elif fault is None:
        return
    elif room.succeeded is not None:
        late = fault.kind == STOP_NODE and room.succeeded > fault.until
        fault.missed += late
        fault.finished += not late and room.opened < fault.t
    elif room.died == _NEVER:
        fault.missed += 1


def _told(nodes: Sequence[tuple[str, Sequence[Fact]]]) -> dict[tuple[str, str, int], list[int]]:
    """(worker, address, room) -> when nodes were told that it is an orphan."""
    told: dict[tuple[str, str, int], list[int]] = {}
    for address, facts in nodes:
        for fact in facts:
            if fact["event"] == "orphans":
                for room in fact["rooms"]:
                    told.setdefault((process_of(fact["worker"]), address, room), []).append(fact["t"])
    return told


def process_of(worker: str) -> str:
    """The process behind a worker id: "decode-0#1a2b3c4d.2" (its third life at an address) is "decode-0#1a2b3c4d"."""
    name, mark, rest = worker.rpartition("#")
    return name + mark + rest.partition(".")[0]


def _judge_orphans(
    fault: FaultReport,
    rooms: Iterable[RoomRecord],
    faults: Sequence[FaultReport],
    told: dict[tuple[str, str, int], list[int]],
) -> None:
    flushed = any(f.kind == FLUSH_STORE and f.t > fault.t for f in faults)
    for room in rooms:
        if not room.orphaned:
            continue
        times = [t for t in told.get((room.worker, room.address, room.room), ()) if t >= fault.t]
        struck = any(f.kind in FAILING and f.address == room.address and f.until > room.opened for f in faults)
        if times:
            fault.count_failed(room.address, min(times), len(times), "orphaned")
        elif room.stored and not struck and not flushed:
            fault.missed += 1


def _find_false_orphans(
    told: dict[tuple[str, str, int], list[int]], rooms: dict[tuple[str, str, int], RoomRecord], false: list[str]
) -> None:
    for key, times in told.items():
        room = rooms.get(key)
        if room is not None and room.died == _NEVER and room.opened < min(times) < room.ended and room.ended < _NEVER:
            false.append(f"room {room.room} of {room.worker} at {room.address} was given up for dead while it was open")


def _noticed(fault: FaultReport, rooms: Iterable[RoomRecord], log: Sequence[Fact]) -> bool:
    if fault.kind in FAILING and not fault.failed:
        epochs = [f for f in log if f["event"] == "epoch" and f["address"] == fault.address]
        before = max((f["epoch"] for f in epochs if f["t"] < fault.t), default=1)
        return any(f["epoch"] > before for f in epochs if f["t"] >= fault.t)
    if fault.kind == START_NODE:
        later = [room.address for room in rooms if room.opened > fault.t + _SETTLED_NS]
        return fault.until < _NEVER and (fault.address in later or len(later) < _ENOUGH_ROOMS)
    return True


def _problems(faults: Sequence[FaultReport], unended: Sequence[RoomRecord], false: Sequence[str]) -> Iterable[str]:
    for fault in faults:
        name = f"{fault.kind} of {fault.address or fault.worker or 'the store'}"
        if fault.missed:
            yield f"{name}: {fault.missed} rooms were missed"
        if fault.failed_twice:
            yield f"{name}: {fault.failed_twice} rooms failed more than once"
        if not fault.noticed:
            yield f"{name} was not noticed"
    if unended:
        room = unended[0]
        yield f"{len(unended)} rooms never ended, among them room {room.room} of {room.worker} at {room.address}"
    if false:
        yield f"{len(false)} false failures, among them: {false[0]}"


def _ms(ns: int) -> float:
    return round(ns / 1e6, 1)
