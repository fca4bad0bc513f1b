"""A small recorded double of a transfer engine: it writes down what it is asked, in order, and can be told to fail."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from coordinator.backends import Peer
from coordinator.rooms import Failure


@dataclass
class RecordedEngine:
    """Endpoints are texts "address/rank/serial"."""

    calls: list[tuple[str, Any]] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    _lock: Lock = field(default_factory=Lock)

    def connect(self, address: str, rank: Hashable, peer: Peer[str]) -> str:
        """A new endpoint text; raises if the address is marked as broken."""
        if address in self.broken:
            raise ConnectionError(f"{address} is broken")
        with self._lock:
            endpoint = f"{address}/{rank}/{len(self.calls)}"
            self.calls.append(("connect", endpoint))
        return endpoint

    def forget(self, endpoint: str) -> None:
        """Write it down."""
        with self._lock:
            self.calls.append(("forget", endpoint))

    def release(self, room_id: int, failure: Failure) -> None:
        """Write it down."""
        with self._lock:
            self.calls.append(("release", room_id))

    def evidence(self, error: BaseException) -> str:
        """Connection errors speak about the node, everything else does not."""
        return str(error) if isinstance(error, ConnectionError) else ""

    def of(self, kind: str) -> list[Any]:
        """What was asked of one kind."""
        with self._lock:
            return [value for name, value in self.calls if name == kind]
