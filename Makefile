# Each target sets up what it needs, from a fresh clone on. `make demo` and `make test` are where to begin.

PYTHON ?= python3
VENV := .venv
BENCH_VENV := .venv-bench
PY ?= $(VENV)/bin/python
READY := $(VENV)/.ready
BENCH_READY := $(BENCH_VENV)/.ready

.PHONY: help setup demo test test-notebook test-gpu lint bench lab clean

help:
	@echo "make demo           train in two worker processes from a notebook, in a real Jupyter kernel"
	@echo "make test           lint and all tests that this machine can run"
	@echo "make test-notebook  the tests that start Jupyter kernels"
	@echo "make test-gpu       the tests that need a CUDA device (PY=... SETUP= to use an environment of your own)"
	@echo "make lint           ruff, mypy, import-linter"
	@echo "make bench          launch times, side by side with Accelerate's launcher"
	@echo "make lab            JupyterLab on the examples"
	@echo "make clean          remove the environments and everything built"

SETUP ?= $(READY)

setup: $(SETUP)

$(READY): requirements/dev.txt pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -qq --disable-pip-version-check -r requirements/dev.txt
	$(VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# The benchmark environment is the development environment plus the peer; it shares the large packages by path.
$(BENCH_READY): $(READY) requirements/bench.txt
	test -x $(BENCH_VENV)/bin/python || $(PYTHON) -m venv $(BENCH_VENV)
	$(VENV)/bin/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> $$($(BENCH_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/development.pth
	$(BENCH_VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r requirements/bench.txt
	touch $@

demo: $(SETUP)
	$(PY) examples/run_headless.py examples/01_quickstart.ipynb examples/02_tiny_gpt.ipynb

test: lint
	$(PY) -m tests.support.groups

test-notebook: $(SETUP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m notebook tests

test-gpu: $(SETUP)
	$(PY) -m pytest -m gpu -rs tests

lint: $(SETUP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	PYTHONPATH=. $(PY) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

bench: $(BENCH_READY)
	OMP_NUM_THREADS=1 $(BENCH_VENV)/bin/python -m tests.benchmarks

lab: $(SETUP)
	$(VENV)/bin/python -m pip install -qq --disable-pip-version-check -c requirements/dev.txt -r requirements/lab.txt
	$(VENV)/bin/python -m jupyterlab examples

clean:
	rm -rf $(VENV) $(BENCH_VENV) .build build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
