"""One process of a prefill deployment: SGLang's bootstrap server with our hook alone, or one rank without any hook.

    python child_bootstrap.py '{"role": "server", "backend": "mooncake", "port": 15000, "host": "127.0.0.1"}'
    python child_bootstrap.py '{"role": "rank", "backend": "mooncake", "port": 15000, "tp_rank": 0, "tp_size": 2}'

First line out: {"pid", "version"}. Orders, beside those of lines.py:
server: {"do": "node"}: health of the node, what was sent   {"do": "close"}: SGLang's close()
rank:   {"do": "open", "rooms": [...]}: a sender for each   {"do": "set", "rooms": [...], "status": 0-4}
        {"do": "status"}: [[room, 0-4], ...]   {"do": "dead"}: names of its threads that have ended
both:   {"do": "fds"}: open descriptors
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any

import lines

SETTINGS = lines.settings()
import context  # noqa: E402 - only now can SGLang be imported

BACKEND: str = SETTINGS["backend"]


def _server() -> Any:
    """As SGLang's launcher makes it after its plug-ins were loaded."""
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    prefill = importlib.import_module("coordinator.sglang.prefill")
    for target, hook, kind in prefill.hooks():
        registry.HookRegistry.register(target, hook, registry.HookType(kind))
    registry.HookRegistry.apply_hooks()
    return context.bootstrap_class(BACKEND)(SETTINGS["host"], SETTINGS["port"])


def _rank() -> Any:
    size = {"tp_rank": SETTINGS["tp_rank"], "tp_size": SETTINGS["tp_size"]}
    return context.make_manager(BACKEND, "prefill", bootstrap_port=SETTINGS["port"], **size)


def _node() -> Any:
    announcer = MADE.app.on_cleanup[-1].__self__
    return {
        "health": announcer.node and announcer.node.health(),
        "sent": announcer.aborts.counters if announcer.aborts else {},
    }


def _close() -> None:
    MADE.close()


def _open(rooms: list[int]) -> int:
    for room in rooms:
        SENDERS[room] = context.make_sender(BACKEND, MADE, "127.0.0.1:1", room)
    return len(rooms)


def _set(rooms: list[int], status: int) -> None:
    for room in rooms:
        MADE.update_status(room, status)


def _status() -> list[tuple[int, int]]:
    return [(room, int(status)) for room, status in dict(MADE.request_status).items()]


if __name__ == "__main__":
    SENDERS: dict[int, Any] = {}
    BEFORE = set(threading.enumerate())
    MADE = {"server": _server, "rank": _rank}[SETTINGS["role"]]()
    THREADS = [thread for thread in threading.enumerate() if thread not in BEFORE]
    lines.serve(
        {
            "node": _node,
            "close": _close,
            "open": _open,
            "set": _set,
            "status": _status,
            "dead": lambda: [thread.name for thread in THREADS if not thread.is_alive()],
            "fds": lambda: len(os.listdir("/proc/self/fd")),
        },
        {"made": MADE, "context": context},
    )
