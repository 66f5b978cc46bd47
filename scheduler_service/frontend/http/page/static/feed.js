// Reads /page/feed, with fetch: an EventSource cannot send a key.
import { checked } from "./chat.js";

const SILENT_MS = 15000; // the feed sends a frame at least every 5 s
export const MAX_WAIT_MS = 5000; // between two tries to reach the server

/** Apply frames to `world` until `signal` aborts, and connect again after a loss.
 *
 * `tell` gets "connected", or a sentence about the loss. Throws if the server refuses the key.
 */
export async function follow(world, key, tell, signal) {
  for (let wait = 250; !signal.aborted; wait = Math.min(2 * wait, MAX_WAIT_MS)) {
    try {
      const answer = await fetch("/page/feed", { headers: key ? { Authorization: `Bearer ${key}` } : {}, signal });
      if (answer.status === 401 || answer.status === 403)
        throw new Refused("The server refuses this key: it must be one with admin.");
      for await (const frame of frames((await checked(answer)).body)) {
        if (frame.snapshot) tell("connected");
        world.apply(frame);
        wait = 250;
      }
      throw new Error("the server ended the feed");
    } catch (problem) {
      if (signal.aborted) return;
      if (problem instanceof Refused) throw problem;
      const reason = problem instanceof TypeError ? "the server does not answer" : problem.message;
      tell(`Not connected: ${reason}. What is shown is old.`);
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}

class Refused extends Error {}

/** The frames of a stream of server-sent events, each on one line. */
async function* frames(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  const parts = []; // of a line whose end has not come: a snapshot of 100,000 blocks comes in many chunks
  try {
    for (;;) {
      let timer;
      const silence = new Promise(
        (_, fail) => (timer = setTimeout(() => fail(new Error("the server is silent")), SILENT_MS)),
      );
      const { value, done } = await Promise.race([reader.read(), silence]).finally(() => clearTimeout(timer));
      if (done) return;
      const lines = value.split("\n");
      for (const [i, line] of lines.entries()) {
        parts.push(line);
        if (i === lines.length - 1) break;
        const text = parts.splice(0).join("");
        if (text.startsWith("data:")) yield JSON.parse(text.slice(5));
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the stream has failed
  }
}
