"""The site on a phone and on a desktop, light and dark, in Debian's chromium: nothing is too wide, or cut without a hint."""

import functools
import http.server
import importlib.util
import json
import queue
import re
import shutil
import subprocess
import tempfile
import threading
import unittest
from pathlib import Path

import pytest
from doc_pages import built_site

CHROMIUM = shutil.which("chromium")
WIDTHS, THEMES = (390, 1280), ("light", "dark")

CHECK = """<!doctype html><body style="margin: 0"><iframe style="border: 0; height: 900px"></iframe><script>
const frame = document.querySelector("iframe");
const scrolls = (element, view) => ["auto", "scroll"].includes(view.getComputedStyle(element).overflowX);
const inBox = (element, view) => {
  for (let e = element.parentElement; e && e.tagName != "BODY"; e = e.parentElement) if (scrolls(e, view)) return true;
  return false;
};
const hasHint = (element, view) => view.getComputedStyle(element).backgroundAttachment.includes("local");
const isWide = (element) => element.scrollWidth > element.clientWidth + 1;
const lines = (element) => Math.max(...element.innerText.split("\\n").map((line) => line.length));

function faults(page, theme, width) {
  const view = frame.contentWindow, page_ = view.document, found = [];
  const tell = (what, element) => found.push(`${page}, ${theme}, ${width}: ${what}: ${element.innerText.slice(0, 60)}`);
  const limit = page_.documentElement.clientWidth;
  if (page_.documentElement.scrollWidth > limit) found.push(`${page}, ${theme}, ${width}: the page scrolls sideways`);
  for (const element of page_.querySelectorAll(".bd-article *")) {
    const box = element.getBoundingClientRect(), style = view.getComputedStyle(element);
    if (box.right > limit + 1 && box.width > 1 && !inBox(element, view)) tell("wider than the page", element);
    if (element.clientWidth > 1 && isWide(element)) {
      if (style.overflowX == "hidden" || style.overflowX == "clip") tell("cut", element);
      if (scrolls(element, view)) {
        if (!hasHint(element, view)) tell("scrolls without a hint", element);
        if (element.matches("table.cards") && width < 600) tell("a card that scrolls", element);
        if (element.tagName == "PRE" && width > 1000 && lines(element) <= 88) tell("88 characters do not fit", element);
      }
    }
    if (element.tagName == "IMG" && theme == "dark") {
      const white = style.backgroundColor != "rgba(0, 0, 0, 0)" || !style.filter.includes("invert(1)");
      if (white) found.push(`${page}: white in dark mode: ${element.src}`);
    }
  }
  return found;
}

async function run() {
  const found = [], seen = {};
  for (const page of PAGES) {
    await new Promise((done) => { frame.onload = done; frame.src = page; });
    const root = frame.contentDocument.documentElement;
    for (const theme of THEMES) for (const width of WIDTHS) {
      root.dataset.theme = theme;
      frame.style.width = `${width}px`;
      found.push(...faults(page, theme, width));
    }
    for (const kind of ["table", "pre", "img"])
      seen[kind] = (seen[kind] || 0) + root.querySelectorAll(`.bd-article ${kind}`).length;
  }
  return {found, seen};
}
run().catch((error) => ({found: [String(error)], seen: {}}))
  .then((report) => fetch("/report", {method: "POST", body: JSON.stringify(report)}));
</script>"""


def checked(site, pages):
    """What the browser finds on the pages of a site: faults, and how many boxes it has seen."""
    reports = queue.Queue()
    names = {"PAGES": pages, "THEMES": THEMES, "WIDTHS": WIDTHS}
    text = re.sub(r"\b(PAGES|THEMES|WIDTHS)\b", lambda name: json.dumps(names[name[1]]), CHECK)

    class Server(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            if self.path != "/check":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self):
            reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder}"]
            address = f"http://127.0.0.1:{server.server_port}/check"
            command = [CHROMIUM, *options, "--remote-debugging-port=0", "--window-size=1400,1000", address]
            browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                return reports.get(timeout=400)
            finally:
                browser.terminate()
                browser.wait(timeout=30)
                server.shutdown()


FAULTY = """<!doctype html><html data-theme="light"><body style="margin: 0"><div class="bd-article">
<p style="width: 500px">wide</p>
<p style="width: 300px; overflow: hidden; white-space: nowrap">%s</p>
<pre style="overflow: auto">%s</pre>
<div style="width: 200px; overflow: auto; background: local"><p style="width: 300px">hinted</p></div>
<img src="x.png" style="background: white">
</div></body></html>"""


@pytest.mark.slow
@unittest.skipUnless(CHROMIUM, "needs chromium")
class WidthTest(unittest.TestCase):
    def test_the_check_finds_faults(self):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "page.html").write_text(FAULTY % ("cut " * 30, "x = 1 " * 80))
            report = checked(folder, ["page.html"])
        phone = ["the page scrolls sideways", "wider than the page: wide", "cut: cut cut", "scrolls without a hint: x = 1"]
        for theme in THEMES:
            for width, faults in ((390, phone), (1280, phone[2:])):
                found = [fault for fault in report["found"] if fault.startswith(f"page.html, {theme}, {width}: ")]
                self.assertEqual(len(found), len(faults), found)
                for fault, told in zip(faults, found):
                    self.assertIn(fault, told)
        self.assertEqual(len([fault for fault in report["found"] if "white in dark mode" in fault]), 2)

    @unittest.skipUnless(importlib.util.find_spec("sphinx"), "needs Sphinx: the extra docs")
    def test_nothing_is_wider_than_the_page_on_a_phone_and_on_a_desktop(self):
        site = built_site()
        pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
        pages = [page for page in pages if not page.startswith(("_", "genindex", "search", "py-modindex"))]
        names = [page for page in pages if page.startswith("api/names/")]
        pages = [page for page in pages if page not in names] + names[::8]  # Pages of names have one shape.
        report = checked(site, pages)
        self.assertEqual(report["found"], [])
        for kind, least in (("table", 100), ("pre", 150), ("img", 9)):
            self.assertGreater(report["seen"][kind], least, kind)
