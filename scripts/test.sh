#!/usr/bin/env bash
# Test: bash scripts/test.sh [--quick | --all] [pytest arguments]
#
# Without arguments: lint, format, types and the tests that prove each promise, in one environment, .venv.
# --quick: lint, format, and only the tests that take less than a few seconds and one short training run per engine.
# --all: every case of every test. Then the tests that depend on the version of torch run again in a second environment,
# .venv-newest, with the newest torch and without torch-xla. Tests with TorchTPU have a third one, .venv-torchtpu, where
# there is Python 3.12 or 3.13. NEWEST_TORCH=no installs neither. Python 3.14 has no torch-xla: there the tests with it
# are skipped, types are not checked, and --all does not run.
# Other arguments go to pytest, for example `tests/config`. Three processes run the tests; -n 8 takes eight.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# The tests set the accelerator and the number of devices themselves.
unset PJRT_DEVICE CPU_NUM_DEVICES XLA_FLAGS RANK WORLD_SIZE
# Where Python may not keep compiled modules, as in many images, each start compiles torch's again: 2.5 CPU s of 7.
unset PYTHONDONTWRITEBYTECODE

main() {
    local which=${1:-} packages=requirements/dev.txt
    case $which in
        --quick) announce "lint, format, and tests of a few seconds each" 2 && shift && set -- -m "not slow or quick" "$@" ;;
        --all)
            announce "lint, format, types, and all tests in three environments of 18 GB" 60
            packages=requirements/all.txt newest_python=$newest_with_xla pythons="3.11, 3.12 or 3.13"
            ;;
        *) announce "lint, format, types, and the tests that prove each promise" 11 ;;
    esac
    set_up "$packages"
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    if is_supported_python "$python" "$oldest_python" "$newest_with_xla"; then
        [[ $which == --quick ]] || "$python" -m mypy # 23 s without a cache
    else
        log "types are not checked: they are those of the torch that Python 3.11 to 3.13 have"
    fi
    if [[ $which != --all || ${NEWEST_TORCH:-yes} == no ]]; then
        run_tests "$@"
        [[ $which != --all ]] || log "NEWEST_TORCH=no: the tests with the newest torch and without torch-xla were skipped"
        return
    fi
    if ! set_up_newest; then
        log "$(grep ^torch== requirements/newest.txt) could not be installed, so no tests ran;" \
            "NEWEST_TORCH=no bash scripts/test.sh --all skips those with it"
        return 1
    fi
    set_up_torch_tpu || log "TorchTPU is not installed: see the messages above; the tests with it" \
        "(tests/parallel/test_emulated_tpu.py) are skipped"
    run_tests "$@"
    use_environment .venv-newest
    run_tests -m "not slow" tests/models tests/optim tests/parallel tests/checkpoint tests/extensions
    run_tests tests/golden tests/parallel/test_torch*.py tests/tools/plan/test_torch_engine.py
}

announce() {
    log "$1: about $2 minutes on two cores, after an environment of 8 GB is installed"
}

# Subshells, because the environments are others.
set_up_newest() (
    use_environment .venv-newest
    set_up requirements/newest.txt
)

# 6 GB that only test_emulated_tpu.py needs: what a failed installation leaves is removed.
set_up_torch_tpu() (
    use_torch_tpu
    find_python > /dev/null || exit
    (set_up requirements/torchtpu-emulator.txt) && exit
    rm -rf "$venv"
    exit 1
)

# Three processes, each of which takes whole files, slow ones first. Two left a part of two cores unused: 703 s for 636.
run_tests() {
    "$python" -m pytest --numprocesses=3 --dist=loadfile --no-loadscope-reorder "$@"
}

main "$@"
