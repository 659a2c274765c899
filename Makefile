# What can be done here: `make help`. Every target sets up what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_FLAGS := --quiet --disable-pip-version-check --constraint constraints.txt
export PYTHONDONTWRITEBYTECODE := 1

.PHONY: help run test simulate chaos determinism schemathesis ledger check services peers format protos clean

help: ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

run: $(VENV)/.run ## start Tandem on this machine with the built-in model
	@$(BIN)/tandem up $(ARGS)

test: $(VENV)/.dev ## run the tests (ARGS="-k parity" for some of them)
	$(BIN)/python -m pytest $(ARGS)

simulate: $(VENV)/.dev ## play KV handles under faults for 100,000 steps (ARGS="--seed 7" for a certain run)
	PYTHONPATH=.:protos/gen $(BIN)/python -m tests.kv_transfer_svc.simulation $(ARGS)

chaos: $(VENV)/.dev ## kill, stop and restart a fleet's processes for 15 minutes (ARGS="--minutes 4 --seed 7")
	PYTHONPATH=.:protos/gen $(BIN)/python -m tests.chaos $(ARGS)

determinism: $(VENV)/.dev ## answer 1,000 requests in every way and compare all bits (ARGS="--seed 7" for a certain run)
	PYTHONPATH=.:protos/gen $(BIN)/python -m tests.tandem_engine.determinism $(ARGS)

schemathesis: $(VENV)/.dev ## send 5,000 requests made from the OpenAPI document (ARGS="--cases 300 --seed 7")
	PYTHONPATH=.:protos/gen $(BIN)/python -m tests.control_plane.api.generated_requests $(ARGS)

ledger: $(VENV)/.dev ## 2,000 requests with cancellations and a killed worker: do the ledger's sums hold?
	TANDEM_LEDGER_REQUESTS=2000 $(BIN)/python -m pytest tests/system/test_ledger.py $(ARGS)

check: $(VENV)/.dev ## lint, types, import contracts, protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=protos/gen $(BIN)/lint-imports --no-logo
	cd protos && ../$(BIN)/buf lint
	$(BIN)/python protos/compile.py --check

services: ## install what some tests need: a C compiler and PostgreSQL (apt), workerd and other clients (npm)
	@infra/services.sh

peers: ## install the engines that benchmarks measure ours beside (ARGS="openvino" for one of them)
	$(PYTHON) -m benchmarks.peers.install $(ARGS)

format: $(VENV)/.dev ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(VENV)/.dev ## generate Python from the .proto files
	$(BIN)/python protos/compile.py

clean: ## remove what was built
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache examples/worker/node_modules tests/clients/node_modules

# Two marks, so that a newcomer's `make run` does not wait for test tools.

$(VENV)/.run: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once; torch is most of it)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tandem needs Python 3.11 or newer; set PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install $(PIP_FLAGS) --editable '.[all]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "Adding the test tools"
	@$(BIN)/pip install $(PIP_FLAGS) --editable '.[dev]'
	@touch $@
