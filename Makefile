# `make help` lists the targets. Each target sets up what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_FLAGS := --quiet --disable-pip-version-check --constraint constraints.txt
# Bytecode is kept in __pycache__: else each process compiles what it imports of the tree, 0.2 to 0.5 s at every start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test wheels images manifests install-test wheel-test container-test test-versions simulate chaos gateways alerts determinism schemathesis tools fuzz hostile gpu-kit vllm vllm-next upgrade-test audit ledger check docs services peers format protos clean

# The diagrams of the site. Pinned by digest; without npm or a network the site shows a diagram as its text.
MERMAID := 11.6.0
MERMAID_SHA256 := 3a93016a73dc82ba890d919f9bbb176f3da9d98341650c0b517f2595cc68fef8

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

run: $(VENV)/.run ## start Tandem on this machine with the built-in model
	@$(BIN)/tandem up $(ARGS)

test: $(VENV)/.dev ## run the tests (ARGS="-k parity" for some of them)
	$(BIN)/python -m pytest $(ARGS)

wheels: $(VENV)/.dev ## build the pure wheel, and wheels with compiled kernels, into dist (ARGS="--platform any")
	PYTHONPATH=.:protos/gen $(BIN)/python -m infra.wheels $(ARGS)

images: $(VENV)/.dev ## build the container images with docker, podman or buildah (ARGS="--target decode" for one)
	PYTHONPATH=.:protos/gen $(BIN)/python -m infra.images $(ARGS)

manifests: $(VENV)/.dev ## render and check the Kubernetes manifests (after make services)
	PYTHONPATH=.:protos/gen $(BIN)/python -m infra.kubernetes.validate

install-test: $(VENV)/.dev ## install in each way from nothing, with the seconds of each step (ARGS="wheel systemd")
	PYTHONPATH=.:protos/gen $(BIN)/python -m tests.install $(ARGS)

wheel-test: $(VENV)/.dev ## install each extra from the wheel into a fresh environment and start each service
	PYTHONPATH=. $(BIN)/python -m tests.packaging.extras $(ARGS)

container-test: $(VENV)/.dev ## do what README says in a Debian system of its own, as a user without rights (root, debootstrap, bubblewrap)
	PYTHONPATH=.:protos/gen $(BIN)/python -m tests.packaging.debian

test-versions: ## run the short suite with each of Python 3.11, 3.12 and 3.13 that is here (ARGS=3.13 for one)
	$(PYTHON) -m infra.python_versions $(ARGS)

simulate: $(VENV)/.dev ## run KV handles under faults for 100,000 steps (ARGS="--seed 7" repeats a run)
	PYTHONPATH=.:protos/gen $(BIN)/python -m tests.kv_transfer_svc.simulation $(ARGS)

chaos: $(VENV)/.dev ## kill, stop and restart a fleet's processes for 15 minutes (ARGS="--minutes 4 --seed 7")
	PYTHONPATH=.:protos/gen $(BIN)/python -m tests.chaos $(ARGS)

gateways: $(VENV)/.dev ## drain or kill one of two gateways every 20 s for 5 minutes, and check streams and ledger (ARGS="--postgres --minutes 2")
	PYTHONPATH=.:protos/gen $(BIN)/python -m tests.system.gateways_in_turn $(ARGS)

alerts: $(VENV)/.dev ## inject each alert's fault several times, with the seconds until the alert fires and ends
	PYTHONPATH=.:protos/gen $(BIN)/python -m tests.alerts $(ARGS)

determinism: $(VENV)/.dev ## answer 1,000 requests in every way and compare all bits (ARGS="--seed 7" repeats a run)
	PYTHONPATH=.:protos/gen $(BIN)/python -m tests.tandem_engine.determinism $(ARGS)

tools: $(VENV)/.dev ## let the field's own tools work against Tandem, each in an environment of its own (ARGS="guidellm litellm")
	PYTHONPATH=.:protos/gen $(BIN)/python -m tests.tools $(ARGS)

schemathesis: $(VENV)/.dev ## send 5,000 requests generated from the OpenAPI document (ARGS="--cases 300 --seed 7")
	PYTHONPATH=.:protos/gen $(BIN)/python -m tests.control_plane.api.generated_requests $(ARGS)

fuzz: $(VENV)/.fuzz ## fuzz each byte parser for 2 minutes (ARGS="--seconds 20"; ARGS=--long for 10 minutes each)
	PYTHONPATH=.:protos/gen $(BIN)/python -m tests.fuzz $(ARGS)

