// The live page: a chat whose tokens show where they came from, and the engine's numbers once a second.

const $ = (id) => document.getElementById(id);
const POLL_MS = 1000;
const MOST_BARS = 12;
const KEY = "outrider-key";
const messages = []; // the conversation so far, as the API takes it
let running = null; // the AbortController of the answer that is being written

// -- talking to the server

function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** fetch, which asks for a key where one is wanted; throws an Error that says what the server said. */
async function call(path, options = {}) {
  for (;;) {
    const sent = sessionStorage.getItem(KEY);
    const response = await fetch(path, { ...options, headers: headers() });
    if (response.ok) return response;
    if (response.status === 401) {
      if (sent) $("ask-note").textContent = "That key was not accepted.";
      if (sent === sessionStorage.getItem(KEY)) await askForKey(options.signal);
      continue;
    }
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `the server answered with status ${response.status}`);
  }
}

let asked = null; // one dialog, however many requests wait for it
function askForKey(signal) {
  asked ??= new Promise((resolve) => {
    $("ask").showModal();
    $("ask-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, $("key").value.trim());
      $("key").value = "";
      $("ask").close();
    };
    $("ask").onclose = () => { asked = null; resolve(); };
  });
  return asked.then(() => signal?.throwIfAborted());
}

/** The JSON objects of an event stream; throws if it ends before it should. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection to the server broke off");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// -- the chat

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function addArticle(role, text = "") {
  $("hint").hidden = true;
  const article = element("article", role);
  const body = element("div", "text", text);
  article.append(element("span", "unseen", role === "user" ? "You:" : "Model:"), body);
  $("log").append(article);
  $("log").scrollTop = $("log").scrollHeight;
  return { article, body };
}

function append(body, segments) {
  const log = $("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  body.append(...segments.map((s) => element("span", s.drafted ? "drafted" : "drawn", s.text)));
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function summary(answer) {
  const { usage, metrics, begun, first, firstTokens } = answer;
  const tokens = usage.completion_tokens;
  const stats = metrics.speculative_decoding;
  const seconds = (performance.now() - first) / 1000;
  const said = [`${tokens} tokens`];
  if (tokens > firstTokens && seconds > 0) said.push(`${number((tokens - firstTokens) / seconds)} tokens/s`);
  said.push(`first after ${((first - begun) / 1000).toFixed(2)} s`);
  if (stats.num_draft_tokens) {
    said.push(`${percent(stats.num_accepted_draft_tokens / Math.max(tokens, 1))} from drafts`);
    said.push(`${stats.num_accepted_draft_tokens} of ${stats.num_draft_tokens} draft tokens accepted`);
  }
  if (answer.reason === "length") said.push("cut off at the limit");
  if (answer.reason === "abort") said.push("ended by the server");
  return said.join(" · ");
}

async function answer(signal, body) {
  const got = { begun: performance.now(), first: performance.now(), firstTokens: 0, text: "", reason: null };
  const request = {
    messages, stream: true, stream_options: { include_usage: true },
    temperature: $("temperature").valueAsNumber || 0,
    speculative: { enabled: $("speculate").checked, segments: true, metrics: true },
  };
  if ($("longest").value) request.max_completion_tokens = $("longest").valueAsNumber;
  try {
    const options = { method: "POST", body: JSON.stringify(request), signal };
    for await (const event of events(await call("/v1/chat/completions", options))) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) {
        const segments = choice.segments ?? [];
        if (segments.length && !got.text) Object.assign(got, { first: performance.now(), firstTokens: segments.length });
        append(body, segments);
        got.text += segments.map((s) => s.text).join("");
        got.reason = choice.finish_reason ?? got.reason;
      }
      if (event.usage) Object.assign(got, { usage: event.usage, metrics: event.metrics });
    }
  } catch (error) {
    got.error = signal.aborted ? null : error;
  }
  return got;
}

async function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  addArticle("user", text);
  messages.push({ role: "user", content: text });
  const { article, body } = addArticle("assistant busy");
  running = new AbortController();
  busy(true);
  const got = await answer(running.signal, body);
  const stopped = running.signal.aborted;
  article.classList.remove("busy");
  if (got.error) article.append(element("p", "error", got.error.message));
  else article.append(element("p", "note", stopped ? "stopped" : summary(got)));
  $("log").scrollTop = $("log").scrollHeight;
  running = null;
  busy(false);
  if (got.text) messages.push({ role: "assistant", content: got.text });
  else {
    messages.pop(); // as if it had not been said
    if (!$("prompt").value) $("prompt").value = text;
  }
}

function busy(is) {
  const focused = document.activeElement === $(is ? "send" : "stop");
  $("log").setAttribute("aria-busy", is); // read out when it is all there
  $("send").hidden = is;
  $("stop").hidden = !is;
  if (focused) $(is ? "stop" : "prompt").focus();
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !$("ask").open) running?.abort(); });
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", async () => {
  running?.abort();
  while (running) await new Promise((resolve) => setTimeout(resolve, 10));
  messages.length = 0;
  $("log").querySelectorAll("article").forEach((article) => article.remove());
  $("hint").hidden = false;
  $("prompt").focus();
});

// -- the numbers

const number = (value) => (value >= 100 ? value.toFixed(0) : value.toFixed(1));
const percent = (share) => `${Math.round(100 * share)}\u00a0%`;

function show(now) {
  const { lately, speculation: spec, kv_blocks: kv } = now;
  const speed = lately.tokens_per_second, plain = lately.plain_tokens_per_second, worked = lately.seconds > 0;
  $("model").textContent = now.model;
  $("speed").textContent = worked ? number(speed) : "–";
  $("plain").textContent = plain ? number(plain) : "–";
  const most = Math.max(speed, plain ?? 0) || 1;
  $("speed-bar").style.width = `${75 * speed / most}%`;
  $("plain-bar").style.width = `${75 * (plain ?? 0) / most}%`;
  const gain = plain ? `${(speed / plain).toFixed(2)}× plain` : "";
  $("gain").textContent = gain ? `${gain} decoding, by estimate` : worked ? "plain decoding is not estimated" : "";
  $("length").textContent = spec.draft_length.toFixed(1);
  $("per-step").textContent = lately.tokens_per_step ? lately.tokens_per_step.toFixed(2) : "–";
  tile("running", now.running, now.waiting ? `+ ${now.waiting} waiting` : "");
  tile("kv", percent(kv.used / kv.total), `of ${(kv.total * kv.size).toLocaleString("en")}`);
  const why = spec.on && plain ? "" : `: ${spec.reason}`; // else the bars say it
  $("reason").textContent = `drafter ${spec.drafter} is ${spec.on ? "on" : "off"}${why}`;
  $("headline").textContent = worked ? [`${number(speed)} tokens/s`, gain].filter(Boolean).join(" · ") : "";
  chart(lately.acceptance_by_position.slice(0, MOST_BARS));
}

function tile(id, value, more) {
  $(id).replaceChildren(`${value} `, element("small", "", more));
}

function chart(shares) {
  const box = $("chart");
  while (shares.length && !shares.at(-1)) shares.pop();
  if (!shares.length) {
    box.replaceChildren(element("p", "", "no draft accepted lately"));
    box.setAttribute("aria-label", "no draft accepted lately");
    return;
  }
  if (box.querySelector("p")) box.replaceChildren();
  while (box.children.length > shares.length) box.lastChild.remove();
  while (box.children.length < shares.length) {
    const column = element("div", "");
    column.append(element("span", ""), element("i", ""), element("span", "", box.children.length + 1));
    box.append(column);
  }
  shares.forEach((share, i) => {
    const [value, bar] = box.children[i].children;
    value.textContent = Math.round(100 * share);
    bar.style.height = `${68 * share}%`;
  });
  const said = shares.map((share, i) => `position ${i + 1}: ${percent(share)}`).join(", ");
  box.setAttribute("aria-label", `Share of drafts whose token was accepted: ${said}`);
}

function setState(text, bad = false) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").classList.toggle("bad", bad);
}

async function poll() {
  if (!document.hidden) {
    try {
      const now = await (await call("/v1/status")).json();
      show(now);
      setState(now.running ? "working" : "ready");
    } catch (error) {
      setState(error instanceof TypeError ? "no connection" : error.message, true);
    }
  }
  setTimeout(poll, POLL_MS);
}

$("live").addEventListener("toggle", () => { $("log").scrollTop = $("log").scrollHeight; });
$("live").open = !matchMedia("(max-width: 60rem)").matches;
if ($("live").open) $("prompt").focus(); // on a phone that would bring up the keyboard
poll();
