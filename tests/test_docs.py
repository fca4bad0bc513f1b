"""What the documents claim is compared with the code, and what they tell people to type is run.

README.md, docs/protocol.md and docs/internals.md. (docs/configuration.md is compared in test_compose.py.)
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from fakenode import Farm
from scriptlab import CATALOGUE, Case, Lab
from servers import MissingLane, Server
from util import wait_until

from coordinator import Cause, PrefillNode, Settings, Status, Worker, doctor
from coordinator.decide.detector import Detector
from coordinator.runtime.core import COUNTERS
from coordinator.store.keys import Keys
from coordinator.store.ops import Ops
from coordinator.store.scripts import load, names

ROOT = Path(__file__).resolve().parent.parent
README, PROTOCOL, INTERNALS = ROOT / "README.md", ROOT / "docs" / "protocol.md", ROOT / "docs" / "internals.md"
DOCS = (README, PROTOCOL, INTERNALS, ROOT / "docs" / "configuration.md", ROOT / "CHANGELOG.md")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")


def section(path: Path, title: str) -> str:
    """What stands under a heading, to the next one of any level."""
    text = path.read_text()
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{path.name} has no section {title!r}"
    return found[1]


def tables(text: str) -> list[list[list[str]]]:
    """Every table: its rows without the head, each a list of cells."""
    found: list[list[list[str]]] = []
    for block in re.findall(r"(?:^\|.*\|\n?)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in block.splitlines()]
        found.append([[cell.strip("| ") for cell in row] for row in rows[2:]])
    return found


def table(path: Path, title: str) -> list[list[str]]:
    [only] = tables(section(path, title))
    return only


def named(cell: str) -> list[str]:
    """The code spans of a cell."""
    return _SPAN.findall(cell)


def blocks(path: Path, language: str) -> list[str]:
    return [text for kind, text in _BLOCK.findall(path.read_text()) if kind == language]


def typed(path: Path) -> list[str]:
    """What a document tells people to type: lines of code blocks, and code spans."""
    text = path.read_text()
    lines = [line.removeprefix("$ ") for _, block in _BLOCK.findall(text) for line in block.splitlines()]
    return lines + _SPAN.findall(_BLOCK.sub("", text))


def sources(under: str = "coordinator") -> list[Path]:
    return sorted((ROOT / under).rglob("*.py"))


# -- docs/protocol.md: keys -------------------------------------------------------------------------------------


def key_table() -> dict[str, str]:
    return {named(row[0])[0]: row[1] for row in table(PROTOCOL, "Keys")}


def test_the_key_table_is_keys_py() -> None:
    """Every key that keys.py spells, with its type, and no other."""
    keys, spelled = Keys("coordinator"), {}
    words: dict[str, Any] = {"address": "A", "worker": "<worker>", "epoch": "<epoch>"}
    for name, member in vars(Keys).items():
        if name.startswith("_") or name in ("namespace", "snapshot"):
            continue
        if isinstance(member, property):
            text, doc = getattr(keys, name), member.__doc__
        else:
            asked = member.__code__.co_varnames[1 : member.__code__.co_argcount]
            text, doc = member(keys, *(words[argument] for argument in asked)), member.__doc__
        assert doc
        spelled[text] = doc.partition(":")[0].removeprefix("Pub/sub ")
    assert key_table() == spelled


def test_a_snapshot_is_named_by_its_pending_field() -> None:
    """The fields that the table gives for `pending` lead to the keys of the table."""
    keys = Keys("coordinator")
    assert keys.snapshot("A", "lost:3:w") == keys.lost("A", 3, "w")
    assert keys.snapshot("A", "orphans:w") == keys.orphans("A", "w")
    [content] = [row[2] for row in table(PROTOCOL, "Keys") if "pending" in row[0]]
    assert named(content) == ["lost:<epoch>:<worker>", "orphans:<worker>"]


def documented_fields(title: str) -> set[str]:
    return {name for row in table(PROTOCOL, title) for name in named(row[0])}


def written_fields(key: str) -> set[str]:
    """Fields that the scripts write into the hash they call `key`."""
    found: set[str] = set()
    for name in names():
        for call in re.findall(rf"'HSET', {key},(.*?)\)\n", load(name).text, re.DOTALL):
            found |= set(re.findall(r"'([a-z_]+)',", call)) | set(re.findall(r", '([a-z_]+)',", call))
    return found - {"alive", "failed", "suspect", "node_failed", "node_restarted"}


@pytest.mark.parametrize(("title", "key"), [("The node's fields", "node"), ("The worker's fields", "record")])
def test_the_fields_are_those_that_the_scripts_write(title: str, key: str) -> None:
    """Every field of the two hashes, and no other."""
    assert documented_fields(title) == written_fields(key)


def test_the_trail_and_the_channel_are_the_scripts() -> None:
    """Every kind of event and every word that a script writes, with the event's fields."""
    text = "".join(load(name).text for name in names())
    kinds: dict[str, set[str]] = {}
    for call in re.findall(r"trail\(events,.*?'kind', (.*?)\)\n", text):
        first, _, rest = call.partition(", ")
        for kind in re.findall(r"'([a-z]+)'", re.sub(r"== '\w+'", "", first)):
            kinds.setdefault(kind, set()).update(re.findall(r"'([a-z]+)',", rest))
    listed = {named(row[0])[0]: row[2] for row in table(PROTOCOL, "The trail and the channel")}
    assert {kind: set(re.sub(r"\(.*?\)", "", cell).replace(",", " ").split()) for kind, cell in listed.items()} == kinds
    words = section(PROTOCOL, "The trail and the channel").partition("Words on the channel:")[2]
    assert set(named(words)) == set(re.findall(r"'PUBLISH', channel, '(\w+) '", text))


