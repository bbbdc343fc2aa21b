/** The playground page: makes the parts and joins them. */

import { byId } from "../lib/dom.js";
import { Poll } from "../lib/poll.js";
import { ActiveSettings } from "./active.js";
import { Attachments } from "./attachments.js";
import { CodeDialog } from "./code_dialog.js";
import { ModelColumns } from "./columns.js";
import { Composer } from "./composer.js";
import { ConnectionLine } from "./connection.js";
import { Conversation } from "./conversation.js";
import { Extras } from "./extras.js";
import { Generations } from "./generations.js";
import { Keeping } from "./keeping.js";
import { Page } from "./page.js";
import { Panel } from "./panel.js";
import { Playground } from "./playground.js";
import { Presets } from "./presets.js";
import { Settings } from "./settings.js";
import { PlaygroundSocket } from "./socket.js";
import { Tenants } from "./tenants.js";
import { Thread } from "./thread.js";
import { ToolServers } from "./tool_servers.js";

const root = byId("playground");
const { reader, socketPath, modelsUrl, loginUrl, picturesUrl, fileUrl, presetsUrl } = root.dataset;

const conversation = new Conversation(reader);
const linked = new URLSearchParams(location.search);
if (linked.get("model")) conversation.model = linked.get("model");
if (linked.has("compare")) conversation.compared = linked.getAll("compare");
const page = new Page();
const socket = new PlaygroundSocket(socketPath);
const connection = new ConnectionLine(byId("connection"), socket, loginUrl);
const generations = new Generations(socket);
const panel = new Panel(byId("settings"), byId("settings-toggle"), { key: "quire.panel", minWidth: "64rem" });
const extras = new Extras(byId("extras"), conversation);
const toolServers = new ToolServers(byId("tool-servers"), conversation);
const settings = new Settings(byId("sampling"), conversation.settings, (raw) => {
  const { probabilities } = conversation.settings;
  conversation.settings = { ...raw, ...(probabilities && { probabilities }) };
  conversation.changed();
});
const columns = new ModelColumns(byId("columns"), byId("compare"), [conversation.model, ...conversation.compared], (values) => {
  [conversation.model, ...conversation.compared] = values;
  conversation.changed();
  attachments.changed();
});
const tenants = new Tenants(byId("tenant-choice"), byId("tenant"), reader, linked.get("tenant"), () => models.now());
const thread = new Thread(byId("scroller"), byId("thread"), {
  edit: (index, text) => playground.edit(index, text),
  again: () => playground.again(),
  results: () => playground.results(),
  siblings: (turn) => conversation.siblings(turn),
  choose: (turn) => playground.choose(turn),
  picture: pictureUrl,
  errorActions: (error) => playground.errorActions(error),
  followed: (following) => (byId("to-end").hidden = following),
});
const attachments = new Attachments(byId("composer"), byId("picture-files"), {
  upload: () => tenants.address(picturesUrl),
  picture: pictureUrl,
  models: () => columns.models,
  say: (text) => page.say(text),
});
const composer = new Composer(byId("composer"), attachments, {
  send: (text, images) => playground.send(text, images),
  stop: () => playground.stop(),
  editLast: () => playground.editLast(),
});
const playground = new Playground({
  conversation,
  thread,
  generations,
  settings,
  extras,
  toolServers,
  panel,
  columns,
  tenants,
  composer,
  page,
});
const code = new CodeDialog(byId("code"), byId("code-toggle"));
code.request = () => playground.lastRequest();

/* -- pictures -- */

/** Files belong to the tenant of the conversation, which may be another than the chosen one. */
function pictureUrl(id) {
  const url = fileUrl.replace("FILE", encodeURIComponent(id));
  const { saved } = conversation;
  return saved ? `${url}?tenant=${encodeURIComponent(saved.tenant)}` : tenants.address(url);
}

/** A browser would open a dropped file in place of the page, and drop a pasted one silently. */
function attachFiles(event, transfer) {
  if (!transfer?.types.includes("Files")) return;
  event.preventDefault();
  if (event.type !== "dragover") attachments.add([...transfer.files]);
  root.toggleAttribute("data-drop", event.type === "dragover");
}

