"""The values that one generation goes by."""

from __future__ import annotations

import dataclasses

from qwen_onnx.runners.sampling_options import Sampling


@dataclasses.dataclass(frozen=True)
class GenerationOptions:
    """What a generation goes by, once all is decided."""

    max_new_tokens: int | None = None
    """None: until the model ends or the context is full."""
    ignore_eos: bool = False
    top_logits: int = 0
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    min_new_tokens: int = 0
    """So many tokens come before an end token, or before the one that completes a stop string."""
    logprobs: int | None = None
    """How many of the best ids have theirs beside the chosen one; None for none at all."""
    stop: tuple[str, ...] = ()
    """Looked for in the text, which `generate_ids` does not make."""

    @property
    def plain(self) -> bool:
        """Each id is that of the best logit as the model computed it."""
        return self.sampling.plain and not self.min_new_tokens

    def describe(self) -> str:
        """The values in force, in two lines."""
        most = "none" if self.max_new_tokens is None else self.max_new_tokens
        stop = " ".join(map(repr, self.stop)) or "none"
        return (
            f"{self.sampling.describe()}\n"
            f"max_new_tokens {most}, min_new_tokens {self.min_new_tokens}, stop {stop}"
        )
