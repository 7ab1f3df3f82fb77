"""The model as people use it: messages or ids in, tokens with text and timings out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from qwen_onnx.errors import UserError
from qwen_onnx.runners.chat_template import ChatTemplate
from qwen_onnx.runners.constraint import as_constraint
from qwen_onnx.runners.detokenizer import StreamDetokenizer
from qwen_onnx.runners.generate import FinishReason, generate_ids
from qwen_onnx.runners.generation_defaults import read_defaults
from qwen_onnx.runners.generation_options import GenerationOptions, GenerationRequest
from qwen_onnx.runners.grammar import Grammars
from qwen_onnx.runners.runner import Runner
from qwen_onnx.runners.sampling_options import SamplingOptions, in_force
from qwen_onnx.runners.stop_strings import StopStrings, verified_stop
from qwen_onnx.runners.tokenizer import TOKENIZER_FILE, Tokenizer

Message = Mapping[str, object]
"""A chat message: `role` (system, user, assistant, tool) and `content`."""
Prompt = str | Sequence[int] | Sequence[Message]
"""A raw text, token ids, or chat messages."""
Tools = Sequence[Mapping[str, object]]
"""JSON schemas of functions, as OpenAI's API has them."""


@dataclasses.dataclass(frozen=True)
class Token:
    """One generated token."""

    token_id: int
    text: str
    """What became certain with it; may be empty, and holds more than one token's bytes after a held-back one."""
    finish_reason: FinishReason | None
    """None while the answer goes on."""
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt's tokens, those an earlier turn had left in the cache."""
    ttft_ms: float
    """Time to first token: from the call to the first token, in milliseconds."""
    tokens_per_s: float | None
    """Decoding speed so far, the first token (which is prefill) not counted; None at the first."""
    top_logits: tuple[tuple[int, float], ...] = ()
    logprob: float | None = None
    """ln of its probability, in float64, when asked for: the softmax of the model's own logits of all ids that name a
    token, before bias, penalties and temperature, as in OpenAI's API."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(id, the same) of the best ids, best first, when asked for."""


