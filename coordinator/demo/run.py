"""One run of the demo in time order: store, nodes, workers, faults, farewell, audit.

Everything that was started is ended by pid on every way out. The folder with what the processes recorded is kept
when the run was not ok, and named.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Settings
from ..errors import ConfigError, StoreNotFound, StoreUnavailable
from .audit import audit
from .facts import Facts, FactsFile
from .faults import (
    FAILING,
    FLUSH_STORE,
    KILL_WORKER,
    PAUSE_STORE,
    PAUSED_S,
    RESTART_NODE,
    START_NODE,
    STOP_NODE,
    STOPPED_S,
    Fault,
    Planned,
    parse_fault,
)
from .fleet import Child, Fleet, free_addresses
from .options import DemoOptions, Resolved
from .pull import require
from .roles import STUCK_S, TCP, WorkerOptions
from .table import Board, Display, render
from .watch import Watch, leftovers

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["DemoOptions", "Fault", "parse_fault", "render", "run_demo"]

STANDBY_S = 2.5
STEP_S = 0.1
_EVENTS_SHOWN = 8
STARTING = (START_NODE, RESTART_NODE)


def run_demo(options: DemoOptions, console: Console | None = None) -> dict[str, Any]:
    """Run it and return the result, as `--json` prints it; `result["ok"]` is the verdict.

    Progress goes to `console` (default: stderr): a live table on a terminal, else a line a second. Raises ConfigError,
    EngineMissing, StoreNotFound or StoreUnavailable before anything is started, ProcessEnded if one of the processes
    dies by itself.
    """
    resolved = options.resolve()
    require(options.transport)
    settings = Settings.load()
    folder = Path(tempfile.mkdtemp(prefix="coordinator-demo-"))
    keep = True
    try:
        with ExitStack() as stack, _ending_on_sigterm():
            url, store = _open_store(options.store, settings, stack)
            client = _client(url, settings, stack)
            store["server"] = _server_name(client)
            if any(planned.fault.kind == FLUSH_STORE for planned in resolved.plan):
                _refuse_to_flush_foreign(client, settings, bool(options.store))
            result = _Run(
                options=options,
                resolved=resolved,
                settings=settings,
                folder=folder,
                url=url,
                client=client,
                display=Display(console),
            ).go(store)
        keep = not result["ok"]
        result["recorded_in"] = str(folder) if keep else ""
        return result
    except (KeyboardInterrupt, SystemExit, ConfigError, StoreUnavailable, StoreNotFound):
        keep = False
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


class _Run:
    """The state of one run."""

    def __init__(
        self,
        *,
        options: DemoOptions,
        resolved: Resolved,
        settings: Settings,
        folder: Path,
        url: str,
        client: Any,
        display: Display,
    ) -> None:
        self.options, self.resolved, self.settings, self.display = options, resolved, settings, display
        self.client, self.folder = client, folder
        self.fleet = Fleet(folder, url, options.transport)
        self.log_file = folder / "orchestrator.facts"
        self.log = Facts(self.log_file)
        self.addresses = free_addresses(options.nodes)
        self.watch = Watch(client, settings, self.addresses, self.log)
        self.nodes: list[Child] = []
        self.workers: list[Child] = []
        self.standby: dict[int, Child] = {}
        self.continues: list[tuple[float, int]] = []
        self.pending: deque[Planned] = deque(resolved.plan)
        self.killed_worker_at = 0.0
        self.board = Board(options.seed, resolved.seconds, deque(maxlen=_EVENTS_SHOWN))
        self.start = 0.0

    def go(self, store: dict[str, Any]) -> dict[str, Any]:
        """All of it; the result."""
        try:
            with self.display:
                self._begin(store)
                self._act()
                self._await_orphans()
                self.fleet.end(self._living(self.workers))
                self.fleet.end(self.fleet.children)
                self.watch.stop()
                return self._result(store)
        finally:
            self.fleet.end(self.fleet.children, grace_s=1.0)

    def _begin(self, store: dict[str, Any]) -> None:
        o, r = self.options, self.resolved
        what = f"{r.requests} requests of {o.trace}" if r.requests is not None else f"{r.rate:g} rooms a second"
        if o.transport != TCP:
            what += f" by {o.transport}"
        self._say(f"store {store['url']} ({store['how']}, {store['server']})")
        self._say(f"{o.nodes} nodes, {o.workers} workers, {what}, {r.seconds:g} s, seed {o.seed}")
        if r.note:
            self._say(r.note)
        for planned in r.plan:
            self._say(f"planned: {planned.fault} {self._target(planned)}")
        self.nodes = [self.fleet.start_node(address) for address in self.addresses]
        self.workers = [self._start_worker(index) for index in range(o.workers)]
        self.fleet.wait_for(self.nodes, "announced")
        self.fleet.wait_for(self.workers, "start")
        self.watch.start()
        self.start = time.monotonic()
        start_fact = self.log.write("start", role="orchestrator", id="orchestrator")
        self.board.start_ns = start_fact
        for worker in self.workers:
            worker.go()
        self._say("the workers begin")

    def _start_worker(self, index: int) -> Child:
        o, r = self.options, self.resolved
        module, folder = o._worker_modules.get(index, ("", ""))
        options = WorkerOptions(
            name=f"decode-{index}",
            nodes=tuple(self.addresses),
            rate=r.rate / o.workers,
            seconds=r.seconds,
            seed=o.seed,
            trace=str(Path(o.trace).resolve()) if o.trace else "",
            speed=o.speed,
            index=index,
            count=o.workers,
            report_errors=o.report_errors,
        )
        return self.fleet.start_worker(options, module, [folder]) if module else self.fleet.start_worker(options)

    # -- while it runs ------------------------------------------------------------------------------------------

    def _act(self) -> None:
        """Faults in time, until every living worker has seen its rooms through."""
        limit = self.resolved.seconds + STUCK_S + STOPPED_S
        while True:
            now = time.monotonic() - self.start
            while self.pending and self.pending[0].fault.at_s <= now:
                self._strike(self.pending.popleft())
            self._prepare(now)
            self._continue_stopped(now)
            self._look()
            if not self.pending and all(self._has(worker, "drained") for worker in self._living(self.workers)):
                return
            if now > limit:
                self._say("workers are not done with their rooms: ending them")
                return
            self._sleep()

    def _sleep(self) -> None:
        now = time.monotonic() - self.start
        next_fault = self.pending[0].fault.at_s - now if self.pending else STEP_S
        time.sleep(min(STEP_S, max(0.0, next_fault)))

    def _prepare(self, now: float) -> None:
        """Have the process of a node that will be started ready, so that the start takes milliseconds."""
        for planned in self.pending:
            target = planned.target
            if planned.fault.kind not in STARTING or planned.fault.at_s - now > STANDBY_S or target is None:
                continue
            self._successor(target)

    def _successor(self, index: int) -> Child:
        if index not in self.standby:
            self.standby[index] = self.fleet.start_node(self.addresses[index], wait=True)
        return self.standby[index]

    def _continue_stopped(self, now: float) -> None:
        for at_s, index in [item for item in self.continues if item[0] <= now]:
            self.continues.remove((at_s, index))
            self.log.write("back", address=self.addresses[index])
            self.fleet.resume(self.nodes[index])
            self._say(f"{self.addresses[index]} goes on (SIGCONT)")

    def _strike(self, planned: Planned) -> None:
        kind, index = planned.fault.kind, planned.target
        if kind in STARTING and index is not None:
            self.fleet.wait_for([self._successor(index)], "waiting")
        self._say(f"{kind} {self._target(planned)}")
        if index is None:
            self.log.write("fault", kind=kind)
            (self._pause_store if kind == PAUSE_STORE else self._flush_store)()
        elif kind == KILL_WORKER:
            worker = self.workers[index]
            self.killed_worker_at = time.monotonic()
            self.log.write("fault", kind=kind, worker=worker.id, pid=worker.process.pid)
            self.fleet.kill(worker)
        elif kind in FAILING:
            node = self.nodes[index]
            self.log.write("fault", kind=kind, address=node.address, pid=node.process.pid)
            self._strike_node(kind, index, node, planned.fault.at_s)
        elif kind == START_NODE:
            self.log.write("fault", kind=kind, address=self.addresses[index])
            self._replace(index)

    def _strike_node(self, kind: str, index: int, node: Child, at_s: float) -> None:
        if kind == STOP_NODE:
            self.fleet.stop(node)
            self.continues.append((at_s + STOPPED_S, index))
            return
        self.fleet.kill(node)
        if kind == RESTART_NODE:
            self._replace(index)

    def _replace(self, index: int) -> None:
        self.nodes[index] = self.standby.pop(index)
        self.nodes[index].go()

    def _pause_store(self) -> None:
        self._on_store("CLIENT", "PAUSE", str(round(PAUSED_S * 1000)), "ALL")

    def _flush_store(self) -> None:
        self._on_store("FLUSHDB" if self.options.store else "FLUSHALL")
        self._on_store("SCRIPT", "FLUSH")

    def _on_store(self, *command: str) -> None:
        from redis.exceptions import RedisError

        every = {"target_nodes": "primaries"} if hasattr(self.client, "get_primaries") else {}
        try:
            self.client.execute_command(*command, **every)
        except RedisError as exc:
            raise StoreUnavailable(f"{' '.join(command)} failed: {exc}") from exc

    def _await_orphans(self) -> None:
        """Give the nodes time to hear of killed workers: two leases and a little."""
        if not self.killed_worker_at:
            return
        deadline = self.killed_worker_at + 2 * self.settings.lease_s + 2 * self.settings.tick_s + 3
        self._say("waiting until the nodes were told of the killed worker")
        while time.monotonic() < deadline:
            self._look()
            report = audit([child.facts for child in self.fleet.children], self._log_facts())
            if not any(fault.kind == KILL_WORKER and fault.missed for fault in report.faults):
                return
            time.sleep(0.25)

    def _look(self) -> None:
        """Take in what the processes recorded, and show it."""
        self.fleet.check()
        for child in self.fleet.children:
            self.board.take(child.name, child.role, child.address, child.look())
        upcoming = self.pending[0] if self.pending else None
        self.board.next_fault = f"{upcoming.fault} {self._target(upcoming)}" if upcoming else ""
        self.board.second = time.monotonic() - self.start
        self.board.nodes = [(node.address, _state(node), self.watch.views.get(node.address)) for node in self.nodes]
        self.board.workers = [(worker.name, _state(worker)) for worker in self.workers]
        self.board.trouble = self.watch.trouble
        self.display.show(self.board)

    def _say(self, text: str) -> None:
        at_s = time.monotonic() - self.start if self.start else 0.0
        self.board.events.append(f"{at_s:5.1f} s  {text}")
        self.display.say(f"{at_s:5.1f} s  {text}")

    def _target(self, planned: Planned) -> str:
        if planned.target is None:
            return "the store"
        return f"decode-{planned.target}" if planned.fault.kind == KILL_WORKER else self.addresses[planned.target]

    def _living(self, children: list[Child]) -> list[Child]:
        return [child for child in children if child.alive]

    def _has(self, child: Child, event: str) -> bool:
        return any(fact["event"] == event for fact in child.facts[-50:])

    # -- afterwards ---------------------------------------------------------------------------------------------

    def _log_facts(self) -> list[dict[str, Any]]:
        return FactsFile(self.log_file).news()

    def _result(self, store: dict[str, Any]) -> dict[str, Any]:
        for child in self.fleet.children:
            child.look()
        report = audit([child.facts for child in self.fleet.children], self._log_facts())
        left = leftovers(self.client, self.settings, self.addresses)
        problems = list(report.problems)
        if left.rooms:
            problems.append(f"{left.rooms} rooms are still listed in the store")
        if left.keys_without_ttl:
            problems.append(f"{len(left.keys_without_ttl)} keys have no TTL, among them {left.keys_without_ttl[0]}")
        return {
            "ok": not problems,
            "store": store,
            "rooms": {
                "opened": report.opened,
                "succeeded": report.succeeded,
                "failed": report.failed,
                "orphaned": report.orphaned,
                "open_at_end": report.open_at_end + left.rooms,
                "unserved": sum(_last(child, "tally").get("unserved", 0) for child in self.workers),
            },
            "faults": [fault.plain(self.board.start_ns) for fault in report.faults],
            "false_failures": report.false_failures,
            "probes_sent": sum(_last(child, "tally").get("counters", {}).get("probes", 0) for child in self.workers),
            "keys_without_ttl": len(left.keys_without_ttl),
            "seed": self.options.seed,
            "seconds": round(time.monotonic() - self.start, 1),
            "problems": problems,
        }


def _last(child: Child, event: str) -> dict[str, Any]:
    return next((fact for fact in reversed(child.facts) if fact["event"] == event), {})


def _state(child: Child) -> str:
    if not child.alive:
        return "killed"
    return "stopped" if child.stopped else "running"


def _open_store(given: str, settings: Settings, stack: ExitStack) -> tuple[str, dict[str, Any]]:
    from ..store.connect import parse_url, redact

    if given:
        parse_url(given)
        return given, {"url": redact(given), "how": "given"}
    from ..store.embedded import EmbeddedServer

    server = EmbeddedServer.start()
    stack.callback(server.stop)
    return server.url, {"url": server.url, "how": "embedded"}


def _client(url: str, settings: Settings, stack: ExitStack) -> Any:
    from ..store.connect import sync_client

    client = sync_client(url, settings)
    stack.callback(client.close)
    return client


def _server_name(client: Any) -> str:
    """Name and version of the server; StoreUnavailable or StoreRefused if it does not answer."""
    from ..inspect import answering

    with answering():
        info: dict[str, Any] = client.info("server")
    if "valkey_version" in info:
        return f"valkey {info['valkey_version']}"
    return f"redis {info.get('redis_version', '?')}"


def _refuse_to_flush_foreign(client: Any, settings: Settings, given: bool) -> None:
    """flush-store erases a database: only ours, or one that holds nothing but keys of our namespace."""
    if not given:
        return
    for key in client.scan_iter(count=1000):
        if not key.startswith(f"{settings.namespace}:"):
            raise ConfigError(f"{FLUSH_STORE} would erase {key!r}: give --store an empty database, or no --store")


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM and SIGHUP leave by the same way as Ctrl-C, so that everything is ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
