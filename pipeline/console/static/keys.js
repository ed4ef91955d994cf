// Keys of the console. Each also has a link or a button, so no script is needed to use a page.
"use strict";

(() => {
  const PAGES = { a: "/queue", f: "/feedback", h: "/history" };
  let selectedIndex = -1;
  let isAfterG = false;

  const rows = () => [...document.querySelectorAll("[data-row]")];

  function select(index) {
    const found = rows();
    if (found.length === 0) return;
    selectedIndex = Math.max(0, Math.min(index, found.length - 1));
    found.forEach((row, place) => row.classList.toggle("selected", place === selectedIndex));
    const link = found[selectedIndex].querySelector("a");
    if (link) link.focus({ preventScroll: true });
    found[selectedIndex].scrollIntoView({ block: "nearest" });
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
    j: () => select(selectedIndex + 1),
    k: () => select(selectedIndex - 1),
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

  // New content keeps the selected row.
  document.addEventListener("htmx:afterSettle", () => {
    rows().forEach((row, place) => row.classList.toggle("selected", place === selectedIndex));
  });
})();
