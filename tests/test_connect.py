"""Store URLs: what each means, what is refused, no password in any message; each topology builds and connects."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from scriptlab import A, N
from servers import Lanes, Server, free_port
from util import wait_until

from coordinator.config import Settings
from coordinator.errors import ConfigError, StoreRefused, StoreUnavailable
from coordinator.protocol import Batch, NodeView
from coordinator.store.client import AsyncStore, SyncStore
from coordinator.store.connect import CONNECTIONS, Target, async_client, parse_url, redact, sync_client
from coordinator.store.ops import Ops

SETTINGS = Settings(call_timeout_s=2, retry_s=5)
OPS = Ops(SETTINGS)
SECRET = "geheim"

GOOD = {
    "redis://h": Target("redis", "", (("h", 6379),)),
    "redis://h:7000/3": Target("redis", "", (("h", 7000),), db=3),
    "redis://h?db=3": Target("redis", "", (("h", 6379),), db=3),
    "redis://h/1?db=2": Target("redis", "", (("h", 6379),), db=2),
    "redis://[::1]:7000": Target("redis", "", (("::1", 7000),)),
    f"redis://:{SECRET}@h": Target("redis", "", (("h", 6379),), password=SECRET),
    f"redis://user:{SECRET}@h": Target("redis", "", (("h", 6379),), username="user", password=SECRET),
    "redis://us%40er:p%2Fw%3A@h": Target("redis", "", (("h", 6379),), username="us@er", password="p/w:"),
    "rediss://h:7000": Target("rediss", "", (("h", 7000),)),
    "rediss://h?ssl_cert_reqs=none": Target("rediss", "", (("h", 6379),)),
    "unix:///run/redis.sock": Target("unix", ""),
    "unix:///run/a@b.sock?db=2": Target("unix", "", db=2),
    "redis+sentinel://a,b:5000/main/2": Target("redis+sentinel", "", (("a", 26379), ("b", 5000)), "main", 2),
    f"redis+sentinel://u:{SECRET}@a/main": Target(
        "redis+sentinel", "", (("a", 26379),), "main", 0, username="u", password=SECRET
    ),
    "redis+cluster://a:1,b:2": Target("redis+cluster", "", (("a", 1), ("b", 2))),
    "redis+cluster://[::1]:1,[::2]:2": Target("redis+cluster", "", (("::1", 1), ("::2", 2))),
    "redis+cluster://a/0": Target("redis+cluster", "", (("a", 6379),)),
}

BAD = {
    "": "scheme must be one of redis://",
    "h:6379": "scheme must be one of",
    f"http://u:{SECRET}@h": "scheme must be one of",
    f"valkey://u:{SECRET}@h": "scheme must be one of",
    "redis://": "names no host",
    f"redis://u:{SECRET}@": "names no host",
    "redis://h:0": "'h:0' is not host:port",
    f"redis://u:{SECRET}@h:70000": "Port out of range",
    f"redis://u:{SECRET}@h:x": "Port could not be cast",
    f"redis://u:{SECRET}@[::1": "cannot be read as a URL",
    f"redis://u:{SECRET}@h/main": "whole number from 0",
    f"redis://u:{SECRET}@h/-1": "whole number from 0",
    "redis://h/0?db=x": "whole number from 0",
    "unix://": "unix:///path/to/socket",
    "unix:///s?db=one": "whole number from 0",
    f"redis://u:{SECRET}@a,b": r"redis\+sentinel:// or redis\+cluster://",
    f"redis+sentinel://u:{SECRET}@a": "name the service",
    f"redis+cluster://u:{SECRET}@a/1": "database 0 only",
    f"redis://:{SECRET}/{SECRET}@h": "percent-encode",
    f"redis://:{SECRET}#{SECRET}@h": "percent-encode",
    f"redis://:{SECRET}?{SECRET}@h": "percent-encode",
    f"redis://h?password={SECRET}": "'password' cannot be set here",
    f"unix:///s?username=u&password={SECRET}": "'username' cannot be set here",
    "redis://h?socket_timeout=100": "'socket_timeout' cannot be set here",
    "redis://h?ssl_cert_reqs=none": "'ssl_cert_reqs' cannot be set here",
}


@pytest.mark.parametrize("url", GOOD)
def test_a_url_means_its_target(url: str) -> None:
    """Scheme, hosts with their usual ports, service, database and decoded credentials."""
    got, want = parse_url(url), GOOD[url]
    for field in ("scheme", "hosts", "service", "db", "username", "password"):
        assert getattr(got, field) == getattr(want, field), field
    assert got.url == url


@pytest.mark.parametrize("url", BAD)
def test_a_bad_url_is_refused_by_name_and_without_its_password(url: str) -> None:
    """ConfigError says what is wrong in one line; both clients refuse it too; the password is nowhere in it."""
    for build in (parse_url, lambda u: sync_client(u, SETTINGS), lambda u: async_client(u, SETTINGS)):
        with pytest.raises(ConfigError, match=BAD[url]) as caught:
            build(url)
        assert SECRET not in str(caught.value)
        assert "\n" not in str(caught.value)
        assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://u:{SECRET}@h:1/0", "redis://u:***@h:1/0"),
        (f"redis://:{SECRET}@h", "redis://:***@h"),
        (f"redis://u:{SECRET}@x@h", "redis://u:***@h"),
        (f"redis://u:{SECRET}:x@h", "redis://u:***@h"),
        (f"redis+sentinel://u:{SECRET}@a:1,b:2/m", "redis+sentinel://u:***@a:1,b:2/m"),
        (f"redis://h?password={SECRET}&db=1", "redis://h?password=***&db=1"),
        (f"unix:///s?password={SECRET}", "unix:///s?password=***"),
        ("redis://u@h", "redis://u@h"),
        ("redis://h:1/0", "redis://h:1/0"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    """What logs and messages print."""
    assert redact(url) == shown


def test_a_target_shows_no_password() -> None:
    """`shown` is what may be printed."""
    assert parse_url(f"redis://u:{SECRET}@h").shown == "redis://u:***@h"


# -- real connections -------------------------------------------------------------------------------------------


def _batch() -> Any:
    return OPS.sync(Batch(N, A, 1, "reset", NodeView(1), 2, (1, 2**63 - 1)))


def _through_both(url: str) -> tuple[Any, Any]:
    """The same Op through SyncStore and AsyncStore."""

    async def run() -> Any:
        store = AsyncStore(async_client(url, SETTINGS), SETTINGS.retry_s)
        try:
            return await store.run(_batch())
        finally:
            await store.aclose()

    client = sync_client(url, SETTINGS)
    try:
        return SyncStore(client, SETTINGS.retry_s).run(_batch()), asyncio.run(run())
    finally:
        client.close()


def _database(server: Server, db: int) -> redis.Redis:
    return redis.Redis(port=server.port, db=db, decode_responses=True)


def test_plain_url_with_database(lanes: Lanes) -> None:
    """redis://host:port/3 works in database 3 and nowhere else."""
    server = lanes.get("redis")
    assert isinstance(server, Server)
    replies = _through_both(f"redis://127.0.0.1:{server.port}/3")
    assert [reply.status for reply in replies] == ["OK", "OK"]
    with _database(server, 3) as third, server.client() as first:
        assert third.smembers(OPS.keys.rooms(N, A)) == {"1", str(2**63 - 1)}
        assert first.dbsize() == 0
        third.flushdb()


