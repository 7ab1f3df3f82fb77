// The model, in a worker: the page stays responsive while a token is computed.
//
// The page asks for one thing at a time (load, begin, next) and gets one answer; who wants no more tokens stops
// asking. The cache stays: of a prompt, only what comes after its common beginning with the last one is computed.

const PAST = "past_key_values.";

let ort, tokenizer, template, session, manifest, named, held, made;
const past = {};

const actions = {
  async load({ folder, device }) {
    const [{ Tokenizer }, { Template }] = await Promise.all([script("tokenizers.mjs"), script("jinja.mjs")]);
    ort = await script(`ort.${device}.min.mjs`);
    ort.env.wasm.wasmPaths = new URL("./ort/", import.meta.url).href;
    // Threads need shared memory, which a page has only behind COOP and COEP headers.
    ort.env.wasm.numThreads = self.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency) : 1;

    const [vocabulary, settings] = await Promise.all(
      ["tokenizer.json", "tokenizer_config.json"].map((name) => json(folder, name)),
    );
    manifest = await json(folder, "export.json");
    tokenizer = new Tokenizer(vocabulary, settings);
    const written = "chat_template.jinja" in manifest.files;
    const source = written ? await (await file(folder, "chat_template.jinja")).text() : settings.chat_template;
    template = typeof source === "string" ? new Template(source) : { render: chatml };
    // The embedding may have more rows than there are tokens: ids from here on name none.
    named = 1 + Object.values(vocabulary.model.vocab).reduce((a, b) => Math.max(a, b), 0);
    for (const { id } of vocabulary.added_tokens) named = Math.max(named, id + 1);

    const graph = await bytes(folder, "model.onnx");
    // One file, unless the export links to those of the checkpoint.
    const externalData = [];
    for (const path of Object.keys(manifest.files).filter((name) => name.endsWith(".safetensors"))) {
      externalData.push({ path, data: await bytes(folder, path, (share) => postMessage({ share })) });
    }
    session = await ort.InferenceSession.create(graph, {
      executionProviders: [device],
      externalData,
      // On a GPU the cache stays there, and only logits come back.
      preferredOutputLocation: device === "webgpu" ? cacheOn("gpu-buffer") : undefined,
    });
    holdNothing();
    return { model: manifest.model_id, dtype: manifest.dtype, threads: ort.env.wasm.numThreads };
  },

  /** The first token of the answer to a whole conversation. */
  async begin(messages) {
    const prompt = template.render({ messages, add_generation_prompt: true });
    const { ids } = tokenizer.encode(prompt, { add_special_tokens: false });
    if (ids.length >= manifest.context_length) {
      throw new Error(`${ids.length} tokens of conversation do not fit a context of ${manifest.context_length}.`);
    }
    let shared = 0;
    // The last token is computed anew in any case: its logits are what is wanted.
    while (shared < ids.length - 1 && ids[shared] === held[shared]) shared++;
    if (shared < held.length) {
      for (const name of Object.keys(past)) hold(name, await cut(past[name], shared));
      held.length = shared;
    }
    made = [];
    return { prompt: ids.length, cached: shared, ...(await step(ids.slice(shared))) };
  },

  async next() {
    return step([made.at(-1)]);
  },
};

/** Feeds ids, and chooses the next one. */
async function step(ids) {
  const length = held.length + ids.length;
  const outputs = await session.run({
    input_ids: integers(ids),
    attention_mask: integers(Array(length).fill(1)), // over the held tokens and the new ones
    position_ids: integers(ids.map((_, index) => held.length + index)),
    ...past,
  });
  for (const name of Object.keys(past)) hold(name, outputs[name.replace("past_key_values", "present")]);
  held.push(...ids);

  const logits = outputs.logits.data; // of the last token only
  let best = 0;
  for (let id = 1; id < named; id++) if (logits[id] > logits[best]) best = id;
  const ended = manifest.eos_token_ids.includes(best);
  if (!ended) made.push(best);
  const decoded = tokenizer.decode(made, { skip_special_tokens: true, clean_up_tokenization_spaces: false });
  const full = held.length >= manifest.context_length;
  // A character may take several tokens: half of one is kept back until the rest comes, or nothing more does.
  const text = ended || full ? decoded : decoded.replace(/\uFFFD+$/, "");
  return { text, finish: ended ? "eos" : full ? "context" : null };
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
  const outputs = manifest.graphs[0].outputs.map(({ name }) => name);
  return Object.fromEntries(outputs.filter((name) => name !== "logits").map((name) => [name, location]));
}

function integers(values) {
  return new ort.Tensor("int64", BigInt64Array.from(values, BigInt), [1, values.length]);
}

/** What Qwen's templates come down to, for a folder that has none. */
function chatml({ messages }) {
  const turns = messages.map(({ role, content }) => `<|im_start|>${role}\n${content}<|im_end|>\n`);
  return `${turns.join("")}<|im_start|>assistant\n`;
}

async function script(name) {
  const url = new URL(`./ort/${name}`, import.meta.url);
  try {
    return await import(url);
  } catch {
    throw new Error(`${url} cannot be loaded. Copy the scripts into ort/ first: docs/embedding.md says how.`);
  }
}

async function file(folder, name) {
  const url = new URL(name, folder);
  const response = await fetch(url).catch(() => ({ ok: false, status: "no answer" }));
  if (!response.ok) {
    throw new Error(`${url}: ${response.status}. Export a model there: qwen-onnx export tiny tiny --target portable`);
  }
  return response;
}

async function json(folder, name) {
  return (await file(folder, name)).json();
}

/** A file's bytes; `progress` gets the share that has come, where the server says how much there is. */
async function bytes(folder, name, progress) {
  const response = await file(folder, name);
  const size = Number(response.headers.get("content-length"));
  if (!progress || !size || response.headers.get("content-encoding")) {
    return new Uint8Array(await response.arrayBuffer());
  }
  const whole = new Uint8Array(size);
  let come = 0;
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) break;
    whole.set(value, come);
    come += value.length;
    progress(come / size);
  }
  if (come < size) throw new Error(`${name}: ${come} of ${size} bytes came.`);
  return whole;
}

self.onmessage = async ({ data: { action, value } }) => {
  try {
    postMessage({ answer: (await actions[action](value)) ?? {} });
  } catch (error) {
    postMessage({ error: error.message ?? String(error) });
  }
};
