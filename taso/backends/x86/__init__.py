"""Machine code for x86-64 processors with AVX-512, written at run time: an assembler and kernels for sizes at hand."""
