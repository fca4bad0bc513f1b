"""From SGLang's tables to the ledger: which rooms are where, which wait, which are lost; without SGLang."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from intakelab import HOLD_S, A, B, Lab

from coordinator import Status
from coordinator.decide.notes import Notes as Failed
from coordinator.sglang.intake import NOTES
from coordinator.sglang.tables import FAILED, SUCCESS

TRANSFERRING = 3
BAD_ADDRESSES = ("", "nowhere", "0.0.0.0:80", "127.0.0.1:99999", "host:80:80")


@pytest.fixture
def lab() -> Lab:
    return Lab()


@pytest.fixture
def known(lab: Lab) -> Lab:
    """SGLang and the store know node A since 99."""
    lab.now = 99.0
    lab.info(A)
    lab.take()
    lab.alive(A)
    lab.now = 100.0
    return lab


# -- a room counts from when SGLang knew its node ----------------------------------------------------------------


def test_a_room_is_entered_as_of_its_opening(known: Lab) -> None:
    """Opened at 100, entered at 103: it counts from 100."""
    known.open(A, 1)
    known.take(3.0)
    assert known.open_in_ledger(A) == {1: 100.0}
    assert known.intake.homes == {1: A}
    assert len(known.tracker[A]) == 1


def test_rooms_wait_for_info_and_count_from_the_question(lab: Lab) -> None:
    """Opened before SGLang knows the node: unwatched until the answer, then as of when that was asked for."""
    lab.open(A, 1)
    lab.take(1.0)
    assert lab.open_in_ledger(A) == {}
    assert lab.waiting() == {1}
    lab.infos.asked[A] = lab.now = 105.0
    lab.now = 106.0
    lab.info(A)
    lab.take()
    lab.alive(A)
    lab.take()
    assert lab.open_in_ledger(A) == {1: 105.0}
    assert lab.told == []


def test_a_room_that_waits_is_not_failed_by_an_old_end(lab: Lab) -> None:
    """Opened before the restart, but SGLang asked after it: the room is the new instance's and stays."""
    lab.open(A, 1)
    lab.take(5.0)
    lab.info(A)
    lab.take()
    lab.alive(A, epoch=2, failed_age_ms=2000)  # it ended at 103, the question was asked at 105
    lab.take()
    assert lab.open_in_sglang() == {1}
    assert lab.open_in_ledger(A) == {1: 105.0}


def test_a_room_with_void_info_is_lost(known: Lab) -> None:
    """The node ended and its info is gone; a room opened before that is lost, one opened after it waits."""
    known.open(A, 1)
    known.now = 101.0
    known.drop(A)
    known.open(A, 2)
    known.take()
    assert [room for room, _ in known.told] == [1]
    assert known.waiting() == {2}
    known.take(1.0)
    assert known.open_in_sglang() == {2}


def test_void_info_though_new_info_came_in_the_same_turn(known: Lab) -> None:
    """Opened, node ended, info dropped and fetched again, all before the loop turns: still lost, with the old node."""
    known.open(A, 1)
    known.now = 101.0
    known.drop(A)
    known.open(A, 2)
    known.now = 102.0
    known.info(A)
    known.open(A, 3)
    known.take()
    assert [room for room, _ in known.told] == [1]
    assert known.open_in_ledger(A) == {2: 102.0, 3: 102.0}


def test_the_end_between_opening_and_entering(known: Lab) -> None:
    """The node's failure is known before the note of a room is read: it fails with the node."""
    known.open(A, 1)
    known.now = 101.0
    known.failed(A)
    known.take()
    assert known.told == [(1, "gone")]
    assert known.open_in_sglang() == set()


# -- held: for first contact, and at a node that SGLang has just reached ------------------------------------------


def test_first_contact_comes_first(lab: Lab) -> None:
    """Nothing is entered before the store has said whether the node has failed; no store, no waiting."""
    lab.info(A)
    lab.open(A, 1)
    assert lab.take().more
    assert lab.open_in_ledger(A) == {}
    lab.store_away = True
    assert not lab.take().more
    assert lab.open_in_ledger(A) == {1: 100.0}


def test_first_contact_never_comes(lab: Lab) -> None:
    """A store that never answers for this address delays its rooms for a while, not for ever."""
    lab.info(A)
    lab.open(A, 1)
    lab.take()
    lab.take(HOLD_S + 0.1)
    assert lab.open_in_ledger(A) == {1: 100.0}


def test_a_failed_node_that_sglang_has_reached_gets_a_probe(known: Lab) -> None:
    """Failed for the store, reached by SGLang since: the room is held and the node asked; it revives, it is entered."""
    known.failed(A)
    known.drop(A)
    known.now = 101.0
    known.info(A)
    known.open(A, 1)
    taken = known.take()
    assert taken.ask == {A}
    assert taken.more
    assert known.waiting() == {1}
    known.alive(A, epoch=3, failed_age_ms=1000)
    known.take(0.5)
    assert known.open_in_ledger(A) == {1: 101.0}
    assert known.told == []


