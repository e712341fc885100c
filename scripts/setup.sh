# Sourced by the other scripts: `set_up FILE` makes $venv (.venv) and installs the requirements in FILE, again only when
# they change. Afterwards $python is the interpreter to use. Needs bash and Python 3.11, 3.12 or 3.13, nothing else.
# shellcheck shell=bash

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
venv=$PWD/.venv
python=$venv/bin/python

set_up() {
    local stamp=$venv/installed-$1 wanted
    lock
    wanted=$(requirements_state "$1")
    if [[ ! -f $stamp || $(< "$stamp") != "$wanted" ]]; then
        if ! install_requirements "$1" >&2; then
            say "set-up failed; the messages above say why, and the same command tries again"
            exit 1
        fi
        # Written last and moved into place, so that an interrupted installation is never taken for a whole one.
        requirements_state "$1" > "$stamp.new"
        mv "$stamp.new" "$stamp"
    fi
    unlock
}

# Hosts of one job may share this folder: one of them installs and prepares, the others wait for it.
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
    local interpreter extra=()
    interpreter=$(find_python) || return
    say "setting up $venv with $("$interpreter" --version) and $1 (several GB and minutes the first time)"
    runs_supported_python "$python" || find "$venv" -mindepth 1 ! -name lock -delete
    "$interpreter" -m venv "$venv" || return
    if [[ $1 != requirements-newest.txt ]] && on_tpu_host; then
        extra=("torch-xla[tpu]==$(sed -n 's/^torch-xla==\([0-9.]*\).*/\1/p' requirements.txt)")
    fi
    "$python" -m pip install --disable-pip-version-check -r "$1" ${extra[@]+"${extra[@]}"}
}

# What an installation depends on: the requirements, the interpreter, and whether there are TPUs.
requirements_state() {
    # shellcheck disable=SC2046 # file names without spaces
    cat requirements.txt "$1" $(sed -n 's/^-r //p' "$1")
    "$python" --version 2>&1
    on_tpu_host && echo "with TPU"
    true
}

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]] && ! runs_supported_python "$PYTHON"; then
        say "PYTHON=$PYTHON is not a Python 3.11, 3.12 or 3.13 with the venv and ensurepip modules"
        return 1
    fi
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
        if runs_supported_python "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    say "no Python 3.11, 3.12 or 3.13 with the venv and ensurepip modules found (tried python3," \
        "python3.13, python3.12, python3.11, python); install one (Debian, Ubuntu: apt install python3-venv), or name" \
        "it: PYTHON=/path/to/python3.12"
    return 1
}

runs_supported_python() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2> /dev/null
}

# Said by the variable that torch-xla reads in place of the metadata server, or TPU chips by their PCI identity: vendor
# Google, and one of the devices v2/v3, v4, v5e, v6e, v5p, 7x (the list of torch-xla
# 2.9.0; Google's network cards share the vendor).
on_tpu_host() {
    local card
    [[ -z ${TPU_ACCELERATOR_TYPE:-} ]] || return 0
    for card in /sys/bus/pci/devices/*; do
        [[ -f $card/vendor && $(< "$card/vendor") == 0x1ae0 ]] || continue
        case $(< "$card/device") in 0x0027 | 0x005e | 0x0063 | 0x006f | 0x0062 | 0x0076) return 0 ;; esac
    done
    return 1
}

say() {
    echo "$*" >&2
}
