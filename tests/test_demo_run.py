"""The demo as a whole: real processes on a real store, short runs with a short lease."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from rich.console import Console
from typer.testing import CliRunner
from util import wait_until

import coordinator.demo.__main__ as entry
from coordinator.demo.options import DemoOptions
from coordinator.demo.run import parse_fault, render, run_demo
from coordinator.errors import ConfigError, CoordinatorError, StoreUnavailable

ROOT = Path(__file__).resolve().parent.parent
SHORT_LEASE = {"COORDINATOR_LEASE_S": "1.6"}
FAULT_FIELDS = ["kind", "address", "affected", "failed", "failed_twice", "missed", "first_ms", "all_ms", "spread_ms"]


@pytest.fixture(autouse=True)
def _short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SHORT_LEASE.items():
        monkeypatch.setenv(name, value)


def _run(*faults: str, **options: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = {"nodes": 2, "workers": 3, "rate": 60.0, "seconds": 4.0, **options}
    return run_demo(DemoOptions(faults=tuple(parse_fault(text) for text in faults), **chosen), Console(quiet=True))


def _children(pid: int) -> set[int]:
    """All processes below one."""
    direct: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            direct |= {int(child) for child in task.read_text().split()}
    return direct.union(*(_children(child) for child in direct))


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def ordinary() -> tuple[dict[str, Any], set[int]]:
    """The result of a run with the default kinds of faults, and what is left below this process after it."""
    before = _children(os.getpid())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHORT_LEASE.items():
            patch.setenv(name, value)
        result = _run("kill-node@1", "start-node@2", "kill-worker@3", seconds=5.0, seed=3)
    return result, _children(os.getpid()) - before


def test_a_run_through_the_default_faults_is_ok(ordinary: tuple[dict[str, Any], set[int]]) -> None:
    """Rooms were open at each fault, every owner was told, and each room is accounted for once."""
    result, _ = ordinary
    assert result["problems"] == []
    assert result["ok"]
    rooms = result["rooms"]
    assert rooms["opened"] == rooms["succeeded"] + rooms["failed"] + rooms["orphaned"]
    assert rooms["opened"] > 150
    kill, _start, worker = result["faults"]
    assert kill["affected"] == kill["failed"] == rooms["failed"] > 0
    assert 0 < kill["first_ms"] <= kill["all_ms"]
    assert worker["failed"] > 0
    assert 500 < worker["first_ms"] < 6000
    assert result["probes_sent"] > 0


def test_the_result_has_the_documented_shape(ordinary: tuple[dict[str, Any], set[int]]) -> None:
    """The JSON object's fields, in the documented order, and it is JSON."""
    result, _ = ordinary
    names = ["ok", "store", "rooms", "faults", "false_failures", "probes_sent", "keys_without_ttl"]
    assert names == list(result)[: len(names)]
    assert list(result["rooms"])[:5] == ["opened", "succeeded", "failed", "orphaned", "open_at_end"]
    assert all(list(fault)[: len(FAULT_FIELDS)] == FAULT_FIELDS for fault in result["faults"])
    assert json.loads(json.dumps(result)) == result


def test_a_run_leaves_nothing_behind(ordinary: tuple[dict[str, Any], set[int]]) -> None:
    """No process, no store, no folder."""
    result, left = ordinary
    assert set() == left
    assert not Path(result["store"]["url"].removeprefix("unix://")).exists()
    assert result["recorded_in"] == ""


def test_the_result_is_shown_to_people(ordinary: tuple[dict[str, Any], set[int]]) -> None:
    """Each fault, the totals and the verdict."""
    console = Console(record=True, width=80, file=io.StringIO())
    render(ordinary[0], console)
    shown = console.export_text()
    opened = ordinary[0]["rooms"]["opened"]
    for text in ("kill-node", "start-node", "kill-worker", f"opened {opened}", "ok: every owner"):
        assert text in shown


@pytest.mark.parametrize(
    ("bug", "what"),
    [("drop", "1 rooms were missed"), ("double", "1 rooms failed more than once"), ("false", "false failures")],
)
def test_the_audit_notices_a_planted_bug(monkeypatch: pytest.MonkeyPatch, bug: str, what: str) -> None:
    """A worker that drops one failure, applies one twice, or fails a healthy node: the run is not ok."""
    monkeypatch.setenv("PLANTED_BUG", bug)
    modules = {0: ("planted_worker", str(ROOT / "tests"))}
    result = _run("kill-node@1.5", seconds=3.0, workers=2, rate=80.0, _worker_modules=modules)
    assert not result["ok"]
    assert what in " / ".join(result["problems"])
    expected = {"drop": result["faults"][0]["missed"], "double": result["faults"][0]["failed_twice"]}
    assert expected.get(bug, result["false_failures"]) > 0
    recorded = Path(result["recorded_in"])
    assert {"orchestrator.facts", "decode-0.facts", "decode-0.log"} <= {path.name for path in recorded.iterdir()}
    for path in recorded.iterdir():
        path.unlink()
    recorded.rmdir()


