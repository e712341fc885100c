#!/usr/bin/env bash
# Plan a run before renting devices: bash docs/journeys/planner.sh [MODEL [KIND TOPOLOGY [flags of the run]]]
#
# Prints the plan of llama3_8b on a slice of TPUs, ranks the meshes for the same global batch, plans again with the
# flags of the best one, and lets the TPU's own compiler check it, which needs no TPU: two to four minutes on two idle
# cores and 5 to 6 GB of memory for 8 B parameters. The compiler is in requirements/tpu-aot.txt. For GPUs, replace the
# topology by --plan_devices and leave out the compiler.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
model=${1:-llama3_8b} kind=${2:-v6e} topology=${3:-4x4}
slice=(--model_variant="$model" --plan_device_kind="$kind" --plan_topology="$topology")

plan() {
    .venv/bin/python main_training.py --plan "${slice[@]}" "$@"
}

echo "== The plan"
plan --sharding_strategy=fsdp --batch_size=1 "${@:4}"

echo "== The meshes that fit, the fastest first"
ranking=$(plan --sharding_strategy=fsdp --batch_size=1 "${@:4}" --plan_search)
echo "$ranking"

# Every row ends with the flags that make it.
best=$(grep --max-count=1 --only-matching -- '--sharding_strategy=.*' <<< "$ranking")
read -ra flags <<< "$best"

echo "== The best mesh, checked by the compiler: $best"
plan "${@:4}" "${flags[@]}" --plan_compile
