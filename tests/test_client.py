"""The runners: what each error means, deadlines that hold, one outer retry and none below it (CASES 41, 46)."""

from __future__ import annotations

import asyncio
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from chaos import Chaos
from scriptlab import A, Lab, N
from servers import Server, free_port
from util import wait_until

from coordinator.config import Settings
from coordinator.errors import CoordinatorError, ScriptFault, StoreRefused, StoreUnavailable
from coordinator.store.client import FIRST_DELAY_S, LONGEST_DELAY_S, AsyncStore, SyncStore, classify, delays
from coordinator.store.connect import async_client, sync_client
from coordinator.store.ops import Op, Ops

SETTINGS = Settings(call_timeout_s=0.3, retry_s=1.2)
PATIENT = Settings(call_timeout_s=2, retry_s=20)
OPS = Ops(SETTINGS)
Runner = Callable[[str, Settings, Op[Any], bool], Any]


def _sync(url: str, settings: Settings, op: Op[Any], once: bool = False) -> Any:
    with sync_client(url, settings) as client:
        store = SyncStore(client, settings.retry_s)
        return store.once(op) if once else store.run(op)


def _async(url: str, settings: Settings, op: Op[Any], once: bool = False) -> Any:
    async def run() -> Any:
        store = AsyncStore(async_client(url, settings), settings.retry_s)
        try:
            return await (store.once(op) if once else store.run(op))
        finally:
            await store.aclose()

    return asyncio.run(run())


RUNNERS = pytest.mark.parametrize("run", [_sync, _async], ids=["sync", "async"])


class Parrot:
    """A server that answers whatever arrives with the same bytes."""

    def __init__(self) -> None:
        self.reply, self.asked, self.connections = b"+OK\r\n", 0, 0
        parrot = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                parrot.connections += 1
                while self.request.recv(1 << 16):
                    parrot.asked += 1
                    self.request.sendall(parrot.reply)

        class Tcp(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, *_: object) -> None:
                """The client may go away at any moment."""

        self._server = Tcp(("127.0.0.1", 0), Handler)
        self.url = f"redis://127.0.0.1:{self._server.server_address[1]}/0"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


@pytest.fixture
def parrot() -> Iterator[Parrot]:
    parrot = Parrot()
    yield parrot
    parrot.close()


# -- classification ---------------------------------------------------------------------------------------------

WIRE: dict[bytes, tuple[type[CoordinatorError], str]] = {
    b"-LOADING Redis is loading the dataset in memory": (StoreUnavailable, "LOADING"),
    b"-READONLY You can't write against a read only replica.": (StoreUnavailable, "READONLY"),
    b"-READONLY You can't write against a read only replica. script: 0a9, on @user_script:9.": (
        StoreUnavailable,
        "READONLY",
    ),
    b"-OOM command not allowed when used memory > 'maxmemory'. script: 0a9, on @user_script:9.": (
        StoreUnavailable,
        "OOM",
    ),
    b"-MISCONF Redis is configured to save RDB snapshots, but it's unable to persist to disk.": (
        StoreUnavailable,
        "MISCONF",
    ),
    b"-BUSY Redis is busy running a script. You can only call SCRIPT KILL": (StoreUnavailable, "BUSY"),
    b"-CLUSTERDOWN The cluster is down": (StoreUnavailable, "CLUSTERDOWN"),
    b"-MASTERDOWN Link with MASTER is down": (StoreUnavailable, "MASTERDOWN"),
    b"-TRYAGAIN Multiple keys request during rehashing of slot": (StoreUnavailable, "TRYAGAIN"),
    b"-MOVED 1 127.0.0.1:7001": (StoreUnavailable, "MOVED"),
    b"-NOREPLICAS Not enough good replicas to write.": (StoreUnavailable, "NOREPLICAS"),
    b"-UNBLOCKED force unblock": (StoreUnavailable, "UNBLOCKED"),
    b"-ERR max number of clients reached": (StoreUnavailable, ""),
    b"-NOPERM this user has no permissions to run the 'evalsha' command": (StoreRefused, ""),
    b"-NOAUTH Authentication required.": (StoreRefused, ""),
    b"-WRONGPASS invalid username-password pair or user is disabled.": (StoreRefused, ""),
    b"-WRONGTYPE Operation against a key holding the wrong kind of value": (StoreRefused, ""),
    b"-ERR user_script:3: Script attempted to access nonexistent global variable 'x'": (ScriptFault, ""),
    b"-ERR Error running script (call to 0a9): @user_script:1: unknown command": (ScriptFault, ""),
    b"-CROSSSLOT Keys in request don't hash to the same slot": (ScriptFault, ""),
    b"-ERR unknown command 'EVALSHA'": (ScriptFault, ""),
    b"-": (ScriptFault, ""),
    b"+OK": (ScriptFault, ""),
    b":7": (ScriptFault, ""),
    b"$-1": (ScriptFault, ""),
    b"*0": (ScriptFault, ""),
    b"*-1": (ScriptFault, ""),
    b"*1\r\n$8\r\nNONSENSE": (ScriptFault, ""),
    b"*2\r\n$2\r\nOK\r\n-ERR inner": (ScriptFault, ""),
    b"*1\r\n$2\r\n\xff\xfe": (ScriptFault, ""),
    b"HTTP/1.1 400 Bad Request": (ScriptFault, ""),
    b"\x00\x01\x02": (ScriptFault, ""),
}