def test_a_failed_node_that_stays_failed_loses_the_room(known: Lab) -> None:
    """It does not revive within the time of a few probes: the room fails, and SGLang's info of the node is void."""
    known.failed(A)
    known.drop(A)
    known.now = 101.0
    known.info(A)
    known.open(A, 1)
    assert known.take().dead == set()
    assert known.take(HOLD_S + 0.1).dead == {A}
    assert known.told == [(1, f"{A} is failed: gone")]
    assert known.waiting() == set()
    assert known.intake.homes == {}


def test_a_held_room_whose_info_becomes_void_is_lost_at_once(known: Lab) -> None:
    """Held at a failed node, then SGLang drops the node: nothing waits for the deadline."""
    known.failed(A)
    known.open(A, 1)
    known.take()
    known.now = 101.0
    known.drop(A)
    known.take()
    assert [room for room, _ in known.told] == [1]


# -- leaving, final states, numbers used again --------------------------------------------------------------------


@pytest.mark.parametrize("where", ["fresh", "waiting", "held", "entered"])
def test_a_cleared_room_is_nowhere(lab: Lab, where: str) -> None:
    """clear() in each place that a room can be in: gone from ledger, lists, counts and tracker."""
    if where != "waiting":
        lab.info(A)
    if where == "entered":
        lab.take()
        lab.alive(A)
    lab.open(A, 1)
    if where != "fresh":
        lab.take()
    lab.clear(A, 1)
    lab.take()
    assert lab.waiting() == set()
    assert lab.ledger.rooms(A) == []
    assert (lab.intake.homes, lab.intake.counts, dict(lab.tracker)) == ({}, {}, {})


def test_success_leaves(known: Lab) -> None:
    """A room that succeeded is no longer shared, though its status is still read; clear() changes nothing more."""
    known.open(A, 1)
    known.take()
    known.statuses[1] = SUCCESS
    known.take()
    assert known.ledger.rooms(A) == []
    assert known.statuses[1] == SUCCESS
    known.clear(A, 1)
    known.take()
    assert known.intake.homes == {}


def test_a_local_failure_is_the_ledgers(known: Lab) -> None:
    """SGLang fails a room itself: the ledger has it failed with SGLang's reason, so that other ranks hear of it."""
    known.open(A, 1)
    known.records[1] = "KV transfer failed"
    known.statuses[1] = FAILED
    known.take()
    room = known.ledger.find(A, 1)
    assert room is not None
    assert room.status is Status.FAILED
    assert room.failure is not None
    assert room.failure.reason == "KV transfer failed"


def test_a_local_failure_of_a_room_that_waits(lab: Lab) -> None:
    """Failed before its node was known, not cleared yet: it never becomes open in the ledger."""
    lab.open(A, 1, 2)
    lab.take()
    lab.statuses[1] = FAILED
    lab.take()
    lab.info(A)
    lab.take()
    lab.alive(A)
    lab.take()
    assert set(lab.open_in_ledger(A)) == {2}
    lab.clear(A, 1)
    lab.take()
    assert lab.intake.counts == {A: 1}


def test_a_local_failure_before_first_contact_is_told_to_other_ranks(lab: Lab) -> None:
    """Opened and failed within the milliseconds of first contact: it was open, so the siblings are to hear of it."""
    told = Failed(lambda: lab.now, lambda: None)
    lab.ledger._notes = told
    lab.info(A)
    lab.open(A, 1)
    lab.take()
    lab.records[1] = "KV transfer failed"
    lab.statuses[1] = FAILED
    lab.take()
    assert [note.room.id for note in told.take()[0]] == [1]
    lab.alive(A)
    lab.take()
    assert lab.open_in_ledger(A) == {}


@pytest.mark.parametrize("between", ["cleared", "failed", "succeeded", "nothing"])
@pytest.mark.parametrize("turn", [True, False])
def test_a_number_used_again(known: Lab, between: str, turn: bool) -> None:
    """The same number opened again, cleared before or not, the loop turned between or not: one room, as of the later
    opening, that inherits neither status nor reason.
    """
    known.open(A, 1)
    if turn:
        known.take()
    if between == "cleared":
        known.clear(A, 1)
    elif between == "failed":
        known.records[1] = "it broke"
        known.statuses[1] = FAILED
    elif between == "succeeded":
        known.statuses[1] = SUCCESS
    known.now = 105.0
    known.open(A, 1)
    known.take()
    assert known.open_in_ledger(A) == {1: 105.0}
    assert known.statuses[1] == 1
    assert known.records == {}
    assert known.intake.counts == {A: 1}
    assert known.told == []


