"""`qwen-onnx web`: a model as a chat page on this machine."""
