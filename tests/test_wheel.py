"""The wheel: built from this checkout, installed into a fresh environment, used from another directory.

The environment takes redis, aiohttp and the command line's packages from the one that runs the tests, through a .pth
file, so that no package index is needed; coordinator itself comes from the wheel alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from servers import Server

from coordinator import Status
from coordinator.store import scripts

ROOT = Path(__file__).parent.parent
SOURCES = ("coordinator", "lua", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")
LUA = {str(path.relative_to(ROOT / "lua")): path.read_bytes() for path in sorted((ROOT / "lua").rglob("*.lua"))}


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel in it."""

    wheel: Path
    home: Path
    elsewhere: Path

    @property
    def package(self) -> Path:
        [found] = self.home.glob("lib/python*/site-packages/coordinator")
        return found

    def run(self, *command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a program of that environment from another directory, with nothing of this checkout on its path."""
        drop = ("PYTHON", "COORDINATOR_", "VIRTUAL_ENV")
        env = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
        program = str(self.home / "bin" / command[0])
        return subprocess.run(
            [program, *command[1:]], cwd=self.elsewhere, env=env, capture_output=True, text=True, timeout=timeout_s,
            check=False,
        )  # fmt: skip

    def python(self, code: str, *args: str) -> str:
        """What `code` prints."""
        done = self.run("python", "-c", code, *args)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel, built from a copy of the sources (building leaves nothing in the checkout) and installed."""
    source, dist, home = (tmp_path_factory.mktemp(name) for name in ("source", "dist", "venv"))
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(dist), str(source)]
    _run(build)
    [wheel] = dist.glob("*.whl")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    _run([*pip, "install", "--no-deps", "--no-index", "--quiet", str(wheel)])
    [site] = home.glob("lib/python*/site-packages")
    # Behind the environment's own packages, and only the plain directory: .pth files in it (an editable install of
    # this checkout) are not followed.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(wheel, home, tmp_path_factory.mktemp("elsewhere"))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"


def test_the_scripts_in_the_wheel_are_those_of_lua(installed: Installed) -> None:
    """coordinator/lua holds the same files, byte for byte, in the archive and on disk; nothing else lies there."""
    with zipfile.ZipFile(installed.wheel) as archive:
        inside = {
            name.removeprefix("coordinator/lua/"): archive.read(name)
            for name in archive.namelist()
            if name.startswith("coordinator/lua/")
        }
    assert len(LUA) > 8
    assert inside == LUA
    lua = installed.package / "lua"
    assert {str(path.relative_to(lua)): path.read_bytes() for path in lua.rglob("*") if path.is_file()} == LUA


def test_the_wheel_holds_the_package_and_nothing_else(installed: Installed) -> None:
    """Every module, the typing marker, the scripts and the metadata: no tests, no caches, no other top level."""
    with zipfile.ZipFile(installed.wheel) as archive:
        names = archive.namelist()
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "coordinator").rglob("*.py")}
    assert modules <= set(names)
    assert "coordinator/py.typed" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"coordinator"}
    assert [name for name in names if "test" in name or "__pycache__" in name] == []


def test_the_metadata_asks_for_what_is_imported(installed: Installed) -> None:
    """redis and aiohttp always, the rest by extra; Python 3.11; the command's entry point."""
    with zipfile.ZipFile(installed.wheel) as archive:
        [metadata] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        [entry] = [n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt")]
        lines = archive.read(metadata).decode().splitlines()
        points = archive.read(entry).decode()
    needed = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    assert sorted(line.split("<")[0].split(">")[0] for line in needed if "extra ==" not in line) == ["aiohttp", "redis"]
    assert "Requires-Python: >=3.11" in lines
    assert "coordinator = coordinator.cli:main" in points


def test_it_is_the_wheel_that_is_imported(installed: Installed) -> None:
    """From another directory, `coordinator` is the installed one, and so are its scripts."""
    code = """
import json, coordinator, coordinator.store.scripts as scripts
from coordinator import Worker, PrefillNode, Status
print(json.dumps([coordinator.__file__, str(scripts.directory()), list(scripts.names()), coordinator.__version__]))
"""
    file, directory, names, version = json.loads(installed.python(code))
    assert Path(file) == installed.package / "__init__.py"
    assert Path(directory) == installed.package / "lua"
    assert names == sorted(name.removesuffix(".lua") for name in LUA if "/" not in name)
    assert f"coordinator-{version}-" in installed.wheel.name


def test_every_script_hashes_like_the_checkouts(installed: Installed) -> None:
    """Processes of a checkout and of a wheel share the server's script cache: same text, same sha."""
    code = """
import json
from coordinator.store import scripts
print(json.dumps({name: scripts.load(name).sha for name in scripts.names()}))
"""
    assert json.loads(installed.python(code)) == {name: scripts.load(name).sha for name in scripts.names()}


def test_a_worker_of_the_wheel_talks_to_a_real_server(installed: Installed, redis_server: Server) -> None:
    """Joins, flushes, fails the node and reads the snapshot: the whole way, from the installed package."""
    code = """
import json, sys
from coordinator import Sight, Status, Worker
from coordinator.decide.detector import Evidence
told = []
class Alive:
    async def __call__(self, address):
        return Sight(Evidence.OK)
    async def aclose(self):
        pass
with Worker(sys.argv[1], name="wheel", probe=Alive()) as worker:
    worker.on_failure(lambda room, failure: told.append([room.id, failure.cause, failure.reason]))
    rooms = [worker.join("10.0.0.5:8998", 8804230600348159981 + i) for i in range(3)]
    flushed = worker.flush(30)
    failure = worker.fail_node("10.0.0.5:8998", reason="wheel")
    seen = sorted(room for _, room in failure.rooms())
    statuses = [int(room.status) for room in rooms]
print(json.dumps([flushed, seen, statuses, sorted(told)]))
"""
    flushed, seen, statuses, told = json.loads(installed.python(code, redis_server.url))
    ids = [8804230600348159981 + i for i in range(3)]
    assert (flushed, seen, statuses) == (True, ids, [Status.FAILED] * 3)
    assert told == [[room, "node_failed", "wheel"] for room in ids]
    with redis_server.sync_client() as client:
        assert client.hget("coordinator:{10.0.0.5:8998}:node", "epoch") == "2"


def test_the_command_of_the_wheel(installed: Installed, redis_server: Server) -> None:
    """`coordinator --help` answers, and a command reaches the store."""
    shown = installed.run("coordinator", "--help")
    assert shown.returncode == 0, shown.stderr
    assert all(word in shown.stdout for word in ("demo", "status", "doctor"))
    status = installed.run("coordinator", "--url", redis_server.url, "status", "--json")
    assert status.returncode == 0, status.stderr
    json.loads(status.stdout)
