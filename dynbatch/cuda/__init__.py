"""The CUDA backend: batched operators run by a GPU, or by whatever implements its `Driver`."""
