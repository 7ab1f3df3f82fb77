// The chat template of an export.

import { Template } from "./libraries/jinja.mjs";
import { file } from "./files.js";

const TOKENS = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/** {render(messages, thinking), thinking: it has a switch for that}. */
export async function templateOf(folder, files, config) {
  const source = "chat_template.jinja" in files ? await (await file(folder, "chat_template.jinja")).text() : named(config);
  if (!source) return { render: chatml, thinking: false };
  const template = new Template(source);
  const tokens = {};
  for (const name of TOKENS) {
    const text = config[name]?.content ?? config[name];
    if (typeof text === "string") tokens[name] = text;
  }
  return {
    thinking: source.includes("enable_thinking"),
    render(messages, thinking) {
      const switched = thinking === undefined ? {} : { enable_thinking: thinking };
      return template.render({ ...tokens, messages, add_generation_prompt: true, ...switched });
    },
  };
}

/** One template, or that of several which is named default. */
function named({ chat_template: found }) {
  if (!Array.isArray(found)) return typeof found === "string" ? found : found?.default;
  return (found.find(({ name }) => name === "default") ?? found[0])?.template;
}

/** What Qwen's templates come down to, for a folder that has none. */
function chatml(messages) {
  const turns = messages.map(({ role, content }) => `<|im_start|>${role}\n${content}<|im_end|>\n`);
  return `${turns.join("")}<|im_start|>assistant\n`;
}
