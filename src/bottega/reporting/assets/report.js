// The page of the report: draws charts when they are seen, handles the controls, and refreshes a live page.
"use strict";
(() => {
  const LIGHT = ["#2b5fc1", "#d1622b", "#2e8b6f", "#8a4fa3", "#a8862a", "#c23f6d", "#3a8fa8", "#6b6b7b"];
  const DARK = ["#8fb3ff", "#ffa477", "#6fd3a3", "#d3a0ea", "#e3c46a", "#ff8fb3", "#7fd0e6", "#b3b3c4"];
  const MIN_TOOLBOX_WIDTH = 420; // pixels
  const root = document.documentElement;
  let data = readData(document);
  const drawn = new Map(); // element -> chart
  const settings = { smoothing: 0.6, axis: 0, log: false };

  function readData(source) {
    return JSON.parse(source.getElementById("report-data").textContent);
  }

  function isDark() {
    const theme = root.dataset.theme;
    return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  function palette() {
    return isDark() ? DARK : LIGHT;
  }

  function css(name) {
    return getComputedStyle(root).getPropertyValue(name).trim();
  }

  const charts = makeCharts({ getData: () => data, settings, palette, css });

  function findChart(reference) {
    return reference.split("/").reduce((value, key) => value[key], data);
  }

  function draw(element) {
    const reference = element.dataset.chart, chart = findChart(reference);
    if (!chart) return;
    const isCurve = !chart.kind;
    if (chart.kind === "confusion") element.style.height = `${Math.max(260, Math.min(900, 150 + 26 * chart.classes.length))}px`;
    if (chart.kind === "memory") element.style.height = "190px";
    const plot = drawn.get(element) || echarts.init(element, null, { renderer: "svg" });
    const option = isCurve ? charts.line(chart, reference.startsWith("modules/"), element.parentElement.classList.contains("wide")) : charts[chart.kind](chart);
    if (element.clientWidth < MIN_TOOLBOX_WIDTH) {
      option.toolbox = { show: false };
      option.legend = { ...option.legend, right: 4 };
      if (isCurve && option.legend.show === false) option.grid.top = 12;
    }
    plot.setOption(option, true);
    if (!drawn.has(element)) {
      drawn.set(element, plot);
      if (isCurve) plot.group = "curves"; // one pointer and one zoom for all curves
      sizes.observe(element);
    }
  }

  const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => drawn.get(target)?.resize()));
  // Charts are drawn when they come near the screen, so that a page with hundreds of them opens at once.
  const visible = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      visible.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "500px" });

  function watchCharts() {
    document.querySelectorAll("[data-chart]").forEach((element) => visible.observe(element));
    document.querySelectorAll("[data-run]").forEach((swatch) => { swatch.style.background = palette()[swatch.dataset.run % palette().length]; });
  }

  function redraw(onlyCurves) {
    for (const element of drawn.keys()) if (!onlyCurves || !findChart(element.dataset.chart).kind) draw(element);
  }

  function setUpControls() {
    const slider = document.getElementById("smoothing");
    if (!slider) return;
    const output = document.getElementById("smoothing-value"), select = document.getElementById("axis"), box = document.getElementById("log-scale");
    slider.value = settings.smoothing; select.value = settings.axis; box.checked = settings.log;
    output.textContent = settings.smoothing.toFixed(2);
    document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
    slider.addEventListener("input", () => { settings.smoothing = Number(slider.value); output.textContent = settings.smoothing.toFixed(2); redraw(true); });
    select.addEventListener("change", () => { settings.axis = Number(select.value); redraw(true); });
    box.addEventListener("change", () => { settings.log = box.checked; redraw(true); });
  }

  function setUpSamples() {
    document.querySelectorAll(".samples").forEach((block) => {
      const slider = block.querySelector(".stepper input");
      if (!slider) return;
      const steps = slider.dataset.steps.split(","), output = block.querySelector("output");
      const show = () => {
        const step = steps[slider.value];
        output.textContent = Number(step).toLocaleString("en");
        slider.setAttribute("aria-valuetext", `step ${step}`);
        block.querySelectorAll(".sample-step").forEach((panel) => { panel.hidden = panel.dataset.step !== step; });
      };
      slider.addEventListener("input", show);
      show();
    });
  }

  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    watchCharts();
    redraw(false);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    watchCharts();
    redraw(false);
  });
  addEventListener("beforeprint", () => document.querySelectorAll("[data-chart]").forEach(draw));

  // A live page asks its server whether the run has changed, and replaces its content if so; settings stay.
  async function refresh() {
    try {
      const version = await (await fetch("version", { cache: "no-store" })).text();
      if (version !== data.version) {
        const response = await fetch("", { cache: "no-store" });
        if (response.ok) replacePage(new DOMParser().parseFromString(await response.text(), "text/html"));
      }
      document.title = document.title.replace(/^\(offline\) /, "");
    } catch {
      if (!document.title.startsWith("(offline)")) document.title = `(offline) ${document.title}`; // the server has ended
    }
  }

  function replacePage(next) {
    const open = [...document.querySelectorAll("details[open]")].map((details) => details.id);
    const steps = [...document.querySelectorAll(".stepper input")].map((slider) => (slider.value === slider.max ? null : slider.value));
    data = readData(next);
    drawn.forEach((plot) => plot.dispose());
    drawn.clear();
    for (const id of ["nav", "main"]) document.getElementById(id).replaceWith(document.adoptNode(next.getElementById(id)));
    open.forEach((id) => document.getElementById(id)?.setAttribute("open", ""));
    // A slider at the newest samples stays at the newest.
    document.querySelectorAll(".stepper input").forEach((slider, i) => { slider.value = steps[i] ?? slider.max; });
    start();
  }

  function start() {
    watchCharts();
    setUpControls();
    setUpSamples();
  }

  echarts.connect("curves");
  start();
  if (data.refresh) {
    setInterval(refresh, 1000 * data.refresh);
  }
})();
