#!/usr/bin/env bash
# Everything that must hold before a change goes in: lint, format, types, all tests; then the tests that need no
# torch-xla once more, with the newest torch and without it. With arguments, which go to pytest, the first part alone:
#     bash scripts/test.sh -m "not slow" tests/config
# Where that torch cannot be installed, this fails and says so; NEWEST_TORCH=no leaves it out on purpose.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up requirements-dev.txt

# No test may depend on the accelerator or the number of devices that happens to be set outside.
unset PJRT_DEVICE CPU_NUM_DEVICES XLA_FLAGS RANK WORLD_SIZE

"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
"$python" -m pytest "$@"
(($# == 0)) || exit 0
if [[ ${NEWEST_TORCH:-yes} == no ]]; then
    say "NEWEST_TORCH=no: not tested with the newest torch and without torch-xla"
    exit 0
fi

venv=$PWD/.venv-newest
python=$venv/bin/python
if ! (set_up requirements-newest.txt); then
    say "$(grep ^torch== requirements-newest.txt) could not be installed, so the recipe is not tested with it;" \
        "NEWEST_TORCH=no bash scripts/test.sh leaves it out"
    exit 1
fi
"$python" -m pytest -m "not slow"
"$python" -m pytest tests/parallel/test_torch.py tests/parallel/test_torch_runs.py
