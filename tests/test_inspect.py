"""The read-only views, on every lane, and the doctor on real servers with and without permissions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

import pytest
import redis
from filled import BIG, N0, N1, A, B, C, Filled
from servers import FakeLane, Server
from util import wait_until

from coordinator import doctor, inspect
from coordinator.config import Settings
from coordinator.errors import StoreRefused, StoreUnavailable
from coordinator.protocol import Stats
from coordinator.store.connect import sync_client
from coordinator.store.keys import Keys


@pytest.fixture
def filled(store_server: FakeLane | Server) -> Iterator[Filled]:
    with store_server.sync_client() as client:
        store = Filled(client)
        store.fill()
        yield store


@pytest.fixture
def client(redis_server: Server) -> Iterator[redis.Redis]:
    with redis_server.sync_client() as client:
        yield client


def test_addresses_are_the_index_sorted(filled: Filled) -> None:
    """Every address that was marked as used is listed, without reading any key of it."""
    assert inspect.addresses(filled.client, filled.keys) == [N0, N1]


def test_view_of_a_living_address(filled: Filled) -> None:
    """State, epoch, instance, exact rooms, counts by status and the oldest room are those that the workers wrote."""
    view = inspect.address_view(filled.client, filled.keys, N0)
    assert view is not None
    assert (view.state, view.draining, view.epoch, view.instance) == ("alive", False, 1, "life-1")
    assert (view.watchers, view.rooms) == (2, 4)
    assert view.by_status == {"bootstrapping": 2, "waiting_for_input": 1, "transferring": 1}
    assert view.oldest == inspect.RoomView(BIG, A, "transferring", 5000)
    assert [(w.worker, w.rooms) for w in view.workers] == [(A, 3), (B, 1)]
    assert all(0 < w.lease_left_ms <= 5000 for w in view.workers)
    assert (view.failure, view.votes, view.pending) == (None, (), {})
    assert view.announced_age_ms is not None
    assert view.announced_age_ms < 5000


def test_view_after_a_failure(filled: Filled) -> None:
    """Cause, reason, author and snapshots are shown; the rooms are gone and so are the figures about them."""
    filled.fail(N0, "cable pulled")
    view = inspect.address_view(filled.client, filled.keys, N0)
    assert view is not None
    assert (view.state, view.epoch, view.rooms) == ("failed", 2, 0)
    assert view.failure is not None
    assert (view.failure.cause, view.failure.reason, view.failure.by) == ("node_failed", "cable pulled", "tester")
    assert 0 <= view.failure.age_ms < 5000
    assert view.pending == {f"lost:1:{A}": 3, f"lost:1:{B}": 1}
    assert (sum(view.by_status.values()), view.oldest) == (0, None)
    other = inspect.address_view(filled.client, filled.keys, N1)
    assert other is not None
    assert (other.state, other.rooms, other.failure) == ("alive", 1, None)


def test_draining_and_votes_are_shown(filled: Filled) -> None:
    """A node that drains says so, and a vote against a node names the voter."""
    filled.node(N0, "life-1", info='{"rank": 0}', draining=True)
    filled.store.run(filled.ops.suspect(N0, A, 1, True, "timeout"))
    view = inspect.address_view(filled.client, filled.keys, N0)
    assert view is not None
    assert (view.draining, view.info, view.state, view.votes) == (True, '{"rank": 0}', "suspect", (A,))


def test_an_expired_lease_is_negative_and_no_watcher(filled: Filled) -> None:
    """A worker past its lease stays listed until it is reaped, but watches nothing."""
    filled.client.zadd(filled.keys.workers(N0), {A: 1000})
    view = inspect.address_view(filled.client, filled.keys, N0)
    assert view is not None
    assert view.watchers == 1
    assert {w.worker: w.lease_left_ms < 0 for w in view.workers} == {A: True, B: False}


def test_an_unknown_address_is_none_and_left_out(filled: Filled) -> None:
    """Looking at an address that the store does not know shows nothing and writes nothing."""
    before = sorted(filled.client.scan_iter())
    assert inspect.address_view(filled.client, filled.keys, "10.9.9.9:1") is None
    views = inspect.address_views(filled.client, filled.keys, [N1, "10.9.9.9:1", N0])
    assert [view.address for view in views] == [N1, N0]
    assert sorted(filled.client.scan_iter()) == before


def test_views_of_many_addresses_cost_few_round_trips(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """150 addresses with two workers each are seen in three round trips, and no KEYS or SCAN is among them."""
    store = Filled(client)
    given = [f"10.1.0.{i}:8998" for i in range(1, 151)]
    for address in given:
        store.rooms(address, A, (1, 2), stats=Stats(2, 0, 0, ""))
        store.rooms(address, B, (3,), stats=Stats(1, 0, 0, ""))
    trips: list[bytes] = []
    send: Callable[..., None] = redis.connection.Connection.send_packed_command

    def counted(self: redis.connection.Connection, command: Iterable[bytes], check_health: bool = True) -> None:
        command = list(command)
        trips.append(b"".join(command))
        send(self, command, check_health)

    monkeypatch.setattr(redis.connection.Connection, "send_packed_command", counted)
    views = inspect.address_views(client, store.keys, given)
    assert [view.rooms for view in views] == [3] * 150
    assert len(trips) == 3
    assert not any(word in sent for sent in trips for word in (b"$4\r\nKEYS", b"$4\r\nSCAN"))


def test_rooms_come_in_bounded_pieces(filled: Filled) -> None:
    """20,000 rooms of one worker come complete, in many pieces, together with the other worker's."""
    mine = range(BIG, BIG + 20_000)
    for start in range(0, 20_000, 5000):
        filled.client.sadd(filled.keys.rooms(N0, A), *mine[start : start + 5000])
    pieces = list(inspect.rooms(filled.client, filled.keys, N0, piece=500))
    assert max(len(rooms) for _, rooms in pieces) <= 1000
    assert {room for worker, rooms in pieces if worker == A for room in rooms} == {1, 2, *mine}
    assert {room for worker, rooms in pieces if worker == B for room in rooms} == {1}


