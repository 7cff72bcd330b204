"""NVIDIA GPUs: cuDNN's graphs, kernels of our own, and CuPy for memory and streams."""
