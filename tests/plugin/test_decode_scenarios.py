"""Eight stock decode ranks of each backend share rooms through the entry point, and nodes end in many ways."""

from __future__ import annotations

import pytest
from bed import Bed
from context import BACKENDS
from decoding import (
    PATIENCE_S,
    await_clean,
    await_shared,
    await_states,
    fake,
    pace,
    python,
    reached,
    shared,
)
from servers import Server, free_port
from util import wait_until

BACKEND = "mooncake"


@pytest.mark.parametrize("backend", BACKENDS)
def test_eight_ranks(bed: Bed, store: Server, backend: str) -> None:
    """Rooms of eight ranks are in Redis; kill -9 of the prefill fails every one in every rank, and none elsewhere."""
    dies, lives = bed.prefill(backend, url=store.url), bed.prefill(backend, url=store.url)
    ranks = bed.decodes(8, backend, url=store.url)
    mine, other = list(range(100)), list(range(500, 510))
    for node, rooms in ((dies, mine), (lives, other)):
        assert all(bed.ask(ranks, do="ensure", address=node.address))
        bed.ask(ranks, do="open", address=node.address, rooms=rooms)
        await_shared(store, node.address, set(rooms), workers=8)
    names = sorted(name.split("@")[0] for name in shared(store, dies.address))
    assert names == [f"decode-tp{n}" for n in range(8)]

    killed = dies.kill()
    seen = bed.ask(ranks, do="wait", address=dies.address, timeout_s=30)
    assert all(one["n"] == one["of"] == 100 for one in seen)
    last = [one["last"] - killed for one in seen]
    print(f"\n{backend}: kill -9 to the last of 800 rooms: {max(last):.2f} s, spread {max(last) - min(last):.3f} s")
    assert max(last) < 5
    for rank in ranks:
        await_clean(rank, dies.address)
    assert bed.ask(ranks, do="poll", address=lives.address) == [{"WaitingForInput": 10}] * 8
    await_shared(store, lives.address, set(other), workers=8)
    await_shared(store, dies.address, set())
    failures = bed.ask(ranks, do="failure", room=7)
    assert {(one["type"], one["other_rank"]) for one in failures} == {("KVTransferError", False)}
    assert len({one["text"] for one in failures}) == 1, "the same reason in every rank"
    assert not any(bed.ask([*ranks, lives], do="outside"))


def test_an_address_that_begins_another(bed: Bed, store: Server) -> None:
    """`127.0.0.1:2345` ends; rooms, info and pool of `127.0.0.1:23456` are untouched."""
    long = next(port for port in iter(free_port, 0) if port > 20000)
    short = long // 10
    rank, [ends, stays] = bed.decode(BACKEND, url=store.url, env=pace()), bed.fakes(2, ports=[short, long])
    assert stays.address.startswith(ends.address)
    reached(rank, ends, stays)
    rank.ask(do="open", address=ends.address, rooms=[1])
    rank.ask(do="open", address=stays.address, rooms=[2])
    ends.stop()
    await_states(rank, [1], "Failed")
    await_clean(rank, ends.address)
    sizes = rank.ask(do="sizes")
    assert sizes["pool"] == [f"{stays.address}_0_0_0"]
    assert sizes["info"] == [stays.address]
    assert rank.ask(do="states", rooms=[2]) == {"2": "WaitingForInput"}
    await_shared(store, stays.address, {2})


@pytest.mark.parametrize("backend", ["mooncake", "nixl", "mori"])
def test_a_restart_between_two_beats(bed: Bed, store: Server, backend: str) -> None:
    """The prefill is killed and started again at its address at once: old rooms fail soon; new requests reach the new
    instance's rank port, stay open, and are shared.
    """
    env = pace(probe_interval_s=5.0)  # seldom: the announcement tells
    old, rank = bed.prefill(backend, url=store.url), bed.decode(backend, url=store.url, env=env)
    reached(rank, old)
    rank.ask(do="open", address=old.address, rooms=[1, 2])
    await_shared(store, old.address, {1, 2})
    new = bed.restart(old)
    await_states(rank, [1, 2], "Failed")
    await_clean_of(rank, old.address, [1, 2])
    wait_until(lambda: rank.ask(do="ensure", address=new.address), PATIENCE_S, "the new one is reached")
    rank.ask(do="open", address=new.address, rooms=[3, 1])
    ports = python(
        rank, "result = [i['rank_port'] for infos in manager.connection_pool.values() for i in infos]"
    )  # fmt: skip
    assert ports == new.rank_ports
    await_shared(store, new.address, {1, 3})
    wait_until(lambda: len(new.ask(do="messages")) >= 2, PATIENCE_S, "the new instance has heard of them")
    python(rank, "time.sleep(1)")
    assert rank.ask(do="states", rooms=[3, 1]) == {"3": "WaitingForInput", "1": "WaitingForInput"}


