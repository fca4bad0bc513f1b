"""The audit: made-up facts with a known truth. Times are ms after the start; every rule of audit.py has its case."""

from __future__ import annotations

from typing import Any

from coordinator.demo.audit import Audit, FaultReport, audit, process_of

A, B = "127.0.0.1:20000", "127.0.0.1:20002"
Fact = dict[str, Any]


def at(ms: float, event: str, **fields: Any) -> Fact:
    """One fact."""
    return {"t": 10**18 + round(ms * 1e6), "event": event, **fields}


def worker(name: str, *facts: Fact) -> list[Fact]:
    """A worker process's file, in the order of time."""
    return [at(0, "start", role="worker", id=name, pid=1), *sorted(facts, key=lambda fact: int(fact["t"]))]


def node(address: str, *facts: Fact, start: float = 0) -> list[Fact]:
    """A node process's file."""
    return [
        at(start, "start", role="node", id="i", pid=2, address=address),
        at(start, "serving"),
        at(start, "announced"),
        *facts,
    ]


def opened(ms: float, room: int, address: str = A) -> Fact:
    return at(ms, "opened", address=address, room=room)


def succeeded(ms: float, room: int, address: str = A) -> Fact:
    return at(ms, "succeeded", address=address, room=room)


def failed(ms: float, room: int, address: str = A, cause: str = "node_failed") -> Fact:
    return at(ms, "failed", address=address, room=room, cause=cause, reason="r", epoch=1)


def stored(ms: float, *rooms: int, address: str = A) -> Fact:
    return at(ms, "stored", rooms=[[address, room] for room in rooms])


def orphans(ms: float, who: str, *rooms: int) -> Fact:
    return at(ms, "orphans", worker=who, rooms=list(rooms))


def fault(ms: float, kind: str, address: str = "", who: str = "") -> Fact:
    return at(ms, "fault", kind=kind, address=address, worker=who)


def only(report: Audit) -> FaultReport:
    [entry] = report.faults
    return entry


KILL = fault(1000, "kill-node", A)


def test_a_kill_that_everybody_noticed_is_ok() -> None:
    """Two owners, each with its rooms failed once: counts, times and spread are exact."""
    report = audit(
        [
            node(A),
            worker("w1", opened(100, 1), failed(1300, 1), opened(200, 2), failed(1302, 2)),
            worker("w2", opened(300, 3), failed(1325.5, 3), opened(300, 4, B), succeeded(1400, 4, B)),
        ],
        [KILL],
    )
    assert report.problems == ()
    assert (
        report.opened,
        report.succeeded,
        report.failed,
        report.orphaned,
        report.open_at_end,
        report.false_failures,
    ) == (4, 1, 3, 0, 0, 0)
    expected = {
        "kind": "kill-node",
        "address": A,
        "affected": 3,
        "failed": 3,
        "failed_twice": 0,
        "missed": 0,
        "first_ms": 302.0,
        "all_ms": 325.5,
        "spread_ms": 23.5,
        "at_s": 1.0,
        "worker": "",
        "owners": 2,
        "finished": 0,
        "causes": {"node_failed": 3},
        "noticed": True,
    }
    assert expected == only(report).plain(10**18)


def test_a_dropped_failure_is_missed() -> None:
    """A room that was open and never ended is missed, and stays open at the end."""
    report = audit([worker("w1", opened(100, 1), failed(1300, 1), opened(200, 2))], [KILL])
    assert (only(report).failed, only(report).missed) == (1, 1)
    assert report.open_at_end == 1
    assert "1 rooms were missed" in report.problems[0]


def test_a_room_opened_at_the_dead_node_counts() -> None:
    """A worker that does not know yet opens a room there: it must fail as well."""
    rooms = [opened(900, 1), failed(1300, 1), opened(1200, 2)]
    assert only(audit([worker("w1", *rooms)], [KILL])).missed == 1
    report = audit([worker("w1", *rooms, failed(1300, 2))], [KILL])
    assert (only(report).failed, only(report).missed) == (2, 0)


def test_a_room_whose_last_bytes_were_in_flight_is_not_counted() -> None:
    """It succeeded after the fault: neither failed nor missed."""
    report = audit([worker("w1", opened(100, 1), succeeded(1002, 1), opened(100, 2), failed(1300, 2))], [KILL])
    assert (only(report).failed, only(report).missed, only(report).finished) == (1, 0, 1)
    assert report.problems == ()


def test_rooms_that_ended_before_do_not_count() -> None:
    """Success or failure before the fault: not affected. Such a failure is a false one."""
    report = audit([worker("w1", opened(100, 1), succeeded(999, 1), opened(100, 2), failed(990, 2))], [KILL])
    assert only(report).failed == 0
    assert report.false_failures == 1


def test_two_failures_of_one_room_are_double() -> None:
    """on_failure called twice for an opening."""
    report = audit([worker("w1", opened(100, 1), failed(1300, 1), failed(1400, 1))], [KILL])
    assert (only(report).failed, only(report).failed_twice) == (1, 1)
    assert only(report).plain(10**18)["all_ms"] == 300.0
    assert "failed more than once" in report.problems[0]


