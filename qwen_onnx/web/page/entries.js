// What the log shows: questions, answers with their reasoning, notes and errors.

import { split } from "./context.js";
import { copyButton, render } from "./markdown.js";

const entries = document.getElementById("entries");

export function addQuestion(text) {
  const entry = add("article", "user");
  entry.append(make("div", "text", text));
  return entry;
}

/** A line between entries, as that the model no longer sees what is above. */
export function addNote(text, before = null) {
  const note = make("p", "note", text);
  entries.insertBefore(note, before);
  return note;
}

export function addError(text) {
  add("article", "error").textContent = text;
}

export function removeErrors() {
  for (const entry of entries.querySelectorAll(".error")) entry.remove();
}

export function removeAll() {
  entries.replaceChildren();
}

/** One answer: it is told its whole text so far, as often as there is more. */
export class Answer {
  #details = make("details", "reasoning");
  #summary = make("summary", "", "Thinking…");
  #reasoning = make("div", "markdown");
  #text = make("div", "text markdown");
  #numbers = make("p", "numbers");
  #shown = null;
  #waiting = null;
  #content = "";

  constructor(retry) {
    this.entry = add("article", "assistant writing");
    this.entry.setAttribute("aria-busy", "true");
    this.#details.append(this.#summary, this.#reasoning);
    this.#details.hidden = true;
    const actions = make("div", "actions");
    const again = make("button", "retry", "Try again");
    again.type = "button";
    again.addEventListener("click", retry);
    actions.append(copyButton(() => this.#text.innerText && split(...this.#content).answer), again);
    this.entry.append(this.#details, this.#text, this.#numbers, actions);
  }

  /** Drawn at the next frame: tokens may come faster than those. */
  write(content, begun) {
    this.#content = [content, begun];
    this.#waiting ??= requestAnimationFrame(() => this.#draw());
  }

  numbers(text) {
    this.#numbers.textContent = text;
  }

  end() {
    this.#draw();
    this.entry.classList.remove("writing");
    this.entry.removeAttribute("aria-busy");
  }

  #draw() {
    cancelAnimationFrame(this.#waiting);
    this.#waiting = null;
    const { reasoning, answer, thinking } = split(...this.#content);
    this.#details.hidden = !reasoning && !thinking;
    const under = thinking && this.entry.classList.contains("writing");
    this.#summary.textContent = under ? "Thinking…" : "Reasoning";
    if (this.#shown?.reasoning !== reasoning) this.#reasoning.replaceChildren(render(reasoning));
    if (this.#shown?.answer !== answer) this.#text.replaceChildren(render(answer));
    this.#shown = { reasoning, answer };
  }
}

function add(tag, name) {
  const entry = make(tag, name);
  entries.append(entry);
  return entry;
}

function make(tag, name, text = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.textContent = text;
  return made;
}
