"""Settings: every knob is checked, every relation is named, every field is one variable."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest

from coordinator import ConfigError, PrefillNode, Settings, Worker
from coordinator.config import PREFIX, check_name, variable, variables

NUMBERS = [f.name for f in dataclasses.fields(Settings) if isinstance(f.default, (int, float))]
WHOLE = [f.name for f in dataclasses.fields(Settings) if isinstance(f.default, int)]
TEXTS = [f.name for f in dataclasses.fields(Settings) if isinstance(f.default, str)]
INF, NAN = math.inf, math.nan


def make(given: dict[str, Any]) -> Settings:
    """Settings from arguments by name, whatever their types."""
    return Settings(**given)


def test_the_defaults_hold() -> None:
    """Nothing given and nothing in the environment gives the documented defaults."""
    assert Settings() == Settings.load({})
    s = Settings()
    assert (s.tick_s, s.lease_s, s.probe_interval_s, s.max_misses, s.votes) == (0.5, 5.0, 1.0, 2, 2)


RELATIONS = [
    # The lease must outlive three ticks, or one slow tick is a death (CASE 30).
    ({"lease_s": 1.5, "tick_s": 0.5}, "lease_s > 3 * tick_s does not hold: tick_s is 0.5, lease_s is 1.5"),
    ({"lease_s": 0.2, "tick_s": 0.5}, "lease_s > 3 * tick_s does not hold: tick_s is 0.5, lease_s is 0.2"),
    ({"tick_s": 2.0}, "lease_s > 3 * tick_s does not hold: tick_s is 2.0, lease_s is 5.0"),
    ({"flush_s": 0.2, "tick_s": 0.1}, "flush_s <= tick_s does not hold: tick_s is 0.1, flush_s is 0.2"),
    ({"lease_s": 200.0}, "retention_s >= 4 * lease_s does not hold: lease_s is 200.0, retention_s is 600.0"),
    ({"linger_s": 601.0}, "linger_s <= retention_s does not hold: retention_s is 600.0, linger_s is 601.0"),
    ({"retry_s": 0.5}, "retry_s >= call_timeout_s does not hold: call_timeout_s is 1.0, retry_s is 0.5"),
]


@pytest.mark.parametrize(("given", "message"), RELATIONS)
def test_a_broken_relation_is_named_with_both_values(given: dict[str, Any], message: str) -> None:
    """The message is the relation and the two values that break it."""
    with pytest.raises(ConfigError) as caught:
        Settings(**given)
    assert message == str(caught.value)


@pytest.mark.parametrize(("lease_s", "holds"), [(1.5, False), (1.5001, True), (1.499, False), (3600, False)])
def test_the_lease_is_longer_than_three_ticks_and_no_more_than_retention_allows(lease_s: float, holds: bool) -> None:
    """The edges: three ticks exactly are too short, and four leases must fit into the retention."""
    if holds:
        assert Settings(lease_s=lease_s, tick_s=0.5).lease_s == lease_s
        return
    with pytest.raises(ConfigError, match="does not hold"):
        Settings(lease_s=lease_s, tick_s=0.5)


@pytest.mark.parametrize("value", [-1, -0.5, NAN, INF, -INF, True, False, "5", "", None, b"5", [5]], ids=repr)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_a_finite_number_in_its_range(name: str, value: Any) -> None:
    """Negative, NaN, infinite, bool and text are refused for every number, naming field and value (CASE 30)."""
    with pytest.raises(ConfigError) as caught:
        Settings(**{name: value})
    assert str(caught.value).startswith(f"{name} ")
    assert str(value) in str(caught.value)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_has_a_lower_and_an_upper_end(name: str) -> None:
    """Just outside either end is refused with the range; the ends are those of the field's own record."""
    meta = next(f for f in dataclasses.fields(Settings) if f.name == name).metadata
    kind: Any = int if name in WHOLE else float
    for value in (kind(meta["low"]) - 1, kind(meta["high"]) + 1):
        with pytest.raises(ConfigError, match=re.escape(f"{name} is {value}: it must be from {meta['low']} to")):
            make({name: value})


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_number_takes_no_fraction(name: str) -> None:
    """2.0 misses are refused, not rounded."""
    with pytest.raises(ConfigError, match=f"{name} must be a whole number, not 2.0"):
        make({name: 2.0})


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("value", [None, 5, b"x", True], ids=repr)
def test_a_text_is_text(name: str, value: Any) -> None:
    """Bytes, numbers and None are no texts."""
    with pytest.raises(ConfigError, match=f"{name} must be text"):
        Settings(**{name: value})


