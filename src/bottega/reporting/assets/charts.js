// The charts of the report as options of ECharts. Text of the run is only ever set as text, never as HTML.
"use strict";
const makeCharts = ({ getData, settings, palette, css }) => {
  const MAX_SYMBOL_POINTS = 60; // series with fewer points show each of them
  const MIN_SMOOTHED_POINTS = 20; // fewer points are drawn as they are

  function format(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "";
    if (typeof value !== "number") return String(value);
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
    return Number.isInteger(value) ? value.toLocaleString("en") : size >= 100 ? value.toFixed(1) : value.toPrecision(4);
  }

  function shortNumber(value) {
    const size = Math.abs(value);
    if (size >= 1e13) return value.toExponential(1);
    if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
    return size && size < 1e-3 ? value.toExponential(1) : `${+value.toPrecision(6)}`;
  }

  // Exponential moving average without the bias of its start, as TensorBoard draws it.
  function smooth(values, weight) {
    let last = 0;
    return values.map((value, index) => {
      last = weight * last + (1 - weight) * value;
      return last / (1 - weight ** (index + 1));
    });
  }

  function baseOption(extra) {
    const muted = css("--muted");
    return {
      animation: false,
      color: palette(),
      backgroundColor: "transparent",
      textStyle: { fontFamily: "system-ui, sans-serif", color: css("--ink") },
      aria: { enabled: true },
      grid: { left: 8, right: 16, top: 34, bottom: 8, containLabel: true },
      tooltip: {
        confine: true, backgroundColor: css("--card"), borderColor: css("--line"),
        textStyle: { color: css("--ink"), fontSize: 12 }, valueFormatter: format,
      },
      legend: { type: "scroll", top: 2, left: 4, right: 120, itemWidth: 26, itemHeight: 8, textStyle: { color: muted }, pageTextStyle: { color: muted } },
      toolbox: {
        right: 4, top: -5, itemSize: 12, iconStyle: { borderColor: muted },
        feature: { dataZoom: { yAxisIndex: "none", title: { zoom: "zoom", back: "zoom back" } }, restore: { title: "reset" }, saveAsImage: { title: "save", type: "svg" } },
      },
      ...extra,
    };
  }

  function axis(extra) {
    const muted = css("--muted"), line = css("--line");
    return {
      axisLine: { lineStyle: { color: line } }, axisTick: { show: false }, splitLine: { lineStyle: { color: line, opacity: 0.6 } },
      axisLabel: { color: muted, formatter: (value) => (typeof value === "number" ? shortNumber(value) : value), hideOverlap: true },
      nameTextStyle: { color: muted }, ...extra,
    };
  }

  function lineOption(chart, isModules, isWide) {
    const several = getData().runs.length > 1 && !isModules;
    const colours = palette(), series = [];
    const isLog = (settings.log || chart.log) && chart.series.every((s) => s.points[2].every((v) => v > 0));
    chart.series.forEach((entry, index) => {
      const x = entry.points[settings.axis], values = entry.points[2];
      const means = entry.points[3] || values; // of a thinned series; its values are the extremes of intervals
      const isTraining = entry.label === "training", isValidation = entry.label === "validation";
      const name = several ? `${getData().runs[entry.run]} · ${entry.label}` : entry.label;
      const colour = colours[(several ? entry.run : isValidation ? 1 : index) % colours.length];
      const weight = chart.smooth && (isTraining || isModules) ? settings.smoothing : 0;
      const pairs = (column) => column.map((value, i) => [x[i], value]);
      const common = { type: "line", name, showSymbol: false, itemStyle: { color: colour }, emphasis: { focus: isModules ? "series" : "none" } };
      const isSmoothed = weight > 0 && values.length > MIN_SMOOTHED_POINTS;
      if (isSmoothed && !isModules) {
        series.push({ ...common, data: pairs(values), silent: true, lineStyle: { color: colour, width: 1, opacity: 0.25 }, tooltip: { show: false }, z: 1 });
      }
      series.push({
        ...common, data: pairs(isSmoothed ? smooth(means, weight) : values), z: 2,
        showSymbol: values.length === 1 || (isValidation && values.length <= MAX_SYMBOL_POINTS), symbolSize: 5,
        lineStyle: { color: colour, width: isModules ? 1.2 : 1.8, type: several && isValidation ? "dashed" : "solid" },
      });
    });
    return baseOption({
      // The colours of several runs are those beside their names; a small chart has no room to repeat them.
      legend: { ...baseOption({}).legend, show: chart.series.length > 1 && (isWide || !several) },
      xAxis: axis({ type: "value", min: "dataMin", max: "dataMax", splitLine: { show: false }, axisPointer: { snap: true, label: { show: false } }, axisLabel: { ...axis({}).axisLabel, showMinLabel: false, showMaxLabel: false } }),
      yAxis: axis({ type: isLog ? "log" : "value", scale: true }),
      tooltip: { ...baseOption({}).tooltip, trigger: "axis", order: isModules ? "valueDesc" : "seriesAsc", formatter: (items) => describePoints(items, isModules) },
      dataZoom: [{ type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseMove: false, preventDefaultMouseMove: false }],
      series,
    });
  }

  // The tooltip as elements, so that names of runs and modules stay text. The raw line behind a smoothed one is left out.
  function describePoints(items, isModules) {
    const box = document.createElement("div");
    const points = new Map();
    for (const item of items) points.set(item.seriesName, item); // the smoothed series comes last
    const list = [...points.values()].slice(0, isModules ? 12 : 24);
    if (!list.length) return "";
    const head = document.createElement("strong");
    head.textContent = `${settings.axis ? "samples" : "step"} ${list[0].value[0].toLocaleString("en")}`;
    box.append(head);
    for (const item of list) {
      const row = document.createElement("div"), dot = document.createElement("span");
      dot.textContent = "● ";
      dot.style.color = item.color;
      row.append(dot, `${item.seriesName}: ${format(item.value[1])}`);
      box.append(row);
    }
    return box;
  }

  function confusionOption(chart) {
    const count = chart.classes.length, cells = [], rowSums = chart.counts.map((row) => row.reduce((a, b) => a + b, 0));
    chart.counts.forEach((row, i) => row.forEach((value, j) => {
      const share = rowSums[i] ? value / rowSums[i] : 0;
      cells.push({ value: [j, i, share, value], label: { color: share > 0.5 ? css("--card") : css("--ink") } });
    }));
    return baseOption({
      legend: { show: false },
      tooltip: {
        ...baseOption({}).tooltip,
        formatter: ({ value }) => {
          const box = document.createElement("div");
          box.textContent = `${chart.classes[value[1]]} classified as ${chart.classes[value[0]]}: ${value[3].toLocaleString("en")} (${(100 * value[2]).toFixed(1)} %)`;
          return box;
        },
      },
      grid: { left: 24, right: 16, top: 8, bottom: 8, containLabel: true },
      toolbox: { show: false },
      xAxis: axis({ type: "category", data: chart.classes, axisLabel: { color: css("--muted"), rotate: count > 5 ? 45 : 0, interval: 0, fontSize: count > 30 ? 8 : 11, width: 90, overflow: "truncate" } }),
      yAxis: axis({ type: "category", data: chart.classes, inverse: true, axisLabel: { color: css("--muted"), interval: 0, fontSize: count > 30 ? 8 : 11, width: 110, overflow: "truncate" } }),
      visualMap: { show: false, min: 0, max: 1, dimension: 2, inRange: { color: [css("--code"), palette()[0]] } },
      series: [{
        type: "heatmap", data: cells,
        label: { show: count <= 16, formatter: ({ value }) => (value[3] ? String(value[3]) : "") },
        itemStyle: { borderColor: css("--card"), borderWidth: 1 },
      }],
    });
  }

  function calibrationOption(chart) {
    const centres = chart.counts.map((_, i) => (chart.edges[i] + chart.edges[i + 1]) / 2);
    return baseOption({
      legend: { show: false },
      tooltip: {
        ...baseOption({}).tooltip, trigger: "axis",
        formatter: ([{ dataIndex: i }]) => `confidence ${format(chart.edges[i])} to ${format(chart.edges[i + 1])}: accuracy ${format(chart.accuracy[i]) || "unknown"}, ${format(chart.counts[i])} samples`,
      },
      xAxis: axis({ type: "category", data: centres.map((x) => x.toFixed(2)), name: "confidence", nameLocation: "middle", nameGap: 24, splitLine: { show: false } }),
      yAxis: axis({ type: "value", min: 0, max: 1, name: "accuracy" }),
      grid: { left: 8, right: 20, top: 40, bottom: 26, containLabel: true },
      series: [
        { type: "bar", data: chart.accuracy, barWidth: "92%", itemStyle: { color: palette()[0], opacity: 0.85 } },
        { type: "line", data: centres, showSymbol: false, silent: true, lineStyle: { color: css("--muted"), type: "dashed", width: 1.5 } },
      ],
    });
  }

  function memoryOption(chart) {
    const names = Object.keys(chart.categories);
    return baseOption({
      toolbox: { show: false },
      grid: { left: 8, right: 40, top: 60, bottom: 8, containLabel: true },
      tooltip: { ...baseOption({}).tooltip, trigger: "item", valueFormatter: (v) => `${format(v)} GiB` },
      legend: { ...baseOption({}).legend, right: 4 },
      xAxis: axis({ type: "value", name: "GiB", nameLocation: "end", nameGap: 4 }),
      yAxis: axis({ type: "category", data: [""] }),
      series: names.map((name) => ({ type: "bar", name, stack: "memory", data: [chart.categories[name]], barMaxWidth: 60 })),
    });
  }

  function historyOption(chart) {
    let best = null;
    const steps = chart.trials.map(([number, value]) => {
      if (best === null || (chart.mode === "max" ? value > best : value < best)) best = value;
      return [number, best];
    });
    return baseOption({
      tooltip: { ...baseOption({}).tooltip, trigger: "item", formatter: ({ value, seriesName }) => `trial ${value[0]}: ${seriesName === "best so far" ? "best " : ""}${format(value[1])}` },
      xAxis: axis({ type: "value", name: "trial", nameLocation: "middle", nameGap: 24, minInterval: 1, splitLine: { show: false } }),
      yAxis: axis({ type: "value", scale: true }),
      grid: { left: 8, right: 16, top: 34, bottom: 26, containLabel: true },
      series: [
        { type: "scatter", name: "trials", symbolSize: 8, data: chart.trials.map(([n, v]) => [n, v]) },
        { type: "line", name: "best so far", step: "end", showSymbol: false, data: steps, lineStyle: { width: 2 } },
      ],
    });
  }

  function parallelOption(chart) {
    const last = chart.keys.length - 1, objective = chart.rows.map((row) => row[last]);
    const low = Math.min(...objective), high = Math.max(...objective);
    const dimensions = chart.keys.map((key, index) => {
      const values = chart.rows.map((row) => row[index]);
      const numbers = values.filter((value) => value !== null);
      const isNumeric = numbers.length > 0 && numbers.every((value) => typeof value === "number");
      const isLog = isNumeric && chart.log[index] && Math.min(...numbers) > 0;
      const name = index < last ? key.split(".").slice(-2).join(".") : key;
      const shared = { dim: index, name, nameTextStyle: { color: css("--muted"), width: 110, overflow: "truncate" }, axisLabel: { color: css("--muted"), formatter: isNumeric ? shortNumber : undefined } };
      if (isNumeric) return { ...shared, type: isLog ? "log" : "value", scale: true };
      return { ...shared, type: "category", data: [...new Set(values.map((value) => JSON.stringify(value)))] };
    });
    const rows = chart.rows.map((row, i) => ({
      name: `trial ${chart.numbers[i]}`,
      value: row.map((value, index) => (dimensions[index].type === "category" ? JSON.stringify(value) : value ?? "-")),
    }));
    const colours = chart.mode === "max" ? [palette()[1], css("--muted"), palette()[0]] : [palette()[0], css("--muted"), palette()[1]];
    return baseOption({
      legend: { show: false },
      toolbox: { show: false },
      parallel: { left: 90, right: 90, top: 44, bottom: 24 },
      parallelAxis: dimensions,
      visualMap: { show: false, min: low, max: high > low ? high : low + 1, dimension: last, inRange: { color: colours } },
      series: [{ type: "parallel", data: rows, lineStyle: { width: 1.6, opacity: 0.8 }, smooth: false }],
    });
  }

  function paretoOption(chart) {
    const front = new Set(chart.front);
    const points = (isOnFront) => chart.points.filter((point) => front.has(point[2]) === isOnFront);
    const onFront = points(true).sort((a, b) => a[0] - b[0]);
    return baseOption({
      tooltip: { ...baseOption({}).tooltip, trigger: "item", formatter: ({ value }) => `trial ${value[2]}: ${format(value[0])}, ${format(value[1])}` },
      xAxis: axis({ type: "value", scale: true, name: chart.metrics[0], nameLocation: "middle", nameGap: 24 }),
      yAxis: axis({ type: "value", scale: true, name: chart.metrics[1] }),
      grid: { left: 8, right: 16, top: 44, bottom: 26, containLabel: true },
      series: [
        { type: "scatter", name: "trials", data: points(false), symbolSize: 8, itemStyle: { opacity: 0.6 } },
        { type: "line", name: "Pareto front", data: onFront, symbolSize: 9, lineStyle: { width: 2 } },
      ],
    });
  }

  function intervalsOption(chart) {
    const names = chart.groups.map((group) => group.name), runs = [], means = [];
    chart.groups.forEach((group, index) => {
      means.push({ value: [index, group.mean], low: group.low, high: group.high });
      for (const [label, value] of group.values) if (value !== null) runs.push({ value: [index, value], name: label });
    });
    const whisker = (params, api) => {
      const x = api.coord([api.value(0), 0])[0], low = api.coord([api.value(0), api.value(1)])[1], high = api.coord([api.value(0), api.value(2)])[1];
      const line = (x1, y1, x2, y2) => ({ type: "line", shape: { x1, y1, x2, y2 }, style: { stroke: palette()[1], lineWidth: 2 } });
      return { type: "group", children: [line(x, low, x, high), line(x - 8, low, x + 8, low), line(x - 8, high, x + 8, high)] };
    };
    return baseOption({
      tooltip: {
        ...baseOption({}).tooltip, trigger: "item",
        formatter: ({ name, value, seriesName }) => {
          const box = document.createElement("div");
          box.textContent = seriesName === "runs" ? `${name}: ${format(value[1])}` : `${names[value[0]]}: mean ${format(chart.groups[value[0]].mean)}, interval ${format(chart.groups[value[0]].low)} to ${format(chart.groups[value[0]].high)}`;
          return box;
        },
      },
      xAxis: axis({ type: "category", data: names, axisLabel: { color: css("--muted"), width: 320, overflow: "truncate" } }),
      yAxis: axis({ type: "value", scale: true }),
      legend: { ...baseOption({}).legend, data: ["runs", "mean"] },
      series: [
        { type: "custom", name: "interval", renderItem: whisker, data: chart.groups.map((group, index) => [index, group.low, group.high]), encode: { x: 0, y: [1, 2] } },
        { type: "scatter", name: "runs", data: runs, symbolSize: 8, itemStyle: { opacity: 0.75 } },
        { type: "scatter", name: "mean", data: means, symbol: "diamond", symbolSize: 13, itemStyle: { color: palette()[1] } },
      ],
    });
  }

  const OPTIONS = {
    confusion: confusionOption, calibration: calibrationOption, memory: memoryOption, history: historyOption,
    parallel: parallelOption, pareto: paretoOption, intervals: intervalsOption,
  };

  return { line: lineOption, ...OPTIONS };
};
