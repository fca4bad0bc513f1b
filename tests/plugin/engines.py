"""Transfer engines that move nothing: the one part of a backend that is replaced, at the engine's own interface.

`install(backend)` makes the engine of that backend importable, and of that backend alone: where nothing is installed
for Mori, SGLang's mori module cannot be imported, as on a real machine. What a manager asked of its engine is in
`CALLS`, as (method, arguments).
"""

from __future__ import annotations

import enum
import importlib
import sys
import types
from typing import Any

import standins

#: What was asked of the engines of this process, oldest first.
CALLS: list[tuple[str, tuple[Any, ...]]] = []


class _Engine:
    """Accepts every call and records it; what a manager needs as an answer is a method below."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> int:
            CALLS.append((name, args))
            return 0

        return call


class MooncakeEngine(_Engine):
    """As sglang's MooncakeTransferEngine."""

    def get_session_id(self) -> str:
        return "127.0.0.1:1"


class NixlAgent(_Engine):
    """As nixl._api.nixl_agent."""

    def __init__(self, name: str, config: object) -> None:
        self.name = name

    def get_plugin_list(self) -> list[str]:
        return ["UCX"]

    def get_agent_metadata(self) -> bytes:
        return f"metadata of {self.name}".encode()

    def register_memory(self, *args: object) -> list[object]:
        CALLS.append(("register_memory", args))
        return [args]

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}

    def add_remote_agent(self, metadata: bytes) -> str:
        CALLS.append(("add_remote_agent", (metadata,)))
        return metadata.decode().removeprefix("metadata of ")

    def check_xfer_state(self, handle: object) -> str:
        return "DONE"


class _MoriDesc:
    port = 1

    def __init__(self, key: str = "key") -> None:
        self.key = key

    def pack(self) -> bytes:
        return self.key.encode()

    @classmethod
    def unpack(cls, data: bytes) -> _MoriDesc:
        return cls(data.decode())


class MoriEngine(_Engine):
    """As mori.io.IOEngine."""

    def __init__(self, key: str, config: object) -> None:
        self._desc = _MoriDesc(key)

    def get_engine_desc(self) -> _MoriDesc:
        return self._desc

    def register_memory(self, *args: object) -> _MoriDesc:
        return _MoriDesc("memory")


class AscendEngine(_Engine):
    """As memfabric_hybrid.TransferEngine."""

    TransDataOpType = types.SimpleNamespace(SDMA=0, DEVICE_RDMA=1)

    def get_rpc_port(self) -> int:
        return 1


def install(backend: str) -> None:
    """Make the engine of `backend` (common|mooncake|nixl|mori|ascend) importable in this process."""
    {"common": _nothing, "mooncake": _mooncake, "nixl": _nixl, "mori": _mori, "ascend": _ascend}[backend]()


def _nothing() -> None:
    pass


def _mooncake() -> None:
    name = "sglang.srt.distributed.device_communicators.mooncake_transfer_engine"
    vars(importlib.import_module(name))["_mooncake_transfer_engine"] = MooncakeEngine()


def _nixl() -> None:
    _module("nixl")
    sync = types.SimpleNamespace(NIXL_THREAD_SYNC_STRICT=1)
    _module("nixl._api", nixl_agent=NixlAgent, nixl_agent_config=dict, nixl_thread_sync_t=sync)
    errors = ("nixlBackendError", "nixlRemoteDisconnectError", "nixlNotFoundError", "nixlUnknownError")
    _module("nixl._bindings", **{name: type(name, (RuntimeError,), {}) for name in errors})


def _mori() -> None:
    modes = enum.Enum("modes", "POLLING EVENT")
    _module("mori")
    _module("mori.cpp", TransferStatus=type("TransferStatus", (), {}))
    _module("mori.io", IOEngine=MoriEngine, EngineDesc=_MoriDesc, MemoryDesc=_MoriDesc, PollCqMode=modes)


def _ascend() -> None:
    _module("memfabric_hybrid", TransferEngine=AscendEngine)


def _module(name: str, **known: object) -> None:
    sys.modules[name] = standins.StandIn(name, **known)