def test_a_failure_at_another_address_is_false() -> None:
    """Rooms at addresses that nothing happened to must not notice."""
    report = audit([worker("w1", opened(100, 1, B), failed(1300, 1, B), opened(9, 2), failed(1300, 2))], [KILL])
    assert report.false_failures == 1
    assert "without a fault" in report.problems[0]


def test_a_failure_after_success_is_false() -> None:
    """A room that had reached Success is not failed, fault or not."""
    report = audit([worker("w1", opened(100, 1), succeeded(1100, 1), failed(1300, 1))], [KILL])
    assert (report.false_failures, only(report).failed) == (1, 0)


def test_a_cause_that_no_node_has_is_false() -> None:
    """A lost lease does not count as the node's failure, even at the right time and address."""
    report = audit([worker("w1", opened(100, 1), failed(1300, 1, cause="lease_lost"))], [KILL])
    assert report.false_failures == 1


def test_a_room_opened_after_the_restart_must_live() -> None:
    """Opened at the successor: within the margin a failure is explained, later it is false."""
    restart = fault(1000, "restart-node", A)
    life = [node(A), node(A, start=1020)]
    early = worker("w1", opened(100, 1), failed(1100, 1), opened(1100, 2), failed(1101, 2, cause="node_restarted"))
    assert audit([*life, early], [restart]).problems == ()
    late = worker("w1", opened(100, 1), failed(1100, 1), opened(1400, 2), failed(1500, 2))
    assert audit([*life, late], [restart]).false_failures == 1
    alive = worker("w1", opened(100, 1), failed(1100, 1), opened(1021, 2), succeeded(1500, 2))
    assert (only(audit([*life, alive], [restart])).failed, only(audit([*life, alive], [restart])).finished) == (1, 0)


def test_each_room_belongs_to_one_fault() -> None:
    """The same node is killed twice: rooms are counted where they were open."""
    log = [KILL, fault(2000, "start-node", A), fault(4000, "kill-node", A)]
    processes = [
        node(A),
        node(A, start=2500),
        worker("w1", opened(100, 1), failed(1300, 1), opened(3000, 2), failed(4100, 2), opened(3000, 3)),
    ]
    first, _started, second = audit(processes, log).faults
    assert (first.failed, first.missed, first.plain(10**18)["all_ms"]) == (1, 0, 300.0)
    assert (second.failed, second.missed, second.plain(10**18)["all_ms"]) == (1, 1, 100.0)


def test_an_owner_that_waits_through_a_hang_has_missed_it() -> None:
    """A stopped node that goes on completes its rooms; whoever waited for that was not told."""
    log = [fault(1000, "stop-node", A), at(11000, "back", address=A)]
    report = audit([worker("w1", opened(100, 1), succeeded(11100, 1), opened(100, 2), failed(6000, 2))], log)
    assert (only(report).failed, only(report).missed) == (1, 1)
    in_flight = audit([worker("w1", opened(100, 1), succeeded(1001, 1), opened(100, 2), failed(6000, 2))], log)
    assert in_flight.problems == ()


def test_a_killed_owner_misses_nothing() -> None:
    """The worker died before it could act: its rooms are orphans, not missed by the node's fault."""
    log = [KILL, fault(1100, "kill-worker", who="w1")]
    report = audit(
        [node(A), worker("w1", opened(100, 1), stored(200, 1)), worker("w2", opened(1, 2), failed(1300, 2))], log
    )
    assert report.problems == ()
    assert [entry.failed for entry in report.faults] == [1, 0]
    assert report.orphaned == 1


DEATH = fault(1000, "kill-worker", who="w#1")


def test_the_nodes_are_told_of_a_killed_worker() -> None:
    """Told under whatever life's id; owners are the nodes; rooms that had ended do not count."""
    dead = worker(
        "w#1", opened(1, 1), opened(2, 2, B), stored(5, 1), stored(5, 2, address=B), opened(3, 3), succeeded(9, 3)
    )
    report = audit([dead, node(A, orphans(6500, "w#1", 1, 3)), node(B, orphans(6700, "w#1.2", 2))], [DEATH])
    assert report.problems == ()
    assert (only(report).failed, only(report).missed, report.orphaned) == (2, 0, 2)
    plain = only(report).plain(10**18)
    assert (plain["first_ms"], plain["all_ms"], plain["spread_ms"]) == (5500.0, 5700.0, 200.0)


def test_an_orphan_nobody_was_told_of_is_missed() -> None:
    """Only its own node counts, and only after the death."""
    dead = worker("w#1", opened(1, 1), opened(2, 2), stored(5, 1, 2))
    report = audit([dead, node(A, orphans(900, "w#1", 2)), node(B, orphans(6700, "w#1", 1))], [DEATH])
    assert (only(report).failed, only(report).missed) == (0, 2)