def test_a_number_used_again_at_another_node(known: Lab) -> None:
    """The number moves to B without clear(): A forgets it, and A's end does not touch it."""
    known.info(B)
    known.take()
    known.alive(B)
    known.open(A, 1)
    known.take()
    known.now = 105.0
    known.open(B, 1)
    known.take()
    assert (known.open_in_ledger(A), known.open_in_ledger(B)) == ({}, {1: 105.0})
    known.failed(A)
    known.take()
    assert known.open_in_sglang() == {1}


def test_a_late_failure_does_not_reach_the_next_request(known: Lab) -> None:
    """The verdict is delivered after the number has been opened again: the later request is untouched."""
    known.open(A, 1)
    known.take()
    room = known.ledger.find(A, 1)
    assert room is not None
    known.clear(A, 1)
    known.now = 101.0
    known.open(A, 1)
    assert not known.statuses.fail(1, room.opened_s, "late")
    assert known.statuses[1] == 1


# -- odd input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [None, "7", -1, 2**63, True, 1.5])
def test_no_room_id(known: Lab, room: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be shared is SGLang's alone: one warning, counted, and its neighbours are shared."""
    for _ in range(3):
        known.open(A, room)
    known.open(A, 5)
    known.clear(A, room)
    known.take()
    assert set(known.open_in_ledger(A)) == {5}
    assert known.intake.untracked == 3
    assert caplog.text.count("room_not_shared") == 1


@pytest.mark.parametrize("address", BAD_ADDRESSES)
def test_no_address(lab: Lab, address: str) -> None:
    """An address that nothing can be known by: its rooms are SGLang's alone, its info and its end raise nothing."""
    lab.info(address)
    lab.open(address, 1)
    lab.take()
    lab.drop(address)
    lab.clear(address, 1)
    lab.take()
    assert lab.intake.untracked >= 1
    assert lab.told == []
    assert lab.intake.counts == {}


def test_two_spellings_of_one_node(lab: Lab) -> None:
    """`LOCALHOST:80` and `localhost:80` are one node for the ledger and two for SGLang; each has its own rooms."""
    upper, lower = "LOCALHOST:80", "localhost:80"
    for name in (upper, lower):
        lab.info(name)
    lab.take()
    lab.alive(lower)
    lab.open(upper, 1)
    lab.open(lower, 2)
    lab.take()
    assert set(lab.open_in_ledger(lower)) == {1, 2}
    assert lab.intake.counts == {upper: 1, lower: 1}
    lab.drop(upper)
    assert lab.intake.keeps(lower)
    lab.clear(upper, 1)
    lab.clear(lower, 2)
    lab.take()
    lab.drop(lower)
    lab.take()
    assert not lab.intake.keeps(lower)
    lab.intake.forget(lower)
    assert (lab.intake.names, lab.intake.spelled) == ({}, set())


def test_an_address_in_use_is_not_forgotten(known: Lab) -> None:
    """Neither while SGLang knows the node nor while a room is there."""
    known.intake.forget(A)
    known.open(A, 1)
    known.drop(A)
    known.take()
    known.intake.forget(A)
    assert A in known.intake.spelled


def test_many_notes_are_taken_in_pieces(known: Lab) -> None:
    """More notes than one turn takes: it says that there is more, and nothing is lost."""
    known.open(A, *range(NOTES + 10))
    assert known.take().more
    assert not known.take().more
    assert len(known.open_in_ledger(A)) == NOTES + 10


# -- a model -------------------------------------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """SGLang and the store do what they like, in any order; the loop turns when it turns.

    The model knows for each open number when this life began, and by which of the node's instances it lives: the one
    that SGLang's info was fetched from, or, while it waits, the next one that info is fetched from.
    """

    rooms = st.integers(0, 4)
    addresses = st.sampled_from([A, B])

    def __init__(self) -> None:
        super().__init__()
        self.lab = Lab()
        self.lives: dict[int, dict[str, Any]] = {}  # open in SGLang, or failed and not cleared
        self.instance = dict.fromkeys((A, B), 0)  # that runs; even numbers run, odd ones are down
        self.info: dict[str, int | None] = dict.fromkeys((A, B))  # the instance that SGLang's info is about
        self.epoch = dict.fromkeys((A, B), 0)
        self.ends: dict[str, float | None] = dict.fromkeys((A, B))
        self.told = dict.fromkeys((A, B), 0)  # the instance that the ledger knows about

    def _tick(self) -> None:
        self.lab.now += 1.0

    @rule(address=addresses, room=rooms)
    def open(self, address: str, room: int) -> None:
        life = self.lives.get(room)
        if life is not None and self.lab.statuses.get(room, 0) in (1, 2, 3):
            return  # SGLang does not open a number twice while it is open
        self._tick()
        self.lab.open(address, room)
        assert self.lab.statuses[room] == 1, "nothing inherited"
        assert room not in self.lab.records
        self.lives[room] = {"at": address, "by": self.info[address], "cause": ""}

    @rule(room=rooms)
    def clear(self, room: int) -> None:
        life = self.lives.pop(room, None)
        if life is not None:
            self._tick()
            self.lab.clear(life["at"], room)

    @rule(room=rooms, status=st.sampled_from([2, TRANSFERRING, SUCCESS, FAILED]))
    def move(self, room: int, status: int) -> None:
        life, old = self.lives.get(room), self.lab.statuses.get(room)
        self._tick()
        if status == FAILED and life is not None:
            self.lab.records.setdefault(room, "here")
        if status == 2 and old is None:
            return
        self.lab.statuses[room] = status
        if life is None:
            assert room not in self.lab.statuses
        elif old in (FAILED, SUCCESS):
            assert self.lab.statuses[room] == old
        elif status == FAILED:
            life["cause"] = "here"

    @rule(address=addresses)
    def info_arrives(self, address: str) -> None:
        if self.instance[address] % 2 == 0 and self.info[address] is None:
            self._tick()
            self.lab.infos.asked[address] = self.lab.now
            self._tick()
            self.lab.info(address)
            self.info[address] = self.instance[address]
            for life in self.lives.values():
                if life["at"] == address and life["by"] is None:
                    life["by"] = self.instance[address]

    @rule(address=addresses)
    def node_ends(self, address: str) -> None:
        if self.instance[address] % 2 == 0:
            self._tick()
            self.instance[address] += 1
            self.ends[address] = self.lab.now

    @rule(address=addresses)
    def node_starts(self, address: str) -> None:
        if self.instance[address] % 2 == 1:
            self._tick()
            self.instance[address] += 1

    @rule(address=addresses)
    def verdict(self, address: str) -> None:
        """The ledger learns how the node is, and if an epoch ended, SGLang's info about it is dropped afterwards."""
        self._tick()
        if self.lab.ledger.book(address) is None:
            return
        now, end = self.lab.now, self.ends[address]
        moved = self.instance[address] - self.told[address]
        if self.epoch[address] == 0:
            self.epoch[address] = 1
        elif moved:
            self.epoch[address] += 1
        state = "failed" if self.instance[address] % 2 else "alive"
        age = None if end is None else int((now - end) * 1000)
        if state == "failed":
            self.lab.failed(address, self.epoch[address])
        else:
            self.lab.alive(address, self.epoch[address], age)
        self.told[address] = self.instance[address]

    @rule(address=addresses)
    def cleaned_up(self, address: str) -> None:
        """As _handle_node_failure: what SGLang knew of an instance that ended is dropped."""
        known = self.info[address]
        if known is not None and known < self.told[address]:
            self._tick()
            self.lab.drop(address)
            self.info[address] = None

    @rule(seconds=st.sampled_from([0.0, 0.0, 0.5]))
    def turn(self, seconds: float) -> None:
        self.lab.take(seconds)

    @invariant()
    def none_failed_falsely(self) -> None:
        for room, reason in self.lab.told:
            life = self.lives.get(room)
            if life is None or self.lab.statuses.get(room) != FAILED or life["cause"] == "here":
                continue
            if self.lab.records.get(room) == reason:
                by = life["by"]
                assert by is not None, f"room {room} had no node that could fail: {reason}"
                assert by != self.instance[life["at"]], f"room {room} lives at an instance that runs: {reason}"

    @precondition(lambda self: not self.lab.notes.queue and not self.lab.changed)
    @invariant()
    def none_lost(self) -> None:
        lab = self.lab
        for room in lab.open_in_sglang():
            at = self.lives[room]["at"]
            assert room in lab.open_in_ledger(at) or room in lab.waiting(), f"room {room} is nowhere"
        for at in (A, B):
            for room in lab.open_in_ledger(at):
                assert room in lab.open_in_sglang(), f"room {room} is open in the ledger alone"
            assert lab.intake.counts.get(at, 0) == sum(home == at for home in lab.intake.homes.values())

    def teardown(self) -> None:
        """In the end everybody learns everything; then whoever lives at an instance that ended has failed."""
        lab = self.lab
        for _ in range(3):
            lab.take()
            for address in (A, B):
                self.verdict(address)
                self.cleaned_up(address)
            lab.take()
        lab.take(2 * HOLD_S)
        for room in lab.open_in_sglang():
            life = self.lives[room]
            if life["by"] is not None:
                assert life["by"] == self.instance[life["at"]], f"room {room} waits for an instance that ended"
        self.none_failed_falsely()
        self.none_lost()


def test_model() -> None:
    """No room lost, none failed falsely, none inherited, whatever the order."""
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
