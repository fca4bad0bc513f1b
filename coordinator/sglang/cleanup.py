"""Runs SGLang's own clean-up after a node has ended, on threads of its own: a socket that hangs in one delays neither a
failure nor another clean-up, and what it raises is logged and counted.

SGLang's `_handle_node_failure` names rooms by number only, a moment after it listed them, and the number may be in use
for another request by then. So it cleans, and fails nothing (`Cleaner.works_here`): what the coordinator failed has
failed already.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from .tables import ConnectionPool, InfoTable, Tracker

log = logging.getLogger("coordinator")

THREADS = 8  # clean-ups at a time; more wait for their turn


class Cleaner:
    """Cleans up after nodes for one decode manager. `failed` is called for each exception out of SGLang."""

    def __init__(
        self, manager: Any, infos: InfoTable, pool: ConnectionPool, tracker: Tracker, failed: Callable[[], object]
    ) -> None:
        self.cleaned = 0
        self.errors = 0
        self._manager, self._infos, self._pool, self._tracker, self._failed = manager, infos, pool, tracker, failed
        self._lock = threading.Lock()
        self._waiting: deque[tuple[str, float]] = deque()  # (address, since when the info that is void was known)
        self._threads = 0
        self._here: set[int] = set()
        self._beating: set[str] = set()

    def works_here(self) -> bool:
        """Whether the calling thread is in SGLang's clean-up."""
        return threading.get_ident() in self._here

    def clean(self, address: str) -> None:
        """Clean up after a node, soon."""
        with self._lock:
            self._waiting.append((address, self._infos.period(address)[0]))
            if self._threads >= THREADS:
                return
            self._threads += 1
        try:
            threading.Thread(target=self._run, name="coordinator clean-up", daemon=True).start()
        except RuntimeError:  # no more threads now: done with the next one
            with self._lock:
                self._threads -= 1
            raise

    def _run(self) -> None:
        me = threading.get_ident()
        self._here.add(me)
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    self._here.discard(me)
                    return
                address, since = self._waiting.popleft()
            if not self._fetched_again(address, since):
                self.guard("_handle_node_failure", address)
                self._make_sure(address, since)
                self.cleaned += 1

    def _make_sure(self, address: str, since: float) -> None:
        """If SGLang's own raised before it got there: requests must not use what is void."""
        with self._manager.connection_lock:
            if address in self._infos and not self._fetched_again(address, since):
                self._infos.pop(address, None)
                self._tracker.pop(address, None)
                for key in [key for key in self._pool if key.startswith(address)]:
                    del self._pool[key]

    def _fetched_again(self, address: str, since: float) -> bool:
        """Whether SGLang knows the node's next instance by now, and no longer the one known since then."""
        return address in self._infos and self._infos.period(address)[0] != since

    def good_beat(self, address: str, done: Callable[[str], object]) -> None:
        """Run the backend's hook for a good beat, then `done`: one at a time for each node, as it may hang."""
        if address in self._beating:
            return
        self._beating.add(address)

        def beat() -> None:
            self.guard("_on_heartbeat_success", address)
            self._beating.discard(address)
            done(address)

        try:
            threading.Thread(target=beat, name="coordinator good beat", daemon=True).start()
        except RuntimeError:  # no more threads now: at the next good beat
            self._beating.discard(address)

    def guard(self, method: str, address: str) -> None:
        """Call SGLang's method; failure detection must not depend on what it raises."""
        try:
            getattr(self._manager, method)(address)
        except BaseException:
            self.errors += 1
            self._failed()
            log.exception("sglang_failed method=%s address=%s", method, address)
