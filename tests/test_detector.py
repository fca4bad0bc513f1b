"""The detector as tables: what was seen, tick by tick, and what has to be done. Time is a number, nothing waits."""

from __future__ import annotations

import heapq
import random
from typing import Any

import pytest

from coordinator import Settings
from coordinator.decide.detector import OWN_INTERVALS, OWN_ROUNDS, RECHECK_S, URGENT_GAP_S, Act, Detector, Evidence
from coordinator.protocol import Votes
from coordinator.runtime.heartbeat import LATE_S, Lateness

N = "10.0.0.5:8998"
OK, MISCONFIGURED, UNREADY, BAD, REFUSED, TIMEOUT, UNREACHABLE = Evidence
NOTHING, AGAIN, VOTE, WITHDRAW, FAIL, GIVE_UP = Act


def detector(**settings: Any) -> Detector:
    """With the defaults: 2 misses, interval and time-out 1 s."""
    return Detector(Settings(**settings))


def ticks(d: Detector, seen: list[Evidence], address: str = N, start: float = 0.0, **context: Any) -> list[Act]:
    """One observation a second."""
    return [d.observe(address, evidence, start + i, **context) for i, evidence in enumerate(seen)]


# -- misses ------------------------------------------------------------------------------------------------------------

MISSES = [
    # An answer in between clears what was missed (CASE 13).
    (2, [TIMEOUT, OK] * 20, [NOTHING, NOTHING] * 20),
    (2, [REFUSED, OK] * 20, [AGAIN, NOTHING] * 20),
    (3, [TIMEOUT, TIMEOUT, OK] * 9, [NOTHING] * 27),
    # The second in a row is a vote, and so is each further one; the answer takes it back, once.
    (2, [OK, TIMEOUT, TIMEOUT], [NOTHING, NOTHING, VOTE]),
    (2, [TIMEOUT, TIMEOUT, TIMEOUT, OK, OK], [NOTHING, VOTE, VOTE, WITHDRAW, NOTHING]),
    (2, [REFUSED, REFUSED], [AGAIN, VOTE]),
    (1, [TIMEOUT], [VOTE]),
    (1, [REFUSED], [VOTE]),
    (3, [REFUSED, REFUSED, REFUSED], [AGAIN, AGAIN, VOTE]),
    (3, [TIMEOUT, TIMEOUT, TIMEOUT], [NOTHING, NOTHING, VOTE]),
    # All kinds of misses count together; only a refused connection is tried again at once.
    (2, [UNREACHABLE, BAD], [NOTHING, VOTE]),
    (4, [REFUSED, TIMEOUT, BAD, UNREACHABLE], [AGAIN, NOTHING, NOTHING, VOTE]),
    # 401 and 404 are answers: misconfigured is not dead (CASE 17).
    (2, [MISCONFIGURED] * 10, [NOTHING] * 10),
    (2, [TIMEOUT, MISCONFIGURED, TIMEOUT], [NOTHING] * 3),
    (2, [TIMEOUT, TIMEOUT, MISCONFIGURED], [NOTHING, VOTE, WITHDRAW]),
    # 503 before the first success is a node that warms up; after it, it is a miss (CASE 17).
    (2, [UNREADY] * 10, [NOTHING] * 10),
    (2, [MISCONFIGURED, UNREADY, UNREADY], [NOTHING] * 3),
    (2, [OK, UNREADY, UNREADY], [NOTHING, NOTHING, VOTE]),
    (2, [UNREADY, OK, UNREADY, OK, UNREADY], [NOTHING] * 5),
    # Warming up neither counts nor clears.
    (2, [TIMEOUT, UNREADY, TIMEOUT], [NOTHING, NOTHING, VOTE]),
    # Another 5xx is a node that cannot serve, from the start.
    (2, [BAD, BAD], [NOTHING, VOTE]),
]


@pytest.mark.parametrize(("max_misses", "seen", "acts"), MISSES)
def test_misses_in_a_row_make_a_vote(max_misses: int, seen: list[Evidence], acts: list[Act]) -> None:
    """Each row: what the probes saw, and what had to be done after each."""
    assert ticks(detector(max_misses=max_misses), seen) == acts


