"""ONNX graphs of Qwen decoders, built with onnxscript.

Read lowerings, model, layers, cache, static and build; then blocks, panels, contrib and portable.
"""
