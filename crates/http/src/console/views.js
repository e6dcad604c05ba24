// The ten views. Each answers one question: `render` returns the elements of its page. A view with `live` renders again
// after as many seconds, one that `watches` after a change of versions.

import {
  act, answerLink, badge, bars, buckets, button, bytes, difference, duration, field, get, getIfThere, h, muted, note,
  notice, number, percent, plot, post, quantile, query, remove, row, section, select, signed, table, tiles, time, total,
} from './kit.js';

const clip = (text) => h('div', { class: 'clip' }, text);
const grid = (...content) => h('div', { class: 'grid' }, content);
const alert = (title, text, kind = '') => h('p', { class: `alert ${kind}` }, h('b', {}, title), text);
const missing = (what) => notice(`${what}: not available in this release.`);
const STATES = { active: 'good', canary: 'info', rejected: 'bad', rolled_back: 'bad', candidate: 'warn', retired: '' };
const state = (record) => badge(record.state.replace('_', ' '), STATES[record.state]);
const rater = (id) => h('code', {}, id ?? 'no key');

// What acts.

const activate = (version, active, refresh, effects = []) => act({
  title: `Serve version ${version}?`,
  effects: [
    `New requests get version ${version} instead of ${active}; running ones end with the version that they started with.`,
    `Training pauses, and goes on from version ${version} when it is resumed.`, ...effects,
  ],
  action: `Serve version ${version}`,
  danger: true,
}, () => post(`admin/policies/${version}/activate`), `Version ${version} is served.`).then((done) => done && refresh());

const pin = (record, refresh) => act(record.pinned ? {
  title: `Unpin version ${record.version}?`,
  effects: ['Its files may be deleted when newer versions exceed policy.keep_versions. It cannot be served afterwards.'],
  action: 'Unpin',
} : {
  title: `Pin version ${record.version}?`,
  effects: ['Its files are kept until it is unpinned, so that it can be served at any time.'],
  action: 'Pin',
}, () => post(`admin/policies/${record.version}/${record.pinned ? 'unpin' : 'pin'}`),
`Version ${record.version} is ${record.pinned ? 'unpinned' : 'pinned'}.`).then((done) => done && refresh());

const trainer = (verb, title, effects, refresh) => act({ title, effects, action: title.replace('?', '') },
  () => post(`admin/train/${verb}`), (status) => `Training: ${status.state}, step ${status.step}.`).then((done) => done && refresh());

const quarantine = async (id, refresh) => {
  const reason = h('input', { required: true, maxlength: 1024 });
  await act({
    title: `Quarantine ${id}?`,
    effects: ['Its feedback is recorded, but no longer trained on, until it is released.', 'A key is quarantined with all its end users.'],
    action: 'Quarantine',
    danger: true,
    input: field('Reason', reason),
  }, () => post(`admin/feedback/quarantine/${encodeURIComponent(id)}`, { reason: reason.value }), `${id} is in quarantine.`);
  refresh();
};

const release = (id, refresh) => act({
  title: `Release ${id}?`,
  effects: ['Its feedback counts again: also what waits, and what was dropped meanwhile, unless it is too old.'],
  action: 'Release',
}, () => remove(`admin/feedback/quarantine/${encodeURIComponent(id)}`), `${id} is released.`).then((done) => done && refresh());

// Is it healthy?

/** The rate of a counter between consecutive readings. */
const rates = (history, value) => history.map(({ at, metrics }, n) => {
  if (n === 0) return null;
  const before = history[n - 1];
  return Math.max(0, value(metrics) - value(before.metrics)) / ((at - before.at) / 1000);
});
const CLIENTS = ({ route }) => route?.startsWith('/v1');
const requests = (first) => (metrics) => total(metrics, 'hone_http_requests_total', (l) => CLIENTS(l) && l.code.startsWith(first));
const FIRST_TOKEN = 'hone_http_time_to_first_token_seconds';
const WINDOW = 30;

