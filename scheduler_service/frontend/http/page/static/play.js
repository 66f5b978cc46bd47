// Play: a chat with the served model, or the same question under two settings, and the code that does the same.
import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { AnswerView } from "./answer.js";
import { Answer, asCurl, asPython, bodyOf, checked, messageOf, read } from "./chat.js";

const SETTINGS = {
  model: "", system: "", stop: "", tools: "", schema: "", logprobs: true,
  numbers: { temperature: "0.2", top_p: "", max_tokens: "256", seed: "", min_p: "", repetition_penalty: "" },
};

/** `refused` is told the server's sentence about a key that it does not take. */
export function Play({ access, refused }) {
  const [models, setModels] = useState([]); // names of the model and its adapters
  const [problem, setProblem] = useState("");
  const [turns, setTurns] = useState([]); // {question, messages, answers}: both of each side, null for one that has ended
  const [both, setBoth] = useState(false);
  const [settings, setSettings] = useState([SETTINGS, SETTINGS]);
  const [running, setRunning] = useState(null); // AbortController of the answers under way
  const [sent, setSent] = useState([]); // the last bodies
  const question = useRef(null);
  const fail = (error) => {
    setProblem(error.message);
    if (error.status === 401) refused(error.message);
  };
  useEffect(() => {
    setProblem("");
    fetch("/v1/models", { headers: access.key ? { Authorization: `Bearer ${access.key}` } : {} })
      .then(async (answer) => setModels((await (await checked(answer)).json()).data.map((one) => one.id)))
      .catch(fail);
  }, [access]);

  /** `turn`: what is asked, before it has answers. */
  const ask = async ({ question: text, messages }, before) => {
    const answers = messages.map((one) => one && new Answer());
    const turn = { question: text, messages, answers };
    let bodies;
    try {
      bodies = messages.map((asked, side) => {
        const { model, ...others } = settings[side];
        return asked && bodyOf(model || models[0], others, [...conversation(before, side), ...asked]);
      });
    } catch (error) {
      return setProblem(error.message);
    }
    setProblem("");
    setSent(bodies.filter(Boolean));
    setTurns([...before, turn]);
    const end = new AbortController();
    setRunning(end);
    const ends = await Promise.allSettled(bodies.map((body, side) => body && read(answers[side], body, access.key, end.signal)));
    for (const [side, { reason }] of ends.entries()) {
      if (reason?.name === "AbortError") answers[side].end("stopped here");
      else if (reason) fail(reason);
    }
    if (ends.some((one) => one.reason && one.reason.name !== "AbortError") && answers.every((one) => !one?.content && !one?.calls.length)) {
      setTurns(before); // a refused question is no turn of the conversation
      question.current.value ||= text;
    }
    setRunning(null);
  };
  const send = (event) => {
    event.preventDefault();
    const text = question.current.value.trim();
    if (!text || running || !models.length) return;
    question.current.value = "";
    askAll(text, turns);
  };
  const askAll = (text, before) => {
    const asked = [{ role: "user", content: text }];
    ask({ question: text, messages: both ? [asked, asked] : [asked] }, before);
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    if (event.key === "Escape") running?.abort();
  };
  const last = turns.at(-1);
  const again = () => (last.question ? askAll(last.question, turns.slice(0, -1)) : ask(last, turns.slice(0, -1)));
  const edit = () => {
    question.current.value = last.question;
    setTurns(turns.slice(0, -1));
    question.current.focus();
  };
  const change = (side, change_) => setSettings(settings.map((one, i) => (i === side ? { ...one, ...change_ } : one)));

  return html`<div class="play">
    <section class="talk" aria-label="Chat">
      <div class="turns" role="log" aria-label="Conversation" tabindex="0">
        ${turns.map((turn, i) => html`<${Turn} key=${i} turn=${turn} />`)}
        ${!turns.length && html`<p class="hint">Ask ${models[0] || "the model"} something. Enter sends, Shift and Enter begin a line, Escape stops.</p>`}
      </div>
      ${!running && last?.answers.some((one) => one?.calls.length) &&
      html`<${Results} key=${turns.length} answers=${last.answers} send=${(messages) => ask({ question: "", messages }, turns)} />`}
      ${problem && html`<p role="alert" class="problem">${problem}</p>`}
      <form onSubmit=${send}>
        <label for="question">Question</label>
        <textarea id="question" ref=${question} rows="3" onKeyDown=${onKey}></textarea>
        <div class="buttons">
          ${running
            ? html`<button type="button" onClick=${() => running.abort()}>Stop</button>`
            : html`<button disabled=${!models.length}>Send</button>`}
          <button type="button" disabled=${running || !last} onClick=${again}>Again</button>
          <button type="button" disabled=${running || !last?.question} onClick=${edit}>Edit</button>
          <button type="button" disabled=${running || !last} onClick=${() => setTurns([])}>Clear</button>
          <label class="check"><input type="checkbox" checked=${both} disabled=${running} onChange=${(event) => setBoth(event.target.checked)} /> two answers side by side</label>
        </div>
      </form>
      ${sent.map((body, side) => html`<${Code} key=${side} body=${body} hasKey=${Boolean(access.key)} />`)}
    </section>
    <div class="all-settings">
      ${settings.slice(0, both ? 2 : 1).map((one, side) => html`<${Settings} key=${side} side=${side} both=${both} models=${models} settings=${one} change=${(to) => change(side, to)} />`)}
    </div>
  </div>`;
}

