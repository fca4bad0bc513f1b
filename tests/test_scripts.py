"""Every script on every lane: its words, its repetition (G2), its header. Situations come from scriptlab's catalogue.

On the strict lane each script starts with "#!lua": there the server refuses a key that was not declared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from scriptlab import BIG, CATALOGUE, A, B, C, Case, Lab, M, N, timeless
from servers import FakeLane, Server

from coordinator.config import Settings
from coordinator.errors import ScriptFault
from coordinator.protocol import Batch, NodeView
from coordinator.store import scripts
from coordinator.store.ops import Op, Ops

CASES = [pytest.param(case, id=case.id) for case in CATALOGUE]
ONE_LANE = pytest.mark.parametrize("lane", ["redis"], indirect=True)


@pytest.fixture
def lab(store_server: FakeLane | Server) -> Iterator[Lab]:
    with store_server.sync_client() as client:
        yield Lab(client, declared=store_server.kind == "strict")


# -- words ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_answers_its_word_and_is_understood(lab: Lab, case: Case) -> None:
    """The situation leads to the status word that the catalogue says, and the Op's reader accepts the reply."""
    op = case.arrange(lab)
    reply = lab.raw(op)
    assert reply[0] == case.status, reply
    op.parse(reply)


def test_catalogue_covers_every_word_of_every_header() -> None:
    """Each status word under RETURNS is reached by a situation, and no situation claims another word."""
    promised = {(name, word) for name in scripts.names() for word in scripts.load(name).returns}
    assert {(case.script, case.status) for case in CATALOGUE} == promised


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("word", ["", "ok", "NONSENSE", None, 7])
def test_a_word_that_no_header_lists_is_a_fault(case: Case, word: object) -> None:
    """Every reader refuses a status that its script does not list, whatever follows it."""
    import fakeredis

    lab = Lab(fakeredis.FakeRedis(decode_responses=True))
    op = case.arrange(lab)
    with pytest.raises(ScriptFault, match=f"{case.script} answered"):
        op.parse([word, *lab.raw(op)[1:]])


# -- G2: repetition ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_G2_repetition_is_harmless(lab: Lab, case: Case) -> None:
    """The same call again gives the same answer and leaves the same keys with the same values, event trail included."""
    op = case.arrange(lab)
    first, kept = lab.run(op), lab.dump()
    for _ in range(2):
        assert timeless(lab.run(op)) == timeless(first)
        assert lab.dump() == kept


@pytest.mark.parametrize("case", CASES)
def test_G2_repetition_after_other_addresses_lived_on(lab: Lab, case: Case) -> None:
    """What the same workers do at an address whose text is a prefix of this one changes neither answer nor keys."""
    op = case.arrange(lab)
    first, kept = lab.run(op), lab.dump()
    for worker in (A, B):
        lab.open(worker, (1, 2, 3), address=M)
    lab.run(lab.ops.register_node(M, "start", "life-1", 0, "m-1", "node"))
    lab.run(lab.ops.fail_node(M, 1, "m-2", "op", "test", [A, B]))
    lab.run(lab.ops.drain_ack(M, f"lost:1:{A}", A))
    assert timeless(lab.run(op)) == timeless(first)
    assert {key: value for key, value in lab.dump().items() if f"{{{M}}}" not in key} == kept


def _both(lab: Lab) -> None:
    lab.node()
    lab.open(A, (1, 2, BIG))
    lab.open(B, (1,))


def test_G2_fail_node_again_after_the_next_epoch_began(lab: Lab) -> None:
    """A very late repetition answers the old counts and leaves the rooms of the new epoch open."""
    _both(lab)
    op = lab.fail()
    first = lab.run(op)
    assert first.counts == {A: 3, B: 1}
    lab.node("life-2")
    lab.open(A, (5,), number=2, epoch=2)
    kept = lab.dump()
    assert timeless(lab.run(op)) == timeless(first)
    assert lab.dump() == kept
    assert lab.client.smembers(lab.keys.rooms(N, A)) == {"5"}


