"""Graphs on NVIDIA GPUs: cuDNN's graph API and kernels of our own, memory and streams by CuPy."""