/** The messages of a side's turns. Turns of one answer belong to both sides. */
function conversation(turns, side) {
  return turns.flatMap(({ messages, answers }) => {
    const i = side in answers ? side : 0;
    return answers[i] ? [...messages[i], messageOf(answers[i])] : [];
  });
}

function Turn({ turn: { question, messages, answers } }) {
  const results = messages.flatMap((one) => one ?? []).filter((one) => one.role === "tool");
  return html`<article>
    ${question && html`<p class="asked">${question}</p>`}
    ${results.map((one) => html`<p class="asked">Result: ${one.content}</p>`)}
    <div class="answers">${answers.map((answer, side) => html`<div key=${side}>${answer && html`<${AnswerView} answer=${answer} />`}</div>`)}</div>
  </article>`;
}

/** The results of the last answers' calls, as their tools would return them. */
function Results({ answers, send }) {
  const submit = (event) => {
    event.preventDefault();
    const { elements } = event.target;
    send(answers.map((answer, side) => (answer?.calls.length
      ? answer.calls.map((call, i) => ({ role: "tool", tool_call_id: call.id, content: elements[`result-${side}-${i}`].value }))
      : null)));
  };
  return html`<form class="results" onSubmit=${submit}>
    ${answers.map((answer, side) => (answer?.calls ?? []).map((call, i) => {
      const id = `result-${side}-${i}`;
      return html`<div key=${id}><label for=${id}>Result of ${call.name}(${call.arguments})</label> <textarea id=${id} name=${id} rows="2"></textarea></div>`;
    }))}
    <div class="buttons"><button>Send results</button></div>
  </form>`;
}

function Settings({ side, both, models, settings, change }) {
  const id = (name) => `${name}-${side}`;
  const area = (name, label, rows) => html`<label for=${id(name)}>${label}</label>
    <textarea id=${id(name)} rows=${rows} value=${settings[name]} onInput=${(event) => change({ [name]: event.target.value })}></textarea>`;
  return html`<section class="settings" aria-label=${both ? `Settings of answer ${side + 1}` : "Settings"}>
    <h3>${both ? `Answer ${side + 1}` : "Settings"}</h3>
    <label for=${id("model")}>Model or adapter</label>
    <select id=${id("model")} value=${settings.model || models[0]} onChange=${(event) => change({ model: event.target.value })}>
      ${models.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select>
    ${area("system", "System prompt", 2)}
    <div class="numbers">${Object.entries(settings.numbers).map(([name, value]) => html`<div>
      <label for=${id(name)}>${name}</label>
      <input id=${id(name)} inputmode="decimal" value=${value} onInput=${(event) => change({ numbers: { ...settings.numbers, [name]: event.target.value } })} />
    </div>`)}</div>
    ${area("stop", "Stop strings, one a line", 2)}
    ${area("tools", "Tools, as JSON", 3)}
    ${area("schema", "JSON schema of the answer", 3)}
    <label class="check"><input type="checkbox" checked=${settings.logprobs} onChange=${(event) => change({ logprobs: event.target.checked })} /> probabilities of tokens (point at one, or focus the answer and use arrow keys)</label>
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
