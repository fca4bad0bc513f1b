"""Traces: both public formats, streamed, and clear words for what does not parse."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.demo import trace
from coordinator.demo.trace import Request
from coordinator.errors import ConfigError

JSON = (
    '{"timestamp": 1000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
    '{"timestamp": 1000, "input_length": 7322, "output_length": 490}\n'
    "\n"
    '{"timestamp": 4500, "input_length": 12, "output_length": 0}\n'
)
CSV = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
    "2023-11-17 00:00:00,879,55\n"
)

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Puts text into a trace file."""

    def put(text: str) -> Path:
        path = tmp_path / "trace"
        path.write_text(text)
        return path

    return put


def test_json_lines_are_read_relative_to_the_first_row(write: Write) -> None:
    """Milliseconds become seconds since the first row; other fields and empty lines are skipped."""
    expected = [Request(0.0, 6758, 500), Request(0.0, 7322, 490), Request(3.5, 12, 0)]
    assert expected == list(trace.read(write(JSON)))


def test_csv_is_read_with_seven_decimals(write: Write) -> None:
    """The seventh decimal counts, and a time without decimals is read too."""
    rows = list(trace.read(write(CSV)))
    assert [(row.input_length, row.output_length) for row in rows] == [(374, 44), (396, 109), (879, 55)]
    assert pytest.approx([row.at_s for row in rows], abs=1e-6) == [0.0, 4.314579, 20653.31941]


def test_csv_columns_may_come_in_any_order_among_others(write: Write) -> None:
    """Columns are found by name; quotes and Windows line ends are CSV as well."""
    text = 'GeneratedTokens,Model,TIMESTAMP,ContextTokens\r\n5,"a, b",2023-11-16 18:15:46.5,70\r\n'
    assert [Request(0.0, 70, 5)] == list(trace.read(write(text)))


def test_a_row_before_the_first_counts_as_zero(write: Write) -> None:
    """A trace that is not quite in order is replayed, not refused."""
    rows = [f'{{"timestamp": {t}, "input_length": 1, "output_length": 1}}' for t in (500, 0, 600)]
    assert pytest.approx([row.at_s for row in trace.read(write("\n".join(rows)))]) == [0.0, 0.0, 0.1]


GOOD_ROW = '{"timestamp": 0, "input_length": 1, "output_length": 1}\n'


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("", "", "is empty"),
        ("\n\n", "", "is empty"),
        (GOOD_ROW + "{oops\n", "line 2", "not a JSON object"),
        (GOOD_ROW + "[1]\n", "line 2", "not a JSON object"),
        (GOOD_ROW + '\n{"timestamp": 1, "input_length": 2}\n', "line 3", "no output_length"),
        ('{"timestamp": "x", "input_length": 2, "output_length": 2}', "line 1", 'timestamp is "x"'),
        ('{"timestamp": 1, "input_length": -2, "output_length": 2}', "line 1", "input_length is -2"),
        ('{"timestamp": 1, "input_length": true, "output_length": 2}', "line 1", "input_length is true"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 2}', "line 1", "timestamp is NaN"),
        ("time,tokens\n1,2\n", "line 1", "no TIMESTAMP and no ContextTokens and no GeneratedTokens"),
        (CSV + "2023-11-16 18:15:46,1\n", "line 5", "2 cells, the header has 3"),
        (CSV + "yesterday,1,1\n", "line 5", "'yesterday' is not a date"),
        (CSV + "2023-11-16 18:15:46.67x,1,1\n", "line 5", "is not a date"),
        (CSV + "2023-11-16 18:15:46,many,1\n", "line 5", "ContextTokens 'many' is not a whole number"),
        (CSV + "2023-11-16 18:15:46,1,-1\n", "line 5", "GeneratedTokens is -1"),
    ],
)
def test_a_bad_line_is_named(write: Write, text: str, where: str, what: str) -> None:
    """The error names the file, the line's number and what is wrong with it."""
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        list(trace.read(path))
    assert str(path) in str(caught.value)
    assert where in str(caught.value)
    assert what in str(caught.value)


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    """No such file, a folder and bytes that are no text are said, not raised as such."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, what in (("missing", "No such file"), (".", "directory"), ("binary", "not text")):
        with pytest.raises(ConfigError, match=what):
            list(trace.read(tmp_path / name))


def test_reading_streams(write: Write) -> None:
    """The rows before a bad line come out before it is met."""
    rows = trace.read(write(GOOD_ROW + "oops\n"))
    assert Request(0.0, 1, 1) == next(rows)
    with pytest.raises(ConfigError, match="line 2"):
        next(rows)


def test_replay_is_faster_and_ends_in_time(write: Write) -> None:
    """Speed divides the times; rows after the limit are left out, and the summary says so."""
    path = write(JSON)
    assert pytest.approx([row.at_s for row in trace.replay(path, 2.0, 10)]) == [0.0, 0.0, 1.75]
    assert trace.Summary(3, 3.5, cut=False) == trace.summarize(path, 1.0, 3.6)
    assert [row.at_s for row in trace.replay(path, 1.0, 3.4)] == [0.0, 0.0]
    assert trace.Summary(2, 0.0, cut=True) == trace.summarize(path, 1.0, 3.4)


def test_the_workers_share_a_trace_without_overlap(write: Write) -> None:
    """Row n belongs to worker n modulo their number; together they have all."""
    rows = list(trace.synthetic(50, 2, "x"))
    shares = [list(trace.every(rows, index, 3)) for index in range(3)]
    assert rows[1::3] == shares[1]
    assert sorted(rows, key=lambda row: row.at_s) == sorted(itertools.chain(*shares), key=lambda row: row.at_s)


def test_made_up_requests_follow_seed_and_rate() -> None:
    """The same seed gives the same requests, another seed others, at about the rate asked for."""
    first = list(trace.synthetic(200, 20, "a"))
    assert first == list(trace.synthetic(200, 20, "a"))
    assert first != list(trace.synthetic(200, 20, "b"))
    assert 3600 < len(first) < 4400
    assert all(0 < row.at_s < 20 and row.input_length >= 500 for row in first)
