"""One Op per script: which keys, which arguments, how to read the answer. Pure; the runners in client.py send it.

A reader that meets an answer its script does not list raises ScriptFault: a malformed reply is never guessed at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..config import Settings
from ..errors import ScriptFault
from ..protocol import Batch, NodeView, Page, Reaped, Registration, SyncReply, SyncStatus, Verdict, Votes
from .keys import Keys

T = TypeVar("T")
Words = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Op(Generic[T]):
    """One call of one script. `read` turns the reply (a list of str) into a value."""

    script: str
    keys: tuple[str, ...]
    args: Words
    read: Callable[[list[Any]], T]

    def parse(self, reply: object) -> T:
        """Read `reply`; raise ScriptFault if it is not what the script's header promises."""
        try:
            if not isinstance(reply, list):
                raise TypeError("not a list")
            return self.read(reply)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as exc:
            raise ScriptFault(f"{self.script} answered {str(reply)[:200]!r}: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Ops:
    """Builds every Op for one namespace and one set of settings."""

    settings: Settings

    @property
    def keys(self) -> Keys:
        """The namespace's keys."""
        return Keys(self.settings.namespace)

    def _ms(self, seconds: float) -> int:
        return max(1, round(seconds * 1000))

    @property
    def _ttl(self) -> int:
        return self._ms(self.settings.retention_s)

    def sync(self, batch: Batch) -> Op[SyncReply]:
        """Apply a worker's batch, renew its lease, learn the node's state."""
        k, a, w, s, node, stats = self.keys, batch.address, batch.worker, self.settings, batch.node, batch.stats
        keys = (k.node(a), k.workers(a), k.rooms(a, w), k.worker(a, w), k.aborts(a, w), k.suspects(a), k.events(a))
        figures: Words = ("", "", "", "")
        if stats is not None:
            figures = (stats.bootstrapping, stats.waiting_for_input, stats.transferring, stats.oldest)
        age = -1 if node.failed_age_ms is None else node.failed_age_ms
        known = (node.epoch, node.state, age, node.cause, node.reason, node.by, node.instance)
        pace = (self._ms(s.lease_s), self._ms(s.probe_interval_s), self._ttl, s.events_kept)
        turn = (batch.claim, self._ms(s.tick_s))
        args: Words = (w, batch.number, batch.mode, *known, *pace, batch.count, *figures, *turn, len(batch.adds))
        return Op("sync", keys, (*args, *batch.adds, *batch.removes), _read_sync)

    def fail_node(
        self, address: str, epoch: int, call: str, by: str, reason: str, workers: Sequence[str]
    ) -> Op[Verdict]:
        """End `epoch` of the address. `call` identifies this call and its repetitions; `workers` as last listed."""
        k = self.keys
        keys = (k.node(address), k.workers(address), k.suspects(address), k.pending(address), k.events(address))
        pairs = tuple(key for w in workers for key in (k.rooms(address, w), k.lost(address, epoch, w)))
        args: Words = (epoch, call, by, reason, self._ttl, self.settings.events_kept, k.channel, address, *workers)
        return Op("fail_node", keys + pairs, args, _read_verdict)

    def suspect(
        self, address: str, worker: str, epoch: int, vote: bool, reason: str, majority: bool = False
    ) -> Op[Votes]:
        """Vote that the node is dead in this epoch, or withdraw the vote."""
        k, s = self.keys, self.settings
        keys = (k.node(address), k.workers(address), k.suspects(address), k.events(address))
        window = self._ms(2 * s.max_misses * (s.probe_interval_s + s.probe_timeout_s))
        args: Words = (worker, epoch, int(vote), reason, window, s.votes, int(majority), self._ttl, s.events_kept)
        return Op("suspect", keys, (*args, k.channel, address), _read_votes)

    def register_node(
        self,
        address: str,
        how: str,
        instance: str,
        epoch: int,
        call: str,
        by: str,
        workers: Sequence[str] = (),
        info: str = "",
        draining: bool | None = None,
    ) -> Op[Registration]:
        """Announce an instance ("start", "renew") or report what a probe read ("probe")."""
        k = self.keys
        keys = (k.node(address), k.workers(address), k.suspects(address), k.pending(address), k.events(address))
        pairs = tuple(key for w in workers for key in (k.rooms(address, w), k.lost(address, epoch, w)))
        flag = "" if draining is None else str(int(draining))
        lease = self._ms(self.settings.lease_s)
        args: Words = (how, instance, info, flag, epoch, call, by, lease, self._ttl, self.settings.events_kept)
        return Op("register_node", keys + pairs, (*args, k.channel, address, *workers), _read_registration)

    def reap_worker(self, address: str, worker: str, by: str, reason: str, leaving: bool = False) -> Op[Reaped]:
        """Take a worker off the address: its lease has run out, or it leaves by itself."""
        k, a, w = self.keys, address, worker
        keys = (k.node(a), k.workers(a), k.rooms(a, w), k.worker(a, w), k.aborts(a, w))
        more = (k.suspects(a), k.pending(a), k.orphans(a, w), k.events(a))
        lease = self._ms(self.settings.lease_s)
        args: Words = (w, int(leaving), by, reason, lease, self._ttl, self.settings.events_kept, k.channel, a)
        return Op("reap_worker", keys + more, args, _read_reaped)

    def abort_room(self, address: str, worker: str, room: int, reason: str, by: str) -> Op[bool]:
        """Mark one room for its owner to fail; False if the store does not know it as open."""
        k = self.keys
        keys = (k.rooms(address, worker), k.aborts(address, worker), k.events(address))
        args: Words = (worker, room, reason, by, self._ttl, self.settings.events_kept, k.channel, address)
        return Op("abort_room", keys, args, _read_aborted)

    def pass_on(
        self, address: str, by: str, siblings: Sequence[str], rooms: Sequence[tuple[int, str]]
    ) -> Op[tuple[tuple[int, int], ...]]:
        """Mark (room, reason)s for each of `siblings` to fail; answers the (sibling's index, room)s not open there."""
        k = self.keys
        keys = tuple(key for w in siblings for key in (k.rooms(address, w), k.aborts(address, w)))
        args: Words = (by, self._ttl, self.settings.events_kept, k.channel, address)
        words = tuple(word for pair in rooms for word in pair)
        return Op("pass_on", (k.events(address), *keys), (*args, *words), _read_passed)

    def drain_read(self, address: str, field: str, cursor: str = "0", count: int = 1000) -> Op[Page]:
        """One bounded piece of the snapshot that `field` of the pending hash names."""
        return Op("drain", self._drain_keys(address, field), ("read", cursor, count, field, "", 0, 0, 0), _read_page)

    def drain_ack(self, address: str, field: str, by: str, linger_s: float = 0.0) -> Op[None]:
        """Acknowledge a snapshot; it stays readable for `linger_s`."""
        linger = self._ms(linger_s) if linger_s > 0 else 0
        args: Words = ("ack", "0", 0, field, by, linger, self._ttl, self.settings.events_kept)
        return Op("drain", self._drain_keys(address, field), args, _read_done)

    def drain_drop(self, address: str, field: str, by: str) -> Op[None]:
        """Free a snapshot now."""
        args: Words = ("drop", "0", 0, field, by, 0, self._ttl, self.settings.events_kept)
        return Op("drain", self._drain_keys(address, field), args, _read_done)

    def discover(self, addresses: Sequence[str]) -> Op[tuple[str, ...]]:
        """Mark addresses as used; learn of those that nobody marked for 0.6 leases (marks come every 0.25)."""
        args: Words = (self._ttl, self._ms(0.6 * self.settings.lease_s), *addresses)
        return Op("discover", (self.keys.addresses,), args, _read_discovered)

    def _drain_keys(self, address: str, field: str) -> tuple[str, ...]:
        k = self.keys
        return (k.snapshot(address, field), k.pending(address), k.events(address))


def _pairs(flat: Sequence[str]) -> dict[str, int]:
    return {flat[i]: int(flat[i + 1]) for i in range(0, len(flat), 2)}


def _age(text: str) -> int | None:
    age = int(text)
    return None if age < 0 else age


def _read_sync(r: list[Any]) -> SyncReply:
    state = NodeView(int(r[1]), r[2], _age(r[3]), r[4], r[5], r[6], r[7], r[8] == "1")
    marks = tuple((int(r[13][i]), r[13][i + 1]) for i in range(0, len(r[13]), 2))
    return SyncReply(SyncStatus(r[0]), state, int(r[9]), int(r[10]), int(r[11]), tuple(r[12]), marks)


def _read_verdict(r: list[Any]) -> Verdict:
    if r[0] == "FAILED":
        return Verdict("FAILED", NodeView(int(r[1]), "failed", 0), _pairs(r[2]))
    if r[0] == "STALE":
        return Verdict("STALE", NodeView(int(r[1]), r[2], _age(r[3]), r[4], r[5], r[6]))
    if r[0] == "RETRY":
        return Verdict("RETRY", NodeView(0), workers=tuple(r[1]))
    raise ValueError(f"unknown status {r[0]!r}")


def _read_votes(r: list[Any]) -> Votes:
    if r[0] == "STALE":
        return Votes(stale=True)
    if r[0] == "VOTES":
        return Votes(False, int(r[1]), int(r[2]), int(r[3]))
    raise ValueError(f"unknown status {r[0]!r}")


def _read_registration(r: list[Any]) -> Registration:
    if r[0] == "RETRY":
        return Registration("RETRY", NodeView(int(r[1])), workers=tuple(r[2]))
    if r[0] in ("SAME", "NEW", "REPLACED", "PAST", "STALE"):
        view = NodeView(int(r[1]), r[2], draining=r[3] == "1")
        return Registration(r[0], view, _pairs(r[4]), _pairs(r[5]), tuple(r[6]))
    raise ValueError(f"unknown status {r[0]!r}")


def _read_reaped(r: list[Any]) -> Reaped:
    if r[0] == "REAPED":
        return Reaped("REAPED", rooms=int(r[1]))
    if r[0] == "ALIVE":
        return Reaped("ALIVE", left_ms=int(r[1]))
    if r[0] == "UNKNOWN":
        return Reaped("UNKNOWN")
    raise ValueError(f"unknown status {r[0]!r}")


def _read_aborted(r: list[Any]) -> bool:
    return {"OK": True, "UNKNOWN": False}[r[0]]


def _read_passed(r: list[Any]) -> tuple[tuple[int, int], ...]:
    if r[0] != "OK":
        raise ValueError(f"unknown status {r[0]!r}")
    flat = r[1]
    return tuple((int(flat[i]) - 1, int(flat[i + 1])) for i in range(0, len(flat), 2))


def _read_page(r: list[Any]) -> Page:
    if r[0] != "ROOMS":
        raise ValueError(f"unknown status {r[0]!r}")
    return Page(str(r[1]), tuple(map(int, r[2].split())))


def _read_done(r: list[Any]) -> None:
    if r[0] not in ("ACKED", "DROPPED"):
        raise ValueError(f"unknown status {r[0]!r}")


def _read_discovered(r: list[Any]) -> tuple[str, ...]:
    if r[0] != "OK":
        raise ValueError(f"unknown status {r[0]!r}")
    return tuple(r[1])
