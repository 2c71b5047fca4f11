# Every command sets up what it needs in .venv. PYTHON names the interpreter that .venv is made with.

PYTHON ?= python3
TORCH_INDEX ?=
SECONDS_FOR_TESTS ?= 1500
PYTEST_ARGS ?=
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.run-installed
DEV := $(VENV)/.dev-installed
# Errors only: what pip warns of is about the machine's own settings.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
FROM := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test lint protos protos-check dashboards bench-overhead \
	bench-compressors bench-claims bench-decisions bench-efficiency bench-modes bench-netlab \
	bench-network-model bench-skip bench-solver bench-quick bench chaos report clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; \
		do printf 'make %-19s %s\n' "$$name" "$$text"; done

install: $(DEV)  ## make .venv with everything for development, pinned

demo: $(RUN)  ## train a small job on an emulated slow link and watch plans change
	@$(BIN)/python -m gradpilot.demo

# Two workers: tests/conftest.py says what may run beside what.
# The outer limit ends a test that blocks where pytest-timeout cannot interrupt it.
test: $(DEV)  ## run all tests; PYTEST_ARGS adds arguments
	@timeout --kill-after=30 $(SECONDS_FOR_TESTS) $(BIN)/python -m pytest --numprocesses=2 --dist=loadscope $(PYTEST_ARGS)

lint: $(DEV)  ## check style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases bench examples tests
	$(BIN)/lint-imports

protos:  ## generate protos/v1/*_pb2* from the .proto files
	protos/generate.sh

protos-check:  ## fail if the generated code is out of date
	protos/generate.sh --check

dashboards: $(DEV)  ## generate dashboard and PrometheusRule after a change of queries or rules
	$(BIN)/python tests/deploy/tools.py
	.venv-deploy/bin/python deploy/grafana/dashboard.py
	$(BIN)/python deploy/kubernetes/monitoring/prometheusrule.py

bench-overhead: $(DEV)  ## measure what the agent costs a step; writes bench/results/overhead.json
	$(BIN)/python -m bench.overhead

bench-compressors: $(DEV)  ## time all compressors; writes bench/results/compressors.json
	$(BIN)/python -m bench.compressors

bench-claims: $(DEV)  ## try the claims of the papers; writes bench/results/claims.json
	$(BIN)/python -m bench.claims

bench-decisions: $(DEV)  ## simulate all policies (16 minutes); writes bench/results/decisions.json
	$(BIN)/python -m bench.decisions --traces 8

bench-efficiency: $(DEV)  ## train to see what compression costs in steps; writes bench/results/efficiency.json
	$(BIN)/python -m bench.efficiency

chaos: $(DEV)  ## disturb a job 200 times at random; SEED=0; writes bench/results/chaos.json
	$(BIN)/python -m bench.chaos --seed $(or $(SEED),0)

bench-modes: $(DEV)  ## what managing costs in every mode of DDP (as root, 6 minutes); writes bench/results/modes.json
	$(BIN)/python -m bench.modes

bench-netlab: $(DEV)  ## measure emulated links (as root); writes bench/results/netlab.json
	$(BIN)/python -m bench.netlab.measure

bench-skip: $(DEV)  ## what skipping saves and costs (as root, 9 minutes); writes bench/results/skip.json
	$(BIN)/python -m bench.skip

bench-network-model: $(DEV)  ## how well the cost model foretells (as root, 7 minutes); writes bench/results/network_model.json
	$(BIN)/python -m bench.network_model

bench-solver: $(DEV)  ## measure how long a decision takes; writes bench/results/solver.json
	$(BIN)/python -m bench.solver

bench-quick: $(DEV)  ## a small part of the benchmarks with all checks (as root, 5 minutes); into build/quick
	$(BIN)/python -m bench.quick $(BENCH_ARGS)

bench: $(DEV)  ## time to accuracy, all methods and networks (as root, hours; can be resumed)
	$(BIN)/python -m bench.tta --matrix required --result bench/results/tta.json

report: $(DEV)  ## put the figures of bench/results into the documents
	$(BIN)/python -m bench.report

clean:  ## remove environments, caches and build outputs
	rm -rf .venv .venv-deploy .venv-protos .venv-protos-runtimes build dist *.egg-info demo-report
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- environments ----------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
		sys.exit(sys.version_info < (3, 11) and f"needs Python 3.11 or newer, {sys.executable} is {v}; name another: make PYTHON=python3.11 ...")'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# A stamp is touched last, so an interrupted installation is taken up again.
$(RUN): requirements/torch.txt requirements/run.txt pyproject.toml | $(BIN)/python
	@echo 'installing into $(VENV); the first time takes a minute or two' >&2
	@$(PIP) install $(FROM) --requirement requirements/torch.txt
	@$(PIP) install --requirement requirements/run.txt
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(DEV): requirements/dev.txt $(RUN)
	@$(PIP) install --requirement requirements/dev.txt
	@$(PIP) check
	@touch $@
