// Greedy decoding of a portable export with onnxruntime-node and @huggingface/tokenizers, and nothing else.
//
// node loop.mjs FOLDER PROMPT MAX_NEW_TOKENS

import { readFileSync } from "node:fs";
import { join } from "node:path";

import { Tokenizer } from "@huggingface/tokenizers";
import ort from "onnxruntime-node";

const CACHE_ARRAYS = { float32: Float32Array, float16: globalThis.Float16Array ?? Uint16Array };

async function generate(folder, prompt, maxNewTokens) {
  const json = (name) => JSON.parse(readFileSync(join(folder, name), "utf8"));
  const manifest = json("export.json");
  const vocabulary = json("tokenizer.json");
  const tokenizer = new Tokenizer(vocabulary, json("tokenizer_config.json"));
  const session = await ort.InferenceSession.create(join(folder, "model.onnx"));

  // The embedding may have more rows than there are tokens: ids from here on name none.
  let named = 0;
  for (const id of Object.values(vocabulary.model.vocab)) named = Math.max(named, id + 1);
  for (const { id } of vocabulary.added_tokens) named = Math.max(named, id + 1);

  // Nothing is held at first: every key and value tensor is there, and 0 tokens long.
  let past = {};
  for (const { name, type, shape } of session.inputMetadata) {
    if (!name.startsWith("past_key_values.")) continue;
    past[name] = new ort.Tensor(type, new CACHE_ARRAYS[type](0), [1, shape[1], 0, shape[3]]);
  }

  const integers = (values) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), [1, values.length]);
  const made = [];
  let held = 0;
  let step = tokenizer.encode(prompt, { add_special_tokens: false }).ids;
  const most = manifest.context_length;
  if (!step.length || step.length > most) throw `1 to ${most} tokens of prompt wanted, found ${step.length}`;
  while (made.length < maxNewTokens && held + step.length <= most) {
    const length = held + step.length;
    const outputs = await session.run({
      input_ids: integers(step),
      attention_mask: integers(Array(length).fill(1)), // over the held tokens and the new ones
      position_ids: integers(step.map((_, index) => held + index)),
      ...past,
    });
    held = length;
    for (const name of Object.keys(past)) past[name] = outputs[name.replace("past_key_values", "present")];

    const logits = outputs.logits.data; // of the last token only
    let best = 0;
    for (let id = 1; id < named; id++) if (logits[id] > logits[best]) best = id;
    step = [best];
    made.push(best);
    if (manifest.eos_token_ids.includes(best)) break;
  }
  return made;
}

const [folder, prompt, maxNewTokens] = process.argv.slice(2);
if (!maxNewTokens) {
  console.error("node loop.mjs FOLDER PROMPT MAX_NEW_TOKENS");
  process.exit(2);
}
console.log(JSON.stringify(await generate(folder, prompt, Number(maxNewTokens))));
