// Points on a canvas by WebGL 2: one vertex a point, moved, turned and zoomed by uniforms alone.
'use strict';
class Plot {
  static VERTEX = `#version 300 es
    in vec3 before; in vec3 after; in vec4 shade;
    uniform float moved; uniform mat3 turn; uniform vec2 middle; uniform vec2 scale; uniform float size;
    out vec4 color;
    void main() {
      vec3 at = turn * mix(before, after, moved);
      gl_Position = shade.a > 0.0 ? vec4((at.xy - middle) * scale, -at.z / 400.0, 1.0) : vec4(2.0, 2.0, 2.0, 1.0);
      gl_PointSize = size;
      color = shade;
    }`;

  static FRAGMENT = `#version 300 es
    precision highp float;
    in vec4 color; uniform float size;
    out vec4 pixel;
    void main() {
      float inside = (1.0 - length(gl_PointCoord * 2.0 - 1.0)) * size * 0.5;
      if (inside <= 0.0) discard;
      float alpha = color.a * min(inside, 1.0);
      pixel = vec4(color.rgb * alpha, alpha);
    }`;

  // n points in `stage`; `told` has over(i, x, y), clicked(i), drawn(context) and viewed().
  constructor(stage, n, told) {
    Object.assign(this, { stage, n, told, dims: 2, moved: 1, asked: false, yaw: 0.5, pitch: 0.35 });
    this.view = { x: 0, y: 0, zoom: 0 }; // the middle, and log2 of px a unit
    this.before = new Float32Array(n * 3);
    this.after = new Float32Array(n * 3);
    this.shades = new Uint8Array(n * 4);
    this.radius = () => 3;
    this.canvas = document.createElement('canvas');
    this.over = document.createElement('canvas');
    stage.append(this.canvas, this.over);
    this.begin();
    this.canvas.addEventListener('webglcontextlost', (event) => event.preventDefault());
    this.canvas.addEventListener('webglcontextrestored', () => { this.begin(); this.draw(); });
    this.listen();
  }

  begin() {
    const gl = this.canvas.getContext('webgl2', { antialias: false, alpha: true });
    if (!gl) throw new Error('this browser has no WebGL 2');
    this.gl = gl;
    const program = gl.createProgram();
    for (const [kind, source] of [[gl.VERTEX_SHADER, Plot.VERTEX], [gl.FRAGMENT_SHADER, Plot.FRAGMENT]]) {
      const shader = gl.createShader(kind);
      gl.shaderSource(shader, source);
      gl.compileShader(shader);
      gl.attachShader(program, shader);
    }
    gl.linkProgram(program);
    if (!gl.getProgramParameter(program, gl.LINK_STATUS) && !gl.isContextLost()) {
      throw new Error(gl.getProgramInfoLog(program));
    }
    gl.useProgram(program);
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
    gl.depthFunc(gl.LEQUAL);
    const uniforms = ['moved', 'turn', 'middle', 'scale', 'size'];
    this.uniform = Object.fromEntries(uniforms.map((name) => [name, gl.getUniformLocation(program, name)]));
    this.buffers = {};
    for (const [name, length, type] of [['before', 3, gl.FLOAT], ['after', 3, gl.FLOAT], ['shade', 4, gl.UNSIGNED_BYTE]]) {
      this.buffers[name] = gl.createBuffer();
      gl.bindBuffer(gl.ARRAY_BUFFER, this.buffers[name]);
      const location = gl.getAttribLocation(program, name);
      gl.enableVertexAttribArray(location);
      gl.vertexAttribPointer(location, length, type, type === gl.UNSIGNED_BYTE, 0, 0);
    }
    // In a shuffled order, the same each time: else the last class would cover the others.
    const order = Uint32Array.from({ length: this.n }, (_, i) => i);
    let random = 1;
    for (let i = this.n - 1; i > 0; i -= 1) {
      random = (Math.imul(random, 1664525) + 1013904223) >>> 0;
      const j = random % (i + 1);
      [order[i], order[j]] = [order[j], order[i]];
    }
    gl.bindBuffer(gl.ELEMENT_ARRAY_BUFFER, gl.createBuffer());
    gl.bufferData(gl.ELEMENT_ARRAY_BUFFER, order, gl.STATIC_DRAW);
    this.upload('before', this.before);
    this.upload('after', this.after);
    this.upload('shade', this.shades);
  }

