// What all views share: elements, requests, metrics, numbers, plots, tables and dialogs.

/** An element. Text becomes text nodes, never markup. Attributes that begin with "on" are listeners. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'value' || name === 'checked' || name === 'selected') element[name] = value;
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

// Requests. The key stays in this tab.

const KEY = 'hone-console-key';
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? '',
  set: (text) => (text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY)),
};

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function request(path, { method = 'GET', body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (method !== 'GET') headers['content-type'] = 'application/json';
  const sent = method === 'POST' ? JSON.stringify(body ?? {}) : undefined;
  const response = await fetch(path, { method, headers, body: sent, signal });
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  throw new Refused(response.status, answer?.error?.message ?? `status ${response.status}`);
}

export const get = async (path) => (await request(path)).json();
export const post = async (path, body) => (await request(path, { method: 'POST', body })).json();
export const remove = async (path) => (await request(path, { method: 'DELETE' })).json();
/** As `get`, or null where this release lacks the path. */
export const getIfThere = (path) =>
  get(path).catch((error) => {
    if (error.status === 404) return null;
    throw error;
  });

export const query = (fields) => {
  const given = Object.entries(fields).filter(([, value]) => value !== '' && value !== null && value !== undefined);
  return given.length ? `?${new URLSearchParams(given)}` : '';
};

// Metrics in Prometheus' text format.

const LINE = /^([a-z_]+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /([a-z_]+)="((?:[^"\\]|\\.)*)"/g;

/** name -> [{labels, value}] */
export function parseMetrics(text) {
  const all = new Map();
  for (const line of text.split('\n')) {
    const parts = LINE.exec(line);
    if (!parts) continue;
    const labels = {};
    for (const [, name, value] of (parts[2] ?? '').matchAll(LABEL)) labels[name] = value.replace(/\\(.)/g, '$1');
    if (!all.has(parts[1])) all.set(parts[1], []);
    all.get(parts[1]).push({ labels, value: Number(parts[3]) });
  }
  return all;
}

export function total(metrics, name, admits = () => true) {
  return (metrics?.get(name) ?? []).reduce((sum, row) => sum + (admits(row.labels) ? row.value : 0), 0);
}

/** Counts by upper bound, of one histogram, over its other labels. */
export function buckets(metrics, name, admits = () => true) {
  const sums = new Map();
  for (const { labels, value } of metrics?.get(`${name}_bucket`) ?? []) {
    if (!admits(labels)) continue;
    const bound = labels.le === '+Inf' ? Infinity : Number(labels.le);
    sums.set(bound, (sums.get(bound) ?? 0) + value);
  }
  return [...sums].sort((a, b) => a[0] - b[0]);
}

/** A quantile of what was observed between two readings, linear within a bucket; null without observations. */
export function quantile(share, now, before = []) {
  const earlier = new Map(before);
  const counts = now.map(([bound, count]) => [bound, count - (earlier.get(bound) ?? 0)]);
  const all = counts.at(-1)?.[1] ?? 0;
  if (all <= 0) return null;
  let [low, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= share * all) {
      return bound === Infinity ? low : low + ((bound - low) * (share * all - below)) / Math.max(count - below, 1);
    }
    [low, below] = [bound, count];
  }
  return low;
}

// Numbers and times.

const SMALL = new Intl.NumberFormat('en', { maximumSignificantDigits: 3 });
const WHOLE = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  return Math.abs(value) >= 1000 ? WHOLE.format(value) : SMALL.format(value);
}
export const percent = (value) => (value === null || value === undefined ? '–' : `${number(100 * value)} %`);
export const signed = (value) => (value === null || value === undefined ? '–' : (value > 0 ? '+' : '') + number(value));
export function bytes(value) {
  if (value === null || value === undefined) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let at = 0;
  for (; value >= 1024 && at < units.length - 1; at += 1) value /= 1024;
  return `${number(value)} ${units[at]}`;
}
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return '–';
  if (seconds < 1) return `${number(1000 * seconds)} ms`;
  if (seconds < 90) return `${number(seconds)} s`;
  if (seconds < 5400) return `${WHOLE.format(seconds / 60)} min`;
  return seconds < 172800 ? `${number(seconds / 3600)} h` : `${number(seconds / 86400)} d`;
}
export function time(ms) {
  if (ms === null || ms === undefined) return '–';
  const date = new Date(ms);
  const clock = date.toLocaleTimeString('en-GB');
  const day = date.toDateString() === new Date().toDateString() ? '' : `${date.toLocaleDateString('en-CA')} `;
  return h('time', { datetime: date.toISOString(), title: date.toISOString() }, day + clock);
}

// Parts of pages.

