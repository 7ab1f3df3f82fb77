// What computes: WebGPU where the browser has a GPU for it, else WebAssembly.

/** The backends to try, the best first, and how each is called. `asked`: webgpu, wasm, or neither. */
export async function backends(asked, dtype) {
  const wasm = { device: "wasm", label: threads() === 1 ? "WebAssembly, 1 thread" : `WebAssembly, ${threads()} threads` };
  if (asked === "wasm") return [wasm];
  const adapter = await navigator.gpu?.requestAdapter({ powerPreference: "high-performance" }).catch(() => null);
  const info = adapter?.info ?? {};
  const fault = !adapter
    ? "this browser offers no GPU"
    : dtype === "f16" && !adapter.features.has("shader-f16")
      ? "this GPU has no shader-f16, which an f16 export needs"
      : "";
  if (asked === "webgpu" && fault) throw new Error(`WebGPU: ${fault}. Choose WebAssembly in the settings.`);
  const name = [info.vendor, info.architecture].filter(Boolean).join(" ");
  const webgpu = { device: "webgpu", label: name ? `WebGPU (${name})` : "WebGPU" };
  if (asked === "webgpu") return [webgpu];
  // An adapter in software is slower than WebAssembly.
  return fault || adapter.isFallbackAdapter || info.isFallbackAdapter ? [wasm] : [webgpu, wasm];
}

/** Threads need shared memory, which a page has only behind COOP and COEP headers. */
export function threads() {
  return self.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency) : 1;
}
