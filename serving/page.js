// Names and answers come from others: every text goes through textContent or append(string), never through markup.
const $ = id => document.getElementById(id)
const shown = {} // part of the page -> the JSON it was last drawn from

const SIGNALS = [ // key, words, unit, threshold, and whether a value is beyond it
  ['swap_p99_ms', 'Swap, P99', ' ms', 'at most 10 ms', v => v > 10],
  ['prefix_hit_rate', 'Prefix hit rate', '', 'at least 0.3', v => v < .3],
  ['route_p99_ms', 'Routing, P99', ' ms', 'at most 3 ms', v => v > 3],
  ['ttft_p50_ms', 'Time to first token, P50', ' ms'],
  ['tpot_p50_ms', 'Time per token, P50', ' ms'],
]
const number = (v, unit = '') => v == null ? '–' : `${+v.toPrecision(3)}${unit}`
const short = version => version.slice(0, 12)
const clock = seconds => new Date(seconds * 1000).toLocaleString()

function element(tag, content, kind = '') {
  const e = Object.assign(document.createElement(tag), { className: kind })
  e.append(content)
  return e
}

// A cell is a text, or [text, class]; the first names its row.
function rows(id, found, none) {
  const lines = found.map(cells => {
    const row = document.createElement('tr')
    row.append(...cells.map((c, i) => element(i ? 'td' : 'th', ...[c].flat())))
    row.firstChild.scope = 'row'
    return row
  })
  if (!lines.length) {
    const row = element('tr', element('td', none))
    row.firstChild.colSpan = $(id).tHead.rows[0].cells.length
    lines.push(row)
  }
  $(id).tBodies[0].replaceChildren(...lines)
}

// What hasn't changed isn't drawn again, so a selection or a reader's place in a table stays.
function draw(part, value, how) {
  const json = JSON.stringify(value)
  if (shown[part] !== json) how(value)
  shown[part] = json
}

function drawStatus(s) {
  const minutes = Math.floor(s.uptime_s / 60)
  draw('server', [s.base, s.ready, minutes], () => {
    $('server').textContent = `${s.base}, ${s.ready ? 'ready' : 'not ready'}, up for ${minutes} min`
  })
  draw('signals', s.signals, v => rows('signals', SIGNALS.map(([key, words, unit, threshold, beyond]) => {
    const judged = () => beyond(v[key]) ? ['beyond threshold', 'bad'] : ['fine', 'good']
    const verdict = v[key] == null ? 'not measured' : beyond ? judged() : ''
    return [words, number(v[key], unit), threshold ?? '–', verdict]
  })))
  draw('load', [s.sequences, s.pages, s.fallbacks], () => {
    const { free, ...used } = s.pages
    const tenants = Object.entries(used).map(([tenant, n]) => `${n} ${tenant}`).join(', ')
    $('load').textContent = `${s.sequences.running} sequences run, ${s.sequences.waiting} wait. `
      + `Pages: ${free} free, ${tenants}. Fallbacks to the base: ${s.fallbacks}.`
  })
  draw('alerts', s.alerts, alerts => {
    const lines = alerts.map(a => element('li', `${a.name}: ${a.detail} (since ${clock(a.since)})`, 'bad'))
    $('alerts').replaceChildren(...(lines.length ? lines : [element('li', 'none')]))
  })
  draw('adapters', s.adapters, adapters => rows('adapters', adapters.map(a => [
    a.name, short(a.version), a.state === 'broken' ? [`broken: ${a.reason}`, 'bad'] : a.state,
    Object.entries(a.parts).map(([name, weight]) => `${weight} × ${name}`).join(' + '),
    `${a.requests}`, number(a.hit_rate),
  ]), 'none'))
  draw('rollouts', s.rollouts, rollouts => rows('rollouts', rollouts.map(r => [
    r.name, short(r.old), short(r.new), `${r.stage} %`, clock(r.since), `${r.requests}`,
    [`${r.errors}`, r.errors ? 'bad' : ''],
  ]), 'none'))
}

