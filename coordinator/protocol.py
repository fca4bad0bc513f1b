"""What worker, node and store say to each other, as frozen values. Pure; below both store/ and decide/.

Names and order follow the headers in lua/. Times are milliseconds of age, never a clock reading: the store's
clock and a process's clock never meet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

ALIVE, SUSPECT, FAILED = "alive", "suspect", "failed"

_TEXT_LIMIT = 256


class SyncStatus(StrEnum):
    """Outcome of a sync: applied, epoch ended, the store lacks the previous batch, or this worker was reaped."""

    OK = "OK"
    STALE = "STALE"
    RESYNC = "RESYNC"
    FENCED = "FENCED"


@dataclass(frozen=True, slots=True)
class NodeView:
    """What the store holds about a node. `failed_age_ms` is None if no epoch of it ever ended."""

    epoch: int
    state: str = ALIVE
    failed_age_ms: int | None = None
    cause: str = ""
    reason: str = ""
    by: str = ""
    instance: str = ""
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of open rooms by status, and a few of the oldest as "room:status:age_ms"."""

    bootstrapping: int = 0
    waiting_for_input: int = 0
    transferring: int = 0
    oldest: str = ""


@dataclass(frozen=True, slots=True)
class Batch:
    """One sync of one worker at one address. Repeating it is harmless; it is repeated until it is answered.

    `mode` is "delta" or "reset". `count` is how many rooms the store must hold for this worker afterwards.
    `node` is what the worker knows: it moves a store forward that fell behind. `claim`: how many ticks ahead of its
    time this worker takes a probe turn; 0 for none.
    """

    address: str
    worker: str
    number: int
    mode: str
    node: NodeView
    count: int
    adds: tuple[int, ...] = ()
    removes: tuple[int, ...] = ()
    stats: Stats | None = None
    claim: int = 1


@dataclass(frozen=True, slots=True)
class SyncReply:
    """Everything a worker must know back. `turns`: this worker probes that often, one interval apart, for the first
    time in `turn_ms` (below 0: it was its turn then). `watchers`: live workers there."""

    status: SyncStatus
    node: NodeView
    turns: int = 0
    turn_ms: int = 0
    watchers: int = 0
    expired: tuple[str, ...] = ()
    aborted: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Answer of fail_node. `outcome` is FAILED (counts by worker), STALE (node tells why) or RETRY (workers)."""

    outcome: str
    node: NodeView
    counts: dict[str, int] = field(default_factory=dict)
    workers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Votes:
    """Answer of suspect. `stale`: the epoch moved or the node has failed already."""

    stale: bool
    votes: int = 0
    needed: int = 1
    watchers: int = 0


@dataclass(frozen=True, slots=True)
class Registration:
    """Answer of register_node. `outcome`: SAME, NEW, REPLACED (counts), PAST, STALE or RETRY (workers).

    `pending` maps the snapshots nobody acknowledged yet to their sizes.
    """

    outcome: str
    node: NodeView
    counts: dict[str, int] = field(default_factory=dict)
    pending: dict[str, int] = field(default_factory=dict)
    expired: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reaped:
    """Answer of reap_worker. `outcome`: REAPED (rooms), ALIVE (left_ms of the lease) or UNKNOWN."""

    outcome: str
    rooms: int = 0
    left_ms: int = 0


@dataclass(frozen=True, slots=True)
class Page:
    """A bounded piece of a snapshot. `cursor` "0" ends; a room may come twice."""

    cursor: str
    rooms: tuple[int, ...]


def worker_id(name: str, group: str, start: str) -> str:
    """`<name>#<start>`, or `<name>@<group>#<start>`; `start` is new with every start. Names have neither sign."""
    return f"{name}@{group}#{start}" if group else f"{name}#{start}"


def group_of(worker: str) -> str:
    """The group that a worker's id, of whatever life, names; empty if it has none."""
    return worker.partition("#")[0].partition("@")[2]


def clean_text(value: object) -> str:
    """Text that may travel as a reason: one line, printable, at most 256 characters, encodable."""
    raw = str(value)[: 4 * _TEXT_LIMIT].encode("utf-8", "replace").decode("utf-8")
    return " ".join("".join(c if c.isprintable() else " " for c in raw).split())[:_TEXT_LIMIT]
