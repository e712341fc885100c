#!/usr/bin/env bash
# A TPU slice of several hosts, with gcloud:
#
#     export ZONE=us-east5-b TYPE=v6e-16 VERSION=v2-alpha-tpuv6e PROJECT=...
#     bash scripts/tpu_pod.sh create NAME        # a queued resource; SPOT=yes asks for spot capacity
#     bash scripts/tpu_pod.sh wait NAME          # until it is there
#     bash scripts/tpu_pod.sh copy NAME          # this checkout to every host
#     bash scripts/tpu_pod.sh train NAME --data_path=gs://BUCKET/tokens --ckpt_save_path=gs://BUCKET/run [--flag=value ...]
#     bash scripts/tpu_pod.sh delete NAME
#
# Hosts share no folder, so data and checkpoints are in object storage. Training runs on every host in one command, in
# the foreground, and the output of all hosts is shown; the same command continues it. Several hosts need one process
# each, which the xla engine has.
set -euo pipefail

folder=pretraining # on the hosts, in the home folder

main() {
    if (($# < 2)); then
        echo "usage: bash scripts/tpu_pod.sh create|wait|copy|train|delete NAME [--flag=value ...]" >&2
        exit 2
    fi
    local action=$1 name=$2
    shift 2
    : "${ZONE:?is not set: the zone of the slice, such as us-east5-b}"
    where=(--zone="$ZONE" ${PROJECT:+--project="$PROJECT"})
    case $action in
        create) create "$name" ;;
        wait) wait_for "$name" ;;
        copy) copy "$name" ;;
        train) train "$name" "$@" ;;
        delete) gcloud compute tpus queued-resources delete "$name" --force --quiet "${where[@]}" ;;
        *)
            echo "$action: no such action; create, wait, copy, train or delete" >&2
            exit 2
            ;;
    esac
}

create() {
    : "${TYPE:?is not set: the kind and size of the slice, such as v6e-16}"
    : "${VERSION:?is not set: the image of the hosts, such as v2-alpha-tpuv6e}"
    gcloud compute tpus queued-resources create "$1" --node-id="$1" --accelerator-type="$TYPE" \
        --runtime-version="$VERSION" ${SPOT:+--spot} "${where[@]}"
}

wait_for() {
    local state
    while true; do
        state=$(gcloud compute tpus queued-resources describe "$1" --format="value(state.state)" "${where[@]}")
        echo "$1 is $state"
        case $state in
            ACTIVE) return ;;
            FAILED | SUSPENDING | SUSPENDED | DELETING) return 1 ;;
        esac
        sleep "${WAIT_SECONDS:-20}"
    done
}

# The files that git tracks as they are here, committed or not, and new ones in pretraining/ and scripts/
copy() {
    local archive others
    archive=$(mktemp --suffix=.tar.gz)
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    export GIT_INDEX_FILE=$archive.index
    git read-tree HEAD
    git add --update
    git add --all pretraining scripts
    git archive --format=tar.gz --output="$archive" "$(git write-tree)"
    others=$(git ls-files --others --exclude-standard --directory)
    [[ -z $others ]] || echo "not copied, because git does not track it: ${others//$'\n'/, }" >&2
    gcloud compute tpus tpu-vm scp "$archive" "$1:checkout.tar.gz" --worker=all "${where[@]}"
    rm "$archive" "$archive.index"
    # An extension whose folder was deleted here is deleted there, too
    on_every_host "$1" "mkdir -p $folder && cd $folder && rm -rf pretraining scripts && tar -xzf ../checkout.tar.gz"
}

train() {
    local name=$1 flags
    shift
    flags=$(printf ' %q' --engine=xla "$@")
    on_every_host "$name" "cd $folder && PJRT_DEVICE=TPU bash scripts/train.sh$flags"
}

on_every_host() {
    gcloud compute tpus tpu-vm ssh "$1" --worker=all --command="$2" "${where[@]}"
}

main "$@"