async function health({ state: { history, overview } }) {
  if (!overview || !history.length) return notice('Waiting for the first reading …');
  const x = history.map(({ at }) => at / 1000);
  const now = history.at(-1).metrics;
  const before = history.at(-WINDOW)?.metrics ?? history[0].metrics;
  const latency = (share) => history.map(({ metrics }, n) =>
    quantile(share, buckets(metrics, FIRST_TOKEN), buckets(history[Math.max(0, n - WINDOW)].metrics, FIRST_TOKEN)));
  const [p50, p95] = [latency(0.5), latency(0.95)];
  const gauge = (name, admits) => history.map(({ metrics }) => total(metrics, name, admits));
  const [ok, client, server] = ['2', '4', '5'].map((first) => rates(history, requests(first)));
  const tokens = rates(history, (metrics) => total(metrics, 'hone_http_completion_tokens_total'));
  const [resident, planned, free] = ['hone_memory_resident_bytes', 'hone_memory_planned_peak_bytes', 'hone_data_free_bytes'].map((name) => total(now, name));
  const grown = (name) => total(now, name) - total(before, name);
  const alerts = [
    ...overview.not_ready.map((reason) => ['Not ready', `${reason}. Load balancers send no requests here until this ends; the log has more.`, 'bad']),
    ...overview.warnings.map(({ kind, advice }) => [`Training: ${kind.replaceAll('_', ' ')}`, advice]),
    overview.train.last_error && ['Last error of the trainer', overview.train.last_error],
    overview.train.hold && ['Training is held', `${overview.train.hold}. Resume it under “Learning”.`],
    planned > 0 && resident > planned && ['More memory than planned', `${bytes(resident)} of ${bytes(planned)}. Lower rollout.max_batch_tokens, train.max_tokens or engine.slots.`],
    grown('hone_http_limited_requests_total') > 0 && ['Requests are refused with 429', 'Raise engine.slots or engine.queue, or the limits of keys; “Refused” has the reasons.'],
    grown('hone_store_dropped_records_total') > 0 && ['Records are dropped', 'The disk of data.dir is too slow or full.', 'bad'],
    grown('hone_engine_failures_total') > 0 && ['Generations fail', 'The log has the engine’s error.', 'bad'],
  ].filter(Boolean);
  return [
    section('Warnings', alerts.length ? alerts.map((entry) => alert(...entry)) : notice('None: nothing needs attention.')),
    tiles([
      ['State', overview.not_ready.length ? 'not ready' : 'ready', `release ${overview.release}, up ${duration((overview.at - overview.started) / 1000)}`, overview.not_ready.length && 'bad'],
      ['Requests', `${number(ok.at(-1) ?? 0)} /s`, `${number(total(now, 'hone_http_requests_total', CLIENTS))} since start`],
      ['Failed (5xx)', number(total(now, 'hone_http_requests_total', (l) => l.code.startsWith('5') && CLIENTS(l))), 'since start', server.at(-1) > 0 && 'bad'],
      ['Time to first token', duration(p50.at(-1)), `95 %: ${duration(p95.at(-1))}, last minute`],
      ['Tokens', `${number(tokens.at(-1) ?? 0)} /s`, 'to clients'],
      ['Running', `${overview.running} of ${overview.slots}`, `${overview.shadow} for training`],
      ['Waiting', number(overview.waiting), 'requests in the queue', overview.waiting > overview.slots && 'warn'],
      ['Memory', bytes(resident), planned ? `planned peak ${bytes(planned)}` : 'resident', planned > 0 && resident > planned && 'warn'],
      ['Disk', bytes(free), 'free', free < 1e9 && 'warn'],
      ['Trainer', overview.train.state, `step ${overview.train.step}, ${overview.train.ready_groups} groups ready`],
    ]),
    grid(
      plot({ title: 'Requests per second', x, isTime: true, series: [{ name: '2xx', values: ok }, { name: '4xx', values: client }, { name: '5xx', values: server }] }),
      plot({ title: 'Time to first token', x, isTime: true, show: duration, series: [{ name: 'median', values: p50 }, { name: '95 %', values: p95 }] }),
      plot({ title: 'Sequences and queue', x, isTime: true, series: [
        { name: 'clients', values: gauge('hone_engine_sequences', (l) => l.priority === 'live') },
        { name: 'training', values: gauge('hone_engine_sequences', (l) => l.priority === 'shadow') },
        { name: 'waiting', values: gauge('hone_engine_waiting_requests', (l) => l.priority === 'live') },
      ] }),
      plot({ title: 'Memory', x, isTime: true, show: bytes, series: [{ name: 'resident', values: gauge('hone_memory_resident_bytes') }], lines: planned ? [[planned, 'planned peak']] : [] }),
    ),
  ];
}

// Is it learning?

const SERVED = ['active', 'canary', 'retired', 'rolled_back'];
let stepCount = '500';

