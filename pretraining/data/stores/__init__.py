"""The formats of token shards: Arrow IPC, Parquet and Megatron. Each store reports where the documents are."""
