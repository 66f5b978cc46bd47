// What the clients' programs for Node share, as checks.py.
export const [url, model] = [process.env.PAGEWIRE_URL, process.env.PAGEWIRE_MODEL];
export const [question, report] = ["What is the weather in Paris?", "18 degrees and sunny"];
const city = { type: "string", maxLength: 12 };
export const parameters = { type: "object", properties: { city }, required: ["city"], additionalProperties: false };

export function expect(holds, what) {
  if (!holds) throw new Error(`not so: ${JSON.stringify(what)}`);
}

export async function run(...checks) {
  for (const check of checks) {
    const failed = (error) => `: ${String(error).replace(/\s+/g, " ").slice(0, 300)}`;
    const error = await check().then(() => "", failed);
    console.log(`${error ? "fail" : "pass"} ${check.name}${error}`);
  }
}
