# Each target sets up what it needs, from a fresh clone on. `make demo` and `make test` are where to begin.

PYTHON ?= python3
VENV := .venv
BENCH_VENV := .venv-bench
PY ?= $(VENV)/bin/python
# Kernels and ranks import the tree hundreds of times: its bytecode is kept, wherever the caller's shell says otherwise.
unexport PYTHONDONTWRITEBYTECODE
READY := $(VENV)/.ready
# Modules are compiled when they are first imported: compiling all that is installed takes half a minute.
INSTALL := -m pip install -qq --disable-pip-version-check --no-compile
BENCH_READY := $(BENCH_VENV)/.ready
PARITY_VENV := .venv-parity
PARITY_READY := $(PARITY_VENV)/.ready
BENCH_DEEPSPEED_VENV := .venv-bench-deepspeed
BENCH_DEEPSPEED_READY := $(BENCH_DEEPSPEED_VENV)/.ready
BROWSER_READY := $(VENV)/.browser-ready
CHROMIUM ?= $(shell command -v chromium)
# Notebook services with an image of their own, and its Python: in PATH, among pyenv's versions or uv's.
HOSTED := colab kaggle
PYTHON_colab := 3.13
PYTHON_kaggle := 3.12
HOSTED_TORCH := torch==2.11.0
MARIMO_VENV := .venv-marimo
MARIMO_READY := $(MARIMO_VENV)/.ready
CUDA_VENV := .venv-cuda
CUDA_READY := $(CUDA_VENV)/.ready
PYTHON_cuda := 3.12
GPU_DAY_WHEELS := .build/gpu-day-wheels
MEGATRON_VENV := .venv-megatron
MEGATRON_READY := $(MEGATRON_VENV)/.ready
DEEPSPEED_VENV := .venv-deepspeed
DEEPSPEED_READY := $(DEEPSPEED_VENV)/.ready
DEEPSPEED_OPS := .build/torch-extensions/.ready
# DeepSpeed on the CPU; its optimizer in C++ is compiled once, for this machine, into this checkout.
DEEPSPEED_ENV := DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(CURDIR)/.build/torch-extensions OMP_NUM_THREADS=1
CLIENTS_VENV := .venv-clients
CLIENTS_READY := $(CLIENTS_VENV)/.ready
# Versions of transformers that clients use, besides the one of requirements/clients.txt.
TRANSFORMERS := 4.57.3 5.0.0
TRANSFORMERS_BUILD := .build/transformers
S3_VENV := .venv-s3
S3_READY := $(S3_VENV)/.ready
RAY_VENV := .venv-ray
RAY_READY := $(RAY_VENV)/.ready
TRACKERS_VENV := .venv-trackers
TRACKERS_READY := $(TRACKERS_VENV)/.ready
DIST_VENV := .venv-dist
DIST_READY := $(DIST_VENV)/.ready
XLA_VENV := .venv-xla
XLA_READY := $(XLA_VENV)/.ready
TPU_VENV := .venv-tpu
TPU_READY := $(TPU_VENV)/.ready
DOCS_VENV := .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready
DOCS_TESTS_READY := $(DOCS_VENV)/.tests-ready
EXAMPLES := $(sort $(wildcard examples/*.ipynb))
PORTED := $(sort $(wildcard examples/ported/*.ipynb))
KERNELS := 6.31.0 7.3.0 7.4.0
KERNELS_BUILD := .build/kernels

.PHONY: help setup demo examples examples-own examples-ported examples-record test test-integrations test-notebook test-colab test-kaggle test-marimo test-kernels test-browser test-gpu test-gpu-day gpu-day-wheels test-cuda client-names test-clients test-parity test-deepspeed test-megatron test-ray test-s3 test-trackers test-xla test-tpu test-docs test-matrix test-nightly soak lint docs dist bench bench-quick bench-record pictures lab clean

help:
	@echo "make demo           execute the quickstart in a real Jupyter kernel: it trains in two worker processes"
	@echo "make examples       execute all example notebooks, and compare their outputs with the committed ones"
	@echo "make examples-own   those of this package alone"
	@echo "make examples-ported  those on transformers, diffusers and trl alone; in an environment of its own"
	@echo "make examples-record  execute all, and take over the outputs that have changed"
	@echo "make test           lint, unit, distributed, notebook, fault and browser tests"
	@echo "make test-integrations  DeepSpeed, Megatron-LM, Ray, S3, the real Accelerate and its clients, the docs: seven environments"
	@echo "make soak           MINUTES=60 of random launches, faults, stops and saves in one kernel, watched for growth"
	@echo "make test-nightly   both, with more cases of what they try with one (hours)"
	@echo "make test-notebook  the tests that start Jupyter kernels"
	@echo "make test-colab     launch, panels and faults with the versions of Colab's image; an environment of 5 GB, Python 3.13"
	@echo "make test-kaggle    the same with the versions of Kaggle's image; Python 3.12"
	@echo "make test-marimo    a launch in a marimo notebook, in chromium; in an environment of its own"
	@echo "make test-kernels   the tests that start Jupyter kernels, with several versions of ipykernel"
	@echo "make test-browser   panels in JupyterLab and Notebook; needs chromium (apt-get install chromium)"
	@echo "make test-gpu       the tests that need a CUDA device, and a table of what they measured"
	@echo "                    PY=... SETUP=: an environment of your own; DRY=yes: all of it on the CPU, to try the tests"
	@echo "make test-gpu-day   what fits into nine minutes on a machine with one GPU; DRY=yes: on the CPU"
	@echo "make gpu-day-wheels the packages for such a machine without a network: tests/gpu/day/run.sh installs them"
	@echo "make test-cuda      torch's build for CUDA with libraries in the place of the driver: what starts it, what is planned for"
	@echo "                    which GPUs; needs no GPU, an environment of 5 GB, Python 3.12"
	@echo "make test-parity    behaviour, random programs, checkpoints, losses and weights against the real Accelerate; in an environment of its own"
	@echo "make test-clients   training libraries in ranks, with this package as their accelerate; in an environment of its own"
	@echo "make client-names   download the libraries that import accelerate; write the table of the names that they use"
	@echo "make test-deepspeed  DeepSpeed's ZeRO, all stages, on the CPU; in an environment of its own"
	@echo "make test-megatron  Megatron-LM's GPT, BERT and T5, split over ranks; in an environment of its own"
	@echo "make test-s3        checkpoints in an S3 server on this machine; in an environment of its own"
	@echo "make test-ray       ranks on Ray clusters of two and three nodes; in an environment of its own"
	@echo "make test-trackers  every vendor's tracker, offline; an environment of 156 packages, not part of make test"
	@echo "make test-xla       training on torch_xla's CPU device; an environment of 7 GB, not part of make test"
	@echo "make test-tpu       training on TPUs with torch_tpu, from Python 3.12; skips without a TPU; not part of make test"
	@echo "make docs           the documentation site in .build/docs; an environment of its own"
	@echo "make test-docs      every block of code of the site, in kernels with real ranks; the site built without a warning"
	@echo "make test-matrix    the wheel on every Python found, with the oldest, a middle and the newest torch (hours)"
	@echo "                    CELLS=3.10-2.6,3.13-2.15: only these; GROUPS=unit,launch: only these; \`LIST=yes\` prints the cells"
	@echo "make dist           the sdist and the wheel in dist/, checked as the package index does"
	@echo "make lint           ruff, mypy, import-linter"
	@echo "make bench          times and memory, side by side with Accelerate (ROWS=launch: only these; not part of make test)"
	@echo "                    each area in the environment that it needs: DeepSpeed's and transformers', Ray's, the browser's"
	@echo "make bench-quick    the ten rows that matter most, in five minutes; part of CI, for information"
	@echo "make bench-record   make bench, and write the figures into docs/benchmarks.md"
	@echo "make pictures       take the README's pictures in JupyterLab; needs chromium"
	@echo "make lab            JupyterLab on the examples"
	@echo "make clean          remove the environments and everything built"

SETUP ?= $(READY)

setup: $(SETUP)

$(READY): requirements/dev.txt pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(INSTALL) -r requirements/dev.txt
	$(VENV)/bin/python $(INSTALL) --no-deps --no-build-isolation -e .
	touch $@

$(BROWSER_READY): $(READY) requirements/browser.txt
	$(VENV)/bin/python $(INSTALL) --no-deps -r requirements/browser.txt
	touch $@

# Makes a virtual environment whose own packages come first on the path, the development environment's after them.
define over_development
test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
$(VENV)/bin/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	> $$($(1)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/development.pth
endef

# The benchmark environment is the development environment plus the peer; it shares the large packages by path.
$(BENCH_READY): $(READY) requirements/bench.txt
	$(call over_development,$(BENCH_VENV))
	$(BENCH_VENV)/bin/python $(INSTALL) --no-deps -r requirements/bench.txt
	touch $@

# The parity tests' environment is the development environment plus the peer and the libraries whose objects both take.
$(PARITY_READY): $(READY) requirements/bench.txt requirements/clients.txt requirements/parity.txt
	$(call over_development,$(PARITY_VENV))
	$(PARITY_VENV)/bin/python $(INSTALL) --no-deps \
		-r requirements/bench.txt -r requirements/clients.txt -r requirements/parity.txt
	touch $@

# The rows of strategies need DeepSpeed beside the peer, which takes it with transformers only; that of the Trainer too.
$(BENCH_DEEPSPEED_READY): $(READY) requirements/bench.txt requirements/deepspeed.txt requirements/clients.txt
	$(call over_development,$(BENCH_DEEPSPEED_VENV))
	$(BENCH_DEEPSPEED_VENV)/bin/python $(INSTALL) --no-deps \
		-r requirements/bench.txt -r requirements/deepspeed.txt -r requirements/clients.txt
	touch $@

# Makes a virtual environment with the Python of PYTHON_<name>; shares nothing.
define of_another_python
test -x .venv-$(1)/bin/python || $$($(PYTHON) -c "from tests.support.matrix import find_interpreter; \
	print(find_interpreter('$(PYTHON_$(1))') or 'python$(PYTHON_$(1))')") -m venv .venv-$(1)
endef

# The development environment with torch's build for CUDA.
$(CUDA_READY): requirements/dev.txt
	$(call of_another_python,cuda)
	$(CUDA_VENV)/bin/python $(INSTALL) $(HOSTED_TORCH)
	grep -v '^torch==' requirements/dev.txt > $(CUDA_VENV)/dev.txt
	$(CUDA_VENV)/bin/python $(INSTALL) --no-deps -r $(CUDA_VENV)/dev.txt
	touch $@

# The images' versions on their Python.
.venv-%/.ready: requirements/%.txt requirements/hosted.txt
	$(call of_another_python,$*)
	.venv-$*/bin/python $(INSTALL) $(HOSTED_TORCH)
	.venv-$*/bin/python $(INSTALL) --no-deps \
		-r requirements/hosted.txt -r requirements/$*.txt
	touch $@

# marimo over the development environment.
$(MARIMO_READY): $(READY) requirements/marimo.txt
	$(call over_development,$(MARIMO_VENV))
	$(MARIMO_VENV)/bin/python $(INSTALL) --no-deps -r requirements/marimo.txt
	touch $@

# Megatron-LM's environment is the development environment plus megatron-core.
$(MEGATRON_READY): $(READY) requirements/megatron.txt
	$(call over_development,$(MEGATRON_VENV))
	$(MEGATRON_VENV)/bin/python $(INSTALL) --no-deps -r requirements/megatron.txt
	touch $@

# DeepSpeed's environment is the development environment plus DeepSpeed and transformers, a client of both.
$(DEEPSPEED_READY): $(READY) requirements/deepspeed.txt requirements/clients.txt
	$(call over_development,$(DEEPSPEED_VENV))
	$(DEEPSPEED_VENV)/bin/python $(INSTALL) --no-deps \
		-r requirements/deepspeed.txt -r requirements/clients.txt
	touch $@

# The libraries that use this package as their accelerate, or report from ranks, over the development environment.
# The real Accelerate lies beside the path: only the processes that the tests compare with import it.
$(CLIENTS_READY): $(READY) requirements/clients.txt requirements/libraries.txt requirements/bench.txt
	$(call over_development,$(CLIENTS_VENV))
	$(CLIENTS_VENV)/bin/python $(INSTALL) --no-deps \
		-r requirements/clients.txt -r requirements/libraries.txt
	$(CLIENTS_VENV)/bin/python $(INSTALL) --no-deps --upgrade \
		--target $(CLIENTS_VENV)/peer "$$(grep '^accelerate==' requirements/bench.txt)"
	touch $@

# A version of transformers, and what it pins, in a folder that precedes the clients' environment in the path.
$(TRANSFORMERS_BUILD)/%/.ready: $(CLIENTS_READY) requirements/transformers-%.txt
	$(CLIENTS_VENV)/bin/python $(INSTALL) --no-deps --upgrade \
		--target $(@D) -r requirements/transformers-$*.txt
	touch $@

# Minutes of C++ compilation and 2 GB of memory; without it the test of that optimizer skips.
$(DEEPSPEED_OPS): $(DEEPSPEED_READY)
	$(DEEPSPEED_ENV) MAX_JOBS=1 PATH="$(CURDIR)/$(DEEPSPEED_VENV)/bin:$$PATH" $(DEEPSPEED_VENV)/bin/python -c \
		"from notebook_accelerate.strategies.deepspeed.deepspeed_engine import compilation_context; \
		from deepspeed.ops.op_builder import CPUAdamBuilder; compilation_context(); CPUAdamBuilder().load(verbose=False)" > /dev/null
	touch $@

# The environment of the tests on an S3 server is the development environment plus s3fs and the server.
$(S3_READY): $(READY) requirements/s3.txt
	$(call over_development,$(S3_VENV))
	$(S3_VENV)/bin/python $(INSTALL) --no-deps -r requirements/s3.txt
	touch $@

$(KERNELS_BUILD)/%/.ready: $(READY)
	$(VENV)/bin/python $(INSTALL) --no-deps --upgrade \
		--target $(@D) ipykernel==$* nest-asyncio==1.6.0
	touch $@

# Ray's environment is the development environment plus Ray.
$(RAY_READY): $(READY) requirements/ray.txt
	$(call over_development,$(RAY_VENV))
	$(RAY_VENV)/bin/python $(INSTALL) --no-deps -r requirements/ray.txt
	touch $@

# The trackers' environment is the development environment plus the packages of all vendors.
$(TRACKERS_READY): $(READY) requirements/trackers.txt
	$(call over_development,$(TRACKERS_VENV))
	$(TRACKERS_VENV)/bin/python $(INSTALL) --no-deps -r requirements/trackers.txt
	touch $@

# torch_xla takes one version of torch only, so this environment shares nothing.
$(XLA_READY): requirements/xla.txt
	test -x $(XLA_VENV)/bin/python || $(PYTHON) -m venv $(XLA_VENV)
	$(XLA_VENV)/bin/python $(INSTALL) -r requirements/xla.txt
	touch $@

# The ranks of TPUs with torch_tpu, which shares nothing either: it works from Python 3.12 (make test-tpu PYTHON=python3.12).
$(TPU_READY): requirements/tpu.txt
	test -x $(TPU_VENV)/bin/python || $(PYTHON) -m venv $(TPU_VENV)
	$(TPU_VENV)/bin/python $(INSTALL) -r requirements/tpu.txt
	touch $@

# The site's environment is the development environment plus Sphinx: the reference imports the package, and so torch.
$(DOCS_READY): $(READY) requirements/docs.txt
	$(call over_development,$(DOCS_VENV))
	$(DOCS_VENV)/bin/python $(INSTALL) --no-deps -r requirements/docs.txt
	touch $@

# What the site's blocks of code use, beside it.
$(DOCS_TESTS_READY): $(DOCS_READY) requirements/clients.txt requirements/libraries.txt requirements/deepspeed.txt
	$(DOCS_VENV)/bin/python $(INSTALL) --no-deps \
		-r requirements/clients.txt -r requirements/libraries.txt -r requirements/deepspeed.txt
	touch $@

$(DIST_READY): requirements/dist.txt
	test -x $(DIST_VENV)/bin/python || $(PYTHON) -m venv $(DIST_VENV)
	$(DIST_VENV)/bin/python $(INSTALL) -r requirements/dist.txt
	touch $@

demo: $(SETUP)
	$(PY) examples/run_headless.py examples/01_quickstart.ipynb

# The notebooks are committed with their outputs: executed again, they show the same but for numbers.
examples: examples-own examples-ported

examples-own: $(SETUP)
	$(PY) examples/run_headless.py $(EXAMPLES)
	$(PY) -m tests.support.saved_outputs $(or $(OUTPUTS),compare) $(EXAMPLES)

# nbconvert's templates are in the development environment.
examples-ported: $(CLIENTS_READY)
	HF_HUB_OFFLINE=1 JUPYTER_PATH=$(CURDIR)/$(VENV)/share/jupyter $(CLIENTS_VENV)/bin/python examples/run_headless.py $(PORTED)
	$(CLIENTS_VENV)/bin/python -m tests.support.saved_outputs $(or $(OUTPUTS),compare) $(PORTED)

# ALL=yes: also the cells in which only numbers have changed.
examples-record:
	$(MAKE) examples OUTPUTS=record$(if $(ALL),-all)

# Where there is a chromium, panels are tested in it; elsewhere those tests skip and say why.
test: $(SETUP) $(if $(CHROMIUM),$(BROWSER_READY))
	$(PY) -m tests.support.groups everyday lint

test-integrations: $(SETUP)
	$(PY) -m tests.support.groups integrations

test-nightly: $(DEEPSPEED_OPS)
	TEST_NIGHTLY=yes $(MAKE) test
	$(MAKE) test-gpu DRY=yes
	TEST_NIGHTLY=yes $(MAKE) test-integrations

soak: $(SETUP)
	OMP_NUM_THREADS=1 $(PY) -m tests.soak --minutes $(or $(MINUTES),60)

test-notebook: $(SETUP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m notebook tests

# TESTS="tests/notebook tests/faults/test_stopping.py": only these.
define test_hosted
OMP_NUM_THREADS=1 TEST_KERNEL_VERSION=6.17.1 TEST_HOSTED=$(1) PYDEVD_USE_FRAME_EVAL=NO PYTHONPATH=$(CURDIR) \
	.venv-$(1)/bin/python -m pytest -rs -m "not benchmark" -o cache_dir=.build/pytest-$(1) \
	$(or $(TESTS),tests/hosted tests/unit/launch tests/unit/telemetry tests/unit/widgets tests/unit/support \
	tests/notebook tests/faults)
endef

test-colab: .venv-colab/.ready
	$(call test_hosted,colab)

test-kaggle: .venv-kaggle/.ready
	$(call test_hosted,kaggle)

test-marimo: $(MARIMO_READY)
	OMP_NUM_THREADS=1 $(MARIMO_VENV)/bin/python -m pytest -rs -o cache_dir=.build/pytest-marimo tests/marimo

test-kernels: $(KERNELS:%=$(KERNELS_BUILD)/%/.ready)
	for version in $(KERNELS); do \
		echo "ipykernel $$version"; \
		OMP_NUM_THREADS=1 TEST_KERNEL_VERSION=$$version TEST_KERNEL_PATH=$(CURDIR)/$(KERNELS_BUILD)/$$version \
			$(PY) -m pytest -m notebook -o cache_dir=.build/pytest-kernels tests || exit 1; \
	done

test-browser: $(BROWSER_READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest -rs tests/browser

test-gpu: $(SETUP)
	$(if $(DRY),TEST_GPU=dry) $(PY) -m pytest -m gpu -rs $(if $(DRY),tests/gpu,tests)

test-gpu-day: $(SETUP)
	$(if $(DRY),TEST_GPU=dry) OMP_NUM_THREADS=$(if $(DRY),1,4) $(PY) -m tests.gpu.day

gpu-day-wheels:
	mkdir -p $(GPU_DAY_WHEELS)
	$(PYTHON) -m pip download -qq --disable-pip-version-check --no-deps --only-binary=:all: --dest $(GPU_DAY_WHEELS) \
		--python-version 3.12 --implementation cp $(foreach tag,2_28 2_27 2_24 2_17,--platform manylinux_$(tag)_x86_64) \
		--platform manylinux2014_x86_64 --platform manylinux1_x86_64 -r requirements/gpu-day.txt
	$(PYTHON) -m tests.gpu.day.wheels $(GPU_DAY_WHEELS)
	du -sh $(GPU_DAY_WHEELS)

test-cuda: $(CUDA_READY)
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) $(CUDA_VENV)/bin/python -m pytest -rs -o cache_dir=.build/pytest-cuda tests/cuda

test-clients: $(CLIENTS_READY) $(TRANSFORMERS:%=$(TRANSFORMERS_BUILD)/%/.ready)
	OMP_NUM_THREADS=1 $(CLIENTS_VENV)/bin/python -m pytest -o cache_dir=.build/pytest-clients tests/clients

client-names: $(SETUP)
	rm -rf .build/clients
	$(PY) -m pip download -qq --disable-pip-version-check --no-deps --only-binary :all: --dest .build/clients \
		axolotl diffusers peft sentence-transformers transformers trl
	$(PY) -m tests.parity.surface.client_names .build/clients

test-deepspeed: $(DEEPSPEED_READY)
	$(DEEPSPEED_ENV) $(DEEPSPEED_VENV)/bin/python -m pytest -o cache_dir=.build/pytest-deepspeed -m "not benchmark" \
		tests/parity/strategies/test_deepspeed.py tests/deepspeed

test-megatron: $(MEGATRON_READY)
	OMP_NUM_THREADS=1 $(MEGATRON_VENV)/bin/python -m pytest -o cache_dir=.build/pytest-megatron tests/megatron

test-s3: $(S3_READY)
	OMP_NUM_THREADS=1 $(S3_VENV)/bin/python -m pytest -o cache_dir=.build/pytest-s3 tests/s3

test-docs: $(DOCS_TESTS_READY) $(if $(CHROMIUM),$(BROWSER_READY)) docs
	$(DOCS_VENV)/bin/python -m codespell_lib docs examples notebook_accelerate widgets $(wildcard *.md)
	$(DEEPSPEED_ENV) HF_HUB_OFFLINE=1 $(DOCS_VENV)/bin/python -m pytest -rs -o cache_dir=.build/pytest-docs tests/docs

test-ray: $(RAY_READY)
	OMP_NUM_THREADS=1 $(RAY_VENV)/bin/python -m pytest -o cache_dir=.build/pytest-ray -m "not benchmark" tests/ray

test-trackers: $(TRACKERS_READY)
	OMP_NUM_THREADS=1 $(TRACKERS_VENV)/bin/python -m pytest -rs -o cache_dir=.build/pytest-trackers \
		tests/unit/tracking/test_vendors.py

test-xla: $(XLA_READY)
	OMP_NUM_THREADS=1 PJRT_DEVICE=CPU $(XLA_VENV)/bin/python -m pytest -o cache_dir=.build/pytest-xla tests/xla

test-tpu: $(TPU_READY)
	OMP_NUM_THREADS=1 $(TPU_VENV)/bin/python -m pytest -rs -o cache_dir=.build/pytest-tpu tests/tpu \
		tests/unit/hardware/test_tpu.py tests/unit/launch/test_tpu_ranks.py

test-parity: $(PARITY_READY) $(BENCH_DEEPSPEED_READY)
	$(DEEPSPEED_ENV) $(BENCH_DEEPSPEED_VENV)/bin/python -m tests.parity.behaviour.both_sides deepspeed.
	OMP_NUM_THREADS=1 $(PARITY_VENV)/bin/python -m pytest -o cache_dir=.build/pytest-parity \
		tests/parity/behaviour tests/parity/random_programs tests/parity/checkpoints tests/parity/commands \
		tests/parity/training/test_accelerate.py

# Each cell has an environment of its own in .build/matrix, of 1 GB to 7 GB; the table is .build/matrix.md.
test-matrix: $(DIST_READY)
	$(DIST_VENV)/bin/python -m tests.support.matrix $(if $(CELLS),--cells $(CELLS)) $(if $(GROUPS),--groups $(GROUPS)) \
		$(if $(LIST),--list)

docs: $(DOCS_READY)
	PYTHONPATH=. $(DOCS_VENV)/bin/python -m sphinx -W --keep-going -q -d .build/doctrees docs .build/docs
	@echo "open .build/docs/index.html"

dist: $(DIST_READY)
	rm -rf dist
	$(DIST_VENV)/bin/python -m build --no-isolation
	$(DIST_VENV)/bin/python -m twine check --strict dist/*

lint: $(SETUP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	PYTHONPATH=. $(PY) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

# The rows, by the environment that they need; without ROWS, all.
IN_BROWSER := $(if $(ROWS),$(filter browser,$(ROWS)),browser)
IN_RAY := $(if $(ROWS),$(filter ray,$(ROWS)),ray)
IN_BENCH := $(if $(ROWS),$(filter-out strategies zero trainer browser ray,$(ROWS)),--but strategies trainer browser ray)
IN_BENCH_DEEPSPEED := $(if $(ROWS),$(filter strategies zero trainer,$(ROWS)),strategies trainer)
BENCHMARKS := -m benchmarks $(RECORD)

# The environments with the peer come last: the head of the table names its version.
bench: $(if $(IN_BROWSER),$(if $(CHROMIUM),$(BROWSER_READY),$(READY))) $(if $(IN_RAY),$(RAY_READY)) $(if $(IN_BENCH),$(BENCH_READY)) $(if $(IN_BENCH_DEEPSPEED),$(BENCH_DEEPSPEED_READY))
	$(if $(IN_BROWSER),OMP_NUM_THREADS=1 $(VENV)/bin/python $(BENCHMARKS) $(IN_BROWSER))
	$(if $(IN_RAY),OMP_NUM_THREADS=1 $(RAY_VENV)/bin/python $(BENCHMARKS) $(IN_RAY))
	$(if $(IN_BENCH_DEEPSPEED),OMP_NUM_THREADS=1 $(BENCH_DEEPSPEED_VENV)/bin/python $(BENCHMARKS) $(IN_BENCH_DEEPSPEED))
	$(if $(IN_BENCH),OMP_NUM_THREADS=1 $(BENCH_VENV)/bin/python $(BENCHMARKS) $(IN_BENCH))

bench-quick: $(BENCH_READY)
	OMP_NUM_THREADS=1 $(BENCH_VENV)/bin/python -m benchmarks --quick

bench-record:
	$(MAKE) bench RECORD=--record

pictures: $(BROWSER_READY)
	OMP_NUM_THREADS=1 $(PY) -m tests.support.pictures

lab: $(SETUP)
	$(VENV)/bin/python $(INSTALL) -c requirements/dev.txt -r requirements/lab.txt
	$(VENV)/bin/python -m jupyterlab examples

clean:
	rm -rf docs/tutorials $(CUDA_VENV) $(DIST_VENV) $(DOCS_VENV) $(TPU_VENV) $(XLA_VENV) $(TRACKERS_VENV) $(VENV) $(BENCH_VENV) $(BENCH_DEEPSPEED_VENV) $(HOSTED:%=.venv-%) $(DEEPSPEED_VENV) $(MARIMO_VENV) $(MEGATRON_VENV) $(PARITY_VENV) $(RAY_VENV) $(S3_VENV) .build build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