async function learning({ state: shared, refresh }) {
  const [{ data: steps }, { data: policies }] = await Promise.all([get(`admin/steps?limit=${stepCount}`), shared.versions()]);
  const status = await get('admin/train');
  const x = steps.map(({ step }) => step);
  const values = (name) => steps.map(({ metrics }) => metrics[name]);
  const parts = [...new Set(steps.flatMap(({ metrics }) => Object.keys(metrics).filter((name) => name.startsWith('part/'))))];
  const marks = policies.filter(({ state: own, step }) => SERVED.includes(own) && step > 0).map(({ step, version }) => [step, `v${version}`]);
  const every = Math.ceil(marks.length / 40);
  const shownMarks = marks.filter((_, at) => at % every === 0);
  const draw = (title, series, show) => plot({ title, x, xName: 'step', series, show, marks: shownMarks });
  const signal = values('zero_std_groups_ratio').map((share) => (share === null || share === undefined ? null : 1 - share));
  const last = steps.at(-1)?.metrics ?? {};
  const isPaused = status.state === 'paused' || status.hold;
  return [
    section('Trainer',
      row(badge(status.state, status.state === 'failed' ? 'bad' : status.state === 'paused' ? 'warn' : 'good'),
        h('span', {}, `step ${status.step} · ${status.ready_groups} groups ready · ${status.in_flight_groups} in flight · ${status.queued_prompts} prompts queued`)),
      status.last_error && alert('Last error', status.last_error), (status.hold || status.schedule) && notice(status.hold ?? status.schedule),
      row(
        button('Pause', () => trainer('pause', 'Pause training?', ['A running step ends and is published; then no further step is taken.', 'Requests are served and recorded as before. The pause ends with “Resume” or a restart.'], refresh)),
        button('Resume', () => trainer('resume', 'Resume training?', ['The trainer takes steps again as soon as groups are ready.', 'A learning rate that a warning lowered is restored.'], refresh), isPaused && 'primary'),
        button('Step now', () => trainer('step', 'Take one step?', ['One step is taken on the groups that are ready, however few, and its version is published.'], refresh)),
        field('Steps shown', select([['100', '100'], ['500', '500'], ['1000', '1,000']], stepCount, (value) => {
          stepCount = value;
          refresh();
        })))),
    steps.length ? tiles([
      ['Reward', number(last.reward_mean), 'mean of the last step'],
      ['Groups with a signal', percent(signal.at(-1)), 'of the last step'],
      ['KL to the base', number(last.kl), 'nats per token'],
      ['Entropy', number(last.entropy), 'nats per token'],
      ['Length', number(last.completion_length), 'tokens, mean'],
      ['Step', number(steps.at(-1).step), h('span', {}, time(steps.at(-1).created))],
    ]) : null,
    steps.length ? grid(
      draw('Reward', [{ name: 'weighted mean', values: values('reward_mean') }, { name: 'held out', values: values('held_out_reward') }]),
      draw('Reward by part', parts.slice(0, 6).map((name) => ({ name: name.slice(5), values: values(name) }))),
      draw('Groups with a signal', [{ name: 'share', values: signal }], percent),
      draw('KL', [{ name: 'nats per token', values: values('kl') }]),
      draw('Entropy', [{ name: 'nats per token', values: values('entropy') }]),
      draw('Completion length', [{ name: 'tokens', values: values('completion_length') }]),
    ) : section('Steps', notice('No step yet. A step needs groups of completions with different rewards, or ratings.')),
    steps.length ? muted('Dashed lines mark steps whose version was served.') : null,
  ].filter(Boolean);
}

// What changed?

let sides = [null, null];
let versionCount = 50;

function checks(record) {
  if (!record.checks.length) return muted(record.reason ?? 'no checks');
  const failed = record.checks.filter(({ passed }) => !passed);
  const withdrawn = record.state === 'rolled_back' && !failed.length;
  const summary = withdrawn ? badge('checks passed, withdrawn later', 'warn') : failed.length ? badge(`failed ${failed.map(({ name }) => name).join(', ')}`, 'bad') : badge(`${record.checks.length} checks passed`, 'good');
  return h('details', {}, h('summary', {}, summary), record.reason && h('p', {}, record.reason),
    table(`Checks of version ${record.version}`, ['Check', '', '#Value', '#Bound', 'Measurement'], record.checks.map((check) =>
      [check.name, badge(check.passed ? 'passed' : 'failed', check.passed ? 'good' : 'bad'), number(check.value), number(check.bound), check.detail])));
}

async function changes({ state: shared, refresh }) {
  const { data, active } = await shared.versions();
  const chain = new Set();
  for (let at = active; at !== null && at !== undefined && !chain.has(at); at = data.find(({ version }) => version === at)?.parent) chain.add(at);
  const newest = data.toReversed().slice(0, versionCount);
  const own = data.find(({ version }) => version === active);
  const earlier = data.findLast(({ version, state: past }) => version < active && past === 'retired');
  const rows = newest.map((record) => [
    h('span', { class: chain.has(record.version) ? '' : 'off' }, h('span', { class: `lane ${chain.has(record.version) ? 'on' : ''}` }), `v${record.version}`, record.pinned ? ' 📌' : ''),
    state(record), record.parent === null ? 'base' : `v${record.parent}`, record.step, number(record.metrics.reward_mean), checks(record), time(record.created),
    h('span', { class: 'row' },
      record.version !== active && ['retired', 'rolled_back'].includes(record.state) ? button('Promote', () => activate(record.version, active, refresh), 'small') : null,
      record.adapter ? button(record.pinned ? 'Unpin' : 'Pin', () => pin(record, refresh), 'small') : null),
  ]);
  const served = data.filter(({ state: past }) => SERVED.includes(past)).toReversed();
  sides = [sides[0] ?? earlier?.version ?? 0, sides[1] ?? active];
  const result = h('div', {});
  const choose = (at, label) => field(label, select(served.map(({ version, state: past }) => [String(version), `v${version} (${past.replace('_', ' ')})`]), String(sides[at]), (value) => (sides[at] = Number(value))));
  return [
    section('Served now', row(h('b', {}, `Version ${active}`), state(own ?? { state: 'active' }), own?.reason && muted(own.reason),
      earlier ? button(`Roll back to v${earlier.version}`, () => activate(earlier.version, active, refresh, [`Version ${active} stays in the list and can be served again.`]), 'danger') : null)),
    section('Versions', table('Policy versions', ['Version', 'State', 'From', '#Step', '#Reward', 'Verdict', 'Made', ''], rows),
      data.length > versionCount ? button(`Show all ${data.length}`, () => {
        versionCount = data.length;
        refresh();
      }) : null, muted('Filled dots are the ancestors of the served version.')),
    section('Two versions on the same prompts',
      row(choose(0, 'Left'), choose(1, 'Right'), button('Compare', async () => {
        result.replaceChildren(notice('Searching …'));
        try {
          const { data: pairs } = await get(`admin/compare${query({ left: sides[0], right: sides[1], limit: 20 })}`);
          result.replaceChildren(...(pairs.length ? pairs.map(pair) : [notice('No recorded prompt has completions of both versions.')]));
        } catch (error) {
          result.replaceChildren(alert('Not compared', error.message, 'bad'));
        }
      }, 'primary')),
      muted('Recorded completions are compared: those of repeated prompts, of clients or of a dataset.'), result),
  ];
}

