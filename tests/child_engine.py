"""Nodes with a real transfer engine, forked off one process that has imported everything. See enginelab.py.

A line of JSON on stdin starts one process: {"url", "ports": [...], "length", "regions"}; it answers with a line
{"pid", "at": {address: where its bytes lie}} once all its nodes are announced. Each port is one node of its own, with
its own engine, its own /health and `length` bytes of its pattern; `regions` makes its announcement as large as a real
pool's.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import redis.asyncio  # noqa: F401  (imported once, not in each child)

from coordinator import PrefillNode, Settings, backends
from coordinator.backends import Memory
from coordinator.demo.child import die_with_parent

SETTINGS = Settings(tick_s=0.1, lease_s=5.0, retention_s=60)


def pattern(port: int, length: int) -> bytes:
    """The bytes of the node at `port`."""
    return (f"{port:05d}".encode("ascii") * (length // 5 + 1))[:length]


def answer_health(listening: socket.socket) -> None:
    """Every request gets 200."""
    while True:
        taken, _ = listening.accept()
        with taken:
            if taken.recv(4096):
                taken.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")


def make(kind: str, memory: int) -> Any:
    """A node's engine."""
    return backends.MooncakeEngine(memory) if kind == "mooncake" else backends.NixlEngine(memory, "node")


def register_more(engine: Any, regions: int) -> Any:
    """Have the library announce many regions, as of a pool with one a layer. What comes back must be kept."""
    more = Memory(4096 * regions)
    parts = [(more.address + 4096 * i, 4096) for i in range(regions)]
    if engine.kind == "mooncake":
        return more, [engine._life.engine.register_memory(at, length) for at, length in parts]
    return more, engine._agent.register_memory([(at, length, 0, "") for at, length in parts], "DRAM")


def serve(kind: str, order: dict[str, Any]) -> None:
    """One process with one node a port, until it is killed."""
    nodes, at = [], {}
    for port in order["ports"]:
        listening = socket.create_server(("127.0.0.1", port), backlog=64)
        threading.Thread(target=answer_health, args=(listening,), daemon=True).start()
        engine = make(kind, order["length"])
        block = engine.lend(order["length"])
        engine.memory.view(block)[:] = pattern(port, order["length"])
        kept = register_more(engine, order["regions"]) if order["regions"] else None
        info = {"engine": engine.announcement()}
        node = PrefillNode(f"127.0.0.1:{port}", order["url"], info=info, settings=SETTINGS)
        nodes.append((node, engine, kept))
        at[node.address] = block.address
    if not all(node.wait_announced() for node, _, _ in nodes):
        sys.exit("a node was not announced")
    os.write(1, json.dumps({"pid": os.getpid(), "at": at}).encode("ascii") + b"\n")  # in one piece: others write too
    while True:
        time.sleep(60)


def main(kind: str) -> None:
    """Fork a process for each line; end with stdin."""
    die_with_parent(os.getppid())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    importlib.import_module(f"coordinator.backends.{kind}_engine").load()
    for line in sys.stdin:
        parent = os.getpid()
        if os.fork() == 0:
            die_with_parent(parent)
            serve(kind, json.loads(line))


if __name__ == "__main__":
    main(sys.argv[1])
