"""Ops: pure, exact with every 63-bit id (CASE 55), and closed against replies that no script gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scriptlab import BIG, CATALOGUE, A, B, C, Lab, N
from servers import FakeLane, Server

from coordinator.config import Settings
from coordinator.errors import ScriptFault
from coordinator.protocol import Batch, NodeView, Stats
from coordinator.rooms import MAX_ROOM_ID
from coordinator.store.ops import Op, Ops

OPS = Ops(Settings())
ROOM_IDS = st.integers(0, MAX_ROOM_ID) | st.sampled_from([0, 1, 2**53, 2**53 + 1, 2**62, MAX_ROOM_ID - 1, MAX_ROOM_ID])


def _samples() -> list[Op[Any]]:
    return [
        OPS.sync(Batch(N, A, 1, "delta", NodeView(1), 2, (1, 2), (3,), Stats(1, 2, 3, "1:bootstrapping:4"))),
        OPS.fail_node(N, 1, "call", B, "reason", [A, B]),
        OPS.suspect(N, A, 1, True, "timeout"),
        OPS.register_node(N, "start", "life-1", 1, "call", "node", [A], "{}", True),
        OPS.reap_worker(N, A, B, "lease expired"),
        OPS.abort_room(N, A, BIG, "no memory", "node"),
        OPS.pass_on(N, C, [A, B], [(BIG, "no memory"), (1, "too late")]),
        OPS.drain_read(N, f"lost:1:{A}"),
        OPS.drain_ack(N, f"lost:1:{A}", A, 30),
        OPS.drain_drop(N, f"orphans:{A}", "node"),
        OPS.discover([N]),
    ]


SAMPLES = [pytest.param(op, id=f"{op.script}-{op.args[0]}") for op in _samples()]


@pytest.fixture
def lab(store_server: FakeLane | Server) -> Iterator[Lab]:
    with store_server.sync_client() as client:
        yield Lab(client)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rooms=st.sets(ROOM_IDS, min_size=1, max_size=40), more=st.sets(ROOM_IDS, max_size=10))
def test_room_ids_come_back_exact(lab: Lab, rooms: set[int], more: set[int]) -> None:
    """Through SADD, SREM, a snapshot, SSCAN, an abort mark and the statistics every id is the same int (CASE 55)."""
    lab.client.flushdb()
    ordered = tuple(sorted(rooms))
    first = ordered[0]
    stats = Stats(len(rooms), 0, 0, f"{first}:bootstrapping:1")
    lab.run(lab.batch(A, 1, ordered, mode="reset", stats=stats))
    held = (rooms | more) - {first}
    reply = lab.run(lab.batch(A, 2, tuple(more - {first}), (first,), count=len(held)))
    assert reply.status == "OK"
    assert {int(room) for room in lab.client.smembers(lab.keys.rooms(N, A))} == held
    for room in sorted(held)[:3]:
        assert lab.run(lab.ops.abort_room(N, A, room, "no memory", "node"))
    marks = lab.run(lab.batch(A, 3, count=len(held))).aborted
    assert {room for room, _ in marks} == set(sorted(held)[:3])
    assert str(first) in str(lab.client.hget(lab.keys.worker(N, A), "oldest"))
    assert lab.run(lab.fail()).counts == ({A: len(held)} if held else {})
    seen: set[int] = set()
    cursor = "0"
    while True:
        page = lab.run(lab.ops.drain_read(N, f"lost:1:{A}", cursor, 7))
        seen.update(page.rooms)
        cursor = page.cursor
        if cursor == "0":
            break
    assert seen == held


@pytest.mark.parametrize("op", SAMPLES)
def test_ops_carry_nothing_but_text_and_whole_numbers(op: Op[Any]) -> None:
    """A float, a bool or None among the arguments would be spelled by the driver; none is there."""
    assert all(type(word) in (str, int) for word in op.args)
    assert all(type(key) is str for key in op.keys)
    assert len(set(op.keys)) == len(op.keys)


def test_ops_are_pure() -> None:
    """The same inputs give equal Ops: what is repeated is what was sent."""
    assert _samples() == _samples()


def test_every_script_has_a_sample() -> None:
    """The samples of this file leave no script out."""
    assert {op.script for op in _samples()} == {case.script for case in CATALOGUE}


REPLY = st.recursive(
    st.none()
    | st.integers(-(2**63), 2**63)
    | st.text(max_size=8)
    | st.binary(max_size=4)
    | st.booleans()
    | st.floats()
    | st.sampled_from(
        ["OK", "STALE", "RESYNC", "FAILED", "RETRY", "REAPED", "ALIVE", "VOTES", "SAME", "ROOMS", "ACKED"]
    )
    | st.builds(Exception),
    lambda inner: st.lists(inner, max_size=14) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=30,
)


@settings(max_examples=300, deadline=None)
@given(reply=REPLY | st.lists(REPLY, min_size=1, max_size=14), which=st.integers(0, len(_samples()) - 1))
def test_a_nonsense_reply_is_a_script_fault(reply: object, which: int) -> None:
    """Whatever comes back is read as the script's header promises or raises ScriptFault; no other exception (G5)."""
    op = _samples()[which]
    try:
        op.parse(reply)
    except ScriptFault as exc:
        assert str(exc).startswith(f"{op.script} answered ")  # noqa: PT017 (any other exception fails the test)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CATALOGUE])
