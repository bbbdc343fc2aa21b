// Vercel's AI SDK, over chat completions, the Responses API and Anthropic's Messages.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, streamText, tool } from 'ai';
import { z } from 'zod';

const { BASE_URL: baseURL, API_KEY: apiKey, MODEL } = process.env;
const compatible = createOpenAICompatible({
  name: 'quire', baseURL, apiKey, supportsStructuredOutputs: true, includeUsage: true,
});
const model = compatible(MODEL);
const openai = createOpenAI({ baseURL, apiKey });
const prompt = 'What is the capital of France?';
const common = { temperature: 0, maxRetries: 0 };

const whole = await generateText({ model, prompt, ...common });
let streamed = '';
for await (const text of streamText({ model, prompt, ...common }).textStream) streamed += text;
let response = '';
const over = streamText({ model: openai.responses(MODEL), prompt, ...common });
for await (const text of over.textStream) response += text;
const anthropic = createAnthropic({ baseURL, apiKey });
const message = await generateText({ model: anthropic(MODEL), prompt, ...common });
// Words are given: the demo model isn't trained on JSON.
const schema = z.object({ country: z.enum(['France', 'Italy']), capital: z.enum(['Paris', 'Rome']) });
const { object } = await generateObject({ model, prompt, schema, maxOutputTokens: 200, ...common });
const inputSchema = z.object({ city: z.enum(['Rome', 'Paris']) });
const weather = tool({ description: 'The weather.', inputSchema });
const called = await generateText({
  model, prompt: 'Weather in Rome?', tools: { weather }, toolChoice: 'required', ...common,
});
console.log(JSON.stringify({
  whole: whole.text, streamed, response, message: message.text, structured: Object.keys(object).sort(),
  calls: called.toolCalls.map((call) => call.toolName), tokens: whole.usage.outputTokens,
}));