@pytest.mark.parametrize("evidence", [e for e in Evidence if e is not Evidence.REFUSED])
def test_late_evidence_is_dropped_but_a_refusal(evidence: Evidence) -> None:
    """Stopped for 10 s and continued: not one of the misses counts, and each probe is made again (CASE 24)."""
    d = detector()
    d.observe(N, OK, 0.0)
    assert ticks(d, [evidence] * 8, start=10.0, late=True) == [AGAIN] * 8
    assert (d.watch(N).misses, d.watch(N).last, d.dropped_late) == (0, OK, 8)
    assert d.observe(N, TIMEOUT, 20.0) is NOTHING


def test_a_node_that_was_heard_is_not_failed_by_an_older_vote() -> None:
    """SGLang has reached the node while the vote was on its way: no verdict, and a probe at once."""
    d = detector()
    assert ticks(d, [OK, TIMEOUT, TIMEOUT]) == [NOTHING, NOTHING, VOTE]
    d.heard(N)
    assert d.counted(N, Votes(stale=False, votes=2, needed=2, watchers=2), 10.0) is NOTHING
    assert d.watch(N).urgent
    assert d.observe(N, OK, 10.1) is Act.WITHDRAW


def test_who_has_missed_nothing_is_not_probed_for_being_heard() -> None:
    """An answer that changes nothing costs nothing; an address that is not watched stays unwatched."""
    d = detector()
    d.observe(N, OK, 0.0)
    d.heard(N)
    d.heard("127.0.0.1:2")
    assert not d.watch(N).urgent
    assert set(d.watches) == {N}


def test_a_late_refusal_counts_and_is_looked_at_again() -> None:
    """A worker that is always late, for example with a thousand dead nodes, finds them all the same."""
    d = detector()
    d.observe(N, OK, 0.0)
    assert [d.observe(N, Evidence.REFUSED, at, late=True) for at in (10.0, 10.1)] == [AGAIN, VOTE]
    assert d.dropped_late == 0


def test_late_evidence_does_not_clear_misses_either() -> None:
    """What was seen on time before stays counted."""
    d = detector()
    assert [d.observe(N, TIMEOUT, 0.0), d.observe(N, OK, 1.0, late=True), d.observe(N, TIMEOUT, 2.0)] == [
        NOTHING,
        AGAIN,
        VOTE,
    ]


@pytest.mark.parametrize(
    ("beats", "started", "ended", "late"),
    [
        ([0.0, 0.05, 0.10], 0.06, 0.12, False),
        ([0.0, 10.0], 0.01, 10.0, True),  # stopped while the probe was out, the loop came around first
        ([0.0], 0.01, 10.0, True),  # stopped, and the probe's end is the first thing to run
        ([0.0, 10.0], 10.1, 10.2, False),  # stopped before it began
        ([0.0, 10.0, 10.05], 9.99, 10.06, True),
        ([0.0, LATE_S], 0.01, LATE_S, False),  # a hiccup within the limit
        ([0.0, LATE_S + 0.01], 0.01, LATE_S + 0.01, True),
    ],
)
def test_lateness(beats: list[float], started: float, ended: float, late: bool) -> None:
    """A probe is late if the loop missed its beat at some time between its start and its end (CASE 24)."""
    lateness = Lateness(beats[0])
    for beat in beats[1:]:
        lateness.beat(beat)
    assert lateness.since(started, ended) == late


# -- votes -------------------------------------------------------------------------------------------------------------


def voted(d: Detector, address: str = N, at: float = 0.0) -> None:
    """Two time-outs: the vote is made at `at`."""
    assert ticks(d, [TIMEOUT, TIMEOUT], address, at - 1)[-1] is VOTE


COUNTS = [
    # votes, needed, watchers, seconds since the vote, what to do
    (1, 1, 1, 0.0, FAIL),
    (2, 2, 2, 0.0, FAIL),
    (2, 2, 9, 0.0, FAIL),
    (3, 2, 9, 0.0, FAIL),
    (1, 2, 2, 0.0, NOTHING),
    (1, 2, 2, 4.99, NOTHING),
    (1, 2, 2, 5.0, GIVE_UP),
    (1, 2, 9, 60.0, GIVE_UP),
]


