"""The only place that spells a key. In: canonical addresses and worker ids. Out: key text.

Every key of an address carries the hash tag `{address}`, so that one address lives in one cluster slot.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one namespace. The docstring of each says type and content."""

    namespace: str

    @property
    def addresses(self) -> str:
        """ZSET: address -> server ms of its last use. For discovery only."""
        return f"{self.namespace}:addresses"

    @property
    def channel(self) -> str:
        """Pub/sub channel: "<what happened> <address>". Speed only, never truth."""
        return f"{self.namespace}:events"

    def node(self, address: str) -> str:
        """HASH: epoch, state, instance, info, draining, cause, reason, by and times in server ms."""
        return f"{self.namespace}:{{{address}}}:node"

    def workers(self, address: str) -> str:
        """ZSET: worker -> lease deadline, server ms."""
        return f"{self.namespace}:{{{address}}}:workers"

    def rooms(self, address: str, worker: str) -> str:
        """SET: that worker's open rooms, decimal."""
        return f"{self.namespace}:{{{address}}}:rooms:{worker}"

    def worker(self, address: str, worker: str) -> str:
        """HASH: last applied batch, its epoch, counts by status, oldest rooms; or the fence of a worker that left."""
        return f"{self.namespace}:{{{address}}}:worker:{worker}"

    def aborts(self, address: str, worker: str) -> str:
        """HASH: room -> reason, for the owner to fail."""
        return f"{self.namespace}:{{{address}}}:aborts:{worker}"

    def suspects(self, address: str) -> str:
        """ZSET: worker -> until when its vote counts, server ms."""
        return f"{self.namespace}:{{{address}}}:suspects"

    def pending(self, address: str) -> str:
        """HASH: "lost:<epoch>:<worker>" or "orphans:<worker>" -> rooms in that snapshot, not yet acknowledged."""
        return f"{self.namespace}:{{{address}}}:pending"

    def lost(self, address: str, epoch: int, worker: str) -> str:
        """SET: what that worker had open when the epoch ended."""
        return f"{self.namespace}:{{{address}}}:lost:{epoch}:{worker}"

    def orphans(self, address: str, worker: str) -> str:
        """SET: what a worker had open when it was reaped or left."""
        return f"{self.namespace}:{{{address}}}:orphans:{worker}"

    def events(self, address: str) -> str:
        """STREAM: the audit trail."""
        return f"{self.namespace}:{{{address}}}:events"

    def snapshot(self, address: str, field: str) -> str:
        """The snapshot that a field of `pending` names."""
        return f"{self.namespace}:{{{address}}}:{field}"
