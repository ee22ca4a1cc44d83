# Two commands matter: `make run` and `make test`. Both set up everything they need.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := .stamps
LOCK := requirements.lock
PIP := $(BIN)/pip --disable-pip-version-check --no-input -q

HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=

PROTOS := $(wildcard protos/glm/v1/*.proto)
KERNELS := $(wildcard services/worker/ops/csrc/*.[ch]) services/worker/ops/build.py

.PHONY: help setup setup-dev protos kernels lint format test test-e2e soak test-npu-contract run bench eval check clean

help: ## Show the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'
	@echo "  Variables: HOST=$(HOST) PORT=$(PORT) ARGS='' (more flags for run), PYTHON=$(PYTHON)"

$(STAMPS)/venv: $(LOCK) pyproject.toml
	@mkdir -p $(STAMPS)
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing glm-mesh and what it runs on (first time: a few minutes)"
	@$(PIP) install -c $(LOCK) setuptools grpcio-tools
	@$(PIP) install -c $(LOCK) --no-build-isolation -e '.[worker]'
	@$(BIN)/python -P tools/check_install.py
	@touch $@

$(STAMPS)/dev: $(STAMPS)/venv
	@echo "installing the tools of tests and lint"
	@$(PIP) install -c $(LOCK) --no-build-isolation -e '.[worker,dev]'
	@touch $@

$(STAMPS)/protos: $(PROTOS) $(STAMPS)/venv
	@$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)
	@touch $@

$(STAMPS)/kernels: $(KERNELS) $(STAMPS)/venv
	@$(BIN)/python -P -m services.worker.ops.build
	@touch $@

setup: $(STAMPS)/venv $(STAMPS)/protos $(STAMPS)/kernels ## Make the environment that `run` needs

setup-dev: setup $(STAMPS)/dev ## Make the environment that `test`, `lint` and `bench` need

protos: $(STAMPS)/protos ## Compile protos/glm/v1

kernels: $(STAMPS)/kernels ## Compile the CPU kernels

run: setup ## Serve glm-nano at http://HOST:PORT (Ctrl-C ends it)
	@exec $(BIN)/glm-mesh up --host $(HOST) --port $(PORT) $(ARGS)

lint: setup-dev ## Style, types, import doors, protos, Dockerfile
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python -P tools/proto_breaking.py
	$(BIN)/hadolint docker/Dockerfile

format: setup-dev ## Rewrite the code in the house style
	$(BIN)/ruff check --fix -q .
	$(BIN)/ruff format -q .

test: setup-dev ## All tests, the whole mesh included
	$(BIN)/pytest -q $(ARGS)

test-e2e: setup-dev ## Only the tests that start the whole mesh
	$(BIN)/pytest -q -m "e2e and not soak" $(ARGS)

soak: setup-dev ## Long runs through the whole mesh: every layout, lost ranks, ten thousand cancels, bad clients
	$(BIN)/pytest -v -m "soak or hypothesis" --hypothesis-profile search --timeout 3600 $(ARGS)

test-npu-contract: ## Operators and decoder steps against the real torch_npu wheel (no NPU needed)
	@$(PYTHON) -m tools.npu_contract $(ARGS)

bench: setup-dev ## One JSON line per claim (PEER=port races a peer that already runs)
	@$(BIN)/python -m benchmarks $(if $(PEER),--peer $(PEER)) $(ARGS)

eval: setup-dev ## Score glm-nano per skill through the mesh, on prompts it has not seen
	@$(BIN)/python -m tools.eval_mesh $(ARGS)

check: lint test test-npu-contract ## What CI runs

clean: ## Remove everything that was built
	rm -rf $(VENV) $(STAMPS) .npu-contract build *.egg-info protos/glm/v1/*_pb2*.py* services/worker/ops/_native