@pytest.mark.parametrize(("votes", "needed", "watchers", "after", "act"), COUNTS)
def test_a_vote_is_counted(votes: int, needed: int, watchers: int, after: float, act: Act) -> None:
    """Enough votes fail the node; alone with its opinion for 5 s the worker fails its own rooms."""
    d = detector()
    voted(d)
    assert d.alone_s == 5.0
    assert d.counted(N, Votes(False, votes, needed, watchers), after) is act


def test_a_stale_count_does_nothing() -> None:
    """The epoch moved or the node has failed already."""
    d = detector()
    voted(d)
    assert d.counted(N, Votes(stale=True), 100.0) is NOTHING


def test_a_count_that_comes_after_an_answer_does_nothing() -> None:
    """The node answered while the vote was on its way."""
    d = detector()
    voted(d)
    assert d.observe(N, OK, 1.0) is WITHDRAW
    assert d.counted(N, Votes(False, 2, 2, 2), 1.1) is NOTHING


def test_a_vote_that_cannot_be_recorded_gives_up() -> None:
    """Without the store there is nobody to agree with: own rooms only, once."""
    d = detector()
    voted(d)
    assert [d.uncounted(N), d.uncounted(N)] == [GIVE_UP, NOTHING]


@pytest.mark.parametrize("context", ["store_away", "failed"])
def test_with_the_store_away_or_the_node_failed_a_worker_gives_up_for_itself(context: str) -> None:
    """No vote: its own rooms fail at the second miss, once; an answer makes it start afresh."""
    d = detector()
    where: Any = {context: True}
    assert ticks(d, [TIMEOUT] * 5, **where) == [NOTHING, GIVE_UP, NOTHING, NOTHING, NOTHING]
    assert ticks(d, [OK, TIMEOUT, TIMEOUT], start=5, **where) == [NOTHING, NOTHING, GIVE_UP]


def test_given_up_does_not_stop_the_verdict() -> None:
    """Others came to the same opinion later: the node fails for everybody."""
    d = detector()
    voted(d)
    assert d.counted(N, Votes(False, 1, 2, 2), 5.0) is GIVE_UP
    assert d.counted(N, Votes(False, 1, 2, 2), 6.0) is NOTHING
    assert d.observe(N, TIMEOUT, 7.0) is VOTE
    assert d.counted(N, Votes(False, 2, 2, 2), 7.0) is FAIL


def test_the_wait_for_others_covers_what_another_worker_needs() -> None:
    """alone_s is the time of max_misses probes that time out, and one interval more, whatever the settings."""
    d = Detector(Settings(max_misses=3, probe_interval_s=2.0, probe_timeout_s=0.5))
    assert d.alone_s == 3 * (2.0 + 0.5) + 2.0


# -- doubt -------------------------------------------------------------------------------------------------------------


def addresses(n: int) -> list[str]:
    """n nodes."""
    return [f"10.0.0.{i}:80" for i in range(n)]


DOUBT = [
    # used, of them dead, doubtful
    (1, 1, False),
    (2, 2, False),
    (3, 2, False),
    (3, 3, True),
    (5, 3, True),
    (6, 3, False),
    (7, 4, True),
    (200, 20, False),
    (200, 101, True),
]


@pytest.mark.parametrize(("used", "dead", "doubtful"), DOUBT)
def test_a_worker_doubts_itself_when_most_seem_dead(used: int, dead: int, doubtful: bool) -> None:
    """More than half, and at least three: below that it says nothing about the worker's own network."""
    d = detector()
    nodes = addresses(used)
    for node in nodes:
        d.observe(node, OK, 0.0)
    for node in nodes[:dead]:
        ticks(d, [TIMEOUT, TIMEOUT], node, 1.0)
    assert d.doubtful() == doubtful


def test_addresses_that_never_answered_nor_missed_do_not_count() -> None:
    """A hundred addresses that warm up do not hide that the three in use are gone."""
    d = detector()
    for node in addresses(100):
        d.observe(node, UNREADY, 0.0)
    for node in ("a:1", "b:1", "c:1"):
        ticks(d, [TIMEOUT, TIMEOUT], node)
    assert d.doubtful()


