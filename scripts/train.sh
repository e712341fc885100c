#!/usr/bin/env bash
# Train: bash scripts/train.sh [--flag=value ...]
#
# Passes the settings below and then your flags to main_training.py; of a repeated flag the last value counts. Without
# data of your own it first prepares a small corpus, the source code of Python's standard library, and at the end prints
# a sample of the trained model. With --config_file or --import_config, the settings below are not used.
# Returns the exit code of the training: 0 finished, 2 a mistake in the configuration, 3 training stopped itself, 4 the
# time of --max_run_seconds is up, 143 after SIGTERM, 130 after SIGINT. The same command again continues the run.
#
# After every other exit code, such as 5 (a step hung, or another process was lost), and after a kill, training starts
# again from its newest checkpoint: at most MAX_RESTARTS times (default 100), and only if it made steps that no start
# before it had made. On several hosts, two starts in a row, including the first two, may make none: a host may come later
# than the others.
#
# Several processes: NPROC or NPROC_PER_NODE (default: the number of CUDA GPUs of this host). Several hosts: NNODES,
# NODE_RANK, MASTER_ADDR and MASTER_PORT on each. The xla engine runs one process per host, which uses all its devices.
# ENGINE=torch is --engine=torch, and on a host with TPUs installs TorchTPU, which runs one process per chip; several
# hosts need TPU_WORKER_HOSTNAMES on each, from which it derives the variables above.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

settings=(
    --model_variant=tiny
    --sharding_strategy=fsdp
    --fsdp_activation_checkpointing=True
    --selective_checkpointing=1/2

    # 16 sequences of 256: 4096 tokens per step
    --seq_length=256
    --global_batch_size=16
    --batch_size=2
    --num_steps=140
    --learning_rate=3e-3
    --init_std=0.07  # 1 / sqrt(hidden_size): 0.02 suits hidden sizes of thousands, and learns more slowly here
    # fp32, because most CPUs have no bf16 units: a step in mixed precision takes several times as long. On TPUs and
    # GPUs, remove this.
    --mixed_precision=False

    --report_interval=1
    --checkpoint_interval=35
)
corpus=data/stdlib
got_signal="" # whether this script was told to end

main() {
    NPROC=${NPROC:-${NPROC_PER_NODE:-}}
    if uses_torch_tpu; then
        use_torch_tpu
        set_up requirements-torchtpu.txt
    else
        set_up requirements.txt
    fi
    if has_help_flag "$@"; then
        exec "$python" main_training.py "$@"
    fi
    choose_devices
    check_variables "$@"
    local flags=("${settings[@]}") folder code=0
    if has_config_file "$@"; then
        flags=()
    elif ! has_data "$@"; then
        prepare_corpus
    fi
    LAUNCHED_AT=$(date +%s)
    export SCRIPT_SETTINGS="${flags[*]}" LAUNCHED_AT # their source is printed at the start
    flags+=(${ENGINE:+"--engine=$ENGINE"} "$@")
    folder=$(run_folder "${flags[@]}")
    keep_running "${flags[@]}" || code=$?
    if [[ $code == 0 && ${NODE_RANK:-0} == 0 ]] && ! has_data "$@" && ! has_config_file "$@"; then
        print_sample "$folder"
    fi
    return "$code"
}

# Does nothing if the corpus exists. Appends the flags that train on it to `flags`.
prepare_corpus() {
    lock
    "$python" -m pretraining.tools.prepare --stdlib --output="$corpus"
    unlock
    while IFS= read -r flag; do
        flags+=("$flag")
    done < "$corpus/flags.txt"
}

has_help_flag() {
    [[ " $* " == *" --help "* || " $* " == *" --help="* || " $* " == *" -h "* ]]
}

