"""Workers, nodes and processes of one test, with fast settings; all of them end with the fleet.

with Fleet(redis_url) as fleet:
    node = fleet.farm.node(instance="life-1")
    a = fleet.worker("a")                      # a Watched: .worker, .told (room id, Failure) in order
    b = fleet.process("b")                     # a WorkerProcess: real, killable, told by JSON lines
    fleet.rooms(node.address, a.id)            # what the store holds
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import redis
from fakenode import Farm, NodeProcess
from util import wait_until

from coordinator import Failure, PrefillNode, Room, Settings, Worker
from coordinator.protocol import Verdict
from coordinator.store.client import SyncStore
from coordinator.store.connect import sync_client
from coordinator.store.embedded import owned_command
from coordinator.store.keys import Keys
from coordinator.store.ops import Ops

HERE = Path(__file__).parent
PATIENCE_S = 20.0  # how long a test waits for what should come soon; machines are busy


def fast(**given: Any) -> Settings:
    """Settings with short times; `given` over them."""
    values: dict[str, Any] = {
        "tick_s": 0.05, "lease_s": 2.0, "flush_s": 0.002, "retention_s": 30.0, "linger_s": 2.0,
        "probe_interval_s": 0.2, "probe_timeout_s": 0.8, "call_timeout_s": 1.0, "retry_s": 3.0,
    }  # fmt: skip
    return Settings(**{**values, **given})


def hold(fact: Callable[[], object], for_s: float, what: str) -> None:
    """AssertionError as soon as `fact` is not true during the next `for_s` seconds."""
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        value = fact()
        assert value, f"{what}: it was {value!r} {end - time.monotonic():.2f} s before the end"
        time.sleep(0.01)


@dataclass
class Watched:
    """A worker and what it was told."""

    worker: Worker
    told: list[tuple[int, Failure]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.worker.on_failure(self._told)

    def _told(self, room: Room, failure: Failure) -> None:
        self.told.append((room.id, failure))

    @property
    def id(self) -> str:
        return self.worker.id

    def join(self, address: str, rooms: range | list[int] | tuple[int, ...]) -> list[Room]:
        """Open these rooms and wait until the store has them."""
        opened = [self.worker.join(address, room) for room in rooms]
        self.flush()
        return opened

    def flush(self) -> None:
        assert self.worker.flush(PATIENCE_S), f"{self.id} did not get its rooms into the store"

    def told_rooms(self) -> Counter[int]:
        """Room -> how often it was told."""
        return Counter(room for room, _ in self.told)

    def await_told(self, rooms: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until `rooms` failures were told."""
        wait_until(lambda: len(self.told) >= rooms, timeout_s, f"{self.id} told of {rooms} rooms")

    def state(self, address: str) -> str:
        """How this worker sees a node."""
        return str(self.worker.health()["addresses"].get(address, {}).get("state"))

    def knows(self, address: str) -> bool:
        """Whether this worker has probed the node and got an answer."""
        return self.worker._core.detector.watch(address).ever_ok


