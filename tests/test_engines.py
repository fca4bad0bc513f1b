"""Real engines: bytes move between processes, and a peer that is killed or hung harms nobody.

Needs mooncake-transfer-engine-non-cuda and nixl-cu12; skipped without them unless COORDINATOR_REQUIRE_ENGINES=1.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from enginelab import Node, Nodes, engine_or_skip, pattern, rss_kib
from fakenode import Farm
from rich.console import Console
from util import wait_until

from coordinator import Failure, Room, Settings, Status, Worker
from coordinator.backends import Backend, MooncakeBackend, NixlBackend, PeerFailed, Session, Transfer, Withdrawn
from coordinator.demo.fleet import free_addresses
from coordinator.demo.options import DemoOptions
from coordinator.demo.run import parse_fault, run_demo
from coordinator.rooms import Cause

KINDS = ("mooncake", "nixl")
LENGTH = 8 * 1024 * 1024
FAST = Settings(tick_s=0.05, lease_s=5.0, probe_interval_s=0.2, probe_timeout_s=0.5, retention_s=60, linger_s=5)
PATIENT = replace(FAST, probe_interval_s=0.5, probe_timeout_s=5.0)  # twenty nodes start on a small machine
LONG_S = 30.0


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The reading side's engine."""
    made = engine_or_skip(request.param, 2 * LENGTH)
    yield made
    assert made.close()


@pytest.fixture
def backend(redis_url: str, engine: Any) -> Iterator[Backend[Session]]:
    """A backend over it, with a worker of its own."""
    with Worker(redis_url, name="decode", settings=FAST) as worker:
        kind = MooncakeBackend if engine.kind == "mooncake" else NixlBackend
        yield kind(worker, engine)


@pytest.fixture
def nodes(redis_url: str, engine: Any) -> Iterator[Nodes]:
    """Processes to read from."""
    with Nodes(engine.kind, redis_url, LENGTH) as made:
        yield made


def ports(n: int) -> list[int]:
    """Ports that are free now."""
    return [int(address.rpartition(":")[2]) for address in free_addresses(n)]


def only(node: Node) -> tuple[str, int]:
    """The one address of a process, and where its bytes lie."""
    ((address, at),) = node.at.items()
    return address, at


def error_of(future: Future[None]) -> BaseException | None:
    """How a read ended."""
    return future.exception(LONG_S)


def test_bytes_arrive(engine: Any, backend: Backend[Session], nodes: Nodes) -> None:
    """A room's bytes are read piece by piece out of the node's process; its end gives the block back."""
    (node,) = nodes.start(ports(1))
    address, at = only(node)
    with engine.receive(backend.open(address, 1), LENGTH) as transfer:
        half = LENGTH // 2
        for offset in (0, half):
            engine.read(transfer, backend.endpoint(address), at + offset, offset, half).result(LONG_S)
        assert bytes(transfer.view) == pattern(int(address.rpartition(":")[2]), LENGTH)
    assert engine.memory.free_bytes == engine.memory.size
    with pytest.raises(Withdrawn):
        _ = transfer.view


def test_a_killed_peer_is_evidence_and_is_forgotten(engine: Any, backend: Backend[Session], nodes: Nodes) -> None:
    """kill -9 in the middle of a read: the read breaks, the report fails the room, the peer and the block are gone."""
    (node,) = nodes.start(ports(1))
    address, at = only(node)
    room = backend.open(address, 1)
    transfer = engine.receive(room, LENGTH)
    session = backend.endpoint(address)
    engine.read(transfer, session, at, 0, 4096).result(LONG_S)
    assert backend.worker.flush(5)
    wait_until(lambda: backend.worker._core.detector.watch(address).ever_ok)
    node.pause()
    flying = engine.read(transfer, session, at, 0, LENGTH)
    node.kill()
    error = error_of(flying)
    assert isinstance(error, PeerFailed), error
    backend.transfer_failed(address, error)
    wait_until(lambda: room.status is Status.FAILED)
    wait_until(lambda: engine.health()["peers"] == 0 and engine.memory.free_bytes == engine.memory.size)
    assert knows(engine, session) is False
    with pytest.raises(Withdrawn):
        engine.read(transfer, session, at, 0, 1)


