"""Where the plug-in cannot do its work it says so, once and by name, and SGLang runs as without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bed import Bed, Decode
from decoding import pace, python
from servers import Server

BACKEND = "mooncake"
STOCK = {"addr_to_rooms_tracker": "collections.defaultdict", "request_status": "builtins.dict"}
HERE = Path(__file__).resolve().parent
#: Runs in a process of its own: something is done to SGLang or the plug-in, then the entry point, then a manager.
PROGRAM = """
import logging, sys, threading
sys.path[:0] = sys.argv[1:3]
import loopback, standins
loopback.watch()
logging.basicConfig(level="INFO", format="%(name)s %(levelname)s %(message)s")
standins.boot()
import context
{prepare}
from sglang.srt.plugins import load_plugins
load_plugins()
{between}
manager = context.make_manager("mooncake", "decode")
print(type(manager.request_status).__name__, sorted(t.name for t in threading.enumerate() if "eartbeat" in t.name))
"""


def is_stock(rank: Decode) -> bool:
    """Stock tables, stock thread (named, or not, as SGLang names it), no thread of ours."""
    bridge = python(rank, "result = hasattr(manager, '_coordinator')")
    threads = rank.ask(do="threads")
    ours = [name for name in threads if name.startswith("coordinator")]
    beats = [name for name in threads if "eartbeat" in name]
    return not bridge and not ours and bool(beats) and rank.ask(do="types") == STOCK


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"COORDINATOR_URL": "http://127.0.0.1:1"}, "http"),
        ({"COORDINATOR_URL": "redis://127.0.0.1:notaport"}, "notaport"),
        ({"COORDINATOR_TICK_S": "often"}, "COORDINATOR_TICK_S"),
        ({"COORDINATOR_LEASE_S": "0.1"}, "lease_s"),
        ({"COORDINATOR_NAMESPACE": "a b"}, "namespace"),
    ],
)
def test_wrong_settings(bed: Bed, store: Server, env: dict[str, str], says: str) -> None:
    """A wrong URL or variable: one warning that names it, no traceback, and everything stock."""
    rank = bed.decode(BACKEND, url=store.url, env={**pace(), **env})
    log = rank.log()
    assert is_stock(rank)
    warnings = [line for line in log.splitlines() if "not_plugged" in line or "rooms_not_shared" in line]
    assert len(warnings) == 1, log
    assert says in warnings[0]
    assert "WARNING" in warnings[0]
    assert "Traceback" not in log
    with store.client() as client:
        assert not client.keys("*")


def test_a_variable_that_nobody_knows_is_no_reason(bed: Bed, store: Server) -> None:
    """COORDINATOR_GROUP and COORDINATOR_ADDRESS are the plug-in's own; with them the rooms are shared."""
    rank = bed.decode(BACKEND, url=store.url, env=pace(group="-", address="127.0.0.1"))
    assert python(rank, "result = hasattr(manager, '_coordinator')")
    assert python(rank, "result = manager._coordinator.worker.group") == ""


def run(store: Server, prepare: str = "", between: str = "") -> tuple[str, str]:
    """(last line out, log) of PROGRAM."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("COORDINATOR_", "SGLANG_"))}
    env |= {"SGLANG_HOST_IP": "127.0.0.1", "COORDINATOR_URL": store.url, **pace()}
    code = PROGRAM.format(prepare=prepare, between=between) + "\nsys.stdout.flush()\nimport os\nos._exit(0)\n"
    done = subprocess.run(
        [sys.executable, "-c", code, str(HERE), str(HERE.parent)],
        env=env, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1], done.stderr


CONN = "import sglang.srt.disaggregation.common.conn as conn\n"
UNKNOWN = "from coordinator.sglang import compat\ncompat.version = lambda: {!r}\n"


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (UNKNOWN.format("0.6.0"), "SGLang 0.6.0 is not known"),
        (UNKNOWN.format("0.5.24rc1"), "SGLang 0.5.24rc1 is not known"),
        (UNKNOWN.format(""), "without a version"),
        (CONN + "del conn.CommonKVManager._handle_node_failure", "CommonKVManager._handle_node_failure"),
        (CONN + "del conn.CommonKVManager.record_failure", "CommonKVManager.record_failure"),
        (CONN + "conn.CommonKVReceiver.__init__ = lambda self, manager: None", "no parameter 'mgr'"),
        ("import sys\nsys.modules['sglang.srt.disaggregation.base.conn'] = None", "sglang.srt.disaggregation"),
    ],
)
def test_another_sglang(store: Server, prepare: str, says: str) -> None:
    """An unknown version, or a known one without something that is needed: nothing is hooked, and it says what."""
    between = "sys.modules.pop('sglang.srt.disaggregation.base.conn')" if "base.conn" in prepare else ""
    out, log = run(store, prepare, between)
    warnings = [line for line in log.splitlines() if "sglang_not_plugged" in line]
    assert len(warnings) == 1, log
    assert says in warnings[0]
    assert "WARNING" in warnings[0]
    assert out.startswith("dict ")
    if "_handle_node_failure" not in says:
        assert "eartbeat" in out, log


@pytest.mark.parametrize("name", ["prefill_response_tracker", "failure_records", "connection_pool"])
def test_a_manager_that_lacks_something(store: Server, name: str) -> None:
    """One manager class without an attribute that is needed: a warning that names it, and that manager is stock."""
    prepare = CONN + (
        "stock = conn.CommonKVManager.__init__\n"
        "def init(self, args, disaggregation_mode, *more, **words):\n"
        "    stock(self, args, disaggregation_mode, *more, **words)\n"
        f"    self.__dict__['kept'] = self.__dict__.pop({name!r})\n"
        "conn.CommonKVManager.__init__ = init"
    )
    out, log = run(store, prepare)
    warnings = [line for line in log.splitlines() if "rooms_not_shared" in line]
    assert len(warnings) == 1, log
    assert f"MooncakeKVManager has no {name}" in warnings[0]
    assert "Traceback" not in log
    assert out.startswith("dict ")
    assert "eartbeat" in out


def test_the_same_program_is_plugged_in(store: Server) -> None:
    """Nothing is broken: the program that the tests above run has our tables. (They could fail.)"""
    out, log = run(store)
    assert out.startswith("StatusTable "), log
    assert "not_plugged" not in log


def test_an_error_of_ours_is_told_and_stock(store: Server) -> None:
    """A bug in the plug-in itself, while it is registered: told with its traceback, and everything stock."""
    out, log = run(store, "from coordinator.sglang import decode\ndel decode.hooks")
    assert "sglang_not_plugged" in log
    assert out.startswith("dict ")
    out, log = run(store, "from coordinator.sglang import decode\ndecode.Bridge = None")
    assert "rooms_not_shared" in log
    assert out.startswith("dict ")
