# gpuyard. `make demo` on a fresh machine is all it takes; `make help` lists the rest.
SHELL := /bin/sh
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
CHECKED := wire workers portal client allinone bench examples tests manage.py
# mypy's and import-linter's plug-ins load the settings; they never connect.
NO_DATABASE := DATABASE_URL=postgresql://nobody@127.0.0.1:1/none

.PHONY: help setup up demo test check lock clean browser

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort | expand -t 10
	@echo "PORT=8001 make up     another port;  DATABASE_URL, REDIS_URL: servers of yours;  .env.example lists all"

demo: setup ## the portal with a training job on four GPUs; DEMO_EXIT=1 ends after its summary
	@$(PY) -m allinone demo

up: setup ## the portal without the job
	@$(PY) -m allinone up

setup: $(VENV)/.installed ## the installation alone: .venv, locked packages, browser assets
	@$(PY) -m allinone assets

test: setup browser ## every test
	@$(PY) -m pytest

check: setup ## ruff, mypy, import contracts, missing migrations
	$(VENV)/bin/ruff check $(CHECKED)
	$(NO_DATABASE) $(VENV)/bin/mypy
	$(NO_DATABASE) $(VENV)/bin/lint-imports
	$(PY) -m allinone database -- manage.py makemigrations --check --dry-run

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "gpuyard needs Python 3.11 or newer; name one with PYTHON=python3.12 make setup." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "Python's venv module is missing: apt install python3-venv, then make setup again." >&2; exit 2; }

$(VENV)/.installed: requirements/dev.txt pyproject.toml | $(VENV)/bin/python
	@echo "Installing the locked packages into $(VENV) (once; this takes minutes)…"
	@$(PY) -m pip install -qq --disable-pip-version-check -r requirements/dev.txt || \
		{ echo "pip could not install requirements/dev.txt; its reason is above. Repair it and run make setup again." >&2; exit 1; }
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps --editable . || exit 1
	@touch $@

# The browser tests drive the system's Chromium. Only root can install it; without it those tests are skipped and say so.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null 2>&1 && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
		echo "Installing Chromium for the browser tests…"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 && exit 0; \
	fi; \
	echo "There is no Chromium, so the browser tests are skipped: apt install chromium, then make test again." >&2

PIP_COMPILE := CUSTOM_COMPILE_COMMAND='make lock' $(VENV)/bin/pip-compile --quiet --no-emit-index-url --no-emit-find-links \
	--no-emit-trusted-host --strip-extras --no-header

lock: $(VENV)/.installed ## writes requirements/*.txt anew from pyproject.toml; UPGRADE=--upgrade takes newer versions
	$(PIP_COMPILE) $(UPGRADE) --extra node --extra portal --extra embedded --extra examples --extra dev -o requirements/dev.txt pyproject.toml
	$(PIP_COMPILE) $(UPGRADE) --extra portal -c requirements/dev.txt -o requirements/portal.txt pyproject.toml
	$(PIP_COMPILE) $(UPGRADE) --extra node -c requirements/dev.txt -o requirements/node.txt pyproject.toml
	@# A build tag such as +cpu belongs to one index; the lock has to install from any.
	@sed -i -E 's/^([a-zA-Z0-9._-]+==[^+ ;]+)\+[a-z0-9.]+/\1/; s#$(CURDIR)/##' requirements/*.txt

clean: ## removes .venv, node_modules and caches; var/, which holds the database and the logs, stays
	rm -rf $(VENV) node_modules .mypy_cache .ruff_cache .import_linter_cache .hypothesis test-results *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
