# `make verify` judges every kernel that this machine can run; `make test` runs the project's own tests;
# `make sensitivity` measures the suite by wrong kernels. Each makes its own virtual environment first, once. To choose
# where packages come from, give pip's options, for example `make verify PIP_OPTIONS="--index-url URL"`, or set pip's
# own variables (PIP_INDEX_URL, PIP_FIND_LINKS, ...).
# `make verify-gpu` builds the native library and judges our kernels on this machine's GPU; it installs nothing and
# needs no network: PYTHON is used with the packages that it has, and the build stays in build/gpu.

PYTHON ?= python3
PIP_OPTIONS ?=
PLAN ?= standard
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

BIN := .venv/bin
INSTALLED := .venv/installed
# What an installation is made of. The native library is built with it, beside its modules, where nvcc is found.
INSTALLED_FROM := pyproject.toml constraints/constraints.txt setup.py kernels/native_build.py $(wildcard kernels/cuda/*)
# The first release of pip that installs a dependency group is 25.1.
PIP := pip==26.3

.PHONY: verify verify-gpu test sensitivity docs clean

verify: $(INSTALLED)
	$(BIN)/ropecheck verify --plan $(PLAN) --out report

# What pyproject.toml names, less the extras. The build folder is emptied: setuptools would pack what an earlier one left.
# Every command runs, whatever the one before it finds.
verify-gpu:
	@command -v $(PYTHON) >/dev/null || { echo "'$(PYTHON)' is not found: name the Python of a CUDA build of torch with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; from importlib.util import find_spec; missing = [name for name in "torch triton numpy mpmath pytest xdist rich pip setuptools".split() if find_spec(name) is None]; sys.exit("verify-gpu needs these packages beside " + sys.executable + ": " + ", ".join(missing) if missing else 0)'
	rm -rf build
	ROPECHECK_CUDA=require $(PYTHON) -m pip install --quiet --no-index --no-deps --no-build-isolation --target build/gpu .
	@export PYTHONPATH=$(CURDIR)/build/gpu; judged=0; sanitized=0; seen=0; \
		build/gpu/bin/ropecheck verify --policy gpu --out report-gpu || judged=$$?; \
		build/gpu/bin/ropecheck sanitize --out report-sanitizer || sanitized=$$?; \
		build/gpu/bin/ropecheck sensitivity -n $(WORKERS) --out report-sensitivity || seen=$$?; \
		echo "exit status of verify: $$judged, of sanitize: $$sanitized, of sensitivity: $$seen"; \
		[ $$judged$$sanitized$$seen = 000 ]

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/pytest -n $(WORKERS) --dist loadgroup

# Every fault of the fault dictionary, and the tables of the documentation's page on them.
sensitivity: $(INSTALLED)
	$(BIN)/ropecheck sensitivity -n $(WORKERS) --markdown docs/faults.md

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv report report-gpu report-sanitizer report-sensitivity build *.egg-info kernels/libropecheck_cuda.so

# The stamp is written last: an installation that failed or was interrupted is made again. torch comes first, because
# the native library is built with its headers.
$(INSTALLED): $(INSTALLED_FROM)
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.10 or newer is needed, and '$(PYTHON)' is not found: name one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1): name another with make PYTHON=..." >&2; exit 1; }
	@echo 'Installing into .venv, once: torch alone is a large download.'
	@rm -f $@
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) $(PIP)
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --constraint constraints/constraints.txt torch
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --constraint constraints/constraints.txt \
		--group dev --editable ".[triton,flint,vendors]"
	@touch $@
