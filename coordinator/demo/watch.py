"""Looks at the store for the live table, sparingly, and once at the end for the audit. A thread of its own, so that
a store that hangs does not delay a fault.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import inspect
from ..config import Settings
from ..errors import CoordinatorError
from ..store.keys import Keys
from .facts import Facts

LOOK_S = 0.5


class Watch(threading.Thread):
    """Reads the run's addresses every LOOK_S; records each new epoch as a fact. `trouble` is empty while it can."""

    def __init__(self, client: Any, settings: Settings, addresses: Sequence[str], log: Facts) -> None:
        super().__init__(name="demo-watch", daemon=True)
        self._client, self._keys, self._addresses, self._log = client, Keys(settings.namespace), addresses, log
        self._ended = threading.Event()
        self._epochs: dict[str, int] = {}
        self.views: dict[str, inspect.AddressView] = {}
        self.trouble = ""

    def run(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Read once; a store that does not answer is `trouble`, no error."""
        try:
            views = {view.address: view for view in inspect.address_views(self._client, self._keys, self._addresses)}
        except CoordinatorError as exc:
            self.trouble = str(exc)
            return
        self.views, self.trouble = views, ""
        for address, view in views.items():
            if view.epoch > self._epochs.get(address, 0):
                self._epochs[address] = view.epoch
                self._log.write("epoch", address=address, epoch=view.epoch, state=view.state)

    def stop(self) -> None:
        """End the thread and look a last time."""
        self._ended.set()
        self.join(5)
        self.look()


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What a run has left in the store: rooms in sets of open rooms, and keys that would stay for ever."""

    rooms: int
    keys_without_ttl: tuple[str, ...]


def leftovers(client: Any, settings: Settings, addresses: Sequence[str]) -> Leftovers:
    """Look through the run's keys after every process has ended. Raises what the driver raises."""
    keys = Keys(settings.namespace)
    rooms, forever = 0, []
    for address in addresses:
        head = keys.rooms(address, "")
        for key in client.scan_iter(match=keys.node(address).removesuffix("node") + "*", count=1000):
            if client.pttl(key) == -1:
                forever.append(key)
            if key.startswith(head):
                rooms += client.scard(key)
    if client.pttl(keys.addresses) == -1:
        forever.append(keys.addresses)
    return Leftovers(rooms, tuple(sorted(forever)))
