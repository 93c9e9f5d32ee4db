"use strict";
// Tables sort by a click, or Enter, on a head; numbers by their full value, blanks last. Without this they are only not sorted.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const key = (row, column) => {
    const cell = row.cells[column];
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    return cell.classList.contains("num") ? null : cell.textContent;
  };
  const sort = (head, column) => {
    const down = head.getAttribute("aria-sort") === "ascending";
    const rows = [...body.rows].map((row) => [key(row, column), row]);
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", {numeric: true});
      return down ? -order : order;
    });
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...rows.map(([, row]) => row));
  };
  heads.forEach((head, column) => {
    head.classList.add("sorts");
    head.tabIndex = 0;
    head.title = "sort by this column";
    head.addEventListener("click", () => sort(head, column));
    head.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(head, column); }
    });
  });
}