export const badge = (text, kind = '') => h('span', { class: `badge ${kind}` }, text);
export const muted = (text) => h('span', { class: 'muted' }, text);
export const notice = (text) => h('p', { class: 'empty' }, text);
export const section = (title, ...content) => h('section', { class: 'card' }, h('h2', {}, title), ...content);
export const row = (...content) => h('div', { class: 'row' }, ...content);
export const button = (text, onclick, kind = '') => h('button', { type: 'button', class: kind, onclick }, text);
export const answerLink = (id, text) => h('a', { href: `#answers/${id}` }, text ?? 'open');

export function tiles(entries) {
  const shown = entries.filter(Boolean).map(([name, value, note, kind]) =>
    h('div', { class: `tile ${kind ?? ''}` }, h('dt', {}, name), h('dd', {}, value, note ? h('small', {}, note) : null)));
  return h('dl', { class: 'tiles' }, shown);
}

/** A table that scrolls sideways where it is too wide. Numeric columns have a title that begins with "#". */
export function table(caption, titles, rows, empty = 'Nothing yet.') {
  if (!rows.length) return notice(empty);
  const numeric = titles.map((title) => title.startsWith('#'));
  const head = titles.map((title, at) => h('th', { scope: 'col', class: numeric[at] && 'num' }, title.replace(/^#/, '')));
  const body = rows.map((cells) => h('tr', {}, cells.map((cell, at) => h('td', { class: numeric[at] && 'num' }, cell))));
  return h('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': caption },
    h('table', {}, h('caption', { class: 'sr' }, caption), h('thead', {}, h('tr', {}, head)), h('tbody', {}, body)));
}

/** Shares of a sum as bars: [name, value, text]. */
export function bars(entries, empty = 'None.') {
  const most = Math.max(...entries.map(([, value]) => value), 0);
  if (!(most > 0)) return notice(empty);
  return h('ul', { class: 'bars' }, entries.map(([name, value, text]) =>
    h('li', {}, h('span', {}, name), h('meter', { min: 0, max: most, value, 'aria-label': name }), h('b', {}, text ?? number(value)))));
}

export function field(label, input, hint) {
  return h('label', {}, label, input, hint ? h('small', {}, hint) : null);
}
export const select = (options, value, onchange, id) =>
  h('select', { onchange: onchange && ((event) => onchange(event.target.value)), id },
    options.map(([name, text]) => h('option', { value: name, selected: name === value }, text)));

// Notes and confirmations.

export function note(text, kind = '') {
  const element = h('p', { class: `note ${kind}` }, text);
  byId('notes').append(element);
  setTimeout(() => element.remove(), kind === 'bad' ? 12000 : 5000);
}

/** Asks before an action. `effects` says what will happen. Resolves to whether the operator confirmed. */
export function confirm({ title, effects, action, danger = false, input }) {
  return new Promise((resolve) => {
    const yes = h('button', { type: 'submit', value: 'yes', class: danger ? 'danger' : 'primary' }, action);
    const no = h('button', { type: 'submit', value: 'no', formnovalidate: true }, 'Cancel');
    const dialog = h('dialog', { class: 'confirm', 'aria-labelledby': 'confirm-title' },
      h('form', { method: 'dialog' }, h('h2', { id: 'confirm-title' }, title),
        h('ul', {}, effects.map((line) => h('li', {}, line))), input ?? null, h('div', { class: 'buttons' }, no, yes)));
    dialog.addEventListener('close', () => {
      dialog.remove();
      resolve(dialog.returnValue === 'yes');
    });
    document.body.append(dialog);
    dialog.showModal();
    (input?.querySelector('input') ?? (danger ? no : yes)).focus();
  });
}

/** Confirms and runs an action, and says what came of it. */
export async function act(question, run, done) {
  if (!(await confirm(question))) return false;
  try {
    const answer = await run();
    note(typeof done === 'function' ? done(answer) : done, 'good');
    return true;
  } catch (error) {
    note(`${question.action} failed: ${error.message}`, 'bad');
    return false;
  }
}

// Plots.

const COLORS = 6;
const BINARY_STEPS = Array.from({ length: 50 }, (_, power) => 2 ** power);
const WHOLE_STEPS = [1, 2, 5].flatMap((digit) => [0, 1, 2, 3, 4, 5, 6].map((power) => digit * 10 ** power)).sort((a, b) => a - b);
const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString('en-GB');
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const observer = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    if (target.plot && contentRect.width > 0) target.plot.setSize({ width: contentRect.width, height: target.plot.height });
  }
});

