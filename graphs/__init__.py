"""ONNX graphs of Qwen decoders, built with onnxscript. Read: state, layers, attention, static, model, build."""
