// What the tests of the report's page in a browser ask of the shown page.

// Find layout faults of the shown page, in words. All visible content is text, in HTML or inside a picture.
function faults() {
  // A phone zooms out until all of a wide page is in its window: innerWidth would grow with the page.
  const faults = [], root = document.documentElement, width = root.clientWidth;
  if (root.scrollWidth > width) faults.push(`the page is ${root.scrollWidth} wide, the window ${width}`);
  const luminance = words => {
    const [r, g, b] = words.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = e => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (colour !== 'rgba(0, 0, 0, 0)') return luminance(colour);
    }
    return 1;
  };
  const say = (e, what) => faults.push(`${what}: <${e.tagName}> ${e.textContent.trim().slice(0, 60)}`);
  const scrolls = style => ['auto', 'scroll'].includes(style.overflowX);
  for (const text of document.querySelectorAll('svg text')) {
    const box = text.getBoundingClientRect(), frame = text.ownerSVGElement.getBoundingClientRect();
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
        || box.bottom > frame.bottom + 1) say(text, 'cut off by its picture');
  }
  for (const e of document.querySelectorAll('body *')) {
    const style = getComputedStyle(e);
    const within = e.closest('svg') !== null && e.tagName !== 'svg';
    if (!within && style.overflowX === 'hidden' && e.scrollWidth > e.clientWidth) say(e, 'cut off');
    if (!within && style.overflowY === 'hidden' && e.scrollHeight > e.clientHeight) say(e, 'cut off below');
    const texts = [...e.childNodes].filter(n => n.nodeType === Node.TEXT_NODE && n.data.trim());
    if (!texts.length || e.tagName === 'STYLE') continue;
    const front = luminance(within ? style.fill : style.color), back = ground(e);
    const contrast = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    if (contrast < 4.5) say(e, `contrast ${contrast.toFixed(2)}`);
    let outer = e;
    while (outer && !scrolls(getComputedStyle(outer))) outer = outer.parentElement;
    const range = document.createRange();
    for (const text of texts) {
      range.selectNodeContents(text);
      const box = range.getBoundingClientRect();
      if (!box.width || !box.height) say(e, 'not shown');
      else if (!outer && (box.left < -1 || box.right > width + 1)) say(e, 'beyond the window');
    }
    const size = parseFloat(style.fontSize) * (within ? e.getScreenCTM().a : 1);
    if (size < 8.5) say(e, `${size.toFixed(1)} pixels small`);
  }
  for (const box of document.querySelectorAll('.scroll')) {
    const { left, right } = box.getBoundingClientRect();
    if (left < -1 || right > width + 1) say(box, 'beyond the window');
  }
  return faults;
}

// Measure each picture: its size on the screen, and the number of its coloured shapes.
function pictures() {
  return [...document.querySelectorAll('figure > svg, img')].map(e => {
    const { width, height } = e.getBoundingClientRect();
    const drawn = [...e.querySelectorAll('path, line, rect')].filter(p => {
      const { fill, stroke } = getComputedStyle(p);
      return fill.startsWith('rgb') || stroke.startsWith('rgb');
    });
    return { name: e.getAttribute('aria-label'), width, height, drawn: drawn.length,
      shown: e.checkVisibility({ opacityProperty: true, visibilityProperty: true }),
      complete: e.tagName === 'svg' || (e.complete && e.naturalWidth > 0) };
  });
}

// List the numbers next to the bars that a dotted line crosses.
function struck() {
  return [...document.querySelectorAll('.row > svg')].flatMap(cell => {
    const lines = [...cell.querySelectorAll('line[stroke-dasharray]')].map(e => e.getBoundingClientRect().left);
    return [...cell.querySelectorAll('text')].filter(text => {
      const { left, right } = text.getBoundingClientRect();
      return lines.some(at => left - 1 < at && at < right + 1);
    }).map(e => e.textContent);
  });
}