def test_a_room_of_which_the_store_never_heard_is_not_missed() -> None:
    """Opened a moment before the kill and never written: nobody can tell the node."""
    report = audit([worker("w#1", opened(999, 1)), node(A)], [DEATH])
    assert (only(report).failed, only(report).missed, report.orphaned) == (0, 0, 1)
    assert report.problems == ()


def test_orphans_at_a_node_that_died_are_not_missed() -> None:
    """The node lost the room's memory itself, before or after the worker's death; another node has to be told."""
    dead = worker("w#1", opened(1, 1), opened(2, 2, B), stored(5, 1), stored(5, 2, address=B))
    for when in (900, 3000):
        faults = audit([dead, node(A), node(B)], [DEATH, fault(when, "kill-node", A)]).faults
        [report] = [entry for entry in faults if entry.kind == "kill-worker"]
        assert report.missed == 1


def test_a_flush_takes_the_orphans_along() -> None:
    """The only record of a dead worker's rooms was erased after its death; before, its death changes nothing."""
    dead = worker("w#1", opened(1, 1), stored(5, 1))
    assert audit([dead, node(A)], [DEATH, fault(2000, "flush-store")]).faults[0].missed == 0
    assert audit([dead, node(A)], [fault(500, "flush-store"), DEATH]).faults[1].missed == 1


def test_told_twice_is_double() -> None:
    """A node that is told of the same orphan again."""
    dead = worker("w#1", opened(1, 1), stored(5, 1))
    report = audit([dead, node(A, orphans(6000, "w#1", 1), orphans(7000, "w#1", 1))], [DEATH])
    assert (only(report).failed, only(report).failed_twice) == (1, 1)


def test_a_living_worker_given_up_for_dead_is_a_false_failure() -> None:
    """Orphans are named while their worker lives and has them open."""
    living = worker("w#2", opened(1, 1), succeeded(7000, 1))
    report = audit([living, node(A, orphans(6000, "w#2", 1))], [])
    assert report.false_failures == 1
    assert "given up for dead" in report.problems[0]
    closed = worker("w#2", opened(1, 1), succeeded(5999, 1))
    assert audit([closed, node(A, orphans(6000, "w#2", 1))], []).problems == ()


def test_store_faults_affect_no_room() -> None:
    """What fails while the store is away is false, and a room that does not end is open at the end."""
    log = [fault(1000, "pause-store"), fault(5000, "flush-store")]
    report = audit([worker("w1", opened(1, 1), failed(1300, 1, cause="unreachable"), opened(2, 2))], log)
    assert [entry.failed + entry.missed for entry in report.faults] == [0, 0]
    assert (report.false_failures, report.open_at_end) == (1, 1)
    assert len(report.problems) == 2


def test_a_room_closed_with_its_worker_is_open_at_the_end() -> None:
    """The cause "closed" hides nothing: such a room had no end of its own."""
    report = audit([worker("w1", opened(1, 1), failed(9000, 1, cause="closed"))], [])
    assert (report.open_at_end, report.failed, report.false_failures) == (1, 0, 0)


def test_a_fault_without_rooms_must_be_noticed_otherwise() -> None:
    """No room was open there: the store's epoch of the address tells."""
    log = [at(500, "epoch", address=A, epoch=1), KILL]
    assert not only(audit([], log)).noticed
    assert audit([], log).problems == ("kill-node of 127.0.0.1:20000 was not noticed",)
    assert only(audit([], [*log, at(1500, "epoch", address=A, epoch=2)])).noticed
    assert not only(audit([], [*log, at(1500, "epoch", address=B, epoch=2)])).noticed


def test_a_started_node_must_be_used_again() -> None:
    """Many rooms elsewhere and none there: nobody noticed that it is back. Few rooms say nothing."""
    start = fault(1000, "start-node", A)
    life = [node(A, start=1500)]
    elsewhere = [fact for n in range(50) for fact in (opened(5000 + n, n, B), succeeded(6000 + n, n, B))]
    assert not only(audit([*life, worker("w1", *elsewhere)], [start])).noticed
    assert only(audit([*life, worker("w1", *elsewhere[:20])], [start])).noticed
    assert only(audit([*life, worker("w1", *elsewhere, opened(7000, 99), succeeded(8000, 99))], [start])).noticed
    assert not only(audit([worker("w1")], [start])).noticed


def test_a_failure_recorded_before_its_opening_is_the_same_room() -> None:
    """The callback may be faster than the thread that joined."""
    report = audit([worker("w1", failed(1300, 1), opened(1300.1, 1))], [KILL])
    assert (report.opened, only(report).failed, only(report).missed) == (1, 1, 0)


def test_a_process_killed_before_it_began_is_passed_over() -> None:
    """An empty file is no error."""
    assert audit([[]], []).opened == 0


def test_the_process_behind_a_worker_id() -> None:
    """Later lives of one process at an address carry a number; names may have dots."""
    assert process_of("a.b-0#1a2b3c4d.2") == "a.b-0#1a2b3c4d"
    assert process_of("a.b-0#1a2b3c4d") == "a.b-0#1a2b3c4d"