def test_G2_register_node_again_after_workers_came_back(lab: Lab) -> None:
    """The repetition of a replacement answers the same counts and does not end the epoch that it began."""
    _both(lab)
    op = lab.register("start", "life-2", workers=[A, B])
    first = lab.run(op)
    assert (first.outcome, first.counts) == ("REPLACED", {A: 3, B: 1})
    lab.open(A, (5,), number=2, epoch=2)
    kept = lab.dump()
    assert timeless(lab.run(op)) == timeless(first)
    assert lab.dump() == kept


def test_G2_two_nodes_with_different_calls_replace_once(lab: Lab) -> None:
    """A node's own "start" and the probe that saw the new instance first end one epoch, not two."""
    _both(lab)
    assert lab.run(lab.register("probe", "life-2", workers=[A, B])).outcome == "REPLACED"
    kept = lab.dump()
    answer = lab.run(lab.register("start", "life-2", epoch=2, workers=[A, B]))
    assert (answer.outcome, answer.node.epoch) == ("SAME", 2)
    assert lab.dump() == kept | {lab.keys.node(N): kept[lab.keys.node(N)] | {"info": ""}}


def test_G2_sync_again_after_others_synced(lab: Lab) -> None:
    """A batch that comes again after other workers' batches changes no room, and its probe turn is still its own."""
    lab.open(B, (9,))
    lab.client.hset(lab.keys.node(N), "probe_ms", 1)
    op = lab.batch(A, 1, (1, 2), mode="reset")
    first = lab.run(op)
    assert first.turns == 1
    other = lab.run(lab.batch(B, 2, (10,), count=2))
    assert other.turns == 0
    kept = lab.dump()
    assert timeless(lab.run(op)) == timeless(first)
    assert lab.dump() == kept


def test_G2_reap_again_after_the_node_took_the_orphans(lab: Lab) -> None:
    """A repetition after the orphans were acknowledged answers the count and brings nothing back."""
    _both(lab)
    lab.expire(A)
    first = lab.run(lab.reap(A))
    assert (first.outcome, first.rooms) == ("REAPED", 3)
    lab.run(lab.ops.drain_drop(N, f"orphans:{A}", "node"))
    kept = lab.dump()
    assert lab.run(lab.reap(A)) == first
    assert lab.dump() == kept


def test_G2_ack_again_does_not_touch_a_later_snapshot(lab: Lab) -> None:
    """Acknowledging the snapshot of one epoch twice leaves the next epoch's snapshot pending."""
    _both(lab)
    lab.run(lab.fail())
    lab.node("life-2")
    lab.open(A, (5,), number=2, epoch=2)
    lab.run(lab.ops.drain_ack(N, f"lost:1:{A}", A))
    lab.run(lab.fail(epoch=2, call="call-2"))
    kept = lab.dump()
    lab.run(lab.ops.drain_ack(N, f"lost:1:{A}", A))
    assert lab.dump() == kept
    assert kept[lab.keys.lost(N, 2, A)] == {"5"}
    assert f"lost:2:{A}" in kept[lab.keys.pending(N)]


# -- what the scripts answer besides the word -------------------------------------------------------------------


def test_sync_tells_what_the_worker_must_know(lab: Lab) -> None:
    """Epoch, state, instance, draining, watchers, expired workers and marked rooms come back in one answer."""
    lab.node("life-1", draining=True)
    lab.open(A, (1, BIG))
    lab.open(B, (1,))
    lab.run(lab.ops.abort_room(N, A, BIG, "no memory", "node"))
    lab.expire(B)
    reply = lab.run(lab.batch(A, 2, count=2))
    assert (reply.node.epoch, reply.node.state, reply.node.instance, reply.node.draining) == (
        1,
        "alive",
        "life-1",
        True,
    )
    assert (reply.watchers, reply.expired, reply.aborted) == (1, (B,), ((BIG, "no memory"),))


def test_every_owner_reads_the_same_reason(lab: Lab) -> None:
    """After a failure each worker's next batch is STALE with the cause, reason and author of the verdict (CASE 11)."""
    _both(lab)
    lab.run(lab.fail())
    views = [lab.run(lab.batch(worker, 2, count=1)) for worker in (A, B)]
    assert [view.status for view in views] == ["STALE", "STALE"]
    assert {(v.node.epoch, v.node.state, v.node.cause, v.node.reason, v.node.by) for v in views} == {
        (2, "failed", "node_failed", "cable pulled", B)
    }
    assert all(0 <= v.node.failed_age_ms < 60_000 for v in views)