for (const type of ["dragover", "drop"]) addEventListener(type, (event) => attachFiles(event, event.dataTransfer));
addEventListener("dragleave", (event) => event.relatedTarget || root.removeAttribute("data-drop"));
byId("prompt").addEventListener("paste", (event) => attachFiles(event, event.clipboardData));

/* -- models -- */

let listedTenant = null;

function showModels({ models, mcp_servers: servers = [], tenant, tenants: all = [], view_only: viewOnly = false }) {
  tenants.update(all, tenant);
  if (listedTenant !== tenants.value) {
    listedTenant = tenants.value;
    presets.load();
    keeping.history.refresh();
  }
  columns.update(models);
  toolServers.update(servers);
  byId("no-models").hidden = models.length > 0;
  root.toggleAttribute("data-view-only", viewOnly);
  byId("view-only").hidden = !viewOnly;
  composer.blocked = models.length > 0 ? "" : "no model";
  attachments.changed();
  root.dataset.models = "known";
}

const models = new Poll(() => tenants.address(modelsUrl), ({ models: listed }) => (listed.every(isReady) ? 5000 : 1500), {
  data: showModels,
  failed: (message) => page.say(`The models can't be listed: ${message}`),
  loggedOut: () => connection.loggedOut(),
});

function isReady(model) {
  return model.state === "ready";
}

/* -- the rest of the page -- */

function keys(event) {
  if (event.key === "Escape" && !event.defaultPrevented && !document.querySelector("dialog:modal")) {
    playground.stop();
  }
}

const system = byId("system");
system.addEventListener("input", () => {
  conversation.system = system.value;
  conversation.changed();
});

byId("reset-all").addEventListener("click", () => {
  Object.assign(conversation, { system: "", tools: "", servers: [], schema: "", settings: {} });
  conversation.changed();
  showSettings();
});

function showSettings() {
  system.value = conversation.system;
  settings.show(conversation.settings);
  extras.show();
  toolServers.show();
}

new ActiveSettings(byId("active-settings"), conversation, showSettings);

const presets = new Presets(byId("presets"), byId("preset-starters"), presetsUrl, tenants, {
  current: () => {
    const { model, system, tools, servers, schema, settings: values } = conversation;
    const filled = Object.entries({ system, tools, schema }).filter(([, text]) => text.trim());
    const options = { ...Object.fromEntries(filled), ...(servers.length && { servers }), ...(Object.keys(values).length && { settings: values }) };
    return { prompt: composer.text, options: { ...(model && { model }), ...options } };
  },
  apply: ({ prompt, options }) => {
    if (Object.keys(options).length > 0) {
      const { model = conversation.model, ...rest } = options;
      Object.assign(conversation, { system: "", tools: "", servers: [], schema: "", settings: {}, ...rest, model });
      conversation.changed();
      columns.values = [model, ...conversation.compared];
      showSettings();
    }
    if (prompt) composer.setText(prompt);
  },
});

/** The fields follow a conversation that was opened. */
function showConversation() {
  showSettings();
  columns.values = [conversation.model, ...conversation.compared];
  attachments.changed();
  playground.restore();
}

const keeping = new Keeping(root, { conversation, tenants, page, stop: () => playground.stop(), show: showConversation });
conversation.onUnsaved = () =>
  page.say("This conversation is too long to keep: it is lost when the page is reloaded.");
byId("new-conversation").addEventListener("click", () => {
  playground.clear();
  keeping.show();
});
byId("to-end").addEventListener("click", () => thread.follower.toEnd());
for (const button of root.querySelectorAll("[data-starter]")) {
  button.addEventListener("click", () => {
    if (!playground.send(button.dataset.starter)) composer.setText(button.dataset.starter);
  });
}
addEventListener("keydown", keys);

system.value = conversation.system;
playground.restore();
keeping.begin();
socket.connect();
models.now();
composer.focus();