function pair({ prompt, left, right }) {
  const parts = difference(left.text, right.text);
  const side = (own, name, tag, answer) => h('div', {}, h('header', {}, `v${sides[name === 'left' ? 0 : 1]} · reward ${number(answer.reward)} · `, answerLink(answer.completion_id)),
    parts.filter(([kind]) => kind === 'same' || kind === own).map(([kind, text]) => (kind === 'same' ? text : h(tag, {}, text))));
  return h('article', { class: 'pair' }, h('p', {}, h('b', {}, prompt)), side('left', 'left', 'del', left), side('right', 'right', 'ins', right));
}

// Is the canary safe?

const LIMITS = { promote: 'it is promoted', roll_back: 'it is rolled back', estimate: 'the mean difference decides' };

function forecast(canary) {
  const points = canary.evidence;
  const [first, last] = [points[0], points.at(-1)];
  if (!last || last.ratings < 4) return 'Too few ratings for a forecast.';
  const [finding, value] = last.worse > last.not_worse ? ['worse', last.worse] : ['not worse', last.not_worse];
  if (value <= 0) return 'The evidence points nowhere yet.';
  const ratings = ((canary.needed - value) / value) * last.ratings;
  const pace = (last.ratings - first.ratings) / Math.max(1, (last.at - first.at) / 1000);
  if (canary.max_ratings && last.ratings + ratings > canary.max_ratings) {
    return `The evidence leans to “${finding}”, but the limit of ${number(canary.max_ratings)} ratings comes first: ${number(canary.max_ratings - last.ratings)} are left.`;
  }
  const when = pace > 0 ? `, in about ${duration(ratings / pace)}` : '';
  return `At this rate it is found “${finding}” after ${number(Math.max(1, Math.ceil(ratings)))} further ratings${when}.`;
}

async function canary({ state: shared, refresh }) {
  const [{ running }, { data, active }] = await Promise.all([get('admin/canary'), shared.versions()]);
  const ended = data.flatMap((record) => record.checks.filter(({ name }) => name.startsWith('canary/')).map((check) => ({ record, check }))).toReversed();
  const past = section('Earlier canaries', table('Earlier canaries', ['Version', 'Verdict', '#Difference', 'Evidence', 'Made'],
    ended.slice(0, 20).map(({ record, check }) => [`v${record.version}`, badge(check.name === 'canary/anchor' ? (check.passed ? 'stays' : 'left for its anchor') : check.passed ? 'promoted' : 'rolled back', check.passed ? 'good' : 'bad'), signed(check.value), check.detail, time(record.created)]), 'None yet.'));
  if (!running) {
    return [section('Now', notice('No canary is running: all requests get the active version. With policy.promotion = "canary" a new version first gets a share of the traffic.')), past];
  }
  const x = running.evidence.map(({ ratings }) => ratings);
  const arm = (name, version, counts, share) => section(`${name}: version ${version}`, tiles([
    ['Share', percent(share)], ['Ratings', number(counts.ratings)], ['Requests', number(counts.requests)],
    ['Failed', percent(counts.requests ? counts.failures / counts.requests : 0), `${counts.failures} requests`, counts.failures > 2 && 'bad'],
  ]));
  return [
    section('Decision', running.is_recall && h('p', {}, `A share of the traffic gets version ${running.version} again, to show whether version ${running.control} is worse than it.`), h('p', {}, forecast(running)),
      h('p', {}, `It ends at `, time(running.deadline), running.max_ratings ? ` or after ${number(running.max_ratings)} ratings` : '', ` at the latest; then ${running.is_recall ? 'the active version stays' : LIMITS[running.on_limit]}.`),
      row(badge(`difference ${signed(running.mean)}`, running.mean === null ? '' : running.mean < -running.margin ? 'bad' : 'good'),
        badge(running.rating_rate === null ? 'rates of rating unknown' : `rated ${number(running.rating_rate)} times as often`, running.rating_rate !== null && running.rating_rate < 0.8 ? 'bad' : ''),
        muted(`of the range of ratings; ${running.margin} worse is accepted · ${running.raters} keys rated · share ${running.stages.length}`)),
      row(button('End the canary', () => act({
        title: `End the canary of version ${running.version}?`,
        effects: [`All requests get version ${active}.`, running.is_recall ? 'The comparison is not repeated; steps that wait for their version are undone.' : `Version ${running.version} is rolled back; training goes on from version ${active}.`],
        action: 'End the canary',
        danger: true,
      }, () => post(`admin/policies/${active}/activate`), 'The canary has ended.').then((done) => done && refresh()), 'danger'))),
    grid(arm('Canary', running.version, running.canary, running.share), arm('Active', running.control, running.active, 1 - running.share)),
    plot({ title: 'Evidence over ratings', x, xName: 'ratings', series: [
      { name: 'not worse', values: running.evidence.map((point) => point.not_worse) }, { name: 'worse', values: running.evidence.map((point) => point.worse) },
    ], lines: [[running.needed, 'decides']] }),
    past,
  ];
}