def test_unix_socket(make_server: Callable[..., Server], tmp_path: Path) -> None:
    """unix:///path?db=2 works through the socket."""
    path = tmp_path / "s"
    server = make_server("redis", "--unixsocket", str(path))
    assert [reply.status for reply in _through_both(f"unix://{path}?db=2")] == ["OK", "OK"]
    with _database(server, 2) as client:
        assert client.scard(OPS.keys.rooms(N, A)) == 2
        client.flushdb()


@pytest.fixture
def user(redis_server: Server) -> Iterator[str]:
    """A user with a password that needs encoding; answers the URL's credentials."""
    with redis_server.sync_client() as client:
        client.execute_command("ACL", "SETUSER", "tester", "on", ">p@ss/w:rd", "~coordinator:*", "&*", "+@all")
        yield "tester:p%40ss%2Fw%3Ard"
        client.execute_command("ACL", "DELUSER", "tester")


def test_user_and_password_are_used(redis_server: Server, user: str) -> None:
    """The percent-encoded password of the URL logs that user in."""
    url = f"redis://{user}@127.0.0.1:{redis_server.port}"
    assert [reply.status for reply in _through_both(url)] == ["OK", "OK"]
    with sync_client(url, SETTINGS) as client:
        assert client.acl_whoami() == "tester"


def test_a_wrong_password_is_refused_at_once(redis_server: Server, user: str) -> None:
    """StoreRefused, not a retry until the deadline, and the password is not in the message."""
    url = f"redis://tester:{SECRET}@127.0.0.1:{redis_server.port}"
    with pytest.raises(StoreRefused) as caught:
        _through_both(url)
    assert SECRET not in str(caught.value)


def test_cluster_url(lanes: Lanes) -> None:
    """redis+cluster:// connects, learns the slots and runs Ops; many of them at once come back in order."""
    server = lanes.get("strict")
    assert isinstance(server, Server)
    url = f"redis+cluster://127.0.0.1:{server.port}"
    assert [reply.status for reply in _through_both(url)] == ["OK", "OK"]

    async def run() -> list[Any]:
        store = AsyncStore(async_client(url, SETTINGS))
        try:
            with server.sync_client() as client:
                client.script_flush()
            addresses = [f"10.0.0.{n}:8998" for n in range(30)]
            first = [OPS.sync(Batch(a, A, 1, "reset", NodeView(n + 1), 1, (n,))) for n, a in enumerate(addresses)]
            return await store.many(first)
        finally:
            await store.aclose()

    assert [reply.node.epoch for reply in asyncio.run(run())] == list(range(1, 31))
    with server.sync_client() as client:
        assert client.smembers(OPS.keys.rooms("10.0.0.29:8998", A)) == {"29"}


