"""What goes wrong inside and around a decode process: SGLang's code raises, a rank fails alone, the store is away."""

from __future__ import annotations

import itertools

import pytest
from bed import Bed
from decoding import (
    PATIENCE_S,
    await_clean,
    await_shared,
    await_states,
    fake,
    health,
    own_server,
    pace,
    python,
    reached,
    shared,
)
from servers import Server
from util import wait_until

BACKEND = "mooncake"
BAD = ("RuntimeError('planted')", "SystemExit(3)", "KeyboardInterrupt()")


@pytest.mark.parametrize("error", BAD)
def test_an_exception_inside_the_failure_handler(bed: Bed, store: Server, error: str) -> None:
    """It is logged and counted; the rooms fail all the same, pool and info are emptied, and the next node's end is
    found, with the handler broken or whole.
    """
    rank, nodes = bed.decode(BACKEND, url=store.url, env=pace()), bed.fakes(3)
    reached(rank, *nodes)
    for n, node in enumerate(nodes):
        rank.ask(do="open", address=node.address, rooms=[10 * n, 10 * n + 1])
    python(
        rank,
        f"def bad(address):\n    raise {error}\nmanager._handle_node_failure = bad",
    )
    for n, node in enumerate(nodes[:2]):
        node.stop()
        await_states(rank, [10 * n, 10 * n + 1], "Failed")
        await_clean(rank, node.address)
    assert health(rank)["sglang"]["errors"] == 2
    assert rank.log().count("sglang_failed method=_handle_node_failure") == 2
    python(rank, "del manager._handle_node_failure")
    nodes[2].stop()
    await_states(rank, [20, 21], "Failed")
    await_clean(rank, nodes[2].address)
    assert health(rank)["sglang"]["errors"] == 2


@pytest.mark.parametrize("error", BAD)
def test_an_exception_inside_a_backends_hook(bed: Bed, store: Server, error: str) -> None:
    """_on_heartbeat_success raises at each good beat: logged and counted, and the node's end is still found."""
    rank, node = bed.decode(BACKEND, url=store.url, env=pace()), fake(bed)
    python(
        rank,
        f"def bad(self, address):\n    raise {error}\n"
        "type(manager)._on_heartbeat_success = bad\n"
        "bridge = manager._coordinator\n"
        "if bridge._answered not in bridge._core.on_answer:\n    bridge.worker.on_node_answered(bridge._answered)",
    )
    reached(rank, node)
    rank.ask(do="open", address=node.address, rooms=[1, 2])
    wait_until(lambda: health(rank)["sglang"]["errors"] >= 2, PATIENCE_S, "it was called")
    assert "sglang_failed method=_on_heartbeat_success" in rank.log()
    assert rank.ask(do="states", rooms=[1, 2]) == {"1": "WaitingForInput", "2": "WaitingForInput"}
    node.stop()
    await_states(rank, [1, 2], "Failed")
    await_clean(rank, node.address)


def test_a_handler_that_hangs_delays_nobody(bed: Bed, store: Server) -> None:
    """One clean-up never returns: other nodes' rooms fail, and their clean-up is done."""
    rank, nodes = bed.decode(BACKEND, url=store.url, env=pace()), bed.fakes(3)
    reached(rank, *nodes)
    for n, node in enumerate(nodes):
        rank.ask(do="open", address=node.address, rooms=[n])
    python(
        rank,
        "stock, gate = manager._handle_node_failure, threading.Event()\n"
        "manager._handle_node_failure = lambda a: gate.wait() if a == hung else stock(a)",
        hung=nodes[0].address,
    )
    python(rank, "globals()['hung'] = hung", hung=nodes[0].address)
    for n, node in enumerate(nodes):
        node.stop()
        await_states(rank, [n], "Failed")
    await_clean(rank, nodes[1].address, nodes[2].address)
    python(rank, "gate.set()")
    await_clean(rank, nodes[0].address)


