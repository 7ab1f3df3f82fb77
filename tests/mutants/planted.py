"""Faults that the tests let pass when they were tried first: what each is, the file, what stands there, the fault."""

from __future__ import annotations

LAYERS = "graphs/layers.py"
WEIGHTS = "qwen_onnx/exports/weights.py"
PLANTED = [
    ("eps of a plain norm", LAYERS, "axis=-1, epsilon=self.eps,", "axis=-1, epsilon=1e-6,"),
    ("eps of a fused norm", LAYERS, "delta, weight, epsilon=self.eps)", "delta, weight, epsilon=1e-6)"),
    ("eps of a portable norm", LAYERS, "op.Add(mean_square, self.eps)", "op.Add(mean_square, 1e-6)"),
    ("bf16 to f16, the smallest exponent", WEIGHTS, "size -= 1 << 7  #", "size -= 0 << 7  #"),
    ("bf16 to f16, the largest exponent", WEIGHTS, "size >= 30 << 7", "size >= 31 << 7"),
    (
        "a tensor is of the first shard that has one of its name",
        "qwen_onnx/checkpoints/checkpoint.py",
        "tensors[name] = headers[file][name]",
        "tensors[name] = next(header[name] for header in headers.values() if name in header)",
    ),
    (
        "a session's hash is without the tokenizer",
        "runners/session_file.py",
        '("config.json", "tokenizer.json")',
        '("config.json",)',
    ),
    ("a batch's key is without the files", "qwen_onnx/cli/batch/run.py", "runner.manifest.files, ", ""),
    (
        "right guesses after an end token stay in the cache",
        "runners/generate.py",
        "cache.truncate(len(sequence.token_ids) - 1)  #",
        "pass  #",
    ),
    ("near ties are not computed again", "runners/sequence.py", "= is_near(named)", "= False"),
    (
        "ends of YaRN's ramp are whole",
        "qwen_onnx/checkpoints/rope.py",
        'truncate=read.boolean("truncate", "truncate" not in rope)',
        "truncate=True",
    ),
    ("equal ends of YaRN's ramp", "qwen_onnx/exports/rotary.py", "high += 0.001", "high += 1"),
    (
        "a detokenizer's window after a flush",
        "runners/text/detokenizer.py",
        "text = self._give()\n        self._given = []",
        "text = self._give()",
    ),
    (
        "a side file is not copied",
        "qwen_onnx/exports/writer.py",
        "for name in side_files(self.checkpoint.folder):",
        "for name in side_files(self.checkpoint.folder)[:-1]:",
    ),
    (
        "grouped attention of a head_dim that is no power of two",
        "graphs/static.py",
        "op.Mul(q_B1X, size**-0.5)",
        "op.Mul(q_B1X, (1 << size.bit_length() - 1) ** -0.5)",
    ),
]
