#!/usr/bin/env python3
"""Looks at a page of ./train_nsa in a headless Chromium, and compares what it shows with the JSON behind it:

    ./train_nsa inspect --from RUN --text FILE --html page.html --json page.json
    dev/browser_check.py page.html page.json [--chromium PROGRAM]
        picks layers, groups and positions with the mouse and the keyboard
    ./train_nsa report --from RUN... --html page.html
    dev/browser_check.py page.html [--chromium PROGRAM]
        in a wide, a middling and a narrow window: every curve has its points, the values beside the mouse are right, no
        two texts of a chart overlap, none is cut off, and no window has to be scrolled sideways

Needs Chromium (apt-get install chromium) and nothing of Python but its own library. A page must ask for nothing from
elsewhere and report no error. Ends with "N checks, all good", or with what is wrong and status 1."""
import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile


def stop(text):
    sys.exit(f"browser_check.py: {text}")


class Browser:
    """The DevTools protocol over a pair of pipes: messages are JSON, each ended by a NUL."""

    def __init__(self, program, profile):
        to_browser, self.write_end = os.pipe()
        self.read_end, from_browser = os.pipe()

        def give_pipes():
            os.dup2(to_browser, 103), os.dup2(from_browser, 104)
            os.dup2(103, 3), os.dup2(104, 4)

        self.process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-background-networking", "--window-size=1300,900", "--user-data-dir=" + profile,
             "--remote-debugging-pipe", "about:blank"],
            preexec_fn=give_pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser), os.close(from_browser)
        self.rest, self.count, self.events, self.session = b"", 0, [], None

    def message(self):
        while b"\0" not in self.rest:
            piece = os.read(self.read_end, 1 << 20)
            if not piece:
                stop("the browser has ended")
            self.rest += piece
        line, self.rest = self.rest.split(b"\0", 1)
        return json.loads(line)

    def call(self, method, **params):
        self.count += 1
        request = {"id": self.count, "method": method, "params": params}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.write_end, json.dumps(request).encode() + b"\0")
        while True:
            answer = self.message()
            if answer.get("id") == self.count:
                if "error" in answer:
                    stop(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            stop(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def open(self, path):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(domain + ".enable")
        self.call("Page.navigate", url="file://" + os.path.abspath(path))
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self.message())

    def click(self, selector):
        """The middle of what the selector finds first, by the mouse."""
        x, y = self.evaluate(
            f"(()=>{{const e=document.querySelector({json.dumps(selector)});e.scrollIntoView({{block:'center'}});"
            "const r=e.getClientRects()[0];return[r.x+r.width/2,r.y+r.height/2]})()")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, name):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def choose(self, select, value):
        self.evaluate(f"(()=>{{const e=document.getElementById('{select}');e.value='{value}';"
                      "e.dispatchEvent(new Event('change'))})()")


checks = 0


def check(what, found, expected, limit=0):
    """Equal, or with a limit lists of numbers that are as close as that."""
    global checks
    checks += 1
    close = limit and len(found) == len(expected) and all(abs(a - b) <= limit for a, b in zip(found, expected))
    if not close and found != expected:
        stop(f"{what}: the page shows {found}, expected {expected}")


# ----------------------------------------------------------------------------------------------------------------------
# Inspect.

SHOWN = """(()=>{const all=(s,f)=>[...document.querySelectorAll(s)].map(f);return{
  layer:+document.getElementById("layer").value,group:+document.getElementById("group").value,
  current:all("#text .current",e=>+e.dataset.t),chosen:all("#text .block.chosen",e=>+e.dataset.block),
  forced:all("#text .block.forced",e=>+e.dataset.block),future:all("#text .block.future",e=>+e.dataset.block),
  window:all("#text .window",e=>+e.dataset.t),listed:all("#blocks tr",e=>+e.dataset.block),
  share:all("#blocks .bar i",e=>parseFloat(e.style.width)),gates:all("#gates .bar i",e=>parseFloat(e.style.width)),
  hash:location.hash}})()"""
TEXT = """[...document.querySelectorAll('#text [data-t]')].map(e=>
  [...e.childNodes].filter(n=>n.nodeType==3).map(n=>n.data).join('')).join('')"""