def test_one_whose_own_network_is_gone_fails_only_its_own_rooms() -> None:
    """Ten nodes vanish for one worker of five: it fails none, and gives up each once (CASE 23)."""
    d = detector()
    nodes = addresses(10)
    for node in nodes:
        d.observe(node, OK, 0.0)
    acts: dict[Act, int] = dict.fromkeys(Act, 0)
    for now in range(1, 15):
        for node in nodes:
            act = d.observe(node, TIMEOUT, float(now))
            if act is VOTE:
                act = d.counted(node, Votes(False, 1, 3 if d.doubtful() else 2, 5), float(now))
            acts[act] += 1
    assert acts[FAIL] == 0
    assert acts[GIVE_UP] == 10


def test_when_all_nodes_are_dead_for_everybody_a_majority_fails_them() -> None:
    """Doubt asks for more votes; it does not protect nodes that are dead for the others too (CASE 20)."""
    d = detector()
    for node in addresses(3):
        ticks(d, [TIMEOUT, TIMEOUT], node)
    assert d.doubtful()
    assert d.counted(addresses(3)[0], Votes(False, 2, 3, 5), 2.0) is NOTHING
    assert d.counted(addresses(3)[0], Votes(False, 3, 3, 5), 3.0) is FAIL


def test_when_all_nodes_seem_dead_to_the_only_worker_it_gives_up() -> None:
    """With nobody to ask, a single worker in doubt fails its own rooms and no node (CASE 20)."""
    d = detector()
    for node in addresses(3):
        ticks(d, [TIMEOUT, TIMEOUT], node)
    assert [d.counted(node, Votes(False, 1, 1, 1), 2.0) for node in addresses(3)] == [GIVE_UP] * 3


# -- when to probe -----------------------------------------------------------------------------------------------------


def due_at(d: Detector, store_away: bool = False) -> float:
    """When the next probe is due; checked against `due` just before and at that time."""
    at = d.next_due_s(store_away)
    assert at is not None
    assert d.due(at - 0.001, store_away) == []
    return at


def probe(d: Detector, now: float, evidence: Evidence, **context: Any) -> Act:
    """Take the turn and see something, in no time."""
    assert d.due(now, context.get("store_away", False)) == [N]
    return d.observe(N, evidence, now, **context)


def watched(watchers: int = 1) -> Detector:
    """A worker that has the first turn at 0 and has not looked yet."""
    d = detector()
    d.watch(N).watchers = watchers
    d.turn(N, 0.0)
    return d


@pytest.mark.parametrize(("watchers", "pause"), [(0, 5.0), (1, 5.0), (2, 6.0), (8, 24.0), (64, 192.0)])
def test_without_a_turn_a_worker_looks_for_itself_after_three_rounds(watchers: int, pause: float) -> None:
    """Others probe it meanwhile. The first look too waits for a turn, and no longer than any other."""
    d = detector()
    d.watch(N).watchers = watchers
    assert d.due(100.0, False) == []
    assert due_at(d) == 100.0 + pause
    probe(d, 100.0 + pause, OK)
    assert due_at(d) == 100.0 + 2 * pause
    assert pause == max(OWN_INTERVALS, OWN_ROUNDS * watchers)


def test_a_round_of_workers_that_come_by_less_often_than_an_interval_takes_longer() -> None:
    """They take several turns at once: a round is a tick for each."""
    d = detector(tick_s=0.5, probe_interval_s=0.1)
    d.watch(N).watchers = 8
    d.due(100.0, False)
    assert due_at(d) == pytest.approx(100.0 + OWN_ROUNDS * 8 * 0.5)


def test_a_granted_turn_is_due_at_its_time() -> None:
    """Whatever was looked at before; several are due one interval apart; those missed are one look."""
    d = watched()
    probe(d, 100.0, OK)
    d.turn(N, 101.5)
    assert due_at(d) == 101.5
    d.ask(N)
    probe(d, 101.0, OK)
    assert due_at(d) == 101.5
    probe(d, 101.5, OK)
    d.turn(N, 102.0, 3)
    for at in (102.0, 103.0, 104.0):
        assert due_at(d) == at
        probe(d, at, OK)
    d.turn(N, 105.0, 3)
    probe(d, 107.5, OK)
    assert due_at(d) == 107.5 + OWN_INTERVALS


