"""Real SGLang managers, receivers, senders and bootstrap servers, as a scheduler would make them.

`fill()` puts into SGLang's runtime context what its launcher would have published. Needs `standins.boot()` first.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import types
from typing import Any

import engines

BACKENDS = ("common", "mooncake", "nixl", "mori", "ascend")
_PREFIX = {"common": "Common", "mooncake": "Mooncake", "nixl": "Nixl", "mori": "Mori", "ascend": "Ascend"}
_PARALLEL: dict[str, Any] = {
    **{f"attn_{axis}_{what}": int(what == "size") for axis in ("tp", "cp", "dcp", "dp") for what in ("size", "rank")},
    **{f"{axis}_size": 1 for axis in ("tp", "dp", "pp", "ep")},
    **{"nnodes": 1, "num_dp_ranks": 1, "launch_world_size": 1, "dist_init_addr": None},
    **{"enable_dp_attention": False, "enable_kv_cache_sharding": False, "enable_dsa_cache_layer_split": False},
    **{"enable_cp_tp_group_sharing": False, "load_balance_method": "follow_bootstrap_room"},
    **{"pp_group": None, "world_group": None},
}
#: The KV cache of a model with one layer: 64 pages of 1 KiB.
_PAGE, _PAGES = 1024, 64
_MEMORY = ctypes.create_string_buffer(_PAGE * _PAGES)
_KV_ARGS: dict[str, Any] = {
    **{"kv_data_ptrs": (ctypes.addressof(_MEMORY),), "kv_data_lens": (_PAGE * _PAGES,), "kv_item_lens": (_PAGE,)},
    **{"kv_layer_ids": (0,)},
    **{f"aux_{what}": () for what in ("data_ptrs", "data_lens", "item_lens")},
    **{f"state_{what}": () for what in ("types", "data_ptrs", "data_lens", "item_lens", "layer_ids")},
    **{f"state_{what}": () for what in ("dim_per_tensor", "slice_outer_counts", "conv_shard_groups")},
    **{f"{what}_kv_layers": 0 for what in ("hidden", "draft", "total")},
    **{"kv_cache_dtype_str": "auto", "is_hybrid_mla_backend": False, "swa_kv_cache_layout": None, "ib_device": ""},
    **{"gpu_id": 0, "kv_head_num": 1, "total_kv_head_num": 1, "page_size": 1, "system_dp_rank": 0, "pp_rank": 0},
    **{"rust_http_port": None, "prefill_start_layer": 0, "prefill_end_layer": None, "kv_buf_groups": 0},
    **{"mla_compression_ratios": None, "kv_layout": None, "num_draft_entries": 0},
}


def module(backend: str, name: str = "conn") -> Any:
    """The module sglang.srt.disaggregation.<backend>.<name>."""
    return importlib.import_module(f"sglang.srt.disaggregation.{backend}.{name}")


def stock(backend: str, what: str) -> Any:
    """The class of `backend` as SGLang names it: `what` is KVManager, KVReceiver, KVSender or KVBootstrapServer."""
    engines.install(backend)
    return getattr(module(backend), _PREFIX[backend] + what)


def status(name: str) -> int:
    """The KVPoll value of that name."""
    return int(getattr(module("base").KVPoll, name))


def status_name(value: int) -> str:
    """Failed, Bootstrapping, WaitingForInput, Transferring or Success."""
    known = vars(module("base").KVPoll).items()
    return next(str(name) for name, number in known if not name.startswith("_") and number == value)


def fill(tp_rank: int = 0, tp_size: int = 1, bootstrap_port: int = 8998, host: str = "127.0.0.1") -> None:
    """Publish the configuration of one rank; it holds for the managers that are made afterwards."""
    runtime = importlib.import_module("sglang.srt.runtime_context")

    def bag(path: str, **values: object) -> Any:
        made = runtime._ConfigBag(path)
        for name, value in values.items():
            made._set(name, value)
        return made

    runtime.get_context()._config_bags = {
        "serving": bag("serving", host=host, port=30000),
        "disagg": bag(
            "disagg", disaggregation_bootstrap_port=bootstrap_port, disaggregation_decode_allocation_policy="early"
        ),
        "observability": bag("observability", enable_trace=False),
        "schedule": bag("schedule", max_prefill_tokens=16384, chunked_prefill_size=8192),
        "device": bag("device", device="cpu", gpu_id=0),
        "memory": bag("memory", enable_unified_memory=False),
        "spec": bag("spec", speculative_algorithm=None),
    }
    ranks = {"attn_tp_rank": tp_rank, "tp_rank": tp_rank, "attn_tp_size": tp_size, "tp_size": tp_size}
    runtime.get_parallel()._overrides = {**_PARALLEL, **ranks}
    _fill_pipeline_group()


def _fill_pipeline_group() -> None:
    """Up to 0.5.20 a prefill manager asks for the pipeline's group directly, not through the context."""
    state = importlib.import_module("sglang.srt.distributed.parallel_state")
    if getattr(state, "_PP", None) is None:
        vars(state)["_PP"] = types.SimpleNamespace(rank_in_group=0, world_size=1)


