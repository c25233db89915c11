// Tables, code and pictures that are wider than the page can be scrolled by keys: a browser scrolls what has the focus.
const WIDE = ".md-typeset__scrollwrap, pre > code, p:has(> picture)";

function letKeysScroll() {
  for (const each of document.querySelectorAll(WIDE)) {
    if (each.scrollWidth > each.clientWidth) each.setAttribute("tabindex", "0");
    else each.removeAttribute("tabindex");
  }
}

window.addEventListener("load", letKeysScroll);
new ResizeObserver(letKeysScroll).observe(document.body);
