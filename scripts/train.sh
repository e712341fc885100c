#!/usr/bin/env bash
# Train: bash scripts/train.sh [--flag=value ...]
#
# The settings below, then your flags: of a flag given twice the last counts. Without data of your own it prepares a
# small corpus first, the source files of Python's standard library, and ends with a sample from the trained model.
# With --config_file or --import_config that file takes the place of the settings below.
# Returns the training's exit code: 0 finished, 2 a mistake in the flags, 3 training stopped itself, 143 and 130 after
# a signal. The same command again continues.
#
# Several processes: NPROC or NPROC_PER_NODE (default: the CUDA GPUs of this host), and on each of several hosts NNODES,
# NODE_RANK, MASTER_ADDR and MASTER_PORT. The xla engine takes one process per host, which drives all its devices.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

settings=(
    --model_variant=tiny
    --sharding_strategy=fsdp
    --fsdp_activation_checkpointing=True
    --selective_checkpointing=1/2

    # 16 sequences of 256: 4096 tokens a step
    --seq_length=256
    --global_batch_size=16
    --batch_size=2
    --num_steps=140
    --learning_rate=3e-3
    --init_std=0.07  # 1 / sqrt(hidden): the usual 0.02 suits widths of thousands, and learns slower here
    # A CPU has no bf16 units: a step takes several times as long in mixed precision. On TPUs, leave this out.
    --mixed_precision=False

    --report_interval=1
    --checkpoint_interval=35
)
# Only with the prepared corpus
corpus=data/stdlib
corpus_settings=(--run_name=quickstart --val_interval=35 --val_steps=4 --val_sanity_steps=-1)

main() {
    NPROC=${NPROC:-${NPROC_PER_NODE:-}}
    set_up requirements.txt
    if asks_for_help "$@"; then
        exec "$python" main_training.py --help
    fi
    choose_devices
    local flags=("${settings[@]}") folder code=0
    if brings_config "$@"; then
        flags=()
    elif ! names_data "$@"; then
        prepare_corpus
    fi
    flags+=("$@")
    folder=$(run_folder "${flags[@]}")
    launch "${flags[@]}" || code=$?
    if [[ $code == 0 && ${NODE_RANK:-0} == 0 ]] && ! names_data "$@" && ! brings_config "$@"; then
        show_sample "$folder"
    fi
    return "$code"
}

# Ready at once where it is prepared already. Adds the flags that train on it.
prepare_corpus() {
    lock
    "$python" -m pretraining.data.prepare --stdlib --output="$corpus"
    unlock
    flags+=("${corpus_settings[@]}")
    while IFS= read -r flag; do
        flags+=("$flag")
    done < "$corpus/flags.txt"
}

asks_for_help() {
    [[ " $* " == *" --help "* || " $* " == *" -h "* ]]
}

names_data() {
    local word
    for word in "$@"; do
        case ${word//-/_} in __data_path* | __use_dummy_dataset | __use_dummy_dataset=[TtYy1]*) return 0 ;; esac
    done
    return 1
}

# A configuration file says what the settings above say, and names its data.
brings_config() {
    local word
    for word in "$@"; do
        case ${word//-/_} in __import_config* | __config_file*) return 0 ;; esac
    done
    return 1
}

# A host without accelerator: XLA's CPU backend, as eight devices.
choose_devices() {
    if ! on_tpu_host && [[ $(gpus) == 0 ]]; then
        export PJRT_DEVICE=${PJRT_DEVICE:-CPU}
    fi
    if [[ ${PJRT_DEVICE:-} == CPU ]]; then
        export CPU_NUM_DEVICES=${CPU_NUM_DEVICES:-8}
    fi
}

# Not every line is a GPU: without a driver nvidia-smi writes its complaint to stdout, and MIG slices stand indented.
gpus() {
    nvidia-smi -L 2> /dev/null | grep -c '^GPU ' || true
}

# Checks the flags before anything is launched. Its remarks are shown only if they are wrong; training repeats them.
run_folder() {
    local said
    if ! said=$("$python" -m pretraining.config.flags "$@" 2>&1); then
        say "$said"
        exit 2
    fi
    echo "${said##*$'\n'}"
}

launch() {
    local processes=${NPROC:-$(gpus)} hosts=${NNODES:-1} codes code=0
    if ((processes * hosts <= 1)) || drives_all_devices "$@"; then
        attended "$python" main_training.py "$@"
        return
    fi
    local rendezvous=(--standalone)
    if ((hosts > 1)); then
        rendezvous=(--node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}")
    fi
    codes=$(mktemp -d)
    EXIT_CODES=$codes attended "$python" -m torch.distributed.run --nnodes="$hosts" --nproc-per-node="$processes" \
        "${rendezvous[@]}" main_training.py "$@" || code=$?
    first_failure "$codes" "$code"
}

drives_all_devices() {
    [[ -n ${PJRT_DEVICE:-} && ${NPROC:-1} == 1 ]] || [[ " $* " == *" --engine=xla "* || " $* " == *" --engine xla "* ]]
}

# Runs a command so that a SIGTERM to this script reaches it too, and returns its exit code. bash makes what it runs in
# the background deaf to Ctrl-C, which is undone; the terminal sends that one to both.
attended() {
    local child code signalled
    "$python" -c 'import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])' "$@" &
    child=$!
    trap 'signalled=yes; kill -TERM "$child" 2> /dev/null || true' TERM
    trap 'signalled=yes' INT
    while
        signalled="" code=0
        wait "$child" || code=$?
        [[ -n $signalled ]] && kill -0 "$child" 2> /dev/null
    do :; done
    if [[ -n $signalled ]]; then
        code=0
        wait "$child" || code=$?
    fi
    trap - TERM INT
    return "$code"
}

# torchrun turns every exit code into 1; each process leaves its own in a file. The first that failed says why.
first_failure() {
    local code=$2 first="" file
    for file in "$1"/*; do
        if [[ $code != 0 && -f $file && $(< "$file") != 0 && (-z $first || $file -ot $first) ]]; then
            first=$file
        fi
    done
    [[ -z $first ]] || code=$(< "$first")
    rm -r "$1"
    return "$code"
}

show_sample() {
    say ""
    "$python" -m pretraining.generate "$1" --prompt="def main(" --max_new_tokens=120
}

main "$@"
