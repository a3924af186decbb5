"""gpuyard over REST: the Python client and the `gpuyard` command."""
