"""The model as people use it: messages or ids in, tokens with text and timings out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from qwen_onnx.errors import UserError
from qwen_onnx.runners.batch import Row, generate_rows, verify_batches
from qwen_onnx.runners.generate import AnswerIds, FinishReason, generate_ids, verify_prompt
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.sampling.constraint import as_constraint
from qwen_onnx.runners.sampling.generation_config import read_defaults
from qwen_onnx.runners.sampling.grammar import Grammars
from qwen_onnx.runners.sampling.params import SamplingOptions, in_force
from qwen_onnx.runners.sampling.request import GenerationOptions, GenerationRequest
from qwen_onnx.runners.score import Score, score_ids
from qwen_onnx.runners.session_file import load_session, save_session
from qwen_onnx.runners.stream import AnswerTokens
from qwen_onnx.runners.stream import Token as Token
from qwen_onnx.runners.text.prompts import Message as Message
from qwen_onnx.runners.text.prompts import Prompt as Prompt
from qwen_onnx.runners.text.prompts import PromptEncoder, Tools
from qwen_onnx.runners.text.stop_strings import verified_stop
from qwen_onnx.runners.text.tokenizer import TOKENIZER_FILE, Tokenizer
from qwen_onnx.runners.text.vocabulary import Vocabulary


class Chat:
    """An exported model with its tokenizer, chat template and the cache of the conversation so far.

    One conversation at a time, and one thread: each call reuses what the cache shares with the new prompt. Several
    conversations are several Chats, which may share a Runner.
    """

    def __init__(self, runner: Runner) -> None:
        """`qwen_onnx.load` makes one of a folder."""
        folder = runner.folder
        self.runner = runner
        self._prompts = PromptEncoder(folder, rows=runner.manifest.vocab_size)
        self.tokenizer, self.template = self._prompts.tokenizer, self._prompts.template
        self.eos_token_ids = frozenset(runner.manifest.eos_token_ids)
        self.defaults = read_defaults(folder)
        self._cache = runner.new_cache()
        self._turn = 0
        self._vocabulary = _vocabulary(runner, self.tokenizer)
        runner.exclude(self._vocabulary.nameless(np.arange(runner.manifest.vocab_size)))

    @property
    def context_used(self) -> int:
        """Slots of the cache in use."""
        return self._cache.length

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache as it is now."""
        return self._cache.nbytes

    @property
    def slot_bytes(self) -> int:
        """Bytes that each token takes in the cache."""
        return self._cache.slot_bytes

    def prompt_ids(
        self,
        prompt: Prompt,
        *,
        tools: Tools | None = None,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a raw text, of ids (as they are), or of messages under the chat template.

        Args:
            add_generation_prompt: messages end where the model is to answer.

        Raises:
            UserError: the export has no tokenizer or template, they refuse the input, or an id has no row.
        """
        return self._prompts.encode(
            prompt, tools=tools, enable_thinking=enable_thinking, add_generation_prompt=add_generation_prompt
        )

    def score(self, prompt: Prompt) -> Score:
        """How likely the model finds a text, token ids or a conversation; the Chat's own cache stays what it is.

        The `score` graph is opened at the first call, weights that are in private memory once more for it; where the
        export has none for the provider, the tokens go one by one.

        Raises:
            UserError: as `generate`, or fewer than two tokens.
            NonFiniteLogitsError: the model computed NaN or infinity.
        """
        ids = self.prompt_ids(prompt, add_generation_prompt=False)
        return score_ids(self.runner, ids, self._vocabulary)

    def rewind(self, prompt: Prompt) -> None:
        """Forget all of the cache that this prompt does not begin with, as if no more had ever been said.

        Raises:
            UserError: as `prompt_ids`.
        """
        ids = self.prompt_ids(prompt, add_generation_prompt=False) if prompt else []
        self._cache.truncate(self._cache.shared_prefix(ids))

    def save(self, path: str | Path, *, messages: Sequence[Message] = ()) -> None:
        """Write the conversation's cache to a file, and messages for whoever loads it; a file, or nothing new.

        Raises:
            UserError: it cannot be written, or what stands at `path` is no saved session.
        """
        save_session(Path(path), self._cache, self.runner.manifest, messages)

    def load(self, path: str | Path) -> list[Message]:
        """Go on with a saved conversation in place of this one; the messages it was saved with.

        A prompt that begins like it computes only what is new. Where the cache is of another type here (f16 on a GPU,
        f32 on a CPU), the file's is left where it is and the next prompt is computed anew.

        Raises:
            UserError: no session that this model saved, a damaged one, or one longer than the context; the
                conversation is then what it was.
        """
        cache, messages = load_session(Path(path), self.runner)
        self._turn, self._cache = self._turn + 1, cache
        return list(messages)

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
            if self._vocabulary.nameless(np.array(token_id)):
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
        tokens = AnswerTokens(
            self.tokenizer, options, prompt_tokens=len(prompt_ids), cached_tokens=cached, started=started
        )
        steps = generate_ids(self.runner, self._cache, prompt_ids, options, self._vocabulary)
        for made, step in enumerate(steps, start=1):
            token = tokens.push(step)
            if token.finish_reason is FinishReason.STOP:
                # Guesses that were right, and are not wanted; the id that ended it was not computed.
                self._cache.truncate(len(prompt_ids) + made - 1)
            yield token
            if self._turn != turn:
                raise UserError(
                    "another answer was begun on this Chat, or a session loaded; make a Chat for each conversation"
                )
            if token.finish_reason is not None:
                return

    def generate_batch(
        self, prompts: Sequence[Prompt], request: GenerationRequest | Sequence[GenerationRequest]
    ) -> Iterator[tuple[int, Token]]:
        """Answers to several prompts, one decode step for all: pairs of a prompt's index and its next token.

        Each draws, ends and is reported as if it were alone. The conversation that this Chat holds is not touched.

        Args:
            request: of all prompts, or one for each; `reuse_cache` has no meaning here.

        Raises:
            UserError: as `generate`, naming the prompt as prompts[INDEX]; before any compute. Or opened with
                `speculate` or `greedy_on_device`, or on TensorRT, which are for one sequence.
            NonFiniteLogitsError: as `generate`, whichever prompt it was; the other answers are cut off too.
        """
        requests = [request] * len(prompts) if isinstance(request, GenerationRequest) else request
        if len(requests) != len(prompts):
            raise UserError(f"{len(prompts)} prompts and {len(requests)} requests: one for each wanted")
        started = time.perf_counter()
        verify_batches(self.runner, len(prompts))
        rows: list[Row] = []
        for prompt, of_prompt in zip(prompts, requests, strict=True):
            try:
                rows.append(self._row(prompt, of_prompt, started))
            except UserError as error:
                raise UserError(f"prompts[{len(rows)}]: {error}") from None
        yield from generate_rows(self.runner, rows)

    def verified_ids(self, prompt: Prompt, request: GenerationRequest) -> list[int]:
        """The prompt's ids.

        Raises:
            UserError: whatever `stream` would refuse before any compute.
        """
        self.options(request)
        return self._verified_ids(prompt, request)

    def _verified_ids(self, prompt: Prompt, request: GenerationRequest) -> list[int]:
        prompt_ids = self.prompt_ids(prompt, tools=request.tools, enable_thinking=request.enable_thinking)
        verify_prompt(prompt_ids, self.runner.context_length)
        return prompt_ids

    def _row(self, prompt: Prompt, request: GenerationRequest, started: float) -> Row:
        prompt_ids, options = self._verified_ids(prompt, request), self.options(request)
        ids = AnswerIds(prompt_ids, options, self._vocabulary, context_length=self.runner.context_length)
        tokens = AnswerTokens(self.tokenizer, options, prompt_tokens=len(prompt_ids), started=started)
        return Row(prompt_ids, ids, tokens, ended=options.max_new_tokens == 0)

    @cached_property
    def _grammars(self) -> Grammars:
        if self.tokenizer is None:
            raise UserError(f"{self.runner.folder}: has no {TOKENIZER_FILE}: no text to hold to a constraint")
        return Grammars(self.tokenizer, self._vocabulary)


def _vocabulary(runner: Runner, tokenizer: Tokenizer | None) -> Vocabulary:
    rows, ends = runner.manifest.vocab_size, frozenset(runner.manifest.eos_token_ids)
    if tokenizer is None:
        return Vocabulary(rows, eos_token_ids=ends)
    size = min(rows, tokenizer.size)
    return Vocabulary(size, tokenizer.holes[tokenizer.holes < size], ends)
