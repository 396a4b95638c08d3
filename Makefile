# make run   set everything up and run the demo
# make test  set everything up, then lint, types, import contracts and all tests
# make bench the benchmarks (bench/README.md)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.viiwork-installed
SOURCES := pyproject.toml setup.py $(shell find csrc -type f)
# Network namespaces need root; elsewhere the tests that use them are left out, and pytest says how many.
ifneq ($(shell id -u),0)
PYTEST_SELECT := -m "not netns"
endif

.PHONY: run test lint bench tools test-tools clean

run: $(STAMP)
	$(BIN)/viiwork demo

test: $(STAMP) test-tools lint
	$(BIN)/python -m pytest $(PYTEST_SELECT)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python bench/relay/run.py
	$(BIN)/python bench/kv/whole_state.py
	$(BIN)/python -m bench.soak.run

$(STAMP): $(SOURCES) | tools
	@echo "setting up $(VENV): downloading and building takes a minute or two"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet --editable '.[embedded,dev]'
	@touch $@

tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "viiwork needs Python 3.11 or newer: '$(PYTHON)' is not (set PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "Python's venv is missing: apt-get install python3-venv" >&2; exit 1; }
	@command -v cc >/dev/null \
	  || { echo "no C compiler found: apt-get install gcc libc6-dev" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; \
	  sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' \
	  || { echo "Python's C headers are missing: apt-get install python3-dev" >&2; exit 1; }

test-tools:
ifeq ($(shell id -u),0)
	@command -v ip >/dev/null && command -v tc >/dev/null \
	  || { echo "the network tests need ip and tc: apt-get install iproute2" >&2; exit 1; }
endif

clean:
	rm -rf $(VENV) build *.egg-info viiwork/native/*.so