def test_info_fetched_while_the_handler_still_works_is_kept(bed: Bed, store: Server) -> None:
    """SGLang has dropped the old info and fetched the next instance's before its handler returned: that one stays."""
    rank, node = bed.decode(BACKEND, url=store.url, env=pace()), fake(bed)
    reached(rank, node)
    rank.ask(do="open", address=node.address, rooms=[1])
    python(
        rank,
        "stock, info = manager._handle_node_failure, manager.prefill_info_table[address]\n"
        "def slow(address):\n"
        "    stock(address)\n"
        "    manager.prefill_info_table[address] = info\n"
        "manager._handle_node_failure = slow",
        address=node.address,
    )
    node.stop()
    await_states(rank, [1], "Failed")
    wait_until(lambda: health(rank)["sglang"]["cleaned"] == 1, PATIENCE_S, "cleaned up")
    python(rank, "time.sleep(0.2)")
    assert rank.ask(do="sizes")["info"] == [node.address]


def test_a_clean_up_fails_no_number_that_is_in_use_again(bed: Bed, store: Server) -> None:
    """SGLang's handler has listed the rooms and stands still; the number is opened again; then it goes on."""
    rank, node = bed.decode(BACKEND, url=store.url, env=pace()), fake(bed)
    reached(rank, node)
    rank.ask(do="open", address=node.address, rooms=[1])
    python(
        rank,
        "import sys\n"
        "gate, at_gate = threading.Event(), threading.Event()\n"
        "common = sys.modules['sglang.srt.disaggregation.common.conn']\n"
        "stock = common.CommonKVReceiver.disconnect_endpoint\n"
        "def slow(endpoint):\n"
        "    at_gate.set()\n"
        "    gate.wait()\n"
        "    stock(endpoint)\n"
        "common.CommonKVReceiver.disconnect_endpoint = slow",
    )
    node.stop()
    await_states(rank, [1], "Failed")
    python(rank, "at_gate.wait(10)")
    rank.ask(do="clear", rooms=[1])
    node.start()
    wait_until(lambda: rank.ask(do="ensure", address=node.address), PATIENCE_S, "it is back")
    rank.ask(do="open", address=node.address, rooms=[1])
    python(rank, "gate.set()")
    wait_until(lambda: health(rank)["sglang"]["cleaned"] == 1, PATIENCE_S, "cleaned up")
    assert rank.ask(do="states", rooms=[1]) == {"1": "WaitingForInput"}
    assert rank.ask(do="sizes")["records"] == 0


def test_a_clean_up_that_waited_too_long_drops_nothing_new(bed: Bed, store: Server) -> None:
    """Ordered while the old info was there, done after the next instance's was fetched: that one stays."""
    rank, node = bed.decode(BACKEND, url=store.url, env=pace()), fake(bed)
    reached(rank, node)
    python(
        rank,
        "cleaner = manager._coordinator.cleaner\n"
        "info = manager.prefill_info_table[address]\n"
        "cleaner._threads += 100\n"  # none is free
        "cleaner.clean(address)\n"
        "with manager.connection_lock:\n"
        "    manager.prefill_info_table.pop(address)\n"
        "manager.prefill_info_table[address] = info\n"
        "cleaner._threads -= 99\n"
        "cleaner._run()",
        address=node.address,
    )
    assert rank.ask(do="sizes")["info"] == [node.address]