@RUNNERS
@pytest.mark.parametrize(
    "reply", WIRE, ids=lambda reply: reply[:24].decode("latin-1").encode("unicode_escape").decode()
)
def test_what_a_reply_means(parrot: Parrot, run: Runner, reply: bytes) -> None:
    """Error replies and nonsense, from a real socket through the driver, become one of three errors, in one line."""
    kind, word = WIRE[reply]
    parrot.reply = reply + b"\r\n"
    with pytest.raises(CoordinatorError) as caught:
        run(parrot.url, SETTINGS, OPS.drain_ack(N, "orphans:x", A), True)
    assert type(caught.value) is kind, caught.value
    assert getattr(caught.value, "word", "") == word
    assert caught.value.retry_safe is (kind is StoreUnavailable)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@RUNNERS
@pytest.mark.parametrize("reply", [b"-NOPERM no", b"-WRONGTYPE Operation", b"-ERR user_script:3: x", b"+OK", b"*0"])
def test_only_what_passes_by_itself_is_repeated(parrot: Parrot, run: Runner, reply: bytes) -> None:
    """A refusal or a fault is raised at once: the server is asked a single time."""
    parrot.reply = reply + b"\r\n"
    with pytest.raises((StoreRefused, ScriptFault)):
        run(parrot.url, PATIENT, OPS.drain_ack(N, "orphans:x", A), False)
    assert parrot.asked == 1


@pytest.mark.parametrize(
    ("exc", "kind"),
    [
        (redis.ConnectionError("Connection reset by peer"), StoreUnavailable),
        (redis.TimeoutError("Timeout reading from socket"), StoreUnavailable),
        (redis.exceptions.ClusterDownError("CLUSTERDOWN"), StoreUnavailable),
        (redis.exceptions.RedisClusterException("no node"), StoreUnavailable),
        (redis.exceptions.MaxConnectionsError("Too many connections"), StoreUnavailable),
        (ConnectionRefusedError(111, "Connection refused"), StoreUnavailable),
        (BrokenPipeError(32, "Broken pipe"), StoreUnavailable),
        (TimeoutError(), StoreUnavailable),
        (redis.AuthenticationError("invalid"), StoreRefused),
        (redis.exceptions.NoPermissionError("this user"), StoreRefused),
        (redis.ResponseError("WRONGTYPE Operation"), StoreRefused),
        (redis.ResponseError("something else"), ScriptFault),
        (redis.exceptions.InvalidResponse("Protocol Error"), ScriptFault),
        (ValueError("not ours"), ScriptFault),
    ],
)
def test_what_an_exception_means(exc: Exception, kind: type[CoordinatorError]) -> None:
    """The driver's and the system's exceptions; an empty text is replaced by the exception's name."""
    meant = classify(exc)
    assert type(meant) is kind
    assert str(exc).strip() in str(meant)
    if not str(exc):
        assert type(exc).__name__ in str(meant)


def test_our_own_errors_pass_through_unchanged() -> None:
    """classify is idempotent."""
    error = StoreUnavailable("away")
    assert classify(error) is error


@RUNNERS
def test_text_that_is_no_utf8_in_the_store_is_read_anyway(redis_server: Server, run: Runner) -> None:
    """A reason that somebody wrote by hand in another encoding does not make the address unreadable."""
    with redis_server.sync_client() as client:
        lab = Lab(client)
        lab.open(A, (1,))
        client.hset(lab.keys.node(N), "reason", b"caf\xe9")
        reply = run(redis_server.url, PATIENT, lab.batch(A, 2, count=1), True)
        assert reply.status == "OK"
        assert reply.node.reason.startswith("caf")


# -- deadlines --------------------------------------------------------------------------------------------------


