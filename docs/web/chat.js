// The page: messages in, tokens out as they come. The model itself is in model.js.

const element = (id) => document.getElementById(id);
const log = element("log");
const message = element("message");
const worker = new Worker("model.js", { type: "module" });

let messages = [];
let answering = false;
let waiting = null;

worker.onmessage = ({ data: { share, answer, error } }) => {
  if (share !== undefined) {
    element("progress").value = share;
    status("loading", share < 1 ? `Loading… ${Math.floor(100 * share)} %` : "Starting…");
  } else if (error !== undefined) waiting.reject(new Error(error));
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
  const asked = query.get("model") ?? "./tiny/";
  const device = query.get("device") === "webgpu" ? "webgpu" : "wasm";
  const folder = new URL(asked.endsWith("/") ? asked : `${asked}/`, location.href).href;
  try {
    const { model, dtype, threads } = await ask("load", { folder, device });
    const where = device === "webgpu" ? "WebGPU" : `WebAssembly, ${threads} ${threads === 1 ? "thread" : "threads"}`;
    status("ready", `${model} · ${dtype} · ${where}`);
  } catch (error) {
    status("failed", "Not loaded");
    element("welcome").hidden = true;
    add("error").textContent = error.message;
    return;
  } finally {
    element("progress").hidden = true;
  }
  for (const control of document.querySelectorAll("button, textarea")) control.disabled = false;
  message.focus();
}

async function answer(text) {
  answering = true;
  element("welcome").hidden = true;
  show(true);
  messages.push({ role: "user", content: text });
  add("user", "text").textContent = text;
  const written = add("assistant writing", "text");
  const numbers = document.createElement("p");
  numbers.className = "numbers";
  const started = performance.now();
  let made = 0;
  let first;
  try {
    let token = await ask("begin", messages);
    const { prompt, cached } = token;
    for (;;) {
      const now = performance.now();
      made++;
      first ??= now;
      follow(() => (written.textContent = token.text));
      const speed = made > 1 ? ` · ${((1000 * (made - 1)) / (now - first)).toFixed(1)} tokens/s` : "";
      numbers.textContent =
        `${made} ${made === 1 ? "token" : "tokens"}${speed} · first token after ${(first - started).toFixed(0)} ms` +
        ` · ${cached} of ${prompt} prompt tokens cached`;
      if (made === 1) follow(() => written.after(numbers));
      if (token.finish === "context") numbers.textContent += " · the context is full";
      if (token.finish || !answering) break;
      token = await ask("next");
    }
    messages.push({ role: "assistant", content: token.text });
  } catch (error) {
    messages.pop();
    follow(() => (add("error").textContent = error.message));
  }
  written.parentElement.classList.remove("writing");
  answering = false;
  show(false);
  message.focus();
}

/** A new entry of the log; `inner` is the class of an element in it, which is given then. */
function add(name, inner) {
  const entry = document.createElement("article");
  entry.className = name;
  const given = inner ? document.createElement("div") : entry;
  if (inner) {
    given.className = inner;
    entry.append(given);
  }
  follow(() => log.append(entry));
  return given;
}

/** Changes the log, and stays at its end if the reader was there. */
function follow(change) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function status(state, text) {
  element("status").dataset.state = state;
  element("status").textContent = text;
}

function show(busy) {
  element("send").hidden = busy;
  element("stop").hidden = !busy;
  element("reset").disabled = busy;
}

element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = message.value.trim();
  if (!text || answering) return;
  message.value = "";
  answer(text);
});
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  element("composer").requestSubmit();
});
element("suggestions").addEventListener("click", ({ target }) => {
  if (target.matches("button") && !answering) answer(target.textContent);
});
element("stop").addEventListener("click", () => (answering = false));
element("reset").addEventListener("click", () => {
  messages = [];
  for (const entry of log.querySelectorAll("article")) entry.remove();
  element("welcome").hidden = false;
  message.focus();
});

load();
