"""What SGLang itself promises about rooms and nodes, checked on its real managers with the plug-in's tables in them.

One decode process of each backend serves all tests; every test has numbers and a node of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from bed import Bed, Decode, FakePrefill
from context import BACKENDS
from decoding import PATIENCE_S, await_clean, await_shared, await_states, fake, pace, python, reached
from servers import Server
from standins import version
from util import wait_until

numbers = itertools.count(1000, 100)
OLD = version() == "0.5.19"


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with Bed() as bed:
        yield bed


@pytest.fixture(scope="module", params=BACKENDS)
def rank(request: pytest.FixtureRequest, bed: Bed, store: Server) -> Iterator[Decode]:
    made = bed.decode(request.param, url=store.url, env=pace())
    yield made
    made.close()


@pytest.fixture
def node(bed: Bed, rank: Decode) -> FakePrefill:
    made = fake(bed)
    reached(rank, made)
    return made


@pytest.fixture
def room() -> int:
    return next(numbers)


def backend(rank: Decode) -> str:
    return str(rank.settings["backend"])


def status(rank: Decode, room: int) -> str | None:
    """What `request_status` holds."""
    code = "s = manager.request_status.get(room)\nresult = None if s is None else context.status_name(s)"
    found: str | None = python(rank, code, room=room)
    return found


def known(rank: Decode, room: int) -> dict[str, bool]:
    """Which of the manager's tables hold a room."""
    tables = ["request_status", "failure_records", "required_prefill_response_num_table", "prefill_response_tracker"]
    found: dict[str, bool] = python(rank, "result = {t: room in getattr(manager, t) for t in tables}",
                                    room=room, tables=tables)  # fmt: skip
    return found


def test_the_tables_are_ours(rank: Decode) -> None:
    """Loaded through the entry point: the two tables are the plug-in's, and it is said once in the log."""
    types = rank.ask(do="types")
    assert types == {
        "addr_to_rooms_tracker": "coordinator.sglang.tables.Tracker",
        "request_status": "coordinator.sglang.tables.StatusTable",
    }
    assert rank.log().count("sglang_plugged version=") == 1
    assert rank.log().count("rooms_shared worker=") == 1
    assert python(rank, "result = manager.request_status is manager._coordinator.statuses")


def test_the_end_of_a_node(rank: Decode, node: FakePrefill, room: int) -> None:
    """Pool, info and tracker of a node that ended are empty; open rooms have failed, those that succeeded have not."""
    rooms = [room, room + 1, room + 2]
    rank.ask(do="open", address=node.address, rooms=rooms)
    rank.ask(do="set", room=room, state="Success")
    assert rank.ask(do="sizes")["pool"]
    node.stop()
    await_states(rank, rooms[1:], "Failed")
    await_clean(rank, node.address)
    assert status(rank, room) == "Success"
    assert rank.ask(do="states", rooms=[room]) == {str(room): "Success"}
    assert not known(rank, room)["failure_records"]


def test_reason_and_flag_of_a_node_failure(rank: Decode, node: FakePrefill, room: int) -> None:
    """KVTransferError that names the node, and is not said to come from another rank; the record is used up."""
    rank.ask(do="open", address=node.address, rooms=[room])
    node.stop()
    await_states(rank, [room], "Failed")
    await_clean(rank, node.address)
    failure = rank.ask(do="failure", room=room)
    assert failure["type"] == "KVTransferError"
    assert failure["other_rank"] is False
    assert f"connection with prefill instance (bootstrap_addr: {node.address})" in failure["text"]
    assert not known(rank, room)["failure_records"]


@pytest.mark.parametrize("state", ["Failed", "Bootstrapping", "WaitingForInput", "Transferring", "Success"])
def test_only_an_opening_status_creates_a_room(rank: Decode, room: int, state: str) -> None:
    """A late status of a room that is not there creates nothing."""
    rank.ask(do="set", room=room, state=state)
    opening = state in ("Bootstrapping", "WaitingForInput")
    assert status(rank, room) == (state if opening else None)
    python(rank, "manager.request_status.pop(room, None)", room=room)


@pytest.mark.parametrize("state", ["Bootstrapping", "WaitingForInput", "Transferring", "Success"])
def test_failed_is_final(rank: Decode, node: FakePrefill, room: int, state: str) -> None:
    """Nothing follows Failed, not even Success."""
    rank.ask(do="open", address=node.address, rooms=[room])
    rank.ask(do="set", room=room, state="Failed")
    rank.ask(do="set", room=room, state=state)
    assert status(rank, room) == "Failed"
    assert rank.ask(do="states", rooms=[room]) == {str(room): "Failed"}


