// OpenAI's SDK for node: whole, streamed, helpers, Responses, files and batches.
import OpenAI, { toFile } from 'openai';

const { BASE_URL, API_KEY, MODEL: model } = process.env;
const client = new OpenAI({ baseURL: BASE_URL, apiKey: API_KEY, maxRetries: 0 });
const messages = [{ role: 'user', content: 'What is the capital of France?' }];
const input = messages[0].content;

const whole = await client.chat.completions.create({ model, messages, temperature: 0 });
let streamed = '';
const chunks = await client.chat.completions.create({ model, messages, temperature: 0, stream: true });
for await (const chunk of chunks) streamed += chunk.choices[0]?.delta?.content ?? '';

const runner = client.chat.completions.stream({ model, messages, temperature: 0 });
const helped = await runner.finalContent();

const events = [];
const responses = client.responses.stream({ model, input, temperature: 0 });
for await (const event of responses) events.push(event.type);
const response = await responses.finalResponse();
const next = await client.responses.create({
  model, input: 'And of Italy?', previous_response_id: response.id, max_output_tokens: 5,
});

const file = await client.files.create({
  file: await toFile(Buffer.from('{}\n'), 'in.jsonl'), purpose: 'batch',
});
const content = await (await client.files.content(file.id)).text();
await client.files.delete(file.id);
let gone = null;
try { await client.files.retrieve(file.id); } catch (error) { gone = error.constructor.name; }

console.log(JSON.stringify({
  whole: whole.choices[0].message.content, streamed, helped, response: response.output_text,
  first: events[0], last: events.at(-1), previous: next.previous_response_id === response.id,
  content, gone,
}));
