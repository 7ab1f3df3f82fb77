import { join } from "node:path";

import ort from "onnxruntime-node";

import { cases, versionOf, writeResult } from "./cases.mjs";
import { runCases } from "./loop.mjs";

const session = await ort.InferenceSession.create(join(cases.folder, cases.model));
const found = cases.only_load ? {} : await runCases(ort, session, cases);
writeResult("onnxruntime-node", versionOf("onnxruntime-node"), found);
