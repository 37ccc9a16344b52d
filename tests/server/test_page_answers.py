"""Answers on the page: Markdown, formulas, colours, tables, and what an untrusted answer cannot do."""

from __future__ import annotations

import pytest

from tests.server.running import RunningServer
from tests.whole import takes_long

pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install 'weft[test]')")

from tests.server.browser import Browser, needs_chromium


def show(server: RunningServer, browser: Browser, answer: str, **fields: str) -> None:
    """Open the page on a kept conversation with this answer."""
    browser.open(server.url)
    browser.keep([{"role": "user", "content": "q"}, {"role": "assistant", "content": answer, **fields}])
    browser.open(server.url)


def loaded(browser: Browser) -> list[str]:
    """Names of the files in ``vendor/`` that the page has loaded."""
    names = "performance.getEntriesByType('resource').map((e) => e.name).filter((n) => n.includes('/vendor/'))"
    return sorted({name.partition("/vendor/")[2] for name in browser.script(f"return {names}")})  # type: ignore[attr-defined]


MARKDOWN = """# Head

1. *one*
2. `two`

| a | b |
|---|---|
| <script>alert(1)</script> | 2 |

![picture](https://example.org/x.png) [bad](javascript:alert(1)) [good](https://example.org/)
<iframe src="https://example.org"></iframe>

```python
print("<b>hi</b>")
```
"""


