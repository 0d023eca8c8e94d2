
// All rows of a run: search, sort, filter, one row in whole. Texts become text and never markup.
for (const box of document.querySelectorAll("[data-explorer]")) {
  const find = (name) => box.querySelector(`[data-${name}]`);
  const make = (tag, kind, text, ...parts) => {
    const element = document.createElement(tag);
    if (kind) element.className = kind;
    if (text) element.textContent = text;
    element.append(...parts);
    return element;
  };
  const shape = (tag, values) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(values)) element.setAttribute(name, value);
    return element;
  };
  const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(4);
  const score = (value) => (value === null ? "–" : signed(value));
  const short = (value) => (value === null || value === undefined ? "–" : String(+value.toPrecision(3)));
  const labels = new Map([[true, "target"], [false, "other"], [null, "no label"]]);
  const [search, set, label, query, low, high] =
    ["search", "set", "label", "query", "low", "high"].map(find);
  const [said, dialog, picture] = ["said", "row", "histogram"].map(find);

  const unpack = async () => {
    const text = document.getElementById(box.dataset.explorer).textContent.trim();
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).json();
  };

  const start = async () => {
    const data = await unpack();
    const { columns } = data;
    const rows = columns.score.map((_, n) => {
      const row = { n };
      for (const [name, values] of Object.entries(columns)) row[name] = values[n];
      row.together = row.score;
      row.text = `${row.asked}\n${row.said}`.toLowerCase();
      return row;
    });

    // what is left -----------------------------------------------------------------------------
    const chosen = () => (query && query.value !== "" ? +query.value : -1);
    const accept = () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const least = low.value === "" ? -Infinity : +low.value;
      const most = high.value === "" ? Infinity : +high.value;
      const isScored = low.value !== "" || high.value !== "";
      return (row) => words.every((word) => row.text.includes(word))
        && (set.value === "" || row.set === (set.value === "none" ? "" : set.value))
        && (!label || label.value === "" || labels.get(row.label) === label.value)
        && (!isScored || (row.score !== null && row.score >= least && row.score <= most));
    };
    const tell = () => {
      const left = grid.getDataCount("active");
      const text = `${left.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows`;
      // Which rows are on the page follows from the scores with all queries.
      const isPart = chosen() >= 0 && data.left_out > 0;
      said.textContent = text + (isPart ? "; rows that are left out may score higher with this query" : "");
    };
    const filter = () => { grid.setFilter(accept()); draw(); };

    // the histogram ----------------------------------------------------------------------------
    const [width, height] = [600, 90];
    let bars = data.histogram;
    const count = () => {
      if (chosen() < 0) return data.histogram;
      const known = rows.map((row) => row.score).filter((value) => value !== null);
      const [least, most] = known.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
      const counts = data.histogram.counts.map(() => 0);
      const size = (most - least) / counts.length || 1;
      for (const v of known) counts[Math.min(counts.length - 1, Math.floor((v - least) / size))] += 1;
      return { low: least, high: most, counts };
    };
    const at = (value) => width * (value - bars.low) / (bars.high - bars.low || 1);
    const draw = () => {
      const most = Math.log1p(Math.max(1, ...bars.counts)), wide = width / bars.counts.length;
      const [from, to] = [low.value === "" ? 0 : at(+low.value), high.value === "" ? width : at(+high.value)];
      const [left, right] = [Math.max(0, from), Math.min(width, to)];
      const isAll = low.value === "" && high.value === "";
      picture.replaceChildren(
        shape("rect", { class: "brush", x: left, y: 0, height, width: isAll ? 0 : Math.max(0, right - left) }),
        ...bars.counts.map((value, n) => {
          const tall = height * Math.log1p(value) / most;
          return shape("rect", { class: "bar", x: n * wide + 0.5, y: height - tall, width: wide - 1, height: tall });
        }));
      find("least").textContent = bars.low.toFixed(3);
      find("most").textContent = bars.high.toFixed(3);
    };
    const value = (event) => {
      const frame = picture.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - frame.left) / frame.width));
      return bars.low + share * (bars.high - bars.low);
    };
    let begun = null;
    const brush = (event) => {
      const [least, most] = [begun, value(event)].sort((a, b) => a - b);
      // Rounded outward; no bound at an end of the picture.
      low.value = least <= bars.low ? "" : (Math.floor(least * 1e4) / 1e4).toFixed(4);
      high.value = most >= bars.high ? "" : (Math.ceil(most * 1e4) / 1e4).toFixed(4);
      draw();
    };
    picture.addEventListener("pointerdown", (event) => {
      begun = value(event);
      picture.setPointerCapture(event.pointerId);
    });
    picture.addEventListener("pointermove", (event) => { if (begun !== null) brush(event); });
    picture.addEventListener("pointerup", (event) => {
      if (begun === null) return;
      const isClick = Math.abs(at(value(event)) - at(begun)) < 4;
      if (isClick) low.value = high.value = "";
      else brush(event);
      begun = null;
      filter();
    });
    picture.addEventListener("pointercancel", () => { begun = null; });

    // one row in whole ---------------------------------------------------------------------------
    const pieces = (tokens) => make("p", "tokens", "", ...tokens.map(([text, share, tone]) => {
      if (!tone) return document.createTextNode(text);
      const element = make("span", (tone > 0 ? "up" : "down") + Math.abs(tone), text);
      element.title = signed(share);
      return element;
    }));
    const explains = (row) => {
      if (!row.each) return [];
      const order = row.each.map((step, n) => [step * data.step, n]).sort((a, b) => b[0] - a[0]);
      const items = order.slice(0, 5).map(([cosine, n]) => {
        const button = make("button", "", `${signed(cosine)} ${data.queries[n][0].slice(0, 90) || data.queries[n][1].slice(0, 90)}`);
        button.type = "button";
        button.addEventListener("click", () => {
          shown = null;
          dialog.close();
          query.value = String(n);
          choose();
          query.focus();
        });
        return make("li", "", "", button);
      });
      return [make("h5", "", "The queries that this row explains most: choose one to see its rows"), make("ul", "explains", "", ...items)];
    };
    const chips = (row) => [row.set && `${row.set} set`, label && labels.get(row.label)]
      .filter(Boolean).map((text) => make("span", "chip", text));
    let shown = null;
    const show = (row) => {
      shown = row.getIndex();
      const one = row.getData(), told = data.tokens[one.n];
      const noise = one.sigma ? ` ± ${one.sigma.toFixed(4)}` : "";
      const body = [make("p", "score", `score ${score(one.together)}${noise}`, ...chips(one))];
      if (chosen() >= 0) body.push(make("p", "score", `score ${score(one.score)} with the chosen query`));
      // The chances are those of all queries together.
      if (chosen() < 0 && one.p !== undefined && one.p !== null) {
        body.push(make("p", "score", `${one.higher} of ${one.prompts} unrelated prompts score this high; p ${short(one.p)}, q ${short(one.q)}`));
      }
      if (told) {
        body.push(make("h5", "", "Tokens, by their share of the score"), pieces(told.row));
        body.push(make("h5", "", "Shares of the answer's tokens"), pieces(told.answer));
        if (told.alike) body.push(make("p", "score", `${told.alike} more rows are nearly the same.`));
      } else {
        body.push(make("p", "prompt", one.asked), make("p", "said", one.said));
      }
      body.push(...explains(one));
      find("heading").textContent = `Row ${one.line.toLocaleString("en")}${data.has_lines ? ` of ${one.file || "the file"}` : ""}`;
      find("body").replaceChildren(...body);
      find("body").scrollTop = 0;
      find("before").setAttribute("aria-disabled", String(!row.getPrevRow()));
      find("after").setAttribute("aria-disabled", String(!row.getNextRow()));
      if (!dialog.open) dialog.showModal();
    };
    const turn = (next) => { if (next) show(next); };
    find("before").addEventListener("click", () => turn(grid.getRow(shown).getPrevRow()));
    find("after").addEventListener("click", () => turn(grid.getRow(shown).getNextRow()));
    find("close").addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      if (shown === null) return;  // another query was chosen
      mark(shown);
      holder().focus({ preventScroll: true });
    });

    // the grid -----------------------------------------------------------------------------------
    const written = (write) => (cell) => document.createTextNode(write(cell.getValue()));
    const line = (text) => text.replace(/\s+/g, " ").slice(0, 300);
    const column = (title, field, write, more) => ({ title, field, formatter: written(write), formatterPrint: written(write), ...more });
    const number = { hozAlign: "right", sorter: "number", sorterParams: { alignEmptyValues: "bottom" } };
    const shownColumns = [
      column("Score", "score", score, { ...number, width: 96, responsive: 0 }),
      column("p", "p", short, { ...number, width: 80, responsive: 4 }),
      column("q", "q", short, { ...number, width: 80, responsive: 4 }),
      column("Set", "set", (text) => text || "–", { sorter: "string", width: 100, responsive: 2 }),
      column("Label", "label", (value) => labels.get(value), { sorter: "boolean", width: 90, responsive: 3 }),
      column("Row", "line", (value) => value.toLocaleString("en"), { ...number, width: 80, responsive: 1 }),
      column("File", "file", (text) => text, { sorter: "string", width: 120, responsive: 3 }),
      column("Asked", "asked", line, { sorter: "string", minWidth: 170, responsive: 2 }),
      column("Said", "said", line, { sorter: "string", minWidth: 170, responsive: 0 }),
    ].filter(({ field }) => field in columns && (field !== "label" || label));
    const grid = new Tabulator(find("grid"), {
      data: rows,
      index: "n",
      columns: shownColumns,
      columnDefaults: { headerSortTristate: false, resizable: false, headerSortStartingDir: "desc" },
      layout: "fitColumns",
      responsiveLayout: "hide",
      height: "26rem",
      placeholder: "No row matches.",
      initialSort: [{ column: "score", dir: "desc" }],
      printAsHtml: true,
      printStyled: false,
      printRowRange: () => grid.getRows("active").slice(0, 40),
    });
    // Rows that leave the view leave the document: the focus stays on what holds them.
    const holder = () => find("grid").querySelector(".tabulator-tableholder");
    let current = null;  // a row by its index: other scores make all rows again
    const mark = (index) => {
      const [before, row] = [current, index].map((n) => n !== null && grid.getRow(n));
      if (before) before.getElement().classList.remove("current");
      if (!row) return;
      current = index;
      const element = row.getElement();
      element.id = `${box.dataset.explorer}-${index}`;
      element.classList.add("current");
      holder().setAttribute("aria-activedescendant", element.id);
      grid.scrollToRow(row, "nearest", false).catch(() => {});
    };
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
    const press = (event) => {
      const every = grid.getRows("active");
      const place = every.findIndex((one) => one.getIndex() === current);
      if (event.key in step && every.length) {
        event.preventDefault();
        const next = place < 0 ? 0 : place + step[event.key];
        mark(every[Math.min(every.length - 1, Math.max(0, next))].getIndex());
      } else if (place >= 0 && (event.key === "Enter" || event.key === " ")) {
        event.preventDefault();
        show(every[place]);
      }
    };
    const sortable = (one) => {
      const element = one.getElement();
      element.tabIndex = 0;
      element.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        grid.setSort(one.getField(), element.getAttribute("aria-sort") === "descending" ? "asc" : "desc");
      });
    };
    const choose = async () => {
      const place = chosen();
      for (const row of rows) row.score = place < 0 ? row.together : row.each && row.each[place] * data.step;
      low.value = high.value = "";
      bars = count();
      for (const name of ["p", "q"]) {
        if (name in columns) grid[place < 0 ? "showColumn" : "hideColumn"](name);
      }
      await grid.replaceData(rows);
      grid.setSort("score", "desc");
      filter();
    };

    // rows as a file -----------------------------------------------------------------------------
    const plain = (text) => (/^[=+\-@\t\r]/.test(text) && !Number.isFinite(+text) ? `'${text}` : text);
    // Texts stand in quotes: some programs divide cells at semicolons or tabs too.
    const cell = (held) => (typeof held === "string" ? `"${plain(held).replaceAll('"', '""')}"` : String(held ?? ""));
    find("save").addEventListener("click", () => {
      // The noise and the chances are those of all queries together.
      const more = chosen() < 0 ? ["sigma", "p", "q"] : [];
      const names = ["line", "file", "id", "score", ...more, "set", "label", "asked", "said"].filter((name) => name in columns);
      const lines = grid.getRows("active").map((row) => names.map((name) => cell(row.getData()[name])).join(","));
      const place = URL.createObjectURL(new Blob(["\ufeff", [names.join(","), ...lines, ""].join("\n")], { type: "text/csv" }));
      const link = make("a");
      link.href = place;
      link.download = chosen() < 0 ? "rows.csv" : `rows-query-${chosen() + 1}.csv`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(place), 10000);
    });

    grid.on("tableBuilt", () => {
      find("grid").setAttribute("aria-label", "All rows");
      for (const one of grid.getColumns()) sortable(one);
      holder().setAttribute("aria-label", "Rows: arrow keys move, Enter opens one");
      holder().addEventListener("keydown", press);
      grid.on("rowClick", (_, row) => show(row));
      grid.on("dataFiltered", () => setTimeout(tell));
      let waiting = 0;
      const later = () => { clearTimeout(waiting); waiting = setTimeout(filter, 120); };
      for (const input of [search, low, high]) input.addEventListener("input", later);
      for (const choice of [set, label]) if (choice) choice.addEventListener("change", filter);
      if (query) query.addEventListener("change", choose);
      find("clear").addEventListener("click", () => {
        for (const input of [search, set, label, low, high]) if (input) input.value = "";
        filter();
      });
      const part = box.closest("details");
      if (part) part.addEventListener("toggle", () => { if (part.open) grid.redraw(true); });
      find("controls").hidden = false;
      find("waiting").hidden = true;
      draw();
      tell();
    });
  };
  // What is in view comes first.
  const begin = () => start().catch((error) => {
    find("waiting").textContent = `The rows cannot be shown here: ${error.message}`;
  });
  addEventListener("load", () => (window.requestIdleCallback || setTimeout)(begin));
}
