// The report's own code. Text from data reaches the page as textContent alone, never as markup.
(async () => {
  const shortNumber = (value) => String(Number(value.toPrecision(4)));
  const at = (id) => document.getElementById(id);
  const make = (tag, text, attributes = {}) => {
    const made = document.createElement(tag);
    if (text !== undefined && text !== null) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  const trouble = (text) => { at('trouble').textContent = text; at('trouble').hidden = false; };

  // ------------------------------------------------------------------ what the file holds

  const bytesOf = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  async function unpacked(base64) {
    const stream = new Blob([bytesOf(base64)]).stream().pipeThrough(new DecompressionStream('gzip'));
    return JSON.parse(await new Response(stream).text());
  }
  let data;
  try {
    data = await unpacked(at('data').textContent);
  } catch (error) {
    trouble(`This page is damaged or this browser is too old to read it (${error}).`);
    return;
  }
  at('data').remove();
  const floats = (text) => new Float32Array(bytesOf(text).buffer);
  const integers = (text) => new Int32Array(bytesOf(text).buffer);
  const n = data.ids.length;
  data.rows = integers(data.rows);
  // A column is known by its number: it may be called as the score of a map, or anything.
  data.columns.forEach((column, number) => {
    column.key = String(number);
    if (column.codes) column.codes = integers(column.codes);
    if (column.kind === 'number') {
      column.numbers = column.values.map((text) => (text !== '' && Number.isFinite(Number(text)) ? Number(text) : null));
    }
  });
  const label = data.label === null ? null : data.columns[data.label];
  const said = data.columns.find((c) => c.name === 'text');
  for (const map of data.maps) {
    map.coords = floats(map.coords);
    frame(map);
    map.scores = new Map(map.scores);
    if (map.kept) {
      const numbers = Array.from(floats(map.kept), (v) => (Number.isFinite(v) ? v : null));
      map.column = { key: 'kept', name: 'near rows kept', kind: 'number', numbers, ends: ['0', '1'],
        values: numbers.map((v) => (v === null ? '' : shortNumber(v))) };
    }
  }
  for (const graph of data.graphs) {
    graph.indices = integers(graph.indices);
    graph.distances = floats(graph.distances);
  }

  // Every map is shown in the same frame, its middle at 0 and its reach 100.
  function frame(map) {
    const low = new Array(map.dims).fill(Infinity);
    const high = new Array(map.dims).fill(-Infinity);
    map.coords.forEach((value, i) => {
      const axis = i % map.dims;
      low[axis] = Math.min(low[axis], value);
      high[axis] = Math.max(high[axis], value);
    });
    map.middle = low.map((value, axis) => (value + high[axis]) / 2);
    const half = low.map((value, axis) => (high[axis] - value) / 2);
    map.reach = Math.max(...half) || 1;
    map.half = half.map((value) => (value / map.reach) * 100);
  }
  const place = (map, i, target = [0, 0, 0]) => {
    for (let axis = 0; axis < 3; axis += 1) {
      target[axis] = axis < map.dims
        ? ((map.coords[i * map.dims + axis] - map.middle[axis]) / map.reach) * 100 : 0;
    }
    return target;
  };

  const textOf = (column, i) => (column.kind === 'class' ? column.values[column.codes[i]] ?? '' : column.values[i]);

  // ------------------------------------------------------------------ state

  const state = {
    map: data.maps[data.first],
    color: data.color,
    hidden: new Set(),
    chosen: -1,
    hover: -1,
    selected: new Set(),
    found: null, // a Set while something is searched for
    lasso: false,
    named: true,
  };
  const shades = new Uint8ClampedArray(n * 4);
  let shown = new Uint8Array(n).fill(1);
  let version = 0;

  const columnsToColor = () => [
    ...data.columns.filter((c) => c.kind !== 'text'),
    ...(state.map.column ? [state.map.column] : []),
  ];
  const columnOf = (key) => columnsToColor().find((c) => c.key === key) ?? null;
  const rgb = (hex) => [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
  const palette = data.palette.map(rgb);
  const others = () => rgb(isDark() ? '#555b61' : data.other);
  const ramps = data.ramps.map((ramp) => ramp.map(rgb));
  const rampOf = () => ramps[isDark() ? 1 : 0];

  // Classes by number of samples; those past the palette share grey, as in the pictures.
  function classes(column) {
    if (column.classes) return column.classes;
    const counts = new Array(column.values.length).fill(0);
    let without = 0;
    for (const code of column.codes) {
      if (code >= 0) counts[code] += 1;
      else without += 1;
    }
    const order = counts.map((_, code) => code).filter((code) => counts[code] > 0);
    const common = [...order].sort((a, b) => counts[b] - counts[a] || a - b);
    const few = order.length <= palette.length;
    const usable = few ? palette : palette.filter((_, i) => !data.greys.includes(i));
    const colored = new Set(common.slice(0, usable.length));
    const shade = new Map();
    order.filter((code) => colored.has(code)).forEach((code, i) => shade.set(code, usable[i]));
    counts[-1] = without; // of those without a value, the last in the legend
    column.classes = { counts, shade, order: [...(few ? order : common), ...(without ? [-1] : [])] };
    return column.classes;
  }

  function paint() {
    const column = columnOf(state.color);
    const grey = others();
    const focus = state.found ?? (state.selected.size ? state.selected : null);
    const ramp = rampOf();
    let low = 0;
    let high = 1;
    if (column && column.kind === 'number') [low, high] = range(column);
    for (let i = 0; i < n; i += 1) {
      let shade = palette[0];
      shown[i] = 1;
      if (column && column.kind === 'class') {
        const code = column.codes[i];
        shade = classes(column).shade.get(code) ?? grey;
        if (state.hidden.has(code)) shown[i] = 0;
      } else if (column) {
        const value = column.numbers[i];
        shade = value === null ? grey
          : ramp[Math.round(((value - low) / (high - low || 1)) * (ramp.length - 1))];
      }
      shades.set(shade, i * 4);
      shades[i * 4 + 3] = !shown[i] ? 0 : focus && !focus.has(i) ? (isDark() ? 70 : 40) : n > 20000 ? 170 : 220;
    }
    version += 1;
    plot?.paint(shades);
  }
  const range = (column) => column.ends.map(Number);

  // ------------------------------------------------------------------ the map

  const calm = matchMedia('(prefers-reduced-motion: reduce)');
  const stage = at('map');
  const isDark = () => document.documentElement.classList.contains('dark');
  let plot = null;
  let whole = true; // all is shown, and shall be when the window changes
  function fit() {
    if (!plot) return;
    const [width, height] = plot.size;
    const [x, y] = state.map.dims === 3 ? [125, 125] : state.map.half;
    const scale = Math.min((width - 40) / (2 * Math.max(x, 1)), (height - 40) / (2 * Math.max(y, 1)));
    plot.look({ x: 0, y: 0, zoom: Math.log2(Math.max(scale, 0.1)) });
    fitted = plot.view.zoom;
    whole = true;
  }
  let fitted = 0;
  const radius = () => Math.min(6, Math.max(1.6, 160 / Math.sqrt(n))) * 2 ** (Math.max(0, plot.view.zoom - fitted) / 4);

  // What stands above the points: the chosen one, its neighbours, the one under the mouse, names.
  function above(context) {
    const place = plot.placer();
    const ink = isDark() ? '#ffffff' : '#141414';
    const ring = (i, more, width, color) => {
      context.beginPath();
      context.arc(...place(i), radius() + more, 0, 2 * Math.PI);
      context.lineWidth = width;
      context.strokeStyle = color;
      context.stroke();
    };
    if (state.chosen >= 0) {
      const near = neighbors(state.chosen).map(({ index }) => index);
      context.globalAlpha = 0.45;
      context.lineWidth = 1;
      context.strokeStyle = ink;
      for (const i of near) {
        context.beginPath();
        context.moveTo(...place(state.chosen));
        context.lineTo(...place(i));
        context.stroke();
      }
      context.globalAlpha = 1;
      for (const i of near) ring(i, 2.5, 1.2, ink);
      ring(state.chosen, 4.5, 2.5, '#dc1e1e');
    }
    if (state.hover >= 0) ring(state.hover, 2.5, 1.8, ink);
    if (!state.named || state.map.dims === 3) return;
    context.font = '700 14px system-ui, sans-serif';
    context.textAlign = 'center';
    context.textBaseline = 'middle';
    context.lineJoin = 'round';
    context.lineWidth = 4;
    context.strokeStyle = isDark() ? '#101214' : '#ffffff';
    context.fillStyle = ink;
    written = laidOut(names(), context, place);
    for (const { text, x, y } of written) {
      context.strokeText(text, x, y);
      context.fillText(text, x, y);
    }
  }
  // The names of the largest classes first, each where no other stands and within the map, or not.
  let written = [];
  function laidOut(wanted, context, place) {
    const [width, height] = plot.size;
    const made = [];
    for (const { index, text } of wanted) {
      const [px, py] = place(index);
      if (px < 0 || py < 0 || px > width || py > height) continue;
      const half = context.measureText(text).width / 2 + 3;
      const x = Math.min(Math.max(px, half), width - half);
      for (const by of [0, -18, 18, -36, 36]) {
        const y = Math.min(Math.max(py + by, 10), height - 10);
        if (made.some((other) => Math.abs(other.x - x) < other.half + half && Math.abs(other.y - y) < 18)) continue;
        made.push({ text, x, y, half });
        break;
      }
    }
    return made;
  }

  // Each class by name at its most central sample, where the classes are few enough to read.
  const NAMED_MOST = 24;
  let named = { key: null, names: [] };
  function names() {
    const key = `${state.map.name} ${version}`;
    if (named.key !== key) named = { key, names: nameClasses() };
    return named.names;
  }
  function nameClasses() {
    const column = columnOf(state.color);
    if (!column || column.kind !== 'class') return [];
    const { order, counts, shade } = classes(column);
    const members = new Map();
    for (let i = 0; i < n; i += 1) {
      const code = column.codes[i];
      if (!shown[i] || !shade.has(code)) continue;
      if (!members.has(code)) members.set(code, []);
      members.get(code).push(i);
    }
    if (members.size > NAMED_MOST) return [];
    const map = state.map;
    const named = order.filter((code) => members.has(code) && counts[code] >= 5);
    return named.sort((a, b) => counts[b] - counts[a]).map((code) => {
      const own = members.get(code);
      const step = Math.ceil(own.length / 150);
      const some = own.filter((_, k) => k % step === 0).map((i) => [i, ...place(map, i)]);
      let best = -1;
      let least = Infinity;
      for (const [index, x, y] of some) {
        // The least sum of distances, not of squares: between two clusters there is no sample.
        const far = some.reduce((sum, [, x2, y2]) => sum + Math.hypot(x - x2, y - y2), 0);
        if (far < least) [best, least] = [index, far];
      }
      const text = column.values[code];
      return { index: best, text: text.length > 24 ? `${text.slice(0, 23)}\u2026` : text };
    });
  }
  const draw = () => plot?.draw();
  const places = new Map();
  function go(map, milliseconds) {
    if (!plot) return;
    if (!places.has(map.name)) {
      const made = new Float32Array(n * 3);
      const target = [0, 0, 0];
      for (let i = 0; i < n; i += 1) made.set(place(map, i, target), i * 3);
      places.set(map.name, made);
    }
    plot.move(places.get(map.name), map.dims, milliseconds);
  }
  function start() {
    try {
      plot = new Plot(stage, n, {
        over: hover,
        clicked: (i) => { choose(i); if (i >= 0) at('card').scrollIntoView({ block: 'nearest' }); },
        drawn: above,
        viewed: () => { whole = false; },
      });
      plot.radius = radius;
    } catch (error) {
      trouble(`The map cannot be drawn (${error.message}). The tables below still work.`);
    }
  }
  const screen = (i) => plot.place(i);

  function hover(index, x, y) {
    const tip = at('tip');
    const i = index >= 0 && shown[index] ? index : -1;
    if (i !== state.hover) {
      state.hover = i;
      draw();
      if (i >= 0) tip.replaceChildren(...about(i, 96, 6));
    }
    tip.hidden = i < 0;
    if (i < 0) return;
    const [width, height] = plot.size;
    tip.style.left = `${Math.max(4, Math.min(x + 14, width - tip.offsetWidth - 6))}px`;
    tip.style.top = `${y + 18 + tip.offsetHeight > height ? Math.max(4, y - tip.offsetHeight - 12) : y + 18}px`;
  }

  // ------------------------------------------------------------------ samples

  const sheets = new Map(); // number of a sheet -> address of its bytes
  function picture(i, px) {
    if (!data.thumbnails) return null;
    const { tile, across, rows } = data.thumbnails;
    const number = Math.floor(i / (across * across));
    if (!sheets.has(number)) {
      const blob = new Blob([bytesOf(at(`sheet-${number}`).textContent)], { type: 'image/webp' });
      sheets.set(number, URL.createObjectURL(blob));
    }
    const k = i % (across * across);
    const made = make('div', null, { class: 'picture', role: 'img', 'aria-label': `picture of ${data.ids[i]}` });
    const scale = px / tile;
    made.style.width = made.style.height = `${px}px`;
    made.style.backgroundImage = `url(${sheets.get(number)})`;
    made.style.backgroundSize = `${across * px}px ${rows[number] * px}px`;
    made.style.backgroundPosition = `${-(k % across) * px}px ${-Math.floor(k / across) * px}px`;
    if (scale >= 2) made.style.imageRendering = 'pixelated';
    return made;
  }
  function about(i, px, most) {
    const made = [];
    const image = picture(i, px);
    if (image) made.push(image);
    made.push(make('strong', data.ids[i]));
    const list = make('dl');
    const rest = data.columns.filter((c) => c !== said);  // what a sample is comes before the rest
    const columns = [said, ...rest, state.map.column].filter(Boolean);
    for (const column of columns.slice(0, most)) {
      const text = textOf(column, i);
      if (text !== '') list.append(make('dt', column.name), make('dd', text, { dir: 'auto' }));
    }
    made.push(list);
    return made;
  }
  function neighbors(i) {
    const graph = data.graphs[state.map.graph];
    if (!graph) return [];
    const made = [];
    for (let j = i * graph.k; j < (i + 1) * graph.k; j += 1) {
      made.push({ index: graph.indices[j], distance: graph.distances[j] });
    }
    return made;
  }
  function choose(index) {
    state.chosen = index >= 0 ? index : -1;
    const near = at('near');
    const found = index < 0 ? [] : neighbors(index);
    near.replaceChildren();
    at('near-title').hidden = at('near-what').hidden = found.length === 0;
    at('card').hidden = index < 0;
    if (index < 0) {
      at('chosen').replaceChildren(make('p', 'Choose a point to see it here, with its nearest neighbours among the embeddings.', { class: 'hint' }));
    } else {
      at('chosen').replaceChildren(...about(index, 160, 60));
      at('card').firstElementChild.replaceChildren(...about(index, 48, 2));
      if (found.length) {
        at('near-title').textContent = `The ${found.length} nearest neighbours`;
        at('near-what').textContent = data.graphs[state.map.graph].title;
        for (const { index: other, distance } of found) {
          const item = make('li');
          const button = sampleButton(other);
          button.append(make('span', shortNumber(distance), { class: 'count' }));
          item.append(button);
          near.append(item);
        }
      }
      say(`Chosen: ${[data.ids[index], ...(label ? [textOf(label, index)] : [])].filter(Boolean).join(', ')}${unhide(index)}`);
    }
    draw();
  }
  // What is chosen is seen: its class is shown again where it was hidden, and that is said.
  function unhide(index) {
    const column = columnOf(state.color);
    if (shown[index] || column?.kind !== 'class') return '';
    state.hidden.delete(column.codes[index]);
    refreshLegend();
    paint();
    return `; ${textOf(column, index) || '(none)'} is shown again`;
  }
  function sampleButton(i) {
    const button = make('button', null, { type: 'button' });
    const image = picture(i, 32);
    if (image) button.append(image);
    const short = (said && textOf(said, i)) || data.ids[i].split('/').pop() || data.ids[i];
    const text = [short, ...(label ? [textOf(label, i)] : [])].filter(Boolean).join(' \u00b7 ');
    button.append(make('span', text, { class: 'name', title: data.ids[i], dir: 'auto' }));
    button.addEventListener('click', () => {
      const list = button.closest('#near');
      const place = list ? [...list.children].indexOf(button.parentElement) : -1;
      choose(i);
      if (list) (list.querySelectorAll('button')[place] ?? at('chosen')).focus({ preventScroll: true });
      else toMap();
    });
    return button;
  }
  // Where the map and the rest do not fit on the screen together.
  function toMap() {
    if (getComputedStyle(at('card')).display === 'none') return;
    at('stage').scrollIntoView({ block: 'nearest' });
    at('card').scrollIntoView({ block: 'nearest' });
  }
  at('to-side').addEventListener('click', () => {
    at('side').scrollIntoView({ block: 'start' });
    at('chosen').focus({ preventScroll: true });
  });
  const say = (text) => { at('say').textContent = text; };

  // ------------------------------------------------------------------ controls

  function listMaps() {
    at('maps').replaceChildren(...data.maps.map((map) => {
      const label = make('label');
      const radio = make('input', null, { type: 'radio', name: 'map', value: map.name });
      radio.checked = map === state.map;
      radio.addEventListener('change', () => {
        const turned = map.dims === 3 !== (state.map.dims === 3);
        state.map = map;
        go(map, calm.matches ? 0 : 700);
        if (turned || whole) fit();
        listColors();
        listLegend();
        noteMap();
        paint();
        choose(state.chosen);
        say(`Map: ${[map.title, map.note].filter(Boolean).join(', ')}`);
      });
      label.append(radio, ` ${map.title}`);
      return label;
    }));
  }
  function noteMap() {
    at('map-note').textContent = state.map.note;
    at('map-note').hidden = state.map.note === '';
  }
  function listColors() {
    const options = [...columnsToColor().map((c) => [c.key, c.name]), ['', 'nothing']];
    if (!options.some(([key]) => key === state.color)) state.color = '';
    at('color').replaceChildren(...options.map(([key, name]) => make('option', name, { value: key })));
    at('color').value = state.color;
  }
  function listLegend() {
    const column = columnOf(state.color);
    const legend = at('legend');
    legend.replaceChildren();
    at('legend-title').textContent = column ? column.name : 'One colour';
    at('show-all').hidden = state.hidden.size === 0;
    at('legend-keys').textContent = column?.kind === 'class'
      ? 'Arrows go from class to class, Enter hides or shows one, O shows it alone.' : '';
    if (column && column.kind === 'number') {
      const ramp = rampOf();
      const canvas = make('canvas', null, { id: 'ramp', width: ramp.length, height: 1, role: 'img', 'aria-label': 'scale of colours' });
      const context = canvas.getContext('2d');
      ramp.forEach((shade, i) => { context.fillStyle = `rgb(${shade})`; context.fillRect(i, 0, 1, 1); });
      const ends = make('p', null, { class: 'row' });
      const brief = range(column).map(shortNumber);
      ends.append(...(brief[0] === brief[1] ? column.ends : brief).map((text) => make('span', text, { class: 'count' })));
      legend.append(canvas, ends);
    } else if (column) {
      const { counts, shade, order } = classes(column);
      for (const code of order) {
        const line = make('div', null, { class: 'class' });
        const button = make('button', null, { type: 'button', class: 'line', 'aria-keyshortcuts': 'O', title: 'Click to hide or show, double click (or O) to show alone' });
        const swatch = make('span', null, { class: 'swatch' });
        swatch.style.background = `rgb(${shade.get(code) ?? others()})`;
        const name = column.values[code] ?? '(none)';
        button.append(swatch, make('span', name, { class: 'name', title: name }), make('span', counts[code].toLocaleString('en'), { class: 'count' }));
        button.dataset.code = code;
        button.addEventListener('click', () => {
          if (!state.hidden.delete(code)) state.hidden.add(code);
          refreshLegend();
          paint();
        });
        const alone = () => {
          state.hidden = new Set(order.filter((other) => other !== code));
          refreshLegend();
          paint();
          say(`${name} alone is shown`);
        };
        button.addEventListener('dblclick', alone);
        button.addEventListener('keydown', (event) => {
          if (event.key.toLowerCase() === 'o' && !event.ctrlKey && !event.metaKey && !event.altKey) alone();
        });
        // No stop for Tab: the key does the same.
        const only = make('button', 'only', { type: 'button', class: 'alone', tabindex: '-1', 'aria-label': `Show ${name} alone` });
        only.addEventListener('click', alone);
        line.append(button, only);
        legend.append(line);
      }
      rove(legend, '.line');
      refreshLegend();
    }
  }
  function refreshLegend() {
    for (const button of at('legend').querySelectorAll('.line')) {
      button.setAttribute('aria-pressed', String(!state.hidden.has(Number(button.dataset.code))));
    }
    at('show-all').hidden = state.hidden.size === 0;
  }
  // One stop for Tab in a list however long; arrows, Home and End go on from there.
  function rove(list, which = 'button') {
    const all = [...list.querySelectorAll(which)];
    all.forEach((one, number) => { one.tabIndex = number ? -1 : 0; });
    list.onkeydown = (event) => {
      const from = all.indexOf(document.activeElement);
      const to = { ArrowDown: from + 1, ArrowUp: from - 1, PageDown: from + 10, PageUp: from - 10, Home: 0, End: all.length - 1 }[event.key];
      if (from < 0 || to === undefined) return;
      all[Math.min(all.length - 1, Math.max(0, to))].focus();
      event.preventDefault();
    };
    for (const one of all) {
      one.addEventListener('focus', () => {
        for (const other of list.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
        one.tabIndex = 0;
      });
    }
  }
  at('color').addEventListener('change', () => {
    state.color = at('color').value;
    state.hidden.clear();
    listLegend();
    paint();
  });
  at('show-all').addEventListener('click', () => {
    const back = document.activeElement === at('show-all');
    state.hidden.clear();
    refreshLegend();
    paint();
    if (back) at('legend').querySelector('[tabindex="0"]')?.focus({ preventScroll: true });
  });

  let haystack = null;
  function search() {
    const wanted = at('search').value.trim().toLowerCase();
    haystack ??= data.ids.map((id, i) => [id, ...data.columns.map((c) => textOf(c, i))].join('\n').toLowerCase());
    state.found = wanted ? new Set(haystack.flatMap((text, i) => (text.includes(wanted) ? [i] : []))) : null;
    const found = state.found ?? new Set();
    at('found').textContent = wanted ? `${found.size.toLocaleString('en')} found` : '';
    at('select-found').hidden = found.size === 0;
    const items = [...found].slice(0, 50).map((i) => {
      const item = make('li');
      item.append(sampleButton(i));
      return item;
    });
    at('matches').replaceChildren(...items);
    rove(at('matches'));
    paint();
  }
  let typing = 0;
  at('search').addEventListener('input', () => { clearTimeout(typing); typing = setTimeout(search, n > 5000 ? 150 : 0); });
  at('search').addEventListener('keydown', (event) => {
    if (event.key !== 'Enter') return;
    clearTimeout(typing);
    search();
    if (!state.found?.size) return;
    choose(state.found.values().next().value);
    toMap();
  });
  at('select-found').addEventListener('click', (event) => {
    const found = state.found;
    at('search').value = '';
    search();
    select(found);
    toSelection(event);
  });

  // ------------------------------------------------------------------ selection

  const ROWS_SHOWN = 200;
  // Where the button that was pressed is gone: by key to the table, by mouse without scrolling there.
  const toSelection = (event) => at('selection').focus({ preventScroll: event.detail > 0 });
  function select(rows) {
    state.selected = new Set([...rows].sort((a, b) => a - b));
    const count = state.selected.size;
    at('counted').textContent = count
      ? `${count.toLocaleString('en')} of ${n.toLocaleString('en')} selected${count > ROWS_SHOWN ? `, the first ${ROWS_SHOWN} are listed` : ''}`
      : 'Nothing is selected: draw a lasso, search, or take all that is in view.';
    for (const button of document.querySelectorAll('.of-selection')) button.disabled = count === 0;
    const table = at('table');
    table.hidden = count === 0;
    const head = make('tr');
    head.append(...(data.thumbnails ? [make('th', 'picture', { scope: 'col' })] : []), make('th', 'id', { scope: 'col' }),
      ...data.columns.map((c) => make('th', c.name, { scope: 'col', class: c.is_number ? 'number' : '' })));
    table.tHead.replaceChildren(head);
    const rowsShown = [...state.selected].slice(0, ROWS_SHOWN).map((i) => {
      const row = make('tr');
      if (data.thumbnails) {
        const cell = make('td');
        cell.append(picture(i, 32));
        row.append(cell);
      }
      const cell = make('td');
      const button = make('button', data.ids[i], { type: 'button' });
      button.addEventListener('click', () => { choose(i); at('map').focus(); });
      cell.append(button);
      row.append(cell, ...data.columns.map((c) => make('td', textOf(c, i), c.is_number ? { class: 'number' } : { dir: 'auto' })));
      return row;
    });
    table.tBodies[0].replaceChildren(...rowsShown);
    rove(table.tBodies[0]);
    paint();
  }
  // Texts are made inert: to a spreadsheet none is a formula. Numbers stand as they are.
  const inert = (text) => (/^[=+\-@\t\r\n]/.test(text) ? `'${text}` : text);
  const cells = () => [
    ['embedx_row', 'id', ...data.columns.map((c) => inert(c.name))],
    ...[...state.selected].map((i) => [String(data.rows[i]), inert(data.ids[i]),
      ...data.columns.map((c) => (c.is_number ? textOf(c, i) : inert(textOf(c, i))))]),
  ];
  // Quotes as in RFC 4180.
  const csvCell = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const csv = () => cells().map((row) => row.map(csvCell).join(',')).join('\r\n') + '\r\n';
  async function copy(text, what) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = make('textarea', text);
      document.body.append(area);
      area.select();
      document.execCommand('copy');
      area.remove();
    }
    say(`${what} copied`);
    at('counted').textContent = `${what} copied`;
  }
  at('copy-ids').addEventListener('click', () => copy([...state.selected].map((i) => data.ids[i]).join('\n'), 'Ids'));
  at('copy-table').addEventListener('click', () => copy(cells().map((row) => row.map((text) => text.replace(/[\t\r\n]+/g, ' ')).join('\t')).join('\n'), 'Table'));
  at('csv').addEventListener('click', () => {
    const link = make('a', null, { download: 'selection.csv' });
    link.href = URL.createObjectURL(new Blob([csv()], { type: 'text/csv' }));
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  });
  at('clear').addEventListener('click', (event) => {
    select([]);
    toSelection(event);
  });
  function selectInView() {
    const placed = plot.placer();
    const [width, height] = plot.size;
    const inside = [];
    for (let i = 0; i < n; i += 1) {
      if (!shown[i]) continue;
      const [x, y] = placed(i);
      if (x >= 0 && y >= 0 && x <= width && y <= height) inside.push(i);
    }
    select(inside);
    say(at('counted').textContent);
  }
  at('select-view').addEventListener('click', () => { if (plot) selectInView(); });

  // ------------------------------------------------------------------ lasso

  const sheet = at('lasso');
  const polygon = sheet.querySelector('polygon');
  let path = null;
  function lassoOn(on) {
    state.lasso = on;
    path = null;
    polygon.setAttribute('points', '');
    sheet.classList.toggle('on', on);
    at('tool-lasso').setAttribute('aria-pressed', String(on));
  }
  at('tool-lasso').addEventListener('click', () => lassoOn(!state.lasso));
  const spot = (event) => {
    const box = sheet.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  sheet.addEventListener('pointerdown', (event) => {
    event.preventDefault();
    sheet.setPointerCapture(event.pointerId);
    path = [spot(event)];
  });
  sheet.addEventListener('pointermove', (event) => {
    if (!path) return;
    path.push(spot(event));
    polygon.setAttribute('points', path.join(' '));
  });
  const finish = (event) => {
    if (!path) return;
    const drawn = path;
    lassoOn(false);
    if (event.type === 'pointerup' && drawn.length > 2) {
      const inside = within(drawn);
      select(event.shiftKey ? [...state.selected, ...inside] : inside);
    }
  };
  sheet.addEventListener('pointerup', finish);
  sheet.addEventListener('pointercancel', finish);
  function within(shape) {
    const placed = plot.placer();
    const found = [];
    for (let i = 0; i < n; i += 1) {
      if (!shown[i]) continue;
      const [x, y] = placed(i);
      let odd = false;
      for (let a = 0, b = shape.length - 1; a < shape.length; b = a, a += 1) {
        const [x1, y1] = shape[a];
        const [x2, y2] = shape[b];
        if (y1 > y !== y2 > y && x < ((x2 - x1) * (y - y1)) / (y2 - y1) + x1) odd = !odd;
      }
      if (odd) found.push(i);
    }
    return found;
  }

  // ------------------------------------------------------------------ keys and buttons

  at('names').addEventListener('click', () => {
    state.named = !state.named;
    at('names').setAttribute('aria-pressed', String(state.named));
    draw();
  });
  at('zoom-in').addEventListener('click', () => plot?.zoom(0.7));
  at('zoom-out').addEventListener('click', () => plot?.zoom(-0.7));
  at('fit').addEventListener('click', fit);
  stage.addEventListener('keydown', (event) => {
    const ways = { ArrowLeft: [40, 0], ArrowRight: [-40, 0], ArrowUp: [0, 40], ArrowDown: [0, -40] };
    if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in ways) plot.pan(...ways[event.key]);
    else if (event.key === '+' || event.key === '=') plot.zoom(0.5);
    else if (event.key === '-') plot.zoom(-0.5);
    else if (event.key === '0') fit();
    else if (event.key.toLowerCase() === 'l') lassoOn(!state.lasso);
    else if (event.key.toLowerCase() === 's') selectInView();
    else if (event.key === 'Enter') stepToNearest();
    else if (event.key === 'Escape') {
      if (state.lasso) return; // let go of below, wherever the focus is
      if (state.chosen >= 0) choose(-1);
      else select([]);
    } else return;
    event.preventDefault();
  });
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && state.lasso) lassoOn(false);
  });
  // From the chosen sample to its nearest neighbour not seen on the way; without one, to the middle.
  const seen = new Set();
  function stepToNearest() {
    if (state.chosen < 0) {
      seen.clear();
      const [width, height] = plot.size;
      choose(plot.at(width / 2, height / 2, Infinity));
    } else {
      const next = neighbors(state.chosen).find(({ index }) => !seen.has(index) && shown[index]);
      if (next) choose(next.index);
      else seen.clear();
    }
    if (state.chosen >= 0) seen.add(state.chosen);
  }
  function dark(on) {
    document.documentElement.classList.toggle('dark', on);
    at('theme').setAttribute('aria-pressed', String(on));
    listLegend();
    paint();
  }
  at('theme').addEventListener('click', () => dark(!document.documentElement.classList.contains('dark')));
  new ResizeObserver(() => (whole ? fit() : draw())).observe(stage);

  // ------------------------------------------------------------------ tables

  function table(heads, rows, what) {
    const made = make('table', null, { 'aria-label': what });
    const head = make('tr');
    head.append(...heads.map((text) => make('th', text, { scope: 'col' })));
    made.createTHead().append(head);
    const body = made.createTBody();
    for (const row of rows) {
      const line = make('tr');
      line.append(...row.map((text, i) => (i ? make('td', text) : make('th', text, { scope: 'row' }))));
      body.append(line);
    }
    return made;
  }
  const scores = data.scores.filter((name) => data.maps.some((map) => map.scores.has(name)));
  at('scores').append(scores.length
    ? table(['map', ...scores], data.maps.map((map) => [map.title, ...scores.map((name) => map.scores.get(name) ?? '')]), 'Scores of the maps')
    : make('p', 'The maps hold no scores.'));
  at('settings').append(table(['of', 'setting', 'value'], data.settings, 'Settings'));
  if (data.failed.length || data.left_out.length) {
    at('failures-title').textContent = `What failed or is not shown (${data.n_failed.toLocaleString('en')} failed)`;
    at('failed').append(...data.left_out.map((text) => make('p', text)));
    if (data.failed.length) at('failed').append(table(['id', 'why'], data.failed, 'What failed'));
  } else {
    at('failures-title').textContent = 'Nothing failed';
  }

  // ------------------------------------------------------------------ begin

  listMaps();
  start();
  go(state.map, 0);
  fit();
  const wantsDark = matchMedia('(prefers-color-scheme: dark)').matches;
  listColors();
  noteMap();
  select([]);
  dark(wantsDark);
  window.report = { data, state, plot, choose, select, screen, csv, written: () => written };
})();
