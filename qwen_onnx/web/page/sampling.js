// From logits to an id. Names, order and formulas are those of the terminal's sampler (runners/sampling/logits.py).

/** What was set, and of the rest what generation_config.json says. A temperature of 0 is greedy. */
export function samplingOf({ temperature }, config) {
  const own = config.temperature ?? 1;
  const draws = temperature === undefined ? Boolean(config.do_sample) && own > 0 : temperature > 0;
  return {
    draws,
    temperature: temperature ?? own,
    topK: config.top_k ?? 0,
    topP: config.top_p ?? 1,
    minP: config.min_p ?? 0,
    repetitionPenalty: config.repetition_penalty ?? 1,
  };
}

/**
 * Chooses one of the first `named` ids.
 * @param seen ids of prompt and answer
 * @param random from 0 to 1, without 1
 */
export function choose(logits, named, seen, sampling, random = Math.random) {
  const scores = Float32Array.from(logits.subarray(0, named));
  const penalty = sampling.repetitionPenalty;
  if (penalty !== 1) {
    for (const id of new Set(seen)) if (id < named) scores[id] *= scores[id] < 0 ? penalty : 1 / penalty;
  }
  let best = 0;
  for (let id = 1; id < named; id++) if (scores[id] > scores[best]) best = id;
  if (!Number.isFinite(scores[best])) throw new Error("The model computed numbers that are none. Try WebAssembly.");
  if (!sampling.draws) return best;

  let least = -Infinity;
  if (sampling.topK > 0 && sampling.topK < named) least = Float32Array.from(scores).sort()[named - sampling.topK];
  let candidates = [];
  let total = 0;
  for (let id = 0; id < named; id++) {
    if (scores[id] < least) continue;
    const weight = Math.exp((scores[id] - scores[best]) / sampling.temperature);
    if (!(weight > 0)) continue;
    candidates.push({ id, weight });
    total += weight;
  }
  if (sampling.topP < 1) {
    candidates.sort((a, b) => b.weight - a.weight || a.id - b.id);
    let reached = 0;
    let count = 0;
    while (count < candidates.length && (count === 0 || reached < sampling.topP * total)) {
      reached += candidates[count++].weight;
    }
    candidates = candidates.slice(0, count);
  }
  if (sampling.minP > 0) candidates = candidates.filter(({ weight }) => weight >= sampling.minP);
  let left = random() * candidates.reduce((sum, { weight }) => sum + weight, 0);
  for (const { id, weight } of candidates) if ((left -= weight) < 0) return id;
  return candidates.at(-1).id;
}
