"""One slot per address, every key declared (G12), and nothing in periodic work that scans the keyspace (CASE 50)."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import redis
from fakenode import Farm
from monitor import Monitor, keys_of, script_calls
from redis.crc import key_slot
from scriptlab import CATALOGUE, A, Case, Lab, N
from servers import Lanes, Server
from util import wait_until

from coordinator import PrefillNode, Settings, Worker
from coordinator.store import scripts

CASES = [pytest.param(case, id=case.id) for case in CATALOGUE]


@pytest.fixture
def lab(real_server: Server) -> Iterator[Lab]:
    with real_server.sync_client() as client:
        yield Lab(client)


@pytest.mark.parametrize("case", CASES)
def test_G12_one_slot_per_address(redis_server: Server, case: Case) -> None:
    """All keys of a call lie in the slot of its address's hash tag, and in the namespace."""
    with redis_server.sync_client() as client:
        op = case.arrange(Lab(client))
        slots = {key_slot(key.encode()) for key in op.keys}
        expected = key_slot(b"coordinator:addresses") if op.script == "discover" else key_slot(N.encode())
        assert slots == {expected}
        assert all(key.startswith("coordinator:") for key in op.keys)
        if op.script != "discover":
            assert all(f":{{{N}}}:" in key for key in op.keys)


def test_G12_every_key_that_a_script_touches_is_declared(real_server: Server, lab: Lab) -> None:
    """MONITOR over the whole catalogue: each command inside a script works on KEYS of its own call, nothing else."""
    with Monitor(real_server) as seen:
        for case in CATALOGUE:
            lab.client.flushall()
            lab.run(case.arrange(lab))
    calls = script_calls(seen)
    assert len(calls) > len(CATALOGUE)
    ran = {command.name for _, commands in calls for command in commands}
    assert {"RENAME", "UNLINK", "SSCAN", "ZADD", "XADD", "PUBLISH", "TIME", "HSETNX"} <= ran
    known: dict[tuple[str, ...], list[str]] = {}
    for declared, commands in calls:
        for command in commands:
            if command.words not in known:
                known[command.words] = keys_of(lab.client, command)
            assert set(known[command.words]) <= set(declared), command
            if command.name == "PUBLISH":
                assert command.words[1] == lab.keys.channel


def test_the_monitor_would_notice_an_undeclared_key(real_server: Server, lab: Lab) -> None:
    """The test above can fail: a script that touches a key beside its KEYS is seen doing it."""
    with Monitor(real_server) as seen:
        lab.client.eval("return redis.call('GET', KEYS[1] .. '2')", 1, "{t}1")
    ((declared, commands),) = script_calls(seen)
    assert [keys_of(lab.client, command) for command in commands] == [["{t}12"]]
    assert declared == ("{t}1",)


def test_the_strict_server_would_refuse_an_undeclared_slot(lanes: Lanes) -> None:
    """The strict lane can fail a script: with "#!lua" in front, a key of another slot is refused."""
    server = lanes.get("strict")
    assert isinstance(server, Server)
    with server.sync_client() as client, pytest.raises(redis.ResponseError, match="same slot"):
        client.eval("#!lua\nreturn redis.call('SET', 'elsewhere', '1', 'PX', '1000')", 1, "{t}1")


@pytest.mark.parametrize("name", scripts.names())
def test_no_script_builds_a_key(name: str) -> None:
    """Keys come from KEYS alone: no script knows the namespace, the hash tag or a key's spelling."""
    text = scripts.load(name).text
    assert "coordinator" not in text
    assert "'{'" not in text
    assert "..':" not in text.replace(" ", "").replace("'lost:'..epoch..':'..ARGV[i]", "")


def test_addresses_spread_over_slots() -> None:
    """The tag is the address, not the namespace: 64 addresses use more than half as many slots (CASE 52)."""
    assert len({key_slot(f"coordinator:{{10.0.0.{n}:8998}}:node".encode()) for n in range(64)}) > 32


# -- CASE 50 ----------------------------------------------------------------------------------------------------

BUSY = Settings(
    tick_s=0.05, lease_s=0.4, probe_interval_s=0.1, probe_timeout_s=0.5, retention_s=3, linger_s=0.2, call_timeout_s=2
)
SMALL = (":suspects",)
BIG_KINDS = (":rooms:", ":lost:", ":orphans:")


def _churn(worker: Worker, addresses: list[str], first: int, stop: threading.Event) -> None:
    for room_id in itertools.count(first):
        if stop.wait(0.002):
            return
        try:
            room = worker.join(addresses[room_id % len(addresses)], room_id)
        except Exception:  # a failed address refuses joins: that is part of this life
            continue
        if room_id % 3:
            room.leave()


def test_periodic_work_never_scans_the_keyspace(real_server: Server, lab: Lab) -> None:
    """Two workers and a node live through a dead worker and failures under MONITOR: no KEYS, no SCAN, no big DEL."""
    url, told, stop = real_server.url, threading.Event(), threading.Event()
    with Farm() as farm, Monitor(real_server) as seen:
        web = [farm.node(instance=f"life-{n}") for n in range(2)]
        addresses = [node.address for node in web]
        ghost = Lab(lab.client, settings=BUSY)
        with (
            PrefillNode(addresses[0], url, instance="life-0", settings=BUSY, on_orphans=lambda *_: told.set()) as node,
            Worker(url, name="one", settings=BUSY) as one,
            Worker(url, name="two", settings=BUSY) as two,
        ):
            assert node.wait_announced()
            ghost.open(A, tuple(range(1, 2001)), address=addresses[0])
            threads = [
                threading.Thread(target=_churn, args=(worker, addresses, first, stop))
                for worker, first in ((one, 10_000), (two, 50_000))
            ]
            for thread in threads:
                thread.start()
            try:
                wait_until(told.is_set, 20, "the dead worker's orphans")
                for address in addresses:
                    assert sum(one.fail_node(address, reason="operator").counts.values()) > 0
                wait_until(lambda: one.health()["counters"]["acks"] + two.health()["counters"]["acks"] >= 4, 20, "acks")
                wait_until(lambda: seen.saw("UNLINK", ":lost:"), 20, "a freed snapshot")
            finally:
                stop.set()
                for thread in threads:
                    thread.join(5)
    counts = Counter(command.name for command in seen.commands)
    assert counts["EVALSHA"] > 50
    assert counts["UNLINK"] > 0
    forbidden = {"KEYS", "SCAN", "SMEMBERS", "FLUSHALL", "FLUSHDB", "RANDOMKEY", "SORT", "SUNION", "SPOP"}
    assert not forbidden & set(counts)
    deleted = {key for command in seen.commands if command.name == "DEL" for key in command.words[1:]}
    assert all(key.endswith(SMALL) for key in deleted), deleted
    freed = {key for command in seen.commands if command.name == "UNLINK" for key in command.words[1:]}
    assert any(":lost:" in key for key in freed)
    assert any(":orphans:" in key for key in freed)
    for command in seen.commands:
        if command.name in ("SADD", "SREM"):
            assert len(command.words) <= 2 + max(2000, BUSY.batch_rooms)
        elif command.name in ("HGETALL", "ZRANGE", "HKEYS"):
            assert not any(kind in command.words[1] for kind in BIG_KINDS)