# -- docs/protocol.md: scripts ----------------------------------------------------------------------------------


def test_the_script_table_is_the_headers() -> None:
    """Every script with its purpose, status words, repetition and cost, as its header says."""
    listed = {named(row[0])[0]: tuple(row[1:]) for row in table(PROTOCOL, "Scripts")}
    scripts = {name: load(name) for name in names()}
    assert listed == {n: (s.purpose, ", ".join(s.returns), s.repeat, s.cost) for n, s in scripts.items()}


def answers() -> dict[tuple[str, str], int]:
    """Number of elements by script and status word, as documented."""
    found = {}
    for what, elements in table(PROTOCOL, "Answers"):
        [script] = named(what)
        words = what.partition("` ")[2]
        flat = re.sub(r"\[.*?\]|\(.*?\)|;.*", "x", elements)
        for word in load(script).returns if words == "any" else words.split(", "):
            found[script, word] = len(flat.split(", "))
    return found


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CATALOGUE])
def test_the_answers_have_the_elements_listed(case: Case) -> None:
    """Each situation's answer is as long as its row says."""
    import fakeredis

    lab = Lab(fakeredis.FakeRedis(decode_responses=True))
    assert len(lab.raw(case.arrange(lab))) == answers()[case.script, case.status]


def test_every_status_word_has_its_answer_listed() -> None:
    """The layout of each word of each script is in the table, and of no other."""
    assert set(answers()) == {(name, word) for name in names() for word in load(name).returns}


# -- docs/protocol.md: what happens -----------------------------------------------------------------------------


def test_the_causes_are_the_enum() -> None:
    """Every cause a room can fail with, and no other."""
    assert [named(row[0])[0] for row in table(PROTOCOL, "How a failure travels")] == [cause.value for cause in Cause]


def test_the_times_are_those_of_the_default_settings() -> None:
    """The figures in brackets follow from the formulas beside them and from the code."""
    s = Settings()
    i, t, m = s.probe_interval_s, s.probe_timeout_s, s.max_misses
    first = i
    window = Ops(s).suspect("10.0.0.5:1", "w", 1, True, "x").args[4]
    expected = {
        "first probe": first,
        "killed": first + 0.03 * (m - 1) + 0.05 + 0.03 * (m - 1),
        "hung": first + (m - 1) * max(i, t) + t + m * t,
        "... and votes": int(window) / 1000,
        "from the verdict": s.tick_s,
        "a worker that alone": Detector(s).alone_s,
        "dead worker": s.lease_s + s.tick_s,
    }
    for what, text in table(PROTOCOL, "How long it takes"):
        found = re.findall(r"\(([\d.]+) s\)", text)
        values = [value for start, value in expected.items() if what.startswith(start)]
        assert [float(figure) for figure in found] == [round(value, 1) for value in values], what