def test_a_room_that_fails_in_one_rank_fails_in_all(bed: Bed, store: Server) -> None:
    """Aborted in one of three ranks: Failed in all three, said to come from another rank; another engine's room of that
    number, and the other rooms, stay. The flag is kept when the node ends afterwards.
    """
    env = pace(group="engine-a")
    ranks = bed.decodes(3, BACKEND, url=store.url, env=env)
    other, node = bed.decode(BACKEND, url=store.url, env=pace(group="engine-b")), fake(bed)
    for rank in (*ranks, other):
        reached(rank, node)
        rank.ask(do="open", address=node.address, rooms=[1, 2, 3])
    await_shared(store, node.address, {1, 2, 3}, workers=4)
    ranks[0].ask(do="abort", rooms=[1])
    for rank in ranks:
        await_states(rank, [1], "Failed")
    failure = ranks[1].ask(do="failure", room=1)
    assert failure["other_rank"] is True
    assert failure["type"] == "KVTransferError"
    assert ranks[0].ask(do="failure", room=1)["other_rank"] is False
    for rank in ranks:
        assert rank.ask(do="states", rooms=[2, 3]) == {"2": "WaitingForInput", "3": "WaitingForInput"}
    node.stop()
    for rank in ranks:
        await_states(rank, [2, 3], "Failed")
        await_clean(rank, node.address)
    await_states(other, [1, 2, 3], "Failed")
    assert "Lost connection" in other.ask(do="failure", room=1)["text"]
    assert ranks[2].ask(do="failure", room=1)["other_rank"] is True
    assert ranks[2].ask(do="failure", room=2)["other_rank"] is False


def test_a_number_used_again_after_a_failure_in_another_rank(bed: Bed, store: Server) -> None:
    """Both ranks clear the failed room and open the number again at once: the new rooms stay open and are shared."""
    ranks, node = bed.decodes(2, BACKEND, url=store.url, env=pace()), fake(bed)
    for rank in ranks:
        reached(rank, node)
    for _ in range(10):
        bed.ask(ranks, do="open", address=node.address, rooms=[1])
        ranks[0].ask(do="abort", rooms=[1])
        await_states(ranks[1], [1], "Failed")
        bed.ask(ranks, do="clear", rooms=[1])
        bed.ask(ranks, do="open", address=node.address, rooms=[1])
        await_shared(store, node.address, {1}, workers=2)
        python(ranks[0], "time.sleep(0.3)")  # longer than a second look at who has the room
        for rank in ranks:
            assert rank.ask(do="states", rooms=[1]) == {"1": "WaitingForInput"}
        bed.ask(ranks, do="clear", rooms=[1])


def test_the_store_stops_and_comes_back(bed: Bed) -> None:
    """Without Redis managers open rooms and fail those of a node that ends; with Redis again, open rooms are shared."""
    servers = own_server()
    own = next(servers)
    rank = bed.decode(BACKEND, url=own.url, env=pace(call_timeout_s=0.5, retry_s=1))
    ends, stays, later = bed.fakes(3)
    reached(rank, ends, stays)
    rank.ask(do="open", address=ends.address, rooms=[1, 2])
    rank.ask(do="open", address=stays.address, rooms=[11])
    await_shared(own, ends.address, {1, 2})
    own.kill()
    wait_until(lambda: not health(rank)["store"]["reachable"], PATIENCE_S, "the store is away")
    reached(rank, later)
    rank.ask(do="open", address=later.address, rooms=[21])
    rank.ask(do="open", address=stays.address, rooms=[12])
    ends.stop()
    await_states(rank, [1, 2], "Failed")
    await_clean(rank, ends.address)
    assert "bootstrap_addr" in rank.ask(do="failure", room=1)["text"]
    assert set(rank.ask(do="states", rooms=[11, 12, 21]).values()) == {"WaitingForInput"}
    own.start()
    await_shared(own, stays.address, {11, 12})
    await_shared(own, later.address, {21})
    await_shared(own, ends.address, set())
    assert set(rank.ask(do="states", rooms=[11, 12, 21]).values()) == {"WaitingForInput"}
    later.stop()
    await_states(rank, [21], "Failed")
    servers.close()


def test_the_store_is_not_there_at_the_start(bed: Bed) -> None:
    """A manager that starts before Redis serves; once Redis is there, its rooms are shared."""
    servers = own_server()
    own = next(servers)
    own.kill()
    rank, node = bed.decode(BACKEND, url=own.url, env=pace(call_timeout_s=0.5, retry_s=1)), fake(bed)
    reached(rank, node)
    rank.ask(do="open", address=node.address, rooms=[1])
    assert rank.ask(do="states", rooms=[1]) == {"1": "WaitingForInput"}
    own.start()
    await_shared(own, node.address, {1})
    servers.close()


