"""The CPU backend: memory, lowered routines, generated kernels."""