/** Draws dashed lines at `marks` ([x, text]); texts that would overlap are left out. */
function markLines(plot, marks) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.strokeStyle = style('--mark');
  ctx.fillStyle = style('--muted');
  ctx.font = `${10 * ratio}px system-ui`;
  ctx.textAlign = 'left';
  ctx.setLineDash([3 * ratio, 3 * ratio]);
  let free = -Infinity;
  for (const [x, text] of marks) {
    const at = plot.valToPos(x, 'x', true);
    if (at < bbox.left || at > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
    if (at < free) continue;
    ctx.fillText(text, at + 2 * ratio, bbox.top + 9 * ratio);
    free = at + ctx.measureText(text).width + 8 * ratio;
  }
  ctx.restore();
}

/**
 * A plot with its legend, which shows the last values, or those under the cursor.
 * series: [{name, values}]; lines: [[y, text]] are constant; marks: [[x, text]].
 */
export function plot({ title, x, series, show = number, isTime = false, marks = [], lines = [], xName = '' }) {
  const given = series.filter(({ values }) => values.some((value) => value !== null && value !== undefined));
  if (x.length < 2 || !given.length) {
    return h('figure', { class: 'plot' }, h('figcaption', {}, h('b', {}, title)), notice('Not enough points yet.'));
  }
  const all = [...given, ...lines.map(([y, name]) => ({ name, values: x.map(() => y), isLine: true }))];
  const color = (at) => style(`--c${(at % COLORS) + 1}`);
  const lastOf = (values) => values.findLast((value) => value !== null && value !== undefined);
  const outputs = all.map(({ values }) => h('b', {}, show(lastOf(values))));
  const legend = all.map(({ name }, at) => h('span', { class: `key c${(at % COLORS) + 1}` }, name, ' ', outputs[at]));
  const where = muted('');
  const canvas = h('div', { class: 'canvas', role: 'img', 'aria-label': `${title}: ${all.map((s) => `${s.name} ${show(lastOf(s.values))}`).join(', ')}` });
  const axis = () => ({ stroke: style('--muted'), grid: { stroke: style('--grid'), width: 1 }, ticks: { show: false }, font: '11px system-ui' });
  const options = {
    width: 400,
    height: 170,
    legend: { show: false },
    cursor: { y: false, drag: { x: true, y: false }, points: { size: 6 } },
    scales: { x: { time: isTime }, y: { range: (_, low, high) => (!low && !high ? [0, 1] : window.uPlot.rangeNum(low, high, 0.1, true)) } },
    axes: [isTime ? { ...axis(), size: 26, space: 70, values: (_, values) => values.map(clock) } : { ...axis(), size: 26, incrs: WHOLE_STEPS }, { ...axis(), size: 58, values: (_, values) => values.map(show), ...(show === bytes ? { incrs: BINARY_STEPS } : {}) }],
    series: [{}, ...all.map(({ isLine }, at) => ({ stroke: color(at), width: 1.5, spanGaps: true, points: { show: x.length < 30 && !isLine }, dash: isLine ? [6, 4] : undefined }))],
    hooks: {
      draw: [(own) => markLines(own, marks)],
      setCursor: [(own) => {
        const at = own.cursor.idx;
        outputs.forEach((output, n) => (output.textContent = show(at === null ? lastOf(all[n].values) : all[n].values[at])));
        if (at === null || at === undefined) where.textContent = '';
        else where.textContent = isTime ? clock(x[at]) : `${xName} ${x[at]}`;
      }],
    },
  };
  requestAnimationFrame(() => {
    if (!canvas.isConnected) return;
    options.width = canvas.clientWidth || 400;
    canvas.plot = new window.uPlot(options, [x, ...all.map(({ values }) => values.map((value) => value ?? null))], canvas);
    observer.observe(canvas);
  });
  return h('figure', { class: 'plot' }, h('figcaption', {}, h('b', {}, title), legend, where), canvas);
}

// Differences of texts, by words.

/** [kind, text] with kind "same", "left" or "right"; long texts are not compared. */
export function difference(left, right) {
  const [a, b] = [left, right].map((text) => text.match(/\s+|[^\s]+/g) ?? []);
  if (a.length * b.length > 1e6) return [['left', left], ['right', right]];
  const length = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      length[i][j] = a[i] === b[j] ? length[i + 1][j + 1] + 1 : Math.max(length[i + 1][j], length[i][j + 1]);
    }
  }
  const parts = [];
  const add = (kind, text) => (parts.at(-1)?.[0] === kind ? (parts.at(-1)[1] += text) : parts.push([kind, text]));
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      add('same', a[i]);
      [i, j] = [i + 1, j + 1];
    } else if (j >= b.length || (i < a.length && length[i + 1][j] >= length[i][j + 1])) add('left', a[i++]);
    else add('right', b[j++]);
  }
  return parts;
}
