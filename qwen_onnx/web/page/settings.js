// The dialog of settings. An empty field is the model's own.

import { saveSettings, savedSettings } from "./store.js";

const element = (id) => document.getElementById(id);

export class Settings {
  #values = savedSettings();

  constructor() {
    element("open-settings").addEventListener("click", () => this.#open());
    element("settings").addEventListener("close", () => this.#close());
  }

  get values() {
    return this.#values;
  }

  /** What the model's own are, as the fields show where they are empty. */
  defaults({ temperature, maxTokens, thinking }) {
    element("temperature").placeholder = String(temperature);
    element("max-tokens").placeholder = String(maxTokens);
    element("thinking-label").hidden = !thinking;
  }

  #open() {
    const { system, temperature, maxTokens, thinking, device } = this.#values;
    element("system").value = system ?? "";
    element("temperature").value = temperature ?? "";
    element("max-tokens").value = maxTokens ?? "";
    element("thinking").value = thinking === undefined ? "" : thinking ? "on" : "off";
    element("device").value = device ?? "";
    element("settings").returnValue = "cancel";
    element("settings").showModal();
  }

  #close() {
    const chosen = element("settings").returnValue;
    if (chosen === "reset") saveSettings({});
    else if (chosen === "save") {
      const thinking = element("thinking").value;
      saveSettings({
        system: element("system").value.trim(),
        temperature: number("temperature"),
        maxTokens: number("max-tokens"),
        thinking: thinking ? thinking === "on" : undefined,
        device: element("device").value,
      });
    } else return;
    this.#values = savedSettings();
  }
}

function number(id) {
  const { value, valueAsNumber } = element(id);
  return value === "" ? undefined : valueAsNumber;
}
