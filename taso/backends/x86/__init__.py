"""Machine code for x86-64 with AVX-512 or AVX2, written at run time: an assembler and kernels for sizes at hand."""
