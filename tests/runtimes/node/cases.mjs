// What every run_*.mjs reads and writes: node run_X.mjs CASES.json RESULT.json

import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";

const [casesPath, resultPath] = process.argv.slice(2);

export const cases = JSON.parse(readFileSync(casesPath, "utf8"));

/** The version of an installed package. */
export function versionOf(name) {
  // Not every package lets its package.json be imported: it lies above the entry point.
  let folder = new URL("./", `file://${createRequire(import.meta.url).resolve(name)}`);
  for (;;) {
    try {
      const found = JSON.parse(readFileSync(new URL("package.json", folder), "utf8"));
      if (found.name === name) return found.version;
    } catch (error) {
      if (error.code !== "ENOENT") throw error;
    }
    folder = new URL("../", folder);
  }
}

/** Writes RESULT.json, and the logits beside it as little-endian f32. */
export function writeResult(runtime, version, { logits, ...ids }) {
  const path = logits ? resultPath.replace(/\.json$/, "") + ".f32" : null;
  if (path) writeFileSync(path, new Uint8Array(logits.buffer, logits.byteOffset, logits.byteLength));
  writeFileSync(resultPath, JSON.stringify({ runtime, version, ...ids, logits: path }));
}
