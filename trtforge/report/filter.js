for (const table of document.querySelectorAll("table[data-filter]")) {
  const rows = [...table.tBodies[0].rows];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const field = document.createElement("input");
  field.type = "search";
  field.className = "search";
  field.placeholder = `Search ${rows.length} rows`;
  field.setAttribute("aria-label", field.placeholder);
  field.addEventListener("input", () => {
    const wanted = field.value.toLowerCase();
    rows.forEach((row, index) => (row.hidden = !texts[index].includes(wanted)));
  });
  table.parentElement.before(field);
}
