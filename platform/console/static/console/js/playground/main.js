/** The playground page: makes the parts and joins them. */

import { byId } from "../lib/dom.js";
import { Poll } from "../lib/poll.js";
import { Composer } from "./composer.js";
import { ConnectionLine } from "./connection.js";
import { Conversation } from "./conversation.js";
import { Generations } from "./generations.js";
import { Page } from "./page.js";
import { Panel } from "./panel.js";
import { Picker } from "./picker.js";
import { Playground } from "./playground.js";
import { Settings } from "./settings.js";
import { PlaygroundSocket } from "./socket.js";
import { Tenants } from "./tenants.js";
import { Thread } from "./thread.js";

const root = byId("playground");
const { reader, socketPath, modelsUrl, loginUrl } = root.dataset;

const conversation = new Conversation(reader);
const page = new Page();
const socket = new PlaygroundSocket(socketPath);
const connection = new ConnectionLine(byId("connection"), socket, loginUrl);
const generations = new Generations(socket);
const panel = new Panel(byId("settings"), byId("settings-toggle"));
const settings = new Settings(byId("sampling"), conversation.settings, (raw) => {
  conversation.settings = raw;
  conversation.changed();
});
const picker = new Picker(byId("model"), byId("model-list"), conversation.model, (id) => {
  conversation.model = id;
  conversation.changed();
});
const tenants = new Tenants(byId("tenant-choice"), byId("tenant"), reader, () => models.now());
const thread = new Thread(byId("scroller"), byId("thread"), {
  edit: (index, text) => playground.edit(index, text),
  again: () => playground.again(),
  errorActions: (error) => playground.errorActions(error),
  followed: (following) => (byId("to-end").hidden = following),
});
const composer = new Composer(byId("composer"), {
  send: (text) => playground.send(text),
  stop: () => playground.stop(),
  editLast: () => playground.editLast(),
});
const playground = new Playground({
  conversation,
  thread,
  generations,
  settings,
  panel,
  picker,
  tenants,
  composer,
  page,
});

function showModels({ models, tenant, tenants: all = [] }) {
  tenants.update(all, tenant);
  picker.update(models);
  byId("no-models").hidden = models.length > 0;
  composer.blocked = models.length > 0 ? "" : "no model";
  root.dataset.models = "known";
}

const models = new Poll(() => tenants.address(modelsUrl), ({ models: found }) => (found.every(isReady) ? 5000 : 1500), {
  data: showModels,
  failed: (message) => page.say(`The models can't be listed: ${message}`),
  loggedOut: () => connection.loggedOut(),
});

function isReady(model) {
  return model.state === "ready";
}

function keys(event) {
  if (event.key === "Escape" && !event.defaultPrevented && !byId("settings").matches(":modal")) {
    playground.stop();
  }
}

const system = byId("system");
system.value = conversation.system;
system.addEventListener("input", () => {
  conversation.system = system.value;
  conversation.changed();
});
conversation.onUnsaved = () =>
  page.say("This conversation is too long to be kept when the page is reloaded.");
byId("new-conversation").addEventListener("click", () => playground.clear());
byId("to-end").addEventListener("click", () => thread.follower.toEnd());
for (const button of root.querySelectorAll("[data-starter]")) {
  button.addEventListener("click", () => composer.put(button.dataset.starter));
}
addEventListener("keydown", keys);

playground.restore();
socket.connect();
models.now();
composer.focus();
