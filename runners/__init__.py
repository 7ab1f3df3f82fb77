"""Runs exported folders on ONNX Runtime. Read: session, kv_cache, runner, sampling, generate, chat."""
