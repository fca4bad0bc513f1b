"""Store trouble at script level: lost replies (G2, CASE 37), forgotten scripts (45), an error at every call (48)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from chaos import Chaos
from scriptlab import BIG, CATALOGUE, A, B, C, Lab, N, timeless
from servers import Server

from coordinator.config import Settings
from coordinator.errors import StoreRefused, StoreUnavailable
from coordinator.protocol import Batch, NodeView, Stats
from coordinator.store.client import AsyncStore, SyncStore
from coordinator.store.connect import async_client, sync_client
from coordinator.store.ops import Op, Ops
from coordinator.store.scripts import load
from coordinator.store.verdict import fail_address, fail_address_async, new_call

SETTINGS = Settings(call_timeout_s=2, retry_s=20)
Arrange = Callable[[Lab], Op[Any]]


@pytest.fixture
def lab(real_server: Server) -> Iterator[Lab]:
    with real_server.sync_client() as client:
        yield Lab(client)


@pytest.fixture
def net(real_server: Server) -> Iterator[Chaos]:
    with Chaos(real_server.port) as net:
        yield net


def _run_sync(net: Chaos, op: Op[Any]) -> Any:
    with sync_client(net.url, SETTINGS) as client:
        return SyncStore(client, SETTINGS.retry_s).run(op)


def _run_async(net: Chaos, op: Op[Any]) -> Any:
    async def run() -> Any:
        store = AsyncStore(async_client(net.url, SETTINGS), SETTINGS.retry_s)
        try:
            return await store.run(op)
        finally:
            await store.aclose()

    return asyncio.run(run())


RUNNERS = pytest.mark.parametrize("run", [_run_sync, _run_async], ids=["sync", "async"])


def _two_workers(lab: Lab) -> None:
    lab.node()
    lab.open(A, (1, 2, BIG))
    lab.open(B, (1,))


def _sync_op(lab: Lab) -> Op[Any]:
    _two_workers(lab)
    return lab.batch(A, 2, (7, 8), (1,), count=4)


def _fail_op(lab: Lab) -> Op[Any]:
    _two_workers(lab)
    return lab.fail()


def _reap_op(lab: Lab) -> Op[Any]:
    _two_workers(lab)
    lab.expire(A)
    return lab.reap(A)


def _register_op(lab: Lab) -> Op[Any]:
    _two_workers(lab)
    return lab.register("start", "life-2", workers=[A, B])


def _abort_op(lab: Lab) -> Op[Any]:
    _two_workers(lab)
    return lab.ops.abort_room(N, A, BIG, "no memory", "node")


def _vote_op(lab: Lab) -> Op[Any]:
    _two_workers(lab)
    return lab.ops.suspect(N, A, 1, True, "timeout")


def _ack_op(lab: Lab) -> Op[Any]:
    _two_workers(lab)
    lab.run(lab.fail())
    return lab.ops.drain_ack(N, f"lost:1:{A}", A)


def _without_times(dump: dict[str, Any]) -> dict[str, Any]:
    """A dump that two runs can share: entry ids and times of the events are taken out."""
    out: dict[str, Any] = {}
    for key, value in dump.items():
        if isinstance(value, list):
            out[key] = [fields for _, fields in value]
        elif isinstance(value, dict):
            out[key] = {name: text for name, text in value.items() if name not in ("failed_ms", "probe_ms", "turn_ms")}
        else:
            out[key] = value
    return out


@RUNNERS
@pytest.mark.parametrize(
    "arrange",
    [_sync_op, _fail_op, _reap_op, _register_op, _abort_op, _vote_op, _ack_op],
    ids=lambda f: f.__name__.strip("_").removesuffix("_op"),
)
def test_G2_a_lost_reply_is_harmless(
    real_server: Server, lab: Lab, net: Chaos, arrange: Arrange, run: Callable[[Chaos, Op[Any]], Any]
) -> None:
    """The server has done it, the reply is cut, the runner asks again: same answer and store as if undisturbed."""
    undisturbed = lab.run(arrange(lab))
    expected = _without_times(lab.dump())
    lab.client.flushall()

    op = arrange(lab)
    lab.client.script_load(load(op.script).text)  # else the first call is answered NOSCRIPT and changes nothing
    cut = net.cut_reply(load(op.script).sha.encode())
    answer = run(net, op)
    assert cut.is_set(), "no reply was cut: the test proved nothing"
    assert timeless(answer) == timeless(undisturbed)
    assert _without_times(lab.dump()) == expected


@RUNNERS
def test_G2_a_lost_request_is_harmless(
    real_server: Server, lab: Lab, net: Chaos, run: Callable[[Chaos, Op[Any]], Any]
) -> None:
    """The request itself is lost: the repetition is the first that arrives."""
    op = _fail_op(lab)
    lost = net.lose_request(load("fail_node").sha.encode())
    verdict = run(net, op)
    assert lost.is_set()
    assert verdict.counts == {A: 3, B: 1}
    assert lab.client.smembers(lab.keys.lost(N, 1, A)) == {"1", "2", str(BIG)}


def test_a_plain_snapshot_script_would_lose_the_rooms(lab: Lab, net: Chaos) -> None:
    """The test above can fail: "SMEMBERS, DEL, return" repeated after a lost reply answers no room at all."""
    lab.client.sadd("naive", 1, 2, 3)
    text = "local r = redis.call('SMEMBERS', KEYS[1]) redis.call('DEL', KEYS[1]) return r"
    with sync_client(net.url, SETTINGS) as client:
        net.cut_reply(b"naive")
        with pytest.raises(redis.ConnectionError):
            client.eval(text, 1, "naive")
        assert client.eval(text, 1, "naive") == []


# -- CASE 45 ----------------------------------------------------------------------------------------------------


@RUNNERS
def test_script_flush_is_not_noticed(
    real_server: Server, lab: Lab, net: Chaos, run: Callable[[Chaos, Op[Any]], Any]
) -> None:
    """Before each call the server forgets every script; each is answered as if it had not (CASE 45)."""
    lab.client.script_flush()
    _two_workers(lab)
    for op in (lab.batch(A, 2, (7,), count=4), lab.ops.suspect(N, A, 1, True, "timeout"), lab.fail()):
        lab.client.script_flush()
        run(net, op)
    assert lab.client.smembers(lab.keys.lost(N, 1, A)) == {"1", "2", "7", str(BIG)}


def test_script_flush_before_a_pipeline_of_many(real_server: Server, lab: Lab) -> None:
    """A hundred batches in one round trip after SCRIPT FLUSH: each is applied, in order, and none twice."""
    addresses = [f"10.0.0.{n}:8998" for n in range(100)]

    async def run() -> list[Any]:
        store = AsyncStore(async_client(real_server.url, SETTINGS), SETTINGS.retry_s)
        try:
            ops = [lab.batch(A, 1, (n, BIG), mode="reset", address=a) for n, a in enumerate(addresses)]
            lab.client.script_flush()
            first = await store.many(ops)
            lab.client.script_flush()
            more = [lab.batch(A, 2, (1000 + n,), count=3, address=a) for n, a in enumerate(addresses)]
            return first + await store.many(more)
        finally:
            await store.aclose()

    replies = asyncio.run(run())
    assert [reply.status for reply in replies] == ["OK"] * 200
    for n, address in enumerate(addresses):
        assert lab.client.smembers(lab.keys.rooms(address, A)) == {str(n), str(BIG), str(1000 + n)}


def test_one_refused_op_in_a_pipeline_leaves_the_others(real_server: Server, lab: Lab) -> None:
    """A key of the wrong type makes one op of many an error value; the rest is applied and answered."""
    addresses = [f"10.0.0.{n}:8998" for n in range(1, 4)]
    for address in addresses:
        lab.open(A, (1,), address=address)
    lab.client.set(lab.keys.rooms(addresses[1], A), "text", ex=60)

    async def run() -> list[Any]:
        store = AsyncStore(async_client(real_server.url, SETTINGS))
        try:
            return await store.many([lab.batch(A, 2, (2,), count=2, address=a) for a in addresses])
        finally:
            await store.aclose()

    ok, bad, also = asyncio.run(run())
    assert isinstance(bad, StoreRefused), bad
    assert "WRONGTYPE" in str(bad)
    assert (ok.status, also.status) == ("OK", "OK")


# -- CASE 48 ----------------------------------------------------------------------------------------------------


def _life(ops: Ops) -> list[Op[Any]]:
    """Two workers and a node live through a failure, a replacement and a leaving."""

    def batch(worker: str, number: int, mode: str, epoch: int, count: int, adds: Any = (), gone: Any = ()) -> Op[Any]:
        return ops.sync(Batch(N, worker, number, mode, NodeView(epoch), count, adds, gone, Stats(count)))

    return [
        ops.register_node(N, "start", "life-1", 0, "c1", "node"),
        batch(A, 1, "reset", 0, 3, (1, 2, BIG)),
        batch(B, 1, "reset", 0, 1, (1,)),
        batch(A, 2, "delta", 1, 3, (3,), (1,)),
        ops.abort_room(N, A, 2, "no memory", "node"),
        ops.suspect(N, A, 1, True, "timeout"),
        ops.suspect(N, B, 1, True, "timeout"),
        ops.fail_node(N, 1, "c2", A, "two votes", [A, B]),
        batch(A, 3, "delta", 1, 3),
        ops.drain_read(N, f"lost:1:{A}"),
        ops.drain_ack(N, f"lost:1:{A}", A, 30),
        ops.register_node(N, "start", "life-2", 2, "c3", "node"),
        batch(A, 4, "reset", 2, 2, (5, 6)),
        ops.register_node(N, "probe", "life-3", 2, "c4", A, [A, B]),
        batch(A, 5, "reset", 3, 2, (7, 8)),
        ops.reap_worker(N, A, A, "leaves", leaving=True),
        ops.drain_drop(N, f"orphans:{A}", "node"),
    ]


class Broken:
    """A client that raises at call `at`, before or after the server has done it, and works otherwise."""

    def __init__(self, client: Any, at: int, after: bool, error: Exception) -> None:
        self._client, self._left, self._after, self._error = client, at, after, error
        self.raised = False

    def execute_command(self, *words: Any) -> Any:
        self._left -= 1
        if self._left != 0:
            return self._client.execute_command(*words)
        self.raised = True
        if self._after:
            self._client.execute_command(*words)
        raise self._error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


ERRORS = {
    "reset": redis.ConnectionError("Connection reset by peer"),
    "timeout": redis.TimeoutError("Timeout reading from socket"),
    "loading": redis.exceptions.BusyLoadingError("Redis is loading the dataset in memory"),
    "readonly": redis.exceptions.ReadOnlyError("You can't write against a read only replica."),
    "oom": redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_at_every_single_call(redis_server: Server, error: str, after: bool) -> None:
    """Whichever call of a whole life fails once, before or after its effect: the end is the same (CASE 48)."""
    with redis_server.sync_client() as client:
        lab = Lab(client)
        steps = _life(lab.ops)
        answers = [timeless(SyncStore(client).run(op)) for op in steps]
        expected = _without_times(lab.dump())
        for k in range(1, len(steps) + 1):
            client.flushdb()
            broken = Broken(client, k, after, ERRORS[error])
            store = SyncStore(broken, retry_s=10)
            assert [timeless(store.run(op)) for op in steps] == answers, f"an error at call {k}"
            assert broken.raised
            assert _without_times(lab.dump()) == expected, f"an error at call {k}"


def test_two_lost_replies_in_a_row(redis_server: Server) -> None:
    """The repetition's own reply may be lost as well."""
    with redis_server.sync_client() as client, Chaos(redis_server.port) as net:
        lab = Lab(client)
        op = _fail_op(lab)
        sha = load("fail_node").sha.encode()
        client.script_load(load("fail_node").text)
        with sync_client(net.url, SETTINGS) as through:
            store = SyncStore(through)
            for _ in range(2):
                cut = net.cut_reply(sha)
                with pytest.raises(StoreUnavailable):
                    store.once(op)
                assert cut.is_set()
            assert store.once(op).counts == {A: 3, B: 1}