def test_every_guarantee_is_proved_by_tests_that_exist() -> None:
    """G1 to G13, as in the README, each proved by tests that exist, at least one of them of its own name."""
    functions = {
        node.name
        for path in sources("tests")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")
    }
    rows = {row[0]: row for row in table(PROTOCOL, "Guarantees")}
    assert list(rows) == [f"G{n}" for n in range(1, 14)]
    assert list(rows) == [row[0] for row in table(README, "What it guarantees")]
    for name, row in rows.items():
        proofs = [span for span in named(row[3]) if span.startswith("test_")]
        assert [proof for proof in proofs if proof not in functions] == []
        own = f"_{name.lower()}_"
        assert [proof for proof in proofs if own in proof.lower()], f"{name} names no test of its own"


# -- docs/protocol.md: the store --------------------------------------------------------------------------------


def test_the_access_rules_are_what_is_needed() -> None:
    """The ACL line grants what doctor.commands() lists, on this namespace's keys and channel, and nothing else."""
    [line] = [line for line in typed(PROTOCOL) if line.startswith("ACL SETUSER")]
    rules = line.split()[3:]
    patterns = ["on", ">PASSWORD", "resetkeys", "~coordinator:*", "resetchannels", "&coordinator:*", "-@all"]
    assert rules == [*patterns, *(f"+{name.lower()}" for name in doctor.commands())]


def test_the_access_rules_work_as_they_stand(redis_server: Server, redis_url: str) -> None:
    """The line is accepted by a server; a worker of that user writes, and may do nothing else; +select is extra."""
    [line] = [line for line in typed(PROTOCOL) if line.startswith("ACL SETUSER")]
    with redis_server.client() as admin, Farm() as farm:
        address = farm.node().address
        admin.execute_command(*line.split())
        try:
            user = redis_url.replace("://", "://coordinator:PASSWORD@")
            with Worker(user, name="decode") as worker:
                worker.join(address, 7)
                assert worker.flush(10)
            other = Worker(user.removesuffix("/0") + "/1", name="decode")
            try:
                other.join(address, 7)
                assert not other.flush(0.3)
                admin.execute_command("ACL", "SETUSER", "coordinator", "+select")
                assert other.flush(10)
            finally:
                other.close()
        finally:
            admin.execute_command("ACL", "DELUSER", "coordinator")


# -- docs/protocol.md: redis-cli --------------------------------------------------------------------------------


