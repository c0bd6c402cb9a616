# Two commands for a fresh machine: `make demo` and `make test`. Each makes .venv and installs what it needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Simulated devices need a thread each in XLA's pool, or their collectives wait for each other for ever. (The examples see to
# that themselves: one device is faster without.)
test quick sweep parity benchmarks: export NPROC ?= 16
# Few of the files that are installed are ever imported. Python compiles those then, and keeps the result; pip would take a minute to
# compile all. To pip a false value of this variable means that it compiles nothing.
export PIP_NO_COMPILE := 0
export PYTHONDONTWRITEBYTECODE :=
# A file at a time in each process: compilation, which takes most of the time, uses one core. One process more than there are
# cores, since a fifth of the time they wait for files, sockets and processes that they started.
# A process that crashes, for want of memory say, is an error at once: one in its place would run the same test again and again.
PYTEST_WORKERS ?= -n $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$(( (n < 4 ? n : 4) + 1 ))) --dist loadfile \
	--no-loadscope-reorder --max-worker-restart=0

TUTORIALS := $(patsubst %.py,%.md,$(wildcard docs/pages/tutorials/*.py))
FIGURES := docs/pages/figures/.made
LIBRARY := $(shell find redeqx/ models -name '*.py')

.PHONY: demo examples test quick newer lint style types sweep parity benchmarks table1 docs docs-serve clean

demo: $(VENV)/.demo
	$(BIN)/python -m examples.language_modeling

# Every example's full run, and their numbers as one table; `make examples EXAMPLES="lora meta_learning"` runs some.
examples: $(VENV)/.demo
	$(BIN)/python -m examples $(EXAMPLES)

# The style first, then the types beside the tests. `make test TYPECHECK=redeqx` also checks the library's annotations at run
# time, and takes half as long again.
test: style
	$(MAKE) --no-print-directory -j 2 types quick

quick: $(VENV)/.test
	$(BIN)/python -m pytest -q $(PYTEST_WORKERS) -m "not sweep and not parity" $(TESTS)

# The quick tests of traced, planned and compiled programs on a newer Python, which has a newer JAX:
# `make newer PYTHON=python3.13`, and `TESTS=` for all of them.
newer: TESTS = $(addprefix tests/,compiled dims kernels machine partition tracing transforms test_deployer.py test_predictor.py)
newer:
	$(MAKE) --no-print-directory quick VENV=.venv-newer PYTHON="$(PYTHON)" TESTS="$(TESTS)"

lint: style types

style: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/pyright --pythonpath $(BIN)/python

# What is too long for a newcomer's first test, and `parity`: in one session, since each imports all tests for half a minute.
# `make sweep PART=2/5` takes every fifth.
PART ?= 1/1
sweep: $(VENV)/.sweep
	$(BIN)/python -m pytest -q $(PYTEST_WORKERS) -m "sweep or parity" --part $(PART)

# Every family against transformers and diffusers themselves, on torch.
parity: $(VENV)/.parity
	$(BIN)/python -m pytest -q $(PYTEST_WORKERS) -m parity

# What is measured and never asserted; step_speed.py and generation.py need the peers of the `bench` extra.
benchmarks: $(VENV)/.bench
	$(BIN)/python tests/benchmarks/import_time.py
	$(BIN)/python tests/benchmarks/step_overhead.py
	$(BIN)/python tests/benchmarks/collectives.py
	$(BIN)/python tests/benchmarks/plans.py
	$(BIN)/python tests/benchmarks/optimizers.py
	NPROC=16 $(BIN)/python tests/benchmarks/rounding.py
	$(BIN)/python tests/benchmarks/checkpoint.py
	$(BIN)/python -m redeqx launch --processes 2 tests/benchmarks/checkpoint.py
	$(BIN)/python tests/benchmarks/soak.py
	$(BIN)/python tests/benchmarks/step_speed.py
	$(BIN)/python tests/benchmarks/draws.py
	NPROC=16 $(BIN)/python tests/benchmarks/packing.py
	$(BIN)/python tests/benchmarks/generation.py
	NPROC=16 $(BIN)/python tests/benchmarks/speculative.py

# The documentation into build/docs; every link is checked. The tutorials and the figures, which take nearly all of the time, are
# made side by side, and again only where they or the library have changed.
docs: $(VENV)/.docs
	$(MAKE) --no-print-directory -j 4 $(FIGURES) $(TUTORIALS)
	$(BIN)/mkdocs build --quiet --config-file docs/mkdocs.yml

# A tutorial runs as a notebook.
$(TUTORIALS): %.md: %.py docs/tutorials.py $(LIBRARY) | $(VENV)/.docs
	$(BIN)/python docs/tutorials.py $<

$(FIGURES): docs/figures.py $(LIBRARY) | $(VENV)/.docs
	$(BIN)/python docs/figures.py
	touch $@

docs-serve: docs
	$(BIN)/mkdocs serve --config-file docs/mkdocs.yml

# The paper's Table 1 from the compilers of TPUs and GPUs that are not here: 5 GB to install.
table1: $(VENV)/.topology
	$(BIN)/python tests/benchmarks/table1.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable ".[examples]"
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable ".[dev,examples,hf,tensorboard,topology-tpu]"
	touch $@

# The trackers, whose packages are large.
$(VENV)/.sweep: $(VENV)/.parity
	$(BIN)/python -m pip install --quiet --editable ".[wandb,mlflow,trackio]"
	touch $@

$(VENV)/.topology: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable ".[topology-tpu,topology-gpu]"
	touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	touch $@

# torch first and alone, pinned to the digit: a looser requirement draws gigabytes of CUDA.
$(VENV)/.bench: $(VENV)/.test
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable ".[bench]"
	touch $@

$(VENV)/.parity: $(VENV)/.test
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable ".[parity]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
