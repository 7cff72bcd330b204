"""CUDA C++ of our own for what cuDNN lacks, or does in more passes over memory: text, and how it is launched."""