@dataclass
class Scene:
    """What the documents describe, really happening once on a server: open rooms, a failure, a departure."""

    server: Server
    printed: list[dict[str, str]] = field(default_factory=list)  # by block, by command as it stands in the document
    keys: dict[str, str] = field(default_factory=dict)  # every key that was there at one time, with its type
    node_fields: set[str] = field(default_factory=set)
    worker_fields: set[str] = field(default_factory=set)
    health: dict[str, Any] = field(default_factory=dict)
    node_counters: set[str] = field(default_factory=set)
    address: str = ""

    def play(self) -> None:
        acts = blocks(PROTOCOL, "console")
        assert len(acts) == 3
        settings = Settings(url=self.server.url)
        with Farm() as farm, self.server.client() as client:
            there = farm.node(instance="life-1")
            self.address = there.address
            trail, record = Keys("coordinator").events(self.address), Keys("coordinator").worker
            node = PrefillNode(self.address, settings=settings, instance="life-1", info={"ranks": 2})
            one, two = Worker(name="decode-0", settings=settings), Worker(name="decode-1", settings=settings)
            try:
                assert node.wait_announced(20)
                one.join(self.address, 8804230600348159981).update(Status.TRANSFERRING)
                for worker, room in ((one, 42), (one, 7), (two, 42), (two, 43)):
                    worker.join(self.address, room)
                assert one.flush(20)
                assert two.flush(20)
                wait_until(lambda: client.hget(record(self.address, one.id), "transferring") == "1", 20, "statistics")
                self.look(client, acts[0], one)

                assert node.abort(one.id, 7, "no memory")
                wait_until(lambda: one.status(self.address, 7) is Status.FAILED, 20, "the abort")
                assert one.flush(20)
                there.stop()
                wait_until(lambda: acknowledged(client, trail) == 2, 30, "both acknowledgements")
                self.look(client, acts[1], one)

                there.start()
                wait_until(lambda: two.health()["addresses"][self.address]["state"] == "alive", 30, "the recovery")
                two.join(self.address, 99)
                assert two.flush(20)
                self.health = one.health()
                self.node_counters = set(node.counters)
                two.close()
                self.look(client, acts[2], two)
            finally:
                one.close()
                two.close()
                node.close()

    def look(self, client: redis.Redis, act: str, worker: Worker) -> None:
        """Run the commands of one block, and note what is there."""
        for key in client.scan_iter(count=1000):
            self.keys[key] = str(client.type(key)).upper()
        self.node_fields |= set(cast(Any, client.hkeys(Keys("coordinator").node(self.address))))
        self.worker_fields |= set(cast(Any, client.hkeys(Keys("coordinator").worker(self.address, worker.id))))
        printed: dict[str, str] = {}
        self.printed.append(printed)
        env = {**os.environ, "A": f"{{{self.address}}}", "W": worker.id}
        for command in commands(act):
            line = f'redis-cli() {{ command redis-cli -p {self.server.port} "$@"; }}; {command}'
            done = subprocess.run(
                ["bash", "-c", line], env=env, capture_output=True, text=True, check=False, timeout=30
            )
            printed[command] = done.stdout + done.stderr


def acknowledged(client: Any, trail: str) -> int:
    return sum(words["kind"] == "acked" for _, words in client.xrange(trail))


def commands(act: str) -> dict[str, str]:
    """Commands of a console block with the output that stands below each."""
    parts = re.split(r"^\$ (.*)\n", act, flags=re.MULTILINE)
    assert parts[0] == ""
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    try:
        server = Server("redis")
    except MissingLane:
        try:
            server = Server("valkey")
        except MissingLane as missing:
            pytest.skip(f"missing lane: {missing}")
    try:
        scene = Scene(server.start())
        scene.play()
        yield scene
    finally:
        server.stop()


def masked(text: str) -> list[str]:
    """The lines of an output without what differs from run to run, in any order."""
    text = re.sub(r"decode-\d#[0-9a-f]{8}", "WORKER", text)
    text = re.sub(r"\b[0-9a-f]{16}\b", "CALL", text)
    return sorted(re.sub(r"\d+", "0", line) for line in text.splitlines())


@pytest.mark.parametrize("act", [0, 1, 2])
def test_redis_cli_prints_what_the_document_shows(scene: Scene, act: int) -> None:
    """Each command of each block, run on the scene that the document describes."""
    if shutil.which("redis-cli") is None:
        pytest.skip("no redis-cli on PATH: apt-get install redis-tools")
    for command, shown in commands(blocks(PROTOCOL, "console")[act]).items():
        assert masked(scene.printed[act][command]) == masked(shown), command


def test_every_key_on_a_server_is_in_the_table(scene: Scene) -> None:
    """Whatever a node and two workers left on a server matches one row, type included; no row is never seen."""
    rows = {
        re.sub(r"<epoch>", r"\\d+", re.escape(key).replace("<worker>", r"[^:]+")).replace(
            r"\{A\}", re.escape(f"{{{scene.address}}}")
        ): kind
        for key, kind in key_table().items()
        if kind != "channel"
    }
    seen = {pattern for key, kind in scene.keys.items() for pattern in rows if re.fullmatch(pattern, key)}
    for key, kind in scene.keys.items():
        assert [row for pattern, row in rows.items() if re.fullmatch(pattern, key)] == [kind], key
    rare = {pattern for pattern in rows if pattern.endswith(("suspects", "aborts:[^:]+"))}  # gone too soon to look
    assert seen | rare == set(rows)