def test_votes_count_only_watchers(lab: Lab) -> None:
    """Two of three must agree; a doubtful voter needs more than half; the vote of a reaped worker is gone."""
    for worker in (A, B, C):
        lab.open(worker, (1,))
    votes = lab.run(lab.ops.suspect(N, A, 1, True, "timeout"))
    assert (votes.votes, votes.needed, votes.watchers) == (1, 2, 3)
    votes = lab.run(lab.ops.suspect(N, B, 1, True, "timeout"))
    assert (votes.votes, votes.needed) == (2, 2)
    lab.run(lab.reap(A, leaving=True))
    votes = lab.run(lab.ops.suspect(N, B, 1, True, "timeout", majority=True))
    assert (votes.votes, votes.needed, votes.watchers) == (1, 2, 2)


def test_one_failing_address_does_not_touch_its_prefix(lab: Lab) -> None:
    """10.0.0.5:899 and 10.0.0.5:8998 share nothing (CASE 22)."""
    lab.open(A, (1, 2), address=M)
    lab.open(A, (1, 2))
    before = {key: value for key, value in lab.dump().items() if f"{{{M}}}" in key}
    lab.run(lab.fail())
    assert {key: value for key, value in lab.dump().items() if f"{{{M}}}" in key} == before


def test_a_reaped_worker_leaves_others_alone(lab: Lab) -> None:
    """Only the dead worker's rooms become orphans; the other's are still open and its lease stands (CASE 27)."""
    _both(lab)
    lab.expire(A)
    lab.run(lab.reap(A))
    dump = lab.dump()
    assert dump[lab.keys.orphans(N, A)] == {"1", "2", str(BIG)}
    assert dump[lab.keys.rooms(N, B)] == {"1"}
    assert dump[lab.keys.workers(N)] == {B}
    assert lab.keys.rooms(N, A) not in dump


def test_leases_survive_a_store_that_was_away(lab: Lab) -> None:
    """After a third of a lease without any sync, the next one extends every lease instead of naming anybody expired."""
    _both(lab)
    lab.expire(A)
    lab.client.hset(lab.keys.node(N), "seen_ms", 1)
    reply = lab.run(lab.batch(B, 2, count=1))
    assert (reply.expired, reply.watchers) == ((), 2)
    assert lab.run(lab.reap(A)).outcome == "ALIVE"


def test_an_old_lease_is_not_shortened_by_forgiveness(lab: Lab) -> None:
    """A lease that ends later than a fresh term keeps its deadline."""
    lab.open(A, (1,))
    lab.client.zadd(lab.keys.workers(N), {A: 9e15})
    lab.client.hset(lab.keys.node(N), "seen_ms", 1)
    lab.run(lab.reap(B))
    lab.open(B, ())
    assert lab.client.zscore(lab.keys.workers(N), A) == 9e15


# -- headers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", scripts.names())
def test_script_is_ascii_and_its_header_is_whole(name: str) -> None:
    """The text is ASCII (its sha1 is the same everywhere), every field has one line, no word is listed twice."""
    script = scripts.load(name)
    assert script.text.isascii()
    assert "\t" not in script.text
    assert len(set(script.returns)) == len(script.returns)
    assert all(re.fullmatch(r"[A-Z]+", word) for word in script.returns)


def _fits(names: tuple[str, ...], sent: int) -> bool:
    """Whether `sent` values match header names, of which the last, or a last group in brackets, may repeat."""
    fixed = [word for word in names if not word.endswith("...")]
    group = re.search(r"\(([^)]*)\)\.\.\.$", " ".join(names))
    if group:
        size = len(group[1].split())
        fixed_count = len(names) - size
        return sent >= fixed_count and (sent - fixed_count) % size == 0
    return sent >= len(fixed) if len(fixed) < len(names) else sent == len(fixed)


