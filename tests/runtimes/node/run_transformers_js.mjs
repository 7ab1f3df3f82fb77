// transformers.js over a folder in its layout, at the level of generate().

import { basename, dirname } from "node:path";

import { AutoModelForCausalLM, Tensor, env } from "@huggingface/transformers";

import { cases, versionOf, writeResult } from "./cases.mjs";

env.allowRemoteModels = false;
env.localModelPath = `${dirname(cases.folder)}/`;
const model = await AutoModelForCausalLM.from_pretrained(basename(cases.folder), {
  dtype: cases.dtype === "float16" ? "fp16" : "fp32",
  device: "cpu",
});

const integers = (rows) =>
  new Tensor("int64", BigInt64Array.from(rows.flat(), BigInt), [rows.length, rows[0].length]);

/** Greedy ids after each row; an end token does not end it, and may be chosen. */
async function generate(rows, masks, steps, { past = null, seen = () => {} } = {}) {
  const { sequences, past_key_values } = await model.generate({
    inputs: integers(rows),
    attention_mask: integers(masks),
    past_key_values: past,
    max_new_tokens: steps,
    do_sample: false,
    eos_token_id: null,
    logits_processor: [
      (_, logits) => {
        seen(logits);
        return logits;
      },
    ],
    return_dict_in_generate: true,
  });
  const made = sequences.tolist().map((row, index) => row.slice(rows[index].length).map(Number));
  return { made, past: past_key_values };
}

const ones = (rows) => rows.map((row) => row.map(() => 1));
const seen = [];
const first = await generate([cases.prompt], ones([cases.prompt]), cases.steps, {
  seen: (logits) => seen.push(Float32Array.from(logits.data)),
});
const history = [...cases.prompt, ...first.made[0], ...cases.turn];
const second = await generate([history], ones([history]), cases.turn_steps, { past: first.past });

const longest = Math.max(...cases.batch.map((row) => row.length));
const padded = (row, pad, real) => [...Array(longest - row.length).fill(pad), ...row.map(real)];
const batch = await generate(
  cases.batch.map((row) => padded(row, cases.pad, (id) => id)),
  cases.batch.map((row) => padded(row, 0, () => 1)),
  cases.batch_steps,
);

const logits = new Float32Array(seen.length * seen[0].length);
seen.forEach((row, index) => logits.set(row, index * row.length));
writeResult("transformers.js", versionOf("@huggingface/transformers"), {
  prompt: first.made[0],
  turn: second.made[0],
  batch: batch.made,
  chunked: null,
  logits,
});
