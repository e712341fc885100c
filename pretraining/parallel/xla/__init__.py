"""The xla engine. Sets, before any module of this package imports torch_xla, what XLA reads from the environment."""

from __future__ import annotations

import os

# XLA logs a deprecation notice of GSPMD at every compilation; errors still show. An exported value wins.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# XLA's CPU client has NPROC threads, or as many as there are cores or devices. Two programs in flight that both hold
# some while they wait for all devices hang: 2 of 3 runs of 1,500 such pairs did on two cores with 8 devices, and none
# of 8 runs of 4,000 with 16 threads.
if (devices := os.environ.get("CPU_NUM_DEVICES", "")).isdecimal() and int(devices) > 1:
    os.environ["NPROC"] = str(max(2 * int(devices), os.cpu_count() or 1))
has_own_flags = "XLA_FLAGS" in os.environ  # torch_xla adds to the variable
