# `make help` lists what there is. Every target does its own set-up on a fresh machine.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
export PYTHONUNBUFFERED := 1
export UV_PROJECT_ENVIRONMENT ?= .venv

EXTRAS := --extra operator --extra gateway --extra worker --extra cpu --extra demo --extra dev
RUN := uv run --no-sync

.PHONY: help setup demo test test-fast lint types crds e2e drills up down images bench clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: ## install uv, Debian packages and the Python environment
	@bash setup.sh $(EXTRAS)

demo: setup ## build, boot, serve, edit the weights, prove the flush: the main job, in front of you
	@$(RUN) python -m e2e.demo

test: setup ## everything that CI runs: style, types, unit, component and end-to-end tests
	@$(RUN) python -m e2e.suite

test-fast: setup ## the inner loop: no cluster, under two minutes
	@$(RUN) ruff check . && $(RUN) ruff format --check .
	@$(RUN) pytest tests -q -m "not slow and not cluster and not model and not mooncake"

lint: ## style
	@$(RUN) ruff check . && $(RUN) ruff format --check .

types: ## type check
	@$(RUN) mypy

crds: ## write crds/*.yaml from the models
	@$(RUN) python -m moonpool_api

e2e: setup ## the end-to-end scenarios on the embedded cluster (or on KUBECONFIG)
	@$(RUN) pytest e2e -q

drills: setup ## the long scenarios: faults under traffic
	@$(RUN) pytest e2e -q -m drill || { code=$$?; [ $$code = 5 ] && echo "no scenario is marked drill yet: make e2e runs all"; }

up: setup ## boot the embedded cluster and load the images
	@$(RUN) python -m e2e.cluster up
	@$(RUN) python -m images.builder build --load

down: ## leave no process, mount, cgroup or interface behind
	@if [ -x .venv/bin/python ]; then $(RUN) python -m e2e.cluster down; else echo "nothing to take down: no .venv here"; fi

images: setup ## build the container images
	@$(RUN) python -m images.builder build

bench: setup ## every benchmark, one JSON line each
	@uv sync -q $(EXTRAS) --extra bench
	@for file in benchmarks/[a-z]*.py; do $(RUN) python -m benchmarks.$$(basename $$file .py); done

clean: down ## also forget the Python environment (caches under ~/.cache/moonpool stay)
	@rm -rf .venv
