"""NIXL: a room leaves the books the moment its last transfer is confirmed.

SGLang's NIXL manager learns of a finished transfer from a notification and drops the room from its tracker on
Success. A node's failure that comes later finds nothing; one that comes earlier wins, and the notification is late.
"""

from __future__ import annotations

from typing import TypeVar

from ..decide.ledger import Room
from ..rooms import Status
from .base import Backend

E = TypeVar("E")


class NixlBackend(Backend[E]):
    """Rooms over a NIXL agent."""

    name = "nixl"

    def succeeded(self, room: Room) -> bool:
        """All notifications of a room are in: Success, and out of the books. False if it had failed or left."""
        won = room.update(Status.SUCCESS)
        return room.leave() and won
