"""The objects that take the place of SGLang's tables: what they take over of a dict and a set, and what they forbid."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from intakelab import A, B, Lab

from coordinator.sglang.tables import ConnectionPool, InfoTable, Notes, PoolKey, StatusTable

FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)


def table(**records: str) -> tuple[StatusTable, Notes, dict[int, str]]:
    notes, kept = Notes(lambda: None), {int(name[1:]): text for name, text in records.items()}
    return StatusTable(notes, kept), notes, kept


# -- request_status --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", range(5))
def test_only_an_opening_status_creates_a_room(status: int) -> None:
    """Bootstrapping and WaitingForInput create one; a late Transferring, Success or Failed does not."""
    statuses, _, _ = table()
    statuses[7] = status
    assert dict(statuses) == ({7: status} if status in (BOOTSTRAPPING, WAITING) else {})


@pytest.mark.parametrize("new", range(5))
@pytest.mark.parametrize("old", range(5))
def test_a_room_moves_up_only(old: int, new: int) -> None:
    """All 25 moves: up, or to Failed unless it has succeeded; Failed and Success are final."""
    statuses, notes, _ = table()
    dict.__setitem__(statuses, 7, old)
    statuses[7] = new
    moves = 0 < old < SUCCESS and (new == FAILED or new > old)
    assert statuses[7] == (new if moves else old)
    final = moves and new in (FAILED, SUCCESS)
    assert list(notes.queue) == ([("", 7, new, "")] if final else [])


@pytest.mark.parametrize("status", range(5))
def test_a_move_of_a_cleared_room_brings_nothing_back(status: int) -> None:
    """Whoever read a status before the room was cleared, and writes after, changes nothing."""
    statuses, notes, _ = table()
    statuses[7] = BOOTSTRAPPING
    statuses.pop(7)
    notes.queue.clear()
    statuses.move(7, status)
    assert (dict(statuses), list(notes.queue)) == ({}, [])


def test_the_reason_goes_with_the_failure() -> None:
    """What SGLang recorded before it failed the room is in the note."""
    statuses, notes, records = table()
    statuses[7] = BOOTSTRAPPING
    records[7] = "it broke"
    statuses[7] = FAILED
    assert list(notes.queue) == [("", 7, FAILED, "it broke")]


def test_pop_is_a_dicts() -> None:
    """pop answers, takes a default and raises as a dict's; `del` too; each is noted as leaving."""
    statuses, notes, _ = table()
    statuses[7] = BOOTSTRAPPING
    assert statuses.pop(7) == BOOTSTRAPPING
    assert statuses.pop(7, None) is None
    with pytest.raises(KeyError):
        statuses.pop(7)
    statuses[8] = BOOTSTRAPPING
    del statuses[8]
    assert dict(statuses) == {}
    assert list(notes.queue) == [("", 7), ("", 7), ("", 8)]


def test_the_coordinator_fails_an_open_room() -> None:
    """With its reason, once; not one that was cleared, has ended, or was opened later than what failed."""
    statuses, _, records = table()
    assert not statuses.fail(7, 10.0, "never opened")
    statuses.opened[7], statuses[7] = 10.0, BOOTSTRAPPING
    assert not statuses.fail(7, 9.0, "an earlier life")
    assert statuses.fail(7, 10.0, "the node failed")
    assert not statuses.fail(7, 10.0, "again")
    assert (statuses[7], records) == (FAILED, {7: "the node failed"})


def test_success_is_kept() -> None:
    """A room that has succeeded is not failed with its node."""
    statuses, _, records = table()
    statuses.opened[7], statuses[7] = 10.0, BOOTSTRAPPING
    statuses[7] = SUCCESS
    assert not statuses.fail(7, 10.0, "the node failed")
    assert (statuses[7], records) == (SUCCESS, {})


def test_the_first_reason_is_kept() -> None:
    """What SGLang recorded is not replaced by the symptom; an empty reason records nothing."""
    statuses, _, records = table(_7="it broke")
    for room in (7, 8):
        statuses.opened[room], statuses[room] = 10.0, BOOTSTRAPPING
    assert statuses.fail(7, 10.0, "the node failed")
    assert statuses.fail(8, 10.0, "")
    assert records == {7: "it broke"}


def test_failed_before_its_status_is_written() -> None:
    """Tracked but not in the table yet when its node is failed: it starts as failed and stays so."""
    statuses, _, _ = table()
    statuses.opened[7] = 10.0
    assert statuses.fail(7, 10.0, "the node failed")
    statuses[7] = BOOTSTRAPPING
    statuses[7] = SUCCESS
    assert statuses[7] == FAILED