def test_turns_granted_at_different_times_keep_theirs() -> None:
    """Others had those in between. The answer to a repeated batch may name one that is past."""
    d = watched()
    probe(d, 100.0, OK)
    d.turn(N, 105.0)
    d.turn(N, 102.0, 2)
    for at in (102.0, 103.0, 105.0):
        assert due_at(d) == at
        probe(d, at, OK)
    d.turn(N, 90.0)
    assert due_at(d) == 105.0 + URGENT_GAP_S


def test_a_turn_survives_an_epoch() -> None:
    """The store counts on it."""
    d = watched()
    probe(d, 100.0, OK)
    d.turn(N, 101.0)
    d.renew(N)
    assert due_at(d) == 101.0


def test_what_was_asked_for_is_due_at_once() -> None:
    """ask brings the probe forward, but never closer than the gap to the last one: errors come in floods."""
    d = watched()
    probe(d, 100.0, OK)
    for _ in range(1000):
        d.ask(N)
    assert due_at(d) == 100.0 + URGENT_GAP_S
    probe(d, 101.0, OK)
    assert due_at(d) == 101.0 + OWN_INTERVALS


def test_who_has_waited_for_a_round_has_the_first_choice() -> None:
    """Two ticks ahead, else one; a turn that is still to come counts as a look."""
    d = detector()
    d.watch(N).watchers = 4
    assert d.claim(N, 100.0) == 2, "never looked"
    d.turn(N, 100.0)
    probe(d, 100.0, OK)
    assert [d.claim(N, at) for at in (100.0, 102.99, 103.0, 200.0)] == [1, 1, 2, 2]
    d.turn(N, 104.0)
    assert [d.claim(N, at) for at in (103.5, 104.0)] == [1, 1]


def test_who_looks_every_interval_anyhow_takes_no_turn() -> None:
    """It would be wasted on a worker that alone cannot reach the node; at a failed node turns are all there is."""
    d = watched(2)
    probe(d, 100.0, UNREACHABLE)
    assert d.claim(N, 110.0) == 0
    assert probe(d, 101.0, UNREACHABLE) is VOTE
    assert d.uncounted(N) is GIVE_UP
    assert d.claim(N, 110.0) == 0
    probe(d, 102.0, OK)
    assert d.claim(N, 110.0) == 2
    probe(d, 103.5 + 6.0, TIMEOUT, failed=True)
    assert d.claim(N, 120.0) == 2


@pytest.mark.parametrize(
    ("evidence", "pause"),
    [
        (REFUSED, RECHECK_S),
        (TIMEOUT, 1.0),
        (BAD, 1.0),
        (UNREACHABLE, 1.0),
        (OK, 5.0),
        (UNREADY, 5.0),
        (MISCONFIGURED, 5.0),
    ],
)
def test_the_next_look_after_each_evidence(evidence: Evidence, pause: float) -> None:
    """Refused: within milliseconds; another miss: at the next interval; an answer: when the turn comes."""
    d = watched()
    probe(d, 100.0, evidence)
    assert due_at(d) == pytest.approx(100.0 + pause)


def test_late_evidence_is_looked_at_again_soon() -> None:
    """Within milliseconds, also when it was good."""
    d = watched()
    probe(d, 100.0, OK, late=True)
    assert due_at(d) == pytest.approx(100.0 + RECHECK_S)


def test_with_the_store_away_nobody_grants_turns() -> None:
    """Each worker probes every interval by itself."""
    d = watched()
    probe(d, 100.0, OK, store_away=True)
    assert due_at(d, store_away=True) == 101.0
    assert due_at(d, store_away=False) == 105.0


def test_with_the_store_away_the_first_look_is_at_once() -> None:
    """No turn will come."""
    d = detector()
    d.watch(N)
    assert d.due(100.0, False) == []
    assert due_at(d, store_away=True) == 0.0
    probe(d, 100.1, OK, store_away=True)


def test_a_node_given_up_is_looked_at_every_interval() -> None:
    """Its recovery must be seen by the worker that refuses joins there."""
    d = watched()
    probe(d, 100.0, TIMEOUT)
    assert probe(d, 101.0, TIMEOUT) is VOTE
    assert d.uncounted(N) is GIVE_UP
    assert due_at(d) == 102.0
    probe(d, 102.0, TIMEOUT)
    assert due_at(d) == 103.0
    probe(d, 103.0, OK)
    assert due_at(d) == 108.0


