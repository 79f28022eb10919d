# What there is to do; every target works from a fresh clone.
.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-processes test-laws test-units test-thorough test-thorough-histories test-thorough-units test-thorough-processes test-gpu test-deploy test-containers test-beside-containers test-cluster lock board observability metrics-page chart-files test-vllm test-vllm-plans test-vllm-engines check bench bench-vllm proto sim sweep clean
BIN := .venv/bin
PROTO := client/kvlease/proto
# Without bytecode every process compiles what it imports, and tests start hundreds: one of a daemon took twice the time.
unexport PYTHONDONTWRITEBYTECODE

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

setup: .venv/.ready ## make .venv, once

.venv/.ready: pyproject.toml constraints-cpu.txt requirements/dev.lock .ci/setup
	@bash .ci/setup
	@touch $@

demo: setup ## generate with a real model through the daemon, with faults, and check every token
	@$(BIN)/python examples/demo.py $(if $(DEVICE),--device $(DEVICE))

serve: setup ## run the daemon in the foreground on CPU memory
	@$(BIN)/kvleased serve

# What needs a venv, tools or a device of its own, or many minutes, has a target of its own.
ELSEWHERE := not gpu and not vllm and not deploy and not cluster
# Where tests start processes; to look at thousands of others for them takes each of pytest's workers ten seconds.
PROCESSES := tests/acceptance tests/gpu tests/integrations/transformers tests/laws/test_sweep.py
# Where they start none; what else there is belongs to other targets, and costs each of pytest's workers ten seconds to look at.
UNITS := tests/unit tests/golden
# Where laws are played; what else is thorough and starts none is a unit.
HISTORIES := tests/laws
# Fewer examples of each law than hypothesis makes where nobody says how many.
QUICK := --hypothesis-profile quick
test: setup ## run the tests: laws and units, and beside them those that start processes
	@$(MAKE) --no-print-directory -j 3 test-laws test-processes test-units

test-processes test-laws test-units: setup
# The threads of torch wait for one another in loops, and others have the processors; tiny models take a third less with one.
test-processes test-thorough-processes: export OMP_NUM_THREADS := 1
test-processes:
	@$(BIN)/python -m pytest -q -n 3 --dist worksteal -m "acceptance and not thorough and $(ELSEWHERE)" $(PROCESSES)
# Laws have a process of their own, because they copy it to try what is promised, and one that has read all units' tests is ten
# times as large. What starts processes waits for them half of its time, so it goes first where it does not.
test-laws:
	@nice -n 2 $(BIN)/python -m pytest -q -n 0 $(QUICK) -m "not acceptance and not thorough and $(ELSEWHERE)" tests/laws
test-units:
	@nice -n 2 $(BIN)/python -m pytest -q -n 2 --dist worksteal $(QUICK) -m "not acceptance and not thorough and $(ELSEWHERE)" $(UNITS)

test-thorough: setup ## play on what `make test` plays for seconds: a million commands, every system call, all tiers at once, rarer faults
	@$(MAKE) --no-print-directory -j 3 test-thorough-histories test-thorough-units test-thorough-processes

test-thorough-histories test-thorough-units test-thorough-processes: setup
test-thorough-histories:
	@nice -n 5 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "(thorough or hypothesis) and not acceptance and $(ELSEWHERE)" $(HISTORIES)
test-thorough-units:
	@nice -n 5 $(BIN)/python -m pytest -q -n 0 -m "(thorough or hypothesis) and not acceptance and $(ELSEWHERE)" tests/unit
test-thorough-processes:
	@$(BIN)/python -m pytest -q -n 0 -m "thorough and acceptance and $(ELSEWHERE)" $(PROCESSES)

test-gpu: setup ## run the tests of pools on a GPU on a GPU; `make test` runs them over a stand-in of its driver
	@$(BIN)/python -m pytest -q -n 0 -m gpu tests/gpu

# What shares the image and its engine, which mostly waits; all else is tested beside it.
CONTAINERS := $(addprefix tests/deploy/test_,compose.py image.py pod.py systemd.py)
test-deploy: setup build/venv-deploy/.ready ## check what is deployed: chart, image, units; installs what it needs
	@$(MAKE) --no-print-directory -j 2 test-containers test-beside-containers

