// Play: a chat with the served model, or the same question under two settings, and the code that does the same.
import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { answers, asCurl, asPython, bodyOf, messageOf, sentence } from "./chat.js";

const SETTINGS = {
  system: "", stop: "", tools: "", schema: "", logprobs: true,
  numbers: { temperature: "0.7", top_p: "", max_tokens: "256", seed: "", min_p: "", repetition_penalty: "" },
};
const DRAW_MS = 50; // an answer is drawn at most 20 times a second

export function Play({ accessKey }) {
  const [model, setModel] = useState("");
  const [problem, setProblem] = useState("");
  const [turns, setTurns] = useState([]); // {question, answers: [answer of each settings]}
  const [both, setBoth] = useState(false);
  const [settings, setSettings] = useState([SETTINGS, SETTINGS]);
  const [running, setRunning] = useState(null); // AbortController of the answers under way
  const [sent, setSent] = useState(null); // the last bodies
  const question = useRef(null);
  useEffect(() => {
    const headers = accessKey ? { Authorization: `Bearer ${accessKey}` } : {};
    fetch("/v1/models", { headers })
      .then(async (answer) => {
        if (!answer.ok) throw new Error(await sentence(answer));
        setModel((await answer.json()).data[0].id);
      })
      .catch((error) => setProblem(error.message));
  }, [accessKey]);

  const ask = async (text, before) => {
    const count = both ? 2 : 1;
    let bodies;
    try {
      bodies = settings.slice(0, count).map((one, side) => bodyOf(model, one, [
        ...before.flatMap((turn) => [{ role: "user", content: turn.question }, messageOf(turn.answers[side] ?? turn.answers[0])]),
        { role: "user", content: text },
      ]));
    } catch (error) {
      return setProblem(error.message);
    }
    setProblem("");
    setSent(bodies);
    const end = new AbortController();
    setRunning(end);
    const found = bodies.map(() => ({ content: "", reasoning: "", calls: [], tokens: [], finish: "" }));
    let drawnAt = 0;
    const draw = () => setTurns([...before, { question: text, answers: found.map((one) => ({ ...one })) }]);
    draw();
    const run = async (body, side) => {
      for await (const answer of answers(body, accessKey, end.signal)) {
        found[side] = answer;
        if (performance.now() - drawnAt >= DRAW_MS) {
          drawnAt = performance.now();
          draw();
        }
      }
    };
    const ends = await Promise.allSettled(bodies.map(run));
    const failed = ends.find((one) => one.status === "rejected" && one.reason.name !== "AbortError");
    if (failed) setProblem(failed.reason.message);
    for (const [side, one] of ends.entries())
      if (one.status === "rejected" && one.reason.name === "AbortError") found[side] = { ...found[side], finish: "stopped here" };
    draw();
    if (failed && found.every((one) => !one.content && !one.calls.length)) {
      setTurns(before); // a refused question is no turn of the conversation
      question.current.value ||= text;
    }
    setRunning(null);
  };
  const send = (event) => {
    event.preventDefault();
    const text = question.current.value.trim();
    if (!text || running || !model) return;
    question.current.value = "";
    ask(text, turns);
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    if (event.key === "Escape") running?.abort();
  };
  const edit = () => {
    question.current.value = turns.at(-1).question;
    setTurns(turns.slice(0, -1));
    question.current.focus();
  };
  const change = (side, change_) => setSettings(settings.map((one, i) => (i === side ? { ...one, ...change_ } : one)));

  return html`<div class="play">
    <section class="talk" aria-label="Chat">
      <div class="turns" role="log" aria-label="Conversation" tabindex="0">
        ${turns.map((turn, i) => html`<article key=${i}>
          <p class="asked">${turn.question}</p>
          <div class="answers">${turn.answers.map((answer, side) => html`<${Answer} key=${side} answer=${answer} />`)}</div>
        </article>`)}
        ${!turns.length && html`<p class="hint">Ask ${model || "the model"} something. Enter sends, Shift and Enter begin a line, Escape stops.</p>`}
      </div>
      ${problem && html`<p role="alert" class="problem">${problem}</p>`}
      <form onSubmit=${send}>
        <label for="question">Question</label>
        <textarea id="question" ref=${question} rows="3" onKeyDown=${onKey}></textarea>
        <div class="buttons">
          ${running
            ? html`<button type="button" onClick=${() => running.abort()}>Stop</button>`
            : html`<button disabled=${!model}>Send</button>`}
          <button type="button" disabled=${running || !turns.length} onClick=${() => ask(turns.at(-1).question, turns.slice(0, -1))}>Again</button>
          <button type="button" disabled=${running || !turns.length} onClick=${edit}>Edit</button>
          <button type="button" disabled=${running || !turns.length} onClick=${() => setTurns([])}>Clear</button>
          <label class="check"><input type="checkbox" checked=${both} disabled=${running} onChange=${(event) => setBoth(event.target.checked)} /> two answers side by side</label>
        </div>
      </form>
      ${sent?.map((body, side) => html`<${Code} key=${side} body=${body} hasKey=${Boolean(accessKey)} />`)}
    </section>
    <div class="all-settings">
      ${settings.slice(0, both ? 2 : 1).map((one, side) => html`<${Settings} key=${side} side=${side} both=${both} settings=${one} change=${(to) => change(side, to)} />`)}
    </div>
  </div>`;
}