// What do users say?

async function users({ refresh }) {
  const { data } = await get('admin/ratings?limit=1000');
  const rated = data.filter(({ value }) => value !== null);
  const mean = (list) => (list.length ? list.reduce((sum, { value }) => sum + value, 0) / list.length : null);
  const names = [...new Set(rated.map(({ name }) => name))];
  const groups = (id) => Object.entries(Object.groupBy(data, id));
  const raters = groups(({ rater: own }) => own ?? '').sort((a, b) => b[1].length - a[1].length);
  const versions = groups(({ version }) => version).sort((a, b) => b[0] - a[0]).slice(0, 12);
  return [
    tiles([
      ['Newest feedback', number(data.length), data.length === 1000 ? 'the newest 1,000 are shown' : 'all of it'],
      ...names.slice(0, 4).map((name) => [name, number(mean(rated.filter((entry) => entry.name === name))), `mean of ${rated.filter((entry) => entry.name === name).length}`]),
      ['Corrections', number(data.filter(({ correction }) => correction !== null).length)],
      ['Raters', number(raters.length)],
    ]),
    grid(
      section('Raters', table('Raters', ['Rater', '#Posts', '#Mean', 'Last', ''], raters.slice(0, 50).map(([id, posts]) => {
        const valued = posts.filter(({ value }) => value !== null);
        const action = posts[0].is_quarantined ? badge('quarantined', 'bad') : button('Quarantine', () => quarantine(id, refresh), 'small');
        return [rater(id || null), posts.length, number(mean(valued)), time(posts[0].created), id ? action : null];
      }))),
      section('Mean by version', table('Mean rating by version', ['Version', ...names.map((name) => `#${name}`), '#Posts'], versions.map(([version, posts]) =>
        [`v${version}`, ...names.map((name) => number(mean(posts.filter((entry) => entry.name === name && entry.value !== null)))), posts.length]))),
    ),
    section('Newest', table('Newest feedback', ['When', 'Rater', 'Part', '#Value', 'Says', 'About', ''], data.slice(0, 100).map((entry) => [
      time(entry.created), rater(entry.rater), entry.name ?? badge('correction', 'info'), number(entry.value), clip(entry.correction ?? entry.comment ?? ''), clip(entry.text || entry.prompt), answerLink(entry.completion_id),
    ]), 'No feedback yet. Clients post it to /v1/feedback.')),
  ];
}

// Show me an answer.

const filter = { source: '', rated: '', version: '', contains: '' };
const trail = [];

async function answers({ part, refresh, go }) {
  if (part) return answer(part, go);
  const page = await get(`admin/answers${query({ ...filter, limit: 50, after: trail.at(-1) })}`);
  const set = (name) => (value) => {
    filter[name] = value;
    trail.length = 0;
    refresh();
  };
  const input = (name, label, attributes) => field(label, h('input', { value: filter[name], onchange: (event) => set(name)(event.target.value.trim()), ...attributes }));
  return [
    section('Find', row(
      input('contains', 'Text', { type: 'search' }), input('version', 'Version', { type: 'number', min: 0, size: 5 }),
      field('Source', select([['', 'any'], ['live', 'clients'], ['dataset', 'dataset']], filter.source, set('source'))),
      field('Feedback', select([['', 'any'], ['true', 'with'], ['false', 'without']], filter.rated, set('rated'))))),
    section('Answers', table('Answers', ['When', 'Prompt', 'Answer', 'Version', '#Reward', '#Samples', 'Kind', ''], page.data.map((entry) => [
      time(entry.created), clip(entry.prompt), clip(entry.text), entry.version === null ? '–' : `v${entry.version}`, number(entry.reward), entry.samples,
      h('span', {}, badge(entry.source === 'live' ? entry.route : 'dataset'), entry.is_rated ? badge('rated', 'good') : null, entry.is_corrected ? badge('corrected', 'info') : null, entry.held_out ? badge('exam', 'warn') : null),
      answerLink(entry.id),
    ]), 'No recorded answer matches.'),
    row(trail.length ? button('Newest', () => {
      trail.length = 0;
      refresh();
    }) : null, page.has_more ? button('Older', () => {
      trail.push(page.last_id);
      refresh();
    }) : null)),
  ];
}

/** The class of a token: 0 is certain, 4 a surprise. */
const surprise = (logprob) => [-0.1, -0.7, -1.6, -3].filter((bound) => logprob < bound).length;