class Chat:
    """An exported model with its tokenizer, chat template and the cache of the conversation so far.

    One conversation at a time: each call reuses what the cache shares with the new prompt.
    """

    def __init__(self, runner: Runner) -> None:
        """`qwen_onnx.load` makes one of a folder."""
        folder = runner.folder
        self.runner = runner
        has_tokenizer = (folder / TOKENIZER_FILE).exists()
        self.tokenizer = Tokenizer.from_folder(folder) if has_tokenizer else None
        self.template = ChatTemplate.from_folder(folder) if has_tokenizer else None
        self.eos_token_ids = frozenset(runner.manifest.eos_token_ids)
        self.defaults = read_defaults(folder)
        self._cache = runner.new_cache()
        self._turn = 0
        self._size, self._holes = runner.manifest.vocab_size, np.empty(0, np.int64)
        if self.tokenizer is not None:
            self._size, self._holes = min(self._size, self.tokenizer.size), self.tokenizer.holes
        nameless = np.arange(runner.manifest.vocab_size) >= self._size
        nameless[self._holes] = True
        runner.exclude(nameless)

    @property
    def context_used(self) -> int:
        """Slots of the cache in use."""
        return self._cache.length

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache as it is now."""
        return self._cache.nbytes

    def prompt_ids(
        self, prompt: Prompt, *, tools: Tools | None = None, enable_thinking: bool | None = None
    ) -> list[int]:
        """Token ids of a raw text, of ids (as they are), or of messages under the chat template.

        Raises:
            UserError: the export has no tokenizer or template, they refuse the input, or an id has no row.
        """
        if isinstance(prompt, str):
            return self._tokenizer().encode(prompt)
        ids = [item for item in prompt if isinstance(item, int | np.integer) and not isinstance(item, bool)]
        if len(ids) == len(prompt):
            rows = self.runner.manifest.vocab_size
            for token_id in ids:  # now, as Python's numbers: an int64 would not hold each of them
                if not 0 <= token_id < rows:
                    raise UserError(f"token id {token_id} is outside the embedding's {rows} rows")
            return [int(token_id) for token_id in ids]
        messages = [item for item in prompt if isinstance(item, Mapping)]
        if len(messages) != len(prompt):
            raise UserError("a prompt is a text, a list of token ids or a list of messages, not a mixture")
        if self.template is None:
            raise UserError(f"{self.runner.folder}: has no chat template; give raw text or token ids")
        text = self.template.render(messages, tools=tools, enable_thinking=enable_thinking)
        return self._tokenizer().encode(text, add_special_tokens=False)

    def options(self, request: GenerationRequest) -> GenerationOptions:
        """The values that an answer goes by: those asked for, and of the rest what generation_config.json says.

        Raises:
            UserError: a value that this export has no use for.
        """
        stop = self.defaults.stop if request.stop is None else verified_stop(request.stop)
        if request.stop and self.tokenizer is None:
            raise UserError(f"{self.runner.folder}: has no {TOKENIZER_FILE}: no text, and so no stop strings")
        values = in_force(request.sampling, self.defaults.sampling)
        for token_id in values.logit_bias:
            if token_id >= self._size or token_id in self._holes:
                raise UserError(f"logit_bias of {token_id}: the id names no token")
        most, least = request.max_new_tokens, request.min_new_tokens
        return GenerationOptions(
            self.defaults.max_new_tokens if most is None else most,
            request.ignore_eos,
            request.top_logits,
            sampling=values,
            min_new_tokens=self.defaults.min_new_tokens if least is None else least,
            logprobs=request.logprobs,
            stop=stop,
            grammar=None if request.constraint is None else self._grammars.compile(request.constraint),
        )

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        ignore_eos: bool = False,
        top_logits: int = 0,
        sampling: SamplingOptions | None = None,
        stop: str | Sequence[str] | None = None,
        min_new_tokens: int | None = None,
        logprobs: int | None = None,
        json_schema: Mapping[str, object] | bool | str | None = None,
        regex: str | None = None,
        tools: Tools | None = None,
        enable_thinking: bool | None = None,
        reuse_cache: bool = True,
    ) -> Iterator[Token]:
        """Tokens after a raw text, token ids or chat messages; the options are those of `GenerationRequest`.

        What is None is as the export's generation_config.json, or its chat template, says.

        Args:
            json_schema, regex: the answer is JSON of this schema, or matches this expression: see `as_constraint`.

        Raises:
            UserError: an unusable prompt or option, or a prompt longer than the context; before any compute. And
                when another answer of this Chat was begun before this one ended.
            NonFiniteLogitsError: the model computed NaN or infinity.
        """
        request = GenerationRequest(
            max_new_tokens=max_new_tokens,
            ignore_eos=ignore_eos,
            top_logits=top_logits,
            sampling=SamplingOptions() if sampling is None else sampling,
            stop=stop,
            min_new_tokens=min_new_tokens,
            logprobs=logprobs,
            constraint=as_constraint(json_schema=json_schema, regex=regex),
            tools=tools,
            enable_thinking=enable_thinking,
            reuse_cache=reuse_cache,
        )
        yield from self.stream(prompt, request)

    def stream(self, prompt: Prompt, request: GenerationRequest) -> Iterator[Token]:
        """As `generate`, of a request that is made already."""
        options = self.options(request)
        started = time.perf_counter()
        self._turn = turn = self._turn + 1
        prompt_ids = self.prompt_ids(prompt, tools=request.tools, enable_thinking=request.enable_thinking)
        if not request.reuse_cache:
            self._cache.truncate(0)
        cached = self._cache.shared_prefix(prompt_ids[:-1])
        detokenizer = None if self.tokenizer is None else StreamDetokenizer(self.tokenizer)
        stops = StopStrings(options.stop)
        steps = generate_ids(
            self.runner,
            self._cache,
            prompt_ids,
            options,
            eos_token_ids=self.eos_token_ids,
            size=self._size,
            holes=self._holes,
        )
        first = 0.0
        for made, step in enumerate(steps, start=1):
            now = time.perf_counter()
            first = first or now
            reason = step.finish_reason
            # By its reason, not by being special: some tokenizers do not flag their end token.
            ended = reason is FinishReason.EOS
            text = "" if ended or detokenizer is None else detokenizer.push(step.token_id)
            if reason is not None and detokenizer:
                text += detokenizer.flush()
            text = stops.push(text, may_end=made > options.min_new_tokens)
            if stops.found:
                reason = FinishReason.STOP
                # Guesses that were right, and are not wanted; the id that ended it was not computed.
                self._cache.truncate(len(prompt_ids) + made - 1)
            elif reason is not None:
                text += stops.flush()
            yield Token(
                token_id=step.token_id,
                text=text,
                finish_reason=reason,
                prompt_tokens=len(prompt_ids),
                cached_tokens=cached,
                ttft_ms=1e3 * (first - started),
                tokens_per_s=(made - 1) / (now - first) if made > 1 else None,
                top_logits=step.top_logits,
                logprob=step.logprob,
                top_logprobs=step.top_logprobs,
            )
            if self._turn != turn:
                raise UserError(
                    "another answer was begun on this Chat; load the export once more for a second one"
                )
            if reason is not None:
                return

    @cached_property
    def _grammars(self) -> Grammars:
        if self.tokenizer is None:
            raise UserError(f"{self.runner.folder}: has no {TOKENIZER_FILE}: no text to hold to a constraint")
        return Grammars(self.tokenizer, size=self._size, eos_token_ids=self.eos_token_ids)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(f"{self.runner.folder}: has no {TOKENIZER_FILE}; give token ids")
        return self.tokenizer
