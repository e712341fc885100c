"""A minimal recipe that pretrains a Llama variant on TPUs, GPUs and plain CPUs."""
