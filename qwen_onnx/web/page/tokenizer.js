// The tokenizer of an export, as the runner has it.

import { Tokenizer } from "./libraries/tokenizers.mjs";

/** Of reasoning and of calls: an answer is read by them, so they have text even where they are flagged as special. */
const TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"];

/**
 * {encode(text) -> ids, decode(ids) -> text, named: ids from here on name no token}.
 *
 * `beside`: added_tokens.json, {text: id}, which counts where tokenizer_config.json lists no added tokens.
 */
export function tokenizerOf(vocabulary, settings, beside = {}) {
  const listed = settings.added_tokens_decoder
    ? Object.entries(settings.added_tokens_decoder).map(([id, token]) => ({ ...token, id: Number(id) }))
    : Object.entries(beside).map(([content, id]) => ({ content, id, special: false, normalized: true }));
  const there = new Set(vocabulary.added_tokens.map(({ content }) => content));
  const added = [...vocabulary.added_tokens, ...listed.filter(({ content }) => !there.has(content))];
  const tokenizer = new Tokenizer({ ...vocabulary, added_tokens: added }, settings);
  tokenizer.special_tokens = tokenizer.special_tokens.filter((text) => !TAGS.includes(text));
  // The embedding may have more rows than there are tokens.
  const ids = [...Object.values(vocabulary.model.vocab), ...added.map(({ id }) => id)];
  return {
    named: 1 + ids.reduce((most, id) => Math.max(most, id), 0),
    encode: (text) => tokenizer.encode(text, { add_special_tokens: false }).ids,
    // The library refuses to decode nothing.
    decode: (made) =>
      made.length ? tokenizer.decode(made, { skip_special_tokens: true, clean_up_tokenization_spaces: false }) : "",
  };
}
