"""The one taxonomy of errors.

An error here is something the caller must not overlook. Expected outcomes (a room that was
already left, an epoch that moved) are values, not exceptions. Each message names the value that
was wrong and the way out; `retry_safe` says whether the same call may simply be made again.
"""

from __future__ import annotations


class CoordinatorError(Exception):
    """Base of every error this package raises on purpose."""

    retry_safe = False


class ConfigError(CoordinatorError, ValueError):
    """A setting, or a relation between settings, is wrong. Raised before anything is started."""


class InvalidAddress(CoordinatorError, ValueError):
    """Not the `host:port` of a node. Nothing was sent or changed."""


class InvalidRoom(CoordinatorError, ValueError):
    """Not a room id: an int in [0, 2**63 - 1]. Nothing was sent or changed."""


class InvalidStatus(CoordinatorError, ValueError):
    """Not a status, or not one that may open a room. Nothing was sent or changed."""


class RoomExists(CoordinatorError):
    """This worker already has that room open at that address. The open room is untouched."""


class JoinRefused(CoordinatorError):
    """The address takes no rooms now. Route the request to another node; joining again later is safe.

    `address`, `state` ("failed", "unreachable" or "draining") and `reason` say why.
    """

    retry_safe = True

    def __init__(self, address: str, state: str, reason: str) -> None:
        super().__init__(f"{address} takes no rooms: it is {state} ({reason}); open the room at another node")
        self.address, self.state, self.reason = address, state, reason


class UnknownAddress(CoordinatorError, LookupError):
    """No node or worker ever used that address in this namespace. Nothing was changed."""


class WorkerClosed(CoordinatorError):
    """The worker was closed, or belongs to the parent of this forked process: create a new Worker."""


class StoreUnavailable(CoordinatorError):
    """The store did not answer within the deadline. Every call of this package is idempotent: retry it.

    `word` is the first word of the server's error reply ("OOM", "READONLY", ...) if there was one.
    """

    retry_safe = True

    def __init__(self, text: str, word: str = "") -> None:
        super().__init__(text)
        self.word = word


class StoreRefused(CoordinatorError):
    """The store answered and refused: wrong password, missing permission, a key of another type. Mend it first."""


class StoreNotFound(CoordinatorError):
    """No store is configured, running or installed. The message lists the ways to get one."""


class ScriptFault(CoordinatorError):
    """A script is missing, malformed, or answered something its header does not list."""


class NodeSuperseded(CoordinatorError):
    """Another instance has registered at this node's address since: this process must not serve there."""
