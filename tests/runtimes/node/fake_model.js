// In the place of the page's worker: gives the answers that window.fake holds, in pieces, and keeps what it was asked.
window.fake = { answers: [], asked: [], held: false, reading: 0, dropped: 0, begun: false };
window.Worker = class {
  postMessage({ action, value }) {
    const { fake } = window;
    if (action !== "next") fake.asked.push({ action, value: structuredClone(value) });
    const reply = {
      load: () => ({
        model: "fake", dtype: "f32", backend: "nothing", temperature: 0, maxTokens: 99, thinking: true,
      }),
      begin: () => {
        fake.pieces = [...(fake.answers.shift() ?? ["?"])];
        fake.text = "";
        fake.left = fake.reading;
        return { prompt: 9, cached: 0, dropped: fake.dropped, begun: fake.begun };
      },
      next: () => {
        if (fake.left-- > 0) return { read: 1 };
        fake.text += fake.pieces.shift() ?? "";
        return { text: fake.text, finish: fake.pieces.length || fake.held ? null : "eos" };
      },
    }[action];
    setTimeout(() => this.onmessage({ data: { answer: reply() } }), action === "next" ? 5 : 0);
  }
};
