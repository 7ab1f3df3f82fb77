"""ONNX graphs of Qwen decoders, built with onnxscript.

Read: state, layers, rotary, attention, lowering, static, model, build; then contrib_ops, contrib, packed; quantised;
portable.
"""
