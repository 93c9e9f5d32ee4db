"use strict";
// Tables sort by the button in a head; numbers by their full value, blanks last; a third click restores the first order.
// Rows of a group stay together, in the groups' first order. Without this they are only not sorted.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const original = [...body.rows];
  const group = new Map();
  for (const row of original) if (!group.has(row.dataset.group)) group.set(row.dataset.group, group.size);
  const key = (row, column) => {
    const cell = row.cells[column];
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    return cell.classList.contains("num") ? null : cell.textContent;
  };
  const sort = (head, column) => {
    const down = head.getAttribute("aria-sort") === "ascending";
    const restore = head.getAttribute("aria-sort") === "descending";
    for (const other of heads) other.removeAttribute("aria-sort");
    if (restore) { body.append(...original); return; }
    const rows = [...body.rows].map((row) => [key(row, column), row]);
    rows.sort(([a, one], [b, other]) => {
      const apart = group.get(one.dataset.group) - group.get(other.dataset.group);
      if (apart) return apart;
      if (a === null || b === null) return (a === null) - (b === null);
      const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", {numeric: true});
      return down ? -order : order;
    });
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...rows.map(([, row]) => row));
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = group.size > 1 ? "sort by this column, within each figure" : "sort by this column";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(head, column));
    head.append(button);
  });
}
// On paper nothing is folded.
addEventListener("beforeprint", () => {
  for (const folded of document.querySelectorAll("details:not([open])")) { folded.open = true; folded.dataset.printed = ""; }
});
addEventListener("afterprint", () => {
  for (const folded of document.querySelectorAll("details[data-printed]")) { folded.open = false; delete folded.dataset.printed; }
});
// A link into a folded part opens it.
const reveal = () => {
  const folded = document.getElementById(location.hash.slice(1))?.closest("details");
  if (folded) folded.open = true;
};
reveal();
addEventListener("hashchange", reveal);
// The hint to swipe only stands where a box is cut at its right edge.
const hint = () => {
  for (const box of document.querySelectorAll(".scroll")) {
    const swipe = (box.closest("figure") ?? box.previousElementSibling).querySelector(".swipe");
    if (swipe) swipe.hidden = box.scrollWidth <= box.clientWidth;
  }
};
hint();
addEventListener("resize", hint);
addEventListener("toggle", hint, true);
