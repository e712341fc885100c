#!/usr/bin/env bash
# Bring a run of another trainer: bash docs/journeys/migrant.sh FILE [--vocab_size=N and other flags]
#
# FILE is a configuration of NxD Training, NeMo or GPT-NeoX. Prints what becomes of each of its keys, plans it on GPUs,
# trains three steps of a small model of the same kind on this host, and exports that to Hugging Face's format. DEVICES
# is the number of GPUs, 8 unless it is set; if the file's mesh or batch cannot be divided by it, the error says what can.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
imported=(--import_config="${1:?give a configuration file}" "${@:2}")
run=runs/migrant-$(basename "${1%.*}")

echo "== What becomes of each key"
.venv/bin/python main_training.py "${imported[@]}" --import_only

devices=${DEVICES:-8}
echo "== On $devices GPUs"
.venv/bin/python main_training.py "${imported[@]}" --import_pp=fold --plan \
    --plan_devices="$devices" --plan_device_kind=h100

echo "== Three steps here"
small=(--num_layers=2 --hidden_size=64 --intermediate_size=128 --num_attention_heads=4 --num_kv_heads=4 --seq_length=32)
one_cpu=(--engine=torch --device=cpu --import_pp=fold --tensor_parallel_size=1 --context_parallel_size=1)
steps=(--num_steps=3 --lr_warmup_steps=1 --lr_decay_steps=3 --batch_size=1 --global_batch_size=4
    --report_interval=1 --checkpoint_interval=3)
.venv/bin/python main_training.py "${imported[@]}" "${small[@]}" "${one_cpu[@]}" "${steps[@]}" \
    --use_dummy_dataset --log_dir="$run"

echo "== Exported"
.venv/bin/python -m pretraining.tools.convert "$run" "$run/exported"
ls "$run/exported"