def knows(engine: Any, session: Session) -> bool:
    """Whether the library itself still has the peer."""
    if engine.kind == "nixl":
        return bool(engine._agent.check_remote_metadata(session.name))
    return session.name in engine._lives


def test_a_hung_peer_keeps_its_block_until_the_last_byte(engine: Any, backend: Backend[Session], nodes: Nodes) -> None:
    """A room fails while its read hangs: the block is withheld, since the peer, when it goes on, still fills it."""
    (node,) = nodes.start(ports(1))
    address, at = only(node)
    room = backend.open(address, 1)
    transfer = engine.receive(room, LENGTH)
    session = backend.endpoint(address)
    view = transfer.view
    engine.read(transfer, session, at, 0, 4096).result(LONG_S)
    assert backend.worker.flush(5)
    node.pause()
    flying = engine.read(transfer, session, at, 0, LENGTH)
    backend.worker.fail_node(address, "test")
    assert isinstance(error_of(flying), Withdrawn)
    wait_until(lambda: engine.health()["waiting"] == 1 and engine.health()["leaving"] == 1)
    assert engine.memory.free_bytes == engine.memory.size - LENGTH
    seen = bytes(view[-16:])
    node.resume()
    wait_until(lambda: engine.memory.free_bytes == engine.memory.size)
    arrived = bytes(view[-16:])
    assert arrived != seen, "the read was over before: this test proves nothing"
    wait_until(lambda: engine.health()["peers"] == 0)

    block = engine.memory.take(LENGTH)  # the same bytes, now somebody else's
    assert block.offset == transfer.block.offset
    view[:] = bytes(LENGTH)
    time.sleep(0.5)
    assert bytes(view) == bytes(LENGTH)
    engine.memory.give_back(block)


def test_a_peer_that_is_not_there(engine: Any, backend: Backend[Session], nodes: Nodes) -> None:
    """Reading from a node that died before anybody had read from it is evidence, and leaves nothing behind."""
    (node,) = nodes.start(ports(1))
    address, at = only(node)
    node.kill()
    wait_until(lambda: gone(node))
    room = backend.open(address, 1)
    with engine.receive(room, 4096) as transfer:
        with pytest.raises(PeerFailed) as caught:
            engine.read(transfer, backend.endpoint(address), at, 0, 4096).result(LONG_S)
        assert engine.evidence(caught.value)
        assert engine.evidence(ValueError("mine")) == ""
    wait_until(lambda: engine.memory.free_bytes == engine.memory.size)


def gone(node: Node) -> bool:
    """Whether the process has ended."""
    try:
        node.resume()
    except ProcessLookupError:
        return True
    return False


def test_a_room_that_failed_before_its_transfer(engine: Any, backend: Backend[Session]) -> None:
    """Nothing is kept for a room that failed between its opening and its transfer."""

    class Failed:
        id = 7
        failure = Failure(Cause.NODE_FAILED, "test", "127.0.0.1:1")

    with pytest.raises(Withdrawn):
        engine.receive(Failed(), 100)
    assert engine.memory.free_bytes == engine.memory.size


# -- two hundred failures ---------------------------------------------------------------------------------------

WARM_UP, FAILURES = 40, 200
AT_ONCE = [4] * 5  # nodes a process: an engine takes long to start
HEALTHY = 30  # nodes that live: a worker that sees most nodes dead doubts itself instead
REGIONS = 200  # what a library remembers of such a peer shows in the memory
BOUND_KIB = 2 * 1024
ROOM_BYTES = 65536


