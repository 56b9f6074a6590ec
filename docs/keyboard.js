// What the theme leaves to the pointer: menu and search of narrow screens, and tables that scroll sideways.
const BUTTONS = ".md-header label[for=__drawer], .md-header label[for=__search]";

function makeFocusable() {
  for (const label of document.querySelectorAll(BUTTONS)) {
    label.tabIndex = 0;
    label.setAttribute("role", "button");
    if (!label.textContent.trim()) label.setAttribute("aria-label", "Search");
  }
  for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap")) {
    if (wrap.scrollWidth > wrap.clientWidth) {
      wrap.tabIndex = 0;
      wrap.setAttribute("role", "group");
      wrap.setAttribute("aria-label", "Table, scrolls sideways");
    } else {
      for (const name of ["tabindex", "role", "aria-label"]) wrap.removeAttribute(name);
    }
  }
}

addEventListener("load", makeFocusable);
addEventListener("resize", makeFocusable);
addEventListener("keydown", (event) => {
  const menu = document.getElementById("__drawer");
  if (event.key === "Escape" && menu?.checked) {
    menu.click();
    document.querySelector(BUTTONS)?.focus();
  }
  if (event.key === " " && event.target.matches?.(BUTTONS)) {  // the theme itself takes Enter
    event.preventDefault();
    event.target.click();
  }
});
