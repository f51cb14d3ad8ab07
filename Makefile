# One command a chore; .ci/run runs the same words. Each needs Python >= 3.10 and Java >= 17, and nothing else.
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
BIN := .venv/bin
# Python keeps the bytecode of src and tests, which every process of the tests and of the demo would compile again.
unexport PYTHONDONTWRITEBYTECODE
QUICK_WORKERS ?= 3
TEST = tests/spark tests/estimators tests/unit tests/fuzz tests/flyte/local
REST = tests/faults tests/frameworks tests/compat tests/servers tests/pages tests/gpu
# What takes minutes: each of these before a release, and when what it tests changes.
NIGHTLY = tests/chaos tests/kubernetes tests/faults/test_dynamic_allocation.py tests/faults/test_elastic.py \
  tests/faults/test_engine_process.py tests/faults/test_upstreams.py tests/frameworks/test_engines.py \
  tests/frameworks/test_explain.py tests/pages/test_benchmarks.py tests/pages/test_cluster.py tests/pages/test_examples.py \
  tests/pages/test_failures.py tests/pages/test_new.py tests/pages/test_rossmann.py tests/servers/test_pretended_gpus.py \
  tests/servers/test_yarn.py tests/servers/test_yarn_faults.py
CHAOS_SEED ?=
ORACLE_ROUNDS ?= 200
CHAOS_ROUNDS ?= $(if $(CHAOS_SEED),1,20)

.PHONY: help setup demo quick test frameworks compat pages flyte rest nightly managers kubernetes test-all horovod trackers oldest matrix faults oracle chaos fuzz audit lint format types imports docs bench clean constraints examples keywords wheel release-check

help:            ## this list
	@sed -n 's/^\([a-z-]*\): .*## /  make \1	/p' Makefile | expand -t 22

setup:           ## .venv with the pinned dependencies (every other target does it first)
	@scripts/setup.sh

demo:            ## train on the bike-sharing data with two ranks, then score a batch and a stream
	@scripts/setup.sh demo
	@$(BIN)/tritium demo

quick: setup     ## 1 to 2 minutes on 2 cores: lint, types, imports, and the tests that start neither a JVM nor ranks
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q -n $(QUICK_WORKERS) --slowest-test=2 -m "not processes" tests/unit

# Tests run in WORKERS=3 processes side by side, as much of what is tested is waiting.
test: setup      ## every promise once: data, launch, estimators, prediction, with and without Spark
	@$(BIN)/python -m pytest -n $(or $(WORKERS),3) $(TEST)

frameworks: setup ## each framework's programs, on its own and under launch
	@$(BIN)/python -m pytest -n $(or $(WORKERS),3) tests/frameworks

compat: setup    ## old code: Horovod, Petastorm, TensorFlowOnSpark, runners
	@$(BIN)/python -m pytest -n $(or $(WORKERS),3) tests/compat

pages: setup     ## what is written runs: docs, examples, the demo, each benchmark small
	@$(BIN)/python -m pytest -n $(or $(WORKERS),3) tests/pages

flyte: setup     ## workflows with Flyte: local runs, and the commands of pods, with faults and Delta
	@scripts/openmpi.sh >/dev/null
	@$(BIN)/python -m pytest -n $(or $(WORKERS),2) tests/flyte

rest: setup      ## what `make test` leaves out: faults, frameworks, compat, servers, pages; without what is nightly
	@$(BIN)/python -m pytest -n $(or $(WORKERS),3) $(REST) $(NIGHTLY:%=--ignore=%)

nightly: setup   ## what takes minutes: chaos, executors that come and go, YARN, Kubernetes where it was made, benchmarks and examples
	@$(BIN)/python -m pytest -n $(or $(WORKERS),3) $(NIGHTLY)
	@$(MAKE) managers

managers: setup  ## the contract on a real YARN of two hosts (Maven fetches it the first time), and on Kubernetes where it was made
	@TRITIUM_KINDS="yarn kubernetes" $(BIN)/python -m pytest -q -rs -k "yarn or kubernetes" tests/spark

test-all: test rest nightly audit ## every test, and known vulnerabilities of the dependencies

kubernetes: setup ## a real Kubernetes of two nodes, as root: Go compiles it the first time (11 minutes of a core); then its tests
	@scripts/kubernetes.sh >/dev/null
	@$(BIN)/python -m pytest -q -rs tests/kubernetes
	@TRITIUM_KINDS=kubernetes $(BIN)/python -m pytest -q -rs -k kubernetes tests/spark
	@TRITIUM_KINDS=kubernetes-connect $(BIN)/python -m pytest -q -rs tests/spark/test_contract.py

horovod: setup   ## the tests of framework="horovod", with the real one: compiled into .envs/ the first time (5 minutes)
	@python=$$(scripts/horovod.sh) && $$python -m pytest -q -k horovod tests/frameworks tests/unit/frameworks tests/pages/test_docs.py

