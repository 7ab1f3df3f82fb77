"""Runs exported folders on ONNX Runtime.

Read: session, providers, kv_cache, bindings, feeds, sliced_steps, fixed_steps, steps, runner; then sampling,
generate, chat; for TensorRT growing_steps, tensorrt, engine; libraries and driver tell what is installed.
"""
