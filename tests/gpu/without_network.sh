#!/usr/bin/env bash
# The tests on a GPU where nothing can be installed from a network: with what `make gpu-wheels` has downloaded, beside
# the machine's own torch and pytest. $OUT is where the results go. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" .gpu-wheels/*.whl
PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} CROSSRANK_GPU_TESTS=${CROSSRANK_GPU_TESTS:-cuda} \
  "$python" -m pytest -c tests/gpu/pytest.ini --rootdir . tests/gpu "$@"
