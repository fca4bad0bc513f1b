"""The demo's prefill node: GET /health, streams of room bytes on the next port, and an announcement in the store.

It holds a room's memory ("KV") from the request until the bytes are out. When a connection breaks it cannot know
whether the worker died or will ask again, so it holds on; the coordinator tells it (`on_orphans`) which rooms died
with their worker, and it frees them then. What nobody claims is freed after UNCLAIMED_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from typing import Any

import redis.asyncio  # noqa: F401  (a node that is started must not spend its first 200 ms on this)
from aiohttp import web

from .. import PrefillNode
from ..address import canonical
from ..backends import Block, EngineFailed
from . import wire
from .audit import process_of
from .child import begin, stop_on_signals, wait_for, wait_for_go
from .facts import Facts
from .pull import Offer, fill, make_engine, offer
from .roles import NodeOptions

__all__ = ["NodeOptions", "NodeProcess", "main"]

logger = logging.getLogger("coordinator.demo.node")

TALLY_S = 0.5
UNCLAIMED_S = 30.0
_REQUEST_S = 10.0
_BACKLOG = 1024


class NodeProcess:
    """One life of a node."""

    def __init__(self, options: NodeOptions) -> None:
        self.address = canonical(options.address)
        self.url, self.wait = options.url, options.wait
        self.share = bool(options.parent)  # the orchestrator starts successors; nobody else may share a port
        host, _, port = self.address.rpartition(":")
        self.bind = options.bind or host.strip("[]")
        self.port = int(port)
        self.facts = Facts(options.facts or None)
        self.instance = f"{os.getpid():x}-{os.urandom(4).hex()}"
        self.engine = make_engine(options.transport, "node")
        self.blocks: dict[tuple[str, int], Block] = {}  # by an engine: where the bytes of a held room lie
        self.held: dict[tuple[str, int], asyncio.Task[None] | None] = {}
        self.probes = self.served = self.broken = self.freed = 0

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        stop = stop_on_signals()
        loop = asyncio.get_running_loop()
        self.facts.write("start", role="node", id=self.instance, pid=os.getpid(), address=self.address)
        ports = [_bound(self.bind, port, self.share) for port in (self.port, self.port + 1)]
        app = web.Application()
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        if self.wait:
            self.facts.write("waiting")
            if not await asyncio.to_thread(wait_for_go):
                return
        await web.SockSite(runner, ports[0], backlog=_BACKLOG).start()
        streams = await asyncio.start_server(self._stream, sock=ports[1], backlog=_BACKLOG)
        self.facts.write("serving")
        logger.info("serving address=%s instance=%s", self.address, self.instance)

        def on_orphans(worker: str, rooms: list[int]) -> None:
            """Called on a thread of the node's; the rooms are acknowledged when this returns."""
            self.facts.write("orphans", worker=worker, rooms=rooms)
            asyncio.run_coroutine_threadsafe(self._free(worker, rooms), loop).result(5)

        info: dict[str, Any] = {"stream_port": self.port + 1, "pid": os.getpid()}
        if self.engine is not None:
            info["engine"] = self.engine.announcement()
        async with PrefillNode(
            self.address, self.url, instance=self.instance, info=info, on_orphans=on_orphans
        ) as node:
            announcing = asyncio.create_task(self._announced(node))
            while not await wait_for(stop, TALLY_S):
                self._tally()
            announcing.cancel()
        self._tally()
        streams.close()
        for task in list(self.held.values()):
            if task is not None:
                task.cancel()
        await runner.cleanup()
        if self.engine is not None:
            self.engine.close(1.0)

    async def _announced(self, node: PrefillNode) -> None:
        """Record that the store knows this instance: rooms opened from now on are this life's."""
        while not await asyncio.to_thread(node.wait_announced, 1.0):
            logger.warning("not_announced_yet address=%s", self.address)
        self.facts.write("announced")

    async def _health(self, request: web.Request) -> web.Response:
        self.probes += 1
        body = {"instance": self.instance, "held": len(self.held), "served": self.served}
        return web.json_response(body, headers={"X-Coordinator-Instance": self.instance})

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        key: tuple[str, int] | None = None
        try:
            line = await asyncio.wait_for(reader.readline(), _REQUEST_S)
            request = wire.RoomRequest.decode(line)
            key = (process_of(request.worker), request.room)
            self.held[key] = asyncio.current_task()
            await self._deliver(key, request, reader, writer)
            self.served += 1
            self._free_memory(key)
            self.held.pop(key, None)
        except (OSError, wire.BrokenTransfer, EngineFailed, ValueError) as exc:
            self.broken += 1
            logger.info("stream_broke room=%s error=%s", key, exc)
            if key in self.held:
                self.held[key] = None
                asyncio.get_running_loop().call_later(UNCLAIMED_S, self._drop, key)
        except asyncio.CancelledError:  # freed as an orphan, or the node ends; nobody awaits this task
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _deliver(
        self,
        key: tuple[str, int],
        request: wire.RoomRequest,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if self.engine is None:
            await wire.send(writer, request)
            return
        self.blocks[key], crc = fill(self.engine, request)
        await offer(reader, writer, Offer(self.instance, self.blocks[key].address, crc))

    def _free_memory(self, key: tuple[str, int]) -> None:
        if self.engine is not None and (block := self.blocks.pop(key, None)) is not None:
            self.engine.take_back(block)

    async def _free(self, worker: str, rooms: list[int]) -> None:
        for room in rooms:
            self._drop((process_of(worker), room))
        logger.info("orphans worker=%s rooms=%d held=%d", worker, len(rooms), len(self.held))

    def _drop(self, key: tuple[str, int]) -> None:
        if key in self.held:
            task = self.held.pop(key)
            self._free_memory(key)
            self.freed += 1
            if task is not None:
                task.cancel()

    def _tally(self) -> None:
        self.facts.write(
            "tally",
            probes=self.probes,
            served=self.served,
            broken=self.broken,
            freed=self.freed,
            held=len(self.held),
        )


def _bound(host: str, port: int, share: bool) -> socket.socket:
    """A socket that holds the port but does not listen yet; `share`: beside the predecessor's, for a quick restart."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if share:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except OSError as exc:
        bound.close()
        hint = "a node takes the port of its address for /health and the next one for the bytes"
        raise OSError(exc.errno, f"cannot listen on {host}:{port}: {exc.strerror}; {hint}") from None
    return bound


def main(options: NodeOptions) -> int:
    """Run a node until it is told to end. Raises ConfigError, InvalidAddress, OSError (port in use)."""
    process = NodeProcess(options)
    asyncio.run(process.run())
    return 0


if __name__ == "__main__":
    sys.exit(begin(NodeOptions, main))
