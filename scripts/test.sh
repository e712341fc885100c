#!/usr/bin/env bash
# Everything that must hold before a change goes in: lint, format, types, all tests. Further arguments go to pytest:
#     bash scripts/test.sh -m "not slow" tests/config
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up requirements-dev.txt

# No test may depend on the accelerator or the number of devices that happens to be set outside.
unset PJRT_DEVICE CPU_NUM_DEVICES XLA_FLAGS RANK WORLD_SIZE

"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
exec "$python" -m pytest "$@"
