"""Runs exported folders on ONNX Runtime.

Read chat, generate, sequence; then sampling/ for the choice of a token, text/ for prompts and answers, model/ for
logits over a KV cache, and runtime/ for sessions. session_file, score and speculate stand beside.
"""
