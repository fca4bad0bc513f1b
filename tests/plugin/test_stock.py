"""What stock SGLang does where the plug-in is installed and COORDINATOR_URL is unset: nothing of ours shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bed import Bed
from context import BACKENDS


@pytest.fixture
def bed() -> Iterator[Bed]:
    with Bed() as bed:
        yield bed


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_url_nothing_changes(bed: Bed, backend: str) -> None:
    """Plug-ins loaded, no COORDINATOR_URL: stock types, the threads of an unloaded process, no import of redis."""
    loaded, bare = bed.decode(backend), bed.decode(backend, plugins=False)
    stock = {"addr_to_rooms_tracker": "collections.defaultdict", "request_status": "builtins.dict"}
    assert loaded.ask(do="types") == stock == bare.ask(do="types")
    assert _kinds(loaded.ask(do="threads")) == _kinds(bare.ask(do="threads"))
    assert loaded.ask(do="modules", prefix="redis") == []
    assert loaded.ready["manager"] == bare.ready["manager"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rooms_open_through_a_real_prefill(bed: Bed, backend: str) -> None:
    """A real prefill of each backend registers, gives its route, and is told of the rooms; nothing left the machine."""
    node, rank = bed.prefill(backend), bed.decode(backend)
    assert rank.ask(do="ensure", address=node.address)
    rank.ask(do="open", address=node.address, rooms=[11, 12, 13])
    assert rank.ask(do="poll") == {"WaitingForInput": 3}
    sizes = rank.ask(do="sizes")
    assert sizes["tracker"] == {node.address: 3}
    assert sizes["pool"] == [f"{node.address}_0_0_0"]
    assert sizes["info"] == [node.address]
    rank.ask(do="abort", rooms=[11])
    assert rank.ask(do="states", rooms=[11, 12]) == {"11": "Failed", "12": "WaitingForInput"}
    assert rank.ask(do="outside") == node.ask(do="outside") == []


def test_a_dead_node_fails_its_rooms_after_two_beats(bed: Bed) -> None:
    """kill -9 of the prefill: stock fails every room in its own time, empties its tables and keeps the reason."""
    node, rank = bed.prefill("mooncake"), bed.decode("mooncake", env={"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2"})
    rank.ask(do="ensure", address=node.address)
    rank.ask(do="open", address=node.address, rooms=[1, 2, 3])
    killed = node.kill()
    seen = rank.ask(do="wait", address=node.address, timeout_s=40)
    assert seen["n"] == seen["of"] == 3
    assert seen["first"] - killed >= 2  # two beats, 2 s apart at the least
    sizes = rank.ask(do="sizes")
    assert (sizes["tracker"], sizes["pool"], sizes["info"]) == ({}, [], [])
    failure = rank.ask(do="failure", room=2)
    assert failure["type"] == "KVTransferError"
    assert failure["other_rank"] is False
    assert f"connection with prefill instance (bootstrap_addr: {node.address})" in failure["text"]


def _kinds(names: list[str]) -> list[str]:
    """Names of threads without the numbers that Python gives."""
    return sorted(name.split("-")[0] for name in names)