has_data() {
    local word
    for word in "$@"; do
        case ${word//-/_} in __data_path* | __use_dummy_dataset | __use_dummy_dataset=[TtYy1]*) return 0 ;; esac
    done
    return 1
}

# A configuration file replaces the settings above and names its data.
has_config_file() {
    local word
    for word in "$@"; do
        case ${word//-/_} in __import_config* | __config_file*) return 0 ;; esac
    done
    return 1
}

# Without an accelerator, use the CPU backend of XLA with eight virtual devices.
choose_devices() {
    if ! is_tpu_host && [[ $(count_gpus) == 0 ]]; then
        export PJRT_DEVICE=${PJRT_DEVICE:-CPU}
    fi
    if [[ ${PJRT_DEVICE:-} == CPU ]]; then
        export CPU_NUM_DEVICES=${CPU_NUM_DEVICES:-8}
    fi
}

# Check the flags before any process starts, and print the run's folder. Notes are printed only together with an error,
# because training prints them again. Of several hosts, the processes print it, so that those of the others hear of it.
run_folder() {
    local output
    if output=$("$python" -m pretraining.tools.run_folder "$@" 2>&1); then
        echo "${output##*$'\n'}"
    elif ((${NNODES:-1} == 1)); then
        refuse "$output"
    fi
}

# Launch, and launch again while that helps. RESTARTS counts it, and PROGRESS_FILE has the newest step.
keep_running() {
    local code step newest=0 futile=0 patience=$((${NNODES:-1} > 1 ? 2 : 0))
    PROGRESS_FILE=$(mktemp)
    export PROGRESS_FILE RESTARTS=0
    while true; do
        code=0
        launch "$@" || code=$?
        case $code in 0 | 2 | 3 | 4 | 130 | 141 | 143) break ;; esac
        [[ -z $got_signal ]] || break
        step=$(< "$PROGRESS_FILE")
        step=$((10#${step:-0}))
        futile=$((step > newest ? 0 : futile + 1)) newest=$((step > newest ? step : newest))
        if ((futile > patience)); then
            log "training ended with code $code and made no new step since it was started: giving up"
            break
        elif ((RESTARTS >= ${MAX_RESTARTS:-100})); then
            ((RESTARTS == 0)) || log "training ended with code $code after $RESTARTS restarts: giving up"
            break
        fi
        RESTARTS=$((RESTARTS + 1))
        log "training ended with code $code at step $step: restart $RESTARTS of at most ${MAX_RESTARTS:-100}"
        sleep 1
        case " $* " in *" --resume=never "* | *" --resume never "*) set -- "$@" --resume=auto ;; esac
    done
    rm -f "$PROGRESS_FILE"
    return "$code"
}

launch() {
    local processes hosts
    if uses_torch_tpu; then
        set_tpu_variables || return
    fi
    processes=${NPROC:-$(count_gpus)} hosts=${NNODES:-1}
    ((processes > 0)) || processes=1
    if ! uses_torch_tpu && { ((processes * hosts <= 1)) || uses_one_process "$@"; }; then
        run_attended "$python" main_training.py "$@"
        return
    fi
    # NCCL's flight recorder: after collective_timeout, each process writes its last collectives to /tmp/nccl_trace_rank_N
    export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
    export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
    NPROC=$processes run_attended "$python" -m pretraining.run.launch main_training.py "$@"
}

# Refuse variables that a launch could not use, and those that are missing on one of several hosts.
check_variables() {
    local name
    for name in NPROC NPROC_PER_NODE NNODES NODE_RANK MASTER_PORT MAX_RESTARTS; do
        [[ -z ${!name:-} || ${!name} =~ ^(0|[1-9][0-9]{0,5})$ ]] || refuse "$name=${!name} is not a whole number"
    done
    if ((${NNODES:-1} <= 1)) || uses_torch_tpu || uses_one_process "$@"; then
        return
    fi
    for name in NODE_RANK MASTER_ADDR; do
        [[ -n ${!name:-} ]] || refuse "NNODES=$NNODES, but $name is not set: each host needs NODE_RANK, its number" \
            "from 0 to $((NNODES - 1)), and MASTER_ADDR, the name or address of host 0"
    done
    ((NODE_RANK < NNODES)) || refuse "NODE_RANK=$NODE_RANK is not below NNODES=$NNODES: hosts are counted from 0"
}

refuse() {
    log "$*"
    exit 2
}

uses_torch_tpu() {
    [[ ${ENGINE:-} == torch ]] && is_tpu_host
}

# Export what all processes of TorchTPU must agree on before one of them starts, and set NPROC to the chips of this host.
set_tpu_variables() {
    local lines line
    lines=$(NPROC=$NPROC "$python" -c 'import os, torch
known = set(os.environ)
torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=int(os.environ["NPROC"] or 0) or None)
print(*(f"{name}={os.environ[name]}" for name in os.environ if name not in known), sep="\n")
devices = len(os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(","))
print("NPROC", devices // int(os.environ.get("NNODES", 1)), sep="=")') || return
    while IFS= read -r line; do
        [[ $line =~ ^[A-Z_]+= ]] && export "${line?}"
    done <<< "$lines"
}

uses_one_process() {
    case " $* " in
        *" --engine=xla "* | *" --engine xla "*) return 0 ;;
        *" --engine=torch "* | *" --engine torch "*) ((${NNODES:-1} == 1)) || return 1 ;;
    esac
    [[ -n ${PJRT_DEVICE:-} && ${NPROC:-1} == 1 ]]
}

# Run a command in the background, pass SIGTERM on to it, and return its exit code. bash starts background commands with
# SIGINT ignored, so Python restores its default; on Ctrl-C the terminal signals both processes.
run_attended() {
    local child code signal_received
    "$python" -c 'import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])' "$@" &
    child=$!
    trap 'signal_received=yes got_signal=yes; kill -TERM "$child" 2> /dev/null || true' TERM
    trap 'signal_received=yes got_signal=yes' INT
    while
        signal_received="" code=0
        wait "$child" || code=$?
        [[ -n $signal_received ]] && kill -0 "$child" 2> /dev/null
    do :; done
    if [[ -n $signal_received ]]; then
        code=0
        wait "$child" || code=$?
    fi
    trap - TERM INT
    return "$code"
}

print_sample() {
    log $'\na sample of the model, token by token on the CPU:'
    "$python" -m pretraining.tools.generate "$1" --prompt="def main(" --max_new_tokens=120
}

main "$@"
