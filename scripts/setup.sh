# Sourced by the other scripts. `set_up FILE` creates the virtual environment $venv (.venv), installs the requirements
# in FILE, and does nothing when they are installed. Afterwards $python is the interpreter to use. Needs bash and
# Python 3.11 to 3.14, which last has no torch-xla; TorchTPU needs 3.12 or 3.13.
# shellcheck shell=bash

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
use_environment() {
    venv=$PWD/$1
    python=$venv/bin/python
}
use_environment .venv
oldest_python=11 newest_python=14 pythons="3.11, 3.12, 3.13 or 3.14"
newest_with_xla=13 # torch-xla has no build for later ones

# TorchTPU and torch-xla need different versions of torch and libtpu.
use_torch_tpu() {
    use_environment .venv-torchtpu
    oldest_python=12 newest_python=13 pythons="3.12 or 3.13"
}

set_up() {
    local stamp=$venv/installed-${1//\//-}
    lock
    if [[ ! -f $stamp || $(< "$stamp") != "$(installation_state "$1")" ]]; then
        if ! install_requirements "$1" >&2; then
            log "installation failed: see the messages above; the same command tries again"
            exit 1
        fi
        # Written last and renamed, so that an interrupted installation is repeated.
        installation_state "$1" > "$stamp.new"
        mv "$stamp.new" "$stamp"
    fi
    unlock
}

# Hosts of one job may share this folder: one of them installs and prepares the data, the others wait.
lock() {
    mkdir -p "$venv"
    exec 9> "$venv/lock"
    if command -v flock > /dev/null; then
        flock 9
    fi
}

unlock() {
    exec 9>&-
}

install_requirements() {
    local extra=()
    if ! is_supported_python "$python" || ! "$python" -m pip --version > /dev/null 2>&1; then
        create_environment || return
    fi
    log "installing $1 into $venv with $("$python" --version)"
    if runs_xla_on_tpu; then
        # requirements/tpu-aot.txt: jax, which lowers the attention kernel
        extra+=("torch-xla[tpu]==$(pinned_version torch-xla requirements.txt)" -r requirements/tpu-aot.txt)
    fi
    choose_torch_build "$1" || return
    # Only errors of pip are shown: it warns of each index that lacks a package. Python compiles the modules that it
    # imports; those of all packages would take half a minute and 0.5 GB.
    PIP_QUIET=2 with_progress "$python" -m pip install --disable-pip-version-check -r "$1" ${extra[@]+"${extra[@]}"} \
        --no-compile
}

# Run a command, and print a line every five seconds: the size is that of downloads and of what is installed.
with_progress() {
    local code=0 began=$SECONDS progress
    mkdir -p "$venv/tmp"
    while sleep 5 > /dev/null 2>&1 && kill -0 $$ 2> /dev/null; do
        log "installing: $((SECONDS - began)) s, $(du -sm "$venv" 2> /dev/null | cut -f1) MB in $venv"
    done 9>&- &
    progress=$!
    TMPDIR=$venv/tmp "$@" || code=$?
    kill "$progress"
    rm -rf "$venv/tmp"
    return "$code"
}

runs_xla_on_tpu() {
    [[ $venv == */.venv ]] && is_tpu_host
}

# Append the CPU build of torch to `extra` if the host has no CUDA GPU, torch is not installed and the package index
# has that build; replace the CPU build if the host has a CUDA GPU.
choose_torch_build() {
    local version remedy="PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu makes it about 1.5 GB"
    local whole="about 7 GB in all, 6 minutes on two cores"
    # shellcheck disable=SC2046 # file names without spaces
    version=$(pinned_version torch $(requirement_files "$1") requirements.txt)
    if [[ -z $version || $(uname -sm) != "Linux x86_64" ]]; then
        return
    elif [[ $(count_gpus) != 0 ]]; then
        if has_torch "*+cpu"; then
            "$python" -m pip uninstall --yes torch || return
        fi
        has_torch "*" || log "the CUDA build of torch ($whole)"
    elif ! has_torch "*"; then
        # Not grep -q, which ends at the first match: pip would fail to write the rest, and pipefail would report that.
        if "$python" -m pip index versions torch 2> /dev/null | grep -F " $version+cpu" > /dev/null; then
            log "no CUDA GPU: the CPU build of torch (about 1.5 GB in all)"
            extra+=("torch==$version+cpu")
        else
            log "the CUDA build of torch ($whole); without a CUDA GPU, $remedy"
        fi
    fi
}

# Whether a version of torch that matches the pattern is installed.
has_torch() {
    compgen -G "$venv/lib/python3.*/site-packages/torch-$1.dist-info" > /dev/null
}

# Print the name of a file and of those that it includes, whose names are relative to its folder.
requirement_files() {
    local included
    echo "$1"
    # shellcheck disable=SC2013 # file names without spaces
    for included in $(sed -n "s|^-r |$(dirname "$1")/|p" "$1"); do
        requirement_files "$included"
    done
}

# Print the version of a package in the first of the requirement files that pins it for this Python.
pinned_version() {
    local other='python_version >='
    is_supported_python "$python" "$oldest_python" "$newest_with_xla" || other='python_version <'
    sed -n "/$other/d;/^$1==/{s/^$1==\([0-9.]*\).*/\1/p;q;}" "${@:2}"
}

# Only a line that begins with "GPU " is a GPU: nvidia-smi prints errors to stdout, too, and indents MIG slices.
count_gpus() {
    nvidia-smi -L 2> /dev/null | grep -c '^GPU ' || true
}

# Completes an interrupted environment, and replaces one of an unsupported Python.
create_environment() {
    local interpreter
    interpreter=$(find_python) || return
    is_supported_python "$python" || find "$venv" -mindepth 1 ! -name lock -delete
    log "creating $venv with $interpreter"
    with_progress "$interpreter" -m venv "$venv"
}

# Print what an installation depends on: the requirements, the interpreter, and whether the host has TPUs.
installation_state() {
    # shellcheck disable=SC2046 # file names without spaces
    cat requirements.txt $(requirement_files "$1")
    "$python" --version 2>&1
    is_tpu_host && echo "with TPU"
    runs_xla_on_tpu && cat requirements/tpu-aot.txt
    has_torch "*+cpu" && [[ $(count_gpus) != 0 ]] && echo "without CUDA"
    true
}

find_python() {
    local candidate newest
    if runs_xla_on_tpu; then
        newest_python=$newest_with_xla pythons="3.11, 3.12 or 3.13"
    fi
    if [[ -n ${PYTHON:-} ]]; then
        is_supported_python "$PYTHON" && echo "$PYTHON" && return
        log "PYTHON=$PYTHON is not a Python $pythons with the modules venv and ensurepip"
        return 1
    fi
    # Last, the versions of pyenv, whose commands start only the selected ones. One without torch-xla only where there is
    # no other.
    for newest in "$newest_with_xla" "$newest_python"; do
        for candidate in python3 python3.{14,13,12,11} python \
            "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[1234].*/bin/python3; do
            if is_supported_python "$candidate" "$oldest_python" "$newest"; then
                echo "$candidate"
                return
            fi
        done
    done
    log "no Python $pythons with the modules venv and ensurepip found (tried python3, python3.14, python3.13," \
        "python3.12, python3.11, python, pyenv's versions): install one (Debian, Ubuntu: apt install python3-venv)," \
        "or give its path: PYTHON=/path/to/python3.12"
    return 1
}

# Whether a command is a Python 3 whose minor version is in a range, by default that of the environment.
is_supported_python() {
    local range="${2:-$oldest_python} <= sys.version_info[1] <= ${3:-$newest_python}"
    "$1" -c "import ensurepip, sys, venv; sys.exit(not (sys.version_info[0] == 3 and $range))" 2> /dev/null
}

# A host has TPUs if TPU_ACCELERATOR_TYPE is set (torch-xla reads it instead of the metadata server), or if it has a PCI
# device of Google with the identity of a TPU v2/v3, v4, v5e, v6e, v5p or 7x (torch-xla 2.9.0's list; Google's network
# cards have the same vendor).
is_tpu_host() {
    local card
    [[ -z ${TPU_ACCELERATOR_TYPE:-} ]] || return 0
    for card in /sys/bus/pci/devices/*; do
        [[ -f $card/vendor && $(< "$card/vendor") == 0x1ae0 ]] || continue
        case $(< "$card/device") in 0x0027 | 0x005e | 0x0063 | 0x006f | 0x0062 | 0x0076) return 0 ;; esac
    done
    return 1
}

log() {
    echo "$*" >&2
}
