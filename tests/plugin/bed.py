"""Real prefill and decode processes of SGLang for a test, and cheap prefill nodes by the hundred.

    with Bed() as bed:
        node = bed.prefill("mooncake")                         # a process; node.address, kill, pause, resume, restart
        ranks = bed.decodes(8, "mooncake", url=redis_url)      # eight processes; without url the plug-in is inert
        bed.ask(ranks, do="ensure", address=node.address)
        ranks[0].ask(do="open", address=node.address, rooms=[1, 2])
        fakes = bed.fakes(5); fakes[0].hung = True              # in this process: /route and /health over real sockets

All that was started is ended by its pid when the block ends. The orders are in child_decode.py, child_prefill.py and
lines.py; an order that raised in the child raises ChildError here, with the end of the child's log.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import parse_qs, urlsplit

from fakenode import HEADER, Farm
from servers import free_port

from coordinator.store.embedded import owned_command

HERE = Path(__file__).resolve().parent
READY_S = 60.0


class ChildError(AssertionError):
    """A child answered with an error, or ended, or stayed silent."""


C = TypeVar("C", bound="Child")


class Child:
    """One process that answers JSON lines; `ready` is its first line."""

    def __init__(self, program: str, settings: dict[str, Any], env: dict[str, str]) -> None:
        self.settings = settings
        self.ready: dict[str, Any] = {}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 -- close() closes it
        self._buffer = b""
        command = owned_command([sys.executable, str(HERE / program), json.dumps(settings)])
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=env, cwd=HERE
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def await_ready(self) -> Self:
        self.ready = self.read(READY_S)
        return self

    def ask(self, timeout_s: float = 60.0, **order: Any) -> Any:
        """Send an order and return its answer."""
        self.send(**order)
        return self.read(timeout_s)

    def send(self, **order: Any) -> None:
        """Send an order; its answer is what the next `read` returns."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildError(f"child ended (code {self._process.wait(5)}):\n{self.log()[-3000:]}") from None

    def read(self, timeout_s: float = 60.0) -> Any:
        """The next answer."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            wait_s = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], wait_s)[0]:
                raise ChildError(f"no answer within {timeout_s:g} s:\n{self.log()[-3000:]}")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise ChildError(f"child ended (code {self._process.wait(5)}):\n{self.log()[-3000:]}")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise ChildError(f"{answer['error']}\n{self.log()[-3000:]}")
        return answer

    def log(self) -> str:
        """What the child has written to stderr: SGLang's log, ours and every traceback."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode("utf-8", "replace")

    def kill(self) -> float:
        """SIGKILL; back when the process is gone, with CLOCK_MONOTONIC of the signal. Again: nothing."""
        at = time.monotonic()
        if self.alive:
            self._process.kill()
        self._process.wait(10)
        return at

    def pause(self) -> None:
        """SIGSTOP: its sockets accept, nobody answers."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def finish(self, timeout_s: float = 20.0) -> int:
        """End its stdin, so that it leaves as a Python program does; returns its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(timeout_s)

    def close(self) -> None:
        """Kill it if it runs, and give back its files."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._log.close()


class Prefill(Child):
    """A prefill process: see child_prefill.py."""

    @property
    def address(self) -> str:
        return f"{self.settings.get('host', '127.0.0.1')}:{self.settings['port']}"

    @property
    def rank_ports(self) -> list[int]:
        return list(self.ready["rank_ports"])


class Decode(Child):
    """A decode rank: see child_decode.py."""

    @property
    def rank_port(self) -> int:
        return int(self.ready["rank_port"])


class FakePrefill:
    """One prefill node in this process: /route and /health are answered as SGLang's bootstrap server does.

    Plain attributes, which any thread may set: `hung` (accept, never answer), `status` of /health, `instance`.
    `healths` has the CLOCK_MONOTONIC of every /health request that was read.
    """

    def __init__(self, farm: Farm, port: int = 0, rank_port: int = 9) -> None:
        self._farm = farm
        self._port = port
        self._server: Any = None
        self._tasks: set[Any] = set()
        self.rank_port = rank_port
        self.hung = False
        self.status = 200
        self.instance = ""
        self.healths: list[float] = []
        self.start()

    @property
    def port(self) -> int:
        return self._port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen; back when connections are accepted."""
        self._farm.run(self._start())

    def stop(self) -> None:
        """Stop listening and drop what is open. Again: nothing."""
        self._farm.run(self._stop())

    async def _start(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, backlog=512)
            self._port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: Any, writer: Any) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                target = head.split(b" ", 2)[1].decode()
                if target.startswith("/health"):
                    self.healths.append(time.monotonic())
                if self.hung:
                    await asyncio.sleep(3600)
                writer.write(self._answer(target))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client went away, or the node stops
        finally:
            self._tasks.discard(task)
            writer.close()

    def _answer(self, target: str) -> bytes:
        status, body = self.status, "OK"
        parts = urlsplit(target)
        if parts.path == "/route":
            status, body = 200, json.dumps(self._route(parse_qs(parts.query)))
        header = f"{HEADER}: {self.instance}\r\n" if self.instance else ""
        return f"HTTP/1.1 {status} Status\r\n{header}Content-Length: {len(body)}\r\n\r\n{body}".encode()

    def _route(self, query: dict[str, list[str]]) -> dict[str, Any]:
        if query["prefill_dp_rank"] != ["-1"]:
            return {"rank_ip": "127.0.0.1", "rank_port": self.rank_port}
        sizes = {f"{axis}_size": 1 for axis in ("attn_tp", "attn_cp", "dp", "pp", "page")}
        return {**sizes, "kv_cache_dtype": "auto", "follow_bootstrap_room": True}


