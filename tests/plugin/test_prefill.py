"""SGLang's bootstrap server as a PrefillNode, and rooms of dead decode workers at real prefill managers.

Server and ranks are processes of their own, as in a deployment; SGLang's classes are real, the transfer engines move
nothing. Decode workers are plain coordinator workers in processes of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import types
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import PATIENCE_S, hold
from servers import Server, free_port
from util import wait_until

from coordinator import InvalidAddress, Settings, StoreUnavailable
from coordinator.inspect import address_view
from coordinator.sglang import prefill
from coordinator.sglang.aborts import Aborts, send_aborts
from coordinator.store.keys import Keys

HERE = Path(__file__).resolve().parent
FAST = {"tick_s": 0.05, "lease_s": 1.5, "retention_s": 30.0, "linger_s": 2.0, "retry_s": 3.0}
FAILED, BOOTSTRAPPING, SUCCESS = 0, 1, 4
HEADER = "X-Coordinator-Instance"


class Child:
    """A process that answers JSON lines; its log is a file."""

    def __init__(self, program: Path, *args: str, env: dict[str, str] | None = None) -> None:
        self._log = tempfile.NamedTemporaryFile(prefix="coordinator-child-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(program), *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            text=True, env={**os.environ, **(env or {})},
        )  # fmt: skip
        self.first = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(10)}:\n{self.log()}"
        return json.loads(line)

    def ask(self, do: str, **more: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        assert not (isinstance(answer, dict) and "error" in answer), self.log()
        return answer

    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Its stdin ends; answers its exit code."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait(20)

    def gone(self) -> None:
        self.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self._log.close()


class Bed:
    """The processes of one test, on one store."""

    def __init__(self, store: Server) -> None:
        self.store, self.port = store, free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._made: list[Child] = []
        fast = {f"COORDINATOR_{name.upper()}": str(value) for name, value in FAST.items()}
        self.env = {"COORDINATOR_URL": store.url, "SGLANG_HOST_IP": "127.0.0.1", **fast}

    def child(self, program: str | Path, *args: str, **env: str) -> Child:
        self._made.append(Child(HERE / program, *args, env={**self.env, **env}))
        return self._made[-1]

    def server(self, backend: str = "mooncake", host: str = "127.0.0.1", **env: str) -> Child:
        what = {"role": "server", "backend": backend, "port": self.port, "host": host}
        made = self.child("child_bootstrap.py", json.dumps(what), **env)
        wait_until(lambda: self.health_header() is not None, PATIENCE_S, "the server answers")
        return made

    def ranks(self, backend: str, of: int = 2, **env: str) -> list[Child]:
        what = {"role": "rank", "backend": backend, "port": self.port, "tp_size": of}
        return [self.child("child_bootstrap.py", json.dumps({**what, "tp_rank": n}), **env) for n in range(of)]

    def worker(self, name: str) -> Child:
        return self.child(HERE.parent / "child_worker.py", self.store.url, name, json.dumps(FAST))

    def health_header(self) -> str | None:
        """The instance id in /health, "" if there is none; None if nobody answers."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{self.address}/health", timeout=5) as answer:
            assert answer.read() == b"OK"
            return str(answer.headers.get(HEADER, ""))
        return None

    def node(self, address: str = "") -> dict[str, str]:
        with self.store.client() as client:
            return {
                str(k): str(v) for k, v in client.hgetall(Keys("coordinator").node(address or self.address)).items()
            }

    def await_announced(self, instance: str | None, address: str = "") -> dict[str, str]:
        assert instance
        wait_until(lambda: self.node(address).get("instance") == instance, PATIENCE_S, "it is announced")
        return self.node(address)

    def open_rooms(self) -> int:
        with self.store.client() as client:
            view = address_view(client, Keys("coordinator"), self.address)
            return view.rooms if view else 0

    def end(self) -> None:
        for child in self._made:
            child.gone()


@pytest.fixture
def bed(redis_server: Server) -> Iterator[Bed]:
    made = Bed(redis_server)
    yield made
    made.end()


def test_it_is_announced_with_the_instance_that_health_serves(bed: Bed) -> None:
    """A stock bootstrap server is a node of the store, known by the id that its /health carries; other paths do not."""
    server = bed.server()
    instance = bed.health_header()
    node = bed.await_announced(instance)
    assert (node["state"], node["epoch"]) == ("alive", "1")
    info = json.loads(node["info"])
    assert (info["engine"], info["version"], info["pid"]) == ("sglang", server.first["version"], server.first["pid"])
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://{bed.address}/route", timeout=5)
    assert refused.value.headers.get(HEADER) is None
    refused.value.close()
    assert f"prefill_address address={bed.address}:" in server.log()


