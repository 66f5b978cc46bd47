// One request: the body that is sent, the stream that comes back, and the same request as curl and Python.

/** The body of a request, from the settings' texts. Throws an Error whose message names the setting. */
export function bodyOf(model, settings, messages) {
  const body = { model, messages, stream: true };
  if (settings.system.trim()) body.messages = [{ role: "system", content: settings.system }, ...messages];
  for (const [name, text] of Object.entries(settings.numbers)) {
    if (text.trim() === "") continue;
    if (!Number.isFinite(Number(text))) throw new Error(`${name} must be a number, and is ${text}`);
    const isWhole = /^-?\d+$/.test(text.trim());
    if (isWhole && !Number.isSafeInteger(Number(text))) throw new Error(`${name} is beyond the page's whole numbers, which end at 2^53`);
    body[name] = Number(text);
  }
  const stops = settings.stop.split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  if (settings.tools.trim()) body.tools = parsed("The tools", settings.tools);
  if (settings.schema.trim()) {
    const schema = parsed("The JSON schema", settings.schema);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

function parsed(name, text) {
  try {
    return JSON.parse(text);
  } catch (problem) {
    throw new Error(`${name}: ${problem.message}`);
  }
}

/** The answer to one request, as far as it has come. */
export class Answer {
  listeners = new Set();
  content = "";
  texts = []; // of the content, as they came
  tokens = [];
  numSpelled = 0; // tokens from the start that spell the content; a token of the turn's end is none of them
  spells = true; // until a token is not what the content goes on with, such as one of reasoning
  reasoning = "";
  calls = [];
  finish = "";
  usage = null; // if the request asks for it
  #spelled = 0; // characters

  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  end(finish) {
    this.finish = finish;
    this.#tell();
  }

  take({ delta = {}, text = delta.content ?? "", logprobs, finish_reason: finish }) {
    this.content += text;
    if (text) this.texts.push(text);
    this.reasoning += delta.reasoning_content ?? "";
    for (const part of delta.tool_calls ?? []) {
      const call = (this.calls[part.index] ??= { id: "", name: "", arguments: "" });
      call.id ||= part.id ?? "";
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
    for (const token of logprobs?.content ?? []) this.tokens.push(token);
    this.#spell();
    this.finish = finish ?? this.finish;
    this.#tell();
  }

  #spell() {
    while (this.#spelled < this.content.length && this.numSpelled < this.tokens.length) {
      const { token } = this.tokens[this.numSpelled];
      const part = this.content.slice(this.#spelled, this.#spelled + token.length);
      this.spells &&= token.startsWith(part);
      if (part !== token) return; // its end may be held back, because a stop string may begin there
      this.#spelled += token.length;
      this.numSpelled += 1;
    }
  }

  /** The content behind the tokens that spell it. */
  get rest() {
    return this.content.slice(this.#spelled);
  }

  #tell() {
    for (const listener of this.listeners) listener();
  }
}

/** Send a body, and read the answer to it. Throws an Error with the server's sentence. */
export async function read(answer, body, key, signal, route = "/v1/chat/completions") {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await checked(await fetch(route, { method: "POST", headers, body: JSON.stringify(body), signal }));
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    answer.usage = event.usage ?? answer.usage;
    for (const choice of event.choices ?? []) answer.take(choice);
  }
  throw new Error("the server ended the stream before the answer was complete");
}

/** A good answer. Throws an Error with the server's sentence and `status` for any other. */
export async function checked(response) {
  if (response.ok) return response;
  let reason = `the server answered ${response.status}`;
  try {
    reason = (await response.json()).error.message;
  } catch {} // not the server's own answer, but a proxy's page
  throw Object.assign(new Error(reason), { status: response.status });
}

/** The data of server-sent events. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {}); // stops the generation, if the answer is not complete
  }
}

/** The message that continues a conversation after an answer. */
export function messageOf(answer) {
  const message = { role: "assistant", content: answer.content };
  if (answer.calls.length)
    message.tool_calls = answer.calls.map(({ id, name, arguments: text }) => ({
      id, type: "function", function: { name, arguments: text },
    }));
  return message;
}

export function asCurl(body, origin, hasKey) {
  const key = hasKey ? ` \\\n  -H "Authorization: Bearer $PAGEWIRE_CLIENT_API_KEY"` : "";
  const text = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl -N ${origin}/v1/chat/completions \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${text}'`;
}

export function asPython(body, origin, hasKey) {
  const { stream, min_p, repetition_penalty, ...rest } = body;
  const extra = Object.entries({ min_p, repetition_penalty }).filter(([, value]) => value !== undefined);
  if (extra.length) rest.extra_body = Object.fromEntries(extra); // not parameters of OpenAI's package
  const key = hasKey ? 'os.environ["PAGEWIRE_CLIENT_API_KEY"]' : '"none"';
  return `import json
${hasKey ? "import os\n" : ""}
from openai import OpenAI

request = json.loads(r'''${JSON.stringify(rest, null, 2).replaceAll("'''", "\\u0027\\u0027\\u0027")}''')
client = OpenAI(base_url="${origin}/v1", api_key=${key})
for event in client.chat.completions.create(**request, stream=True):
    for choice in event.choices:
        print(choice.delta.content or "", end="", flush=True)
`;
}