@ONE_LANE
@pytest.mark.parametrize("case", CASES)
def test_header_names_what_the_op_sends(lab: Lab, case: Case) -> None:
    """As many keys and arguments are sent as the header names, groups with "..." repeated whole."""
    op, script = case.arrange(lab), scripts.load(case.script)
    assert _fits(script.keys, len(op.keys)), (script.keys, op.keys)
    assert _fits(script.args, len(op.args)), (script.args, op.args)


def _ordinal(text: str, table: str) -> set[int]:
    return {int(n) for n in re.findall(rf"{table}\[(\d+)\]", text)}


@pytest.mark.parametrize("name", scripts.names())
def test_header_names_what_the_script_reads(name: str) -> None:
    """No KEYS[n] or ARGV[n] is read beyond the names in the header, and every fixed name is read."""
    script = scripts.load(name)
    for names, table in ((script.keys, "KEYS"), (script.args, "ARGV")):
        fixed = len([w for w in names if "(" not in w and ")" not in w and not w.endswith("...")])
        used = _ordinal(script.text.partition("]]")[2], table)
        assert used, f"{table} is never read"
        assert max(used) <= len(names)
        assert used == set(range(1, fixed + 1)), f"{table}: of {fixed} names {sorted(used)} are read"


@pytest.mark.parametrize("name", scripts.names())
def test_key_names_in_the_header_are_key_names(name: str) -> None:
    """Each name under KEYS is a kind of key that keys.py spells, in the place where the Op puts such a key."""
    ops = Ops(Settings())
    examples: dict[str, Op[Any]] = {
        "abort_room": ops.abort_room(N, A, 1, "r", "b"),
        "discover": ops.discover([N]),
        "drain": ops.drain_read(N, f"lost:1:{A}"),
        "fail_node": ops.fail_node(N, 1, "c", "b", "r", [A]),
        "pass_on": ops.pass_on(N, A, [B], [(1, "r")]),
        "reap_worker": ops.reap_worker(N, A, "b", "r"),
        "register_node": ops.register_node(N, "start", "i", 1, "c", "b", [A]),
        "suspect": ops.suspect(N, A, 1, True, "r"),
        "sync": ops.sync(Batch(N, A, 1, "delta", NodeView(1), 0)),
    }
    assert set(examples) == set(scripts.names())
    sent = [re.sub(r"^coordinator:(\{[^}]*\}:)?", "", key).partition(":")[0] for key in examples[name].keys]
    named = [re.sub(r"[().]", "", word) for word in scripts.load(name).keys]
    assert sent == [{"snapshot": "lost"}.get(word, word) for word in named]


@pytest.mark.parametrize(
    "source",
    [
        "return {'OK'}",
        "--[[\nPURPOSE: x\n]]\n",
        "--[[\nPURPOSE: x\nUSES: a\nKEYS: a\nARGV: a\nRETURNS: OK\nREPEAT: \nCOST: O(1)\n]]\n",
        "--[[\nUSES: a\nPURPOSE: x\nKEYS: a\nARGV: a\nRETURNS: OK\nREPEAT: y\nCOST: O(1)\n]]\n",
        "--[[\nPURPOSE: x\nUSES: a\nKEYS: a\nARGV: a\nRETURNS: OK\nREPEAT: y\nCOST: O(1)\nMORE: z\n]]\n",
    ],
)
def test_a_malformed_header_is_a_fault(source: str) -> None:
    """A script without the seven fields in their order is refused when it is loaded, by name."""
    with pytest.raises(ScriptFault, match=r"odd\.lua"):
        scripts.parse_header("odd", source)


def test_an_unknown_script_is_a_fault() -> None:
    """The error names the script and where it was looked for."""
    with pytest.raises(ScriptFault, match=r"no script 'nope' in .*lua"):
        scripts.load("nope")


@ONE_LANE
def test_sha_is_the_servers(lab: Lab) -> None:
    """The sha1 that runners send is the one the server computes, so that EVALSHA finds what EVAL loaded."""
    for name in scripts.names():
        script = scripts.load(name)
        assert lab.client.script_load(script.text) == script.sha