test-containers test-beside-containers: setup build/venv-deploy/.ready
test-containers:
	@$(BIN)/python -m pytest -q -n 0 -m deploy $(CONTAINERS)
test-beside-containers:
	@$(BIN)/python -m pytest -q -n 0 -m deploy tests/deploy $(addprefix --ignore=,$(CONTAINERS))

build/venv-deploy/.ready: tests/deploy/setup.sh tests/deploy/containers/base.sh tests/deploy/requirements.txt
	@bash tests/deploy/setup.sh

test-cluster: setup build/venv-deploy/.ready build/cluster/.ready ## run the chart in a cluster of one node; needs root, and at first a quarter of an hour
	@$(BIN)/python -m pytest -q -n 0 -m cluster tests/deploy/cluster

build/cluster/.ready: tests/deploy/cluster/setup.sh
	@bash tests/deploy/cluster/setup.sh

lock: setup ## lock what the image is made of, with hashes, and what is developed and tested with
	@bash requirements/lock

board: build/venv-deploy/.ready ## write the Grafana board from its panels, and copy it into the chart
	@build/venv-deploy/bin/python deploy/grafana/board.py
	@$(MAKE) --no-print-directory chart-files

observability: setup ## run Prometheus over a daemon on this machine (started if none answers), with rules and alerts
	@$(BIN)/python deploy/prometheus/observe.py

metrics-page: setup ## write docs/metrics.md from the metrics' catalogue
	@$(BIN)/python docs/write_metrics.py

chart-files: setup ## copy rules and dashboards of deploy/ into the chart, and write its schema of settings
	@$(BIN)/python helm/write_schema.py
	@rm -f helm/kvlease/files/rules/*.yaml helm/kvlease/files/dashboards/*.json
	@for file in deploy/prometheus/*rules*.yaml; do [ ! -f $$file ] || cp $$file helm/kvlease/files/rules/; done
	@for file in deploy/grafana/*.json; do [ ! -f $$file ] || cp $$file helm/kvlease/files/dashboards/; done

test-vllm: setup .venv-vllm/.ready ## run vLLM 0.32 itself: compare plans, and engines with the daemon
	@$(MAKE) --no-print-directory -j 2 test-vllm-plans test-vllm-engines

test-vllm-plans test-vllm-engines: setup .venv-vllm/.ready
test-vllm-plans:
	@$(BIN)/python tests/vllm/run.py
test-vllm-engines:
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal -m vllm --requests-min 500 tests/integrations/vllm

bench-vllm: setup .venv-vllm/.ready ## measure vLLM 0.32 with and without kvlease, each figure beside its floor
	@$(BIN)/python tests/benchmarks/engines.py $(addprefix --only ,$(ONLY))

.venv-vllm/.ready: tests/vllm/setup.sh requirements/vllm.lock
	@bash tests/vllm/setup.sh

check: setup ## run all checks that do not run tests, and the coverage gates
	@bash .ci/check

bench: setup ## measure, each figure beside its floor; ONLY="serving start" measures these alone
	@$(BIN)/python tests/benchmarks/run.py $(addprefix --only ,$(ONLY))

MINUTES ?= 1
sim: setup ## simulate all caches with faults for MINUTES (1) on all cores, FROM a seed; EXHAUSTIVE=1 searches small worlds
	@$(BIN)/python -m tests.laws.simulate --minutes $(MINUTES) $(if $(FROM),--base-seed $(FROM)) $(if $(EXHAUSTIVE),--exhaustive)

POINTS ?= 2000
sweep: setup ## fail or kill a disk mover at every system call, at POINTS (2000) points at least; needs strace
	@$(BIN)/python -m tests.laws.sweep --points $(POINTS)

proto: setup ## generate the protocol's Python code from its sources
	@$(BIN)/python -m grpc_tools.protoc -I$(PROTO) --python_out=client --pyi_out=client \
	    --grpc_python_out=client kvlease/v1/kvlease.proto

clean: ## remove what can be made again
	rm -rf .venv .venv-vllm build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