def test_writers_race() -> None:
    """Success, Failed and pop from three threads at once: a room that was cleared never comes back."""
    statuses, _, _ = table()
    rounds, barrier, wrong = 300, threading.Barrier(3), []

    def write(room_to_status: Any) -> None:
        for room in range(rounds):
            barrier.wait()
            room_to_status(room)
            barrier.wait()
            if barrier.wait() == 0:
                if room in statuses:
                    wrong.append(room)
                statuses.opened[room + 1], statuses[room + 1] = 10.0, TRANSFERRING
            barrier.wait()

    def succeed(room: int) -> None:
        statuses[room] = SUCCESS

    statuses.opened[0], statuses[0] = 10.0, TRANSFERRING
    works = [succeed, lambda room: statuses.fail(room, 10.0, ""), lambda room: statuses.pop(room, None)]
    threads = [threading.Thread(target=write, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


# -- notes -----------------------------------------------------------------------------------------------------------


def test_one_wake_per_sleep() -> None:
    """The first note after the loop went to sleep wakes it, no other."""
    lab = Lab()
    lab.open(A, 1, 2, 3)
    assert lab.wakes == 1
    lab.notes.asleep = True
    lab.clear(A, 1)
    assert lab.wakes == 2


# -- addr_to_rooms_tracker -------------------------------------------------------------------------------------------


def test_a_view_holds_nothing() -> None:
    """Dropped and made again, it shows the same rooms; the last room that leaves takes it away."""
    lab = Lab()
    lab.open(A, 1, 2)
    lab.take()
    lab.tracker.pop(A)
    assert len(lab.tracker[A]) == 2
    lab.clear(A, 1, 2)
    lab.take()
    assert dict(lab.tracker) == {}
    assert not lab.tracker[A]


def test_get_makes_no_view() -> None:
    """`get` and `in` are a dict's: an address without rooms stays absent."""
    lab = Lab()
    assert lab.tracker.get(A) is None
    assert A not in lab.tracker


def test_discarding_what_is_not_there() -> None:
    """As a set's discard: nothing happens, and nothing stays behind."""
    lab = Lab()
    lab.tracker[A].discard(5)
    lab.take()
    assert dict(lab.tracker) == {}


def test_discard_at_another_address() -> None:
    """A room is left at its own address only."""
    lab = Lab()
    lab.open(A, 1)
    lab.take()
    lab.tracker[B].discard(1)
    lab.take()
    assert lab.intake.homes == {1: A}


# -- prefill_info_table ----------------------------------------------------------------------------------------------


def test_an_entry_counts_from_the_question() -> None:
    """From when it was asked, if that is known, else from when it was entered; until it is dropped."""
    now = [10.0]
    changed: list[str] = []
    infos = InfoTable(changed.append, lambda: now[0])
    assert infos.period(A) == (0.0, 0.0)
    infos.asked[A] = 8.0
    infos[A] = "info"
    assert infos.period(A) == (8.0, float("inf"))
    now[0] = 12.0
    assert infos.pop(A) == "info"
    assert (infos.period(A), infos.void(A)) == ((8.0, 12.0), 12.0)
    now[0] = 13.0
    infos[A] = "new"
    assert (infos.period(A), infos.void(A)) == ((13.0, float("inf")), 12.0)
    assert changed == [A, A, A]


def test_pop_of_info_is_a_dicts() -> None:
    """A default, or KeyError; what was not there did not become void."""
    infos = InfoTable(lambda address: None, lambda: 10.0)
    assert infos.pop(A, None) is None
    with pytest.raises(KeyError):
        del infos[A]
    assert (infos.period(A), infos.void(A)) == ((0.0, 0.0), 0.0)


def test_forgetting_info() -> None:
    """Nothing is remembered of an address that is gone; one that is there stays."""
    infos = InfoTable(lambda address: None, lambda: 10.0)
    infos[A] = "info"
    infos.forget(A)
    assert infos.period(A)[0] == 10.0
    infos.pop(A)
    infos.forget(A)
    assert (infos.period(A), infos.void(A)) == ((0.0, 0.0), 0.0)


# -- connection_pool -------------------------------------------------------------------------------------------------

hosts = st.sampled_from(["10.0.0.1", "10.0.0.11", "[fe80::1]", "a_b", "a_b_1"])
places = st.tuples(hosts, st.integers(1, 65535)).map(lambda place: f"{place[0]}:{place[1]}")


@given(one=places, other=places, ranks=st.tuples(*[st.integers(-1, 16)] * 3))
def test_a_key_starts_with_its_own_address_only(one: str, other: str, ranks: tuple[int, int, int]) -> None:
    """As SGLang lists keys of a failed node: exactly that node's."""
    pool = ConnectionPool({f"{one}_{ranks[0]}_{ranks[1]}_{ranks[2]}": []})
    assert len([key for key in pool if key.startswith(other)]) == (one == other)


def test_the_pool_is_a_dict() -> None:
    """Keys that were listed find, delete and compare as text."""
    pool = ConnectionPool()
    pool["10.0.0.1:80_0_0_0"] = [1]
    [key] = list(pool)
    assert (key, hash(key)) == ("10.0.0.1:80_0_0_0", hash("10.0.0.1:80_0_0_0"))
    assert pool[key] == [1]
    assert key.startswith("10.0.0.1:80")
    assert key.startswith("10.0.0.1:80_0_0_0")
    assert not key.startswith("10.0.0.1:8")
    assert key.startswith(("10.0.0.1", "x"))  # a tuple, or bounds, are text's own
    assert key.startswith("0.0.0", 1)
    del pool[key]
    assert not pool
    assert isinstance(PoolKey("a"), str)
