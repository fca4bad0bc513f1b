"""The command line as people run it: a process of its own, against a real store that the scripts themselves filled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filled import BIG, N0, N1, A, B, C, Filled
from servers import Server, free_port
from util import wait_until

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("demo", "store", "status", "rooms", "fail", "events", "node", "worker", "doctor")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "coordinator.cli", *words]


def environment(url: str = "", **more: str) -> dict[str, str]:
    env = {name: text for name, text in os.environ.items() if not name.startswith("COORDINATOR_")}
    return {**env, **({"COORDINATOR_URL": url} if url else {}), "NO_COLOR": "1", **more}


def coordinator(*words: str, url: str = "", code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command line to its end; the exit code must be `code`, and there is never a traceback."""
    done = subprocess.run(
        command(*words), env=environment(url, **env), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def refused(*words: str, url: str = "", **env: str) -> str:
    """The one error line of a command that must fail without having printed anything else."""
    done = coordinator(*words, url=url, code=1, **env)
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.fixture
def filled(redis_server: Server) -> Iterator[Filled]:
    with redis_server.sync_client() as client:
        store = Filled(client)
        store.fill()
        yield store


@pytest.fixture
def start(redis_url: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a long-running command; whatever still runs is ended after the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str, url: str = redis_url, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(*words),
            env=environment(url, **env),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_help_names_every_command_and_imports_no_driver() -> None:
    """--help lists the nine commands without loading redis or aiohttp, so that it answers at once."""
    done = coordinator("--help")
    assert [name for name in COMMANDS if f"\n  {name} " not in done.stdout] == []
    probe = (
        "import sys; from coordinator.cli.app import run; run(['--help']); print({'redis', 'aiohttp'} & {*sys.modules})"
    )
    loaded = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.splitlines()[-1] == "set()"
    for name in COMMANDS:
        assert "Usage: coordinator " + name in coordinator(name, "--help").stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_one_line_says_how_to_get_it(missing: str) -> None:
    """Without typer or rich: the pip command, exit code 1."""
    script = f"import sys; sys.modules[{missing!r}] = None; from coordinator.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "error: the command line needs typer and rich: pip install 'coordinator[cli]'\n"


def test_status_json_has_exactly_the_documented_keys(filled: Filled, redis_url: str) -> None:
    """The keys that the help text promises, with the values in the store; rooms are decimal strings."""
    said = json.loads(coordinator("status", "--json", url=redis_url).stdout)
    assert set(said) == {"url", "namespace", "addresses"}
    assert [one["address"] for one in said["addresses"]] == [N0, N1]
    one = said["addresses"][0]
    assert set(one) == {
        *("address", "state", "draining", "epoch", "instance", "info", "watchers", "rooms", "by_status", "oldest"),
        *("failure", "seen_age_ms", "announced_age_ms", "workers", "votes", "pending"),
    }
    assert (one["state"], one["epoch"], one["rooms"], one["watchers"]) == ("alive", 1, 4, 2)
    assert one["oldest"] == {"room": str(BIG), "worker": A, "status": "transferring", "age_ms": 5000}
    assert set(one["workers"][0]) == {"worker", "lease_left_ms", "rooms", "by_status", "oldest"}
    filled.fail(N0, "cable pulled")
    failure = json.loads(coordinator("status", "--json", url=redis_url).stdout)["addresses"][0]["failure"]
    assert set(failure) == {"cause", "reason", "by", "age_ms"}
    assert (failure["cause"], failure["reason"]) == ("node_failed", "cable pulled")


def test_status_table_shows_what_people_look_for(filled: Filled, redis_url: str) -> None:
    """One row per address with state, epoch, counts, the oldest room, the last failure and the open snapshots."""
    filled.fail(N1, "cable pulled")
    lines = coordinator("status", url=redis_url).stdout.splitlines()
    assert lines[0].split()[:5] == ["ADDRESS", "STATE", "EPOCH", "INSTANCE", "WORKERS"]
    assert lines[1].split()[:9] == [N0, "alive", "1", "life-1", "2", "4", "2", "1", "1"]
    assert f"{BIG} transferring 5.0 s ({A})" in lines[1]
    assert lines[2].split()[:6] == [N1, "failed", "2", "life-9", "1", "0"]
    assert "ago: cable pulled (by tester)" in lines[2]
    assert lines[2].rstrip().endswith("1 rooms in 1")


def test_text_from_the_store_cannot_drive_the_terminal(filled: Filled, redis_url: str) -> None:
    """Escape sequences and markup that somebody wrote as a reason are shown as plain text."""
    filled.fail(N0, "\x1b[2J[bold]red[/bold]")
    for words in (("status",), ("events",)):
        shown = coordinator(*words, url=redis_url).stdout
        assert "\x1b" not in shown
        assert "[2J[bold]red[/bold]" in shown


def test_an_empty_store_says_so(redis_url: str) -> None:
    """No addresses: one line, exit code 0; and nothing at all to list in JSON."""
    assert "no addresses" in coordinator("status", url=redis_url).stdout
    assert json.loads(coordinator("status", "--json", url=redis_url).stdout)["addresses"] == []
    assert coordinator("events", url=redis_url).stdout == ""


def test_namespaces_do_not_see_each_other(filled: Filled, redis_url: str) -> None:
    """--namespace and COORDINATOR_NAMESPACE choose whose state is shown."""
    other = Filled(filled.client, "other")
    other.node("10.7.7.7:1", "life-1")
    other.store.run(other.ops.discover(["10.7.7.7:1"]))
    for said in (
        coordinator("--namespace", "other", "status", "--json", url=redis_url),
        coordinator("status", "--json", url=redis_url, COORDINATOR_NAMESPACE="other"),
    ):
        assert [one["address"] for one in json.loads(said.stdout)["addresses"]] == ["10.7.7.7:1"]


def test_rooms_lists_each_room_once_exactly(filled: Filled, redis_url: str) -> None:
    """Worker and room on a line each, 63 bits exact, as text and as JSON; another spelling of an address will do."""
    assert sorted(coordinator("rooms", N0, url=redis_url).stdout.split("\n")) == sorted(
        ["", f"{A} 1", f"{A} 2", f"{A} {BIG}", f"{B} 1"]
    )
    said = coordinator("rooms", "[2001:DB8:0::1]:8998", "--json", url=redis_url).stdout.splitlines()
    assert [json.loads(line) for line in said] == [{"address": N1, "worker": C, "room": "7"}]


def test_a_reader_that_has_seen_enough_is_no_error(filled: Filled, redis_url: str) -> None:
    """`coordinator rooms | head -1` ends quietly although 100,000 lines were to come."""
    for start in range(0, 100_000, 5000):
        filled.client.sadd(filled.keys.rooms(N0, A), *range(start, start + 5000))
    with subprocess.Popen(
        command("rooms", N0), env=environment(redis_url), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"decode-")
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(20) == 1


def test_fail_ends_the_epoch_and_says_whose_rooms(filled: Filled, redis_url: str) -> None:
    """Epoch and counts per worker are printed and are what the store did; the reason is one printable line."""
    shown = coordinator("fail", N0, "--reason", "cable\npulled", url=redis_url).stdout.splitlines()
    assert shown == [
        f"failed {N0}: epoch is 2 now, 4 rooms of 2 workers",
        f"  {A}  3",
        f"  {B}  1",
    ]
    node = filled.client.hgetall(filled.keys.node(N0))
    assert (node["state"], node["epoch"], node["reason"]) == ("failed", "2", "cable pulled")
    assert str(node["by"]).startswith("operator:")
    assert filled.client.scard(filled.keys.lost(N0, 1, A)) == 3
    assert filled.client.hget(filled.keys.node(N1), "state") == "alive"


def test_fail_again_says_so_and_changes_nothing(filled: Filled, redis_url: str) -> None:
    """An address that has failed already: exit code 0, the first reason, no second epoch."""
    first = json.loads(coordinator("fail", N0, "--reason", "first", "--json", url=redis_url).stdout)
    assert set(first) == {"address", "outcome", "epoch", "reason", "by", "rooms", "counts"}
    assert (first["outcome"], first["epoch"], first["rooms"], first["counts"]) == ("failed", 2, 4, {A: 3, B: 1})
    before = filled.client.hgetall(filled.keys.node(N0))
    second = json.loads(coordinator("fail", N0, "--reason", "second", "--json", url=redis_url).stdout)
    assert (second["outcome"], second["epoch"], second["reason"], second["counts"]) == (
        "already failed",
        2,
        "first",
        {},
    )
    assert "has failed already" in coordinator("fail", N0, url=redis_url).stdout
    assert filled.client.hgetall(filled.keys.node(N0)) == before


@pytest.mark.parametrize("words", [("fail", "--reason", "x"), ("rooms",), ("events",)])
def test_an_unknown_address_is_an_error_and_writes_nothing(
    filled: Filled, redis_url: str, words: tuple[str, ...]
) -> None:
    """An address that the store does not know: the error names it, no key appears."""
    before = sorted(filled.client.scan_iter())
    assert "10.9.9.9:1" in refused(words[0], "10.9.9.9:1", *words[1:], url=redis_url)
    assert sorted(filled.client.scan_iter()) == before


@pytest.mark.parametrize("name", ["fail", "rooms", "events"])
def test_a_bad_address_is_refused_before_anything_is_sent(name: str) -> None:
    """The error names the value and a right form; there is no store at that URL, and nobody asked it."""
    said = refused(name, "10.0.0.5", url="redis://127.0.0.1:1/0")
    assert "'10.0.0.5'" in said
    assert "host:port" in said


@pytest.mark.parametrize(
    "words", [("status",), ("rooms", N0), ("fail", N0), ("events",), ("doctor",), ("events", "-f")]
)
def test_no_store_is_one_line(words: tuple[str, ...]) -> None:
    """Nothing listens: one error that names the place, exit code 1."""
    port = free_port()
    assert str(port) in refused(*words, url=f"redis://127.0.0.1:{port}/0")


def test_no_store_configured_names_the_ways_to_get_one(tmp_path: Path) -> None:
    """Without a URL and without a running embedded store nothing is started; the error says what to do."""
    said = refused("status", XDG_RUNTIME_DIR=str(tmp_path))
    assert "COORDINATOR_URL" in said
    assert "coordinator store" in said
    assert not list(tmp_path.rglob("socket"))


def test_a_refused_login_is_an_error_without_the_password(redis_url: str) -> None:
    """A wrong password is named as such and is not printed; neither is the one in a malformed URL."""
    said = refused("status", url=redis_url.replace("redis://", "redis://nobody:hunter2@"))
    assert "refused" in said
    assert "hunter2" not in said
    said = refused("status", url="ftp://nobody:hunter2@127.0.0.1/0")
    assert "redis://" in said
    assert "hunter2" not in said


def test_a_bad_setting_names_the_variable(redis_url: str) -> None:
    """A variable that does not parse, and a relation that does not hold, end the command."""
    assert "COORDINATOR_TICK_S='soon'" in refused("status", url=redis_url, COORDINATOR_TICK_S="soon")
    assert "lease_s > 3 * tick_s" in refused("status", url=redis_url, COORDINATOR_LEASE_S="1", COORDINATOR_TICK_S="1")


@pytest.mark.parametrize(
    "words", [("bogus",), ("status", "--bogus"), ("fail",), ("demo", "--nodes", "many"), ("node",)]
)
def test_bad_usage_is_exit_code_2(words: tuple[str, ...]) -> None:
    """An unknown command or option, a missing argument, a word for a number."""
    assert "Usage: coordinator" in coordinator(*words, code=2).stderr


@pytest.mark.parametrize(
    "words", [("demo", "--nodes", "0"), ("demo", "--fault", "earthquake@3"), ("demo", "--trace", "/no")]
)
def test_a_demo_that_cannot_be_is_refused_before_it_starts(words: tuple[str, ...]) -> None:
    """Bad options of the demo are one error line."""
    refused(*words)


def test_the_demo_prints_its_result_as_one_object() -> None:
    """A short run without faults: exit code 0, one JSON object on stdout with the keys that the help text names."""
    words = ("--nodes", "1", "--workers", "2", "--rate", "20", "--seconds", "1", "--fault", "none", "--json")
    said = json.loads(coordinator("demo", *words).stdout)
    shown = " ".join(coordinator("demo", "--help").stdout.split())
    assert list(said) == shown.partition("JSON: {")[2].partition("}")[0].split(", ")
    assert (said["ok"], said["faults"]) == (True, [])
    assert said["rooms"]["opened"] > 0


def test_events_are_lines_and_json_lines(filled: Filled, redis_url: str) -> None:
    """Time, address, kind and the script's words; of one address or of all; JSON with stable keys."""
    filled.fail(N0, "cable pulled")
    lines = coordinator("events", url=redis_url).stdout.splitlines()
    assert len(lines) == 3
    assert lines[-1].split()[1:3] == [N0, "failed"]
    assert "reason='cable pulled'" in lines[-1]
    said = [json.loads(line) for line in coordinator("events", N0, "--json", url=redis_url).stdout.splitlines()]
    assert [set(event) for event in said] == [{"address", "id", "at_ms", "kind", "fields"}] * 2
    assert said[1]["fields"] == {"epoch": "1", "by": "tester", "reason": "cable pulled", "rooms": "4"}


def test_following_events_until_ctrl_c(filled: Filled, start: Callable[..., subprocess.Popen[str]]) -> None:
    """--follow prints what happens when it happens; Ctrl-C ends it with 130 and no word on stderr."""
    process = start("events", N0, "--follow", "--json")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["kind"] == "registered"
    filled.fail(N0)
    assert json.loads(process.stdout.readline())["kind"] == "failed"
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert process.stderr is not None
    assert process.stderr.read().strip() == ""


def test_watching_status_survives_the_store(redis_server: Server, start: Callable[..., subprocess.Popen[str]]) -> None:
    """--watch prints a look a second, says when the store is away, and goes on when it is back."""
    with redis_server.sync_client() as client:
        Filled(client).fill()
    process = start("status", "--watch", "--json")
    assert process.stdout is not None
    assert process.stderr is not None
    assert len(json.loads(process.stdout.readline())["addresses"]) == 2
    redis_server.pause()
    assert process.stderr.readline().startswith("error: the store does not answer")
    redis_server.resume()
    with redis_server.sync_client() as client:
        Filled(client).fail(N0)

    def state() -> Any:
        assert process.stdout is not None
        return json.loads(process.stdout.readline())["addresses"][0]["state"]

    wait_until(lambda: state() == "failed", 10, "the watcher seeing the failure")
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130


def test_doctor_tells_and_fails_by_its_exit_code(make_server: Callable[..., Server]) -> None:
    """A sound store is exit code 0, an evicting one 1; both say why, as a table and as JSON."""
    sound = make_server("redis", "--lazyfree-lazy-expire", "yes")
    said = json.loads(coordinator("doctor", "--json", url=sound.url).stdout)
    assert set(said) == {"url", "ok", "checks"}
    assert said["ok"] is True
    names = [
        "round-trip",
        "server",
        "role",
        "maxmemory-policy",
        "lazyfree-lazy-expire",
        "persistence",
        "permissions",
        "clock",
    ]
    assert [check["name"] for check in said["checks"]] == names
    assert all(set(check) == {"name", "outcome", "value", "advice"} for check in said["checks"])
    evicting = make_server("redis", "--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru")
    shown = coordinator("doctor", url=evicting.url, code=1).stdout
    assert "failed" in next(line for line in shown.splitlines() if line.startswith("maxmemory-policy"))
    assert json.loads(coordinator("doctor", "--json", url=evicting.url, code=1).stdout)["ok"] is False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_store_runs_until_it_is_told_to_end(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], number: int, code: int
) -> None:
    """`coordinator store` prints a URL that works, a second one finds the first, status finds it without a URL."""
    process = start("store", url="", XDG_RUNTIME_DIR=str(tmp_path))
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert url.startswith("unix://")
    assert coordinator("store", XDG_RUNTIME_DIR=str(tmp_path)).stdout.strip() == url
    assert json.loads(coordinator("status", "--json", XDG_RUNTIME_DIR=str(tmp_path)).stdout)["url"] == url
    process.send_signal(number)
    assert process.wait(10) == code
    refused("status", url=url)


def test_node_and_worker_serve_rooms_until_sigterm(redis_url: str, start: Callable[..., subprocess.Popen[str]]) -> None:
    """The two roles, configured by variables as in the compose stack, find each other through the store."""
    address = f"127.0.0.1:{free_port()}"
    node = start("node", COORDINATOR_NODE_ADDRESS=address)
    worker = start("worker", COORDINATOR_WORKER_NAME="decode", COORDINATOR_WORKER_RATE="50")

    def looked() -> Any:
        return json.loads(coordinator("status", "--json", url=redis_url).stdout)["addresses"]

    def busy() -> bool:
        return any(one["rooms"] or one["workers"] for one in looked())

    wait_until(busy, 20, "the worker opening rooms at the node")
    [one] = looked()
    assert (one["address"], one["state"]) == (address, "alive")
    assert one["workers"][0]["worker"].startswith("decode#")
    for process in (worker, node):
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    [one] = looked()
    assert (one["rooms"], one["workers"]) == (0, [])
