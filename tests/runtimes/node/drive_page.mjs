// Uses docs/web as a person would, in headless Chromium: node drive_page.mjs CASES.json RESULT.json
//
// CASES.json: {"url": of the page, "turns": [texts to send], "screenshots": folder or null}. RESULT.json: what was
// seen, {"status", "error", "answers", "numbers", "seen", "stopped", "left", "console"}.

import { writeFileSync } from "node:fs";
import { join } from "node:path";

import { cases } from "./cases.mjs";
import { launch } from "./chromium.mjs";

const browser = await launch();
const result = { error: null, answers: [], numbers: [], console: [] };
try {
  const page = await browser.newPage({ viewport: { width: 960, height: 720 } });
  page.setDefaultTimeout(60_000);
  page.on("pageerror", (error) => result.console.push(String(error)));
  page.on("console", (message) => message.type() === "error" && result.console.push(message.text()));
  const picture = async (name) =>
    cases.screenshots && (await page.screenshot({ path: join(cases.screenshots, `${name}.png`) }));

  await page.goto(cases.url);
  await page.locator('#status:not([data-state="loading"])').waitFor();
  result.status = await page.locator("#status").textContent();
  if (await page.locator(".error").count()) {
    result.error = await page.locator(".error").textContent();
    await picture("error");
  } else {
    await picture("welcome");
    // Every state of the text under way; and, once asked to, Stop is pressed at the first one.
    await page.evaluate(() => {
      window.seen = [];
      window.stopAtOnce = false;
      new MutationObserver(() => {
        const text = [...document.querySelectorAll(".assistant .text")].at(-1)?.textContent;
        if (!text || text === window.seen.at(-1)) return;
        window.seen.push(text);
        if (window.stopAtOnce) document.getElementById("stop").click();
      }).observe(document.getElementById("log"), { childList: true, subtree: true });
    });
    for (const [index, turn] of cases.turns.entries()) {
      await page.locator("#message").fill(turn);
      await page.keyboard.press("Enter");
      const answer = page.locator(".assistant:not(.writing)").nth(index);
      await answer.waitFor();
      result.answers.push(await answer.locator(".text").textContent());
      result.numbers.push(await answer.locator(".numbers").textContent());
    }
    result.seen = await page.evaluate(() => window.seen);
    await picture("chat");
    await page.emulateMedia({ colorScheme: "dark" });
    await picture("dark");

    await page.locator("#reset").click();
    await page.locator("#welcome").waitFor();
    result.left = await page.locator("article").count();
    await page.evaluate(() => (window.stopAtOnce = true));
    await page.locator("#message").fill(cases.turns[0]);
    await page.locator("#send").click();
    const stopped = page.locator(".assistant:not(.writing)");
    await stopped.waitFor();
    result.stopped = await stopped.locator(".text").textContent();
    result.numbers.push(await stopped.locator(".numbers").textContent());
  }
} finally {
  await browser.close();
}
writeFileSync(process.argv[3], JSON.stringify(result));
