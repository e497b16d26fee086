(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  function themed(layout) {
    const copy = JSON.parse(JSON.stringify(layout));
    copy.paper_bgcolor = copy.plot_bgcolor = "rgba(0,0,0,0)";
    copy.font = { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("--fg") };
    copy.hoverlabel = { align: "left", bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--fg") } };
    copy.legend = Object.assign({ traceorder: "normal" }, copy.legend);
    for (const axis of ["xaxis", "yaxis"]) {
      copy[axis] = Object.assign({ gridcolor: colour("--grid"), zerolinecolor: colour("--muted"), linecolor: colour("--line"), automargin: true, tickfont: { size: 12 } }, copy[axis]);
      if (copy[axis].title) copy[axis].title.font = { size: 13, color: colour("--muted") };
    }
    return copy;
  }
  function draw() {
    for (const [id, figure] of Object.entries(figures)) {
      Plotly.react(id, figure.data, themed(figure.layout), { responsive: true, displayModeBar: false });
    }
  }
  draw();
  dark.addEventListener("change", draw);
})();
