"""Epochs under races and delays: the atomic snapshot (G1), no resurrection (G4), a store that falls back (CASE 47)."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import redis
from scriptlab import BIG, A, B, C, Lab, N
from servers import FakeLane, Server
from util import wait_until

from coordinator.protocol import Batch, NodeView
from coordinator.store.client import SyncStore
from coordinator.store.ops import Op, Ops
from coordinator.store.verdict import fail_address, new_call

ROUNDS = 100
JOINERS = ("w0#00000000", "w1#11111111", "w2#22222222")


@pytest.fixture
def lab(store_server: FakeLane | Server) -> Iterator[Lab]:
    with store_server.sync_client() as client:
        yield Lab(client, declared=store_server.kind == "strict")


# -- G1 ---------------------------------------------------------------------------------------------------------


class Joiner(threading.Thread):
    """One worker that opens rooms as fast as it can and keeps what it was told about each."""

    def __init__(self, server: Server, name: str, first_room: int, stop: threading.Event) -> None:
        super().__init__(name=name, daemon=True)
        self.server, self.next_room, self.halt = server, first_room, stop
        self.accepted: dict[int, set[int]] = defaultdict(set)  # by epoch
        self.refused: set[int] = set()
        self.error: BaseException | None = None

    def has_rooms_in(self, epoch: int) -> bool:
        assert self.error is None, self.error
        return bool(self.accepted.get(epoch))

    def run(self) -> None:
        try:
            with self.server.sync_client() as client:
                self._join(SyncStore(client), Lab(client).ops)
        except BaseException as exc:
            self.error = exc

    def _join(self, store: SyncStore, ops: Ops) -> None:
        epoch, number, mode, held = 1, 0, "reset", 0
        while not self.halt.is_set():
            number += 1
            adds = tuple(range(self.next_room, self.next_room + 5))
            self.next_room += 5
            reply = store.run(ops.sync(Batch(N, self.name, number, mode, NodeView(epoch), held + 5, adds)))
            if reply.status == "OK" and reply.node.state != "failed":
                assert reply.node.epoch == epoch
                self.accepted[epoch].update(adds)
                mode, held = "delta", held + 5
                continue
            assert reply.status in ("OK", "STALE"), reply
            self.refused.update(adds)
            epoch, mode, held = reply.node.epoch, "reset", 0


def _end_epoch(store: SyncStore, ops: Ops, epoch: int) -> dict[str, int]:
    """Every other time by a verdict and a new start, else by another instance in one step."""
    if epoch % 2:
        counts = fail_address(store, ops, N, "race", "tester", epoch).counts
        op = ops.register_node(N, "start", f"life-{epoch + 1}", epoch + 1, new_call(), "node")
        assert store.run(op).outcome == "NEW"
        return counts
    workers: tuple[str, ...] = ()
    call = new_call()
    while True:
        op = ops.register_node(N, "start", f"life-{epoch + 1}", epoch, call, "node", workers)
        answer = store.run(op)
        if answer.outcome == "REPLACED":
            return answer.counts
        assert answer.outcome == "RETRY"
        workers = answer.workers


def _read(store: SyncStore, ops: Ops, field: str) -> set[int]:
    rooms: set[int] = set()
    cursor = "0"
    while True:
        page = store.run(ops.drain_read(N, field, cursor, 500))
        rooms.update(page.rooms)
        cursor = page.cursor
        if cursor == "0":
            return rooms


def test_G1_atomic_snapshot(real_server: Server) -> None:
    """Whatever races an ending epoch is in its snapshot if it was acknowledged and nowhere if it was refused."""
    stop = threading.Event()
    joiners = [Joiner(real_server, name, 1 + n * 10_000_000, stop) for n, name in enumerate(JOINERS)]
    with real_server.sync_client() as client:
        store, ops = SyncStore(client), Lab(client).ops
        store.run(ops.register_node(N, "start", "life-1", 0, new_call(), "node"))
        lost: dict[tuple[int, str], set[int]] = {}
        counts: dict[tuple[int, str], int] = {}
        for joiner in joiners:
            joiner.start()
        try:
            for epoch in range(1, ROUNDS + 1):
                for joiner in joiners:
                    wait_until(partial(joiner.has_rooms_in, epoch), 20, f"rooms of {joiner.name} in epoch {epoch}")
                for worker, n in _end_epoch(store, ops, epoch).items():
                    counts[epoch, worker] = n
                for name in JOINERS:
                    lost[epoch, name] = _read(store, ops, f"lost:{epoch}:{name}")
        finally:
            stop.set()
            for joiner in joiners:
                joiner.join(10)
        for joiner in joiners:
            assert joiner.error is None
            for epoch in range(1, ROUNDS + 1):
                assert lost[epoch, joiner.name] == joiner.accepted[epoch]
                assert counts[epoch, joiner.name] == len(joiner.accepted[epoch])
                assert not lost[epoch, joiner.name] & joiner.refused
            still_open = {int(room) for room in client.smembers(ops.keys.rooms(N, joiner.name))}
            assert still_open == joiner.accepted.get(ROUNDS + 1, set())
        assert any(joiner.refused for joiner in joiners), "no join ever raced a failure: the test proved nothing"


def test_G1_a_leave_that_races_a_failure_counts_once(real_server: Server) -> None:
    """A room whose leave was acknowledged in the epoch is not in its snapshot, all others are (CASE 8)."""
    with real_server.sync_client() as mine, real_server.sync_client() as other:
        lab, ops = Lab(mine), Lab(other).ops
        rooms = set(range(1, 3001))
        lab.open(A, sorted(rooms))
        left: set[int] = set()
        halt = threading.Event()

        def leave() -> None:
            store, number = SyncStore(other), 1
            while len(left) < len(rooms) and not halt.is_set():
                number += 1
                going = tuple(sorted(rooms - left)[:10])
                batch = Batch(N, A, number, "delta", NodeView(1), len(rooms) - len(left) - 10, (), going)
                if store.run(ops.sync(batch)).status != "OK":
                    return
                left.update(going)

        thread = threading.Thread(target=leave)
        thread.start()
        wait_until(lambda: len(left) > 100, 10, "the first leaves")
        verdict = lab.run(lab.fail())
        halt.set()
        thread.join(10)
        assert _read(SyncStore(mine), lab.ops, f"lost:1:{A}") == rooms - left
        assert verdict.counts == {A: len(rooms - left)}
        assert left
        assert left != rooms, "everything left before the failure: the test proved nothing"


# -- G4 ---------------------------------------------------------------------------------------------------------


def _next_epoch(lab: Lab, moved_on: bool) -> None:
    """A and B had rooms in epoch 1; epoch 2 has begun; A has opened a room in it if it `moved_on`."""
    lab.node()
    lab.open(A, (1, 2, BIG))
    lab.open(B, (1,))
    lab.run(lab.batch(A, 2, (3,), count=4))
    lab.run(lab.fail())
    lab.node("life-2")
    if moved_on:
        lab.open(A, (1, 9), number=4, epoch=2)


LATE: dict[str, tuple[Callable[[Lab], Op[Any]], str]] = {
    "join": (lambda lab: lab.batch(A, 3, (50,), count=5), "STALE"),
    "leave": (lambda lab: lab.batch(A, 3, (), (1,), count=3), "STALE"),
    "reset": (lambda lab: lab.batch(A, 3, (1, 2), mode="reset"), "STALE"),
    "first batch of a stranger": (lambda lab: lab.batch(C, 1, (1, 2), mode="reset"), "STALE"),
    "verdict": (lambda lab: lab.fail(epoch=1, call="late", workers=[A, B]), "STALE"),
    "vote": (lambda lab: lab.ops.suspect(N, A, 1, True, "timeout"), "STALE"),
    "withdrawal": (lambda lab: lab.ops.suspect(N, A, 1, False, "ok"), "STALE"),
    "probe": (lambda lab: lab.register("probe", "life-1", epoch=1, call="late"), "PAST"),
    "probe of a third instance": (lambda lab: lab.register("probe", "life-3", epoch=1, call="late"), "STALE"),
    "start of the old instance": (lambda lab: lab.register("start", "life-1", epoch=1, call="late"), "PAST"),
    "abort": (lambda lab: lab.ops.abort_room(N, A, 2, "late", "node"), "UNKNOWN"),
    "pass on": (lambda lab: lab.ops.pass_on(N, C, [A, B], [(2, "late")]), "OK"),
}


@pytest.mark.parametrize("moved_on", [False, True], ids=["behind", "moved-on"])
@pytest.mark.parametrize("name", LATE)
def test_G4_no_resurrection_from_an_older_epoch(lab: Lab, name: str, moved_on: bool) -> None:
    """A message of epoch 1 that arrives in epoch 2 changes no value and creates no key (CASES 9, 15)."""
    _next_epoch(lab, moved_on)
    late, word = LATE[name]
    before = lab.dump()
    for _ in range(2):
        assert lab.raw(late(lab))[0] == word
        assert lab.dump() == before


@pytest.mark.parametrize("acknowledged", [False, True], ids=["orphans-pending", "orphans-taken"])
@pytest.mark.parametrize("mode", ["delta", "reset"])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_G4_no_resurrection_of_a_reaped_worker(lab: Lab, mode: str, epoch: int, acknowledged: bool) -> None:
    """No batch of a reaped id, whatever its number and epoch, is listed, stored or un-reaped; its heir is untouched."""
    lab.open(A, (1, 2))
    lab.open(B, (1,))
    lab.expire(A)
    lab.run(lab.reap(A))
    if acknowledged:
        lab.run(lab.ops.drain_drop(N, f"orphans:{A}", "node"))
    lab.open(f"{A}.1", (1, 2))  # the same process under its next id
    before = lab.dump()
    for number in (1, 2, 7):
        assert lab.run(lab.batch(A, number, (5, 6), mode=mode, epoch=epoch)).status == "FENCED"
        assert lab.dump() == before
    assert lab.run(lab.ops.suspect(N, A, 1, True, "timeout")).stale
    assert not lab.run(lab.ops.abort_room(N, A, 1, "late", "node"))
    assert lab.run(lab.reap(A, leaving=True)).outcome == "REAPED"
    assert lab.dump() == before


@pytest.mark.parametrize(
    ("number", "mode", "adds", "removes"),
    [(3, "delta", (50,), ()), (3, "delta", (), (1,)), (4, "delta", (50,), (1,)), (1, "reset", (50, 51), ())],
)
def test_G4_no_resurrection_by_a_delayed_batch(
    lab: Lab, number: int, mode: str, adds: tuple[int, ...], removes: tuple[int, ...]
) -> None:
    """A batch that arrives after later ones, delta or reset, is answered RESYNC and changes nothing (CASE 3)."""
    lab.open(A, (1, 2), number=5)
    before = lab.dump()
    reply = lab.run(lab.batch(A, number, adds, removes, mode=mode, count=2))
    assert reply.status == "RESYNC"
    assert lab.dump() == before


def test_G4_a_worker_that_knows_no_epoch_yet_cannot_bring_back_rooms(lab: Lab) -> None:
    """The first batch, sent before anything was known, arrives again after the epoch it was applied in has ended."""
    op = lab.batch(A, 1, (1, 2), mode="reset", epoch=0)
    lab.run(op)
    lab.run(lab.fail())
    before = lab.dump()
    assert lab.run(op).node.state == "failed"
    assert lab.dump() == before
    lab.node("life-2")
    before = lab.dump()
    reply = lab.run(op)
    assert (reply.status, reply.node.epoch) == ("RESYNC", 2)
    assert lab.dump() == before


def test_rooms_of_an_ended_epoch_are_deleted_when_their_owner_syncs(lab: Lab) -> None:
    """A store that skipped an epoch still holds rooms of it: the owner's stale batch takes them out."""
    lab.open(A, (1, 2))
    lab.open(B, (1,), epoch=4)
    assert lab.run(lab.batch(A, 2, (3,), count=3)).status == "STALE"
    assert lab.keys.rooms(N, A) not in lab.dump()
    assert lab.dump()[lab.keys.rooms(N, B)] == {"1"}


