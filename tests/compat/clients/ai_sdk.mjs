// Vercel's AI SDK with its provider for compatible servers: tools in steps, whole and streamed, and typed outputs.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { expect, model as name, parameters, question, report, run, url } from "./checks.mjs";

const options = { name: "pagewire", baseURL: `${url}/v1`, supportsStructuredOutputs: true, includeUsage: true };
const provider = createOpenAICompatible(options);
const schema = jsonSchema(parameters);
const weather = tool({ description: "The weather.", inputSchema: schema, execute: async () => report });
const ask = { model: provider(name), prompt: question, maxOutputTokens: 48, maxRetries: 0, temperature: 0 };
const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
const providerOptions = { pagewire: { parallel_tool_calls: false } };
const loop = { ...ask, providerOptions, tools: { weather }, stopWhen: stepCountIs(2), prepareStep };

async function tools() {
  const result = await generateText(loop);
  expect(result.steps[0].toolResults.length > 0 && result.text, result.steps.map((step) => step.content));
}

async function tools_streamed() {
  const result = streamText(loop);
  const kinds = new Set();
  for await (const part of result.fullStream) kinds.add(part.type);
  expect(kinds.has("tool-call") && kinds.has("tool-result") && (await result.text), [...kinds]);
  expect((await result.totalUsage).outputTokens > 0, "usage");
}

async function typed() {
  const asked = { ...ask, output: Output.object({ schema }) };
  expect((await generateText(asked)).output.city !== undefined, "whole");
  expect((await streamText(asked).output).city !== undefined, "streamed");
}

const text = async () => expect((await generateText({ ...ask, model: provider.completionModel(name) })).text, "text");

await run(tools, tools_streamed, typed, text);