def test_a_true_reply_cut_or_twisted_is_a_script_fault(case: Any) -> None:
    """Each element of a real reply replaced by another kind of thing, or the tail cut off: an answer or ScriptFault."""
    import fakeredis

    lab = Lab(fakeredis.FakeRedis(decode_responses=True))
    op = case.arrange(lab)
    reply = lab.raw(op)
    op.parse(reply)
    twisted = [reply[:n] for n in range(len(reply))]
    for n in range(len(reply)):
        for odd in (None, "", "x", 7, -1, [], ["x"], [["x"]], {}, b"\xff", Exception("inner"), object()):
            twisted.append([*reply[:n], odd, *reply[n + 1 :]])
    for wrong in twisted:
        try:
            op.parse(wrong)
        except ScriptFault as exc:
            assert op.script in str(exc)  # noqa: PT017 (any other exception fails the test)
    with pytest.raises(ScriptFault):
        op.parse([])


@pytest.mark.parametrize("op", SAMPLES)
@pytest.mark.parametrize("reply", [None, "OK", b"OK", 7, {}, ("OK",), [], [None], [[]], [b"OK"]])
def test_a_reply_of_another_shape_is_a_script_fault(op: Op[Any], reply: object) -> None:
    """Not a list, an empty list, or a list without a status word."""
    with pytest.raises(ScriptFault, match=f"{op.script} answered"):
        op.parse(reply)


def test_a_fault_shows_a_bounded_part_of_the_reply() -> None:
    """A huge nonsense reply does not become a huge message."""
    with pytest.raises(ScriptFault) as caught:
        OPS.discover([N]).parse(["NO", "x" * 1_000_000])
    assert len(str(caught.value)) < 1000


def test_times_travel_in_whole_milliseconds() -> None:
    """Lease, interval, retention and linger of the settings arrive as milliseconds, never as zero."""
    ops = Ops(Settings(lease_s=1.5, tick_s=0.2, probe_interval_s=0.25, retention_s=6.5, linger_s=0))
    sync = ops.sync(Batch(N, A, 1, "delta", NodeView(1), 0))
    assert sync.args[10:13] == (1500, 250, 6500)
    assert ops.drain_ack(N, "orphans:x", A, 0.0001).args[5] == 1
    assert ops.drain_ack(N, "orphans:x", A, 0.0).args[5] == 0
    assert ops.discover([]).args[0] == 6500


def test_age_of_a_failure_that_never_was_is_none() -> None:
    """-1 on the wire is "no epoch ever ended", both ways."""
    unknown = OPS.sync(Batch(N, A, 1, "delta", NodeView(1), 0))
    known = OPS.sync(Batch(N, A, 1, "delta", NodeView(1, failed_age_ms=0), 0))
    assert (unknown.args[5], known.args[5]) == (-1, 0)
    reply = ["OK", "1", "alive", "-1", "", "", "", "", "0", "0", "0", "1", [], []]
    assert unknown.parse(reply).node.failed_age_ms is None
    assert unknown.parse([*reply[:3], "0", *reply[4:]]).node.failed_age_ms == 0
