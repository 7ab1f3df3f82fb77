"""The loop: the ids that a cache lacks go in, logits come out, each sequence takes its next token."""

from __future__ import annotations

import collections.abc
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.errors import UserError, option
from qwen_onnx.runners.model.kv_cache import KVCache
from qwen_onnx.runners.model.logits_model import LogitsModel
from qwen_onnx.runners.output import Token
from qwen_onnx.runners.sampling.request import Request
from qwen_onnx.runners.sequence import Chosen, Sequence

SCORED_BYTES = 64 << 20
"""Most bytes of logits at a time."""

Sequences = collections.abc.Sequence[Sequence]


def verify_request(model: LogitsModel, request: Request) -> None:
    """Raises UserError where the model chooses or guesses ids by itself, and the request is not plain greedy."""
    verify_plain(request, on_device=model.chooses, speculate=model.scores)


def verify_plain(request: Request, *, on_device: bool, speculate: bool) -> None:
    """As `verify_request`, before there is a model."""
    if (on_device or speculate) and not request.plain:
        name = option("greedy_on_device" if on_device else "speculate")
        others = ", ".join(map(option, ("logit_bias", "min_new_tokens", "json_schema")))
        plain = (
            option("greedy") if option("greedy") != "greedy" else "**qwen_onnx.runners.sampling.params.GREEDY"
        )
        raise UserError(
            f"{name} is greedy: no sampling, penalties, {others} or {option('regex')}; {plain} leaves out those of "
            "generation_config.json"
        )


def verify_batch(model: LogitsModel, size: int) -> None:
    """Raises UserError where the model was opened for what goes one sequence at a time, or not so many."""
    verify_not_alone(on_device=model.chooses, speculate=model.scores)
    model.verify_batch_size(size)


def verify_not_alone(*, on_device: bool, speculate: bool) -> None:
    """As `verify_batch`, before there is a model."""
    for name, asked in (("greedy_on_device", on_device), ("speculate", speculate)):
        if asked:
            raise UserError(f"{option(name)} is for one prompt at a time, not for batches: leave it out")


def generate(
    model: LogitsModel, sequences: Sequences, cache: KVCache | None = None
) -> Iterator[tuple[Sequence, Token]]:
    """Each sequence and its next token, until all have ended; in the order of the sequences within a step.

    Padding takes up slots beside tokens, so a short row's slots may be full before its context is. It then goes on
    in a cache of its own, or of those that are left: it ends where it would alone.

    Args:
        cache: of one sequence: what it holds of the prompt is not computed again. None: new ones.

    Raises:
        UserError: an id outside the embedding, or no memory for a cache of so many rows; or a sequence has no token
            left to choose.
        NonFiniteLogitsError: the model computed NaN or infinity in some row.
    """
    while live := [sequence for sequence in sequences if sequence.finish_reason is None]:
        held = model.new_cache(batch_size=len(live)) if cache is None else cache
        step = _single_step if len(live) == 1 else _batch_step
        if len(live) == 1:
            # The last id is computed even where the cache holds it: its logits are what is needed.
            held.truncate(held.shared_prefix(live[0].token_ids[:-1]))
            live[0].cached_tokens = held.length if not live[0].made else live[0].cached_tokens
        while held.length < model.context_length:
            yield from step(model, held, live)
            if all(sequence.finish_reason is not None for sequence in live):
                break


def _single_step(model: LogitsModel, cache: KVCache, live: Sequences) -> Iterator[tuple[Sequence, Token]]:
    """One step of the one sequence: a token, or several where drafts of them were right."""
    (sequence,) = live
    found = _next_ids(model, cache, sequence)
    # What the cache holds are right ids; the last one is not computed yet.
    cache.truncate(len(sequence.token_ids) + len(found) - 1)
    for chosen in found:
        token = sequence.take(chosen)
        if token.finish_reason is not None:
            cache.truncate(len(sequence.token_ids) - 1)  # drafts that were right, and are not wanted
        yield sequence, token
        if token.finish_reason is not None:
            return


def _next_ids(model: LogitsModel, cache: KVCache, sequence: Sequence) -> list[Chosen]:
    """What comes after the ids that the cache lacks."""
    pending = sequence.token_ids[cache.length :]
    if model.chooses:
        greedy = model.decode_greedy if sequence.made else model.prefill_greedy
        token_id = int(greedy(cache, np.array([pending], np.int64))[0])
        return [Chosen(token_id, sequence.named(model.logits(cache)[0]) if sequence.reports else None)]
    drafts = sequence.drafts(_most_drafts(model, cache, len(pending))) if model.scores else []
    if not drafts:
        compute = model.decode if sequence.made and len(pending) == 1 else model.prefill
        return [sequence.choose(compute(cache, np.array([pending], np.int64))[0])]
    if len(pending) > 1:
        model.prefill(cache, np.array([pending[:-1]], np.int64))
    new_ids = np.array([[pending[-1], *drafts]], np.int64)
    return sequence.verified(model.score(cache, new_ids, new_ids.shape[1])[0], drafts)


def _most_drafts(model: LogitsModel, cache: KVCache, pending: int) -> int:
    """As many as the context, a step and the memory for logits hold beside the id before them."""
    room = model.context_length - cache.length - pending
    return min(room, model.chunk(cache, ahead=pending - 1) - 1, SCORED_BYTES // (4 * model.vocab_size) - 1)


def _batch_step(model: LogitsModel, cache: KVCache, live: Sequences) -> Iterator[tuple[Sequence, Token]]:
    """One step of all rows; those that have ended go along, and nobody looks at them."""
    if not cache.length:
        padded = left_padded([sequence.token_ids for sequence in live])
        logits = model.prefill(cache, padded.ids, padded.mask)
    else:
        logits = model.decode(cache, np.array([[sequence.token_ids[-1]] for sequence in live], np.int64))
    for sequence, row in zip(live, logits, strict=True):
        if sequence.finish_reason is None:
            yield sequence, sequence.step(row)


class Padded(NamedTuple):
    """Prompts side by side, int64 [batch, S] both."""

    ids: NDArray[np.int64]
    mask: NDArray[np.int64] | None
    """0 for padding; None where nothing is."""


def left_padded(prompts: collections.abc.Sequence[collections.abc.Sequence[int]]) -> Padded:
    """Prompts that end together; padding is id 0, which any embedding has."""
    width = max(map(len, prompts))
    ids = np.array([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], np.int64)
    if all(len(prompt) == width for prompt in prompts):
        return Padded(ids, None)
    return Padded(ids, np.array([[0] * (width - len(p)) + [1] * len(p) for p in prompts], np.int64))
