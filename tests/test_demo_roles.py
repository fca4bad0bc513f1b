"""The two roles as long-running processes, as a compose stack runs them: nobody tells them when to end but a signal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from util import wait_until

from coordinator.demo.facts import read_all
from coordinator.demo.fleet import free_addresses

ROOT = Path(__file__).resolve().parent.parent
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(redis_url: str) -> Iterator[Start]:
    """Starts a role with options, on the test's store; whatever still runs is killed at the end."""
    with contextlib.ExitStack() as stack:

        def run(role: str, **options: Any) -> subprocess.Popen[bytes]:
            kind = f"{role.capitalize()}Options"
            code = f"from coordinator.demo.{role} import main, {kind}; raise SystemExit(main({kind}(**{options!r})))"
            env = {**os.environ, "PYTHONPATH": str(ROOT), "COORDINATOR_URL": redis_url}
            process = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield run


def _events(path: Path, event: str) -> list[dict[str, Any]]:
    return [fact for fact in read_all(path) if fact["event"] == event]


def test_roles_find_each_other_and_end_on_sigterm(start: Start, tmp_path: Path) -> None:
    """A worker without a list finds the node in the store; SIGTERM reports its open rooms to the node; both exit 0."""
    [address] = free_addresses(1)
    node_facts, worker_facts = tmp_path / "node", tmp_path / "worker"
    worker = start("worker", name="decode", rate=50.0, facts=str(worker_facts))
    node = start("node", address=address, facts=str(node_facts))
    wait_until(lambda: len(_events(worker_facts, "succeeded")) > 5, 15, "rooms that succeed")

    with urllib.request.urlopen(f"http://{address}/health", timeout=5) as answer:
        instance = answer.headers["X-Coordinator-Instance"]
        assert instance == json.load(answer)["instance"] == _events(node_facts, "start")[0]["id"]

    worker.send_signal(signal.SIGTERM)
    assert worker.wait(10) == 0
    left_open = {fact["room"] for fact in _events(worker_facts, "stuck")}
    assert left_open
    wait_until(
        lambda: left_open <= {r for f in _events(node_facts, "orphans") for r in f["rooms"]}, 5, "the node's news"
    )
    node.send_signal(signal.SIGTERM)
    assert node.wait(10) == 0
    assert _events(node_facts, "tally")[-1]["freed"] > 0


def test_a_port_in_use_is_one_error(start: Start, tmp_path: Path) -> None:
    """A second node at the same address ends instead of sharing the port with the first."""
    [address] = free_addresses(1)
    first = start("node", address=address, facts=str(tmp_path / "first"))
    wait_until(lambda: _events(tmp_path / "first", "serving"), 10, "the first node")
    assert start("node", address=address).wait(10) != 0
    assert first.poll() is None