function Answer({ answer }) {
  const tokens = shown(answer);
  return html`<div class="answer">
    ${answer.reasoning && html`<details><summary>Reasoning</summary><p>${answer.reasoning}</p></details>`}
    <p class="content">${tokens ? tokens.map((one, i) => html`<${Token} key=${i} token=${one} />`) : answer.content}</p>
    ${answer.calls.map((call) => html`<pre class="call" tabindex="0" aria-label="Tool call">${call.name}(${call.arguments})</pre>`)}
    ${answer.finish && html`<p class="finish">${answer.finish}</p>`}
  </div>`;
}

/** The tokens of an answer's text, without those behind it, such as the end of a turn; null if they do not spell it. */
function shown({ tokens, content }) {
  let end = 0;
  for (let length = 0; length < content.length && end < tokens.length; end += 1) length += tokens[end].token.length;
  const found = tokens.slice(0, end);
  return end && found.map((one) => one.token).join("") === content ? found : null;
}

function Token({ token }) {
  const share = (one) => `${JSON.stringify(one.token)} ${(100 * Math.exp(one.logprob)).toFixed(1)} %`;
  const others = token.top_logprobs.filter((one) => one.token !== token.token).map(share);
  const shade = Math.min(4, Math.floor(-token.logprob / 0.7)); // 4: below 6 %
  return html`<span class=${`token shade-${shade}`} title=${[share(token), ...others].join("\n")}>${token.token}</span>`;
}

function Settings({ side, both, settings, change }) {
  const id = (name) => `${name}-${side}`;
  const area = (name, label, rows) => html`<label for=${id(name)}>${label}</label>
    <textarea id=${id(name)} rows=${rows} value=${settings[name]} onInput=${(event) => change({ [name]: event.target.value })}></textarea>`;
  return html`<section class="settings" aria-label=${both ? `Settings of answer ${side + 1}` : "Settings"}>
    <h3>${both ? `Answer ${side + 1}` : "Settings"}</h3>
    ${area("system", "System prompt", 2)}
    <div class="numbers">${Object.entries(settings.numbers).map(([name, value]) => html`<div>
      <label for=${id(name)}>${name}</label>
      <input id=${id(name)} inputmode="decimal" value=${value} onInput=${(event) => change({ numbers: { ...settings.numbers, [name]: event.target.value } })} />
    </div>`)}</div>
    ${area("stop", "Stop strings, one a line", 2)}
    ${area("tools", "Tools, as JSON", 3)}
    ${area("schema", "JSON schema of the answer", 3)}
    <label class="check"><input type="checkbox" checked=${settings.logprobs} onChange=${(event) => change({ logprobs: event.target.checked })} /> probabilities of tokens (point at a token)</label>
  </section>`;
}

function Code({ body, hasKey }) {
  const [language, setLanguage] = useState("curl");
  const [copied, setCopied] = useState("");
  const text = (language === "curl" ? asCurl : asPython)(body, location.origin, hasKey);
  const copy = () => navigator.clipboard.writeText(text).then(() => setCopied("copied"), () => setCopied("the browser refuses"));
  return html`<details class="code"><summary>The code of this request</summary>
    <div class="buttons">
      ${["curl", "Python"].map((one) => html`<button type="button" aria-pressed=${language === one} onClick=${() => (setLanguage(one), setCopied(""))}>${one}</button>`)}
      <button type="button" onClick=${copy}>Copy</button> <span role="status">${copied}</span>
    </div>
    <pre tabindex="0" aria-label=${`The request in ${language}`}>${text}</pre>
  </details>`;
}