@pytest.mark.parametrize("state", ["Bootstrapping", "WaitingForInput", "Transferring", "Failed"])
def test_success_is_final(rank: Decode, node: FakePrefill, room: int, state: str) -> None:
    """Nothing follows Success: a status never moves down, and what has arrived is not lost."""
    rank.ask(do="open", address=node.address, rooms=[room])
    rank.ask(do="set", room=room, state="Success")
    rank.ask(do="set", room=room, state=state)
    assert status(rank, room) == "Success"


SAY = """
import zmq
def say(state, rank):
    if hasattr(manager, "apply_prefill_status"):
        manager.apply_prefill_status(bootstrap_room=room, status=context.status(state), prefill_rank=rank)
        return
    out = zmq.Context.instance().socket(zmq.PUSH)
    out.connect(f"tcp://127.0.0.1:{manager.rank_port}")
    out.send_multipart([str(x).encode() for x in (room, context.status(state), rank)])
    out.close(linger=5000)
for state, rank in words:
    say(state, rank)
"""


def say(rank: Decode, room: int, *words: tuple[str, int]) -> None:
    """Prefill ranks say how the transfer ended: by the version's own way, a call or a message."""
    if OLD and backend(rank) in ("common", "nixl"):
        pytest.skip("0.5.19: this backend has no message about the end of a transfer")
    if OLD and backend(rank) == "mori":
        pytest.skip("0.5.19: this backend packs its message in its own way")
    python(rank, SAY, room=room, words=words)


def test_success_needs_all_distinct_ranks(rank: Decode, node: FakePrefill, room: int) -> None:
    """Two ranks must say so: one that says it twice is one."""
    rank.ask(do="open", address=node.address, rooms=[room])
    python(rank, "manager.required_prefill_response_num_table[room] = 2", room=room)
    say(rank, room, ("Success", 0), ("Success", 0))
    wait_until(
        lambda: python(rank, "result = list(manager.prefill_response_tracker[room])", room=room) == [0], PATIENCE_S, "0"
    )
    assert status(rank, room) != "Success"
    say(rank, room, ("Success", 1))
    wait_until(lambda: status(rank, room) == "Success", PATIENCE_S, "both have said so")


def test_success_cannot_override_a_failure(rank: Decode, node: FakePrefill, room: int) -> None:
    """One rank failed; that the others succeed afterwards changes nothing."""
    rank.ask(do="open", address=node.address, rooms=[room])
    python(rank, "manager.required_prefill_response_num_table[room] = 1", room=room)
    say(rank, room, ("Failed", 0), ("Success", 1), ("Success", 0))
    wait_until(lambda: status(rank, room) == "Failed", PATIENCE_S, "failed")
    wait_until(
        lambda: python(rank, "result = len(manager.prefill_response_tracker.get(room, ()))", room=room) == 2,
        PATIENCE_S, "all words have arrived",
    )  # fmt: skip
    assert status(rank, room) == "Failed"
    failure = rank.ask(do="failure", room=room)
    assert failure["type"] == "KVTransferError"
    assert failure["other_rank"] is False


def test_success_cannot_recreate_a_cleared_room(rank: Decode, node: FakePrefill, room: int) -> None:
    """clear(), then the end of the transfer is said: no status, and the next request with the number starts anew."""
    rank.ask(do="open", address=node.address, rooms=[room, room + 1])
    rank.ask(do="clear", rooms=[room])
    say(rank, room, ("Success", 0), ("Failed", 0))
    python(rank, "manager.required_prefill_response_num_table[room] = 1", room=room + 1)
    say(rank, room + 1, ("Success", 0))
    wait_until(lambda: status(rank, room + 1) == "Success", PATIENCE_S, "words have been read")
    assert status(rank, room) is None
    rank.ask(do="open", address=node.address, rooms=[room])
    assert rank.ask(do="states", rooms=[room]) == {str(room): "WaitingForInput"}
    assert not known(rank, room)["failure_records"]