def test_a_restart_is_another_instance(bed: Bed) -> None:
    """kill -9 and a start at the same address: another id, the old epoch ends, its open rooms fail at once."""
    first = bed.server()
    before = bed.await_announced(bed.health_header())
    worker = bed.worker("decode")
    worker.ask("join", address=bed.address, rooms=[1, 2])
    wait_until(lambda: bed.open_rooms() == 2, PATIENCE_S, "the rooms are open")
    first.kill()
    bed.server()
    after = bed.await_announced(bed.health_header())
    assert before["instance"] != after["instance"]
    assert int(after["epoch"]) == int(before["epoch"]) + 1
    wait_until(lambda: {told[0] for told in worker.ask("told")} == {1, 2}, PATIENCE_S, "the old rooms failed")


@pytest.mark.parametrize(
    ("backend", "deferred"),
    [("mooncake", "0"), ("mooncake", "1"), ("nixl", "0"), ("nixl", "1"), ("mori", "1"), ("ascend", "1")],
)
def test_rooms_of_a_dead_worker_fail_at_every_rank(bed: Bed, backend: str, deferred: str) -> None:
    """kill -9 of a decode process: exactly its rooms are Failed at each prefill rank; finished ones, a living worker's,
    those of nobody, and the ranks' own threads live on. Twice: what the first round left behind does not stop the next.
    """
    server = bed.server(backend)
    ranks = bed.ranks(backend, SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=deferred)
    dies, lives = bed.worker("dies"), bed.worker("lives")
    first, big, second = list(range(1, 301)), 2**63 - 1, list(range(2001, 2004))
    for rank in ranks:
        rank.ask("open", rooms=[*first, big, *range(1001, 1021), *second, 3001])
        rank.ask("set", rooms=[1], status=SUCCESS)
    dies.ask("join", address=bed.address, rooms=[*first, big])
    lives.ask("join", address=bed.address, rooms=list(range(1001, 1021)))
    wait_until(lambda: bed.open_rooms() == 321, PATIENCE_S, "the rooms are open")
    fds = [child.ask("fds") for child in (server, *ranks)]
    dies.kill()

    living = {1: SUCCESS} | dict.fromkeys([*range(1001, 1021), *second, 3001], BOOTSTRAPPING)
    for rank in ranks:
        expected = living | dict.fromkeys([*first[1:], big], FAILED)
        wait_until(lambda: dict(rank.ask("status")) == expected, PATIENCE_S, "exactly these failed")  # noqa: B023
    dies = bed.worker("dies")
    dies.ask("join", address=bed.address, rooms=second)
    wait_until(lambda: bed.open_rooms() == 23, PATIENCE_S, "the rooms are open")
    dies.kill()
    for rank in ranks:
        expected |= dict.fromkeys(second, FAILED)
        wait_until(lambda: dict(rank.ask("status")) == expected, PATIENCE_S, "these too")  # noqa: B023
        assert rank.ask("dead") == []
    sent = server.ask("node")["sent"]
    assert sent == {"rooms_aborted": 304, "messages_sent": 608, "ranks_missed": 0, "rooms_left": 0}
    wait_until(lambda: server.ask("fds") <= fds[0] + 2, PATIENCE_S, "no descriptor is left open at the server")
    for rank, before in zip(ranks, fds[1:], strict=True):
        wait_until(lambda: rank.ask("fds") <= before + 2, PATIENCE_S, "nor at a rank")  # noqa: B023
    assert lives.ask("told") == []


def test_a_number_that_lives_elsewhere_is_left_alone(bed: Bed) -> None:
    """The same room number in a dead and in a living worker: untouched while it lives, also after the patience has run
    out; a sibling that lets go of it within that time frees it.
    """
    server = bed.server("mooncake")
    [rank] = bed.ranks("mooncake", of=1)
    rank.ask("open", rooms=[1, 2, 3])
    dies, lives = bed.worker("dies"), bed.worker("lives")
    dies.ask("join", address=bed.address, rooms=[1, 2, 3])
    lives.ask("join", address=bed.address, rooms=[2, 3])
    wait_until(lambda: bed.open_rooms() == 5, PATIENCE_S, "the rooms are open")
    dies.kill()
    wait_until(lambda: dict(rank.ask("status"))[1] == FAILED, PATIENCE_S, "the one that nobody has")
    lives.ask("leave", address=bed.address, rooms=[2])
    wait_until(lambda: dict(rank.ask("status"))[2] == FAILED, PATIENCE_S, "its sibling let go")
    wait_until(lambda: server.ask("node")["sent"]["rooms_left"] == 1, PATIENCE_S, "patience has run out")
    assert dict(rank.ask("status")) == {1: FAILED, 2: FAILED, 3: BOOTSTRAPPING}
    assert "orphans_live_on" in server.log()


