#!/usr/bin/env bash
# Compare meshes and engines on this host: bash docs/journeys/benchmarker.sh [flags of every run]
#
# Trains a small model on counters, with the same global batch on three meshes and both engines, and writes one page
# that compares the six runs: speed, memory, losses and where the time went. DEVICES is the number of virtual devices
# (xla) and of processes (torch) on a host without an accelerator, 4 unless it is set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=runs/benchmark-$(date +%Y%m%d-%H%M%S) devices=${DEVICES:-4}
declare -A meshes=(
    [fsdp]="--sharding_strategy=fsdp"
    [hsdp]="--sharding_strategy=hsdp --sharding_group_size=2"
    [tensor]="--sharding_strategy=fsdp --tensor_parallel_size=2 --sequence_parallel=True"
)

runs=()
for mesh in fsdp hsdp tensor; do
    read -ra flags <<< "${meshes[$mesh]}"
    for engine in xla torch; do
        echo "== $mesh on the $engine engine: ${flags[*]}"
        runs+=("$folder/$mesh-$engine")
        processes=1
        [[ $engine == xla ]] || processes=$devices
        NPROC=$processes CPU_NUM_DEVICES=$devices bash scripts/train.sh --use_dummy_dataset=True --num_steps=20 \
            --engine="$engine" "${flags[@]}" "$@" --log_dir="${runs[-1]}"
    done
done

echo "== The six of them on one page"
.venv/bin/python -m pretraining.tools.report "${runs[@]}" --output="$folder/report.html"
