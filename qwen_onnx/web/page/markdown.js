// A model's Markdown as elements. What it wrote can run nothing and load nothing: HTML in it is text, images are
// links, and DOMPurify lets only these elements through.

import MarkdownIt from "./libraries/markdown-it.mjs";
import DOMPurify from "./libraries/purify.mjs";

const markdown = new MarkdownIt({ html: false, linkify: false, breaks: true });
markdown.renderer.rules.image = (tokens, index, options, environment, renderer) => {
  const { escapeHtml } = markdown.utils;
  const text = renderer.renderInlineAsText(tokens[index].children, options, environment) || "image";
  return `<a href="${escapeHtml(tokens[index].attrGet("src"))}">${escapeHtml(text)}</a>`;
};

const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "s", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["href", "title", "class", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** The elements of a text; each code block with its language and a button that copies it. */
export function render(text) {
  const fragment = DOMPurify.sanitize(markdown.render(text), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.rel = "noopener noreferrer nofollow";
    link.target = "_blank";
  }
  for (const block of fragment.querySelectorAll("pre")) block.replaceWith(codeBlock(block));
  for (const table of fragment.querySelectorAll("table")) {
    const frame = document.createElement("div");
    frame.className = "table";
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

function codeBlock(block) {
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  const language = /(?:^|\s)language-(\S+)/.exec(block.firstElementChild?.className ?? "")?.[1] ?? "";
  const name = document.createElement("span");
  name.textContent = language;
  caption.append(name, copyButton(() => block.textContent.replace(/\n$/, "")));
  block.tabIndex = 0; // it scrolls sideways, by keys too
  figure.append(caption, block.cloneNode(true));
  return figure;
}

/** A button that copies what `text` gives, and says so. */
export function copyButton(text) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const done = await navigator.clipboard.writeText(text()).then(() => true, () => false);
    button.textContent = done ? "Copied" : "Not allowed here";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}
