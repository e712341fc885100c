"""Processes that wait for each other while they read and write."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.processes import run_together

TIMEOUT = 4  # s


def main() -> None:
    """Be one of the two processes. Rank 0 prints that it waited for the other one, and whether it lost it."""
    import torch.distributed as dist

    from pretraining.checkpoint.peers import Peers
    from pretraining.config.script import lost_peer

    dist.init_process_group("gloo")
    peers = Peers(timeout=TIMEOUT)
    numbers = peers.agree(os.getpid)
    peers.agree(lambda: time.sleep(2 * TIMEOUT * peers.rank))
    peers.lead(lambda: time.sleep(2 * TIMEOUT))
    print("waited for a slow one", flush=True)
    try:
        peers.agree(lambda: os.kill(os.getpid(), signal.SIGSTOP) if peers.rank else None)
    except RuntimeError as error:
        print(bool(lost_peer(error)), flush=True)
    os.kill(numbers[1], signal.SIGKILL)
    os._exit(0)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_slow_process_is_waited_for_and_one_that_gives_no_answer_is_lost() -> None:
    (_, output), _ = run_together("-m", "tests.checkpoint.test_peers")
    assert output[-2:] == ["waited for a slow one", "True"]  # gloo prints lines, too


if __name__ == "__main__":
    main()
