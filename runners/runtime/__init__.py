"""ONNX Runtime and the machine: sessions, providers, threads, and whether files are what they were."""
