"""NVIDIA's software: driver, CUDA libraries, TensorRT and its engines."""
