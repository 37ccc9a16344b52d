"""Images over HTTP: in the forms of the three protocols, with their clients, to a real engine; and hostile ones."""

from __future__ import annotations

import base64
import concurrent.futures
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from tests.media import INKLING, INKLING2, VL, overrides
from tests.multimodal.test_media import HOSTILE
from tests.patience import GUARD_S, stretched
from tests.pictures import (
    INKLING_TOP,
    TOP,
    data_uri,
    encoded,
    image_part,
    picture,
    save_inkling2_processor,
    save_inkling_processor,
    save_processor,
)
from tests.server.browser import Browser, needs_chromium
from tests.server.running import RunningServer
from tests.tiny import make_checkpoint
from tests.tiny_tokenizer import VOCAB_SIZE
from tests.whole import takes_long
from weft import LLM, SamplingParams
from weft.config import resolve
from weft.engine.chat_messages import template_messages
from weft.engine.input_processor import InputProcessor
from weft.errors import ConfigError
from weft.multimodal.processor import load_processor
from weft.text.tokenizer import Tokenizer

GREEDY = {"temperature": 0.0, "max_tokens": 6}
IMAGE = picture(48, 40)
FILES = {
    "png": encoded(IMAGE),
    "jpeg": encoded(IMAGE, "JPEG", quality=90),
    "webp": encoded(IMAGE, "WEBP", lossless=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(
        VL, tmp_path_factory.mktemp("vision"), **(overrides(VL) | {"top": TOP, "vocab_size": VOCAB_SIZE})
    )
    save_processor(folder)
    return folder


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Iterator[RunningServer]:
    """A server whose model reads images, with nothing allowed that has to be allowed."""
    flags = ["--cpu-cache-gib", "0.1", "--max-model-len", "500", "--limit-mm-per-prompt", '{"image": 3}']
    running = RunningServer("--model", str(folder), "--served-model-name", "eyes", *flags, module="weft")
    try:
        yield running.wait_ready()
    finally:
        running.close()


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), cpu_cache_gib=0.1, max_model_len=500) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(seeing: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0)


def question(*parts: Any) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("kind", FILES)
def test_openai(client: openai.OpenAI, llm: LLM, kind: str) -> None:
    """Text, tokens and usage are those of the engine without a server; the image stands where it was put."""
    asked: Any = question("what ", image_part(FILES[kind], kind, detail="auto"), " is it?")
    answer = client.chat.completions.create(model="eyes", messages=asked, **GREEDY)
    params = SamplingParams(**GREEDY)
    wanted = llm.chat(question("what ", {"type": "image", "image": FILES[kind]}, " is it?"), params, use_tqdm=False)[0]
    assert answer.choices[0].message.content == wanted.outputs[0].text
    assert answer.usage is not None and answer.usage.prompt_tokens == len(wanted.prompt_token_ids)
    details = answer.usage.prompt_tokens_details
    assert details is not None and details.model_dump()["image_tokens"] == wanted.prompt_token_ids.count(5) == 30
    before, inside, after = (wanted.prompt or "").partition("<|vision_start|><|image_pad|><|vision_end|>")
    assert before.endswith("user\nwhat ") and inside and after.startswith(" is it?")


