"""All of an export but its graphs: prompts become ids, options a request. What can be refused of them is, at once."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np

from qwen_onnx.contract.manifest import Manifest, read_manifest
from qwen_onnx.errors import UserError, option
from qwen_onnx.options import Given, given, made
from qwen_onnx.runners.runtime.integrity import verify_texts
from qwen_onnx.runners.sampling.generation_config import read_generation_config
from qwen_onnx.runners.sampling.grammar import Grammar, Grammars
from qwen_onnx.runners.sampling.params import merged
from qwen_onnx.runners.sampling.request import Request
from qwen_onnx.runners.sequence import verify_prompt
from qwen_onnx.runners.text.prompts import Prompt, PromptEncoder, PromptIds
from qwen_onnx.runners.text.tokenizer import TOKENIZER_FILE
from qwen_onnx.runners.text.vocabulary import Vocabulary


class Processor:
    """Tokenizer, chat template and generation_config.json of an export. Several Chats may share one."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Of files that were verified; `of` reads and verifies them."""
        self.folder, self.manifest = folder, manifest
        self.prompts = PromptEncoder(folder, rows=manifest.vocab_size)
        self.tokenizer, self.template = self.prompts.tokenizer, self.prompts.template
        self.eos_token_ids = frozenset(manifest.eos_token_ids)
        self.generation_config = read_generation_config(folder)
        """What holds where a request says nothing."""
        self.vocabulary = Vocabulary.of(manifest.vocab_size, self.eos_token_ids, self.tokenizer)

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Of an exported folder; no graph and no weights are opened.

        Raises:
            UserError: not an export, or one of these files is damaged.
        """
        manifest = read_manifest(folder)
        verify_texts(folder, manifest)
        return cls(folder, manifest)

    def request(self, options: Given) -> Request:
        """See `Chat.request`."""
        asked = given(Request, options)
        request = made(Request, merged(self.generation_config.given, asked))
        if "stop" in asked and request.stops and self.tokenizer is None:
            raise UserError(f"{self.folder}: has no {TOKENIZER_FILE}: no text, and so no stop strings")
        for token_id in request.logit_bias:
            if self.vocabulary.nameless(np.array(token_id)):
                raise UserError(f"{option('logit_bias')} of {token_id}: the id names no token")
        return request

    def verified_ids(self, prompt: Prompt, request: Request, *, context_length: int) -> PromptIds:
        """The prompt's ids, as this request wants them.

        Raises:
            UserError: whatever `Chat.generate` would refuse of it before any compute.
        """
        prompt_ids = self.prompts.encode(prompt, **request.of_prompt, most=context_length)
        verify_prompt(prompt_ids, context_length)
        return prompt_ids

    def grammar(self, request: Request) -> Grammar | None:
        """Of the request's constraint; the last one is kept.

        Raises:
            UserError: it cannot be compiled, or the export has no text to hold to it.
        """
        return None if request.constraint is None else self._grammars.compile(request.constraint)

    @cached_property
    def _grammars(self) -> Grammars:
        if self.tokenizer is None:
            raise UserError(f"{self.folder}: has no {TOKENIZER_FILE}: no text to hold to a constraint")
        return Grammars(self.tokenizer, self.vocabulary)
