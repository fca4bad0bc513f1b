"""The HTTP probe against real servers on loopback: what each kind of answer, and of silence, is taken for."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from coordinator import HttpProbe, Settings, Sight
from coordinator.decide.detector import Evidence
from coordinator.runtime.probe import BODY_LIMIT, clean_instance, from_os_error, look, read_field

OK, MISCONFIGURED, UNREADY, BAD, REFUSED, TIMEOUT, UNREACHABLE = Evidence
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Speak = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def http(handler: Handler, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """A web server whose every path is `handler`; its address."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        await web.SockSite(runner, listener).start()
        port = listener.getsockname()[1]
        try:
            yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        finally:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def tcp(speak: Speak) -> AsyncIterator[str]:
    """A server that speaks whatever it likes; its address."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await speak(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def look_at(address: str, timeout_s: float = 5.0, **settings: Any) -> Sight:
    """One look of a probe of its own."""
    s = Settings(probe_timeout_s=timeout_s, **settings)
    probe = HttpProbe(s)
    try:
        return await look(probe, address, s.probe_timeout_s)
    finally:
        await probe.aclose()


def seen_of(handler: Handler, **settings: Any) -> Sight:
    """What a probe sees of a web server with that handler."""

    async def run() -> Sight:
        async with http(handler) as address:
            return await look_at(address, **settings)

    return asyncio.run(run())


def seen_of_raw(speak: Speak, timeout_s: float = 5.0, **settings: Any) -> Sight:
    """What a probe sees of a server that speaks like this."""

    async def run() -> Sight:
        async with tcp(speak) as address:
            return await look_at(address, timeout_s, **settings)

    return asyncio.run(run())


def answering(status: int = 200, body: bytes = b"", **headers: str) -> Handler:
    """A handler with one answer."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return handle


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "evidence"),
    [
        (200, OK), (204, OK), (301, OK), (304, OK),
        (400, MISCONFIGURED), (401, MISCONFIGURED), (403, MISCONFIGURED), (404, MISCONFIGURED), (429, MISCONFIGURED),
        (500, BAD), (502, BAD), (504, BAD),
        (503, UNREADY),
    ],
)  # fmt: skip
def test_what_a_status_says(status: int, evidence: Evidence) -> None:
    """2xx and 3xx answer, 4xx is a wrong path or right, 503 is not ready, other 5xx cannot serve (CASE 17)."""
    sight = seen_of(answering(status))
    assert (sight.evidence, sight.detail) == (evidence, f"HTTP {status}")


