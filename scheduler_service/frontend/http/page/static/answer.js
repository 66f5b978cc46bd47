// An answer as it comes. What is drawn stays: each draw adds the new tokens, and reads the last group of them alone.
import { html, useMemo, useState } from "./vendor/preact.js";
import { useChanges } from "./live/changes.js";

const HZ = 20;
const GROUP = 64; // tokens

export function AnswerView({ answer }) {
  useChanges([answer], HZ);
  const [at, setAt] = useState(-1); // the token that is pointed at
  const { calls, content, finish, numSpelled, reasoning, texts, tokens } = answer;
  const end = answer.spells ? numSpelled : 0;
  const keyed = (event) => {
    const to = { ArrowRight: Math.min(end - 1, at + 1), ArrowLeft: Math.max(0, at - 1), Home: 0, End: end - 1, Escape: -1 }[event.key];
    if (to === undefined) return;
    setAt(to);
    event.preventDefault();
  };
  const leave = () => setAt(-1);
  return html`<div class="answer">
    ${reasoning && html`<details><summary>Reasoning</summary><p>${reasoning}</p></details>`}
    ${end
      ? html`<div class="content" role="group" aria-label="Answer, whose tokens the arrow keys read" tabindex="0" onKeyDown=${keyed} onBlur=${leave}
            onPointerOver=${(event) => setAt(Number(event.target.dataset.at ?? -1))} onPointerLeave=${leave}>${groups(tokens, end, at)}${answer.rest}</div>
          <p class="about-token" role="status">${at >= 0 && at < end ? aboutToken(tokens[at]) : ""}</p>`
      : content && html`<p class="content">${groups(texts, texts.length, -1)}</p>`}
    ${calls.map((call) => html`<pre class="call" tabindex="0" aria-label="Tool call">${call.name}(${call.arguments})</pre>`)}
    ${finish && html`<p class="finish">${finish}</p>`}
  </div>`;
}

function groups(parts, end, at) {
  const found = [];
  for (let from = 0; from < end; from += GROUP) {
    const to = Math.min(end, from + GROUP);
    found.push(html`<${Group} key=${from} parts=${parts} from=${from} to=${to} at=${from <= at && at < to ? at : -1} />`);
  }
  return found;
}

/** Tokens or texts of an answer, drawn anew only if they are more, or another token is pointed at. */
function Group({ parts, from, to, at }) {
  return useMemo(() => {
    const shown = parts.slice(from, to);
    return html`<span>${typeof shown[0] === "string" ? shown.join("") : shown.map((token, i) => Token(token, from + i, at))}</span>`;
  }, [parts, to, at]);
}

function Token({ token, logprob }, i, at) {
  const shade = Math.min(4, Math.floor(-logprob / 0.7)); // 4: below 6 %
  return html`<span key=${i} data-at=${i} class=${`token shade-${shade}${i === at ? " at" : ""}`}>${token}</span>`;
}

function aboutToken({ token, logprob, top_logprobs: top }) {
  const share = (one) => `${JSON.stringify(one.token)} ${(100 * Math.exp(one.logprob)).toFixed(1)} %`;
  const others = top.filter((one) => one.token !== token).map(share);
  return `${share({ token, logprob })}${others.length ? `; others: ${others.join(", ")}` : ""}`;
}
