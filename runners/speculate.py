"""Greedy decoding several tokens a step: guesses taken from the context itself, verified by the model.

Prompt lookup (A. Saxena, 2023), a case of speculative decoding (arXiv:2211.17192): where the last tokens occurred
before, what followed them then is likely to follow now. Answers that quote their prompt gain; others lose little.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LONGEST_MATCH, SHORTEST_MATCH = 3, 2
"""Tokens that must have occurred before: longer is surer, shorter is oftener."""

MOST_DRAFTS = 7
"""With the token before them 8 are computed in a step."""

PAUSE = 16
"""Tokens without guesses after one that was all wrong twice in a row."""

NEAR = 1e-4
"""Where the best logit leads by less, as a share of its size or of 10, the token is computed alone: sums in another
order differ by 5e-6 of logits of order 5. (Products over quantized weights differ by a hundredth, since activations
round to another of 8 bits; hence no guesses there.)"""


class PromptLookup:
    """Guesses for one sequence, which grows by `extend`."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self._misses, self._pause = 0, 0
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens."""
        for token_id in token_ids:
            # Where each n-gram that ends here goes on; the last one, which goes on with nothing yet, is not in it.
            for length in range(SHORTEST_MATCH, LONGEST_MATCH + 1):
                if len(self._ids) >= length:
                    self._after[tuple(self._ids[-length:])] = len(self._ids)
            self._ids.append(token_id)

    def draft(self, most: int) -> list[int]:
        """What followed the latest earlier occurrence of the last tokens: at most so many, often none."""
        if self._pause:
            self._pause -= 1
            return []
        for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
            start = self._after.get(tuple(self._ids[-length:]))
            if start is not None:
                return self._ids[start : start + min(most, MOST_DRAFTS)]
        return []

    def learn(self, right: int) -> None:
        """How many of the guesses were right: none, time and again, and there will be none for a while."""
        self._misses = 0 if right else self._misses + 1
        if self._misses == 2:
            self._misses, self._pause = 0, PAUSE


def is_near(logits: NDArray[np.float32]) -> bool:
    """Whether another order of summing could make another id of f32 [vocab] the best."""
    second, best = np.partition(logits, -2)[-2:].tolist()
    return bool(best - second <= NEAR * max(10.0, abs(best)))
