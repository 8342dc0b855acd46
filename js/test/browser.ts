import { existsSync } from "node:fs";
import { delimiter, join } from "node:path";
import { type Browser, chromium, type Page } from "playwright-core";
import { serve } from "#serve";

const NAMES = ["chromium", "chromium-browser", "google-chrome"];
const FLAGS = [
  "--no-sandbox",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];

/** The browser that tests use: that of CHROME_PATH, or one on the PATH. */
export function findBrowser(): string | undefined {
  if (process.env.CHROME_PATH) return process.env.CHROME_PATH;
  const folders = (process.env.PATH ?? "").split(delimiter);
  const places = NAMES.flatMap((name) => folders.map((folder) => join(folder, name)));
  return places.find((place) => existsSync(place));
}

/** Why tests that need a browser skip; false where they run. */
export function skipReason(): string | false {
  if (findBrowser()) return false;
  const reason = `NO BROWSER: none of ${NAMES.join(", ")} is on the PATH, and CHROME_PATH is not set`;
  if (process.env.REQUIRE_BROWSER === "1") throw new Error(reason);
  console.warn(`\n*** ${reason}: the browser's tests are skipped ***\n`);
  return reason;
}

/** A browser and a server of the package's folder. */
export class Served {
  /** What the pages wrote to the console or threw, and what they failed to load. */
  readonly faults: string[] = [];

  private constructor(
    readonly url: string,
    readonly browser: Browser,
    readonly closeServer: () => void,
  ) {}

  static async start(flags: string[]): Promise<Served> {
    const executablePath = findBrowser() as string;
    const browser = await chromium.launch({ executablePath, args: [...FLAGS, ...flags] });
    const { url, close } = await serve();
    return new Served(url, browser, close);
  }

  /** Opens a page of the package's folder. */
  async open(path: string): Promise<Page> {
    const page = await this.browser.newPage();
    page.on("pageerror", (error) => this.faults.push(String(error)));
    page.on("console", (message) => {
      if (message.type() === "error") this.faults.push(message.text());
    });
    page.on("request", (request) => {
      if (!request.url().startsWith(this.url) && !/^(blob|data):/.test(request.url())) {
        this.faults.push(`asks ${request.url()}`);
      }
    });
    await page.goto(`${this.url}${path}`);
    return page;
  }

  async stop(): Promise<void> {
    await this.browser.close();
    this.closeServer();
  }
}
