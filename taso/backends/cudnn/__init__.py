"""The NVIDIA backend: cuDNN's graph API and own CUDA kernels, through CuPy."""
