"use strict";
// Without this script everything is there to read, one query below the other.
for (const box of document.querySelectorAll("[data-switch]")) {
  const items = [...box.querySelectorAll("[data-item]")];
  const chooser = box.querySelector(".chooser");
  const select = chooser.querySelector("select");
  const show = (number) => {
    items.forEach((item, i) => { item.hidden = i !== number; });
    select.selectedIndex = number;
  };
  const move = (step) => show((select.selectedIndex + step + items.length) % items.length);
  select.addEventListener("change", () => show(select.selectedIndex));
  chooser.querySelector("[data-step='-1']").addEventListener("click", () => move(-1));
  chooser.querySelector("[data-step='1']").addEventListener("click", () => move(1));
  chooser.hidden = false;
  show(select.selectedIndex);
}
// A definition opens on a click without this script, and is also shown on hover.
for (const term of document.querySelectorAll(".term")) {
  term.title = document.getElementById(term.getAttribute("popovertarget")).lastChild.textContent;
}
// A link to something that is folded away opens it.
const reveal = () => {
  let above = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const target = above;
  for (; above; above = above.parentElement) if (above.tagName === "DETAILS") above.open = true;
  if (target) target.scrollIntoView();
};
addEventListener("hashchange", reveal);
if (location.hash) reveal();
