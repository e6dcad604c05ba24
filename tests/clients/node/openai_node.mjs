// OpenAI's package for Node: chat, streams, tools, objects, responses, completions, errors, retries.

import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

import { KEY, MODEL, OBJECT_TOKENS, URL, check, expect, raised, run } from "./checks.mjs";

const connect = (apiKey, maxRetries = 0) =>
  new OpenAI({ baseURL: `${URL}/v1`, apiKey, maxRetries, timeout: 60_000 });
const client = connect(KEY);
const chat = client.chat.completions;
const question = { role: "user", content: "What is 12 + 7?" };
const short = { model: MODEL, messages: [question], max_completion_tokens: 40, temperature: 0 };
const long = { ...short, max_completion_tokens: OBJECT_TOKENS };

const Number = z.number().int().min(0).max(99);
const Operands = z.object({ a: Number, b: Number });
const Sum = z.object({
  sign: z.enum(["plus", "minus"]),
  left: z.object({ value: Number }),
  carry: z.boolean().nullable(),
});

check("chat_and_streams", async () => {
  const whole = await chat.create(short);
  const { content, refusal } = whole.choices[0].message;
  expect(content && refusal === null, JSON.stringify(whole));
  let text = "";
  let usage;
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await chat.create({ ...short, ...options })) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  expect(text === content, `streamed ${text}, whole ${content}`);
  expect(usage.total_tokens === whole.usage.total_tokens, JSON.stringify(usage));
  const final = await chat.stream(short).finalContent();
  expect(final === content, `the helper's text is ${final}`);
});

check("objects", async () => {
  const parsed = await chat.parse({ ...long, response_format: zodResponseFormat(Sum, "sum") });
  Sum.parse(parsed.choices[0].message.parsed);
});

check("a_loop_with_tools", async () => {
  const calls = [];
  const add = zodFunction({
    name: "add",
    description: "Adds.",
    parameters: Operands,
    function: ({ a, b }) => {
      calls.push([a, b]);
      return String(a + b);
    },
  });
  const required = { tool_choice: "required", parallel_tool_calls: false };
  const first = await chat.parse({ ...long, ...required, tools: [add] });
  const message = first.choices[0].message;
  const [call] = message.tool_calls;
  const { a, b } = Operands.parse(call.function.parsed_arguments);
  const result = { role: "tool", tool_call_id: call.id, content: String(a + b) };
  const messages = [question, message, result];
  const second = await chat.create({ ...long, messages, tools: [add], tool_choice: "none" });
  expect(second.choices[0].message.content, JSON.stringify(second));

  const named = { type: "function", function: { name: "add" } };
  const stream = chat.stream({ ...long, tools: [add], tool_choice: named });
  const streamed = (await stream.finalChatCompletion()).choices[0].message.tool_calls[0];
  expect(streamed.function.arguments === call.function.arguments, JSON.stringify(streamed));

  // The package's loop ends after a call that the request names.
  const runner = chat.runTools({ ...long, tools: [add], tool_choice: named });
  await runner.done();
  expect(calls.length === 1, JSON.stringify(calls));
});

check("completions", async () => {
  const options = { model: MODEL, prompt: "1 + 1 =", max_tokens: 8, temperature: 0 };
  const whole = await client.completions.create(options);
  let text = "";
  for await (const part of await client.completions.create({ ...options, stream: true })) {
    text += part.choices[0].text;
  }
  expect(text === whole.choices[0].text, `streamed ${text}, whole ${whole.choices[0].text}`);
});

check("responses", async () => {
  const options = { model: MODEL, input: "What is 12 + 7?", max_output_tokens: 40, temperature: 0 };
  const whole = await client.responses.create(options);
  expect(whole.output_text, JSON.stringify(whole));
  let text = "";
  for await (const event of await client.responses.create({ ...options, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  expect(text === whole.output_text, `streamed ${text}, whole ${whole.output_text}`);
  const second = await client.responses.create({ ...options, previous_response_id: whole.id });
  expect(second.usage.input_tokens > whole.usage.input_tokens, JSON.stringify(second.usage));
  const read = await client.responses.retrieve(whole.id);
  expect(read.output_text === whole.output_text, JSON.stringify(read));
});

check("errors_are_typed", async () => {
  const bad = () => chat.create({ ...short, temperature: 3 });
  const error = await raised(OpenAI.BadRequestError, bad);
  expect(error.param === "temperature" && error.code === "invalid_value", JSON.stringify(error));
  expect(error.requestID, "no request id");
  const unknown = () => connect("no-such-key").models.list();
  await raised(OpenAI.AuthenticationError, unknown);
  const missing = () => chat.create({ ...short, model: "no-such-model" });
  await raised(OpenAI.NotFoundError, missing);
});

check("retries_after_a_limit", async () => {
  const limited = connect("limited-node-key");
  let sent = 0;
  const counting = new OpenAI({
    baseURL: `${URL}/v1`,
    apiKey: "limited-node-key",
    maxRetries: 3,
    fetch: (...request) => {
      sent += 1;
      return fetch(...request);
    },
  });
  const useUp = async () => {
    for (let i = 0; i < 200; i++) await limited.models.list();
  };
  // More than once, because the limit may permit a request between the two.
  for (let asked = 1; asked <= 5; asked++) {
    await raised(OpenAI.RateLimitError, useUp);
    await counting.chat.completions.create({ ...short, max_completion_tokens: 4 });
    if (sent > asked) return;
  }
  throw new Error("no request was repeated");
});

await run();
