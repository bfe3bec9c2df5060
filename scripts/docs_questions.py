"""Ask the site's own search what users ask: python scripts/docs_questions.py out/site

The search runs in the browser, so that a page loads the site's worker and its index, and asks.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: Questions, and the pages of which the first hit has to be one.
QUESTIONS = {
    "exclude a layer": ("faq.html", "howto/accuracy.html"),
    "what data do I need": ("faq.html", "howto/data.html"),
    "why slower": ("faq.html", "howto/speed.html"),
    "opset": ("faq.html", "formats.html"),
    "GPU": ("faq.html", "howto/gpu.html"),
    "accuracy layer by layer": ("faq.html", "accuracy.html"),
    "only weights to 4 bits": ("faq.html", "formats.html"),
    "what is XINT8": ("faq.html", "formats.html"),
    "per channel": ("faq.html", "formats.html"),
    "first layer float": ("faq.html", "onnx.html"),
    "Whisper encoder and decoder": ("faq.html", "howto/encoder_decoder.html"),
    "compare two models": ("faq.html", "accuracy.html"),
    "TensorRT": ("faq.html", "howto/use_result.html"),
    "javascript": ("faq.html", "howto/use_result.html"),
    "detector finds nothing": ("faq.html", "troubleshooting.html"),
}
BROWSERS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
)
#: The worker takes {type: 0} with the index, answers {type: 2} queries, and posts its answers to
#: what started it: here the page itself.
_PAGE = """<!DOCTYPE html><meta charset="utf-8"><body>
<script>
const answers = [];
self.postMessage = message => answers.push(message);
const send = data => self.dispatchEvent(new MessageEvent("message", {data}));
</script>
<script src="@worker"></script>
<script>
const answered = async count => {
  while (answers.length < count) await new Promise(wake => setTimeout(wake, 5));
};
(async () => {
  send({type: 0, data: {...@index, options: {suggest: false}}});
  await answered(1);
  const hits = [];
  for (const question of @questions) {
    const count = answers.length;
    send({type: 2, data: question});
    await answered(count + 1);
    hits.push(answers.at(-1).data.items.map(sections => sections[0].location));
  }
  const out = document.createElement("pre");
  out.id = "hits"; out.textContent = JSON.stringify(hits); document.body.append(out);
})();
</script>
"""


def hits(site: Path, questions: list[str], browser: str) -> list[list[str]]:
    """Return the addresses that the site's search finds, best first, for each question."""
    workers = (site / "assets" / "javascripts" / "workers").glob("search*.js")
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    values = {
        "@worker": next(workers).resolve().as_uri(),
        "@index": index.replace("</", "<\\/"),
        "@questions": json.dumps(questions),
    }
    text = re.sub("|".join(values), lambda found: values[found[0]], _PAGE)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "ask.html"
        page.write_text(text, encoding="utf-8")
        options = ["--no-sandbox", "--virtual-time-budget=60000", "--dump-dom"]
        shown = subprocess.run(
            [browser, *options, page.as_uri()],
            check=True,
            capture_output=True,
            encoding="utf-8",
        )
    answer = re.search(r'<pre id="hits">(.*?)</pre>', shown.stdout, re.DOTALL)
    assert answer is not None, "the search of the site gave no answer"
    found: list[list[str]] = json.loads(html.unescape(answer[1]))
    return found


def main(site: Path) -> int:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("no browser is installed: the search of the site was not asked")
        return 0
    questions = list(QUESTIONS)
    wrong = []
    for question, found in zip(questions, hits(site, questions, browser), strict=True):
        pages, best = QUESTIONS[question], found[0] if found else "nothing"
        if best.partition("#")[0] not in pages:
            wrong.append(f"{question!r} leads to {best}, not to {' or '.join(pages)}")
    print("\n".join(wrong), file=sys.stderr)
    print(
        f"search of the site: {len(questions) - len(wrong)} of {len(questions)} questions"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
