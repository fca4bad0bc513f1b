"""Loads the Lua scripts and their headers. One verb a file; parts named under USES are put in front.

The files ship inside the wheel as coordinator/lua and lie beside the package in a checkout (also when that is
installed as editable). Nothing is sent to a server here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from pathlib import Path

from ..errors import ScriptFault

FIELDS = ("PURPOSE", "USES", "KEYS", "ARGV", "RETURNS", "REPEAT", "COST")
_HEADER = re.compile(r"\A--\[\[\n(.*?)\n\]\]\n", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its whole text, its sha1 as Redis computes it, and its parsed header.

    `keys` and `args` are names; a name or group followed by "..." may repeat. `returns` are the status words.
    """

    name: str
    text: str
    sha: str
    purpose: str
    keys: tuple[str, ...]
    args: tuple[str, ...]
    returns: tuple[str, ...]
    repeat: str
    cost: str


def directory() -> Path:
    """Where the scripts lie: in the package (wheel), else beside it (checkout)."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "lua", package.parent / "lua"):
        if (candidate / "sync.lua").is_file():
            return candidate
    raise ScriptFault(f"no Lua scripts in {package}/lua or {package.parent}/lua: reinstall the package")


def names() -> tuple[str, ...]:
    """Names of all scripts, sorted."""
    return tuple(sorted(path.stem for path in directory().glob("*.lua")))


@cache
def load(name: str) -> Script:
    """Read, check and hash one script. Raises ScriptFault when it is missing or its header is malformed."""
    path = directory() / f"{name}.lua"
    if not path.is_file():
        raise ScriptFault(f"no script {name!r} in {directory()}")
    source = path.read_text(encoding="ascii")
    header = parse_header(name, source)
    parts = [(directory() / "parts" / f"{part}.lua").read_text(encoding="ascii") for part in header["USES"].split()]
    text = "".join([*parts, source])
    return Script(
        name=name,
        text=text,
        sha=sha1(text.encode("ascii")).hexdigest(),
        purpose=header["PURPOSE"],
        keys=tuple(header["KEYS"].split()),
        args=tuple(header["ARGV"].split()),
        returns=tuple(word.strip() for word in header["RETURNS"].split("|")),
        repeat=header["REPEAT"],
        cost=header["COST"],
    )


def parse_header(name: str, source: str) -> dict[str, str]:
    """The header's fields: exactly FIELDS, one line each, in that order. Raises ScriptFault otherwise."""
    match = _HEADER.match(source)
    if not match:
        raise ScriptFault(f"{name}.lua does not begin with a header comment")
    pairs = [line.partition(": ")[::2] for line in match[1].splitlines()]
    if tuple(field for field, _ in pairs) != FIELDS or not all(value.strip() for _, value in pairs):
        raise ScriptFault(f"{name}.lua: the header must have one line each of {', '.join(FIELDS)}")
    return dict(pairs)
