// Uses the chat page as people do, in headless Chromium: node drive_page.mjs CASES.json RESULT.json
//
// CASES.json: {"url", "runs": [{"scenario", "fake": without the model, "viewport", "scheme", and what it takes}],
// "pictures": folder or null}. RESULT.json: of each run {"status", "error", "console", "found"}.

import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";

import { cases } from "./cases.mjs";
import { launch } from "./chromium.mjs";
import { scenarios, viewports } from "./page_scenarios.mjs";

const browser = await launch();
const results = [];
try {
  for (const run of cases.runs) {
    const viewport = viewports[run.viewport ?? "desktop"];
    const context = await browser.newContext({ viewport, colorScheme: run.scheme ?? "light" });
    const page = await context.newPage();
    page.setDefaultTimeout(60_000);
    const result = { error: null, console: [], found: null };
    results.push(result);
    page.on("pageerror", (error) => result.console.push(String(error)));
    page.on("console", (message) => message.type() === "error" && result.console.push(message.text()));
    if (run.fake) await page.addInitScript(readFileSync(new URL("fake_model.js", import.meta.url), "utf8"));
    await page.goto(cases.url + (run.query ?? ""));
    await page.locator('#status:not([data-state="loading"])').waitFor();
    result.status = await page.locator("#status").textContent();
    result.isolated = await page.evaluate(() => crossOriginIsolated);
    if (await page.locator(".error").count()) result.error = await page.locator(".error").textContent();
    const picture = async (name) => {
      const file = `${name}-${run.viewport}-${run.scheme}.png`;
      if (cases.pictures) await page.screenshot({ path: join(cases.pictures, file) });
    };
    if (run.scenario) result.found = await scenarios[run.scenario](page, { ...run, picture });
    await context.close();
  }
} finally {
  await browser.close();
}
writeFileSync(process.argv[3], JSON.stringify(results));
