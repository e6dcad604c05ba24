// Vercel's AI SDK with OpenAI-compatible chat and with OpenAI's responses: text, streams, tools, objects.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

import { KEY, MODEL, OBJECT_TOKENS, URL, check, expect, raised, run } from "./checks.mjs";

const options = { name: "hone", baseURL: `${URL}/v1`, apiKey: KEY };
const compatible = createOpenAICompatible({
  ...options,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI(options);
const models = {
  compatible: compatible(MODEL),
  chat: openai.chat(MODEL),
  responses: openai.responses(MODEL),
};
const prompt = "What is 12 + 7?";
const common = { prompt, temperature: 0, maxRetries: 0 };
const Number = z.number().int().min(0).max(99);
const Sum = z.object({ sign: z.enum(["plus", "minus"]), left: z.object({ value: Number }) });

for (const [name, model] of Object.entries(models)) {
  check(`text_with_${name}`, async () => {
    const settings = { ...common, model, system: "Answer.", maxOutputTokens: 40 };
    const whole = await generateText(settings);
    expect(whole.text && whole.usage.totalTokens > 0, JSON.stringify(whole.usage));
    const stream = streamText(settings);
    let text = "";
    for await (const part of stream.textStream) text += part;
    expect(text === whole.text, `streamed ${text}, whole ${whole.text}`);
    expect((await stream.usage).outputTokens > 0, "no usage in the stream");
  });

  check(`a_loop_with_tools_with_${name}`, async () => {
    const calls = [];
    const add = tool({
      description: "Adds.",
      inputSchema: z.object({ a: Number, b: Number }),
      execute: async ({ a, b }) => {
        calls.push([a, b]);
        return a + b;
      },
    });
    const settings = {
      ...common,
      model,
      tools: { add },
      maxOutputTokens: OBJECT_TOKENS,
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({
        toolChoice: stepNumber === 0 ? { type: "tool", toolName: "add" } : "none",
      }),
    };
    const whole = await generateText(settings);
    expect(whole.steps.length === 2 && calls.length === 1, JSON.stringify(calls));
    expect(whole.text, JSON.stringify(whole.steps.map((step) => step.content)));
    const stream = streamText(settings);
    await stream.consumeStream();
    expect((await stream.text) === whole.text, `streamed ${await stream.text}, ${whole.text}`);
    expect(JSON.stringify(calls[0]) === JSON.stringify(calls[1]), JSON.stringify(calls));
  });

  check(`objects_with_${name}`, async () => {
    const output = Output.object({ schema: Sum });
    const settings = { ...common, model, output, maxOutputTokens: OBJECT_TOKENS };
    Sum.parse((await generateText(settings)).output);
  });

  check(`errors_are_typed_with_${name}`, async () => {
    const error = await raised(APICallError, () =>
      generateText({ ...common, model, maxOutputTokens: 4, temperature: 3 }),
    );
    expect(error.statusCode === 400, `status ${error.statusCode}`);
    expect(error.message.includes("temperature"), error.message);
  });
}

await run();