@pytest.mark.parametrize("kind", ["plain", "sentinel", "cluster"])
def test_nobody_there_is_store_unavailable(kind: str) -> None:
    """Every topology says the same when nothing listens, through both runners, within the deadline."""
    port = free_port()
    url = {
        "plain": f"redis://u:{SECRET}@127.0.0.1:{port}",
        "sentinel": f"redis+sentinel://u:{SECRET}@127.0.0.1:{port}/main",
        "cluster": f"redis+cluster://u:{SECRET}@127.0.0.1:{port}",
    }[kind]
    hurried = Settings(call_timeout_s=0.5, retry_s=0.5)

    async def run() -> None:
        store = AsyncStore(async_client(url, hurried), hurried.retry_s)
        try:
            await store.run(_batch())
        finally:
            await store.aclose()

    with pytest.raises(StoreUnavailable) as caught:
        SyncStore(sync_client(url, hurried), hurried.retry_s).run(_batch())
    assert SECRET not in str(caught.value)
    with pytest.raises(StoreUnavailable) as caught:
        asyncio.run(run())
    assert SECRET not in str(caught.value)


@pytest.fixture
def sentinel(lanes: Lanes, tmp_path: Path) -> Iterator[int]:
    """The port of a Sentinel that watches the "redis" lane under the name main."""
    server = lanes.get("redis")
    assert isinstance(server, Server)
    port = free_port()
    conf = tmp_path / "sentinel.conf"
    conf.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel monitor main 127.0.0.1 {server.port} 1\n"
        "sentinel down-after-milliseconds main 60000\n"
    )
    process = subprocess.Popen([str(server.binary), str(conf), "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: _answers(port), 10, "the sentinel")
        yield port
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as line:
            line.sendall(b"SENTINEL get-master-addr-by-name main\r\n")
            return b"127.0.0.1" in line.recv(200)
    except OSError:
        return False


def test_sentinel_url(lanes: Lanes, sentinel: int) -> None:
    """redis+sentinel:// asks the sentinel for the primary and works there, in the database of the URL."""
    replies = _through_both(f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{sentinel}/main/4")
    assert [reply.status for reply in replies] == ["OK", "OK"]
    server = lanes.get("redis")
    assert isinstance(server, Server)
    with _database(server, 4) as client:
        assert client.scard(OPS.keys.rooms(N, A)) == 2
        client.flushdb()


@pytest.mark.parametrize("build", [sync_client, async_client])
def test_sentinel_client_carries_database_and_credentials(build: Callable[..., Any]) -> None:
    """They are for the primary, not for the sentinels."""
    pool = build(f"redis+sentinel://u:{SECRET}@a:1,b:2/main/4", SETTINGS).connection_pool
    options = pool.connection_kwargs
    assert (pool.service_name, pool.is_master) == ("main", True)
    assert (options["db"], options["username"], options["password"]) == (4, "u", SECRET)
    inner = [one.connection_pool.connection_kwargs for one in pool.sentinel_manager.sentinels]
    assert [(kwargs["host"], kwargs["port"]) for kwargs in inner] == [("a", 1), ("b", 2)]
    assert all(kwargs.get("password") is None for kwargs in inner)


@pytest.mark.parametrize("url", ["redis://h", "unix:///s", "redis+sentinel://a/main"])
@pytest.mark.parametrize("build", [sync_client, async_client])
def test_every_client_has_explicit_limits(build: Callable[..., Any], url: str) -> None:
    """Timeouts from the settings, RESP2, decoded replies, no driver retry, a fixed number of connections."""
    pool = build(url, SETTINGS).connection_pool
    options = pool.connection_kwargs
    assert options["socket_timeout"] == options.get("socket_connect_timeout", 2) == 2
    assert (options["protocol"], options["decode_responses"]) == (2, True)
    assert options["retry"]._retries == 0
    assert pool.max_connections == CONNECTIONS


def test_connecting_runs_no_client_command(redis_server: Server) -> None:
    """A user that may only run scripts connects without a refusal in the server's ACL log (least privilege)."""
    with redis_server.sync_client() as client:
        client.execute_command("ACL", "LOG", "RESET")
        rights = [
            "~coordinator:*",
            "&coordinator:events",
            "-@all",
            "+eval",
            "+evalsha",
            "+@hash",
            "+@set",
            "+@sortedset",
        ]
        rights += ["+@stream", "+@keyspace", "+time", "+publish", "+ping"]
        client.execute_command("ACL", "SETUSER", "narrow", "on", ">pw", *rights)
        try:
            replies = _through_both(f"redis://narrow:pw@127.0.0.1:{redis_server.port}")
            assert [reply.status for reply in replies] == ["OK", "OK"]
            assert cast("list[Any]", client.execute_command("ACL", "LOG")) == []
        finally:
            client.execute_command("ACL", "DELUSER", "narrow")