# -- the loops over the workers' list ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_failing_an_address_survives_a_list_that_changes_and_a_lost_reply(
    real_server: Server, lab: Lab, net: Chaos, kind: str
) -> None:
    """fail_address learns the workers from RETRY; the reply of the deciding call is cut; counts and rooms are exact."""
    _two_workers(lab)
    lab.open(C, (4, 5))
    lab.client.script_load(load("fail_node").text)
    cut = net.cut_reply(lab.keys.lost(N, 1, C).encode())  # only the second round, with all keys, carries this
    if kind == "sync":
        with sync_client(net.url, SETTINGS) as client:
            verdict = fail_address(SyncStore(client), lab.ops, N, "test", "tester")
    else:

        async def run() -> Any:
            store = AsyncStore(async_client(net.url, SETTINGS))
            try:
                return await fail_address_async(store, lab.ops, N, "test", "tester", 1, new_call())
            finally:
                await store.aclose()

        verdict = asyncio.run(run())
    assert cut.is_set()
    assert (verdict.outcome, verdict.counts) == ("FAILED", {A: 3, B: 1, C: 2})
    assert lab.client.smembers(lab.keys.lost(N, 1, C)) == {"4", "5"}


def test_a_list_that_never_settles_ends_in_an_error(redis_server: Server) -> None:
    """Workers that change at every round end in StoreUnavailable that says so, not in an endless loop."""
    with redis_server.sync_client() as client:
        lab = Lab(client)
        lab.open(A, (1,))

        class Restless(SyncStore):
            rounds = 0

            def run(self, op: Op[Any]) -> Any:
                self.rounds += 1
                lab.open(f"w#{self.rounds:08x}", (1,))
                return super().run(op)

        store = Restless(client)
        with pytest.raises(StoreUnavailable, match=rf"workers at {N} changed 20 times"):
            fail_address(store, lab.ops, N, "test", "tester")
        assert store.rounds == 20
        assert lab.client.hget(lab.keys.node(N), "epoch") == "1"


def test_catalogue_through_the_asyncio_runner(redis_server: Server) -> None:
    """Every situation of the catalogue gives the same typed answer through AsyncStore as on the bench."""
    with redis_server.sync_client() as client:
        lab = Lab(client)

        async def run() -> None:
            store = AsyncStore(async_client(redis_server.url, SETTINGS))
            try:
                for case in CATALOGUE:
                    client.flushdb()
                    expected = lab.run(case.arrange(lab))
                    client.flushdb()
                    answer = await store.run(case.arrange(lab))
                    assert timeless(answer) == timeless(expected), case.id
            finally:
                await store.aclose()

        asyncio.run(run())
