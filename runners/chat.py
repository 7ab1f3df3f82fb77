"""The model as people use it: messages or ids in, tokens with text and timings out."""

from __future__ import annotations

import collections.abc
import threading
import time
from collections.abc import Iterator

import numpy as np

from qwen_onnx.errors import UserError
from qwen_onnx.options import Given, method_options
from qwen_onnx.runners.answers import Answers
from qwen_onnx.runners.conversation import Conversation
from qwen_onnx.runners.generate import generate, verify_batch, verify_request
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.output import Token as Token
from qwen_onnx.runners.processor import Processor
from qwen_onnx.runners.sampling.request import Request
from qwen_onnx.runners.score import Score, score_ids
from qwen_onnx.runners.sequence import Sequence
from qwen_onnx.runners.text.prompts import Message as Message
from qwen_onnx.runners.text.prompts import Prompt as Prompt
from qwen_onnx.runners.text.prompts import PromptIds, Tools


class Chat(Answers, Conversation):
    """An exported model with its tokenizer, chat template and the cache of the conversation so far.

    One conversation at a time: each call reuses what the cache shares with the new prompt. Several conversations are
    several Chats, which may share a Runner and with it the weights: `Chat(first.runner)`. Of answers that are begun
    while another goes on, in whatever thread, the last one goes on and the others end with an error.
    """

    def __init__(self, runner: Runner, processor: Processor | None = None) -> None:
        """`qwen_onnx.load` makes one of a folder; `processor` is of the same export, read anew where it is None."""
        super().__init__(runner)
        self._answering = threading.Lock()
        self.processor = processor = processor or Processor(runner.folder, runner.manifest)
        self.tokenizer, self.template = processor.tokenizer, processor.template
        self.eos_token_ids = processor.eos_token_ids
        self.generation_config = processor.generation_config
        """What holds where a request says nothing."""
        runner.exclude(processor.vocabulary.nameless(np.arange(runner.manifest.vocab_size)))

    @property
    def has_template(self) -> bool:
        """See Answers."""
        return self.template is not None

    def prompt_ids(
        self,
        prompt: Prompt,
        *,
        tools: Tools | None = None,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        escape_special: bool = False,
        close_reasoning: bool = False,
        most: int | None = None,
    ) -> PromptIds:
        """Token ids of a raw text, of ids (as they are), or of messages under the chat template.

        Args:
            add_generation_prompt: messages end where the model is to answer.
            chat_template, escape_special: as the options of `generate`.
            close_reasoning: where the template begins the reasoning, end it: the answer comes at once.
            most: tokens that the text may be; one that is far longer is refused before all of it is encoded.

        Raises:
            UserError: the export has no tokenizer or template, they refuse the input, or an id has no row.
        """
        return self.processor.prompts.encode(
            prompt, tools=tools, enable_thinking=enable_thinking, add_generation_prompt=add_generation_prompt,
            chat_template=chat_template, escape_special=escape_special, close_reasoning=close_reasoning,
            most=most,
        )  # fmt: skip

    def request(self, options: Given) -> Request:
        """The request that an answer goes by: what is given, and of the rest what generation_config.json says.

        Args:
            options: values of Request by field name.

        Raises:
            UserError: an unknown name, or a value that is wrong or that this export has no use for.
        """
        return self.processor.request(options)

    @method_options(Request)
    def generate(self, prompt: Prompt, options: Given) -> Iterator[Token]:
        """Tokens after a raw text, token ids or chat messages.

        What is not given, or None, is as the export's generation_config.json, or its chat template, says.

        Raises:
            UserError: an unusable prompt or option, or a prompt longer than the context; before any compute. And
                when another answer of this Chat was begun before this one ended.
            NonFiniteLogitsError: the model computed NaN or infinity.
        """
        started = time.perf_counter()
        sequence = self._sequence(prompt, options, started)
        verify_request(self.runner, sequence.request)
        steps = self._in_turn(
            lambda cache: generate(self.runner, [sequence], cache), reuse_cache=sequence.request.reuse_cache
        )
        for _, token in steps:
            yield token
            if token.finish_reason is not None:
                return

    @method_options(Request)
    def generate_batch(
        self, prompts: collections.abc.Sequence[Prompt], options: Given
    ) -> Iterator[tuple[int, Token]]:
        """Answers to several prompts, one decode step for all: pairs of a prompt's index and its next token.

        Each draws, ends and is reported as if it were alone. The conversation that this Chat holds is not touched.

        Raises:
            UserError: as `generate`, naming the prompt as prompts[INDEX]; before any compute. Or opened with
                `speculate` or `greedy_on_device`, or on TensorRT, which are for one sequence.
            NonFiniteLogitsError: as `generate`, whichever prompt it was; the other answers are cut off too.
        """
        _verify_prompts(prompts)
        return self.generate_each(prompts, [options] * len(prompts))

    def generate_each(
        self, prompts: collections.abc.Sequence[Prompt], options: collections.abc.Sequence[Given]
    ) -> Iterator[tuple[int, Token]]:
        """As `generate_batch`, with options of its own for each prompt; `reuse_cache` has no meaning here."""
        _verify_prompts(prompts)
        if len(options) != len(prompts):
            raise UserError(f"{len(prompts)} prompts and options of {len(options)}: one for each wanted")
        started = time.perf_counter()
        verify_batch(self.runner, len(prompts))
        sequences: dict[Sequence, int] = {}
        for index, (prompt, own) in enumerate(zip(prompts, options, strict=True)):
            try:
                sequences[self._sequence(prompt, own, started)] = index
            except UserError as error:
                raise UserError(f"prompts[{index}]: {error}") from None
        for sequence, token in generate(self.runner, [*sequences]):
            yield sequences[sequence], token

    def score(self, prompt: Prompt) -> Score:
        """How likely the model finds a text, token ids or a conversation; the Chat's own cache stays what it is.

        The `score` graph is opened at the first call, weights that are in private memory once more for it; where the
        export has none for the provider, the tokens go one by one.

        Raises:
            UserError: as `generate`, or fewer than two tokens.
            NonFiniteLogitsError: the model computed NaN or infinity.
        """
        ids = self.prompt_ids(prompt, add_generation_prompt=False)
        return score_ids(self.runner, ids, self.processor.vocabulary)

    def rewind(self, prompt: Prompt) -> None:
        """Forget all of the cache that this prompt does not begin with, as if no more had ever been said.

        Raises:
            UserError: as `prompt_ids`.
        """
        ids = self.prompt_ids(prompt, add_generation_prompt=False) if prompt else []
        self._forget_other_than(ids)

    def verified_ids(self, prompt: Prompt, options: Given) -> PromptIds:
        """The prompt's ids, as these options want them.

        Raises:
            UserError: whatever `generate` would refuse before any compute.
        """
        return self._encoded(prompt, self.request(options))

    def _encoded(self, prompt: Prompt, request: Request) -> PromptIds:
        return self.processor.verified_ids(prompt, request, context_length=self.runner.context_length)

    def _sequence(self, prompt: Prompt, options: Given, started: float) -> Sequence:
        request = self.request(options)
        prompt_ids = self._encoded(prompt, request)
        return Sequence(
            prompt_ids,
            request,
            self.processor.vocabulary,
            context_length=self.runner.context_length,
            tokenizer=self.tokenizer,
            begun=None if request.constraint else prompt_ids.begun,
            grammar=self.processor.grammar(request),
            speculate=self.runner.scores,
            started=started,
        )


def _verify_prompts(prompts: object) -> None:
    """Raises UserError for one prompt in the place of several: each of its characters would be one."""
    if isinstance(prompts, str | bytes | bytearray | collections.abc.Mapping) or not hasattr(
        prompts, "__len__"
    ):
        found = repr(prompts) if isinstance(prompts, str) else type(prompts).__name__
        raise UserError(f"a list of prompts wanted, found {found}; for one prompt give a list of it")
