"""Read-only views of the store, for people and tools. In: a blocking client and the keys. Out: frozen values.

Nothing here writes, lists keys or reads a whole set at once. A view of up to 200 addresses costs three round trips.
Ages and leases are taken against the server's clock. Two addresses, or two workers, may be seen some milliseconds
apart: this is for looking, not for deciding.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .errors import StoreUnavailable
from .store.client import classify, delays, driver_errors
from .store.keys import Keys

AT_ONCE = 200  # addresses in one pipeline
PIECE = 1000  # rooms in one SSCAN: the server is held for well under a millisecond
BACKLOG = 1000  # events of one address in one answer
_OPEN = ("bootstrapping", "waiting_for_input", "transferring")
_OLDEST = re.compile(rf"(\d+):({'|'.join(_OPEN)}):(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class RoomView:
    """A room among a worker's oldest. `age_ms` is as old as the worker's last statistics say."""

    room: int
    worker: str
    status: str
    age_ms: int


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker at an address. `lease_left_ms` is negative once it may be reaped; `rooms` is exact.

    `by_status` is what the worker last said about itself, so it may differ from `rooms` for a moment;
    zeros when it has none.
    """

    worker: str
    lease_left_ms: int
    rooms: int
    by_status: Mapping[str, int]
    oldest: RoomView | None


@dataclass(frozen=True, slots=True)
class LastFailure:
    """Why the last epoch of an address ended, also when the node has come back since."""

    cause: str
    reason: str
    by: str
    age_ms: int


@dataclass(frozen=True, slots=True)
class AddressView:
    """All that the store holds about one address, without the rooms themselves.

    `watchers` counts the workers whose lease runs. `votes` are those for the node's death. `pending` maps snapshots
    that nobody has acknowledged yet to their sizes. `seen_age_ms` is the time since anybody synced or announced,
    `announced_age_ms` since the node itself did (None: never).
    """

    address: str
    state: str
    draining: bool
    epoch: int
    instance: str
    info: str
    watchers: int
    rooms: int
    by_status: Mapping[str, int]
    oldest: RoomView | None
    failure: LastFailure | None
    seen_age_ms: int | None
    announced_age_ms: int | None
    workers: tuple[WorkerView, ...] = ()
    votes: tuple[str, ...] = ()
    pending: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of an address's audit trail. `at_ms` is the server's clock; `fields` are the script's words."""

    address: str
    id: str
    at_ms: int
    kind: str
    fields: Mapping[str, str]


@contextmanager
def answering() -> Iterator[None]:
    """Turn what the driver raises into StoreUnavailable, StoreRefused or ScriptFault."""
    try:
        yield
    except driver_errors() as exc:
        raise classify(exc) from exc


def addresses(client: Any, keys: Keys) -> list[str]:
    """Every address used within the retention time, sorted."""
    with answering():
        return sorted(client.zrange(keys.addresses, 0, -1))


def address_view(client: Any, keys: Keys, address: str) -> AddressView | None:
    """One address (canonical text), or None if the store knows nothing about it."""
    return next(iter(address_views(client, keys, [address])), None)


def address_views(client: Any, keys: Keys, given: Sequence[str]) -> list[AddressView]:
    """The given addresses in that order, without those that the store knows nothing about."""
    views: list[AddressView] = []
    with answering():
        for start in range(0, len(given), AT_ONCE):
            views += _views(client, keys, given[start : start + AT_ONCE])
    return views


def _views(client: Any, keys: Keys, given: Sequence[str]) -> Iterator[AddressView]:
    pipe = client.pipeline(transaction=False)
    for address in given:
        pipe.hgetall(keys.node(address))
        pipe.zrange(keys.workers(address), 0, -1, withscores=True)
        pipe.zrange(keys.suspects(address), 0, -1, withscores=True)
        pipe.hgetall(keys.pending(address))
    replies = iter(pipe.execute())
    clock = _clock(client)
    heads = [(address, next(replies), next(replies), next(replies), next(replies)) for address in given]
    pipe = client.pipeline(transaction=False)
    for address, _node, leases, *_ in heads:
        for worker, _deadline in leases:
            pipe.scard(keys.rooms(address, worker))
            pipe.hgetall(keys.worker(address, worker))
    replies = iter(pipe.execute() if any(head[2] for head in heads) else [])
    for address, node, leases, suspects, pending in heads:
        now = clock(keys.node(address))
        workers = tuple(_worker(w, int(until) - now, next(replies), next(replies)) for w, until in leases)
        votes = tuple(worker for worker, until in suspects if until >= now)
        if node or workers or pending:
            sizes = {name: int(n) for name, n in pending.items()}
            yield _address(address, node, now, workers=workers, votes=votes, pending=sizes)


def _clock(client: Any) -> Callable[[str], int]:
    """The clock, in ms, of the server that holds a key; each server is asked once."""
    readings: dict[str, int] = {}

    def read(key: str) -> int:
        node = client.get_node_from_key(key) if hasattr(client, "get_node_from_key") else None
        name = node.name if node else ""
        if name not in readings:
            seconds, micros = client.get_redis_connection(node).time() if node else client.time()
            readings[name] = seconds * 1000 + micros // 1000
        return readings[name]

    return read


