# Two commands do all set-up: `make run` and `make test`. The environment lives in .venv and is made when needed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: run test explore hostile lint bench sanitize clean

run: $(READY)
	$(BIN)/cbdsl run --preset paper-iid

test: $(READY) lint
	$(BIN)/pytest --numprocesses 2 --dist loadfile

# Property tests on fresh random examples, more of them; `make test` always takes the same ones.
explore: $(READY)
	CBDSL_EXAMPLES=fresh $(BIN)/pytest --numprocesses 2 --dist loadfile -m hypothesis

# Hostile members, servers and strangers against real processes and a real broker, for minutes; all on the loopback.
hostile: $(READY)
	$(BIN)/pytest tests/hostile -m "hostile or not hostile"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/cbdsl bench

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The native engine's tests on a build that checks every address and every undefined operation.
sanitize: $(READY)
	rm -rf build/sanitized
	CBDSL_SANITIZE=address,undefined $(BIN)/pip install --quiet --no-deps --target build/sanitized .
	LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/sanitized $(BIN)/pytest tests/engines/test_native_engine.py tests/engines/test_native_graphs.py
