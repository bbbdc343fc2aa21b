# Quire. `make up` installs everything and serves; `make test` installs everything and tests.

PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
TESTS  ?= tests
# One more than the two cores that are reckoned with: many tests wait for a browser or a process.
WORKERS ?= 3
PYTEST  := QUIRE_TEST_REQUIRE_SERVICES=1 $(BIN)/python -m pytest
# File by file, in the order of folders: a worker starts what a folder shares (a browser, a product) once.
PARALLEL := --dist loadfile --no-loadscope-reorder
# Folders with quick unit tests.
UNIT    := $(addprefix tests/,console deploy docs history inference platform engine/contract engine/sampling engine/text)
# What `make coverage` runs, except browsers.
COVERED := $(UNIT) $(addprefix tests/,engine kernels features)
CLIENTS := tests/clients
# The same releases everywhere; pyproject.toml holds the ranges they were chosen from.
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet --no-input

.PHONY: up install install-test environments check run-check test run-tests test-slow coverage sanitize lint lint-style
.PHONY: lint-types audit format bench clean dev docs help

help:
	@echo "make up [ARGS=...]   install, then serve the demo model (ARGS go to 'manage.py up')"
	@echo "make dev             beside 'make up': a gateway at port 8001 that follows changes of files"
	@echo "make check           lint, types and quick unit tests: no Redis, no processes"
	@echo "make test            install, then lint and run all tests but the slow ones"
	@echo "make test-slow       the slow tests, and those in quarantine"
	@echo "make coverage        which lines of platform/, inference/ and engine/ the tests run (htmlcov/)"
	@echo "make sanitize        the CPU kernels' tests, watched for stray memory accesses and races"
	@echo "make lint            ruff (with bandit's rules), mypy, import contracts, what audit found"
	@echo "make audit           known vulnerabilities of what is pinned, where the data can be reached"
	@echo "make docs            write the generated pages of docs/, and kernels/cpu/abi.py from its header"
	@echo "make bench [ARGS=..] measure latency and throughput here"
	@echo "make clean           remove the virtual environment and caches (data in .quire/ stays)"

up: $(VENV)/.installed
	$(BIN)/python manage.py up $(ARGS)

install: $(VENV)/.installed

# Types are checked while the tests run. Where either finds something both go on to the end, and the command fails.
check: $(VENV)/.installed-test lint-style
	@$(MAKE) --no-print-directory -k -j 2 lint-types run-check

# Half of their time they wait.
run-check:
	$(PYTEST) -n 4 $(PARALLEL) -m "not slow and not gpu and not flaky and not service and not system" $(UNIT) $(ARGS)

test: install-test lint-style
	@$(MAKE) --no-print-directory -k -j 2 lint-types run-tests

run-tests:
	$(PYTEST) -n $(WORKERS) $(PARALLEL) $(TESTS) $(ARGS)

# Side by side: each leaves a processor idle for half of its time. The system's packages come first, for
# only one may install those.
install-test:
	deploy/system-packages.sh test
	@$(MAKE) --no-print-directory -j 2 environments

environments: $(VENV)/.installed-test $(VENV)/.installed-clients $(VENV)/.installed-helm
	@:

test-slow: $(VENV)/.installed-test $(VENV)/.installed-more-clients
	deploy/system-packages.sh test
	$(BIN)/python -m pytest -m "slow or flaky" $(TESTS) $(ARGS)

coverage: $(VENV)/.installed-test
	$(PYTEST) -n $(WORKERS) $(PARALLEL) --cov=platform --cov=inference --cov=engine --cov-report= \
	  --ignore=tests/console/browser $(COVERED) $(ARGS)
	$(BIN)/coverage html --skip-covered -q
	@for package in platform inference engine; do \
	  echo "$$package: $$($(BIN)/coverage report --include="$$package/*" --format=total) %"; done

sanitize: $(VENV)/.installed-test
	$(BIN)/python -m tests.kernels.sanitize address
	$(BIN)/python -m tests.kernels.sanitize thread

lint: lint-style lint-types

lint-style: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python deploy/audit.py --kept
	$(BIN)/python -m tests.quarantine
	$(BIN)/python -m tools.names

lint-types: $(VENV)/.installed-test
	$(BIN)/mypy
	PYTHONPATH=.:platform $(BIN)/lint-imports

audit: $(VENV)/.installed-test
	$(BIN)/python deploy/audit.py

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-test
	$(BIN)/python -m tools.abi
	$(BIN)/python -m tools.docs
	$(BIN)/python manage.py openapi -o docs/openapi.json

# A gateway that starts anew when a file changes, beside what a running `manage.py up` has: its replicas,
# workers, Redis and database. Another instance's: QUIRE_DATA_DIR=... make dev.
dev: $(VENV)/.installed
	QUIRE_DEBUG=1 $(BIN)/python manage.py runserver $(or $(ARGS),127.0.0.1:8001)

bench: $(VENV)/.installed
	$(BIN)/python manage.py bench $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage htmlcov

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: with the constraint in force nothing asks for another build of it later.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Quire into $(VENV)/ (a few minutes the first time) ..."
	deploy/system-packages.sh run
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt $$($(BIN)/python deploy/requirements.py postgres)
	$(PIP) install --no-deps --editable .  # the command `quire`
	@touch $@

# Client libraries, each release as it was tested: Python's in an environment of their own, node's
# beside the programs that use them.
$(VENV)/.installed-clients: pyproject.toml $(CLIENTS)/constraints.txt $(CLIENTS)/agents-constraints.txt \
  $(CLIENTS)/node/package-lock.json | $(BIN)/python
	deploy/system-packages.sh test
	$(PYTHON) -m venv $(VENV)/clients
	$(VENV)/clients/bin/python -m pip --disable-pip-version-check --quiet --no-input install \
	  -c $(CLIENTS)/constraints.txt $$($(BIN)/python deploy/requirements.py --alone clients)
	$(PYTHON) -m venv $(VENV)/agents
	$(VENV)/agents/bin/python -m pip --disable-pip-version-check --quiet --no-input install \
	  -c $(CLIENTS)/agents-constraints.txt $$($(BIN)/python deploy/requirements.py --alone agents)
	npm ci --prefix $(CLIENTS)/node --no-audit --no-fund --silent
	@touch $@

# Clients that are large to install, for the slow tests alone.
$(VENV)/.installed-more-clients: pyproject.toml $(CLIENTS)/more-constraints.txt \
  $(CLIENTS)/proxy-constraints.txt | $(BIN)/python
	$(PYTHON) -m venv $(VENV)/more-clients
	$(VENV)/more-clients/bin/python -m pip --disable-pip-version-check --quiet --no-input install \
	  -c $(CLIENTS)/more-constraints.txt $$($(BIN)/python deploy/requirements.py --alone more-clients)
	$(PYTHON) -m venv $(VENV)/proxy
	$(VENV)/proxy/bin/python -m pip --disable-pip-version-check --quiet --no-input install \
	  -c $(CLIENTS)/proxy-constraints.txt $$($(BIN)/python deploy/requirements.py --alone proxy)
	@touch $@

$(VENV)/.installed-helm: tests/deploy/helm.py | $(BIN)/python
	@$(BIN)/python -m tests.deploy.helm || echo "helm can't be fetched: the chart's tests are skipped." >&2
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install -c constraints.txt $$($(BIN)/python deploy/requirements.py test demo gpu)
	@touch $@