def _worker(worker: str, left_ms: int, rooms: int, record: Mapping[str, str]) -> WorkerView:
    if not rooms:
        record = {}  # what it said about itself is from before its rooms were taken
    by_status = {name: int(record.get(name) or 0) for name in _OPEN}
    found = [
        RoomView(int(room), worker, status, int(age)) for room, status, age in _OLDEST.findall(record.get("oldest", ""))
    ]
    return WorkerView(worker, left_ms, rooms, by_status, _oldest(found))


def _oldest(found: list[RoomView]) -> RoomView | None:
    return max(found, key=lambda room: room.age_ms, default=None)


def _address(
    address: str,
    node: Mapping[str, str],
    now: int,
    *,
    workers: tuple[WorkerView, ...],
    votes: tuple[str, ...],
    pending: Mapping[str, int],
) -> AddressView:
    def age(name: str) -> int | None:
        return max(0, now - int(node[name])) if node.get(name) else None

    failed = age("failed_ms")
    failure = None
    if failed is not None:
        failure = LastFailure(node.get("cause", ""), node.get("reason", ""), node.get("by", ""), failed)
    return AddressView(
        address=address,
        state=node.get("state", "unknown"),
        draining=node.get("draining") == "1",
        epoch=int(node.get("epoch") or 0),
        instance=node.get("instance", ""),
        info=node.get("info", ""),
        watchers=sum(w.lease_left_ms >= 0 for w in workers),
        rooms=sum(w.rooms for w in workers),
        by_status={name: sum(w.by_status[name] for w in workers) for name in _OPEN},
        oldest=_oldest([w.oldest for w in workers if w.oldest]),
        failure=failure,
        seen_age_ms=age("seen_ms"),
        announced_age_ms=age("announced_ms"),
        workers=workers,
        votes=votes,
        pending=pending,
    )


def rooms(client: Any, keys: Keys, address: str, piece: int = PIECE) -> Iterator[tuple[str, list[int]]]:
    """Open rooms in pieces of about `piece`, each as (worker, rooms).

    The server is never held by it. A room that is open all the time comes at least once, and may come twice.
    """
    with answering():
        for worker in client.zrange(keys.workers(address), 0, -1):
            cursor: Any = 0
            while True:
                cursor, found = client.sscan(keys.rooms(address, worker), cursor, count=piece)
                if found:
                    yield worker, [int(room) for room in found]
                if not int(cursor):
                    break


def events(client: Any, keys: Keys, address: str | None = None, limit: int = BACKLOG) -> Iterator[Event]:
    """The last `limit` events of one address (canonical text), or of each address: oldest first."""
    chosen = addresses(client, keys) if address is None else [address]
    yield from _backlog(client, keys, chosen, limit)


def follow(
    client: Any,
    keys: Keys,
    address: str | None = None,
    *,
    limit: int = BACKLOG,
    poll_s: float = 0.25,
    trouble: Callable[[StoreUnavailable], None] = lambda exc: None,
) -> Iterator[Event]:
    """As events, then each new one as it comes, for ever; addresses that appear later are followed too.

    `poll_s` must be shorter than the client's socket timeout. When the store goes away after the start, `trouble` is
    called at each attempt, and what happened meanwhile comes later: a stream is read from where it was left.
    """
    seen: dict[str, str] = {}
    for event in events(client, keys, address, limit):
        seen[event.address] = event.id
        yield event
    pause = delays()
    while True:
        try:
            chosen = addresses(client, keys) if address is None else [address]
            fresh = _read(client, keys, {a: seen.get(a, "0") for a in chosen}, poll_s)
            pause = delays()
        except StoreUnavailable as exc:
            trouble(exc)
            time.sleep(pause())
            continue
        for event in fresh:
            seen[event.address] = event.id
            yield event


def _backlog(client: Any, keys: Keys, chosen: Sequence[str], limit: int) -> list[Event]:
    with answering():
        pipe = client.pipeline(transaction=False)
        for address in chosen:
            pipe.xrevrange(keys.events(address), count=limit)
        replies = pipe.execute() if chosen else []
    return _in_order([(a, entry) for a, entries in zip(chosen, replies, strict=True) for entry in entries])


def _read(client: Any, keys: Keys, after: Mapping[str, str], poll_s: float) -> list[Event]:
    """What came after the given ids. One stream is waited for in the server; several may lie in different slots."""
    with answering():
        if len(after) == 1:
            [(address, last)] = after.items()
            replies = [client.xread({keys.events(address): last}, count=BACKLOG, block=max(1, round(poll_s * 1000)))]
        else:
            time.sleep(poll_s)
            pipe = client.pipeline(transaction=False)
            for address, last in after.items():
                pipe.xread({keys.events(address): last}, count=BACKLOG)
            replies = pipe.execute() if after else []
    found = []
    for address, reply in zip(after, replies, strict=True):
        streams = reply.values() if isinstance(reply, dict) else [entries for _, entries in reply or ()]
        found += [(address, entry) for entries in streams for entry in entries]
    return _in_order(found)


def _in_order(found: list[tuple[str, tuple[str, Mapping[str, str]]]]) -> list[Event]:
    listed = [_event(address, at, words) for address, (at, words) in found]
    return sorted(listed, key=lambda event: [int(part) for part in event.id.split("-")])


def _event(address: str, at: str, words: Mapping[str, str]) -> Event:
    fields = {name: word for name, word in words.items() if name != "kind"}
    return Event(address, at, int(at.partition("-")[0]), words.get("kind", ""), fields)
