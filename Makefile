# Each target is the session of the same name in noxfile.py; `make` lists them. `make demo` and `make test` are where to
# begin: all of this needs Python and make only. Variables reach the sessions: make test-gpu DRY=yes.

PYTHON ?= python3
NOX := .build/nox/bin/nox
TARGETS := setup demo lab test test-integrations test-nightly lint examples examples-own examples-ported examples-record \
	test-deepspeed test-strategies test-ray test-megatron test-s3 test-cuda test-parity test-clients test-docs docs \
	test-notebook test-browser test-kernels test-colab test-kaggle test-marimo test-trackers test-xla test-tpu test-gpu \
	test-gpu-day gpu-day-wheels soak client-names dist pictures bench bench-record bench-quick

.PHONY: help clean test-matrix $(TARGETS)

help: $(NOX)
	@$(NOX) --list

$(TARGETS): $(NOX)
	@$(NOX) --session $@

# CELL="3.10(oldest)": only this Python and torch.
test-matrix: $(NOX)
	@$(NOX) --session "test-matrix$(if $(CELL),-$(CELL))"

$(NOX): Makefile
	test -x .build/nox/bin/python || $(PYTHON) -m venv .build/nox
	.build/nox/bin/python -m pip install -qq --disable-pip-version-check nox==2026.10.20 uv==0.13.9
	touch $@

clean:
	rm -rf docs/tutorials .venv .venv-* .build build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
