"""Addresses: one text for one node, and nothing that a key, a glob or a log could read as syntax."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import Status
from coordinator.address import canonical
from coordinator.decide.ledger import Ledger
from coordinator.errors import InvalidAddress
from coordinator.store.keys import Keys

SAFE = set(string.ascii_lowercase + string.digits + "-_.:[]")

ACCEPTED = {
    "10.0.0.5:8998": "10.0.0.5:8998",
    "127.0.0.1:1": "127.0.0.1:1",
    "10.0.0.5:65535": "10.0.0.5:65535",
    "prefill-0.svc:8998": "prefill-0.svc:8998",
    "Prefill-0.SVC.cluster.local:8998": "prefill-0.svc.cluster.local:8998",
    "node_7:80": "node_7:80",
    "h:1": "h:1",
    f"{'a' * 63}:80": f"{'a' * 63}:80",
    "[2001:db8::1]:8998": "[2001:db8::1]:8998",
    "[2001:DB8::1]:8998": "[2001:db8::1]:8998",
    "[2001:db8:0::1]:8998": "[2001:db8::1]:8998",
    "[2001:0db8:0000:0000:0000:0000:0000:0001]:8998": "[2001:db8::1]:8998",
    "[::1]:80": "[::1]:80",
}

REFUSED = {
    # What is missing, and what is not a port (CASE 56).
    "": "host:port",
    "h": "host:port",
    "h:": "port",
    ":1": "host:port",
    "h:0": "from 1 to 65535",
    "h:70000": "from 1 to 65535",
    "h:65536": "from 1 to 65535",
    "h:08998": "port",
    "h:+80": "port",
    "h:-1": "port",
    "h: 80": "port",
    "h:80 ": "port",
    "h:8_0": "port",
    "h:\uff18\uff10": "port",
    "h:8998/health": "port",
    "http://h:80": "brackets",
    # IPv6 and IPv4 that are none, or that name no single host.
    "[::1": "bracket",
    "[::1]": "port",
    "[::1]80": "port",
    "[]:80": "not an IPv6",
    "[::1]x:80": "bracket",
    "[10.0.0.5]:80": "not an IPv6",
    "[fe80::1%eth0]:80": "zone",
    "[::ffff:10.0.0.5]:8998": "write 10.0.0.5",
    "[::]:8998": "every interface",
    "2001:db8::1:8998": "brackets",
    "::1": "brackets",
    "0.0.0.0:8998": "every interface",
    "256.0.0.1:80": "four numbers",
    "10.0.5:80": "four numbers",
    "010.0.0.5:80": "leading zeros",
    "8998:80": "four numbers",
    "::1:80": "brackets",
    # Names that are none.
    "-h:80": "host name",
    "h-:80": "host name",
    "a..b:80": "host name",
    ".a:80": "host name",
    "a.:80": "host name",
    f"{'a' * 64}:80": "host name",
    "a b:80": "host name",
    "user@h:80": "host name",
    # What a key, a glob, a protocol or a log reads as syntax (CASE 54).
    "{h}:80": "host name",
    "h{:80": "host name",
    "h}:80": "host name",
    "*:80": "host name",
    "h?:80": "host name",
    "h\\:80": "host name",
    "h\r:80": "host name",
    "h\n:80": "host name",
    "h:80\n": "port",
    "h:80\r\nPING": "port",
    "h\x00:80": "host name",
    "h:80\x00": "port",
    "\U0001f525:80": "ASCII",
    "b\u00fccher:80": "ASCII",
    "\u212aelvin:80": "ASCII",
    "\ud800:80": "ASCII",
    "a" * 10_000 + ":80": "10003 characters",
    "a" * 10_000: "10000 characters",
}


@pytest.mark.parametrize("text", ACCEPTED)
def test_accepted_addresses_have_one_canonical_text(text: str) -> None:
    """Every spelling of an address becomes the text that the table names, and that text stays itself."""
    assert ACCEPTED[text] == canonical(text)
    assert ACCEPTED[text] == canonical(ACCEPTED[text])


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: ascii(text)[:40])
def test_refused_addresses_are_named_with_the_way_out(text: str) -> None:
    """The error shows the value and says what to write instead, in printable ASCII."""
    with pytest.raises(InvalidAddress) as caught:
        canonical(text)
    message = str(caught.value)
    assert REFUSED[text] in message
    assert ascii(text)[1:-1][:30] in message
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 500


@pytest.mark.parametrize(
    "value", [None, 7, True, 1.5, b"h:80", ("h", 80), ["h:80"], object()], ids=lambda v: type(v).__name__
)
def test_what_is_no_text_is_refused(value: Any) -> None:
    """Not even unhashable values escape as a TypeError."""
    with pytest.raises(InvalidAddress, match="pass text"):
        canonical(value)


@pytest.mark.parametrize("text", [*REFUSED, ["h:80"], None], ids=lambda text: ascii(text)[:40])
def test_a_refused_address_changes_nothing(text: Any) -> None:
    """join, update, leave and find refuse before a book is opened, so nothing can be sent (G13)."""
    ledger = Ledger("w#1", lambda: 0.0)
    for call in (
        lambda: ledger.join(text, 7),
        lambda: ledger.update(text, 7, Status.TRANSFERRING),
        lambda: ledger.leave(text, 7),
        lambda: ledger.find(text, 7),
    ):
        with pytest.raises(InvalidAddress):
            call()
    assert ledger.books() == []


def test_a_prefix_is_another_address() -> None:
    """10.0.0.1:80 and 10.0.0.1:8000 share no key, and neither is a prefix of the other's (CASE 22)."""
    keys = Keys("coordinator")
    short, long = canonical("10.0.0.1:80"), canonical("10.0.0.1:8000")
    of_short, of_long = keys.rooms(short, "w#1"), keys.rooms(long, "w#1")
    assert of_short.split("}")[0] not in of_long.split("}")
    assert f"{{{short}}}" in of_short
    assert f"{{{short}}}" not in of_long


