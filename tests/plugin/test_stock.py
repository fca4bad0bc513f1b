"""What stock SGLang does where the plug-in is installed and COORDINATOR_URL is unset: nothing of ours shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bed import Bed
from context import BACKENDS
from util import wait_until


@pytest.fixture
def bed() -> Iterator[Bed]:
    with Bed() as bed:
        yield bed


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_url_nothing_changes(bed: Bed, backend: str) -> None:
    """Plug-ins loaded, no COORDINATOR_URL: stock types, the threads of an unloaded process, no import of redis."""
    loaded, bare = bed.decode(backend), bed.decode(backend, plugins=False)
    assert "Executed general plugin: coordinator" in loaded.log()  # by the entry point that is installed
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
    wait_until(lambda: node.ask(do="messages", tag="ABORT"), 10, "the prefill rank is told of the abort")
    [(_, port, frames)] = node.ask(do="messages", tag="ABORT")
    assert port == node.rank_ports[0]
    assert "11" in frames
    assert rank.ask(do="outside") == node.ask(do="outside") == []


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "common"])
def test_a_sender_meets_its_receiver(bed: Bed, backend: str) -> None:
    """A real sender waits for its receiver, is bootstrapped by it, and fails when the decode side aborts."""
    node, rank = bed.prefill(backend), bed.decode(backend)
    node.ask(do="send", rooms=[21, 22])
    assert node.ask(do="senders") == {"21": "Bootstrapping", "22": "Bootstrapping"}
    rank.ask(do="ensure", address=node.address)
    rank.ask(do="open", address=node.address, rooms=[21])
    wait_until(lambda: node.ask(do="senders")["21"] == "WaitingForInput", 10, "the sender is bootstrapped")
    rank.ask(do="abort", rooms=[21])
    wait_until(lambda: node.ask(do="senders") == {"21": "Failed", "22": "Bootstrapping"}, 10, "the sender fails")


def test_a_node_starts_again_at_its_address(bed: Bed) -> None:
    """The bed: SIGSTOP makes a node silent, SIGCONT brings it back, a restart answers at the same address."""
    patient = {"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "60"}  # no beat between the end and the start of the node
    node = bed.prefill("mooncake", tp_ranks=[0, 1], tp_size=2)
    rank = bed.decode("mooncake", tp_rank=1, tp_size=2, env=patient)
    node.pause()
    assert not rank.ask(do="ensure", address=node.address)
    node.resume()
    assert rank.ask(do="ensure", address=node.address)
    again = bed.restart(node)
    assert (again.address, node.alive) == (node.address, False)
    rank.ask(do="open", address=node.address, rooms=[31])
    assert rank.ask(do="poll") == {"WaitingForInput": 1}
    assert rank.ask(do="sizes")["pool"] == [f"{node.address}_0_0_1"]
    wait_until(lambda: len(again.ask(do="messages")) == 2, 10, "the rank of the new process is told")
    assert {port for _, port, _ in again.ask(do="messages")} == {again.rank_ports[1]}


def test_fake_nodes_stand_for_real_ones(bed: Bed) -> None:
    """The bed: rooms open at nodes in this process, /health is counted, and a hung one is silent."""
    one, other = bed.fakes(2)
    rank = bed.decode("mooncake")
    assert rank.ask(do="ensure", address=one.address)
    rank.ask(do="open", address=one.address, rooms=[1, 2])
    assert rank.ask(do="poll") == {"WaitingForInput": 2}
    other.hung = True
    assert not rank.ask(do="ensure", address=other.address)
    wait_until(lambda: one.healths, 20, "a beat at the node that is known")
    assert other.healths == []


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
