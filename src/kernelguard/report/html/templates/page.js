"use strict";
(() => {
  const say = document.getElementById("say");
  const announce = (text) => { say.textContent = ""; requestAnimationFrame(() => { say.textContent = text; }); };

  // Copying works without a network and without https: the old way is tried where the clipboard is not allowed.
  const oldCopy = (text) => {
    const area = document.createElement("textarea");
    area.value = text;
    area.setAttribute("readonly", "");
    area.style.position = "fixed";
    area.style.opacity = "0";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };
  const copy = async (text) => {
    if (navigator.clipboard && window.isSecureContext) {
      try { await navigator.clipboard.writeText(text); return true; } catch { /* not allowed: try the other way */ }
    }
    return oldCopy(text);
  };
  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.addEventListener("click", async () => {
      const text = button.parentElement.querySelector("code").textContent;
      const done = await copy(text);
      button.textContent = done ? "Copied" : "Select it";
      announce(done ? "Copied to the clipboard" : "Copying is not allowed here");
      button.focus();
      setTimeout(() => { button.textContent = "Copy"; }, 1600);
    });
  }

  for (const button of document.querySelectorAll("button[data-fold]")) {
    button.addEventListener("click", () => {
      const scope = document.getElementById(button.dataset.scope);
      for (const part of scope.querySelectorAll("details")) part.open = button.dataset.fold === "open";
      announce(button.dataset.fold === "open" ? "All unfolded" : "All folded");
    });
  }

  // A printed page cannot be unfolded.
  let folded = [];
  window.addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const part of folded) part.open = true;
  });
  window.addEventListener("afterprint", () => { for (const part of folded) part.open = false; folded = []; });

  // Reading a timeline slice by slice, with the mouse or the arrow keys.
  for (const figure of document.querySelectorAll("figure[data-slices]")) {
    const { lanes, width, left, right } = JSON.parse(figure.dataset.slices);
    const svg = figure.querySelector("svg");
    const cursor = figure.querySelector(".cursor");
    const reading = figure.querySelector(".reading");
    const count = lanes[0][1].length;
    let at = -1;
    const show = (slice) => {
      at = Math.max(0, Math.min(count - 1, slice));
      const x = left + (at + 0.5) / count * (right - left);
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.style.display = "";
      const time = (at / count * width / 1000).toFixed(1);
      reading.textContent = `at ${time} ms: ` + lanes.map(([name, v]) => `${name} ${v[at]}%`).join(", ");
    };
    svg.addEventListener("mousemove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      if (x >= left && x <= right) show(Math.floor((x - left) / (right - left) * count));
    });
    svg.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20, Home: -count, End: count };
      if (!(event.key in steps)) return;
      event.preventDefault();
      show((at < 0 ? 0 : at) + steps[event.key]);
    });
  }
})();
