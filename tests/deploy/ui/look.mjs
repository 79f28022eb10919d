// Look at the page with a real browser: a line of JSON in, on standard input, a line of JSON out for each fact.
// Jobs: {url, browser, shots: directory or "", width, height, dark, still, mobile, forced, blocked: nothing is kept, acts: [[name, argument...], ...]}.
import { createInterface } from "node:readline";
import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`);
const { chromium } = require("playwright-core");

const PIXELS = () => [...document.querySelectorAll("canvas.map")].map((canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let sum = 0;
  for (let at = 0; at < data.length; at += 4) sum = (sum * 31 + data[at] * 65536 + data[at + 1] * 256 + data[at + 2]) % 4294967291;
  return sum;
});
const REFUSES = () => {
  for (const name of ["localStorage", "sessionStorage"]) {
    Object.defineProperty(window, name, { get() { throw new DOMException("Access is denied.", "SecurityError"); } });
  }
};
const ACTS = {
  fill: async (page, selector, words) => { await page.locator(selector).first().fill(words); return true; },
  text: (page, selector) => page.locator(selector).first().innerText(),
  count: (page, selector) => page.locator(selector).count(),
  attribute: (page, selector, name) => page.locator(selector).first().getAttribute(name),
  wait: async (page, selector) => { await page.locator(selector).first().waitFor({ timeout: 30000 }); return true; },
  hover: async (page, selector, x, y) => { await page.locator(selector).first().hover({ position: { x, y } }); return true; },
  tap: async (page, selector, x, y) => { await page.locator(selector).first().tap({ position: { x, y } }); return true; },
  click: async (page, selector) => { await page.locator(selector).first().click(); return true; },
  check: async (page, selector) => { await page.locator(selector).first().check({ force: true }); return true; },
  select: async (page, selector, value) => { await page.locator(selector).selectOption(value); return true; },
  focus: async (page, selector) => { await page.locator(selector).first().focus(); return true; },
  press: async (page, key) => { await page.keyboard.press(key); return true; },
  focused: (page) => page.evaluate(() => { const one = document.activeElement; return `${one.tagName.toLowerCase()}${one.id ? `#${one.id}` : ""}.${one.className}`; }),
  pixels: (page) => page.evaluate(PIXELS),
  overflow: (page) => page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth),
  evaluate: (page, words) => page.evaluate(words),
  pause: async (page, ms) => { await page.waitForTimeout(ms); return true; },
  shot: async (page, name, isFull) => { await page.screenshot({ path: name, fullPage: Boolean(isFull) }); return true; },
  show: async (page, html) => { await page.goto("about:blank"); await page.setContent(html); return true; },
  goto: async (page, url) => (await page.goto(url)).status(),
};

let browser;
for await (const line of createInterface({ input: process.stdin })) {
  const job = JSON.parse(line);
  browser ??= await chromium.launch({ executablePath: job.browser, args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] });
  const context = await browser.newContext({
    viewport: { width: job.width ?? 1360, height: job.height ?? 900 }, deviceScaleFactor: job.scale ?? 1,
    colorScheme: job.dark ? "dark" : "light", reducedMotion: job.still ? "reduce" : "no-preference",
    isMobile: Boolean(job.mobile), hasTouch: Boolean(job.mobile), forcedColors: job.forced ? "active" : "none",
  });
  if (job.blocked) await context.addInitScript(REFUSES);
  const page = await context.newPage();
  const found = { errors: [], requests: [], facts: [] };
  page.on("pageerror", (error) => found.errors.push(String(error)));
  page.on("console", (message) => { if (message.type() === "error") found.errors.push(message.text()); });
  page.on("request", (request) => found.requests.push(request.url()));
  try {
    await page.goto(job.url);
    for (const [name, ...rest] of job.acts) found.facts.push(await ACTS[name](page, ...rest));
  } catch (error) {
    found.failure = String(error);
  }
  await context.close();
  process.stdout.write(`${JSON.stringify(found)}\n`);
}
await browser?.close();
