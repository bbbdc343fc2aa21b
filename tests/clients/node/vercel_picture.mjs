// Vercel's AI SDK: a picture over chat completions, the Responses API and Anthropic's Messages.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText } from 'ai';

const { BASE_URL: baseURL, API_KEY: apiKey, MODEL, PICTURE } = process.env;
const models = {
  chat: createOpenAICompatible({ name: 'quire', baseURL, apiKey })(MODEL),
  response: createOpenAI({ baseURL, apiKey }).responses(MODEL),
  message: createAnthropic({ baseURL, apiKey })(MODEL),
};
const content = [{ type: 'image', image: PICTURE }, { type: 'text', text: 'What is this?' }];
const said = {};
for (const [name, model] of Object.entries(models)) {
  const messages = [{ role: 'user', content }];
  said[name] = (await generateText({ model, messages, temperature: 0, maxRetries: 0 })).text;
}
console.log(JSON.stringify(said));