def kv_args(engine_rank: int = 0, **over: object) -> Any:
    """The KVArgs of a rank with one small layer and no other state; `over` replaces single fields."""
    made = module("base").KVArgs()
    for name, value in {**_KV_ARGS, "engine_rank": engine_rank, **over}.items():
        setattr(made, name, list(value) if isinstance(value, tuple) else value)
    return made


def make_manager(
    backend: str,
    mode: str,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    engine_rank: int | None = None,
    bootstrap_port: int = 8998,
    host: str = "127.0.0.1",
) -> Any:
    """A real manager of `backend` in `mode` (decode|prefill), its threads started; prefill registers itself.

    A prefill manager needs the bootstrap server at `host`:`bootstrap_port`. `engine_rank` is `tp_rank` if not given.
    """
    made = manager_class(backend)
    fill(tp_rank, tp_size, bootstrap_port, host)
    mode_of = importlib.import_module("sglang.srt.disaggregation.utils").DisaggregationMode
    args = kv_args(tp_rank if engine_rank is None else engine_rank)
    manager = made(args, mode_of(mode), types.SimpleNamespace(enable_pd_role_switch=False))
    if backend == "common" and mode == "decode":
        manager.heartbeat_thread = manager._start_heartbeat_checker_thread()
    return manager


def manager_class(backend: str) -> Any:
    """The backend's own manager class; for `common` a subclass with the messages that every backend must add."""
    found = stock(backend, "KVManager")
    return _common_manager(found) if backend == "common" else found


def receiver_class(backend: str) -> Any:
    """The backend's own receiver class; for `common` a subclass with what a version leaves to its backends."""
    found = stock(backend, "KVReceiver")
    return _common_receiver(found) if backend == "common" else found


def bootstrap_class(backend: str) -> Any:
    """The backend's own bootstrap server class: `bootstrap_class(b)(host, port)` listens in a thread of its own."""
    return stock(backend, "KVBootstrapServer")


def _common_manager(base: Any) -> Any:
    class Manager(base):  # type: ignore[misc]
        def build_receiver_registration_message(self) -> list[bytes]:
            return [b"None", self.local_ip.encode(), str(self.rank_port).encode()]

        def build_receiver_metadata_message(self, *, bootstrap_room: int, **more: Any) -> list[bytes]:
            return [str(bootstrap_room).encode(), self.local_ip.encode(), str(self.rank_port).encode()]

    return Manager


def _common_receiver(base: Any) -> Any:
    if not base.__abstractmethods__:
        return base  # 0.5.22 and later: complete
    mooncake = stock("mooncake", "KVReceiver")

    class Receiver(base):  # type: ignore[misc]
        poll = mooncake.poll
        failure_exception = mooncake.failure_exception

        def send_metadata(self, *args: object, **kwargs: object) -> None:
            for info in self.bootstrap_infos or []:
                sock, lock = self._connect_to_bootstrap_server(info)
                with lock:
                    room = str(self.bootstrap_room).encode()
                    sock.send_multipart([room, self.kv_mgr.local_ip.encode(), str(self.kv_mgr.rank_port).encode()])

    return Receiver


def make_sender(backend: str, manager: Any, address: str, room: int) -> Any:
    """A real sender: the prefill side of `room`; `address` is its bootstrap server. Not for `common`."""
    made = stock(backend, "KVSender")
    placed = {"dest_tp_ranks": [0], "pp_rank": 0}  # up to 0.5.21
    known = inspect.signature(made).parameters
    return made(manager, address, room, **{name: value for name, value in placed.items() if name in known})
