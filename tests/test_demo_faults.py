"""Faults: reading them, planning them, and refusing a plan that cannot be carried out."""

from __future__ import annotations

import pytest

from coordinator.demo.faults import DEFAULT_FAULTS, KINDS, Fault, Planned, default_faults, parse_fault, plan
from coordinator.demo.options import DemoOptions
from coordinator.errors import ConfigError


def _plan(*texts: str, nodes: int = 3, workers: int = 3, seed: int = 1) -> list[tuple[str, int | None]]:
    planned = plan([parse_fault(text) for text in texts], nodes, workers, 60, seed)
    return [(item.fault.kind, item.target) for item in planned]


def test_every_kind_is_read_and_written_back() -> None:
    """KIND@SECOND, with decimals, comes back as the same text."""
    for kind in KINDS:
        assert Fault(kind, 4.5) == parse_fault(f"{kind}@4.5")
        assert f"{kind}@4.5" == str(parse_fault(f"{kind}@4.5"))


@pytest.mark.parametrize(
    "text", ["", "kill-node", "kill-node@", "kill-node@x", "kill-node@-1", "kill-node@nan", "boom@3"]
)
def test_a_malformed_fault_is_refused(text: str) -> None:
    """The error quotes the text."""
    with pytest.raises(ConfigError, match=f"fault '{text}'"):
        parse_fault(text)


def test_the_same_seed_gives_the_same_targets() -> None:
    """Targets depend on the seed alone, and over some seeds every node gets its turn."""
    texts = ("kill-node@1", "kill-worker@2", "restart-node@3", "stop-node@4")
    assert _plan(*texts, seed=7) == _plan(*texts, seed=7)
    assert {0, 1, 2} == {_plan("kill-node@1", seed=seed)[0][1] for seed in range(30)}


def test_no_target_is_struck_while_it_is_down() -> None:
    """Killed nodes are not killed again, stopped ones not before they go on, killed workers never."""
    for seed in range(20):
        targets = [target for _, target in _plan("kill-node@1", "stop-node@2", "restart-node@3", seed=seed)]
        assert {0, 1, 2} == set(targets)
        assert len({target for _, target in _plan("kill-worker@1", "kill-worker@2", seed=seed)}) == 2
    assert len(_plan("stop-node@1", "stop-node@12", nodes=1)) == 2


def test_start_node_starts_the_one_killed_last() -> None:
    """Faults are carried out in the order of time, whatever the order they were given in."""
    kinds = _plan("start-node@5", "kill-node@1", "kill-node@2", "start-node@9")
    assert [kind for kind, _ in kinds] == ["kill-node", "kill-node", "start-node", "start-node"]
    assert kinds[1][1] == kinds[2][1]
    assert kinds[0][1] == kinds[3][1]


@pytest.mark.parametrize(
    ("texts", "what"),
    [
        (("start-node@5",), "no node is down"),
        (("kill-node@5", "start-node@4"), "no node is down"),
        (("kill-node@1", "kill-node@2", "kill-node@3", "kill-node@4"), "no node is running"),
        (("kill-worker@1", "kill-worker@2", "kill-worker@3"), "no worker would be left"),
        (("kill-node@60",), "behind the end of the run"),
    ],
)
def test_an_impossible_plan_is_refused(texts: tuple[str, ...], what: str) -> None:
    """Before anything starts, with the fault and the reason."""
    with pytest.raises(ConfigError, match=what):
        _plan(*texts)


def test_the_store_has_no_target() -> None:
    """pause-store and flush-store concern nobody in particular."""
    assert _plan("pause-store@1", "flush-store@2") == [("pause-store", None), ("flush-store", None)]


def test_default_faults_fit_short_runs() -> None:
    """At 4, 7 and 9 s; in proportion in a run of less than 15 s."""
    assert default_faults(60) == DEFAULT_FAULTS
    assert [fault.at_s for fault in default_faults(7.5)] == [2.0, 3.5, 4.5]


def test_options_resolve_to_a_plan() -> None:
    """Defaults are 15 s with three faults; no faults is an empty tuple; one worker is never killed."""
    resolved = DemoOptions().resolve()
    assert resolved.seconds == 15.0
    assert list(DEFAULT_FAULTS) == [item.fault for item in resolved.plan]
    assert all(isinstance(item, Planned) for item in resolved.plan)
    assert DemoOptions(faults=()).resolve().plan == ()
    assert [item.fault.kind for item in DemoOptions(workers=1).resolve().plan] == ["kill-node", "start-node"]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (DemoOptions(nodes=0), "--nodes"),
        (DemoOptions(workers=1000), "--workers"),
        (DemoOptions(rate=0), "--rate"),
        (DemoOptions(seconds=float("nan")), "--seconds"),
        (DemoOptions(speed=2), "--speed needs"),
        (DemoOptions(trace="x", rate=3), "exclude each other"),
        (DemoOptions(trace="/nowhere/x"), "cannot be read"),
    ],
)
def test_wrong_options_are_refused(options: DemoOptions, what: str) -> None:
    """Before anything starts, naming the option."""
    with pytest.raises(ConfigError, match=what):
        options.resolve()