@pytest.mark.timeout(170)
@pytest.mark.parametrize("kind", KINDS)
def test_memory_after_two_hundred_killed_peers(kind: str, redis_url: str) -> None:
    """200 peers killed in the middle of a read: all rooms failed, all peers forgotten, the memory at its level."""
    engine = engine_or_skip(kind, 64 * ROOM_BYTES, **({"renew_after": 20} if kind == "mooncake" else {}))
    sizes, failures, level = AT_ONCE, 0, 0
    with Farm() as farm, Nodes(kind, redis_url, ROOM_BYTES, REGIONS) as nodes:
        healthy = [farm.node().address for _ in range(HEALTHY)]
        while failures < WARM_UP + FAILURES:
            free = iter(ports(sum(sizes)))
            started = nodes.start(*([next(free) for _ in range(n)] for n in sizes))
            with Worker(redis_url, name="decode", settings=PATIENT) as worker:
                for address in healthy:
                    worker.join(address, 0)
                backend = (MooncakeBackend if kind == "mooncake" else NixlBackend)(worker, engine)
                failures += kill_some(backend, engine, started)
            assert engine.memory.free_bytes == engine.memory.size
            assert engine.health()["peers"] == engine.health()["transfers"] == 0
            gc.collect()
            if failures <= WARM_UP:
                level = rss_kib()
    grown = rss_kib() - level
    print(f"{kind}: {failures} failures, {level} KiB after {WARM_UP}, {grown:+} KiB since")
    assert engine.close()
    assert grown < BOUND_KIB


def kill_some(backend: Backend[Session], engine: Any, nodes: list[Node]) -> int:
    """Kill these processes while a room of each of their nodes is being read; returns when all is over."""
    opened = {node.pid: [begin(backend, engine, *one) for one in node.at.items()] for node in nodes}
    rooms = [room for some in opened.values() for room, *_ in some]
    wait_until(lambda: all(backend.worker._core.detector.watch(room.address).ever_ok for room in rooms))
    flying = []
    for node in nodes:
        node.pause()  # so that the read is under way for certain
        for _, transfer, session, at in opened[node.pid]:
            flying.append(engine.read(transfer, session, at, 0, ROOM_BYTES))
        node.kill()
    for room, future in zip(rooms, flying, strict=True):
        error = error_of(future)
        assert isinstance(error, PeerFailed | Withdrawn), error
        backend.transfer_failed(room.address, error)
    wait_until(lambda: all(room.status is Status.FAILED for room in rooms), LONG_S)
    wait_until(lambda: engine.health()["peers"] == 0 and engine.memory.free_bytes == engine.memory.size)
    return len(rooms)


def begin(backend: Backend[Session], engine: Any, address: str, at: int) -> tuple[Room, Transfer, Session, int]:
    """A room at one node, once its bytes have been read there."""
    room = backend.open(address, 1)
    transfer, session = engine.receive(room, ROOM_BYTES), backend.endpoint(address)
    engine.read(transfer, session, at, 0, ROOM_BYTES).result(LONG_S)
    assert transfer.view[:5] == address.rpartition(":")[2].encode("ascii")
    return room, transfer, session, at


# -- the demo ---------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_the_demo_over_an_engine_is_ok(kind: str) -> None:
    """A node killed, one hung, one restarted, a worker killed: every room is failed once or arrives whole."""
    assert engine_or_skip(kind, 4096).close()
    faults = ("kill-node@1", "stop-node@2", "restart-node@3", "kill-worker@4")
    plan = tuple(parse_fault(text) for text in faults)
    options = DemoOptions(nodes=4, workers=3, rate=60.0, seconds=5.0, faults=plan, transport=kind)
    result = run_demo(options, Console(quiet=True))
    assert result["ok"], result["problems"]
    assert result["rooms"]["succeeded"] > 50
    assert sum(fault["failed"] for fault in result["faults"]) > 0