function sample(own) {
  const tokens = own.tokens.map(({ text, logprob, forced }) => h('span', {
    class: `${logprob === null ? '' : `t${surprise(logprob)}`} ${forced ? 'forced' : ''}`.trim() || null,
    title: logprob === null ? null : `ln p ${logprob.toFixed(3)}, p ${percent(Math.exp(logprob))}${forced ? ', forced' : ''}`,
  }, text));
  const parts = own.rewards.map((reward) => [reward.name, number(reward.value), number(reward.weight), reward.is_feedback ? rater(reward.rater) : 'grader', clip(reward.comment ?? '')]);
  const total = own.tokens.reduce((sum, { logprob }) => sum + (logprob ?? 0), 0);
  return h('article', { class: 'sample' },
    h('header', {}, badge(own.origin, own.origin === 'served' ? 'good' : own.origin === 'correction' ? 'info' : ''), badge(`v${own.version}`),
      h('span', {}, `reward ${number(own.reward)}`), own.advantage === null ? null : badge(`advantage ${signed(own.advantage)}`, own.advantage > 0 ? 'good' : own.advantage < 0 ? 'bad' : '')),
    h('div', { class: 'tokens' }, tokens),
    h('p', { class: 'muted' }, `${own.tokens.length} tokens · ${own.finish}${own.origin === 'correction' ? '' : ` · ln p ${number(total)}`}${own.untrainable ? ` · not trained on: ${own.untrainable}` : ''}`),
    parts.length ? table('Rewards', ['Part', '#Value', '#Weight', 'By', 'Comment'], parts) : notice('No reward.'));
}

async function answer(id, go) {
  const found = await get(`admin/answers/${encodeURIComponent(id)}`);
  const legend = h('p', { class: 'legend' }, muted('Probability of a token: '), [['t0', 'above 90 %'], ['t1', '50 %'], ['t2', '20 %'], ['t3', '5 %'], ['t4', 'less']].map(([name, text]) => h('span', { class: name }, text)));
  const erase = () => act({
    title: 'Erase this answer?',
    effects: ['Its prompt, completions, rewards and feedback are deleted for good.', 'Versions that were trained on it keep what they learned.'],
    action: 'Erase',
    danger: true,
  }, () => remove(`admin/completions/${encodeURIComponent(id)}`), 'The answer is erased.').then((done) => done && go('#answers'));
  return [
    row(h('a', { href: '#answers' }, '← all answers'), h('code', {}, found.id), found.source === 'live' ? button('Erase', erase, 'danger small') : null),
    section('Conversation', found.messages.map((message) => h('div', { class: `message ${message.role}` }, h('b', {}, message.name ?? message.role), h('pre', {}, message.content || JSON.stringify(message.tool_calls ?? '', null, 1)))),
      h('p', { class: 'muted' }, [found.route, found.model, `${found.prompt_tokens} prompt tokens`, `temperature ${number(found.temperature)}`, found.key_id && `key ${found.key_id}`, found.held_out && 'kept for exams'].filter(Boolean).join(' · '), ' · ', time(found.created)),
      Object.keys(found.metadata).length ? h('details', {}, h('summary', {}, 'Metadata'), h('pre', {}, JSON.stringify(found.metadata, null, 1))) : null),
    section(found.samples.length > 1 ? `Completions (${found.samples.length})` : 'Completion', legend, h('div', { class: 'samples' }, found.samples.map(sample)),
      h('p', { class: 'muted' }, 'Advantage: the reward minus the mean of its group, before scaling.')),
    found.groups.length ? section('Training', groupTable(found.groups, false)) : null,
  ].filter(Boolean);
}

function groupTable(groups, links = true) {
  return table('Groups', ['When', 'State', 'Reason or step', 'Route', '#Members', 'Parts', ''], groups.map((group) => [
    time(group.created), badge(group.state, { dropped: 'warn', trained: 'good' }[group.state]), group.reason ?? (group.step === null ? 'waits' : `step ${group.step}`), group.route, group.members, group.parts.join(', ') || 'correction', links ? answerLink(group.completion_id) : null,
  ]), 'None.');
}

// What was refused or quarantined?

async function refused({ state: { history, versions }, refresh }) {
  const [{ data: flagged }, groups, { data: policies }] = await Promise.all([get('admin/feedback/quarantine'), get('admin/groups?state=dropped&limit=100'), versions()]);
  const now = history.at(-1)?.metrics;
  const counts = (name, label, admits = () => true) => (now?.get(name) ?? []).filter(({ labels, value }) => value > 0 && labels[label] && admits(labels))
    .map(({ labels, value }) => [labels[label].replaceAll('_', ' '), value]).sort((a, b) => b[1] - a[1]);
  const rejected = policies.filter(({ state: own }) => own === 'rejected' || own === 'rolled_back').toReversed();
  const id = h('input', { required: true, placeholder: '2bd806c97f0e', pattern: '[0-9a-f.]+', size: 28 });
  return [
    grid(
      section('Requests refused', bars([...counts('hone_http_limited_requests_total', 'reason'), ...counts('hone_http_requests_total', 'code', ({ code }) => /^[45]/.test(code)).map(([code, count]) => [`status ${code}`, count])])),
      section('Groups not trained on', bars(counts('hone_train_dropped_groups_total', 'reason'))),
      section('Prompts without a group', bars(counts('hone_rollout_skipped_prompts_total', 'reason'))),
      section('Ratings not used', bars(counts('hone_feedback_ratings_total', 'outcome', ({ outcome }) => outcome !== 'trained'))),
    ),
    section('Quarantined keys and users',
      table('Quarantine', ['Key or user', 'Reason', 'Since', ''], flagged.map((entry) => [rater(entry.key_id), entry.reason?.note ?? JSON.stringify(entry.reason), time(entry.since), button('Release', () => release(entry.key_id, refresh), 'small')]), 'Nothing is in quarantine.'),
      h('form', { class: 'row', onsubmit: (event) => {
        event.preventDefault();
        quarantine(id.value.trim(), refresh);
      } }, field('Id of a key or an end user', id), h('button', { type: 'submit' }, 'Quarantine'))),
    section('Versions refused', table('Versions refused', ['Version', 'State', 'Reason', 'Made'], rejected.slice(0, 30).map((record) => [`v${record.version}`, state(record), record.reason ?? '', time(record.created)]), 'None.')),
    section('Groups dropped last', groupTable(groups.data)),
    muted('Bars count since the start of the process.'),
  ];
}

