"""The processes of a run: started as children, struck by faults, ended by pid whatever happens.

Children get a session of their own, so that Ctrl-C reaches the orchestrator alone; the kernel ends them if it is
killed. Must be used from the main thread: the kernel's signal follows the thread that started them.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import CoordinatorError
from .child import encode
from .facts import Fact, FactsFile
from .roles import TCP, NodeOptions, WorkerOptions

READY_S = 30.0
GRACE_S = 5.0
#: Unless it is set already. As between hosts: UCX alone would read the memory of another process of this host directly.
#: Its keepalive aborts the process that was stopped for ten seconds, not the one that waits for it.
ENGINE_ENV = {
    "UCX_TLS": "tcp",
    "UCX_NET_DEVICES": "lo",
    "UCX_KEEPALIVE_INTERVAL": "inf",
    "NIXL_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "2",
}
NODE_MODULE, WORKER_MODULE = "coordinator.demo.node", "coordinator.demo.worker"


class ProcessEnded(CoordinatorError):
    """A child ended although nobody had told it to; the message has the end of its log."""


@dataclass
class Child:
    """One process. `facts` is all that was read from its file so far; `expected` that it may end."""

    role: str
    name: str
    address: str
    process: subprocess.Popen[bytes]
    file: FactsFile
    log: Path
    facts: list[Fact] = field(default_factory=list)
    id: str = ""
    expected: bool = False
    stopped: bool = False

    @property
    def alive(self) -> bool:
        """Runs, perhaps stopped."""
        return self.process.poll() is None

    def look(self) -> list[Fact]:
        """Read what it recorded since the last look."""
        news = self.file.news()
        self.facts += news
        for fact in news:
            if fact["event"] == "start":
                self.id = fact["id"]
        return news

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it is there."""
        if self.alive:
            self.process.send_signal(number)

    def go(self) -> None:
        """Let a child that waits go on."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n  ".join(self.log.read_text(errors="replace").strip().splitlines()[-8:]) or "(empty)"


class Fleet:
    """All children of a run; their files lie in `folder`."""

    def __init__(self, folder: Path, url: str, transport: str = TCP) -> None:
        self.folder = folder
        self.children: list[Child] = []
        self.transport = transport
        self._env = {**(ENGINE_ENV if transport != TCP else {}), **os.environ, "COORDINATOR_URL": url}
        self._paths = [str(Path(__file__).resolve().parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]

    def start_node(self, address: str, *, wait: bool = False) -> Child:
        """Start a node process for `address`; with `wait` it listens only after `go()`."""
        name = f"node-{address.rpartition(':')[2]}-{len(self.children)}"
        options = NodeOptions(
            address, facts=str(self._facts(name)), parent=os.getpid(), wait=wait, transport=self.transport
        )
        return self._start("node", name, address, module=NODE_MODULE, argument=encode(options))

    def start_worker(self, options: WorkerOptions, module: str = WORKER_MODULE, paths: Iterable[str] = ()) -> Child:
        """Start a worker process, which waits for `go()`."""
        options = replace(
            options, facts=str(self._facts(options.name)), parent=os.getpid(), wait=True, transport=self.transport
        )
        return self._start("worker", options.name, "", module=module, argument=encode(options), paths=paths)

    def wait_for(self, children: Iterable[Child], event: str, timeout_s: float = READY_S) -> None:
        """Wait until each child has recorded `event`. Raises ProcessEnded, also after `timeout_s`."""
        missing = list(children)
        deadline = time.monotonic() + timeout_s
        while missing:
            for child in missing:
                child.look()
            missing = [child for child in missing if all(fact["event"] != event for fact in child.facts)]
            self.check()
            if missing and time.monotonic() > deadline:
                late = missing[0]
                raise ProcessEnded(
                    f"{late.name} was not {event} within {timeout_s:g} s; its log ends:\n  {late.tail()}"
                )
            time.sleep(0.01)

    def check(self) -> None:
        """Raise ProcessEnded if a child has ended by itself."""
        for child in self.children:
            if not child.expected and not child.alive:
                code = child.process.returncode
                raise ProcessEnded(
                    f"{child.name} ended by itself (exit status {code}); its log ends:\n  {child.tail()}"
                )

    def kill(self, child: Child) -> None:
        """SIGKILL; returns when it is gone, so that its port is free."""
        child.expected = True
        child.signal(signal.SIGKILL)
        child.process.wait()

    def stop(self, child: Child) -> None:
        """SIGSTOP."""
        child.stopped = True
        child.signal(signal.SIGSTOP)

    def resume(self, child: Child) -> None:
        """SIGCONT."""
        child.stopped = False
        child.signal(signal.SIGCONT)

    def end(self, children: Iterable[Child], grace_s: float = GRACE_S) -> None:
        """SIGTERM, and SIGKILL for whoever is not gone after `grace_s` together. Again: nothing."""
        chosen = list(children)
        for child in chosen:
            child.expected = True
            if child.process.stdin is not None and not child.process.stdin.closed:
                child.process.stdin.close()
            child.signal(signal.SIGTERM)
            if child.stopped:
                self.resume(child)
        deadline = time.monotonic() + grace_s
        for child in chosen:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill(child)

    def _facts(self, name: str) -> Path:
        return self.folder / f"{name}.facts"

    def _start(
        self, role: str, name: str, address: str, *, module: str, argument: str, paths: Iterable[str] = ()
    ) -> Child:
        log = self.folder / f"{name}.log"
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, argument],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self._env, "PYTHONPATH": os.pathsep.join(path for path in (*paths, *self._paths) if path)},
                start_new_session=True,
            )
        child = Child(role, name, address, process, FactsFile(self._facts(name)), log)
        self.children.append(child)
        return child


def free_addresses(count: int) -> list[str]:
    """Loopback addresses whose port and the next one are free, outside the range of outgoing connections.

    A node that is down for a while must find its port free again, and nobody who connects to it meanwhile may get
    that very port as his own.
    """
    first, last = 20_000, min(32_000, _first_ephemeral_port() - 2)
    found: list[str] = []
    for port in random.sample(range(first, last, 2), (last - first) // 2):
        if len(found) == count:
            break
        if _is_free(port) and _is_free(port + 1):
            found.append(f"127.0.0.1:{port}")
    if len(found) < count:
        raise CoordinatorError(f"no {count} pairs of free ports between {first} and {last}")
    return found


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # leftovers of closed connections do not matter
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
