// What people do on the page, and what they then see: each takes a Playwright page and gives plain data.

const LINES = Array.from({ length: 30 }, (_, index) => `line ${index}`).join("\n");
const LONG = "word ".repeat(4000);

export const viewports = { desktop: { width: 1100, height: 800 }, phone: { width: 390, height: 844 } };

async function send(page, text) {
  await page.locator("#message").fill(text);
  await page.keyboard.press("Enter");
}

async function sent(page, text, count) {
  await send(page, text);
  await answers(page, count);
}

async function answers(page, count) {
  await page.locator(".assistant:not(.writing)").nth(count - 1).waitFor();
  await page.locator("#send").waitFor();
}

const texts = (page, selector) => page.locator(selector).allInnerTexts();
const fake = (page, values) => page.evaluate((given) => Object.assign(window.fake, given), values);
const asked = (page) =>
  page.evaluate(() => window.fake.asked.filter(({ action }) => action === "begin").map(({ value }) => value));
const fromEnd = (page) =>
  page.evaluate(() => {
    const log = document.getElementById("log");
    return Math.round(log.scrollHeight - log.scrollTop - log.clientHeight);
  });

export const scenarios = {
  /** With the model: two turns, a new chat, one that is stopped. */
  async chats(page, { turns }) {
    for (const [index, turn] of turns.entries()) await sent(page, turn, index + 1);
    const said = await texts(page, ".assistant .text");
    const numbers = await texts(page, ".numbers");
    await page.locator("#reset").click();
    await sent(page, turns[0], 1);
    return { said, numbers: [...numbers, ...(await texts(page, ".numbers"))] };
  },

  /** With the model: until the context is full, and beyond. */
  async fills(page, { turns }) {
    for (const [index, turn] of turns.entries()) await sent(page, turn, index + 1);
    const notes = await texts(page, ".note");
    await sent(page, "What is 3 plus 4?", turns.length + 1);
    await send(page, LONG);
    await page.locator(".error").waitFor();
    const [error] = await texts(page, ".error");
    const back = await page.locator("#message").inputValue();
    await sent(page, "What is 3 plus 4?", turns.length + 2);
    return { notes, error, back, said: await texts(page, ".assistant .text"), errors: (await texts(page, ".error")).length };
  },

  /** With the model: a temperature, a length and a system message. */
  async settings(page) {
    await page.locator("#open-settings").click();
    await page.locator("#max-tokens").fill("3");
    await page.locator("#system").fill("Be brief.");
    await page.locator("#temperature").fill("0");
    await page.locator("#settings .primary").click();
    await sent(page, "Count from 3 to 9.", 1);
    await page.reload();
    await page.locator('#status[data-state="ready"]').waitFor();
    const kept = await page.evaluate(() => JSON.parse(localStorage.getItem("qwen-onnx.settings")));
    await page.locator("#open-settings").click();
    const shown = await page.locator("#max-tokens").inputValue();
    await page.keyboard.press("Escape");
    return { kept, shown, numbers: await texts(page, ".numbers") };
  },

  async scrolls(page) {
    await fake(page, { answers: Array(3).fill(LINES.split("\n").map((line) => `${line}\n\n`)) });
    await sent(page, LINES, 1);
    const first = await fromEnd(page);
    await sent(page, LINES, 2);
    const second = await fromEnd(page);
    await send(page, "again");
    await page.locator(".assistant.writing .text p").first().waitFor();
    await page.locator("#log").hover();
    await page.mouse.wheel(0, -600);
    await answers(page, 3);
    const left = await fromEnd(page);
    await page.locator("#to-end").click();
    await page.waitForFunction(() => document.getElementById("to-end").hidden);
    return { first, second, left, back: await fromEnd(page) };
  },

  async stops(page) {
    await fake(page, { held: true, answers: [["<think>\n", "hm"], ["one ", "two"]] });
    await send(page, "think");
    await page.waitForFunction(() => document.querySelector(".reasoning .markdown")?.textContent.trim() === "hm");
    const summary = await texts(page, ".reasoning summary");
    await page.locator("#stop").click();
    await answers(page, 1);
    await send(page, "say");
    await page.locator(".assistant.writing .text", { hasText: "one two" }).waitFor();
    await page.keyboard.press("Escape");
    await answers(page, 2);
    await fake(page, { reading: 1e9 });
    await send(page, "a long one");
    await page.locator(".numbers", { hasText: "Reading 1 of 9" }).waitFor();
    await page.locator("#stop").click();
    await page.locator("#send").waitFor();
    return {
      summary,
      numbers: await texts(page, ".numbers"),
      back: await page.locator("#message").inputValue(),
      questions: await texts(page, ".user"),
      asked: (await asked(page))[1].messages,
    };
  },

  async retries(page) {
    await fake(page, { answers: [["one"], ["two"], ["three"]] });
    await sent(page, "first", 1);
    await sent(page, "second", 2);
    await page.locator(".retry:visible").click();
    await page.locator(".assistant .text", { hasText: "three" }).waitFor();
    await page.locator("#send").waitFor();
    const [, before, after] = await asked(page);
    return {
      said: await texts(page, ".assistant .text"),
      same: JSON.stringify(before) === JSON.stringify(after),
      buttons: await page.locator(".retry:visible").count(),
    };
  },

  async reloads(page) {
    await fake(page, { answers: [["<think>\nwell\n</think>\n\n", "**one**"]] });
    await sent(page, "first\nquestion", 1);
    await page.reload();
    await page.locator('#status[data-state="ready"]').waitFor();
    const shown = [await texts(page, ".user"), await texts(page, ".assistant .text"), await page.locator("strong").count()];
    await sent(page, "second", 2);
    const messages = (await asked(page))[0].messages;
    await fake(page, { answers: [["half of"]], held: true });
    await send(page, "third");
    await page.locator(".assistant.writing .text p").waitFor();
    await page.reload();
    await page.locator('#status[data-state="ready"]').waitFor();
    const half = [(await texts(page, ".assistant .text")).at(-1), (await texts(page, ".numbers")).at(-1)];
    await page.locator("#reset").click();
    await page.reload();
    await page.locator('#status[data-state="ready"]').waitFor();
    await page.evaluate(() => localStorage.setItem("qwen-onnx.chat.fake", '{"messages":[{"role":"system"}]}'));
    await page.reload();
    await page.locator('#status[data-state="ready"]').waitFor();
    return { shown, messages, half, left: await page.locator("article").count() };
  },

  async drops(page) {
    await fake(page, { answers: [["1"], ["2"], ["3"], ["4"]] });
    await sent(page, "a", 1);
    await sent(page, "b", 2);
    await fake(page, { dropped: 1 });
    await sent(page, "c", 3);
    await fake(page, { dropped: 0 });
    await sent(page, "d", 4);
    const order = await page.locator("#entries > *").evaluateAll((all) => all.map((each) => each.className));
    return { order, asked: (await asked(page)).map(({ messages }) => messages.map(({ content }) => content).join()) };
  },

  async hostile(page, { text }) {
    const outside = [];
    page.on("request", (request) => request.url().startsWith(new URL(page.url()).origin) || outside.push(request.url()));
    await fake(page, { answers: [[text], [`<think>\n${text}\n</think>\n\nok`]] });
    await sent(page, text, 1);
    await sent(page, "again", 2);
    await page.waitForTimeout(100);
    return {
      ran: await page.evaluate(() => window.ran ?? null),
      outside,
      shown: (await texts(page, ".assistant .text"))[0],
      elements: await page.locator("#entries").evaluate((log) =>
        [...new Set([...log.querySelectorAll("*")].map(({ localName }) => localName))].sort(),
      ),
      links: await page.locator(".assistant").first().evaluate((entry) =>
        [...entry.querySelectorAll("a")].map((link) => [link.getAttribute("href"), link.rel, link.target]),
      ),
      handlers: await page.locator("#entries").evaluate((log) =>
        [...log.querySelectorAll("*")].flatMap((each) => each.getAttributeNames().filter((name) => name.startsWith("on"))),
      ),
    };
  },

  /** For the pictures, too. */
  async looks(page, { answers: given, picture }) {
    await fake(page, { answers: given });
    await picture("welcome");
    await sent(page, "Write a Python function that squares a number.", 1);
    await sent(page, "And a table of the first squares?", 2);
    await picture("chat");
    await page.context().grantPermissions(["clipboard-read", "clipboard-write"]);
    await page.locator("figure .copy").first().click();
    const code = await page.evaluate(() => navigator.clipboard.readText());
    await page.locator(".assistant .actions .copy").first().click();
    const whole = await page.evaluate(() => navigator.clipboard.readText());
    await page.locator(".reasoning summary").first().click();
    await page.locator("#open-settings").click();
    await picture("settings");
    await page.keyboard.press("Escape");
    const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    return { code, whole, wide, languages: await texts(page, "figcaption span") };
  },

  /** Without a mouse. */
  async keys(page) {
    await fake(page, { answers: [["```\ncode\n```"]] });
    await page.keyboard.type("one");
    await page.keyboard.press("Shift+Enter");
    await page.keyboard.type("two");
    await page.keyboard.press("Enter");
    await answers(page, 1);
    const focused = [];
    await page.locator("#open-settings").focus();
    for (let step = 0; step < 8; step++) {
      focused.push(await page.evaluate(() => document.activeElement.id || document.activeElement.className || document.activeElement.localName));
      await page.keyboard.press("Tab");
    }
    return { question: await texts(page, ".user"), focused };
  },
};
