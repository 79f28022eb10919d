// Own the connection: the stream of server-sent events, its token, and coming back after it was lost.

import { keep, recall } from "/ui/keeping.js";

const RETRY_MS = [500, 1000, 2000, 4000];
const SILENT_SECONDS = 8;
const TOKEN = "kvlease-token";
const SENDABLE = /^[ -~]+$/;
const UNKNOWN = "The daemon does not know who looks. `kvlease ui`, on its machine, prints this page's address with a reader's token in it; "
  + "the token alone is in the file reader.token beside the daemon's socket.";

/** Take a token that came behind the address, and take it out of the address; tell whether there was one. */
export function takeToken() {
  const found = new URLSearchParams(location.hash.slice(1)).get("token");
  if (found) {
    setToken(found);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return Boolean(found);
}
export const setToken = (token) => keep("sessionStorage", TOKEN, token);

function headers() {
  const token = recall("sessionStorage", TOKEN);
  // What no header can have is no token: it is not sent, and the daemon asks for one.
  return token && SENDABLE.test(token) ? { Authorization: `Bearer ${token}` } : {};
}

export async function ask(path) {
  const answer = await fetch(path, { headers: headers(), signal: AbortSignal.timeout(SILENT_SECONDS * 1000), cache: "no-store" });
  if (!answer.ok) throw Object.assign(new Error(answer.statusText), { status: answer.status });
  return answer.json();
}

/** Follow the stream until it is stopped; `tell` gets (kind, value), where a kind is "state" or an event's. */
export class Stream {
  constructor(tell) {
    this.tell = tell;
    this.cache = "";
    this.controller = null;
    this.tries = 0;
  }

  start(cache) {
    this.stop();
    this.cache = cache;
    this.controller = new AbortController();
    this.#run(this.controller);
  }

  stop() {
    this.controller?.abort();
    this.controller = null;
  }

  async #run(controller) {
    while (!controller.signal.aborted) {
      let why = "the daemon does not answer";
      const line = new AbortController();
      const signal = AbortSignal.any([controller.signal, line.signal]);
      try {
        const query = this.cache ? `?cache=${encodeURIComponent(this.cache)}` : "";
        const asked = fetch(`/ui/data/live${query}`, { headers: headers(), signal, cache: "no-store" });
        const answer = await within(asked, line, "the daemon has not answered");
        if (answer.status === 401 || answer.status === 403) {
          // The detail of a 401 is for programs, whose token is in a file.
          const detail = answer.status === 401 ? UNKNOWN : (await answer.json()).detail;
          this.tell("state", { state: "refused", why: detail ?? "not allowed" });
          return;
        }
        if (!answer.ok) {
          const problem = await answer.json().catch(() => ({}));
          if (answer.status === 404) this.cache = "";
          throw new Error(problem.detail ?? answer.statusText);
        }
        this.tries = 0;
        await this.#read(answer.body.getReader(), line);
        why = "the daemon ended the stream";
      } catch (error) {
        if (controller.signal.aborted) return;
        if (error instanceof Error && !(error instanceof TypeError)) why = error.message;
      }
      if (controller.signal.aborted) return;
      this.tell("state", { state: "lost", why });
      const pause = RETRY_MS[Math.min(this.tries++, RETRY_MS.length - 1)];
      await new Promise((done) => setTimeout(done, pause));
    }
  }

  async #read(reader, line) {
    const decoder = new TextDecoder();
    let kept = "";
    for (;;) {
      const { done, value } = await within(reader.read(), line, "nothing has come");
      if (done) return;
      kept += decoder.decode(value, { stream: true });
      const events = kept.split("\n\n");
      kept = events.pop();
      for (const event of events) {
        const kind = /^event: (.*)$/m.exec(event)?.[1];
        const data = /^data: (.*)$/m.exec(event)?.[1];
        if (kind && data) this.tell(kind, JSON.parse(data));
      }
    }
  }
}

/** Wait for what comes next; the daemon sends figures each second, so a long silence is the end of the line. */
async function within(awaited, line, words) {
  let timer;
  const silence = new Promise((_, fail) => {
    timer = setTimeout(() => fail(new Error(`${words} for ${SILENT_SECONDS} seconds`)), SILENT_SECONDS * 1000);
  });
  try {
    return await Promise.race([awaited, silence]);
  } catch (error) {
    line.abort();
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

export function bytesOf(text) {
  const binary = atob(text);
  const found = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at++) found[at] = binary.charCodeAt(at);
  return found;
}
