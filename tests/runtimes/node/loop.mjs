// Greedy decoding over a growing cache with ONNX Runtime's JavaScript API: in Node, in WebAssembly, in a browser.

const CACHE_ARRAYS = { float32: Float32Array, float16: globalThis.Float16Array ?? Uint16Array };

/** Rows of one batch, as long as each other: what is shorter is padded on the left. */
class Batch {
  constructor(ort, session, cases, rows) {
    Object.assign(this, { ort, session });
    this.masks = Array.from({ length: rows }, () => []);
    this.past = {};
    for (let layer = 0; layer < cases.layers; layer++) {
      for (const part of ["key", "value"]) {
        this.past[`${layer}.${part}`] = new ort.Tensor(
          cases.dtype,
          new CACHE_ARRAYS[cases.dtype](0),
          [rows, cases.kv_heads, 0, cases.head_dim],
        );
      }
    }
  }

  /** Feeds S ids a row, with 0 in the mask where one is padding; gives each row's logits. */
  async step(ids, masks = ids.map((row) => row.map(() => 1))) {
    const rows = ids.length;
    const queries = ids[0].length;
    masks.forEach((mask, row) => this.masks[row].push(...mask));
    const positions = this.masks.map((mask) => {
      let seen = 0;
      return mask.map((bit) => Math.max((seen += bit) - 1, 0)).slice(-queries);
    });
    const feeds = {
      input_ids: this.integers(ids),
      attention_mask: this.integers(this.masks),
      position_ids: this.integers(positions),
    };
    for (const [name, tensor] of Object.entries(this.past)) feeds[`past_key_values.${name}`] = tensor;
    const outputs = await this.session.run(feeds);
    for (const name of Object.keys(this.past)) this.past[name] = outputs[`present.${name}`];

    const { data, dims } = outputs.logits;
    if (dims[0] !== rows || dims[1] !== 1) throw new Error(`logits of shape ${dims}`);
    return Array.from({ length: rows }, (_, row) => data.slice(row * dims[2], (row + 1) * dims[2]));
  }

  /** Chooses `steps` ids a row, the first one by `logits`; all but the last are fed. */
  async greedy(logits, steps, seen = () => {}) {
    const made = logits.map(() => []);
    for (;;) {
      seen(logits);
      const chosen = logits.map(argmax);
      chosen.forEach((id, row) => made[row].push(id));
      if (made[0].length === steps) return made;
      logits = await this.step(chosen.map((id) => [id]));
    }
  }

  integers(rows) {
    const flat = BigInt64Array.from(rows.flat(), BigInt);
    return new this.ort.Tensor("int64", flat, [rows.length, rows[0].length]);
  }
}

/** Runs what CASES.json asks for; `logits` are those that the ids of `prompt` were chosen by, one after another. */
export async function runCases(ort, session, cases) {
  const { prompt, steps } = cases;
  const chat = new Batch(ort, session, cases, 1);
  const seen = [];
  const [first] = await chat.greedy(await chat.step([prompt]), steps, ([row]) => seen.push(row));
  const turn = await chat.step([[first.at(-1), ...cases.turn]]);
  const [second] = await chat.greedy(turn, cases.turn_steps);

  const batch = new Batch(ort, session, cases, cases.batch.length);
  const longest = Math.max(...cases.batch.map((row) => row.length));
  const padded = (row, pad, real) => [...Array(longest - row.length).fill(pad), ...row.map(real)];
  const begun = await batch.step(
    cases.batch.map((row) => padded(row, cases.pad, (id) => id)),
    cases.batch.map((row) => padded(row, 0, () => 1)),
  );
  const rows = await batch.greedy(begun, cases.batch_steps);

  const chunks = new Batch(ort, session, cases, 1);
  const half = Math.ceil(prompt.length / 2);
  await chunks.step([prompt.slice(0, half)]);
  const [chunked] = await chunks.greedy(await chunks.step([prompt.slice(half)]), steps);

  const logits = new Float32Array(seen.length * seen[0].length);
  seen.forEach((row, index) => logits.set(row, index * row.length));
  return { prompt: first, turn: second, batch: rows, chunked, logits };
}

export function argmax(values) {
  let best = 0;
  for (let index = 1; index < values.length; index++) if (values[index] > values[best]) best = index;
  return best;
}