  upload(name, values) {
    const { gl } = this;
    gl.bindBuffer(gl.ARRAY_BUFFER, this.buffers[name]);
    gl.bufferData(gl.ARRAY_BUFFER, values, gl.DYNAMIC_DRAW);
  }

  // Colours and opacities (n, 4); a point of opacity 0 is not there.
  paint(shades) {
    this.shades = shades;
    this.upload('shade', shades);
    this.draw();
  }

  // Places (n, 3), gone to from where the points are in so many milliseconds.
  move(places, dims, milliseconds) {
    this.before = this.now();
    this.after = places;
    this.dims = dims;
    this.moved = milliseconds ? 0 : 1;
    this.upload('before', this.before);
    this.upload('after', this.after);
    const start = performance.now();
    const step = (time) => {
      if (this.after !== places) return;
      const share = Math.min(1, Math.max(0, (time - start) / milliseconds));
      this.moved = share * share * (3 - 2 * share);
      this.render();
      if (share < 1) requestAnimationFrame(step);
    };
    if (milliseconds) requestAnimationFrame(step);
    else this.draw();
  }

  now() {
    if (this.moved >= 1) return this.after;
    return this.after.map((value, i) => this.before[i] + (value - this.before[i]) * this.moved);
  }

  turn() {
    if (this.dims < 3) return [1, 0, 0, 0, 1, 0, 0, 0, 1];
    const [c, s, d, r] = [Math.cos(this.yaw), Math.sin(this.yaw), Math.cos(this.pitch), Math.sin(this.pitch)];
    return [c, s * r, -s * d, 0, d, r, s, -c * r, c * d]; // column by column
  }

  get size() {
    return [this.stage.clientWidth || 300, this.stage.clientHeight || 300];
  }

  // Where point i is, in px from the left and from the top.
  place(i) {
    return this.placer()(i);
  }

  placer() {
    const turn = this.turn();
    const [width, height] = this.size;
    const scale = 2 ** this.view.zoom;
    const { after, before, moved } = this;
    const at = (k) => (moved >= 1 ? after[k] : before[k] + (after[k] - before[k]) * moved);
    return (i) => {
      const [x, y, z] = [at(3 * i), at(3 * i + 1), at(3 * i + 2)];
      return [
        width / 2 + (turn[0] * x + turn[3] * y + turn[6] * z - this.view.x) * scale,
        height / 2 - (turn[1] * x + turn[4] * y + turn[7] * z - this.view.y) * scale,
      ];
    };
  }

  // The point nearest to a place on the screen, -1 where none is near.
  at(x, y, reach = 6) {
    const place = this.placer();
    let best = -1;
    let least = (this.radius() + reach) ** 2;
    for (let i = 0; i < this.n; i += 1) {
      if (!this.shades[4 * i + 3]) continue;
      const [px, py] = place(i);
      const far = (px - x) ** 2 + (py - y) ** 2;
      if (far < least) [best, least] = [i, far];
    }
    return best;
  }

  look(next) {
    Object.assign(this.view, next);
    this.view.zoom = Math.min(16, Math.max(-6, this.view.zoom));
    this.draw();
  }

  // Zoom so that what is under (x, y) stays there.
  zoom(by, x, y) {
    const [width, height] = this.size;
    const [px, py] = [(x ?? width / 2) - width / 2, height / 2 - (y ?? height / 2)];
    const before = 2 ** this.view.zoom;
    const after = 2 ** Math.min(16, Math.max(-6, this.view.zoom + by));
    this.look({
      zoom: Math.log2(after),
      x: this.view.x + px / before - px / after,
      y: this.view.y + py / before - py / after,
    });
    this.told.viewed();
  }

