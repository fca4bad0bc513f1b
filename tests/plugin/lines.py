"""What both child programs share: settings in argv, orders as JSON lines on stdin, one JSON line for each on stdout.

An order that raises is answered with {"error": text}; the traceback goes to stderr, which the parent keeps.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # after this directory: both have an engines.py

import loopback
import standins


def settings() -> dict[str, Any]:
    """The parent's settings; this process can reach only this machine from now on, and SGLang can be imported."""
    loopback.watch()
    logging.basicConfig(level=os.environ.get("TEST_LOG", "INFO"), format="%(name)s %(levelname)s %(message)s")
    logging.getLogger("urllib3").setLevel(logging.WARNING)
    standins.boot()
    given: dict[str, Any] = json.loads(sys.argv[1])
    if given.get("plugins"):
        from sglang.srt.plugins import load_plugins

        load_plugins()
    return given


def serve(orders: dict[str, Callable[..., Any]], names: dict[str, Any], **ready: Any) -> None:
    """Say `ready`, then answer orders until stdin ends. Every child knows those of _common() as well."""
    say({"pid": os.getpid(), "version": standins.version(), **ready})
    known = {**_common(names), **orders}
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = known[order.pop("do")](**order)
        except Exception as exc:
            traceback.print_exc()
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        say(answer)


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def _common(names: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    def python(code: str) -> Any:
        """Run `code` with the child's names; its answer is what it leaves in `result`."""
        exec(code, names)
        return names.pop("result", None)

    return {
        "python": python,
        "threads": lambda: sorted(thread.name for thread in threading.enumerate()),
        "modules": lambda prefix: sorted(m for m in sys.modules if m == prefix or m.startswith(prefix + ".")),
        "now": time.monotonic,
        "outside": lambda: list(loopback.stopped),
    }
