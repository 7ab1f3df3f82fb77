// Which messages still fit the context, and how reasoning stands in them: the rules of the terminal's chat.

export const OPEN = "<think>";
export const CLOSE = "</think>";

/**
 * The messages, and how many of their oldest turns were dropped: none while they leave `room` in the context. Where
 * they do not, turns go until half the context is free. The system message and the last turn stay; where these alone
 * are too many, nothing is dropped.
 */
export function withRoom(messages, room, contextLength, count) {
  if (count(messages) + room <= contextLength) return { kept: messages, dropped: 0 };
  let kept = messages;
  let dropped = 0;
  for (;;) {
    const turns = kept.flatMap(({ role }, index) => (role === "user" ? [index] : []));
    if (turns.length <= 1 || count(kept) <= Math.floor(contextLength / 2)) break;
    kept = [...kept.slice(0, 1).filter(({ role }) => role === "system"), ...kept.slice(turns[1])];
    dropped++;
  }
  return count(kept) >= contextLength ? { kept: messages, dropped: 0 } : { kept, dropped };
}

/**
 * An answer in its two parts. Reasoning stands at the beginning and once only; `begun`: the prompt ended with its
 * opening tag. Of an answer under way, what may become a tag belongs to neither part.
 */
export function split(text, begun) {
  const start = text.trimStart();
  if (!begun && !start.startsWith(OPEN)) {
    return { reasoning: "", answer: OPEN.startsWith(start) && start ? "" : text, thinking: false };
  }
  const inside = begun ? text : start.slice(OPEN.length);
  const end = inside.indexOf(CLOSE);
  if (end < 0) return { reasoning: withoutTag(inside).replace(/^\n+|\n+$/g, ""), answer: "", thinking: true };
  const answer = inside.slice(end + CLOSE.length).replace(/^\n+/, "");
  return { reasoning: inside.slice(0, end).replace(/^\n+|\n+$/g, ""), answer, thinking: false };
}

/** An answer as it can stand in a conversation: templates drop earlier reasoning by its closing tag. */
export function closed(text, begun) {
  return split(text, begun).thinking ? `${text}\n${CLOSE}\n\n` : text;
}

function withoutTag(text) {
  for (let length = CLOSE.length - 1; length > 0; length--) {
    if (text.endsWith(CLOSE.slice(0, length))) return text.slice(0, -length);
  }
  return text;
}
