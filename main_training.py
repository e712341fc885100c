"""Pretrain a Llama variant: `python main_training.py --name=value ...`, or `bash scripts/train.sh`."""

from __future__ import annotations

from pretraining.config.flags import run
from pretraining.config.script import exit_with
from pretraining.configure import CHECKS
from pretraining.parallel.rendezvous import report
from pretraining.run import train


def main(**flags: str) -> int:
    """Pretrain a Llama variant: `train` has the parts of a run in their order."""
    return train(flags).code


if __name__ == "__main__":
    exit_with(lambda: run(main, checks=CHECKS, report=report))