def test_a_restart_is_noticed_by_its_instance() -> None:
    """Another process answers within milliseconds: the old rooms fail as restarted, new ones live."""
    result = _run("restart-node@1.5", seconds=3.0)
    assert result["problems"] == []
    assert list(result["faults"][0]["causes"]) == ["node_restarted"]
    assert result["faults"][0]["all_ms"] < 1500


def test_a_hung_node_is_noticed() -> None:
    """SIGSTOP: connections stay open and say nothing; the rooms fail all the same, and the node is ended at the end."""
    result = _run("stop-node@1", seconds=2.0)
    assert result["problems"] == []
    assert result["faults"][0]["failed"] > 0
    assert result["faults"][0]["all_ms"] < 8500


def test_trouble_of_the_store_fails_nothing(redis_url: str) -> None:
    """On a store that was given: a pause and the loss of all data; no room fails, and no key is left for ever."""
    result = _run("pause-store@0.5", "flush-store@3", seconds=4.5, store=redis_url)
    assert result["problems"] == []
    assert result["rooms"]["failed"] == 0
    assert {"url": redis_url, "how": "given"} == {name: result["store"][name] for name in ("url", "how")}


def test_a_store_with_foreign_keys_is_not_flushed(redis_url: str) -> None:
    """flush-store on a database that holds more than our keys is refused before anything starts."""
    with redis.Redis.from_url(redis_url) as client:
        client.set("somebody's", "data", ex=60)
        with pytest.raises(ConfigError, match="would erase"):
            _run("flush-store@1", store=redis_url)
        assert client.get("somebody's") == b"data"


def test_a_store_that_is_not_there_is_one_error() -> None:
    """Said before any process is started."""
    with pytest.raises(StoreUnavailable, match="does not answer"):
        _run(store="redis://127.0.0.1:1/0")


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    """Every row is one room, at the speed asked for; the workers share the rows."""
    rows = [{"timestamp": 50 * n, "input_length": 1000 + n, "output_length": 9} for n in range(60)]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    result = run_demo(DemoOptions(2, 3, trace=str(path), speed=2.0, faults=()), Console(quiet=True))
    assert result["ok"]
    assert (result["rooms"]["opened"], result["rooms"]["succeeded"]) == (60, 60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_every_process_ends_with_the_demo(number: int, tmp_path: Path) -> None:
    """Ctrl-C, SIGTERM and even SIGKILL of the demo leave no process, and no folder where it can still act."""
    with _begun(tmp_path) as demo:
        below = _children(demo.pid)
        assert len(below) >= 1 + 2 + 2
        demo.send_signal(number)
        assert demo.wait(15) != 0
        wait_until(lambda: not any(_runs(pid) for pid in below), 5, "the end of all processes")
        if number != signal.SIGKILL:
            assert list(tmp_path.glob("coordinator-demo-*")) == []


def test_a_process_that_dies_by_itself_is_an_error(tmp_path: Path) -> None:
    """A crash that was no fault of ours ends the run with the process's name, not with a verdict."""
    with _begun(tmp_path) as demo:
        victim = next(pid for pid in _children(demo.pid) if b"demo.node" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(victim, signal.SIGKILL)
        out, err = demo.communicate(timeout=15)
    assert demo.returncode == 2
    assert out == ""
    assert "ended by itself" in err
    assert "Traceback" not in err


@contextlib.contextmanager
def _begun(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo of its own process, in which rooms are being opened."""
    command = [sys.executable, "-m", "coordinator.demo", "--nodes", "2", "--workers", "2", "--seconds", "30", "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env, start_new_session=True) as demo:
        try:
            assert demo.stderr is not None
            for line in demo.stderr:
                if "the workers begin" in line:
                    break
            yield demo
        finally:
            demo.kill()


def test_the_exit_status_says_whether_it_was_ok(
    monkeypatch: pytest.MonkeyPatch, ordinary: tuple[dict[str, Any], set[int]]
) -> None:
    """0 when ok, 1 when not, 2 when it could not be run; --json prints the one object and nothing else."""
    for ok, status in ((True, 0), (False, 1)):
        monkeypatch.setattr(entry, "run_demo", lambda options, ok=ok: {**ordinary[0], "ok": ok})
        answer = CliRunner().invoke(entry.app, ["--json"])
        assert (status, ok) == (answer.exit_code, json.loads(answer.stdout)["ok"])

    def broken(options: DemoOptions) -> dict[str, Any]:
        raise CoordinatorError("it went wrong")

    monkeypatch.setattr(entry, "run_demo", broken)
    answer = CliRunner().invoke(entry.app, ["--json"])
    assert (answer.exit_code, answer.stdout, answer.stderr) == (2, "", "error: it went wrong\n")
