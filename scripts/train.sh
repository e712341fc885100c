#!/usr/bin/env bash
# Train: bash scripts/train.sh [--flag=value ...]
#
# Passes the settings below and then your flags to main_training.py; of a repeated flag the last value counts. Without
# data of your own it first prepares a small corpus, the source code of Python's standard library, and at the end prints
# a sample of the trained model. With --config_file or --import_config, the settings below are not used.
# Returns the exit code of the training: 0 finished, 2 a mistake in the configuration, 3 training stopped itself, 4 the
# time of --max_run_seconds is up, 143 after SIGTERM, 130 after SIGINT, 141 if the reader of the output has gone. The
# same command again continues the run.
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
    --num_steps=54
    --optimizer=muon
    --learning_rate=1.4e-2
    --init_std=0.05  # 0.02 suits hidden sizes of thousands, and learns more slowly here
    # fp32, because most CPUs have no bf16 units: a step in mixed precision takes several times as long. On TPUs and
    # GPUs, remove this.
    --mixed_precision=False

    --report_interval=1
    --checkpoint_interval=27
)
# Not with another --optimizer. 0.95, the default, averages the gradients of 20 steps, which suits runs of thousands
of_muon=--optimizer_args=momentum=0.5
corpus=data/stdlib

main() {
    local requirements=requirements.txt options=() flags=("${settings[@]}") gpus
    has_flag 'optimizer=' "$@" || flags+=("$of_muon")
    gpus=$(count_gpus)
    if [[ ${ENGINE:-} == torch ]] && is_tpu_host; then
        use_torch_tpu
        requirements=requirements/torchtpu.txt options+=(--torch_tpu)
    fi
    set_up "$requirements"
    if has_flag 'help(=|$)' "$@" || [[ " $* " == *" -h "* ]]; then
        exec "$python" main_training.py "$@"
    fi

    # Without an accelerator, use the CPU backend of XLA with eight virtual devices
    if ! is_tpu_host && [[ $gpus == 0 ]]; then
        export PJRT_DEVICE=${PJRT_DEVICE:-CPU}
    fi
    if [[ ${PJRT_DEVICE:-} == CPU ]]; then
        export CPU_NUM_DEVICES=${CPU_NUM_DEVICES:-8}
    fi

    if has_flag '(import_config|config_file)' "$@"; then
        flags=() # the file replaces the settings above, and names its data
    elif ! has_flag '(data_path|use_dummy_dataset($|=([TtYy1]|[Oo][Nn])))' "$@"; then
        prepare_corpus
        while IFS= read -r flag; do
            flags+=("$flag")
        done < "$corpus/flags.txt"
        options+=(--sample="def main(")
    fi
    export SCRIPT_SETTINGS="${flags[*]}" # their source is printed at the start
    exec "$python" -m pretraining.tools.launch --gpus="$gpus" ${options[@]+"${options[@]}"} main_training.py \
        ${flags[@]+"${flags[@]}"} ${ENGINE:+"--engine=$ENGINE"} "$@"
}

# Whether the beginning of a flag's name, of name=value or of name value matches a pattern, in which a "=" stands between
# them; dashes count as underscores.
has_flag() {
    local word="" next
    for next in "${@:2}" ""; do
        [[ -z $next || $next == --* || $word == *=* ]] || word+="=$next"
        [[ ${word//-/_} =~ ^__$1 ]] && return
        word=$next
    done
    return 1
}

prepare_corpus() {
    [[ ! -f $corpus/flags.txt ]] || return 0 # written last
    lock
    "$python" -m pretraining.tools.prepare --stdlib --output="$corpus"
    unlock
}

main "$@"