def check_place(browser, data, layer, group, t):
    shown, at, s = browser.evaluate(SHOWN), f"layer {layer}, group {group}, position {t}", data["shape"]
    own = data["layers"][layer]["groups"][group]
    last, count, chosen = t // s["slc_block"], -(-len(data["tokens"]) // s["slc_block"]), own["blocks"][t]
    check(at + ", picked", [shown["layer"], shown["group"], shown["current"]], [layer, group, [t]])
    check(at + ", address", shown["hash"], f"#layer={layer}&group={group}&position={t}")
    check(at + ", chosen blocks", shown["chosen"], chosen)
    choice = last + 1 > s["slc_count"]
    check(at + ", forced blocks", shown["forced"], sorted({0, last - 1, last}) if choice else [])
    check(at + ", blocks to come", shown["future"], list(range(last + 1, count)))
    check(at + ", window", shown["window"], list(range(max(0, t - s["window"] + 1), t)))
    check(at + ", list of blocks", sorted(shown["listed"]), chosen)
    all_of = own["all_importance"][t]
    share = {b: 100 * x / all_of if all_of > 0 else 0 for b, x in zip(chosen, own["importances"][t])}
    check(at + ", shares", shown["share"], [share[b] for b in shown["listed"]], limit=0.06)  # one decimal
    check(at + ", gates", shown["gates"], [100 * x for head in own["gates"][t] for x in head], limit=0.06)


def check_inspect(browser, data):
    tokens, shape, rng = len(data["tokens"]), data["shape"], random.Random(1)
    check("the text", browser.evaluate(TEXT), "".join(data["tokens"]))
    check_place(browser, data, 0, 0, tokens - 1)
    places = [(layer, group) for layer in range(shape["layers"]) for group in range(shape["kv_groups"])]
    # a token that shows nothing, the rest of a character, has no place to click at
    clickable = [t for t, text in enumerate(data["tokens"]) if text.strip()]
    for layer, group in places[:8]:
        browser.choose("layer", layer), browser.choose("group", group)
        for t in sorted(rng.sample(clickable, min(4, len(clickable)))):
            browser.click(f"#text [data-t='{t}']")
            check_place(browser, data, layer, group, t)
            browser.evaluate("document.activeElement.blur()")
            browser.key("ArrowLeft")
            check_place(browser, data, layer, group, max(0, t - 1))
    browser.evaluate("location.hash='layer=0&group=0&position=0'")
    check_place(browser, data, 0, 0, 0)


# ----------------------------------------------------------------------------------------------------------------------
# Report.

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
# The first chart: its curves by name, each with the number of its points; and its right edge.
DRAWN = """[...document.querySelector("svg.chart").querySelectorAll("path")].map(path=>
  [path.dataset.name,(path.getAttribute("d").match(/[ML]/g)||[]).length])"""
EDGE = """(()=>{const r=document.querySelector('svg.chart').getBoundingClientRect();
  return[r.right-2,r.top+r.height/2]})()"""


def check_report(browser, runs):
    # Of one run both losses are drawn, of several the one that decides.
    curves = {}
    for run in runs:
        losses = {"validation": run["numbers"].get("val_loss", []), "training": run["numbers"].get("loss", [])}
        losses = {name: [p[3] for p in points if p[3] is not None] for name, points in losses.items() if points}
        curves.update(losses if len(runs) == 1 else {run["folder"]: next(iter(losses.values()))})
    for width in (1300, 800, 420):
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        browser.evaluate("redraw()")
        check(f"crowded at {width} pixels", browser.evaluate(CROWDED), [])
        check(f"points at {width} pixels", dict(browser.evaluate(DRAWN)),
              {name: len(values) for name, values in curves.items()})
    x, y = browser.evaluate(EDGE)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    last = [values[-1] for values in curves.values()][:24]
    check("beside the mouse, at the end", browser.evaluate(
        "[...document.querySelectorAll('#tip td:last-child')].map(e=>+e.textContent)"), last, limit=1e-4 * min(last))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page"), parser.add_argument("json", nargs="?", help="of inspect; without it, a page of report")
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    options = parser.parse_args()
    if not options.chromium:
        stop("no chromium: apt-get install chromium, or --chromium PROGRAM")
    with open(options.json or options.page, encoding="utf-8") as file:
        text = file.read()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(options.chromium, profile)
        try:
            browser.open(options.page)
            if options.json:
                check_inspect(browser, json.loads(text))
            else:
                data = json.loads(text.split('id="data">')[1].split("</script>")[0])
                check_report(browser, data["runs"])
            for event in browser.events:
                method, params = event.get("method"), event.get("params", {})
                if method in ("Runtime.exceptionThrown", "Log.entryAdded"):
                    stop(f"the page reports {json.dumps(params)[:500]}")
                if method == "Network.requestWillBeSent":
                    check("requests", params["request"]["url"].split("#")[0],
                          "file://" + os.path.abspath(options.page))
        finally:
            browser.process.kill()
            browser.process.wait()
    print(f"{checks} checks, all good")


if __name__ == "__main__":
    main()