def test_the_path_is_asked_for_as_configured() -> None:
    """GET of health_path, /health by default."""
    asked: list[tuple[str, str]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append((request.method, request.path_qs))
        return web.Response()

    seen_of(handle)
    seen_of(handle, health_path="/v1/ready?deep=1")
    assert asked == [("GET", "/health"), ("GET", "/v1/ready?deep=1")]


def test_redirects_are_not_followed() -> None:
    """Who answers is who listens at the address; where it points to is never asked."""
    hits: list[str] = []

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        hits.append(request.path)
        return web.Response(headers={"X-Coordinator-Instance": "other"})

    async def run() -> Sight:
        async with http(elsewhere) as target, http(answering(302, Location=f"http://{target}/x")) as address:
            return await look_at(address)

    assert asyncio.run(run()) == Sight(OK, "", "HTTP 302")
    assert hits == []


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"])
def test_proxies_of_the_environment_are_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe goes direct, whatever HTTP_PROXY and friends say (CASE 21)."""
    through: list[str] = []

    async def proxy(request: web.Request) -> web.StreamResponse:
        through.append(str(request.url))
        return web.Response(status=500)

    async def run() -> Sight:
        async with http(proxy) as proxy_address, http(answering()) as address:
            monkeypatch.setenv(name, f"http://{proxy_address}")
            monkeypatch.delenv("NO_PROXY", raising=False)
            monkeypatch.delenv("no_proxy", raising=False)
            return await look_at(address)

    assert asyncio.run(run()).evidence is OK
    assert through == []


def test_each_look_is_a_connection_of_its_own() -> None:
    """A kept connection could be to a process that is gone: two looks come from two ports."""
    ports: list[int] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        return web.Response()

    async def run() -> None:
        async with http(handle) as address:
            probe = HttpProbe(Settings())
            for _ in range(3):
                assert (await probe(address)).evidence is OK
            await probe.aclose()
            await probe.aclose()
            assert (await probe(address)).evidence is OK, "it may be used again"
            await probe.aclose()

    asyncio.run(run())
    assert len(set(ports)) == 4


def test_an_ipv6_address() -> None:
    """The canonical text of an IPv6 node can be probed."""

    async def run() -> Sight:
        async with http(answering(), "::1") as address:
            assert address.startswith("[::1]:")
            return await look_at(address)

    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    assert asyncio.run(run()).evidence is OK


# -- the instance ------------------------------------------------------------------------------------------------------

FIELD = {"instance_field": "node.instance"}
BODY = json.dumps({"node": {"instance": "from-body"}}).encode()

INSTANCES = [
    # settings, headers, body, instance
    ({}, {}, b"", ""),
    ({}, {"X_Coordinator_Instance": "i1"}, b"", "i1"),
    ({}, {"x_coordinator_instance": "i1"}, b"", "i1"),
    ({"instance_header": "X-Pod-Uid"}, {"X_Pod_Uid": "u7", "X_Coordinator_Instance": "i1"}, b"", "u7"),
    ({"instance_header": ""}, {"X_Coordinator_Instance": "i1"}, b"", ""),
    ({}, {"X_Coordinator_Instance": "two words"}, b"", ""),
    ({}, {"X_Coordinator_Instance": "x" * 400}, b"", "x" * 128),
    ({}, {}, BODY, ""),
    (FIELD, {}, BODY, "from-body"),
    (FIELD, {"X_Coordinator_Instance": "from-header"}, BODY, "from-header"),
    (FIELD, {"X_Coordinator_Instance": ""}, BODY, "from-body"),
    (FIELD, {}, b'{"node": {"instance": 17}}', "17"),
    (FIELD, {}, b'{"node": {"instance": null}}', ""),
    (FIELD, {}, b'{"node": {"instance": ["a"]}}', ""),
    (FIELD, {}, b'{"node": "instance"}', ""),
    (FIELD, {}, b'{"other": 1}', ""),
    (FIELD, {}, b"[1, 2]", ""),
    (FIELD, {}, b"not json", ""),
    (FIELD, {}, b"\xff\xfe", ""),
    (FIELD, {}, b"", ""),
]


@pytest.mark.parametrize(("settings", "headers", "body", "instance"), INSTANCES)
def test_where_the_instance_is_read(
    settings: dict[str, Any], headers: dict[str, str], body: bytes, instance: str
) -> None:
    """From the configured header, else from the JSON field; what is not there or malformed is no instance."""
    sight = seen_of(answering(200, body, **headers), **settings)
    assert (sight.evidence, sight.instance) == (OK, instance)


def test_a_body_that_comes_in_pieces_is_read_to_its_end() -> None:
    """The JSON is split over several writes: the instance in its last piece is found."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in (b'{"load": [', b"1, 2, 3", b'], "node": {"inst', b'ance": "late"}}'):
            await response.write(piece)
            await asyncio.sleep(0.02)
        return response

    assert seen_of(handle, **FIELD).instance == "late"


def test_an_endless_body_is_not_read_to_its_end() -> None:
    """At most 64 KiB are read for the field, and nothing at all without one; the answer itself counts."""
    sent = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        sent = 0
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"x" * 8192)
                sent += 8192
        return response

    for settings in ({}, FIELD):
        sight = seen_of(handle, **settings)
        assert (sight.evidence, sight.instance) == (OK, "")
        assert sent < 200 * BODY_LIMIT, "the server was cut off, its socket buffers aside"


def test_read_field_descends() -> None:
    """Dots descend; numbers and texts are instances, other values are not."""
    assert read_field(b'{"a": {"b": {"c": "x"}}}', "a.b.c") == "x"
    assert read_field(b'{"a": "x"}', "a") == "x"
    assert read_field(b'{"a": {"b": 1.5}}', "a.b") == ""


@pytest.mark.parametrize(
    ("text", "clean"),
    [(" i1 \n", "i1"), ("a b", ""), ("\u00e4", ""), ("a\x00b", ""), ("", ""), ("x" * 200, "x" * 128)],
)
def test_an_instance_is_printable_ascii_without_spaces(text: str, clean: str) -> None:
    """It is a word of a list in the store."""
    assert clean_instance(text) == clean


# -- no answers --------------------------------------------------------------------------------------------------------


def test_a_port_where_nobody_listens_is_refused() -> None:
    """Somebody is at that host, and not the node."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for host in ("127.0.0.1", "localhost"):
        sight = asyncio.run(look_at(f"{host}:{port}"))
        assert (sight.evidence, sight.detail) == (REFUSED, "connection refused or reset")


def test_a_reset_counts_as_refused() -> None:
    """The peer's kernel answers RST: the process is gone."""

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    assert seen_of_raw(reset).evidence is REFUSED


def test_a_connection_that_closes_without_an_answer_counts_as_refused() -> None:
    """Accepted by a process that was dying."""

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")

    assert seen_of_raw(close).evidence is REFUSED


