"""SGLang's own disaggregation modules on a machine without torch and without its other 70 dependencies.

`boot()` enters `sglang` as a bare package, so that its __init__ does not run, and answers the names in HEAVY with
modules that agree to everything. All that is under test stays SGLang's code, unmodified: sglang.srt.disaggregation,
plugins, runtime_context, environ, utils. Nothing here replaces a transfer engine: see engines.py.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

#: Not installed beside SGLang here, or too heavy: answered by a module that agrees to everything.
HEAVY = {
    *("torch", "torchvision", "triton", "starlette", "PIL", "pydantic", "pydantic_core", "openai"),
    *("orjson", "pybase64", "psutil", "tqdm", "prometheus_client", "IPython"),
    *("sglang.kernels", "sglang.srt.configs", "sglang.srt.model_executor", "sglang.srt.mem_cache.page_interleave"),
    *("sglang.srt.function_call", "sglang.srt.layers"),
}
_DTYPES = (
    *("bfloat16", "float16", "float32", "float64", "half", "float", "int8", "int16", "int32", "int64", "int", "long"),
    *("uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
#: Devices that torch must not seem to have.
_ABSENT = {("torch", device) for device in ("npu", "hpu", "musa", "mlu")}


class _Agreeable(type):
    """A class that may be subclassed, subscripted, compared, iterated and joined with `|`."""

    def __getattr__(cls, name: str) -> Any:
        return _agree(name)

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __lt__(cls, other: object) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__


class _Anything(metaclass=_Agreeable):
    """What a HEAVY module answers with; called with one function alone it is a decorator that changes nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __init_subclass__(cls, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return _agree(name)

    def __call__(self, *args: Any, **kwargs: object) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


def _agree(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Agreeable(name, (_Anything,), {})


class StandIn(types.ModuleType):
    """A module that has every attribute: classes by a capital letter, else callables."""

    def __init__(self, name: str, **known: object) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__all__: list[str] = []
        for attribute, value in known.items():
            setattr(self, attribute, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (self.__name__, name) in _ABSENT:
            raise AttributeError(name)
        value = _Anything() if name[:1].islower() else _agree(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers HEAVY and everything below it, before any installed package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        parts = fullname.split(".")
        if not any(".".join(parts[:n]) in HEAVY for n in range(1, len(parts) + 1)):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def version() -> str:
    """The installed SGLang's version."""
    return importlib.metadata.version("sglang")


def boot() -> None:
    """Make `import sglang.srt.disaggregation...` work in this process; a second call changes nothing."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    os.environ.setdefault("SGLANG_HOST_IP", "127.0.0.1")  # else SGLang looks for an outside interface
    spec = importlib.util.find_spec("sglang")
    assert spec is not None, "sglang is not installed here: make test-sglang"
    assert spec.submodule_search_locations
    bare = importlib.machinery.ModuleSpec("sglang", None, is_package=True)
    bare.submodule_search_locations = list(spec.submodule_search_locations)
    package = types.ModuleType("sglang")
    package.__path__ = bare.submodule_search_locations
    package.__spec__ = bare
    package.__dict__["__version__"] = version()
    sys.modules["sglang"] = package
    sys.meta_path.insert(0, _Finder())
    _boot_torch()
    memory = types.SimpleNamespace(total=8 << 30, available=4 << 30)
    _module("psutil", virtual_memory=lambda: memory)
    # Up to 0.5.20 data-parallel attention is asked directly, not through the runtime context.
    _module("sglang.srt.layers.dp_attention", get_attention_dp_rank=lambda: 0, get_attention_dp_size=lambda: 1)
    _boot_logging()


def _module(name: str, **known: object) -> None:
    sys.modules[name] = StandIn(name, **known)


def _boot_torch() -> None:
    """A torch without any accelerator."""

    def no(*args: object, **kwargs: object) -> bool:
        return False

    def none(*args: object, **kwargs: object) -> int:
        return 0

    torch = importlib.import_module("torch")
    cpu = {"is_available": no, "device_count": none}
    for kind in ("cuda", "xpu", "mps", "cpu"):
        flags = dict.fromkeys(("_is_available", "_is_amx_tile_supported", "_is_avx512_supported"), no)
        _submodule(torch, kind, **cpu, **flags)
    _submodule(torch, "version", cuda=None, hip=None, xpu=None)
    reduce = types.SimpleNamespace(SUM=0, MIN=1, MAX=2, PRODUCT=3, AVG=4)
    _submodule(torch, "distributed", is_available=no, is_initialized=no, ReduceOp=reduce)
    _submodule(_submodule(torch, "backends"), "mps", is_available=no)
    limits = types.SimpleNamespace(max=448.0, min=-448.0, eps=1e-6, tiny=1e-6, bits=8)
    known: dict[str, object] = {name: type(name, (), {})() for name in _DTYPES}
    known |= {"__version__": "2.13.0", "finfo": lambda *_: limits, "iinfo": lambda *_: limits}
    vars(torch).update(known)


def _submodule(parent: types.ModuleType, name: str, **known: object) -> types.ModuleType:
    module = StandIn(f"{parent.__name__}.{name}", **known)
    sys.modules[module.__name__] = module
    setattr(parent, name, module)
    return module


def _boot_logging() -> None:
    """SGLang calls Logger.warning_once, which transformers would have added."""
    if not hasattr(logging.Logger, "warning_once"):

        @functools.cache
        def warning_once(logger: logging.Logger, *args: Any, **kwargs: Any) -> None:
            logger.warning(*args, **kwargs)

        logging.Logger.warning_once = warning_once  # type: ignore[attr-defined]