# -- a store that lost data -------------------------------------------------------------------------------------


def _save(lab: Lab) -> dict[str, bytes]:
    where = lab.client.connection_pool.connection_kwargs
    with redis.Redis(host=where["host"], port=where["port"]) as raw:
        return {key: cast(bytes, raw.dump(key)) for key in lab.dump()}


def _restore(lab: Lab, saved: dict[str, bytes]) -> None:
    lab.client.flushall()
    for key, blob in saved.items():
        lab.client.restore(key, 60_000, blob)


@pytest.fixture
def real_lab(real_server: Server) -> Iterator[Lab]:
    with real_server.sync_client() as client:
        yield Lab(client, declared=real_server.kind == "strict")


def test_an_older_store_is_moved_forward(real_lab: Lab) -> None:
    """A promoted replica that missed an epoch gets it back from the first owner; nobody sees it go back (CASE 47)."""
    lab = real_lab
    lab.node()
    lab.open(A, (1, 2))
    lab.open(B, (1,))
    saved = _save(lab)
    lab.run(lab.batch(A, 2, (3,), count=3))
    lab.run(lab.fail())
    lab.node("life-2")
    lab.open(A, (8, 9), number=3, epoch=2)
    _restore(lab, saved)
    assert lab.dump()[lab.keys.node(N)]["epoch"] == "1"

    known = NodeView(2, "alive", 40, "node_failed", "cable pulled", B, "life-2")
    reply = lab.run(lab.batch(A, 4, (10,), count=3, node=known))
    assert (reply.status, reply.node.epoch, reply.node.instance) == ("RESYNC", 2, "life-2")
    assert lab.run(lab.batch(A, 5, (8, 9, 10), mode="reset", node=known)).status == "OK"
    late = lab.run(lab.batch(B, 2, (2,), count=2))  # B had not heard of it before the store fell back
    assert (late.status, late.node.epoch, late.node.reason) == ("STALE", 2, "cable pulled")
    dump = lab.dump()
    assert dump[lab.keys.rooms(N, A)] == {"8", "9", "10"}
    assert lab.keys.rooms(N, B) not in dump
    assert dump[lab.keys.node(N)]["epoch"] == "2"
    assert [entry["kind"] for _, entry in dump[lab.keys.events(N)]].count("restored") == 1


