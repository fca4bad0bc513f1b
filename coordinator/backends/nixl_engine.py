"""NIXL's agent over UCX.

What it cannot do (1.5), and what happens instead: releasing a handle, removing the agent or deregistering the memory
stops no bytes that are on their way. So a handle is released, an agent removed and a block given back only after the
agent itself has said DONE or an error.

Its own progress thread spins: it takes a whole core per agent, also of one that has nothing to do. It stays off, and
the mover calls the agent instead, every 2 ms when idle.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any

from .errors import EngineFailed, PeerFailed
from .pulling import SIZE_BYTES, PullingEngine, Session, missing

log = logging.getLogger("coordinator")

MODULES = ("nixl_cu12", "nixl_cu13", "nixl")  # one interface; the last picks one of the others and wants torch


class NixlEngine(PullingEngine):
    """`name` is the first part of the agent's name; peers need one that no other process has."""

    kind = "nixl"
    progress_s = 0.002

    def __init__(self, size_bytes: int = SIZE_BYTES, name: str = "agent") -> None:
        self.name = f"{name}-{os.getpid():x}-{os.urandom(6).hex()}"
        super().__init__(size_bytes)

    def _start(self) -> None:
        api, bindings = load()
        self._gone: tuple[type[BaseException], ...] = (
            bindings.nixlRemoteDisconnectError,
            bindings.nixlBackendError,
            bindings.nixlNotFoundError,
        )
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent = api.nixl_agent(self.name, config)
            self._agent.register_memory([(self.memory.address, self.memory.size, 0, "")], "DRAM")
        except Exception as exc:  # its own errors share no base
            raise EngineFailed(f"NIXL does not start with UCX: {type(exc).__name__}: {exc}") from exc

    def _announced(self) -> dict[str, Any]:
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode("ascii")
        return {"agent": self.name, "metadata": metadata}

    def _meet(self, address: str, said: Mapping[str, Any]) -> str:
        try:
            name = self._agent.add_remote_agent(base64.b64decode(said["metadata"], validate=True))
        except (KeyError, TypeError, binascii.Error) as exc:
            raise PeerFailed(f"{address} announced no NIXL metadata: {exc!r}") from None
        except Exception as exc:  # its own errors share no base
            raise PeerFailed(f"NIXL takes no metadata of {address}: {type(exc).__name__}: {exc}") from exc
        return name.decode() if isinstance(name, bytes) else str(name)

    def _post(self, session: Session, local: int, remote: int, length: int) -> Any:
        agent = self._agent
        ours = agent.get_xfer_descs([(local, length, 0)], "DRAM")
        theirs = agent.get_xfer_descs([(remote, length, 0)], "DRAM")
        try:
            handle = agent.initialize_xfer("READ", ours, theirs, session.name, b"")
        except self._gone as exc:
            raise PeerFailed(f"{session.address} is lost to NIXL: {type(exc).__name__}") from exc
        try:
            state = agent.transfer(handle)
        except self._gone as exc:
            agent.release_xfer_handle(handle)
            raise PeerFailed(f"{session.address} is lost to NIXL: {type(exc).__name__}") from exc
        if state == "ERR":
            agent.release_xfer_handle(handle)
            raise PeerFailed(f"{session.address} takes no read")
        return handle

    def _is_done(self, handle: Any) -> bool:
        try:
            state = self._agent.check_xfer_state(handle)
        except self._gone as exc:
            self._agent.release_xfer_handle(handle)
            raise PeerFailed(f"NIXL says {type(exc).__name__}") from None
        if state == "PROC":
            return False
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise PeerFailed(f"NIXL says {state}")
        return True

    def _lose(self, name: str) -> None:
        self._agent.remove_remote_agent(name)

    def _progress(self) -> None:
        try:
            self._agent.get_new_notifs()  # nobody sends any here: this is what drives UCX
        except self._gone as exc:  # some peer is gone: whoever reads from it is told by its own read
            log.debug("progress_failed engine=nixl error=%s", type(exc).__name__)

    def _abandon(self, handles: list[Any]) -> None:
        for handle in handles:
            self._agent.release_xfer_handle(handle)
        for name in list(self._known):
            self._agent.remove_remote_agent(name)

    def _end(self) -> None:
        del self._agent


def load() -> tuple[Any, Any]:
    """NIXL's Python interface and its bindings, whichever package has them. Raises EngineMissing."""
    first: ImportError | None = None
    for package in MODULES:
        try:
            return importlib.import_module(f"{package}._api"), importlib.import_module(f"{package}._bindings")
        except ImportError as exc:
            first = first or exc
    assert first is not None
    raise missing("nixl", "nixl-cu12 and numpy", first)
