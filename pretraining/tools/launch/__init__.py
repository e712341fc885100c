"""Start the processes of a run on this host, and again after they died. scripts/train.sh ends as this program."""
