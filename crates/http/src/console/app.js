// The frame of the console: the key, the list of views, and the stream of overviews.

import { byId, get, h, key, note, parseMetrics, Refused, request } from './kit.js';
import { VIEWS } from './views.js';

/** What the views read. `history` has a reading of the metrics every two seconds, for ten minutes. */
const state = { overview: null, history: [], policies: null };
const READINGS = 300;

// The views. The address names one, after "#", with a part after "/".

let current = null;
let shown = 0;

function route() {
  const [name, ...rest] = location.hash.slice(1).split('/');
  const view = VIEWS.find(({ id }) => id === name) ?? VIEWS[0];
  return { view, part: decodeURIComponent(rest.join('/')) };
}

async function show(isNavigation) {
  const { view, part } = route();
  const turn = (shown += 1);
  for (const link of document.querySelectorAll('nav a')) {
    if (link.dataset.view === view.id) {
      link.setAttribute('aria-current', 'page');
      if (isNavigation) link.scrollIntoView({ block: 'nearest', inline: 'nearest' });
    } else link.removeAttribute('aria-current');
  }
  byId('question').textContent = view.question;
  document.title = `${view.name} – Hone console`;
  if (isNavigation) byId('view').replaceChildren(h('p', { class: 'empty' }, 'Loading …'));
  try {
    const content = await view.render({ state, part, refresh, go });
    if (turn !== shown) return;
    byId('view').replaceChildren(...[content].flat());
  } catch (error) {
    if (turn !== shown) return;
    byId('view').replaceChildren(h('p', { class: 'empty', role: 'alert' }, error.message));
    if (error instanceof Refused && error.status === 401) askForKey(error.message);
  }
  current = view;
}

/** Renders the view with new data. */
function refresh() {
  state.policies = null;
  return show(false);
}

function go(hash) {
  if (location.hash === hash) show(true);
  else location.hash = hash;
}

function isBusy() {
  const active = document.activeElement;
  return document.querySelector('dialog[open]') || byId('view').contains(active) && /INPUT|TEXTAREA|SELECT/.test(active.tagName)
    || document.querySelector('#view .u-over:hover') || String(getSelection()).length > 0;
}

// The key.

function askForKey(reason) {
  const dialog = byId('key-dialog');
  if (dialog.open) return;
  if (reason) byId('key-reason').textContent = `${reason}. A key with the scope read shows everything; one with the scope admin also acts.`;
  byId('key-input').value = '';
  dialog.showModal();
}

function useKey(text) {
  key.set(text);
  byId('key-dialog').close();
  connect();
  show(true);
}

// The stream. EventSource cannot send a key, so the events are read from a response.

let stream = null;

async function connect() {
  stream?.abort();
  const own = (stream = new AbortController());
  while (!own.signal.aborted) {
    try {
      const response = await request('admin/events', { signal: own.signal });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = '';
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        text += value;
        const events = text.split('\n\n');
        text = events.pop();
        for (const event of events) receive(event);
      }
    } catch (error) {
      if (own.signal.aborted) return;
      setStatus(error instanceof Refused ? 'no access' : 'no connection', 'bad');
      if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
        byId('view').replaceChildren(h('p', { class: 'empty', role: 'alert' }, error.message));
        if (error.status === 401) askForKey(error.message);
        return;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

function setStatus(text, kind) {
  const status = byId('status');
  if (status.textContent !== text) status.textContent = text;
  status.className = `badge ${kind}`;
}

let ticks = 0;

async function receive(event) {
  const name = /^event: (.*)$/m.exec(event)?.[1];
  const data = /^data: (.*)$/m.exec(event)?.[1];
  if (name === 'changed') {
    state.policies = null;
    if (current?.watches && !isBusy()) show(false);
  }
  if (name !== 'overview') return;
  const overview = (state.overview = JSON.parse(data));
  const troubles = overview.not_ready.length ? ['not ready', 'bad'] : overview.warnings.length ? ['warning', 'warn'] : ['healthy', 'good'];
  setStatus(...troubles);
  byId('model').textContent = overview.model;
  byId('served').textContent = `v${overview.active}${overview.canary === null ? '' : `, canary v${overview.canary}`} · ${overview.train.state}`;
  if (ticks++ % 2 === 0) await read(overview.at);
  if (current?.live && ticks % current.live === 0 && !isBusy()) show(false);
}

async function read(at) {
  try {
    const metrics = parseMetrics(await (await request('admin/metrics')).text());
    state.history.push({ at, metrics });
    if (state.history.length > READINGS) state.history.shift();
  } catch (error) {
    if (!(error instanceof Refused)) return;
    note(`The metrics cannot be read: ${error.message}`, 'bad');
  }
}

state.versions = async () => (state.policies ??= await get('admin/policies'));

byId('views').append(...VIEWS.map(({ id, name }) => h('li', {}, h('a', { href: `#${id}`, 'data-view': id }, name))));
byId('key-button').addEventListener('click', () => askForKey());
byId('key-forget').addEventListener('click', () => useKey(''));
byId('key-form').addEventListener('submit', (event) => {
  event.preventDefault();
  useKey(byId('key-input').value.trim());
});
byId('skip').addEventListener('click', (event) => {
  event.preventDefault();
  byId('content').focus();
});
addEventListener('hashchange', () => {
  show(true);
  byId('content').focus({ preventScroll: true });
  scrollTo(0, 0);
});
// The digits open views.
addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|TEXTAREA|SELECT/.test(event.target.tagName)) return;
  if (document.querySelector('dialog[open]') || !/^[0-9]$/.test(event.key)) return;
  const view = VIEWS[(Number(event.key) + 9) % 10];
  if (view) go(`#${view.id}`);
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => show(false));
connect();
show(true);