def await_clean_of(rank: object, address: str, rooms: list[int]) -> None:
    """The failed rooms are cleared, as a scheduler does, and SGLang has dropped the old instance."""
    rank.ask(do="clear", rooms=rooms)  # type: ignore[attr-defined]
    await_clean(rank, address)  # type: ignore[arg-type]


def test_a_restart_of_a_prefill_without_the_plug_in(bed: Bed, store: Server) -> None:
    """No instance id, and back before the next probe: nobody can tell, as in stock SGLang. A probe that meets the gap
    does notice, and then old rooms fail and new ones reach the new instance.
    """
    old, rank = bed.prefill(BACKEND), bed.decode(BACKEND, url=store.url, env=pace())
    reached(rank, old)
    rank.ask(do="open", address=old.address, rooms=[1])
    await_shared(store, old.address, {1})
    old.kill()
    await_states(rank, [1], "Failed")
    await_clean_of(rank, old.address, [1])
    new = bed.restart(old)
    reached(rank, new)
    rank.ask(do="open", address=new.address, rooms=[2])
    await_shared(store, new.address, {2})
    assert rank.ask(do="states", rooms=[2]) == {"2": "WaitingForInput"}


def test_rooms_opened_before_their_node_is_up(bed: Bed, store: Server) -> None:
    """Requests that wait for a prefill to start are neither failed nor shared; once SGLang knows the node they are."""
    port = free_port()
    address, rank = f"127.0.0.1:{port}", bed.decode(BACKEND, url=store.url, env=pace())
    rank.ask(do="open", address=address, rooms=[1, 2], init=False)
    assert not rank.ask(do="ensure", address=address)
    python(rank, "time.sleep(1.5)")  # many probe intervals
    assert rank.ask(do="states", rooms=[1, 2]) == {"1": "Bootstrapping", "2": "Bootstrapping"}
    assert shared(store, address) == {}
    node = bed.prefill(BACKEND, port=port, url=store.url)
    reached(rank, node)
    await_shared(store, address, {1, 2})
    python(rank, "for made in rooms.values():\n    made.init(0)")
    assert rank.ask(do="states", rooms=[1, 2]) == {"1": "WaitingForInput", "2": "WaitingForInput"}
    node.kill()
    await_states(rank, [1, 2], "Failed")


RACE = """
import numpy
lost, opened, stop = [], [], threading.Event()
def scheduler():
    room = first
    while not stop.is_set():
        if manager.try_ensure_parallel_info(address):
            for _ in range(20):
                made = receiver(manager, address, room)
                made.init(0)
                rooms[room] = made
                opened.append(room)
                room += 1
                time.sleep(0.0005)
        else:
            time.sleep(0.001)
thread = threading.Thread(target=scheduler, daemon=True)
thread.start()
"""
TRUTH = """
b = manager._coordinator
ledger = {room.id: int(room.status) for room in b.worker.rooms(address)}
result = {"open": [], "nowhere": [], "phantom": []}
for room in opened:
    state = manager.request_status.get(room)
    if state in (1, 2, 3):
        result["open"].append(room)
        if not 0 < ledger.get(room, 0) < 4:
            result["nowhere"].append(room)
    elif 0 < ledger.get(room, 0) < 4:
        result["phantom"].append(room)
"""


@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
def test_rooms_opened_while_their_node_is_being_failed(bed: Bed, store: Server, backend: str) -> None:
    """A scheduler opens rooms without pause while its node ends and comes back, many times: in the end every room is
    Failed, or open and shared; none is open and unknown to the ledger.
    """
    rank, node = bed.decode(backend, url=store.url, env=pace(probe_interval_s=0.05)), fake(bed)
    node.instance = "0"
    address = node.address
    python(rank, RACE, address=address, first=1)
    for n in range(1, 13):
        wait_until(lambda: rank.ask(do="poll").get("WaitingForInput", 0) > 5, PATIENCE_S, "rooms are open")
        node.stop()
        if n % 2:  # found dead; else it is back before anybody looks
            await_clean_or_gone(rank, address)
        node.instance = str(n)
        node.start()
    wait_until(lambda: any(shared(store, address).values()), PATIENCE_S, "rooms at the last instance are shared")
    python(rank, "stop.set()\nthread.join(10)")

    def settled() -> bool:
        found = python(rank, TRUTH, address=address)
        members = [room for their in shared(store, address).values() for room in their]
        return not found["nowhere"] and not found["phantom"] and sorted(found["open"]) == sorted(members)

    wait_until(settled, PATIENCE_S, "every room is failed, or open and shared")
    found = python(rank, TRUTH, address=address)
    states = rank.ask(do="poll")
    print(f"\n{backend}: {states}, {len(found['open'])} open at the last instance")
    node.stop()
    wait_until(lambda: set(rank.ask(do="poll")) == {"Failed"}, PATIENCE_S, "the last ones fail with their node")


def await_clean_or_gone(rank: object, address: str) -> None:
    wait_until(lambda: address not in rank.ask(do="sizes")["info"], PATIENCE_S, "its info is dropped")  # type: ignore[attr-defined]
