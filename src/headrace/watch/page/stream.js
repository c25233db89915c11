// Reads server-sent events by fetch, which unlike EventSource can name a token; comes back when it breaks.

const SILENCE_MS = 8000;
const LONGEST_PAUSE_MS = 4000;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Cuts text into events: {event, data} each; what is not complete yet waits.
export class EventParser {
  #rest = "";

  push(text) {
    const blocks = (this.#rest + text).split("\n\n");
    this.#rest = blocks.pop();
    return blocks.map((block) => {
      const found = { event: "message", data: "" };
      for (const line of block.split("\n")) {
        const [, name, value] = /^(event|data): ?(.*)$/.exec(line) || [];
        if (name === "event") found.event = value;
        if (name === "data") found.data += value;
      }
      return found;
    });
  }
}

async function read(url, token, signal, alive, take) {
  const headers = { Accept: "text/event-stream" };
  if (token) headers.Authorization = "Bearer " + token;
  const reply = await fetch(url, { headers, signal, cache: "no-store" });
  if (!reply.ok) {
    const told = await reply.json().catch(() => ({}));
    throw new Refused(reply.status, told.error || `the server answers ${reply.status}`);
  }
  const parser = new EventParser();
  const decoder = new TextDecoder();
  const reader = reply.body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    alive();
    for (const each of parser.push(decoder.decode(value, { stream: true }))) {
      if (each.event === "message") take(JSON.parse(each.data));
    }
  }
}

// Follows the runs until it is closed. `on` has: open(), message(m), lost(text), refused(error).
// A new connection begins with everything, so that nothing that was missed is missing. It asks for what `names` returns
// then: without a name the server takes the newest run, which may be another one by that time.
export function follow(names, token, on) {
  let closed = false;
  let controller = null;
  (async () => {
    let pause = 250;
    while (!closed) {
      controller = new AbortController();
      let timer = 0;
      let begun = false;
      const own = controller;
      const alive = () => {
        clearTimeout(timer);
        timer = setTimeout(() => own.abort(), SILENCE_MS);
      };
      try {
        alive();
        const query = new URLSearchParams(names().map((name) => ["run", name]));
        await read("/stream?" + query, token, own.signal, alive, (message) => {
          if (closed) return;
          if (!begun) on.open();
          begun = true;
          pause = 250;
          on.message(message);
        });
        if (!closed) on.lost("the server has ended");
      } catch (error) {
        if (closed) return;
        if (error instanceof Refused && error.status < 500) {
          on.refused(error);
          return;
        }
        on.lost(error instanceof Refused ? error.message : "no answer from the server");
      } finally {
        clearTimeout(timer);
      }
      await new Promise((done) => setTimeout(done, pause));
      pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
    }
  })();
  return () => {
    closed = true;
    if (controller) controller.abort();
  };
}
