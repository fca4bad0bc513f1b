"""What every backend has in common: a worker, an engine, a peer cache, and the order in which they let go.

When a node ends (failed, restarted, unreachable), its cached endpoints are evicted in the same step in which its
rooms fail; then, on the delivery thread, first the engine forgets each stale endpoint, then each failed room's
transfer is released: buffers go back only when the engine no longer knows who could write into them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Hashable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from ..address import canonical
from ..decide.ledger import Room
from ..rooms import Failure, Status
from ..worker import Worker
from .peers import Peer, PeerCache

log = logging.getLogger("coordinator")

E = TypeVar("E")


class Engine(Protocol[E]):
    """What a transfer engine must be able to do. `E` is its own endpoint type (a session, an agent name, a socket)."""

    def connect(self, address: str, rank: Hashable, peer: Peer[E]) -> E:
        """Make an endpoint to one rank of the node. May block and raise."""
        ...

    def forget(self, endpoint: E) -> None:
        """Forget a peer: afterwards it can no longer write here. Called once per endpoint."""
        ...

    def release(self, room_id: int, failure: Failure) -> None:
        """Let go of one failed room's transfer: cancel it, give its buffers back. Called once per room."""
        ...

    def evidence(self, error: BaseException) -> str:
        """What `error` says about the node, as a short text; "" if it says nothing about it."""
        ...


class Backend(Generic[E]):
    """Rooms over one engine. All membership goes through the worker's ledger and so through the shared store.

    Create it before the first join. Thread-safe.
    """

    name = "backend"

    def __init__(self, worker: Worker, engine: Engine[E]) -> None:
        self.worker, self.engine = worker, engine
        self.peers: PeerCache[E] = PeerCache(self._fetch, self._forget_later)
        worker.on_node_ended(self._ended)
        worker.on_failure(self._failed)

    def open(self, address: str, room_id: int, status: Status = Status.BOOTSTRAPPING) -> Room:
        """Open a room. Raises as Worker.join."""
        return self.worker.join(address, room_id, status)

    def endpoint(self, address: str, rank: Hashable = 0) -> E:
        """The endpoint to one rank of a node. Raises what the store and the engine raise; both are safe to retry."""
        name = canonical(address)
        return self.peers.endpoint(name, rank, lambda peer: self.engine.connect(name, rank, peer))

    def transfer_failed(self, address: str, error: BaseException) -> None:
        """A transfer broke: what the engine makes of it becomes evidence, not a verdict."""
        text = self.engine.evidence(error)
        if text:
            self.worker.report_transfer_error(address, text)

    def _fetch(self, address: str) -> tuple[str, Mapping[str, Any]]:
        found = self.worker.node_info(address)
        info = json.loads(found.get("info") or "{}")
        return found.get("instance", ""), info if isinstance(info, dict) else {}

    def drop_peer(self, address: str) -> None:
        """Forget what is known of a node; the next endpoint is made from what it announces then."""
        self._forget_later(self.peers.evict(canonical(address)))

    def _ended(self, address: str) -> None:
        self._forget_later(self.peers.evict(address))

    def _forget_later(self, endpoints: list[E]) -> None:
        for endpoint in endpoints:
            self.worker.defer(lambda endpoint=endpoint: self.engine.forget(endpoint))  # type: ignore[misc]

    def _failed(self, room: Room, failure: Failure) -> None:
        self.engine.release(room.id, failure)