def test_every_field_on_a_server_is_in_the_tables(scene: Scene) -> None:
    """The hashes of node and worker hold documented fields."""
    assert scene.node_fields <= documented_fields("The node's fields")
    assert {"epoch", "state", "failed_ms", "verdict_counts"} <= scene.node_fields
    assert scene.worker_fields == documented_fields("The worker's fields")


# -- docs/internals.md ------------------------------------------------------------------------------------------


def test_health_is_as_documented(scene: Scene) -> None:
    """The keys of health(), and of its two inner tables, are those listed."""
    listed = {named(row[0])[0]: named(row[1]) for row in table(INTERNALS, "health()")}
    assert list(listed) == list(scene.health)
    assert listed["store"] == list(scene.health["store"])
    assert listed["addresses"] == list(scene.health["addresses"][scene.address])
    assert listed["beats_s_ago"] == list(scene.health["beats_s_ago"]) == list(scene.health["restarts"])


def test_the_counters_are_the_code(scene: Scene) -> None:
    """Worker's and PrefillNode's counters, in order."""
    worker, node = ([named(row[0])[0] for row in rows] for rows in tables(section(INTERNALS, "Counters")))
    assert worker == list(COUNTERS) == list(scene.health["counters"])
    assert set(node) == scene.node_counters


def logged() -> set[tuple[str, str]]:
    """(event, level) of every log call outside the demo."""
    found = set()
    for path in sources():
        if "demo" in path.relative_to(ROOT).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id in ("log", "logger") and node.args:
                assert isinstance(node.args[0], ast.Constant), f"{path.name}:{node.lineno}: not a constant event name"
                level = {"exception": "error"}.get(node.func.attr, node.func.attr)
                found.add((str(node.args[0].value).split()[0], level))
    return found


def test_the_log_table_is_the_code() -> None:
    """Every event that is logged, with its level, and no other."""
    listed = [(named(row[0])[0], row[1]) for row in table(INTERNALS, "Log")]
    assert len(listed) == len(set(listed))
    assert set(listed) == logged()


def defined() -> dict[str, dict[str, set[str]]]:
    """By file: names defined at the top and, by class, its members and attributes."""
    found: dict[str, dict[str, set[str]]] = {}
    for path in sources():
        here = found[str(path.relative_to(ROOT))] = {"": set()}
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                here[""].add(node.name)
            if isinstance(node, ast.Assign):
                here[""] |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            if isinstance(node, ast.ClassDef):
                here[node.name] = {
                    part.name for part in node.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))
                }
                here[node.name] |= {
                    part.target.id
                    for part in node.body
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
                }
                here[node.name] |= {
                    part.attr for part in ast.walk(node)
                    if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
                }  # fmt: skip
    return found


@pytest.mark.parametrize("path", [PROTOCOL, INTERNALS], ids=lambda path: path.name)
def test_names_in_the_text_exist(path: Path) -> None:
    """`Class.member` is one of the code; "`name` in `file`" is defined in that file."""
    text = _BLOCK.sub("", path.read_text())
    here = defined()
    classes: dict[str, set[str]] = {}
    for parts in here.values():
        for name, members in parts.items():
            classes.setdefault(name, set()).update(members)
    enums = {"Status": {status.name for status in Status}}
    for owner, member in re.findall(r"`([A-Z]\w+)\.([A-Za-z_]\w*)(?:\([^`]*\))?`", text):
        assert member in classes.get(owner, set()) | enums.get(owner, set()), f"{owner}.{member}"
    pairs = re.findall(r"`([A-Za-z_][\w.]*)`(?: \([^)]*\))? in\s+`(coordinator/[\w/]+\.py)`", text)
    for name, file in pairs:
        top, _, member = name.partition(".")
        assert top in here[file][""], f"{name} in {file}"
        assert not member or member in here[file][top], f"{name} in {file}"
    assert path == PROTOCOL or len(pairs) >= 8