@RUNNERS
def test_a_black_hole_ends_within_the_deadline(redis_server: Server, run: Runner) -> None:
    """Connections are accepted, nothing is answered: StoreUnavailable after retry_s and at most a call (CASE 46)."""
    with Chaos(redis_server.port) as net:
        net.blackhole = True
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable):
            run(net.url, SETTINGS, OPS.discover([N]), False)
        took = time.monotonic() - begun
    assert took >= SETTINGS.call_timeout_s
    assert took < SETTINGS.retry_s + 2 * SETTINGS.call_timeout_s + 3  # 3 s for a busy machine


@RUNNERS
def test_a_black_hole_in_the_middle_of_a_reply_ends_too(redis_server: Server, run: Runner) -> None:
    """The connection worked before and goes silent: the call ends, and works again when the silence ends."""
    with Chaos(redis_server.port) as net:
        assert run(net.url, SETTINGS, OPS.discover([N]), False) == ()
        net.mute(b"EVAL")
        with pytest.raises(StoreUnavailable):
            run(net.url, SETTINGS, OPS.discover([N]), False)
        net.heal()
        assert run(net.url, SETTINGS, OPS.discover([N]), False) == ()


@RUNNERS
def test_one_attempt_is_one_connection(redis_server: Server, run: Runner) -> None:
    """The driver does not retry by itself: a refused connection is attempted once a call."""
    with Chaos(redis_server.port) as net:
        net.refuse = True
        with pytest.raises(StoreUnavailable):
            run(net.url, PATIENT, OPS.discover([N]), True)
        wait_until(lambda: net.accepted, 5, "the attempt")
        assert net.accepted == 1


@RUNNERS
def test_retries_back_off(redis_server: Server, run: Runner) -> None:
    """Attempts within the deadline are many, but no storm."""
    with Chaos(redis_server.port) as net:
        net.refuse = True
        with pytest.raises(StoreUnavailable):
            run(net.url, SETTINGS, OPS.discover([N]), False)
        assert 2 <= net.accepted <= 60


@RUNNERS
def test_a_store_that_comes_back_in_time_answers(make_server: Callable[..., Server], run: Runner) -> None:
    """Not up yet, then up: the call that was begun before succeeds (CASE 62)."""
    server = make_server("redis")
    server.kill()
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(run(server.url, PATIENT, OPS.discover([N]), False)))
    thread.start()
    server.start()
    thread.join(PATIENT.retry_s + 10)
    assert answers == [()]


@RUNNERS
def test_nobody_listens(run: Runner) -> None:
    """A refused connection is StoreUnavailable and says so."""
    with pytest.raises(StoreUnavailable, match="does not answer"):
        run(f"redis://127.0.0.1:{free_port()}", SETTINGS, OPS.discover([N]), True)


def test_delays_grow_and_are_capped() -> None:
    """Full jitter: never more than the bound, which doubles up to the cap; two callers do not march in step."""
    pauses = [[pause() for _ in range(12)] for pause in (delays() for _ in range(200))]
    for n in range(12):
        bound = min(FIRST_DELAY_S * 2**n, LONGEST_DELAY_S)
        column = [row[n] for row in pauses]
        assert max(column) <= bound
        assert max(column) > bound * 0.8
        assert min(column) < bound * 0.2


# -- servers that changed ---------------------------------------------------------------------------------------


def _connections(client: redis.Redis) -> set[str]:
    """Ids of the other clients' connections."""
    mine = str(client.client_id())
    return {str(entry["id"]) for entry in client.client_list() if str(entry["id"]) != mine and entry["flags"] == "N"}


def test_readonly_drops_connections_sync(make_server: Callable[..., Server]) -> None:
    """A primary that became a replica: its connections are given up, and the next call works when it is one again."""
    server = make_server("redis")
    with server.sync_client() as admin, sync_client(server.url, PATIENT) as client:
        store = SyncStore(client, PATIENT.retry_s)
        store.once(OPS.discover([N]))
        before = _connections(admin)
        assert len(before) == 1
        admin.replicaof("127.0.0.1", str(free_port()))
        try:
            with pytest.raises(StoreUnavailable) as caught:
                store.once(OPS.discover([N]))
            assert caught.value.word == "READONLY"
            wait_until(lambda: not _connections(admin) & before, 5, "the old connection's end")
        finally:
            admin.replicaof("NO", "ONE")
        store.run(OPS.discover([N]))
        assert len(_connections(admin)) == 1


