"""Token shards in, numpy batches out. Knows no torch, no device and no engine.

>>> stream = open_stream(config, rank, world_size)
>>> stream.batch(0)["tokens"]  # int32 [rows, seq_length]
"""

from pretraining.data.prefetch import Prefetcher
from pretraining.data.stream import IGNORED, Batch, Stream, check_data, open_stream, parts_of

__all__ = ["IGNORED", "Batch", "Prefetcher", "Stream", "check_data", "open_stream", "parts_of"]