def test_clear_is_idempotent(rank: Decode, store: Server, node: FakePrefill, room: int) -> None:
    """Twice is once; the neighbour stays; nothing of the room is left anywhere."""
    rank.ask(do="open", address=node.address, rooms=[room, room + 1])
    await_shared(store, node.address, {room, room + 1})
    rank.ask(do="clear", rooms=[room])
    rank.ask(do="clear", rooms=[room])
    await_shared(store, node.address, {room + 1})
    assert not any(known(rank, room).values())
    assert rank.ask(do="states", rooms=[room + 1]) == {str(room + 1): "WaitingForInput"}
    wait_until(lambda: rank.ask(do="sizes")["tracker"].get(node.address) == 1, PATIENCE_S, "one is left")
    rank.ask(do="clear", rooms=[room + 1])
    await_shared(store, node.address, set())
    wait_until(lambda: node.address not in rank.ask(do="sizes")["tracker"], PATIENCE_S, "no empty set stays")


def test_abort_keeps_the_state_until_clear(rank: Decode, store: Server, node: FakePrefill, room: int) -> None:
    """An aborted room is Failed with SGLang's reason until it is cleared, and no longer shared."""
    rank.ask(do="open", address=node.address, rooms=[room])
    await_shared(store, node.address, {room})
    rank.ask(do="abort", rooms=[room])
    assert rank.ask(do="states", rooms=[room]) == {str(room): "Failed"}
    await_shared(store, node.address, set())
    clears = backend(rank) == "mori" and version() in ("0.5.19", "0.5.20", "0.5.21")  # abort() ends with clear()
    assert status(rank, room) == (None if clears else "Failed")
    failure: dict[str, Any] = rank.ask(do="failure", room=room)
    if not clears:
        assert "Aborted" in failure["text"]
        assert failure["other_rank"] is False
    assert not known(rank, room)["failure_records"]


def test_a_room_at_a_node_that_is_gone(rank: Decode, node: FakePrefill, room: int) -> None:
    """Opened after the node's info is gone: SGLang fails it itself, as stock, and says that the node is down."""
    rank.ask(do="open", address=node.address, rooms=[room])
    node.stop()
    await_states(rank, [room], "Failed")
    await_clean(rank, node.address)
    rank.ask(do="open", address=node.address, rooms=[room + 1])
    assert rank.ask(do="states", rooms=[room + 1]) == {str(room + 1): "Failed"}
    assert "is healthy before, but now it is down" in rank.ask(do="failure", room=room + 1)["text"]


def test_a_number_used_again_after_each_end(rank: Decode, store: Server, node: FakePrefill, room: int) -> None:
    """After Success, a failure and an abort, cleared or not: the next request with the number inherits nothing."""
    for end in ("Success", "Failed", "abort", "clear", "node"):
        rank.ask(do="open", address=node.address, rooms=[room])
        python(rank, "manager.prefill_response_tracker.setdefault(room, set()).update([5, 6])", room=room)
        if end == "abort":
            rank.ask(do="abort", rooms=[room])
        elif end == "clear":
            rank.ask(do="clear", rooms=[room])
        elif end == "node":
            node.stop()
            await_states(rank, [room], "Failed")
            await_clean(rank, node.address)
            node.start()
            wait_until(lambda: rank.ask(do="ensure", address=node.address), PATIENCE_S, "it is back")
        else:
            python(rank, "manager.record_failure(room, 'an old reason')", room=room)
            rank.ask(do="set", room=room, state=end)
        rank.ask(do="open", address=node.address, rooms=[room])
        assert rank.ask(do="states", rooms=[room]) == {str(room): "WaitingForInput"}, end
        assert not known(rank, room)["failure_records"], end
        assert python(rank, "result = list(manager.prefill_response_tracker.get(room, ()))", room=room) == [], end
        await_shared(store, node.address, {room})
    rank.ask(do="clear", rooms=[room])


def test_no_empty_set_comes_back_with_a_good_beat(rank: Decode, node: FakePrefill, room: int) -> None:
    """Good answers of a node without rooms make no entry in the tracker, nor after the node is gone."""
    rank.ask(do="open", address=node.address, rooms=[room])
    rank.ask(do="clear", rooms=[room])
    wait_until(lambda: node.address not in rank.ask(do="sizes")["tracker"], PATIENCE_S, "empty")
    seen = len(node.healths)
    wait_until(lambda: len(node.healths) >= seen + 3, PATIENCE_S, "it is probed without rooms")
    assert node.address not in rank.ask(do="sizes")["tracker"]