def test_shutdown(bed: Bed, store: Server) -> None:
    """SGLang's teardown sets its event: the thread ends, our threads with it, and the rooms leave Redis."""
    rank, node = bed.decode(BACKEND, url=store.url, env=pace()), fake(bed)
    if not python(rank, "result = hasattr(manager, '_heartbeat_shutdown')"):
        pytest.skip("this version has no teardown")
    reached(rank, node)
    rank.ask(do="open", address=node.address, rooms=[1, 2])
    await_shared(store, node.address, {1, 2})
    assert "HeartbeatChecker" in rank.ask(do="threads")
    rank.ask(do="shutdown")

    def ours() -> list[str]:
        return [name for name in rank.ask(do="threads") if name.startswith(("coordinator", "HeartbeatChecker"))]

    wait_until(lambda: not ours(), PATIENCE_S, f"threads have ended: {ours()}")
    assert not any(shared(store, node.address).values())
    rank.ask(do="open", address=node.address, rooms=[3])  # raises nothing
    rank.ask(do="clear", rooms=[1, 2, 3])


def test_dead_addresses_leave_nothing(bed: Bed, store: Server) -> None:
    """Nodes that came and went leave nothing: tables, threads, and after a while the ledger's books."""
    quick = pace(lease_s=0.6, tick_s=0.15, probe_interval_s=0.3)
    rank, stays = bed.decode(BACKEND, url=store.url, env=quick), fake(bed)
    reached(rank, stays)
    rank.ask(do="open", address=stays.address, rooms=[0])
    await_shared(store, stays.address, {0})
    threads = len(rank.ask(do="threads"))
    numbers = itertools.count(1)
    for _ in range(4):
        nodes = [fake(bed) for _ in range(50)]
        rooms = {node.address: next(numbers) for node in nodes}
        python(
            rank,
            "for address, room in rooms_at.items():\n"
            "    assert manager.try_ensure_parallel_info(address)\n"
            "    made = receiver(manager, address, room)\n    made.init(0)\n    rooms[room] = made",
            rooms_at=rooms,
        )
        for node in nodes:
            node.stop()
        await_states(rank, list(rooms.values()), "Failed", 60)
        rank.ask(do="clear", rooms=list(rooms.values()))
    wait_until(lambda: rank.ask(do="sizes")["info"] == [stays.address], 60, "info")
    wait_until(lambda: list(rank.ask(do="sizes")["tracker"]) == [stays.address], 60, "tracker")
    sizes = rank.ask(do="sizes")
    assert sizes["pool"] == [f"{stays.address}_0_0_0"]
    assert sizes["statuses"] == 1
    wait_until(lambda: len(rank.ask(do="threads")) <= threads + 1, 60, "threads")
    kept = (
        "b = manager._coordinator\n"
        "result = [len(b._core.ledger.books()), len(b.intake.names), len(b.intake.spelled), len(b.infos._periods)]"
    )
    wait_until(lambda: python(rank, kept) == [1, 1, 1, 1], 60, f"all forgotten: {python(rank, kept)}")
    assert rank.ask(do="states", rooms=[0]) == {"0": "WaitingForInput"}


def test_addresses_that_never_were_are_forgotten(bed: Bed, store: Server) -> None:
    """Requests that name nodes which never come up, and end: nothing is remembered of those addresses."""
    rank = bed.decode(BACKEND, url=store.url, env=pace())
    for n in range(50):
        rank.ask(do="open", address=f"127.0.0.1:{1000 + n}", rooms=[n], init=False)
    rank.ask(do="clear", rooms=list(range(50)))
    kept = (
        "b = manager._coordinator\n"
        "result = [len(b.intake.names), len(b.intake.spelled), len(manager.addr_to_rooms_tracker)]"
    )
    wait_until(lambda: python(rank, kept) == [0, 0, 0], PATIENCE_S, f"forgotten: {python(rank, kept)}")
