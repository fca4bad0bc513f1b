"""What a process remembers about nodes: what each announced, and an endpoint per rank. Keyed by the exact address.

Connecting and disconnecting happen outside the lock. Eviction bumps the address's generation: whatever was being
fetched or connected meanwhile belongs to the past and is handed back as stale, so that nothing of a dead node gets
into the cache after it was emptied, and each stale endpoint is handed out exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Any, Generic, TypeVar

E = TypeVar("E")

REMEMBERED = 1000
ATTEMPTS = 3  # a node that is evicted this often while one endpoint connects is not there


@dataclass(slots=True)
class Peer(Generic[E]):
    """One node: its instance, what it announced, and the endpoints to its ranks."""

    instance: str
    info: Mapping[str, Any]
    endpoints: dict[Hashable, E] = field(default_factory=dict)


class PeerCache(Generic[E]):
    """Peers by canonical address. `fetch(address)` gives (instance, info) and may raise; nothing of a failed fetch
    is kept. `stale(endpoints)` receives endpoints that nobody may use any more, outside the lock. Thread-safe.
    """

    def __init__(
        self, fetch: Callable[[str], tuple[str, Mapping[str, Any]]], stale: Callable[[list[E]], object]
    ) -> None:
        self._fetch, self._stale = fetch, stale
        self._lock = Lock()
        self._peers: dict[str, Peer[E]] = {}
        self._generations: dict[str, int] = {}  # of addresses evicted lately; all others have the floor's
        self._floor, self._next = 0, count(1).__next__

    def peer(self, address: str) -> Peer[E]:
        """The node at `address`, fetched if it is not known. Raises what `fetch` raises, or ConnectionError."""
        for _ in range(ATTEMPTS):
            with self._lock:
                known, generation = self._peers.get(address), self._generations.get(address, self._floor)
            if known is not None:
                return known
            instance, info = self._fetch(address)
            with self._lock:
                if self._generations.get(address, self._floor) == generation:
                    return self._peers.setdefault(address, Peer(instance, info))
        raise ConnectionError(f"{address} failed {ATTEMPTS} times while it was looked up")

    def endpoint(self, address: str, rank: Hashable, connect: Callable[[Peer[E]], E]) -> E:
        """The endpoint to one rank of a node, connected if needed. Raises what `fetch` and `connect` raise."""
        for _ in range(ATTEMPTS):
            peer = self.peer(address)
            with self._lock:
                if rank in peer.endpoints:
                    return peer.endpoints[rank]
            made = connect(peer)
            with self._lock:
                current = self._peers.get(address) is peer
                kept = peer.endpoints.setdefault(rank, made) if current else made
            if current and kept is made:
                return made
            self._stale([made])  # another thread was faster, or the node failed meanwhile
            if current:
                return kept
        raise ConnectionError(f"{address} failed {ATTEMPTS} times while rank {rank!r} was connected")

    def evict(self, address: str) -> list[E]:
        """Forget the node at exactly this address; its endpoints, for the caller to disconnect, each once."""
        with self._lock:
            self._generations[address] = self._next()
            if len(self._generations) > REMEMBERED:  # whoever is fetching meanwhile fetches once more
                self._generations, self._floor = {}, self._next()
            peer = self._peers.pop(address, None)
            if peer is None:
                return []
            endpoints, peer.endpoints = list(peer.endpoints.values()), {}
            return endpoints

    def addresses(self) -> list[str]:
        """The addresses that are known now."""
        with self._lock:
            return list(self._peers)