function drawModels(models) {
  const before = $('model').value
  $('model').replaceChildren(...models.map(m => element('option', m.id)))
  for (const option of $('model').options) option.selected = option.value === before
}

async function ask(path, options = {}) {
  const key = $('key').value.trim()
  const headers = options.body ? { 'content-type': 'application/json' } : {}
  if (key) headers.authorization = `Bearer ${key}`
  const response = await fetch(path, { ...options, headers }).catch(e => {
    throw e.name === 'AbortError' ? e : new Error("The server can't be reached.")
  })
  if (response.ok) return response
  const message = (await response.json().catch(() => null))?.error?.message
    ?? `The server answered ${response.status} without saying why.`
  const wait = response.headers.get('retry-after')
  throw new Error(wait ? `${message} Try again in ${wait} s.` : message)
}

// The JSON of each server-sent event, until [DONE].
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader()
  for (let buffer = ''; ;) {
    const { value, done } = await reader.read()
    if (done) throw new Error('The answer broke off.')
    const found = (buffer + value).split(/\r?\n\r?\n/)
    buffer = found.pop()
    for (const event of found) {
      const data = event.split(/\r?\n/).filter(l => l.startsWith('data:')).map(l => l.slice(5).trimStart()).join('\n')
      if (data === '[DONE]') return
      if (data) yield JSON.parse(data)
    }
  }
}

let running = null // the AbortController of the answer that is being written
function writing(on) { // the focus doesn't get lost in a button that is disabled
  const [off, now] = on ? [$('send'), $('stop')] : [$('stop'), $('send')]
  now.disabled = false
  if (document.activeElement === off) now.focus()
  off.disabled = true
  $('answer').ariaBusy = `${on}` // read aloud when it is whole
}

async function send() {
  if (running || !$('ask').reportValidity()) return
  running = new AbortController()
  writing(true)
  for (const id of ['answer', 'error', 'facts']) $(id).textContent = ''
  const body = JSON.stringify({
    model: $('model').value, messages: [{ role: 'user', content: $('prompt').value }], max_tokens: +$('most').value,
    stream: true, stream_options: { include_usage: true },
  })
  const facts = {}
  try {
    const response = await ask('/v1/chat/completions', { method: 'POST', body, signal: running.signal })
    const reason = response.headers.get('x-lorajax-fallback')
    if (reason) facts.fallback = `the adapter couldn't be served: ${reason}`
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message)
      if (event.model) facts.model = `answered by ${event.model}`
      if (event.lorajax?.why) facts.why = event.lorajax.why
      if (event.usage) facts.usage = `${event.usage.prompt_tokens} + ${event.usage.completion_tokens} tokens`
      const text = event.choices?.[0]?.delta?.content
      if (text) $('answer').append(text)
    }
  } catch (e) {
    if (e.name === 'AbortError') facts.stopped = 'stopped'
    else $('error').textContent = e instanceof TypeError ? 'The answer broke off.' : e.message
  } finally {
    running = null
    writing(false)
    $('facts').textContent = Object.values(facts).join(' · ')
  }
}

async function refresh() {
  try {
    drawStatus(await (await ask('/v1/lorajax/status')).json())
    draw('models', (await (await ask('/v1/models')).json()).data, drawModels)
  } catch (e) {
    draw('server', e.message, message => { $('server').textContent = message })
  }
}

$('key').value = sessionStorage.getItem('key') ?? ''
$('key').addEventListener('change', () => { sessionStorage.setItem('key', $('key').value); refresh() })
$('ask').addEventListener('submit', e => { e.preventDefault(); send() })
$('stop').addEventListener('click', () => running?.abort())
$('prompt').addEventListener('keydown', e => { if (e.key === 'Enter' && (e.ctrlKey || e.metaKey)) send() })
for (; ; await new Promise(done => setTimeout(done, 2000))) if (!document.hidden) await refresh()
