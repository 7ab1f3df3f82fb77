// onnxruntime-web's WebAssembly in headless Chromium.

import { createReadStream, existsSync } from "node:fs";
import { createServer } from "node:http";
import { dirname, extname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { cases, versionOf, writeResult } from "./cases.mjs";
import { launch } from "./chromium.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const folders = {
  ort: join(here, "node_modules/onnxruntime-web/dist"),
  model: cases.folder,
  script: here,
};
const types = { ".mjs": "text/javascript", ".wasm": "application/wasm" };

const server = createServer((request, response) => {
  const [, folder, ...rest] = new URL(request.url, "http://localhost").pathname.split("/");
  if (!folder) return response.setHeader("content-type", "text/html").end("<!doctype html><title>run</title>");
  const path = folders[folder] && !rest.includes("..") ? join(folders[folder], ...rest) : "";
  if (!existsSync(path)) return response.writeHead(404).end();
  response.setHeader("content-type", types[extname(path)] ?? "application/octet-stream");
  createReadStream(path).pipe(response);
});
await new Promise((listening) => server.listen(0, "127.0.0.1", listening));

async function inThePage(cases) {
  const ort = await import("/ort/ort.wasm.min.mjs");
  const { runCases } = await import("/script/loop.mjs");
  ort.env.wasm.wasmPaths = "/ort/";
  ort.env.wasm.numThreads = 1;
  const model = `/model/${cases.model}`;
  const path = cases.external ?? "weights.safetensors";
  const data = new URL(path, new URL(model, location.href)).href;
  const session = await ort.InferenceSession.create(model, {
    executionProviders: ["wasm"],
    externalData: [{ path, data }],
  });
  const { logits, ...ids } = await runCases(ort, session, cases);
  // Numbers in JSON would be 20 characters each: bytes, in base64.
  const bytes = await new Promise((read) => {
    const reader = new FileReader();
    reader.onload = () => read(reader.result);
    reader.readAsDataURL(new Blob([logits]));
  });
  return { ...ids, bytes: bytes.slice(bytes.indexOf(",") + 1) };
}

const browser = await launch();
try {
  const page = await browser.newPage();
  await page.goto(`http://127.0.0.1:${server.address().port}/`);
  const { bytes, ...ids } = await page.evaluate(inThePage, cases);
  const raw = Buffer.from(bytes, "base64");
  const logits = new Float32Array(raw.buffer, raw.byteOffset, raw.byteLength / 4);
  const version = `${versionOf("onnxruntime-web")}, Chromium ${browser.version()}`;
  writeResult("onnxruntime-web (wasm, Chromium)", version, { ...ids, logits });
} finally {
  await browser.close();
  server.closeAllConnections();
  server.close();
}
