// WebAssembly in Node. It opens no files: the graph and its weights are handed over as bytes.

import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";

import * as ort from "onnxruntime-web";

import { cases, versionOf, writeResult } from "./cases.mjs";
import { runCases } from "./loop.mjs";

ort.env.wasm.numThreads = 1;
const model = join(cases.folder, cases.model);
const weights = cases.external ?? "weights.safetensors";
const session = await ort.InferenceSession.create(readFileSync(model), {
  executionProviders: ["wasm"],
  externalData: [{ path: weights, data: readFileSync(join(dirname(model), weights)) }],
});
writeResult("onnxruntime-web (wasm, Node)", versionOf("onnxruntime-web"), await runCases(ort, session, cases));
