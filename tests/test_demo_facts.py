"""What processes write down, and how a room's bytes travel."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from coordinator.demo import facts, wire
from coordinator.demo.wire import BrokenTransfer, RoomRequest


def test_facts_come_back_as_written(tmp_path: Path) -> None:
    """Each fact is one line with its time; 63-bit room numbers stay exact; a second look gives the news only."""
    path = tmp_path / "a.facts"
    log, file = facts.Facts(path), facts.FactsFile(path)
    first = log.write("opened", address="h:1", room=2**63 - 1)
    assert [{"t": first, "event": "opened", "address": "h:1", "room": 2**63 - 1}] == file.news()
    second = log.write("left", room=1)
    assert [{"t": second, "event": "left", "room": 1}] == file.news()
    assert file.news() == []


def test_a_torn_last_line_is_left_until_it_is_whole(tmp_path: Path) -> None:
    """Half a line of a killed process is no fact, and no error."""
    path = tmp_path / "a.facts"
    facts.Facts(path).write("opened")
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"t": 5, "ev')
    file = facts.FactsFile(path)
    assert [fact["event"] for fact in file.news()] == ["opened"]
    with open(path, "ab") as more:
        more.write(b'ent": "left"}\n')
    assert file.news() == [{"t": 5, "event": "left"}]
    assert len(facts.read_all(path)) == 2


def test_a_malformed_line_is_not_passed_over(tmp_path: Path) -> None:
    """Any line but the last must be a fact: the audit would be about nothing otherwise."""
    for line in ("oops", "[]", "{}", json.dumps({"t": "1", "event": "x"})):
        path = tmp_path / "a.facts"
        path.write_text(line + "\n")
        with pytest.raises(ValueError, match="no fact"):
            facts.read_all(path)


def test_a_missing_file_or_no_file_is_no_fact(tmp_path: Path) -> None:
    """A process that was killed before it wrote anything, and one that records nothing."""
    assert facts.read_all(tmp_path / "none") == []
    facts.Facts(None).write("opened")


def test_a_request_is_read_as_written() -> None:
    """The line that asks for a room round-trips; its size follows from the tokens."""
    request = RoomRequest("decode-0#0123abcd", 2**63 - 1, 100)
    assert request == RoomRequest.decode(request.encode())
    assert request.size == 1600
    assert RoomRequest("w", 1, 0).size == wire.BYTES_PER_TOKEN


@pytest.mark.parametrize(
    "line", [b"", b"ROOM w 1 1", b"GET / HTTP/1.1\n", b"ROOM w -1 1\n", b"ROOM w 1 x\n", b"ROOM w 1 99999999999\n"]
)
def test_another_line_is_no_request(line: bytes) -> None:
    """Whatever else connects is refused."""
    with pytest.raises(BrokenTransfer):
        RoomRequest.decode(line)


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def _transfer(serve: Serve, request: RoomRequest) -> int:
    """Receive one room from a server that does `serve`; returns how often its beginning was told."""
    began: list[bool] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            writer.write(request.encode())
            await wire.receive(reader, request.size, lambda: began.append(True))
        finally:
            writer.close()
    return len(began)


def test_a_room_arrives_whole() -> None:
    """Bytes and sum pass over a real socket, and the first bytes are told once."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await wire.send(writer, RoomRequest.decode(await reader.readline()))

    assert asyncio.run(_transfer(serve, RoomRequest("w", 77, 3000))) == 1


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (b"", "1600 bytes before the end"),
        (b"x" * 1000, "600 bytes before the end"),
        (b"x" * 1600, "before the sum"),
        (b"x" * 1600 + b"abcd", "do not match"),
    ],
)
def test_a_room_that_arrives_otherwise_is_broken(answer: bytes, what: str) -> None:
    """Too few bytes, no sum and a wrong sum are told apart."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)

    with pytest.raises(BrokenTransfer, match=what):
        asyncio.run(_transfer(serve, RoomRequest("w", 77, 100)))


def test_the_streams_are_on_the_next_port() -> None:
    """Also for IPv6 addresses."""
    assert wire.stream_port("10.0.0.5:8998") == 8999
    assert wire.stream_port("[2001:db8::1]:8998") == 8999
