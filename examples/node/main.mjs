// Streams a text, resuming it after lost connections, and cancels another stream: node main.mjs [PROMPT]
import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { setTimeout as pause } from "node:timers/promises";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const { PAGEWIRE_TARGET: target, PAGEWIRE_CLIENT_TLS: tls, PAGEWIRE_CLIENT_API_KEY: key, PROTOS = "../../protos" } = process.env;
const file = loader.loadSync("pagewire/v1/inference_service.proto", { includeDirs: [PROTOS], longs: String, defaults: true });
const { InferenceService } = grpc.loadPackageDefinition(file).pagewire.v1;
const client = new InferenceService(target, grpc.credentials.createSsl(readFileSync(`${tls}/ca.crt`)), {
  "grpc.max_reconnect_backoff_ms": 2000,
});
const metadata = new grpc.Metadata();
metadata.set("authorization", `Bearer ${key}`);

const { UNAVAILABLE, CANCELLED, INTERNAL, ALREADY_EXISTS, RESOURCE_EXHAUSTED } = grpc.status;
const canResume = ({ code, details }, again) =>
  code === UNAVAILABLE || code === CANCELLED || (code === INTERNAL && details.includes("RST_STREAM")) ||
  (again && (code === ALREADY_EXISTS || code === RESOURCE_EXHAUSTED));

async function* generate(request) {
  let first, again = false, patience = Date.now() + 60_000;
  const tokens = [];
  while (true) {
    try {
      for await (const message of client.generate(request, metadata)) {
        patience = Date.now() + 60_000;
        first ??= message;
        tokens.push(...message.tokenIds);
        yield message;
        if (message.finishReason) return;
      }
      return;
    } catch (error) {
      if (!canResume(error, again) || Date.now() > patience) throw error;
      again = true;
      await pause(100 + 400 * Math.random());
      const outputs = tokens.length ? [{ index: 0, tokenIds: tokens }] : [];
      request = { ...request, resume: { seed: first?.seed, modelFingerprint: first?.modelFingerprint, outputs } };
      process.stderr.write("trying again\n");
    }
  }
}

const request = { text: process.argv[2] ?? "Once upon a time", sampling: { maxTokens: 256, temperature: 1 } };
let seed;
for await (const message of generate({ requestId: randomUUID(), ...request })) {
  seed ??= message.seed;
  process.stdout.write(message.text);
}
process.stdout.write(`\nseed ${seed}\n`);

const call = client.generate({ requestId: randomUUID(), ...request }, metadata);
call.on("error", (error) => process.stdout.write(error.code === CANCELLED ? "cancelled\n" : `${error}\n`));
call.once("data", () => call.cancel());
call.once("close", () => client.close());