def test_a_worker_that_leaves_frees_its_rooms(bed: Bed) -> None:
    """A decode process that ends in order with rooms open: they are aborted here without waiting for a lease."""
    bed.server("nixl")
    [rank] = bed.ranks("nixl", of=1)
    rank.ask("open", rooms=[1, 2])
    leaves = bed.worker("leaves")
    leaves.ask("join", address=bed.address, rooms=[1])
    wait_until(lambda: bed.open_rooms() == 1, PATIENCE_S, "the room is open")
    leaves.ask("close")
    wait_until(lambda: dict(rank.ask("status")) == {1: FAILED, 2: BOOTSTRAPPING}, PATIENCE_S, "freed")


def test_a_store_that_is_down_at_the_start(bed: Bed) -> None:
    """The server starts and serves without its store, and is announced when the store is there."""
    bed.store.kill()
    server = bed.server()
    instance = bed.health_header()
    wait_until(lambda: "announce_failed" in server.log(), PATIENCE_S, "it says so")
    bed.store.start()
    bed.await_announced(instance)
    assert server.log().count("announce_failed") == 1


@pytest.mark.parametrize(
    ("env", "says", "served"),
    [
        ({"COORDINATOR_URL": "http://127.0.0.1:1"}, "http", True),
        ({"COORDINATOR_ADDRESS": "not a host"}, "not a host", True),
        ({"COORDINATOR_ADDRESS": "0.0.0.0"}, "0.0.0.0", True),
        ({"COORDINATOR_TICK_S": "often"}, "often", False),
        ({"COORDINATOR_INSTANCE_HEADER": "X\r\nY: z"}, "instance_header", False),
    ],
)
def test_wrong_settings_are_one_line_and_stock_behaviour(
    bed: Bed, env: dict[str, str], says: str, served: bool
) -> None:
    """A wrong variable: one warning that names it, no traceback; SGLang serves, and nothing is announced."""
    server = bed.server(**env)
    wait_until(lambda: "prefill_not_announced" in server.log(), PATIENCE_S, "it says so")
    assert server.log().count("prefill_not_announced") == 1
    assert next(iter(env)).removeprefix("COORDINATOR_").lower() in server.log().lower()
    assert says in server.log()
    assert "Traceback" not in server.log()
    assert bool(bed.health_header()) is served
    [rank] = bed.ranks("mooncake", of=1)  # it registers
    assert rank.ask("dead") == []
    with bed.store.client() as client:
        assert client.keys("*") == []
    server.ask("close")
    assert server.end() == 0


def test_without_a_url_nothing_is_different(bed: Bed) -> None:
    """No COORDINATOR_URL: no header, no thread, no driver loaded, not a word in the log."""
    server = bed.server(COORDINATOR_URL="")
    assert bed.health_header() == ""
    assert not [name for name in server.ask("threads") if name.startswith("coordinator")]
    assert server.ask("modules", prefix="redis") == []
    assert "coordinator" not in server.log()


@pytest.mark.parametrize("host", ["0.0.0.0", ""])
def test_a_wildcard_is_announced_as_this_machine(bed: Bed, host: str) -> None:
    """A server that listens everywhere announces the address that SGLang finds for this machine."""
    bed.server(host=host)
    bed.await_announced(bed.health_header())


def test_another_address_by_variable(bed: Bed) -> None:
    """COORDINATOR_ADDRESS says what routers use; its host alone goes with the server's port."""
    bed.server(COORDINATOR_ADDRESS="prefill-0.svc")
    bed.await_announced(bed.health_header(), f"prefill-0.svc:{bed.port}")


def test_a_port_that_is_taken_ends_nobodys_epoch(bed: Bed) -> None:
    """A second server that cannot bind is never announced: the first one's epoch and instance stay."""
    bed.server()
    before = bed.await_announced(bed.health_header())
    second = bed.server()
    wait_until(lambda: "Server error" in second.log(), PATIENCE_S, "SGLang says that it could not bind")
    hold(lambda: bed.node()["instance"] == before["instance"], 0.5, "the first one's")
    assert bed.node()["epoch"] == before["epoch"]
    assert second.ask("node")["health"] is None


def test_close_ends_the_announcement(bed: Bed) -> None:
    """SGLang's close() takes its server and our node away within its two seconds; the process ends by itself."""
    server = bed.server()
    bed.await_announced(bed.health_header())
    server.ask("close")
    assert not [name for name in server.ask("threads") if name.startswith("coordinator")]
    seen = bed.node()["announced_ms"]
    hold(lambda: bed.node()["announced_ms"] == seen, 0.3, "no renewal any more")
    assert server.end() == 0