// Rewards.

const draft = { route: '', prompt: '', completion: '', metadata: '' };

async function rewards({ state: { history } }) {
  const { data: routes } = await get('admin/rewards');
  const now = history.at(-1)?.metrics;
  draft.route ||= routes[0]?.route ?? '';
  const output = h('div', { role: 'status' });
  const keep = (name) => (event) => (draft[name] = event.target.value);
  const metadata = () => Object.fromEntries(draft.metadata.split('\n').filter((line) => line.includes('=')).map((line) => [line.slice(0, line.indexOf('=')).trim(), line.slice(line.indexOf('=') + 1).trim()]));
  const test = async (event) => {
    event.preventDefault();
    try {
      const result = await post('admin/rewards/test', { route: draft.route, prompt: draft.prompt, completion: draft.completion, metadata: metadata() });
      output.replaceChildren(h('p', {}, 'Reward: ', h('b', {}, number(result.reward))),
        table('Parts', ['Part', 'Kind', '#Value', '#Weight'], result.parts.map(({ name, kind, value, weight }) => [name, kind, value === null ? 'not scored' : number(value), number(weight)]), 'The route has no grader: only feedback scores it.'));
    } catch (error) {
      output.replaceChildren(alert('Not scored', error.message, 'bad'));
    }
  };
  const distribution = (route, part) => {
    const counts = buckets(now, 'hone_reward_value', (labels) => labels.route === route && labels.part === part);
    return bars(counts.map(([bound, count], at) => [bound === Infinity ? `above ${counts[at - 1]?.[0]}` : `to ${bound}`, count - (counts[at - 1]?.[1] ?? 0)]).filter(([, count]) => count > 0), 'No value since the start of the process.');
  };
  return [
    section('Parts', table('Parts of rewards', ['Route', 'Part', 'Kind', '#Weight', 'Reads', '#Not scored'], routes.flatMap(({ route, parts }) => parts.map((part) => [
      route, part.name, part.is_feedback ? badge('feedback', 'info') : part.kind, number(part.weight), part.reads.join(', '), number(total(now, 'hone_reward_missing_total', (labels) => labels.route === route && labels.part === part.name)),
    ])))),
    section('Try a reward on a text', h('form', { onsubmit: test },
      row(field('Route', select(routes.map(({ route }) => [route, route]), draft.route, (value) => (draft.route = value)))),
      row(h('label', { class: 'wide' }, 'Prompt', h('textarea', { value: draft.prompt, oninput: keep('prompt') })),
        h('label', { class: 'wide' }, 'Completion', h('textarea', { value: draft.completion, oninput: keep('completion'), required: true })),
        h('label', { class: 'wide' }, 'Metadata, a line for each: name = value', h('textarea', { value: draft.metadata, oninput: keep('metadata'), placeholder: 'answer = 19' }))),
      h('div', { class: 'buttons' }, h('button', { type: 'submit', class: 'primary' }, 'Score')), output)),
    grid(routes.flatMap(({ route, parts }) => parts.map(({ name }) => section(`Values of ${route} / ${name}`, distribution(route, name))))),
  ];
}

// Data.

const SCOPES = [['completion_id', 'a completion'], ['session_id', 'a session'], ['end_user', 'an end user'], ['key_id', 'an API key'], ['before', 'everything before a date']];

