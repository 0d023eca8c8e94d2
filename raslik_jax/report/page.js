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
// What is folded away on the screen is open on paper.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const details of opened) details.open = true;
});
addEventListener("afterprint", () => {
  for (const details of opened) details.open = false;
});
