"""A prefill process: a real bootstrap server, real prefill managers that register with it, or both.

    python child_prefill.py '{"backend": "mooncake", "port": 15000, "server": true, "tp_ranks": [0], "tp_size": 1,
                              "host": "127.0.0.1", "plugins": false}'

First line out: {"pid", "version", "port", "rank_ports"}. Orders, beside those of lines.py:
{"do": "health"}: CLOCK_MONOTONIC of each /health request   {"do": "requests"}: [[time, method, path], ...]
{"do": "messages", "tag": "ABORT"}: [[time, rank_port, [frame, ...]], ...] with that frame; all if "tag" is not given
{"do": "send", "rank": 0, "rooms": [...]}: opens a real sender for each room   {"do": "senders"}: {room: status name}
{"do": "close"}: the server's own close()
Requests are counted in aiohttp and messages in pyzmq, so that SGLang's classes are as they are.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import context
import lines
import zmq
from aiohttp import web

SETTINGS = lines.settings()
REQUESTS: list[tuple[float, str, str]] = []
MESSAGES: list[tuple[float, int, list[str]]] = []
SENDERS: dict[int, Any] = {}
BACKEND: str = SETTINGS.get("backend", "common")
PORT: int = SETTINGS["port"]
HOST: str = SETTINGS.get("host", "127.0.0.1")


def _watch_requests() -> None:
    handle = web.Application._handle

    async def counted(app: web.Application, request: web.Request) -> web.StreamResponse:
        REQUESTS.append((time.monotonic(), request.method, request.path))
        return await handle(app, request)

    vars_of_class: Any = web.Application
    vars_of_class._handle = counted


def _watch_messages() -> None:
    receive = zmq.Socket.recv_multipart

    def recorded(pull: Any, *args: Any, **kwargs: Any) -> Any:
        frames = receive(pull, *args, **kwargs)
        if pull.socket_type == zmq.PULL:
            port = int(pull.last_endpoint.rsplit(b":", 1)[1])
            MESSAGES.append((time.monotonic(), port, [frame.decode("ascii", "replace")[:64] for frame in frames]))
        return frames

    zmq.Socket.recv_multipart = recorded


def _receive_for_ever(manager: Any) -> None:
    while True:
        manager.server_socket.recv_multipart()


def _managers() -> list[Any]:
    made = []
    for rank in SETTINGS.get("tp_ranks", [0]):
        size = SETTINGS.get("tp_size", 1)
        made.append(
            context.make_manager(BACKEND, "prefill", tp_rank=rank, tp_size=size, bootstrap_port=PORT, host=HOST)
        )
        if BACKEND == "common":  # its backends bring the thread that receives
            threading.Thread(target=_receive_for_ever, args=(made[-1],), daemon=True).start()
    return made


def _messages(tag: str | None = None) -> list[tuple[float, int, list[str]]]:
    return [message for message in list(MESSAGES) if tag is None or tag in message[2]]


def _send(rooms: list[int], rank: int = 0) -> int:
    for room in rooms:
        SENDERS[room] = context.make_sender(BACKEND, MANAGERS[rank], f"{HOST}:{PORT}", room)
    return len(rooms)


def _wait_for_server(server: Any) -> None:
    """Back when the server listens; it says so by itself only in its log."""
    deadline = time.monotonic() + 20
    while server.thread.is_alive() and time.monotonic() < deadline:
        try:
            socket.create_connection((HOST, PORT), timeout=5).close()
        except OSError:
            time.sleep(0.01)
        else:
            return
    raise AssertionError(f"no bootstrap server at {HOST}:{PORT}")


if __name__ == "__main__":
    _watch_requests()
    _watch_messages()
    SERVER = context.bootstrap_class(BACKEND)(HOST, PORT) if SETTINGS.get("server", True) else None
    if SERVER is not None:
        _wait_for_server(SERVER)
    MANAGERS = _managers()
    ORDERS: dict[str, Callable[..., Any]] = {
        "health": lambda: [at for at, _, path in list(REQUESTS) if path == "/health"],
        "requests": lambda: list(REQUESTS),
        "messages": _messages,
        "send": _send,
        "senders": lambda: {room: context.status_name(sender.poll()) for room, sender in SENDERS.items()},
        "close": lambda: SERVER.close() if SERVER is not None else None,
    }
    NAMES = {"server": SERVER, "managers": MANAGERS, "senders": SENDERS, "context": context}
    lines.serve(ORDERS, NAMES, port=PORT, rank_ports=[manager.rank_port for manager in MANAGERS])
