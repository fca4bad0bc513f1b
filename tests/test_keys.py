"""Keys: one spelling each, one slot per address, no two things under one key; bad addresses get no key (CASE 54)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from ipaddress import IPv6Address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from monitor import Monitor
from redis.crc import key_slot
from servers import Server

from coordinator import InvalidAddress, PrefillNode, Settings, Status, Worker
from coordinator.address import canonical
from coordinator.store.keys import Keys

A, N = "decode-0#aaaaaaaa", "10.0.0.5:8998"
KEYS = Keys("coordinator")

SPELLED = {
    KEYS.addresses: "coordinator:addresses",
    KEYS.channel: "coordinator:events",
    KEYS.node(N): "coordinator:{10.0.0.5:8998}:node",
    KEYS.workers(N): "coordinator:{10.0.0.5:8998}:workers",
    KEYS.rooms(N, A): "coordinator:{10.0.0.5:8998}:rooms:decode-0#aaaaaaaa",
    KEYS.worker(N, A): "coordinator:{10.0.0.5:8998}:worker:decode-0#aaaaaaaa",
    KEYS.aborts(N, A): "coordinator:{10.0.0.5:8998}:aborts:decode-0#aaaaaaaa",
    KEYS.suspects(N): "coordinator:{10.0.0.5:8998}:suspects",
    KEYS.pending(N): "coordinator:{10.0.0.5:8998}:pending",
    KEYS.lost(N, 7, A): "coordinator:{10.0.0.5:8998}:lost:7:decode-0#aaaaaaaa",
    KEYS.orphans(N, A): "coordinator:{10.0.0.5:8998}:orphans:decode-0#aaaaaaaa",
    KEYS.events(N): "coordinator:{10.0.0.5:8998}:events",
}

PORT = st.integers(1, 65535)


def _text(host: object, port: int) -> str:
    return f"[{host}]:{port}" if isinstance(host, IPv6Address) else f"{host}:{port}"


HOSTS = (
    st.ip_addresses(v=4, network="10.0.0.0/8")
    | st.ip_addresses(v=6, network="2001:db8::/32")
    | st.from_regex(r"[a-z][a-z0-9_]{0,9}(\.svc)?", fullmatch=True)
)
ADDRESSES = st.builds(_text, HOSTS, PORT)
WORKERS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}#[0-9a-f]{8}(\.[1-9])?", fullmatch=True)
EPOCHS = st.integers(0, 2**53)


@pytest.mark.parametrize(("key", "text"), SPELLED.items())
def test_every_key_is_spelled_as_documented(key: str, text: str) -> None:
    """The texts that people type into redis-cli."""
    assert key == text


def test_no_key_is_left_out_of_this_table() -> None:
    """A new key in keys.py needs its line above."""
    spelled = {name for name in dir(Keys) if not name.startswith("_")} - {"namespace", "snapshot"}
    assert len(spelled) == len(SPELLED)


@pytest.mark.parametrize("field", [f"lost:7:{A}", f"orphans:{A}"])
def test_a_field_of_pending_names_its_snapshot(field: str) -> None:
    """What the pending hash says is the tail of the snapshot's key."""
    assert KEYS.snapshot(N, field) in (KEYS.lost(N, 7, A), KEYS.orphans(N, A))


def _all(address: str, worker: str, epoch: int) -> list[str]:
    k = KEYS
    shared = [k.node(address), k.workers(address), k.suspects(address), k.pending(address), k.events(address)]
    own = [k.rooms(address, worker), k.worker(address, worker), k.aborts(address, worker), k.orphans(address, worker)]
    return [*shared, *own, k.lost(address, epoch, worker)]


@given(address=ADDRESSES, worker=WORKERS, epoch=EPOCHS)
def test_G12_all_keys_of_an_address_share_its_slot(address: str, worker: str, epoch: int) -> None:
    """For every canonical address and worker id the hash tag is the whole address, and nothing else is in braces."""
    assert canonical(address) == address
    keys = _all(address, worker, epoch)
    assert {key_slot(key.encode()) for key in keys} == {key_slot(address.encode())}
    for key in keys:
        assert (key.count("{"), key.count("}")) == (1, 1)
        assert key.isascii()
        assert key.isprintable()
        assert not set(key) & set("*?\\\"' \t\r\n")


@given(
    one=st.tuples(ADDRESSES, WORKERS, EPOCHS),
    two=st.tuples(ADDRESSES, WORKERS, EPOCHS),
)
def test_no_two_things_share_a_key(one: tuple[str, str, int], two: tuple[str, str, int]) -> None:
    """Keys of different kinds, addresses or workers never meet, whatever their texts."""
    assert len(set(_all(*one))) == 10
    if one[0] != two[0]:
        assert not set(_all(*one)) & set(_all(*two))
    elif one[1] != two[1]:
        assert not set(_all(*one)[5:]) & set(_all(*two)[5:])


def test_namespaces_are_apart() -> None:
    """Two namespaces share no key, even if one is a prefix of the other."""
    assert Keys("coordinator").node(N) != Keys("coordinator2").node(N)
    assert not Keys("coordinator2").node(N).startswith("coordinator:")


HOSTILE = {
    "braces": "10.0.0.5{x}:8998",
    "closing brace": "10.0.0.5}:8998",
    "star": "*:8998",
    "colons": "a:b:8998",
    "glob": "h[ab]:8998",
    "carriage return": "h\r\nFLUSHALL\r\n:8998",
    "nul": "h\0:8998",
    "space": "h h:8998",
    "emoji": "h\N{PILE OF POO}:8998",
    "lone surrogate": "h\ud800:8998",
    "ten kilobytes": "h" * 10_240 + ":8998",
    "not text": 8998,
    "bytes": b"10.0.0.5:8998",
    "nothing": None,
}


def _enter_room(worker: Worker, address: Any) -> None:
    with worker.room(address, 1):
        raise AssertionError("the room was opened")


def test_hostile_addresses_are_refused_before_anything_is_sent(redis_server: Server) -> None:
    """Every public call refuses them by InvalidAddress, keeps nothing, and the server never hears of them (CASE 54)."""
    settings = Settings(tick_s=0.05, lease_s=1, call_timeout_s=2)
    with Worker(redis_server.url, name="decode", settings=settings) as worker:
        assert worker.flush(5)
        with Monitor(redis_server) as seen:
            for name, address in HOSTILE.items():
                text: Any = address
                calls: dict[str, Callable[[], object]] = {
                    "join": partial(worker.join, text, 1),
                    "room": partial(_enter_room, worker, text),
                    "update": partial(worker.update, text, 1, Status.TRANSFERRING),
                    "leave": partial(worker.leave, text, 1),
                    "status": partial(worker.status, text, 1),
                    "fail_node": partial(worker.fail_node, text, reason="x"),
                    "report": partial(worker.report_transfer_error, text, "x"),
                    "node": partial(PrefillNode, text, redis_server.url, settings=settings),
                }
                for call in calls.values():
                    with pytest.raises(InvalidAddress) as caught:
                        call()
                    assert len(str(caught.value)) < 500, name
                    assert str(caught.value).isprintable(), name
        assert worker.health()["addresses"] == {}
    assert not [command for command in seen.commands if command.name in ("EVAL", "EVALSHA", "PUBLISH")]
    with redis_server.sync_client() as client:
        assert client.keys("*{*") == []
