# `make verify` judges every kernel that this machine can run; `make test` runs the project's own tests. Each makes
# its own virtual environment first, once. To choose where packages come from, give pip's options, for example
# `make verify PIP_OPTIONS="--index-url URL"`, or set pip's own variables (PIP_INDEX_URL, PIP_FIND_LINKS, ...).

PYTHON ?= python3
PIP_OPTIONS ?=
PLAN ?= standard
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

BIN := .venv/bin
INSTALLED := .venv/installed
# The first release of pip that installs a dependency group is 25.1.
PIP := pip==26.3

.PHONY: verify test docs clean

verify: $(INSTALLED)
	$(BIN)/ropecheck verify --plan $(PLAN) --out report

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/pytest -n $(WORKERS) --dist loadgroup

docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --constraint constraints/constraints.txt --group docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv report build *.egg-info

# The stamp is written last: an installation that failed or was interrupted is made again.
$(INSTALLED): pyproject.toml constraints/constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.10 or newer is needed, and '$(PYTHON)' is not found: name one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1): name another with make PYTHON=..." >&2; exit 1; }
	@echo 'Installing into .venv, once: torch alone is a large download.'
	@rm -f $@
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) $(PIP)
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --constraint constraints/constraints.txt \
		--group dev --editable ".[triton,flint,vendors]"
	@touch $@
