// The page: messages in, tokens out as they come. The model itself is in model.js, a worker.

import { closed } from "./context.js";
import { addError, addNote, addQuestion, Answer, removeAll, removeErrors } from "./entries.js";
import { Follower } from "./follow.js";
import { Settings } from "./settings.js";
import { saveChat, savedChat } from "./store.js";

const element = (id) => document.getElementById(id);
const message = element("message");
const worker = new Worker("model.js", { type: "module" });
const follower = new Follower(element("log"), element("entries"), element("to-end"));
const settings = new Settings();

let model = "";
let chat = { messages: [], unseen: 0 };
let answering = false;
let stopped = false;
let waiting = null;
let under = null; // the answer under way, as it would be kept

worker.onmessage = ({ data: { progress, answer, error } }) => {
  if (progress) showProgress(progress);
  else if (error !== undefined) waiting.reject(new Error(error));
  else waiting.resolve(answer);
};
worker.onerror = (event) => waiting?.reject(new Error(event.message || "model.js cannot be loaded."));

/** Asks the worker for one thing; it works on one at a time. */
function ask(action, value) {
  return new Promise((resolve, reject) => {
    waiting = { resolve, reject };
    worker.postMessage({ action, value });
  });
}

async function load() {
  const query = new URLSearchParams(location.search);
  const asked = query.get("model") ?? "./model/";
  const device = query.get("device") ?? settings.values.device;
  const folder = new URL(asked.endsWith("/") ? asked : `${asked}/`, location.href).href;
  try {
    const loaded = await ask("load", { folder, device });
    model = loaded.model;
    settings.defaults(loaded);
    element("name").textContent = document.title = model;
    status("ready", `${loaded.dtype} · ${loaded.backend}`);
  } catch (error) {
    status("failed", "Not loaded");
    element("welcome").hidden = true;
    addError(error.message);
    return;
  } finally {
    element("progress").hidden = true;
  }
  chat = savedChat(model);
  for (const [index, { role, content, begun, numbers }] of chat.messages.entries()) {
    if (index === chat.unseen && index) addNote(UNSEEN);
    if (role === "user") addQuestion(content);
    else {
      const answer = new Answer(retry);
      answer.write(content, begun);
      answer.numbers(numbers ?? "");
      answer.end();
    }
  }
  element("welcome").hidden = chat.messages.length > 0;
  for (const control of document.querySelectorAll("button, textarea")) control.disabled = false;
  follower.toEnd();
  message.focus();
}

const UNSEEN = "The context has no room left for an answer: the model no longer sees what is above.";

/** Asks a question; where nothing of an answer came, it is given back to be changed. */
async function send(text) {
  removeErrors();
  element("welcome").hidden = true;
  const question = addQuestion(text);
  chat.messages.push({ role: "user", content: text });
  follower.toEnd();
  if (await answer()) return;
  chat.messages.pop();
  question.remove();
  if (!message.value) message.value = text;
  element("welcome").hidden = chat.messages.length > 0;
}

/** Answers the last question; false if there is nothing of an answer. */
async function answer() {
  answering = true;
  stopped = false;
  busy(true);
  const written = new Answer(retry);
  const started = performance.now();
  let begun = false;
  let content = "";
  let numbers = "";
  let made = 0;
  try {
    const seen = chat.messages.slice(chat.unseen).map(({ role, content }) => ({ role, content }));
    const { prompt, cached, dropped, ...begin } = await ask("begin", { messages: seen, settings: settings.values });
    begun = begin.begun;
    if (dropped) forget(dropped);
    let first;
    while (!stopped) {
      const token = await ask("next");
      if (token.read !== undefined) {
        written.numbers(`Reading ${token.read} of ${prompt} tokens…`);
        continue;
      }
      const now = performance.now();
      made++;
      first ??= now;
      content = token.text;
      written.write(content, begun);
      const speed = made > 1 ? ` · ${((1000 * (made - 1)) / (now - first)).toFixed(1)} tokens/s` : "";
      numbers =
        `${made} ${made === 1 ? "token" : "tokens"}${speed} · first token after ${(first - started).toFixed(0)} ms` +
        ` · ${cached} of ${prompt} prompt tokens cached`;
      if (token.finish === "context") numbers += " · the context is full";
      if (token.finish === "length") numbers += " · as many as the settings allow";
      written.numbers(numbers);
      under = { role: "assistant", content: closed(content, begun), begun, numbers: `${numbers} · interrupted` };
      if (token.finish) break;
    }
    if (stopped) numbers += `${numbers && " · "}stopped`;
  } catch (error) {
    if (made) numbers += ` · ${error.message}`;
    else addError(error.message);
  }
  under = null;
  if (made) {
    chat.messages.push({ role: "assistant", content: closed(content, begun), begun, numbers });
    written.numbers(numbers);
    written.end();
    if (!saveChat(model, chat)) addNote("The browser keeps no more of this: a reload will forget it.");
  } else written.entry.remove();
  answering = false;
  busy(false);
  message.focus();
  return made > 0;
}

/** The oldest turns are out of the context, for good. */
function forget(turns) {
  chat.unseen += 2 * turns;
  for (const note of document.querySelectorAll("#entries .note")) note.remove();
  const first = document.querySelectorAll("#entries .user")[chat.unseen / 2];
  addNote(UNSEEN, first);
}

/** The last question once more, without its answer. */
async function retry() {
  if (answering || chat.messages.length < 2) return;
  removeErrors();
  const before = chat.messages.pop();
  const entry = [...document.querySelectorAll("#entries .assistant")].at(-1);
  entry.hidden = true;
  follower.toEnd();
  if (await answer()) entry.remove();
  else {
    chat.messages.push(before);
    entry.hidden = false;
  }
}

function showProgress({ done, total }) {
  element("progress").value = total ? done / total : 0;
  const whole = done >= total;
  status("loading", whole ? "Starting…" : `Loading ${megabytes(done)} of ${megabytes(total)} MB`);
}

function megabytes(bytes) {
  return (bytes / 1e6).toFixed(bytes < 1e8 ? 1 : 0);
}

function status(state, text) {
  element("status").dataset.state = state;
  element("status").textContent = element("status").title = text;
}

function busy(is) {
  element("send").hidden = is;
  element("stop").hidden = !is;
  element("reset").disabled = is;
  document.body.classList.toggle("busy", is);
}

element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = message.value.trim();
  if (!text || answering) return;
  message.value = "";
  send(text);
});
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  element("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && answering && !element("settings").open) stopped = true;
});
element("suggestions").addEventListener("click", ({ target }) => {
  if (target.matches("button") && !answering) send(target.textContent);
});
element("stop").addEventListener("click", () => (stopped = true));
element("reset").addEventListener("click", () => {
  chat = { messages: [], unseen: 0 };
  saveChat(model, chat);
  removeAll();
  element("welcome").hidden = false;
  follower.toEnd();
  message.focus();
});

// Of an answer under way, a reload keeps what was said.
window.addEventListener("pagehide", () => {
  if (under) saveChat(model, { ...chat, messages: [...chat.messages, under] });
});

load();