def test_a_node_failed_for_everybody_is_looked_at_in_turns() -> None:
    """Whoever sees it answer says so to everybody: each for itself would be as many probes as workers."""
    d = watched(8)
    probe(d, 100.0, REFUSED, failed=True)
    assert probe(d, 100.0 + RECHECK_S, REFUSED, failed=True) is GIVE_UP
    assert due_at(d) == 100.0 + RECHECK_S + OWN_ROUNDS * 8
    d.turn(N, 108.0)
    assert due_at(d) == 108.0
    probe(d, 108.0, REFUSED, failed=True)
    assert due_at(d) == 108.0 + OWN_ROUNDS * 8
    assert due_at(d, store_away=True) == 109.0


def test_one_probe_at_a_time() -> None:
    """While one is out, further turns wait; a probe that broke by itself is made again when it is due."""
    d = watched()
    assert d.due(0.0, False) == [N]
    d.ask(N)
    assert d.due(1000.0, False) == []
    assert d.next_due_s(False) is None
    d.abandon(N)
    assert d.due(1000.0, False) == [N]
    assert d.watch(N).misses == 0


def test_no_address_no_probe() -> None:
    """Nothing watched, nothing due; forgotten addresses are gone."""
    d = detector()
    assert (d.due(0.0, False), d.next_due_s(False)) == ([], None)
    d.watch(N)
    d.forget(N)
    d.forget(N)
    assert d.due(0.0, False) == []


def test_another_epoch_or_instance_starts_with_a_clean_slate() -> None:
    """Misses, vote, success and despair are about the former one; that a probe is out stays true."""
    d = watched()
    probe(d, 100.0, OK)
    d.ask(N)
    probe(d, 101.0, TIMEOUT)
    assert probe(d, 102.0, TIMEOUT) is VOTE
    d.uncounted(N)
    d.ask(N)
    assert d.due(103.0, False) == [N]
    d.renew(N)
    watch = d.watch(N)
    assert (watch.misses, watch.voted_s, watch.given_up, watch.ever_ok, watch.probing) == (0, None, False, False, True)
    assert d.due(200.0, False) == []
    assert d.observe(N, UNREADY, 103.0) is NOTHING, "the new one warms up"
    assert due_at(d) == 108.0


# -- arithmetic of many nodes (CASE 18) --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("killed", "limit_s"), [(REFUSED, 1.0 + 0.1), (TIMEOUT, 2 * 1.0 + 2 * 1.0 + 0.1)])
def test_one_death_among_hung_nodes_is_found_in_its_own_time(killed: Evidence, limit_s: float, seed: int) -> None:
    """200 nodes, 20 swallow packets; another dies: refused within one interval, hung within two plus two time-outs."""
    d, rng = detector(), random.Random(seed)
    nodes = [f"10.1.{i // 100}.{i % 100}:80" for i in range(200)]
    hung, victim, died_s = set(nodes[:20]), nodes[100], 30.0 + rng.random()
    granted = {node: rng.random() for node in nodes}  # turns are granted once per interval, at different times
    answers: list[tuple[float, str, Evidence]] = []
    for node in nodes:
        d.watch(node)
    found: dict[str, float] = {}
    now = 0.0
    while victim not in found and now < 60:
        now += 0.01
        for node, at in granted.items():
            if at <= now:
                granted[node] = at + 1.0
                d.ask(node)
        for node in d.due(now, False):
            if node in hung or (node == victim and now >= died_s and killed is TIMEOUT):
                heapq.heappush(answers, (now + 1.0, node, TIMEOUT))
            else:
                heapq.heappush(answers, (now + 0.001, node, REFUSED if node == victim and now >= died_s else OK))
        while answers and answers[0][0] <= now:
            at, node, evidence = heapq.heappop(answers)
            act = d.observe(node, evidence, at)
            if act is VOTE:
                act = d.counted(node, Votes(False, 2, 2, 4), at)
            if act is FAIL:
                found.setdefault(node, at)
    assert set(found) == hung | {victim}
    assert died_s < found[victim] <= died_s + limit_s