class WorkerProcess:
    """A worker in a real process (child_worker.py)."""

    def __init__(self, url: str, name: str, settings: Settings, *flags: str) -> None:
        given = json.dumps({**asdict(settings), "url": ""})
        argv = [sys.executable, str(HERE / "child_worker.py"), url, name, given, *flags]
        self.process = subprocess.Popen(
            owned_command(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE.parent,
            env={"PYTHONPATH": str(HERE.parent), "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        self.id = str(self._read()["id"])

    def do(self, verb: str, **words: Any) -> Any:
        """Order something and wait for its answer."""
        self.order(verb, **words)
        return self._read()

    def order(self, verb: str, **words: Any) -> None:
        """Order something; the caller reads the answer with `answer`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": verb, **words}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The answer to an earlier order."""
        return self._read()

    def join(self, address: str, rooms: range | list[int]) -> None:
        """Open these rooms and wait until the store has them."""
        self.do("join", address=address, rooms=list(rooms))
        assert self.do("flush", timeout_s=PATIENCE_S), f"{self.id} did not get its rooms into the store"

    def told(self) -> list[tuple[int, str, str, str, int]]:
        """(room, address, cause, reason, epoch) of every failure told so far."""
        return [tuple(item) for item in self.do("told")]

    def await_told(self, rooms: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until `rooms` failures were told."""
        wait_until(lambda: len(self.told()) >= rooms, timeout_s, f"{self.id} told of {rooms} rooms")

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"worker process {self.process.pid} ended"
        return json.loads(line)

    def send(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end. Again: nothing."""
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def pause(self) -> None:
        """SIGSTOP."""
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.send(signal.SIGCONT)


class Fleet:
    """Everything of one test on one store. `client` replaces the URL for workers and nodes (the fake lane)."""

    def __init__(
        self,
        url: str = "",
        *,
        settings: Settings | None = None,
        client: Callable[[], Any] | None = None,
        look: Callable[[], redis.Redis] | None = None,
    ) -> None:
        self.url, self.settings, self._client = url, settings or fast(), client
        self.ops = Ops(self.settings)
        self.keys: Keys = self.ops.keys
        self._stack = contextlib.ExitStack()
        self.farm = self._stack.enter_context(Farm())
        patient = fast(call_timeout_s=10.0, retry_s=20.0)
        self.redis: Any = look() if look else sync_client(url, patient)
        self._stack.callback(self.redis.close)
        self.store = SyncStore(self.redis, 20.0)

    # -- who takes part -----------------------------------------------------------------------------------------

    def worker(self, name: str = "w", *, settings: Settings | None = None, url: str = "", **words: Any) -> Watched:
        """A worker in this process."""
        words.setdefault("client", None if url else self._client)
        watched = Watched(Worker(url or self.url, name=name, settings=settings or self.settings, **words))
        self._stack.callback(watched.worker.close)
        return watched

    def prefill(self, address: str, *, settings: Settings | None = None, url: str = "", **words: Any) -> PrefillNode:
        """An announced PrefillNode in this process."""
        words.setdefault("client", None if url else self._client)
        node = PrefillNode(address, url or self.url, settings=settings or self.settings, **words)
        self._stack.callback(node.close)
        return node

    def process(self, name: str = "p", *flags: str, settings: Settings | None = None, url: str = "") -> WorkerProcess:
        """A worker in a process of its own."""
        worker = WorkerProcess(url or self.url, name, settings or self.settings, *flags)
        self._stack.callback(worker.kill)
        return worker

    def node_process(self, instance: str = "life-1") -> NodeProcess:
        """A /health node in a process of its own."""
        return self._stack.enter_context(NodeProcess(instance))

    def keep(self, thing: Any) -> Any:
        """Close `thing` with the fleet, before what it was made of."""
        return self._stack.enter_context(thing)

    # -- what the store holds -----------------------------------------------------------------------------------

    def rooms(self, address: str, worker: str) -> set[int]:
        """The rooms that the store lists for a worker."""
        return {int(room) for room in self.redis.smembers(self.keys.rooms(address, worker))}

    def listed(self, address: str) -> set[str]:
        """The workers that the store lists at an address."""
        return set(self.redis.zrange(self.keys.workers(address), 0, -1))

    def node(self, address: str) -> dict[str, str]:
        """The node's hash."""
        return dict(self.redis.hgetall(self.keys.node(address)))

    def epoch(self, address: str) -> int:
        return int(self.node(address).get("epoch", 0))

    def events(self, address: str, kind: str) -> list[dict[str, str]]:
        """The audit trail's entries of one kind, oldest first."""
        return [fields for _, fields in self.redis.xrange(self.keys.events(address)) if fields["kind"] == kind]

    def fail(self, address: str, epoch: int | None = None, reason: str = "test") -> Verdict:
        """Fail an address as an operator would, not through a worker."""
        from coordinator.store.verdict import fail_address

        return fail_address(self.store, self.ops, address, reason, "tester", epoch)

    # -- the end ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()
