// The model, in a worker: the page stays responsive while a token is computed.
//
// The page asks for one thing at a time (load, begin, next) and gets one answer; who wants no more tokens stops
// asking. The cache stays: of a prompt, only what comes after its common beginning with the last one is computed.

import { backends, threads } from "./backend.js";
import { OPEN, withRoom } from "./context.js";
import { bytes, file, json } from "./files.js";
import { choose, samplingOf } from "./sampling.js";
import { templateOf } from "./template.js";
import { tokenizerOf } from "./tokenizer.js";

const PAST = "past_key_values.";
const GRAPH = "model.onnx";
const CHUNK = 128; // tokens of a prompt at once: between two, the page can say stop
const MOST_TOKENS = 1024;
const BINARIES = { wasm: "ort-wasm-simd-threaded.wasm", webgpu: "ort-wasm-simd-threaded.asyncify.wasm" };

let ort, tokenizer, template, session, manifest, config, named, held, left, made, prompted, sampling, most;
const past = {};

const actions = {
  async load({ folder, device }) {
    manifest = await json(folder, "export.json");
    const [vocabulary, settings] = await Promise.all(
      ["tokenizer.json", "tokenizer_config.json"].map((name) => json(folder, name)),
    );
    const optional = (name) => (name in manifest.files ? json(folder, name) : {});
    config = await optional("generation_config.json");
    tokenizer = tokenizerOf(vocabulary, settings, await optional("added_tokens.json"));
    template = await templateOf(folder, manifest.files, settings);
    named = Math.min(tokenizer.named, manifest.vocab_size);

    const names = Object.keys(manifest.files).filter((name) => name.endsWith(".safetensors")); // several, if linked
    const total = [GRAPH, ...names].reduce((sum, name) => sum + manifest.files[name].size, 0);
    let done = 0;
    const progress = (size) => postMessage({ progress: { done: (done += size), total } });
    const graph = await bytes(folder, GRAPH, manifest.files[GRAPH].size, progress);
    const externalData = [];
    for (const path of names) {
      externalData.push({ path, data: await bytes(folder, path, manifest.files[path].size, progress) });
    }
    const tried = [];
    for (const { device: chosen, label } of await backends(device, manifest.dtype)) {
      try {
        await open(chosen, graph, externalData);
        holdNothing();
        return {
          model: manifest.model_id,
          dtype: manifest.dtype,
          backend: tried.length ? `${label} (${tried.join("; ")})` : label,
          temperature: config.do_sample ? (config.temperature ?? 1) : 0,
          maxTokens: config.max_new_tokens ?? MOST_TOKENS,
          thinking: template.thinking,
        };
      } catch (error) {
        tried.push(`${label} failed: ${error.message ?? error}`);
      }
    }
    throw new Error(tried.join("; "));
  },

  /** Takes a conversation; `next` then reads it, and answers. */
  async begin({ messages, settings }) {
    most = settings.maxTokens ?? config.max_new_tokens ?? MOST_TOKENS;
    sampling = samplingOf(settings, config);
    const { context_length: length } = manifest;
    const system = settings.system ? [{ role: "system", content: settings.system }] : [];
    const encode = (texts) => {
      const prompt = template.render(texts, settings.thinking);
      return { prompt, ids: tokenizer.encode(prompt) };
    };
    const count = (texts) => encode(texts).ids.length;
    const { kept, dropped } = withRoom([...system, ...messages], Math.min(most, Math.floor(length / 4)), length, count);
    const { prompt, ids } = encode(kept);
    if (ids.length >= length) {
      throw new Error(`This is ${ids.length} tokens long, and the context holds ${length}. Shorten it.`);
    }
    let shared = 0;
    // The last token is computed anew in any case: its logits are what is wanted.
    while (shared < ids.length - 1 && ids[shared] === held[shared]) shared++;
    if (shared < held.length) {
      for (const name of Object.keys(past)) hold(name, await cut(past[name], shared));
      held.length = shared;
    }
    [made, left, prompted] = [[], ids.slice(shared), ids];
    return { prompt: ids.length, cached: shared, dropped, begun: prompt.trimEnd().endsWith(OPEN) };
  },

  /** How far the prompt is read, as long as it is; then a token at a time. */
  async next() {
    if (left.length > CHUNK) {
      await feed(left.slice(0, CHUNK));
      left = left.slice(CHUNK);
      return { read: held.length };
    }
    const logits = await feed(left.length ? left : [made.at(-1)]);
    left = [];
    const id = choose(logits, named, [...prompted, ...made], sampling);
    const ended = manifest.eos_token_ids.includes(id);
    if (!ended) made.push(id);
    const decoded = tokenizer.decode(made);
    const full = held.length >= manifest.context_length;
    const finish = ended ? "eos" : full ? "context" : made.length >= most ? "length" : null;
    // A character may take several tokens: half of one is kept back until the rest comes, or nothing more does.
    return { text: finish ? decoded : decoded.replace(/\uFFFD+$/, ""), finish };
  },
};

