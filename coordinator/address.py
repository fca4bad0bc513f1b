"""Addresses: the `host:port` a node is known by. In: any text. Out: the one canonical text, or InvalidAddress.

Every address that enters the system passes `canonical` once; below it only canonical text moves. The
canonical text is part of key names (`{address}` is the hash tag), so nothing that Redis, a glob or a log
could read as syntax gets through.
"""

from __future__ import annotations

import re
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import NoReturn

from .errors import InvalidAddress

_MAX = 253 + 2 + 6  # RFC 1035 name, brackets, ":65535"
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.ASCII)
_IPV4_LIKE = re.compile(r"[0-9.]+", re.ASCII)
_PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)


def canonical(address: str) -> str:
    """Return the canonical text of `address` ("10.0.0.5:8998", "[2001:db8::1]:8998", "prefill-0.svc:8998").

    Host names are lower-cased, IPv6 is compressed (RFC 5952). Raises InvalidAddress.
    """
    if not isinstance(address, str):
        _refuse(address, 'pass text such as "10.0.0.5:8998"')
    if len(address) > _MAX:
        _refuse(address[:40] + "...", f"it has {len(address)} characters, at most {_MAX} are possible")
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        _refuse(address, "write host:port")
    if not _PORT.fullmatch(port) or int(port) > 65535:
        _refuse(address, "the port is a decimal number from 1 to 65535")
    if host.startswith("["):
        return f"[{_ipv6(address, host)}]:{port}"
    if ":" in host:
        _refuse(address, "write an IPv6 host in brackets: [2001:db8::1]:8998")
    host = host.lower() if host.isascii() else host
    if _IPV4_LIKE.fullmatch(host):
        return f"{_ipv4(address, host)}:{port}"
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in host.split(".")):
        _refuse(address, "a host name has ASCII letters, digits, '-', '_' and '.' only")
    return f"{host}:{port}"


def _ipv4(address: str, host: str) -> IPv4Address:
    try:
        ip = IPv4Address(host)
    except AddressValueError:
        _refuse(address, "an IPv4 host has four numbers from 0 to 255, without leading zeros")
    if ip.is_unspecified:
        _refuse(address, "0.0.0.0 means every interface; announce the address that peers connect to")
    return ip


def _ipv6(address: str, host: str) -> IPv6Address:
    if not host.endswith("]"):
        _refuse(address, "the bracket is not closed: [2001:db8::1]:8998")
    try:
        ip = IPv6Address(host[1:-1])
    except AddressValueError:
        _refuse(address, "the text in brackets is not an IPv6 address")
    if ip.scope_id is not None:
        _refuse(address, "a zone (%eth0) means something on one host only; use a routable address")
    if ip.ipv4_mapped is not None:
        _refuse(address, f"it is an IPv4 address in another dress: write {ip.ipv4_mapped} without brackets")
    if ip.is_unspecified:
        _refuse(address, ":: means every interface; announce the address that peers connect to")
    return ip


def _refuse(address: object, hint: str) -> NoReturn:
    raise InvalidAddress(f"{address!a} is not a node address: {hint}")