def test_events_are_in_order_and_of_one_address_or_all(filled: Filled) -> None:
    """The trail of one address, and of all merged by time, with the words of the scripts."""
    filled.fail(N0, "cable pulled")
    one = list(inspect.events(filled.client, filled.keys, N0))
    assert [event.kind for event in one] == ["registered", "failed"]
    assert one[1].fields == {"epoch": "1", "by": "tester", "reason": "cable pulled", "rooms": "4"}
    every = list(inspect.events(filled.client, filled.keys))
    assert {event.address for event in every} == {N0, N1}
    assert [event.at_ms for event in every] == sorted(event.at_ms for event in every)
    assert [event.kind for event in inspect.events(filled.client, filled.keys, N0, limit=1)] == ["failed"]


@pytest.mark.parametrize("address", [N0, None])
def test_follow_goes_on_where_the_backlog_ended(real_server: Server, address: str | None) -> None:
    """Each event comes exactly once: those from before, then those that happen, over a pause of the store."""
    with real_server.client(timeout_s=0.5) as client, real_server.sync_client() as writer:
        store, trouble = Filled(writer), threading.Event()
        store.fill()
        followed = inspect.follow(client, store.keys, address, poll_s=0.05, trouble=lambda exc: trouble.set())
        before = list(islice(followed, 1 if address else 2))
        assert {event.kind for event in before} == {"registered"}
        store.fail(N0)
        assert [event.kind for event in islice(followed, 1)] == ["failed"]
        got: list[inspect.Event] = []
        reader = threading.Thread(target=lambda: got.extend(islice(followed, 1)))
        real_server.pause()
        reader.start()
        wait_until(trouble.is_set, what="the follower noticing that the store is away")
        real_server.resume()
        store.node(N0, "life-2")
        reader.join(5)
        assert [(event.address, event.kind) for event in got] == [(N0, "revived")]


def test_a_follower_of_everything_meets_new_addresses(client: redis.Redis) -> None:
    """An address that is first used while one follows is followed from its first event."""
    store = Filled(client)
    store.fill()
    followed = inspect.follow(client, store.keys, poll_s=0.02)
    assert len(list(islice(followed, 2))) == 2
    store.node("10.0.0.77:1", "life-1")
    store.store.run(store.ops.discover(["10.0.0.77:1"]))
    assert next(followed).address == "10.0.0.77:1"


def test_a_cluster_client_sees_the_same(make_server: Callable[..., Server]) -> None:
    """Views, rooms, events and the doctor through a client that routes each key to its own server."""
    server = make_server("strict")
    with server.sync_client() as writer:
        store = Filled(writer)
        store.fill()
        store.fail(N1)
    client, keys = (
        sync_client(server.url.replace("redis://", "redis+cluster://").removesuffix("/0"), Settings()),
        store.keys,
    )
    assert inspect.addresses(client, keys) == [N0, N1]
    views = inspect.address_views(client, keys, [N0, N1])
    assert [(view.state, view.rooms, view.watchers) for view in views] == [("alive", 4, 2), ("failed", 0, 1)]
    assert sum(len(rooms) for _, rooms in inspect.rooms(client, keys, N0)) == 4
    assert [event.kind for event in inspect.events(client, keys)] == ["registered", "registered", "failed"]
    assert [event.kind for event in islice(inspect.follow(client, keys, poll_s=0.02), 3)][-1] == "failed"
    found = {check.name.rpartition(" ")[2]: check.outcome for check in doctor.examine(client, keys)}
    assert found["permissions"] == found["role"] == "ok"
    client.close()


