"""What can go wrong between an engine and its peers. Kinds matter: only PeerFailed says anything about a node."""

from __future__ import annotations

from ..errors import CoordinatorError


class EngineMissing(CoordinatorError):
    """The engine's package, or a library that it needs, is not installed. The message says what to install."""


class EngineFailed(CoordinatorError):
    """The engine refused to do something here, in this process; no node is to blame."""


class OutOfMemory(EngineFailed):
    """No block of that size is free. Blocks of failed rooms come back when their transfers have settled."""

    retry_safe = True


class PeerFailed(CoordinatorError):
    """A peer could not be reached, or broke a transfer: evidence about its node."""

    retry_safe = True


class Withdrawn(CoordinatorError):
    """This side let go of the transfer or of the peer, because the room or the node failed, or the transfer ended."""
