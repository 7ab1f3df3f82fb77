"""`python -m qwen_onnx`: the `qwen-onnx` command."""

from qwen_onnx.cli.main import main

main()