def test_a_failed_node_stays_failed_in_an_older_store(real_lab: Lab) -> None:
    """Whoever knows of the failure carries state, cause and age of it; joins stay refused."""
    lab = real_lab
    lab.node()
    lab.open(A, (1, 2))
    saved = _save(lab)
    lab.run(lab.fail())
    _restore(lab, saved)
    known = NodeView(2, "failed", 5000, "node_failed", "cable pulled", B, "life-1")
    reply = lab.run(lab.batch(A, 2, (), (), count=0, node=known))
    assert (reply.node.epoch, reply.node.state, reply.node.reason) == (2, "failed", "cable pulled")
    assert reply.node.failed_age_ms >= 5000
    reply = lab.run(lab.batch(A, 3, (7,), mode="reset", node=known))
    assert reply.node.state == "failed"
    assert lab.keys.rooms(N, A) not in lab.dump()


def test_an_emptied_store_is_rebuilt_by_the_owners(lab: Lab) -> None:
    """After FLUSHALL each owner is asked for its whole ledger; its rooms are back with its second batch (CASE 44)."""
    lab.open(A, (1, 2), number=4)
    lab.open(B, (1,), number=7)
    lab.client.flushall()
    for worker, number, rooms in ((A, 5, (1, 2)), (B, 8, (1,))):
        assert lab.run(lab.batch(worker, number, count=len(rooms))).status == "RESYNC"
        lab.open(worker, rooms, number=number + 1)
    dump = lab.dump()
    assert (dump[lab.keys.rooms(N, A)], dump[lab.keys.rooms(N, B)]) == ({"1", "2"}, {"1"})
    assert dump[lab.keys.workers(N)] == {A, B}
