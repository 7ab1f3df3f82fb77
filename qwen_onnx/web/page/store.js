// Settings and the conversation, in the browser's storage. Where there is none, or it is full, the page works all the
// same, and forgets.

const SETTINGS = "qwen-onnx.settings";
const CHAT = "qwen-onnx.chat.";

/** The settings that were saved: {system, temperature, maxTokens, thinking, device}, each of them perhaps. */
export function savedSettings() {
  const found = read(SETTINGS);
  const settings = {};
  if (typeof found?.system === "string" && found.system) settings.system = found.system;
  if (found?.temperature >= 0 && found.temperature <= 5) settings.temperature = found.temperature;
  if (Number.isInteger(found?.maxTokens) && found.maxTokens > 0) settings.maxTokens = found.maxTokens;
  if (typeof found?.thinking === "boolean") settings.thinking = found.thinking;
  if (["webgpu", "wasm"].includes(found?.device)) settings.device = found.device;
  return settings;
}

export function saveSettings(settings) {
  write(SETTINGS, settings);
}

/** The conversation with this model: its messages, and how many of them the model no longer sees. */
export function savedChat(model) {
  const found = read(CHAT + model);
  const messages = Array.isArray(found?.messages) ? found.messages : [];
  const whole = messages.every(
    (message, index) => message?.role === (index % 2 ? "assistant" : "user") && typeof message.content === "string",
  );
  if (!whole || messages.length % 2) return { messages: [], unseen: 0 };
  const { unseen } = found ?? {};
  return { messages, unseen: Number.isInteger(unseen) && unseen >= 0 && unseen < messages.length ? unseen : 0 };
}

/** False: it was not kept. */
export function saveChat(model, chat) {
  return write(CHAT + model, chat);
}

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key) ?? "null");
  } catch {
    return null;
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