@needs_chromium
def test_markdown_is_drawn_and_sanitised(server: RunningServer, browser: Browser) -> None:
    show(server, browser, MARKDOWN)
    for selector, text in {
        "h1": "Head",
        "ol em": "one",
        "li code": "two",
        "table td": "<script>alert(1)</script>",
    }.items():
        assert browser.text(f".markdown {selector}") == text
    assert browser.text(".code pre") == 'print("<b>hi</b>")\n' and browser.text(".code-bar span") == "python"
    links = {a.text: (a.get_attribute("href"), a.get_attribute("rel")) for a in browser.all(".markdown a")}
    assert links["picture"][0] == "https://example.org/x.png" and links["good"][1] == "noopener noreferrer nofollow"
    assert links.get("bad", (None,))[0] is None
    assert not browser.all(".markdown img, .markdown script, .markdown iframe, .markdown b")
    browser.script("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    browser.one(".code-bar button").click()
    browser.until(lambda: browser.text(".code-bar button") == "Copied")
    assert browser.script("return window.copied") == 'print("<b>hi</b>")\n'
    assert not browser.complaints()


def grows_to_the_whole(browser: Browser, text: str) -> object:
    """Whether a text that comes in pieces is drawn like one that comes at once."""
    return browser.driver.execute_async_script(
        """
        const [text, done] = arguments;
        import("/markdown.js").then(({ Markdown }) => {
          const whole = document.createElement("div"), grown = document.createElement("div");
          new Markdown(whole).set(text);
          const view = new Markdown(grown);
          for (let end = 0; end <= text.length; end += 7) view.set(text.slice(0, end));
          view.set(text);
          done(grown.isEqualNode(whole));
        });
        """,
        text,
    )


@takes_long
@needs_chromium
def test_markdown_that_grows_is_that_of_the_whole(server: RunningServer, browser: Browser) -> None:
    browser.open(server.url)
    assert grows_to_the_whole(browser, MARKDOWN * 2) is True


# -- formulas and colours ----------------------------------------------------------------------------------------------

FORMULAS = r"""The roots of $ax^2 + bx + c$ are

$$
x
= \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}
$$

and \(\vec{v}\) and
\[ \int_0^1 x\,dx \]
It costs $5 and not $10, or $5 million in US$, and `$x$` is code.
"""

CODE = """```python
def f(x):  # a comment
    return "<b>" + x
```

```no-such-language
def f
```
"""


@takes_long
@needs_chromium
def test_formulas_and_colours_are_loaded_when_an_answer_has_some(server: RunningServer, browser: Browser) -> None:
    browser.open(server.url)
    size = "performance.getEntriesByType('resource').reduce((sum, e) => sum + e.decodedBodySize, 0)"
    assert int(str(browser.script(f"return {size}"))) < 210_000, "the first load has grown"
    show(server, browser, "It costs $5.\n\n```\ncode without a language\n```")
    assert loaded(browser) == ["marked.js", "purify.js"]

    show(server, browser, FORMULAS + CODE)
    browser.until(lambda: len(browser.all(".katex")) == 4 and browser.all(".hljs-keyword"))
    assert {"katex.css", "katex.js", "highlight.js"} < set(loaded(browser))
    assert len(browser.all(".formula.display .mfrac")) == 1 and len(browser.all(".formula.display")) == 2
    assert "costs $5 and not $10, or $5 million in US$, and $x$ is code" in browser.text(".markdown > p:last-of-type")
    assert browser.one(".katex svg[data-style]").rect["width"] > 3, "the arrow of a vector"
    fonts = "return [...document.fonts].filter((f) => f.status === 'loaded' && f.family.startsWith('KaTeX')).length"
    browser.until(lambda: browser.script(fonts))
    assert browser.text(".hljs-comment") == "# a comment"
    texts = [str(e.get_property("textContent")) for e in browser.all(".code pre")]
    assert texts == ['def f(x):  # a comment\n    return "<b>" + x\n', "def f\n"]
    assert not browser.all(".code b") and not browser.complaints()


@takes_long
@needs_chromium
def test_a_growing_answer_with_formulas_is_that_of_the_whole(server: RunningServer, browser: Browser) -> None:
    show(server, browser, FORMULAS + CODE)
    browser.until(lambda: browser.all(".katex") and browser.all(".hljs-keyword"))
    assert grows_to_the_whole(browser, FORMULAS + CODE) is True


# -- untrusted answers -------------------------------------------------------------------------------------------------

HOSTILE_FORMULAS = [
    r"\href{javascript:alert(1)}{x}",
    r"\href{https://evil.example/}{x}",
    r"\url{https://evil.example/}",
    r"\includegraphics[width=9em]{https://evil.example/x.png}",
    r"\htmlClass{listing}{x}",
    r"\htmlId{send}{x}",
    r"\htmlStyle{position:fixed;inset:0}{x}",
    r"\htmlData{style=position:fixed}{x}",
    r'\text{<img src=x onerror="document.title=1"><script>document.title=2</script>}',
    r"\color{red;position:fixed}x",
    r"\def\a{\a\a}\a",
    r"\rule{9999em}{9999em}",
    r"\unknown{x}",
    r"\frac{",
]
WIDE = r"$\rule{20em}{20em}\rule{20em}{20em}\rule{20em}{20em}$"
STRANGE = ".markdown :is(a, img, script, iframe, form, [onerror], [id], [class*=listing])"


@needs_chromium
def test_a_formula_cannot_leave_its_answer(server: RunningServer, browser: Browser) -> None:
    show(server, browser, "\n\n".join(f"F ${formula}$" for formula in HOSTILE_FORMULAS))
    browser.until(lambda: browser.all(".katex"))
    assert not browser.all(STRANGE) and browser.driver.title == "Weft"
    fixed = "[...document.querySelectorAll('.markdown *')].filter((e) => getComputedStyle(e).position === 'fixed')"
    assert browser.script(f"return {fixed}.length") == 0
    assert int(str(browser.script("return document.querySelector('.markdown').scrollHeight"))) < 3000
    assert r"\unknown{x}" in browser.text(".markdown") and browser.all("code.maths"), "what is not TeX stays as it was"
    assert not [name for name in browser.complaints() if "evil" in name or "Content Security" in name]

    show(server, browser, WIDE)
    browser.until(lambda: browser.all(".katex"))
    beside = """
        const r = document.querySelector('.markdown').getBoundingClientRect();
        return document.elementFromPoint(r.right + 20, r.y + 50).closest('.formula') !== null;
    """
    assert not browser.script(beside), "it is painted beside its answer"


HOSTILE_CODE = """```html
<img src=x onerror="document.title=1"><script>document.title=2</script></span></code></pre><b>out</b>
```

```js"><img src=x onerror=alert(1)>
let a = 1;
```

```python class=listing
x = "</span><a href='javascript:alert(1)'>y</a>"
```
"""


@takes_long
@needs_chromium
def test_code_stays_text(server: RunningServer, browser: Browser) -> None:
    show(server, browser, HOSTILE_CODE)
    browser.until(lambda: browser.all(".hljs-tag") and browser.all(".hljs-string"))
    elements = "return [...new Set([...document.querySelectorAll('.markdown code *')].map((e) => e.localName))]"
    assert browser.script(elements) == ["span"]
    texts = "\n".join(str(e.get_property("textContent")) for e in browser.all(".code pre"))
    assert "</span></code></pre><b>out</b>" in texts and "</span><a href='javascript:alert(1)'>y</a>" in texts
    assert not browser.all(STRANGE) and browser.driver.title == "Weft"
    assert not browser.complaints()


@needs_chromium
def test_links_lead_to_addresses_alone(server: RunningServer, browser: Browser) -> None:
    targets = ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,x", "vbscript:x", "file:///x", "//x.y/"]
    links = [f"[l]({target}) ![i]({target}) <{target}>" for target in targets]
    links += ["[r][1] [$x$](javascript:alert(1)) [good](https://x.y/)", "[1]: javascript:x"]
    show(server, browser, "\n\n".join(links))
    hrefs = "[...document.querySelectorAll('.markdown [href], .markdown [src]')].map((e) => e.href)"
    assert browser.script(f"return {hrefs}") == ["https://x.y/"]


# -- tables and figures ------------------------------------------------------------------------------------------------

TABLE = """| name | left | middle | right |
|---|:---|:---:|---:|
| Internationalisation | a | b | 1,024 |

3. third
"""


@takes_long
@needs_chromium
def test_tables(server: RunningServer, browser: Browser) -> None:
    """Columns are aligned as written; on a phone no word is broken, and the table scrolls alone."""
    with browser.phone():
        show(server, browser, TABLE.replace("left |", "left left left left left left left |"))
        aligned = "return [...document.querySelectorAll('.markdown td')].map((e) => getComputedStyle(e).textAlign)"
        found = [str(way).removeprefix("-webkit-") for way in browser.script(aligned)]  # type: ignore[attr-defined]
        assert found == ["left", "left", "center", "right"]
        assert browser.script("return document.querySelector('.markdown ol').start") == 3
        lines = "const r = document.createRange(); r.selectNodeContents(document.querySelector('.markdown td'));"
        assert browser.script(lines + "return r.getClientRects().length") == 1, "a word is broken"
        assert browser.width("chat") == 390


@takes_long
@needs_chromium
def test_what_the_cache_did_is_folded(server: RunningServer, browser: Browser) -> None:
    show(server, browser, "An answer.", cache="KV matched 9 of 10 tokens", figures="10 prompt tokens, 9 of them reused")
    answer = browser.one(".assistant")
    assert answer.text.split("\n") == ["An answer.", "Copy", "Regenerate"]
    mark = browser.one(".assistant .mark")
    assert mark.accessible_name == "About this answer" and mark.get_attribute("aria-expanded") == "false"
    mark.click()
    assert "KV matched 9 of 10 tokens" in answer.text and "10 prompt tokens" in answer.text
    mark.click()
    assert "KV matched" not in answer.text