@pytest.mark.parametrize("value", ["", "a b", "a:b", "{a}", "a*", "-a", "a\n", "\u00e4", "a" * 65])
def test_a_namespace_is_a_plain_word(value: str) -> None:
    """The first word of every key holds nothing that a key or a glob reads as syntax."""
    with pytest.raises(ConfigError, match="namespace"):
        Settings(namespace=value)


@pytest.mark.parametrize("value", ["", "a b", "a#b", "#", "-a", "a\n", "\u00e4", "a" * 65, None, 7])
def test_a_name_is_a_plain_word(value: Any) -> None:
    """A worker's name goes into keys too; refused before anything starts."""
    with pytest.raises(ConfigError, match="name"):
        check_name(value)
    with pytest.raises(ConfigError, match="name"):
        Worker("redis://127.0.0.1:1/0", name=value)


def test_a_health_path_begins_with_a_slash() -> None:
    """A path without one would become part of the host."""
    with pytest.raises(ConfigError, match="health_path 'health' must start with '/'"):
        Settings(health_path="health")


# -- the environment ---------------------------------------------------------------------------------------------------


def other(field: Any) -> Any:
    """A valid value other than the default."""
    if isinstance(field.default, str):
        return field.default + "x"
    special = {"tick_s": 0.25, "lease_s": 6.0, "retention_s": 700.0, "call_timeout_s": 0.5}
    return special.get(field.name, type(field.default)(field.default + 1) if field.name != "flush_s" else 0.01)


@pytest.mark.parametrize("field", dataclasses.fields(Settings), ids=lambda f: f.name)
def test_every_field_has_a_variable(field: Any) -> None:
    """COORDINATOR_<FIELD> sets the field, an argument outranks it, and it is listed with its help."""
    value = other(field)
    env = {variable(field.name): f" {value} "}
    assert variable(field.name) == PREFIX + field.name.upper()
    loaded = Settings.load(env)
    assert getattr(loaded, field.name) == value
    assert type(getattr(loaded, field.name)) is type(field.default)
    assert dataclasses.replace(loaded, **{field.name: field.default}) == Settings()
    assert Settings.load(env, **{field.name: field.default}) == Settings()
    assert getattr(Settings.load(env, **{field.name: None}), field.name) == value
    assert variables()[variable(field.name)]


def test_every_variable_is_a_field() -> None:
    """The list that compose file, code and docs are compared with is exactly the fields."""
    assert set(variables()) == {variable(f.name) for f in dataclasses.fields(Settings)}


def test_every_variable_is_documented() -> None:
    """docs/configuration.md names each variable, and no other COORDINATOR_ word that Settings would have to know."""
    text = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text()
    assert [name for name in variables() if name not in text] == []


@pytest.mark.parametrize("text", ["", " ", "abc", "1,5", "5s", "0x10", "1 2"])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_variable_that_does_not_parse_is_named(name: str, text: str) -> None:
    """An empty or malformed number stops the start with the variable's name; it never means the default."""
    with pytest.raises(ConfigError) as caught:
        Settings.load({variable(name): text})
    assert str(caught.value).startswith(f"{variable(name)}={text.strip()!r} is not a")


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-1", "1e999"])
@pytest.mark.parametrize("name", [n for n in NUMBERS if n not in WHOLE])
def test_a_variable_out_of_range_is_refused(name: str, text: str) -> None:
    """What float() reads but is no duration is refused like an argument is."""
    with pytest.raises(ConfigError, match=name):
        Settings.load({variable(name): text})


def test_an_empty_text_variable_is_an_empty_text() -> None:
    """COORDINATOR_INSTANCE_HEADER= switches the header off; it is no error and not the default."""
    assert Settings.load({"COORDINATOR_INSTANCE_HEADER": ""}).instance_header == ""


def test_an_unknown_argument_is_named() -> None:
    """A typing error does not pass silently."""
    with pytest.raises(ConfigError, match=r"unknown setting 'tick'.*tick_s"):
        Settings.load({}, tick=1)


def test_os_environ_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """load() without a mapping reads the process's own environment."""
    monkeypatch.setenv("COORDINATOR_TICK_S", "0.25")
    assert Settings.load().tick_s == 0.25


def test_settings_are_frozen() -> None:
    """A checked object cannot be changed into an unchecked one."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().tick_s = 9  # type: ignore[misc]


@pytest.mark.parametrize("start", [Worker, lambda: PrefillNode("10.0.0.5:8998")])
def test_a_wrong_setting_starts_nothing(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker and node raise before a thread is started or a server is looked for (CASE 30)."""
    import threading

    monkeypatch.setenv("COORDINATOR_LEASE_S", "0.1")
    before = threading.active_count()
    with pytest.raises(ConfigError, match=r"lease_s > 3 \* tick_s does not hold"):
        start()
    assert threading.active_count() == before
