"""Tiny nodes that answer /health over real sockets, in this process or as a process of their own.

    with Farm() as farm:
        node = farm.node(instance="life-1")     # node.address; set node.status, .instance, .delay_s, .swallow, .reset
        node.stop(); node.start()               # the port refuses; the port answers again
    with NodeProcess("life-1") as node:         # node.kill(), node.pause(), node.resume(), node.start("life-2")

A farm is one thread with one event loop, whatever the number of nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

HEADER = "X-Coordinator-Instance"
_RST = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close() sends RST instead of FIN


@dataclass(eq=False)
class FakeNode:
    """One address. Plain attributes, which any thread may set, say how it behaves from the next request on."""

    farm: Farm
    port: int
    instance: str = ""  # sent in the instance header; empty: no such header
    status: int | Callable[[int], int] = 200  # or a function of the number of the request (1 is the first)
    body: str = "ok"
    delay_s: float = 0.0
    swallow: bool = False  # the connection is accepted, nothing is ever answered
    reset: bool = False  # the connection is reset instead of answered
    asked: int = 0  # requests so far
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen on the port; back when connections are accepted."""
        self.farm.run(self._start())

    def stop(self) -> None:
        """Stop listening and drop what is open: the port refuses from now on. Again: nothing."""
        self.farm.run(self._stop())

    async def _start(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=512)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the prober went away, or the node stops
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        if self.swallow:
            await asyncio.sleep(3600)
        if self.reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
            writer.transport.abort()
            return
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        status = self.status(self.asked) if callable(self.status) else self.status
        writer.write(response(status, self.instance, self.body))
        await writer.drain()


def response(status: int, instance: str, body: str) -> bytes:
    """The bytes of one HTTP answer that ends the connection."""
    header = f"{HEADER}: {instance}\r\n" if instance else ""
    return (
        f"HTTP/1.1 {status} Status\r\n{header}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    ).encode()


class Farm:
    """Any number of in-process nodes on one thread."""

    def __init__(self) -> None:
        self.nodes: list[FakeNode] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake nodes", daemon=True)
        self._thread.start()

    def node(self, instance: str = "", **behaviour: Any) -> FakeNode:
        """A node that answers on a free port."""
        node = FakeNode(self, behaviour.pop("port", 0), instance, **behaviour)
        node.start()
        self.nodes.append(node)
        return node

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` on the farm's loop and wait for it."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def close(self) -> None:
        """Stop every node and end the thread."""
        if not self._thread.is_alive():
            return
        for node in self.nodes:
            node.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def __enter__(self) -> Farm:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class NodeProcess:
    """A node as a process: it can be killed, stopped and started again on the same port."""

    def __init__(self, instance: str = "life-1") -> None:
        from servers import free_port

        self.port = free_port()
        self._process: subprocess.Popen[str] | None = None
        self.start(instance)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, instance: str) -> None:
        """Start it as `instance`; back when it answers. Ends what ran before."""
        from coordinator.store.embedded import owned_command

        self.kill()
        self.instance = instance
        argv = [sys.executable, "-S", str(Path(__file__)), str(self.port), instance]
        self._process = subprocess.Popen(owned_command(argv), stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", f"no node on port {self.port}"

    def kill(self) -> None:
        """SIGKILL; back when the port refuses. Again: nothing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None

    def pause(self) -> None:
        """SIGSTOP: the kernel accepts connections, nobody answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> NodeProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()


def _main(port: int, instance: str) -> None:
    """The process: answer every request on `port` with 200."""
    with socket.create_server(("127.0.0.1", port), backlog=128) as listener:
        os.write(1, b"ready\n")
        while True:
            link, _ = listener.accept()
            with link, contextlib.suppress(OSError):
                link.settimeout(2)
                link.recv(4096)
                link.sendall(response(200, instance, "ok"))


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