/** Makes the session of this backend. */
async function open(device, graph, externalData) {
  ort = await import(`./libraries/ort.${device}.min.mjs`);
  const libraries = new URL("./libraries/", import.meta.url);
  ort.env.wasm.wasmPaths = libraries.href;
  ort.env.wasm.wasmBinary = await (await file(libraries, BINARIES[device])).arrayBuffer();
  ort.env.wasm.numThreads = threads();
  session = await ort.InferenceSession.create(graph, {
    executionProviders: [device],
    externalData,
    // On a GPU the cache stays there, and only logits come back.
    preferredOutputLocation: device === "webgpu" ? cacheOn("gpu-buffer") : undefined,
  });
}

/** Feeds ids after those that are held; the logits after the last one. */
async function feed(ids) {
  const length = held.length + ids.length;
  const outputs = await session.run({
    input_ids: integers(ids),
    attention_mask: integers(Array(length).fill(1)), // over the held tokens and the new ones
    position_ids: integers(ids.map((_, index) => held.length + index)),
    ...past,
  });
  for (const name of Object.keys(past)) hold(name, outputs[name.replace("past_key_values", "present")]);
  held.push(...ids);
  return outputs.logits.data; // of the last token only
}

/** Every key and value tensor is there, and 0 tokens long. */
function holdNothing() {
  held = [];
  const arrays = { float32: Float32Array, float16: globalThis.Float16Array ?? Uint16Array };
  for (const { name, type, shape } of session.inputMetadata) {
    if (!name.startsWith(PAST)) continue;
    hold(name, new ort.Tensor(type, new arrays[type](0), [1, shape[1], 0, shape[3]]));
  }
}

/** Nobody else frees what lies on a GPU. */
function hold(name, tensor) {
  past[name]?.dispose();
  past[name] = tensor;
}

/** The first tokens of a key or value tensor. */
async function cut(tensor, kept) {
  const data = await tensor.getData();
  const [rows, heads, length, size] = tensor.dims;
  const shorter = new data.constructor(rows * heads * kept * size);
  for (let head = 0; head < rows * heads; head++) {
    const start = head * length * size;
    shorter.set(data.subarray(start, start + kept * size), head * kept * size);
  }
  return new ort.Tensor(tensor.type, shorter, [rows, heads, kept, size]);
}

function cacheOn(location) {
  const { outputs } = manifest.graphs.find((graph) => graph.file === GRAPH);
  return Object.fromEntries(
    outputs.filter(({ name }) => name !== "logits").map(({ name }) => [name, location]),
  );
}

function integers(values) {
  return new ort.Tensor("int64", BigInt64Array.from(values, BigInt), [1, values.length]);
}

self.onmessage = async ({ data: { action, value } }) => {
  try {
    postMessage({ answer: (await actions[action](value)) ?? {} });
  } catch (error) {
    postMessage({ error: error.message ?? String(error) });
  }
};
