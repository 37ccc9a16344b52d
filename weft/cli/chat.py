"""``weft chat``: talk to the model in the terminal.

Job: read lines, stream answers, keep the conversation. Owns: the conversation and its commands. Does not know: how
tokens are generated. The engine runs step by step, so that Ctrl-C can end one answer between two steps.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from weft.cli.flags import add_engine_flags, add_sampling_flags, engine_settings, sampling_params, sampling_settings
from weft.cli.meter import Meter
from weft.cli.parser import add_verb
from weft.errors import ConfigError, RequestError
from weft.sampling_params import SamplingParams

if TYPE_CHECKING:
    from weft.engine.llm import LLM

HELP = """\
/reset  forget the conversation
/help   this list
/exit   leave (so does Ctrl-D)
Ctrl-C  end the answer that is being written"""

_ENDINGS: dict[str | None, str] = {
    "abort": "stopped; ",
    "length": "cut off by the token limit; ",
    "error": "the model computed NaN; ",
}


def add_parser(verbs: Any, help: str) -> None:
    parser = add_verb(verbs, "chat", run, help)
    parser.add_argument("--system", metavar="TEXT", help="system message of every conversation")
    add_sampling_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    params = sampling_params(sampling_settings(args))
    if params.n != 1:
        raise ConfigError(f"n={params.n}: a chat has one answer; leave it out, or use weft generate")
    from weft import LLM

    with LLM(**engine_settings(args)) as llm:
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):  # line editing and history, if the platform has them
                import readline  # noqa: F401
            print(f"{llm.config.served_model_name}. /help lists the commands.")
        Conversation(llm, params, args.system).run()
    return 0


class Conversation:
    """A conversation of one user with one model: a list of messages."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._reset()

    def _reset(self) -> None:
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def run(self) -> None:
        """Read lines from stdin until ``/exit`` or the end of the file."""
        for line in _lines():
            text = line.strip()
            if text == "/exit":
                return
            if text == "/help":
                print(HELP)
            elif text == "/reset":
                self._reset()
                print("The conversation is forgotten.")
            elif text.startswith("/"):
                print(f"There is no command {text.split()[0]}. /help lists the commands.")
            elif text:
                self._answer(text)

    def _answer(self, text: str) -> None:
        """Ask a question. The answer is added to the conversation unless the request was refused."""
        self._messages.append({"role": "user", "content": text})
        try:
            answer = self._stream()
        except RequestError as error:
            self._messages.pop()
            print(f"error: {error}")
            return
        self._messages.append({"role": "assistant", "content": answer})

    def _stream(self) -> str:
        """Print the answer while it is generated, then its figures. Returns the answer."""
        meter = Meter()
        request_id = self._llm.add_request(self._llm.render_chat(self._messages), self._params)
        text, reason, why = "", None, None
        with _interrupts() as interrupted:
            while not self._llm.is_finished():
                if interrupted:
                    self._llm.abort(request_id)
                    reason = "abort"
                    break
                outputs = self._llm.step()
                meter.take(outputs)
                for output in outputs:
                    completion = output.outputs[0]
                    print(completion.text[len(text) :], end="", flush=True)
                    text, reason, why = completion.text, completion.finish_reason, completion.stop_reason
        ending = f"{why}; " if reason == "error" and why is not None else _ENDINGS.get(reason, "")
        print("\n" + _dim(f"({ending}{meter.summary()})"))
        return text


def _lines() -> Iterator[str]:
    """Yield lines from stdin, with a prompt on a terminal. Ctrl-C clears the line, Ctrl-D ends."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            return
        except KeyboardInterrupt:
            if not prompt:
                raise
            print()


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C in a list during the body. A second one is a real interrupt."""
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, previous)


def _dim(text: str) -> str:
    return f"\033[2m{text}\033[0m" if sys.stdout.isatty() else text