def test_a_rank_that_is_gone_delays_nobody(bed: Bed) -> None:
    """One of two ranks is dead: the other gets its ABORT all the same, and the miss is counted."""
    server = bed.server("mori")
    ranks = bed.ranks("mori")
    ranks[1].ask("open", rooms=[1])
    ranks[0].kill()
    dies = bed.worker("dies")
    dies.ask("join", address=bed.address, rooms=[1])
    wait_until(lambda: bed.open_rooms() == 1, PATIENCE_S, "the room is open")
    dies.kill()
    wait_until(lambda: dict(ranks[1].ask("status")) == {1: FAILED}, PATIENCE_S, "the living rank")
    wait_until(lambda: server.ask("node")["sent"]["ranks_missed"] == 1, PATIENCE_S, "the miss is counted")
    assert "abort_not_sent" in server.log()


@pytest.mark.parametrize(
    ("given", "host", "expected"),
    [
        ("", "10.0.0.5", "10.0.0.5:8998"),
        ("", "Prefill-0.svc", "prefill-0.svc:8998"),
        ("", "2001:DB8::1", "[2001:db8::1]:8998"),
        ("", "localhost", "localhost:8998"),
        ("10.0.0.6", "0.0.0.0", "10.0.0.6:8998"),
        ("10.0.0.6:9000", "0.0.0.0", "10.0.0.6:9000"),
        ("::1", "0.0.0.0", "[::1]:8998"),
        ("[::1]", "0.0.0.0", "[::1]:8998"),
        ("[::1]:9000", "0.0.0.0", "[::1]:9000"),
        (" prefill-0 ", "10.0.0.5", "prefill-0:8998"),
    ],
)
def test_the_address_that_is_announced(monkeypatch: pytest.MonkeyPatch, given: str, host: str, expected: str) -> None:
    """From the server's host and port, and COORDINATOR_ADDRESS over them."""
    monkeypatch.setenv("COORDINATOR_ADDRESS", given)
    assert prefill.announced_address(host, 8998) == expected


@pytest.mark.parametrize(
    "given", ["a b", "host:", "host:99999", "0.0.0.0", "::", "[::1", "http://host", "fe80::1%eth0"]
)
def test_an_address_that_cannot_be_used_names_the_variable(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """The error names the variable and its value."""
    monkeypatch.setenv("COORDINATOR_ADDRESS", given)
    with pytest.raises(InvalidAddress, match="COORDINATOR_ADDRESS="):
        prefill.announced_address("10.0.0.5", 8998)


def test_aborts_wait_for_the_store_and_end_with_close() -> None:
    """While nobody can say who lives, nothing is sent and nothing raised; close() ends the wait."""
    asked: list[list[int]] = []

    def away(rooms: list[int]) -> set[int]:
        asked.append(rooms)
        raise StoreUnavailable("away")

    def ranks() -> list[tuple[str, int]]:
        raise AssertionError("sent without knowing who lives")

    aborts = Aborts(ranks, away, 0.05)
    thread = threading.Thread(target=aborts, args=("w", [1]))
    thread.start()
    wait_until(lambda: len(asked) >= 3, PATIENCE_S, "it asks again")
    aborts.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert aborts.counters["rooms_left"] == 1


async def _announced_after_bind(port: int) -> list[bool]:
    from aiohttp import web

    server = types.SimpleNamespace(host="127.0.0.1", port=port, prefill_port_table={}, app=web.Application())
    announcer = prefill.Announcer(server, Settings.load({}, url="redis://127.0.0.1:1", **FAST))
    announcer.install(server.app)
    server._runner = web.AppRunner(server.app)
    await server._runner.setup()
    await asyncio.sleep(0.5)
    seen = [announcer.node is not None]
    await web.TCPSite(server._runner, host="127.0.0.1", port=port).start()
    for _ in range(500):
        await asyncio.sleep(0.02)
        if announcer.node is not None:
            break
    seen.append(announcer.node is not None)
    await server._runner.cleanup()
    return [*seen, announcer.node._closed]


def test_nothing_is_announced_before_the_port_is_bound() -> None:
    """No node while the application has started and does not listen; a node once it does; closed with the server."""
    assert asyncio.run(_announced_after_bind(free_port())) == [False, True, True]


def test_a_hook_that_fails_is_a_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with the server that we are given: its own result comes back, and one line is logged."""
    monkeypatch.setenv("COORDINATOR_URL", "redis://127.0.0.1:1")
    assert prefill.setup_routes(lambda server: "its own", object()) == "its own"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_ports_that_nobody_listens_on() -> None:
    """Sending to nobody ends in bounded time, names the rank, and leaves nothing open."""
    before = len(os.listdir("/proc/self/fd"))
    missed = send_aborts([("127.0.0.1", free_port()), ("bad host", 1)], [1, 2])
    assert {ip for (ip, _), _ in missed} == {"127.0.0.1", "bad host"}
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, PATIENCE_S, "all is closed")
