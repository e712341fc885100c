"""Where tokens come from: Arrow IPC, Parquet and Megatron files, each described by one index of its documents."""
