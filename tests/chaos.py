"""A TCP proxy on loopback that does what networks do: lost replies, lost requests, delay, silence, resets.

    with Chaos(server.port) as net:
        client = redis.Redis(port=net.port, ...)      # or net.url
        cut = net.cut_reply(b"EVALSHA")               # the next such request is executed, its answer is lost
        ...
        assert cut.is_set()                           # it happened

Everything is a plain attribute or a method that any thread may use. `accepted` counts connection attempts.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from dataclasses import dataclass, field
from types import TracebackType

_RST = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close() sends RST instead of FIN
_KEPT = 1 << 16


@dataclass(eq=False)
class _Link:
    """One proxied connection: the writers towards client and server, and the last bytes the client sent."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    sent: bytes = b""
    cut: threading.Event | None = None

    def reset(self) -> None:
        for side in (self.client, self.server):
            with contextlib.suppress(OSError):
                side.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
            side.transport.abort()


@dataclass
class Chaos:
    """Proxy to 127.0.0.1:`upstream`. Harmless until told otherwise; ends with `close`."""

    upstream: int
    delay_s: float = 0.0  # every chunk of bytes, either way, is held for this long
    blackhole: bool = False  # connections are accepted, bytes are kept, nothing arrives; False lets them go on
    refuse: bool = False  # new connections are reset at once
    accepted: int = 0  # connection attempts so far, refused ones too
    _cut: tuple[bytes, threading.Event] | None = None
    _lose: tuple[bytes, threading.Event] | None = None
    _mute: bytes | None = None
    _links: set[_Link] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"chaos :{self.port}", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    # -- what a test says ---------------------------------------------------------------------------------------

    def cut_reply(self, needle: bytes) -> threading.Event:
        """The next request with `needle` in it reaches the server; when its answer comes, the connection is reset."""
        self._cut = (needle, threading.Event())
        return self._cut[1]

    def lose_request(self, needle: bytes) -> threading.Event:
        """The next request with `needle` in it is thrown away and the connection is reset."""
        self._lose = (needle, threading.Event())
        return self._lose[1]

    def mute(self, needle: bytes) -> None:
        """Connections whose client has sent `needle` (lately, or from now on) stay open and hear nothing more."""
        self._mute = needle

    def heal(self) -> None:
        """Be harmless again; what was black-holed is delivered, muted bytes are lost."""
        self.delay_s, self.blackhole, self.refuse = 0.0, False, False
        self._cut = self._lose = self._mute = None

    def reset(self) -> None:
        """Reset every connection that is open now."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(self._reset_all, done)
        assert done.wait(5), "the proxy's thread does not answer"

    def close(self) -> None:
        """Reset everything and end the proxy. Again: nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)

    def __enter__(self) -> Chaos:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- the proxy's own thread ---------------------------------------------------------------------------------

    def _reset_all(self, done: threading.Event) -> None:
        for link in list(self._links):
            link.reset()
        done.set()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._listener))
        try:
            self._loop.run_forever()
        finally:
            server.close()
            self._reset_all(threading.Event())
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        except OSError:
            _Link(writer, writer).reset()
            return
        link = _Link(writer, up_writer)
        if self.refuse:
            link.reset()
            return
        self._links.add(link)
        try:
            await asyncio.gather(self._requests(reader, link), self._replies(up_reader, link))
        except (OSError, asyncio.CancelledError):
            pass  # either side went away or was reset on purpose, or the proxy ends
        finally:
            self._links.discard(link)
            link.client.close()
            link.server.close()

    async def _held(self) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        while self.blackhole:  # noqa: ASYNC110 (other threads set the flag)
            await asyncio.sleep(0.005)

    async def _requests(self, reader: asyncio.StreamReader, link: _Link) -> None:
        while chunk := await reader.read(_KEPT):
            await self._held()
            before, link.sent = link.sent, (link.sent + chunk)[-_KEPT:]
            if self._lose is not None and _arrives(self._lose[0], before, chunk):
                (_, event), self._lose = self._lose, None
                link.reset()
                event.set()
                return
            if self._cut is not None and _arrives(self._cut[0], before, chunk):
                (_, link.cut), self._cut = self._cut, None
            link.server.write(chunk)
            await link.server.drain()
        link.server.write_eof()

    async def _replies(self, reader: asyncio.StreamReader, link: _Link) -> None:
        while chunk := await reader.read(_KEPT):
            if link.cut is not None:
                link.reset()
                link.cut.set()
                return
            await self._held()
            if self._mute is not None and self._mute in link.sent:
                continue
            link.client.write(chunk)
            await link.client.drain()
        link.client.close()


def _arrives(needle: bytes, before: bytes, chunk: bytes) -> bool:
    """Whether `needle` ends in this chunk; it may have begun in an earlier one."""
    overlap = len(needle) - 1
    return needle in (before[-overlap:] if overlap else b"") + chunk
