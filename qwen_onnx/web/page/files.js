// Files of the export, and of the page: fetched, measured, and said so when they are not there.

export async function file(folder, name) {
  const url = new URL(name, folder);
  const response = await fetch(url).catch(() => ({ ok: false, status: "no answer" }));
  if (!response.ok) {
    throw new Error(`${url}: ${response.status}. Is \`qwen-onnx web\` still running? It serves page and model.`);
  }
  return response;
}

export async function json(folder, name) {
  return (await file(folder, name)).json();
}

/** A file of `size` bytes; `progress` is told of each piece that has come. */
export async function bytes(folder, name, size, progress) {
  const response = await file(folder, name);
  const whole = new Uint8Array(size);
  let come = 0;
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) break;
    if (come + value.length > size) throw new Error(`${name}: more than the ${size} bytes that export.json names.`);
    whole.set(value, come);
    come += value.length;
    progress(value.length);
  }
  if (come < size) throw new Error(`${name}: ${come} of ${size} bytes came. Load the page again.`);
  return whole;
}
