"""Which kernels exist and what their CUDA source is. Pure Python: no torch, no GPU, no compiling."""
