
// The box that asks the index, where the page is served. Texts become text and never markup.
const box = document.querySelector("#ask-box");
const said = box.querySelector("[role=status]");
const found = box.querySelector("[data-found]");
const visible = (text) => text.replace(/(?![\n\t\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu,
  (c) => "\\u{" + c.codePointAt(0).toString(16) + "}");
const make = (tag, kind, text, ...parts) => {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  if (text) element.textContent = visible(text);
  element.append(...parts);
  return element;
};
const number = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(4);
const row = (item) => {
  const noise = item.sigma === null ? "" : ` ± ${item.sigma.toFixed(4)}`;
  const place = item.place ? `, row ${item.place}${item.file ? ` of ${item.file}` : ""}` : "";
  const score = make("p", "score", `score ${number(item.score)}${noise}${place}`);
  if (item.is_target !== null) score.append(make("span", "chip", item.is_target ? "target" : "other"));
  const asked = [item.instruction, item.input].filter(Boolean).join("\n");
  const told = item.chance && item.score > 0 ? [make("p", "score", `${item.chance.higher} of ${item.chance.prompts} unrelated prompts score it as high; p ${+item.chance.p.toPrecision(2)}, q ${+item.chance.q.toPrecision(2)}`)] : [];
  return make("li", "", "", score, ...told, make("p", "asked", asked), make("p", "", item.output));
};
const pole = (title, items) => {
  const list = make("ol", "examples", "", ...items.map(row));
  return make("div", "", "", make("h3", "", title), list);
};
box.querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = box.querySelector("button");
  if (button.getAttribute("aria-disabled") === "true") return;
  const [instruction, output] = [...box.querySelectorAll("textarea")].map((area) => area.value);
  button.setAttribute("aria-disabled", "true");
  said.textContent = "Asking the index …";
  try {
    const reply = await fetch("ask", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ instruction, output }),
    });
    const answer = await reply.json();
    if (!reply.ok) throw new Error(answer.error);
    found.replaceChildren(
      make("p", "prompt", answer.queries[0].output),
      make("div", "columns", "", pole("Pull toward this answer", answer.toward),
        pole("Pull against it", answer.against)));
    said.textContent = `Traced in ${answer.seconds.toFixed(2)} s.`;
  } catch (error) {
    found.replaceChildren();
    said.textContent = visible(error.message);
  }
  button.removeAttribute("aria-disabled");
});
box.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    box.querySelector("form").requestSubmit();
  }
});
box.hidden = false;
