"""Token shards in, numpy batches out."""

from pretraining.data.prefetch import Prefetcher
from pretraining.data.stream import Batch, Stream, open_stream

__all__ = ["Batch", "Prefetcher", "Stream", "open_stream"]
