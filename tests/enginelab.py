"""What the tests of real engines share: whether they can run, and nodes in processes that can be killed.

with Nodes("nixl", url) as nodes:
    (node,) = nodes.start([port])       # node.pid, node.at[address]
    node.kill(); node.pause(); node.resume()
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from child_engine import make, pattern
from util import wait_until

from coordinator.backends import EngineMissing

__all__ = ["Node", "Nodes", "engine_or_skip", "pattern", "rss_kib"]

HERE = Path(__file__).parent
#: As between hosts: over TCP, and on loopback only. UCX alone would read another process's memory directly.
QUIET = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "FATAL"}


def engine_or_skip(kind: str, size_bytes: int, **more: Any) -> Any:
    """An engine; skips if its package is missing, unless COORDINATOR_REQUIRE_ENGINES=1."""
    os.environ.update(QUIET)
    try:
        engine = make(kind, size_bytes)
    except EngineMissing as exc:
        if os.environ.get("COORDINATOR_REQUIRE_ENGINES") == "1":
            raise
        pytest.skip(str(exc))
    for name, value in more.items():
        setattr(engine, name, value)
    return engine


def rss_kib() -> int:
    """Resident memory of this process, KiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


@dataclass
class Node:
    """A process with one or more nodes; `at` says where the bytes of each address lie in it."""

    pid: int
    at: dict[str, int]

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP; returns when every thread of it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: all(state == "T" for state in self._states()), what=f"{self.pid} to stop")

    def _states(self) -> list[str]:
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks]

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)


class Nodes:
    """Starts such processes; all end with it."""

    def __init__(self, kind: str, url: str, length: int = 65536, regions: int = 0) -> None:
        self.order = {"url": url, "length": length, "regions": regions}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "child_engine.py"), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **QUIET, "PYTHONPATH": str(HERE.parent), "GLOG_minloglevel": "3"},
            text=True,
            start_new_session=True,
        )

    def start(self, *groups: list[int]) -> list[Node]:
        """One process for each group of ports; back when all are announced."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for ports in groups:
            self._process.stdin.write(json.dumps({**self.order, "ports": ports}) + "\n")
        self._process.stdin.flush()
        return [Node(**json.loads(self._process.stdout.readline())) for _ in groups]

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._process.kill()  # the forked ones end with it
        self._process.communicate()
