"""Token shards: which files of a folder they are, and where the documents of each are."""
