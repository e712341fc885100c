"""Token shards: which files of a folder they are, and where the documents of each are."""

MAGIC = b"ARROW1"  # what an Arrow file begins with
STREAM_MAGIC = b"\xff\xff\xff\xff"  # the continuation marker that begins every message of an Arrow stream
