# Two commands do all set-up: `make run` and `make test`. The environment lives in .venv and is made when needed.
# `make run` installs the core, its engine and figures; `make test` adds the tools of development to the same environment.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CORE   := $(VENV)/.core
READY  := $(VENV)/.ready
FLOWER := .venv-flower
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := $(BIN)/pytest --numprocesses 2 --dist worksteal

.PHONY: run test test-all test-rest test-slow test-cluster flower-test explore hostile arm-test package-test lint docs bench sanitize clean

run: $(CORE)
	$(BIN)/cbdsl run --preset paper-iid

# Lint, types, and every test that needs no broker, browser, cluster or process of its own.
test: $(READY) lint
	$(PYTEST)

# Everything. Chromium, mosquitto and the ARM tools are Debian packages; a test without them is skipped with their names.
test-all: test test-rest

test-rest: test-slow test-cluster flower-test hostile arm-test package-test

# Processes, brokers, browsers, documents and whole runs.
test-slow: $(READY)
	$(PYTEST) -m "slow and not hostile and not arm and not package and not cluster"

# Runs on a Ray cluster of two nodes on this machine, with actors, nodes and drivers that are killed; minutes.
test-cluster: $(READY)
	$(BIN)/pytest -m cluster

# The Flower app in an environment of its own, without torch: flwr wants another Ray, typer and rich than the rest.
flower-test: $(FLOWER)/.ready
	$(FLOWER)/bin/pytest tests/flower -m "slow or not slow"

# Property tests on fresh random examples, more of them; `make test` always takes the same ones.
explore: $(READY)
	CBDSL_EXAMPLES=fresh $(PYTEST) -m hypothesis

# Hostile members, servers and strangers against real processes and a real broker, for minutes; all on the loopback.
hostile: $(READY)
	$(BIN)/pytest tests/hostile -m "hostile or not hostile"

# Kernels and exported C for ARM, cross-compiled and run by an emulator; sizes for a Cortex-M4, and how far claims are off.
# Nothing is installed: what is missing is skipped, with the line that installs it.
arm-test: $(READY)
	$(BIN)/pytest tests/arm -m arm -rsP

# sdist and wheel: built, installed into an environment without torch, and used there.
package-test: $(READY)
	$(BIN)/pytest tests/packaging -m package

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site in build/site: notebooks are run, warnings are errors, nothing is fetched.
docs: $(READY)
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/site
	@echo "open build/site/index.html"

bench: $(READY)
	$(BIN)/cbdsl bench

$(CORE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[study]'
	touch $(CORE)

$(READY): $(CORE)
	$(PIP) 'cbdsl[dev]'
	touch $(READY)

$(FLOWER)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FLOWER)
	grep -E '^(cbor2|hypothesis|numpy|paho-mqtt|pytest|safetensors|tomli_w)==' constraints.txt >$(FLOWER)/constraints.txt
	$(FLOWER)/bin/pip install --quiet --disable-pip-version-check --constraint $(FLOWER)/constraints.txt \
		'flwr[simulation]==1.41.0' hypothesis pytest --editable .
	touch $(FLOWER)/.ready

clean:
	rm -rf $(VENV) $(FLOWER) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The native engine's tests on a build that checks every address and every undefined operation.
sanitize: $(READY)
	rm -rf build/sanitized
	CBDSL_SANITIZE=address,undefined $(BIN)/pip install --quiet --no-deps --target build/sanitized .
	LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/sanitized $(BIN)/pytest tests/engines/test_native_engine.py tests/engines/test_native_graphs.py \
		tests/engines/test_recurrent.py
