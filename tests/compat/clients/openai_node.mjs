// OpenAI's client for Node: a loop of tools, whole and streamed, its tool runner, and a parsed form.
import OpenAI from "openai";
import { expect, model, parameters, question, report, run, url } from "./checks.mjs";

const chats = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 }).chat.completions;
const user = { role: "user", content: question };
const ask = { model, max_completion_tokens: 48, messages: [user] };
const tool = { type: "function", function: { name: "weather", description: "The weather.", parameters, strict: true } };
const first = { ...ask, tools: [tool], tool_choice: "required", parallel_tool_calls: false };

async function answer(called) {
  const call = called.tool_calls[0];
  expect(JSON.parse(call.function.arguments).city !== undefined, called);
  const messages = [user, called, { role: "tool", tool_call_id: call.id, content: report }];
  const last = await chats.create({ ...ask, messages, tools: [tool], tool_choice: "none" });
  expect(last.choices[0].message.content, last);
}

const tools = async () => answer((await chats.create(first)).choices[0].message);
const tools_streamed = async () => answer(await chats.stream(first).finalMessage());

async function tool_runner() {
  let calls = 0;
  const call = (given) => `${report} in ${given.city}, ${(calls += 1)}`;
  const runnable = { type: "function", function: { ...tool.function, function: call, parse: JSON.parse } };
  const named = { type: "function", function: { name: "weather" } };
  await chats.runTools({ ...ask, tools: [runnable], tool_choice: named }, { maxChatCompletions: 2 }).done();
  expect(calls > 0, calls);
}

async function parsed() {
  const response_format = { type: "json_schema", json_schema: { name: "place", schema: parameters, strict: true } };
  const found = await chats.parse({ ...ask, response_format });
  expect(found.choices[0].message.parsed.city !== undefined, found);
}

await run(tools, tools_streamed, tool_runner, parsed);
