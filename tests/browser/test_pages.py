"""The pages in a real browser: they load nothing, say nothing on the console, and can be read and used by anyone."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from command import Command

pytestmark = pytest.mark.browser
KINDS = (
    "everything",
    "profile",
    "training",
    "check",
    "verdict",
    "isolation",
    "leak",
    "raised",
    "verdicts",
    "run",
    "two",
)


@contextmanager
def opened(chromium: Any, page_file: Path, **context: Any) -> Iterator[Any]:
    """The page in a tab of its own; whatever it says on the console or asks of the network fails the test."""
    said: list[str] = []
    with_defaults = {"viewport": {"width": 1200, "height": 800}, **context}
    tabs = chromium.new_context(**with_defaults)
    page = tabs.new_page()
    page.on("console", lambda message: said.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("request", lambda request: said.append(f"request: {request.url}") if asked(request.url) else None)
    page.goto(page_file.as_uri())
    yield page
    tabs.close()
    assert said == []


def asked(url: str) -> bool:
    return not url.startswith(("file:", "data:"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_meets_the_accessibility_rules(chromium: Any, pages: dict[str, Path], kind: str, scheme: str) -> None:
    """axe-core's rules: names, contrast, headings, landmarks, tables; everything unfolded."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    with opened(chromium, pages[kind], color_scheme=scheme) as page:
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        found = axe.Axe().run(page)
        bad = [
            f"{rule['id']}: {rule['help']} {[n['html'][:160] for n in rule['nodes'][:3]]}"
            for rule in found.response["violations"]
        ]
    assert bad == []


def test_the_accessibility_rules_do_find_something(chromium: Any, tmp_path: Path) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    file = tmp_path / "bad.html"
    file.write_text("<html><body><button></button><img src='data:,'></body></html>")
    with opened(chromium, file) as page:
        assert {"button-name", "image-alt", "html-has-lang"} <= {
            rule["id"] for rule in axe.Axe().run(page).response["violations"]
        }


@pytest.mark.parametrize("kind", KINDS)
def test_a_narrow_screen_shows_all_of_it(chromium: Any, pages: dict[str, Path], kind: str) -> None:
    """The page itself never scrolls sideways; wide tables and drawings do so inside."""
    with opened(chromium, pages[kind], viewport={"width": 360, "height": 740}) as page:
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("kind", ["everything", "profile", "training", "check"])
def test_nothing_of_a_fix_is_cut_off(chromium: Any, pages: dict[str, Path], kind: str) -> None:
    """A command that goes on behind a button is copied without having been read."""
    with opened(chromium, pages[kind], viewport={"width": 390, "height": 844}) as page:
        fixes = page.locator(".code code")
        assert fixes.count() > 0
        assert fixes.evaluate_all("all => all.filter(one => one.scrollWidth > one.clientWidth)") == []


def test_the_verdict_is_the_first_thing_that_is_seen(chromium: Any, pages: dict[str, Path]) -> None:
    with opened(chromium, pages["profile"], viewport={"width": 1200, "height": 600}) as page:
        assert page.inner_text("h1").startswith("92% utilization and yet bound by host launch")
        for element in (page.locator("h1"), page.locator(".paradox")):
            box = element.bounding_box()
            assert box["y"] + box["height"] < 600
        texts = page.locator(".paradox .value").all_inner_texts()
        assert texts == ["92%", "36%", "67%"]


def test_all_of_it_has_its_place(chromium: Any, pages: dict[str, Path]) -> None:
    """Slow path, waits, compiling, tokens, ranks and steps are on the page when they are in the traces."""
    with opened(chromium, pages["everything"]) as page:
        titles = page.locator("h2").all_inner_texts()
        wanted = {"Where the CPU waits for the GPU", "Compiling inside steps", "Tokens", "Ranks", "Steps"}
        assert wanted <= set(titles)
        assert "aten::linalg_solve_triangular (3x)" in page.inner_text("main")
        assert "The others wait for rank 0" in page.inner_text("main")


def test_dark_is_dark_and_light_is_light(chromium: Any, pages: dict[str, Path]) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        with opened(chromium, pages["check"], color_scheme=scheme) as page:
            colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
            colours[scheme] = sum(int(n) for n in colour[4:-1].split(","))
    assert colours["dark"] < 90
    assert colours["light"] > 720


def test_details_fold_with_the_mouse_and_the_keyboard(chromium: Any, pages: dict[str, Path]) -> None:
    with opened(chromium, pages["verdict"]) as page:
        part = page.locator("#run0-probes > details").nth(1)
        assert part.get_attribute("open") is None
        part.locator("> summary").click()
        assert part.get_attribute("open") is not None
        part.locator("> summary").focus()
        page.keyboard.press("Enter")
        assert part.get_attribute("open") is None
        page.get_by_role("button", name="Unfold all").first.click()
        assert page.locator("#run0-probes details:not([open])").count() == 0
        page.get_by_role("button", name="Fold all", exact=True).first.click()
        assert page.locator("#run0-probes details[open]").count() == 0


