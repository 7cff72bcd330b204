"""The oneDNN backend; `library` and `primitives` are its raw layer over the C API."""