def test_no_store_is_store_unavailable(make_server: Callable[..., Server]) -> None:
    """A dead store is one typed error from every view."""
    server = make_server()
    client, keys = server.client(timeout_s=1), Keys("coordinator")
    server.kill()
    looks: list[Callable[[], object]] = [
        lambda: inspect.addresses(client, keys),
        lambda: inspect.address_view(client, keys, N0),
        lambda: list(inspect.rooms(client, keys, N0)),
        lambda: list(inspect.events(client, keys)),
        lambda: doctor.examine(client, keys),
    ]
    for look in looks:
        with pytest.raises(StoreUnavailable):
            look()


def _found(client: redis.Redis, namespace: str = "coordinator") -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.examine(client, Keys(namespace))}


def test_doctor_on_a_good_store(make_server: Callable[..., Server]) -> None:
    """Everything is ok on a server as it should be, and nothing was written."""
    with make_server("redis", "--lazyfree-lazy-expire", "yes").sync_client() as client:
        found = _found(client)
        assert {check.outcome for check in found.values()} == {"ok"}, found
        assert client.dbsize() == 0
        assert "Redis" in found["server"].value


def test_doctor_fails_an_evicting_store_and_a_replica(make_server: Callable[..., Server]) -> None:
    """A policy that drops keys, and a server that refuses writes, are failures with a way out."""
    primary = make_server("redis", "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    with primary.sync_client() as client:
        policy = _found(client)["maxmemory-policy"]
        assert (policy.outcome, policy.value) == ("failed", "allkeys-lru")
        assert "noeviction" in policy.advice
    with make_server("redis", "--replicaof", f"127.0.0.1 {primary.port}").sync_client() as client:
        assert _found(client)["role"].outcome == "failed"


def test_doctor_warns_of_what_is_only_slow(make_server: Callable[..., Server]) -> None:
    """lazyfree-lazy-expire off is a warning."""
    with make_server("redis", "--lazyfree-lazy-expire", "no").sync_client() as client:
        assert _found(client)["lazyfree-lazy-expire"].outcome == "warning"


def test_doctor_says_unknown_where_it_may_not_ask(real_server: Server) -> None:
    """With exactly the listed commands, CONFIG is unknown and nothing is failed; without one, that one is named."""
    granted = [f"+{name.lower()}" for name in doctor.commands()]
    with real_server.sync_client() as admin:
        rules = ("on", ">secret", "~coordinator:*", "&coordinator:*")
        admin.execute_command("ACL", "SETUSER", "coordinator", "reset", *rules, *granted)
        admin.execute_command("ACL", "SETUSER", "poor", "reset", *rules, *granted, "-rename", "-info")
        admin.execute_command("ACL", "SETUSER", "stranger", "reset", *rules)
    try:
        with real_server.client(username="coordinator", password="secret") as client:
            found = _found(client)
            assert {check.outcome for check in found.values()} == {"ok", "unknown"}, found
            assert found["lazyfree-lazy-expire"].outcome == "unknown"
            assert found["permissions"].outcome == found["maxmemory-policy"].outcome == "ok"
            elsewhere = _found(client, "other")["permissions"]
            assert elsewhere.outcome == "failed", "another namespace is outside of what was granted"
        with real_server.client(username="poor", password="secret") as client:
            found = _found(client)
            assert (found["permissions"].outcome, found["permissions"].value) == ("failed", "forbidden: INFO RENAME")
            assert found["server"].outcome == found["maxmemory-policy"].outcome == "unknown"
        with real_server.client(username="stranger", password="secret") as client, pytest.raises(StoreRefused):
            doctor.examine(client, Keys("coordinator"))
    finally:
        with real_server.sync_client() as admin:
            admin.execute_command("ACL", "DELUSER", "coordinator", "poor", "stranger")


def test_doctor_warns_of_a_clock_that_is_off(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten minutes between the two clocks are reported, as a warning: nothing here depends on it."""
    monkeypatch.setattr("coordinator.doctor.time.time", lambda: 1_000_000_000.0)
    clock = _found(client)["clock"]
    assert clock.outcome == "warning"
    assert "ahead" in clock.value


def test_checks_and_views_are_values(filled: Filled) -> None:
    """Views are frozen and comparable: two looks at the same state differ in ages only."""
    first, second = (inspect.address_view(filled.client, filled.keys, N1) for _ in range(2))
    assert first is not None
    assert second is not None
    same = {"workers": (), "seen_age_ms": 0, "announced_age_ms": 0}
    assert replace(first, **same) == replace(second, **same)  # type: ignore[arg-type]
    assert [worker.worker for worker in first.workers] == [C]
