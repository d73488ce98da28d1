#!/usr/bin/env python3
"""Looks at a page of `./train_nsa report` in a headless Chromium, in a wide, a middling and a narrow window:

    ./train_nsa report --from RUN... --html page.html
    dev/report_browser.py page.html [--chromium PROGRAM] [--screenshots PREFIX]

Every curve must have the points that the page's JSON has, the values beside the mouse must be that JSON's, no two
texts of a chart may overlap, none may be cut off, and no window may have to be scrolled sideways; the page must report
no error. Needs Chromium, as dev/inspect_browser.py does. Ends with "N checks, all good", or with what is wrong and
status 1."""
import argparse
import json
import shutil
import sys
import tempfile

from inspect_browser import Browser

WINDOWS = 1300, 800, 420
CROWDED = """(()=>{const wrong=[];for(const svg of document.querySelectorAll("svg.chart")){
  const box=svg.getBoundingClientRect(),name=svg.getAttribute("aria-label");
  const texts=[...svg.querySelectorAll("text")].map(e=>({text:e.textContent,r:e.getBoundingClientRect()}));
  texts.forEach(({text,r},i)=>{
    if(r.left<box.left-1||r.right>box.right+1||r.top<box.top-1||r.bottom>box.bottom+1)wrong.push(`${name}: "${text}"`);
    for(const b of texts.slice(i+1))
      if(r.left<b.r.right&&b.r.left<r.right&&r.top+2<b.r.bottom&&b.r.top+2<r.bottom)
        wrong.push(`${name}: "${text}" and "${b.text}"`)})}
  if(document.documentElement.scrollWidth>innerWidth)wrong.push("the page is wider than its window");
  return wrong})()"""
# The first chart: its curves by name, each with the number of its points.
DRAWN = """[...document.querySelector("svg.chart").querySelectorAll("path")].map(path=>
  [path.dataset.name,(path.getAttribute("d").match(/[ML]/g)||[]).length])"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page")
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    parser.add_argument("--screenshots", help="beginning of the names of the pictures, light and dark")
    options = parser.parse_args()
    if not options.chromium:
        sys.exit("report_browser.py: no chromium: apt-get install chromium, or --chromium PROGRAM")
    with open(options.page, encoding="utf-8") as file:
        runs = json.loads(file.read().split('id="data">')[1].split("</script>")[0])["runs"]
    # Of one run both losses are drawn, of several the one that decides.
    curves = {}
    for run in runs:
        losses = {"validation": run["numbers"].get("val_loss", []), "training": run["numbers"].get("loss", [])}
        losses = {name: [p[3] for p in points if p[3] is not None] for name, points in losses.items() if points}
        curves.update(losses if len(runs) == 1 else {run["folder"]: next(iter(losses.values()))})
    checks = 0

    def check(good, text):
        nonlocal checks
        checks += 1
        if not good:
            sys.exit(f"report_browser.py: {text}")

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(options.chromium, profile)
        try:
            browser.open(options.page)
            for width in WINDOWS:
                browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
                             mobile=False)
                browser.evaluate("redraw()")
                crowded = browser.evaluate(CROWDED)
                check(not crowded, f"at {width} pixels: {'; '.join(crowded)}")
                drawn = dict(browser.evaluate(DRAWN))
                check(drawn == {name: len(values) for name, values in curves.items()},
                      f"at {width} pixels {drawn} are drawn, the JSON has {list(map(len, curves.values()))}")
                for scheme in ("light", "dark") if options.screenshots else ():
                    browser.call("Emulation.setEmulatedMedia",
                                 features=[{"name": "prefers-color-scheme", "value": scheme}])
                    browser.screenshot(f"{options.screenshots}_{width}_{scheme}.png")
            x, y = browser.evaluate("(()=>{const r=document.querySelector('svg.chart').getBoundingClientRect();"
                                    "return[r.right-2,r.top+r.height/2]})()")
            browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
            read = browser.evaluate("[...document.querySelectorAll('#tip td:last-child')].map(e=>+e.textContent)")
            last = [values[-1] for values in curves.values()][:24]
            check(len(read) == len(last) and all(abs(a - b) <= 1e-4 * abs(b) for a, b in zip(read, last)),
                  f"at the end the mouse reads {read}, the JSON says {last}")
            for event in browser.events:
                if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                    sys.exit(f"report_browser.py: the page reports {json.dumps(event['params'])[:500]}")
        finally:
            browser.process.kill()
            browser.process.wait()
    print(f"{checks} checks, all good")


if __name__ == "__main__":
    main()