def test_readonly_drops_connections_async(make_server: Callable[..., Server]) -> None:
    """The same through asyncio, with batches of many addresses in one pipeline."""
    server = make_server("redis")

    async def run(admin: redis.Redis) -> None:
        store = AsyncStore(async_client(server.url, PATIENT), PATIENT.retry_s)
        try:
            await store.once(OPS.discover([N]))
            before = _connections(admin)
            assert len(before) == 1
            admin.replicaof("127.0.0.1", str(free_port()))
            results = await store.many([OPS.discover([N]), OPS.discover([N])])
            assert [getattr(result, "word", "") for result in results] == ["READONLY", "READONLY"]
            await asyncio.to_thread(wait_until, lambda: not _connections(admin) & before, 5, "the old connection's end")
            admin.replicaof("NO", "ONE")
            await store.run(OPS.discover([N]))
        finally:
            admin.replicaof("NO", "ONE")
            await store.aclose()

    with server.sync_client() as admin:
        asyncio.run(run(admin))


@RUNNERS
def test_a_full_store_is_unavailable_and_says_why(make_server: Callable[..., Server], run: Runner) -> None:
    """A batch that only adds is refused as a whole with OOM; leaving, failing and reaping still work (CASE 42)."""
    server = make_server("redis")
    with server.sync_client() as client:
        lab = Lab(client)
        lab.open(A, (1, 2, 3))
        before = lab.dump()
        client.config_set("maxmemory", 1)
        try:
            with pytest.raises(StoreUnavailable) as caught:
                run(server.url, PATIENT, lab.batch(A, 2, (9,), count=4), True)
            assert caught.value.word == "OOM"
            assert lab.dump() == before
            assert run(server.url, PATIENT, lab.batch(A, 2, (), (1,), count=2), True).status == "OK"
            assert run(server.url, PATIENT, lab.fail(workers=[A]), True).counts == {A: 2}
            assert run(server.url, PATIENT, lab.reap(A, leaving=True), True).outcome == "REAPED"
        finally:
            client.config_set("maxmemory", 0)


@RUNNERS
def test_missing_rights_are_named(redis_server: Server, run: Runner) -> None:
    """A user that may not run scripts: StoreRefused that names the command."""
    with redis_server.sync_client() as client:
        client.execute_command("ACL", "SETUSER", "poor", "on", ">pw", "~*", "&*", "+ping")
        try:
            with pytest.raises(StoreRefused, match="evalsha"):
                run(f"redis://poor:pw@127.0.0.1:{redis_server.port}", PATIENT, OPS.discover([N]), True)
        finally:
            client.execute_command("ACL", "DELUSER", "poor")


@RUNNERS
def test_a_missing_password_is_named(make_server: Callable[..., Server], run: Runner) -> None:
    """The server asks for a password and the URL has none."""
    server = make_server("redis")
    with server.sync_client() as client:
        client.config_set("requirepass", "pw")
        try:
            with pytest.raises(StoreRefused, match="Authentication required"):
                run(server.url, PATIENT, OPS.discover([N]), True)
            assert run(f"redis://:pw@127.0.0.1:{server.port}", PATIENT, OPS.discover([N]), True) == ()
        finally:
            client.config_set("requirepass", "")


def test_many_of_nothing_is_nothing(parrot: Parrot) -> None:
    """No batch, no round trip."""

    async def run() -> list[Any]:
        store = AsyncStore(async_client(parrot.url, SETTINGS))
        try:
            return list(await store.many([]))
        finally:
            await store.aclose()

    assert asyncio.run(run()) == []
    assert parrot.connections == 0


def test_many_is_one_round_trip(parrot: Parrot) -> None:
    """Fifty addresses go out together on one connection."""
    parrot.reply = b"*2\r\n$2\r\nOK\r\n*0\r\n" * 50

    async def run() -> list[Any]:
        store = AsyncStore(async_client(parrot.url, PATIENT))
        try:
            return list(await store.many([OPS.discover([N])] * 50))
        finally:
            await store.aclose()

    assert asyncio.run(run()) == [()] * 50
    assert parrot.connections == 1
    assert parrot.asked <= 3  # the kernel may split what was written at once


def test_one_blocking_runner_serves_many_threads(redis_server: Server) -> None:
    """Threads share a SyncStore: every call is answered with its own answer."""
    with sync_client(redis_server.url, PATIENT) as client:
        store, wrong = SyncStore(client, PATIENT.retry_s), []

        def work(n: int) -> None:
            for k in range(50):
                address = f"10.0.{n}.{k}:1"
                reply = store.run(Lab(client).batch(A, 1, (n,), mode="reset", epoch=n * 100 + k + 1, address=address))
                if reply.node.epoch != n * 100 + k + 1:
                    wrong.append((n, k))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert wrong == []
