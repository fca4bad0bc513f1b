"""Rooms as values: ids, the status lattice, failures. Pure; nothing here knows a clock, a socket or a store."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from .errors import InvalidRoom, InvalidStatus

MAX_ROOM_ID = 2**63 - 1  # SGLang draws bootstrap_room from [0, 2**63 - 1]


class Status(IntEnum):
    """Where a room stands; the numbers are SGLang's KVPoll.

    Moves up only. FAILED and SUCCESS are final. Only BOOTSTRAPPING and WAITING_FOR_INPUT may open a room.
    """

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


#: Status by number: `STATUSES[3] is Status.TRANSFERRING`, without the cost of calling the enum.
STATUSES: tuple[Status, ...] = tuple(Status)
OPENING = (Status.BOOTSTRAPPING, Status.WAITING_FOR_INPUT)


def is_final(status: int) -> bool:
    """FAILED or SUCCESS: the room affects nothing any more and a node's failure does not touch it."""
    return status in (0, 4)


def may_move(old: int, new: int) -> bool:
    """Whether a room at `old` may go to `new`. Staying where it is is no move."""
    return 0 < old < 4 and (new == 0 or new > old)


class Cause(StrEnum):
    """Why a room failed."""

    NODE_FAILED = "node_failed"  # a verdict: the address failed for everybody
    NODE_RESTARTED = "node_restarted"  # another instance answers at the address
    UNREACHABLE = "unreachable"  # this worker alone cannot reach the node, or nobody can be asked
    LEASE_LOST = "lease_lost"  # this worker was reaped while it was away
    ABORTED = "aborted"  # the node or an operator aborted this one room
    DEADLINE = "deadline"  # the room's own deadline passed
    LOCAL = "local"  # this process said so: update(..., Status.FAILED)
    CLOSED = "closed"  # the worker was closed with the room open


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a room failed. The first cause is kept; later symptoms do not replace it.

    `epoch` is the epoch of the address that ended (0 where no epoch ended), `by` the worker, node or
    operator that decided. All owners of a failed node read the same `cause` and `reason`.
    """

    cause: Cause
    reason: str
    address: str
    epoch: int = 0
    by: str = ""


def check_room_id(room_id: object) -> int:
    """Return `room_id` if it is an int in [0, 2**63 - 1]; raise InvalidRoom otherwise (bool is no room id)."""
    if type(room_id) is int and 0 <= room_id <= MAX_ROOM_ID:
        return room_id
    if isinstance(room_id, int) and not isinstance(room_id, bool) and 0 <= room_id <= MAX_ROOM_ID:
        return int(room_id)  # an IntEnum or numpy-like subclass: the plain number
    raise InvalidRoom(f"{ascii(room_id)[:80]} is not a room id: pass an int from 0 to 2**63 - 1")


def check_status(status: object) -> Status:
    """Return `status` as a Status; raise InvalidStatus for anything else than 0..4."""
    if isinstance(status, int) and not isinstance(status, bool) and 0 <= status <= 4:
        return STATUSES[status]
    raise InvalidStatus(f"{ascii(status)[:80]} is not a status: pass one of {', '.join(s.name for s in STATUSES)}")


def check_opening(status: object) -> Status:
    """Return `status` if it may open a room; raise InvalidStatus otherwise."""
    checked = check_status(status)
    if checked not in OPENING:
        raise InvalidStatus(f"{checked.name} cannot open a room: open it with BOOTSTRAPPING or WAITING_FOR_INPUT")
    return checked
