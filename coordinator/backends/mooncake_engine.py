"""Mooncake's transfer engine over TCP, peers met by handshake (P2PHANDSHAKE): no metadata server, no RDMA.

What its Python interface cannot do (0.3.13), and what happens instead:
- Close a segment. What it remembers of a peer (about 4 KiB, and 200 bytes a registered region) goes only with the
  whole engine. So after `renew_after` forgotten peers a fresh engine takes the new ones, and the old one goes with
  the last of its own. Its destructor holds the interpreter's lock for up to a second: that is why not after each.
- Cancel a read. A read from a hung peer settles when that peer goes on or ends, or after 30 s
  (MC_TCP_PROGRESS_TIMEOUT_SEC), when the library drops the connection.
- Open a segment without blocking: up to a minute if the peer hangs. So `connect` reads one byte, outside our lock.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import EngineFailed, PeerFailed
from .pulling import SHORTEST_LOOK_S, SIZE_BYTES, PullingEngine, Session, missing

RENEW_AFTER = 256
DONE, UNDER_WAY = 1, (0, -2)  # -2: for longer than the library likes, which ends nothing


@dataclass(eq=False, slots=True)
class _Life:
    """One TransferEngine, and the sessions that it should have forgotten."""

    engine: Any
    gone: set[str] = field(default_factory=set)


class MooncakeEngine(PullingEngine):
    """`host` is the address of this process that peers connect to; the port is chosen by the library.

    `renew_after` 0: never; an engine that announces itself never does, its port is known.
    """

    kind = "mooncake"

    def __init__(self, size_bytes: int = SIZE_BYTES, host: str = "127.0.0.1", renew_after: int = RENEW_AFTER) -> None:
        self.host, self.renew_after = host, renew_after
        self._lives: dict[str, _Life] = {}  # a peer's session -> the engine that opened it
        super().__init__(size_bytes)

    def _start(self) -> None:
        self._make = load().TransferEngine
        self._life = self._begin()

    def _begin(self) -> _Life:
        engine = self._make()
        if code := engine.initialize(self.host, "P2PHANDSHAKE", "tcp", ""):
            raise EngineFailed(f"Mooncake does not start at {self.host} (code {code}): see what it logged")
        if code := engine.register_memory(self.memory.address, self.memory.size):
            raise EngineFailed(f"Mooncake does not register {self.memory.size} bytes (code {code})")
        return _Life(engine)

    def _announced(self) -> dict[str, Any]:
        self.renew_after = 0
        return {"session": f"{self.host}:{self._life.engine.get_rpc_port()}", "memory": self.memory.address}

    def _meet(self, address: str, said: Mapping[str, Any]) -> str:
        session = said.get("session")
        if not isinstance(session, str) or not session or not isinstance(said.get("memory"), int):
            raise PeerFailed(f"{address} announced no Mooncake session and memory")
        if session not in self._lives:
            if session in self._life.gone:  # another process has that port now: the old one's segment is of no use
                self._life = self._begin()
            self._lives[session] = self._life
        return session

    def _reach(self, address: str, name: str, said: Mapping[str, Any]) -> None:
        engine, block = self._lives[name].engine, self.memory.take(1)
        try:
            batch = engine.batch_transfer_async_read(name, [block.address], [said["memory"]], [1])
            while batch and (status := engine.transfer_check_status(batch)) in UNDER_WAY:
                time.sleep(SHORTEST_LOOK_S)
        finally:
            self.memory.give_back(block)
        if not batch or status != DONE:
            raise PeerFailed(f"{address} cannot be read as Mooncake session {name}")

    def _post(self, session: Session, local: int, remote: int, length: int) -> Any:
        engine = self._lives[session.name].engine
        batch = engine.batch_transfer_async_read(session.name, [local], [remote], [length])
        if not batch:
            raise PeerFailed(f"Mooncake session {session.name} of {session.address} takes no read")
        return engine, batch

    def _is_done(self, handle: Any) -> bool:
        engine, batch = handle
        status = engine.transfer_check_status(batch)
        if status in UNDER_WAY:
            return False
        if status != DONE:
            raise PeerFailed(f"Mooncake says {status}")
        return True

    def _lose(self, name: str) -> None:
        life = self._lives.pop(name)  # the last of an old life takes its engine along
        life.gone.add(name)
        if life is self._life and 0 < self.renew_after <= len(life.gone):
            self._life = self._begin()

    def _end(self) -> None:
        self._lives.clear()
        del self._life


def load() -> Any:
    """Mooncake's Python interface. Raises EngineMissing."""
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as exc:
        hint = "mooncake-transfer-engine-non-cuda, and the system's libibverbs1 and librdmacm1"
        raise missing("mooncake", hint, exc) from None
