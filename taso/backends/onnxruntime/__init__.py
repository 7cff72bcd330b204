"""The ONNX Runtime backend, for those who deploy there: what it makes of a graph is what a graph costs."""