class Bed:
    """All processes and nodes of one test."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._farm: Farm | None = None
        self._fakes: list[FakePrefill] = []

    def prefill(self, backend: str = "common", *, port: int = 0, url: str | None = None, **settings: Any) -> Prefill:
        """A prefill process that answers at its address, its ranks registered; `plugins` are loaded if `url` is given.

        Settings: server (True), tp_ranks ([0]), tp_size (1), host, plugins, env (more variables).
        """
        return self._start(Prefill, "child_prefill.py", url, backend=backend, port=port or free_port(), **settings)

    def decode(self, backend: str = "common", *, url: str | None = None, **settings: Any) -> Decode:
        """A decode rank, ready; SGLang loads its plug-ins, and COORDINATOR_URL is `url` or unset.

        Settings: tp_rank (0), tp_size (1), plugins (True), env (more variables).
        """
        return self.decodes(1, backend, url=url, **settings)[0]

    def decodes(self, n: int, backend: str = "common", *, url: str | None = None, **settings: Any) -> list[Decode]:
        """`n` decode ranks of one tensor-parallel group, started together."""
        size = settings.pop("tp_size", n)
        first = settings.pop("tp_rank", 0)
        settings.setdefault("plugins", True)
        ranks = [
            self._spawn(Decode, "child_decode.py", url, backend=backend, tp_rank=first + i, tp_size=size, **settings)
            for i in range(n)
        ]
        return [rank.await_ready() for rank in ranks]

    def restart(self, node: Prefill) -> Prefill:
        """Another process at the address of `node`, which is killed if it still runs."""
        node.kill()
        settings = dict(node.settings)
        return self._start(Prefill, "child_prefill.py", settings.pop("url", None), **settings)

    def fakes(self, n: int = 1, *, ports: Sequence[int] = ()) -> list[FakePrefill]:
        """`n` prefill nodes in this process, at `ports` or at free ones."""
        self._farm = self._farm or Farm()
        made = [FakePrefill(self._farm, port) for port in (ports or [free_port() for _ in range(n)])]
        self._fakes += made
        return made

    def ask(self, children: Iterable[Child], timeout_s: float = 60.0, **order: Any) -> list[Any]:
        """One order to all of `children` at once; their answers in the same order."""
        asked = list(children)
        for child in asked:
            child.send(**order)
        return [child.read(timeout_s) for child in asked]

    def close(self) -> None:
        """End everything, by pid."""
        for child in self._children:
            child.close()
        for fake in self._fakes:
            fake.stop()
        if self._farm is not None:
            self._farm.close()

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self, kind: type[C], program: str, url: str | None, **settings: Any) -> C:
        return self._spawn(kind, program, url, **settings).await_ready()

    def _spawn(self, kind: type[C], program: str, url: str | None, **settings: Any) -> C:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("COORDINATOR_", "SGLANG_"))}
        env = {**clean, "SGLANG_HOST_IP": "127.0.0.1", "NO_PROXY": "*", "PYTHONUNBUFFERED": "1"}
        if url is not None:
            env["COORDINATOR_URL"] = url
            settings.setdefault("plugins", True)
        env |= settings.get("env", {})
        child = kind(program, {**settings, "url": url}, env)
        self._children.append(child)
        return child
