"""Where the store is: the one place that decides it, in this order.

1. the URL that was given, or COORDINATOR_URL;
2. this user's embedded store, if one runs;
3. redis-server or valkey-server found on PATH, started as the embedded store;
4. the bundled server (extra `embedded`), started as the embedded store.

No port is tried: a server that happens to answer on 6379 is somebody else's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import StoreNotFound
from .embedded import NOT_FOUND, EmbeddedServer, bundled_binary, find_binary


@dataclass(frozen=True, slots=True)
class Found:
    """A store: its URL; `how` ("given", "running", "path" or "bundled"); our handle if it is an embedded one."""

    url: str
    how: str
    server: EmbeddedServer | None = None


def find_store(url: str | None = None, env: Mapping[str, str] | None = None) -> Found:
    """Find or start the store for `url` (None or empty: look for one); `env` defaults to os.environ.

    A given URL is returned unseen. Raises StoreNotFound with the ways to get one, StoreUnavailable if a server that
    is there does not start. Calling again is safe: it finds the running one.
    """
    env = os.environ if env is None else env
    if given := url or env.get("COORDINATOR_URL", "").strip():
        return Found(given, "given")
    if running := EmbeddedServer.running(env):
        return Found(running.url, "running", running)
    binary = find_binary(env)
    if binary is None:
        raise StoreNotFound(NOT_FOUND)
    server = EmbeddedServer.start(binary, shared=True, env=env)
    if not server.owned:  # another process was faster
        return Found(server.url, "running", server)
    return Found(server.url, "bundled" if binary == bundled_binary() else "path", server)