trackers: setup  ## the tests with the real wandb and trackio, which are put into .envs/ the first time (a minute)
	@PYTHONPATH=$$(scripts/trackers.sh) $(BIN)/python -m pytest -q tests/servers/test_wandb_trackio.py

oldest: setup    ## the core suite in short on the oldest Spark, whose environment is made in .envs/ the first time
	@$(BIN)/python scripts/matrix.py --short

matrix: setup    ## the core suite on each Spark and Python, into docs/clusters/platforms.md; MATRIX="4.0.5 4.2.1:3.13": these
	@$(BIN)/python scripts/matrix.py $(MATRIX)

faults: setup    ## the faults alone: 20 rounds, with other seeds, where the moment matters, and 3 of the others
	@mkdir -p artifacts && rm -f artifacts/faults.jsonl
	@TRITIUM_FAULT_FIGURES=$(CURDIR)/artifacts/faults.jsonl TRITIUM_FAULT_ROUNDS=20 TRITIUM_FAULT_REPEATS=3 \
	  TRITIUM_FAULT_LAUNCHES=100 TRITIUM_FAULT_KILLS=50 $(BIN)/python -m pytest -n $(or $(WORKERS),2) tests/faults tests/servers/test_stream_killed.py

oracle: setup    ## ORACLE_ROUNDS=200 random trainings of LightGBM and splits of rows, compared with what they should be
	@TRITIUM_ORACLE_ROUNDS=$(ORACLE_ROUNDS) $(BIN)/python -m pytest -q -n $(or $(WORKERS),2) \
	  tests/unit/ml/lightgbm/test_lightgbm_oracle.py tests/unit/ml/test_validation.py tests/spark/test_validation_split.py

chaos: setup     ## CHAOS_ROUNDS=20 trainings hit by random faults; CHAOS_SEED=1234 repeats one, and prints what it does
	@mkdir -p artifacts && rm -f artifacts/chaos.jsonl
	@CHAOS_FIGURES=$(CURDIR)/artifacts/chaos.jsonl CHAOS_ROUNDS=$(CHAOS_ROUNDS) CHAOS_SEED=$${CHAOS_SEED:-$$(date +%s)} \
	  $(BIN)/python -m pytest $(if $(filter 1,$(CHAOS_ROUNDS)),-s,-n $(or $(WORKERS),2)) tests/chaos

fuzz: setup      ## damaged bytes into each reader (wire, checkpoint, spool, model) for SECONDS=600; READER=wire SEED=1234 repeats one case
	@FUZZ_SECONDS=$(if $(SEED),$(SECONDS),$(or $(SECONDS),600)) FUZZ_SEED=$${SEED:-$$(date +%s)000} \
	  $(BIN)/python -m pytest -q -s -k "$(READER)" tests/fuzz

audit: setup     ## known vulnerabilities of the pinned dependencies, by pip-audit; skipped, with the reason, where nobody answers
	@scripts/audit.sh

lint: setup      ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: setup    ## ruff: mend what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: setup     ## mypy --strict over src and packages
	@$(BIN)/mypy

imports: setup   ## imports point down, and `import tritium` is light
	@$(BIN)/python -m pytest -q tests/unit/test_imports.py

docs: setup      ## the pages, built strictly into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

examples: setup  ## the gallery's examples, whole; their figures and pictures go into docs/gallery
	@$(BIN)/python scripts/examples.py

bench: setup     ## the benchmarks
	@$(BIN)/python benchmarks

keywords: setup  ## write the settings' typed keywords and their page again from the dataclasses
	@$(BIN)/python scripts/keywords.py
	@$(BIN)/python scripts/settings_page.py
	@$(BIN)/ruff check -q --fix $$(git ls-files "src/*.pyi") && $(BIN)/ruff format -q $$(git ls-files "src/*.pyi")

constraints: setup ## write constraints.txt again for every Python and platform, from pyproject.toml
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.10 --extra dev --no-annotate --no-header \
	  --no-emit-index-url --no-emit-find-links pyproject.toml --output-file constraints.txt

wheel: setup     ## wheels and source archives of all packages, in dist/
	@rm -rf dist
	@for package in . packages/*; do $(BIN)/uv build --quiet --out-dir dist $$package; done; ls dist

release-check: wheel ## wheels and source archives, installed and used in fresh environments of each Python
	@scripts/release_check.sh

clean:           ## what builds and runs left behind; .venv stays
	@rm -rf build dist site artifacts spark-warehouse metastore_db derby.log tritium-runs
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis src/tritium.egg-info packages/*/build packages/*/src/*.egg-info
	@rm -f .venv/tests-classes*
	@find src packages tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