async def _swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def _drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for byte in b"HTTP/1.1 200 OK\r\n" + b"X-Slow: 1\r\n" * 1000:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.02)


async def _half_a_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"node": ')
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("speak", "settings"), [(_swallow, {}), (_drip, {}), (_half_a_body, FIELD)], ids=["swallows", "drips", "stalls"]
)
def test_what_does_not_finish_in_time_is_a_timeout(speak: Speak, settings: dict[str, Any]) -> None:
    """Accepting is not answering: silence, a trickle, and half a body that is needed end at the time-out."""
    sight = seen_of_raw(speak, 0.3, **settings)
    assert sight.evidence is TIMEOUT
    assert "0.3 s" in sight.detail


def test_a_body_that_is_not_needed_is_not_waited_for() -> None:
    """The status has been answered: the node lives."""
    assert seen_of_raw(_half_a_body).evidence is OK


def test_a_stopped_process_is_a_timeout() -> None:
    """The kernel accepts for a process that never does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sight = asyncio.run(look_at(f"127.0.0.1:{listener.getsockname()[1]}", 0.2))
    assert sight.evidence is TIMEOUT


@pytest.mark.parametrize(
    ("words", "evidence"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", BAD),
        (b"\x16\x03\x01\x02\x00", BAD),
        (b"-ERR unknown command\r\n", BAD),
        (b"HTTP/1.1 abc\r\n\r\n", BAD),
        (b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n", BAD),
        (b"\n\n\n", TIMEOUT),  # as good as nothing
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_not_http_is_a_miss(words: bytes, evidence: Evidence) -> None:
    """Something else listens there: not the node, and not a refused connection either."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        await writer.drain()
        await asyncio.Event().wait()

    assert seen_of_raw(speak, 0.3 if evidence is TIMEOUT else 5.0).evidence is evidence


def test_hung_addresses_delay_nobody() -> None:
    """Fifty that swallow and one that answers, looked at together by one probe: the one is seen first."""

    async def run() -> tuple[Sight, int]:
        async with tcp(_swallow) as hung, http(answering()) as good:
            probe = HttpProbe(Settings(probe_timeout_s=5))
            looks = [asyncio.create_task(look(probe, hung, 5)) for _ in range(50)]
            await asyncio.sleep(0)
            sight = await look(probe, good, 5)
            waiting = sum(not task.done() for task in looks)
            for task in looks:
                task.cancel()
            await asyncio.gather(*looks, return_exceptions=True)
            await probe.aclose()
            return sight, waiting

    sight, waiting = asyncio.run(run())
    assert (sight.evidence, waiting) == (OK, 50)


@pytest.mark.parametrize(
    ("error", "evidence"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), REFUSED),
        (ConnectionResetError(errno.ECONNRESET, "x"), REFUSED),
        (BrokenPipeError(errno.EPIPE, "x"), REFUSED),
        (ConnectionError("no number"), REFUSED),
        (OSError(errno.EHOSTUNREACH, "no route"), UNREACHABLE),
        (OSError(errno.ENETUNREACH, "no network"), UNREACHABLE),
        (socket.gaierror(socket.EAI_NONAME, "no such name"), UNREACHABLE),
        (OSError(errno.EMFILE, "too many open files"), UNREACHABLE),
    ],
    ids=repr,
)
def test_what_an_errno_says(error: OSError, evidence: Evidence) -> None:
    """Refused and reset speak about the process, the rest about the way to it."""
    assert from_os_error(error).evidence is evidence


@pytest.mark.parametrize(
    ("error", "evidence"),
    [(TimeoutError(), TIMEOUT), (ConnectionRefusedError(), REFUSED), (OSError(errno.EHOSTUNREACH, "x"), UNREACHABLE)],
    ids=repr,
)
def test_a_probe_may_raise_what_its_socket_raises(error: Exception, evidence: Evidence) -> None:
    """A pluggable probe needs no classification of its own."""

    class Broken:
        async def __call__(self, address: str) -> Sight:
            raise error

        async def aclose(self) -> None:
            return

    assert asyncio.run(look(Broken(), "h:1", 1.0)).evidence is evidence


def test_a_probe_that_never_ends_is_ended() -> None:
    """The time-out is the caller's: no probe can hold its address."""

    class Hung:
        async def __call__(self, address: str) -> Sight:
            await asyncio.Event().wait()
            return Sight(OK)

        async def aclose(self) -> None:
            return

    sight = asyncio.run(look(Hung(), "h:1", 0.05))
    assert (sight.evidence, sight.detail) == (TIMEOUT, "no answer within 0.05 s")
