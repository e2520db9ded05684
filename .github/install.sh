#!/usr/bin/env bash
# Install ropecheck for the following steps of a job: install.sh [--development] [WHEEL]
#
# Without a wheel it is built from the sources around this file. --development adds what tests and documentation need.
#
# PACKAGES says where its dependencies come from. "download": everything is installed, torch from TORCH_INDEX, which
# holds builds of torch without CUDA. "present": the machine has them, as a GPU runner has, and nothing is downloaded.
# Under act, which sets ACT, they are always present: a local run judges this tree with the packages of its environment.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=$RUNNER_TEMP/ropecheck
groups=()
if [ "${1:-}" = --development ]; then
  groups=(--group dev)
  shift
fi
what=$(realpath "${1:-$root}")
[ -z "${ACT:-}" ] || PACKAGES=present
export PIP_DISABLE_PIP_VERSION_CHECK=1

# setuptools would pack what an earlier build left.
rm -rf "$target" "$root/build/lib" "$root"/build/bdist.*
case ${PACKAGES:-download} in
  download)
    cd "$root" # whose pyproject.toml holds the groups
    python -m venv "$target"
    "$target/bin/python" -m pip install --quiet pip==26.3
    "$target/bin/python" -m pip install --quiet --constraint constraints/constraints.txt \
      --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" torch
    "$target/bin/python" -m pip install --quiet --constraint constraints/constraints.txt \
      "${groups[@]}" "$what[triton,flint,vendors]"
    ;;
  present)
    python=$(command -v python || command -v python3)
    "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation --target "$target" "$what"
    export PYTHONPATH=$target
    echo "PYTHONPATH=$target" >> "$GITHUB_ENV"
    ;;
  *)
    echo "::error::PACKAGES must be download or present, not '$PACKAGES'"
    exit 2
    ;;
esac
echo "$target/bin" >> "$GITHUB_PATH"
"$target/bin/ropecheck" --version