def test_settings_in_the_text_exist() -> None:
    """What looks like a setting (`..._s`) is one."""
    known = {f.name for f in fields(Settings)} | {"deadline_s"}
    for path in DOCS:
        assert {
            span for span in _SPAN.findall(path.read_text()) if re.fullmatch(r"[a-z_]+_s", span)
        } - known == set(), path


def test_imports_point_down_the_module_table() -> None:
    """A module imports from its own row or from rows below it, and every module but the package itself is in a row."""
    rank = {name: row for row, cells in enumerate(table(INTERNALS, "Modules")) for name in named(cells[0])}

    def rank_of(file: str) -> int | None:
        return next((row for name, row in rank.items() if file == name or file.startswith(name + "/")), None)

    for path in sources():
        file = str(path.relative_to(ROOT))
        if file == "coordinator/__init__.py":
            continue
        own = rank_of(file)
        assert own is not None, f"{file} is in no row"
        for module in imported(path):
            other = rank_of(module)
            assert other is None or other >= own, f"{file} imports {module}"


def imported(path: Path) -> set[str]:
    """Files and folders of the package that a file imports from, TYPE_CHECKING aside."""
    tree = ast.parse(path.read_text())
    hidden = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for part in ast.walk(node)
    }  # fmt: skip
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in hidden:
            base = path.parents[node.level - 1]
            for target in (
                [base / node.module.replace(".", "/")] if node.module else [base / a.name for a in node.names]
            ):
                found.add(str((target if target.is_dir() else target.with_suffix(".py")).relative_to(ROOT)))
    return found


# -- all documents ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(path: Path) -> None:
    """Every relative link, and every file that is named as `folder/file`, exists."""
    text = path.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    relative = [link for link in links if link and "://" not in link]
    assert [link for link in relative if not (path.parent / link).exists()] == []
    files = re.findall(r"\b((?:coordinator|lua|tests|docs|benchmarks)/[\w./-]*\w)", " ".join(typed(path)))
    assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_commands_exist(path: Path) -> None:
    """Every `coordinator` command, with its options, and every `make` target is one."""
    import typer

    from coordinator.cli.app import app

    group = cast(Any, typer.main.get_command(app))
    known = {name: {option for p in command.params for option in p.opts} for name, command in group.commands.items()}
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in typed(path):
        words = line.partition("#")[0].split()
        if "<id>" in line or "<address>" in line:  # the name of a thread
            continue
        if words[:1] == ["make"] and len(words) > 1 and re.fullmatch(r"[a-z]+", words[1]):
            assert words[1] in targets, line
            if words[1] == "demo" and len(words) > 2:
                _, demo_line = line.split(" ARGS=", 1)
                assert options(shlex.split(demo_line)[0].split()) <= known["demo"], line
        if words[:1] == ["coordinator"] and len(words) > 1 and re.fullmatch(r"[a-z-]+", words[1]):
            assert words[1] in known, line
            assert options(words[2:]) <= known[words[1]], line


def options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def test_redis_cli_lines_of_the_readme_name_our_keys() -> None:
    """Every key in them has the form of a row of the key table."""
    rows = {
        re.escape(key).replace(r"\{A\}", r"\{[^{}]+\}").replace("<worker>", r"\w[\w.-]*\#\w+") for key in key_table()
    }
    lines = [line.split() for line in typed(README) if line.startswith("redis-cli ")]
    keys = [word for words in lines for word in words if word.startswith("coordinator:")]
    assert len(keys) >= 4
    assert [key for key in keys if not any(re.fullmatch(row, key) for row in rows)] == []


@pytest.mark.parametrize(
    ("path", "number"),
    [(p, n) for p in DOCS for n in range(len(blocks(p, "python")))],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_python_examples_run(path: Path, number: int, redis_url: str) -> None:
    """Each example as it stands, with this test's server and node instead of the addresses in it."""
    with Farm() as farm:
        text = blocks(path, "python")[number].replace("10.0.0.5:8998", farm.node(instance="life-1").address)
        assert "redis://" in text, "an example that uses no store proves nothing here"
        text = re.sub(r"redis://127\.0\.0\.1:6379/0", redis_url, text)
        exec(compile(text, f"{path.name} example {number}", "exec"), {"__name__": "example"})
