# make demo    trains a small GPT on two processes (or on every GPU)
# make test    the test suite             make lint    ruff and mypy
# make test-all  the same, with tests marked `extensive` and all 200 of the random modules, compiled and not
# make build   installs and compiles      make clean   removes what was built, and $(VENV)
# make test-gpu  only what needs GPUs, $(GPU_RANKS) ranks for most tests; with fewer GPUs than ranks, ranks share them
# make sanitize  the C++ runtime's own tests under ASan, UBSan and TSan, and random calls of its operators (minutes)
# make types   mypy alone                 make coverage  the test suite, and which lines of each file it reached
# make docs    the documentation, to build/docs; a warning of Sphinx is an error
# make wheel   a wheel for the installed torch, to dist/
# make wheels  a wheel for every torch in $(TORCHES), for CPUs and CUDA, to dist/
# make test-newest  the test suite with the newest torch, $(NEWEST), in an environment of its own, .venv-newest
#
# `make test PYTEST_ARGS='-m "not slow" -k demo'` chooses tests. MAX_JOBS limits the compilers at work.
# By default everything lives in a virtual environment, $(VENV). With `VENV=` (empty) the Python that is there is used as
# it is and nothing is downloaded: `make test VENV= PYTHON=python3.12`.

VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
NEWEST ?= torch==2.15.0
TORCHES ?= 2.11 2.12 2.13 2.14 2.15
CUDA_HEADERS ?= nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl nvidia-nccl-cu13

PY := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
SOURCES := setup.py pyproject.toml $(wildcard csrc/*/*)
STAMP := build/stamp
# An extension fits one Python and one torch: the stamp says which, and another one makes it out of date.
IDENTITY = $(PY) -c 'import sys, importlib.metadata as m; print(sys.prefix, sys.version_info[:2], m.version("torch"))'
ifneq ($(shell $(IDENTITY) 2>/dev/null),$(shell cat $(STAMP) 2>/dev/null))
.PHONY: $(STAMP)
endif

.PHONY: demo test test-all test-gpu test-newest coverage lint types sanitize docs wheel wheels build clean
.DEFAULT_GOAL := build

build: $(STAMP)

demo: build
	$(PY) examples/demo_gpt.py

TWO_AT_A_TIME = $$($(PY) -c 'import xdist' 2>/dev/null && printf %s '-n2 --dist loadgroup')

# Where the environment says that Python writes no bytecode, every rank would compile all sources anew.
test: build
	$(PY) -m compileall -q lightning_deepcompile examples tests
	$(PY) -m pytest -q $(TWO_AT_A_TIME) $(PYTEST_ARGS)

test-all: export TEST_ALL = 1
test-all: test

export GPU_RANKS ?= 2

test-gpu: build
	$(PY) -m pytest -q -m gpu -n $$($(PY) -c 'import os; print(max(1, min(10, (os.cpu_count() or 2) // 2)))') $(PYTEST_ARGS)

test-newest:
	$(MAKE) test VENV=.venv-newest TORCH='$(NEWEST)'

# Lines count that ranks run, too: they are processes that end without their exit handlers.
coverage: build $(if $(VENV),$(VENV)/.coverage)
	$(PY) -m pytest -q $(TWO_AT_A_TIME) --cov --cov-report term $(PYTEST_ARGS)

sanitize: build
	$(PY) tests/cpp/sanitize.py

# Without network there may be no mypy: that fails nothing.
CHECK_TYPES = @if $(PY) -c 'import mypy' 2>/dev/null; then $(PY) -m mypy; else echo "no mypy: types are not checked"; fi

lint: $(if $(VENV),$(VENV)/.tools)
	$(PY) -m ruff check --output-format concise .
	$(PY) -m ruff format --check .
	$(CHECK_TYPES)

types: $(if $(VENV),$(VENV)/.tools)
	$(CHECK_TYPES)

# The reference imports the package. Without network there may be no Sphinx: that fails nothing.
docs: build $(if $(VENV),$(VENV)/.docs)
	@if $(PY) -c 'import furo, myst_parser, sphinx' 2>/dev/null; then \
	$(PY) -m sphinx --fail-on-warning --keep-going -q -b html docs build/docs && echo build/docs/index.html; \
	else echo "no furo, myst_parser or sphinx: the documentation is not built"; fi

wheel: $(if $(VENV),$(VENV)/.tools)
	$(PY) -m pip wheel -q --no-build-isolation --no-deps -w dist .

# Each torch has an environment of its own in build/, and is needed to compile alone.
wheels:
	rm -rf build/prebuilt
	set -e; for torch in $(TORCHES); do python=build/env-$$torch/bin/python; \
	test -x $$python || $(PYTHON) -m venv build/env-$$torch; \
	$$python -m pip install -q "torch==$$torch.*" "setuptools>=77" wheel pybind11 ninja numpy $(CUDA_HEADERS); \
	$$python setup.py -q build_variant; done; \
	LDC_PREBUILT=build/prebuilt $$python -m pip wheel -q --no-build-isolation --no-deps -w dist .

ifeq ($(VENV),)
# Not installed: Python finds the package here, and its entry points through the metadata folder that egg_info writes.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

$(STAMP): $(SOURCES)
	$(PY) setup.py -q egg_info build_ext --inplace --force
	mkdir -p $(@D) && $(IDENTITY) > $@
else
$(VENV)/.tools:
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q $(TORCH)
	$(PY) -m pip install -q "setuptools>=77" wheel pybind11 ninja ruff mypy
	$(PY) -m pip install -q "lightning>=2.6,<2.7" numpy # which mypy reads, as it does torch
	touch $@

$(VENV)/.coverage: $(VENV)/.tools
	$(PY) -m pip install -q pytest-cov
	touch $@

EXTRA = $$($(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(1)"])')

$(VENV)/.docs: $(VENV)/.tools pyproject.toml
	$(PY) -m pip install -q $(call EXTRA,docs)
	touch $@

# Installing compiles from scratch in a temporary folder; later changes of C++ alone are compiled where they are.
$(STAMP): $(VENV)/.tools $(SOURCES)
	if [ $(VENV)/.installed -nt pyproject.toml ]; then $(PY) setup.py -q build_ext --inplace --force; \
	else $(PY) -m pip install -q --no-build-isolation -e '.[test]' && touch $(VENV)/.installed; fi
	mkdir -p $(@D) && $(IDENTITY) > $@
endif

clean:
	rm -rf build dist *.egg-info lightning_deepcompile/_C*.so .pytest_cache .ruff_cache .mypy_cache .coverage* .venv-newest $(VENV)
	find lightning_deepcompile examples tests -name __pycache__ -prune -exec rm -rf {} +
