"""Servers as fixtures, and the rule that holds for every test on one: no key is left without a TTL.

`store_server` runs a test on each lane (fake, valkey, redis, strict), `real_server` and `url` on the three real ones,
`redis_server` and `redis_url` on one. These live for the whole session and are empty at the start of a test; a test
may pause, kill or restart them. `make_server` starts further ones. A lane whose binary is missing skips the test with
the reason, and fails it if COORDINATOR_REQUIRE_LANES=1.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pkgutil
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

import loopback
import pytest
from servers import KINDS, REAL_KINDS, FakeLane, Lanes, MissingLane, Server, keys_without_ttl, revive

_SHOWN = 20
T = TypeVar("T")


def _import_hypothesis() -> None:
    """All of it now: pytest rewrites its modules as they are imported, and CPython 3.11's parser can fail
    (SystemError, "AST constructor recursion depth mismatch") when that happens late, beside running threads."""
    if importlib.util.find_spec("hypothesis") is not None:
        strategies = importlib.import_module("hypothesis.strategies._internal")
        for found in pkgutil.iter_modules(strategies.__path__, f"{strategies.__name__}."):
            importlib.import_module(found.name)


def pytest_configure(config: pytest.Config) -> None:
    loopback.watch()
    config.addinivalue_line("markers", "leaves_keys(reason): this test may leave keys without a TTL")


@pytest.fixture(scope="session", autouse=True)
def _own_surroundings() -> Iterator[None]:
    """Tests neither see nor disturb the store, the settings and the embedded server of whoever runs them."""
    _import_hypothesis()
    runtime = tempfile.mkdtemp(prefix="coordinator-xdg-")
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("COORDINATOR_") and n != "COORDINATOR_REQUIRE_LANES"]:
            patch.delenv(name)
        patch.setenv("XDG_RUNTIME_DIR", runtime)
        yield
    shutil.rmtree(runtime, ignore_errors=True)


@pytest.fixture(scope="session")
def lanes() -> Iterator[Lanes]:
    """The session's servers, each started when first asked for."""
    lanes = Lanes()
    yield lanes
    lanes.stop()


@pytest.fixture(autouse=True)
def _no_key_without_ttl(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails every test after which a server that it used holds a key without TTL (G11). Set up first, so ends last."""
    if "lanes" not in request.fixturenames:
        yield
        return
    lanes: Lanes = request.getfixturevalue("lanes")
    lanes.used.clear()
    yield
    left = lanes.end_test()
    if left and not _may_leave_keys(request.node):
        _fail_for_keys(left)


@pytest.fixture(autouse=True)
def _nothing_leaves_this_machine() -> Iterator[None]:
    """Fails a test that tried to reach another host."""
    loopback.stopped.clear()
    yield
    assert loopback.stopped == []


@pytest.fixture(params=KINDS)
def lane(request: pytest.FixtureRequest) -> str:
    """The name of each kind of server in turn."""
    return str(request.param)


@pytest.fixture
def store_server(lane: str, lanes: Lanes) -> FakeLane | Server:
    """Each kind of server in turn, empty: `.kind`, `.sync_client()`, `.async_client()`."""
    return _get(lanes, lane)


@pytest.fixture(params=REAL_KINDS)
def real_server(request: pytest.FixtureRequest, lanes: Lanes) -> Server:
    """Each real kind in turn, empty."""
    return _real(_get(lanes, request.param))


@pytest.fixture
def url(real_server: Server) -> str:
    """URL of each real kind in turn."""
    return real_server.url


@pytest.fixture
def redis_server(lanes: Lanes) -> Server:
    """One real server, empty: the bundled Valkey, else redis-server on PATH."""
    with contextlib.suppress(MissingLane):
        return _real(lanes.get("valkey"))
    return _real(_get(lanes, "redis"))


@pytest.fixture
def redis_url(redis_server: Server) -> str:
    """URL of the one real server."""
    return redis_server.url


@pytest.fixture
def make_server(request: pytest.FixtureRequest) -> Iterator[Callable[..., Server]]:
    """`make_server(kind="valkey", *options)` starts a server of this test's own; ended, and looked over, after it."""
    made: list[Server] = []

    def make(kind: str = "valkey", *options: str) -> Server:
        made.append(_or_report(lambda: Server(kind, *options)))
        return made[-1].start()

    yield make
    left: dict[str, list[str]] = {}
    try:
        for server in made:
            if server.alive:
                revive(server)
                left[f"{server.kind} on {server.port}"] = keys_without_ttl(server)
    finally:
        for server in made:
            server.stop()
    left = {name: keys for name, keys in left.items() if keys}
    if left and not _may_leave_keys(request.node):
        _fail_for_keys(left)


def _get(lanes: Lanes, kind: str) -> FakeLane | Server:
    return _or_report(lambda: lanes.get(kind))


def _real(lane: FakeLane | Server) -> Server:
    assert isinstance(lane, Server)
    return lane


def _or_report(get: Callable[[], T]) -> T:
    """What `get` returns; a missing lane fails or skips the test, never passes it."""
    try:
        return get()
    except MissingLane as missing:
        text = f"missing lane: {missing}"
    if os.environ.get("COORDINATOR_REQUIRE_LANES") == "1":
        pytest.fail(text, pytrace=False)
    pytest.skip(text)


def _may_leave_keys(node: pytest.Item) -> bool:
    marker = node.get_closest_marker("leaves_keys")
    if marker is not None and not (marker.args and isinstance(marker.args[0], str)):
        pytest.fail("leaves_keys needs its reason: @pytest.mark.leaves_keys('why')", pytrace=False)
    return marker is not None


def _fail_for_keys(left: dict[str, list[str]]) -> NoReturn:
    lines = []
    for name, keys in left.items():
        more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
        lines.append(f"{name}: {', '.join(keys[:_SHOWN])}{more}")
    pytest.fail("keys left without a TTL: " + "; ".join(lines), pytrace=False)