def test_streamed_and_reused(client: openai.OpenAI) -> None:
    """A second turn about the same image, encoded otherwise, finds it; another image of its size does not."""
    parts = ["look: ", image_part(FILES["png"])]
    first: Any = question(*parts)
    stream = client.chat.completions.create(
        model="eyes", messages=first, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    usage = chunks[-1].usage
    assert usage is not None
    for picture_of, least, most in (
        (FILES["webp"], usage.prompt_tokens - 8, 999),
        (encoded(picture(48, 40, 9)), 0, 20),
    ):
        again: Any = question("look: ", image_part(picture_of, "webp"))
        again += [{"role": "assistant", "content": said}, {"role": "user", "content": "and now?"}]
        answer = client.chat.completions.create(model="eyes", messages=again, **GREEDY)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert least <= (answer.usage.prompt_tokens_details.cached_tokens or 0) <= most


def test_anthropic(seeing: RunningServer, client: openai.OpenAI) -> None:
    """Blocks with base64, also in the result of a tool."""
    import anthropic  # whose types take seconds

    sdk = anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0)
    source = {"type": "base64", "media_type": "image/jpeg", "data": base64.b64encode(FILES["jpeg"]).decode()}
    block = {"type": "image", "source": source}
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "seen"}, block]}
    asked: Any = [
        {"role": "user", "content": [block, {"type": "text", "text": "what is it?"}]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    message = sdk.messages.create(model="eyes", max_tokens=6, messages=asked, extra_body={"temperature": 0.0})
    same: Any = question(image_part(FILES["jpeg"], "jpeg"), "what is it?")
    same += [
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "t", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "t", "content": [
            {"type": "text", "text": "seen"}, image_part(FILES["jpeg"], "jpeg")]},
    ]  # fmt: skip
    wanted = client.chat.completions.create(model="eyes", messages=same, **GREEDY)
    assert wanted.usage is not None and [block.text for block in message.content] == [wanted.choices[0].message.content]
    counted = sdk.messages.count_tokens(model="eyes", messages=asked)
    assert counted.input_tokens == wanted.usage.prompt_tokens
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted.input_tokens


def test_responses(client: openai.OpenAI) -> None:
    part: Any = {"type": "input_image", "image_url": data_uri(FILES["png"]), "detail": "high"}
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": "what "}, part]}]
    answer = client.responses.create(model="eyes", input=asked, temperature=0.0, max_output_tokens=6)
    same: Any = question("what ", image_part(FILES["png"]))
    wanted = client.chat.completions.create(model="eyes", messages=same, **GREEDY)
    assert answer.output_text == wanted.choices[0].message.content
    assert answer.usage is not None and wanted.usage is not None
    assert answer.usage.input_tokens == wanted.usage.prompt_tokens
    assert answer.usage.input_tokens_details.model_dump()["image_tokens"] == 30


@takes_long
def test_video_as_frames(client: openai.OpenAI, llm: LLM) -> None:
    frames = [encoded(picture(16, 16, seed), "JPEG") for seed in range(4)]
    url = "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in frames)
    asked: Any = question({"type": "video_url", "video_url": {"url": url, "fps": 4}}, "?")
    answer = client.chat.completions.create(model="eyes", messages=asked, **GREEDY)
    video = {"type": "video", "video": (frames, {"fps": 4, "do_sample_frames": False})}
    wanted = llm.chat(question(video, "?"), SamplingParams(**GREEDY), use_tqdm=False)[0]
    assert answer.choices[0].message.content == wanted.outputs[0].text
    assert answer.usage is not None and answer.usage.prompt_tokens == len(wanted.prompt_token_ids)


class Trap:
    """A listening socket of this machine that nobody may connect to."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self._listener.accept()
            except OSError:
                return
            self.num_connections += 1

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def trap() -> Iterator[Trap]:
    trap = Trap()
    yield trap
    trap.close()


def refused(server: RunningServer, path: str, body: dict[str, Any]) -> str:
    response = server.client.post(path, json=body)
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["message"])


def test_hostile_pictures(seeing: RunningServer) -> None:
    """Each is refused in its own words, and the next good one is answered."""
    for name, (data, _) in HOSTILE.items():
        if len(data) < 1 << 20:
            message = refused(seeing, "/v1/chat/completions", {"messages": question(image_part(data))} | GREEDY)
            assert ";" in message and "Traceback" not in message, name
    assert seeing.client.post(
        "/v1/chat/completions", json={"messages": question(image_part(FILES["png"]))} | GREEDY
    ).is_success


def test_nothing_leaves_the_machine(seeing: RunningServer, trap: Trap, tmp_path: Path) -> None:
    """Without the flags neither hosts nor files are touched, in any protocol and any spelling."""
    secret = tmp_path / "x.png"
    secret.write_bytes(FILES["png"])
    here = f"127.0.0.1:{trap.port}"
    urls = [
        f"http://{here}/x.png",
        f"HTTPS://{here}/",
        f"http://localhost:{trap.port}/",
        f"//{here}/x",
        f"ftp://{here}/",
    ]
    urls += [f"file://{secret}", f"FILE://{secret}", str(secret), f"file:{secret}", "http://169.254.169.254/", "\x00"]
    for url in urls:
        forms: list[Any] = [{"type": "image_url", "image_url": {"url": url}}, {"type": "image_url", "image_url": url}]
        forms += [{"type": "image", "image": url}, {"type": "input_image", "image_url": url}]
        forms += [{"type": "video", "video": [url, url]}, {"type": "image_pil", "image_pil": url}]
        for form in forms:
            refused(seeing, "/v1/chat/completions", {"messages": question(form)} | GREEDY)
        block = {"type": "image", "source": {"type": "url", "url": url}}
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            refused(seeing, path, {"messages": [{"role": "user", "content": [block]}], "max_tokens": 3})
        item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
        refused(seeing, "/v1/responses", {"input": [item]})
    assert trap.num_connections == 0


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([{"type": "image_url"}], "without image_url"),
        ([{"type": "image_url", "image_url": {"url": 5}}], "given as int"),
        ([{"type": "image", "image": {"url": {"url": "x"}}}], "given as dict"),
        ([{"type": "image", "image": [1, 2]}], "given as list"),
        ([image_part(FILES["png"], detail="vast")], "detail='vast'; allowed are auto, low, high"),
        ([{"type": "input_image", "file_id": "f"}], "stores no files"),
        ([{"type": "input_audio", "input_audio": {}}], "part of type 'input_audio'; audio is not supported"),
        ([{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}], "videos are read as frames"),
        ([{"type": "video", "video": [data_uri(FILES["png"])]}], "1 frames; it needs at least 2"),
        ([{"type": "video", "video": 5}], "a video is given as int"),
        ([{"type": "video", "video": [5, 6]}], "an image is given as int"),
        ([{"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,,,"}}], "nothing .0 bytes."),
        ([image_part(FILES["png"])] * 4, "4 images; at most 3 are allowed here"),
        (["<|image_pad|>"], "1 image placeholders .token 5. and 0 images"),
        (["<|image_pad|>", image_part(FILES["png"])], "2 image placeholders .token 5. and 1 images"),
    ],
)
def test_refused_parts(seeing: RunningServer, parts: list[Any], error: str) -> None:
    message = refused(seeing, "/v1/chat/completions", {"messages": question(*parts)} | GREEDY)
    assert re.search(error, message), message


def test_too_long_with_images(seeing: RunningServer) -> None:
    image = image_part(encoded(picture(64, 64)))
    broken = image_part(b"is not read at all")
    for parts in ((image, "x " * 600), ("x " * 600, image), ("x " * 600, broken)):
        body = {"messages": question(*parts)} | GREEDY
        assert "maximum context length" in refused(seeing, "/v1/chat/completions", body)
    body = {"messages": question(image, "x " * 100), "truncate_prompt_tokens": 50} | GREEDY
    assert "off a prompt with images" in refused(seeing, "/v1/chat/completions", body)


def test_a_model_without_eyes(server: RunningServer) -> None:
    for path, part in (
        ("/v1/chat/completions", image_part(FILES["png"])),
        ("/v1/messages", {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}),
    ):
        message = refused(server, path, {"messages": [{"role": "user", "content": [part]}], "max_tokens": 3})
        assert "reads text only: the checkpoint has no vision tower" in message


def test_the_flags_allow(folder: Path, tmp_path: Path) -> None:
    """The settings reach the reader."""
    (tmp_path / "x.png").write_bytes(FILES["png"])
    host = "pictures.example:8443"
    settings: dict[str, Any] = {"allowed_local_media_path": tmp_path, "allowed_media_domains": [host]}
    config = resolve(model=str(folder), mm_processor_cache_gb=0.0, **settings)
    processor = load_processor(config)
    assert processor is not None and processor.limits.domains == (host,)
    inputs = InputProcessor(config, Tokenizer.load(folder), 500, media=processor)
    assert inputs.text_only is None
    _, media = template_messages(question({"type": "image_url", "image_url": f"file://{tmp_path}/x.png"}), None)
    assert processor.process(media, 500, "messages")[0].grid == (1, 10, 12)


def test_a_media_folder_that_does_not_exist_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", folder / "config.json"):
        with pytest.raises(ConfigError, match=r"allowed_local_media_path=.* is not a folder"):
            load_processor(resolve(model=str(folder), allowed_local_media_path=path))


DROP = """
const bytes = Uint8Array.from(atob(arguments[2]), (c) => c.charCodeAt(0));
const transfer = new DataTransfer();
transfer.items.add(new File([bytes], arguments[3], { type: arguments[4] }));
const options = { bubbles: true, cancelable: true, dataTransfer: transfer, clipboardData: transfer };
const event = arguments[1] === "paste" ? new ClipboardEvent("paste", options) : new DragEvent(arguments[1], options);
document.querySelector(arguments[0]).dispatchEvent(event);
"""


@takes_long
@needs_chromium
def test_the_page(seeing: RunningServer, browser: Browser) -> None:
    """An image dropped and one pasted are shown, sent and answered, and stand in the tree of Inspect."""

    def give(how: str, data: bytes, name: str, kind: str) -> None:
        target = "#message" if how == "paste" else "#chat"
        browser.script(DROP, target, how, base64.b64encode(data).decode(), name, kind)

    browser.open(seeing.url)
    assert browser.text(".chips li") == "Images" and browser.one("#attach").is_displayed()
    give("drop", FILES["png"], "a.png", "image/png")
    browser.until(lambda: len(browser.all("#attached img")) == 1)
    give("paste", encoded(picture(2600, 30)), "wide.png", "image/png")
    browser.until(lambda: len(browser.all("#attached img")) == 2)
    give("drop", b"%PDF", "a.pdf", "application/pdf")
    browser.until(lambda: "a.pdf cannot be attached: it is no PNG" in browser.text("#attach-problem"))
    give("drop", b"nonsense", "b.png", "image/png")
    browser.until(lambda: "b.png cannot be attached" in browser.text("#attach-problem"))
    browser.button("✕", "#attached li:nth-child(2)").click()
    browser.until(lambda: len(browser.all("#attached img")) == 1)
    answer = browser.ask("what is it?")
    assert not browser.all("#attached img") and len(browser.all(".user .pictures img")) == 1
    assert browser.script("return document.querySelector('.user .pictures img').naturalWidth") == 48
    assert "new tokens" in browser.text(".about") and "reads text only" not in answer.text
    browser.driver.refresh()
    browser.until(lambda: len(browser.all(".user .pictures img")) == 1)
    browser.open(seeing.url, "inspect")
    browser.script("document.getElementById('tab-cache').click()")
    browser.until(lambda: "image " in str(browser.script(  # unfolded: other tests fill the tree too
        "document.getElementById('unfold').click();"
        "return [...document.querySelectorAll('[role=treeitem]')].map((e) => e.ariaLabel).join()")))  # fmt: skip
    assert browser.all("#tree rect.image") and not browser.complaints()


@takes_long
def test_a_tiny_picture_does_not_wait_for_a_huge_one(seeing: RunningServer) -> None:
    """Streams do not wait for a huge picture either: pictures are decoded outside of the event loop's process."""
    huge = base64.b64encode(encoded(Image.new("RGB", (5000, 5000), (10, 20, 30)))).decode()
    tiny = {"messages": question(image_part(encoded(picture(52, 44)), "png"))}
    body = {"messages": question(image_part(base64.b64decode(huge), "png")), "max_tokens": 1}
    ended: dict[str, float] = {}

    def send(name: str, content: Any, limit: int) -> int:
        with httpx.Client(base_url=seeing.url, timeout=GUARD_S) as caller:
            status = caller.post("/v1/chat/completions", json=content | {"max_tokens": limit}).status_code
        ended[name] = time.monotonic()
        return status

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        large = [threads.submit(send, f"huge {number}", body, 1) for number in range(3)]
        time.sleep(0.3)
        late = 0.0
        small = threads.submit(send, "tiny", tiny, 1)
        while not all(each.done() for each in large):
            began = time.monotonic()
            assert seeing.client.get("/health").status_code == 200
            late = max(late, time.monotonic() - began)
            time.sleep(0.005)
        assert [each.result() for each in (small, *large)] == [200] * 4
    assert ended["tiny"] < min(ended[f"huge {number}"] for number in range(3))
    assert late < stretched(0.25), late


@takes_long
@pytest.mark.parametrize(("arch", "save"), [(INKLING2, save_inkling2_processor), (INKLING, save_inkling_processor)])
def test_inkling(arch: str, save: Callable[[Path], None], tmp_path: Path) -> None:
    """Images through the workers are those of the engine alone; videos, audio and damaged pictures are refused."""
    top = overrides(arch)["top"] | INKLING_TOP
    keys = overrides(arch) | {"top": top, "vocab_size": VOCAB_SIZE, "unpadded_vocab_size": VOCAB_SIZE}
    folder = make_checkpoint(arch, tmp_path, **keys)
    save(folder)
    with LLM(str(folder), cpu_cache_gib=0.1, max_model_len=500) as llm:
        shown = question("what ", {"type": "image", "image": FILES["png"]}, " is it?")
        wanted = llm.chat(shown, SamplingParams(**GREEDY), use_tqdm=False)[0]
    flags = ["--cpu-cache-gib", "0.1", "--max-model-len", "500"]
    server = RunningServer("--model", str(folder), "--served-model-name", "eyes", *flags, module="weft")
    try:
        client = openai.OpenAI(base_url=f"{server.wait_ready().url}/v1", api_key="none", max_retries=0)
        asked: Any = question("what ", image_part(FILES["png"]), " is it?")
        answer = client.chat.completions.create(model="eyes", messages=asked, **GREEDY)
        assert answer.choices[0].message.content == wanted.outputs[0].text
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        tokens = answer.usage.prompt_tokens_details.model_dump()["image_tokens"]
        assert tokens == wanted.prompt_token_ids.count(4) > 20
        frames = "data:video/jpeg;base64," + ",".join([data_uri(FILES["jpeg"], "jpeg").partition(",")[2]] * 4)
        for part, error in (
            ({"type": "video_url", "video_url": {"url": frames}}, "reads images and no videos"),
            ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}, "audio is not supported"),
            (image_part(FILES["png"][:-40]), "damaged or cut off"),
        ):
            body = {"model": "eyes", "messages": question(part)}
            assert error in refused(server, "/v1/chat/completions", body)
    finally:
        server.close()
