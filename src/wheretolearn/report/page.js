"use strict";

// Clicking a column's name sorts its table by it, and again the other way round; empty cells stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    button.addEventListener("click", () => sortBy(table, headings, column));
    heading.append(button);
  });
}

function sortBy(table, headings, column) {
  const down = headings[column].getAttribute("aria-sort") === "ascending";
  for (const heading of headings) heading.removeAttribute("aria-sort");
  headings[column].setAttribute("aria-sort", down ? "descending" : "ascending");
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => [keyOf(row.cells[column]), row]);
  rows.sort(([a], [b]) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    const order = typeof a === "number" && typeof b === "number" ? a - b : compareTexts(String(a), String(b));
    return down ? -order : order;
  });
  body.append(...rows.map(([, row]) => row));
}

// <data value="..."> says what to sort by; other cells are sorted by their text.
function keyOf(cell) {
  const data = cell.querySelector("data");
  const text = (data ? data.value : cell.textContent).trim();
  const number = Number(text);
  return text !== "" && !Number.isNaN(number) ? number : text;
}

const compareTexts = new Intl.Collator(undefined, { numeric: true }).compare;

// A saved figure is a file of its own: with the colours it is shown in, on a ground.
for (const button of document.querySelectorAll("button.save")) {
  button.hidden = false;
  button.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([asFile(button.closest("figure"))], { type: "image/svg+xml" }));
    link.download = button.dataset.name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  });
}

function asFile(figure) {
  const svg = figure.querySelector("svg").cloneNode(true);
  const [, , width, height] = svg.getAttribute("viewBox").split(" ");
  svg.setAttribute("width", `${width}pt`);
  svg.setAttribute("height", `${height}pt`);
  const title = document.createElementNS(svg.namespaceURI, "title");
  title.textContent = svg.getAttribute("aria-label");
  const ground = document.createElementNS(svg.namespaceURI, "rect");
  ground.setAttribute("width", "100%");
  ground.setAttribute("height", "100%");
  ground.setAttribute("style", "fill: var(--card)");
  svg.prepend(title, ground);
  const styles = getComputedStyle(document.documentElement);
  const text = new XMLSerializer().serializeToString(svg);
  const resolved = (name) => styles.getPropertyValue(name).trim().replaceAll('"', "'");
  return text.replace(/var\((--[\w-]+)\)/g, (_, name) => resolved(name));
}
