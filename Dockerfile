# An image of this checkout in /workspace, with its packages.
#
#     docker build -t pretraining .                             # CPU build of torch, about 1.5 GB
#     docker build -t pretraining --build-arg DEVICE=cuda .     # CUDA build, about 7 GB
#     docker run --rm pretraining --num_steps=20                # the arguments of scripts/train.sh
#     docker run --rm --gpus=all --shm-size=8g --volume=/data:/data pretraining --data_path=/data/tokens \
#         --log_dir=/data/runs/first   # without it a run is in the container, and --rm removes it with its checkpoints
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS packages
ARG DEVICE=cpu
WORKDIR /workspace
COPY requirements.txt ./
COPY requirements requirements
COPY scripts/setup.sh scripts/
# setup.sh takes the CPU build where an index has it; PyPI has the CUDA build. Its stamp says what is installed, so that
# train.sh installs nothing. It needs bash; podman and buildah ignore SHELL.
RUN bash -c 'if [[ $DEVICE == cpu ]]; then export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu; fi \
    && export PIP_NO_CACHE_DIR=1 && source scripts/setup.sh && set_up requirements.txt \
    && { .venv/bin/python -m compileall -q .venv/lib || true; }' # the user of the image may not write there

FROM python:${PYTHON}-slim
# g++: torch.compile and Triton compile with it
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid=1000 trainer \
    && install --directory --owner=trainer /workspace
WORKDIR /workspace
COPY --from=packages --chown=trainer /workspace/.venv .venv
COPY --chown=trainer . .
USER 1000
ENTRYPOINT ["bash", "scripts/train.sh"]
