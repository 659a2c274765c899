// Vercel's AI SDK with its provider for servers like OpenAI's: text, a stream, an object, a tool, embeddings.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const { TANDEM_URL, TANDEM_MODEL, TANDEM_EMBEDDER } = process.env;
const tandem = createOpenAICompatible({
  name: "tandem", baseURL: `${TANDEM_URL}/v1`, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const ask = { model: tandem(TANDEM_MODEL), prompt: "What is 17 + 25?", maxOutputTokens: 48, temperature: 0, maxRetries: 0 };

const whole = await generateText(ask);
assert(whole.text && whole.usage.outputTokens > 0);
const streamed = streamText(ask);
let text = "";
for await (const piece of streamed.textStream) text += piece;
assert.equal(text, whole.text);
assert((await streamed.usage).outputTokens > 0);
const sum = z.object({ result: z.number().int().min(0).max(999) });
const { output } = await generateText({ ...ask, output: Output.object({ schema: sum }) });
assert(Number.isInteger(output.result));
let called = "";
const weather = tool({
  description: "Tell the weather of a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => { called = city; return "rain"; },
});
await generateText({ ...ask, prompt: "How is the weather in Oslo?", tools: { weather }, toolChoice: "required" });
assert(called, "the tool was called");
const { embeddings } = await embedMany({ model: tandem.embeddingModel(TANDEM_EMBEDDER), values: ["a", "b", "c"] });
assert.deepEqual(embeddings.map((each) => each.length), [384, 384, 384]);