hostile: $(VENV)/.dev ## measure what hostile requests of one client do to the streams of others (ARGS=--quick)
	PYTHONPATH=.:protos/gen $(BIN)/python -m benchmarks.hostile $(ARGS)

gpu-kit: $(VENV)/.run ## try Tandem on this machine's NVIDIA card and write gpu_kit.json, under 10 minutes (ARGS="--quick --device cuda:1")
	PYTHONPATH=.:protos/gen $(BIN)/python -m benchmarks.gpu_kit $(ARGS)

vllm: $(VENV)/.dev build/vllm/.installed ## install vLLM for CPUs into build/vllm and run the tests that need it (ARGS="-k mixed")
	TANDEM_VLLM_PYTHON=$(CURDIR)/build/vllm/bin/python $(BIN)/python -m pytest $(VLLM_TESTS) $(ARGS)

vllm-next: $(VENV)/.dev ## try the newest vLLM for CPUs in an environment of its own, and print what broke (for a nightly job)
	PYTHONPATH=. $(BIN)/python -m infra.vllm.next_version $(ARGS)

upgrade-test: $(VENV)/.dev ## run the release before beside this one, in an environment of its own (some minutes; the first time longer)
	PYTHONPATH=.:protos/gen $(BIN)/python -m tests.upgrade $(ARGS)

audit: $(VENV)/.dev ## write the SBOM and look for known vulnerabilities: exit code 0 clean, 1 vulnerable, 2 not audited
	@PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH=. $(BIN)/python -m infra.audit $(ARGS)

ledger: $(VENV)/.dev ## check the ledger's sums after 2,000 requests with cancellations and a killed worker
	TANDEM_LEDGER_REQUESTS=2000 $(BIN)/python -m pytest tests/system/test_ledger.py $(ARGS)

check: $(VENV)/.dev ## lint, spelling, types, import contracts, protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	PYTHONPATH=protos/gen $(BIN)/lint-imports --no-logo
	cd protos && ../$(BIN)/buf lint
	$(BIN)/python protos/compile.py --check

docs: $(VENV)/.dev build/mermaid.min.js ## build the documentation site into build/site (ARGS=serve to look at it while you write)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build)

services: ## install what some tests need: a C compiler, PostgreSQL, bubblewrap (apt), workerd and other clients (npm), tools (pip)
	@PYTHON=$(PYTHON) infra/services.sh

peers: ## install the engines that the benchmarks compare with ours (ARGS="openvino" for one of them)
	$(PYTHON) -m benchmarks.peers.install $(ARGS)

format: $(VENV)/.dev ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(VENV)/.dev ## generate Python from the .proto files
	$(BIN)/python protos/compile.py

VLLM_TESTS := $(wildcard tests/tandem_vllm tests/tandem_worker/test_vllm_program.py tests/system/test_vllm*.py tests/system/test_mixed_engines.py)

build/vllm/.installed: infra/vllm/requirements-cpu.txt
	@echo "Setting up build/vllm (once; 3 GB)"
	@$(PYTHON) -m venv --clear build/vllm
	@build/vllm/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement $<
	@touch $@

build/mermaid.min.js:
	@mkdir -p build
	@if npm pack --silent mermaid@$(MERMAID) --pack-destination build >/dev/null; then \
		tar -xzf build/mermaid-$(MERMAID).tgz -C build --strip-components 2 package/dist/mermaid.min.js; \
		rm build/mermaid-$(MERMAID).tgz; \
		echo "$(MERMAID_SHA256)  $@" | sha256sum --check --quiet || { rm $@; exit 1; }; \
	else \
		echo "no Mermaid from npm: the site will show diagrams as text" >&2; \
	fi

clean: ## remove what was built
	find . -name __pycache__ -not -path './$(VENV)/*' -not -path '*/node_modules/*' -prune -exec rm -rf {} +
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache examples/worker/node_modules tests/clients/node_modules tests/web/node_modules

# Two marks: `make run` installs no test tools.

$(VENV)/.run: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tandem needs Python 3.11 or newer; set PYTHON=python3.11")'
	@$(PYTHON) -c 'import sys; sys.path.insert(0, "."); from tandem_machine.platforms import unsupported; sys.exit(unsupported() or 0)'
	@echo "Setting up $(VENV) (once; torch is most of it)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install $(PIP_FLAGS) --editable '.[all]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "Adding the test tools"
	@$(BIN)/pip install $(PIP_FLAGS) --editable '.[dev]'
	@touch $@

$(VENV)/.fuzz: $(VENV)/.dev
	@$(BIN)/pip install $(PIP_FLAGS) --editable '.[fuzz]'
	@touch $@