async function data({ refresh }) {
  const found = await getIfThere('admin/data');
  const text = (value) => (value && typeof value === 'object' ? Object.entries(value).map(([name, own]) => `${name} = ${JSON.stringify(own)}`).join(', ') || 'none' : String(value ?? 'none'));
  const kind = select(SCOPES, 'completion_id', (value) => (input.type = value === 'before' ? 'date' : 'text'));
  const input = h('input', { required: true, size: 36, autocomplete: 'off' });
  const name = h('input', { required: true, value: `backup-${new Date().toISOString().slice(0, 10)}`, size: 24 });
  const erase = async (event) => {
    event.preventDefault();
    const value = input.value.trim();
    const post_ = (dry_run) => post('admin/erase', { [kind.value]: value, dry_run });
    let would;
    try {
      would = await post_(true);
    } catch (error) {
      note(error.status === 404 ? 'Erasure is not available in this release.' : error.message, 'bad');
      return;
    }
    const done = await act({
      title: `Erase ${SCOPES.find(([own]) => own === kind.value)[1]}: ${value}?`,
      effects: [
        `${would.completions} prompts, ${would.samples} completions and ${would.feedback} pieces of feedback are deleted for good.`,
        would.versions.length ? `Versions trained on them keep what they learned: ${would.versions.map((version) => `v${version}`).join(', ')}.` : 'No version was trained on them.',
      ],
      action: 'Erase',
      danger: true,
    }, () => post_(false), (erased) => `${erased.completions} prompts are erased.`);
    if (done) refresh();
  };
  const backup = (event) => {
    event.preventDefault();
    act({
      title: `Write the backup ${name.value}?`,
      effects: ['Ledger, adapters and checkpoint are copied while serving and learning go on.', 'It needs as much free space as they have now.'],
      action: 'Write the backup',
    }, () => post('admin/backup', { name: name.value }), (made) => `The backup is in ${made.path} (${bytes(made.bytes)}).`);
  };
  const retention = Object.entries(found?.retention ?? {});
  const removed = found?.retention_removed ?? {};
  return [
    found ? tiles([
      ['Ledger', bytes(found.ledger_bytes)], ['Adapters', bytes(found.adapters_bytes)], ['Checkpoints', bytes(found.checkpoints_bytes)], found.backups_bytes === undefined ? null : ['Backups', bytes(found.backups_bytes)],
      ['Free', bytes(found.free_bytes), 'of the disk'],
      ['Oldest record', found.oldest === null ? '–' : h('span', {}, time(found.oldest))],
    ]) : missing('Sizes'),
    found ? grid(
      section('Records', bars(Object.entries(found.rows ?? {}).map(([table_, count]) => [table_.replaceAll('_', ' '), count]))),
      section('Retention', retention.length ? table('Retention', ['Rule', 'Value'], retention.map(([rule, value]) => [rule, text(value)])) : found.retention ? notice('Records are kept without a limit.') : missing('Limits'),
        removed.age || removed.size ? muted(`Prompts removed since the start: ${number(removed.age ?? 0)} for their age, ${number(removed.size ?? 0)} to keep the bound.`) : null),
    ) : null,
    section('Erase', h('form', { class: 'row', onsubmit: erase }, field('What', kind), field('Id, name or date', input), h('button', { type: 'submit', class: 'danger' }, 'Erase …')),
      muted('The next dialog says how much it concerns, before anything is deleted.')),
    section('Backup', h('form', { class: 'row', onsubmit: backup }, field('Name', name), h('button', { type: 'submit' }, 'Back up …'))),
    section('Export', h('p', {}, 'On the server: ', h('code', {}, 'hone db export --data DIR'), ' writes every record as JSON lines.')),
  ].filter(Boolean);
}

// Keys and audit.

async function keys({ refresh, part }) {
  const [known, audit] = await Promise.all([getIfThere('admin/keys'), getIfThere(`admin/audit${query({ after: part })}`)]);
  const download = () => {
    const url = URL.createObjectURL(new Blob([JSON.stringify(audit.data, null, 1)], { type: 'application/json' }));
    h('a', { href: url, download: 'hone-audit.json' }).click();
    URL.revokeObjectURL(url);
  };
  const soon = (expires) => expires !== null && expires - Date.now() < 14 * 86400e3;
  return [
    section('Keys', known ? table('Keys', ['Name', 'Id', 'Scopes', 'Expires', 'Last used', ''], known.data.map((entry) => [
      entry.name, h('code', {}, entry.id), entry.scopes.map((scope) => badge(scope, scope === 'admin' ? 'warn' : '')), entry.expires === null ? 'never' : time(entry.expires), entry.last_used === null ? 'never' : time(entry.last_used),
      entry.expired ? badge('expired', 'bad') : soon(entry.expires) ? badge('expires soon', 'warn') : null,
    ]), 'No key is configured.') : missing('Keys'), muted('Keys change in the configuration or server.keys_file; SIGHUP reads them again.')),
    section('What operators did', audit ? table('Audit record', ['When', 'Who', 'Action', 'Target', 'Detail', 'Outcome'], audit.data.map((entry) => [
      time(entry.at), entry.actor, entry.action, entry.target ?? '', h('code', {}, clip(Object.keys(entry.detail ?? {}).length ? JSON.stringify(entry.detail) : '')), badge(entry.outcome, entry.outcome === 'ok' ? 'good' : 'bad'),
    ]), 'Nothing yet.') : missing('Audit record'),
    audit ? row(part ? h('a', { href: '#keys' }, 'Newest') : null, audit.has_more ? h('a', { href: `#keys/${audit.data.at(-1).id}` }, 'Older') : null, button('Refresh', refresh), button('Save as JSON', download)) : null),
  ];
}

export const VIEWS = [
  { id: 'health', name: 'Health', question: 'Is it healthy?', render: health, live: 2 },
  { id: 'learning', name: 'Learning', question: 'Is it learning?', render: learning, live: 10, watches: true },
  { id: 'changes', name: 'Changes', question: 'What changed?', render: changes },
  { id: 'canary', name: 'Canary', question: 'Is the canary safe?', render: canary, live: 4, watches: true },
  { id: 'users', name: 'Users', question: 'What do users say?', render: users },
  { id: 'answers', name: 'Answers', question: 'Show me an answer', render: answers },
  { id: 'refused', name: 'Refused', question: 'What was refused or quarantined?', render: refused },
  { id: 'rewards', name: 'Rewards', question: 'What earns a reward?', render: rewards },
  { id: 'data', name: 'Data', question: 'What is kept, and for how long?', render: data },
  { id: 'keys', name: 'Keys and audit', question: 'Who may do what, and who did it?', render: keys },
];
