#!/usr/bin/env python3
"""Picks layers, groups and positions on a page of `./train_nsa inspect` in a headless Chromium, with the mouse and the
keyboard, and compares what the page shows with the JSON that the same command wrote:

    ./train_nsa inspect --from RUN --text FILE --html page.html --json page.json
    dev/inspect_browser.py page.html page.json [--chromium PROGRAM] [--screenshots PREFIX]

Needs Chromium (apt-get install chromium) and nothing of Python but its own library. The page must ask for nothing from
elsewhere and report no error. Ends with "N checks, all good", or with what is wrong and status 1."""
import argparse
import base64
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile


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
                sys.exit("inspect_browser.py: the browser has ended")
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
                    sys.exit(f"inspect_browser.py: {method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            sys.exit(f"inspect_browser.py: {expression}: {result['exceptionDetails']}")
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

    def screenshot(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


SHOWN = """(()=>{const all=(s,f)=>[...document.querySelectorAll(s)].map(f);return{
  layer:+document.getElementById("layer").value,group:+document.getElementById("group").value,
  current:all("#text .current",e=>+e.dataset.t),chosen:all("#text .block.chosen",e=>+e.dataset.block),
  forced:all("#text .block.forced",e=>+e.dataset.block),future:all("#text .block.future",e=>+e.dataset.block),
  window:all("#text .window",e=>+e.dataset.t),listed:all("#blocks tr",e=>+e.dataset.block),
  share:all("#blocks .bar i",e=>parseFloat(e.style.width)),gates:all("#gates .bar i",e=>parseFloat(e.style.width)),
  hash:location.hash}})()"""


class Checker:
    def __init__(self, data):
        self.data, self.shape, self.checks = data, data["shape"], 0

    def equal(self, what, found, expected):
        self.checks += 1
        if found != expected:
            sys.exit(f"inspect_browser.py: {what}: the page shows {found}, the JSON says {expected}")

    def close(self, what, found, expected, limit):
        self.checks += 1
        if len(found) != len(expected) or not all(abs(a - b) <= limit for a, b in zip(found, expected)):
            sys.exit(f"inspect_browser.py: {what}: the page shows {found}, the JSON says {expected}")

    def page(self, shown, layer, group, t):
        at, s = f"layer {layer}, group {group}, position {t}", self.shape
        own = self.data["layers"][layer]["groups"][group]
        size, tokens = s["slc_block"], len(self.data["tokens"])
        last, count, chosen = t // size, -(-tokens // size), own["blocks"][t]
        self.equal(at + ", picked", [shown["layer"], shown["group"], shown["current"]], [layer, group, [t]])
        self.equal(at + ", address", shown["hash"], f"#layer={layer}&group={group}&position={t}")
        self.equal(at + ", chosen blocks", shown["chosen"], chosen)
        choice = last + 1 > s["slc_count"]
        self.equal(at + ", forced blocks", shown["forced"], sorted({0, last - 1, last}) if choice else [])
        self.equal(at + ", blocks to come", shown["future"], list(range(last + 1, count)))
        self.equal(at + ", window", shown["window"], list(range(max(0, t - s["window"] + 1), t)))
        self.equal(at + ", list of blocks", sorted(shown["listed"]), chosen)
        all_of = own["all_importance"][t]
        share = {b: 100 * x / all_of if all_of > 0 else 0 for b, x in zip(chosen, own["importances"][t])}
        self.close(at + ", shares", shown["share"], [share[b] for b in shown["listed"]], 0.06)  # one decimal
        self.close(at + ", gates", shown["gates"], [100 * x for head in own["gates"][t] for x in head], 0.06)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page"), parser.add_argument("json")
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    parser.add_argument("--screenshots", help="beginning of the names of two pictures, light and dark")
    options = parser.parse_args()
    if not options.chromium:
        sys.exit("inspect_browser.py: no chromium: apt-get install chromium, or --chromium PROGRAM")
    with open(options.json, encoding="utf-8") as file:
        data = json.load(file)
    tokens, shape = len(data["tokens"]), data["shape"]
    check, rng = Checker(data), random.Random(1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(options.chromium, profile)
        try:
            browser.open(options.page)
            check.equal("the text", browser.evaluate(
                "[...document.querySelectorAll('#text [data-t]')].map(e=>[...e.childNodes].filter("
                "n=>n.nodeType==3).map(n=>n.data).join('')).join('')"), "".join(data["tokens"]))
            check.page(browser.evaluate(SHOWN), 0, 0, tokens - 1)
            places = [(layer, group) for layer in range(shape["layers"]) for group in range(shape["kv_groups"])]
            # a token that shows nothing, the rest of a character, has no place to click at
            clickable = [t for t, text in enumerate(data["tokens"]) if text.strip()]
            for layer, group in places[:8]:
                browser.choose("layer", layer), browser.choose("group", group)
                for t in sorted(rng.sample(clickable, min(4, len(clickable)))):
                    browser.click(f"#text [data-t='{t}']")
                    check.page(browser.evaluate(SHOWN), layer, group, t)
                    browser.evaluate("document.activeElement.blur()")
                    browser.key("ArrowLeft")
                    t = max(0, t - 1)
                    check.page(browser.evaluate(SHOWN), layer, group, t)
            browser.evaluate("location.hash='layer=0&group=0&position=0'")
            check.page(browser.evaluate(SHOWN), 0, 0, 0)
            for scheme in ("light", "dark") if options.screenshots else ():
                browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
                browser.evaluate(f"location.hash='layer={shape['layers'] - 1}&group=0&position={tokens * 2 // 3}'")
                browser.evaluate("scrollTo(0,0)")
                browser.screenshot(f"{options.screenshots}_{scheme}.png")
            for event in browser.events:
                method, params = event.get("method"), event.get("params", {})
                if method in ("Runtime.exceptionThrown", "Log.entryAdded"):
                    sys.exit(f"inspect_browser.py: the page reports {json.dumps(params)[:500]}")
                if method == "Network.requestWillBeSent":
                    check.equal("requests", params["request"]["url"].split("#")[0],
                                "file://" + os.path.abspath(options.page))
        finally:
            browser.process.kill()
            browser.process.wait()
    print(f"{check.checks} checks, all good")


if __name__ == "__main__":
    main()