labels = st.text(string.ascii_letters + string.digits + "-_", min_size=1, max_size=12)
hosts = st.one_of(
    st.lists(labels, min_size=1, max_size=4).map(".".join),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda ip: f"[{ip}]"),
    st.ip_addresses(v=6).map(lambda ip: f"[{ip.exploded.upper()}]"),
)
near_addresses = st.builds(lambda host, port: f"{host}:{port}", hosts, st.integers(-1, 70000))


@given(st.one_of(near_addresses, st.text(max_size=40), st.text(st.sampled_from("ab1.:[]{}*%\n\r\0-_/"), max_size=30)))
def test_whatever_is_accepted_is_safe_and_canonical(text: str) -> None:
    """Text is either refused with InvalidAddress or becomes safe characters that canonical maps to themselves."""
    try:
        name = canonical(text)
    except InvalidAddress:
        return
    assert set(name) <= SAFE
    assert name == canonical(name)
    host, _, port = name.rpartition(":")
    assert 1 <= int(port) <= 65535
    assert (":" in host) == (host.startswith("[") and host.endswith("]"))
    assert f"{{{name}}}" in Keys("n").node(name)


@given(st.ip_addresses(v=6), st.integers(1, 65535))
def test_every_spelling_of_an_ipv6_host_is_one_address(ip: Any, port: int) -> None:
    """Compressed, exploded and upper case are the same node; unspecified and IPv4-mapped ones are refused."""
    spellings = [f"[{text}]:{port}" for text in (str(ip), ip.exploded, ip.exploded.upper())]
    if ip.is_unspecified or ip.ipv4_mapped is not None:
        for text in spellings:
            with pytest.raises(InvalidAddress):
                canonical(text)
        return
    assert len({canonical(text) for text in spellings}) == 1
