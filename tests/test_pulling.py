"""Engines without their libraries: what is missing is said; the rules of letting go hold over a scripted one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from util import wait_until

from coordinator import Failure
from coordinator.backends import (
    EngineFailed,
    EngineMissing,
    Memory,
    MooncakeEngine,
    NixlEngine,
    OutOfMemory,
    Peer,
    PeerFailed,
    PullingEngine,
    Session,
    Withdrawn,
)
from coordinator.demo.options import DemoOptions
from coordinator.demo.run import run_demo
from coordinator.errors import ConfigError
from coordinator.rooms import Cause

FAILURE = Failure(Cause.NODE_FAILED, "test", "10.0.0.1:80", epoch=1)
PEER: Peer[Session] = Peer("one", {"engine": {"kind": "scripted", "name": "peer"}})


@dataclass
class Opening:
    """A room as an engine sees it."""

    id: int = 1
    failure: Failure | None = None


class Scripted(PullingEngine):
    """A library whose reads settle when the test says so: with None, or with an error."""

    kind = "scripted"

    def _start(self) -> None:
        self.calls: list[str] = []
        self.settled: dict[int, BaseException | None] = {}
        self.posted = 0

    def _announced(self) -> dict[str, Any]:
        return {"name": "me"}

    def _meet(self, address: str, said: Mapping[str, Any]) -> str:
        return str(said["name"])

    def _post(self, session: Session, local: int, remote: int, length: int) -> int:
        self.posted += 1
        return self.posted

    def _is_done(self, handle: int) -> bool:
        if handle not in self.settled:
            return False
        if (error := self.settled[handle]) is not None:
            raise error
        return True

    def _lose(self, name: str) -> None:
        self.calls.append(f"lose {name} with {self.memory.free_bytes == self.memory.size}")


@pytest.fixture
def engine() -> Iterator[Scripted]:
    """Two rooms fit into it."""
    made = Scripted(8192)
    yield made
    for number in range(1, made.posted + 1):
        made.settled.setdefault(number, None)
    assert made.close()


def test_a_failed_room_waits_for_its_read(engine: Scripted) -> None:
    """Released and forgotten with a read under way: refused at once, but peer and block go only when it has settled."""
    room = Opening()
    session, transfer = engine.connect("10.0.0.1:80", 0, PEER), engine.receive(room, 4096)
    done = engine.read(transfer, session, 1, 0, 10)
    room.failure = FAILURE
    engine.forget(session)
    engine.release(1, FAILURE)
    assert isinstance(done.exception(5), Withdrawn)
    for refused in (lambda: engine.read(transfer, session, 1, 0, 10), lambda: transfer.view):
        with pytest.raises(Withdrawn):
            refused()
    assert (engine.calls, engine.memory.free_bytes) == ([], 4096)
    engine.settled[1] = None
    wait_until(lambda: engine.memory.free_bytes == 8192)
    assert engine.calls == ["lose peer with False"]  # first the peer, then the block


def test_a_later_opening_of_the_same_number_is_not_released(engine: Scripted) -> None:
    """The release of a failed room comes late: what was opened meanwhile under its number keeps its block."""
    old, new = Opening(1, None), Opening(1, None)
    first, second = engine.receive(old, 10), engine.receive(new, 10)
    old.failure = FAILURE
    engine.release(1, FAILURE)
    assert (first.over, second.over) == (True, False)
    second.end()
    second.end()
    assert engine.memory.free_bytes == 8192


def test_a_peer_is_lost_with_its_last_session(engine: Scripted) -> None:
    """Two threads that connected the same peer at once: giving up one of the sessions keeps the other."""
    sessions = [engine.connect("10.0.0.1:80", 0, PEER) for _ in range(2)]
    engine.forget(sessions[0])
    engine.forget(sessions[0])
    assert engine.calls == []
    engine.forget(sessions[1])
    assert engine.calls == ["lose peer with True"]


@pytest.mark.parametrize(
    ("raised", "seen", "evidence"),
    [(PeerFailed("reset"), PeerFailed, True), (RuntimeError("its own"), EngineFailed, False)],
)
def test_errors_of_the_library(
    engine: Scripted, raised: BaseException, seen: type[BaseException], evidence: bool
) -> None:
    """A broken read says something about the node, a library that crashes does not; the next read works."""
    session, transfer = engine.connect("10.0.0.1:80", 0, PEER), engine.receive(Opening(), 10)
    engine.settled.update({1: raised, 2: None})
    error = engine.read(transfer, session, 1, 0, 10).exception(5)
    assert isinstance(error, seen)
    assert bool(engine.evidence(error)) is evidence
    engine.read(transfer, session, 1, 0, 10).result(5)
    transfer.end()


def test_what_does_not_fit_is_refused(engine: Scripted) -> None:
    """Too large a room, a read outside its block, a node with another engine, a room that has failed already."""
    with pytest.raises(OutOfMemory):
        engine.receive(Opening(), 8193)
    transfer, session = engine.receive(Opening(), 10), engine.connect("10.0.0.1:80", 0, PEER)
    for offset, length in ((0, 11), (5, 6), (-1, 1), (0, 0)):
        with pytest.raises(ValueError, match="do not lie"):
            engine.read(transfer, session, 1, offset, length)
    with pytest.raises(PeerFailed, match="no scripted engine"):
        engine.connect("10.0.0.1:80", 0, Peer("one", {"engine": {"kind": "nixl"}}))
    with pytest.raises(Withdrawn):
        engine.receive(Opening(2, FAILURE), 10)
    transfer.end()
    assert engine.memory.free_bytes == 8192


def test_memory_comes_back_in_one_piece() -> None:
    """Blocks given back in any order join again."""
    memory = Memory(5 * 4096)
    blocks = [memory.take(4096) for _ in range(5)]
    for i in (3, 0, 2, 4, 1):
        memory.give_back(blocks[i])
    assert memory.take(5 * 4096).offset == 0


@pytest.mark.parametrize(
    ("kind", "make", "modules"),
    [
        ("mooncake", MooncakeEngine, ["mooncake", "mooncake.engine"]),
        (
            "nixl",
            NixlEngine,
            [f"{name}{part}" for name in ("nixl_cu12", "nixl_cu13", "nixl") for part in ("", "._api")],
        ),
    ],
)
def test_a_missing_package_says_what_to_install(
    kind: str, make: Callable[[], PullingEngine], modules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine and the demo raise one typed error that names the extra, before anything is started."""
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EngineMissing, match=rf"pip install 'coordinator\[{kind}\]'"):
        make()
    with pytest.raises(EngineMissing, match=rf"coordinator\[{kind}\]"):
        run_demo(DemoOptions(transport=kind))


def test_an_unknown_transport_is_refused() -> None:
    """The error names those there are."""
    with pytest.raises(ConfigError, match="tcp, mooncake, nixl"):
        DemoOptions(transport="rdma").resolve()