  pan(dx, dy) {
    if (this.dims === 3) {
      this.yaw += dx / 150;
      this.pitch = Math.min(1.57, Math.max(-1.57, this.pitch + dy / 150));
      this.draw();
    } else {
      const scale = 2 ** this.view.zoom;
      this.look({ x: this.view.x - dx / scale, y: this.view.y + dy / scale });
    }
    this.told.viewed();
  }

  draw() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => this.render());
  }

  render() {
    this.asked = false;
    const { gl } = this;
    const [width, height] = this.size;
    const ratio = window.devicePixelRatio || 1;
    for (const canvas of [this.canvas, this.over]) {
      const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
      if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
    }
    const scale = 2 ** this.view.zoom;
    gl.viewport(0, 0, this.canvas.width, this.canvas.height);
    gl.clearColor(0, 0, 0, 0);
    gl.clear(gl.COLOR_BUFFER_BIT | gl.DEPTH_BUFFER_BIT);
    if (this.dims === 3) gl.enable(gl.DEPTH_TEST);
    else gl.disable(gl.DEPTH_TEST);
    gl.uniform1f(this.uniform.moved, this.moved);
    gl.uniformMatrix3fv(this.uniform.turn, false, this.turn());
    gl.uniform2f(this.uniform.middle, this.view.x, this.view.y);
    gl.uniform2f(this.uniform.scale, (2 * scale) / width, (2 * scale) / height);
    gl.uniform1f(this.uniform.size, 2 * this.radius() * ratio);
    gl.drawElements(gl.POINTS, this.n, gl.UNSIGNED_INT, 0);
    const context = this.over.getContext('2d');
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    this.told.drawn(context);
  }

  listen() {
    const held = new Map();
    const { stage } = this;
    const spot = (event) => {
      const box = stage.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    let far = 0;
    let waiting = false;
    stage.addEventListener('pointerdown', (event) => {
      if (event.button > 0) return;
      stage.setPointerCapture(event.pointerId);
      held.set(event.pointerId, spot(event));
      if (held.size === 1) far = 0;
    });
    stage.addEventListener('pointermove', (event) => {
      const [x, y] = spot(event);
      const was = held.get(event.pointerId);
      if (!was) {
        if (waiting || event.pointerType === 'touch') return;
        waiting = true;
        requestAnimationFrame(() => { waiting = false; this.told.over(this.at(x, y), x, y); });
        return;
      }
      held.set(event.pointerId, [x, y]);
      far += Math.abs(x - was[0]) + Math.abs(y - was[1]);
      if (held.size === 1) {
        if (far > 4) this.pan(x - was[0], y - was[1]);
        return;
      }
      const [ox, oy] = [...held].find(([id]) => id !== event.pointerId)[1];
      const [before, after] = [Math.hypot(was[0] - ox, was[1] - oy), Math.hypot(x - ox, y - oy)];
      if (before > 0 && after > 0) this.zoom(Math.log2(after / before), (x + ox) / 2, (y + oy) / 2);
    });
    const release = (event) => {
      if (!held.delete(event.pointerId) || event.type !== 'pointerup' || held.size) return;
      if (far <= 4) this.told.clicked(this.at(...spot(event)));
    };
    stage.addEventListener('pointerup', release);
    stage.addEventListener('pointercancel', release);
    stage.addEventListener('pointerleave', () => this.told.over(-1, 0, 0));
    stage.addEventListener('wheel', (event) => {
      event.preventDefault();
      const lines = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
      this.zoom(Math.max(-1, Math.min(1, (-event.deltaY * lines) / 250)), ...spot(event));
    }, { passive: false });
    stage.addEventListener('dblclick', (event) => this.zoom(1, ...spot(event)));
  }
}