def test_a_fix_is_copied_whole(chromium: Any, pages: dict[str, Path]) -> None:
    permissions = ["clipboard-read", "clipboard-write"]
    with opened(chromium, pages["check"], permissions=permissions) as page:
        button = page.get_by_role("button", name="Copy: chunk_gated_delta_rule").first
        button.click()
        page.wait_for_function("document.querySelector('#say').textContent === 'Copied to the clipboard'")
        assert page.evaluate("navigator.clipboard.readText()") == "pip install 'torch>=2.12.1' 'triton>=3.7.1'"
        assert button.inner_text() == "Copied"


def test_copying_works_where_the_clipboard_is_not_allowed(chromium: Any, pages: dict[str, Path]) -> None:
    """A page that was opened from a plain http server has no clipboard of its own; the old way still copies."""
    permissions = ["clipboard-read", "clipboard-write"]
    with opened(chromium, pages["check"], permissions=permissions) as page:
        page.evaluate("navigator.clipboard.writeText('something else')")
        page.evaluate("Object.defineProperty(window, 'isSecureContext', {value: false})")
        page.get_by_role("button", name="Copy: causal_conv1d_fn").first.click()
        page.wait_for_function("document.querySelector('#say').textContent === 'Copied to the clipboard'")
        assert page.evaluate("navigator.clipboard.readText()") == "pip install --no-build-isolation causal-conv1d"


def test_the_keyboard_alone_is_enough(chromium: Any, pages: dict[str, Path]) -> None:
    with opened(chromium, pages["profile"]) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        page.locator("figure[data-slices] svg").focus()
        page.keyboard.press("ArrowRight")
        first = page.inner_text(".reading")
        page.keyboard.press("End")
        last = page.inner_text(".reading")
        assert first.startswith("at 0.2 ms: CPU ")
        assert last.startswith("at 47.6 ms: CPU ")


def test_the_drawing_is_read_with_the_mouse(chromium: Any, pages: dict[str, Path]) -> None:
    """Half-way through the recording the drawing says what the numbers behind it say."""
    with opened(chromium, pages["profile"]) as page:
        svg = page.locator("figure[data-slices] svg")
        svg.scroll_into_view_if_needed()
        box = svg.bounding_box()
        page.mouse.move(box["x"] + box["width"] * (92 + 1030) / 2 / 1040, box["y"] + 30)
        data = json.loads(page.locator("figure[data-slices]").get_attribute("data-slices"))
        said = ", ".join(f"{name} {values[120]}%" for name, values in data["lanes"])
        assert page.inner_text(".reading").endswith(f"ms: {said}")


def test_paper_shows_what_is_folded(chromium: Any, pages: dict[str, Path]) -> None:
    pypdf = pytest.importorskip("pypdf")
    with opened(chromium, pages["verdict"]) as page:
        folded = page.locator("details:not([open])").count()
        assert folded > 5
        printed = page.pdf(format="A4")
        assert page.locator("details:not([open])").count() == folded
    text = "\n".join(sheet.extract_text() for sheet in pypdf.PdfReader(io.BytesIO(printed)).pages)
    # Numbers of a table that is folded on the screen, and no button.
    assert "liger_rms_norm" in text
    assert "plain torch" in text
    assert "Unfold all" not in text


def test_names_in_a_trace_cannot_become_code(chromium: Any, tmp_path: Path) -> None:
    trace, html = tmp_path / "evil.json.gz", tmp_path / "evil.html"
    evil = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>"
    events = [
        {"ph": "X", "cat": "cpu_op", "name": evil, "pid": 1, "tid": 1, "ts": 0, "dur": 90, "args": {"External id": 1}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 1, "dur": 3,
         "args": {"correlation": 7, "External id": 1}},
        {"ph": "X", "cat": "kernel", "name": evil, "pid": 0, "tid": 7, "ts": 20, "dur": 50,
         "args": {"correlation": 7, "External id": 1}},
    ]  # fmt: skip
    document = {"deviceProperties": [{"name": evil}], "traceEvents": events}
    trace.write_bytes(gzip.compress(json.dumps(document).encode()))
    Command("profile", trace, "-o", html)
    with opened(chromium, html) as page:
        assert page.evaluate("window.pwned") is None
        assert page.locator("img").count() == 0
        assert evil in page.content() or page.get_by_text("window.pwned").count() > 0
