// Keys of the console. Each also has a link or a button, so no script is needed to use a page.
"use strict";

(() => {
  const PAGES = { a: "/queue", f: "/feedback", h: "/history" };
  let selectedId = null; // of the row, since new rows move it
  let isAfterG = false;

  const rows = () => [...document.querySelectorAll("[data-row]")];

  const isSelected = (row) => row.dataset.row === selectedId;

  function showSelected() {
    rows().forEach((row) => row.classList.toggle("selected", isSelected(row)));
    const selected = rows().find(isSelected);
    selected?.querySelector("a")?.focus({ preventScroll: true });
    return selected;
  }

  function move(step) {
    const found = rows();
    if (found.length === 0) return;
    const index = found.findIndex(isSelected);
    selectedId = found[Math.max(0, Math.min(index + step, found.length - 1))].dataset.row;
    showSelected().scrollIntoView({ block: "nearest" });
  }

  function focusForm(id) {
    const field = document.querySelector(`#${id} :is(textarea, input:not([type=hidden]), button)`);
    if (field) field.focus();
    return Boolean(field);
  }

  function openHelp() {
    document.getElementById("help").showModal();
  }

  const ACTIONS = {
    j: () => move(1),
    k: () => move(-1),
    "/": () => document.getElementById("search")?.focus(),
    e: () => focusForm("correct"),
    x: () => focusForm("except"),
    u: () => focusForm("undo"),
    "?": openHelp,
    g: () => { isAfterG = true; },
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && event.target.matches("input, textarea, select")) {
      event.target.blur();
      return;
    }
    if (event.target.closest("input, textarea, select, dialog[open]")) return;
    const wasAfterG = isAfterG;
    isAfterG = false;
    if (wasAfterG && PAGES[event.key]) {
      location.assign(PAGES[event.key]);
      return;
    }
    const action = ACTIONS[event.key];
    if (action) {
      event.preventDefault();
      action();
    }
  });

  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("help-button").addEventListener("click", openHelp);
  });

  // New content replaces the rows: select the same one again, and give it back the focus that it had.
  document.addEventListener("htmx:afterSettle", () => {
    if (document.activeElement === document.body) showSelected();
  });
})();
